"""The emitted module: a Python program that is one compiled graph.

In: the schedule, its memory plan, kernels' sources. Out: the text of a module with a function
``call(args)``, which takes the graph's inputs as a list, clears it and returns the outputs. It is
what runs inside ``torch.compile``, and what a person reads; started by itself it makes inputs of
the traced sizes and times a call.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from deuteron.codegen.cpp.kernels import CppKernel
from deuteron.codegen.triton.generate import TritonKernel
from deuteron.ir.expr import ITEMSIZE
from deuteron.ir.index import Div, Index, MinMax, Mod, Sym, hint
from deuteron.ir.program import Constant, Extern, Input, Layout, Output, Program, ViewArg
from deuteron.memory.plan import OUT_VARIANTS, MemoryPlan, span
from deuteron.schedule.kernel import Kernel, Schedule

TORCH_NAMES = {
    "bool": "bool",
    "u8": "uint8",
    "i8": "int8",
    "i16": "int16",
    "i32": "int32",
    "i64": "int64",
    "f16": "float16",
    "bf16": "bfloat16",
    "f32": "float32",
    "f64": "float64",
}


def source(i: Index) -> str:
    """An index of sizes as a Python expression."""
    if i.value is not None:
        return str(i.value)
    parts = []
    for m, c in i.terms:
        words = [_atom(a) for a in m]
        if c != 1 or not words:
            words.insert(0, str(c))
        parts.append("*".join(words))
    return " + ".join(parts).replace("+ -", "- ")


def _atom(a: Any) -> str:
    if isinstance(a, Div):
        return f"(({source(a.num)})//({source(a.den)}))"
    if isinstance(a, Mod):
        return f"(({source(a.num)})%({source(a.den)}))"
    if isinstance(a, MinMax):
        return f"{a.kind}({source(a.a)}, {source(a.b)})"
    assert isinstance(a, Sym), a
    return a.name


def sizes_text(parts: Sequence[Index]) -> str:
    return "(" + "".join(f"{source(i)}, " for i in parts).rstrip(" ") + ")"


@dataclass(frozen=True)
class Launches:
    """Consecutive GPU kernels: for each the numbers of its tensors among the addresses of the call,
    and the names of the sizes that the call passes."""

    name: str
    device: str
    kernels: tuple[str, ...]
    places: tuple[tuple[int, ...], ...]
    sizes: tuple[str, ...]


@dataclass(frozen=True)
class Emitted:
    """The module's text, the C++ translation unit's segment functions, and what the text refers to
    by name: values that have no text, by the names that the module uses."""

    text: str
    segments: str
    sequences: tuple[Launches, ...]
    objects: dict[str, Any]


@dataclass
class Segment:
    """Consecutive kernels of one device, called at once."""

    name: str
    device: str
    kernels: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)  # of its C++ function
    places: list[tuple[int, ...]] = field(default_factory=list)
    after: list[str] = field(default_factory=list)  # lines of the module that follow the call
    checks: bool = False
    pointers: dict[str, int] = field(default_factory=dict)
    numbers: dict[str, int] = field(default_factory=dict)

    def pointer(self, text: str) -> int:
        return self.pointers.setdefault(text, len(self.pointers))

    def number(self, text: str) -> int:
        return self.numbers.setdefault(text, len(self.numbers))


class Writer:
    """Writes ``call`` step by step."""

    def __init__(
        self,
        program: Program,
        schedule: Schedule,
        plan: MemoryPlan,
        kernels: dict[str, CppKernel | TritonKernel],
        title: str,
    ) -> None:
        self.program, self.schedule, self.plan = program, schedule, plan
        self.kernels, self.title = kernels, title
        self.lines: list[str] = []
        self.head: list[str] = []
        self.segments: list[str] = []
        self.sequences: list[Launches] = []
        self.objects: dict[str, Any] = {}
        self.ops: dict[str, str] = {}
        self.variables: dict[str, str] = {}
        self.open: Segment | None = None
        self.count = 0
        self.symbols = [s for s, (kind, _, _) in program.sizes if kind != "result"]
        self.static = not self.symbols
        self.late = {s: where for s, where in program.sizes if where[0] == "result"}
        self.arrays: list[tuple[str, str]] = []  # name, text of an array that depends on sizes
        self.offsets: dict[str, list[int]] = {}
        self.totals: dict[str, int] = {}
        if self.static:
            for device, arena in plan.arenas.items():
                self.offsets[device], self.totals[device] = arena.offsets({})

    # -- names ------------------------------------------------------------------------------------
    def variable(self, name: str) -> str:
        """The Python variable that holds a tensor."""
        root = self.plan.home.get(name, name)
        found = self.variables.get(root)
        if found is None:
            base = "".join(c if c.isalnum() else "_" for c in root)
            found = base if base.isidentifier() and base not in RESERVED else f"t_{base}"
            while found in self.variables.values():
                found += "_"
            self.variables[root] = found
        return found

    def object(self, value: Any, wish: str) -> str:
        for k, v in self.objects.items():
            if v is value:
                return k
        name = f"{wish}_{len(self.objects)}"
        self.objects[name] = value
        return name

    def pointer(self, name: str) -> tuple[str, str | None]:
        """(Python text of an address, text of an offset to add or None) of a tensor."""
        root = self.plan.home.get(name, name)
        place = self.plan.slot.get(root)
        if place is None:
            return f"{self.variable(root)}.data_ptr()", None
        device, k = place
        base = f"base_{self.arena(device)}"
        if self.static:
            return base, str(self.offsets[device][k])
        return base, f"at_{self.arena(device)}_{k}"

    def arena(self, device: str) -> int:
        return list(self.plan.arenas).index(device)

    # -- the whole --------------------------------------------------------------------------------
    def write(self) -> Emitted:
        self.inputs()
        self.workspaces()
        made: dict[int, list[str]] = {}
        for name, k in self.plan.buffers.items():
            made.setdefault(k, []).append(name)
        for k, step in enumerate(self.schedule.steps):
            for name in made.get(k, ()):
                lay = self.schedule.layouts[name]
                # What is allocated before its sizes are known would be wrong.
                self.line(f"{self.variable(name)} = {self.empty(lay)}")
            if isinstance(step, Extern):
                self.close()
                self.extern(step)
            else:
                self.generated(step)
            dead = [self.variable(n) for n in self.plan.dies.get(k, ())]
            if dead:
                self.pending(f"del {', '.join(dead)}")
        self.close()
        outs = ", ".join(self.output(o) for o in self.program.outputs)
        self.line(f"return ({outs}{',' if len(self.program.outputs) == 1 else ''})")
        return Emitted(self.text(), "\n".join(self.segments), tuple(self.sequences), self.objects)

    def line(self, text: str) -> None:
        self.lines.append("    " + text)

    def pending(self, text: str) -> None:
        """A line after the open segment's call."""
        if self.open is None:
            self.line(text)
        else:
            self.open.after.append(text)

    def inputs(self) -> None:
        names = ["_"] * self.program.num_inputs
        scalars = {w[1]: s.name for s, w in self.program.sizes if w[0] == "int"}
        for k, name in scalars.items():
            names[k] = name
        for d in self.program.defs:
            if isinstance(d, Input):
                names[d.position] = self.variable(d.name)
            elif isinstance(d, Constant):
                self.objects[self.variable(d.name)] = self.program.constants[d.name]
        if names:
            self.line(f"{', '.join(names)}{',' if len(names) == 1 else ''} = args")
        self.line("args.clear()")
        for s, (kind, where, dim) in self.program.sizes:
            if kind in ("shape", "stride"):
                what = f"shape[{dim}]" if kind == "shape" else f"stride({dim})"
                self.line(f"{s.name} = {names[where]}.{what}")
            elif kind == "expr":
                self.line(f"{s.name} = {where}")

    def workspaces(self) -> None:
        if not self.static:
            self.lines.append("    LAYOUT")  # replaced when everything is known
        for device, arena in self.plan.arenas.items():
            if not arena.slots:
                continue
            k = self.arena(device)
            total = str(self.totals[device]) if self.static else f"total_{k}"
            self.line(f'space_{k} = workspace({total}, "{device}")')
            self.line(f"base_{k} = space_{k}.data_ptr()")

    def empty(self, lay: Layout) -> str:
        dtype = TORCH_NAMES.get(lay.dtype, lay.dtype)
        return (
            f"empty({sizes_text(lay.shape)}, {sizes_text(lay.strides)}, torch.{dtype}, "
            f'"{lay.device}")'
        )

    # -- generated kernels ------------------------------------------------------------------------
    def generated(self, step: Kernel) -> None:
        """Adds a kernel to the open segment, or opens one."""
        if self.open is not None and self.open.device != step.device:
            self.close()
        if self.open is None:
            kind = "seg" if step.device == "cpu" else "gpu"
            self.open = Segment(f"{kind}_{self.count}", step.device)
            self.count += 1
        self.open.kernels.append(step.name)
        k = self.kernels[step.name]
        if isinstance(k, CppKernel):
            self.cpu(k, self.open)
        else:
            self.gpu(k, self.open)

    def cpu(self, k: CppKernel, seg: Segment) -> None:
        args = []
        for _, name in k.args:
            text, offset = self.pointer(name)
            base = f"p[{seg.pointer(text)}]"
            if offset is None or offset == "0":
                args.append(base)
            elif self.static:
                args.append(f"(char*){base} + {offset}")
            else:
                args.append(f"(char*){base} + s[{seg.number(offset)}]")
        numbers = [f"s[{seg.number(s.name)}]" for s in k.sizes]
        z = f"const long long z[] = {{{', '.join(numbers)}}}; " if numbers else ""
        seg.lines.append(
            f"  {{ void* q[] = {{{', '.join(args)}}}; {z}cpp_{k.name}(q, {'z' if z else '0'}); }}"
        )
        seg.checks |= k.checks

    def gpu(self, k: TritonKernel, seg: Segment) -> None:
        place = []
        for kind, what in k.args:
            if kind == "size":
                assert isinstance(what, Sym)
                seg.number(what.name)
                continue
            if kind == "counter":
                continue
            assert isinstance(what, str)
            text, offset = self.pointer(what)
            place.append(seg.pointer(text if offset in (None, "0") else f"{text} + {offset}"))
        seg.places.append(tuple(place))

    def close(self) -> None:
        """Calls the open segment."""
        seg, self.open = self.open, None
        if seg is None:
            return
        addresses = f"pointers({len(seg.pointers)})({', '.join(seg.pointers)})"
        self.line(f"# {', '.join(seg.kernels)}")
        if seg.device == "cpu":
            head = f'extern "C" void {seg.name}(void** p, const long long* s) {{'
            self.segments += [head, *seg.lines, "}"]
            self.line(f"{seg.name}({addresses}, {self.array(seg)})")
        else:
            names = tuple(seg.numbers)
            kernels, places = tuple(seg.kernels), tuple(seg.places)
            self.sequences.append(Launches(seg.name, seg.device, kernels, places, names))
            sizes = "".join(n + ", " for n in names)
            self.line(f'{seg.name}(stream("{seg.device}"), {addresses}, ({sizes.rstrip()}))')
        if seg.checks:
            self.line(f"check_indices({seg.name!r})")
        for text in seg.after:
            self.line(text)

    def array(self, seg: Segment) -> str:
        """The sizes that a segment takes, as an array: known once for all calls of these sizes,
        unless a library call of this very call decides one."""
        if not seg.numbers:
            return "None"
        text = f"numbers({len(seg.numbers)})({', '.join(seg.numbers)})"
        if any(s.name in seg.numbers for s in self.late):
            return text
        self.arrays.append((f"z_{seg.name}", text))
        return f"z_{seg.name}"

    # -- library calls ----------------------------------------------------------------------------
    def extern(self, d: Extern) -> None:
        for o in d.origins[:1]:
            if o.line:
                self.line(f"# {o.line}".replace("\n", " "))
        args = [self.argument(a) for a in d.args]
        args += [f"{k}={self.argument(v)}" for k, v in d.kwargs]
        if d.op in OUT_VARIANTS:
            assert d.names[0] is not None
            args.append(f"out={self.variable(d.names[0])}")
            self.line(f"{self.operator(OUT_VARIANTS[d.op])}({', '.join(args)})")
            return
        text = f"{self.operator(d.op)}({', '.join(args)})"
        names = [self.variable(n) if n is not None else "_" for n in d.names]
        for k, s in enumerate(d.sizes):
            if s is not None:
                names[k] = s.name
        if not names or all(n == "_" for n in names):
            self.line(text)
            return
        if len(names) == 1 and self.flat(d):
            self.line(f"{names[0]} = {text}")
        else:
            tail = "," if len(names) == 1 else ""
            inner = text if self.flat(d) else f"leaves({text})"
            self.line(f"{', '.join(names)}{tail} = {inner}")
        for k, n in enumerate(d.names):
            if n is None:
                continue
            lay = d.layouts[k]
            assert lay is not None
            shared = d.aliases[k] if d.aliases else None
            for s, (_, tensor, dim) in self.late.items():
                if tensor == n:
                    self.line(f"{s.name} = {self.variable(n)}.shape[{dim}]")
            if shared is None and lay.strides and lay.dtype in ITEMSIZE:
                v = self.variable(n)
                self.line(f"{v} = as_traced({v}, {sizes_text(lay.strides)})")

    def flat(self, d: Extern) -> bool:
        """Whether the operator returns its tensors directly, not in lists."""
        if d.op in self.program.callables:
            return False
        found: Any = torch.ops
        for part in d.op.split("."):
            found = getattr(found, part)
        returns = found._schema.returns
        return len(returns) == len(d.names) and all(
            str(r.type) in ("Tensor", "int", "number", "Scalar", "SymInt", "bool") for r in returns
        )

    def operator(self, op: str) -> str:
        found = self.ops.get(op)
        if found is None:
            found = "op_" + "".join(c if c.isalnum() else "_" for c in op)
            self.ops[op] = found
            if op in self.program.callables:
                self.objects[found] = self.program.callables[op]
            else:
                self.head.append(f"{found} = torch.ops.{op}")
        return found

    def argument(self, x: Any) -> str:
        if isinstance(x, ViewArg):
            return self.view(x.tensor, x.shape, x.strides, x.offset)
        if isinstance(x, Index):
            return source(x)
        if isinstance(x, (tuple, list)):
            return "[" + ", ".join(self.argument(y) for y in x) + "]"
        if x is None or isinstance(x, (bool, int, str)):
            return repr(x)
        if isinstance(x, float):
            return repr(x) if math.isfinite(x) else f"float({str(x)!r})"
        if isinstance(x, (torch.dtype, torch.layout, torch.memory_format)):
            return repr(x)
        if isinstance(x, torch.device):
            return f"torch.device({str(x)!r})"
        key = getattr(x, "key", None)
        if isinstance(key, str) and key in self.program.callables:
            return self.object(self.program.callables[key], "object")
        return self.object(x, "object")

    def view(
        self, name: str, shape: tuple[Index, ...], strides: tuple[Index, ...], offset: Index
    ) -> str:
        v = self.variable(name)
        lay = self.schedule.layouts[name]
        same = lay.shape == shape and all(
            a is b or n.value == 1 for a, b, n in zip(lay.strides, strides, shape, strict=True)
        )
        if same and offset.value == 0:
            return v
        return f"view({v}, {sizes_text(shape)}, {sizes_text(strides)}, {source(offset)})"

    def output(self, o: Output) -> str:
        if o.tensor is None:
            return source(o.value) if isinstance(o.value, Index) else repr(o.value)
        lay = self.schedule.layouts[o.tensor]
        if lay.shape == o.shape and lay.strides == o.strides and o.offset.value == 0:
            return self.variable(o.tensor)
        v = self.variable(o.tensor)
        return f"view({v}, {sizes_text(o.shape)}, {sizes_text(o.strides)}, {source(o.offset)})"

    # -- the text ---------------------------------------------------------------------------------
    def layout(self) -> list[str]:
        """The function that places the workspace for given sizes, and its use in ``call``."""
        names = ", ".join(s.name for s in self.symbols)
        out = [f"def layout({names}):"]
        results: list[str] = []
        for device, arena in self.plan.arenas.items():
            k = self.arena(device)
            need = ", ".join(source(s.nbytes) for s in arena.slots)
            ats = [f"at_{k}_{j}" for j in range(len(arena.slots))]
            unpack = "".join(a + ", " for a in ats)
            out.append(f"    ({unpack.rstrip()}), total_{k} = place([{need}], LIVES_{k})")
            self.head.append(f"LIVES_{k} = {arena.lives!r}")
            results += [f"total_{k}", *ats]
        for name, text in self.arrays:
            out.append(f"    {name} = {text}")
            results.append(name)
        out.append(f"    return ({''.join(r + ', ' for r in results)})")
        self.results = results
        return [*out, ""]

    def text(self) -> str:
        layout = [] if self.static else self.layout()
        if not self.static:
            key = "".join(s.name + ", " for s in self.symbols)
            use = [f"    sizes = ({key})", "    found = LAYOUTS.get(sizes)"]
            use += ["    if found is None:", "        found = remember(LAYOUTS, sizes, layout)"]
            if self.results:
                use.append(f"    ({''.join(r + ', ' for r in self.results)}) = found")
            at = self.lines.index("    LAYOUT")
            self.lines[at : at + 1] = use
            self.head.append("LAYOUTS = {}")
        segs = [s.split("(")[0].split()[-1] for s in self.segments if s.startswith("extern")]
        bound = [*segs, *(q.name for q in self.sequences), *self.objects]
        return "\n".join(
            [
                f'"""{self.title}"""',
                "",
                "import torch",
                "",
                "from deuteron.runtime.support import (",
                "    as_traced, empty, leaves, numbers, place, pointers, remember,",
                "    stream, view, workspace,",
                ")",
                "",
                *self.head,
                *(["", f"# set by who loads this module: {', '.join(bound)}"] if bound else []),
                "",
                *layout,
                "def call(args):",
                *self.lines,
                "",
                *self.main(),
            ]
        )

    def main(self) -> list[str]:
        """What makes the module a program of its own."""
        parts = []
        for d in inputs_of(self.program):
            if isinstance(d, Input):
                lay = d.layout
                shape = tuple(hint(n) for n in lay.shape)
                strides = tuple(hint(n) for n in lay.strides)
                dtype = TORCH_NAMES.get(lay.dtype, lay.dtype)
                extent = max(1, hint(span(lay)))
                parts.append(f"({shape}, {strides}, torch.{dtype}, {lay.device!r}, {extent})")
            else:
                parts.append(repr(d))
        return [
            "INPUTS = [",
            *(f"    {p}," for p in parts),
            "]",
            "",
            'if __name__ == "__main__":',
            "    from deuteron.runtime.alone import main",
            "",
            "    main(__file__, INPUTS)",
            "",
        ]


