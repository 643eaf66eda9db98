"""The Triton kernel of a nest with products.

In: a `Kernel` whose nest and tiling the schedule chose. Out: a `TritonKernel` of one configuration.
"""

from __future__ import annotations

from deuteron.base.text import plain_name
from deuteron.codegen.lowering import Tiles, lower_nest
from deuteron.codegen.triton.kernel import Config, TritonKernel
from deuteron.codegen.triton.scalars import POINTER_TYPES
from deuteron.codegen.triton.sizes import MAX_INT32_INDEX
from deuteron.codegen.triton.source import MODULE_HEADER, comments_of
from deuteron.codegen.triton.tiles import Printer
from deuteron.schedule.kernel import Kernel


def contraction_kernel(kernel: Kernel) -> TritonKernel:
    """The Triton function of a kernel with products."""
    assert kernel.contraction is not None
    nest, tiling = kernel.contraction
    layouts = dict(kernel.reads) | dict(kernel.writes)
    pointers = {n: f"p{k}_{plain_name(n)}" for k, n in enumerate(layouts)}
    ends = [lay.extent() + lay.offset for lay in layouts.values()]
    wide = any(e.value is None or e.value > MAX_INT32_INDEX for e in ends)
    fast = all(s.operands != "f32" for s in nest.reductions().values())
    code = lower_nest(nest, tiling, layouts, Tiles(whole=True, powers=True, reciprocals=fast))
    body = Printer(tiling, pointers, "tl.int64" if wide else "tl.int32", fast).print(code)
    name = f"triton_{kernel.name}"
    lines = [
        *comments_of(kernel, layouts, pointers),
        f"# {tiling}",
        "pid = tl.program_id(0)",
        *body,
    ]
    params = ", ".join([*pointers.values(), "STAGES: tl.constexpr"])
    text = [
        MODULE_HEADER,
        "@triton.jit",
        f"def {name}({params}):",
        *(f"    {x}" for x in lines),
        "",
    ]
    config = Config((("STAGES", tiling.num_stages),), tiling.num_warps, tiling.num_stages)
    return TritonKernel(
        name=name,
        source="\n".join(text),
        args=tuple(("tensor", n) for n in layouts),
        params=tuple(pointers.values()),
        types=tuple(POINTER_TYPES[lay.dtype] for lay in layouts.values()),
        constexprs=("STAGES",),
        configs=(config,),
        grid_source=str(tiling.programs()),
        aligned=tuple(pointers.values()),
        fp_fusion=True,
    )


__all__ = ["contraction_kernel"]
