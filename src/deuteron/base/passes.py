"""Passes: the rows of the compiler's tables, and the one way to run them.

In: an artifact, a table of rows, a `Context`. Out: the artifact that the last row gives. A row
names a function ``(artifact, Context) -> artifact``, the verifier of what that gives (or a sentence
that says why there is none), and its printer. A row may have a table of its own, of the passes that
its function runs: the rows of the outermost table are the stages of the compiler (`pipeline`).

Every run is timed (entries "stage" and "pass" of the Record). With a debug folder every artifact is
written there: a stage's in the file that its row names, a pass's in a file with its number
(``06_schedule/02_dependencies.txt``). A stage's artifact is always verified, a pass's with a debug
folder or the option `verify`: a `VerifyError` then names the first pass that broke something.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from time import perf_counter
from typing import Any, Generic, Protocol, TypeVar

from deuteron.base.device import DeviceSpec, device_spec_for
from deuteron.base.errors import DeuteronError
from deuteron.base.observing import Watcher
from deuteron.base.options import Options
from deuteron.base.record import Record

Before = TypeVar("Before")
After = TypeVar("After")
# The attribute by which an exception says in which pass it was raised.
RAISED_IN = "deuteron_pass"


class StepClock(Protocol):
    """Times the steps of a call: `start` is called before a step, what it returns after it."""

    def start(self, step: int) -> Callable[[], None]: ...


class StageLog:
    """Seconds of the passes of one stage by their names, all runs of a pass together, and the files
    that were begun."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.begun: set[Path] = set()

    def write(self, path: Path, text: str) -> None:
        """Appends where the stage has begun the file: a pass may run once per kernel."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open(
            "a" if path in self.begun else "w", encoding="utf-8", errors="backslashreplace"
        ) as file:
            file.write(text + "\n" if path in self.begun or text[-1:] != "\n" else text)
        self.begun.add(path)


@dataclass(frozen=True)
class Context:
    """What every pass may ask, beside its artifact.

    phase        "captured" (what Dynamo captured), "forward", "backward", "inference" or
                 "chunk" (steps that one of these repeats)
    number       of the graph in this process
    specs        the figures of a device; None: those of this machine's
    like         the kind of device that the program is for, where that is not its tensors'
    contraction  who multiplies two matrices; None: `lower.contractions` decides
    unfused      nodes of the graph that share no kernel (`runtime.guard`)
    clock        called around each step of the emitted module
    watchers     who is shown what the stages made (`base.observing`)
    path         the names of the passes around the one that runs, the stage first
    place        the folder, in the debug folder, of the passes inside the one that runs
    log          of the stage that runs; None where somebody runs its passes by themselves
    """

    options: Options = field(default_factory=Options)
    record: Record = field(default_factory=Record)
    phase: str = "inference"
    number: int = 0
    specs: Callable[[str], DeviceSpec] | None = None
    like: str = ""
    contraction: Callable[..., str | None] | None = None
    unfused: frozenset[str] = frozenset()
    clock: StepClock | None = None
    watchers: tuple[Watcher, ...] = ()
    path: tuple[str, ...] = ()
    place: str = ""
    log: StageLog | None = None

    def spec(self, device: str) -> DeviceSpec:
        """The figures of a device."""
        return device_spec_for(device, self.options) if self.specs is None else self.specs(device)

    @property
    def folder(self) -> Path | None:
        """The folder that receives this graph's artifacts."""
        if self.options.debug_dir is None:
            return None
        return Path(self.options.debug_dir) / f"{self.phase}_{self.number}"

    @property
    def watched(self) -> bool:
        """Whether passes are verified one by one."""
        return self.options.verify or self.options.debug_dir is not None

    def inside(self, row: Pass[Any, Any], number: int) -> Context:
        """The context of the passes of a row."""
        place = f"{self.place}{numbered(number, row.name)}/"
        return replace(self, path=(*self.path, row.name), place=place)


