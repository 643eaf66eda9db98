"""Atomic updates that the hardware does not have (generated kernels call them by way of `libm`)."""

# mypy: disable-error-code="no-untyped-def"
# (signatures of device functions are Triton's)

from __future__ import annotations

import triton
import triton.language as tl

from deuteron.codegen.triton.merging import maximum, minimum


@triton.jit
def _bits(x):
    if x.dtype.primitive_bitwidth == 16:
        return x.to(tl.int16, bitcast=True)
    elif x.dtype.primitive_bitwidth == 32:
        return x.to(tl.int32, bitcast=True)
    else:
        return x.to(tl.int64, bitcast=True)


@triton.jit
def atomic_update(base, index, value, mask, KIND: tl.constexpr):
    """``base[index] = combine(base[index], value)`` where `mask`, by compare and swap."""
    place = base + tl.where(mask, index, 0)
    value = value.to(base.dtype.element_ty)
    old = tl.load(place)
    if old.dtype.primitive_bitwidth == 16:
        words = place.to(tl.pointer_type(tl.int16), bitcast=True)
    elif old.dtype.primitive_bitwidth == 32:
        words = place.to(tl.pointer_type(tl.int32), bitcast=True)
    else:
        words = place.to(tl.pointer_type(tl.int64), bitcast=True)
    todo = mask
    while tl.max(todo.to(tl.int32)) > 0:
        if old.dtype.is_floating() and old.dtype.primitive_bitwidth == 16:
            a, b = old.to(tl.float32), value.to(tl.float32)
        else:
            a, b = old, value
        if KIND == "sum":
            new = a + b
        elif KIND == "prod":
            new = a * b
        elif KIND == "max":
            new = maximum(a, b)
        else:
            new = minimum(a, b)
        want = _bits(old)
        seen = tl.atomic_cas(words, want, _bits(tl.where(todo, new.to(old.dtype), old)))
        todo = todo & (seen != want)
        old = seen.to(old.dtype, bitcast=True)
