"""The page of a report: one HTML file without anything from elsewhere.

In: a report's data. Out: text. The template (`templates/report.html`) is Jinja's, with everything
escaped; tables of thousands of rows and the plots are drawn by the page's own script
(`templates/report.js`) from the data, which the page holds as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import inf
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from deuteron.tools.advice import advice
from deuteron.tools.chains import is_chain
from deuteron.tools.measuring import BUSY
from deuteron.tools.report_diff import difference
from deuteron.tools.words import amount, counted, time_text

TEMPLATES = Path(__file__).parent / "templates"
SECTIONS = (
    ("verdict", "Verdict"),
    ("findings", "Where the time goes"),
    ("steps", "Kernels and calls"),
    ("refusals", "Not fused"),
    ("products", "Products, attention"),
    ("memory", "Memory"),
    ("plots", "Graph and plots"),
    ("dynamo", "Compilation"),
)
# Where a device's figures are from (`base.device`).
SOURCES = {
    "system": "estimated: deuteron doctor --calibrate measures them",
    "measured": "measured by deuteron doctor --calibrate",
}
# Steps, each timed at its best, together at most take this many times a call.
EVEN = 1.1
# Operations that only attention has side by side.
ATTENTION_CALLS = ("attention", "flash", "sdpa")
Data = Mapping[str, Any]


def page(data: Mapping[str, Any], json_name: str, against: Data | None = None) -> str:
    """The whole file. `against`: another report, for the section of differences."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
    )
    environment.filters.update(us=micro, amount=amount, basename=lambda f: Path(f).name)
    changed = difference(against, data) if against is not None else None
    sections = (*SECTIONS, ("difference", "Difference")) if changed else SECTIONS
    names = list(dict.fromkeys(s for p in data["parts"] for s, _ in p["stages"]))
    return environment.get_template("report.html").render(
        data=data,
        json_name=json_name,
        sections=sections,
        cards=cards(data),
        refusals=refusals(data),
        products=products(data),
        tiled=tiled(data),
        attention=attention(data),
        host=host_us(data),
        stage_names=names,
        stages=[(p["id"], [dict(p["stages"]).get(s) for s in names]) for p in data["parts"]],
        launches=any(s["configs"] for p in data["parts"] for s in p["steps"]),
        sources=SOURCES,
        disturbed=(data["totals"]["measured_us"] or 0.0)
        > EVEN * (data["totals"]["call_us"] or inf),
        others=others if (others := data["totals"].get("others") or 0.0) > BUSY else 0.0,
        measured=data["totals"]["measured_us"] is not None,
        difference=changed,
        css=Markup((TEMPLATES / "report.css").read_text(encoding="utf-8")),
        js=Markup((TEMPLATES / "report.js").read_text(encoding="utf-8")),
        payload=Markup(embedded(data)),
    )


def micro(us: float) -> str:
    return time_text(us).replace(" us", " µs")


