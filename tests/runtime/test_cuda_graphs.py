"""CUDA graphs without a GPU: what is recorded, replayed, refused, and whose memory results are."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import deuteron.runtime.cuda_graphs as cuda_graphs
from deuteron.backend import collecting, deuteron_backend
from deuteron.base.passes import Context
from deuteron.capture.stages import Part
from deuteron.runtime import graph_nodes
from deuteron.runtime.cuda_graphs import graphs_of, with_cuda_graphs
from deuteron.runtime.recordable import recordable
from tests.codegen.test_gpu_module import Pretended, builds_nothing
from tests.runtime import cuda_tools
from tests.runtime.cuda_tools import FakeCuda

R = torch.randn


class Recorded(Pretended):
    """Compiles for a GPU, records and replays on the CPU."""

    def empty(self, shape: Any, strides: Any, dtype: torch.dtype) -> Tensor:
        assert self.device == 1
        return torch.empty_strided(shape, strides, dtype=dtype)

    def loaded(self) -> Callable[..., Any]:
        self.eager, options = super().loaded(), self.context.options
        a = self.artifact
        what = recordable(a.program, a.schedule, bool(a.plan.given), options)
        phase = self.context.phase
        return with_cuda_graphs(
            self.eager, what, self.emitted, phase, options, self.record, FakeCuda
        )


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    builds_nothing(monkeypatch)
    FakeCuda.made.clear()
    for module in (cuda_graphs, cuda_tools):
        monkeypatch.setattr(module, "ALIGNMENT", 64)  # of torch's memory on the CPU

    def runner(part: Part, context: Context) -> Any:
        seen.append(Recorded(part, context))
        return seen[-1].call

    seen: list[Recorded] = []

    def compiled(f: Callable[..., Any], **kw: Any) -> Callable[..., Any]:
        backend = functools.partial(deuteron_backend, runner=runner)
        g = torch.compile(f, backend=backend, fullgraph=True, **kw)
        g.seen = seen
        return g

    yield compiled
    FakeCuda.made.clear()


def decisions(seen: list[Recorded]) -> list[str]:
    entries = [e for c in seen for e in c.record.of("decision") if e["subject"] == "cudagraph"]
    return [e["detail"] or e["reason"] for e in entries]


def replays() -> int:
    return sum(len(c.patched) for c in FakeCuda.made)


def block(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    h = F.gelu(F.layer_norm(x, (64,)) @ w + b)
    return F.layer_norm(h, (64,)) @ w + x


def test_replays_and_results_that_stay(record: Any) -> None:
    g = record(block)
    w, b = R(64, 64), R(64)
    xs = [R(64, 64) for _ in range(6)]
    outs = [g(x, w, b) for x in xs]
    assert replays() == 5, decisions(g.seen)
    for x, out in zip(xs, outs, strict=True):
        torch.testing.assert_close(out, block(x, w, b), rtol=1e-4, atol=1e-4)
    assert len({o.data_ptr() for o in outs}) == 6


def test_only_nodes_whose_tensors_moved_are_updated(record: Any) -> None:
    g = record(block)
    w, b, x = R(64, 64), R(64), R(64, 64)
    for _ in range(5):
        out = g(x, w, b)  # its memory is free again when the next call asks for some
        del out
    (cuda,) = FakeCuda.made
    assert cuda.patched[0] == max(cuda.patched)
    assert min(cuda.patched) < max(cuda.patched)


@pytest.mark.parametrize("keep", [False, True])
def test_training(record: Any, keep: bool) -> None:
    net = nn.Sequential(
        *[nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 80), nn.GELU(), nn.Linear(80, 64))] * 2
    )
    g = record(net)
    kept = []
    for _ in range(5):
        x = R(65, 64, requires_grad=True)
        out = g(x)
        if keep:
            out.square().sum().backward(retain_graph=True)
            x.grad = None
            net.zero_grad()
        out.square().sum().backward()
        kept.append((out, [x.grad, *(p.grad for p in net.parameters())], x))
        net.zero_grad()
    assert replays() >= 8
    for out, grads, x in kept:
        y = x.detach().requires_grad_()
        want = net(y)
        want.square().sum().backward()
        torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-4)
        for a, c in zip(grads, [y.grad, *(p.grad for p in net.parameters())], strict=True):
            torch.testing.assert_close(a, c, rtol=1e-3, atol=1e-3)
        net.zero_grad()


def test_hooks_on_saved_tensors(record: Any) -> None:
    """What they give has strides of its own: backwards are no longer replayed, forwards are."""
    f = lambda x, w: block(x.t(), w, w[0])  # noqa: E731
    g = record(f)
    w = R(64, 64, requires_grad=True)
    for hooked in (False, False, False, True, True, False):
        x = R(64, 64, requires_grad=True)
        pack = lambda t: t.mT.contiguous().mT  # noqa: E731
        if hooked:
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
                out = g(x, w)
        else:
            out = g(x, w)
        before = replays()
        got = torch.autograd.grad(out.square().sum(), (x, w))
        want = torch.autograd.grad(f(x, w).square().sum(), (x, w))
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)
    assert replays() == before >= 7, decisions(g.seen)
    assert "a forward ran under hooks on saved tensors" in decisions(g.seen)


def test_two_forwards_before_their_backwards(record: Any) -> None:
    net = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64))
    g = record(net)
    for _ in range(4):
        xs = [R(65, 64, requires_grad=True) for _ in range(3)]
        outs = [g(x) for x in xs]
        for x, out in reversed(list(zip(xs, outs, strict=True))):
            out.square().sum().backward()
            y = x.detach().requires_grad_()
            net(y).square().sum().backward()
            torch.testing.assert_close(x.grad, y.grad, rtol=1e-3, atol=1e-3)
    assert replays() > 12


def test_parameters_that_move(record: Any) -> None:
    g = record(block)
    x, b = R(64, 64), R(64)
    for k in range(4):
        w = R(64, 64) * (k + 1)
        torch.testing.assert_close(g(x, w, b), block(x, w, b), rtol=1e-4, atol=1e-3)
    assert replays() == 3


def test_changing_sizes(record: Any) -> None:
    g = record(block, dynamic=True)
    w, b = R(64, 64), R(64)
    for n in (8, 9, 8, 9, 8, 12, 9, 12, 12):
        x = R(n + 60, 64)
        torch.testing.assert_close(g(x, w, b), block(x, w, b), rtol=1e-4, atol=1e-4)
    assert replays() == 6
    assert sum(len(c.graphs) for c in FakeCuda.made) == 6  # each recorded twice


def test_few_graphs_are_kept(record: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graphs, "MAX_GRAPHS", 2)
    monkeypatch.setattr(cuda_graphs, "MAX_RECORDINGS", 5)
    g = record(block, dynamic=True)
    w, b = R(64, 64), R(64)
    for n in [8, 9, 10, 11, 12, 13, 14] * 3:
        x = R(n + 60, 64)
        torch.testing.assert_close(g(x, w, b), block(x, w, b), rtol=1e-4, atol=1e-4)
    (cuda,) = FakeCuda.made
    kept = [c for c in cuda.graphs if not c.dropped]
    assert len(cuda.graphs) == 10 and len(kept) == 2
    assert "5 recordings: sizes change too often for more" in decisions(g.seen)


def test_other_alignments(record: Any) -> None:
    g = record(block)
    w, b = R(64, 64), R(64)
    memory = R(64 * 64 + 8)
    for k in range(12):
        at = k % 3
        x = memory[at : at + 4096].view(64, 64)
        torch.testing.assert_close(g(x, w, b), block(x, w, b), rtol=1e-4, atol=1e-4)
    assert len(FakeCuda.made[0].graphs) == 6


def test_an_allocator_that_aligns_less(record: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (cuda_graphs, cuda_tools):
        monkeypatch.setattr(module, "ALIGNMENT", 4096)
    g = record(block)
    w, b, x = R(64, 64), R(64), R(64, 64)
    kept = []
    for k in range(20):
        kept += [g(x, w, b), torch.empty(1000 * k + 200)]
        torch.testing.assert_close(kept[-2], block(x, w, b), rtol=1e-4, atol=1e-4)
    assert any("not aligned" in d for d in decisions(g.seen))


def test_inputs_written_in_place_and_views(record: Any) -> None:
    def f(x: Tensor, w: Tensor, s: Tensor) -> tuple[Tensor, ...]:
        y = F.softmax(x @ w, -1)
        s.add_(y.sum(0))
        z = F.layer_norm(y @ w, (64,))
        return y[1:].t(), z, x, z.view(-1)[3:7], y.sum() * 2

    g = record(f)
    w, s, t = R(64, 64), torch.zeros(64), torch.zeros(64)
    for _ in range(5):
        x = R(64, 64)
        got, want = g(x, w, s), f(x, w, t)
        assert got[2] is x
        assert got[1].untyped_storage().data_ptr() == got[3].untyped_storage().data_ptr()
        for a, c in zip(got, want, strict=True):
            torch.testing.assert_close(a, c, rtol=1e-4, atol=1e-4)
            assert a.stride() == c.stride()
        torch.testing.assert_close(s, t, rtol=1e-4, atol=1e-4)
    assert replays() == 4


def test_results_of_library_calls_are_copied(record: Any) -> None:
    def f(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        v, i = torch.sort(F.softmax(x @ w, -1))
        return v, i, F.layer_norm(v @ w, (64,))

    g = record(f)
    w = R(64, 64)
    kept = []
    for _ in range(4):
        x = R(64, 64)
        kept.append((g(x, w), f(x, w)))
    for got, want in kept:
        for a, c in zip(got, want, strict=True):
            torch.testing.assert_close(a, c, rtol=1e-4, atol=1e-4)
    assert replays() == 3


def test_large_results_of_library_calls(record: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graphs, "MAX_COPIED_BYTES", 1000)
    g = record(lambda x, w: (torch.sort(F.softmax(x @ w, -1))[0], F.softmax(w @ w, 0)))
    x, w = R(64, 64), R(64, 64)
    for _ in range(3):
        g(x, w)
    assert not replays()
    assert any("library calls allocate" in d for d in decisions(g.seen))


def test_more_launches_may_copy_more(record: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def f(x: Tensor, w: Tensor, n: int) -> tuple[Tensor, ...]:
        v, i = torch.sort(F.softmax(x @ w, -1))
        for _ in range(n):
            x = F.layer_norm(x, (32,)) @ w
        return v, i, x

    monkeypatch.setattr(cuda_graphs, "MAX_COPIED_BYTES", 3000)
    monkeypatch.setattr(Recorded, "contraction", staticmethod(lambda *_: "generated"))
    x, w = R(32, 32), R(32, 32)  # the sort's results: 12,288 bytes
    for n, expected in ((3, 0), (40, 2)):
        g = record(functools.partial(f, n=n))
        for _ in range(3):
            for a, c in zip(g(x, w), f(x, w, n), strict=True):
                torch.testing.assert_close(a, c, rtol=1e-4, atol=1e-4)
        assert replays() == expected, decisions(g.seen)


def test_tensors_move_as_no_others_do(record: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """By odd multiples of what they are aligned to: other memory is aligned to more."""
    moved: list[int] = []

    def watched(first: Any, second: Any, places: Any, *rest: Any) -> Any:
        moved.extend(b.base - a.base for a, b in places.values())
        return graph_nodes.match(first, second, places, *rest)

    monkeypatch.setattr(cuda_graphs, "match", watched)
    g = record(block)
    for _ in range(2):
        g(R(64, 64), R(64, 64), R(64))
    assert len(moved) >= 4 and all(d % 128 == 64 for d in moved)


def test_random_numbers_differ_from_call_to_call(record: Any) -> None:
    def f(x: Tensor, w: Tensor) -> Tensor:
        return F.layer_norm(F.dropout(x @ w, 0.5) @ w, (64,)) @ w

    g = record(f)
    x, w = R(64, 64), R(64, 64)
    torch.manual_seed(3)
    outs = [g(x, w) for _ in range(4)]
    assert replays() == 3
    assert all(not torch.equal(a, b) for k, a in enumerate(outs) for b in outs[:k])
    torch.manual_seed(3)
    for out in outs:
        torch.testing.assert_close(g(x, w), out)


REFUSED = [
    (lambda x: x.sin().sum(), "launches cost no more"),
    (lambda x: torch.multinomial(F.softmax(x @ x.t() @ x, -1), 2), "random numbers of its own"),
    (lambda x: F.softmax(x @ x.t() @ x, -1).nonzero().sin(), "known only when the GPU"),
]


@pytest.mark.parametrize("k", range(len(REFUSED)))
def test_what_cannot_be_recorded(record: Any, k: int) -> None:
    f, reason = REFUSED[k]
    g = record(f)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        for _ in range(3):
            g(R(64, 64))
    assert not replays() and reason in decisions(g.seen)[0]


def test_a_failing_recording_is_given_up(record: Any) -> None:
    g = record(block)
    w, b, x = R(64, 64), R(64), R(64, 64)
    want = block(x, w, b)
    g(x, w, b)
    FakeCuda.made[0].fail = RuntimeError("operation not permitted when stream is capturing")
    for _ in range(4):
        torch.testing.assert_close(g(x, w, b), want, rtol=1e-4, atol=1e-4)
    assert not replays()
    refusals = [d for d in decisions(g.seen) if "not permitted" in d]
    assert len(refusals) == 2
    assert all(c.dropped for c in FakeCuda.made[0].graphs)
    assert all(r.closed for r in FakeCuda.made[0].regions)


def test_no_memory_for_a_replay_s_results(record: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    g = record(block)
    w, b, x = R(64, 64), R(64), R(64, 64)
    want = block(x, w, b)
    for _ in range(3):
        g(x, w, b)
    n = replays()
    (recorded,) = g.seen
    (graphs,) = graphs_of([recorded.call])
    (recording,) = graphs.recordings.values()
    names = recording.function.__globals__
    usual = names["empty_cuda"]

    def none(*args: Any) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    names["empty_cuda"] = none
    with pytest.raises(torch.OutOfMemoryError):
        g(x, w, b)
    names["empty_cuda"] = usual
    torch.testing.assert_close(g(x, w, b), want, rtol=1e-4, atol=1e-4)
    assert replays() == n + 1


def test_no_memory_for_a_recording(record: Any) -> None:
    g = record(block)
    w, b, x = R(64, 64), R(64), R(64, 64)
    want = block(x, w, b)
    g(x, w, b)
    (cuda,) = FakeCuda.made
    cuda.fail = torch.OutOfMemoryError("CUDA out of memory")
    torch.testing.assert_close(g(x, w, b), want, rtol=1e-4, atol=1e-4)
    cuda.fail = None  # there is some again
    for _ in range(2):
        torch.testing.assert_close(g(x, w, b), want, rtol=1e-4, atol=1e-4)
    assert replays() == 2 and "out of memory while recording" in decisions(g.seen)


def test_graphs_go_with_the_program(record: Any) -> None:
    g = record(block)
    w, b, x = R(64, 64), R(64), R(64, 64)
    for _ in range(3):
        g(x, w, b)
    (cuda,) = FakeCuda.made
    assert [graph.dropped for graph in cuda.graphs] == [True, False]
    for graph in cuda.graphs:
        graph.nodes.clear()  # they hold the program
    g.seen.clear()
    del g
    torch._dynamo.reset()
    gc.collect()
    assert all(graph.dropped for graph in cuda.graphs)


def test_a_failing_launch(record: Any) -> None:
    g = record(block)
    w, b, x = R(64, 64), R(64), R(64, 64)
    want = block(x, w, b)
    for codes in ([], [], [201], [], [1]):  # no context in this thread: again; else never again
        FakeCuda.made and FakeCuda.made[0].codes.extend(codes)
        torch.testing.assert_close(g(x, w, b), want, rtol=1e-4, atol=1e-4)
    n = replays()
    torch.testing.assert_close(g(x, w, b), want, rtol=1e-4, atol=1e-4)
    assert replays() == n and any("CUDA error 1" in d for d in decisions(g.seen))


def test_on_the_cpu_the_record_says_why() -> None:
    with collecting() as records:
        torch.compile(block, backend="deuteron", mode="reduce-overhead")(
            R(64, 64), R(64, 64), R(64)
        )
    (e,) = [e for e in records[0].of("decision") if e["subject"] == "cudagraph"]
    assert not e["accepted"] and e["detail"] == "nothing of it runs on a GPU"
