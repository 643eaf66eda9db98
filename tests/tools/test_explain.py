"""`deuteron.explain`: names what users can name, counts breaks once, leaves nothing behind."""

from __future__ import annotations

import json
import linecache
import time
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import deuteron
from deuteron.tools.explain import enough, explain
from deuteron.tools.measuring import interleaved

HERE = Path(__file__).name
WIDTH = 256  # whose products are the library's: they share no kernel with what surrounds them


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 512),
            nn.Linear(512, WIDTH),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.softmax(-1)


@pytest.fixture(scope="module")
def explained() -> deuteron.Explanation:
    torch._dynamo.reset()
    torch.manual_seed(0)
    return explain(Model(), torch.randn(48, WIDTH), measure=True)


def test_the_text_is_short_and_sorted(explained: deuteron.Explanation) -> None:
    lines = str(explained).splitlines()
    assert lines[0] == explained.headline and "→ " in lines[0] and "least" in lines[0]
    for word in ("measured", "predicted", "a call", "eager"):
        assert word in explained.headline
    assert len(lines) < 30 and "layers.*.up" in str(explained)
    times = [s["us"] for s in explained.steps]
    assert times == sorted(times, reverse=True) and all(t > 0 for t in times)
    assert repr(explained) == str(explained)


def test_every_step_names_its_module_and_line(explained: deuteron.Explanation) -> None:
    """The user's innermost line, not the call of the model in the tool."""
    for part in explained.data["parts"]:
        for s in part["steps"]:
            places = [part["places"][k] for k in s["places"]]
            assert places, s["name"]
            for p in places:
                if p["file"]:
                    assert Path(p["file"]).name == HERE
                    assert linecache.getline(p["file"], p["line"]).strip() == p["code"]
        modules = {p["module"] for p in part["places"]}
        assert {"layers.0.norm", "layers.1.up", "layers.1.down"} <= modules
    assert "tools/" not in str(explained).replace("tests/tools/", "")


def test_modules_of_torch_alone_are_named() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.LayerNorm(4))
    text = explain(model, torch.randn(3, 4)).full()
    assert "0 (Linear)" in text and "2 (LayerNorm)" in text and "explain.py" not in text


def test_why_in_a_sentence(explained: deuteron.Explanation) -> None:
    library = explained.why("layers.0.norm", "layers.0.up")
    assert "because layers.0.up is the library call aten.addmm" in library
    assert "share the kernel" in explained.why("layers.1", "softmax")
    refused = explained.why("layers.0.norm", "layers.1.norm")
    assert "share no kernel" in refused and "cycle" in refused
    line = next(p["line"] for p in explained.data["parts"][0]["places"] if "softmax" in p["code"])
    assert "share the kernel" in explained.why(f"{HERE}:{line}", "layers.1")
    with pytest.raises(ValueError, match="near: layers"):
        explained.why("layer.0.norm", "layers.0.up")


def test_labels_of_what_is_not_fused_are_words_for_why(explained: deuteron.Explanation) -> None:
    apart = [r for p in explained.data["parts"] for r in p["refusals"]]
    said = [explained.why(r["first_label"], r["second_label"]) for r in apart[:10]]
    known = [r["reason"] in text for r, text in zip(apart, said)]
    assert any(known) and all(k or "share the" in text for k, text in zip(known, said)), said


class Noting(nn.Module):
    """Its first call changes what its guards look at, as BERT's does with its configuration."""

    def __init__(self) -> None:
        super().__init__()
        self.kind: str | None = None
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind is None:
            self.kind = "regression"
        return self.norm(x).sin()


def test_what_the_second_call_compiles_is_what_is_timed() -> None:
    """The first call's graphs are told in the frames alone; kernels are counted once. Of frames
    Dynamo keeps the last 64, whoever compiled them."""
    for k in range(65):
        torch.compile(lambda x, k=k: x + k, backend="eager")(torch.ones(3))
        torch._dynamo.reset()
    told = explain(Noting(), torch.randn(4, 8), measure=True)
    forward, backward = told.data["parts"]
    assert (forward["phase"], backward["phase"]) == ("forward", "backward")
    assert all(s["measured_us"] > 0 for p in (forward, backward) for s in p["steps"])
    assert told.data["totals"]["recompilations"] == 1 and "kind" in str(told)
    assert len(told.kernels) == told.data["totals"]["kernels"] == len(told.steps)


