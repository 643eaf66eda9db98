"""What a GPU's code says of itself."""

from __future__ import annotations

import re
import subprocess
from importlib.resources import files
from pathlib import Path


def resources(code: bytes, folder: Path) -> tuple[int, int]:
    """Registers and bytes of local memory of a thread."""
    (match,) = re.findall(r"REG:(\d+) STACK:(\d+)", _asked("-res-usage", code, folder))
    return int(match[0]), int(match[1])


def loads(code: bytes, folder: Path) -> set[str]:
    """The instructions that read memory."""
    return {name for name in instructions(code, folder) if re.match(r"LDG\b", name)}


def instructions(code: bytes, folder: Path) -> list[str]:
    """All instructions, in order, without what they work on."""
    text = _asked("-sass", code, folder)
    return re.findall(r"/\*[0-9a-f]{4,}\*/ +(?:@!?U?P\w+ )?([A-Z][\w.]+)", text)


def _asked(what: str, code: bytes, folder: Path) -> str:
    tool = str(files("triton") / "backends" / "nvidia" / "bin" / "cuobjdump")
    file = folder / "kernel.cubin"
    file.write_bytes(code)
    return subprocess.run([tool, what, file], capture_output=True, text=True, check=True).stdout
