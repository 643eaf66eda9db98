"""Pointwise ATen operators as scalar expressions.

Type promotion is ATen's: the result dtype is the fake tensor's, arguments are cast to the common
dtype, half types compute in f32 and round once. One row per operator in the tables below; operators
that need more than a row are functions after them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND as KIND
from torch._prims_common import elementwise_dtypes
from torch.utils._python_dispatch import _disable_current_modes

from deuteron.ir import expr as E
from deuteron.ir.divisors import nonzero
from deuteron.ir.expr import Expr, cast, literal, op
from deuteron.ir.index import Index, const
from deuteron.ir.operations import FLOAT8, FLOATS, HALF, INTS, SCALAR_OPS
from deuteron.lower.core import TORCH_DTYPES, LowerContext, Value, lowering, make


def compute_dtype(dtype: str) -> str:
    """What ATen computes in for a result of `dtype`."""
    return "f32" if dtype in ("f16", "bf16", *FLOAT8) else dtype


def broadcast(value: Value, idx: Sequence[Index]) -> Expr:
    """The element of `value` at output position `idx`, broadcasting as ATen does (aligned at the
    right)."""
    tail = idx[len(idx) - value.rank :] if value.rank else ()
    return value.at(
        [const(0) if a.extent.value == 1 else i for a, i in zip(value.axes, tail, strict=True)]
    )


def scalar(x: Any, dtype: str) -> Expr:
    """A Python number, a size, or the one element of a tensor as a scalar of `dtype`."""
    if isinstance(x, Value):
        return cast(x.at(()), dtype)
    if isinstance(x, Index):
        return cast(E.index_value(x), dtype)
    return literal(x, dtype)


def operand(
    x: Any, idx: Sequence[Index], dtype: str, common: str | None = None, exactly: bool = False
) -> Expr:
    """An argument in `dtype`. In `common`, to which ATen promotes it, it is rounded first: a tensor
    of dimensions, and with `exactly` numbers and tensors without any, which ATen's arithmetic of
    half types takes as they are."""
    if common in HALF and (exactly or isinstance(x, Value) and x.rank):
        return cast(operand(x, idx, common), dtype)
    return cast(broadcast(x, idx), dtype) if isinstance(x, Value) else scalar(x, dtype)


def common_dtype(ctx: LowerContext, args: Sequence[Any]) -> str:
    """The dtype to which ATen promotes the arguments (not the result: comparisons give bool)."""
    assert ctx.node is not None
    raw = [a.meta["val"] if isinstance(a, torch.fx.Node) else a for a in ctx.node.args]
    raw = [
        a
        for a in raw
        if isinstance(a, (torch.Tensor, bool, int, float, torch.SymInt, torch.SymFloat))
    ]
    _, result = elementwise_dtypes(*raw[: len(args)], type_promotion_kind=KIND.DEFAULT)
    return TORCH_DTYPES[result]


def pointwise(
    ctx: LowerContext,
    args: Sequence[Any],
    f: Callable[..., Expr],
    dtype: str | None = None,
    exactly: str | None = None,
) -> Value:
    """``f`` over broadcast arguments cast to `dtype` (default: compute dtype of the result), cast
    to the result dtype. `exactly`: the dtype to which all are rounded first, numbers too, of what
    an error of its operands may turn into another value."""
    fake = ctx.fake()
    out = TORCH_DTYPES[fake.dtype]
    dtype = dtype or compute_dtype(out)
    common = exactly or out

    def element(idx: tuple[Index, ...]) -> Expr:
        return cast(f(*(operand(a, idx, dtype, common, exactly is not None) for a in args)), out)

    return make(ctx, ctx.shape_of(fake), element)


# aten name -> scalar op, result computed in the compute dtype of the result
SPECIAL_FUNCTIONS = {
    "special_i0e": "i0e",
    "special_i1": "i1",
    "special_i1e": "i1e",
    "special_ndtri": "ndtri",
    "i0": "i0",
}
UNARY_OPERATORS = sorted(
    {n for n, (arity, _) in SCALAR_OPS.items() if arity == 1}
    - {"logical_not", "isnan", "isinf", "signbit", "sign", "round"}  # of other dtypes
    - {*SPECIAL_FUNCTIONS.values()}  # of other names
)
BINARY_OPERATORS = [
    "maximum",
    "minimum",
    "fmax",
    "fmin",
    "atan2",
    "fmod",
    "remainder",
    "copysign",
    "nextafter",
    "hypot",
    "bitwise_and",
    "bitwise_or",
    "bitwise_xor",
]
BOOL_FORM = {
    "maximum": "logical_or",
    "minimum": "logical_and",
    "bitwise_and": "logical_and",
    "bitwise_or": "logical_or",
    "bitwise_xor": "logical_xor",
    "bitwise_not": "logical_not",
    "fmax": "logical_or",
    "fmin": "logical_and",
}
DISCONTINUOUS = ("fmod", "remainder")  # where their operands differ by little
INT_IDENTITY = ("floor", "ceil", "trunc", "round")


def _row(name: str) -> Callable[..., Value]:
    def lower(ctx: LowerContext, *args: Any, **kwargs: Any) -> Value:
        out = TORCH_DTYPES[ctx.fake().dtype]
        if out == "bool":
            if name not in BOOL_FORM:
                raise ctx.decline(f"{name} of bool is not generated")
            return pointwise(ctx, args, lambda *xs: op(BOOL_FORM[name], *xs))
        if name in INT_IDENTITY and out not in FLOATS:
            return pointwise(ctx, args, lambda x: x)
        if name == "abs" and out == "u8":
            return pointwise(ctx, args, lambda x: x)
        if name == "nextafter":  # of the last bit of the type itself
            return pointwise(ctx, args, lambda *xs: op(name, *xs), out, out)
        if name in DISCONTINUOUS:
            return pointwise(ctx, args, lambda x, y: quotient(ctx, name, x, y), exactly=out)
        return pointwise(ctx, args, lambda *xs: op(name, *xs))

    return lower


# Operators whose operands may be numbers, which promote more weakly than tensors do.
WITH_NUMBERS = frozenset(
    f"aten.{n}"
    for n in (
        *BINARY_OPERATORS,
        *("add", "sub", "rsub", "mul", "div", "floor_divide", "pow", "where", "ldexp", "lerp"),
        *("eq", "ne", "lt", "le", "gt", "ge", "clamp", "clamp_min", "clamp_max"),
        *("bitwise_left_shift", "bitwise_right_shift", "__lshift__", "__rshift__"),
        *("addcmul", "addcdiv", "bucketize", "searchsorted"),
    )
) | {"prims.fma"}


def quotient(ctx: LowerContext, name: str, x: Expr, y: Expr) -> Expr:
    """Eager's division of whole numbers on a CPU raises where the divisor is 0."""
    return op(name, x, y if ctx.on_gpu() else nonzero(y))


