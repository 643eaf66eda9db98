"""The C functions that launch, without CUDA: a driver in C that writes down what is asked."""

from __future__ import annotations

import contextlib
import ctypes
import struct
import types
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from deuteron.base.errors import BuildError
from deuteron.base.options import Options
from deuteron.base.record import Record
from deuteron.codegen.products import Product, Side
from deuteron.codegen.triton.generate import Box, Config, TritonKernel
from deuteron.ir.index import Sym, const
from deuteron.ir.program import Layout
from deuteron.runtime import build_cpp, graph_nodes, launch_blas, launch_cuda, launch_graph, tune
from deuteron.runtime.build_triton import Binary
from deuteron.runtime.graph_nodes import Node, Place, Use
from deuteron.runtime.launch_blas import Multiply
from deuteron.runtime.launch_cuda import Launcher, LaunchError, LoadedKernel
from deuteron.runtime.launch_function import box_rows
from deuteron.runtime.launch_graph import Replay
from deuteron.runtime.tune import TunedLauncher, TunedProduct
from deuteron.schedule.kernel import Kernel
from tests.runtime import cuda_tools

DRIVER = """
struct entry { long long what, a, b, c; };
extern "C" {
entry driver_log[4096];
int driver_count = 0, driver_result = 0, driver_capturing = 0;
void note(long long what, long long a, long long b, long long c) {
  if (driver_count < 4096) driver_log[driver_count++] = entry{what, a, b, c};
}
int answer() { int r = driver_result; driver_result = 0; return r; }
int cuLaunchKernel(void* f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                   unsigned bz, unsigned shared, void* stream, void** params, void** extra) {
  if (int r = answer()) return r;
  note((long long)f, gx, *(long long*)params[0], *(int*)params[1]);
  return 0;
}
// What a box is encoded from shows in the words that the kernel gets, as its second argument.
int cuTensorMapEncodeTiled(void* map, int kind, unsigned rank, void* at,
                           const unsigned long long* extents, const unsigned long long* pitches,
                           const unsigned* block, const unsigned* steps, int interleave,
                           int swizzle, int l2, int fill) {
  if ((long long)map % 64 || steps[0] != 1 || interleave || fill) return 1;
  note(9, (long long)at, kind * 100 + rank * 10 + swizzle, extents[0] * 1000 + pitches[0]);
  *(int*)map = block[0] * 100 + block[rank - 1];
  return 0;
}
struct attribute { int id, none; unsigned value[16]; };
struct configuration {
  unsigned grid[3], block[3], shared; void* stream; attribute* attributes; unsigned count;
};
// A cooperative launch, or one in clusters of so many programs.
int cuLaunchKernelEx(const configuration* c, void* f, void** params, void** extra) {
  if (int r = answer()) return r;
  const attribute* a = c->attributes;
  if (c->count != 1 || a->value[0] < 1 || (a->id == 2 && a->value[0] != 1)) return 1;
  if (a->id == 4 && (c->grid[0] % a->value[0] || a->value[1] != 1 || a->value[2] != 1)) return 1;
  note(a->id == 2 ? -(long long)f : -1000 * (long long)a->value[0] - (long long)f, c->grid[0],
       *(long long*)params[0], *(int*)params[1]);
  return a->id == 2 || a->id == 4 ? 0 : 1;
}
int cuStreamIsCapturing(void* s, int* out) { *out = driver_capturing; return 0; }
int cuGraphLaunch(void* e, void* s) { note(1, (long long)s, 0, 0); return answer(); }
int cuGraphExecKernelNodeSetParams_v2(void* e, void* n, void* p) {
  note(2, (long long)n, *(long long*)p, 0); return answer();
}
int cuGraphExecMemcpyNodeSetParams(void* e, void* n, void* p, void* c) {
  note(3, (long long)n, *(long long*)p, 0); return answer();
}
int cuGraphExecMemsetNodeSetParams(void* e, void* n, void* p, void* c) {
  note(4, (long long)n, *(long long*)p, 0); return answer();
}
int cuGraphMemcpyNodeSetParams(void* n, void* p) {
  note(7, (long long)n, *(long long*)p, 0); return 0;
}
int cuGraphMemsetNodeSetParams(void* n, void* p) {
  note(8, (long long)n, *(long long*)p, 0); return 0;
}
int cuGraphInstantiateWithFlags(void** e, void* g, unsigned long long f) { *e = g; return 0; }
int cuCtxGetCurrent(void** c) { *c = 0; return 0; }
int cuGraphExecDestroy(void* e) { note(5, 0, 0, 0); return 0; }
int cuGraphDestroy(void* e) { note(6, 0, 0, 0); return 0; }
}
"""


