"""Programs as text that a person reads and `ir.parser` reads back.

In: a `Program`. Out: text in Python's syntax, one definition after the other::

    s0 = size(2, 8, ("shape", 0, 0))          lowest known value, hint, where it is read at run time
    x = input(0, f32[s0, 8])
    #: softmax | aten.softmax.int | model.py:3: y = x.softmax(-1)
    def top(i=s0, *, j=8) -> f32[s0]:         axes with extents; axes of reductions behind the star
        return reduce_max[j](x[i, j])
    def y(p=s0, q=8) -> f32[s0, 8]:
        _1 = x[p, q] - top[p]                 what is used more than once has a name
        return exp(_1) / (exp(_1) + 1.0)

Layouts: ``f32[s0, 8]`` is contiguous, at offset 0, on the CPU; ``.strides(...)``, ``.offset(n)``
and ``.on(device)`` say otherwise. A bare ``1.0`` is f32, ``1`` is i64, others are ``bf16(1.0)``;
``bf16(x)`` of anything else is a cast. ``at(i*8 + j)`` is an index as a value, ``x[val(e), j]`` a
value as an index, ``x[i, j].where(mask, fill)`` a masked load. Lines that begin with ``#:`` are
origins of what follows. Names that are no identifiers of Python are printed with other characters
and do not read back.
"""

from __future__ import annotations

import keyword
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from deuteron.base.text import one_line
from deuteron.ir.expr import Expr, children, literal
from deuteron.ir.index import Atom, Axis, Div, Index, MinMax, Mod, Sym, Value
from deuteron.ir.operations import COMPARISONS
from deuteron.ir.program import (
    Compute,
    Constant,
    Def,
    Extern,
    Given,
    Input,
    Layout,
    Origin,
    Output,
    Program,
    ViewArg,
    contiguous_strides,
)

INFIX = dict(
    zip(
        ("add", "sub", "mul", "div", "lt", "le", "gt", "ge", "eq", "ne"),
        ("+", "-", "*", "/", "<", "<=", ">", ">=", "==", "!="),
    )
)
RESERVED_NAMES = ("own", "inf", "nan")
MAX_INLINE_DEPTH, MAX_INLINE_LENGTH = (
    8,
    80,
)  # an inner expression of more levels or characters gets a name


def print_program(p: Program) -> str:
    """The program as text; see the module's documentation for the grammar."""
    lines = [f"program(num_inputs={p.num_inputs})"]
    sources = dict(p.sizes)
    for s in _symbols(p):
        source = f", {sources[s]!r}" if s in sources else ""
        lines.append(f"{s.name} = size({s.low}, {s.hint}{source})")
    layouts = p.layouts()
    for d in p.defs:
        lines += _definition(d, layouts)
    lines += [f"check({c.condition!r}, {c.message!r}, {c.where!r})" for c in p.checks]
    lines += [_output(o) for o in p.outputs]
    return "\n".join(lines) + "\n"


def _symbols(p: Program) -> list[Sym]:
    """Every symbol of the program that no call defines, those with a source first."""
    symbols = {s: None for s, _ in p.sizes}
    made = {s for d in p.defs if isinstance(d, Extern) for s in d.sizes if s is not None}

    def see(indices: Iterable[Index]) -> None:
        for i in indices:
            symbols.update(dict.fromkeys(sorted(i.syms() - made)))

    for layout in p.layouts().values():
        see((*layout.shape, *layout.strides, layout.offset))
    for d in p.defs:
        if isinstance(d, Compute):
            see(a.extent for a in d.axes)
            for e in _roots(d):
                see(e.indices())
                see(a.extent for n in e.walk() for a in _bound(n))
            see(d.index or ())
        elif isinstance(d, Extern):
            see(i for x in (d.args, tuple(v for _, v in d.kwargs)) for i in _indices_of(x))
    for o in p.outputs:
        see((*o.shape, *o.strides, o.offset, *([o.value] if isinstance(o.value, Index) else [])))
    return list(symbols)


def _indices_of(x: Any) -> Iterable[Index]:
    if isinstance(x, Index):
        yield x
    elif isinstance(x, ViewArg):
        yield from (*x.shape, *x.strides, x.offset)
    elif isinstance(x, (tuple, list)):
        for y in x:
            yield from _indices_of(y)


