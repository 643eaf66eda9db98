"""CUDA graphs on a GPU: results against eager, then the time of a call beside Inductor.

``python -m dev.gpu.graphs [products] [time] [train] [check [CASE ...]]``; with nothing said,
all of it.
"""

from __future__ import annotations

import statistics
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deuteron.backend import collecting

DEVICE = "cuda"


def blocks(n: int = 12, width: int = 256) -> nn.Module:
    torch.manual_seed(0)
    made = [
        nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU()) for _ in range(n)
    ]
    return nn.Sequential(*made).to(DEVICE)


class Attention(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(256), nn.Linear(256, 768), nn.Linear(256, 256)
        self.to(DEVICE, dtype)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = self.qkv(self.norm(x)).view(b, t, 3, 4, 64).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(y.transpose(1, 2).reshape(b, t, 256))


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(8, 16, 3, padding=1, bias=False),
            *(nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 8, 3)),
        ).to(DEVICE)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x).mean((2, 3))


def close(got: Any, want: Any, tolerance: float) -> str:
    worst = 0.0
    for a, b in zip(got, want, strict=True):
        scale = b.double().abs().max().item() + 1e-30
        worst = max(worst, (a.double() - b.double()).abs().max().item() / scale)
    return f"{worst:.1e}" + ("" if worst <= tolerance else "  WRONG")


def grads(net: nn.Module, x: Tensor) -> list[Tensor]:
    gradients = [x.grad, *(p.grad for p in net.parameters())]
    net.zero_grad()
    return [g for g in gradients if g is not None]


def inference(net: nn.Module, inputs: list[Tensor], tolerance: float) -> str:
    g = torch.compile(net, backend="deuteron", mode="reduce-overhead")
    with torch.no_grad():
        outs = [g(x) for x in inputs]
        return close(outs, [net(x) for x in inputs], tolerance)


def training(net: nn.Module, inputs: list[Tensor], tolerance: float) -> str:
    g = torch.compile(net, backend="deuteron", mode="reduce-overhead")
    results = []
    for x in inputs:
        x = x.clone().requires_grad_()
        out = g(x)
        (out.float() ** 2).mean().backward()
        results.append([out, *grads(net, x)])
    errors = []
    for x, got in zip(inputs, results, strict=True):
        x = x.clone().requires_grad_()
        out = net(x)
        (out.float() ** 2).mean().backward()
        errors.append(close(got, [out, *grads(net, x)], tolerance))
    return max(errors)


def optimizer() -> str:
    losses = []
    for compiled in (False, True):
        net = blocks(3)
        g = torch.compile(net, backend="deuteron", mode="reduce-overhead") if compiled else net
        opt = torch.optim.AdamW(net.parameters(), 1e-3)
        torch.manual_seed(1)
        got = []
        for k in range(12):
            x = torch.randn(8 if k % 3 else 12, 256, device=DEVICE)
            loss = ((g(x) - x.sin()) ** 2).mean()
            opt.zero_grad()
            loss.backward()
            opt.step()
            got.append(loss.detach())
        losses.append(got)
    return close(losses[1], losses[0], 1e-4)


def dropout() -> str:
    def f(x: Tensor, w: Tensor) -> Tensor:
        return F.layer_norm(F.dropout(x @ w, 0.5) @ w, (256,)) @ w

    def masks(x: Tensor, w: Tensor) -> Tensor:
        return F.dropout(F.softmax(x @ w, -1) * 0 + x @ w * 0 + 1, 0.25)

    x, w = torch.randn(64, 256, device=DEVICE), torch.randn(256, 256, device=DEVICE)
    g = torch.compile(f, backend="deuteron", mode="reduce-overhead")
    torch.manual_seed(3)
    outs = [g(x, w) for _ in range(5)]
    torch.manual_seed(3)
    same = all(torch.equal(o, g(x, w)) for o in outs)
    other = all(not torch.equal(a, b) for k, a in enumerate(outs) for b in outs[:k])
    h = torch.compile(masks, backend="deuteron", mode="reduce-overhead")
    kept_shares = [(h(x, w) > 0).float().mean().item() for _ in range(4)]
    good = same and other and all(0.73 < k < 0.77 for k in kept_shares)
    return f"{same} {other} {[round(k, 3) for k in kept_shares]}" + ("" if good else "  WRONG")


def streams() -> str:
    net = blocks(4)
    g = torch.compile(net, backend="deuteron", mode="reduce-overhead")
    outs = []
    with torch.no_grad():
        other = torch.cuda.Stream()
        other.wait_stream(torch.cuda.current_stream())
        xs = [torch.randn(8, 256, device=DEVICE) for _ in range(12)]
        torch.cuda.synchronize()
        for k, x in enumerate(xs):
            with torch.cuda.stream(other if k % 2 else torch.cuda.current_stream()):
                outs.append(g(x))
        torch.cuda.synchronize()
        return close(outs, [net(x) for x in xs], 1e-4)


