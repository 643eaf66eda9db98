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


def never_written(code: bytes, folder: Path) -> set[int]:
    """Uniform registers that something reads and nothing writes."""
    text, read, written = _asked("-sass", code, folder), set[int](), set[int]()
    for name, operands in re.findall(r"/\*[0-9a-f]{4,}\*/ +(?:@!?U?P\w+ )?(\S+) ([^;]*);", text):
        first, *rest = operands.split(",")
        result = re.fullmatch(r"UR(\d+)", first.strip())
        if result and (name[0] == "U" or name.startswith(("R2UR", "S2UR", "VOTEU"))):
            wide = 2 if ".64" in name or "WIDE" in name else 1
            written |= {int(result[1]) + k for k in range(wide)}
        else:
            rest.append(first)
        for operand in rest:
            for where, number in re.findall(r"(gdesc\[)?UR(\d+)", operand):
                # A product whose left factor is in registers has one descriptor of two.
                read |= {int(number) + k for k in ((2, 3) if where else (0,))}
    return read - written


def _asked(what: str, code: bytes, folder: Path) -> str:
    tool = str(files("triton") / "backends" / "nvidia" / "bin" / "cuobjdump")
    file = folder / "kernel.cubin"
    file.write_bytes(code)
    return subprocess.run([tool, what, file], capture_output=True, text=True, check=True).stdout
