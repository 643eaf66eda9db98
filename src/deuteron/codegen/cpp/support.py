"""Helper functions of generated code that are not scalar operations (`support.h`).

In: the names that a unit uses. Out: their text, in the file's order. `prelude.h`'s base stands
before it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from importlib.resources import files

_HELPER = re.compile(r"^//@ (\w+)\n", re.MULTILINE)
_USE_MEMORY = frozenset(("d_scratch", "d_scratch_columns", "d_shared"))


@lru_cache(maxsize=1)
def helpers() -> dict[str, str]:
    """Name -> text, comments left out."""
    text = files(__package__).joinpath("support.h").read_text(encoding="utf-8")
    parts = _HELPER.split(text)
    out = {}
    for name, body in zip(parts[1::2], parts[2::2], strict=True):
        lines = [s for s in body.splitlines() if s.strip() and not s.startswith("//")]
        out[name] = "\n".join(lines)
    return out


def support(used: Iterable[str]) -> str:
    """The helpers among `used`."""
    names = set(used)
    if names & _USE_MEMORY:
        names.add("d_memory")
    return "\n".join(text for name, text in helpers().items() if name in names)