def tuned() -> str:
    """Candidates measured: in-place updates happen once, results are right."""

    def f(x: Tensor, s: Tensor, w: Tensor) -> Tensor:
        s.add_(x.sum(0))
        return F.layer_norm(torch.softmax(x, -1) @ w, (1000,)).sum(0) + s

    g = torch.compile(f, backend="deuteron", mode="max-autotune")
    x, w = torch.randn(3000, 1000, device=DEVICE), torch.randn(1000, 1000, device=DEVICE)
    s, t = torch.zeros(1000, device=DEVICE), torch.zeros(1000, device=DEVICE)
    errors = [close([g(x, s, w), s], [f(x, t, w), t], 1e-3) for _ in range(4)]
    return max(errors)


def out_of_memory() -> str:
    """A call for which there is no memory fails alone: the next one is right."""

    def f(x: Tensor) -> Tensor:
        return torch.softmax(x, 0).sort(0).values.sin() @ torch.ones(4, 4, device=DEVICE)

    seen = []
    for mode in ("default", "reduce-overhead"):
        torch._dynamo.reset()
        g = torch.compile(f, backend="deuteron", mode=mode, dynamic=True)
        small = torch.randn(1000, 4, device=DEVICE)
        for _ in range(3):
            g(small)
        torch.cuda.set_per_process_memory_fraction(0.02)
        try:
            large = torch.randn(32 << 20, 4, device=DEVICE)
            g(large)
            seen.append("no error")
        except torch.OutOfMemoryError as e:
            seen.append(type(e).__name__)
        large = None
        left = torch.cuda.memory_allocated() >> 20
        seen.append(f"{left} MB left " + close([g(small)], [f(small)], 1e-4))
        torch.cuda.set_per_process_memory_fraction(1.0)
    return ", ".join(seen)


def recorded_by_the_user() -> str:
    """A compiled program, with column sums behind a barrier, inside ``torch.cuda.graph``."""

    def f(x: Tensor, w: Tensor) -> Tensor:
        y = F.layer_norm(x, (256,)) * w
        return F.gelu(y.sum(0) + y.square().sum(0)) + y.mean()

    errors = []
    for mode in ("default", "reduce-overhead"):
        torch._dynamo.reset()
        g = torch.compile(f, backend="deuteron", mode=mode)
        x, w = torch.randn(4096, 256, device=DEVICE), torch.randn(256, device=DEVICE)
        for _ in range(3):
            g(x, w)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = g(x, w)
        for k in range(3):
            x.copy_(torch.randn(4096, 256, device=DEVICE) * k)
            graph.replay()
            errors.append(close([out], [f(x, w)], 1e-3))
    return max(errors)


def unfit() -> str:
    def f(x: Tensor) -> Tensor:
        y = F.softmax(x @ x, -1)
        z = y[y[:, 0] > 0.001]
        return F.layer_norm(z @ x, (256,)) @ x

    g = torch.compile(f, backend="deuteron", mode="reduce-overhead")
    xs = [torch.randn(256, 256, device=DEVICE) for _ in range(4)]
    return close([g(x) for x in xs], [f(x) for x in xs], 1e-3)