class Entry(ctypes.Structure):
    _fields_ = [(n, ctypes.c_longlong) for n in ("what", "a", "b", "c")]


class Driver:
    """The stand-in: `log` is what was asked for since the last look."""

    def __init__(self) -> None:
        self.lib = build_cpp.build(DRIVER, ("-O1", "-fPIC", "-shared"), Options.make())

    def number(self, name: str) -> Any:
        return ctypes.c_int.in_dll(self.lib, name)

    @property
    def log(self) -> list[tuple[int, int, int, int]]:
        entries = (Entry * 4096).in_dll(self.lib, "driver_log")
        count = self.number("driver_count")
        out = [(e.what, e.a, e.b, e.c) for e in entries[: count.value]]
        count.value = 0
        return out

    def fail(self, code: int) -> None:
        self.number("driver_result").value = code


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    stand_in = Driver()
    stand_in.log  # noqa: B018 - what earlier tests left
    for module in (launch_cuda, launch_graph, graph_nodes):
        monkeypatch.setattr(module, "_driver", lambda: stand_in.lib)
    entered: list[Any] = []
    monkeypatch.setattr(launch_cuda, "make_current", entered.append)
    launch_cuda._launcher.cache_clear()
    yield stand_in
    launch_cuda._launcher.cache_clear()


