"""`python -m dev fuzz`: random programs, compiled and compared with eager.

In: seeds. Out: counts, and for each failure a runnable file, cut down to the smallest program that
still fails. Programs run in worker processes: a crash or a hang is a failure like others.
"""

from __future__ import annotations

import logging
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from deuteron.base.device import demand
from dev.check.minimize import reduced
from dev.check.oracle import copies, see
from dev.check.test_cases import (
    CAPTURE_BACKENDS,
    Failure,
    Fn,
    How,
    Straight,
    Unusable,
    file_text,
    spent,
)
from dev.coverage.run import PROCESS_SPENT, Lost, Worker
from dev.fuzz.kinds import KINDS, kind_of

PROGRAM_SECONDS = (
    240.0  # seconds for a program: its compilation takes less than one, cutting down up to 120
)
CUTTING_SECONDS = 120.0
# Of a tensor that a program makes with its other sizes; with its first ones it is a few thousand.
# Some would need the memory of a computer (2e9 with seed 12501069), and a comparison takes dozens
# of runs.
MOST_ELEMENTS = 1 << 20
INTERPRETED_SECONDS = 900.0  # Triton's interpreter takes milliseconds for each program of each grid


@dataclass(frozen=True)
class Task:
    """One program. `kind`: of `fuzz_kinds`, or all."""

    seed: int
    device: str = "cpu"
    backend: str = "deuteron"
    lines: int = 40
    options: tuple[tuple[str, Any], ...] = ()
    cut: bool = True
    folder: str = "out/fuzz"
    kind: str = "mixed"


def run_task(task: Task) -> dict[str, Any]:
    """The verdict on one program: right, wrong, error, torch (its capture fails alone), refused
    (eager does not run it, as with other sizes)."""
    name = kind_of(task.seed, task.kind)
    kind = KINDS[name]
    p = kind.make(task.seed, task.lines)
    how = How(p.backward, p.dynamic, task.backend, dict(task.options))
    row: dict[str, Any] = {"seed": task.seed, "kind": name, "lines": len(p.lines)}
    row |= {"text": "", "file": ""}
    whole = p.straight(task.device)
    if not kind.sets:
        whole = with_input_sets(whole, runnable(p.straight(), p.backward))
    try:
        failure = kind.judge(whole, how)
    except Unusable as e:
        return {**row, "verdict": "refused", "text": str(e)}
    if failure is None:
        return {**row, "verdict": "right"}
    row |= {"verdict": failure.kind, "text": failure.text}
    if failure.kind != "torch" and not spent():  # nothing is read from a GPU that is
        cut = task.cut and not kind.sets  # the one that cuts knows of no refusals
        row["file"] = str(write_failure(replace(task, kind=name, cut=cut), whole, how, failure))
    return row


def runnable(p: Straight, backward: bool) -> list[int]:
    """Those sets of inputs that eager takes, on the CPU: where a GPU does not, that ends the
    process. The first one at least. Sets that make large tensors are not taken."""
    fn, good = p.function(), [0]
    for k, given in enumerate(p.sets()[1:], start=1):
        if largest(fn, given) > MOST_ELEMENTS:
            continue
        try:
            see(lambda xs: fn(*xs), copies(given), backward)
        except Exception:  # noqa: BLE001 - other sizes need not suit the program
            continue
        good.append(k)
    return good


def largest(fn: Fn, given: Sequence[Tensor]) -> int:
    """Elements of the largest tensor that a program makes, or of what it writes at once, found
    without making it; as far as it is known without values."""
    with FakeTensorMode() as fake, Counted() as counted, suppress(Exception):
        fn(*(fake.from_tensor(t) for t in given))
    return counted.most


class Counted(TorchDispatchMode):
    """Notes the elements of what operators make, or write to by positions."""

    most = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        made = tree_leaves(out)
        if func.overloadpacket in (torch.ops.aten.index_put, torch.ops.aten.index_put_):
            made.append(torch.ops.aten.index.Tensor(*args[:2]))
        sizes = [x.numel() for x in made if isinstance(x, Tensor)]
        self.most = max([self.most, *(n for n in sizes if isinstance(n, int))])
        return out


def with_input_sets(p: Straight, sets: list[int]) -> Straight:
    """With some of the sets of inputs."""
    return replace(p, inputs={n: tuple(ts[k] for k in sets) for n, ts in p.inputs.items()})


