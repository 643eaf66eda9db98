"""What is changed in PTX before NVIDIA's assembler sees it.

In and out: the text of a PTX module.

For sm_90, ptxas 12.8 (of Triton 3.6) loses the constant in ``add.s16x2 d, a, imm``: it emits
``VIADD.16x2 d, a, 0x0``. LLVM makes such additions where it proves indices to be below 256
(``(x % 6) - 1`` of small ``x``). They are written as two additions of 16 bits.

Of an address in shared memory that serves tensor cores' operands of two layouts, ptxas 12.8 and
12.9 make the second layout's descriptors of a register that nothing writes (attention of 65 keys in
one block, heads of 32 and 8 elements: wrong results on an H200). There the address is added to in
32 bits, which descriptors' lower halves are; the upper ones are constants.

Two numbers of 32 bits side by side in 64, whose lower half nobody reads, LLVM makes of
``mul.wide`` where the lower one is shifted: what leaves its 32 bits stays in the upper half
(positions that a mask compares, of the layout of tensor cores and 8 warps: wrong on an H200). It is
shifted in 32 bits.

Tensor cores read their left factor while the program goes on, where that is in registers, too;
nobody may write these before a wait says that the product is done. Triton 3.6 leaves some products
of a loop's pass running into the next one, which writes its own left factors to the same registers
(a norm of rows before its product: wrong rows on an H200, other ones in each call). A wait goes
before the first of these writes; the assembler then keeps the registers of products that run.
Likewise where a loop fills a buffer again (see `buffers`): there a wait goes before the barrier
behind which the copy begins.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from deuteron.runtime.buffers import overwritten

PACKED_ADD = re.compile(r"^[ \t]*add\.[su]16x2[ \t]+(%\w+), (%\w+), (%\w+);[ \t]*$", re.MULTILINE)
SEPARATE_ADDS = (
    "\t{ .reg .b16 %al, %ah, %bl, %bh; mov.b32 {%al, %ah}, \\2; mov.b32 {%bl, %bh}, \\3; "
    "add.s16 %al, %al, %bl; add.s16 %ah, %ah, %bh; mov.b32 \\1, {%al, %ah}; }"
)
WIDENED = re.compile(r"cvt\.u64\.u32[ \t]+(%rd\d+), (%r\d+);")
OFFSET = r"(%rd\d+), (-?\d+);"
DESCRIPTOR = re.compile(rf"^[ \t]*add\.s64[ \t]+(%rd\d+), {OFFSET}[ \t]*$", re.MULTILINE)
WIDE_SHIFT = re.compile(
    r"^[ \t]*mul\.wide\.u32[ \t]+(%rd\d+), (%r\d+), (\d+);[ \t]*$", re.MULTILINE
)
UPPER = re.compile(r"\bshl\.b64[ \t]+(%rd\d+), %rd\d+, (\d+);")
JOINED = re.compile(r"\bor\.b64[ \t]+%rd\d+, (%rd\d+), (%rd\d+);")
DEFINED = re.compile(r"\s*(?:@!?%\w+\s+)?[\w.:]+\s+(\{[^{}]*\}|%\w+)")
PRODUCT = re.compile(r"\s*wgmma\.mma_async\S*\s+\{[^{}]*\},\s*\{([^{}]*)\}")
WAIT = re.compile(r"\s*wgmma\.wait_group\S*\s+(\d+);")
BLOCK_ENDS = re.compile(r"\$L__BB|.*\bbra\S*\s+\$L__BB")
COPY = re.compile(r"\s*(?:@!?%\w+\s+)?cp\.async\.(?:bulk\.tensor|c[ag])\.")
BARRIER, WAIT_FOR_ALL = "\tbar.sync \t0;", "\twgmma.wait_group.sync.aligned 0;"


def without_packed_adds(text: str) -> str:
    """The module with packed 16-bit additions apart."""
    return PACKED_ADD.sub(SEPARATE_ADDS, text)


def with_halves(text: str) -> str:
    """The module with descriptors in halves, if one address serves several layouts."""
    low = dict(WIDENED.findall(text))
    layouts: dict[str, set[int]] = {}
    for base, constant in re.findall(rf"(?:or\.b64|add\.s64)[ \t]+%rd\d+, {OFFSET}", text):
        layouts.setdefault(base, set()).add(int(constant) >> 32)
    shared = {base for base, kinds in layouts.items() if base in low and len(kinds) > 1}
    if not shared or "wgmma.mma_async" not in text:
        return text

    def halves(found: re.Match[str]) -> str:
        result, base, constant = found.groups()
        if base not in shared:
            return found[0]
        lower, upper = int(constant) & 0xFFFFFFFF, (int(constant) >> 32) & 0xFFFFFFFF
        return (
            f"\t{{ .reg .b32 %low, %high; add.s32 %low, {low[base]}, {lower}; "
            f"mov.b32 %high, {upper}; mov.b64 {result}, {{%low, %high}}; }}"
        )

    return DESCRIPTOR.sub(halves, text)


def with_narrow_shifts(text: str) -> str:
    """The module with lower halves that stay in their 32 bits, where an upper half is beside."""
    upper = {name for name, by in UPPER.findall(text) if int(by) >= 32}
    joined = JOINED.findall(text)
    beside = {a for a, b in joined if b in upper} | {b for a, b in joined if a in upper}

    def narrow(found: re.Match[str]) -> str:
        result, shifted, factor = found[1], found[2], int(found[3])
        if result not in beside or factor & (factor - 1):
            return found[0]
        by = factor.bit_length() - 1
        return f"\t{{ .reg .b32 %low; shl.b32 %low, {shifted}, {by}; cvt.u64.u32 {result}, %low; }}"

    return WIDE_SHIFT.sub(narrow, text) if beside else text


def with_waits(text: str) -> str:
    """The module with a wait before writes to registers that a running product may read."""
    lines = text.split("\n")
    read = running(lines)
    if not read:
        return text
    out: list[str] = []
    waited = False  # in this block
    for line in lines:
        if BLOCK_ENDS.match(line):
            waited = False
        elif (wait := WAIT.match(line)) and wait[1] == "0":
            waited = True
        elif not waited and (defined := DEFINED.match(line)) and read & registers(defined[1]):
            out.append(WAIT_FOR_ALL)
            waited = True
        out.append(line)
    return "\n".join(out)


def with_waits_before_copies(text: str) -> str:
    """The module with a wait for all products before a block's first copy behind them."""
    out: list[str] = []
    barrier = -1  # the last one since products began; 0 before there is one
    for line in text.split("\n"):
        wait = WAIT.match(line)
        if BLOCK_ENDS.match(line) or (wait and wait[1] == "0"):
            barrier = -1
        elif line.lstrip().startswith("wgmma.commit_group"):
            barrier = 0
        elif barrier == 0 and line.lstrip().startswith("bar.sync"):
            barrier = len(out)
        elif barrier >= 0 and COPY.match(line):
            out[barrier or len(out) :] = [WAIT_FOR_ALL, *(out[barrier:] if barrier else [BARRIER])]
            barrier = -1
        out.append(line)
    return "\n".join(out)


