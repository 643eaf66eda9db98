"""Loading: the emitted module's text and the built kernels become a callable.

In: `codegen.assemble.EmittedModule`, the C++ unit's build, what launches GPU kernels. Out:
``call``, which takes the graph's inputs as a list, clears it, and returns its outputs.
"""

from __future__ import annotations

import ctypes
import linecache
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import CodeType
from typing import Any

from deuteron.codegen.assemble import EmittedModule
from deuteron.runtime import build_cpp
from deuteron.runtime.support import AccessError, DivisionByZero, IndexOutOfRange

Call = Callable[[list[Any]], Sequence[Any]]


def load(
    emitted: EmittedModule,
    library: build_cpp.Build | None,
    extra: Mapping[str, Any],
    code: CodeType,
) -> Call:
    """The callable of a graph. `extra`: what launches GPU kernels, by the names of the module's
    sequences, and what else it uses by name; `code`: the module's text, compiled."""
    path = code.co_filename
    names: dict[str, Any] = {"__name__": "deuteron_graph", "__file__": path}
    # Tracebacks show the emitted lines although there may be no such file.
    linecache.cache[path] = (len(emitted.text), None, emitted.text.splitlines(True), path)
    exec(code, names)
    names.update(emitted.objects)
    names.update(extra)
    if library is not None:
        bind(names, emitted.launch_groups, library.result())
    call: Call = names["call"]
    call._boxed_call = True  # type: ignore[attr-defined]  # what AOTAutograd asks for
    weakref.finalize(call, linecache.cache.pop, path, None)
    return call


def bind(names: dict[str, Any], launch_groups: Iterable[str], lib: ctypes.CDLL) -> None:
    """Gives a module its C++ functions."""
    for name in launch_groups:
        function = getattr(lib, name)
        function.restype = None
        names[name] = function
    check_accesses = access_checker(lib)
    if check_accesses is not None:
        names["check_accesses"] = check_accesses
    try:
        flag = ctypes.c_int.in_dll(lib, "cpp_index_error")
    except ValueError:
        return

    def check_indices(where: str) -> None:
        error, flag.value = flag.value, 0
        if error == 2:
            raise DivisionByZero("ZeroDivisionError: a whole number is divided by 0", where=where)
        if error:
            raise IndexOutOfRange(
                "index out of range: an index that the program loads from a tensor",
                hint="eager raises here too; check the tensor of indices",
                where=where,
            )

    names["check_indices"] = check_indices


class _BoundsError(ctypes.Structure):
    """`codegen.cpp.bounds.BOUNDS_ERROR`."""

    _fields_ = (("taken", ctypes.c_int), ("text", ctypes.c_char * 508))


def access_checker(lib: ctypes.CDLL) -> Callable[[], None] | None:
    """What raises for an access outside of a tensor; None where a library checks none."""
    try:
        error = _BoundsError.in_dll(lib, "cpp_bounds_error")
    except ValueError:
        return None

    def check_accesses() -> None:
        if error.taken:
            text = error.text.decode(errors="replace")
            error.taken = 0
            raise AccessError(
                text, hint="this is a bug of Deuteron; please report it with the program"
            )

    return check_accesses


__all__ = ["Call", "bind", "load"]
