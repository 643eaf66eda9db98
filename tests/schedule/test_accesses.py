"""Each load and store of a schedule is said to be proven, masked, at a loaded position, or open."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from deuteron.backend import collecting, deuteron_backend
from deuteron.ir import expr as E
from deuteron.ir.expr import literal, op
from deuteron.ir.index import Axis, Sym, Value, atom, const
from deuteron.ir.program import contiguous
from deuteron.schedule.accesses import ACCESS_STATES, access_state

i, n, m = Axis("i", 8), Sym("n", 0, 8), Sym("m", 0, 8)
LAYOUT = contiguous((const(8),), "f32")
loaded = atom(Value(E.load("ids", (i.index,), "i64")))
small = op("lt", E.index_value(i.index), literal(3, "i64"))
a = Axis("a", atom(n))
strange = a.index % atom(m) * 0 + a.index * a.index // (a.index + 1)


def test_states() -> None:
    assert access_state((i.index,), LAYOUT, None) == "proven"
    assert access_state((i.index + 5,), LAYOUT, small) == "masked"
    assert access_state((loaded,), LAYOUT, None) == "loaded"
    assert access_state((), contiguous((), "f32"), None) == "proven"
    assert access_state((strange,), contiguous((atom(n),), "f32"), None) == "open"


PROGRAMS: dict[str, tuple[Callable[[Tensor], Any], dict[str, bool]]] = {
    "points": (lambda x: x.sin() + 1, {"proven": True, "masked": False, "loaded": False}),
    "padded": (lambda x: F.pad(x, (1, 2)).exp(), {"proven": True, "masked": True}),
    "gathered": (lambda x: x[torch.arange(3).flip(0) * 2 % 5], {"proven": True}),
    "rows": (lambda x: torch.softmax(x, 1), {"proven": True}),
    "columns": (lambda x: F.layer_norm(x, (x.shape[1],)).sum(0), {"proven": True}),
}


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("dynamic", [False, True])
def test_programs(name: str, dynamic: bool) -> None:
    f, expected = PROGRAMS[name]
    x = torch.randn(12, 10)
    with collecting() as records:
        g = torch.compile(f, backend=deuteron_backend, dynamic=dynamic, options={"verify": True})
        torch.testing.assert_close(g(x), f(x))
    (entry,) = records[0].of("accesses")
    assert set(entry) == {"kind", *ACCESS_STATES, "which"}
    assert entry["open"] == 0 and entry["which"] == []
    for kind, some in expected.items():
        assert (entry[kind] > 0) is some, entry


def test_positions_from_tensors() -> None:
    with collecting() as records:
        g = torch.compile(lambda x, i: x[i], backend=deuteron_backend, options={"verify": True})
        g(torch.randn(8), torch.tensor([1, 7]))
    assert records[0].of("accesses")[0]["loaded"] == 1