def running(lines: list[str]) -> set[str]:
    """The registers of left factors whose products may run when their block ends."""
    found, block = set[str](), set[str]()
    for line in lines:
        if product := PRODUCT.match(line):
            block |= registers(product[1])
        elif (wait := WAIT.match(line)) and wait[1] == "0":
            block.clear()
        elif BLOCK_ENDS.match(line):
            found, block = found | block, set()
    return found


def registers(operand: str) -> set[str]:
    return set(re.findall(r"%\w+", operand))


def fix_ptx_stage(
    backend: Any, stages: dict[str, Callable[..., Any]], options: Any, language: Any, arch: Any
) -> None:
    """Triton's hook on its table of stages (``knobs.runtime.add_stages_inspection_hook``)."""
    pipelined, make = stages["ttgir"], stages["ptx"]
    filled = False

    def ttgir(source: Any, metadata: Any) -> Any:
        nonlocal filled
        made = pipelined(source, metadata)
        filled = overwritten(str(made))
        return made

    def ptx(source: Any, metadata: Any) -> str:
        text = with_narrow_shifts(without_packed_adds(make(source, metadata)))
        text = with_waits(with_halves(text))
        return with_waits_before_copies(text) if filled else text

    stages["ttgir"], stages["ptx"] = ttgir, ptx


__all__ = [
    "fix_ptx_stage",
    "with_halves",
    "with_narrow_shifts",
    "with_waits",
    "with_waits_before_copies",
    "without_packed_adds",
]
