"""Kernels between two library calls, called at once.

In: generated kernels, one after the other, and where their tensors are. Out: for the CPU a C++
function that calls them all; for a GPU the `Launches` from which the runtime makes one. Both take
the addresses and the sizes that the kernels need, each once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from deuteron.codegen.cpp.kernels import CppKernel
from deuteron.codegen.triton.generate import TritonKernel
from deuteron.ir.index import Sym

# Address of a tensor: Python text of an address, and what to add to it (a number or the name of
# one) where it lies in a workspace.
Address = tuple[str, str | None]


@dataclass(frozen=True)
class Launches:
    """Consecutive GPU kernels: for each the numbers of its tensors among the addresses of the call,
    and the names of the sizes that the call passes."""

    name: str
    device: str
    kernels: tuple[str, ...]
    operands: tuple[tuple[int, ...], ...]
    sizes: tuple[str, ...]


@dataclass
class LaunchGroup:
    """Consecutive kernels of one device."""

    name: str
    device: str
    kernels: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)  # of its C++ function
    operands: list[tuple[int, ...]] = field(default_factory=list)
    after: list[str] = field(default_factory=list)  # variables to let go when it has run
    index_checked: list[str] = field(default_factory=list)  # kernels that check loaded indices
    checks_accesses: bool = False  # whether kernels check all that they load and store
    pointers: dict[str, int] = field(default_factory=dict)
    numbers: dict[str, int] = field(default_factory=dict)

    def pointer(self, text: str) -> int:
        return self.pointers.setdefault(text, len(self.pointers))

    def number(self, text: str) -> int:
        return self.numbers.setdefault(text, len(self.numbers))

    def cpu(self, name: str, k: CppKernel, tensors: Sequence[Address]) -> None:
        args = []
        for text, offset in tensors:
            base = f"p[{self.pointer(text)}]"
            if offset is None or offset == "0":
                args.append(base)
            elif offset.isdigit():
                args.append(f"(char*){base} + {offset}")
            else:
                args.append(f"(char*){base} + s[{self.number(offset)}]")
        numbers = [f"s[{self.number(s.name)}]" for s in k.sizes]
        z = f"const long long z[] = {{{', '.join(numbers)}}}; " if numbers else ""
        self.kernels.append(name)
        self.lines.append(
            f"  {{ void* q[] = {{{', '.join(args)}}}; {z}cpp_{k.name}(q, {'z' if z else '0'}); }}"
        )
        if k.checks_indices:
            self.index_checked.append(name)
        self.checks_accesses |= k.checks_accesses

    def gpu(self, name: str, k: TritonKernel, tensors: Sequence[Address]) -> None:
        for kind, what in k.args:
            if kind == "size":
                assert isinstance(what, Sym)
                self.number(what.name)
        self.kernels.append(name)
        self.operands.append(
            tuple(
                self.pointer(text if offset in (None, "0") else f"{text} + {offset}")
                for text, offset in tensors
            )
        )

    def function(self, threads: int) -> list[str]:
        """The C++ function. `threads`: how many kernels use, 0 for as many as torch does."""
        before, after = [], []
        if threads:
            before = ["  int usual = omp_get_max_threads();", f"  omp_set_num_threads({threads});"]
            after = ["  omp_set_num_threads(usual);"]
        head = f'extern "C" void {self.name}(void** p, const long long* s) {{'
        return [head, *before, *self.lines, *after, "}"]

    def launches(self) -> Launches:
        return Launches(
            self.name, self.device, tuple(self.kernels), tuple(self.operands), tuple(self.numbers)
        )


OPENMP_DECLARATIONS = 'extern "C" { int omp_get_max_threads(); void omp_set_num_threads(int); }'

__all__ = ["OPENMP_DECLARATIONS", "Address", "Launches", "LaunchGroup"]