def products() -> None:
    """Small products by cuBLAS's own interface against ATen, and the host's time of both."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for m, k, n, batch in (
            (8, 256, 256, 0),
            (128, 768, 2304, 0),
            (7, 33, 65, 0),
            (64, 64, 65, 12),
        ):
            shape = (batch,) if batch else ()
            for flip_a, flip_b in ((False, False), (False, True), (True, False)):
                a = torch.randn(*shape, *((k, m) if flip_a else (m, k)), device=DEVICE, dtype=dtype)
                b = torch.randn(*shape, *((n, k) if flip_b else (k, n)), device=DEVICE, dtype=dtype)
                a, b = (a.mT if flip_a else a), (b.mT if flip_b else b)
                w = torch.randn(n, device=DEVICE, dtype=dtype)

                def f(a: Tensor, b: Tensor, w: Tensor) -> Tensor:
                    return torch.bmm(a, b) if a.dim() == 3 else torch.addmm(w, a, b)

                torch._dynamo.reset()
                with collecting() as records:
                    g = torch.compile(f, backend="deuteron")
                    got = g(a, b, w)
                want = f(a.double(), b.double(), w.double())
                eager = (f(a, b, w).double() - want).abs().max().item()
                ours = (got.double() - want).abs().max().item()
                host = [wall(partial(h, a, b, w), 30)[1] for h in (f, g)]
                bad = "" if ours <= 2 * eager + 1e-6 else "  WRONG"
                about = f"{dtype} {m}x{k}x{n} {batch} {flip_a:d}{flip_b:d}"
                line = f"{about:36} error {ours:.1e}, ATen {eager:.1e}; host us {host[1]:.1f}, "
                print(f"{line}ATen {host[0]:.1f}{bad} {len(records[0].of('library'))}")


def check(names: list[str]) -> None:
    x = [torch.randn(8, 256, device=DEVICE) for _ in range(6)]
    t = [torch.randn(2, 128, 256, device=DEVICE) for _ in range(5)]
    h = [y.bfloat16() for y in t]
    images = [torch.randn(4, 8, 16, 16, device=DEVICE) for _ in range(5)]
    cases: dict[str, Callable[[], str]] = {
        "blocks forward": lambda: inference(blocks(), x, 1e-4),
        "blocks train": lambda: training(blocks(), x, 1e-3),
        "attention bf16 forward": lambda: inference(Attention(torch.bfloat16), h, 2e-2),
        "attention bf16 train": lambda: training(Attention(torch.bfloat16), h, 3e-2),
        "attention f32 train": lambda: training(Attention(torch.float32), t, 1e-3),
        "convolutions forward": lambda: inference(Convolutions().eval(), images, 1e-2),
        "convolutions train": lambda: training(Convolutions(), images, 2e-2),
        "optimizer, two sizes": optimizer,
        "dropout": dropout,
        "two streams": streams,
        "a mask of unknown size": unfit,
        "max-autotune": tuned,
        "out of memory": out_of_memory,
        "recorded by the user": recorded_by_the_user,
    }
    for name, case in cases.items():
        if names and name not in names:
            continue
        torch._dynamo.reset()
        with collecting() as compiled:
            try:
                result = case()
            except Exception:  # noqa: BLE001 - every case is run
                result = "FAILED " + traceback.format_exc()[-700:]
        print(f"{name:24} {result}")
        for r in compiled:
            phase = (r.of("graph") or [{"phase": "?"}])[0]["phase"]
            for e in r.of("decision"):
                if e["subject"] == "autotune":
                    took = f", {e['seconds'] * 1e3:.0f} ms" if "seconds" in e else ""
                    print(f"    {phase}: {e['reason']}: {e['detail']}{took}"[:200])
                if e["subject"] == "cudagraph" and e["reason"] != "recorded at the second call":
                    took = f", {e['seconds'] * 1e3:.0f} ms" if "seconds" in e else ""
                    print(f"    {phase}: {e['reason']}: {e['detail']}{took}"[:200])


def wall(step: Callable[[], Any], calls: int = 60) -> tuple[float, float]:
    """(us of a call with what it waits for, us of the host alone), medians."""
    for _ in range(6):
        step()
    torch.cuda.synchronize()
    whole, host = [], []
    for _ in range(calls):
        start = time.perf_counter()
        step()
        host.append(time.perf_counter() - start)
        torch.cuda.synchronize()
        whole.append(time.perf_counter() - start)
    return statistics.median(whole) * 1e6, statistics.median(host) * 1e6


KINDS: dict[str, dict[str, Any]] = {
    "eager": {},
    "inductor": {"backend": "inductor"},
    "inductor ro": {"backend": "inductor", "mode": "reduce-overhead"},
    "deuteron": {"backend": "deuteron"},
    "deuteron ro": {"backend": "deuteron", "mode": "reduce-overhead"},
}


def compare(name: str, make: Callable[[Any], Callable[[], Any]]) -> None:
    print(name)
    for kind, how in KINDS.items():
        torch._dynamo.reset()
        try:
            step = make((lambda f, how=how: torch.compile(f, **how)) if how else (lambda f: f))
            whole, host = wall(step)
            print(f"    {kind:14} {whole:8.1f} us   host {host:8.1f} us")
        except Exception:  # noqa: BLE001 - every kind is run
            print(f"    {kind:14} FAILED {traceback.format_exc()[-800:]}")


def forward(compiled: Any) -> Callable[[], Any]:
    net, x = blocks(), torch.randn(8, 256, device=DEVICE)
    g = compiled(net)

    def step() -> Any:
        with torch.no_grad():
            return g(x)

    return step


def train(compiled: Any) -> Callable[[], Any]:
    net, x = blocks(), torch.randn(8, 256, device=DEVICE)
    g = compiled(net)

    def step() -> None:
        net.zero_grad()
        g(x).sum().backward()

    return step


def rms(compiled: Any) -> Callable[[], Any]:
    class RMSNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1024, device=DEVICE, dtype=torch.bfloat16))

        def forward(self, x: Tensor) -> Tensor:
            y = x.float()
            y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6)
            return (y * self.weight.float()).to(x.dtype)

    g = compiled(RMSNorm())
    x = torch.randn(32768, 1024, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn_like(x)

    def step() -> None:
        x.grad = None
        g(x).backward(dy)

    return step


def main(what: list[str]) -> None:
    if not what or "products" in what:
        products()
    if not what or "check" in what:
        check(what[what.index("check") + 1 :] if what else [])
    if not what or "time" in what:
        compare("twelve blocks, forward", forward)
    if not what or "train" in what:
        compare("twelve blocks, forward and backward", train)
        compare("RMSNorm 32768x1024 bf16, forward and backward", rms)


if __name__ == "__main__":
    main(sys.argv[1:])