def embedded(data: Data) -> str:
    """JSON that may stand in a script element: no text of the user's can end it."""
    text = json.dumps(data, default=str, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def cards(data: Data) -> list[dict[str, Any]]:
    """The verdict: figures that somebody looks for first."""
    t = data["totals"]
    steps = t["measured_us"] if t["measured_us"] is not None else t["predicted_us"]
    kind = "measured" if t["measured_us"] is not None else "predicted"
    made = [
        card("kernels", str(t["kernels"]), f"and {t['library_calls']} library calls", "steps"),
        card(
            "moved",
            amount(t["bytes"], "B"),
            f"least possible {amount(t['least_bytes'], 'B')}",
            "steps",
        ),
        card(
            "time of the steps",
            time_text(steps),
            f"{kind}; limit {time_text(t['limit_us'])}",
            "findings",
        ),
    ]
    if t["call_us"] is not None:
        times = f"{t['eager_us'] / t['call_us']:.2f} times as fast as eager"
        made.append(
            card("a call", time_text(t["call_us"]), times, "plots", t["eager_us"] < t["call_us"])
        )
    if t["peak_bytes"] is not None:
        made.append(card("peak memory", amount(t["peak_bytes"], "B"), "measured", "memory"))
    else:
        peak = max((p["memory"]["peak"] for p in data["parts"]), default=0)
        made.append(card("peak memory", amount(peak, "B"), "planned, largest part", "memory"))
    refused = t["refusals"]
    top = ", ".join(f"{k} {n}" for k, n in list(refused.items())[:2])
    frames = counted(len(data["frames"]), "function")
    made += [
        card("compile", f"{t['compile_s']:.1f} s", frames, "dynamo"),
        card("not fused", str(sum(refused.values())), top or "nothing", "refusals"),
        card("graph breaks", str(t["graph_breaks"]), "", "dynamo", t["graph_breaks"] > 0),
        card("recompilations", str(t["recompilations"]), "", "dynamo", t["recompilations"] > 0),
    ]
    return made


def card(name: str, value: str, note: str, section: str, bad: bool = False) -> dict[str, Any]:
    return {"name": name, "value": value, "note": note, "section": section, "bad": bad}


def refusals(data: Data) -> list[dict[str, Any]]:
    """By class, the one with most bytes at stake first."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for p in data["parts"]:
        for r in p["refusals"]:
            groups.setdefault(r["reason"], []).append({**r, "part": p["id"]})
    found = []
    for reason, pairs in groups.items():
        pairs.sort(key=lambda r: -r["bytes"])
        a = advice(reason)
        total = sum(r["bytes"] for r in pairs)
        found.append({"reason": reason, "pairs": pairs, "bytes": total,
                      "meaning": a.meaning, "change": a.change})  # fmt: skip
    return sorted(found, key=lambda g: -g["bytes"])


def where(part: Data, s: Data) -> str:
    """Module and line of a step."""
    places = [part["places"][k] for k in s["places"]]
    words = [p["module"] or f"{Path(p['file']).name}:{p['line']}" for p in places]
    return ", ".join(dict.fromkeys(words))


def products(data: Data) -> list[dict[str, Any]]:
    """Every product that somebody had to choose for, and other library calls that multiply."""
    rows = []
    for p in data["parts"]:
        for s in p["steps"]:
            chosen = s["product"]
            if chosen is None and not (s["kind"] == "library" and s["flops"] > 0):
                continue
            us = {c["who"]: c["us"] for c in chosen["candidates"]} if chosen else {}
            rows.append({
                "part": p["id"], "where": where(p, s), "shape": chosen["shape"] if chosen else "",
                "who": s["name"], "ours": us.get("generated"), "library": us.get("library"),
                "us": s["us"], "share": s["share"], "configs": "; ".join(s["configs"][:1]),
            })  # fmt: skip
    return sorted(rows, key=lambda r: -r["us"])[:300]


def attention(data: Data) -> list[dict[str, Any]]:
    """Steps that are attention (library calls by name, kernels that multiply what they have
    multiplied), and those that run in chunks of rows."""
    rows = []
    for p in data["parts"]:
        for s in p["steps"]:
            call = s["kind"] == "library" and any(w in s["name"] for w in ATTENTION_CALLS)
            if not (call or s["chunks"] or is_chain(s)):
                continue
            note = f"A library call: {s['reason']}."
            if s["chunks"]:
                note = "What lies between its products is in memory for one chunk at a time."
            elif not call:
                note = (
                    "One kernel: what lies between its products is in no memory. Tiling: "
                    f"{'; '.join(s['configs'][:1]) or s['tiles']['tiling']}."
                )
            rows.append({**s, "where": where(p, s), "note": note, "what": s["name"]})
    return rows


def tiled(data: Data) -> list[dict[str, Any]]:
    """Kernels with products, those that take longest first."""
    steps = [(p, s) for p in data["parts"] for s in p["steps"] if s["tiles"]]
    rows = [{**s, "part": p["id"], "where": where(p, s)} for p, s in steps]
    return sorted(rows, key=lambda s: -s["us"])[:100]


def host_us(data: Data) -> float:
    """What a call takes beside its steps; 0 where that was not measured."""
    t = data["totals"]
    if t["call_us"] is None or t["measured_us"] is None:
        return 0.0
    return max(0.0, float(t["call_us"] - t["measured_us"]))


__all__ = ["embedded", "page"]