class Variants:
    """Binaries with numbers instead of code: 100 * kernel + 10 * configuration + aligned."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.tuned: dict[Any, int] = {}
        self.missing: set[int] = set()

    def get(self, aligned: bool, wide: bool, config: int = 0) -> LoadedKernel:
        if config in self.missing:
            raise BuildError("too large")
        return LoadedKernel(self.number * 100 + config * 10 + aligned, 128, 0, resident=20)


def kernel(number: int, configs: int = 1) -> TritonKernel:
    return TritonKernel(
        name=f"k{number}",
        source=f"# {number}",
        args=(("tensor", "x"), ("size", Sym("n")), ("tensor", "y")),
        params=("x_ptr", "n", "y_ptr"),
        types=("*fp32", "i32", "*fp32"),
        constexprs=("XBLOCK",),
        configs=tuple(Config((("XBLOCK", 64 << c),), 4) for c in range(configs)),
        grid_source="-(-n // XBLOCK)",
        aligned=("x_ptr", "y_ptr"),
    )


def addresses(*numbers: int) -> bytes:
    return struct.pack(f"{len(numbers)}P", *numbers)


def sequence(kernels: list[TritonKernel], places: list[list[int]]) -> tuple[Launcher, list[Any]]:
    variants = [Variants(k) for k in range(1, len(kernels) + 1)]
    known: Any = {(k.name, "cuda:0"): v for k, v in zip(kernels, variants, strict=True)}
    return Launcher(kernels, places, ["n"], "cuda:0", Options.make(), known), variants


def test_kernels_of_a_sequence(driver: Driver) -> None:
    q, _ = sequence([kernel(1), kernel(2)], [[0, 1], [1, 2]])
    q(7, addresses(1600, 3200, 4800), (200,))
    assert driver.log == [(101, 4, 1600, 200), (201, 4, 3200, 200)]
    q(7, addresses(16, 32, 48), (64,))
    assert driver.log == [(101, 1, 16, 64), (201, 1, 32, 64)]
    q(7, addresses(16, 32, 48), (0,))  # nothing to do
    assert driver.log == []


def test_addresses_that_are_not_aligned(driver: Driver) -> None:
    q, _ = sequence([kernel(1), kernel(2), kernel(3)], [[0, 1], [1, 2], [0, 1]])
    q(7, addresses(1600, 3200, 4804), (200,))
    assert [what for what, *_ in driver.log] == [101, 200, 301]


def test_boxes(driver: Driver) -> None:
    box = Box(0, 64, (96, 40), (48, 1), (16, 32))
    boxed = replace(
        kernel(1),
        args=(("tensor", "x"), ("box", "")),
        params=("x_ptr", "b0_x"),
        types=("*bf16", "tensordesc<bf16[16, 32]>"),
        aligned=("x_ptr",),
        boxes=(box,),
        grid_source="3",
    )
    assert boxed.signature()["b0_x"].startswith("tensordesc")
    assert boxed.signature(aligned=False)["b0_x"] == "constexpr"
    assert boxed.constants(boxed.configs[0], aligned=False)["b0_x"] is None
    q, variants = sequence([boxed], [[1]])
    binary = Binary("k1", b"", 4, 0, ((3, 2, 9, 16, 32),))
    rows = box_rows(boxed, binary)
    found = variants[0].get
    variants[0].get = lambda *given: replace(found(*given), boxes=rows)
    q(7, addresses(0, 1600), (8,))
    assert driver.log == [(9, 1664, 923, 40096), (101, 3, 1600, 3216)]
    q(7, addresses(0, 1608), (8,))  # not aligned: a kernel without boxes
    assert [what for what, *_ in driver.log] == [100]


def zeros_of(
    patch: pytest.MonkeyPatch, dtype: torch.dtype, each: int, streams: int
) -> launch_cuda.StreamMemory:
    """On the CPU."""
    stream = types.SimpleNamespace(synchronize=lambda: None)
    patch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    patch.setattr(torch.cuda, "current_stream", lambda *device: stream)
    patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return launch_cuda.StreamMemory(torch.device("cpu"), dtype, each, streams)


def test_each_stream_has_flags_of_its_own(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    zeros = zeros_of(monkeypatch, torch.int64, 1, 8)
    monkeypatch.setattr(launch_cuda, "_flags", lambda device, each: zeros)
    with_flags = replace(
        kernel(1), args=(("tensor", "x"), ("size", Sym("n")), ("flags", "")), types=("*fp32",) * 3
    )
    q, _ = sequence([with_flags], [[0]])
    other, _ = sequence([with_flags], [[0]])
    for stream in (7, 8, 7):
        q(stream, addresses(16), (64,))
        other(stream, addresses(16), (64,))
    assert zeros.taken == {7: 0, 8: 1}
    at = [q.prepared[s, (64,)].numbers[1] for s in (7, 8)]
    assert at == [zeros.pools[0].data_ptr(), zeros.pools[0].data_ptr() + 8]


def test_cooperating_programs_run_at_once(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    zeros = zeros_of(monkeypatch, torch.int64, launch_cuda.FLAGS_PER_STREAM, 2)
    monkeypatch.setattr(launch_cuda, "_flags", lambda device, each: zeros)
    shared = replace(
        kernel(1),
        args=(("tensor", "x"), ("size", Sym("n")), ("flags", "")),
        grid_source="3 * n",
        programs_per_row=3,
    )
    q, _ = sequence([shared, kernel(2)], [[0], [0, 0]])
    q(7, addresses(16), (2,))
    q(8, addresses(16), (64,))  # 20 at once: six whole groups
    assert driver.log == [(-101, 6, 16, 2), (201, 1, 16, 2), (-101, 18, 16, 64), (201, 1, 16, 64)]
    at = [q.prepared[s, (n,)].numbers[1] for s, n in ((7, 2), (8, 64))]
    assert at[1] - at[0] == 8 * launch_cuda.FLAGS_PER_STREAM
    near, _ = sequence([replace(shared, cluster=True)], [[0]])
    near(7, addresses(16), (64,))  # clusters of three
    assert driver.log == [(-3101, 18, 16, 64)]
    large, _ = sequence([replace(shared, programs_per_row=21)], [[0]])
    with pytest.raises(LaunchError, match="21 programs at once; the device runs 20"):
        large(7, addresses(16), (64,))


def test_flags_of_more_streams(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    zeros = zeros_of(monkeypatch, torch.int64, 64, 2)
    at = [zeros.address(stream) for stream in (5, 6, 5, 7, 8)]
    assert at[0] == at[2] and at[1] - at[0] == at[4] - at[3] == 8 * 64
    assert len(zeros.pools) == 2 and not any(p.any() for p in zeros.pools)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert zeros.address(8) == at[4]
    with pytest.raises(LaunchError, match="cannot be had while it is recorded"):
        zeros.address(9)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert zeros.address(9) not in at


def test_as_many_flags_as_sizes_need(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def flags(device: torch.device, each: int) -> launch_cuda.StreamMemory:
        asked.append(each)
        return zeros_of(monkeypatch, torch.int64, each, 1)

    monkeypatch.setattr(launch_cuda, "_flags", flags)
    looking_back = replace(
        kernel(1),
        args=(("tensor", "x"), ("size", Sym("n")), ("flags", "")),
        flag_count_source="16 + n * 300",
    )
    q, _ = sequence([looking_back, kernel(2)], [[0], [0, 0]])
    assert asked == [launch_cuda.FLAGS_PER_STREAM]  # before any stream may be recorded
    q(7, addresses(16), (2,))
    q(7, addresses(16), (200,))
    assert asked[1:] == [launch_cuda.FLAGS_PER_STREAM, 1 << 16]
    assert [what for what, *_ in driver.log] == [101, 201] * 2  # need not run at once


def test_failing_launches(driver: Driver) -> None:
    q, _ = sequence([kernel(1), kernel(2)], [[0, 1], [1, 2]])
    driver.fail(201)  # a thread without a context: again
    q(7, addresses(16, 32, 48), (64,))
    assert len(driver.log) == 2
    driver.fail(2)
    with pytest.raises(torch.OutOfMemoryError, match="k1"):
        q(7, addresses(16, 32, 48), (64,))
    driver.fail(700)
    with pytest.raises(LaunchError, match="CUDA error 700 at the launch of k1"):
        q(7, addresses(16, 32, 48), (64,))
    assert not driver.log
    q(7, addresses(16, 32, 48), (64,))
    assert len(driver.log) == 2


# -- tuning ---------------------------------------------------------------------------------------

LAY = Layout((const(8),), (const(1),), "f32", "cuda:0")


def step(number: int, reads: tuple[str, ...], writes: tuple[str, ...]) -> Kernel:
    sides = [tuple((n, LAY) for n in side) for side in (reads, writes)]
    return Kernel(f"k{number}", (), sides[0], sides[1], (), "cuda:0", 0, 0.0, 0.0)


Make = Callable[..., tuple[TunedLauncher, list[Variants], Record]]


@pytest.fixture
def tuned(driver: Driver, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Make:
    """Sequences of two kernels, the second one's second configuration being the fastest."""
    monkeypatch.setattr(TunedLauncher, "recording", lambda self: False)
    monkeypatch.setattr(TunedLauncher, "where", lambda self: "test")

    def timed(self: TunedLauncher, launch: Callable[[], None]) -> float:
        driver.log  # noqa: B018 - what was before
        launch()
        (entry,) = driver.log
        times.append(entry)
        return {110: 5.0, 111: 5.0, 211: 3.0, 201: 5.0, 101: 5.0, 221: 4.0}.get(entry[0], 9.0)

    def copy(self: TunedLauncher, address: int, nbytes: int, stream: int) -> Tensor:
        if nbytes > memory[0]:
            raise torch.OutOfMemoryError("no memory")
        copies.append((address, nbytes))
        return aligned

    times: list[Any] = []
    copies: list[Any] = []
    memory = [1 << 30]
    space = torch.empty(64, dtype=torch.uint8)
    aligned = space[-space.data_ptr() % 16 :]
    monkeypatch.setattr(TunedLauncher, "timed", timed)
    monkeypatch.setattr(TunedLauncher, "copy", copy)

    def make(first: Kernel, second: Kernel, folder: str = "a") -> Any:
        kernels = [kernel(1, 2), kernel(2, 3)]
        variants = [Variants(1), Variants(2)]
        known: Any = {(k.name, "cuda:0"): v for k, v in zip(kernels, variants, strict=True)}
        record = Record()
        options = Options.make(None, {"autotune": True, "cache_dir": str(tmp_path / folder)})
        args = (kernels, [[0, 1], [1, 2]], ["n"], "cuda:0", options, known)
        q = TunedLauncher(*args, [first, second], record)
        return q, variants, record

    make.times, make.copies, make.memory, make.space = times, copies, memory, aligned  # type: ignore[attr-defined]
    return make


