"""What `python -m dev coverage` runs: PyTorch's own samples of every operator, in several forms.

In: an entry of torch's `op_db`, a dtype, a part. Out: `Case`s: a function of flat tensors, with the
same function in float64. Parts are the columns of the table:

    forward    every sample, as torch gives it
    backward   every sample, inputs require gradients
    inplace    the in-place variant, on inputs of the graph
    method     the method variant
    layouts    the first samples, inputs permuted, with steps, expanded, and without elements
    dynamic    the first samples, all sizes symbolic
    numbers    one compiled function for several samples: sizes and numbers are symbolic
    lists      samples whose numbers, or lists of equal numbers, may be lists of one element
    mixed      tensors of several dtypes, among them what eager refuses
    zeros      the first samples with zeros of both signs, infinities and NaN
    chains     the first samples of half types between pointwise operators

What the parts after `backward` change is in `coverage_forms`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch

from dev.coverage.forms import FORMS, Case, tensors_of

PARTS: tuple[str, ...] = ("forward", "backward", "inplace", "method", "layouts", "dynamic")
PARTS += ("numbers", "lists", "mixed", "zeros", "chains")
DTYPES = ("float32", "float64", "bfloat16", "float16", "int64", "int32", "bool", "complex64")
MORE_DTYPES = ("int16", "int8", "uint8", "complex128")  # where they are asked for
# Samples of the parts that repeat what `forward` has shown.
MAX_SAMPLES = {"inplace": 8, "method": 3, "layouts": 5, "dynamic": 4}
MAX_SAMPLES |= {"numbers": 4, "lists": 4, "mixed": 3, "zeros": 3, "chains": 3}
# Dtypes of parts in which others would show the same.
PARTS_ONLY_FOR = {
    "numbers": ("float32", "int64"),
    "lists": ("float32", "int64"),
    "mixed": ("float32", "float16", "int32"),
    "zeros": ("float32", "bfloat16"),
    "chains": ("bfloat16", "float16"),
}
MAX_ELEMENTS = 1 << 18  # of a sample's tensors in all; larger ones are left out


class Unsuitable(Exception):
    """A sample that is not run, with the reason."""


# Functions that are no operators: torch's capture calls them with fake tensors, whose memory they
# read.
NO_OPERATORS = re.compile(r"^jiterator_")


def entries() -> dict[str, Any]:
    """Name -> entry of `op_db`."""
    from torch.testing._internal.common_methods_invocations import op_db

    out: dict[str, Any] = {}
    for op in op_db:
        name = op.name + (f".{op.variant_test_name}" if op.variant_test_name else "")
        while name in out:
            name += "'"
        out[name] = op
    return out


def applies(op: Any, dtype: torch.dtype, part: str, device: str) -> bool:
    """Whether eager has the part."""
    if dtype not in op.supported_dtypes(device) or NO_OPERATORS.match(op.name):
        return False
    if str(dtype).removeprefix("torch.") not in PARTS_ONLY_FOR.get(part, DTYPES + MORE_DTYPES):
        return False
    if part == "backward":
        return bool(op.supports_autograd) and dtype in op.supported_backward_dtypes(device)
    if part == "inplace":
        return op.inplace_variant is not None
    if part == "method":
        return op.method_variant is not None
    return True


def cases(op: Any, dtype: torch.dtype, part: str, device: str, most: int) -> Iterator[Case]:
    """At most `most` cases (0: all), spread evenly over the samples."""
    samples = list(op.sample_inputs(device, dtype, requires_grad=part == "backward"))
    if part in MAX_SAMPLES:
        samples = samples[: min(MAX_SAMPLES[part], most) if most else 4 * MAX_SAMPLES[part]]
    elif most and len(samples) > most:
        samples = [samples[i * len(samples) // most] for i in range(most)]
    call = {"inplace": op.inplace_variant, "method": op.method_variant}.get(part, op.op)
    assert call is not None
    for k, s in enumerate(samples):
        tree = ([s.input, *s.args], dict(s.kwargs))
        case = Case(f"{part} sample {k}", call, tree, tensors_of(tree))
        if sum(t.numel() for t in case.tensors) > MAX_ELEMENTS:
            continue
        if part in FORMS:
            yield from FORMS[part](case, dtype)
        else:
            yield case


def suitable(case: Case) -> None:
    """Raises `Unsuitable`."""
    for t in case.tensors:
        if t.layout != torch.strided:
            raise Unsuitable(f"sparse input ({t.layout})")
        if t.is_quantized or t.is_nested:
            raise Unsuitable("quantized or nested input")


def matching_names(pattern: str, names: list[str]) -> list[str]:
    """Names that a regular expression finds, in order."""

    wanted = re.compile(pattern)
    return [n for n in names if wanted.search(n)]
