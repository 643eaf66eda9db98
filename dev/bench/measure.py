"""Times, memory and errors of one case under all contenders, interleaved round by round.

On a GPU the time of a call is the device's: calls over several sets of inputs (more than the cache
holds) are captured into one CUDA graph, whose replays are timed by events. Where a contender cannot
be captured, the row says why, and events surround plain calls. On a CPU it is the wall clock's.
Each round also times a copy, by the same means: the bandwidth that a limit refers to.
"""

from __future__ import annotations

import contextlib
import functools
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch._dynamo
from torch import Tensor

from deuteron.tools.measuring import collector_off, error_line, peak_bytes, synchronize
from dev.bench.cases import TORCH_DTYPES, Absent, Case, Work
from dev.bench.contenders import Contender, compiled, records

Row = dict[str, Any]
# Of calls in one graph: so long that the launch of the graph (about 8 us) does not count.
GRAPH_US = 2000.0
COPY_BYTES = {"cuda": 1 << 29, "cpu": 80_000_000}
INPUT_COPIES = {"cuda": 8, "cpu": 1}
REPEATED_CALLS = 4  # calls that are compared with the first


class Runner:
    """One contender on one case."""

    def __init__(self, contender: Contender, work: Work) -> None:
        self.contender, self.work = contender, work
        self.facts: Row = {}
        self.call = compiled(contender, work.program, work.function)
        self.times: list[float] = []
        self.replay: Callable[[], None] | None = None
        self.calls = 1
        self.keep: list[list[Tensor]] = []

    def step(self, k: int = 0) -> list[Tensor]:
        if self.contender.captures:
            torch.compiler.cudagraph_mark_step_begin()
        return self.work.step(self.call, k)

    def first(self) -> list[Tensor]:
        """The first call compiles. What graphs of the mode's own return is copied: Inductor's next
        call overwrites it."""
        with records(self.contender) as compiled:
            start = time.perf_counter()
            results = self.step()
            synchronize(self.work.device)
            self.facts["first_call_s"] = round(time.perf_counter() - start, 3)
        if self.contender.backend == "deuteron":
            kernels = [e for r in compiled for e in r.of("kernel")]
            self.facts["kernels"] = len(kernels)
            self.facts["library"] = sum(len(r.of("library")) for r in compiled)
            self.facts["predicted_us"] = round(sum(k["predicted_us"] for k in kernels), 2)
            self.facts["fallbacks"] = [e["reason"] for r in compiled for e in r.of("fallback")]
            self.facts["unordered"] = [e["reason"] for r in compiled for e in r.of("unordered")]
        return [t.clone() for t in results] if self.contender.captures else results

    def repeats(self, results: list[Tensor]) -> bool:
        """Whether further calls give the same bits."""
        return all(all(map(identical, results, self.step())) for _ in range(REPEATED_CALLS))

    # -- the clock --------------------------------------------------------------------------------
    def prepare(self, calls: int) -> None:
        """Captures `calls` calls into a graph, where the device and the case ask for that."""
        self.calls = calls
        if self.work.device != "cuda" or self.work.case.clock == "wall" or self.contender.captures:
            return
        try:
            self.capture()
        except Exception as error:  # noqa: BLE001 - whatever forbids capture, the row says it
            torch.cuda.synchronize()
            self.replay, self.keep = None, []
            self.facts["not_captured"] = error_line(root(error))

    def capture(self) -> None:
        sets = len(self.work.sets)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for k in range(max(2, sets)):
                self.step(k % sets)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Results stay until their set's next turn, so that each call writes memory of its own.
        keep: list[list[Tensor]] = [[] for _ in range(sets)]
        with torch.cuda.graph(graph):
            for k in range(self.calls):
                keep[k % sets] = []
                keep[k % sets] = self.step(k % sets)
        self.replay, self.keep = graph.replay, keep

    def timed(self) -> None:
        """One more measurement, in us per call."""
        if self.replay is not None:
            self.times.append(device_us(self.replay) / self.calls)
        elif self.work.device == "cuda" and self.work.case.clock == "device":
            self.times.append(device_us(self.several) / self.calls)
        else:
            self.times.append(self.wall_us())

    def several(self) -> None:
        for k in range(self.calls):
            self.step(k % len(self.work.sets))

    def wall_us(self) -> float:
        """Wall time per call of calls back to back, us."""
        synchronize(self.work.device)
        start = time.perf_counter()
        self.several()
        synchronize(self.work.device)
        return (time.perf_counter() - start) * 1e6 / self.calls

    def host_us(self, calls: int = 30) -> float:
        """Time that a call takes before it returns, us: the least of three batches."""
        best = float("inf")
        for _ in range(3):
            synchronize(self.work.device)
            start = time.perf_counter()
            for _ in range(calls):
                self.step()
            best = min(best, (time.perf_counter() - start) * 1e6 / calls)
        synchronize(self.work.device)
        return best

    def peak_mb(self) -> float:
        """The most memory that a step holds beyond what was held before it, MB."""
        return peak_bytes(self.step, self.work.device) / 1e6


