"""Names and strings of the user's program stay data: in C++, Triton, Python, HTML, shells, files.

The programs here come from files with hostile names and have hostile lines, functions, parameters
and operators. `PAYLOADS` would make a file, or break the text, if any of them left its comment or
its string. What is generated is compiled and run, and compared with eager.
"""

from __future__ import annotations

import ast
import linecache
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import deuteron
from deuteron.backend import collecting, deuteron_backend
from deuteron.base.device import device_spec, named_gpu
from deuteron.base.errors import VerifyError
from deuteron.base.passes import Context
from deuteron.base.text import MAX_COMMENT_LENGTH, one_line, plain_name
from deuteron.codegen.cpp.kernels import generate as generate_cpp
from deuteron.codegen.cpp.kernels import translation_unit
from deuteron.codegen.text import comment, identifier, long_string
from deuteron.codegen.triton.generate import generate as generate_triton
from deuteron.ir.parser import parse_program
from deuteron.ir.printer import print_program
from deuteron.ir.program import Compute, Origin
from deuteron.lower.core import source_line
from dev.bench.page import blocks, write_page

PAYLOADS = (
    '"""; open("CANARY", "w").close(); """',
    "*/ int main() { return 1; } /*",
    "\\",
    "??/",
    "$(touch CANARY) `touch CANARY` ; touch CANARY #",
    "${CANARY} %s {0} {x!r}",
    "<script>alert(1)</script><img src=x onerror=alert(1)>",
    "'); open('CANARY', 'w').close() #",
    "a\nopen('CANARY', 'w').close()\n#include \"/etc/passwd\"\n",
    "a\ropen('CANARY', 'w').close()\r",
    "\x00\x07\x1b[2J\x7f\x0b\x0c\x1c",
    "\u2028\u2029\x85\u202eevil\u2066\ufeff",
    "größe 尺寸 𝔣 ² \U0001f4a9",
    "\udc80\ud800",
    '" onmouseover="alert(1)',
    "x" * 100_000,
)
ALL = " ".join(PAYLOADS)
ids = [f"payload{i}" for i in range(len(PAYLOADS))]


@pytest.fixture(autouse=True)
def no_canary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing that a payload says was done."""
    monkeypatch.chdir(tmp_path)
    yield
    assert not list(tmp_path.rglob("CANARY")) and not Path("CANARY").exists()


def shown(text: str) -> bool:
    return all(c.isprintable() for c in text)


# -- the functions that everything goes through ----------------------------------------------------


@pytest.mark.parametrize("payload", [*PAYLOADS, ALL], ids=[*ids, "all"])
def test_texts(payload: str) -> None:
    line = one_line(payload)
    assert shown(line) and len(line) <= MAX_COMMENT_LENGTH
    line.encode()
    assert shown(comment(payload))
    assert ast.parse(comment(payload)).body == []
    for name in (identifier(payload, ()), f"x{plain_name(payload)}"):
        assert name.isascii() and name.isidentifier()
    assert ast.literal_eval(long_string(payload)) == payload
    for tail in ('"', "\\", '"""', "\\\\", '\\"'):
        assert ast.literal_eval(long_string(payload + tail)) == payload + tail


@pytest.mark.parametrize("payload", PAYLOADS, ids=ids)
def test_source_lines(payload: str) -> None:
    node = torch.fx.Graph().placeholder("x")
    node.meta["stack_trace"] = f'  File "{payload}.py", line 12, in f\n    return {payload}\n'
    line = source_line(node)
    assert shown(line) and len(line) <= MAX_COMMENT_LENGTH
    if len(payload) < 100 and shown(payload) and '"' not in payload:
        assert line == f"{payload}.py:12: return {payload}"


def kernels_of(device: str) -> Any:
    """A program with a kernel, and its schedule."""
    from deuteron.ir import expr as E
    from deuteron.ir.index import Axis
    from deuteron.ir.program import Input, Output, Program, contiguous
    from deuteron.schedule import schedule

    axis = Axis("i", 64)
    lay = contiguous((axis.extent,), "f32", device)
    body = E.op("sin", E.load("x", (axis.index,), "f32"))
    program = Program(
        (Input("x", lay, 0), Compute("y", (axis,), body, lay, origins=(Origin("y", "sin"),))),
        (Output("y", lay.shape, lay.strides),),
        num_inputs=1,
    )
    spec = named_gpu("H200") if device == "cuda" else device_spec("cpu")
    (kernel,) = schedule(program, Context(specs=lambda _: spec)).steps
    return program, kernel, spec


@pytest.mark.parametrize("payload", PAYLOADS, ids=ids)
def test_comments_of_kernels(payload: str) -> None:
    """C++: the tokens are the same as without the comment. Triton: the syntax tree is the same."""
    hostile = Origin(payload, payload, payload)
    for device, generate in (("cpu", generate_cpp), ("cuda", generate_triton)):
        _, kernel, spec = kernels_of(device)
        plain = generate(kernel, spec).source
        made = generate(replace(kernel, origins=(hostile,)), spec).source
        made.encode()
        if device == "cuda":
            assert ast.dump(ast.parse(made)) == ast.dump(ast.parse(plain))
            continue
        lines = [x for x in made.split("\n") if not x.startswith("//")]
        assert lines == [x for x in plain.split("\n") if not x.startswith("//")]
        assert all(shown(x) and not x.endswith(("\\", "??/")) for x in made.split("\n"))