for _n in UNARY_OPERATORS + BINARY_OPERATORS:
    lowering(f"aten.{_n}")(_row(_n))
for _aten, _n in SPECIAL_FUNCTIONS.items():
    lowering(f"aten.{_aten}")(_row(_n))


@lowering("aten.round.default")
def round_(ctx: LowerContext, x: Value) -> Value:
    return _row("round")(ctx, x)


def _comparison(name: str) -> Callable[..., Value]:
    def lower(ctx: LowerContext, a: Any, b: Any) -> Value:
        dtype = common_dtype(ctx, (a, b))
        if dtype == "bool":
            table = {
                "eq": lambda x, y: op("logical_not", op("logical_xor", x, y)),
                "ne": lambda x, y: op("logical_xor", x, y),
                "lt": lambda x, y: op("logical_and", op("logical_not", x), y),
                "le": lambda x, y: op("logical_or", op("logical_not", x), y),
                "gt": lambda x, y: op("logical_and", x, op("logical_not", y)),
                "ge": lambda x, y: op("logical_or", x, op("logical_not", y)),
            }
            return pointwise(ctx, (a, b), table[name], "bool")
        return pointwise(ctx, (a, b), lambda x, y: op(name, x, y), compute_dtype(dtype), dtype)

    return lower


for _n in ("eq", "ne", "lt", "le", "gt", "ge"):
    lowering(f"aten.{_n}")(_comparison(_n))


