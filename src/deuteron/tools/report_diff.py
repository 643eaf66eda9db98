"""The difference of two reports: before and after a change, two versions, two options.

In: the data of both. Out: what is new, gone, slower or faster, larger or smaller. Steps of both are
matched by what they do: operations and where these come from, not by names with numbers in them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from deuteron.tools.explain_text import op_text, where
from deuteron.tools.words import amount, time_text

Data = Mapping[str, Any]
# Times so close count as equal: a share, and microseconds.
EVEN, EVEN_US = 0.05, 0.5


def difference(before: Data, now: Data) -> dict[str, Any]:
    """For the page: a title, a headline, lists of rows."""
    a, b = grouped(before), grouped(now)
    both = [(k, a[k], b[k]) for k in b if k in a]
    slower = [(k, x, y) for k, x, y in both if y["us"] > x["us"] * (1 + EVEN) + EVEN_US]
    faster = [(k, x, y) for k, x, y in both if x["us"] > y["us"] * (1 + EVEN) + EVEN_US]
    larger = [(k, x, y) for k, x, y in both if y["bytes"] != x["bytes"]]
    lists = [
        ("New", [row(k, None, b[k]) for k in by_time(b) if k not in a]),
        ("Gone", [row(k, a[k], None) for k in by_time(a) if k not in b]),
        ("Slower", [row(k, x, y) for k, x, y in by_change(slower, "us")]),
        ("Faster", [row(k, x, y) for k, x, y in by_change(faster, "us")]),
        ("Other bytes", [row(k, x, y, "bytes") for k, x, y in by_change(larger, "bytes")]),
    ]
    return {"title": before["title"], "headline": sums(before, now), "lists": lists}


def grouped(data: Data) -> dict[str, dict[str, float]]:
    """Times and bytes of what does the same at the same place, together."""
    out: dict[str, dict[str, float]] = defaultdict(lambda: {"us": 0.0, "bytes": 0, "count": 0})
    for p in data["parts"]:
        for s in p["steps"]:
            if s["kind"] == "view":
                continue
            places = [p["places"][k] for k in s["places"]]
            at = ", ".join(dict.fromkeys(x["module"] or where(x) for x in places))
            of = out[f"{op_text(s, 99)} — {at} ({p['phase']})"]
            of["us"] += s["us"]
            of["bytes"] += s["bytes"]
            of["count"] += 1
    return dict(out)


def by_time(of: Mapping[str, Mapping[str, float]]) -> list[str]:
    return sorted(of, key=lambda k: -of[k]["us"])


def by_change(found: list[Any], what: str) -> list[Any]:
    return sorted(found, key=lambda kxy: -abs(kxy[2][what] - kxy[1][what]))


def row(what: str, before: Any, now: Any, of: str = "us") -> dict[str, str]:
    def text(x: float) -> str:
        return time_text(x) if of == "us" else amount(x, "B")

    x, y = (0.0 if v is None else v[of] for v in (before, now))
    sign = "+" if y >= x else "−"
    return {
        "what": what,
        "before": "" if before is None else text(x),
        "now": "" if now is None else text(y),
        "difference": sign + text(abs(y - x)),
    }


def sums(before: Data, now: Data) -> str:
    """``12 kernels → 10; 1.2 ms → 1 ms; ...``."""
    a, b = before["totals"], now["totals"]

    def time(t: Data) -> str:
        if t["measured_us"] is None:
            return f"{time_text(t['predicted_us'])} predicted"
        return f"{time_text(t['measured_us'])} measured"

    parts = [
        f"kernels {a['kernels']} → {b['kernels']}",
        f"library calls {a['library_calls']} → {b['library_calls']}",
        f"moved {amount(a['bytes'], 'B')} → {amount(b['bytes'], 'B')}",
        f"time of the steps {time(a)} → {time(b)}",
        f"graph breaks {a['graph_breaks']} → {b['graph_breaks']}",
    ]
    return "; ".join(parts)


__all__ = ["difference"]
