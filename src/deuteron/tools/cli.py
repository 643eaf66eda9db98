"""The command line: `deuteron demo | explain | bench | doctor | cache info | cache clear`.

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
    from deuteron.tools.demo import PROGRAM_NAMES, run_demo

    chosen, names = tuple(backends.split(",")), tuple(programs.split(","))
    unknown = [n for n in names if n not in PROGRAM_NAMES]
    if unknown:
        raise typer.BadParameter(f"{unknown[0]!r} is not one of {', '.join(PROGRAM_NAMES)}")
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
    measure: Annotated[bool, typer.Option(help="Time every kernel, and eager beside it.")] = False,
    full: Annotated[bool, typer.Option(help="Every kernel and every decision.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compile a function of a file and print its kernels, sorted by time, and what was not fused.

    Its arguments are the --input options; without them, what the file's inputs() returns (a tensor
    or a tuple); without that, the function is called with none. A module made by FUNCTION (a class
    or a function that returns an nn.Module) is explained in its stead.
    """
    import deuteron
    from deuteron.tools.target import UsageError, target_of

    try:
        named = target_of(target, shape or [], device, backward)
    except UsageError as error:
        raise typer.BadParameter(str(error)) from None
    try:
        told = deuteron.explain(
            named.function, *named.args, backward=backward or None, measure=measure, name=target
        )
    except Exception:
        if (failure := named.eager_failure()) is not None:
            raise typer.BadParameter(failure) from None
        raise
    print(told.to_json() if json else told.full() if full else told)


@app.command()
def bench(
    target: Annotated[str, typer.Argument(metavar="FILE:FUNCTION", help="What to time.")],
    shape: Annotated[
        list[str] | None,
        typer.Option("--input", help="An argument, as float32[8,128]; again for each."),
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto: a GPU when there is one.")] = (
        "auto"
    ),
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
    from deuteron.tools.target import UsageError

    try:
        request = request_of(target, shape or [], device, backward, vs, mode, seconds)
        status = run_bench(request, json)
    except UsageError as error:
        raise typer.BadParameter(str(error)) from None
    raise typer.Exit(status)


@app.command()
def doctor(
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="Measure this machine for the cost model.")
    ] = False,
) -> None:
    """What Deuteron finds on this machine, what is missing, and what to do about it."""
    from deuteron.tools.doctor import examine

    raise typer.Exit(examine(calibrate))


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