def test_long_calls_are_timed_once() -> None:
    """A report of a slow model waits for no more of them than it needs."""
    made: list[int] = []

    def slow() -> None:
        time.sleep(0.02)
        made.append(1)

    ((one,),) = interleaved([slow], 0.01, "cpu", 0)
    assert one >= 0.02 and len(made) == 1
    ((*_,),) = interleaved([slow], 0.01, "cpu", 1)
    assert len(made) > 2


def test_a_slow_first_call_makes_no_small_batches() -> None:
    """Threads that have to wake up take longer than the calls that follow."""
    made: list[int] = []

    def waking() -> None:
        time.sleep(0.02 if not made else 1e-4)
        made.append(1)

    interleaved([waking], 0.01, "cpu", 1)
    assert len(made) > 100


def test_causal_attention_needs_half_of_its_scores() -> None:
    """Of 32 queries the library's FLOPs and limits count the keys that they see."""
    flops = []
    for causal in (False, True):
        torch._dynamo.reset()
        q = torch.randn(2, 4, 32, 16).bfloat16()
        f = lambda q: F.scaled_dot_product_attention(q, q, q, is_causal=causal)  # noqa: E731, B023
        told = explain(f, q, options={"fusion": False})
        flops.append(max(s["flops"] for p in told.data["parts"] for s in p["steps"]))
    assert flops[1] / flops[0] == 33 / 64


def test_json_has_a_schema_with_a_version(explained: deuteron.Explanation) -> None:
    data = json.loads(explained.to_json())
    assert (data["schema"], data["version"]) == ("deuteron.report", 2)
    phases = [p["phase"] for p in data["parts"]]
    assert phases == ["forward", "backward"]
    totals = data["totals"]
    assert totals["kernels"] == len(explained.kernels)
    assert totals["bytes"] >= totals["least_bytes"] > 0
    assert sum(totals["refusals"].values()) == len(explained.refusals)
    for part in data["parts"]:
        for s in part["steps"]:
            assert not s["source"] or s["source"] in data["sources"]
            assert set(s["reads"]) | set(s["writes"]) <= part["tensors"].keys()


def test_inputs_have_the_names_of_parameters(explained: deuteron.Explanation) -> None:
    labels = {t["label"] for p in explained.data["parts"] for t in p["tensors"].values()}
    assert {"layers.0.up.weight", "layers.1.norm.bias", "argument 0"} <= labels
    assert "gradient of result 0" in labels


def test_recomputed_operations_are_marked(explained: deuteron.Explanation) -> None:
    forward, backward = explained.data["parts"]
    assert not forward["recomputed"] and backward["recomputed"]
    again = {o["op"] for s in backward["steps"] for o in s["ops"] if o["again"]}
    assert "gelu" in again


def test_bytes_and_flops_of_library_calls(explained: deuteron.Explanation) -> None:
    part = explained.data["parts"][0]
    up = next(s for s in part["steps"] if s["name"] == "aten.addmm.default")
    assert up["flops"] == 2 * 48 * WIDTH * 512
    assert up["bytes"] == 4 * (48 * WIDTH + WIDTH * 512 + 512 + 48 * 512)
    assert [c["who"] for c in up["product"]["candidates"] if c["chosen"]] == ["library"]


def test_notebooks_show_html(explained: deuteron.Explanation) -> None:
    text = explained._repr_html_()
    assert text.startswith("<details") and "→" in text and "<b>" in text


def test_it_is_visible() -> None:
    assert {"explain", "Explanation", "compile"} <= set(dir(deuteron))
    assert "headline" in dir(deuteron.Explanation)
    assert deuteron.explain.__doc__ and "measure" in deuteron.explain.__doc__