def typical(times: Sequence[float], device: str) -> float:
    """The median on a GPU. The least on a CPU, which other programs may use at the same time; the
    same for all contenders, whose rounds alternate."""
    return statistics.median(times) if device == "cuda" else min(times)


def device_us(run: Callable[[], Any]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3


class Copy:
    """The bandwidth of a copy, measured beside the contenders, by the means that they are."""

    def __init__(self, device: str) -> None:
        self.device, n = device, COPY_BYTES[device] // 4
        self.source = torch.ones(n, device=device)
        self.target = torch.zeros_like(self.source)
        self.times: list[float] = []

    def timed(self) -> None:
        if self.device == "cuda":
            self.times.append(device_us(self.run) / INPUT_COPIES["cuda"])
            return
        start = time.perf_counter()
        self.run()
        self.times.append((time.perf_counter() - start) * 1e6)

    def run(self) -> None:
        for _ in range(INPUT_COPIES[self.device]):
            self.target.copy_(self.source)

    def gbps(self) -> float:
        return 2 * COPY_BYTES[self.device] / typical(self.times, self.device) / 1e3


@functools.cache
def matmul_tflops(device: str, dtype: str) -> float:
    """What the library reaches on a large square product: the limit of contractions."""
    n = 8192 if device == "cuda" else 1024
    a = torch.randn(n, n, device=device, dtype=TORCH_DTYPES[dtype])
    times = []
    for _ in range(12):
        if device == "cuda":
            times.append(device_us(lambda: a @ a))
            continue
        start = time.perf_counter()
        a @ a
        times.append((time.perf_counter() - start) * 1e6)
    return 2 * n**3 / typical(times[2:], device) / 1e6


def root(error: BaseException) -> BaseException:
    """The first error, where others came while it was handled."""
    while error.__context__ is not None:
        error = error.__context__
    return error


# ----------------------------------------------------------------------------------------- errors


def differences(exact: Sequence[Tensor], got: Sequence[Tensor]) -> list[float]:
    """Per result: the largest difference from float64, over the largest magnitude."""
    errors = []
    for e, g in zip(exact, got, strict=True):
        if not g.is_floating_point():
            errors.append(float((g.long() != e.long()).sum()) / max(1, g.numel()))
            continue
        scale = float(e.double().abs().amax()) if e.numel() else 0.0
        largest = float((g.double() - e.double()).abs().amax()) if e.numel() else 0.0
        errors.append(largest / scale if scale else largest)
    return errors


def whole_difference(exact: Sequence[Tensor], got: Sequence[Tensor]) -> list[float]:
    """Of a network: the root of all summed squares of differences over that of all values."""
    wrong = sum(
        float((g.double() - e.double()).square().sum()) for e, g in zip(exact, got, strict=True)
    )
    return [float((wrong / sum(float(e.square().sum()) for e in exact)) ** 0.5)]


def acceptable(mine: Sequence[float], eager: Sequence[float], outs: Sequence[Tensor]) -> bool:
    """At most twice eager's error, plus 1e-6, plus half a unit in the last place of the largest
    value; of whole numbers (rounding may move a few) one in a thousand more may differ."""
    for m, e, t in zip(mine, eager, outs):
        eps = torch.finfo(t.dtype).eps if t.is_floating_point() else 2e-3
        if not m <= 2 * e + 1e-6 + eps / 2:
            return False
    return True


# ------------------------------------------------------------------------------------------- case


def measure(
    case: Case, device: str, contenders: Sequence[Contender], seconds: float, cache: int
) -> Row:
    """One row: see `report` for its fields. Raises what the case's own preparation raises; what a
    contender raises is in the row."""
    torch._dynamo.reset()
    work = Work(case, device, cache)
    row: Row = {
        "suite": case.suite,
        "case": case.name,
        "dtype": case.dtype,
        "backward": case.backward,
        "clock": case.clock if device == "cuda" else "wall",
        "bytes": work.bytes,
        "flops": work.flops,
        "sets": len(work.sets),
        "results": {},
    }
    runners: list[Runner] = []
    exact = work.reference()
    eager = work.step(work.function)
    compare = differences if work.module is None else whole_difference
    eager_errors = compare(exact, eager) if exact is not None else []
    for contender in contenders:
        try:
            runner = Runner(contender, work)
            results = runner.first()
            if exact is not None:
                errors = compare(exact, results)
                runner.facts["error"] = max(errors, default=0.0)
                runner.facts["right"] = acceptable(errors, eager_errors, eager)
                runner.facts["layout"] = all(
                    (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)
                    for a, b in zip(eager, results, strict=True)
                )
                runner.facts["repeats"] = runner.repeats(results)
            del results
            runners.append(runner)
            row["results"][contender.name] = runner.facts
        except Absent as reason:
            row["results"][contender.name] = {"absent": str(reason)}
        except Exception as error:  # noqa: BLE001 - a row for each; a dead device ends the worker
            row["results"][contender.name] = {"failure": error_line(error)}
            if fatal(error):
                return row
    del exact, eager
    time_all(runners, device, seconds, row)
    return row


def identical(a: Tensor, b: Tensor) -> bool:
    """The same bits, also of NaN."""
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def fatal(error: BaseException) -> bool:
    """Whether the process cannot use the device any more."""
    text = str(error)
    return "CUDA error" in text or "illegal memory access" in text or "misaligned" in text


def time_all(runners: list[Runner], device: str, seconds: float, row: Row) -> None:
    """Host time; rounds over the copy and all contenders, in another order each, since what ran
    before changes clocks and caches; then memory."""
    if not runners:
        return
    work = runners[0].work
    sets = len(work.sets)
    with torch.no_grad() if not work.case.backward else contextlib.nullcontext():
        for r in runners:
            for _ in range(2):
                r.step()
            r.facts["host_us"] = round(r.host_us() if device == "cuda" else 0.0, 2)
        copy = Copy(device)
        copy.timed()
        guess = work.bytes / (2 * COPY_BYTES[device] / copy.times[0])
        calls = max(sets, min(256, round(GRAPH_US / guess)))
        calls = -(-calls // sets) * sets if device == "cuda" else max(1, round(2000 / guess))
        for r in runners:
            r.prepare(calls)
        copy.times.clear()
        begin, rounds, order = time.perf_counter(), 0, random.Random(0)
        with collector_off():
            while rounds < 60 and (rounds < 5 or time.perf_counter() - begin < seconds):
                copy.timed()
                for r in order.sample(runners, len(runners)):
                    r.timed()
                rounds += 1
        for r in runners:
            r.facts["us"] = round(typical(r.times, device), 3)
            r.facts["median_us"] = round(statistics.median(r.times), 3)
            r.replay, r.keep = None, []
            r.facts["wall_us"] = r.facts["us"] if row["clock"] == "wall" else round(r.wall_us(), 2)
            r.facts["peak_mb"] = round(r.peak_mb(), 2)
    row["copy_gbps"] = round(copy.gbps(), 1)
    if work.flops:
        row["matmul_tflops"] = round(matmul_tflops(device, work.case.dtype), 3)
    row["rounds"], row["calls"] = rounds, calls
