"""Lists every pass of the compiler, with the times that one program took.

    python -m dev.passes

The program is the one of `dev.architecture`: layer norm, a linear layer and GELU, forward and
backward, on the CPU. Each row: the number of a pass (its debug files are under it), its name, the
artifacts that it takes and gives, milliseconds of the forward (with what is done of the joint
graph) and of the backward, its verifier or why it has none, its printer, its file in the debug
folder. Rows without times are of code for GPUs.
"""

from __future__ import annotations

import inspect
import re
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from deuteron.base.passes import Pass, numbered
from deuteron.base.record import Record
from deuteron.pipeline import STAGES


@dataclass(frozen=True)
class Listed:
    """A row of a table. `number`: those of the passes around it, and its own; `path`: names
    likewise."""

    number: tuple[int, ...]
    path: tuple[str, ...]
    row: Pass[Any, Any]

    @property
    def file(self) -> str:
        """Where the debug folder of a graph has its artifact."""
        parts = [numbered(k, name) for k, name in zip(self.number, self.path, strict=True)]
        return self.row.file or "/".join(parts) + ".txt"

    @property
    def takes(self) -> str:
        return annotation(next(iter(parameters(self.row.run))).annotation)

    @property
    def gives(self) -> str:
        return annotation(signature(self.row.run).return_annotation)

    @property
    def does(self) -> str:
        """The first sentence of what the function says of itself."""
        text = inspect.getdoc(getattr(self.row.run, "apply", self.row.run)) or ""
        return re.split(r"(?<=\.)\s", text.replace("\n", " "))[0].rstrip(".")

    @property
    def verified(self) -> str:
        """By which function, or the sentence that says why by none."""
        check = self.row.check
        return check if isinstance(check, str) else f"`{qualified(check)}`"


def listed(
    table: Sequence[Pass[Any, Any]],
    number: tuple[int, ...] = (),
    path: tuple[str, ...] = (),
) -> Iterator[Listed]:
    """All rows, each before the rows of its own table. The table of a stage that a pass of another
    stage runs, too, stands with that stage."""
    for k, row in enumerate(table, 1):
        one = Listed((*number, k), (*path, row.name), row)
        yield one
        if not path or not any(row.passes is s.passes for s in STAGES):
            yield from listed(row.passes, one.number, one.path)


def signature(run: Any) -> inspect.Signature:
    return inspect.signature(run if inspect.isfunction(run) else type(run).__call__)


def parameters(run: Any) -> list[inspect.Parameter]:
    return [p for p in signature(run).parameters.values() if p.name != "self"]


def annotation(text: Any) -> str:
    return str(text).rsplit(".", 1)[-1]


def qualified(function: Any) -> str:
    return f"{function.__module__.removeprefix('deuteron.')}.{function.__name__}"


def times(record: Record) -> dict[tuple[str, ...], float]:
    """Seconds by the path of a pass."""
    seconds: dict[tuple[str, ...], float] = {(e["name"],): e["seconds"] for e in record.of("stage")}
    for e in record.of("pass"):
        path = (e["stage"], *e["name"].split("/"))
        seconds[path] = e["seconds"]
    return seconds


def markdown(inner: bool) -> str:
    """The table for docs/architecture.md: of stages, or with their passes."""
    lines = [
        f"| | {'pass' if inner else 'stage'} | what it does | in → out | verified by, or why not |",
        "|---|---|---|---|---|",
    ]
    for one in listed(STAGES):
        if len(one.path) > 1 and not inner:
            continue
        name = f"**{one.row.name}**" if len(one.path) == 1 and inner else one.row.name
        number = ".".join(map(str, one.number))
        flow = f"{one.takes} → {one.gives}"
        lines.append(f"| {number} | {name} | {one.does} | {flow} | {one.verified} |")
    return "\n".join(lines)


def main() -> None:
    from deuteron.backend import collecting
    from dev.architecture import compile_walked

    with tempfile.TemporaryDirectory() as folder, collecting() as records:
        compile_walked(cache_dir=folder)
    forward, backward = map(times, records)
    head = (f"{'pass':43}", f"{'artifacts':33}", f"{'forward':>9} {'backward':>9} ms")
    print(*head, "verifier, or why none; printer; debug file", sep="  ")
    for one in listed(STAGES):
        number = ".".join(map(str, one.number))
        name = f"{number:7} {'  ' * (len(one.path) - 1)}{one.row.name}"
        spent = (
            f"{seconds[one.path] * 1e3:9.2f}" if one.path in seconds else f"{'':9}"
            for seconds in (forward, backward)
        )
        about = f"{one.verified}; {qualified(one.row.show)}; {one.file}"
        print(f"{name:43}  {one.takes + ' -> ' + one.gives:33}  {' '.join(spent)}     {about}")


if __name__ == "__main__":
    main()
