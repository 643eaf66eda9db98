"""Triton's interpreter with all programs of a launch at once, where it would run one after the
other: for kernels whose programs wait for one another.

In: a function of a kernel (`dev.check.interpret.loaded`), the number of programs, its arguments.
Each program is a thread; they share the interpreter, which tells by the thread which program it
runs.
"""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy

from deuteron.base.errors import DeuteronError

# Seconds after which programs are taken to wait for what never comes.
LIMIT_SECONDS = 300.0
# Of a program that has read again what it read before: the others, not it, shall have the time.
PAUSE_SECONDS = 1e-3


class _Stopped(Exception):
    """Another program has failed."""


def together(kernel: Any, grid: int, *args: Any, **constants: Any) -> None:
    """Launches `kernel` with a thread for each of `grid` programs. What one of them raises is
    raised, and ends the others; so is DeuteronError where one waits for ever."""
    from triton.runtime import interpreter

    here, failures = threading.local(), list[Exception]()
    threads: list[threading.Thread] = []

    def start(namespace: dict[str, Any]) -> None:
        index = builder.grid_idx

        def body() -> None:
            here.index = index
            try:
                function(**namespace)
            except _Stopped:
                pass
            except Exception as e:  # noqa: BLE001 - raised below
                failures.append(e)

        threads.append(threading.Thread(target=body, daemon=True))
        threads[-1].start()
        if len(threads) == grid:
            end = time.monotonic() + LIMIT_SECONDS
            for t in threads:
                t.join(max(0.0, end - time.monotonic()))
            if any(t.is_alive() for t in threads):
                failures.append(
                    DeuteronError("a program that is interpreted waits for ever", hint="report it")
                )

    def load(pointers: Any, *args: Any) -> Any:
        if failures:
            raise _Stopped
        read = plain_load(pointers, *args)
        now = pointers.data, read.data
        if all(map(numpy.array_equal, now, getattr(here, "read", ((), ())))):
            time.sleep(PAUSE_SECONDS)  # it waits for what another program writes
        here.read = now
        return read

    def rewrite(self: Any) -> Any:
        with lock:  # two threads that parse disturb each other in Python 3.11 (gh-106905)
            return plain_rewrite(self)

    builder, function = interpreter.interpreter_builder, kernel.rewrite()
    plain_load, lock = builder.create_masked_load, threading.Lock()
    plain_rewrite = interpreter.InterpretedFunction.rewrite
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
    stopping = patch.object(builder, "create_masked_load", load)
    in_turn = patch.object(interpreter.InterpretedFunction, "rewrite", rewrite)
    numbered = patch.object(type(builder), "grid_idx", own, create=True)
    try:
        with unchanged, stopping, in_turn, numbered:
            launch = interpreter.GridExecutor(shared["started"], kernel.arg_names, (grid,))
            launch(*args, **constants)
    finally:
        scope_of_all.restore()
    if failures:
        raise failures[0]


__all__ = ["together"]
