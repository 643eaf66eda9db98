"""The demo: three programs, each under eager, Inductor and Deuteron in the same run, and one table.

In: a folder for what is written, a device. Out: the table, the explanations' paths, exit status 0
when Deuteron ran all three and its numbers agree with eager's. Each program runs in a process of
its own with empty caches (`demo_worker`); this one only shows what they report.
"""

from __future__ import annotations

import atexit
import json
import math
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

MESSAGE_PREFIX = "@deuteron-demo "
PROGRAM_NAMES = ("embeddings", "gpt", "residual")
# Gradients differ by about 1e-3 when one input of a ReLU rounds to the other side of zero; losses
# drift apart as training amplifies rounding (a few 1e-4 in these runs). A wrong kernel is far off.
GRADIENT_TOLERANCE, LOSS_TOLERANCE, COSINE_AT_LEAST = 3e-3, 1e-2, 0.99999

Result = dict[str, Any]


def run_demo(out: Path, device: str, backends: tuple[str, ...], names: tuple[str, ...]) -> int:
    """Runs the programs one after the other and prints the table. Returns the exit status."""
    if device == "cuda":
        from deuteron.base.device import demand  # brings torch

        demand(device)
    console = Console()
    out.mkdir(parents=True, exist_ok=True)
    console.print(
        f"[bold]Deuteron's demo[/]: {len(names)} programs, each under {', '.join(backends)}.\n"
        f"Caches are empty, so compile times are cold.\n"
    )
    results: list[Result] = []
    with Progress(
        SpinnerColumn(),
        TextColumn("{task.fields[program]:10}"),
        BarColumn(bar_width=20),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
        console=console,
    ) as progress:
        for name in names:
            task = progress.add_task("starting", total=1.0, program=name)
            result = run_program(name, backends, device, out, progress, task)
            results.append(result)
            progress.update(
                task, completed=1.0, description="failed" if failure(result) else "done"
            )
            progress.stop_task(task)
            show_program(console, result, backends)
    (out / "results.json").write_text(json.dumps(results, indent=1))
    show_table(console, results, backends)
    problems = [p for r in results for p in verdict(r, backends[-1])]
    for problem in problems:
        console.print(f"[red]not right[/]: {problem}", highlight=False, soft_wrap=True)
    if not problems:
        console.print(f"All of {backends[-1]}'s numbers agree with eager's.", style="green")
    return int(bool(problems))


def run_program(
    name: str, backends: tuple[str, ...], device: str, out: Path, progress: Progress, task: Any
) -> Result:
    """One worker process; its other output goes to ``<name>.log`` in the folder."""
    result: Result = {"name": name, "rows": []}
    log_path = out / f"{name}.log"
    with tempfile.TemporaryDirectory(prefix="deuteron-demo-") as scratch, log_path.open("w") as log:
        command = [sys.executable, "-m", "deuteron.tools.demo_worker"]
        command += [name, ",".join(backends), device, str(out), scratch]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        assert process.stdout is not None
        stage = ""
        atexit.register(process.kill)  # where the demo is stopped
        for line in process.stdout:
            if not line.startswith(MESSAGE_PREFIX):
                log.write(line)
                continue
            message = json.loads(line.removeprefix(MESSAGE_PREFIX))
            if "stage" in message:
                stage = message["stage"]
                progress.update(task, completed=message["done"], description=stage)
            if "losses" in message:
                losses = "  ".join(f"{b} {v:.4f}" for b, v in message["losses"].items())
                progress.update(task, description=f"{stage}  loss: {losses}")
            result.update(message.get("result", {}))
        code = process.wait()
        atexit.unregister(process.kill)
    if code or not result["rows"]:
        tail = [t for t in log_path.read_text().splitlines() if t.strip()][-1:]
        result["error"] = f"exit status {code}: {' '.join(tail)} (see {log_path})"
    return result


# ------------------------------------------------------------------------------------ showing


def show_program(console: Console, result: Result, backends: tuple[str, ...]) -> None:
    """What one program was about: closest sentences, or curves side by side."""
    console.print(f"\n[bold]{result['name']}[/]: {result.get('title', '')}", highlight=False)
    if failure(result):
        console.print(f"  [red]{failure(result)}[/]", highlight=False, soft_wrap=True)
    rows = {row["backend"]: row for row in result["rows"]}
    notes = result.get("notes", {})
    if "closest" in notes:
        a, b = notes["closest"]
        console.print(f"  closest two ({notes['similarity']:.3f}): “{a}” / “{b}”", highlight=False)
    for row in rows.values():
        if "cosine" in row and row["backend"] != "eager":
            cosine = row["cosine"]
            console.print(f"  {row['backend']}: cosine against eager at least {cosine:.7f}")
    curves = {b: rows[b]["losses"] for b in backends if b in rows and rows[b].get("losses")}
    if curves and result.get("train"):
        show_curves(console, curves, rows)
    console.print()