def test_the_fastest_candidate_is_taken_and_kept(driver: Driver, tuned: Any) -> None:
    first, second = step(1, ("x",), ("y",)), step(2, ("x",), ("y",))
    q, variants, record = tuned(first, second)
    q(7, addresses(1600, 3200, 4800), (200,))
    assert [v.tuned for v in variants] == [{(8,): 0}, {(8,): 1}]
    # Timed on the call's own tensors, then launched once more for the call.
    assert {e[2] for e in tuned.times} == {1600, 3200} and not tuned.copies
    assert driver.log[-1] == (211, 2, 3200, 200)
    n = len(tuned.times)
    q(7, addresses(1600, 3200, 4800), (200,))
    q(8, addresses(1600, 3200, 4800), (210,))  # another stream, sizes alike
    assert [e[0] for e in driver.log] == [101, 211] * 2 and len(tuned.times) == n
    assert [e["accepted"] for e in record.of("decision")] == [False, True]
    q, _, _ = tuned(first, second)  # a new process finds it in the cache
    q(7, addresses(1600, 3200, 4800), (200,))
    assert [e[0] for e in driver.log] == [101, 211] and len(tuned.times) == n
    q(7, addresses(1600, 3200, 4800), (3000,))  # sizes unlike those
    assert len(tuned.times) > n


