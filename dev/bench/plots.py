"""Plots of measured rows, as PNG: time over the limit by case, and a roofline per device.

Colours: a contender has one hue in all plots, from a palette that colour-blind readers can tell
apart (Okabe and Ito, 2008); ours is the strongest, the others recede.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from dev.bench.report import OURS, Row, limit_us, over_limit, us

CONTENDER_COLOURS = {
    OURS: "#0072B2",
    "inductor": "#E69F00",
    "inductor-max": "#B8860B",
    "eager": "#BBBBBB",
    "handwritten": "#009E73",
    "handwritten-cuda": "#66C2A5",
    "inductor-reduce": "#D55E00",
    "deuteron-reduce": "#56B4E9",
}
# Bars beyond this many times the limit are cut off, and say their length.
MAX_BAR = 4.0


def draw(documents: Sequence[Row], out: Path) -> list[Path]:
    """Writes the plots of all devices among the documents; their paths."""
    import matplotlib

    matplotlib.use("Agg")
    out.mkdir(parents=True, exist_ok=True)
    written = []
    for device in dict.fromkeys(d["machine"]["device"] for d in documents):
        mine = [d for d in documents if d["machine"]["device"] == device]
        rows = [r for d in mine for r in d["rows"] if limit_us(r) == limit_us(r)]
        name = mine[0]["machine"]["name"]
        for suite in dict.fromkeys(r["suite"] for r in rows):
            shown = [r for r in rows if r["suite"] == suite and over_limit(r) == over_limit(r)]
            if shown and suite != "models":
                written.append(bars(shown, f"{suite}, {name}", out / f"{device}-{suite}.png"))
        points = [p for r in rows if (p := intensity(r)) is not None]
        if points:
            written.append(roofline(rows, points, name, out / f"{device}-roofline.png"))
    return written


def contenders(rows: Sequence[Row]) -> list[str]:
    """Those that were timed, ours first."""
    timed = {n for r in rows for n, f in r["results"].items() if "us" in f}
    return [n for n in CONTENDER_COLOURS if n in timed and n != "eager"]


def share(row: Row, contender: str) -> float:
    """Limit over time: 1 is the speed of a copy."""
    return limit_us(row) / us(row, contender)


def bars(rows: Sequence[Row], title: str, path: Path) -> Path:
    """A group of bars per case: time over the limit, shortest best, the limit a line at 1."""
    import matplotlib.pyplot as plt

    names = contenders(rows)
    rows = sorted(rows, key=over_limit, reverse=True)
    figure, axes = plt.subplots(
        figsize=(9, 1.2 + 0.15 * len(rows) * (len(names) + 0.6)), layout="constrained"
    )
    height = 1 / (len(names) + 0.6)
    for k, name in enumerate(names):
        values = [us(r, name) / limit_us(r) for r in rows]
        places = [i + (k - (len(names) - 1) / 2) * -height for i in range(len(rows))]
        shown = [min(v, MAX_BAR) if v == v else 0.0 for v in values]
        axes.barh(places, shown, height * 0.9, color=CONTENDER_COLOURS[name], label=name)
        for place, v in zip(places, values):
            if v > MAX_BAR:
                axes.text(MAX_BAR, place, f" {v:.1f}", va="center", fontsize=6, color="#444444")
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_yticks(range(len(rows)), [r["case"] for r in rows], fontsize=7)
    axes.set_ylim(-0.6, len(rows) - 0.4)
    axes.set_xlim(0, MAX_BAR * 1.08)
    axes.set_xlabel("time / limit (1: the unavoidable bytes at the speed of a copy)")
    axes.set_title(title, loc="left", fontsize=10)
    axes.legend(frameon=False, fontsize=7, loc="lower right")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return path


def intensity(row: Row) -> tuple[float, float] | None:
    """FLOPs per unavoidable byte, and GFLOP/s reached, of ours; None where no FLOPs are known."""
    flops = row["results"].get(OURS, {}).get("flops") or row["flops"]
    time = us(row, OURS)
    if not flops or time != time or row["suite"] == "launch":
        return None
    return flops / row["bytes"], flops / time / 1e3


def roofs(rows: Sequence[Row]) -> Iterator[tuple[str, float]]:
    """GFLOP/s of the library's large products, by dtype, as measured in the run."""
    highest: dict[str, float] = {}
    for r in rows:
        if r.get("matmul_tflops"):
            highest[r["dtype"]] = max(highest.get(r["dtype"], 0.0), r["matmul_tflops"] * 1e3)
    yield from highest.items()


def roofline(
    rows: Sequence[Row], points: Sequence[tuple[float, float]], name: str, path: Path
) -> Path:
    """Each case a point below the roofs: bandwidth of a copy, and products of the library."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    bandwidth = sorted(r["copy_gbps"] for r in rows)[len(rows) // 2]
    low = min(p[0] for p in points) / 2
    high = max(max(p[0] for p in points), 1000.0) * 2
    tops = list(roofs(rows))
    left = [low, high]
    axes.plot(left, [bandwidth * x for x in left], color="black", linewidth=1)
    axes.text(low * 1.1, bandwidth * low * 1.5, f"copy, {bandwidth:.0f} GB/s", fontsize=7)
    for dtype, top in tops:
        axes.plot([top / bandwidth, high], [top, top], color="black", linewidth=1)
        axes.text(high, top * 1.08, f"product, {dtype}, {top / 1e3:.3g} TFLOP/s", fontsize=7,
                  ha="right")  # fmt: skip
    suites: dict[str, list[tuple[float, float]]] = {}
    for r in rows:
        p = intensity(r)
        if p is not None:
            suites.setdefault(r["suite"], []).append(p)
    marks: dict[str, Any] = {"seeds": "o", "norms": "s", "losses": "^", "reductions": "v"}
    shades = dict(zip(suites, ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9")))
    for suite, measured in suites.items():
        xs, ys = zip(*measured)
        axes.scatter(xs, ys, s=14, marker=marks.get(suite, "D"), color=shades[suite], label=suite)
    axes.set_xscale("log")
    axes.set_yscale("log")
    top = max([t for _, t in tops] + [p[1] for p in points])
    axes.set_xlim(low, high)
    axes.set_ylim(10 ** math.floor(math.log10(min(p[1] for p in points))), top * 3)
    axes.set_xlabel("FLOPs per unavoidable byte")
    axes.set_ylabel("GFLOP/s")
    axes.set_title(f"deuteron, {name}", loc="left", fontsize=10)
    axes.legend(frameon=False, fontsize=7, loc="upper left")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return path
