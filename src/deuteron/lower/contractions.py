"""Which matrix products are loops of ours, and which are library calls.

In: the operands of a product. Out: "generated", or why the library multiplies: the times that both
would take (`base.products`), which are in the Record either way.
"""

from __future__ import annotations

from deuteron.base.device import DeviceSpec, device_spec, named_gpu
from deuteron.base.products import (
    FEW_ROWS,
    MIN_TENSOR_CORE_SIDE,
    PROGRAM_NS,
    SMALL_PRODUCT,
    Product,
    generated_us,
    library_us,
    share_kernels,
)
from deuteron.ir.index import hint, product
from deuteron.ir.operations import ITEMSIZE
from deuteron.lower.core import LowerContext, Value

# Whose figures stand for a GPU where none is known.
DEFAULT_GPU = "H100"
PRODUCTS = tuple(f"aten.{n}." for n in ("mm", "bmm", "mv", "dot", "addmm", "baddbmm", "addmv"))
MIN_CALL_GAIN = 0.02  # by what share a call must be faster, which nothing can be fused with


def choose_contraction(ctx: LowerContext, a: Value, b: Value) -> str:
    """ "generated", or why the library multiplies."""
    p, spec = described(ctx, a, b), figures(ctx)
    ours, theirs = generated_us(p, spec), library_us(p, spec)
    if share_kernels(a.dtype, spec) and has_tiles(p, spec):
        return f"{p}: the library {theirs:.1f} us, unless the schedule finds one kernel for it"
    text = f"{p}: generated {ours:.1f} us, the library {theirs:.1f} us"
    loops = ours <= (1 + MIN_CALL_GAIN) * theirs
    ctx.record.add(
        "decision",
        subject="product",
        accepted=loops,
        reason="generated" if loops else "library",
        detail=text,
        first=ctx.node.name if ctx.node is not None else "",
        us=round(theirs - ours, 3),
        generated_us=ours,
        library_us=theirs,
        along=list(p.sides),
    )
    return "generated" if loops else text


def has_tiles(p: Product, spec: DeviceSpec) -> bool:
    """Whether it is large enough for tiles: the schedule chooses who computes it."""
    if spec.kind == "cpu":
        large = p.work > SMALL_PRODUCT and min(p.m, p.n) > FEW_ROWS[p.dots]
        return large and p.batch * PROGRAM_NS / 1e3 / spec.cores < generated_us(p, spec)
    return min(p.m, p.k, p.n) >= MIN_TENSOR_CORE_SIDE


def described(ctx: LowerContext, a: Value, b: Value) -> Product:
    *batch, m, k = a.shape
    n = b.shape[-1]
    views = ((ctx.strided(a), -1), (ctx.strided(b), -2))
    left, right = (view is None or view.strides[axis].value == 1 for view, axis in views)
    return Product(
        hint(product(batch)),
        hint(m),
        hint(k),
        hint(n),
        a.dtype,
        ITEMSIZE[a.dtype],
        (left, right),
        surrounded(ctx),
    )


def surrounded(ctx: LowerContext) -> bool:
    """Whether the result goes into something that could share the product's kernel."""
    users = ctx.node.users if ctx.node is not None else {}
    return any(u.op == "call_function" and not _multiplies(str(u.target)) for u in users)


def _multiplies(target: str) -> bool:
    return target.startswith(PRODUCTS)


def figures(ctx: LowerContext) -> DeviceSpec:
    """Of the device that the product runs on."""
    device = str(ctx.fake().device) if ctx.node is not None else ctx.device
    kind = ctx.like or device.partition(":")[0]
    if ctx.specs is not None:
        spec = ctx.specs(device)
        if spec.kind == kind or not ctx.like:
            return spec
    if kind == "cpu":
        return device_spec("cpu")
    usual_gpu = named_gpu(DEFAULT_GPU)
    assert usual_gpu is not None
    return usual_gpu


__all__ = ["choose_contraction"]
