"""C++ text of scalar values: types, literals, conversions and operations of the IR.

In: dtypes and texts of arguments. Out: the text of one C++ expression, and in `used` the prelude
functions it calls.

Registers and memory differ for the half types: they are stored as ``unsigned short`` and live in
registers as a ``float`` that holds a representable value, so widening is free and narrowing is
one rounding (`d_round_f16`, `d_round_bf16`). 8-bit floats are their bits. ``bool`` is a byte in
memory. Integer arithmetic wraps around: it is done in the unsigned type of the same width.
"""

from __future__ import annotations

import math
from typing import Any

from deuteron.ir.float8 import float8_bits
from deuteron.ir.operations import FLOAT8, FLOATS, HALF, INTS

REGISTER_TYPES = {
    "bool": "bool",
    "u8": "unsigned char",
    "i8": "signed char",
    "i16": "short",
    "i32": "int",
    "i64": "long long",
    "f16": "float",
    "bf16": "float",
    "f32": "float",
    "f64": "double",
    "f8e4m3": "unsigned char",
    "f8e5m2": "unsigned char",
}
MEMORY_TYPES = {
    **REGISTER_TYPES,
    "bool": "unsigned char",
    "f16": "unsigned short",
    "bf16": "unsigned short",
}
UNSIGNED_TYPES = {
    "u8": "unsigned",
    "i8": "unsigned",
    "i16": "unsigned",
    "i32": "unsigned",
    "i64": "unsigned long long",
}

_INFIX = {
    "add": "+",
    "sub": "-",
    "mul": "*",
    "lt": "<",
    "le": "<=",
    "gt": ">",
    "ge": ">=",
    "eq": "==",
    "ne": "!=",
    "bitwise_and": "&",
    "bitwise_or": "|",
    "bitwise_xor": "^",
}
_ROUNDING = {"floor": "floor", "ceil": "ceil", "trunc": "trunc", "round": "rint"}
# Operations on half types whose result is representable without a rounding.
_EXACT = frozenset(
    (
        "neg",
        "abs",
        "maximum",
        "minimum",
        "fmax",
        "fmin",
        "where",
        "sign",
        "floor",
        "ceil",
        "trunc",
        "round",
        "copysign",
        "nextafter",
    )
)


def literal(value: Any, dtype: str) -> str:
    """A constant, exactly: floats in hexadecimal where decimal text would be long."""
    if dtype == "bool":
        return "true" if value else "false"
    if dtype in FLOAT8:
        return f"(unsigned char){float8_bits(value, dtype)}"
    if dtype in FLOATS:
        single = dtype != "f64"
        suffix = "f" if single else ""
        value = float(value)
        if math.isnan(value):
            return f'__builtin_nan{suffix}("")'
        if math.isinf(value):
            return f"{'-' if value < 0 else ''}__builtin_inf{suffix}()"
        return (
            f"({repr(value)}{suffix})"
            if value < 0 or math.copysign(1, value) < 0
            else f"{value!r}{suffix}"
        )
    value = int(value)
    if dtype == "i64":
        return (
            "(-9223372036854775807LL - 1)"
            if value == -(2**63)
            else f"{value}LL"
            if value >= 0
            else f"({value}LL)"
        )
    if value == -(2**31):
        return "(-2147483647 - 1)"
    return str(value) if value >= 0 else f"({value})"


# Functions whose arguments are nearly always small: C text of whether one is, for ``d_<op>_small``.
FAST_TESTS = {
    **dict.fromkeys((("sin", "f32"), ("cos", "f32")), "__builtin_fabsf({}) < 8192.0f"),
    **dict.fromkeys((("sin", "f64"), ("cos", "f64"), ("tan", "f64")), "d_is_near64({})"),
}
FAST_HELPERS = frozenset(
    ("d_trig_small", "d_sin_poly", "d_cos_poly", "d_fma", "d_bits", "d_f32")
    + ("d_is_near64", "d_sin_near64", "d_cos_near64", "d_tan_near64")
)


def zero(dtype: str) -> str:
    return literal(0, dtype)


def from_memory(text: str, dtype: str, used: set[str]) -> str:
    """The register value of an element in memory."""
    if dtype in HALF:
        used.add(f"d_load_{dtype}")
        return f"d_load_{dtype}({text})"
    return f"({text} != 0)" if dtype == "bool" else text


def to_memory(text: str, dtype: str, used: set[str]) -> str:
    """What is stored for a register value."""
    if dtype in HALF:
        used.add(f"d_store_{dtype}")
        return f"d_store_{dtype}({text})"
    return f"(unsigned char)({text})" if dtype == "bool" else text


def rounded_to_memory(text: str, dtype: str, used: set[str]) -> str:
    """What is stored in a half type for an f32 register value."""
    used.add(f"d_f32_to_{dtype}")
    return f"d_f32_to_{dtype}({text})"


def convert(text: str, source: str, target: str, used: set[str]) -> str:
    """C's conversion, as ATen's: floats truncate towards zero, small integers are cut from a 64-bit
    one.
    """
    if source == target:
        return text
    if source == "bool" and target in FLOATS:  # g++ 12 has no vectors for the conversion
        return f"({text} ? {literal(1, target)} : {literal(0, target)})"
    if source in FLOAT8:
        used.add(f"d_{source}_to_f32")
        return convert(f"d_{source}_to_f32({text})", "f32", target, used)
    if target in FLOAT8:
        used.add(f"d_f32_to_{target}")
        return f"d_f32_to_{target}({convert(text, source, 'f32', used)})"
    if target == "bool":
        return f"({text} != 0)"
    if target in HALF:
        if source in HALF and source != target or source not in HALF:
            wide = text if source in HALF or source == "f32" else f"(float)({text})"
            used.add(f"d_round_{target}")
            return f"d_round_{target}({wide})"
    if source in HALF and target == "f32":
        return text
    if target in ("f32", "f64") and source != "i64" or target in INTS and source in (*INTS, "bool"):
        return f"({REGISTER_TYPES[target]})({text})"
    used.add(f"d_to_{target}")
    return f"d_to_{target}({text})"


