"""Triton text of scalar values: types, literals, conversions and operations of the IR.

In: dtypes and texts of arguments. Out: the text of one expression. An argument that is a literal
stands in the text as a Python number only where Triton gives it the other argument's type;
elsewhere it is a typed scalar (`literal(..., typed=True)`). Operations on half types (the IR has
hardly any) compute in f32 and round once; 8-bit floats are their bits. Functions come from `libm`.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from typing import Any

from deuteron.ir.float8 import float8_bits
from deuteron.ir.index import Index
from deuteron.ir.operations import DEAR_OPS, FLOAT8, FLOATS, HALF, INTS, ITEMSIZE

TRITON_TYPES = {
    "bool": "tl.int1", "u8": "tl.uint8", "i8": "tl.int8", "i16": "tl.int16", "i32": "tl.int32",
    "i64": "tl.int64", "f16": "tl.float16", "bf16": "tl.bfloat16", "f32": "tl.float32",
    "f64": "tl.float64", "f8e4m3": "tl.uint8", "f8e5m2": "tl.uint8",
}  # fmt: skip
POINTER_TYPES = {
    "bool": "*i1", "u8": "*u8", "i8": "*i8", "i16": "*i16", "i32": "*i32", "i64": "*i64",
    "f16": "*fp16", "bf16": "*bf16", "f32": "*fp32", "f64": "*fp64",
    "f8e4m3": "*u8", "f8e5m2": "*u8",
}  # fmt: skip
# Dtypes that a literal of a choice takes from the other one.
INLINE_DTYPES = ("f32", "i32", "i64")

INFIX_OPS = {"add": "+", "sub": "-", "mul": "*", "lt": "<", "le": "<=", "gt": ">", "ge": ">=",
         "eq": "==", "ne": "!=", "bitwise_and": "&", "bitwise_or": "|",
         "bitwise_xor": "^"}  # fmt: skip
SHIFT_OPS = {"lshift": "<<", "rshift": ">>"}
LOGICAL_OPS = {"logical_and": "&", "logical_or": "|", "logical_xor": "!="}
# On booleans arithmetic is logic, as in ATen.
BOOLEAN_OPS = {**INFIX_OPS, "add": "|", "mul": "&", "maximum": "|", "minimum": "&", "fmax": "|",
           "fmin": "&", "sub": "!="}  # fmt: skip
# Operations whose result on a half type is one of its values without a rounding.
EXACT_IN_HALF = frozenset(("abs", "where", "maximum", "minimum", "neg"))
LIBM_FUNCTIONS = DEAR_OPS.union(
    [
        "div",
        "floordiv",
        "fmod",
        "remainder",
        "sqrt",
        "rsqrt",
        "trunc",
        "sign",
        "signbit",
        "copysign",
        "maximum",
        "minimum",
        "fmax",
        "fmin",
    ],
)


def exact_in_f32(value: float) -> bool:
    """Whether Triton reads a number of the text right, which it takes for an f32 as long as that
    can hold it at all."""
    if not math.isfinite(value):
        return True
    try:
        return struct.unpack("f", struct.pack("f", value))[0] == value
    except OverflowError:  # then it is an f64 to Triton too
        return True


def literal(value: Any, dtype: str, typed: bool = False) -> str:
    """A constant; `typed` as a scalar tensor of its dtype."""
    if dtype in FLOAT8:
        text = repr(float8_bits(value, dtype))
    elif dtype == "bool":
        text = "True" if value else "False"
    elif dtype in FLOATS:
        value = float(value)
        if value == 0 and math.copysign(1.0, value) < 0:  # Triton forgets the sign of a zero
            bits = f"tl.int{8 * ITEMSIZE[dtype]}"
            lowest = -(2 ** (8 * ITEMSIZE[dtype] - 1))
            return f"tl.full([], {lowest}, {bits}).to({TRITON_TYPES[dtype]}, bitcast=True)"
        if math.isnan(value):
            text = 'float("nan")'
        elif math.isinf(value):
            text = f'float("{"-" if value < 0 else ""}inf")'
        else:
            text = repr(value)
    else:
        text = repr(int(value))
    if typed and dtype == "bf16":  # the interpreter has no constants of bf16
        return f"tl.full([], {text}, tl.float32).to(tl.bfloat16)"
    if typed or (dtype == "f64" and not exact_in_f32(value)):
        return f"tl.full([], {text}, {TRITON_TYPES[dtype]})"
    return f"({text})" if text.startswith("-") else text


def convert(text: str, source: str, target: str, float8: str = "") -> str:
    """C's conversion as ATen has it on CUDA: floats truncate towards zero, small integers are cut
    from a wider one. 8-bit floats are their bits, made of f32; `float8` is the tail of the names of
    the functions that do it.
    """
    if source == target:
        return text
    if source in FLOAT8:
        return convert(f"libm.{source}_to_f32{float8}({text})", "f32", target, float8)
    if target in FLOAT8:
        return f"libm.f32_to_{target}{float8}({convert(text, source, 'f32')})"
    if target == "bool":
        return f"({text} != 0)"
    if source in FLOATS and target in INTS and ITEMSIZE[target] < 4:
        middle = "i64" if target == "u8" else "i32"
        return f"{text}.to({TRITON_TYPES[middle]}).to({TRITON_TYPES[target]})"
    if {source, target} & {"bf16"} and {source, target} != {"bf16", "f32"}:
        return f"{text}.to(tl.float32).to({TRITON_TYPES[target]})"
    return f"{text}.to({TRITON_TYPES[target]})"


def inlines(name: str, operand: str, position: int, value: Any, other_is_literal: bool) -> bool:
    """Whether a literal argument may stand as a Python number in `operation`'s text. Of a choice
    between two numbers Triton makes f32 or i32 by itself. A count of bits may where it is one that
    the machine shifts by."""
    if name in SHIFT_OPS:
        return position == 1 and 0 <= value < 8 * ITEMSIZE[operand] and not other_is_literal
    if name == "where":
        return position > 0 and operand in (("f32", "i32") if other_is_literal else INLINE_DTYPES)
    return name in INFIX_OPS and operand not in HALF and not other_is_literal


def operation(name: str, dtype: str, args: list[str], operand: str) -> str:
    """One scalar operation; `operand` is the arguments' dtype (of the last one for `where`)."""
    if operand in HALF and name == "nextafter":
        return f"libm.nextafter_half({', '.join(args)})"
    if operand in HALF and name not in EXACT_IN_HALF:
        args = [f"{a}.to(tl.float32)" for a in args]
        text = _operation(name, args, "f32")
        return text if dtype == "bool" else convert(text, "f32", dtype)
    return _operation(name, args, operand)


