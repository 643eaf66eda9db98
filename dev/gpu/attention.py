"""Attention and losses on linear layers on a GPU: every form beside its best peers.

    python -m dev.gpu.attention [--seconds 400] [NAME...]

A line for each row: milliseconds of a call (medians by CUDA events; all contenders of a row in one
process, nothing else on the GPU meanwhile), our time over the best peer's, what is wanted, MiB that
a call of ours allocates at its peak (results included), errors over eager's (root of summed
squares, against float64 of one sample; of losses against float32). Rows are compiled by processes
side by side and timed one after the other; what is not ready after three fifths of the seconds is
left out and says on stderr where it is. Peers: `eager` and `inductor` run the same plain code;
`flex` is FlexAttention with the same score and mask (compiled by Inductor, its block mask outside
of the timed call where the mask is fixed); `cudnn`, `flash`, `sdpa` are the library's.
"""

from __future__ import annotations

import argparse
import faulthandler
import math
import multiprocessing
import queue
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

INF = float("-inf")
Call = Callable[..., Any]


@dataclass(frozen=True)
class Row:
    """`build`: inputs, the plain function, peers by name. `train`: forward and backward. `wanted`:
    milliseconds, or (with `of`) a share of that peer's, or of the best one's, time. `without`:
    peers that do not return within half a minute."""

    build: Callable[[], tuple[list[Tensor], Call, dict[str, Call]]]
    wanted: float
    of: str = "ms"
    train: bool = False
    random: bool = False
    without: tuple[str, ...] = ()


def drawn(*shape: int, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16) * scale


