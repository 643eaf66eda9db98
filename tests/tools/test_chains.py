"""What explanations and reports say of attention (what its kernels walk and skip, what is saved,
its backward) and of steps that run in chunks of rows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import deuteron
from deuteron.runtime.guard import Clock
from deuteron.tools.explain_text import full, short
from deuteron.tools.observe import Captured, Observations, Part, Policy
from deuteron.tools.report_data import Report, report_data
from deuteron.tools.report_file import load, write
from tests.schedule.planning import Plan, planned, trained

S = 2048


def attention(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None) -> Tensor:
    s = q @ k.transpose(-2, -1) * 0.1
    return torch.softmax(s if hidden is None else s.masked_fill(hidden, float("-inf")), -1) @ v


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    i = torch.arange(q.shape[-2])
    return attention(q, k, v, i[:, None] < i)


def window(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    i = torch.arange(q.shape[-2])
    return attention(q, k, v, (i[:, None] < i) | (i[:, None] - i >= 256))


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attention(q, k, v, None)


def lengths(q: Tensor, k: Tensor, v: Tensor, n: Tensor) -> Tensor:
    i = torch.arange(q.shape[-2])
    return attention(q, k, v, i >= n[:, None, None])


def heads() -> list[Tensor]:
    return [torch.empty(16, S, 128, dtype=torch.bfloat16) for _ in range(3)]


def reported(plan: Plan, inputs: list[str]) -> Report:
    """The report of what was planned for an H100."""
    seen = Observations()
    graph = Captured(0, inputs, None, Policy(), seen)
    seen.graphs.append(graph)
    for number, (made, context) in enumerate(plan.made):
        kernels = {k.name: SimpleNamespace(name=k.name, source="") for k in made.steps}
        loaded: Any = SimpleNamespace(
            graph=made.graph, program=made.program, schedule=made.schedule, kernels=kernels,
            variants={}, plan=SimpleNamespace(home={}),
        )  # fmt: skip
        name = f"{context.phase}{number}"
        graph.parts.append(Part(name, context.phase, loaded, context, Clock(False)))
    return report_data(seen, plan.records, "planned", [], [])


def loops(report: Report) -> list[dict[str, Any]]:
    found = [s["tiles"] for p in report["parts"] for s in p["steps"] if s["tiles"]]
    return [loop for tiles in found for loop in tiles["loops"]]


@pytest.mark.parametrize(
    ("f", "hides"),
    [(causal, lambda i, j: i < j), (window, lambda i, j: (i < j) | (i - j >= 256)), (plain, None)],
)
def test_tiles_are_counted(f: Callable[..., Tensor], hides: Callable[..., Tensor] | None) -> None:
    with torch.no_grad():
        report = reported(planned(f, *heads(), run=False), ["q", "k", "v"])
    (loop,) = loops(report)
    said = full(report)
    if hides is None:
        assert (loop["full"], loop["skipped"]) == (loop["tiles"], 0)
        assert "no mask leaves anything out" in said
        return
    i = torch.arange(S)
    tiles = hides(i[:, None], i).unfold(0, loop["rows"], loop["rows"])
    tiles = tiles.unfold(1, loop["block"], loop["block"])
    none, every = (~tiles.any(-1).any(-1)).sum(), tiles.all(-1).all(-1).sum()
    assert (loop["full"], loop["skipped"]) == (int(none), int(every))
    partial = loop["tiles"] - loop["full"] - loop["skipped"]
    assert loop["partial"] == partial and loop["tiles"] == tiles.shape[0] * tiles.shape[1]
    assert f"{none} full, {partial} masked in part, {every} skipped" in said
    assert "(dimension 1 of q)" in said and "(dimension 1 of k, v)" in said


def test_what_is_loaded_is_known_at_run_time() -> None:
    with torch.no_grad():
        plan = planned(lengths, *heads(), torch.full((16,), 300), run=False)
    report = reported(plan, ["q", "n", "k", "v"])
    (loop,) = loops(report)
    assert loop["full"] is loop["partial"] is None and len(loop["loaded"]) == 1
    assert "how many are visited is in n, known at run time only" in full(report)


def test_the_forward_names_what_is_saved_and_its_backward(tmp_path: Path) -> None:
    report = reported(trained(causal, *heads(), run=False), ["q", "k", "v"])
    forward, backward = report["parts"]
    (step,) = [s for s in forward["steps"] if s["tiles"]]
    saved = [forward["tensors"][n]["layout"] for n in step["saved"]]
    rows = f"f32[16, {S}, 1]"
    assert sorted(saved) == sorted([f"bf16[16, {S}, 128]", rows, rows])
    assert step["backward"] == [s["id"] for s in backward["steps"]]
    kernels = [s for s in backward["steps"] if s["tiles"]]
    walked = [{n for n, _ in d["along"]} for s in kernels for d in s["tiles"]["dims"]
              if d["mode"] == "loop"]  # fmt: skip
    assert len(kernels) == 2 and walked[0] != walked[1], "one over queries, one over keys"
    made = {backward["tensors"][n]["label"] for s in kernels for n in s["writes"]}
    assert made == {f"gradient of {x}" for x in "qkv"}
    for text in (full(report), short(report)):
        assert "saved for the backward: " in text and "backward 2: " in text
    path = tmp_path / "r.html"
    write(report, path)
    assert load(path) == report
    page = path.read_text()
    assert "backward 2: " in page and "masked in part" in page and "One kernel:" in page


def test_chunks_are_told(tmp_path: Path) -> None:
    def loss(x: Tensor, w: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(x @ w.t(), target)

    torch._dynamo.reset()
    x, w = (torch.randn(n, 32, requires_grad=True) for n in (1000, 4096))
    given = (x, w, torch.randint(0, 4096, (1000,)))
    path = tmp_path / "r.html"
    told = deuteron.report(loss, *given, path=path, options={"chunk_mib": 4})
    parts = {p["id"]: p for p in load(path)["parts"]}
    (step,) = [s for p in parts.values() for s in p["steps"] if s["chunks"]]
    c = step["chunks"]
    assert sum(b["times"] for b in c["bodies"]) == c["count"] == -(-1000 // c["chunk"])
    assert all(parts[b["part"]]["times"] == b["times"] for b in c["bodies"])
    (forward,) = [p for p in parts.values() if p["phase"] == "forward"]
    memory, logits = forward["memory"], c["chunk"] * 4096 * 4
    k = forward["steps"].index(step)
    assert memory["live"][k] >= memory["inside"][k] >= logits and memory["peak_step"] == k
    found = {f["steps"][0]: f for f in load(path)["findings"]}
    repeated = sum(f["of_total"] for i, f in found.items() if i.startswith("chunk"))
    assert 0 < repeated < 1.5 and found[step["id"]]["of_total"] <= 1
    words = f"1000 rows in {c['count']} chunks of {c['chunk']}, by "
    assert words in str(told) and words in told.full() and words in path.read_text()
    assert "option chunk_mib" in told.full()


def test_collectives_tell_what_waits_for_them(tmp_path: Path) -> None:
    dist = pytest.importorskip("torch.distributed")
    if not dist.is_available():
        pytest.skip("torch without distributed")
    from torch.distributed._functional_collectives import all_reduce

    def reduced(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        total = all_reduce(x, "sum", dist.group.WORLD)
        return total + 1, y.relu()

    torch._dynamo.reset()
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/s", rank=0, world_size=1)
    try:
        given = torch.randn(4096), torch.randn(64, 64)
        for measure in (True, False):
            told = deuteron.report(reduced, *given, path=tmp_path / "r.html", measure=measure)
            (part,) = told.data["parts"]
            (step,) = [s for s in part["steps"] if s["collective"]]
            (wait,) = [s for s in part["steps"] if s["id"] == step["collective"]["wait"]]
            assert wait["bytes"] == 0 and wait["predicted_us"] == 0
            assert step["collective"]["exposed_us"] == wait["measured_us"]
            said = "exposed (measured)" if measure else "exposed time not known"
            assert said in told.full() and said in (tmp_path / "r.html").read_text()
    finally:
        dist.destroy_process_group()
