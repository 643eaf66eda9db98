"""What people compute of the product of rows and classes: some of it row by row, some not."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

PROGRAMS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {}


def case(
    f: Callable[[Tensor, Tensor, Tensor], Tensor],
) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    PROGRAMS[f.__name__] = f
    return f


@case
def ce(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(x @ w.t(), t)


@case
def ce_first_dim(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy((x @ w.t()).t(), t[: w.shape[0]] % x.shape[0])


@case
def both_softmax(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
    s = x @ w.t()
    return (s.softmax(0) * s.softmax(1)).sum()


@case
def margin(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
    return F.multi_margin_loss(x @ w.t(), t)


@case
def maxgrad(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
    s = x @ w.t()
    return (s.amax(1) - s.gather(1, t[:, None])[:, 0]).mean()


@case
def top(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
    s = x @ w.t()
    return (s.topk(3, 1).values.sum(1)).mean()


@case
def sorted_(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
    s = x @ w.t()
    return (s.sort(1).values * torch.arange(s.shape[1])).sum(1).mean()


@case
def cums(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
    return (x @ w.t()).cumsum(1).square().mean()


@case
def cums0(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
    return (x @ w.t()).cumsum(0).square().mean()


@case
def bigsum(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
    return (x @ w.t()).square().sum()


@case
def bigmean(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
    return (x @ w.t()).sigmoid().mean()


@case
def std(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
    s = x @ w.t()
    return s.std(1).mean() + s.var(1, unbiased=False).sum()


@case
def center(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
    s = x @ w.t()
    return F.cross_entropy(s - s.mean(0), t)


@case
def rowvec(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
    s = x @ w.t()
    return (s * torch.arange(s.shape[0])[:, None].to(s.dtype)).tanh().sum() / 7


@case
def colvec(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
    s = x @ w.t()
    return (s * torch.arange(s.shape[1]).to(s.dtype)).tanh().sum() / 7


@case
def sym(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
    s = x @ w.t()
    n = min(s.shape)
    return ((s[:n, :n] + s[:n, :n].t()) / 2).logsumexp(1).mean()


@case
def contrast(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
    s = F.normalize(x, dim=1) @ F.normalize(w, dim=1).t() * 5
    n = min(s.shape)
    y = torch.arange(n)
    return (F.cross_entropy(s[:n], y) + F.cross_entropy(s.t()[:n], y)) / 2


@case
def two_sums(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
    s = x @ w.t()
    return s.exp().sum() * 1e-3 + s.logsumexp(1).sum()


@case
def mixed(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
    s = x @ w.t()
    a = s.logsumexp(1)
    return (a / a.sum().detach()).sum() * F.cross_entropy(s, t)


@case
def norm_by_all(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
    s = x @ w.t()
    return F.cross_entropy(s / s.norm(), t)


@case
def seq_soft(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
    s = x @ w.t()
    s = s.view(4, -1, s.shape[1])
    return (s.softmax(1) * s).sum()


@case
def seq_shift(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
    s = (x @ w.t()).view(4, -1, w.shape[0])
    return F.cross_entropy(s[:, :-1].reshape(-1, w.shape[0]), t.view(4, -1)[:, 1:].reshape(-1))


@case
def seq_ok(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
    s = x.view(4, -1, x.shape[1]) @ w.t()
    return F.cross_entropy(s.transpose(1, 2), t.view(4, -1))


@case
def bce(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
    s = x @ w.t()
    y = F.one_hot(t, s.shape[1]).to(s.dtype)
    return F.binary_cross_entropy_with_logits(s, y)


@case
def nll(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
    return F.nll_loss((x @ w.t()).log_softmax(-1), t, reduction="sum")


@case
def entropy(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
    p = (x @ w.t()).softmax(-1)
    return -(p * p.clamp_min(1e-9).log()).sum(-1).mean()


@case
def mlp(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
    return F.gelu(x @ w.t()).matmul(w).square().mean()


@case
def gated(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
    return (F.silu(x @ w.t()) * (x @ w.flip(0).t())).matmul(w).sum()


@case
def embed(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy((x + w[t]) @ w.t(), t)


@case
def dropout(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
    return F.dropout(x @ w.t(), 0.0).logsumexp(1).mean()


@case
def squares(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
    return F.mse_loss(x @ w.t(), torch.ones(x.shape[0], w.shape[0], dtype=x.dtype))


@case
def padrows(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
    s = F.pad(x @ w.t(), (0, 0, 1, 0))[:-1]
    return F.cross_entropy(s, t)


@case
def padcols(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
    s = F.pad(x @ w.t(), (0, 3), value=-5.0)
    return F.cross_entropy(s, t)


@case
def slicecols(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
    s = (x @ w.t())[:, : w.shape[0] * 2 // 3]
    return F.cross_entropy(s, t % (w.shape[0] * 2 // 3))


@case
def masked(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
    s = x @ w.t()
    return F.cross_entropy(s.masked_fill(torch.arange(s.shape[1]) % 3 == 0, -1e4), t)


@case
def diag(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
    s = x @ w.t()
    return s.diagonal().sum() + s.logsumexp(1).sum()


@case
def triu(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
    s = x @ w.t()
    return s.triu().tanh().sum()


@case
def rowmask(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
    s = x @ w.t()
    return s[t % 2 == 0].logsumexp(1).sum()


@case
def gradclip(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
    s = x @ w.t()
    return (F.cross_entropy(s, t) + 1).log()
