"""The scalar functions of generated C++: `prelude*.h`, cut to what a translation unit uses.

In: names of prelude functions (``d_exp``). Out: the text that opens the unit: types, macros and
these functions with everything they mention, in an order that compiles. Nothing of it includes a
header; the whole unit is self-contained text, so it is a sound cache key.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from importlib.resources import files

from deuteron.ir.operations import SCALAR_OPS

# g++ options under which the functions keep their promises (NaN, infinity, signed zeros) and
# vectorise.
CXX_FLAGS = ("-std=gnu++17", "-O3", "-fopenmp", "-fno-math-errno", "-fno-trapping-math")

PRELUDE_FILES = ("prelude.h", "prelude_math.h", "prelude_trig.h", "prelude_special.h")
_HELPER = re.compile(r"^//@ (\w+)\n", re.MULTILINE)
_NAME = re.compile(r"\b[dD]_\w+")


@lru_cache(maxsize=1)
def _helpers() -> dict[str, tuple[str, frozenset[str]]]:
    """Name -> (text without comments, names of the helpers it mentions), in the file's order."""
    folder = files(__package__)
    text = "".join(folder.joinpath(name).read_text(encoding="utf-8") for name in PRELUDE_FILES)
    parts = _HELPER.split(text)
    texts = {}
    for name, text in zip(parts[1::2], parts[2::2], strict=True):
        lines = (
            line.split("  // ")[0].rstrip()
            for line in text.splitlines()
            if not line.startswith("//")
        )
        texts[name] = "\n".join(line for line in lines if line)
    owner = {"D_LIBM2": "D_LIBM"} | {n: n for n in texts}
    return {
        name: (text, frozenset(owner[m] for m in _NAME.findall(text) if m in owner) - {name})
        for name, text in texts.items()
    }


def used_functions(code: str) -> set[str]:
    """The prelude's functions that a piece of generated code mentions."""
    return set(_NAME.findall(code)) & _helpers().keys()


def prelude(used: Iterable[str]) -> str:
    """C++ text that declares the functions `used` (named with their prefix ``d_``).

    KeyError for a name that does not exist.
    """
    helpers = _helpers()
    needed: set[str] = {"base"}
    stack = list(used)
    while stack:
        name = stack.pop()
        if name not in needed:
            needed.add(name)
            stack.extend(helpers[name][1])
    return "\n".join(text for name, (text, _) in helpers.items() if name in needed) + "\n"


# Scalar operations of the IR that the prelude implements as ``d_<name>`` (arithmetic and
# comparisons are C++'s own).
CPP_FUNCTIONS: frozenset[str] = frozenset(n for n in SCALAR_OPS if f"d_{n}" in _helpers())
