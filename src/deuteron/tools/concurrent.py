"""Triton's interpreter with all programs of a launch at once, where it would run one after the
other: for kernels whose programs wait for one another.

In: a function of a kernel (`tools.interpret.loaded`), the number of programs, its arguments. Each
program is a thread; they share the interpreter, which tells by the thread which program it runs.
"""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from deuteron.base.errors import DeuteronError

# Seconds after which a program is taken to wait for what never comes.
LIMIT = 120.0


def together(kernel: Any, grid: int, *args: Any, **constants: Any) -> None:
    """Launches `kernel` with a thread for each of `grid` programs. What one of them raises is
    raised; so is DeuteronError where one waits for ever."""
    from triton.runtime import interpreter

    here, failures = threading.local(), list[Exception]()
    threads: list[threading.Thread] = []

    def start(found: dict[str, Any]) -> None:
        index = builder.grid_idx

        def body() -> None:
            here.index = index
            try:
                function(**found)
            except Exception as e:  # noqa: BLE001 - raised below
                failures.append(e)

        threads.append(threading.Thread(target=body, daemon=True))
        threads[-1].start()
        if len(threads) == grid:
            for t in threads:
                t.join(LIMIT)

    builder, function = interpreter.interpreter_builder, kernel.rewrite()
    names = ", ".join(kernel.arg_names)
    scope = function.__globals__
    shared = scope | {"start_program": start}
    exec(f"def started({names}): start_program(dict(locals()))", shared)
    shared["started"].__annotations__ = function.__annotations__
    own = property(
        lambda self: getattr(here, "index", self.__dict__["index"]),
        lambda self, index: self.__dict__.__setitem__("index", index),
    )
    tl = interpreter.tl
    language = SimpleNamespace(__globals__={"tl": tl, "core": tl.core})
    scope_of_all = interpreter._patch_lang(language)
    # Each call of a device function would replace Triton's language and put it back.
    unchanged = patch.object(interpreter, "_patch_lang", lambda f: interpreter._LangPatchScope())
    try:
        with unchanged, patch.object(type(builder), "grid_idx", own, create=True):
            launch = interpreter.GridExecutor(shared["started"], kernel.arg_names, (grid,))
            launch(*args, **constants)
    finally:
        scope_of_all.restore()
    if failures:
        raise failures[0]
    if any(t.is_alive() for t in threads):
        raise DeuteronError("a program that is interpreted waits for ever", hint="report it")


__all__ = ["together"]