def _bound(n: Expr) -> tuple[Axis, ...]:
    if n.op == "reduce":
        return n.attr[1]
    return (n.attr[1],) if n.op == "scan" else ()


def _roots(d: Compute) -> list[Expr]:
    roots = [d.body] + ([d.mask] if d.mask is not None else [])
    return roots + [a.expr for i in d.index or () for a in i.atoms() if isinstance(a, Value)]


# -- names, indices, layouts ---------------------------------------------------------------------


def name_text(name: str) -> str:
    """The name, made an identifier where it is none."""
    if name.isidentifier() and not keyword.iskeyword(name) and name not in RESERVED_NAMES:
        return name
    return "_" + re.sub(r"\W", "_", name)


def index_text(index: Index, value: Callable[[Expr], str] = repr) -> str:
    """An index in Python's syntax; `value` prints loaded positions."""

    def show(a: Atom) -> str:
        if isinstance(a, (Sym, Axis)):
            return name_text(a.name)
        if isinstance(a, (Div, Mod)):
            sign = "//" if isinstance(a, Div) else "%"
            return f"({index_text(a.num, value)}) {sign} ({index_text(a.den, value)})"
        if isinstance(a, MinMax):
            return f"{a.kind}({index_text(a.a, value)}, {index_text(a.b, value)})"
        assert isinstance(a, Value)
        return f"val({value(a.expr)})"

    out = ""
    for m, c in reversed(index.terms):
        factors = [show(a) for a in m]
        if len(m) + (abs(c) != 1) > 1:
            factors = [f"({f})" if isinstance(a, (Div, Mod)) else f for f, a in zip(factors, m)]
        if abs(c) != 1 or not m:
            factors.insert(0, str(abs(c)))
        text = "*".join(factors)
        if not out:
            no_parentheses = c > 0 or not m or abs(c) != 1 or not isinstance(m[0], (Div, Mod))
            out = text if c > 0 else f"-{text}" if no_parentheses else f"-({text})"
        else:
            inner = (
                f"({text})"
                if len(m) == 1 and isinstance(m[0], (Div, Mod)) and abs(c) == 1
                else text
            )
            out += f" {'-' if c < 0 else '+'} {inner}"
    return out or "0"


def tuple_text(items: Iterable[str]) -> str:
    texts = list(items)
    return f"({texts[0]},)" if len(texts) == 1 else f"({', '.join(texts)})"


def _indices(indices: Sequence[Index]) -> str:
    return tuple_text(index_text(i) for i in indices)


def layout_text(layout: Layout) -> str:
    """``f32[s0, 8]``, with what is not the default behind it."""
    text = f"{layout.dtype}[{', '.join(map(index_text, layout.shape)) or '()'}]"
    if layout.strides != contiguous_strides(layout.shape):
        text += f".strides{_indices(layout.strides)}"
    if layout.offset.value != 0:
        text += f".offset({index_text(layout.offset)})"
    if layout.device != "cpu":
        text += f".on({layout.device!r})"
    return text


# -- expressions ---------------------------------------------------------------------------------


def number_text(value: Any, dtype: str = "") -> str:
    """A number; of f32 and the half types with as many digits as tell it from its neighbours."""
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if value != value else "inf" if value > 0 else "-inf"
    if dtype in ("f32", "f16", "bf16"):
        for digits in (3, 6, 9):
            text = repr(float(f"{value:.{digits}g}"))
            if literal(float(text), dtype).attr == value:
                return text
    return repr(value)