def _truth(x: Expr) -> Expr:
    return x if x.dtype == "bool" else op("ne", x, literal(0, x.dtype))


def _logical(name: str) -> Callable[..., Value]:
    def lower(ctx: LowerContext, *args: Any) -> Value:
        def f(idx: Sequence[Index]) -> Expr:
            return op(
                name, *(_truth(cast(broadcast(a, idx), compute_dtype(a.dtype))) for a in args)
            )

        return make(ctx, ctx.shape_of(ctx.fake()), f)

    return lower


for _n in ("logical_and", "logical_or", "logical_xor", "logical_not"):
    lowering(f"aten.{_n}")(_logical(_n))


def _classify(name: str) -> Callable[..., Value]:
    def lower(ctx: LowerContext, x: Value) -> Value:
        if x.dtype not in FLOATS:
            if name == "signbit" and x.dtype in INTS and x.dtype != "u8":
                return pointwise(ctx, (x,), lambda v: op("lt", v, literal(0, v.dtype)), x.dtype)
            return make(ctx, x.shape, lambda idx: literal(False, "bool"))
        return pointwise(ctx, (x,), lambda v: op(name, v), compute_dtype(x.dtype))

    return lower


for _n in ("isnan", "isinf", "signbit"):
    lowering(f"aten.{_n}")(_classify(_n))


@lowering("aten.isposinf", "aten.isneginf")
def infinite(ctx: LowerContext, x: Value) -> Value:
    """Of the number itself: torch's rule converts halves to f32 first, after which a number that a
    half cannot hold is finite."""
    assert ctx.node is not None
    if x.dtype not in FLOATS:
        return make(ctx, x.shape, lambda idx: literal(False, "bool"))
    end = math.inf if "isposinf" in str(ctx.node.target) else -math.inf
    dtype = compute_dtype(x.dtype)
    return pointwise(ctx, (x,), lambda v: op("eq", v, literal(end, dtype)), dtype)


@lowering("aten.sign", "aten.sgn")
def sign(ctx: LowerContext, x: Value) -> Value:
    if x.dtype == "bool":
        return x
    return pointwise(ctx, (x,), lambda v: op("sign", v))


@lowering("aten.add")
def add(ctx: LowerContext, a: Any, b: Any, *, alpha: Any = 1) -> Value:
    def f(x: Expr, y: Expr) -> Expr:
        if x.dtype == "bool":
            return op("logical_or", x, y if alpha else literal(False, "bool"))
        return op("add", x, y if alpha == 1 else op("mul", y, scalar(alpha, y.dtype)))

    return pointwise(ctx, (a, b), f)


@lowering("aten.sub")
def sub(ctx: LowerContext, a: Any, b: Any, *, alpha: Any = 1) -> Value:
    return pointwise(
        ctx,
        (a, b),
        lambda x, y: op("sub", x, y if alpha == 1 else op("mul", y, scalar(alpha, y.dtype))),
    )


@lowering("aten.rsub")
def rsub(ctx: LowerContext, a: Any, b: Any, alpha: Any = 1) -> Value:
    return pointwise(
        ctx,
        (a, b),
        lambda x, y: op("sub", y, x if alpha == 1 else op("mul", x, scalar(alpha, x.dtype))),
    )


@lowering("aten.mul")
def mul(ctx: LowerContext, a: Any, b: Any) -> Value:
    return pointwise(
        ctx, (a, b), lambda x, y: op("logical_and" if x.dtype == "bool" else "mul", x, y)
    )


@lowering("aten.div")
def div(ctx: LowerContext, a: Any, b: Any, *, rounding_mode: str | None = None) -> Value:
    if rounding_mode is None:
        return pointwise(ctx, (a, b), lambda x, y: op("div", x, y))
    name = {"floor": "floordiv", "trunc": "truncdiv"}[rounding_mode]
    out = TORCH_DTYPES[ctx.fake().dtype]
    if not isinstance(a, Value) or not a.rank:  # which ATen rounds, but no second number
        number = operand(a, (), out)
        a = make(ctx, (), lambda idx: number)
    return pointwise(ctx, (a, b), lambda x, y: quotient(ctx, name, x, y))


