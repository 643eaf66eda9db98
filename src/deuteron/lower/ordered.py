"""Sums at places that tensors hold, in a fixed order: every row adds what comes to it.

In: a scatter that adds, as points, their places and what they add. Out: the same sum as reductions.
The places are sorted (stably, by the library) with the points' numbers, or, where there are few,
each counts who goes before it; the points of a row of the result are then neighbours, from
``first[row]`` to before ``first[row + 1]``, and the row is a reduction over them that ends where it
ends (`ir.dynamic_bounds`). Nothing is added atomically, so that results repeat bit for bit; the
result is written once, in its own dtype, and there is no other memory of its size.

Long runs (padding, a frequent word) are cut: a whole split of the sorted points that has but one
place is summed by itself, beside the others, and a row adds the points before its first whole
split and behind its last one, then the sums of those between.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from deuteron.ir import expr as E
from deuteron.ir.expr import Expr, cast, index_value, literal, op
from deuteron.ir.index import (
    Atom,
    Axis,
    Index,
    const,
    floordiv,
    hint,
    maximum,
    minimum,
    product,
)
from deuteron.ir.program import Compute, Extern, Layout, ViewArg, contiguous, contiguous_strides
from deuteron.lower.access import compare, flatten, masked, unflatten
from deuteron.lower.additions import Rows, bits_of, block_of, is_ranked, is_sparse, packed_dtype
from deuteron.lower.core import LowerContext, make
from deuteron.lower.core import Value as Tensor

# Sorted points that are summed by themselves where they have one place.
SPLIT_POINTS = 128
# Bits of an answer in a list of unknown length: 2**35 positions fill no GPU's memory. Bits that are
# found at once, since one look takes as long as several.
ANSWER_BITS, DIGIT_BITS = 35, 2


class Ordered:
    """One ordered sum: the definitions that compute it, in order."""

    def __init__(
        self,
        ctx: LowerContext,
        x: Tensor,
        rows: Rows,
        place: Sequence[Index],
        body: Expr,
        mask: Expr | None,
    ) -> None:
        self.ctx, self.rows, self.place, self.mask = ctx, rows, place, mask
        self.wish = ctx.node.name if ctx.node is not None else "t"
        self.x = Tensor(x.axes, ctx.own_reductions(x, self.wish))
        axes = (*rows.points, *rows.along)
        self.body = ctx.own_reductions(Tensor(axes, body), self.wish)
        self.count = product(a.extent for a in rows.points)  # of points
        self.bits = 0  # of a point's number below its row, where both are one number
        self.shape = [x.shape[d] for d in rows.rows]
        self.size = product(self.shape)  # rows of the result
        self.widths = [x.shape[d] for d in rows.columns]

    def sum(self) -> Tensor:
        """x plus what comes to each of its elements."""
        if self.few():
            self.bits = bits_of(self.count.value or 1)
            keys = self.order = self.rank()
        else:
            keys, self.order = self.sort()
        if self.sparse():
            ends = self.ends(keys)
            return self.spread(keys, ends, self.split_sums(keys) if self.many() else None)
        first = self.first(keys)
        return self.total(first, self.split_sums(keys) if self.many() else None)

    def sparse(self) -> bool:
        """Whether most rows have no points. Rows that lie side by side are written at once."""
        beside = bool(self.rows.columns) and self.x.rank - 1 in self.rows.rows
        return not beside and is_sparse(hint(self.count), hint(self.size))

    def few(self) -> bool:
        """Whether to count is faster than the library's sort."""
        count, size = self.count.value, self.size.value
        return count is not None and size is not None and is_ranked(count, size)

    def many(self) -> bool:
        """Whether there may be runs longer than a split."""
        return self.count.value is None or self.count.value >= 2 * SPLIT_POINTS

    def key(self) -> Expr:
        """The row of a point (i64)."""
        at = [E.checked(index_value(self.place[d]), self.x.shape[d]) for d in self.rows.rows]
        key = at[0]
        for d, p in zip(self.rows.rows[1:], at[1:], strict=True):
            key = op("add", op("mul", key, index_value(self.x.shape[d])), p)
        if self.mask is not None:  # where it does not hold nothing is added, wherever
            key = op("where", self.mask, E.with_mask(key, self.mask), literal(0, "i64"))
        return key

    def places(self, of: Callable[[Expr, Index], Expr]) -> Tensor:
        """What `of` makes of each point's row and number."""
        (axis,) = self.ctx.axes([self.count])
        numbers = unflatten(axis.index, [a.extent for a in self.rows.points])
        table: dict[Atom, Index] = dict(zip(self.rows.points, numbers, strict=True))
        value = of(self.key().substitute(table), axis.index)
        return self.ctx.define(Tensor((axis,), value), wish=f"{self.wish}_places")

    def rank(self) -> Tensor:
        """As `sort`, in one list: rows and numbers are one whole number, so that no two are the
        same. Each counts who goes before it: of all, or of its block and then of the others, which
        are in order by then."""
        count, n = self.count, self.count.value or 0
        dtype = packed_dtype(n, self.size.value or 0)
        assert dtype is not None

        def packed_key(row: Expr, number: Index) -> Expr:
            high = op("lshift", cast(row, dtype), literal(self.bits, dtype))
            return op("bitwise_or", high, cast(index_value(number), dtype))

        keys, block = self.places(packed_key), block_of(n, dtype)
        (axis,) = self.ctx.axes([count])
        if block:
            blocks = self.ranked_blocks(keys, block, -(-n // block))
            key = blocks.at([axis.index])
            return self.stored(axis, self.count_preceding(blocks, block).at([axis.index]), key)

        def preceding(idx: tuple[Index, ...]) -> Expr:
            (other,) = self.ctx.axes([count])
            return E.reduce("sum", (other,), behind(keys.at([other.index]), keys.at(idx)))

        rank = self.ctx.define(make(self.ctx, [count], preceding), wish=f"{self.wish}_rank")
        return self.stored(axis, rank.at([axis.index]), keys.at([axis.index]))

    def stored(self, axis: Axis, rank: Expr, key: Expr) -> Tensor:
        """Each key at its rank: no two have one."""
        return self.ctx.permuted((axis,), (clamped(cast(rank, "i64"), self.count),), key)

    def ranked_blocks(self, keys: Tensor, block: int, blocks: int) -> Tensor:
        """The keys with those of each block in order; behind the last are others, which go before
        none."""
        ctx, n, dtype = self.ctx, self.count, keys.dtype
        last = literal(2 ** (31 if dtype == "i32" else 63) - 1, dtype)

        def padded(at: Index) -> Expr:
            return masked(compare("lt", at, n), keys.at([at]), last)

        def preceding(idx: tuple[Index, ...]) -> Expr:
            (other,) = ctx.axes([const(block)])
            low = idx[0] * block
            own = padded(low + idx[1])
            return E.reduce("sum", (other,), behind(padded(low + other.index), own))

        sizes = [const(blocks), const(block)]
        rank = ctx.define(make(ctx, sizes, preceding), wish=f"{self.wish}_rank")
        a, b = ctx.axes(sizes)
        place = a.index * block + b.index
        key = padded(place)
        at = a.index * block + clamped(cast(rank.at([a.index, b.index]), "i64"), const(block))
        if n.value == block * blocks:
            return ctx.permuted((a, b), (at,), key)
        filled = make(ctx, [const(block * blocks)], lambda idx: padded(idx[0]))
        return ctx.scatter(filled, (a, b), (at,), key, None, compare("lt", place, n), unique=True)

    def count_preceding(self, keys: Tensor, block: int) -> Tensor:
        """How many go before each key: in every block a binary search without branches."""
        blocks = floordiv(keys.shape[0], const(block))

        def search(low: Index, key: Expr) -> Expr:
            preceding = literal(0, "i32")
            for k in reversed(range(block.bit_length())):
                step = 1 << k >> 1  # the last one looks at the key at the answer itself
                ahead = max(step - 1, 0)
                at = const(ahead)
                if preceding.op != "literal":
                    at = clamped(op("add", preceding, literal(ahead, "i32")), const(block))
                below = less(keys.at([low + at]), key)
                below = op("mul", below, literal(step, "i32")) if step > 1 else below
                preceding = below if preceding.op == "literal" else op("add", preceding, below)
            return preceding

        def rank(idx: tuple[Index, ...]) -> Expr:
            (other,) = self.ctx.axes([blocks])
            return E.reduce("sum", (other,), search(other.index * block, keys.at(idx)))

        made = make(self.ctx, [self.count], rank)
        return self.ctx.define(made, wish=f"{self.wish}_rank")

    def sort(self) -> tuple[Tensor, Tensor]:
        """The places in order, and the numbers of their points."""
        ctx = self.ctx
        keys = self.places(lambda key, number: self.narrow(key))
        (name,) = [n.attr[0] for n in keys.expr.loads()]
        shape = (self.count,)
        names = ctx.fresh_name(f"{self.wish}_sorted"), ctx.fresh_name(f"{self.wish}_order")
        reason = "an order is computed, which library code does best"
        ctx.add(
            Extern(
                names,
                "aten.sort.stable",
                (ViewArg(name, shape, contiguous_strides(shape), const(0)),),
                (("stable", True), ("dim", 0), ("descending", False)),
                (contiguous(shape, keys.dtype, ctx.device), contiguous(shape, "i64", ctx.device)),
                aliases=(None, None),
                origins=ctx.origins(),
                reason=reason,
            )
        )
        return ctx.load(names[0]), ctx.load(names[1])

    def narrow(self, key: Expr) -> Expr:
        """In as few bits as hold every row: the library sorts eight of them at a time."""
        size = self.size.value
        if size is None or size > 2**31:
            return key
        if size > 2**16:
            return cast(key, "i32")
        return cast(op("sub", key, literal(2**15, "i64")), "i16")

    def row(self, key: Expr) -> Expr:
        """The row that a sorted place is (i64)."""
        if self.bits:
            return cast(op("rshift", key, literal(self.bits, key.dtype)), "i64")
        wide = cast(key, "i64")
        return op("add", wide, literal(2**15, "i64")) if key.dtype == "i16" else wide

    def first(self, keys: Tensor) -> Tensor:
        """For each row, and the one behind the last, the first of the sorted points that is not
        before it, and, from bit 32 on, which point that is: who adds up a row of one point finds it
        with one look less. H200, gradient of an embedding of 50257 x 768 (bf16), 32768 positions,
        its sums, us: 39.0 and 37.8."""

        def element(idx: tuple[Index, ...]) -> Expr:
            position = self.search(keys, index_value(idx[0]))
            if not self.beside():
                return position
            position = cast(position, "i64")
            head = op("lshift", cast(self.number(position), "i64"), literal(32, "i64"))
            return op("bitwise_or", head, position)

        made = make(self.ctx, [self.size + 1], element)
        return self.ctx.define(made, wish=f"{self.wish}_first")

    def beside(self) -> bool:
        """Whether `first` has points' numbers: there are some, and 32 bits are enough."""
        return bool(self.count.value) and fits(self.count)

    def ends(self, keys: Tensor) -> Tensor:
        """For each sorted point the first one behind those of its row."""

        def element(idx: tuple[Index, ...]) -> Expr:
            row = self.row(keys.at(idx))
            return self.search(keys, op("add", row, literal(1, "i64")))

        return self.ctx.define(make(self.ctx, [self.count], element), wish=f"{self.wish}_ends")

    def search(self, keys: Tensor, row: Expr) -> Expr:
        """The first of the sorted points that is not before a row: a search without branches, from
        the answer's highest digit down. All values that a digit may have are tried together: it is
        the last one of which the point before is before the row."""
        n, answer = self.count, literal(0, "i64")

        def below(tried: Expr) -> Expr:
            legal = op("le", tried, index_value(n))
            at = clamped(op("sub", tried, literal(1, "i64")), n)
            return op("logical_and", legal, op("lt", self.row(masked(legal, keys.at([at]))), row))

        bits = ANSWER_BITS if n.value is None else n.value.bit_length()
        for low in reversed(range(0, bits, DIGIT_BITS)):
            start = answer
            for digit in range(1, 1 << min(DIGIT_BITS, bits - low)):
                tried = op("add", start, literal(digit << low, "i64"))
                answer = op("where", below(tried), tried, answer)
        return cast(answer, "i32") if fits(n) else answer

    def number(self, q: Expr) -> Expr:
        """Which point the q-th of the sorted ones is."""
        entry = self.order.at([clamped(q, self.count)])
        if not self.bits:
            return entry
        number = literal((1 << self.bits) - 1, entry.dtype)
        return cast(op("bitwise_and", entry, number), "i64")

    def term(self, point: Expr, columns: Sequence[Index], here: Expr | None = None) -> Expr:
        """What a point adds to the columns of its row; one that is not `here` is not read."""
        at = unflatten(clamped(point, self.count), [a.extent for a in self.rows.points])
        table: dict[Atom, Index] = dict(zip(self.rows.points, at, strict=True))
        table |= dict(zip(self.rows.along, columns, strict=True))
        body = self.body if here is None else E.with_mask(self.body, here)
        body = body.substitute(table)
        if self.mask is None:
            return body
        mask = self.mask.substitute(table)
        return op("where", mask, E.with_mask(body, mask, unused=True), literal(0, body.dtype))

    def reduce(self, extent: Index, end: Expr, term: Callable[[Axis], Expr]) -> Expr:
        """The sum of the terms before `end`."""
        (k,) = self.ctx.axes([extent])
        value = term(k)
        here = op("lt", index_value(k.index), end)
        return E.reduce("sum", (k,), op("where", here, value, literal(0, value.dtype)))

    def split_sums(self, keys: Tensor) -> Tensor:
        """The sum of each whole split whose points have one place; others are not used."""
        count = floordiv(self.count, const(SPLIT_POINTS))

        def element(idx: tuple[Index, ...]) -> Expr:
            low = idx[0] * SPLIT_POINTS
            alike = op("eq", *(self.row(keys.at([q])) for q in (low, low + SPLIT_POINTS - 1)))
            end = op("where", alike, literal(SPLIT_POINTS, "i64"), literal(0, "i64"))

            def term(k: Axis) -> Expr:
                return self.term(self.number(index_value(low + k.index)), idx[1:])

            # What is added keeps the reduction inside the expression.
            total = self.reduce(const(SPLIT_POINTS), end, term)
            return op("add", literal(0, total.dtype), total)

        return self.define(make(self.ctx, [count, *self.widths], element), f"{self.wish}_splits")

    def run(
        self,
        low: Expr,
        high: Expr,
        columns: Sequence[Index],
        parts: Tensor | None,
        head: Expr | None = None,
    ) -> Expr:
        """The sum of the sorted points from `low` to before `high`, which have one row. `head`: the
        first of them, where it is known."""
        here, zero = op("sub", high, low), literal(0, "i64")
        alone, whole = here, zero
        if parts is not None:  # whole splits from `begin` on, `whole` of them
            shift, split_length = (
                literal(SPLIT_POINTS.bit_length() - 1, "i64"),
                literal(SPLIT_POINTS, "i64"),
            )
            begin = op("rshift", op("add", low, literal(SPLIT_POINTS - 1, "i64")), shift)
            whole = op("maximum", op("sub", op("rshift", high, shift), begin), zero)
            inner = op("mul", whole, split_length)
            ahead = op("sub", op("mul", begin, split_length), low)
            alone = op("sub", here, inner)
        taken = None
        if head is not None:  # where there are no splits, so that it is the first of those alone
            there = op("lt", zero, here)
            if parts is not None:
                there = op("logical_and", there, op("eq", whole, zero))
            taken = cast(there, "i64")
            alone = op("sub", alone, taken)

        def single(k: Axis) -> Expr:
            number = index_value(k.index)
            if taken is not None:
                number = op("add", number, taken)
            at = op("add", low, number)
            if parts is not None:
                at = op("add", at, op("where", op("lt", number, ahead), zero, inner))
            return self.term(self.number(at), columns)

        total = self.reduce(self.count, alone, single)
        if head is not None:
            value = self.term(head, columns, there)
            total = op("add", op("where", there, value, literal(0, value.dtype)), total)
        if parts is None:
            return total

        def split_sum(k: Axis) -> Expr:
            at = clamped(op("add", begin, index_value(k.index)), parts.shape[0])
            return parts.at([at, *columns])

        return op("add", total, self.reduce(parts.shape[0], whole, split_sum))

    def total(self, first: Tensor, parts: Tensor | None) -> Tensor:
        """x plus the points of each row."""
        x, wide = self.x, self.body.dtype

        def element(idx: tuple[Index, ...]) -> Expr:
            row = flatten([idx[d] for d in self.rows.rows], self.shape)
            columns = [idx[d] for d in self.rows.columns]
            low, high = (cast(first.at([r]), "i64") for r in (row, row + 1))
            head = None
            if self.beside():
                head = op("rshift", low, literal(32, "i64"))
                low, high = (op("bitwise_and", v, literal(2**32 - 1, "i64")) for v in (low, high))
            terms = self.run(low, high, columns, parts, head)
            return cast(op("add", cast(x.at(idx), wide), terms), x.dtype)

        made = make(self.ctx, x.shape, element)
        return self.define(made, self.wish, self.ctx.dense_layout(self.ctx.fake()))

    def spread(self, keys: Tensor, ends: Tensor, parts: Tensor | None) -> Tensor:
        """The same where most rows have none: x, and over it the rows that have, each stored by the
        first of its points."""
        x, wide = self.x, self.body.dtype

        def is_first(point: Index) -> Expr:
            previous = keys.at([maximum(point - 1, const(0))])
            other = op("ne", self.row(previous), self.row(keys.at([point])))
            return op("logical_or", op("eq", index_value(point), literal(0, "i64")), other)

        def index_of(point: Index, columns: Sequence[Index]) -> list[Index]:
            row = unflatten(clamped(self.row(keys.at([point])), self.size), self.shape)
            coordinates = dict(zip(self.rows.rows, row, strict=True))
            coordinates |= dict(zip(self.rows.columns, columns, strict=True))
            return [coordinates[d] for d in range(x.rank)]

        def element(idx: tuple[Index, ...]) -> Expr:
            point, *columns = idx
            low = index_value(point)
            high = op("where", is_first(point), cast(ends.at([point]), "i64"), low)
            terms = self.run(low, high, columns, parts)
            return cast(op("add", cast(x.at(index_of(point, columns)), wide), terms), x.dtype)

        sums = self.define(make(self.ctx, [self.count, *self.widths], element), f"{self.wish}_sums")
        axes = self.ctx.axes(sums.shape)
        point, *columns = (a.index for a in axes)
        at, body = index_of(point, columns), sums.at([point, *columns])
        return self.ctx.scatter(x, axes, tuple(at), body, None, is_first(point), unique=True)

    def define(self, value: Tensor, wish: str, layout: Layout | None = None) -> Tensor:
        """A tensor whose reductions stay inside its expression: each runs beside what needs it."""
        ctx, name = self.ctx, self.ctx.fresh_name(wish)
        if layout is None or layout.shape != value.shape:
            layout = contiguous(value.shape, value.dtype, ctx.device)
        layout = replace(layout, dtype=value.dtype, device=ctx.device)
        ctx.add(Compute(name, value.axes, value.expr, layout, origins=ctx.origins()))
        return ctx.load(name)


def fits(count: Index) -> bool:
    """Whether numbers up to `count` have at most 32 bits."""
    return count.value is not None and count.value < 2**31


def clamped(position: Expr, extent: Index) -> Index:
    """A position that is within its extent, in a form that shows it."""
    index = E.as_position(position)
    return minimum(maximum(index, const(0)), extent - 1)


def less(a: Expr, b: Expr) -> Expr:
    """1 where a < b, else 0 (i32)."""
    return cast(op("lt", a, b), "i32")


def behind(a: Expr, b: Expr) -> Expr:
    """The same of numbers that are not negative, to be added up: the sign of their difference,
    which takes two instructions of different units, where a comparison takes three. H200, us: ranks
    of 32768 places in blocks of 1024 5.7 and 5.3."""
    if a.dtype != "i32":
        return less(a, b)
    return op("neg", op("rshift", op("sub", a, b), literal(31, "i32")))


__all__ = ["Ordered"]
