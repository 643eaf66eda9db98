"""The report: one offline file, the same as JSON, of one call, of a whole program, with a
difference; opened in a real browser."""

from __future__ import annotations

import copy
import html
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import deuteron
from deuteron.base.device import named_gpu
from deuteron.base.errors import OptionError
from deuteron.lower import contractions
from deuteron.tools.explain_text import rows_of
from deuteron.tools.findings import findings, reasons
from deuteron.tools.measuring import others_of
from deuteron.tools.report_data import raise_limits
from deuteron.tools.report_file import ReportError, load, write
from dev import ROOT
from tests.tools.browser import dom, needs_browser, screenshot

HOSTILE = "</script><img src=x onerror=alert(1)>"


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        y = x + self.down(F.gelu(self.up(self.norm(x))))  # </script><img src=x onerror=alert(1)>
        return y.softmax(-1)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch._dynamo.reset()
    path = tmp_path_factory.mktemp("report") / "r.html"
    torch.manual_seed(0)
    x = torch.randn(48, 32).double()  # of float64, which has no tiles: reports tell of calls, too
    with patch.object(contractions, "library_us", lambda *_: 0.0):
        deuteron.report(Mlp().double(), x, path=path, name=f"a model {HOSTILE}")
    return path


def test_one_file_without_anything_from_elsewhere(made: Path) -> None:
    text = made.read_text()
    links = re.findall(r"https?://[^\"' )]+", text)
    assert set(links) <= {"http://www.w3.org/2000/svg"}
    assert not re.search(r"<(script|link|img|iframe)[^>]+(src|href)=", text)
    assert "default-src 'none'" in text
    for section in ("Where the time goes", "Not fused", "Matrix products", "Memory", "Roofline"):
        assert section in text


def test_strings_are_escaped(made: Path) -> None:
    """Names and source lines of the user's are text wherever they stand."""
    text = made.read_text()
    assert HOSTILE not in text
    assert "&lt;/script&gt;" in text and "\\u003c/script\\u003e" in text


def test_json_is_what_the_page_holds(made: Path) -> None:
    held = re.search(r'id="data">(.*?)</script>', made.read_text(), re.DOTALL)
    assert held is not None
    assert json.loads(held[1]) == load(made) == load(made.with_suffix(".json"))


def test_times_are_measured_and_said_so(made: Path) -> None:
    data = load(made)
    assert all(s["measured_us"] > 0 for p in data["parts"] for s in p["steps"])
    assert "are <b>measured</b>" in made.read_text()
    told = deuteron.explain(Mlp(), torch.randn(48, 32))
    told.save(str(made.with_name("predicted.html")))
    assert "are <b>predicted</b>" in made.with_name("predicted.html").read_text()


def test_findings_are_sorted_and_have_reasons(made: Path) -> None:
    found = load(made)["findings"]
    assert [f["lost_us"] for f in found] == sorted((f["lost_us"] for f in found), reverse=True)
    ids = {s["id"] for p in load(made)["parts"] for s in p["steps"]}
    assert all(f["why"] and set(f["steps"]) <= ids for f in found) and len(found) >= 3


@pytest.mark.parametrize(
    ("device", "width", "advised"),
    [("cpu", 500, ""), ("cuda:0", 512, "dtype"), ("cuda:0", 500, "64, dtype")],
)
def test_advice_about_products_is_the_devices(device: str, width: int, advised: str) -> None:
    """Smaller numbers help where the device multiplies them faster, multiples of 64 on a GPU."""
    torch._dynamo.reset()
    told = deuteron.explain(torch.matmul, torch.randn(512, width), torch.randn(width, 512))
    part = told.data["parts"][0]
    (step,) = part["steps"]
    assert step["kind"] == "library" and step["limit"] == "compute"
    h100 = named_gpu("H100")
    assert h100 is not None
    devices = {**told.data["devices"], "cuda:0": h100.to_dict()}
    slow = {**step, "us": 3 * step["limit_us"], "device": device}
    (row,) = rows_of({**part, "steps": [slow]})
    why = " ".join(reasons(part, row, devices))
    words = {"64": "multiples of 64", "dtype": "a smaller dtype"}
    assert ", ".join(k for k, w in words.items() if w in why) == advised, why


