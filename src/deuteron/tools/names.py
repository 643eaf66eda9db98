"""What a user can name: module paths and lines of their own code, for nodes of ATen graphs.

In: FX nodes, and the names that Dynamo gives to where values come from. Out: `Place`, and words.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from torch import fx

from deuteron.base.package import FOLDER
from deuteron.base.text import one_line
from deuteron.lower.core import TRACEBACK_FRAME

# How Dynamo spells that something is in a module, a dictionary, a list or an object.
_ITEM = re.compile(r"\._(?:modules|parameters|buffers)\['([^']*)'\]|\['([^']*)'\]|\[(\d+)\]")
_ROOT = re.compile(r"^[LG]\['(\w+)'\]")
# Names that no user has given: the module itself, and the function that calls it.
_NOT_THEIRS = frozenset(("self", "fn", "function", "f"))


@dataclass(frozen=True)
class Place:
    """Where an operation comes from: the path of its module ("layers.0.norm") and the module's
    class, the innermost line of the user's. Each part may be empty."""

    module: str = ""
    kind: str = ""
    file: str = ""
    line: int = 0
    code: str = ""

    def where(self) -> str:
        """``model.py:12``, or empty."""
        return f"{os.path.basename(self.file)}:{self.line}" if self.file else ""

    def __str__(self) -> str:
        return f"{self.module} ({self.where()})" if self.module and self.file else (
            self.module or self.where()
        )  # fmt: skip


def source_name(text: str) -> str:
    """Dynamo's ``L['self']._modules['up']._parameters['weight']`` -> ``up.weight``; the name of a
    variable that holds a module or tensors stays (``model.up.weight``)."""
    root = _ROOT.match(text)
    if root is None:
        return text
    rest = _ITEM.sub(lambda m: "." + (m[1] or m[2] or m[3]), text[root.end() :]).strip(".")
    if root[1] == "args" and rest:
        return f"argument {rest}"
    return ".".join(w for w in ("" if root[1] in _NOT_THEIRS else root[1], rest) if w)


@lru_cache(maxsize=4096)
def innermost(trace: str) -> tuple[str, int, str]:
    """File, line and text of the innermost frame that is not Deuteron's own."""
    for m in reversed(list(TRACEBACK_FRAME.finditer(trace))):
        file, number, code = m.groups()
        if not file.startswith(f"{FOLDER}{os.sep}"):
            return file, int(number), one_line((code or "").strip())
    return "", 0, ""


def place_of(node: fx.Node) -> Place:
    """Of a node of the forward, or of the forward's operation whose gradient it is part of."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    module, kind = "", ""
    for entry in stack.values():
        if isinstance(entry, (tuple, list)) and len(entry) == 2:
            module = source_name(str(entry[0]))
            kind = getattr(entry[1], "__name__", str(entry[1]).rpartition(".")[2])
    return Place(module, kind, *innermost(node.meta.get("stack_trace") or ""))


def op_name(target: object) -> str:
    """``aten.native_layer_norm.default`` -> ``native_layer_norm``."""
    text = str(target)
    if text.startswith("<built-in function "):
        return text[len("<built-in function ") : -1]
    parts = text.split(".")
    return parts[1] if len(parts) > 1 and parts[0] in ("aten", "prims") else text


def together(words: Iterable[str]) -> str:
    """Module paths that differ in numbers only as one: ``layers.*.up``."""
    groups: dict[str, list[str]] = {}
    for w in words:
        groups.setdefault(re.sub(r"(?<![^.])\d+(?![^.])", "*", w), []).append(w)
    return ", ".join(
        shape if len(set(members)) > 1 else members[0] for shape, members in groups.items()
    )


__all__ = ["Place", "innermost", "op_name", "place_of", "source_name", "together"]