def heads(b: int, h: int, s: int, d: int, shared: int = 1) -> list[Tensor]:
    return [drawn(b, h, s, d), drawn(b, h // shared, s, d), drawn(b, h // shared, s, d)]


def library(backend: SDPBackend, **how: Any) -> Call:
    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel([backend]):
            return F.scaled_dot_product_attention(q, k, v, **how)

    return call


def flex(
    score: Call | None, mask: Call | None, queries: int, keys: int, shared: bool = False
) -> Call:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    block = mask and create_block_mask(mask, None, None, queries, keys, device="cuda")

    def f(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return flex_attention(q, k, v, score_mod=score, block_mask=block, enable_gqa=shared)

    return torch.compile(f, dynamic=False)


def is_causal(b: Any, h: Any, i: Any, j: Any) -> Any:
    return i >= j


def plain(
    causal: bool = True,
    cap: float = 0.0,
    window: int = 0,
    alibi: bool = False,
    dropout: float = 0.0,
    sinks: bool = False,
) -> Call:
    def f(q: Tensor, k: Tensor, v: Tensor, *more: Tensor) -> Tensor:
        if q.shape[1] > k.shape[1]:
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        s = q @ k.transpose(-1, -2) * (1 / math.sqrt(q.shape[-1]))
        if cap:
            s = cap * torch.tanh(s / cap)
        i = torch.arange(s.shape[-2], device=q.device)[:, None]
        j = torch.arange(s.shape[-1], device=q.device)[None, :]
        if alibi:
            slopes = torch.exp2(-torch.arange(1, s.shape[1] + 1, device=q.device) / 2)
            s = s + slopes[:, None, None] * (j - i)
        if causal:
            s = s.masked_fill(i < j, INF)
        if window:
            s = s.masked_fill(i - j >= window, INF)
        if sinks:
            column = more[0][None, :, None, None].expand(s.shape[0], -1, s.shape[2], 1)
            s = torch.cat([s, column], -1)
        p = torch.softmax(s, -1)
        if sinks:
            p = p[..., :-1]
        if dropout:
            p = F.dropout(p, dropout, True)
        return p.to(v.dtype) @ v

    return f


LONG = (4, 16, 4096, 128)


def causal_row() -> Any:
    peers = {
        "flex": flex(None, is_causal, 4096, 4096),
        "cudnn": library(SDPBackend.CUDNN_ATTENTION, is_causal=True),
        "flash": library(SDPBackend.FLASH_ATTENTION, is_causal=True),
    }
    return heads(*LONG), plain(), peers


def plain_row() -> Any:
    peers = {
        "cudnn": library(SDPBackend.CUDNN_ATTENTION),
        "flash": library(SDPBackend.FLASH_ATTENTION),
        "flex": flex(None, None, 4096, 4096),
    }
    return heads(*LONG), plain(False), peers


def cap_row() -> Any:
    def score(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return 20.0 * torch.tanh(s / 20.0)

    return heads(*LONG), plain(cap=20.0), {"flex": flex(score, is_causal, 4096, 4096)}


def window_row() -> Any:
    def mask(b: Any, h: Any, i: Any, j: Any) -> Any:
        return (i >= j) & (i - j < 512)

    return heads(*LONG), plain(window=512), {"flex": flex(None, mask, 4096, 4096)}


def alibi_row() -> Any:
    def score(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s + torch.exp2(-(h + 1) / 2) * (j - i)

    return heads(*LONG), plain(alibi=True), {"flex": flex(score, is_causal, 4096, 4096)}


def shared_row() -> Any:
    peers = {
        "flex": flex(None, is_causal, 4096, 4096, True),
        "flash": library(SDPBackend.FLASH_ATTENTION, is_causal=True, enable_gqa=True),
    }
    return heads(*LONG, shared=4), plain(), peers


def documents_row() -> Any:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    cuts = torch.tensor([700, 1900, 2500, 4100, 5200, 6600, 7300], device="cuda")
    ids = torch.bucketize(torch.arange(8192, device="cuda"), cuts, right=True)[None]

    def f(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
        s = q @ k.transpose(-1, -2) * (1 / math.sqrt(q.shape[-1]))
        i = torch.arange(s.shape[-1], device=q.device)
        seen = (ids[:, :, None] == ids[:, None, :]) & (i[:, None] >= i[None, :])
        return torch.softmax(s.masked_fill(~seen[:, None], INF), -1) @ v

    masked = torch.compile(create_block_mask)
    inner = torch.compile(flex_attention, dynamic=False)

    def peer(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Any:
        def mask(b: Any, h: Any, i: Any, j: Any) -> Any:
            return (i >= j) & (ids[0, i] == ids[0, j])

        return inner(q, k, v, block_mask=masked(mask, None, None, 8192, 8192, device="cuda"))

    return [*heads(1, 16, 8192, 128), ids], f, {"flex and its mask": peer}


def dropout_row() -> Any:
    flash = library(SDPBackend.FLASH_ATTENTION, is_causal=True, dropout_p=0.1)
    return heads(*LONG), plain(dropout=0.1), {"flash": flash}


def sinks_row() -> Any:
    args = [*heads(1, 64, 4096, 64, 8), drawn(64)]
    return args, plain(window=128, sinks=True), {}


def decode_row() -> Any:
    q = drawn(8, 32, 1, 128)
    k, v = drawn(8, 8, 8192, 128), drawn(8, 8, 8192, 128)

    def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    peers = {"flex": flex(None, None, 1, 8192, True), "sdpa": sdpa}
    for name in ("CUDNN", "FLASH"):
        backend = getattr(SDPBackend, f"{name}_ATTENTION")
        peers[name.lower()] = library(backend, enable_gqa=True)
    return [q, k, v], plain(False), peers


def t5_row() -> Any:
    def f(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
        i = torch.arange(q.shape[2], device=q.device)
        distance = i[None, :] - i[:, None]
        far = distance.abs()
        large = 8 + (torch.log(far.float().clamp(min=1) / 8) / math.log(128 / 8) * 8).long()
        bucket = (distance > 0).long() * 16 + torch.where(far < 8, far, large.clamp(max=15))
        s = q @ k.transpose(-1, -2) + table[bucket].permute(2, 0, 1)[None]
        return torch.softmax(s.float(), -1).to(q.dtype) @ v

    q, k, v = heads(8, 12, 1024, 64)
    return [q * 0.125, k, v, drawn(32, 12)], f, {}


def swin_row() -> Any:
    side = torch.arange(7, device="cuda")
    at = torch.stack(torch.meshgrid(side, side, indexing="ij")).flatten(1)
    apart = (at[:, :, None] - at[:, None, :] + 6).permute(1, 2, 0)
    index = apart[..., 0] * 13 + apart[..., 1]

    def f(q: Tensor, k: Tensor, v: Tensor, table: Tensor, index: Tensor) -> Tensor:
        bias = table[index.view(-1)].view(49, 49, -1).permute(2, 0, 1)
        s = q * (q.shape[-1] ** -0.5) @ k.transpose(-1, -2) + bias.unsqueeze(0)
        return torch.softmax(s, -1) @ v

    return [*heads(2048, 4, 49, 32), drawn(169, 4), index], f, {}


def loss_row() -> Any:
    def f(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(x, w).float(), t)

    targets = torch.randint(0, 128256, (8192,), device="cuda")
    return [drawn(8192, 4096), drawn(128256, 4096, scale=1 / 64), targets], f, {}


ROWS = {
    "causal": Row(causal_row, 0.57),
    "no mask": Row(plain_row, 1.15),
    "soft cap": Row(cap_row, 0.85),
    "window 512": Row(window_row, 0.25),
    "ALiBi": Row(alibi_row, 0.70),
    "16 heads on 4": Row(shared_row, 0.60),
    "documents": Row(documents_row, 0.8, "best"),
    "decoding": Row(decode_row, 1.0, "best"),
    "causal, train": Row(causal_row, 2.5, train=True),
    "soft cap, train": Row(cap_row, 0.75, "flex", train=True),
    "window 512, train": Row(window_row, 1.0, "flex", train=True),
    "ALiBi, train": Row(alibi_row, 1.0, "flex", train=True),
    "16 heads on 4, train": Row(shared_row, 1.0, "flex", train=True),
    "documents, train": Row(documents_row, 0.8, "best", train=True),
    "dropout, train": Row(dropout_row, 1.0, "flash", train=True, random=True),
    "sinks, train": Row(sinks_row, 0.35, "inductor", train=True),
    # Inductor adds the bias's gradient, of bf16, element by element to 384 places.
    "T5 bias, train": Row(t5_row, 0.5, "eager", train=True, without=("inductor",)),
    "Swin, train": Row(swin_row, 0.5, "inductor", train=True),
    "loss, train": Row(loss_row, 39.0, train=True),
}


PREPARING = 0.6  # of the seconds given: until when rows are compiled


def exact(args: list[Tensor]) -> list[Tensor]:
    """One sample, in float64; of a loss everything, in float32."""
    out = []
    for a in args:
        x = a.detach()
        if x.dim() == 4:
            x = x[:1]
        wide = torch.float64 if args[0].dim() == 4 else torch.float32
        x = x.to(wide) if x.is_floating_point() else x
        out.append(x.requires_grad_(a.requires_grad))
    return out


def relative(got: list[Tensor], eager: list[Tensor], wide: list[Tensor]) -> float:
    """The largest error over eager's, of what one sample decides."""
    worst = 0.0
    for g, e, w in zip(got, eager, wide, strict=True):
        if w.dim() in (0, 2) and wide[0].dim() == 4:
            continue  # of all samples
        g, e = (x.detach()[: len(w)] if w.dim() == 4 else x for x in (g, e))
        worst = max(worst, float((g.to(w.dtype) - w).norm() / (e.to(w.dtype) - w).norm()))
    return worst


def prepared(row: Row, alone: Any) -> tuple[dict[str, Callable[[], Any]], float, float, float]:
    """Calls by contender, compiled and warm; the error over eager's, MiB, seconds of our first.
    `alone`: a lock of all processes around eager's calls, which need much of the memory."""
    torch.manual_seed(0)
    args, f, peers = row.build()
    calls: dict[str, Call] = {"deuteron": torch.compile(f, backend="deuteron", dynamic=False)}
    calls |= {"inductor": torch.compile(f, dynamic=False), "eager": f, **peers}
    calls = {n: g for n, g in calls.items() if n not in row.without}
    args = [a.requires_grad_(row.train and a.is_floating_point()) for a in args]
    grad = torch.randn_like(args[0]) if args[0].dim() == 4 else torch.ones((), device="cuda")

    def one(g: Call, given: list[Tensor] = args) -> list[Tensor]:
        if not row.train:
            with torch.no_grad():
                return [g(*given)]
        out = g(*given)
        leaves = [a for a in given if a.requires_grad]
        up = grad if grad.dim() == 0 else grad[: len(out)]
        return [out, *torch.autograd.grad(out, leaves, up.to(out.dtype))]

    start = time.perf_counter()
    got = one(calls["deuteron"])
    torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    with alone:
        off = float("nan") if row.random else relative(got, one(f), one(f, exact(args)))
        torch.cuda.empty_cache()
    del got
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    one(calls["deuteron"])
    torch.cuda.synchronize()
    peak = (torch.cuda.max_memory_allocated() - before) / 2**20
    ready: dict[str, Callable[[], Any]] = {}
    for name, g in calls.items():
        try:
            with alone if name == "eager" else nullcontext():
                one(g)
                torch.cuda.synchronize()
                torch.cuda.empty_cache()
            ready[name] = partial(one, g)
        except Exception as e:  # a peer without this form
            print(f"  {name}: {type(e).__name__} {str(e).splitlines()[0][:100]}", flush=True)
    torch.cuda.empty_cache()
    return ready, off, peak, seconds


def work(name: str, patience: float, gate: Any, alone: Any, turn: Any, told: Any) -> None:
    from triton.testing import do_bench

    row = ROWS[name]
    faulthandler.dump_traceback_later(patience)
    try:
        with gate:
            calls, off, peak, seconds = prepared(row, alone)
        faulthandler.cancel_dump_traceback_later()
        told.put((name, "ready"))
        turn.wait()
        ms = {
            k: float(do_bench(f, warmup=30, rep=150, return_mode="median"))
            for k, f in calls.items()
        }
        told.put((name, (ms, off, peak, seconds)))
    except Exception:
        told.put((name, traceback.format_exc(limit=-3)))


def line(name: str, result: Any) -> str:
    if isinstance(result, str):
        return f"{name:22s} FAILED {result}"
    ms, off, peak, seconds = result
    row, own = ROWS[name], ms["deuteron"]
    others = {k: v for k, v in ms.items() if k != "deuteron"}
    best = min(others.values())
    of = {"ms": 1.0, "best": best}.get(row.of) or ms.get(row.of, float("nan"))
    share = own / of
    verdict = "holds" if share <= row.wanted else f"{share / row.wanted:.2f} of it"
    peers = ", ".join(f"{k} {v:.3f}" for k, v in others.items())
    return (
        f"{name:22s} {own:8.3f} ms, {own / best:5.2f} of the best ({peers}); wanted {row.wanted} "
        f"{'ms' if row.of == 'ms' else 'x ' + row.of}: {verdict}; {peak:.0f} MiB; error {off:.2f} "
        f"of eager's; first call {seconds:.0f} s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help=", ".join(ROWS))
    parser.add_argument("--seconds", type=float, default=400)
    parser.add_argument("--jobs", type=int, default=6, help="processes that compile side by side")
    asked = parser.parse_args()
    begin = time.monotonic()
    end = begin + asked.seconds
    context = multiprocessing.get_context("spawn")
    gate, alone, told = context.Semaphore(asked.jobs), context.Lock(), context.Queue()
    names = asked.names or list(ROWS)
    turns = {n: context.Event() for n in names}
    patience = PREPARING * asked.seconds
    workers = {
        n: context.Process(target=work, args=(n, patience - 5, gate, alone, turns[n], told))
        for n in names
    }
    for w in workers.values():
        w.start()
    waiting, ready, results = set(names), [], {}

    def hear(until: float) -> None:
        """What one of them says next, if there is something within a second."""
        for n in names:
            if n not in results and not workers[n].is_alive() and told.empty():
                told.put((n, f"its process ended: {workers[n].exitcode}"))
        try:
            n, text = told.get(timeout=max(0.01, min(1.0, until - time.monotonic())))
        except queue.Empty:
            return
        waiting.discard(n)
        if text == "ready":
            ready.append(n)
        else:
            results[n] = text
            print(line(n, text), flush=True)

    while waiting and time.monotonic() < begin + patience:
        hear(begin + patience)
    for n in sorted(waiting):
        print(f"{n}: not ready after {patience:.0f} s; left out", flush=True)
        workers[n].kill()
    for n in sorted(set(ready) - set(results), key=names.index):
        turns[n].set()
        while n not in results and time.monotonic() < end:
            hear(end)
        workers[n].kill()
    for w in workers.values():
        w.kill()
    print(f"\n{torch.cuda.get_device_name()}, torch {torch.__version__}; 4x16x4096x128, bf16")
    for n in names:
        if n in results:
            print(line(n, results[n]))


if __name__ == "__main__":
    main()
