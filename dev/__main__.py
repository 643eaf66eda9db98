"""The developers' command line: `python -m dev bench | coverage | fuzz | minimize | predictions |
real`.

What has no options of its own is a module beside: `python -m dev.measure.scaling`, see README.md.
Exit status: 0 when all is well, 1 when something is wrong, 2 for wrong usage.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    help="What Deuteron's developers measure and check with.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
# Commands whose own parser reads what follows.
PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


@app.command()
def coverage(
    ops: Annotated[str, typer.Option(help="Regular expression of operator names.")] = "",
    dtypes: Annotated[
        str, typer.Option(help="By comma; default: all but int16, int8, uint8, complex128.")
    ] = "",
    parts: Annotated[
        str,
        typer.Option(
            help="forward, backward, inplace, method, layouts, dynamic, numbers, lists, mixed, "
            "zeros, chains; by comma."
        ),
    ] = "",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    jobs: Annotated[int, typer.Option(help="Worker processes.")] = 2,
    samples: Annotated[int, typer.Option(help="Of an operator, at most; 0: all.")] = 48,
    backend: Annotated[str, typer.Option(help="The backend that is tested.")] = "deuteron",
    state: Annotated[Path, typer.Option(help="Where results are kept.")] = Path(
        "out/coverage.jsonl"
    ),
    resume: Annotated[bool, typer.Option("--resume", help="Keep what the state holds.")] = False,
    write: Annotated[Path | None, typer.Option(help="Write the table, as Markdown.")] = None,
    seconds: Annotated[float | None, typer.Option(help="No job starts after so long.")] = None,
    states: Annotated[
        list[Path] | None,
        typer.Option("--from", help="Run nothing: results are these states (several, any device)."),
    ] = None,
    peer: Annotated[
        Path | None, typer.Option(help="Write which operators Inductor generates code for.")
    ] = None,
) -> None:
    """Every operator of PyTorch's own test samples, compiled and compared with eager."""
    if peer is not None:
        from dev.coverage.peer import write_peer

        raise typer.Exit(write_peer(ops, peer))
    from dev.coverage.cases import DTYPES, MORE_DTYPES, PARTS
    from dev.coverage.run import run_coverage, show

    if states:
        files = " ".join(f"--from {s.name}" for s in states)
        raise typer.Exit(
            show(states, write, f"python -m dev coverage {files} --write docs/coverage.md")
        )
    asked = listed(dtypes, (*DTYPES, *MORE_DTYPES)) if dtypes else DTYPES, listed(parts, PARTS)
    command = f"python -m dev coverage --device {device} --samples {samples}"
    raise typer.Exit(
        run_coverage(
            ops, *asked, device, jobs, samples, backend, state, resume, write, command, seconds
        )
    )


@app.command()
def fuzz(
    seconds: Annotated[float, typer.Option(help="How long programs are started.")] = 60.0,
    seed: Annotated[int, typer.Option(help="Of the first program; the next ones count on.")] = 0,
    count: Annotated[int | None, typer.Option(help="How many, whatever the time.")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    jobs: Annotated[int, typer.Option(help="Worker processes.")] = 2,
    lines: Annotated[int, typer.Option(help="Of a program, at most.")] = 40,
    backend: Annotated[str, typer.Option(help="The backend that is tested.")] = "deuteron",
    kind: Annotated[
        str,
        typer.Option(
            help="mixed, networks, vectors, assertions, checkpoints, attention, losses, or all."
        ),
    ] = "all",
    out: Annotated[Path, typer.Option(help="Folder for failing programs.")] = Path("out/fuzz"),
    cut: Annotated[bool, typer.Option(help="Cut failing programs down.")] = True,
    interpret: Annotated[
        bool, typer.Option("--interpret", help="Triton kernels, interpreted on the CPU.")
    ] = False,
) -> None:
    """Random programs, compiled and compared with eager; failures are cut down and kept."""
    from deuteron.base.options import set_environment
    from dev.fuzz.kinds import KINDS
    from dev.fuzz.run import Task, run_fuzz

    listed(kind, (*KINDS, "all"))
    if interpret:
        set_environment(TRITON_INTERPRET="1")  # of the worker processes
        backend = "interpreted"
    task = Task(seed, device, backend, lines, cut=cut, folder=str(out), kind=kind)
    raise typer.Exit(run_fuzz(seed, None if count is not None else seconds, count, jobs, task))


@app.command()
def minimize(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="With `fn` and `inputs()`.")],
    out: Annotated[Path | None, typer.Option(help="Default: FILE with .small before .py.")] = None,
    seconds: Annotated[float, typer.Option(help="How long at most.")] = 300.0,
    backend: Annotated[str | None, typer.Option(help="Default: what the file says.")] = None,
) -> None:
    """Cut a failing program down to the smallest that still fails."""
    from dev.check.minimize import run_minimize

    target = out or file.with_suffix(".small.py")
    raise typer.Exit(run_minimize(file, target, seconds, backend))


