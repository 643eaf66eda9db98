"""The self-check: each kernel's results against the reference executor, on the same inputs.

In: kernels as scheduled and as generated. Out: `Watcher.watch`, which the emitted module calls
before each launch and whose result it calls after it. The first wrong kernel raises `VerifyError`
and leaves a folder from which it runs alone.

How much a result may differ is found out, not fixed: floating inputs are moved by a unit in the
last place, and what that does to the reference's results is what rounding may do to the kernel's.
"""

from __future__ import annotations

import json
import shlex
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deuteron.base.errors import VerifyError
from deuteron.base.options import Options
from deuteron.codegen.assemble import Generated, triton_fields
from deuteron.codegen.cpp.kernels import CppKernel, translation_unit
from deuteron.schedule.kernel import Kernel
from deuteron.schedule.printer import kernel_lines
from deuteron.schedule.reference import run_kernel

# Relative errors that are always allowed, in units in the last place: vector functions are within
# 4 ulp, and sums are taken in another order.
ULPS = 64
# The reference's own change under inputs that moved by an ulp may be exceeded this many times.
MARGIN = 8.0
HALVES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Difference:
    """Where a result is wrong, in words and numbers."""

    tensor: str
    wrong: int
    total: int
    at: tuple[int, ...]
    got: Any
    want: Any

    def __str__(self) -> str:
        return (
            f"{self.tensor}{list(self.at)} is {self.got}, the reference says {self.want}; "
            f"{self.wrong} of {self.total} elements differ"
        )


def copy(t: Tensor) -> Tensor:
    """A copy with the same strides, as far as the elements reach."""
    out = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device)
    return out.copy_(t) if 0 not in t.stride() or t.numel() < 2 else t.clone()


def moved(t: Tensor, seed: int) -> Tensor:
    """Floating elements moved by up to a unit in the last place, each its own way."""
    if not t.dtype.is_floating_point:
        return copy(t)
    made = torch.Generator().manual_seed(seed)
    way = torch.randint(-1, 2, t.shape, generator=made).double().to(t.device)
    out = copy(t)
    return out.copy_(t.double() * (1.0 + torch.finfo(t.dtype).eps * way))


def compare(name: str, got: Tensor, want: Tensor, other: Tensor) -> Difference | None:
    """How `got` is not `want`; `other` is what moved inputs make of it."""
    if got.numel() == 0:
        return None
    if not want.dtype.is_floating_point:
        bad = got != want
        spare = int((other != want).sum())  # decided by rounding
    else:
        a, b, c = got.double(), want.double(), other.double()
        eps = torch.finfo(want.dtype).eps
        finite = b.isfinite() & c.isfinite()
        scale = float(b[finite].abs().mean()) if bool(finite.any()) else 0.0
        noise = float((c - b)[finite].abs().max()) if bool(finite.any()) else 0.0
        ulps = 2 if want.dtype in HALVES else ULPS
        allowed = ulps * eps * (b.abs() + scale) + MARGIN * noise
        bad = ~((a - b).abs() <= allowed) & (a != b) & ~(a.isnan() & b.isnan())
        spare = int((b.isfinite() != c.isfinite()).sum())
    wrong = int(bad.sum())
    if wrong <= spare:
        return None
    at = tuple(int(i) for i in bad.nonzero()[0])
    return Difference(name, wrong, got.numel(), at, got[at].item(), want[at].item())


class Watcher:
    """The kernels of one graph."""

    def __init__(
        self, kernels: Sequence[Kernel], generated: Mapping[str, Generated], options: Options
    ) -> None:
        self.kernels = {k.name: k for k in kernels}
        self.generated, self.options = generated, options

    def watch(
        self, name: str, tensors: dict[str, Tensor], sizes: dict[str, int]
    ) -> Callable[[], None]:
        """Keeps a kernel's operands; the result, called after it ran, compares."""
        kernel = self.kernels[name]
        given = {n: copy(t) for n, t in tensors.items()}

        def check() -> None:
            want = {n: copy(t) for n, t in given.items()}
            other = {n: moved(t, seed) for seed, (n, t) in enumerate(given.items())}
            try:
                run_kernel(kernel, want, sizes)
                run_kernel(kernel, other, sizes)
            except IndexError:
                return  # the program's own indices are out of range; it raises by itself
            for n, _ in kernel.writes:
                found = compare(n, tensors[n], want[n], other[n])
                if found is not None:
                    self.fail(kernel, found, given, want, sizes)

        return check

    def fail(
        self,
        kernel: Kernel,
        found: Difference,
        given: dict[str, Tensor],
        want: dict[str, Tensor],
        sizes: dict[str, int],
    ) -> None:
        folder = self.folder(kernel.name)
        generated = self.generated[kernel.name]
        save(folder, kernel, generated, given, want, sizes)
        where = next((o.line for o in kernel.origins if o.line), "")
        command = f"{shlex.quote(sys.executable)} -m deuteron.runtime.alone {folder}"
        raise VerifyError(
            f"kernel {generated.name} gives a wrong result: {found}",
            hint=f"its source and inputs are in {folder}; alone: {command}",
            where=where,
            invariant="a kernel's results are the reference executor's",
            node=kernel.name,
            guilty="generate",
        )

    def folder(self, name: str) -> Path:
        if self.options.debug_dir is None:
            return Path(tempfile.mkdtemp(prefix="deuteron-wrong-"))
        root = Path(self.options.debug_dir)
        root.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=f"wrong_{name[:60]}_", dir=root))


def save(
    folder: Path,
    kernel: Kernel,
    generated: Generated,
    given: dict[str, Tensor],
    want: dict[str, Tensor],
    sizes: dict[str, int],
) -> None:
    """What `alone` needs to run the kernel by itself and compare."""
    written = [n for n, _ in kernel.writes]
    torch.save(
        {"given": given, "want": {n: want[n] for n in written}},
        folder / "tensors.pt",
    )
    (folder / "kernel.txt").write_text("\n".join(kernel_lines(kernel)) + "\n")
    about: dict[str, Any] = {"sizes": sizes, "device": kernel.device}
    if isinstance(generated, CppKernel):
        (folder / "kernel.cpp").write_text(translation_unit([generated]))
        about |= {
            "name": generated.name,
            "args": [n for _, n in generated.args],
            "symbols": [s.name for s in generated.sizes],
        }
    else:
        (folder / "kernel.py").write_text(generated.source)
        about |= {"triton": triton_fields(generated)}
    (folder / "about.json").write_text(json.dumps(about, indent=1))


__all__ = ["Difference", "Watcher", "compare", "moved"]