@dataclass(frozen=True)
class Pass(Generic[Before, After]):
    """A row.

    run     the function
    check   ``check(artifact, guilty)`` raises `VerifyError`, which names `guilty`, where the
            artifact breaks an invariant; or the sentence that says why nothing checks it
    show    the artifact as text, for people
    file    in the debug folder of the graph; "" for a file with the number of the pass
    passes  the table that `run` runs
    """

    name: str
    run: Callable[[Before, Context], After]
    check: Callable[[After, str], None] | str
    show: Callable[[After], str]
    file: str = ""
    passes: tuple[Pass[Any, Any], ...] = ()


Table = tuple[Pass[Any, Any], ...]


def numbered(number: int, name: str) -> str:
    return f"{number:02}_{re.sub(r'[^a-z0-9]+', '_', name.lower())}"


def run_stages(
    stages: Sequence[Pass[Any, Any]], artifact: Any, context: Context, first: int
) -> Any:
    """Takes an artifact through stages; `first` is the number of the first one in the whole
    compiler."""
    for number, stage in enumerate(stages, first):
        log, start = StageLog(), perf_counter()
        artifact = run_pass(stage, artifact, replace(context, log=log), number, always=True)
        seconds = perf_counter() - start
        for name, spent in log.seconds.items():
            context.record.add("pass", stage=stage.name, name=name, seconds=spent)
        context.record.add("stage", name=stage.name, seconds=seconds)
        if context.folder is not None:
            context.folder.mkdir(parents=True, exist_ok=True)
            entries = context.record.to_json()
            (context.folder / "record.json").write_text(entries, encoding="utf-8")
    return artifact


def run_passes(passes: Sequence[Pass[Any, Any]], artifact: Any, context: Context) -> Any:
    """Takes an artifact through the passes of the row that runs. May be called several times, for
    one kernel after the other."""
    for number, row in enumerate(passes, 1):
        artifact = run_pass(row, artifact, context, number)
    return artifact


def run_pass(
    row: Pass[Any, Any], artifact: Any, context: Context, number: int, always: bool = False
) -> Any:
    """What a row gives: verified (where passes are watched, or `always`), timed and printed."""
    start = perf_counter()
    try:
        inner = context.inside(row, number) if row.passes else context
        artifact = row.run(artifact, inner)
        if not isinstance(row.check, str) and (always or context.watched):
            row.check(artifact, "/".join((*context.path, row.name)))
    except Exception as e:
        if not hasattr(e, RAISED_IN):
            setattr(e, RAISED_IN, (*context.path, row.name))
        raise
    log = context.log
    if log is not None:
        if context.path:
            name = "/".join((*context.path[1:], row.name))
            log.seconds[name] = log.seconds.get(name, 0.0) + perf_counter() - start
        if context.folder is not None:
            file = row.file or f"{context.place}{numbered(number, row.name)}.txt"
            log.write(context.folder / file, row.show(artifact))
    return artifact


def internal_error(e: Exception) -> DeuteronError:
    """What the user sees of a failure in a pass that nobody foresaw."""
    stage, *inner = getattr(e, RAISED_IN, ("?",))
    where = f"stage {stage!r}" + (f", pass {'/'.join(inner)!r}" if inner else "")
    return DeuteronError(
        f"the compiler failed at {where}: {type(e).__name__}: {e}",
        hint='please report it; options={"fallback": "aten"} runs such a graph through ATen',
    )


def walk(table: Sequence[Pass[Any, Any]]) -> Iterator[tuple[tuple[str, ...], Pass[Any, Any]]]:
    """Every row of a table with its path, each before the rows of its own table."""
    for row in table:
        yield (row.name,), row
        for path, inner in walk(row.passes):
            yield (row.name, *path), inner


def extended(kind: type[After], before: Any, **more: Any) -> After:
    """An artifact of a dataclass that extends another: the fields of `before`, and `more`."""
    known = (f.name for f in fields(kind) if f.name not in more)  # type: ignore[arg-type]
    return kind(**{name: getattr(before, name) for name in known}, **more)


__all__ = [
    "Context",
    "Pass",
    "StageLog",
    "StepClock",
    "Table",
    "extended",
    "internal_error",
    "run_pass",
    "run_passes",
    "run_stages",
    "walk",
]