def _operation(name: str, args: list[str], operand: str) -> str:
    if name == "where":
        return f"tl.where({', '.join(args)})"
    if name == "logical_not":
        return f"({args[0]} == 0)"
    if name in LOGICAL_OPS:
        a, b = args if operand == "bool" else [f"({x} != 0)" for x in args]
        return f"{a} {LOGICAL_OPS[name]} {b}"
    if operand == "bool":
        return _boolean(name, args)
    if operand in INTS:
        return _integer(name, args, operand)
    if name in INFIX_OPS:
        return f"{args[0]} {INFIX_OPS[name]} {args[1]}"
    if name in LIBM_FUNCTIONS:
        return f"libm.{name}({', '.join(args)})"
    match name:
        case "neg":  # Triton's own minus takes it from a positive zero
            return f"{args[0]} * -1.0"
        case "abs" | "floor" | "ceil" | "fma":
            return f"tl.{name}({', '.join(args)})"
        case "round":
            return f"libm.rint({args[0]})"
        case "reciprocal":
            return f"libm.div({literal(1, operand, True)}, {args[0]})"
        case "isnan":
            return f"{args[0]} != {args[0]}"
        case "isinf":
            return f'tl.abs({args[0]}) == float("inf")'
        case "truncdiv":
            return f"libm.trunc(libm.div({', '.join(args)}))"
    raise AssertionError(f"no Triton text for {name} on {operand}")