@lowering("aten.floor_divide")
def floor_divide(ctx: LowerContext, a: Any, b: Any) -> Value:
    return div(ctx, a, b, rounding_mode="floor")


@lowering("aten.pow")
def pow_(ctx: LowerContext, a: Any, b: Any) -> Value:
    out = TORCH_DTYPES[ctx.fake().dtype]
    if out not in FLOATS:
        if isinstance(b, int) and 0 <= b <= 8:
            return pointwise(ctx, (a,), lambda x: _power(x, b))
        raise ctx.decline("integer power with a tensor exponent is not generated")
    if isinstance(b, (int, float)) and not isinstance(b, bool):
        # The exponents that ATen's own pow kernel special-cases; the same arithmetic gives the same
        # rounding.
        special: dict[float, Callable[[Expr], Expr]] = {
            0.5: lambda x: op("sqrt", x),
            -0.5: lambda x: op("rsqrt", x),
            1.0: lambda x: x,
            2.0: lambda x: op("mul", x, x),
            3.0: lambda x: op("mul", op("mul", x, x), x),
            -1.0: lambda x: op("reciprocal", x),
            -2.0: lambda x: op("reciprocal", op("mul", x, x)),
            0.0: lambda x: literal(1.0, x.dtype),
        }
        if out == "f16" and not ctx.on_gpu():  # whose roots ATen takes as any power
            del special[0.5], special[-0.5]
        if float(b) in special:
            return pointwise(ctx, (a,), special[float(b)])
    return pointwise(ctx, (a, b), lambda x, y: op("pow", x, y))


def _power(x: Expr, n: int) -> Expr:
    out = literal(1, x.dtype)
    for _ in range(n):
        out = op("mul", out, x)
    return out


@lowering("aten.where.self", "aten.where.ScalarOther", "aten.where.ScalarSelf", "aten.where.Scalar")
def where(ctx: LowerContext, cond: Value, a: Any, b: Any) -> Value:
    out = TORCH_DTYPES[ctx.fake().dtype]

    def f(idx: Sequence[Index]) -> Expr:
        return op("where", _truth(broadcast(cond, idx)), operand(a, idx, out), operand(b, idx, out))

    return make(ctx, ctx.shape_of(ctx.fake()), f)


@lowering("aten.clamp.default", "aten.clamp.Tensor")
def clamp(ctx: LowerContext, x: Value, low: Any = None, high: Any = None) -> Value:
    given = [b for b in (low, high) if b is not None]

    def f(v: Expr, *bounds: Expr) -> Expr:
        rest = list(bounds)
        if low is not None:
            v = op("maximum", v, rest.pop(0))
        if high is not None:
            v = op("minimum", v, rest.pop(0))
        return v

    return pointwise(ctx, (x, *given), f)


@lowering("aten.clamp_min", "aten.clamp_min.Tensor")
def clamp_min(ctx: LowerContext, x: Value, low: Any) -> Value:
    return pointwise(ctx, (x, low), lambda v, b: op("maximum", v, b))


@lowering("aten.clamp_max", "aten.clamp_max.Tensor")
def clamp_max(ctx: LowerContext, x: Value, high: Any) -> Value:
    return pointwise(ctx, (x, high), lambda v, b: op("minimum", v, b))


@lowering("aten.relu")
def relu(ctx: LowerContext, x: Value) -> Value:
    return pointwise(ctx, (x,), lambda v: op("maximum", v, literal(0, v.dtype)))


def _shift(name: str) -> Callable[..., Value]:
    def lower(ctx: LowerContext, a: Any, b: Any) -> Value:
        if TORCH_DTYPES[ctx.fake().dtype] in FLOATS:
            raise ctx.decline("shifts of floating-point numbers are not generated")
        return pointwise(ctx, (a, b), lambda x, y: op(name, x, y))

    return lower


lowering("aten.bitwise_left_shift", "aten.__lshift__")(_shift("lshift"))
lowering("aten.bitwise_right_shift", "aten.__rshift__")(_shift("rshift"))


@lowering("aten.ldexp")
def ldexp(ctx: LowerContext, a: Any, b: Any) -> Value:
    return pointwise(ctx, (a, b), lambda x, y: op("mul", x, op("exp2", y)))