def test_kernels_are_measured_when_what_they_read_is_there(driver: Driver, tuned: Any) -> None:
    order: list[int] = []
    q, _, _ = tuned(step(1, ("x",), ("y",)), step(2, ("x",), ("y",)))
    launch_once = q.launch_once

    def once(launcher: Any, k: int, pointers: bytes, stream: int) -> None:
        order.append(k)
        launch_once(launcher, k, pointers, stream)

    q.launch_once = once
    real = q.fill_row

    def fill_row(row: Any, k: int, env: Any, aligned: bool, config: int | None = None) -> None:
        order.append(10 + k) if config is None else None
        real(row, k, env, aligned, config)

    q.fill_row = fill_row
    q(7, addresses(1600, 3200, 4800), (200,))
    assert order.index(10) < order.index(1) and order.index(0) < order.index(10)


def test_what_is_overwritten_is_copied(driver: Driver, tuned: Any) -> None:
    q, _, _ = tuned(step(1, ("x", "y"), ("y",)), step(2, ("x",), ("y",)))
    q(7, addresses(1600, 3200, 4800), (200,))
    assert tuned.copies == [(3200, 32)]
    q, _, _ = tuned(step(1, ("x",), ("y",)), step(2, ("x",), ("y",)), "b")
    q(7, addresses(1600, 1600, 4800), (200,))  # two names of one place
    assert tuned.copies[1:] == [(1600, 32)]
    assert {e[2] for e in tuned.times} >= {tuned.space.data_ptr()}


def test_no_memory_for_copies(driver: Driver, tuned: Any) -> None:
    tuned.memory[0] = 8
    q, variants, record = tuned(step(1, ("x", "y"), ("y",)), step(2, ("x",), ("y",)))
    q(7, addresses(1600, 3200, 4800), (200,))
    assert [v.tuned for v in variants] == [{}, {(8,): 1}]
    assert record.of("decision")[0]["reason"] == "no memory for a copy of what it overwrites"
    assert driver.log[-1] == (211, 2, 3200, 200)


def test_candidates_that_cannot_be_built(driver: Driver, tuned: Any) -> None:
    q, variants, _ = tuned(step(1, ("x",), ("y",)), step(2, ("x",), ("y",)))
    variants[1].missing = {1}
    q(7, addresses(1600, 3200, 4800), (200,))
    assert variants[1].tuned == {(8,): 2}