@app.command()
def bench(
    suites: Annotated[
        list[str] | None, typer.Argument(metavar="[SUITE]...", help="Default: all suites.")
    ] = None,
    vs: Annotated[str, typer.Option(help="Contenders beside deuteron, by comma.")] = "",
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto: a GPU when there is one.")] = (
        "auto"
    ),
    dtype: Annotated[str, typer.Option(help="fp32, bf16; by comma; default: all.")] = "",
    only: Annotated[str, typer.Option(help="Regular expression of suite and case.")] = "",
    quick: Annotated[bool, typer.Option("--quick", help="The short selection of cases.")] = False,
    cold: Annotated[bool, typer.Option("--cold", help="First calls in fresh processes.")] = False,
    repeats: Annotated[
        int | None,
        typer.Option(min=1, help="With --cold: calls of each in turn, by default 3; the median."),
    ] = None,
    profile: Annotated[bool, typer.Option("--profile", help="Time by kernel.")] = False,
    jobs: Annotated[int, typer.Option(help="Processes that compile beforehand; -1: cores.")] = -1,
    each: Annotated[
        float, typer.Option(min=0.0, help="Seconds of timing per case, about, by default 0.5.")
    ] = 0.0,
    seconds: Annotated[float, typer.Option(help="Start nothing after so long.")] = 3600.0,
    json: Annotated[Path | None, typer.Option(help="Write all rows here.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for logs, rows, plots.")] = Path("out/bench"),
    plot: Annotated[bool, typer.Option("--plot", help="Plots, and a page with them.")] = False,
    list_: Annotated[bool, typer.Option("--list", help="Only print the cases.")] = False,
    report: Annotated[
        list[Path] | None, typer.Option(help="Run nothing: tables from these JSON files.")
    ] = None,
    write: Annotated[Path | None, typer.Option(help="With --report: write Markdown here.")] = None,
) -> None:
    """Times beside eager and Inductor, interleaved, and beside the limit that memory sets."""
    from dev.bench.command import COLD_CALLS, SECONDS_PER_CASE, Asked, run_command, write_report

    if report:
        write_report(report, write, out, plot)
        return
    if cold and profile:
        raise typer.BadParameter("--cold and --profile are runs of their own")
    if repeats and not cold:
        raise typer.BadParameter("--repeats says how many cold calls there are: add --cold")
    what = "cold" if cold else "profile" if profile else "time"
    given = (
        tuple(suites or ()),
        vs,
        device,
        dtype,
        only,
        quick,
        jobs,
        each or SECONDS_PER_CASE,
        seconds,
        what,
    )
    asked = Asked(*given, repeats or COLD_CALLS)
    raise typer.Exit(run_command(asked, json, out, list_, plot))


def listed(text: str, known: tuple[str, ...]) -> tuple[str, ...]:
    """Values given by comma; none means all."""
    names = tuple(text.split(",")) if text else known
    for n in names:
        if n not in known:
            raise typer.BadParameter(f"{n!r} is not one of {', '.join(known)}")
    return names


@app.command(context_settings=PASSED_ON)
def real(context: typer.Context) -> None:
    """Models of timm and transformers that a date draws, beside eager and Inductor."""
    from dev.real.command import main

    raise typer.Exit(main(context.args))


@app.command(context_settings=PASSED_ON)
def predictions(context: typer.Context) -> None:
    """Kernels whose predicted and measured times differ, worst first."""
    from dev.bench.predictions import main

    raise typer.Exit(main(context.args))


def main() -> None:
    from deuteron.base.errors import DeuteronError

    try:
        app(prog_name="python -m dev")
    except DeuteronError as error:
        print(f"dev: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