class Expressions:
    """Prints several expressions that share parts. `lines` receives the parts that have names.

    `dtypes` gives the dtype of each tensor in memory, `roots` are all expressions that will be
    printed, `registers` are names of a kernel's values that have no indices.
    """

    def __init__(
        self, dtypes: Mapping[str, str], roots: Iterable[Expr], registers: Iterable[str] = ()
    ) -> None:
        self.dtypes, self.registers = dtypes, frozenset(registers)
        self.lines: list[str] = []
        self.text: dict[Expr, str] = {}
        self.depth: dict[Expr, int] = {}
        self.named: set[Expr] = set()
        self.uses: dict[Expr, int] = {}
        for root in roots:
            if root not in self.uses:
                for n in root.walk():
                    if n not in self.uses:
                        self.uses[n] = 0
                        for c in children(n):
                            self.uses[c] += 1
            self.uses[root] += 1

    def print(self, roots: Sequence[Expr]) -> list[str]:
        """The text of each root."""
        for root in roots:
            for n in root.walk():
                if n not in self.text:
                    self._print(n, n in roots)
        return [self.text[r] for r in roots]

    def _print(self, n: Expr, is_root: bool) -> None:
        text = self._node(n)
        depth = 1 + max((self.depth[c] for c in children(n)), default=0)
        leaf = n.op in ("literal", "index") or (
            n.op == "load" and len(text) < MAX_INLINE_LENGTH // 2
        )
        shared = self.uses[n] > 1 and not leaf
        if shared or (
            not is_root and not leaf and (depth > MAX_INLINE_DEPTH or len(text) > MAX_INLINE_LENGTH)
        ):
            name = f"_{len(self.lines) + 1}"
            self.lines.append(f"{name} = {text}")
            text, depth = name, 0
            self.named.add(n)
        self.text[n], self.depth[n] = text, depth

    def index(self, i: Index) -> str:
        return index_text(i, lambda e: self.text[e])

    def _arg(self, n: Expr) -> str:
        text = self.text[n]
        return f"({text})" if n.op in INFIX and n not in self.named else text

    def _node(self, n: Expr) -> str:
        args = [self.text[a] for a in n.args]
        if n.op == "literal":
            text = number_text(n.attr, n.dtype)
            return text if n.dtype in ("bool", "i64", "f32") else f"{n.dtype}({text})"
        if n.op == "index":
            return f"at({self.index(n.attr)})"
        if n.op == "load":
            return self._load(n, args)
        if n.op == "cast":
            if n.attr is not None:
                return f"{n.attr}({args[0]})"
            if n.args[0].op == "literal":  # bf16(0.1) is a literal
                return f"cast[{n.dtype!r}]({args[0]})"
            return f"{n.dtype}({args[0]})"
        if n.op in ("reduce", "scan"):
            axes = ", ".join(name_text(a.name) for a in _bound(n))
            return f"{n.op}_{n.attr[0]}[{axes}]({args[0]})"
        dtype = "bool" if n.op in COMPARISONS else n.args[-1].dtype if n.args else ""
        if n.op == "random":
            dist, stream, element = n.attr
            mark = "" if n.dtype == "f32" else f"[{n.dtype!r}]"
            return f"{dist}{mark}({args[0]}, {stream}, {self.index(element)})"
        if n.op == "check":
            mask = f", {args[1]}" if len(args) > 1 else ""
            return f"check({args[0]}, {self.index(n.attr)}{mask})"
        if n.op in INFIX and n.dtype == dtype and len(args) == 2:
            return f" {INFIX[n.op]} ".join(self._arg(a) for a in n.args)
        return f"{n.op}{'' if n.dtype == dtype else f'[{n.dtype!r}]'}({', '.join(args)})"

    def _load(self, n: Expr, args: list[str]) -> str:
        name, indices, fill = n.attr
        if name in self.registers:
            return name_text(name)
        text = f"{name_text(name)}[{', '.join(map(self.index, indices)) or '()'}]"
        if self.dtypes.get(name) != n.dtype:
            text += f".read({n.dtype!r})"
        return text if not args else f"{text}.where({args[0]}, {number_text(fill, n.dtype)})"


# -- definitions ---------------------------------------------------------------------------------


def origin_lines(origins: Iterable[Origin]) -> list[str]:
    parts = ((o.node, o.op, one_line(o.line)) for o in origins)
    return [f"#: {' | '.join(p if p[2] else p[:2])}" for p in parts]


def axes_text(axes: Iterable[Axis]) -> list[str]:
    return [f"{name_text(a.name)}={index_text(a.extent)}" for a in axes]