@lowering("prims.convert_element_type", "aten._to_copy", "aten.to.dtype")
def convert(ctx: LowerContext, x: Value, dtype: Any = None, **kwargs: Any) -> Value:
    fake = ctx.fake()
    assert ctx.node is not None
    source = ctx.node.args[0]
    if isinstance(source, torch.fx.Node) and source.meta["val"].device != fake.device:
        raise ctx.decline("copies between devices")
    out = TORCH_DTYPES[fake.dtype]
    if out == "bool":
        return make(ctx, x.shape, lambda idx: _truth(x.at(idx)))
    return make(ctx, x.shape, lambda idx: converted(x.at(idx), out))


def converted(x: Expr, dtype: str) -> Expr:
    """A copy in another dtype. What is too large for an 8-bit float without infinity is NaN in
    older versions of torch (which one this is, it is asked)."""
    if dtype in FLOAT8 and x.dtype not in FLOAT8:
        x = cast(x, "f32")
    if dtype == "f8e4m3" and not saturates():
        x = op(
            "where",
            op("gt", op("abs", x), literal(464.0, "f32")),
            literal(math.nan, "f32"),
            x,
        )
    return cast(x, dtype)


@lru_cache(maxsize=1)
def saturates() -> bool:
    with _disable_current_modes():  # of fake tensors
        return not bool(torch.full((1,), 1e4).to(torch.float8_e4m3fn).float().isnan())


@lowering("aten.addcmul")
def addcmul(ctx: LowerContext, x: Value, a: Value, b: Value, *, value: Any = 1) -> Value:
    def f(x: Expr, a: Expr, b: Expr) -> Expr:
        scaled = a if value == 1 else op("mul", scalar(value, a.dtype), a)
        return op("add", x, op("mul", scaled, b))

    return pointwise(ctx, (x, a, b), f)


@lowering("prims.fma")
def fma(ctx: LowerContext, a: Value, b: Value, c: Value) -> Value:
    return pointwise(ctx, (a, b, c), lambda *xs: op("fma", *xs))


@lowering("aten.addcdiv")
def addcdiv(ctx: LowerContext, x: Value, a: Value, b: Value, *, value: Any = 1) -> Value:
    def f(x: Expr, a: Expr, b: Expr) -> Expr:
        scaled = a if value == 1 else op("mul", scalar(value, a.dtype), a)
        return op("add", x, op("div", scaled, b))

    return pointwise(ctx, (x, a, b), f)


@lowering("aten.lerp.Scalar", "aten.lerp.Tensor")
def lerp(ctx: LowerContext, a: Value, b: Value, weight: Any) -> Value:
    def f(x: Expr, y: Expr, w: Expr) -> Expr:
        small = op("lt", op("abs", w), literal(0.5, w.dtype))
        d = op("sub", y, x)
        other = op("sub", y, op("mul", d, op("sub", literal(1.0, w.dtype), w)))
        return op("where", small, op("add", x, op("mul", w, d)), other)

    return pointwise(ctx, (a, b, weight), f)


@lowering("aten.gelu")
def gelu(ctx: LowerContext, x: Value, *, approximate: str = "none") -> Value:
    def f(v: Expr) -> Expr:
        one, half = literal(1.0, v.dtype), literal(0.5, v.dtype)
        if approximate == "tanh":
            beta = literal(math.sqrt(2.0 / math.pi), v.dtype)
            cube = op("mul", op("mul", v, v), v)
            inner = op("mul", beta, op("add", v, op("mul", literal(0.044715, v.dtype), cube)))
            return op("mul", op("mul", half, v), op("add", one, op("tanh", inner)))
        return op(
            "mul",
            op("mul", v, half),
            op("add", one, op("erf", op("mul", v, literal(math.sqrt(0.5), v.dtype)))),
        )

    return pointwise(ctx, (x,), f)


@lowering("aten.silu")
def silu(ctx: LowerContext, x: Value) -> Value:
    return pointwise(
        ctx, (x,), lambda v: op("div", v, op("add", literal(1.0, v.dtype), op("exp", op("neg", v))))
    )


@lowering("aten.square")
def square(ctx: LowerContext, x: Value) -> Value:
    return pointwise(ctx, (x,), lambda v: op("mul", v, v))