def test_comments_compile(tmp_path: Path) -> None:
    """All of them in one file: the preprocessor sees no more than without them."""
    _, kernel, spec = kernels_of("cpu")
    origins = tuple(Origin(p, p, p) for p in PAYLOADS)
    tokens = []
    for k in (kernel, replace(kernel, origins=origins)):
        unit = tmp_path / "unit.cpp"
        unit.write_text(translation_unit([generate_cpp(k, spec)]), encoding="utf-8")
        for mode in ("-std=c++17", "-std=c++11"):  # trigraphs live in the older one
            done = subprocess.run(["g++", mode, "-E", "-P", str(unit)], capture_output=True)
            assert done.returncode == 0, done.stderr.decode(errors="replace")
            tokens.append(done.stdout.split())
    assert all(t == tokens[0] for t in tokens)


@pytest.mark.parametrize("payload", PAYLOADS, ids=ids)
def test_programs_read_back(payload: str) -> None:
    program, _, _ = kernels_of("cpu")
    made = replace(program.defs[1], origins=(Origin("y", "sin", payload),))
    text = print_program(replace(program, defs=(program.defs[0], made)))
    assert parse_program(text).defs[1].body is program.defs[1].body


def test_names_of_tensors() -> None:
    """Names that are no identifiers anywhere still give code that compiles (FX makes none such)."""
    from deuteron.ir import expr as E
    from deuteron.ir.index import Axis, Sym, atom
    from deuteron.ir.program import contiguous
    from deuteron.schedule.kernel import Kernel, Nest, Store

    for payload in PAYLOADS:
        axis = Axis(payload, atom(Sym(payload)))
        lay = contiguous((axis.extent,), "f32")
        value = E.op("sin", E.load(payload + "in", (axis.index,), "f32"))
        nest = Nest((axis,), (), (Store(payload + "out", (axis.index,), value, "point"),))
        ins, outs = ((payload + "in", lay),), ((payload + "out", lay),)
        kernel = Kernel("k", (nest,), ins, outs, (), "cpu", 0, 0.0, 0.0)
        cpp = generate_cpp(kernel, device_spec("cpu")).source
        code = [x.split("  //")[0] for x in cpp.split("\n") if not x.startswith("//")]
        assert all(x.isascii() and shown(x) for x in code), code
        gpu = generate_triton(replace(kernel, device="cuda"), named_gpu("H200"))
        assert {n.arg for n in ast.walk(ast.parse(gpu.source)) if isinstance(n, ast.arg)} <= {
            *gpu.params,
            *gpu.constexprs,
        }
        assert all(p.isascii() and p.isidentifier() for p in gpu.params)


# -- whole programs --------------------------------------------------------------------------------

SOURCE = """
def größe_{name}(x, w):  # {comment}
    y = (x * 2 + w).sin().sum(-1, keepdim=True) * x  # {comment}
    "{string}"; y = y.cumsum(0)  # {comment}
    return y @ w, y.exp()
"""


def hostile(folder: Path, number: int) -> Callable[..., Any]:
    """A function from a file whose name and lines are hostile."""
    payload = PAYLOADS[number]
    line = " ".join(payload.splitlines()).replace("\0", "")
    text = SOURCE.format(name=number, comment=line, string=line.encode("ascii", "ignore").decode()
                         .replace("\\", "").replace('"', "'"))  # fmt: skip
    file = f"{folder}/{payload[:80]}\\.py"
    linecache.cache[file] = (len(text), None, text.splitlines(True), file)
    space: dict[str, Any] = {}
    text = "".join(c for c in text if not "\ud800" <= c <= "\udfff")
    exec(compile(text, file.encode("utf-8", "replace").decode().replace("\0", ""), "exec"), space)
    return space[f"größe_{number}"]


@pytest.mark.parametrize("number", [0, 1, 2, 4, 6, 8, 9, 10, 11, 13])
def test_programs(number: int, tmp_path: Path) -> None:
    """From a hostile file through every artifact; what is written runs by itself."""
    f = hostile(tmp_path, number)
    debug = tmp_path / "debug"
    x, w = torch.randn(16, 16), torch.randn(16, 16)
    with collecting() as records:
        g = torch.compile(f, backend=deuteron_backend, options={"debug_dir": str(debug)})
        torch.testing.assert_close(g(x, w), f(x, w), rtol=1e-3, atol=1e-3)
    text = "\n".join(map(str, records[0].of("kernel")))
    text.encode()
    written = [p for p in debug.rglob("*") if p.is_file()]
    assert written and all(re.fullmatch(r"[\w./-]+", str(p.relative_to(debug))) for p in written)
    (module,) = debug.glob("*/module.py")
    tree = ast.parse(module.read_text(encoding="utf-8"))
    top = {type(n) for n in tree.body}
    assert top <= {ast.Expr, ast.Import, ast.ImportFrom, ast.Assign, ast.FunctionDef, ast.If}
    if number in (0, 8, 13):  # it is started by itself
        done = subprocess.run(
            [sys.executable, str(module)],
            capture_output=True,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(Path(deuteron.__file__).parent.parent)},
        )
        assert done.returncode == 0, done.stderr.decode(errors="replace")


