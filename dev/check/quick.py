"""Triton's interpreter in half the time: what it works out anew for every value is remembered.

For processes started with ``TRITON_INTERPRET=1``; `quicken` changes the interpreter for all that
the process runs. A value's result is the same as before:

* the language is replaced once for a launch, not once more for each call of a device function;
* types of blocks, shapes of values and numpy's dtypes are made once for each.

`by_halves` lets reductions and scans by a function combine halves of a block, as lanes do: sums are
then taken in another order.
"""

from __future__ import annotations

import math
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy


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


def by_halves() -> None:
    """Call it beside `quicken`, where results may have another order of the same sums."""
    from triton.runtime import interpreter

    interpreter.ReduceOps.generic_reduce = halved
    interpreter.ScanOps.generic_scan = doubled


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


def halved(self: Any, blocks: Any) -> Any:
    """A reduction by halves, as lanes do it. Triton's own combines numbers pair by pair."""
    axis = self.axis
    parts = [b.handle.data if axis is not None else b.handle.data.ravel() for b in blocks]
    at, kinds = axis or 0, [b.dtype for b in blocks]
    while (count := parts[0].shape[at]) > 1:
        half = count // 2
        sides = [numpy.split(p, [half, 2 * half], at) for p in parts]
        low, high = ([self.to_tensor(x[k], d) for x, d in zip(sides, kinds)] for k in (0, 1))
        both = self.combine_fn.fn(*low, *high)
        both = both if isinstance(both, tuple) else (both,)
        parts = [
            numpy.concatenate([b.handle.data, x[2]], at) for b, x in zip(both, sides, strict=True)
        ]
    if axis is None:
        shape = (1,) * len(blocks[0].shape) if self.keep_dims else ()
        parts = [p.reshape(shape) for p in parts]
    elif not self.keep_dims:
        parts = [p.squeeze(axis) for p in parts]
    return [self.to_tensor(p, d) for p, d in zip(parts, kinds, strict=True)]


def doubled(self: Any, blocks: Any) -> list[Any]:
    """A scan by steps of 1, 2, 4, ... elements, as lanes do it. Triton's own combines numbers pair
    by pair."""
    kinds, parts = [b.dtype for b in blocks], [b.handle.data for b in blocks]
    count, step = parts[0].shape[self.axis], 1
    places = numpy.arange(count).reshape(
        [-1 if k == self.axis else 1 for k in range(parts[0].ndim)]
    )
    while step < count:
        before = [numpy.roll(p, step, self.axis) for p in parts]
        sides = [[self.to_tensor(x, d) for x, d in zip(p, kinds)] for p in (before, parts)]
        both = self.combine_fn.fn(*sides[0], *sides[1])
        both = both if isinstance(both, tuple) else (both,)
        parts = [numpy.where(places < step, p, b.handle.data) for p, b in zip(parts, both)]
        step *= 2
    return [self.to_tensor(p, d) for p, d in zip(parts, kinds)]


__all__ = ["by_halves", "quicken"]
