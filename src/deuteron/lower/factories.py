"""Tensors from numbers, positions and random streams.

In: sizes and numbers. Out: `Value`s without memory of their own: a constant, an index, or a random
number as a function of a seed, a stream and the element's row-major position.
"""

from __future__ import annotations

from typing import Any

from deuteron.graph.random_ops import MAX_PLAIN_MODULUS
from deuteron.ir import expr as E
from deuteron.ir.expr import Expr, cast, index_value, literal, op
from deuteron.ir.index import Index, fits
from deuteron.ir.operations import FLOATS
from deuteron.lower.access import flatten
from deuteron.lower.core import TORCH_DTYPES, LowerContext, Value, is_dense, lowering, make
from deuteron.lower.pointwise import scalar


def result(ctx: LowerContext) -> tuple[tuple[Index, ...], str]:
    """Shape and dtype of the node's fake result."""
    fake = ctx.fake()
    return ctx.shape_of(fake), TORCH_DTYPES[fake.dtype]


def constant(ctx: LowerContext, number: Any) -> Value:
    shape, dtype = result(ctx)
    if not isinstance(number, (bool, int, float, Index, Value)):
        raise ctx.decline("a tensor is filled with a number that is known at run time only")
    return make(ctx, shape, lambda idx: scalar(number, dtype))


@lowering("aten.full.default", "aten.full_like", "aten.new_full")
def full(ctx: LowerContext, shape: Any, number: Any, *args: Any, **kwargs: Any) -> Value:
    return constant(ctx, number if len(args) == 0 else args[0])


@lowering("aten.scalar_tensor", "prims.scalar_tensor")
def scalar_tensor(ctx: LowerContext, number: Any, **kwargs: Any) -> Value:
    return constant(ctx, number)


@lowering(
    "aten.zeros.default",
    "aten.zeros_like",
    "aten.new_zeros",
    # Nobody may rely on what is in an empty tensor; zeros cost nothing, for nothing stores them.
    "aten.empty.memory_format",
    "aten.empty_like",
    "aten.empty_strided",
    "aten.empty_permuted",
    "aten.new_empty",
    "aten.new_empty_strided",
)
def zeros(ctx: LowerContext, *args: Any, **kwargs: Any) -> Value:
    fake = ctx.fake()
    if not is_dense(ctx.shape_of(fake), ctx.strides_of(fake)):
        raise ctx.decline("memory with holes or overlaps is asked for")
    return constant(ctx, 0)


@lowering("aten.ones.default", "aten.ones_like", "aten.new_ones")
def ones(ctx: LowerContext, *args: Any, **kwargs: Any) -> Value:
    return constant(ctx, 1)


def progression(ctx: LowerContext, start: Any, step: Any) -> Value:
    """``start + i * step``: integers exactly, floats in the type that ATen's kernels count in."""
    shape, dtype = result(ctx)
    for x in (start, step):
        if not isinstance(x, (int, float, Index)) and (
            not isinstance(x, Value) or dtype not in FLOATS
        ):
            raise ctx.decline("a range with a bound that is known at run time only")
    if dtype not in FLOATS:
        start, step = (int(x) if isinstance(x, float) else x for x in (start, step))
    if not isinstance(start, (float, Value)) and not isinstance(step, (float, Value)):
        first, by = ctx.size(start), ctx.size(step)

        def number(idx: tuple[Index, ...]) -> Expr:
            place = idx[0] * by + first
            if by.value is None or first.value is None or fits(place):
                return cast(index_value(place), dtype)
            steps = op("mul", index_value(idx[0]), index_value(by))
            return cast(op("add", steps, index_value(first)), dtype)

        return make(ctx, shape, number)
    wide = "f64" if dtype == "f64" or ctx.fake().device.type == "cpu" else "f32"

    def element(idx: tuple[Index, ...]) -> Expr:
        steps = op("mul", scalar(step, wide), cast(index_value(idx[0]), wide))
        return cast(op("add", scalar(start, wide), steps), dtype)

    return make(ctx, shape, element)


@lowering("aten.arange.default", "aten.arange.start", "aten.arange.start_step")
def arange(ctx: LowerContext, *bounds: Any, **kwargs: Any) -> Value:
    start = bounds[0] if len(bounds) > 1 else 0
    return progression(ctx, start, bounds[2] if len(bounds) > 2 else 1)


@lowering("prims.iota")
def iota(ctx: LowerContext, length: Any, *, start: Any, step: Any, **kwargs: Any) -> Value:
    return progression(ctx, start, step)


# -- random numbers --------------------------------------------------------------------------------
def drawn(ctx: LowerContext, dist: str, seed: Value, stream: int, dtype: str | None) -> Value:
    shape, own = result(ctx)
    return make(
        ctx,
        shape,
        lambda idx: E.random(dist, seed.at(()), stream, flatten(idx, shape), dtype or own),
    )


@lowering("deuteron.rand")
def rand(ctx: LowerContext, seed: Value, stream: int, *args: Any, **kwargs: Any) -> Value:
    return drawn(ctx, "rand", seed, stream, None)


@lowering("deuteron.randn")
def randn(ctx: LowerContext, seed: Value, stream: int, *args: Any, **kwargs: Any) -> Value:
    return drawn(ctx, "randn", seed, stream, None)


@lowering("deuteron.randint64")
def randint64(ctx: LowerContext, seed: Value, stream: int, low: Any, high: Any, size: Any) -> Value:
    bits = drawn(ctx, "rand_bits", seed, stream, "i64")
    first, count = ctx.size(low), ctx.size(high) - ctx.size(low)

    def element(idx: tuple[Index, ...]) -> Expr:
        n = count.value
        place = few(bits.at(idx), index_value(count)) if n is None else below(bits.at(idx), n)
        return op("add", index_value(first), place)

    return make(ctx, bits.shape, element)


def few(bits: Expr, count: Expr) -> Expr:
    """63 bits modulo a number that is far below 2^63."""
    return op("remainder", op("bitwise_and", bits, literal(2**63 - 1, "i64")), count)


def below(bits: Expr, n: int) -> Expr:
    """`random_ops.below`: 64 bits, taken without a sign, modulo n < 2^64."""

    def number(x: int) -> Expr:
        return literal(x, "i64")

    def reduced(x: Expr) -> Expr:
        """x - n where x is not below n, as numbers without a sign."""
        lowest = number(-(2**63))
        over = op("ge", op("bitwise_xor", x, lowest), number(n ^ 2**63))
        return op("where", over, op("sub", x, number(n)), x)

    if n <= MAX_PLAIN_MODULUS:
        return few(bits, number(n))
    if n & (n - 1) == 0:
        return op("bitwise_and", bits, number(n - 1))
    if n > 2**63:
        return reduced(bits)
    half = op("bitwise_and", op("rshift", bits, number(1)), number(2**63 - 1))
    rest = op("remainder", half, number(n))
    last = op("bitwise_and", bits, number(1))
    return reduced(op("add", op("add", rest, rest), last))
