"""Writes values of an expression DAG as Triton variables, each at the outermost loop level where it
can be computed.

In: expressions with linear addresses (`loops.Loops`) and the tile's dimensions. Out: lines in a
chain of `Scope`s.

A tile has one to three dimensions (`Dim`); each flattens a group of axes. A value depends on some
of the dimensions and has extent 1 along the others, so that broadcasting does the rest; one that
depends on none is a scalar. A scope gives dimensions (`codegen.placing`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from deuteron.base.text import one_line, plain_name
from deuteron.codegen.checks import as_arithmetic
from deuteron.codegen.precision import (
    at_least_one,
    erf_of_one_plus,
)
from deuteron.codegen.triton import scalars
from deuteron.codegen.triton.dynamic_bounds import continues, write_reduction
from deuteron.codegen.triton.peephole import divided_by_reciprocal, has_safe_reciprocal, peephole
from deuteron.codegen.triton.row_loads import row_load
from deuteron.codegen.triton.scope import NONE, PART, Dim, Dims, Scope
from deuteron.codegen.triton.state import Limits, TileState
from deuteron.ir import expr as E
from deuteron.ir.elements import is_loaded
from deuteron.ir.expr import Expr, children
from deuteron.ir.index import Axis, Div, Index, MinMax, Mod, Sym, Value, const, is_nonneg, product

# Constants that may be added to a pointer after the rest, which 32 bits then still hold
# (`sizes.MAX_INT32_INDEX`).
MAX_POINTER_OFFSET = 1 << 19
# Quotients of one divisor that are had by its reciprocal: a division is 15 operations, preparing a
# divisor about 20, and each quotient 6 then. H200: 16 in a product of 4 by 16 by 96,
# whose points divide the scores: 134 us (32 registers, 1.9 KB of a stack); so 7.5.
DIVISIONS = 3
POSITION_OPS = ("index", "literal")
COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")


class Emitter(TileState):
    """Writes values as Triton variables."""

    def __init__(
        self,
        dims: Sequence[Dim],
        pointers: Mapping[str, str],
        numbers: Iterator[int],
        index_type: str,
    ) -> None:
        super().__init__(dims, pointers, numbers, index_type)
        self._wide: dict[tuple[Axis, Axis], Emitter] = {}  # by unrolled axis and the axis before it

    def enter(self, dim: Dim, offset: str) -> None:
        """Writes the index and the mask of `dim` for the block that starts at `offset`; the scope
        has it from here on.
        """
        name, stem = dim.name, dim.stem
        lanes = f"tl.arange(0, {dim.block}){dim.slice(self.rank)}"
        if name == "x" and self.rotation is not None and self.rotation.step > 1:
            lanes = f"{self.rotation.step} * {lanes}"
        wide = "" if self.index_type == "tl.int32" else f".to({self.index_type})"
        if dim.parts:
            self.scope.add(f"rpart = {offset} // rspan")
            for a, below, inner in self.places_of(dim.parts):
                text = "rpart" if below.value == 1 else f"rpart // {self._factor(below)}"
                self.scope.axes[a] = self.fresh("r_at")
                more = f" % {self._factor(a.extent)}" if inner else ""
                self.scope.add(f"{self.scope.axes[a]} = {text}{more}")
            offset = f"{offset} % rspan"
        start = f"{offset} + " if offset != "0" else ""
        if name == "r" and self.rotation is not None:
            self.scope.add(*self.rotation.lanes(f"{start}{lanes}{wide}", dim))
        else:
            self.scope.add(f"{stem}index = {start}{lanes}{wide}")
            if dim.masked:
                end = "rlength" if dim.parts else f"{stem}numel"
                self.scope.add(f"{stem}mask = {stem}index < {end}")
        for a in dim.fixed:
            at = self.fresh(f"{name}_at")
            self.scope.add(f"{at} = {self._digit_text(dim, a, offset)}")
            self.scope.axes[a] = at
        self.scope.given |= {name} | (PART if dim.parts else NONE)
        self.starts[name] = offset
        if len(dim.axes) == 1:
            self.scope.axes[dim.axes[0]] = f"{stem}index"
        if name == "x" and self.rotation is not None:
            self.rotation.row_begins(self, dim)

    def widened(self, unrolled_axis: Axis, along: Axis) -> Emitter:
        """An emitter for stores of the points of an unrolled axis together, in the current scope:
        its last dimension has that axis behind `along`."""
        if (unrolled_axis, along) not in self._wide:
            prefix = f"wide{len(self._wide) or ''}"
            old = self.dims["x"]
            assert old.axes[-1] == along and self.rank == len(self.dims)
            count = unrolled_axis.extent.value
            block = f"{count} * {old.block}"
            x = Dim("x", (*old.axes, unrolled_axis), block, old.place, old.masked, prefix)
            others = [d for d in self.dims.values() if d.name != "x"]
            wide = Emitter([*others, x], self.pointers, self.numbers, self.index_type)
            wide.limits = self.limits
            wide.chain[0].lines = self.scope.lines
            for d in others:
                wide.scope.given |= {d.name}
                if len(d.axes) == 1:
                    wide.scope.axes[d.axes[0]] = f"{d.name}index"
            if old.masked:
                self.scope.add(f"{prefix}xnumel = {count} * xnumel")
            wide.enter(x, f"{count} * xoffset")
            self._wide[unrolled_axis, along] = wide
        return self._wide[unrolled_axis, along]

    # -- values ------------------------------------------------------------------------------------

    def needed(self, node: Expr) -> Sequence[Expr]:
        if node.op == "reduce":  # its body is written inside its loop
            return ()
        return (node.args[0],) if continues(self, node) else children(node)

    def define(self, node: Expr) -> None:
        if node.op == "load" and node.attr[0] in self.result_deps:
            raise AssertionError(f"result {node.attr[0]!r} is used before it is computed")
        scope = self.chain[self.level(self.deps(node))]
        if node.op == "reduce":
            scope.texts[node] = write_reduction(self, node)
            return
        if continues(self, node):
            scope.texts[node] = write_reduction(self, node.args[1], self.value(node.args[0]))
            return
        if node.op == "check":
            scope.texts[node] = self._check(node, scope)
            return
        text = self._text(node)
        name = self.fresh()
        scope.add(f"{name} = {text}")
        scope.texts[node] = name

    def _text(self, node: Expr) -> str:
        if node.op == "load":
            return self._load(node)
        if node.op == "index":
            if self.index_type != "tl.int64" and is_loaded(node.attr):
                return self.value(as_arithmetic(node.attr))  # what is loaded may need all its bits
            text = self.index(node.attr)
            return (
                f"({text}).to(tl.int64)"
                if self.index_type != "tl.int64" or not self.deps(node)
                else text
            )
        if node.op == "cast":
            (a,) = node.args
            wide = self._widened(node) or peephole(self, node)
            if wide is not None:
                return wide
            narrow = self.index_type == "tl.int32" and a.op == "index" and not is_loaded(a.attr)
            if narrow and self.deps(a):
                # Numbers of 64 bits are converted many times slower.
                return scalars.convert(f"({self.index(a.attr)})", "i32", node.dtype, self.float8)
            return scalars.convert(self.value(a), a.dtype, node.dtype, self.float8)
        if node.op == "random":
            dist, stream, element = node.attr
            wide = "64" if node.dtype == "f64" else ""
            seed = self.value(node.args[0])
            if (dist, wide) == ("rand", "") and (lanes := self.neighbours(element)) is not None:
                return f"libm.rand_lanes({seed}, {stream}, {lanes}, {self.rank})"
            places = [element // 4, element % 4] if (dist, wide) == ("rand", "") else [element]
            texts = [
                f"tl.full([], {self.index(i)}, tl.int64)" if i.value is not None else self.index(i)
                for i in places
            ]
            return f"libm.{dist}{wide}({seed}, {stream}, {', '.join(texts)})"
        if (shorter := peephole(self, node)) is not None:
            return shorter
        erf = erf_of_one_plus(node)
        if erf is not None and erf in self.inexact.approximate:
            by = self.inexact.exponentials.get(erf)
            kind, more = ("fast", "") if by is None else ("by", f", {self.value(by)}")
            return f"libm.erf_above_{kind}({self.value(erf.args[0])}{more})"
        if node in self.inexact.approximate and node.op not in ("div", "erf"):
            return f"libm.{node.op}_fast({self.value(node.args[0])})"
        if node.op == "div" and node.dtype == "f32":
            a, b = node.args
            served = self.deps(b) - PART < self.deps(a) - PART or self.divisions[b] >= DIVISIONS
            if served and a.op != "literal":
                fast = "_fast" if node in self.inexact.approximate else ""
                if has_safe_reciprocal(self, b, bool(fast)):
                    return divided_by_reciprocal(self, a, b, bool(fast))
                return f"libm.div_by{fast}({self.value(a)}, {self._divisor(b)})"
            if node in self.inexact.approximate:
                return f"{self.value(a)} / {self.value(b)}"  # within 2 units in the last place
            if at_least_one(b):
                return f"libm.div_by_one_or_more({self.value(a)}, {self.value(b)})"
        if node.op == "reciprocal" and node.dtype == "f32" and at_least_one(node.args[0]):
            return f"libm.reciprocal_below_one({self.value(node.args[0])})"
        narrowed = self._narrowed(node) if node.op in COMPARISONS else None
        if narrowed is not None:
            return narrowed
        operand = node.args[-1].dtype
        same_type = node.args[node.op == "where" :]
        args = []
        for k, a in enumerate(node.args):
            others = all(b.op == "literal" for b in same_type if b is not a)
            if a.op == "literal" and scalars.inlines(node.op, operand, k, a.attr, others):
                args.append(scalars.literal(a.attr, a.dtype))
            else:
                args.append(self.value(a))
        return scalars.operation(node.op, node.dtype, args, operand)

    def _narrowed(self, node: Expr) -> str | None:
        """A comparison of an index with an i64 that many elements share, in 32 bits."""
        if self.index_type != "tl.int32":
            return None
        sign = scalars.INFIX_OPS[node.op]
        plain = [self._plain_index(a) for a in node.args]
        if all(plain) and any(a.op == "index" for a in node.args):
            return f"{plain[0]} {sign} {plain[1]}"
        for index, other in (node.args, node.args[::-1]):
            if node.op not in ("eq", "ne") or index.op != "index" or other.op in POSITION_OPS:
                continue
            if not is_nonneg(index.attr):
                continue
            if self.deps(index) <= self.deps(other):
                continue
            text = self.value(other)
            scope = self.chain[self.level(self.deps(other))]
            key = (other, "narrow")
            if key not in scope.sums:
                scope.sums[key] = self.fresh()
                scope.add(f"{scope.sums[key]} = libm.narrow({text})")
            return f"({self.index(index.attr)}) {sign} {scope.sums[key]}"
        return None

    def _plain_index(self, node: Expr) -> str | None:
        """An index or a constant in the index type."""
        if node.op == "index" and not is_loaded(node.attr):
            return f"({self.index(node.attr)})"
        if node.op == "literal" and abs(node.attr) < 2**31:
            return scalars.literal(node.attr, "i64")
        return None

    def _divisor(self, b: Expr) -> str:
        """What `libm.div_by` needs of a divisor that serves many elements."""
        text = self.value(b)
        scope = self.chain[self.level(self.deps(b))]
        names_text = scope.sums.get((b, "divisor"))
        if names_text is None:
            names = [self.fresh(s) for s in ("by", "inverse", "scale")]
            names_text = scope.sums[(b, "divisor")] = ", ".join(names)
            scope.add(f"{names_text} = libm.divisor({text})")
        return names_text

    def _check(self, node: Expr, scope: Scope) -> str:
        """Asserts that an index is within its dimension; its value, which spans what the masks of
        the assertion do."""
        text, extent = self.value(node.args[0]), self._factor(node.attr)
        bounds = self.mask(self.deps(node))
        masks = [self.value(a) for a in node.args[1:]] + ([bounds] if bounds else [])
        outside = " & ".join([f"(({text} < 0) | ({text} >= {extent}))", *masks])
        scope.add(f'tl.device_assert(({outside}) == 0, "index out of bounds")')
        self.checked = True
        have, wanted = self.deps(node.args[0]), self.deps(node)
        return text if have == wanted else self.spread(text, have, wanted)

    def _load(self, node: Expr) -> str:
        name, idx, fill = node.attr
        address, cond = idx[0], node.args[0] if node.args else None
        if cond is None and self.within is None and name not in self.limits:
            steady = self._steady(node) or row_load(self, node)
            if steady is not None:
                return steady
        dims = self.index_deps(address)
        masks = [self.value(cond)] if cond is not None else []
        wanted = dims | (self.deps(cond) if cond is not None else NONE)
        if self.within is not None and self.deps(self.within) < wanted:
            masks.append(self.value(self.within))  # terms that do not exist are not read
        bounds = self.mask(wanted, self.level(wanted))
        where = " & ".join([*([bounds] if bounds else []), *masks])
        text = self.pointer_text(name, address, wanted)
        scope = self.chain[self.level(wanted)]
        self.guard("load", name, address, wanted, where, scope)
        policy = self.policies.get(node, "")
        hint = f', eviction_policy="{policy}"' if policy else ""
        if self.rotation is not None and not masks and self.rotation.covers(self, address):
            return self.rotation.load(self, name, node.dtype, hint)
        if (
            self.rotation is not None
            and not masks
            and self.rotation.rotates(self, address, node.dtype)
        ):
            return self.rotation.rotated(self, name, address, node.dtype, policy)
        if not where:
            return f"tl.load({text}{hint})"
        other = scalars.literal(
            fill if fill is not None else 0, "i8" if node.dtype == "bool" else node.dtype
        )
        return f"tl.load({text}, {where}, other={other}{hint})"

    def _steady(self, node: Expr) -> str | None:
        """A load of what is the same for all elements of a block along r (a weight by channel, of
        rows of channels): one element, where otherwise each lane would read its own."""
        name, (address, *_), _ = node.attr
        r, start = self.dims.get("r"), self.starts.get("r", "0")
        used = [a for a in r.axes if a in address.axes()] if r is not None else []
        if r is None or start == "0" or self.rotation is not None or len(used) != 1:
            return None
        below, inner = self.digit(r, used[0])
        step = address.coefficient(used[0])
        if not below.value or not self.block or below.value % self.block:
            return None
        if step is None or step.axes() or r.name in self.index_deps(address - used[0].index * step):
            return None
        place = f"{start} // {below.value}" + (f" % {self._factor(used[0].extent)}" * inner)
        place = f"({place})" if step.value == 1 else f"({place}) * {self._factor(step)}"
        rest = address - used[0].index * step
        own, wanted = self.index_deps(rest), self.index_deps(address)
        index = self.spread(self.index(rest), own, wanted - {"r"})
        mask, policy = self.mask(wanted - {"r"}), self.policies.get(node)
        more = f", {mask}" if mask else ""
        more += f', eviction_policy="{policy}"' if policy else ""
        pointer = f"{self.pointers[name]} + {index} + {place}"
        return f"tl.broadcast_to(tl.load({pointer}{more}), {self.shape(wanted)})"

    def guard(
        self, what: str, tensor: str, address: Index, dims: Dims, where: str, scope: Scope
    ) -> None:
        """Asserts, where accesses are checked, that those to a tensor are inside it."""
        if tensor not in self.limits:
            return
        count, kernel = self.limits[tensor]
        index = self.spread(self.index(address), self.index_deps(address), dims)
        masks = f" & ({where})" if where else ""
        outside = f"((({index}) < 0) | (({index}) >= {self._factor(count)})){masks}"
        text = f"kernel {kernel}: {what} outside tensor {tensor} of {count} elements, at {address}"
        plain = "".join(c if c.isascii() and c not in "'\"\\{}%" else " " for c in one_line(text))
        scope.add(f'tl.device_assert(({outside}) == 0, "{plain}")')
        self.checked = True

    def pointer_text(self, tensor: str, address: Index, dims: Dims) -> str:
        """The pointers to the elements of a tensor at an address, spanning the dimensions `dims`.

        Its constant is added to the pointer: elements that are so far apart (those of a window)
        then share all arithmetic, and the instruction that reads has the constant."""
        pointer = self.pointers[tensor]
        far = dict(address.terms).get((), 0)
        have = self.index_deps(address)
        if not far or not have or abs(far) > MAX_POINTER_OFFSET or self.rotation is not None:
            return f"{pointer} + {self.spread(self.index(address), have, dims)}"
        index = self.spread(self.index(address - far), have, dims)
        return f"{pointer} + {index} {'-' if far < 0 else '+'} {abs(far)}"

    def _widened(self, node: Expr) -> str | None:
        """A rounding to bf16 whose result is f32 again. Of whole tiles only: Triton 3.6 misplaces
        instructions that it does not know where it gives the values of rows a second layout."""
        (a,) = node.args
        if node.dtype != "f32" or a.dtype != "bf16":
            return None
        if a.op == "where":
            choices = [E.cast(x, "f32") for x in a.args[1:]]
            if any(x.op == "cast" and x.args[0].op == "cast" for x in choices):
                return self.value(E.op("where", a.args[0], *choices))
        if a.op != "cast" or a.args[0].dtype != "f32" or self.deps(a) != frozenset(self.dims):
            return None
        return f"libm.round_bf16({self.value(a.args[0])})"

    def neighbours(self, element: Index) -> str | None:
        """Where the tile's last dimension counts elements, rows of which begin at multiples of 4:
        the text of a row's first element over 4, of the block's start, and of its size."""
        last = list(self.dims.values())[-1]
        if len(last.axes) != 1 or last.prefix or self.rotation is not None or self.rank > 2:
            return None
        rest = element - last.axes[0].index
        if (last.count.value or 0) < 4 or last.name in self.index_deps(rest):
            return None
        if (rest % 4).value != 0:
            return None
        return f"{self.index(rest // 4)}, {self.starts[last.name]}, {last.block}"

    # -- indices -----------------------------------------------------------------------------------

    def index(self, index: Index) -> str:
        """The text of an index: one variable for the part of each set of dimensions, kept where
        that set is known.
        """
        index = self._joined(index, frozenset(d.name for d in self.dims.values() if d.fixed))
        for a in [a for m, _ in index.terms for a in m]:  # values that the index needs come first
            self._prepare(a)
        parts: dict[Dims, dict[tuple, int]] = {}
        for m, c in index.terms:
            parts.setdefault(self.index_deps(Index({m: c})), {})[m] = c
        if NONE in parts and len(parts) > 1 and set(parts[NONE]) == {()}:
            first = next(k for k in parts if k != NONE)
            parts[first].update(parts.pop(NONE))
        texts = [
            self._part(Index(parts[d]), d) for d in sorted(parts, key=lambda d: (len(d), sorted(d)))
        ]
        return " + ".join(texts) or "0"

    def _part(self, own: Index, dims: Dims) -> str:
        scope = self.chain[self.level(dims)]
        part = scope.sums.get(own)
        if part is None:
            text = self._sum(self._joined(own, dims))
            simple = own.value is not None or (len(own.terms) == 1 and text.isidentifier())
            if simple:
                part = text
            else:
                part = self.fresh("at")
                scope.add(f"{part} = {text}")
            scope.sums[own] = part
        return part

    def _joined(self, own: Index, dims: Dims) -> Index:
        """The index with runs of neighbouring axes of a dimension replaced by one axis each."""
        for name in sorted(dims & set(self.dims)):
            axes = self.dims[name].axes
            for n in range(len(axes), 1, -1):
                for i in range(len(axes) - n + 1):
                    run = axes[i : i + n]
                    flat = self._flat(run)
                    step = own.coefficient(run[-1])
                    if step is None or not step.terms or step.axes():
                        continue
                    rest = own - flat * step
                    if not rest.axes() & set(run):
                        own = rest + self._run(name, run).index * step
        return own

    def _flat(self, run: Sequence[Axis]) -> Index:
        total = const(0)
        for a in run:
            total = total * a.extent + a.index
        return total

    def _run(self, name: str, run: Sequence[Axis]) -> Axis:
        """An axis that stands for neighbouring axes of a dimension."""
        dim = self.dims[name]
        joined = Axis("_".join(a.name for a in run), product(a.extent for a in run))
        if joined not in self.dim_of:
            last = dim.axes.index(run[-1])
            below = product(a.extent for a in dim.axes[last + 1 :])
            self._digits[joined] = (below, dim.axes.index(run[0]) > 0)
            self.dim_of[joined] = name
        return joined

    def _prepare(self, a: object) -> None:
        """Writes what the text of an atom needs."""
        if isinstance(a, Value):
            self.value(a.expr)
        elif isinstance(a, Axis):
            self.axis(a)
        elif isinstance(a, (Div, Mod, MinMax)):
            own = (a.a, a.b) if isinstance(a, MinMax) else (a.num, a.den)
            for x in (x for i in own for m, _ in i.terms for x in m):
                self._prepare(x)

    def _sum(self, index: Index) -> str:
        return scalars.index_sum(index, self.atom)

    def axis(self, axis: Axis) -> str:
        """The variable of an axis; written when it is first needed, from the index of its
        dimension.
        """
        for scope in reversed(self.chain):
            if axis in scope.axes:
                return scope.axes[axis]
        dim = self.dims[self.dim_of[axis]]
        scope = self.chain[self.level(frozenset((dim.name,)))]
        name = text = self._digit_text(dim, axis, f"{dim.stem}index")
        if not text.isidentifier():
            name = self.fresh(dim.name)
            scope.add(f"{name} = {text}")
        scope.axes[axis] = name
        return name

    def _digit_text(self, dim: Dim, axis: Axis, of: str) -> str:
        """The text of an axis' place where a dimension's is `of`."""
        below, inner = self._digits.get(axis) or self.digit(dim, axis)
        text = of if below.value == 1 else f"{of} // {self._factor(below)}"
        if not inner:
            return text
        return f"{text if below.value == 1 else f'({text})'} % {self._factor(axis.extent)}"

    def _factor(self, index: Index) -> str:
        text = self._sum(index)
        return text if text.isidentifier() or text.isdigit() else f"({text})"

    def atom(self, a: object) -> str:
        if isinstance(a, Axis):
            return self.axis(a)
        if isinstance(a, Sym):
            return size_name(a)
        if isinstance(a, Value):
            return f"{self.value(a.expr)}.to({self.index_type})"
        if isinstance(a, MinMax):
            return f"tl.{a.kind}imum({self._sum(a.a)}, {self._sum(a.b)})"
        assert isinstance(a, (Div, Mod))
        num, den = self._factor(a.num), self._factor(a.den)
        if is_nonneg(a.num):
            return f"({num} {'//' if isinstance(a, Div) else '%'} {den})"
        return f"libm.index_{'div' if isinstance(a, Div) else 'mod'}({num}, {den})"


def size_name(symbol: Sym) -> str:
    return f"s_{plain_name(symbol.name)}"


__all__ = ["Emitter", "Limits", "size_name"]