def test_candidates_of_a_product(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    results = []
    for n in range(3):
        r = launch_blas._Result()
        r.algorithm.data[0], r.space = n, 100 * n
        results.append(r)
    calls: list[int] = []
    times = {0: 5.0, 1: 9.0, 2: 4.0}
    now = lambda q: int(q.table.best.data[0])  # noqa: E731
    monkeypatch.setattr(Multiply, "__call__", lambda q, stream, pointers: calls.append(now(q)))
    monkeypatch.setattr(TunedProduct, "candidates", lambda q, count: results)
    monkeypatch.setattr(TunedProduct, "timed", lambda q, stream, pointers: times[now(q)])
    monkeypatch.setattr(TunedProduct, "where", lambda q: "test")
    monkeypatch.setattr(tune, "version", lambda: "1")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)

    def product() -> TunedProduct:
        q = TunedProduct.__new__(TunedProduct)
        side = Side(False, 8, 0)
        q.product, q.device = Product(8, 8, 8, 1, "f32", side, side, side, False), 0
        q.options = Options.make(None, {"cache_dir": str(tmp_path)})
        q.log, q.open, q.spaces, q.min_space = Record(), True, {7: 1}, 50
        q.table = launch_blas._Product()
        return q

    first = product()
    first(7, addresses(256, 512, 1024))
    first(7, addresses(256, 512, 1024))
    assert calls == [2, 2] and first.space == 200 and not first.spaces
    assert len(first.log.of("decision")) == 1
    second = product()  # of another process
    times.clear()
    second(7, addresses(256, 512, 1024))
    assert calls == [2, 2, 2] and not second.log.of("decision")
    third = product()
    third(7, addresses(256, 512, 1028))  # no candidates for addresses like these
    assert calls[3:] == [0]


# -- graphs ---------------------------------------------------------------------------------------


def replay_of(kinds: list[int], uses: list[Use], places: list[Place]) -> tuple[Replay, list[Any]]:
    nodes: list[Node] = []
    keep: list[Any] = []
    for k, kind in enumerate(kinds):
        params = (ctypes.c_longlong * 4)()
        at = [ctypes.addressof(params) + 8 * j for j in range(4)]
        nodes.append(Node(kind, k, [0] * 4, at, 1000 + k, params))
        keep.append(params)
    now = {k: 0x4000 * (k + 1) for k in range(len(places))}
    return Replay(77, nodes, uses, places, now, 0, Options.make()), keep


def run(r: Replay, *now: int, stream: int = 5) -> int:
    array = (ctypes.c_longlong * len(now))(*now)
    return int(r.launch(r.plan, array, stream))


def test_a_replay_updates_what_has_moved(driver: Driver) -> None:
    uses = [Use(0, 0, 0, 0), Use(0, 1, 1, 8), Use(1, 0, 1, 0), Use(2, 0, 0, 16)]
    r, params = replay_of([0, 1, 2], uses, [Place(1 << 20, 64), Place(2 << 20, 64)])
    # What fills and copies has memory when the graph becomes executable.
    assert driver.log == [(7, 1001, 0x8000, 0), (8, 1002, 0x4010, 0)]
    assert run(r, 0x5000, 0x6000) == 0
    assert r.moved == 4
    assert driver.log == [
        (2, 1000, 0x5000, 0),
        (3, 1001, 0x6000, 0),
        (4, 1002, 0x5010, 0),
        (1, 5, 0, 0),
    ]
    assert params[0][1] == 0x6008
    assert run(r, 0x5000, 0x6000, stream=6) == 0
    assert driver.log == [(1, 6, 0, 0)]
    assert run(r, 0x5000, 0x7000) == 0
    assert driver.log == [(2, 1000, 0x5000, 0), (3, 1001, 0x7000, 0), (1, 5, 0, 0)]
    r.close()
    assert driver.log == [(5, 0, 0, 0), (6, 0, 0, 0)]


def test_a_replay_updates_half_a_word(driver: Driver) -> None:
    uses = [Use(0, 0, 0, 8, 0), Use(0, 1, 0, -4, 1), Use(0, 2, 0, 0)]
    r, (params,) = replay_of([0], uses, [Place(1 << 20, 64)])
    params[0], params[1] = 0x3F800000 << 32 | 7, 7 << 32 | 5
    assert run(r, 0x123456789000) == 0
    assert params[0] == 0x3F800000 << 32 | 0x56789008
    assert params[1] == 0x56788FFC << 32 | 5
    assert params[2] == 0x123456789000
    r.close()


