"""What benchmarks measure with: caches that nothing has used, times of calls in turn, memory.

A `device` is "cpu" or "cuda". Times are wall times in seconds, until the device is done.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import os
import random
import shutil
import tempfile
import time
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from deuteron.base.device import CALIBRATION_FILE
from deuteron.base.options import Options
from deuteron.runtime.host_memory import POOL

# Calls are timed together until they take so long (seconds), so that neither the clock nor waiting
# for the device counts.
BATCH_S = {"cuda": 0.01, "cpu": 0.05}
MOST_ROUNDS, LEAST_ROUNDS = 60, 5
# Cores that other programs keep busy, from which on times say little.
BUSY = 0.3


def synchronize(device: str) -> None:
    """Waits until the device has done what it was given."""
    if device == "cuda":
        torch.cuda.synchronize()


@contextlib.contextmanager
def others_of(found: dict[str, Any]) -> Iterator[None]:
    """Puts into ``found["others"]`` how many cores other programs kept busy meanwhile; None where
    the system does not tell (`/proc/stat`)."""
    begin, busy, own = time.perf_counter(), busy_s(), time.process_time()
    yield
    wall, end = time.perf_counter() - begin, busy_s()
    found["others"] = (
        None if busy is None or end is None
        else max(0.0, (end - busy - time.process_time() + own) / wall)
    )  # fmt: skip


def busy_s() -> float | None:
    """Seconds that the cores of this process have worked since the system started, together."""
    try:
        lines = Path("/proc/stat").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    own = {f"cpu{k}" for k in os.sched_getaffinity(0)}
    rows = [list(map(int, line.split()[1:9])) for line in lines if line.split()[0] in own]
    return sum(sum(r) - r[3] - r[4] for r in rows) / os.sysconf("SC_CLK_TCK")  # not idle, waiting


def distinct(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """The function with a code object of its own; of what is no function, one that calls it.

    Dynamo keeps compiled code by code object; sharing one would let compilers look through each
    other's entries at every call.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    of = function if inspect.isfunction(function) else call
    code = of.__code__.replace(co_name=f"{of.__name__}_{name}")
    copy = types.FunctionType(code, of.__globals__, code.co_name, of.__defaults__, of.__closure__)
    copy.__kwdefaults__ = of.__kwdefaults__
    copy.__dict__.update(of.__dict__)
    return copy


def error_line(error: BaseException) -> str:
    """The error's class and the beginning of its message."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


# -------------------------------------------------------------------------------------- caches
@contextlib.contextmanager
def fresh_caches() -> Iterator[dict[str, str]]:
    """Environment variables that give every compiler an empty cache, in a folder that is deleted
    afterwards. What `deuteron doctor --calibrate` measured of this machine is copied there."""
    with tempfile.TemporaryDirectory(prefix="deuteron-bench-") as scratch:
        calibration = Options.make().cache_folder() / CALIBRATION_FILE
        if calibration.is_file():
            (Path(scratch) / "deuteron").mkdir()
            shutil.copy(calibration, Path(scratch) / "deuteron")
        yield {
            "TORCHINDUCTOR_CACHE_DIR": f"{scratch}/inductor",
            "DEUTERON_CACHE_DIR": f"{scratch}/deuteron",
            "TRITON_CACHE_DIR": f"{scratch}/triton",
            "TORCH_EXTENSIONS_DIR": f"{scratch}/extensions",
        }


def warm_up(device: str) -> None:
    """What a program needs once, whoever compiles it: the compilers' modules, Dynamo's and
    AOTAutograd's first uses. A first call afterwards is the time of compiling."""
    import torch._inductor.compile_fx  # noqa: F401

    import deuteron.backend
    import deuteron.pipeline  # noqa: F401

    w = torch.randn(4, 4, requires_grad=True, device=device)
    warm = torch.compile(lambda x: (x @ w).sin().sum(), backend="aot_eager")
    warm(torch.randn(4, 4, device=device)).backward()


# --------------------------------------------------------------------------------------- times
@contextlib.contextmanager
def collector_off() -> Iterator[None]:
    """No garbage collection while the clock runs."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def seconds_per_call(call: Callable[[], Any], calls: int, device: str) -> float:
    """Of `calls` calls back to back."""
    synchronize(device)
    start = time.perf_counter()
    for _ in range(calls):
        call()
    synchronize(device)
    return (time.perf_counter() - start) / calls


def calls_in(seconds: float, call: Callable[[], Any], device: str) -> int:
    """How many calls take about so long. A first call, whose threads have to wake up, may take ten
    times what others do: counts grow until they take a tenth of `seconds`."""
    count = 1
    while (each := seconds_per_call(call, count, device)) * count < seconds / 10:
        count *= 4
    return max(1, round(seconds / each))


def interleaved(
    calls: Sequence[Callable[[], Any]], seconds: float, device: str, least: int = LEAST_ROUNDS
) -> list[list[float]]:
    """Per function its seconds per call, one number a round. A round times all functions, in
    another order each, so that a change in the machine's speed meets all of them. Rounds begin for
    about `seconds`, at least so many; where that is none, single calls of so long are enough, else
    there is one."""
    guesses = [seconds_per_call(c, 1, device) for c in calls]
    if not least and sum(guesses) > seconds:
        return [[g] for g in guesses]
    batches = [calls_in(BATCH_S[device], c, device) for c in calls]
    times: list[list[float]] = [[] for _ in calls]
    order = random.Random(0)
    with collector_off():
        begin = time.perf_counter()
        for done in range(MOST_ROUNDS):
            if done >= max(1, least) and time.perf_counter() - begin > seconds:
                break
            for k in order.sample(range(len(calls)), len(calls)):
                times[k].append(seconds_per_call(calls[k], batches[k], device))
    return times


# -------------------------------------------------------------------------------------- memory
def peak_bytes(run: Callable[[], Any], device: str) -> int:
    """The most bytes of tensors that `run` holds beyond those held before it: by CUDA's allocator,
    or by the events of torch's allocator for the CPU. There Deuteron's pool is emptied before, so
    that it has to ask for what it uses; workspaces of up to `memory.plan.KEPT` bytes stay."""
    if device == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        kept = run()
        torch.cuda.synchronize()
        del kept
        return torch.cuda.max_memory_allocated() - before
    from torch.profiler import ProfilerActivity, profile

    POOL.trim()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        kept = run()
    del kept
    results = trace.profiler.kineto_results.events()  # type: ignore[union-attr]
    now = peak = 0
    for event in sorted((e for e in results if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak
