"""The results that README shows, from docs/results.json: a chart, and the rows of its table.

    python -m dev.results            # writes docs/results.svg and README's table
    python -m dev.results --check    # exit status 1 where the table is another

Times and cold compile times are ratios to Inductor's in the same run; below 1 is faster.
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any

from dev import ROOT

DATA = ROOT / "docs" / "results.json"
CHART = ROOT / "docs" / "results.svg"
README = ROOT / "README.md"
TABLE = re.compile(r"(<!-- results -->\n).*?(<!-- end of results -->)", re.S)


def rows() -> list[dict[str, Any]]:
    return list(json.loads(DATA.read_text(encoding="utf-8")))


def table() -> str:
    lines = ["| | time | cold compile | measured by |", "|---|---|---|---|"]
    for r in rows():
        cold = "" if r["cold"] is None else f"{r['cold']:.2f}"
        lines.append(f"| {r['what']} | {r['time']:.2f} | {cold} | `{r['command']}`, {r['date']} |")
    return "\n".join(lines) + "\n"


def chart() -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "deuteron"
    from matplotlib import pyplot

    shown = rows()[::-1]
    figure, axes = pyplot.subplots(figsize=(8.5, 2.6))
    bars = axes.barh([r["what"] for r in shown], [r["time"] for r in shown], color="#3b6fb5")
    axes.bar_label(bars, fmt="%.2f", padding=3)
    axes.axvline(1.0, color="#888888", linewidth=1)
    axes.text(1.0, len(shown) - 0.4, "Inductor", ha="center", va="bottom", color="#666666")
    axes.set_xlim(0, 1.1)
    axes.set_xlabel("run time, geometric mean (less is better)")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(CHART, bbox_inches="tight", metadata={"Date": None})


def main() -> None:
    text = README.read_text(encoding="utf-8")
    wanted = TABLE.sub(lambda m: m[1] + table() + m[2], text)
    if "--check" in sys.argv[1:]:
        sys.exit(wanted != text)
    README.write_text(wanted, encoding="utf-8")
    chart()


if __name__ == "__main__":
    main()