def _definition(d: Def, layouts: Mapping[str, Layout]) -> list[str]:
    if isinstance(d, Input):
        return [f"{name_text(d.name)} = input({d.position}, {layout_text(d.layout)})"]
    if isinstance(d, Constant):
        return [f"{name_text(d.name)} = constant({d.digest!r}, {layout_text(d.layout)})"]
    if isinstance(d, Extern):
        return [*origin_lines(d.origins), call_text(d)]
    return [*origin_lines(d.origins), *_compute(d, layouts)]


def _compute(d: Compute, layouts: Mapping[str, Layout]) -> list[str]:
    roots = _roots(d)
    # Scans run along axes of the definition; reductions bind their own.
    bound = dict.fromkeys(a for r in roots for n in r.walk() for a in _bound(n))
    inner = axes_text(a for a in bound if a not in d.axes)
    signature = ", ".join(axes_text(d.axes) + (["*", *inner] if inner else []))
    out = [f"def {name_text(d.name)}({signature}) -> {layout_text(d.layout)}:"]
    ex = Expressions({n: lay.dtype for n, lay in layouts.items()}, roots)
    texts = ex.print(roots)
    out += [f"    {line}" for line in ex.lines]
    if d.target is None and d.index is None and d.accumulate is None and d.mask is None:
        return [*out, f"    return {texts[0]}"]
    place = "..." if d.index is None else ", ".join(map(ex.index, d.index)) or "()"
    parts = [f"{'own' if d.target is None else name_text(d.target)}[{place}]", texts[0]]
    if d.accumulate is not None:
        parts.append(f"accumulate={d.accumulate!r}")
    if d.mask is not None:
        parts.append(f"mask={texts[1]}")
    if d.unique:
        parts.append("unique=True")
    return [*out, f"    return store({', '.join(parts)})"]


def call_text(d: Extern) -> str:
    """A library call, with what differs from the defaults."""
    results = tuple_text(
        "None"
        if n is None and lay is None
        else f"result({n!r}, {layout_text(lay) if lay else None})"
        for n, lay in zip(d.names, d.layouts)
    )
    parts = [repr(d.op), value_text(d.args), f"results={results}"]
    if d.kwargs:
        parts.append(f"kwargs={value_text(d.kwargs)}")
    for what in ("mutates", "aliases", "reason", "impure"):
        if getattr(d, what):
            parts.append(f"{what}={getattr(d, what)!r}")
    if d.sizes:
        made = ("None" if s is None else f"size({s.low}, {s.hint}, {s.name!r})" for s in d.sizes)
        parts.append(f"sizes={tuple_text(made)}")
    text = f"call({', '.join(parts)})"
    return text if len(text) <= 100 else "call(\n    " + ",\n    ".join(parts) + ",\n)"


def value_text(x: Any) -> str:
    """An argument of a library call."""
    if isinstance(x, Index):
        return f"at({index_text(x)})"
    if isinstance(x, ViewArg):
        place = f"{_indices(x.shape)}, {_indices(x.strides)}, {index_text(x.offset)}"
        return f"view({x.tensor!r}, {place})"
    if isinstance(x, Given):
        return f"given({x.position})"
    if isinstance(x, tuple):
        return tuple_text(map(value_text, x))
    if isinstance(x, list):
        return f"[{', '.join(map(value_text, x))}]"
    if isinstance(x, float):
        return number_text(x)
    if x is None or isinstance(x, (bool, int, str, complex)):
        return repr(x)
    if type(x).__module__ == "torch":  # dtypes, devices, layouts, memory formats
        text = str(x)
        return text if text.startswith("torch.") else f"torch.{type(x).__name__}({text!r})"
    key = getattr(x, "key", None)
    return f"opaque({key if isinstance(key, str) else repr(x)!r})"


def _output(o: Output) -> str:
    if o.tensor is None:
        return f"output(None, {value_text(o.value)})"
    dtype = "" if o.dtype is None else f", dtype={o.dtype!r}"
    place = f"{_indices(o.shape)}, {_indices(o.strides)}, {index_text(o.offset)}"
    distinct = ", distinct=True" if o.distinct else ""
    return f"output({o.tensor!r}, {place}{dtype}{distinct})"


__all__ = ["Expressions", "print_program"]
