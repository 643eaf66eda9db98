"""Programs that random programs were cut down to when they failed: each failed before its fix."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from deuteron.codegen.triton.scalars import literal
from dev.check.perturbed import significant
from dev.check.test_cases import How, Straight, straight


@dataclass(frozen=True)
class Case:
    """`text` is the body of a function of x, y, z; `make` gives inputs of one or several sizes."""

    text: str
    make: tuple[Callable[[], list[Tensor]], ...]
    how: How = field(default_factory=How)

    def program(self) -> Straight:
        sets = [m() for m in self.make]
        names = ", ".join("xyz"[: len(sets[0])])
        body = "".join(f"    {line.strip()}\n" for line in self.text.strip().splitlines())
        made = straight(f"def fn({names}):\n{body}", sets)
        assert made is not None
        return made


def f(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = False) -> Tensor:
    g = torch.Generator().manual_seed(sum(shape) + 1)
    return torch.randn(shape, generator=g).to(dtype).requires_grad_(grad)


def truth(*shape: int) -> Tensor:
    return f(*shape) > 0


DYNAMIC = How(dynamic=True)
BACKWARD = How(backward=True)
BOTH = How(backward=True, dynamic=True)

REGRESSIONS: dict[str, Case] = {
    # C++: `hi - s - 1` for `hi - (s - 1)`, where a segment of a loop begins at a symbolic sum
    "segment from a symbolic sum": Case(
        "return torch.cat([x[..., 1:], x[..., :1]], -1)",
        (lambda: [f(3, 3)], lambda: [f(5, 40)], lambda: [f(2, 5000)]),
        DYNAMIC,
    ),
    # GCC 12 reads elsewhere in a vector gather whose offsets are truth values
    "positions are truth values": Case(
        "return torch.take(x, x % x.numel()), y[(y > 0).long()], y[torch.where(y > 0, 1, 2)]",
        (lambda: [truth(64), f(64)],),
    ),
    # A reduction written out in the stores that use it read what an earlier store had overwritten
    "store before a written out reduction": Case(
        """
        m, p = x @ z, y @ z
        b = p * 0.5
        return b @ z.t(), (p * m).sum(0) + b * x[:, :1], p @ z.t()
        """,
        (lambda: [f(5, 300), f(5, 300), f(300, 400)],),
    ),
    # GCC takes (float)(int)x for trunc(x), which is -0.0 for -0.3
    "zero of an integer": Case(
        "return torch.copysign(x + 1, x.int()), 1 / y.long().float()[:, None]",
        (lambda: [f(67), f(67).clamp(-0.9, 0.9)],),
    ),
    # eager draws in the order in which the input lies in memory
    "dropout of what is permuted": Case(
        "return torch.nn.functional.dropout(x.movedim(0, 1), 0.3, True)",
        (lambda: [f(3, 5, 4)],),
    ),
    # the memory of a value that was computed for a library call was free while a view lived
    "view of what was computed for a call": Case(
        """v = torch.full_like(x, 2).split(2, 1)[0]
        w = v.index_add(0, torch.zeros(1, dtype=torch.int64), v[:1])
        return w.var((1,), keepdim=True, correction=0) + y * v""",
        (lambda: [f(1, 1), f(64, 64, 1, 1)], lambda: [f(5, 2), f(3, 4, 5, 2)]),
        DYNAMIC,
    ),
    # the backward recomputed from inputs that the forward had overwritten
    "recomputed from what is overwritten": Case(
        """x.mul_(0.5).addcmul_(z, z, value=0.1)
        return y / (x + 3)""",
        (lambda: [f(4, 5), f(4, 5, grad=True), f(4, 5)],),
        BACKWARD,
    ),
    # Dynamo's number in place of a tensor became one of float32
    "numbers of what is added in place": Case(
        """w = x.double()
        return w.addcmul_(y.double(), z.double(), value=0.3), w.addcdiv_(w, w.exp(), value=-0.1)""",
        (lambda: [f(4, 5), f(4, 5), f(4, 5)],),
    ),
    "recomputed from a view of what is overwritten": Case(
        """w = (x[1:] * 2).sin() * y
        x.mul_(0.5)
        return w * z, x + 1""",
        (lambda: [f(5, 4), f(4, 4, grad=True), f(4, 4, grad=True)],),
        BACKWARD,
    ),
    # a planted bug that no other test saw
    "extrema of whole numbers": Case(
        """i, j = (x * 9).int(), (y * 9).int()
        return torch.minimum(i, j), torch.maximum(i, j), i.clamp(-2, 3), i.long().clamp(max=1)""",
        (lambda: [f(30), f(31)[:30]],),
    ),
    # a library call got a view with a negative stride, whose sign was not seen: it is a symbol
    "flip before a library call": Case(
        "return x.flip(0).logcumsumexp(0), x.flip(0, 1) @ x",
        (lambda: [f(4, 4, grad=True)], lambda: [f(7, 7, grad=True)]),
        BOTH,
    ),
    # ATen makes it contiguous
    "power of a number": Case("return 2.0 ** x.t(), 0.5 ** x", (lambda: [f(3, 4)],)),
    "gradient of nothing taken": Case(
        "return x.take(y), x.sum()",
        (lambda: [f(2, 3, grad=True), torch.zeros(2, 0, dtype=torch.int64)],),
        BACKWARD,
    ),
    # results that lie in one tensor are views of one, also where the index algebra needs none
    "views of a constant": Case(
        """v = torch.full_like(x, 2).clone()
        w = torch.where(x > 0, x, 1).flip(0)
        return v, v[1:], w, w.unsqueeze(1), y & y, (y & y)[1:]""",
        (lambda: [f(4, 5), truth(3, 5)],),
    ),
    "views of what is a view here": Case(
        "v = y & y\nreturn v[1:].reshape(2, 5), v.chunk(2, 0)[-1], v",
        (lambda: [f(4, 5), truth(3, 5)],),
    ),
    "overlapping views": Case(
        "return x.flip(0).unfold(0, 2, 1), torch.arange(x.shape[1]).unfold(-1, 2, 1)[1:]",
        (lambda: [f(4, 5)], lambda: [f(7, 9)]),
        DYNAMIC,
    ),
    # eager writes into a copy whose elements share memory
    "part of what overlaps": Case(
        """v = x.unfold(1, 3, 2)
        w = torch.slice_scatter(v, v[:1] + 1, 0, 0, 1)
        return torch.select_scatter(v, v.select(2, -1), 2, 0), w""",
        (lambda: [f(3, 9)],),
    ),
    # one result whose text fills a line; a stride that torch counts as at least one
    "one long result": Case(
        """v = torch.nn.functional.avg_pool1d(x[None, None].flatten(0, -3), 2)
        return v.unfold(-1, 3, 2)""",
        (lambda: [f(2, 2, 1, 13)], lambda: [f(3, 3, 1, 20)]),
        DYNAMIC,
    ),
    # C++: an axis that an index walks backwards was split into a negative number of steps
    "split axis walked backwards": Case(
        """v = x.roll(1, 1).view(-1, x.shape[2], x.shape[3])
        return torch.nn.functional.pad(v, (1, 1), mode='replicate').flip(0)""",
        (lambda: [f(5, 3, 4, 3)],),
    ),
    # C++: two reads of an expanded tensor became one, whose address was computed twice
    "two reads that are one": Case(
        """v = torch.nn.functional.embedding(y % 2, x)
        return torch.where(z, v, v.flip(0)) * 2""",
        (lambda: [f(1, 8).expand(2, 8), torch.arange(17), truth(17, 8)],),
    ),
    # C++: a check for positions was done before the condition under which the position is used
    "checks behind a condition": Case(
        "return x.roll(1, -1).chunk(2, 1)[-1]",
        (lambda: [f(2, 2, grad=True)],),
        BACKWARD,
    ),
    # AOTAutograd overwrites the input after the forward, which had saved it
    "saved and overwritten later": Case(
        """v = torch.log_softmax(y, 1) / (x.abs() + 2)
        y.copy_(x)
        return v""",
        (lambda: [f(1, 3, grad=True), f(1, 3)],),
        BACKWARD,
    ),
    # strides of eager's kernels
    "positions in another order": Case(
        "return x[y.t() % 4], x[:, y.t() % 5], x[y.t() % 4, y % 5]",
        (lambda: [f(4, 5), torch.arange(9).view(3, 3)],),
    ),
    "positions with one element in most dimensions": Case(
        """v = x[y % 16, y % 1]
        return v, torch.where(z > 0, v, z.reshape(16, 1, 1).expand(16, 16, 1).diag_embed())""",
        (
            lambda: [
                f(16, 1, 1),
                torch.arange(16)[:, None, None, None].as_strided((16, 1, 1, 1), (1, 16, 16, 16)),
                f(16, 1, 1),
            ],
        ),
    ),
    # torch's rule takes no tensor without channels
    "pooling of no channels": Case(
        "return F.adaptive_avg_pool1d(x[None, None].flatten(0, -3), 2)",
        (lambda: [f(0, 0, 8)], lambda: [f(0, 0, 4)]),
        DYNAMIC,
    ),
    "logsigmoid of what is permuted": Case(
        "return torch.nn.functional.logsigmoid(x.t())", (lambda: [f(4, 5, grad=True)],), BACKWARD
    ),
    "norms of one element": Case(
        "return x.norm(p=1, dim=-1), torch.linalg.vector_norm(x, 2, -1, True)",
        (lambda: [f(4, 1)],),
    ),
    # eager returns the input itself: the graph returns what was copied into
    "an input that is mutated and returned": Case(
        "w = torch.fmod(x, x.abs() + 0.5)\ny.mul_(-2)\nreturn y.type_as(z), w",
        (lambda: [f(3, grad=True), torch.arange(2), torch.arange(3)],),
        BACKWARD,
    ),
    # every other element of rows of three: a row ends where the next begins, and shares nothing
    "every other column of what reduces to an input": Case(
        "y = x & x\nreturn y[..., ::2]", (lambda: [truth(1, 3, 3)],)
    ),
    # a stride of a library's result, of several terms: no sign is proved
    "strides of spectra": Case(
        "s = torch.fft.rfft(x.unfold(-1, 4, 4 - y.shape[0]).sum(-1)[..., 2:])\n"
        "return torch.view_as_real(s.transpose(-1, -2) * 2), "
        "torch.view_as_real(torch.stft(x, 16, 4, return_complex=True).mT)",
        (lambda: [f(3, 40), f(1)], lambda: [f(5, 70), f(2)]),
        DYNAMIC,
    ),
    # in a set of lanes that is cut off at its one lane, a value of that lane depends on no lane
    "a value of a single lane": Case(
        "v = x.norm(p=1, dim=1)\n"
        "v = torch.minimum(v, v)\n"
        "d = torch.diag_embed(v)\n"
        "d = torch.slice_scatter(d, d.narrow(-1, 0, 1), -1, 0, 1)\n"
        "return v / (torch.logaddexp(d, x).abs() + 0.5)",
        (lambda: [f(3, 3, grad=True)],),
        BACKWARD,
    ),
    # a size of several terms that torch had guarded to be 1
    "a broadcast part": Case(
        "return torch.where(x, y.chunk(2, 2)[-1], y), y + y[..., 2:]",
        (lambda: [truth(2, 1, 3), f(2, 1, 3)], lambda: [truth(5, 1, 3), f(5, 1, 3)]),
        DYNAMIC,
    ),
    # eager draws in the order in which the input lies in memory, which was passed as a view
    "random numbers like a broadcast": Case(
        "return torch.randn_like(torch.where(x.t(), y, y)) + y", (lambda: [truth(4, 3), f(1, 4)],)
    ),
    # C++: a kept value was read outside the loop that its place depends on, in a stretch of the
    # row in which the value is the same everywhere
    "kept values of a row's stretch": Case(
        """h = x.shape[-1] // 2
        v = torch.cat([-x[..., h:], x[..., :h]], -1)
        w = torch.cat([x[..., :1].expand(-1, h).exp(), x[..., h:]], -1)
        return (
            torch.nn.functional.layer_norm(v, v.shape[-2:]),
            torch.nn.functional.layer_norm(w, w.shape[-2:]),
        )""",
        (lambda: [f(2, 2, dtype=torch.bfloat16)], lambda: [f(6, 70)]),
    ),
    # a position beyond its dimension was reported where a padding's mask excludes it
    "mirrored, then padded with a number": Case(
        """v = torch.nn.functional.pad(x, (1, 0), mode="reflect")
        return torch.nn.functional.pad(v, (1, 2), value=0.5)""",
        (lambda: [f(1, 8, 2)],),
    ),
    # GCC 12 read from beyond an array what lanes had reported: indices in range were refused
    "classes of a remainder": Case(
        """v = (y % x.shape[-1]).long()
        return torch.nn.functional.nll_loss(torch.log_softmax(x, -1), v, reduction="none")""",
        (lambda: [f(33, 2, grad=True), torch.arange(-16, 17)],),
        BACKWARD,
    ),
    # GCC 12 took masks of lanes in the wrong order where elements lie side by side
    "rows twice, one after the other": Case(
        """v = x.repeat_interleave(2, 0)
        w = y.repeat_interleave(2, 0).flip(1)
        return torch.cat([v, v]), torch.cat([w, w])""",
        (lambda: [f(13, 3), f(13, 2)],),
    ),
    # and also where a loop had more edges than it is cut at
    "mirrored rows, one after the other": Case(
        "return torch.cat([(x + k).flip(1) for k in range(9)])",
        (lambda: [f(13, 3)],),
    ),
    # g++ 12: the address of a load under a mask counted with the loop that it had been moved out of
    "rows times rows": Case(
        """v = (x ^ 3).to(torch.bfloat16)
        s = v @ v.mT
        return v, s, torch.softmax(s, -1), torch.softmax(s, -1) @ v""",
        (lambda: [(f(17, 3, 67) * 8).to(torch.int64)],),
    ),
    # g++ 12: of stores to the same elements, in rows that were written out, the last was not last
    "rows of constants": Case(
        """v = torch.where(x > x, x, 1.5)
        return (v / (x.abs() + 3))[:, y % 11], torch.lerp(v, v, 0.3).sum(0)""",
        (lambda: [f(17, 23, dtype=torch.float16)[:, :22:2], (f(17, 17) * 9).to(torch.int64)],),
    ),
    # g++ 12: of equal constants with a zero behind them, moved as one number, the zero was lost
    "equal numbers and a zero": Case(
        """v = torch.where(x > x, x, 1.5)
        rows = torch.cat([v, torch.zeros_like(v[:, :1])], 1).sum(0)
        return torch.dot(v.reshape(-1), v.reshape(-1)), x.to(torch.bool), rows""",
        (lambda: [f(3, 13, dtype=torch.float64)], lambda: [f(8, 7, dtype=torch.float64)]),
    ),
    # Of two values kept for a later pass over the row that are the same in a segment of it (there
    # the triangle has them all), one was not stored (seed 68008931)
    "a triangle's rows and all": Case(
        """v = torch.atan2(x, x)
        rows = torch.nn.functional.layer_norm(v.triu(1), v.shape[-1:])
        moved = torch.nn.functional.pad(v, (-1, 1))
        return rows, torch.mv(moved, moved[0]), v.to(torch.bool)""",
        (lambda: [f(2, 3)], lambda: [f(3, 40)]),
    ),
    # GCC 12 took what is loaded under one mask in the wrong order, too (its bug 114375)
    "elements twice": Case(
        """v = torch.cat([x, x], -2)
        return torch.stack([v, v], 2), torch.cat([y, y]).repeat_interleave(2, 1)""",
        (lambda: [f(15, 8), f(7, 6)],),
    ),
    # torch's rule for sizes that may change heeds steps of dimensions of one element; eager's does
    # not here
    "rows of what has one, by positions of any number": Case(
        "return y[:, x % y.shape[1]], y[x % y.shape[0]], y[:, :, x % y.shape[2]]",
        (
            lambda: [torch.tensor([[5, 4]]), f(9).as_strided((1, 1, 2), (1, 1, 1))],
            lambda: [torch.tensor([[5, 4, 1]]), f(9).as_strided((1, 1, 4), (1, 1, 1))],
        ),
        DYNAMIC,
    ),
    # the base of a view, returned as the same object as a detached result, had no gradient
    "detached beside a view": Case(
        """v = torch.nn.functional.pad(x, (0, 1, 2, 0))
        return v.detach(), v.select(-2, 0), torch.sin(y)""",
        (lambda: [f(1, 2, 3, grad=True), f(2, 2, grad=True)],),
        BACKWARD,
    ),
    # zeros beside the targets were products with a gradient that is not finite
    "infinite gradient of classes": Case(
        """v = torch.nn.functional.nll_loss(x, y, reduction="none")
        w = torch.nn.functional.nll_loss(x, y)
        return v * float("inf"), w * float("inf")""",
        (lambda: [f(4, 5, grad=True), torch.tensor([1, 4, -100, 0])],),
        BACKWARD,
    ),
    # of NaN eager's vectors give another gradient than the elements that are left over
    "NaN through elu": Case(
        "return torch.nn.functional.elu(x), torch.nn.functional.selu(x)",
        (lambda: [torch.full((33,), torch.nan, requires_grad=True)],),
        BACKWARD,
    ),
    # windows along an axis that is not the last, of sizes that change, were not seen to overlap
    "windows across rows": Case(
        """v = torch.nn.functional.pad(x, (1, 2), value=0.5)
        return v.unfold(-2, 3, 2)""",
        (lambda: [f(1, 7, 7)], lambda: [f(2, 9, 5)]),
        DYNAMIC,
    ),
    # the whole of what a rewrite put there was not known to be a view: its memory was used again
    "part of a constant": Case(
        """v = (torch.zeros_like(x) + x.shape[1]).chunk(2, 0)[-1]
        return v, torch.bernoulli(x.sigmoid())""",
        (lambda: [f(1, 2)],),
    ),
    # a part that is the whole was given the strides of what it is a part of, which was never stored
    "part of what is repeated": Case(
        """v = torch.logical_and(x, y).tile((2,))
        return v.split(2, 2)[0]""",
        (lambda: [f(4, 3, 1), f(4, 3, 1)],),
    ),
    # all cases of 31 masks were listed before they were found to be too many
    "product with a row of differences": Case(
        """v = x - x.mean(0, keepdim=True)
        return torch.mv(v.reshape(-1, 33), v.reshape(-1, 33)[0])""",
        (lambda: [f(31, 4, 33, grad=True)],),
        BACKWARD,
    ),
    # of several NaN in a window eager takes the last: the gradient went to the first
    "several NaN in a window": Case(
        """v = torch.where(x > 0.4, float("nan"), x)
        a = torch.nn.functional.max_pool1d(v, 3, 2, 1)
        b = torch.nn.functional.max_pool2d(v.unsqueeze(1), (2, 5), return_indices=True)
        return a, b, torch.nn.functional.adaptive_max_pool1d(v, 1, return_indices=True)""",
        (lambda: [f(3, 6, 70, grad=True)],),
        BACKWARD,
    ),
    # a view of what the input was given, not of the input: where sizes change it began at 0
    "part of an input that is overwritten": Case(
        """v = x.chunk(2, -2)[-1]
        x.zero_()
        w = y.narrow(-1, 0, (y.shape[-2] + 1) // 2).unflatten(-3, (-1, 1))
        w.relu_()
        return v, w""",
        (
            lambda: [f(2, 1), f(530).as_strided((16, 1, 16), (33, 33, 2), 1)],
            lambda: [f(7, 3), f(50).as_strided((3, 4, 2), (8, 2, 1), 5)],
        ),
        DYNAMIC,
    ),
    # each of two results that lie in memory with holes was stored for itself
    "views of what has steps": Case(
        """v = torch.select_scatter(x, x.select(-1, -1), -1, 0)
        w = torch.slice_scatter(y, y[:2] * 2, 0, 1, 3)
        return v[-2:], v, w.t(), w[1]""",
        (lambda: [truth(16)[1::2], f(8, 9)[2:, ::3]],),
    ),
    # 4*(i//4) + (i%4)//2*2 + i%2 was not seen to be i
    "flattened repetitions": Case(
        "v = x.repeat_interleave(2, -1)\nreturn v.flatten(0), v, v.view(-1, 2)[1:]",
        (lambda: [f(2, 1, 1, 2)],),
    ),
    # the oracle's steps of a unit in the last place were made in f32, so that no f64 moved
    "whole numbers where rounding decides, in f64": Case(
        "v = torch.nn.functional.cosine_similarity(x, x, dim=-3)\nreturn v.to(torch.int32)",
        (lambda: [f(6, 31, 11, dtype=torch.float64)],),
    ),
    # torch's pass that makes tensors of Python numbers (symbolic ones) puts nodes in the places of
    # others; their views still were in the memory of those that went
    "a view that overlaps, of a quotient by a root of a size": Case(
        "return ((x @ x.mT) / x.shape[-1] ** 0.5).as_strided((2, 2), (1, 1))",
        (lambda: [f(2, 2)], lambda: [f(3, 3)]),
        DYNAMIC,
    ),
    # what an input is copied for before it is written to was stored as often as it is repeated
    "repeated along a dimension, and its input is written to": Case(
        """v = x & x
        x[..., 0] = x[..., -1]
        return v.unsqueeze(1).expand(-1, 3, -1)""",
        (lambda: [truth(2, 3)],),
    ),
    # the mean of equal numbers was another one, their variance 1e-14: the gradient of a deviation
    # that eager takes for 0 was that of 1e-7
    "deviations of equal numbers": Case(
        """
        rows, far = torch.cat([x] * 16), x.double().expand(11, 5).std(0)
        same = torch.maximum(rows, y.expand(16, 5))
        whole = y[:, :1].expand(3, 7).std()
        return rows.var(0), same.std(0, correction=0), same.t().var(-1), far, whole
        """,
        (lambda: [f(1, 5, grad=True), f(1, 5).abs().add(1).requires_grad_()],),
        BACKWARD,
    ),
    # where a weight is infinite, eager's formulas for CPUs give NaN, torch's own steps infinities
    # (the oracle took infinity for eager's NaN, and that for an error)
    "norms whose weights are infinite": Case(
        """
        w = torch.where(torch.arange(8) == 6, -torch.inf, z)
        n = torch.nn.functional
        return n.layer_norm(x, (8,), w, w), n.group_norm(y, 4, w, w)
        """,
        (lambda: [f(8, 8, grad=True), f(3, 8, 5, grad=True), f(8)],),
        BACKWARD,
    ),
    # Welford's differences of numbers at the ends of the range are NaN, their sum is not
    "means of numbers at the ends of the range": Case(
        """
        v = torch.where(x.abs() > 1, x * torch.inf, x.double()).nan_to_num(0.0)
        return torch.var_mean(v, -1, correction=0)[1]
        """,
        (lambda: [f(4, 33)],),
    ),
    # the program does not run in float64, where `to` gives the leaf itself: places of NaN were
    # eager's and nothing else
    "NaN where there is no run in float64": Case(
        """
        y.to(torch.float64).tanh_()
        v = torch.where(x > 0.8, torch.nan, x)[:, :4]
        w = torch.where(z > 1.5, -torch.inf, z)
        return torch.nn.functional.elu((v[..., None] * w).sum(-2))
        """,
        (
            lambda: [
                f(7, 8, dtype=torch.float16, grad=True),
                f(8, dtype=torch.float16, grad=True),
                f(4, 16, dtype=torch.float16, grad=True),
            ],
        ),
        BACKWARD,
    ),
    # libm's vectors round otherwise than libm: what was computed again was not the minimum it had
    # been, and nothing was equal to that
    "computed again in f64": Case(
        "return torch.asinh(x).amin(1), torch.tanh(x).amax(1)",
        (lambda: [f(6, 6, 6, dtype=torch.float64, grad=True)],),
        BACKWARD,
    ),
    # torch's rules give dimensions that an operand does not have steps, which decide where no
    # operand tells two dimensions apart
    "dimensions that an operand does not have are expanded": Case(
        "return torch.minimum(x, y), torch.remainder(z, x.abs() + 2.0)",
        (
            lambda: [
                f(2, 2),
                f(4).as_strided((1, 2, 1, 2), (1, 1, 2, 2)),
                f(2).as_strided((1, 1, 1, 2), (1, 1, 1, 1)),
            ],
        ),
    ),
    # torch's fake kernel of a view gives dimensions of one element other steps, so that the pooling
    # took its input for contiguous, or channels last
    "steps of one element that a view gives": Case(
        "return torch.nn.functional.avg_pool1d(x[None, None].flatten(0, -3), 2)",
        (lambda: [f(12).as_strided((1, 2, 6), (12, 1, 2))],),
    ),
    # eager's own backward reads such weights as though they were contiguous
    "weights of a batch norm with steps": Case(
        "return torch.nn.functional.batch_norm(x, None, None, y[::2], y[::2], True)",
        (lambda: [f(4, 4, grad=True), f(8)],),
        BACKWARD,
    ),
    # torch's rule for a choice puts it in memory as it finds the first of its operands
    "chosen from what is broadcast": Case(
        "return torch.where(x > 0, y, z)",
        (lambda: [f(4).as_strided((1, 2, 1, 1), (1, 1, 2, 2)), f(2, 1), f(2, 1)],),
    ),
    # Both loops over pairs were taken for the one loop of another reduction which reads the same
    # vector: only pairs of equal positions were looked at
    "all pairs beside a reduction of a square": Case(
        """n = torch.round(x)
        d = torch.diag_embed(x)
        m = d.max()
        s = (d - y).abs().sum()
        p = torch.where(n[:, None] > n, n[:, None], 0)
        return m, s, p / p.abs().max()""",
        (lambda: [f(31), f(31, 31)],),
    ),
    # a choice of equal values became the values, broadcast, in whose smaller memory the strides
    # that are given do not fit
    "strides given for a choice of equal values": Case(
        """
        v = torch.where(x, y, y.flip(0)).broadcast_to(2, 1, 1, 2, 2)
        return torch.tanh(v.as_strided((2, 2), (1, 1))), z[None].flip(0).as_strided((2,), (2,)) + 1
        """,
        (lambda: [truth(2), f(2).as_strided((1, 1, 2, 1), (2, 2, 1, 1)), f(9)[5:]],),
    ),
    # a view that is not proven inside its tensor was one of what the library was given instead
    "strides given for a part, sizes that change": Case(
        """
        v = torch.where(x > 0, x, x.flip(0))[:, 1:]
        w = torch.as_strided_scatter(x.sin().cumsum(1), y, (2,), (x.shape[1] // 3,), 1)
        return v.as_strided((2, 2), (1, 1), 1) + 1, w.cos()
        """,
        (lambda: [f(9)[5:].view(1, 4), f(2)], lambda: [f(12)[5:].view(1, 7), f(2)]),
        DYNAMIC,
    ),
    # the convolution's result was laid out as channels last
    "strides given for a convolution": Case(
        "return torch.nn.functional.conv2d(x, y)[1:].as_strided((4,), (3,), 2) + 1",
        (lambda: [f(2, 16, 5, 5), f(16, 16, 3, 3)],),
    ),
    # torch traces zeros like a tensor without its steps of one element, so that the pooling took
    # them for contiguous
    "steps of one element of zeros": Case(
        """
        x.zero_()
        return torch.nn.functional.adaptive_avg_pool1d(x[None, None].flatten(0, -3), 2)
        """,
        (lambda: [f(17).as_strided((17, 1), (1, 17))],),
    ),
    # those of a tensor and a number, and with sizes that change those of views and of zeros
    "steps of one element of a tensor and a number": Case(
        "return torch.nn.functional.adaptive_avg_pool1d((x.t() + 0)[None, None].flatten(0, -3), 2)",
        (lambda: [f(1, 17, dtype=torch.bfloat16)],),
    ),
    "steps of one element where sizes change": Case(
        """
        v = x.t() + 0
        v.zero_()
        return torch.nn.functional.adaptive_avg_pool1d(v[None, None].flatten(0, -3), 2)
        """,
        (lambda: [f(1, 17, dtype=torch.bfloat16)], lambda: [f(1, 8, dtype=torch.bfloat16)]),
        DYNAMIC,
    ),
    # eager's copy has what lies between the elements, which strides may then read (61003138,
    # 62006483)
    "what lies between": Case(
        """a = torch.select_scatter(x, x.select(0, 1), 0, 2)
        b = torch.slice_scatter(a.transpose(0, 1), x[:1].transpose(0, 1), 1, 0, 1)
        return a.as_strided((4, 5), (3, 1)), b.t()[1:].as_strided((2, 7), (1, 1))""",
        (lambda: [f(5, 6, 2)[..., :1].select(-1, 0)],),
    ),
    "written in place between others": Case(
        """x.addcdiv_(y, y.abs() + 1, value=-0.1)
        return x.as_strided((2, 2), (1, 1)) + 1""",
        (lambda: [f(33, 4)[:, ::4], f(33, 1)],),
    ),
    # torch's rule was asked of a copy that is not known to be in order, without end (62004011)
    "mirrored half of rows": Case(
        """v = torch.nn.functional.pad(x.chunk(2, -1)[-1][None], (1, 0), mode="reflect")
        return torch.lerp(v, v, 0.3), v""",
        (lambda: [f(8, 11)], lambda: [f(64, 13)]),
        DYNAMIC,
    ),
    # << of a tensor and a number has a name of its own, and strides as a sum has (61002243)
    "shifted by a number": Case(
        "return x >= (y << 1), y >> 1",
        (lambda: [f(17, 1), torch.arange(17).reshape(17, 1, 1).permute(1, 2, 0)],),
    ),
}


@pytest.mark.parametrize("name", REGRESSIONS)
def test_regressions(name: str) -> None:
    case = REGRESSIONS[name]
    failure = case.program().check(case.how)
    assert failure is None, str(failure)


def test_every_program_is_eager_s() -> None:
    """What stands here runs in eager, and has several sizes where it is dynamic."""
    for name, case in REGRESSIONS.items():
        p: Any = case.program()
        for given in p.sets():
            p.function()(*given)
        assert not case.how.dynamic or len(case.make) > 1, name


NONZERO: dict[str, Callable[[Tensor], Any]] = {
    "arithmetic": lambda b: b.nonzero() * 2,
    "power": lambda b: 2.0 ** b.nonzero(),
    "two operands": lambda b: torch.copysign(b.nonzero().float(), b.nonzero()[:, :1].float()),
    "dropout": lambda b: torch.nn.functional.dropout(b.nonzero().float().t(), 0.0),
}


@pytest.mark.parametrize("name", NONZERO)
def test_sizes_that_depend_on_data(name: str) -> None:
    """Rewrites asked whether such results are contiguous, which torch does not know."""
    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(NONZERO[name], backend="deuteron", fullgraph=True)
        for b in (truth(2, 3), truth(4, 5), torch.ones(1, 1, dtype=torch.bool)):
            want, got = NONZERO[name](b), compiled(b)
            torch.testing.assert_close(got, want)
            assert significant(got) == significant(want)


def test_constants_that_f32_cannot_hold_are_typed() -> None:
    """Triton takes a plain number for an f32, as its interpreter does not: f64 kernels on GPUs were
    off by 3e-8."""
    assert literal(1 / 6, "f64") == "tl.full([], 0.16666666666666666, tl.float64)"
    assert literal(0.5, "f64") == "0.5" and literal(0.1, "f32") == "0.1"


def test_strides_that_are_given_as_arguments() -> None:
    """Numbers that may be anything, for all that is known of them."""

    def f(x: Tensor, n: int, m: int) -> tuple[Tensor, Tensor]:
        return x[1:].as_strided((2, 2), (n, m), 1) + 1, (x * 2)[1:].as_strided((2, 2), (n, m), 2)

    torch._dynamo.reset()
    compiled = torch.compile(f, backend="deuteron", dynamic=True, fullgraph=True)
    x = torch.arange(20.0)
    for part, n, m in ((x, 3, 2), (x[:12], 4, 5)):
        for got, want in zip(compiled(part, n, m), f(part, n, m), strict=True):
            torch.testing.assert_close(got, want)
            assert got.stride() == want.stride()
