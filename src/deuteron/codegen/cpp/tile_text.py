"""Tile code as C++: the kernel of a nest with products.

In: what `codegen.lowering` made, the tiling, names of pointers. Out: lines of a function's body. It
chooses nothing: blocks and the order of dimensions are the tiling's.

    for each program (threads)
        loops over blocks
            for j: for i on vector lanes: neighbouring operations on tiles of the same dimensions
            d_dot: a tile of the result in registers

A tile is an array of rows, which are whole registers; what a dot reads stays in memory where it
lies there as it should. Loops end where the places do: behind them, in the last register of a row
that a dot reads, are zeros. Numbers of positions are computed where they are used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from deuteron.codegen.cpp import scalars
from deuteron.codegen.cpp.emit import size_name
from deuteron.codegen.cpp.reductions import combine
from deuteron.codegen.tile_code import Code, Let, Loop, Value, Write
from deuteron.ir.index import Axis, Div, Index, MinMax, Mod, Sym, fits_int, is_nonneg
from deuteron.ir.operations import INTS, REDUCTIONS
from deuteron.schedule.tiling import Dim, Tiling

LANES = 16  # rows of tiles are a multiple
POSITIONS = ("place", "index", "literal", "edge")
REASSOCIATED = {"sum": "+", "prod": "*"}  # what OpenMP reduces over lanes

AT_EACH = ("load", "op", "cast", "random")  # kinds of values of each place


def late(code: Sequence[Code]) -> list[Code]:
    """The same with values of each place directly before what reads them first, whose loops they
    share: before a dot they would be kept in an array (a mask, in bytes). Loads stay before what is
    stored."""
    out: list[Code] = []  # the last first
    for c in reversed(code):
        if isinstance(c, Loop):
            c = replace(c, body=late(c.body))
        at = len(out)
        if isinstance(c, Let) and c.kind in AT_EACH:
            at = max((k for k, x in enumerate(out) if c.value in read_in(x)), default=at - 1) + 1
            if c.kind == "load":
                at = max((at, *(k + 1 for k, x in enumerate(out) if stores(x))))
        out.insert(at, c)
    return out[::-1]


def read_in(c: Code) -> set[Value]:
    if isinstance(c, Let):
        return set(c.args)
    if isinstance(c, Write):
        return {v for v in (c.address, c.value, c.mask) if v is not None}
    limits = {v for v in (c.start, c.stop, *(n for _, n in c.carried)) if v is not None}
    return limits.union(*map(read_in, c.body))


def stores(c: Code) -> bool:
    return isinstance(c, Write) or isinstance(c, Loop) and any(map(stores, c.body))


class Printer:
    """`direct`: whether dots may read from memory what nobody checks."""

    def __init__(
        self, tiling: Tiling, pointers: Mapping[str, str], used: set[str], direct: bool
    ) -> None:
        self.tiling, self.pointers, self.used, self.direct = tiling, pointers, used, direct
        self.dims = {d.name: d for d in tiling.dims}
        self.lines: list[str] = []
        self.indent = "  "
        self.arrays: list[str] = []  # declarations
        self.statements: list[Code | None] = []
        self.number: dict[int, int] = {}  # of a statement
        self.made: dict[str, Let] = {}
        self.uses: dict[str, list[int]] = {}  # numbers of statements that read a value
        self.loops: dict[str, tuple[int, int, str]] = {}  # variable: its loop, the next value
        self.orders: dict[str, tuple[str, ...]] = {}  # of the dimensions of arrays
        self.lasts: set[str] = set()  # factors of dots that are read along rows
        self.storage: dict[str, str] = {}  # value -> its array
        self.homes: dict[str, int] = {}  # value -> the block that made it
        self.here = 0
        self.body: list[str] | None = None  # of the loops that are being written
        self.local: dict[str, str] = {}  # values in them
        self.first: frozenset[str] = frozenset()  # dimensions at whose first place an address is

    def print(self, code: Sequence[Code], threaded: bool) -> list[str]:
        code = late(code)
        self.survey(code)
        for c in reversed(self.statements):
            if isinstance(c, Let) and c.kind == "dot":
                self.vector_side(c)
        self.programs()
        self.block(code)
        share = ["#pragma omp for schedule(dynamic) nowait"] if threaded else []
        head = f"for (long long pid = 0; pid < {self.program_count()}; ++pid) {{"
        return [*share, head, *("  " + a for a in self.arrays), *self.lines, "}"]

    def add(self, text: str) -> None:
        self.lines.append(self.indent + text)

    # -- who reads what ----------------------------------------------------------------------------

    def survey(self, code: Sequence[Code]) -> None:
        for c in code:
            self.number[id(c)] = begin = len(self.statements)
            self.statements.append(c)
            if isinstance(c, Let):
                self.made[c.value.name] = c
                self.read(*c.args)
            elif isinstance(c, Write):
                assert c.mask is None, "places that do not exist are not walked"
                self.read(c.address, c.value)
            else:
                self.read(*(v for v in (c.start, c.stop) if v is not None))
                self.survey(c.body)
                self.statements.append(None)
                for variable, following in c.carried:
                    self.read(following)
                    end = len(self.statements) - 1
                    self.loops[variable.name] = (begin, end, following.name)

    def read(self, *values: Value) -> None:
        for v in values:
            self.uses.setdefault(v.name, []).append(len(self.statements) - 1)

    def used_between(self, v: Value, low: int, high: float = math.inf) -> bool:
        return any(low < u < high for u in self.uses.get(v.name, ()))

    def vector_side(self, c: Let) -> None:
        """The factor that has the last dimension of the result lies along it."""
        last = self.order(c.value)[-1]
        factor = next(a for a in c.args[:2] if last in a.dims)
        self.orders.setdefault(factor.name, (c.attr[1], last))
        self.lasts.add(factor.name)

    def order(self, v: Value) -> tuple[str, ...]:
        return self.orders.get(v.name, v.dims)

    def is_position(self, v: Value) -> bool:
        """Whether it is a number of positions, or compares them."""
        c = self.made.get(v.name)
        if c is None or c.kind in POSITIONS:
            return c is not None
        whole = v.dtype in INTS or v.dtype == "bool"
        return c.kind in ("op", "cast") and whole and all(map(self.is_position, c.args))

    # -- programs and loops ------------------------------------------------------------------------

    def programs(self) -> None:
        """Which blocks a program has: neighbours of the last dimension come one after another."""
        self.add("long long rest = pid;")
        for d in reversed(self.tiling.dims):
            if d.mode == "grid":
                self.add(f"const int {d.name}_at = (int)(rest % {self.count(d)}) * {d.block};")
                self.add(f"rest /= {self.count(d)};")
                self.limit(d, self.number_of(d.size))
            elif d.mode == "whole":
                self.add(f"constexpr int {d.name}_at = 0, {d.name}_n = {self.number_of(d.size)};")

    def number_of(self, n: Index) -> str:
        return str(n.value) if n.value is not None else f"({self.sum(n, {})})"

    def count(self, d: Dim) -> str:
        """The text of how many blocks a dimension has."""
        if d.size.value is not None:
            return str(d.count)
        size = self.number_of(d.size)
        return size if d.block == 1 else f"(({size} + {d.block - 1}) / {d.block})"

    def program_count(self) -> str:
        grid = [d for d in self.tiling.dims if d.mode == "grid"]
        if all(d.size.value is not None for d in grid):
            return str(self.tiling.programs())
        return " * ".join(self.count(d) for d in grid)

    def limit(self, d: Dim, stop: str) -> None:
        """How many places a block has."""
        if stop == self.number_of(d.size) and not d.ragged:
            self.add(f"constexpr int {d.name}_n = {d.block};")
            return
        left = f"(int)({stop} - {d.name}_at)"
        self.add(f"const int {d.name}_n = {left} < {d.block} ? {left} : {d.block};")

    def loop(self, loop: Loop) -> None:
        d = self.dims[loop.dim]
        start, stop = "0", (end := self.number_of(d.size))
        if loop.start is not None:
            low = self.text(loop.start)
            start = f"({low} > 0 ? (int)({low}) / {d.block} * {d.block} : 0)"
            start = f"(int)({low} < {end} ? {start} : {end})"
        if loop.stop is not None:
            high, stop = self.text(loop.stop), f"{d.name}_stop{self.number[id(loop)]}"
            self.add(f"const int {stop} = (int)({high} < {end} ? {high} : {end});")
        at = f"{d.name}_at"
        self.add(f"for (int {at} = {start}; {at} < {stop}; {at} += {d.block}) {{")
        before, self.indent = (self.indent, self.here), self.indent + "  "
        self.limit(d, stop)
        self.block(loop.body)
        for variable, following in loop.carried:
            if self.text(variable) != self.text(following):
                self.copy(following, variable)
        self.indent, self.here = before
        self.add("}")

    def copy(self, source: Value, target: Value) -> None:
        self.over(target.dims, [f"{self.text(target)} = {self.text(source)};"])

    def over(
        self, dims: Sequence[str], lines: Sequence[str], simd: str = "#pragma omp simd"
    ) -> None:
        """Lines at every place of a tile."""
        heads = [f"for (int {d} = 0; {d} < {d}_n; ++{d})" for d in dims]
        for h in heads[:-1]:
            self.add(h)
        if heads:
            self.lines += [self.indent + simd] if simd else []
            lines = [heads[-1] + " {", *("  " + s for s in lines), "}"]
        for s in lines:
            self.add(s)

    def block(self, code: Sequence[Code]) -> None:
        """Neighbours with the same dimensions share loops."""
        self.here = id(code)
        group: list[Let | Write] = []
        for c in code:
            if isinstance(c, Let) and (self.is_position(c.value) or self.stays(c)):
                continue
            apart = self.apart(c)
            if group and (apart or isinstance(c, Loop) or not self.joins(group, c)):
                self.write(group)
                group = []
            if isinstance(c, Loop):
                self.loop(c)
                self.here = id(code)
            elif isinstance(c, Let) and apart:
                apart(c)
            else:
                group.append(c)
        if group:
            self.write(group)

    def apart(self, c: Code) -> Callable[[Let], None] | None:
        """Who writes a statement that shares no loops."""
        if not isinstance(c, Let):
            return None
        table = {"dot": self.dot, "full": self.full}
        return self.turned if self.is_turned(c) else table.get(c.kind)

    # -- loops over tiles --------------------------------------------------------------------------

    def walked(self, c: Let | Write) -> tuple[str, ...]:
        """The dimensions over which a statement loops."""
        if isinstance(c, Write):
            return tuple(d for d in self.dims if d in {*c.address.dims, *c.value.dims})
        return c.args[0].dims if c.kind == "reduce" else c.value.dims

    def joins(self, group: Sequence[Let | Write], c: Let | Write) -> bool:
        results = {x.value.name for x in group if isinstance(x, Let) and x.kind == "reduce"}
        reads = {v.name for v in (c.args if isinstance(c, Let) else (c.address, c.value))}
        alike = self.walked(group[0]) == self.walked(c)
        return alike and not reads & results and self.in_order(group[0]) == self.in_order(c)

    def in_order(self, c: Let | Write) -> bool:
        """Whether it reduces along lanes what OpenMP would not: one after the other."""
        if not isinstance(c, Let) or c.kind != "reduce":
            return False
        kind, over = c.attr
        return kind not in REASSOCIATED and c.args[0].dims[-1] in over

    def write(self, group: Sequence[Let | Write]) -> None:
        dims, last = self.walked(group[0]), self.number[id(group[-1])]
        before: list[str] = []
        behind: list[str] = []
        clauses: list[str] = []
        self.body, self.local = [], {}
        for c in group:
            if isinstance(c, Write):
                value = scalars.to_memory(self.text(c.value), c.value.dtype, self.used)
                self.body.append(f"{self.pointers[c.tensor]}[{self.text(c.address)}] = {value};")
            elif c.kind == "reduce":
                self.reduce(c, before, behind, clauses)
            else:
                self.define(c, self.used_between(c.value, last))
        body, self.body, self.local = self.body, None, {}
        slow = any(map(self.in_order, group))
        simd = "" if slow else " ".join(["#pragma omp simd", *clauses])
        if not before:
            self.over(dims, body, simd)
        else:
            inner = [f"for (int {dims[-1]} = 0; {dims[-1]} < {dims[-1]}_n; ++{dims[-1]}) {{"]
            inner = [*before, *([simd] if simd else []), *inner, *("  " + s for s in body), "}"]
            self.over(dims[:-1], [*inner, *behind], "") if dims[:-1] else self.inside(
                inner + behind
            )
        for c in group:
            if isinstance(c, Let):
                self.pad(c.value)

    def inside(self, lines: Sequence[str]) -> None:
        for s in ("{", *("  " + s for s in lines), "}"):
            self.add(s)

    def define(self, c: Let, kept: bool) -> None:
        """A value at the current place; `kept`: others than these loops read it."""
        assert self.body is not None
        v, kind = c.value, scalars.REGISTER_TYPES[c.value.dtype]
        self.body.append(f"const {kind} {v.name} = {self.value(c)};")
        self.local[v.name] = v.name
        if v.dims and kept:
            self.take(v, c.args, self.number[id(c)])
            self.body.append(f"{self.stored(v)} = {v.name};")

    def reduce(self, c: Let, before: list[str], behind: list[str], clauses: list[str]) -> None:
        assert self.body is not None
        (kind, over), v, (x,) = c.attr, c.value, c.args
        self.array(v)
        neutral = scalars.literal(REDUCTIONS[kind].identity(v.dtype), v.dtype)
        self.over(v.dims, [f"{self.stored(v)} = {neutral};"])
        total, value = self.stored(v), self.text(x)
        if x.dims[-1] in over:
            register = f"{v.name}_r"
            before.append(f"{scalars.REGISTER_TYPES[v.dtype]} {register} = {neutral};")
            behind.append(f"{total} = {combine(kind, v.dtype, total, register, self.used)};")
            clauses += [f"reduction({x}:{register})" for k, x in REASSOCIATED.items() if k == kind]
            total = register
        self.body.append(f"{total} = {combine(kind, v.dtype, total, value, self.used)};")

    # -- arrays ------------------------------------------------------------------------------------

    def row(self, dim: str) -> int:
        """The length of rows along a dimension: whole registers."""
        return -(-self.dims[dim].block // LANES) * LANES

    def size(self, order: Sequence[str]) -> int:
        return math.prod(self.dims[d].block for d in order[:-1]) * self.row(order[-1])

    def array(self, v: Value) -> None:
        """Declares a value's array, or variable."""
        kind, order = scalars.REGISTER_TYPES[v.dtype], self.order(v)
        self.homes[v.name] = self.here
        if not order:
            self.arrays.append(f"{kind} {v.name};")
            return
        name = self.storage[v.name] = f"tile_{v.name}"
        self.arrays.append(f"alignas(64) {kind} {name}[{self.size(order)}];")

    def take(self, v: Value, args: Sequence[Value], at: int) -> None:
        """Gives a value the array of an argument that nobody reads any more, or one of its own."""
        for a in args:
            if a.name in self.storage and self.replaces(v, a, at):
                self.storage[v.name], self.homes[v.name] = self.storage[a.name], self.here
                return
        self.array(v)

    def replaces(self, v: Value, a: Value, at: int) -> bool:
        kinds = {scalars.REGISTER_TYPES[x.dtype] for x in (v, a)}
        if self.order(a) != self.order(v) or len(kinds) > 1:
            return False
        begin, end, following = self.loops.get(a.name, (0, 0, ""))
        if begin < at < end:  # the variable of this loop: its next value may be there
            return v.name in self.summed(following) and not self.used_between(a, at, end)
        return self.homes[a.name] == self.here and not self.used_between(a, at)

    def summed(self, name: str) -> set[str]:
        """The value and what dots add it to."""
        out = {name}
        while name in self.made and self.made[name].kind == "dot":
            name = self.made[name].args[2].name
            out.add(name)
        return out

    def steps(self, v: Value) -> dict[str, int]:
        """How far apart neighbours along each dimension of an array are."""
        *others, last = self.order(v)
        out, step = {last: 1}, self.row(last)
        for d in reversed(others):
            out[d] = step
            step *= self.dims[d].block
        return out

    def pad(self, v: Value) -> None:
        """Zeros in the last register of rows that a dot reads."""
        if v.name not in self.lasts:
            return
        row, last = self.order(v)
        d = self.dims[last]
        if d.block % LANES or d.ragged or d.mode == "loop":
            self.used.add("d_pad")
            self.add(f"d_pad({self.storage[v.name]}, {self.row(last)}, {row}_n, {last}_n);")

    def full(self, c: Let) -> None:
        v, number = c.value, scalars.literal(c.attr, c.value.dtype)
        kind = scalars.REGISTER_TYPES[v.dtype]
        if not v.dims:
            self.add(f"{kind} {v.name} = {number};")
        elif not self.is_start(v):
            self.array(v)
            array, size = self.storage[v.name], self.size(self.order(v))
            self.add(f"for (int l = 0; l < {size}; ++l) {array}[l] = {number};")

    def is_start(self, v: Value) -> bool:
        """Whether it is the 0 that one dot begins with."""
        readers = [self.statements[u] for u in self.uses.get(v.name, ())]
        c = self.made.get(v.name)
        if c is None or c.kind != "full" or c.attr != 0 or len(readers) != 1:
            return False
        return isinstance(readers[0], Let) and readers[0].kind == "dot"

    # -- dots --------------------------------------------------------------------------------------

    def dot(self, c: Let) -> None:
        a, b, total = c.args
        v, k = c.value, c.attr[1]
        start = self.is_start(total)
        if start:
            self.array(v)
        else:
            self.take(v, (total,), self.number[id(c)])
            if self.storage[v.name] != self.storage[total.name]:
                self.copy(total, v)
        rows, last = self.order(v)
        left, right = (a, b) if last in b.dims else (b, a)
        (x, xs), (y, ys) = self.factor(left), self.factor(right)
        assert ys[last] == 1, f"{right.name} does not lie along {last}"
        self.used |= {"d_lanes", "d_dot"}
        sides = f"{x}, {xs[rows]}, {xs[k]}, {y}, {ys[k]}, {rows}_n, {last}_n, {k}_n"
        begin = "true" if start else "false"
        self.add(f"d_dot<{begin}>({self.storage[v.name]}, {self.row(last)}, {sides});")
        self.pad(v)

    def factor(self, v: Value) -> tuple[str, dict[str, int]]:
        """Where it begins, and how far apart neighbours along its dimensions are."""
        c = self.made.get(v.name)
        steps = self.memory_steps(c) if c is not None and self.stays(c) else None
        if c is None or steps is None:
            return self.storage[v.name], self.steps(v)
        return self.start(c), steps

    def start(self, c: Let) -> str:
        """The address of a load's first element."""
        self.first = frozenset(c.value.dims)
        text = f"{self.pointers[c.attr[0]]} + {self.text(c.args[0])}"
        self.first = frozenset()
        return text

    def memory_steps(self, c: Let) -> dict[str, int] | None:
        """The same of a load in memory; None where neighbours are not equally far apart."""
        index, values = self.made[c.args[0].name].attr
        out: dict[str, int] = {}
        for a in values:
            (d,) = [x for x in self.tiling.dims if a in x.axes]
            step = index.coefficient(a)
            if d.block > 1:
                if len(d.axes) > 1 or step is None or step.value is None:
                    return None
                out[d.name] = step.value
        return out

    def stays(self, c: Let) -> bool:
        """Whether it is read in memory by dots alone."""
        plain = c.kind == "load" and len(c.args) == 1 and c.value.dtype == "f32" and self.direct
        readers = [self.statements[u] for u in self.uses.get(c.value.name, ())]
        if not plain or not all(isinstance(r, Let) and r.kind == "dot" for r in readers):
            return False
        steps = self.memory_steps(c)
        if steps is None or c.value.name not in self.lasts:
            return steps is not None
        last = self.order(c.value)[-1]
        return steps[last] == 1 and not self.dims[last].block % LANES and not self.dims[last].ragged

    def is_turned(self, c: Let) -> bool:
        """Whether it is a load of a tile that lies along the other dimension."""
        if c.kind != "load" or len(c.args) > 1 or len(c.value.dims) != 2:
            return False
        same = scalars.REGISTER_TYPES[c.value.dtype] == scalars.MEMORY_TYPES[c.value.dtype]
        steps = self.memory_steps(c) if same else None
        other, last = self.order(c.value)
        return steps is not None and steps[other] == 1 and steps[last] not in (0, 1)

    def turned(self, c: Let) -> None:
        v = c.value
        self.array(v)
        other, last = self.order(v)
        steps = self.memory_steps(c)
        assert steps is not None
        self.used.add("d_transpose")
        where = f"{self.start(c)}, {steps[last]}, {self.storage[v.name]}, {self.row(last)}"
        self.add(f"d_transpose({where}, {last}_n, {other}_n);")
        self.pad(v)

    # -- values ------------------------------------------------------------------------------------

    def stored(self, v: Value) -> str:
        if not v.dims:
            return v.name
        at = (d if s == 1 else f"{d} * {s}" for d, s in self.steps(v).items())
        return f"{self.storage[v.name]}[{' + '.join(at)}]"

    def text(self, v: Value) -> str:
        """A value at the current place."""
        if v.name in self.local:
            return self.local[v.name]
        if not self.is_position(v):
            return self.stored(v)
        c = self.made[v.name]
        if c.kind in POSITIONS or self.body is None:
            return self.value(c)
        self.define(c, False)
        return v.name

    def value(self, c: Let) -> str:
        args = [self.text(a) for a in c.args]
        dtype = c.value.dtype
        match c.kind:
            case "place":
                name, between, below, extent = c.attr
                parts = [f"{name}_at"] * between
                parts += [name] * (bool(c.value.dims) and name not in self.first)
                text = f"({' + '.join(parts) or '0'})" if len(parts) != 1 else parts[0]
                text = text if below.value == 1 else f"({text} / {self.number_of(below)})"
                return text if extent is None else f"({text} % {self.number_of(extent)})"
            case "edge":
                name, last = c.attr
                return f"({name}_at + {name}_n - 1)" if last else f"{name}_at"
            case "index":
                index, values = c.attr
                names = dict(zip(values, args, strict=True))
                wide = "" if fits_int(index) else "(long long)"
                return f"({self.sum(index, {a: wide + t for a, t in names.items()})})"
            case "literal":
                return scalars.literal(c.attr, dtype)
            case "load":
                name, fill = c.attr
                text = scalars.from_memory(f"{self.pointers[name]}[{args[0]}]", dtype, self.used)
                other = scalars.literal(fill, dtype)
                return text if len(args) == 1 else f"({args[1]} ? {text} : {other})"
            case "random":
                dist, stream, _ = c.attr
                name = f"d_{dist}64" if dtype == "f64" else f"d_{dist}"
                self.used.add(name)
                return f"{name}({args[0]}, {stream}, {args[1]})"
            case "cast":
                return scalars.convert(args[0], c.attr, dtype, self.used)
            case "spread":
                return args[0]
        assert c.kind == "op", c.kind
        return scalars.operation(c.attr, dtype, args, c.args[-1].dtype, self.used)

    def sum(self, index: Index, names: Mapping[Axis, str]) -> str:
        terms = []
        for m, k in index.terms:
            factors = [self.atom(a, names) for a in m]
            number = str(k) if fits_int(index) else f"{k}LL"
            terms.append(" * ".join([*factors, *([number] if k != 1 or not factors else [])]))
        return " + ".join(terms) or "0"

    def atom(self, a: object, names: Mapping[Axis, str]) -> str:
        if isinstance(a, Axis):
            return names[a]
        if isinstance(a, Sym):
            return size_name(a)
        if isinstance(a, MinMax):
            x, y = f"({self.sum(a.a, names)})", f"({self.sum(a.b, names)})"
            return f"({x} {'<' if a.kind == 'min' else '>'} {y} ? {x} : {y})"
        assert isinstance(a, (Div, Mod)), a
        num, den = f"({self.sum(a.num, names)})", f"({self.sum(a.den, names)})"
        if is_nonneg(a.num):
            return f"({num} {'/' if isinstance(a, Div) else '%'} {den})"
        name = "d_index_div" if isinstance(a, Div) else "d_index_mod"
        self.used.add(name)
        return f"{name}({num}, {den})"


__all__ = ["Printer"]