def test_operations_of_attention_on_a_cpu_are_counted() -> None:
    """Two products of 2 x 128 x 128 x 32 forward, five backward."""
    q, k, v = (torch.randn(1, 2, 128, 32, requires_grad=True) for _ in "qkv")
    torch._dynamo.reset()
    told = deuteron.explain(torch.nn.functional.scaled_dot_product_attention, q, k, v)
    flops = {
        p["phase"]: s["flops"]
        for p in told.data["parts"]
        for s in p["steps"]
        if "flash_attention_for_cpu" in s["name"]
    }
    each = 2 * 2 * 128 * 128 * 32
    assert flops == {"forward": 2 * each, "backward": 5 * each}


def test_memory_is_that_of_the_steps(made: Path) -> None:
    for part in load(made)["parts"]:
        m = part["memory"]
        assert max(m["live"]) == m["peak"] == m["live"][m["peak_step"]]
        assert m["peak"] == sum(part["tensors"][n]["bytes"] for n in m["at_peak"])


def test_difference_of_two(made: Path, tmp_path: Path) -> None:
    unfused = tmp_path / "unfused.html"
    deuteron.report(
        Mlp(), torch.randn(48, 32), path=unfused, options={"fusion": False}, measure=False,
        against=made,
    )  # fmt: skip
    text = unfused.read_text()
    assert "Against a model" in text and "kernels " in text and "<h3>New</h3>" in text
    before, now = load(made)["totals"], load(unfused)["totals"]
    assert now["kernels"] > before["kernels"]
    assert f"kernels {before['kernels']} → {now['kernels']}" in text


@pytest.mark.parametrize(
    "options",
    [{"guard": "measure"}, {"verify": True}, {"mode": "max-autotune"}, {"eager_random": True}],
    ids=str,
)
def test_with_other_options(options: dict[str, Any], tmp_path: Path) -> None:
    """Their decisions are in the page, whatever fields these have."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1), nn.LayerNorm(8))
    told = deuteron.report(model, torch.randn(4, 8), options=options, path=tmp_path / "o.html")
    assert told.kernels and "other decisions" in (tmp_path / "o.html").read_text()


def test_where_nothing_is_compiled(tmp_path: Path) -> None:
    told = deuteron.report(lambda x: x, torch.randn(3), path=tmp_path / "none.html")
    assert "nothing was compiled" in str(told) and "nothing was compiled" in told.headline
    assert "nothing was compiled" in (tmp_path / "none.html").read_text()


def test_wrong_files_are_told(made: Path, tmp_path: Path) -> None:
    data: Any = load(made)
    with pytest.raises(ReportError, match="no name of an HTML file"):
        write(data, tmp_path / "r.txt")
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(ReportError, match="not a report"):
        load(tmp_path / "x.json")
    (tmp_path / "old.json").write_text(json.dumps({**data, "version": 0}))
    with pytest.raises(ReportError, match="version 0"):
        load(tmp_path / "old.json")
    with pytest.raises(ReportError, match="cannot be written"):
        write(data, made / "below" / "r.html")
    with pytest.raises(OptionError):
        deuteron.compile(Mlp(), options={"report": 3})


PROGRAM = """
import torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.GELU(), torch.nn.Linear(16, 4))
compiled = torch.compile(model, backend="deuteron")
for _ in range(12):
    compiled(torch.randn(8, 16)).sum().backward()
