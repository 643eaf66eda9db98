"""The Triton kernel of a nest with products.

In: a `Kernel` whose nest and tiling the schedule chose. Out: a `TritonKernel` of one configuration.
Where the copy engine moves boxes, the kernel has another body for addresses that it cannot take.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from deuteron.base.text import plain_name
from deuteron.codegen.lowering import Tiles, lower_nest
from deuteron.codegen.triton.emit import size_name
from deuteron.codegen.triton.kernel import ALIGNED_CONSTEXPR, Box, Config, TritonKernel
from deuteron.codegen.triton.scalars import POINTER_TYPES
from deuteron.codegen.triton.sizes import (
    aligned_sizes,
    blocks_text,
    contraction_indices,
    index_width,
    symbols_of,
)
from deuteron.codegen.triton.source import INDEX_CHOICE, MODULE_HEADER, comments_of
from deuteron.codegen.triton.tiles import Printer
from deuteron.ir.expr import Expr
from deuteron.ir.nest import Nest
from deuteron.ir.operations import ITEMSIZE
from deuteron.ir.program import Layout
from deuteron.schedule.kernel import Kernel
from deuteron.schedule.tiling import Tiling


def contraction_kernel(kernel: Kernel) -> TritonKernel:
    """The Triton function of a kernel with products."""
    assert kernel.contraction is not None
    nest, tiling = kernel.contraction
    layouts = dict(kernel.reads) | dict(kernel.writes)
    pointers = {n: f"p{k}_{plain_name(n)}" for k, n in enumerate(layouts)}
    indices = contraction_indices(nest, tiling, layouts)
    symbols = symbols_of(indices, layouts)
    static, wide_source, wide = index_width(indices, layouts)
    index_type = ("tl.int64" if wide else "tl.int32") if static else "INDEX"
    body, boxes = printed(nest, tiling, layouts, pointers, index_type)
    if boxes:
        unboxed = replace(tiling, fetches=False, puts=False)
        plain, _ = printed(nest, unboxed, layouts, pointers, index_type)
        body = [f"if {ALIGNED_CONSTEXPR}:", *indented(body), "else:", *indented(plain)]
    name = f"triton_{kernel.name}"
    lines = [
        *comments_of(kernel, layouts, pointers),
        f"# {tiling}",
        *([] if static else [INDEX_CHOICE]),
        "pid = tl.program_id(0)",
        *body,
    ]
    flags = ("STAGES", *(() if static else ("INDEX_BITS",)))
    flags += (ALIGNED_CONSTEXPR,) if boxes else ()
    params = (*pointers.values(), *map(size_name, symbols), *boxes)
    text = [
        MODULE_HEADER,
        "@triton.jit",
        f"def {name}({', '.join([*params, *(f'{f}: tl.constexpr' for f in flags)])}):",
        *indented(lines),
        "",
    ]
    types = [POINTER_TYPES[lay.dtype] for lay in layouts.values()]
    names = list(layouts)
    return TritonKernel(
        name=name,
        source="\n".join(text),
        args=(
            *(("tensor", n) for n in names),
            *(("size", s) for s in symbols),
            *(("box", "") for _ in boxes),
        ),
        params=params,
        types=(
            *types,
            *("i64" if static and wide else "i32" for _ in symbols),
            *(f"tensordesc<{types[b.tensor][1:]}{list(b.block)}>" for b in boxes.values()),
        ),
        constexprs=flags,
        configs=(Config((("STAGES", tiling.num_stages),), tiling.num_warps, tiling.num_stages),),
        grid_source=grid_text(tiling),
        aligned=(*pointers.values(), *aligned_sizes(symbols)),
        wide_source=wide_source,
        # In f32 as in all other kernels: a softmax's terms and their sum may be in two.
        fp_fusion=is_fast(nest) and not keeps_what_is_chosen_from(nest),
        boxes=tuple(boxes.values()),
    )


def is_fast(nest: Nest) -> bool:
    """Whether its products have less than f32's digits, as exponentials then may."""
    return all(s.operands != "f32" for s in nest.reductions.values())


def keeps_what_is_chosen_from(nest: Nest) -> bool:
    """Whether it keeps, or compares, values of which it takes the largest or least: gradients look
    for that one among them. What is a multiply-add in one layout of a value is none in another."""
    kept = {plain(s.value) for s in nest.stores}
    bodies = [r.body for r in nest.reductions.values()] + [s.value for s in nest.stores]
    kept |= {plain(a) for b in bodies for n in b.walk() if n.op == "eq" for a in n.args}
    chosen = (plain(r.body) for r in nest.reductions.values() if r.kind in ("max", "min"))
    return any(e in kept and e.op != "load" for e in chosen)


def plain(e: Expr) -> Expr:
    """Before its casts."""
    return plain(e.args[0]) if e.op == "cast" else e


def grid_text(tiling: Tiling) -> str:
    """Python text of the number of programs."""
    dims = [d for d in tiling.dims if d.mode == "grid"]
    if all(d.size.value is not None for d in dims):
        return str(tiling.grid())
    total = " * ".join(blocks_text(d.size, str(d.block)) for d in dims)
    return f"min({total}, {tiling.persistent})" if tiling.persistent else total


def printed(
    nest: Nest,
    tiling: Tiling,
    layouts: Mapping[str, Layout],
    pointers: Mapping[str, str],
    index_type: str,
) -> tuple[list[str], dict[str, Box]]:
    """The lines of the function's body; the boxes that it wants, by parameter."""
    fast = is_fast(nest)
    code = lower_nest(
        nest, tiling, layouts, Tiles(whole=True, powers=True, reciprocals=fast, quarters=True)
    )
    printer = Printer(tiling, pointers, index_type, fast)
    lines, names = printer.print(code), list(layouts)
    boxes = {
        param: Box(
            names.index(n), b.offset * ITEMSIZE[layouts[n].dtype], b.extents, b.strides, b.block
        )
        for (n, b), param in printer.boxes.items()
    }
    return lines, boxes


def indented(lines: list[str]) -> list[str]:
    return [f"    {x}" for x in lines]


__all__ = ["contraction_kernel"]