def operation(name: str, dtype: str, args: list[str], operand: str, used: set[str]) -> str:
    """One scalar operation; `operand` is the arguments' dtype (`where`: of the last)."""
    text = _operation(name, args, operand, used)
    if dtype in HALF and name not in _EXACT:
        used.add(f"d_round_{dtype}")
        return f"d_round_{dtype}({text})"
    return text


def _operation(name: str, args: list[str], operand: str, used: set[str]) -> str:
    if name == "where" and operand == "bool":  # g++ 12 has no vectors for a choice of flags
        flag, one, other = args
        return f"(({flag} & {one}) | (!{flag} & {other}))"
    if name == "where":
        return f"({args[0]} ? {args[1]} : {args[2]})"
    if name in ("logical_and", "logical_or", "logical_xor", "logical_not"):
        flags = args if operand == "bool" else [f"({a} != 0)" for a in args]
        if name == "logical_not":
            return f"(!{flags[0]})"
        sign = {"logical_and": "&", "logical_or": "|", "logical_xor": "!="}[name]
        return f"({flags[0]} {sign} {flags[1]})"
    if operand == "bool":
        return _boolean(name, args, used)
    if operand in INTS:
        return _integer(name, args, operand, used)
    suffix = "" if operand == "f64" else "f"
    if name in _INFIX:
        return f"({args[0]} {_INFIX[name]} {args[1]})"
    if name == "div":
        return f"({args[0]} / {args[1]})"
    if name == "neg":
        return f"(-{args[0]})"
    if name == "abs":
        return f"__builtin_fabs{suffix}({args[0]})"
    if name == "sqrt":
        return f"__builtin_sqrt{suffix}({args[0]})"
    if name == "reciprocal":
        return f"({literal(1, operand)} / {args[0]})"
    if name == "rsqrt":
        return f"({literal(1, operand)} / __builtin_sqrt{suffix}({args[0]}))"
    if name in _ROUNDING:
        return f"__builtin_{_ROUNDING[name]}{suffix}({args[0]})"
    if name == "isnan":
        return f"({args[0]} != {args[0]})"
    if name == "isinf":
        return f"(__builtin_fabs{suffix}({args[0]}) == __builtin_inf{suffix}())"
    if name == "copysign":
        return f"__builtin_copysign{suffix}({args[0]}, {args[1]})"
    if name == "fma":
        return f"__builtin_fma{suffix}({args[0]}, {args[1]}, {args[2]})"
    if name == "nextafter" and operand in HALF:
        return _call(f"{name}_{operand}", args, used)
    return _call(name, args, used)


def _call(name: str, args: list[str], used: set[str]) -> str:
    used.add(f"d_{name}")
    return f"d_{name}({', '.join(args)})"


def _boolean(name: str, args: list[str], used: set[str]) -> str:
    table = {
        "add": "|",
        "mul": "&",
        "maximum": "|",
        "minimum": "&",
        "fmax": "|",
        "fmin": "&",
        "sub": "!=",
        **{k: v for k, v in _INFIX.items() if k not in ("add", "sub", "mul")},
    }
    if name in table:
        return f"({args[0]} {table[name]} {args[1]})"
    if name == "bitwise_not":
        return f"(!{args[0]})"
    if name in ("abs", "sign", "floor", "ceil", "trunc", "round"):
        return args[0]
    if name in ("isnan", "isinf", "signbit"):
        return "false"
    return f"(bool){_call(name, [f'(int){a}' for a in args], used)}"


def _integer(name: str, args: list[str], dtype: str, used: set[str]) -> str:
    ctype, wide = REGISTER_TYPES[dtype], UNSIGNED_TYPES[dtype]
    if name in ("add", "sub", "mul"):
        return f"({ctype})(({wide}){args[0]} {_INFIX[name]} ({wide}){args[1]})"
    if name in _INFIX:
        text = f"({args[0]} {_INFIX[name]} {args[1]})"
        return f"({ctype}){text}" if name.startswith("bitwise") else text
    if name == "neg":
        return f"({ctype})(0 - ({wide}){args[0]})"
    if name == "bitwise_not":
        return f"({ctype})(~{args[0]})"
    if name == "abs":
        return (
            args[0]
            if dtype == "u8"
            else f"({ctype})({args[0]} < 0 ? 0 - ({wide}){args[0]} : ({wide}){args[0]})"
        )
    if name in ("maximum", "fmax"):
        return f"({args[0]} > {args[1]} ? {args[0]} : {args[1]})"
    if name in ("minimum", "fmin"):
        return f"({args[0]} < {args[1]} ? {args[0]} : {args[1]})"
    if name == "sign":
        return f"({ctype})(({args[0]} > 0) - ({args[0]} < 0))"
    if name in ("floor", "ceil", "trunc", "round"):
        return args[0]
    if name in ("isnan", "isinf"):
        return "false"
    if name == "signbit":
        return f"({args[0]} < 0)"
    if name == "fma":
        return f"({ctype})(({wide}){args[0]} * ({wide}){args[1]} + ({wide}){args[2]})"
    return f"({ctype}){_call(name, [f'({ctype}){a}' for a in args], used)}"
