"""Which results may differ from one run to the next: a statement for the Record, not a decision.

In: a `Schedule`. Out: an entry for each kernel and library call of a GPU in which the order of
additions, or of writes to one place, is not fixed. CPU kernels do all in order. `python -m dev
bench` compares calls bit by bit, and marks what differs and is not named here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from deuteron.ir.elements import is_loaded
from deuteron.ir.expr import Expr
from deuteron.ir.operations import FLOATS
from deuteron.ir.program import Extern, Origin
from deuteron.schedule.kernel import Kernel, Schedule, Store

UNORDERED_SUM = "floating-point numbers are added at computed places, in no fixed order"
UNORDERED_WRITE = "several values may be written to one place, in no fixed order"
NONDETERMINISTIC_CALL = (
    "the library's operator is not deterministic (torch.use_deterministic_algorithms)"
)

# What that function's documentation names, as operators that its backwards call, and the backwards
# of attention, which add to the gradient of the queries in no fixed order.
_LIBRARY = """
convolution convolution_backward index_put _unsafe_index_put put scatter_add index_add index_copy
scatter scatter_reduce
avg_pool3d_backward max_pool3d_with_indices_backward
_adaptive_avg_pool2d_backward _adaptive_avg_pool3d_backward adaptive_max_pool2d_backward
fractional_max_pool2d_backward fractional_max_pool3d_backward max_unpool2d max_unpool3d
upsample_linear1d_backward upsample_bilinear2d_backward upsample_bicubic2d_backward
upsample_trilinear3d_backward _upsample_bilinear2d_aa_backward _upsample_bicubic2d_aa_backward
reflection_pad1d_backward reflection_pad2d_backward reflection_pad3d_backward
replication_pad1d_backward replication_pad2d_backward replication_pad3d_backward
nll_loss2d_forward _ctc_loss_backward _embedding_bag_backward _embedding_bag_dense_backward
histc bincount median nanmedian grid_sampler_2d_backward grid_sampler_3d_backward cumsum
_scaled_dot_product_flash_attention_backward _scaled_dot_product_efficient_attention_backward
_scaled_dot_product_cudnn_attention_backward
_flash_attention_backward _efficient_attention_backward _cudnn_attention_backward
"""
NONDETERMINISTIC_OPS = frozenset(f"aten.{n}" for n in _LIBRARY.split())


def unordered(schedule: Schedule) -> Iterator[dict[str, Any]]:
    """Fields of entries of the kind "unordered"."""
    for step in schedule.steps:
        if isinstance(step, Extern):
            on_gpu = any(lay is not None and lay.device != "cpu" for lay in step.layouts)
            if on_gpu and step.op.rsplit(".", 1)[0] in NONDETERMINISTIC_OPS:
                yield entry(step.op, NONDETERMINISTIC_CALL, step.origins)
        elif step.device != "cpu":
            for reason in dict.fromkeys(reasons(step)):
                yield entry(step.name, reason, step.origins)


def entry(what: str, reason: str, origins: Sequence[Origin]) -> dict[str, Any]:
    lines = [{"node": o.node, "op": o.op, "line": o.line} for o in origins]
    return {"what": what, "reason": reason, "origins": lines}


def reasons(kernel: Kernel) -> Iterator[str]:
    dtypes = {name: layout.dtype for name, layout in kernel.writes}
    stores = [s for nest in kernel.nests for s in nest.stmts if isinstance(s, Store)]
    for s in stores:
        if s.accumulate in ("sum", "prod") and dtypes[s.tensor] in FLOATS:
            yield UNORDERED_SUM
        elif s.accumulate is None and not s.unique and any(map(is_loaded, s.index)):
            if not is_constant(s.value):
                yield UNORDERED_WRITE


def is_constant(value: Expr) -> bool:
    return all(e.op in ("literal", "cast") for e in value.walk())


__all__ = ["unordered"]
