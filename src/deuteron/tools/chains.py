"""Kernels in which products read one another's results (attention and its gradients), and steps
that repeat, in words; and what relates the steps of several parts.

In: parts and steps of a report (`tools.part_data`). Out: lines of text, for `explain` and the page.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from deuteron.tools.words import amount, counted, time_text

Data = dict[str, Any]


# Who ends what a collective has begun.
WAIT = "_c10d_functional.wait_tensor.default"


def relate(parts: Sequence[Data]) -> None:
    """Adds to each step the tensors of its results that are saved for the backward (`saved`), the
    backward's steps that read them (`backward`, ids), and `notes`; to parts how often a call runs
    them (`times`), and what lies in memory inside a step that repeats others."""
    by_id = {p["id"]: p for p in parts}
    for p in parts:
        for s, made in zip(p["steps"], collectives(p["steps"]), strict=True):
            s["collective"] = made
    steps = {s["id"]: (p, s) for p in parts for s in p["steps"]}
    for p in parts:
        p["times"] = 1
    order = {i: k for k, i in enumerate(steps)}
    kept = {p["id"]: {d["first"] for d in p["saved"] if p["phase"] == "forward"} for p in parts}
    readers: dict[tuple[int, str], list[str]] = {}  # of tensors, in the backward of a graph
    for p, s in steps.values():
        for n in s["reads"] if p["phase"] == "backward" else ():
            readers.setdefault((p["graph"], n), []).append(s["id"])
    for p, s in steps.values():
        s["saved"] = [n for n in s["writes"] if n in kept[p["id"]]]
        found = (i for n in s["saved"] for i in readers.get((p["graph"], n), ()))
        s["backward"] = sorted(set(found), key=order.__getitem__)
        for body in s["chunks"]["bodies"] if s["chunks"] else ():
            by_id[body["part"]]["times"] = body["times"]
    for p in parts:
        inside = [buffers(s, by_id) for s in p["steps"]]
        if any(inside):
            p["memory"] |= live(p["tensors"], inside)
        for s in p["steps"]:
            s["notes"] = [
                *chunk_lines(s, by_id),
                *collective_lines(s),
                *(chain_lines(p, s, steps) if is_chain(s) else ()),
            ]


def collectives(steps: Sequence[Data]) -> Iterator[Data | None]:
    """For each step that begins a collective: which step waits for it (`wait`, an id), how many run
    meanwhile (`beside`), and how long that one waits: on a CPU its measured time (`exposed_us`).
    With a clock around each step nothing overlaps on a GPU, and a network's speed is not known
    before: None."""
    waits = {n: (k, s) for k, s in enumerate(steps) if s["name"] == WAIT for n in s["reads"]}
    for k, s in enumerate(steps):
        begins = s["name"].startswith("_c10d_functional.") and s["name"] != WAIT
        found = next((waits[n] for n in s["writes"] if n in waits), None) if begins else None
        if found is None:
            yield None
        else:
            us = found[1]["measured_us"] if s["device"] == "cpu" else None
            yield {"wait": found[1]["id"], "beside": found[0] - k - 1, "exposed_us": us}


def collective_lines(step: Data) -> Iterator[str]:
    if (c := step["collective"]) is not None:
        beside = f"{counted(c['beside'], 'step')} meanwhile"
        exposed = "exposed time not known"
        if c["exposed_us"] is not None:
            exposed = f"{time_text(c['exposed_us'])} exposed (measured)"
        yield f"a collective: {c['wait']} waits for it, {beside}, {exposed}"


def buffers(step: Data, by_id: Mapping[str, Data]) -> int:
    """Bytes of what a step repeats, beside its arguments and results."""
    bodies = step["chunks"]["bodies"] if step["chunks"] else ()
    return max((by_id[b["part"]]["memory"]["peak"] for b in bodies), default=0)


def live(tensors: Mapping[str, Data], inside: Sequence[int]) -> Data:
    """Bytes that live during each step, beside the inputs; `inside`: those of what steps repeat;
    and what lives at the peak."""
    mine = {n: t for n, t in tensors.items() if t["kind"] != "input" and "in" not in t}
    alive = list(inside)
    for t in mine.values():
        for k in range(t["first"], min(t["last"], len(alive) - 1) + 1):
            alive[k] += t["bytes"]
    peak = max(range(len(alive)), key=lambda k: alive[k]) if alive else 0
    at_peak = [n for n, t in mine.items() if t["first"] <= peak <= t["last"]]
    return {
        "live": alive,
        "inside": list(inside),
        "peak_step": peak,
        "peak": alive[peak] if alive else 0,
        "at_peak": sorted(at_peak, key=lambda n: -mine[n]["bytes"]),
    }


def is_chain(step: Mapping[str, Any]) -> bool:
    """Whether a kernel multiplies what it has multiplied."""
    return bool(step["tiles"] and step["tiles"]["chained"])


def chain_lines(part: Data, step: Data, steps: Mapping[str, tuple[Data, Data]]) -> Iterator[str]:
    """What a kernel walks and leaves out, what is saved of it, and its backward."""
    yield from walk_lines(part, step)
    if step["saved"]:
        each = (f"{label(part, n)} ({size(part, n)})" for n in step["saved"])
        yield f"saved for the backward: {', '.join(each)}"
    for number, other in enumerate(step["backward"], 1):
        its_part, s = steps[other]
        made = ", ".join(label(its_part, n) for n in s["writes"])
        yield f"backward {number}: {s['name']}: {time_text(s['us'])}, writes {made}"
        if is_chain(s):
            yield from (f"  {line}" for line in walk_lines(its_part, s))


def walk_lines(part: Data, step: Data) -> Iterator[str]:
    """Which places programs have, what they walk in which blocks, and the classes of tiles."""
    dims = step["tiles"]["dims"]
    grid = [d for d in dims if d["mode"] == "grid"]
    blocks = [f"{d['block']} of {places(part, d)}" for d in grid if d["block"] > 1]
    each = [counted(d["extent"], "place") for d in grid if d["block"] == 1]
    words = [f"a program has {' and '.join(blocks)}"] if blocks else ["programs"]
    yield ", ".join(words + [f"for each of {e}" for e in each])
    for loop in step["tiles"]["loops"]:
        dim = next(d for d in dims if d["name"] == loop["dimension"])
        yield f"it walks {places(part, dim)} in blocks of {loop['block']}: {classes(part, loop)}"


def classes(part: Data, loop: Data) -> str:
    of = f" of {loop['rows']} × {loop['block']}" if loop["rows"] else ""
    text = f"{counted(loop['tiles'], 'tile')}{of}"
    if loop["loaded"]:
        names = ", ".join(label(part, n) for n in loop["loaded"])
        least = f", at least {loop['skipped']} skipped" if loop["skipped"] else ""
        return f"{text}{least}; how many are visited is in {names}, known at run time only"
    if not loop["rows"]:
        return f"{text}, all full: no mask leaves anything out"
    partial = f"{loop['partial']} masked in part"
    return f"{text}: {loop['full']} full, {partial}, {loop['skipped']} skipped"


def chunk_lines(step: Data, by_id: Mapping[str, Data]) -> Iterator[str]:
    if (c := step["chunks"]) is not None:
        each = " and ".join(f"{b['part']} ({counted(b['times'], 'time')})" for b in c["bodies"])
        yield (
            f"{c['rows']} rows in {counted(c['count'], 'chunk')} of {c['chunk']}, by {each}; "
            f"{amount(buffers(step, by_id), 'B')} lie in memory during one"
        )


def places(part: Data, dim: Data) -> str:
    """``2048 places (dimension 1 of q)``: of inputs that the user can name, where there are any."""
    labels = [(label(part, name), number) for name, number in dim["along"]]
    named = [(text, number) for text, number in labels if ": " not in text]
    of: dict[int, list[str]] = {}
    for text, number in named or labels:
        of.setdefault(number, []).append(text)
    along = "; ".join(f"dimension {number} of {', '.join(names)}" for number, names in of.items())
    return counted(dim["extent"], "place") + (f" ({along})" if along else "")


def label(part: Data, name: str) -> str:
    known = part["tensors"].get(name)
    return str(known["label"]) if known is not None else name


def size(part: Data, name: str) -> str:
    known = part["tensors"].get(name)
    return f"{known['layout']}, {amount(known['bytes'], 'B')}" if known is not None else "?"


__all__ = ["is_chain", "live", "relate"]
