"""Triton's interpreter in half the time: what it works out anew for every value is remembered.

For processes started with ``TRITON_INTERPRET=1``; `quicken` changes the interpreter for all that
the process runs. A value's result is the same as before:

* the language is replaced once for a launch, not once more for each call of a device function;
* types of blocks, shapes of values and numpy's dtypes are made once for each.
"""

from __future__ import annotations

import math
from functools import cache
from types import SimpleNamespace
from typing import Any


@cache
def quicken() -> None:
    from triton.language import core
    from triton.runtime import interpreter

    replace_language = interpreter._patch_lang
    language = SimpleNamespace(__globals__={"tl": interpreter.tl, "core": core})
    interpreter._patch_lang = lambda function: replace_language(language)
    interpreter.InterpretedFunction.__call__ = _called
    interpreter._get_np_dtype = _numpy_dtypes(interpreter._get_np_dtype)
    core.block_type.__init__ = _block_types(core, core.block_type.__init__)
    core.tensor.__init__ = _values(core)


def _called(self: Any, *args: Any, **kwargs: Any) -> Any:
    """A device function, inside a launch."""
    from triton.runtime.errors import InterpreterError

    try:
        return self.rewrite()(*args, **kwargs)
    except Exception as e:
        raise InterpreterError(repr(e)) from e


def _numpy_dtypes(plain: Any) -> Any:
    known: dict[str, Any] = {}

    def of(kind: Any) -> Any:
        name = kind.element_ty.name if kind.is_block() else kind.name
        if name not in known:
            known[name] = plain(kind)
        return known[name]

    return of


def _block_types(core: Any, plain: Any) -> Any:
    known: dict[tuple[Any, ...], dict[str, Any]] = {}

    def init(self: Any, element_ty: Any, shape: Any) -> None:
        if type(element_ty) is not core.dtype:
            plain(self, element_ty, shape)
            return
        key = (element_ty.name, *[getattr(n, "value", n) for n in shape])
        if key not in known:
            plain(self, element_ty, shape)
            known[key] = dict(self.__dict__)
        self.__dict__.update(known[key])

    return init


def _values(core: Any) -> Any:
    known: dict[tuple[int, ...], tuple[Any, Any]] = {}

    def init(self: Any, handle: Any, type: Any) -> None:
        sizes = tuple(type.shape) if type.is_block() else ()
        if sizes not in known:
            shape = core.tuple([core.constexpr(n) for n in sizes])
            known[sizes] = core.constexpr(math.prod(sizes)), shape
        self.numel, self.shape = known[sizes]
        self.handle, self.type, self.dtype = handle, type, type.scalar

    return init


__all__ = ["quicken"]
