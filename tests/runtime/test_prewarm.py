"""What starts before there is anything to build, for graphs on a GPU that are new to the cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx

from deuteron.base.options import Options
from deuteron.runtime import build_triton, launch_cuda, prewarm


class OnGpu(torch.Tensor):
    """A tensor that says it is on a GPU."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda", 0)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    calls: list[Any] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda d: (9, 0))
    monkeypatch.setattr(build_triton, "prepare", lambda *a: calls.append(a))
    monkeypatch.setattr(launch_cuda, "prepare", lambda *a: None)
    return calls


def graph(operations: int) -> fx.GraphModule:
    def f(x: Any) -> Any:
        for _ in range(operations):
            x = x + 1
        return x

    return fx.symbolic_trace(f)


def test_a_graph_is_prepared_once(started: list[Any], tmp_path: Path) -> None:
    options = Options.make(options={"cache_dir": str(tmp_path)})
    x = [torch.ones(3).as_subclass(OnGpu)]
    prewarm.prepare(graph(3), x, options)  # it never compiled
    done = prewarm.prepare(graph(3), x, options)
    assert [(c, n) for c, n, _ in started] == [(90, 1)] * 2
    done()
    prewarm.prepare(graph(3), x, options)()
    assert len(started) == 2
    prewarm.prepare(graph(400), x, options)
    assert started[-1][:2] == (90, prewarm.MAX_PROCESSES)
    prewarm.prepare(graph(3), [torch.ones(4).as_subclass(OnGpu)], options)
    assert len(started) == 4


def test_a_graph_has_one_name_in_all_processes() -> None:
    def f(x: Any) -> Any:
        return torch.sin(x) @ x + abs(x)

    text = prewarm._text(fx.symbolic_trace(f), [torch.ones(2, 3)])
    assert "sin" in text and "[2, 3]" in text and "0x" not in text


def test_nothing_starts_for_the_cpu(started: list[Any], tmp_path: Path) -> None:
    options = Options.make(options={"cache_dir": str(tmp_path)})
    prewarm.prepare(graph(3), [torch.ones(3), 4], options)()
    assert not started and not list(tmp_path.iterdir())


def test_a_process_starts_before_there_is_a_graph(
    started: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def counted(devices: int, cuda: str | None) -> int:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
        monkeypatch.setattr(torch.version, "cuda", cuda)
        started.clear()
        prewarm.start_process()
        return len(started)

    assert counted(1, "13.0") == 1 and started[0][1] == 1
    assert counted(0, "13.0") == counted(1, None) == 0
    monkeypatch.setenv("DEUTERON_WORKERS", "many")  # said where something is compiled
    assert counted(1, "13.0") == 0


def test_processes_are_ready(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    options = Options.make(options={"cache_dir": str(tmp_path), "workers": 2})
    build_triton._builder.cache_clear()
    try:
        build_triton.prepare(90, 4, options)
        builder = build_triton._builder(2, options.build_timeout)
        assert 1 <= len(builder.processes()) <= 2
        builder.submit(build_triton.warm_up, 90, options).result()
    finally:
        builder.close()
        build_triton._builder.cache_clear()