def inputs_of(program: Program) -> Iterable[Input | int | None]:
    """Each argument of ``call``: a tensor's definition, the hint of a size, or None."""
    out: list[Input | int | None] = [None] * program.num_inputs
    for d in program.defs:
        if isinstance(d, Input):
            out[d.position] = d
    for s, (kind, where, _) in program.sizes:
        if kind == "int":
            out[where] = s.hint or 0
    return out


RESERVED = frozenset(
    [
        "args",
        "torch",
        "as_traced",
        "check_indices",
        "empty",
        "leaves",
        "numbers",
        "place",
        "pointers",
        "remember",
        "stream",
        "view",
        "workspace",
        "layout",
        "call",
        "sizes",
        "found",
        "and",
        "as",
        "assert",
        "break",
        "class",
        "continue",
        "def",
        "del",
        "elif",
        "else",
        "except",
        "finally",
        "for",
        "from",
        "global",
        "if",
        "import",
        "in",
        "is",
        "lambda",
        "not",
        "or",
        "pass",
        "raise",
        "return",
        "try",
        "while",
        "with",
        "yield",
        "None",
        "True",
        "False",
        "LAYOUTS",
        "INPUTS",
        "main",
    ]
)


def emit(
    program: Program,
    schedule: Schedule,
    plan: MemoryPlan,
    kernels: dict[str, CppKernel | TritonKernel],
    title: str,
) -> Emitted:
    """The module of a graph; `kernels` by `Kernel.name`."""
    return Writer(program, schedule, plan, kernels, title).write()


__all__ = ["Emitted", "emit", "source"]
