"""Pieces of Python source: sizes as expressions, names, string literals, comments, wrapped calls.

In: values of the IR and texts of the user's (file names, source lines). Out: text that is safe to
put in a module: nothing of the user's leaves its comment or its string.
"""

from __future__ import annotations

import keyword
from collections.abc import Collection, Sequence
from typing import Any

from deuteron.base.text import one_line, plain_name
from deuteron.ir.index import Div, Index, MinMax, Mod, Sym

LINE_WIDTH = 100
TORCH_DTYPES = {
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
    "f8e4m3": "float8_e4m3fn",
    "f8e5m2": "float8_e5m2",
}


def dtype_text(dtype: str) -> str:
    """ "f32" -> "torch.float32"; other names are torch's own."""
    return f"torch.{TORCH_DTYPES.get(dtype, dtype.removeprefix('torch.'))}"


def source(i: Index) -> str:
    """An index of sizes as a Python expression."""
    if i.value is not None:
        return str(i.value)
    parts = []
    for m, c in i.terms:
        factors = [_atom(a) for a in m]
        if c != 1 or not factors:
            factors.insert(0, str(c))
        parts.append("*".join(factors))
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
    """A tuple of sizes."""
    return "(" + "".join(f"{source(i)}, " for i in parts).rstrip(" ") + ")"


def comment(text: str) -> str:
    """A comment line: what is no printable character (line ends among them) becomes a blank."""
    return f"# {one_line(text)}"


def long_string(text: str) -> str:
    """A readable literal of a text of several lines."""
    plain = all(c.isprintable() or c == "\n" for c in text)
    if not plain or '"""' in text or text.endswith(("\\", '"')):
        return repr(text)
    return f'r"""{text}"""'


def identifier(wish: str, taken: Collection[str]) -> str:
    """A name near `wish` that is an identifier and not taken."""
    name = plain_name(wish)
    if not name.isidentifier() or keyword.iskeyword(name) or name in taken:
        name = f"t_{name}"
    while name in taken:
        name += "_"
    return name


def wrapped(head: str, parts: Sequence[str], tail: str, indent: str = "") -> list[str]:
    """`head`, the parts with commas, `tail`: in one line where it fits."""
    line = f"{indent}{head}{', '.join(parts)}{tail}"
    if len(line) <= LINE_WIDTH or not parts:
        return [line]
    out = [indent + head]
    row = ""
    for p in parts:
        if row and len(indent) + 5 + len(row) + len(p) > LINE_WIDTH:
            out.append(f"{indent}    {row.rstrip()}")
            row = ""
        row += f"{p}, "
    return [*out, f"{indent}    {row.rstrip()}", indent + tail.removeprefix(",")]


__all__ = [
    "comment",
    "dtype_text",
    "identifier",
    "long_string",
    "sizes_text",
    "source",
    "wrapped",
]
