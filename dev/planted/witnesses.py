"""Programs that planted bugs make wrong, run with and without the self-check.

    python -m dev.planted.witnesses [--interpret] [--accesses] NAME...    (all without names)

For each program a line of JSON: what the compiled program gives (`plain`: right, wrong, or the
error that it raises), and what the self-check says of it (`checked`: right, or the kernel and the
stage that it names). With --interpret kernels are Triton's, interpreted (TRITON_INTERPRET=1). With
--accesses every access is checked too, and nothing runs unchecked, which ended the process before.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from deuteron.backend import deuteron_backend
from deuteron.base.errors import VerifyError
from deuteron.runtime.support import AccessError

Made: TypeAlias = Tensor | tuple[Tensor, ...]
Options = dict[str, bool]
PROGRAMS: dict[str, Callable[[Tensor], Made]] = {}


def program(f: Callable[[Tensor], Made]) -> Callable[[Tensor], Made]:
    PROGRAMS[f.__name__] = f
    return f


# -- indices: x is 24 by 20 ------------------------------------------------------------------------
@program
def reshaped(x: Tensor) -> Made:
    y = x.reshape(8, 3, 4, 5).permute(2, 0, 3, 1).reshape(32, 15)
    return y.reshape(60, 8).t().contiguous() + 1, y.reshape(-1)[7:].reshape(11, 43).sum(0)


@program
def rolled(x: Tensor) -> Made:
    y = x.roll((3, -2), (0, 1)).reshape(16, 30)
    return y.roll(7, 0).t().reshape(-1, 6).exp(), x.flatten().roll(5).reshape(6, 80) * 2


@program
def in_parts(x: Tensor) -> Made:
    y = x.flatten().repeat(14)[: 8 * 4 * 196].view(8, 4, 196)
    a, b, c = x.abs()[:, 0].view(3, 8, 1, 1) + 0.5
    return (((y + a).abs() / b).log1p() * c).sum((0, 2))


@program
def flipped(x: Tensor) -> Made:
    y = x.flip(0).reshape(40, 12).flip(1)
    return y.reshape(24, 20).flip(0, 1) + x, y.sum(1)


@program
def windows(x: Tensor) -> Made:
    y = x.unfold(0, 5, 3).unfold(1, 4, 2)
    return y.sum((-1, -2)), y.reshape(-1, 20).amax(1), x.reshape(6, 4, 20).unfold(1, 2, 1) * 3


@program
def reduced(x: Tensor) -> Made:
    image = x.reshape(1, 2, 12, 20)
    columns = F.unfold(image, 3, padding=1, stride=2)
    return columns * 2, F.fold(columns, (12, 20), 3, padding=1, stride=2)


@program
def shuffled(x: Tensor) -> Made:
    image = x.reshape(1, 8, 6, 10)
    return (
        F.pixel_shuffle(image, 2).sin(),
        F.channel_shuffle(image, 4) + 1,
        F.pixel_unshuffle(image, 2).reshape(16, 30).cumsum(1),
    )


@program
def padded(x: Tensor) -> Made:
    image = x.reshape(1, 2, 12, 20)
    y = F.pad(image, (2, 3, 1, 4), mode="circular")
    z = F.pad(image, (2, 3, 1, 4), mode="reflect").reshape(-1)[::3]
    return y.reshape(34, 25) * 2, z.exp(), F.pad(x, (3, 0)).reshape(23, 24).roll(1)


@program
def repeated(x: Tensor) -> Made:
    y = x.repeat(3, 2).reshape(48, 60)
    return y[5:, ::7].sin(), x.repeat_interleave(3, 1).reshape(36, 40) + 1, x.tile(2, 1)[3:30]


@program
def upsampled(x: Tensor) -> Made:
    image = x.reshape(1, 2, 12, 20)
    up = F.interpolate(image, scale_factor=3.0)
    return (
        up.reshape(40, 108) + 1,
        F.adaptive_avg_pool2d(image, (5, 7)),
        F.max_pool2d(image, 3, 2, 1),
    )


@program
def strided(x: Tensor) -> Made:
    y = x.as_strided((10, 7, 3), (20, 2, 5), 3)
    return y.reshape(30, 7).t() * 2, x.diagonal(2).cumsum(0), x[1::2, 3:17:3].reshape(-1).flip(0)


@program
def gathered(x: Tensor) -> Made:
    i = (torch.arange(24) * 7) % 24
    y = x[i].reshape(12, 40)
    return y[:, i] * 2, x.gather(0, i.reshape(24, 1).expand(24, 20)), torch.take(x, i * 20 + 1)


@program
def joined(x: Tensor) -> Made:
    y = x.repeat(1, 200)
    return torch.cat([y[:, 1:3000] * 2, y[:, :1500]], 1), torch.stack([x, x.flip(0)], 1).sum(0)


@program
def nested(x: Tensor) -> Made:
    y = x.reshape(2, 12, 20).permute(1, 0, 2).reshape(3, 160).reshape(15, 32)
    z = y.permute(1, 0).reshape(4, 8, 15).permute(2, 1, 0).reshape(480)
    return z.reshape(10, 48).roll(11, 1).reshape(24, 20) + x, z[13:].reshape(-1, 467).exp()


# -- dependences and memory ------------------------------------------------------------------------
@program
def shifted(x: Tensor) -> Made:
    y = x.exp()
    return (y[1:] * y[:-1]).sum(0), y


@program
def neighbours(x: Tensor) -> Made:
    y = x.sin().cumsum(1)
    z = y + y.flip(1) + y.roll(3, 1)
    return z * y.sum(1, keepdim=True), z.cumsum(1) - z.flip(1)


@program
def overwritten(x: Tensor) -> Made:
    x.add_(x.clone().roll(1, 0))
    return x * 2


@program
def after(x: Tensor) -> Made:
    y = torch.sort(x, 0)[0] + x
    x.mul_(3)
    return y, x + y.sum()


@program
def written(x: Tensor) -> Made:
    y = x.sin() + x.flip(0)
    x[2:5].copy_(y[1:4])
    z = x.exp() + y
    x.t()[3:7].mul_(2)
    return z, x.sum(0), y * x


@program
def long(x: Tensor) -> Made:
    a = torch.sort(x, 0)[0].cumsum(1)
    b = torch.sort(a * x, 0)[0].cumsum(1)
    c = torch.sort(b - a, 0)[0].cumsum(0)
    d = torch.sort(c + b, 1)[0].cumsum(0)
    return torch.sort(d * c + b, 0)[0] + a


@program
def turned(x: Tensor) -> Made:
    a = torch.sort(x.sin(), 0)[0].cumsum(1)
    b = a.cumsum(0) + a.flip(0)
    return torch.sort(b, 0)[0].cumsum(0).flip(1) * 2


@program
def dying(x: Tensor) -> Made:
    a = torch.sort(x, 0)[0] * 2
    b = torch.sort(a, 1)[0] + a.t().reshape(24, 20)
    c = torch.sort(b.t().contiguous(), 0)[0]
    d = c.t() + b.roll(1, 1)
    return torch.sort(d, 1)[0] + b, c.sum(0)


@program
def in_place(x: Tensor) -> Made:
    a = torch.sort(x.cos(), 0)[0]
    b = a + a.roll(1, 1)
    c = torch.sort(b, 1)[0]
    d = c * c.flip(0) + c.roll(1, 0)
    return torch.sort(d, 0)[0] * 2


@program
def neighbour(x: Tensor) -> Made:
    a = x.sin() * 2
    b = torch.sort(a, 0)[0]
    c = a.flip(0) + b
    return torch.sort(c, 0)[0]


@program
def flipped_first(x: Tensor) -> Made:
    y = x.flip(0) + 1
    x.mul_(2)
    return y


@program
def sizes(x: Tensor) -> Made:
    a, b = x[:5].sin(), x[:, :3].exp()
    c, d = torch.sort(a, 0)[0] * 2, torch.sort(b, 0)[0] * 3
    e, f = x[:9, :9].cos(), x * 5
    g, h = torch.sort(e, 0)[0] + c[:4, :9].sum(), torch.sort(f, 1)[0] + d.sum()
    s, t = torch.sort(g * 2, 0)[0], torch.sort(h - 1, 0)[0]
    return s.sum() + t * c.sum(), torch.sort(d * g.sum(), 0)[0] + e.sum()


@program
def index_sets(x: Tensor) -> Made:
    y = x.repeat(1, 25)
    return torch.cat([y[..., 1:], y[..., :1]], -1), torch.cat([y[..., 7:] * 2, y[..., :7]], -1)


@program
def chained(x: Tensor) -> Made:
    return (x / x.sum(0)).argmax(-1), (x - x.amax(0)).exp().sum(1)


@program
def clamped(x: Tensor) -> Made:
    image = x.reshape(1, 2, 12, 20)
    a, b = F.adaptive_max_pool2d(image, (5, 3)), F.adaptive_avg_pool2d(image, (7, 9))
    return a, b, x[2:30, 5:100] * 2, x[:, -3:].exp(), F.pad(x, (-2, -3)).flip(1)


# -- reductions
# -----------------------------------------------------------------------------------------
@program
def positions(x: Tensor) -> Made:
    y = (x.repeat(1, 4) * 2).round()
    return y.argmax(1), y.argmin(0), y.max(1)[1], y.flatten().argmax()


@program
def rows(x: Tensor) -> Made:
    y = x.repeat(1, 15)
    z = -y.abs() - 2
    return torch.softmax(y, 1), torch.log_softmax(z, 1), y.amax(1), z.amax(1)


@program
def long_rows(x: Tensor) -> Made:
    y = x[:2].repeat(1, 2000)
    return torch.softmax(y, 1)


@program
def norms(x: Tensor) -> Made:
    y = F.layer_norm(x, (20,)) * x + 1
    return y, y.sum(0), F.rms_norm(y, (20,)).mean(0), y.var(0)


@program
def columns(x: Tensor) -> Made:
    y = x.repeat(40, 1)
    z = F.layer_norm(y, (20,))
    return z, (z * y).sum(0), y.amax(0), (y - y.mean(0)).exp().sum(0)


@program
def wholes(x: Tensor) -> Made:
    i = (x * 9).round().int()
    return torch.minimum(i, i.flip(0)), i.remainder(5), i.remainder(-3), i.clamp(max=2), i.amin(1)


@program
def reductions(x: Tensor) -> Made:
    y = x.repeat(30, 30)
    return y.sum(), (y * 2).sum(1), x[:9].prod(1), y.amin(), y.abs().amin(0), y.mean((0, 1))


@program
def products(x: Tensor) -> Made:
    y = x @ x.t()
    return torch.softmax(y, -1) @ x, (y.relu() * 2).sum(1)


@program
def side_by_side(x: Tensor) -> Made:
    return x.exp(), x[:7].sin().sum(1), x.t().contiguous().cos(), x[:, :3].reshape(-1) + 1


@program
def scans(x: Tensor) -> Made:
    y = x.cumsum(0)
    return y.cumsum(1), y * x.cumsum(1), x.flip(0).cumsum(0) + y


@program
def attention(x: Tensor) -> Made:
    q, k, v = (t.reshape(1, 1, 24, 20) for t in (x, x.flip(0), x.roll(1, 0)))
    s = (q @ k.transpose(-1, -2)) / 4
    return torch.softmax(s, -1) @ v


# -- running ---------------------------------------------------------------------------------------
def results(made: Made) -> list[Tensor]:
    return list(made) if isinstance(made, tuple) else [made]


def same(a: Tensor, b: Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.allclose(a.double(), b.double(), atol=1e-3, rtol=1e-3, equal_nan=True)


def outcome(f: Callable[[Tensor], Made], backend: Any, dynamic: bool, options: Options) -> str:
    """right, wrong, `STAGE names NODE`, or `raises ERROR`."""
    x = torch.randn(24, 20, generator=torch.Generator().manual_seed(0))
    torch._dynamo.reset()
    try:
        g = torch.compile(f, backend=backend, dynamic=dynamic, options=options)
        a = x.clone()
        got = results(g(a))
    except Exception as e:  # noqa: BLE001 - whatever a planted bug does
        inner: BaseException | None = e
        while inner is not None and not isinstance(inner, (VerifyError, AccessError)):
            inner = inner.__cause__ or getattr(inner, "inner_exception", None)
        if isinstance(inner, VerifyError):
            return f"{inner.guilty} names {inner.node}"
        if isinstance(inner, AccessError):
            return f"check_accesses names {inner.message.split('kernel ')[-1].split(':')[0]}"
        return f"raises {type(e).__name__}: {str(e).splitlines()[0][:60]}"
    b = x.clone()
    want = results(f(b))
    right = all(same(s, t) for s, t in zip([*got, a], [*want, b], strict=True))
    return "right" if right else "wrong"


def worst(f: Callable[[Tensor], Made], backend: Any, options: Options) -> str:
    """With fixed sizes; where that is right, with changing ones."""
    first = outcome(f, backend, False, options)
    return first if first != "right" else outcome(f, backend, True, options)


def main() -> None:
    flags = {x for x in sys.argv[1:] if x.startswith("--")}
    names = [x for x in sys.argv[1:] if x not in flags]
    backend: Any = deuteron_backend
    if "--interpret" in flags:
        from dev.check.interpret import interpreted

        backend = interpreted
    for name in names or PROGRAMS:
        f = PROGRAMS[name]
        accesses = "--accesses" in flags
        plain = "ends the process" if accesses else worst(f, backend, {})
        checked = worst(
            f, backend, {"verify": True, **({"check_accesses": True} if accesses else {})}
        )
        print(json.dumps({"program": name, "plain": plain, "checked": checked}), flush=True)


if __name__ == "__main__":
    main()