def show_curves(console: Console, curves: dict[str, list[float]], rows: dict[str, Any]) -> None:
    """Losses at some steps, the whole curves as bars, steps per second, distance from eager."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("  step", no_wrap=True)
    count = min(len(c) for c in curves.values())
    steps = sorted({round(i * (count - 1) / 3) for i in range(4)})
    for i in steps:
        table.add_column(str(i), justify="right", no_wrap=True)
    for title in ("curve", "steps/s", "off by"):
        table.add_column(title, justify="right", no_wrap=True)
    low = min(map(min, curves.values()))
    high = max(map(max, curves.values()))
    for name, curve in curves.items():
        picked = curve[:: max(1, count // 12)][:12]
        bars = "".join("▁▂▃▄▅▆▇█"[int(7.999 * (v - low) / (high - low or 1.0))] for v in picked)
        speed = f"{1e3 / rows[name]['ms']:.1f}" if "ms" in rows[name] else "-"
        drift = "" if name == "eager" else f"{curve_difference(curves['eager'], curve):.1e}"
        cells = [f"{curve[i]:.4f}" for i in steps]
        table.add_row(f"  {name}", *cells, bars, speed, drift)
    console.print(table)


def curve_difference(eager: list[float], curve: list[float]) -> float:
    """Largest difference of two loss curves, relative to the first loss."""
    return max(abs(a - b) for a, b in zip(eager, curve)) / abs(eager[0])


def show_table(console: Console, results: list[Result], backends: tuple[str, ...]) -> None:
    about = next((r for r in results if "device" in r), {})
    where = f"{about.get('device', '?')}, {about.get('threads', '?')} threads, torch "
    console.print(f"[bold]{where}{about.get('torch', '?')}[/]\n", highlight=False)
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for column in ("program", "compiler"):
        table.add_column(column, no_wrap=True)
    for column in ("time\nms", "cold com-\npile, s", "kernels", "library\ncalls", "peak\nMB"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("error", justify="right", no_wrap=True)
    for result in results:
        for k, row in enumerate(result["rows"]):
            name = result["name"] if k == 0 else ""
            last = row["backend"] == backends[-1]
            compiler = f"[bold]{row['backend']}[/]" if last else row["backend"]
            if "error" in row:
                table.add_row(name, compiler, "[red]failed[/]")
                continue
            table.add_row(
                name,
                compiler,
                number(row.get("ms"), ".1f"),
                number(row.get("compile_s") or None, ".1f"),
                number(row.get("kernels"), "d"),
                number(row.get("library"), "d"),
                number(row.get("peak_mb"), ".1f"),
                number(row.get("error_f64"), ".1e"),
            )
        table.add_row()
    console.print(table)
    console.print(
        "time: median of interleaved rounds (one pass over all batches, or one training step with "
        "its optimizer)\nlibrary: calls of ATen; error: relative, against float64, of results or "
        "of loss and gradients",
        style="dim",
    )
    for other in backends[:-1]:
        ratio = mean_ratio(results, backends[-1], other)
        if ratio is not None:
            console.print(f"time of {backends[-1]} / {other}, geometric mean: [bold]{ratio:.2f}[/]")
    for result in results:
        if "explain" in result:
            console.print(f"explained: {result['explain']}", highlight=False, soft_wrap=True)


def number(value: float | None, form: str) -> str:
    return "-" if value is None else f"{value:{form}}"


def mean_ratio(results: list[Result], one: str, other: str) -> float | None:
    """Geometric mean of time ratios, None unless both ran every program."""
    logs = []
    for result in results:
        times = {row["backend"]: row.get("ms") for row in result["rows"]}
        if not times.get(one) or not times.get(other):
            return None
        logs.append(math.log(times[one] / times[other]))
    return math.exp(statistics.fmean(logs)) if logs else None


# ------------------------------------------------------------------------------------ judging


def failure(result: Result) -> str:
    """Why the program as a whole did not run, or ''."""
    return str(result.get("error", ""))


def verdict(result: Result, backend: str) -> list[str]:
    """What is wrong with the compiler's run of a program; [] when its numbers are eager's."""
    name = result["name"]
    if failure(result):
        return [f"{name}: {failure(result)}"]
    rows = {row["backend"]: row for row in result["rows"]}
    row, eager, problems = rows[backend], rows["eager"], []
    if "error" in row:
        return [f"{name}: {backend} failed: {row['error']}"]
    if "explain_error" in result:
        problems.append(f"{name}: explain failed: {result['explain_error']}")
    bound = max(2 * eager["error_f64"] + 1e-6, GRADIENT_TOLERANCE if result["train"] else 0.0)
    if not row["error_f64"] <= bound:
        problems.append(f"{name}: error {row['error_f64']:.1e}, eager's {eager['error_f64']:.1e}")
    if not row.get("cosine", 1.0) >= COSINE_AT_LEAST:
        problems.append(f"{name}: cosine against eager {row['cosine']:.6f}")
    if result["train"]:
        drift = curve_difference(eager["losses"], row["losses"])
        if not drift <= LOSS_TOLERANCE:
            problems.append(f"{name}: losses differ from eager's by {drift:.1e}")
    return problems