def _boolean(name: str, args: list[str]) -> str:
    if name in BOOLEAN_OPS and len(args) == 2:
        return f"{args[0]} {BOOLEAN_OPS[name]} {args[1]}"
    if name == "bitwise_not":
        return f"({args[0]} == 0)"
    if name in ("abs", "sign", "floor", "ceil", "trunc", "round"):
        return args[0]
    if name in ("isnan", "isinf", "signbit"):
        return f"({args[0]} != {args[0]})"
    raise AssertionError(f"no Triton text for {name} on bool")


def complement(text: str) -> str:
    """-x - 1 of an integer x; differences are written as sums with it. Of ``16 - x``, x neighbours,
    Triton 3.6 takes each for as divisible as the first (`AxisInfo`): it compares the first alone,
    and reads from addresses as if they were multiples (fuzz 7510079). Of complements it knows
    nothing."""
    return f"({text} ^ -1)"


def index_sum(index: Index, atom: Callable[[Any], str]) -> str:
    """The text of an index, a sum of products; `atom`: of their factors."""
    constant, parts = 0, list[str]()
    for m, c in index.terms:
        text = " * ".join(atom(a) for a in m)
        if not m:
            constant += c
        elif c == -1:
            parts.append(complement(text))
            constant += 1
        else:
            parts.append(text if c == 1 else f"{text} * {c}")
    return " + ".join(parts + [str(constant)] * bool(constant or not parts))


def _integer(name: str, args: list[str], dtype: str) -> str:
    bits = 8 * ITEMSIZE[dtype]
    if dtype in ("i32", "i64") and name in ("sub", "neg") and not args[-1].lstrip("-").isdigit():
        rest = f"{args[0]} + " if name == "sub" else ""
        return f"{rest}{complement(args[-1])} + 1"
    if name in INFIX_OPS:
        return f"{args[0]} {INFIX_OPS[name]} {args[1]}"
    if name in ("floordiv", "truncdiv", "fmod", "remainder", "pow"):
        return f"libm.int_{name}({', '.join(args)})"
    match name:
        case "div":
            return f"libm.int_truncdiv({', '.join(args)})"
        case "neg":
            return f"-{args[0]}"
        case "bitwise_not":  # the interpreter has no ones of all bits without a sign
            return f"{args[0]} ^ 255" if dtype == "u8" else f"~{args[0]}"
        case "abs":
            return args[0] if dtype == "u8" else f"tl.abs({args[0]})"
        case "maximum" | "fmax":
            return f"tl.maximum({', '.join(args)})"
        case "minimum" | "fmin":
            return f"tl.minimum({', '.join(args)})"
        case "sign":
            return f"libm.sign({args[0]})"
        case "floor" | "ceil" | "trunc" | "round":
            return args[0]
        case "isnan" | "isinf":
            return f"({args[0]} != {args[0]})"
        case "signbit":
            return f"({args[0]} < 0)"
        case "lshift" | "rshift":
            if args[1].isdecimal():
                return f"{args[0]} {SHIFT_OPS[name]} {args[1]}"
            kind = "_unsigned" if (name, dtype) == ("rshift", "u8") else ""
            return f"libm.{name}{kind}({', '.join(args)}, {bits})"
        case "fma":
            return f"{args[0]} * {args[1]} + {args[2]}"
    raise AssertionError(f"no Triton text for {name} on {dtype}")


def reduction_step(kind: str, dtype: str, a: str, b: str) -> str:
    """One step of a reduction or scan."""
    match kind:
        case "sum":
            return f"{a} + {b}"
        case "prod":
            return f"{a} * {b}"
        case "max" | "min":
            return f"{'libm' if dtype in FLOATS else 'tl'}.{kind}imum({a}, {b})"
        case "any":
            return f"{a} | {b}"
        case "all":
            return f"{a} & {b}"
    raise AssertionError(f"no step of a {kind}")
