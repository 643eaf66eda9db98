"""What is changed in PTX before NVIDIA's assembler sees it.

In and out: the text of a PTX module. For sm_90, ptxas 12.8 (of Triton 3.6) loses the constant in
``add.s16x2 d, a, imm``: it emits ``VIADD.16x2 d, a, 0x0``. LLVM makes such additions where it
proves indices to be below 256 (``(x % 6) - 1`` of small ``x``). They are written as two
additions of 16 bits.

A suspicion, and so avoided: where the minuend of a 64-bit subtraction is the upper half of a
product (a 16-bit quotient), ptxas emits ``LEA.HI d, P, a, -b, RZ, 0x10`` and takes P for the carry
of the upper word. On an H200 one kernel (adaptive pooling) masked the rows with b = 0, as if
1 - 0 were negative; a small kernel with the same instruction was right. Differences are written as
sums with the complement.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

PACKED = re.compile(r"^[ \t]*add\.[su]16x2[ \t]+(%\w+), (%\w+), (%\w+);[ \t]*$", re.MULTILINE)
APART = (
    "\t{ .reg .b16 %al, %ah, %bl, %bh; mov.b32 {%al, %ah}, \\2; mov.b32 {%bl, %bh}, \\3; "
    "add.s16 %al, %al, %bl; add.s16 %ah, %ah, %bh; mov.b32 \\1, {%al, %ah}; }"
)


LONG = re.compile(r"^[ \t]*sub\.[su]64[ \t]+(%\w+), (%\w+), (%\w+);[ \t]*$", re.MULTILINE)
SUM = "\t{ .reg .b64 %nb; not.b64 %nb, \\3; add.s64 %nb, %nb, 1; add.s64 \\1, \\2, %nb; }"


def without_packed_adds(text: str) -> str:
    """The module with packed 16-bit additions apart."""
    return PACKED.sub(APART, text)


def without_long_differences(text: str) -> str:
    """The module with sums in place of 64-bit differences."""
    return LONG.sub(SUM, text)


def corrected(
    backend: Any, stages: dict[str, Callable[..., Any]], options: Any, language: Any, arch: Any
) -> None:
    """Triton's hook on its table of stages (``knobs.runtime.add_stages_inspection_hook``)."""
    make = stages["ptx"]
    stages["ptx"] = lambda source, metadata: without_long_differences(
        without_packed_adds(make(source, metadata))
    )


TEXTS = APART + SUM  # which part of a kernel's identity they are
__all__ = ["TEXTS", "corrected", "without_long_differences", "without_packed_adds"]