def write_failure(task: Task, whole: Straight, how: How, failure: Failure) -> Path:
    """The file of a failure."""
    folder = Path(task.folder)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{failure.kind}_{task.seed}.py"
    kind = f" --kind {task.kind}" if task.kind != "all" else ""
    command = f"python -m dev fuzz{kind} --seed {task.seed} --count 1 --device {task.device}"
    path.write_text(file_text(whole, how, f"{command}\n{failure}"), encoding="utf-8")
    if task.cut:
        small, failure, how = reduced(whole, how, failure, CUTTING_SECONDS)
        about = f"Cut down from: {command}\n{failure}"
        path.write_text(file_text(small, how, about), encoding="utf-8")
    return path


def work(connection: Any) -> None:
    """A worker process: tasks come, rows go."""
    torch.set_num_threads(1)
    logging.disable(logging.ERROR)  # also what torch says of sizes that do not fit
    warnings.simplefilter("ignore")
    with suppress(KeyboardInterrupt):
        while True:
            try:
                task = connection.recv()
            except EOFError:
                return
            connection.send({**run_task(task), PROCESS_SPENT: spent()})


@dataclass
class Tally:
    """What came of all programs."""

    verdicts: Counter[str] = field(default_factory=Counter)
    failures: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0

    def bad(self) -> int:
        return self.verdicts["wrong"] + self.verdicts["error"]

    def __str__(self) -> str:
        total = sum(self.verdicts.values())
        text = ", ".join(f"{n} {v}" for v, n in self.verdicts.most_common())
        return f"{total} programs in {self.seconds:.0f} s: {text}"


def fuzz(
    first: int | Sequence[int],
    seconds: float | None,
    count: int | None,
    processes: int,
    template: Task,
    say: Callable[[str], None],
    limit: float = PROGRAM_SECONDS,
    keep: Callable[[dict[str, Any]], None] = lambda row: None,
) -> Tally:
    """Programs of the seeds `first`, `first` + 1, ... until the time or the count is used up; or of
    the seeds given. `keep` receives every row as it comes."""
    tally, lock, began = Tally(), threading.Lock(), time.perf_counter()
    if isinstance(first, int):
        first = range(first, first + count if count is not None else 1 << 60)
    seeds = iter(first)

    def loop() -> None:
        worker = Worker(work)
        while seconds is None or time.perf_counter() - began < seconds:
            with lock:
                seed = next(seeds, None)
            if seed is None:
                break
            task = Task(**{**template.__dict__, "seed": seed})
            try:
                row = worker.run(task, limit)
            except Lost as e:
                row = lost(worker, task, limit, e)
            with lock:
                note(row)
        worker.stop()

    def note(row: dict[str, Any]) -> None:
        keep(row)
        tally.verdicts[row["verdict"]] += 1
        if row["verdict"] in ("wrong", "error"):
            tally.failures.append(row)
            say(f"seed {row['seed']} {row.get('kind', '')}: {row['verdict']}: {row['text'][:300]}")
            if row["file"]:
                say(f"    {row['file']}")
        if sum(tally.verdicts.values()) % 100 == 0:
            tally.seconds = time.perf_counter() - began
            say(str(tally))

    threads = [threading.Thread(target=loop) for _ in range(max(1, processes))]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    tally.seconds = time.perf_counter() - began
    return tally


def lost(worker: Worker, task: Task, limit: float, e: Lost) -> dict[str, Any]:
    """The verdict on a program whose process died or hung: torch's, where that of its capture does
    so alone (Dynamo takes minutes to unbind 4,096 symbolic elements, seed 41001500)."""
    verdict = "error"
    try:
        worker.run(replace(task, backend=CAPTURE_BACKENDS[0], options=(), cut=False), limit)
    except Lost as alone:
        verdict = "torch" if str(alone) == str(e) else verdict
    kind = kind_of(task.seed, task.kind)
    return {"seed": task.seed, "kind": kind, "verdict": verdict, "text": str(e), "file": ""}


def run_fuzz(
    seed: int,
    seconds: float | None,
    count: int | None,
    processes: int,
    template: Task,
) -> int:
    """The command. Exit status 1 where anything failed; the last failure's program is printed."""
    demand(template.device)
    limit = INTERPRETED_SECONDS if template.backend == "interpreted" else PROGRAM_SECONDS

    def say(text: str) -> None:
        print(text, flush=True)

    tally = fuzz(seed, seconds, count, processes, template, say, limit)
    print(tally)
    files = [Path(f["file"]) for f in tally.failures if f["file"]]
    if files:
        smallest = min(files, key=lambda f: f.stat().st_size)
        print(
            f"\nthe smallest failing program, {smallest}:\n\n{smallest.read_text(encoding='utf-8')}"
        )
    return 1 if tally.bad() else 0
