"""Accumulators of reductions: one value per vector lane, combined at the end in a fixed order.

In: a reduction's kind and dtype. Out: lines that declare, update, flush and finish its
accumulators.

Lane arrays (``float acc[64]``) instead of OpenMP reductions: the compiler keeps them in vector
registers, several independent chains hide the latency of an add, and what is computed does not
depend on how the compiler vectorises. Sums are flushed into double accumulators every few
dozen additions per lane, so that their error stays that of the cascade summation that eager uses.
"""

from __future__ import annotations

from dataclasses import dataclass

from deuteron.codegen.cpp import scalars
from deuteron.ir.operations import FLOATS, REDUCTIONS, extreme

# Additions per lane before it goes to the double accumulator (eager's cascade adds 16 to 64).
FLUSH_ADDITIONS = 32


def combine(kind: str, dtype: str, a: str, b: str, used: set[str]) -> str:
    """Two partial results as one; `a` is the accumulator."""
    name = {
        "sum": "add",
        "prod": "mul",
        "max": "maximum",
        "min": "minimum",
        "any": "logical_or",
        "all": "logical_and",
    }[kind]
    if dtype == "bool":
        return f"({a} {'|' if name in ('logical_or', 'maximum', 'add') else '&'} {b})"
    if dtype in FLOATS and kind in ("max", "min"):
        used.add(f"d_{kind}_nan")
        return f"d_{kind}_nan({a}, {b})"
    return scalars._operation(name, [a, b], dtype, used)


