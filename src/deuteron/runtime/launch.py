"""Loading: the emitted module's text and the built kernels become a callable.

In: `codegen.module.Emitted`, the C++ unit's build, the Triton kernels. Out: ``call``, which takes
the graph's inputs as a list, clears it, and returns its outputs.
"""

from __future__ import annotations

import ctypes
import linecache
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import CodeType
from typing import Any

from deuteron.codegen.module import Emitted
from deuteron.runtime import build_cpp
from deuteron.runtime.support import IndexOutOfRange

Call = Callable[[list[Any]], Sequence[Any]]


def load(
    emitted: Emitted,
    library: Future[Path] | None,
    launchers: Mapping[str, Any],
    where: Mapping[str, str],
    path: str,
) -> Call:
    """The callable of a graph. `where`: segment -> the user's lines whose indices it checks."""
    names: dict[str, Any] = {"__name__": "deuteron_graph", "__file__": path}
    names.update(emitted.objects)
    names.update(launchers)
    code: CodeType = compile(emitted.text, path, "exec")
    # Tracebacks show the emitted lines although there may be no such file.
    linecache.cache[path] = (len(emitted.text), None, emitted.text.splitlines(True), path)
    exec(code, names)
    if library is not None:
        bind(names, emitted, build_cpp.load(library.result()), where)
    call: Call = names["call"]
    return call


def bind(
    names: dict[str, Any], emitted: Emitted, lib: ctypes.CDLL, where: Mapping[str, str]
) -> None:
    """Gives the module its C++ functions."""
    for line in emitted.segments.splitlines():
        if line.startswith('extern "C"'):
            name = line.split("(")[0].split()[-1]
            function = getattr(lib, name)
            function.restype = None
            names[name] = function
    try:
        flag = ctypes.c_int.in_dll(lib, "cpp_index_error")
    except ValueError:
        return

    def check_indices(segment: str) -> None:
        if flag.value:
            flag.value = 0
            raise IndexOutOfRange(
                "an index that the program loads is out of range",
                hint="eager raises here too; check the tensor of indices",
                where=where.get(segment, ""),
            )

    names["check_indices"] = check_indices


__all__ = ["Call", "load"]
