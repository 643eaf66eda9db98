"""The text of a Triton kernel around its nests: functions, ranges of programs, comments.

In: the lines of every nest, and the parameters. Out: the text of a Python module.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from deuteron.base.text import one_line
from deuteron.codegen.loops import Loops
from deuteron.codegen.triton.emit import size_name
from deuteron.codegen.triton.sizes import python_text
from deuteron.codegen.triton.tiling import Tiling
from deuteron.ir.index import Index, product
from deuteron.ir.program import Layout
from deuteron.schedule.kernel import Kernel

# Where sizes that a call has decide which type holds the indices.
INDEX_CHOICE = "INDEX: tl.constexpr = tl.int64 if INDEX_BITS == 64 else tl.int32"
MODULE_HEADER = """import triton
import triton.language as tl

from deuteron.codegen.triton import libm
"""


def function_text(
    name: str,
    kernel: Kernel,
    loops: Sequence[Loops],
    tilings: Sequence[Tiling],
    blocks: Sequence[Mapping[str, str]],
    bodies: Sequence[list[str]],
    params: list[str],
    constexprs: list[str],
    layouts: Mapping[str, Layout],
    pointers: Mapping[str, str],
) -> str:
    lines = [MODULE_HEADER]
    signature = ", ".join([*params, *(f"{c}: tl.constexpr" for c in constexprs)])
    notes = comments_of(kernel, layouts, pointers)
    if len(bodies) == 1:
        lines += [*_function(name, signature, [*notes, "pid = tl.program_id(0)", *bodies[0]])]
        return "\n".join([*lines, ""])
    calls, start = [], []
    for i, body in enumerate(bodies):
        lines += [*_function(f"_{name}_{i}", f"pid, {signature}", body), "", ""]
        start.append(f"blocks{i}")
        calls.append(_call(i, name, [*params, *constexprs]))
    main = [*notes, "pid = tl.program_id(0)"]
    for i, (nest, tiling, names) in enumerate(zip(loops, tilings, blocks, strict=True)):
        main.append(f"blocks{i} = {_programs(tiling, names, nest)}")
    for i, call in enumerate(calls):
        before = " + ".join(start[:i])
        last = i == len(calls) - 1
        head = "if" if i == 0 else "elif"
        first = f"pid - ({before})" if before else "pid"
        main += [
            "else:" if last else f"{head} pid < {' + '.join(start[: i + 1])}:",
            "    " + call.replace("PID", first),
        ]
    return "\n".join([*lines, *_function(name, signature, main), ""])


def _call(i: int, name: str, args: list[str]) -> str:
    return f"_{name}_{i}(PID, {', '.join(args)})"


def _programs(tiling: Tiling, blocks: Mapping[str, str], loops: Loops) -> str:
    """Triton text of the number of programs of a nest."""
    counts = {d: product(a.extent for a in axes) for d, axes in tiling.dims}

    def cut(d: str) -> str:
        return f"tl.cdiv({size_text(counts[d])}, {blocks[d]})"

    if tiling.kind == "points":
        rows = (
            [size_text(product(a.extent for a in tiling.program_axes))]
            if tiling.program_axes
            else []
        )
        text = " * ".join([*rows, *(cut(d) for d in blocks)])
        return text if tiling.serial_blocks == 1 else f"tl.cdiv({text}, {tiling.serial_blocks})"
    if tiling.kind == "scan":
        return f"{size_text(counts['x'])} * {cut('r')}"
    if tiling.kind == "rows":
        return cut("x")
    assert loops.row_split is not None
    splits = loops.row_split[1]
    return f"{splits} * {cut('r')}" if tiling.tiled else str(splits)


def size_text(index: Index) -> str:
    text = python_text(index, size_name)
    return text.strip("()") if text.strip("()").isdigit() else text


def _function(name: str, signature: str, body: Iterable[str]) -> list[str]:
    return ["@triton.jit", f"def {name}({signature}):", *(f"    {line}" for line in body)]


def comments_of(
    kernel: Kernel, layouts: Mapping[str, Layout], pointers: Mapping[str, str]
) -> list[str]:
    """What the kernel is, where it comes from, what it moves and computes."""
    out = [
        f"# {kernel.bytes} bytes, {kernel.flops:.0f} FLOPs, {kernel.predicted_us:.1f} us predicted"
    ]
    written, read = dict(kernel.writes), dict(kernel.reads)
    for n, lay in layouts.items():
        use = "in, out" if n in written and n in read else "out" if n in written else "in"
        layout = one_line(f"{lay.dtype}{list(lay.shape)} strides {list(lay.strides)}")
        out.append(f"#   {pointers[n]} ({use}): {layout}")
    for o in kernel.origins:
        where = f"  {o.line}" if o.line else ""
        out.append("#   " + one_line(f"{o.node} = {o.op}{where}"))
    return out


__all__ = ["INDEX_CHOICE", "function_text"]