def test_leaves_nothing_behind() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    before = {k: v.clone() for k, v in model.state_dict().items()}
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    explain(model, torch.randn(6, 4, generator=torch.Generator().manual_seed(1)), measure=True)
    assert torch.equal(torch.rand(1), expected)
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_it_runs_once_unless_it_measures() -> None:
    calls = []

    def f(x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        calls.append(1)
        return x.sin()

    explain(f, torch.ones(3))
    assert len(calls) == 1


def test_mutated_argument_is_put_back() -> None:
    def f(x: Tensor) -> Tensor:
        return x.add_(1).sin()

    x = torch.zeros(3)
    explain(f, x)
    assert torch.equal(x, torch.zeros(3))


def test_timed_steps_compute_the_same() -> None:
    """A part with a clock around each step gives what it gives without."""
    from deuteron.base.observing import observed_by
    from deuteron.tools.observe import Observations

    seen = Observations()
    model, x = Model(), torch.randn(16, WIDTH)
    with observed_by(seen):
        compiled = torch.compile(model, backend="deuteron")
        once = compiled(x)
        seen.policy.on = True
        again = compiled(x)
    assert torch.equal(once, again)
    torch.testing.assert_close(once, model(x))
    ((_, part),) = seen.parts
    assert set(part.us) == set(range(len(part.loaded.schedule.steps)))


def test_backward_on_request() -> None:
    def f(x: Tensor) -> Tensor:
        return x.exp()

    phases = [r.of("graph")[0]["phase"] for r in explain(f, torch.ones(2)).graphs]
    assert phases == ["inference"]
    x = torch.ones(2, requires_grad=True)
    assert len(explain(f, x, backward=False).graphs) == 1
    with pytest.raises(ValueError, match="no backward"):
        explain(f, torch.ones(2), backward=True)


def test_graph_breaks_are_told_once_with_file_and_line() -> None:
    def f(x: Tensor, *, scale: float = 2.0) -> Tensor:
        y = x.sin()
        print("break")
        return y * scale

    report = explain(f, torch.ones(2))
    (told,) = report.breaks
    assert told["code"] == 'print("break")' and Path(told["file"]).name == HERE
    assert linecache.getline(told["file"], told["line"]).strip() == told["code"]
    assert "print" in told["explanation"] and told["count"] == 1 and told["hint"]
    assert f"{HERE}:{told['line']}: " in str(report)
    assert len(report.graphs) == 2


def test_a_break_before_any_operation() -> None:
    def f(x: Tensor, *, scale: float = 2.0) -> Tensor:
        print("break")
        return x * scale

    assert len(explain(f, torch.ones(2)).breaks) == 1


def test_a_compiled_module_is_explained_again() -> None:
    model = torch.compile(nn.Linear(3, 3), backend="eager")
    model(torch.ones(2, 3))
    assert len(explain(model, torch.ones(2, 3)).graphs) == 2


def test_a_graph_that_falls_back_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    from deuteron import backend

    def broken(*args: object) -> object:
        raise RuntimeError("broken on purpose")

    monkeypatch.setattr(backend, "compile_graph", broken)
    monkeypatch.setattr(backend.deuteron_backend, "__kwdefaults__",
                        {**backend.deuteron_backend.__kwdefaults__, "runner": broken})  # fmt: skip
    report = explain(lambda x: x.sin(), torch.ones(3), options={"fallback": "aten"})
    assert "broken on purpose" in str(report) and report.fallbacks


def test_steps_are_timed_until_they_are_steady() -> None:
    """A program beside this one stopped a thread in each of the first calls."""
    assert not enough([9.0], 60.0) and enough([9.0, 8.9], 1.0) and not enough([9.0, 8.9], 0.9)
    assert not enough([9.0, 8.0], 4.9) and enough([9.0, 8.0], 5.0) and enough([9.0, 9.0, 8.9], 1.1)
    assert enough([9.0 * 0.9**k for k in range(12)], 0.1)
