"""What is changed in PTX before NVIDIA's assembler sees it.

In and out: the text of a PTX module. For sm_90, ptxas 12.8 (of Triton 3.6) loses the constant in
``add.s16x2 d, a, imm``: it emits ``VIADD.16x2 d, a, 0x0``. LLVM makes such additions where it
proves indices to be below 256 (``(x % 6) - 1`` of small ``x``). They are written as two
additions of 16 bits.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

PACKED_ADD = re.compile(r"^[ \t]*add\.[su]16x2[ \t]+(%\w+), (%\w+), (%\w+);[ \t]*$", re.MULTILINE)
SEPARATE_ADDS = (
    "\t{ .reg .b16 %al, %ah, %bl, %bh; mov.b32 {%al, %ah}, \\2; mov.b32 {%bl, %bh}, \\3; "
    "add.s16 %al, %al, %bl; add.s16 %ah, %ah, %bh; mov.b32 \\1, {%al, %ah}; }"
)


def without_packed_adds(text: str) -> str:
    """The module with packed 16-bit additions apart."""
    return PACKED_ADD.sub(SEPARATE_ADDS, text)


def fix_ptx_stage(
    backend: Any, stages: dict[str, Callable[..., Any]], options: Any, language: Any, arch: Any
) -> None:
    """Triton's hook on its table of stages (``knobs.runtime.add_stages_inspection_hook``)."""
    make = stages["ptx"]
    stages["ptx"] = lambda source, metadata: without_packed_adds(make(source, metadata))


__all__ = ["fix_ptx_stage", "without_packed_adds"]
