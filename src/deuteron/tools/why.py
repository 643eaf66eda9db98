"""Why two things of the user's share a kernel, or do not: one sentence from a report.

In: a report (`tools.report_data`) and two words: a module's path, an operation, ``file.py:12``, a
kernel. Out: a sentence. Raises `ValueError` with the nearest names where a word names nothing.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from typing import Any

from deuteron.tools.advice import advice
from deuteron.tools.words import amount

Data = Mapping[str, Any]


def why(report: Data, first: str, second: str) -> str:
    """Of the parts that have both, the first; of several pairs, the one with most at stake."""
    answers: list[str] = []
    for word in (first, second):
        if not any(nodes_named(p, word) for p in report["parts"]):
            raise ValueError(unknown(report, word))
    for part in report["parts"]:
        a, b = nodes_named(part, first), nodes_named(part, second)
        if a and b:
            answers.append(answer(part, first, second, a, b))
    if not answers:
        return f"{first} and {second} are in no part together: the backward is a graph of its own."
    return " ".join(dict.fromkeys(answers))


def nodes_named(part: Data, word: str) -> set[str]:
    """The nodes of a part that a word names."""
    found: set[str] = set()
    where, _, op = word.rpartition(": ")
    for s in part["steps"]:
        if s["name"] == word:
            found |= {o["node"] for o in s["ops"]}
        for o in s["ops"]:
            place = part["places"][o["place"]] if o["place"] >= 0 else None
            if (
                word in (o["node"], o["op"])
                or (place is not None and is_at(place, word))
                or op == o["op"]
                and place is not None
                and is_at(place, where)
            ):
                found.add(o["node"])
    return found or nodes_of_code(part, word)


def nodes_of_code(part: Data, word: str) -> set[str]:
    """The nodes of lines in which a word stands: of "softmax", what it was decomposed into."""
    stands = re.compile(rf"(?<!\w){re.escape(word)}(?!\w)")
    lines = {k for k, p in enumerate(part["places"]) if word and stands.search(p["code"])}
    return {o["node"] for s in part["steps"] for o in s["ops"] if o["place"] in lines}


def is_at(place: Data, word: str) -> bool:
    module = place["module"]
    inside = module == word or module.startswith(f"{word}.") or module.endswith(f".{word}")
    line = f"{place['file']}:{place['line']}"
    return bool(word) and (
        inside or (place["file"] and (line == word or line.endswith(f"/{word}")))
    )


def answer(part: Data, first: str, second: str, a: set[str], b: set[str]) -> str:
    steps = [s for s in part["steps"] if s["kind"] != "view"]
    of_a = [s for s in steps if a & {o["node"] for o in s["ops"]}]
    of_b = [s for s in steps if b & {o["node"] for o in s["ops"]}]
    phase = part["phase"]
    shared = [s for s in of_a if s in of_b]
    if shared:
        names = ", ".join(s["name"] for s in shared)
        what = "library call" if all(s["kind"] == "library" for s in shared) else "kernel"
        text = f"In the {phase}, {first} and {second} share the {what} {names}."
        apart = refusals(part, of_a, of_b) if len(shared) < len({s["name"] for s in of_a}) else []
        return " ".join([text, *(refused_text(phase, first, second, r) for r in apart[:1])])
    calls = [(w, s) for w, of in ((first, of_a), (second, of_b)) for s in of]
    library = [(w, s) for w, s in calls if s["kind"] == "library"]
    refused = refusals(part, of_a, of_b)
    if refused:
        return refused_text(phase, first, second, refused[0])
    if library:
        word, s = library[0]
        return (
            f"In the {phase}, {first} and {second} share no kernel because {word} is the library "
            f"call {s['name']}: {s['reason']}."
        )
    between = {n for s in of_a for n in (*s["reads"], *s["writes"])} & {
        n for s in of_b for n in (*s["reads"], *s["writes"])
    }
    if not between:
        return (
            f"In the {phase}, {first} and {second} share no kernel because they share no tensor: "
            "nothing would be read or written less."
        )
    names = ", ".join(part["tensors"][n]["label"] for n in sorted(between) if n in part["tensors"])
    return (
        f"In the {phase}, {first} and {second} share no kernel; both touch {names}, and were "
        "merged with others before they were tried together."
    )


def refusals(part: Data, of_a: Iterable[Data], of_b: Iterable[Data]) -> list[Data]:
    """Between the kernels of both, what was refused, of kernels with products, too; most at stake
    first."""
    a, b = ({o["node"] for s in of for o in s["ops"]} for of in (of_a, of_b))
    regions = [d for d in part["decisions"] if d["subject"] == "contract" and not d["accepted"]]
    found = [
        r
        for r in (*part["refusals"], *regions)
        if (r["first_node"] in a and r["second_node"] in b)
        or (r["first_node"] in b and r["second_node"] in a)
    ]
    return sorted(found, key=lambda r: (-r["us"], -r["bytes"]))


def refused_text(phase: str, first: str, second: str, r: Data) -> str:
    a = advice(r["reason"])
    stake = f" {amount(r['bytes'], 'B')} are at stake." if r["bytes"] else ""
    change = f" {a.change}" if a.change else ""
    return (
        f"In the {phase}, {first} and {second} share no kernel ({r['reason']}): {a.meaning}. "
        f"{r['first_label']} and {r['second_label']}: {r['detail']}.{stake}{change}"
    )


def unknown(report: Data, word: str) -> str:
    names: dict[str, None] = {}
    for p in report["parts"]:
        for place in p["places"]:
            if place["module"]:
                names[place["module"]] = None
            if place["file"]:
                names[f"{place['file'].rpartition('/')[2]}:{place['line']}"] = None
        for s in p["steps"]:
            names.update(dict.fromkeys(o["op"] for o in s["ops"]))
    near = difflib.get_close_matches(word, names, n=3, cutoff=0.4) or list(names)[:8]
    return f"{word!r} names no module, operation, line or kernel here; near: {', '.join(near)}"


__all__ = ["why"]