@dataclass(frozen=True)
class Accumulator:
    """`name` is the stem of its C variables: ``name[l]``, ``name_i[l]`` (positions), ``name_d``
    (double sums).
    """

    name: str
    kind: str
    dtype: str  # of the body
    used: set[str]
    wide: bool = False  # whether positions need 64 bits
    narrow: bool = False  # whether all that it is made of are bytes

    @property
    def positional(self) -> bool:
        return self.kind.startswith("arg")

    @property
    def better(self) -> str:
        """How a better value compares with the best."""
        return ">" if extreme(self.kind) == "max" else "<"

    @property
    def flushed(self) -> bool:
        return self.kind == "sum" and self.dtype in FLOATS

    @property
    def type(self) -> str:
        """Type of a lane. Flags are ints, since vector masks of f32 are as wide; flags of bytes are
        bytes (any and all of columns, 1 M flags, AVX-512: 21 us; as ints 40)."""
        if self.dtype != "bool" or self.positional:
            return scalars.REGISTER_TYPES[self.dtype]
        return "unsigned char" if self.narrow else "int"

    @property
    def result_type(self) -> str:
        if self.positional:
            return "long long"
        return scalars.REGISTER_TYPES[self.dtype]

    @property
    def identity(self) -> str:
        value = REDUCTIONS[self.kind].identity(self.dtype)
        return str(int(value)) if self.dtype == "bool" else scalars.literal(value, self.dtype)

    def declare(self, lanes: str, double_lanes: str | None = None) -> list[str]:
        """Arrays of `lanes` neutral elements. `double_lanes`: one double per lane instead of one
        for all.
        """
        out = [f"alignas(64) {self.type} {self.name}[{lanes}];"]
        init = [f"{self.name}[l] = {self.identity};"]
        if self.positional:
            out.append(f"alignas(64) {self.position_type} {self.name}_i[{lanes}];")
            init.append(f"{self.name}_i[l] = 0;")
        if self.flushed:
            if double_lanes is None:
                out.append(f"double {self.name}_d = 0;")
            else:
                out.append(f"alignas(64) double {self.name}_d[{double_lanes}];")
                init.append(f"{self.name}_d[l] = 0;")
        return [*out, f"for (int l = 0; l < {lanes}; ++l) {{ {' '.join(init)} }}"]

    @property
    def position_type(self) -> str:
        return "long long" if self.wide or self.dtype in ("f64", "i64") else "int"

    def update(self, lane: str, value: str, position: str, guard: str | None = None) -> list[str]:
        """Reductions `value` (at `position` along the reduced axis) into a lane, where `guard`
        holds."""
        a = f"{self.name}[{lane}]"
        if not self.positional:
            cast = f"({self.type})" if self.dtype == "bool" else ""
            new = combine(self.kind, self.dtype, a, cast + value, self.used)
            return [f"{a} = {f'{guard} ? {new} : {a}' if guard else new};"]
        better = f"{value} {self.better} {a}"
        if self.dtype in FLOATS:
            first = "" if self.kind == "argmax_last_nan" else f" & ({a} == {a})"
            better = f"(({better}) | (({value} != {value}){first}))"
        if guard:
            better = f"{guard} & {better}"
        t, at = f"{self.name}_t", f"{self.name}_i[{lane}]"
        return [
            f"const bool {t} = {better};",
            f"{a} = {t} ? {value} : {a};",
            f"{at} = {t} ? ({self.position_type})({position}) : {at};",
        ]

    def flush(self, lanes: int) -> list[str]:
        """Adds all lanes to the one double and clears them."""
        if not self.flushed:
            return []
        n = self.name
        if lanes * 4 % 64:
            return [f"for (int l = 0; l < {lanes}; ++l) {{ {n}_d += (double){n}[l]; {n}[l] = 0; }}"]
        self.used.add("d_lanes")
        return [f"{n}_d += d_lanes_flush<{lanes}>({n});"]

    def flush_lanes(self, count: str) -> list[str]:
        """Adds every lane to its own double and clears it."""
        if not self.flushed:
            return []
        n = self.name
        return [
            '_Pragma("omp simd")',
            f"for (int l = 0; l < {count}; ++l) {{ {n}_d[l] += (double){n}[l]; {n}[l] = 0; }}",
        ]

    def settle_lanes(self, count: str) -> list[str]:
        """The double sums in the lanes."""
        if not self.flushed:
            return []
        n = self.name
        return [
            "#pragma omp simd",
            f"for (int l = 0; l < {count}; ++l) {n}[l] = ({self.type}){n}_d[l];",
        ]

    def finish(self, lanes: int) -> list[str]:
        """Combines the lanes into ``name_r``, in the order of lanes."""
        n, kind = self.name, self.result_type
        if self.flushed:
            return [*self.flush(lanes), f"const {self.type} {n}_r = ({self.type}){n}_d;"]
        if self.positional:
            return [
                f"{scalars.REGISTER_TYPES[self.dtype]} {n}_b = {n}[0]; long long {n}_r = {n}_i[0];",
                f"for (int l = 1; l < {lanes}; ++l) {{",
                *(
                    "  " + s
                    for s in self.merge_position(f"{n}_b", f"{n}_r", f"{n}[l]", f"{n}_i[l]")
                ),
                "}",
            ]
        flag = " != 0" if self.dtype == "bool" else ""
        if self.type in ("float", "double", "int", "long long") and lanes % 16 == 0:
            self.used.add("d_lanes")
            return [f"const {kind} {n}_r = d_lanes_{self.kind}<{lanes}>({n}){flag};"]
        step = combine(self.kind, self.dtype, f"{n}[0]", f"{n}[l]", self.used)
        return [
            f"for (int l = 1; l < {lanes}; ++l) {n}[0] = {step};",
            f"const {kind} {n}_r = {n}[0]{flag};",
        ]

    def merge_position(self, best: str, at: str, value: str, position: str) -> list[str]:
        """Merges (value, position) into (best, at): the better value, the first on a tie (of NaN
        the last, where the kind says so)."""
        better = f"{value} {self.better} {best}"
        tie = f"({value} == {best} && {position} < {at})"
        if self.dtype in FLOATS:
            better = f"({better}) || ({value} != {value} && {best} == {best})"
            side = ">" if self.kind == "argmax_last_nan" else "<"
            nan = f"{value} != {value} && {best} != {best}"
            tie = f"({tie} || ({nan} && {position} {side} {at}))"
        return [
            f"if ({better}) {{ {best} = {value}; {at} = {position}; }}",
            f"else if {tie} {at} = {position};",
        ]

    def gather(self, count: str) -> list[str]:
        """Combines the partial results ``name_p[count]`` of a shared row, in order, into
        ``name_r``.
        """
        n, kind = self.name, self.result_type
        if self.flushed:
            return [
                f"double {n}_d = 0;",
                f"for (long long c = 0; c < {count}; ++c) {n}_d += {n}_p[c];",
                f"const {self.type} {n}_r = ({self.type}){n}_d;",
            ]
        if self.positional:
            return [
                f"{scalars.REGISTER_TYPES[self.dtype]} {n}_b = {self.identity};",
                f"long long {n}_r = 0;",
                f"for (long long c = 0; c < {count}; ++c) {{",
                *(
                    "  " + s
                    for s in self.merge_position(f"{n}_b", f"{n}_r", f"{n}_p[c]", f"{n}_pi[c]")
                ),
                "}",
            ]
        step = combine(self.kind, self.dtype, f"{n}_r", f"{n}_p[c]", self.used)
        return [
            f"{kind} {n}_r = {self.identity};",
            f"for (long long c = 0; c < {count}; ++c) {n}_r = {step};",
        ]

    def gather_lanes(self, width: str, count: str, lanes: str) -> list[str]:
        """Combines ``name_p[count][width]`` over `count`, in order, into the lanes of a fresh
        array.
        """
        n = self.name
        at = f"{n}_p[c * {width} + l]"
        if self.flushed:
            declare = [
                f"alignas(64) double {n}_d[{width}];",
                f"for (int l = 0; l < {width}; ++l) {n}_d[l] = 0;",
            ]
            declare.append(f"alignas(64) {self.type} {n}[{width}];")
            body = [f"{n}_d[l] += {at};"]
        else:
            declare = self.declare(width)
            if self.positional:
                body = self.merge_position(f"{n}[l]", f"{n}_i[l]", at, f"{n}_pi[c * {width} + l]")
            else:
                body = [f"{n}[l] = {combine(self.kind, self.dtype, f'{n}[l]', at, self.used)};"]
        return [
            *declare,
            f"for (long long c = 0; c < {count}; ++c) {{",
            "#pragma omp simd",
            f"for (int l = 0; l < {lanes}; ++l) {{",
            *("  " + s for s in body),
            "} }",
            *self.settle_lanes(lanes),
        ]
