"""Additions at places that tensors hold, under Triton's interpreter: run as a script it prints one
line of JSON for each call of each program, with the errors against float64 and eager's. All run by
comparison and in order, those of `SORTED` three times: with the order by which they are compiled,
with one that is found in two levels, two rows for each program, and with the library's sort."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from deuteron.codegen.triton import dynamic_bounds
from deuteron.lower import additions, ordered
from deuteron.lower.ordered import Ordered

aten = torch.ops.aten
Case = tuple[Callable[..., Any], list[tuple[Any, ...]]]


SORTED = (
    "embedding, bfloat16, any",
    "embedding, float32, mostly one",
    "narrow rows",
    "two positions",
    "few of many rows, mostly one",
    "a single one",
)


def places(kind: str, *shape: int, rows: int = 37) -> torch.Tensor:
    """Positions: any, mostly one of them, or the same everywhere."""
    t = torch.randint(0, rows, shape)
    if kind == "mostly one":
        t[torch.rand(shape) < 0.6] = 1
    return t.fill_(2) if kind == "one" else t


def add(x: Any, i: Any, v: Any) -> Any:
    return x.index_add(0, i, v)


def embedding(padding: int, rows: int = 37) -> Callable[..., Any]:
    return lambda g, i: aten.embedding_dense_backward(g, i, rows, padding, False)


def cases() -> dict[str, Case]:
    r = torch.randn
    out: dict[str, Case] = {}
    kinds = [("bfloat16", "any"), ("float16", "mostly one"), ("float64", "one")]
    for name, kind in kinds + [("float32", kind) for kind in ("any", "mostly one", "one")]:
        g = r(3, 131, 80).to(getattr(torch, name))
        out[f"embedding, {name}, {kind}"] = (embedding(-1), [(g, places(kind, 3, 131))])
    g, i = r(2, 140, 64), places("mostly one", 2, 140)
    out["embedding with padding"] = (embedding(1), [(g, i)])
    out["positions of 32 bits"] = (embedding(-1), [(g, i.int())])
    out["an expanded gradient"] = (embedding(-1), [(r(64).expand(2, 140, 64), i)])
    out["the same for each"] = (
        lambda x, i: add(x, i, x.new_ones(300, 64)),
        [(r(40, 64), places("mostly one", 300))],
    )
    out["one column's, for each"] = (
        lambda x, i, v: add(x, i, v.expand(300, 64)),
        [(r(40, 64), places("mostly one", 300), r(300, 1))],
    )
    out["narrow rows"] = (add, [(r(40, 17), places("any", 300), r(300, 17))])
    out["few narrow rows of many points"] = (
        add,
        [(r(3, 16), places("mostly one", 710, rows=3), r(710, 16))],
    )
    out["long rows"] = (add, [(r(4, 1300), places("any", 20, rows=4), r(20, 1300))])
    out["columns"] = (
        lambda x, i, v: x.index_add(1, i, v, alpha=2.0),
        [(r(64, 40), places("any", 300), r(64, 300))],
    )
    put = lambda x, v, *i: aten.index_put(x, list(i), v, True)  # noqa: E731
    negative = places("any", 10, 30) - 37
    out["counted from the end"] = (put, [(r(37, 3, 32), r(10, 30, 3, 32), negative)])
    both = places("any", 300, rows=9), places("any", 300, rows=8) - 4
    out["two positions"] = (put, [(r(9, 8, 64), r(300, 64), *both)])
    out["one value for all"] = (put, [(r(40, 33), r(33), places("any", 300))])
    out["rows in the middle"] = (
        lambda x, v, i: aten.index_put(x, [None, i], v, True),
        [(r(3, 40, 33), r(3, 260, 33), places("any", 260))],
    )
    out["scatter_add along rows"] = (
        lambda x, i, v: x.scatter_add(0, i[:, None].expand(300, 64), v),
        [(r(40, 64), places("any", 300), r(300, 64))],
    )
    out["twice into one tensor"] = (
        lambda x, i, v, j, u: x.index_add(0, i, v).index_add(0, j, u) * 2,
        [(r(40, 32), places("any", 100), r(100, 32), places("any", 70), r(70, 32))],
    )
    for kind in ("any", "mostly one"):
        i = places(kind, 150, rows=500)
        out[f"few of many rows, {kind}"] = (add, [(r(500, 80), i, r(150, 80))])
        i = places(kind, 2, 150, rows=700)
        g = r(2, 150, 64).bfloat16()
        out[f"most words unused, {kind}"] = (embedding(1, 700), [(g, i)])
    i = places("mostly one", 40, rows=9), places("any", 40, rows=30) - 30
    out["few of many pairs"] = (put, [(r(9, 30, 20).half(), r(40, 20).half(), *i)])
    out["none"] = (add, [(r(40, 32), places("any", 0), r(0, 32))])
    out["a single one"] = (add, [(r(40, 32), places("any", 1), r(1, 32))])
    out["with arithmetic before and behind"] = (
        lambda x, i, v, w: (torch.sigmoid(x).index_add(0, i, v * w.exp()) + 1).relu(),
        [(r(40, 64), places("any", 300), r(300, 64), r(300, 1))],
    )
    out["dynamic"] = (
        add,
        [
            (r(40, 32), places("any", 300), r(300, 32)),
            (r(39, 48), places("one", 290), r(290, 48)),
            (r(38, 48), places("any", 2), r(2, 48)),
            (r(38, 48), places("any", 0), r(0, 48)),
        ],
    )
    return out


def errors(f: Callable[..., Any], args: tuple[Any, ...], got: torch.Tensor) -> dict[str, Any]:
    exact = f(*(a.double() if a.is_floating_point() else a for a in args))
    usual = f(*args)
    assert (got.dtype, got.shape) == (usual.dtype, usual.shape)
    far = [float((x.double() - exact).abs().max()) if x.numel() else 0.0 for x in (got, usual)]
    size = float(exact.abs().max()) if exact.numel() else 0.0
    return {"error": far[0], "eager": far[1], "size": size}


def main() -> None:
    from dev.check.interpret import interpreted

    torch.manual_seed(0)
    additions.COMPARED_US = -1e9
    run(interpreted, tuple(cases()))
    additions.COMPARED_US = 1e9
    run(interpreted, tuple(cases()))
    ordered.block_of = lambda points, dtype: 16  # type: ignore[assignment]
    dynamic_bounds.MIN_ROWS_PER_CORE = 0
    run(interpreted, SORTED)
    Ordered.few = lambda self: False  # type: ignore[method-assign]
    run(interpreted, SORTED)


def run(interpreted: Any, names: Sequence[str]) -> None:
    programs = cases()
    for name in names:
        f, calls = programs[name]
        torch._dynamo.reset()
        compiled = torch.compile(f, backend=interpreted, dynamic=len(calls) > 1)
        for k, args in enumerate(calls):
            entry: dict[str, Any] = {"program": name, "call": k}
            try:
                got, again = compiled(*args), compiled(*args)
                entry |= errors(f, args, got) | {"repeats": torch.equal(got, again)}
            except Exception as e:  # noqa: BLE001 - the test shows it
                entry["failure"] = f"{type(e).__name__}: {e}"[-2000:]
            print(json.dumps(entry), flush=True)


if __name__ == "__main__":
    sys.exit(main())