def test_a_replay_refuses(driver: Driver) -> None:
    r, _ = replay_of([0], [Use(0, 0, 0, 0)], [Place(1 << 20, 64)])
    assert run(r, 0x5004) == launch_graph.MISALIGNED
    driver.number("driver_capturing").value = 1
    assert run(r, 0x5000) == launch_graph.RECORDING
    driver.number("driver_capturing").value = 0
    assert not driver.log
    driver.fail(700)
    assert run(r, 0x5000) == 700 + launch_graph.NODE_CODE
    assert r.nodes[0].name() == "a kernel"
    driver.log  # noqa: B018
    assert run(r, 0x5000) == 0  # what failed half way is tried again
    assert (2, 1000, 0x5000, 0) in driver.log


def test_words_that_are_no_addresses() -> None:
    class Region:
        low, high = 1 << 40, (1 << 40) + (1 << 30)

    class Other:
        low, high = (1 << 41) + 0x135100, (1 << 41) + (1 << 30)

    def node(*words: int) -> Node:
        return Node(0, "k", list(words))

    a, b = Place(Region.low + 4096, 64), Place(Other.low + 4096, 64)
    c, d = Place(Region.low + 16384, 64), Place(Other.low + 20480, 64)
    inside = Place(Region.low + 40960, 64)
    places, passing = {0: (a, b), 1: (c, d)}, [inside]
    spans: Any = (Region, Other)

    def match(one: Node, two: Node) -> list[Use]:
        return graph_nodes.match([one], [two], places, passing, spans)

    same = match(node(5, a.base + 8, 1 << 50, inside.base), node(5, b.base + 8, 1 << 51, 12345))
    assert same == [Use(0, 1, 0, 8)]
    assert match(node(c.base - 16), node(d.base - 16)) == [Use(0, 0, 1, -16)]
    # Numbers that look like addresses but did not move.
    assert match(node(a.base, Region.low + 5, d.base), node(a.base, Region.low + 5, d.base)) == []
    # A pointer to other memory, whose upper half moved as that of a tensor.
    far = (d.base - c.base >> 32) + 7 << 32
    assert match(node(7 << 32 | 4096 * 5), node(far | 4096 * 11)) == []
    # What is left of an address in the gap before or after a smaller argument.
    low = 2**32 - 1
    one = node(7 << 32 | (c.base + 4 & low), (c.base & low) << 32 | 7, 7 << 32 | 8)
    two = node(7 << 32 | (d.base + 4 & low), (d.base & low) << 32 | 7, 7 << 32 | 8)
    assert match(one, two) == [Use(0, 0, 1, 4, 0), Use(0, 1, 1, 0, 1)]
    for one, two, reason in (
        (node(a.base), node(d.base), "moved unlike any tensor"),
        (node(a.base), node(4711), "lost its tensor"),
        (node(4711), node(b.base), "moved unlike any tensor"),
        (node(a.base >> 4), node(b.base >> 4), "in disguise"),
        (node(7 << 32 | (c.base >> 8)), node(9 << 32 | (d.base >> 8)), "in disguise"),
        # As far as a tensor, but not from it to it; and with the other half.
        (node(7 << 32 | 4711), node(7 << 32 | 4711 + (d.base - c.base & low)), "in disguise"),
        (node(7 << 32 | (c.base & low)), node(9 << 32 | (d.base & low)), "in disguise"),
        (node(3 << 32 | 7), node(3 + (d.base - c.base >> 32) << 32 | 7), "in disguise"),
    ):
        with pytest.raises(graph_nodes.Refused, match=reason):
            match(one, two)
    with pytest.raises(graph_nodes.Refused, match="not the same kernels"):
        graph_nodes.match([node(1)], [], places, passing, spans)
    assert tune.MIN_GAIN > 0


def test_the_stand_in_has_what_the_replay_has(driver: Driver) -> None:
    r, _ = replay_of([0], [Use(0, 0, 0, 0)], [Place(1 << 20, 64)])
    fake = cuda_tools.FakeReplay(cuda_tools.FakeCuda(0, Options.make()), None, [], [], [])  # type: ignore[arg-type]
    assert {n for n in vars(fake) if n != "cuda" and n != "current"} <= {*vars(r), "launch"}


def test_flags_are_real_while_tensors_are_fake(monkeypatch: pytest.MonkeyPatch) -> None:
    """AOTAutograd compiles under a mode in which new tensors have no memory."""
    with FakeTensorMode():
        zeros = zeros_of(monkeypatch, torch.int32, 1, 8)
    (made,) = zeros.pools
    assert type(made) is torch.Tensor and made.data_ptr() and not made.any()
