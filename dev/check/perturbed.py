"""Runs of eager in which operators compute otherwise than they do, as they might.

In: a run of a program inside one of these modes. Out: what it shows when what is rounded is moved
(`PerturbedResults`), when operators are given contiguous copies of what they read
(`ContiguousArguments`), or when memory that they get is full of NaN (`PoisonedMemory`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._decomp import decomposition_table
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only

from deuteron.runtime.rounding import EXACT_OPERATORS

# Operators that ask of their numbers whether they are 0, as casts to bool do.
TRUTH_TESTS = frozenset(
    ["logical_and", "logical_or", "logical_xor", "logical_not", "any", "all", "count_nonzero"]
)
# Those that may give either zero where both are the largest: eager's vectors and the elements left
# over by them differ. So may `SUM_OPERATORS` of nothing but negative zeros, which begin with 0 or
# with the first of them, and gradients of norms that are 0: eager's kernels for CPUs and for GPUs
# add and subtract zeros in other orders.
ZERO_SIGN_FREE = frozenset(
    [
        "max",
        "min",
        "amax",
        "amin",
        "aminmax",
        "cummax",
        "cummin",
        "sort",
        "topk",
        "maximum",
        "minimum",
        "fmax",
        "fmin",
        "relu",
        "clamp",
        "clamp_min",
        "clamp_max",
        "threshold",
        "max_pool2d_with_indices",
        "hardtanh",
        "scatter_reduce",
        "index_reduce",
        "native_layer_norm_backward",
        "native_group_norm_backward",
        "native_batch_norm_backward",
        "_fused_rms_norm_backward",
    ]
)
# Sums of products: each is linear in each of its tensors. Other orders of the terms round another
# way, and where terms are beyond the dtype's range together, may go there.
SUMMING_NAMES = """
sum mean cumsum mm bmm mv dot vdot addmm addmv baddbmm addbmm trace convolution
convolution_backward index_add scatter_add index_put embedding_dense_backward avg_pool1d avg_pool2d
avg_pool3d avg_pool2d_backward avg_pool3d_backward _adaptive_avg_pool2d _adaptive_avg_pool3d
_adaptive_avg_pool2d_backward _adaptive_avg_pool3d_backward
"""
SUM_OPERATORS = frozenset(SUMMING_NAMES.split())
PARTIAL_SCALE = 2.0**-64
# Those for which eager's kernels for CPUs and for GPUs, and torch's own steps, have formulas that
# differ where a number is the mean (x * scale + shift rarely is exactly 0 there, (x - mean) * scale
# is), where numbers are infinite (which infinities are subtracted) or near that (Welford's
# differences of large numbers, which a sum does not form); and those in which what is rounded on
# the way cancels (the logarithm of a sum that is nearly 1, where one number is the largest by far)
# or counts for more than a unit in the last place of the result (weights of attention).
STEPWISE_OPERATORS = frozenset(
    [
        "native_layer_norm",
        "native_layer_norm_backward",
        "native_group_norm",
        "native_group_norm_backward",
        "native_batch_norm",
        "native_batch_norm_backward",
        "_native_batch_norm_legit",
        "_batch_norm_with_update",
        "_fused_rms_norm",
        "_fused_rms_norm_backward",
        "var_mean",
        "_log_softmax",
        "_log_softmax_backward_data",
        "_softmax_backward_data",
        "logsumexp",
        "_scaled_dot_product_flash_attention_for_cpu",
    ]
)
# Those whose vectors and left-over elements differ where NaN came in: what the latter give there,
# and what came in.
NAN_BRANCHES: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
    "hardswish_backward": lambda grad, x: (grad, x),
    "elu_backward": lambda grad, alpha, scale, input_scale, is_result, x: (grad * scale, x),
}


def significant(t: Tensor) -> tuple[int, ...]:
    """Strides, where they matter; -1 where they do not."""
    if t.numel() == 0:
        return (-1,) * t.dim()
    return tuple(s if n > 1 else -1 for n, s in zip(t.shape, t.stride()))


def floating(t: Tensor) -> bool:
    """Whether rounding moves the elements."""
    return t.dtype.is_floating_point and t.layout == torch.strided


def exact_whole(t: Tensor) -> Tensor:
    """Where infinities stand, and whole numbers that are not whole for their size alone."""
    return (t == t.round()) & ~(t.isfinite() & (t.abs() >= 1 / torch.finfo(t.dtype).eps))


def magnitude(t: Tensor) -> Tensor:
    return t.abs() if floating(t) else t


def two_passes(
    x: Tensor,
    dim: Any = None,
    *,
    correction: float | None = None,
    keepdim: bool = False,
    rounded: Callable[[Tensor], Tensor] = torch.clone,
) -> Tensor:
    """The variance by sums of differences from the mean. Eager's recurrence on the CPU is off by
    hundreds of units in the last place in long rows. Of equal numbers it is not exactly 0 where
    their mean is `rounded`, that of halves as f32."""
    dims = [*range(x.dim())] if dim is None or dim == [] else dim
    off = x - rounded(x.mean(dims, keepdim=True))
    points = math.prod(x.shape[d] for d in dims)
    left = max(0.0, points - (1 if correction is None else correction))
    return (off * off).sum(dims, keepdim=keepdim) / left


def with_its_tail(x: Tensor, approximate: str = "none", **_: Any) -> Tensor:
    """GELU by what is left of the normal distribution below x: eager adds 1 to what is rounded to
    -1 there, also in float64, and has zeros."""
    if approximate == "none":
        return x * 0.5 * torch.special.erfc(x * -math.sqrt(0.5))
    return x * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))


# Where nothing is wider eager's error is not known: other steps give a measure.
WIDEST_DTYPE = torch.float64
WIDEST_EPS = torch.finfo(WIDEST_DTYPE).eps
MEAN_EPS = torch.finfo(torch.float32).eps  # those of halves are f32
OTHER_FORMULAS: dict[str, Callable[..., Tensor]] = {
    "var": two_passes,
    "std": lambda *args, **kwargs: two_passes(*args, **kwargs).sqrt(),
    "gelu": with_its_tail,
}


class PerturbedResults(TorchDispatchMode):
    """Moves what operators compute by up to a unit in the last place of `dtype` (of the result's
    own where it is None), `SUM_OPERATORS` by that of their terms. What is only moved or chosen, and
    whole numbers, stay: they are exact. Zeros that were chosen change their signs. Some runs
    compute `STEPWISE_OPERATORS` in torch's own steps, and of the widest dtype what `OTHER_FORMULAS`
    names in others.

    `gaps` are the differences of what was compared for equality, with 0 where truth was asked for;
    of them, those are equal that `ties` says."""

    def __init__(
        self, seed: int, dtype: torch.dtype | None, ties: Sequence[Tensor] | None = None
    ) -> None:
        super().__init__()
        self.gaps: list[Tensor] = []
        self.made = seed, dtype, ties
        self.ties = ties
        self.generator, self.odd = torch.Generator().manual_seed(seed), seed % 2 == 1
        # By a whole unit alone, what is rounded to whole numbers would stay even or odd.
        self.share = 0.5 if seed % 8 >= 4 else 1.0
        self.eps = None if dtype is None else torch.finfo(dtype).eps

    def again(self) -> PerturbedResults:
        """One that moves the same, which has seen nothing."""
        return PerturbedResults(*self.made)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket._qualified_op_name.removeprefix("aten::")
        if self.odd and name in STEPWISE_OPERATORS:
            return self.stepped(decomposition_table[func], args, kwargs or {})
        if (
            self.odd
            and name in OTHER_FORMULAS
            and args[0].dtype is WIDEST_DTYPE
            and self.unit(args[0]) == WIDEST_EPS
        ):
            out = func(*args, **(kwargs or {}))
            other = self.stepped(OTHER_FORMULAS[name], args, kwargs or {})
            return torch.where(out.isfinite(), other, out)  # of one number there is none
        if name in TRUTH_TESTS or (
            name == "_to_copy" and (kwargs or {}).get("dtype") is torch.bool
        ):
            args = tree_map_only(Tensor, self.doubted, args)
        out = func(*args, **(kwargs or {}))
        if self.odd and name in OTHER_FORMULAS and floating(out):
            wide, size = args[0].to(WIDEST_DTYPE), min(self.unit(args[0]), MEAN_EPS)
            about = {"rounded": lambda mean: mean * (1 + size * self.way(mean))}
            other = OTHER_FORMULAS[name](wide, *args[1:], **(kwargs or {}), **about)
            out.copy_(torch.where(out.isfinite(), other, out))
        if any(r.alias_info is not None for r in func._schema.returns):
            return out
        adds = name == "index_put" and True in (*args[3:], *(kwargs or {}).values())
        sums = name in SUM_OPERATORS and (adds or name not in EXACT_OPERATORS)
        if name in ZERO_SIGN_FREE or sums:
            out = tree_map_only(Tensor, self.with_other_zero_signs, out)
        if name in ("eq", "ne"):
            out = self.compared(out, name == "eq", *map(torch.as_tensor, args))
        if name in NAN_BRANCHES:
            self.either(out, *NAN_BRANCHES[name](*args))
        if sums:
            return self.summed(func, args, kwargs or {}, out)
        return out if name in EXACT_OPERATORS else tree_map_only(Tensor, self.moved, out)

    def stepped(self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """In the steps of `func`, each moved. What they compare other runs do not."""
        known = self.gaps, self.ties
        self.gaps, self.ties = [], None
        with self:
            out = func(*args, **kwargs)
        self.gaps, self.ties = known
        return out

    def summed(self, func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> Any:
        """A sum in another order of its terms."""
        given = [t for t in tree_flatten(args)[0] if isinstance(t, Tensor) and floating(t)]
        factors = {k: abs(x) for k, x in kwargs.items() if k in ("alpha", "beta")}
        sizes = func(*tree_map_only(Tensor, magnitude, args), **{**kwargs, **factors})
        for t, size in zip(tree_flatten(out)[0], tree_flatten(sizes)[0]):
            if not isinstance(t, Tensor) or not floating(t) or t.numel() == 0:
                continue
            way = self.way(t)
            other = t.double() + self.share * self.unit(t) * size.double() * way
            whole = exact_whole(t) & exact_whole(size)
            t.copy_(torch.where(whole | ~other.isfinite(), t, other))
            if len(given) == 1 and not bool(size.isfinite().all() | ~given[0].isfinite().all()):
                # What is added on the way may be beyond the range. A part of each term is not.
                inside = (
                    func(given[0].double() * PARTIAL_SCALE, *args[1:], **kwargs) / PARTIAL_SCALE
                )
                way = self.drawn(t)
                end = torch.where(way == 0, inside, way * torch.inf)
                t.copy_(torch.where(size.isfinite(), t, end))
        return out

    def unit(self, t: Tensor) -> float:
        return torch.finfo(t.dtype).eps if self.eps is None else self.eps

    def drawn(self, t: Tensor) -> Tensor:
        """-1, 0 or 1 for each element."""
        return torch.randint(-1, 2, t.shape, generator=self.generator).double().to(t.device)

    def way(self, t: Tensor) -> Tensor:
        """Where each element moves."""
        way = self.drawn(t)
        # Many results may follow from a single element: it moves in every run.
        return 1 - 2 * way.abs() if t.numel() == 1 else way

    def either(self, out: Tensor, passed: Tensor, x: Tensor) -> None:
        """For NaN eager's vectors give NaN; its left-over elements, half types and GPUs what they
        give above 0."""
        out.copy_(
            torch.where(x.isnan(), torch.full_like(out, torch.nan) if self.odd else passed, out)
        )

    def compared(self, out: Tensor, equal: bool, a: Tensor, b: Tensor) -> Tensor:
        if a.is_complex() or b.is_complex():
            return out
        tied = self.tied(a.double() - b.double().to(a.device))
        return out if tied is None else torch.where(tied, equal, out)

    def doubted(self, t: Tensor) -> Tensor:
        tied = self.tied(t.double()) if floating(t) else None
        return t if tied is None else torch.where(tied, 0, t)

    def tied(self, gap: Tensor) -> Tensor | None:
        self.gaps.append(gap)
        return None if self.ties is None else self.ties[len(self.gaps) - 1].to(gap.device)

    def with_other_zero_signs(self, t: Tensor) -> Tensor:
        if not floating(t):
            return t
        way = torch.randint(0, 2, t.shape, generator=self.generator).to(t.device)
        zero = torch.where(way == 1, -0.0, 0.0).to(t.dtype)
        return t.copy_(torch.where(t == 0, zero, t))

    def moved(self, t: Tensor) -> Tensor:
        """Not beyond 1, where ranges end: on GPUs no later operator of the process runs after one
        that took it for a probability."""
        if not floating(t) or t.numel() == 0:
            return t
        # Below the normal numbers of the dtype units get no smaller.
        size = t.double().abs().clamp(min=torch.finfo(t.dtype).tiny)
        other = (t.double() + self.unit(t) * size * self.way(t)).to(t.dtype)
        other = torch.where(t.abs() <= 1, other.clamp(-1, 1), other)
        return t.copy_(torch.where(exact_whole(t), t, other))


class ContiguousArguments(TorchDispatchMode):
    """Gives operators contiguous copies of what they read. What they compute does not depend on
    where that lies in memory, but for a kernel that is wrong about it: batch norm's backward on the
    CPU takes weights with steps for contiguous ones. Views, writes, random draws and what names
    strides stay: theirs is to say where elements lie."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = func.overloadpacket._qualified_op_name
        placing = any(r.alias_info is not None for r in func._schema.returns)
        placing |= func._schema.is_mutable or torch.Tag.nondeterministic_seeded in func.tags
        if placing or "strided" in name or "empty" in name or "resize" in name:
            return out
        given = tree_map_only(Tensor, contiguous_copy, (args, kwargs))
        for a, b in zip(tree_flatten(out)[0], tree_flatten(func(*given[0], **given[1]))[0]):
            if isinstance(a, Tensor) and a.layout == torch.strided and 0 not in significant(a):
                a.copy_(b)
        return out


def contiguous_copy(t: Tensor) -> Tensor:
    return t.contiguous() if t.layout == torch.strided else t


class PoisonedMemory(TorchDispatchMode):
    """Leaves NaN in the memory that an operator is likely to get: blocks of the sizes of what it
    reads, and of these sizes in float32, and of sizes between are filled and given back before it
    runs. What is NaN then was computed from memory that nobody wrote."""

    COPIES = 4  # of each size: a kernel takes scratch memory besides its results

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        sizes = {(t.device, t.numel() * t.element_size() * k) for t in given for k in (1, 2, 4)}
        for device, size in tuple(sizes):
            sizes |= {(device, 1 << k) for k in range(10, size.bit_length() + 1)}
        poison = [
            torch.full((-(-size // 4),), math.nan, dtype=torch.float32, device=device)
            for device, size in sorted(sizes, key=str)
            for _ in range(self.COPIES)
        ]
        del poison
        return func(*args, **kwargs)
