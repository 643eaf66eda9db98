"""Which kernels begin at the end of memory, and that they compute the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from deuteron.ir.program import Extern
from deuteron.schedule.kernel import Kernel
from deuteron.schedule.traversal import with_traversal
from tests.schedule import tools
from tests.schedule.tools import scheduled, spec_of

X = torch.randn(64, 300)


def ways(f: Callable[..., Any], l2: int, *args: Any) -> list[bool]:
    spec = replace(spec_of("H200"), l2=l2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tools, "spec_of", lambda device: spec)
        plan = scheduled(f, *args, device="H200", fusion=False)
    return [k.reverse for k in plan.kernels]


def steps(x: torch.Tensor) -> torch.Tensor:
    return (x + 1).sin().exp().cos()


def test_each_kernel_goes_back_where_the_last_one_came_from() -> None:
    assert ways(steps, 60_000, X) == [False, True, False, True]


def test_what_the_cache_holds_is_read_from_its_begin() -> None:
    assert ways(steps, 1 << 30, X) == [False] * 4


def test_what_is_gone_from_the_cache_is_read_from_its_begin() -> None:
    """Before the last kernel others have moved more than the cache holds."""

    def f(x: torch.Tensor, y: torch.Tensor) -> Any:
        a = x + 1
        return a, (y + 1).sin().exp(), a.cos()

    backwards = ways(f, 60_000, X, torch.randn(64, 300))
    assert backwards[-1] is False and True in backwards


def test_the_cache_is_left_to_library_calls() -> None:
    spec = replace(spec_of("H200"), l2=60_000)
    plan = scheduled(steps, X, device="H200", fusion=False)
    plain: list[Any] = [replace(k, retain_in_l2=False) for k in plan.kernels]
    call = Extern((None,), "aten.mm.default", (), (), (None,))
    for calls, marked in (([], [True] * 4), ([call], [False] * 4)):
        done = with_traversal([*plain, *calls], plan.schedule.layouts, {"cpu": spec})
        assert [k.retain_in_l2 for k in done if isinstance(k, Kernel)] == marked
