"""What expressions are made of: dtypes, scalar operations and their costs, kinds of reductions."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

FLOAT8 = ("f8e4m3", "f8e5m2")  # torch's float8_e4m3fn and float8_e5m2: no arithmetic, only casts
DTYPES = ("bool", "u8", "i8", "i16", "i32", "i64", "f16", "bf16", "f32", "f64", *FLOAT8)
ITEMSIZE = dict(zip(DTYPES, (1, 1, 1, 2, 4, 8, 2, 2, 4, 8, 1, 1)))
# Tensors of these are only moved and handed to library calls.
ITEMSIZE.update(
    dict(complex32=4, complex64=8, complex128=16, uint16=2, uint32=4, uint64=8, quantized=1)
    | {f"float8_{k}": 1 for k in ("e4m3fnuz", "e5m2fnuz", "e8m0fnu")}
)
HALF = ("f16", "bf16")
FLOATS = ("f16", "bf16", "f32", "f64")
INTS = ("u8", "i8", "i16", "i32", "i64")


# Scalar operations: number of arguments, approximate cost in vector FLOPs (cost model only), names.
# An instruction is two: on sm_90 erf and tanh are 14 instructions, as kernels of half types have
# them, libdevice's erf 28, acos 16, pow 117; sine and cosine 83, half of them for large arguments.
_OPS: tuple[tuple[int, float, str], ...] = (
    (
        1,
        1.0,
        "neg abs sign floor ceil trunc round reciprocal logical_not bitwise_not isnan isinf "
        "signbit",
    ),
    (1, 4.0, "sqrt rsqrt"),
    (1, 12.0, "exp exp2 expm1 log log2 log10 log1p sigmoid"),
    (1, 28.0, "asin acos atan sinh cosh tanh asinh acosh atanh erf erfc"),
    (1, 40.0, "erfinv lgamma digamma i0 i0e i1 i1e ndtri"),
    (
        2,
        1.0,
        "add sub mul maximum minimum fmax fmin lt le gt ge eq ne logical_and logical_or "
        "logical_xor",
    ),
    (2, 1.0, "bitwise_and bitwise_or bitwise_xor lshift rshift copysign"),
    (2, 4.0, "div floordiv truncdiv fmod remainder"),
    (2, 30.0, "atan2 nextafter hypot ldexp"),
    (1, 80.0, "sin cos tan"),
    (2, 230.0, "pow"),
    (3, 1.0, "where fma"),
)


SCALAR_OPS = {name: (arity, cost) for arity, cost, names in _OPS for name in names.split()}
# What the exact functions of f32 take, and others than these above, as vector FLOPs that the device
# could do meanwhile. H200, three to eight one after the other at each of 8 million points; a core
# of a Xeon with AVX-512 takes 0.7 to 2.8 times as much.
_EXACT: tuple[tuple[float, str], ...] = (
    (2.0, "load"),
    (1.0, "cast"),
    (16.0, "rsqrt"),
    (25.0, "exp exp2"),
    (35.0, "sqrt div reciprocal"),
    (50.0, "tanh asin acos atan sinh cosh asinh acosh atanh"),
    (62.0, "log log2 log10 log1p expm1 sigmoid"),
    (75.0, "erf erfc fmod remainder"),
    (140.0, "atan2"),
)
EXACT_OPS = {name: cost for cost, names in _EXACT for name in names.split()}


# Those that are functions of a library, or some twenty instructions.
DEAR_OPS = frozenset(n for n, (_, cost) in SCALAR_OPS.items() if cost >= 12)
# Operations that integers do not have.
FLOATS_ONLY = frozenset(
    {n for n, (arity, cost) in SCALAR_OPS.items() if arity == 1 and cost > 1}
    | {"reciprocal", "div", "copysign", "atan2", "nextafter", "hypot"}
)


NO_OP = (0, 0.0)


COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
    "eq": operator.eq,
    "ne": operator.ne,
}


COMPARISONS = frozenset(
    ("lt", "le", "gt", "ge", "eq", "ne", "isnan", "isinf", "signbit")
    + ("logical_and", "logical_or", "logical_xor", "logical_not")
)


@dataclass(frozen=True)
class Reduction:
    """A reduction: its neutral element, and the scalar operation that combines two partial
    results."""

    identity: Callable[[str], Any]
    scalar_op: str | None  # None: a rule of its own


def _lowest(dtype: str) -> Any:
    if dtype in FLOATS:
        return -math.inf
    return {"bool": False, "u8": 0}.get(dtype, -(2 ** (8 * ITEMSIZE[dtype] - 1)))


def _highest(dtype: str) -> Any:
    if dtype in FLOATS:
        return math.inf
    return {"bool": True, "u8": 255}.get(dtype, 2 ** (8 * ITEMSIZE[dtype] - 1) - 1)


# max and min propagate NaN, as ATen's do. argmax and argmin return the i64 position along the one
# reduced axis of the first extreme element (of the first NaN where there is one); their partial
# results are (value, position) pairs. argmax_last_nan is the argmax of ATen's poolings: of several
# NaN it takes the last.
REDUCTIONS: dict[str, Reduction] = {
    "sum": Reduction(lambda d: 0, "add"),
    "prod": Reduction(lambda d: 1, "mul"),
    "max": Reduction(_lowest, "maximum"),
    "min": Reduction(_highest, "minimum"),
    "any": Reduction(lambda d: False, "logical_or"),
    "all": Reduction(lambda d: True, "logical_and"),
    "argmax": Reduction(_lowest, None),
    "argmin": Reduction(_highest, None),
    "argmax_last_nan": Reduction(_lowest, None),
}


def widens(a: str, b: str) -> bool:
    """Whether every value of `a` is exact in `b`."""
    if a == b:
        return True
    if a == "bool":
        return True
    if a in INTS and b in INTS:
        signed = (a != "u8", b != "u8")
        return ITEMSIZE[b] > ITEMSIZE[a] and (signed[1] or not signed[0])
    if a in FLOAT8:
        return b in ("f32", "f64")
    if a in FLOATS and b in FLOATS:
        return b == "f64" or (b == "f32" and a in ("f16", "bf16"))
    if a in ("u8", "i8") and b in HALF:
        return True
    return a in ("u8", "i8", "i16") and b in ("f32", "f64") or (a == "i32" and b == "f64")


SCANS = ("sum", "prod", "max", "min")


def extreme(kind: str) -> str:
    """ "max" or "min": the reduction of which a positional reduction (argmax, argmin) gives the
    position."""
    return kind.removeprefix("arg").partition("_")[0]
