"""Writes docs/architecture.md: the text below, with the artifacts of one program in their places.

    python -m dev.architecture           # writes the file
    python -m dev.architecture --check   # exit status 1 where it would write something else

The program is `walked`: layer norm, a linear layer and GELU, forward and backward, on the CPU.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import torch
import torch.nn.functional as F

from deuteron.base.device import DeviceSpec, device_spec
from dev import ROOT, passes

DOCUMENT = ROOT / "docs" / "architecture.md"
TEMPLATE = ROOT / "docs" / "architecture.in.md"


def walked(x: torch.Tensor, g: torch.Tensor, b: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.gelu(F.layer_norm(x, (64,), g, b) @ w)


def two_cores(device: str, options: object) -> DeviceSpec:
    """A CPU whose figures do not depend on the machine."""
    return replace(
        device_spec("cpu"),
        bandwidth_gbps=36.0,
        gflops=(("f32", 100.0),),
        launch_us=0.5,
        cores=2,
        l1=32 << 10,
        l2=1 << 20,
        l3=32 << 20,
    )


def compile_walked(**options: str) -> None:
    """Compiles the program, forward and backward."""
    from deuteron.backend import deuteron_backend

    shapes = [(32, 64), (64,), (64,), (64, 128)]
    args = [torch.ones(s).requires_grad_() for s in shapes]
    with patch("deuteron.base.passes.device_spec_for", two_cores):
        y = torch.compile(walked, backend=deuteron_backend, options=options)(*args)
        y.square().sum().backward()


def artifacts(folder: Path) -> dict[str, str]:
    """Name -> text of everything that the compilation leaves in the debug folder."""
    compile_walked(debug_dir=str(folder), cache_dir=str(folder / "cache"))
    out = {}
    for phase in ("forward", "backward"):
        (written,) = folder.glob(f"{phase}_*")
        for file in written.iterdir():
            if file.suffix in (".txt", ".py"):
                out[f"{phase}/{file.name}"] = tidy(file.read_text(), folder)
    return out


def tidy(text: str, folder: Path) -> str:
    """Without what differs from machine to machine, and without the origin of every line."""
    text = text.replace(str(folder), "debug").replace(str(ROOT) + "/", "")
    lines = [s for s in text.splitlines() if not s.lstrip().startswith("#: ")]
    text = "\n".join(lines)
    text = re.sub(r", [\d.]+ us\b", "", text)
    text = re.sub(r", [\d.]+ us predicted", "", text)
    return re.sub(r"(forward|backward) graph \d+ of this process", r"\1 graph", text)


def call_only(module: str) -> str:
    """The ``call`` function of an emitted module."""
    start = module.index("def call(")
    return module[start : module.index("if __name__")].rstrip()


def kernel_only(kernels: str) -> str:
    """The first kernel's text."""
    parts = re.split(r"\n(?=// )", kernels)
    first = next(p for p in parts if 'extern "C" void cpp_' in p)
    return first[: first.index("\n}\n") + 3] if "\n}\n" in first else first


def document(artifacts: dict[str, str]) -> str:
    def fill(match: re.Match[str]) -> str:
        name = match[1]
        if name in ("stages", "passes"):
            return passes.markdown(inner=name == "passes")
        if name.endswith("module.py"):
            return call_only(artifacts[name])
        if name.endswith("kernels.txt"):
            return kernel_only(artifacts[name])
        return artifacts[name].strip()

    return filled(TEMPLATE, fill)


def filled(template: Path, fill: Callable[[re.Match[str]], str]) -> str:
    """A document: its template, with something made in the place of each {{name}}."""
    return re.sub(r"\{\{([\w/.]+)\}\}", fill, template.read_text())


def write(document: Path, text: str) -> None:
    """Writes a document; with --check, exits with 1 where that would change it."""
    if "--check" in sys.argv[1:]:
        sys.exit(document.read_text() != text)
    document.write_text(text)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        text = document(artifacts(Path(folder)))
    write(DOCUMENT, text)


if __name__ == "__main__":
    main()