def test_explain_is_plain_text(tmp_path: Path) -> None:
    """A terminal obeys control characters."""
    f = hostile(tmp_path, 10)
    report = deuteron.explain(f, torch.randn(8, 8), torch.randn(8, 8))
    assert shown(str(report).replace("\n", " "))
    report.to_json().encode("ascii")


@pytest.mark.parametrize("number", [0, 4, 7, 9, 10, 12])
def test_parameters(number: int, tmp_path: Path) -> None:
    """Parameters, buffers and modules may have any names without a dot."""
    name = PAYLOADS[number].replace(".", "_")[:200]

    class Inner(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_parameter(name, torch.nn.Parameter(torch.randn(8)))
            self.register_buffer(name + "b", torch.randn(8))

        def forward(self, x: Tensor) -> Tensor:
            return x * self._parameters[name] + self._buffers[name + "b"].exp()

    class Outer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.add_module(name, Inner())

        def forward(self, x: Tensor) -> Tensor:
            return self._modules[name](x).tanh().sum(0)

    m = Outer()
    x = torch.randn(4, 8)
    options = {"debug_dir": str(tmp_path / "debug")}
    got = torch.compile(m, backend=deuteron_backend, options=options)(x)
    got.sum().backward()
    torch.testing.assert_close(got, m(x))
    for p in (tmp_path / "debug").rglob("*.py"):
        ast.parse(p.read_text(encoding="utf-8"))


def test_strings_for_operators() -> None:
    """Strings that the program hands to library calls arrive as they are."""
    seen = []
    lib = torch.library.Library("hostile", "DEF")
    lib.define("length(Tensor x, str s) -> Tensor")
    lib.impl("length", lambda x, s: (seen.append(s), x * len(s))[1], "CPU")
    torch.library.register_fake("hostile::length", lambda x, s: torch.empty_like(x), lib=lib)
    given = [p for p in PAYLOADS if "\0" not in p and "\ud800" not in p]

    def f(x: Tensor) -> Tensor:
        for payload in given:
            x = torch.ops.hostile.length(x, payload) / len(payload)
        return x + 1

    x = torch.randn(8)
    torch.testing.assert_close(torch.compile(f, backend=deuteron_backend, fullgraph=True)(x), f(x))
    assert seen == given * 2


@pytest.mark.parametrize("number", [2, 4, 7, 14])
def test_folders(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders with hostile names; the command of a self-check can be pasted into a shell."""
    folder = tmp_path / PAYLOADS[number].replace("/", "_")
    options = {"debug_dir": str(folder / "debug"), "cache_dir": str(folder / "cache")}
    folder.mkdir(mode=0o700)

    def f(x: Tensor) -> Tensor:
        return x.sin() * 2

    x = torch.randn(32)
    g = torch.compile(f, backend=deuteron_backend, options={**options, "verify": True})
    torch.testing.assert_close(g(x), f(x))
    monkeypatch.setattr(
        "deuteron.runtime.verify.compare", lambda n, got, *a: "a planted difference"
    )
    with pytest.raises(VerifyError) as raised:
        g(x)
    command = raised.value.hint.split("alone: ")[1]
    done = subprocess.run(
        ["sh", "-c", command],
        capture_output=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(deuteron.__file__).parent.parent)},
    )
    assert done.returncode == 0 and b"y" in shlex.split(command)[-1].encode() + b"y", done.stderr
    assert Path(shlex.split(command)[-1]).parent == folder / "debug"


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, tuple[str, ...]]] = []
        self.data: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, tuple(sorted(a for a, _ in attrs))))

    def handle_data(self, data: str) -> None:
        self.data.append(data)


def test_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bench's page has the tags of its template, whatever stands in its tables."""
    known = {"html", "head", "meta", "title", "style", "body", "h1", "h2", "h3", "p", "table",
             "thead", "tbody", "tr", "th", "td", "div", "pre", "ul", "li", "img"}  # fmt: skip
    for payload in PAYLOADS:
        line = one_line(payload)
        table = f"| {line} | a |\n|---|---|\n| {line} | b |"
        text = f"# {line}\n\n{line}\n\n{table}\n\n    {line}\n\n- {line}"
        monkeypatch.setattr("dev.bench.page.markdown", lambda d, text=text: text)
        assert blocks(text)
        (tmp_path / "a.png").write_bytes(b"png")
        page = write_page([], tmp_path).read_text(encoding="utf-8")
        tags = Tags()
        tags.feed(page)
        assert {t for t, _ in tags.seen} <= known
        assert {a for _, names in tags.seen for a in names} <= {
            "lang", "charset", "name", "content", "class", "alt", "src",
        }  # fmt: skip
