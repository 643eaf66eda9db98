"""Checked access of generated C++ to tensors (option ``check_accesses``).

In: a kernel's tensors. Out: declarations of their pointers as objects that check what is asked of
them (`support.h`: d_checked). The rest of a kernel's text is the same. The first access outside a
tensor is written into the unit's `cpp_bounds_error`; it reads, or writes, a place of no meaning.
"""

from __future__ import annotations

import json

from deuteron.base.text import one_line
from deuteron.codegen.cpp import scalars
from deuteron.ir.program import Layout

# What a unit with checked accesses defines; `runtime.launch` reads it after each call.
BOUNDS_ERROR = (
    'extern "C" { struct d_bounds_error { int taken; char text[508]; } cpp_bounds_error = {}; }'
)


def checked_pointer(
    number: int, name: str, layout: Layout, variable: str, written: bool, kernel: str, count: str
) -> str:
    """The declaration of a tensor's pointer. `count`: text of the elements that its memory has."""
    kind = ("" if written else "const ") + scalars.MEMORY_TYPES[layout.dtype]
    what = json.dumps(one_line(f"kernel {kernel}: tensor {name}").replace("%", " "))
    return f"const d_checked<{kind}> {variable}{{({kind}*)ptrs[{number}], {count}, {what}}};"


__all__ = ["BOUNDS_ERROR", "checked_pointer"]