compiled(torch.randn(9, 16))
"""


def test_of_a_whole_program(tmp_path: Path) -> None:
    """DEUTERON_REPORT: forward and backward, with times of some calls; recompilations."""
    (tmp_path / "train.py").write_text(PROGRAM)
    path = tmp_path / "out" / "train.html"
    done = subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, timeout=300,
        env={**os.environ, "DEUTERON_REPORT": str(path)}, check=False,
    )  # fmt: skip
    assert done.returncode == 0 and f"the report is {path}" in done.stderr, done.stderr
    data = load(path)
    assert data["title"] == "train.py"
    assert [p["phase"] for p in data["parts"]][:3] == ["forward", "backward", "forward"]
    assert all(s["measured_us"] > 0 for p in data["parts"][:2] for s in p["steps"])
    (again,) = [f["recompiled"] for f in data["frames"] if f["recompiled"]]
    assert "expected 8, actual 9" in again


@needs_browser
def test_in_a_browser(made: Path, tmp_path: Path) -> None:
    """The script runs, draws all rows, opens a step that is linked to; both themes."""
    steps = [s for p in load(made)["parts"] for s in p["steps"] if s["kind"] != "view"]
    page = dom(made, f"#step={steps[1]['id']}")
    assert "data-ready=" in page and page.count('class="row') == len(steps)
    assert 'aria-expanded="true"' in page and "Operations in order" in page
    assert HOSTILE not in page.partition('id="data"')[0] and "onerror=alert(1)&gt;" in page
    from PIL import Image

    shades = []
    for dark in (False, True):
        file = tmp_path / f"{dark}.png"
        screenshot(made, file, dark=dark)
        shades.append(Image.open(file).convert("L").resize((1, 1)).getpixel((0, 0)))
    assert shades[0] > 200 > 60 > shades[1]


def slowed(data: Any) -> dict[str, str]:
    """Plants three causes in a report, as if they had been measured: step -> what must be said.
    The most lost first; all other steps are at their limit."""
    steps = [s for p in data["parts"] for s in p["steps"] if s["kind"] != "view"]
    library = next(s for s in steps if s["product"] and s["kind"] == "library")
    far, small = [s for s in steps if s["kind"] == "kernel"][:2]
    launch = data["devices"]["cpu"]["launch_us"]
    for s in steps:
        s.update(us=s["limit_us"], predicted_us=s["limit_us"])
    library.update(limit_us=5000.0, us=20000.0, predicted_us=20000.0)
    far.update(limit_us=1000.0, us=9000.0, predicted_us=1000.0, bytes=1 << 30)
    far["uncertain"] = "many conditions"
    small.update(limit_us=launch / 4, us=launch, predicted_us=launch)
    for s in steps:
        lost = s["us"] - s["limit_us"]
        s.update(measured_us=s["us"], lost_us=lost, share=s["limit_us"] / s["us"])
    return {
        library["id"]: "The library reaches 25% of the ",
        far["id"]: "That is 9.0 times the 1 ms that were predicted.",
        small["id"]: "It is too small for the device: ",
    }


@needs_browser
def test_the_tutorials_steps_find_what_was_planted(made: Path, tmp_path: Path) -> None:
    """Step 2 of docs/tutorial.md, followed on the page: the boxes
    and the table's first rows are the planted steps, the most lost first, with their true reason;
    what the page calls things is what the steps call them."""
    data: Any = load(made)
    planted = slowed(data)
    data["findings"] = findings(data["parts"], data["devices"])
    path, _ = write(data, tmp_path / "planted.html")
    tutorial = (ROOT / "docs" / "tutorial.md").read_text()
    steps = tutorial.partition("## 2. ")[2].partition("## 3. ")[0]

    page = dom(path)
    assert "Times of steps are measured" in re.sub(r"</?b>", "", page)
    section = page.partition('id="findings"')[2].partition('id="steps"')[0]
    assert "<h2>Where the time goes</h2>" in section and "Where the time goes" in steps
    boxes = re.findall(r"<li>\s*<h3>(.*?)</h3>(.*?)</ul>\s*</li>", section, re.DOTALL)
    rows = re.findall(r'<tr class="row"[^>]*data-id="([^"]+)"', page)
    expected = list(planted)
    assert rows[:3] == expected, "the table is sorted by time lost"
    assert len(boxes) == 3
    for step, (title, body) in zip(expected, boxes, strict=True):
        assert f'data-show="{step}"' in body and "lost of" in body and "(" in title
        assert planted[step] in html.unescape(body), body
    assert "was uncertain (many conditions)" in section and "'guard': 'measure'" in html.unescape(
        section
    )

    opened = dom(path, f"#step={expected[0]}")
    row = opened.partition('<tr class="open">')[2]
    assert "Why time is lost" in row and planted[expected[0]] in html.unescape(row)
    for name in ("Why time is lost", "Kernels and library calls", "*lost*", "*open*"):
        assert name in steps and name.strip("*") in opened


@needs_browser
def test_two_thousand_kernels_open_fast(made: Path, tmp_path: Path) -> None:
    data: Any = load(made)
    part = data["parts"][0]
    steps = part["steps"]
    while len(part["steps"]) < 2000:
        more = copy.deepcopy(steps)
        for s in more:
            s["id"] = f"{part['id']}.{len(part['steps'])}"
            part["steps"].append(s)
    part["memory"]["live"] = [1000] * len(part["steps"])
    path, _ = write(data, tmp_path / "many.html")
    page = dom(path)
    ready = re.search(r'data-ready="(\d+)"', page)
    assert ready is not None and page.count('class="row') > 2000
    assert int(ready[1]) < 3000, "ms; alone on a machine about 300"


def step(us: float, limit_us: float, memory_us: float, unit: str = "f32") -> dict[str, Any]:
    limit = "memory" if memory_us >= limit_us else "compute"
    return {
        "device": "cpu", "unit": unit, "limit": limit, "limit_us": limit_us, "us": us,
        "memory_us": memory_us, "measured_us": us, "lost_us": max(0.0, us - limit_us), "share": 1.0,
    }  # fmt: skip


def test_limits_are_those_of_the_fastest_step() -> None:
    """Figures that a step outruns are too low for all of its unit; memory is left alone."""
    fast, slow, other = step(10, 15, 1), step(30, 24, 18), step(9, 6, 1, "bf16")
    cached, part = step(2, 8, 8), {"limit_us": 53.0}
    part["steps"] = [fast, slow, other, cached]  # type: ignore[assignment]
    assert raise_limits([part]) == {"cpu": {"f32": 1.5}}
    assert [s["limit_us"] for s in part["steps"]] == [10, 18, 6, 8]  # type: ignore[attr-defined]
    assert (slow["limit"], slow["lost_us"], slow["share"]) == ("memory", 12, 0.6)
    assert part["limit_us"] == 42.0


def test_other_programs_are_noticed() -> None:
    """One that computes on another core, and none."""
    found: dict[str, Any] = {}
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("one core: this process would not run beside another")
    with others_of(found), subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:
        time.sleep(2)
        busy.kill()
    assert found["others"] > 0.5


def test_library_calls_are_told_with_what_they_make() -> None:
    q = torch.randn(1, 2, 64, 8)
    told = deuteron.explain(F.scaled_dot_product_attention, q, q, q)
    (part,) = told.data["parts"]
    (call,) = [s for s in part["steps"] if s["kind"] == "library"]
    (row,) = rows_of({**part, "steps": [{**call, "us": 1e6, "limit_us": 1e5, "share": 0.1}]})
    assert "limit for f32[1, 2, 64, 8]" in " ".join(reasons(part, row, told.data["devices"]))


def test_without_a_backward_it_is_inference() -> None:
    told = deuteron.explain(nn.Linear(8, 8), torch.randn(4, 8), backward=False)
    assert [p["phase"] for p in told.data["parts"]] == ["inference"]
