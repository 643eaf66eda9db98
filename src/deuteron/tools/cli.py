"""The command line: `deuteron demo | explain | doctor | cache info | cache clear`.

Typed signatures are options and help. Torch is imported by the commands that need it, not to
print help. Exit status: 0 when all is well, 1 when something is wrong, 2 for wrong usage.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    help="Deuteron: an operator-fusion compiler backend for torch.compile.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
cache_app = typer.Typer(help="The kernel cache on disk.", no_args_is_help=True)
app.add_typer(cache_app, name="cache")


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for explanations, logs, results.")] = Path(
        "out/demo"
    ),
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto: a GPU when there is one.")] = (
        "auto"
    ),
    programs: Annotated[str, typer.Option(help="Which, by comma.")] = "embeddings,gpt,residual",
    backends: Annotated[
        str, typer.Option(help="Compilers to compare, by comma; the last one is judged.")
    ] = "eager,inductor,deuteron",
) -> None:
    """Three programs under eager, Inductor and Deuteron, side by side."""
    from deuteron.tools.demo import NAMES, run_demo

    chosen, names = tuple(backends.split(",")), tuple(programs.split(","))
    unknown = [n for n in names if n not in NAMES]
    if unknown:
        raise typer.BadParameter(f"{unknown[0]!r} is not one of {', '.join(NAMES)}")
    if device not in ("auto", "cpu", "cuda"):
        raise typer.BadParameter(f"{device!r} is not one of auto, cpu, cuda")
    if chosen[0] != "eager":
        raise typer.BadParameter("the first of --backends is eager: the others are compared to it")
    raise typer.Exit(run_demo(out, device, chosen, names))


@app.command()
def explain(
    target: Annotated[str, typer.Argument(metavar="FILE:FUNCTION", help="What to compile.")],
    shape: Annotated[
        list[str] | None,
        typer.Option("--input", help="An argument, as float32[8,128]; again for each."),
    ] = None,
    device: Annotated[str, typer.Option(help="Device of the inputs: cpu or cuda.")] = "cpu",
    backward: Annotated[bool, typer.Option(help="Compile and explain the backward too.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compile a function of a file and print its kernels and every decision.

    Its arguments are the --input options; without them, what the file's inputs() returns (a tensor
    or a tuple); without that, the function is called with none. A module made by FUNCTION (a class
    or a function that returns an nn.Module) is explained in its stead.
    """
    from deuteron.tools.explaining import UsageError, explain_target

    try:
        report = explain_target(target, shape or [], device, backward)
    except UsageError as error:
        raise typer.BadParameter(str(error)) from None
    print(report.to_json() if json else report)


@app.command()
def doctor(
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="Measure this machine for the cost model.")
    ] = False,
) -> None:
    """What Deuteron finds on this machine, what is missing, and what to do about it."""
    from deuteron.tools.doctor import examine

    raise typer.Exit(examine(calibrate))


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
        from deuteron.tools.coverage_peer import write_peer

        raise typer.Exit(write_peer(ops, peer))
    from deuteron.tools.coverage import run_coverage, show
    from deuteron.tools.coverage_cases import DTYPES, MORE, PARTS

    if states:
        files = " ".join(f"--from {s.name}" for s in states)
        raise typer.Exit(show(states, write, f"deuteron coverage {files} --write docs/coverage.md"))
    asked = listed(dtypes, (*DTYPES, *MORE)) if dtypes else DTYPES, listed(parts, PARTS)
    command = f"deuteron coverage --device {device} --samples {samples}"
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
        str, typer.Option(help="mixed, networks, vectors, assertions, checkpoints, or all.")
    ] = "all",
    out: Annotated[Path, typer.Option(help="Folder for failing programs.")] = Path("out/fuzz"),
    cut: Annotated[bool, typer.Option(help="Cut failing programs down.")] = True,
    interpret: Annotated[
        bool, typer.Option("--interpret", help="Triton kernels, interpreted on the CPU.")
    ] = False,
) -> None:
    """Random programs, compiled and compared with eager; failures are cut down and kept."""
    from deuteron.base.options import set_environment
    from deuteron.tools.fuzz import Task, run_fuzz
    from deuteron.tools.fuzz_kinds import KINDS

    listed(kind, (*KINDS, "all"))
    if interpret:
        set_environment(TRITON_INTERPRET="1")  # of the worker processes
        backend = "interpreted"
    task = Task(seed, device, backend, lines, cut=cut, folder=str(out), kind=kind)
    raise typer.Exit(run_fuzz(seed, None if count is not None else seconds, count, jobs, task))


@app.command()
def reduce(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="With `fn` and `inputs()`.")],
    out: Annotated[Path | None, typer.Option(help="Default: FILE with .small before .py.")] = None,
    seconds: Annotated[float, typer.Option(help="How long at most.")] = 300.0,
    backend: Annotated[str | None, typer.Option(help="Default: what the file says.")] = None,
) -> None:
    """Cut a failing program down to the smallest that still fails."""
    from deuteron.tools.reduce import run_reduce

    target = out or file.with_suffix(".small.py")
    raise typer.Exit(run_reduce(file, target, seconds, backend))


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
    from deuteron.tools.bench.command import COLD_CALLS, EACH, Asked, run_command, write_report

    if report:
        write_report(report, write, out, plot)
        return
    if cold and profile:
        raise typer.BadParameter("--cold and --profile are runs of their own")
    if repeats and not cold:
        raise typer.BadParameter("--repeats says how many cold calls there are: add --cold")
    what = "cold" if cold else "profile" if profile else "time"
    given = (tuple(suites or ()), vs, device, dtype, only, quick, jobs, each or EACH, seconds, what)
    asked = Asked(*given, repeats or COLD_CALLS)
    raise typer.Exit(run_command(asked, json, out, list_, plot))


def listed(text: str, known: tuple[str, ...]) -> tuple[str, ...]:
    """Values given by comma; none means all."""
    names = tuple(text.split(",")) if text else known
    for n in names:
        if n not in known:
            raise typer.BadParameter(f"{n!r} is not one of {', '.join(known)}")
    return names


@cache_app.command("info")
def cache_info() -> None:
    """Where the cache is, how many kernels it holds, their size."""
    from deuteron.base.options import Options
    from deuteron.tools.doctor import cache_summary

    print(cache_summary(Options.make().cache_folder()))


@cache_app.command("clear")
def cache_clear() -> None:
    """Delete what the cache holds. Programs that run keep what they have loaded."""
    from deuteron.base.options import Options
    from deuteron.tools.doctor import clear_cache

    print(clear_cache(Options.make().cache_folder()))


def main() -> None:
    from deuteron.base.errors import DeuteronError

    try:
        app()
    except DeuteronError as error:
        print(f"deuteron: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
