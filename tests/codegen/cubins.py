"""What a GPU's code says of itself."""

from __future__ import annotations

import re
import subprocess
from importlib.resources import files
from pathlib import Path


def resources(code: bytes, folder: Path) -> tuple[int, int]:
    """Registers and bytes of local memory of a thread."""
    tool = str(files("triton") / "backends" / "nvidia" / "bin" / "cuobjdump")
    file = folder / "kernel.cubin"
    file.write_bytes(code)
    done = subprocess.run([tool, "-res-usage", file], capture_output=True, text=True, check=True)
    (found,) = re.findall(r"REG:(\d+) STACK:(\d+)", done.stdout)
    return int(found[0]), int(found[1])
