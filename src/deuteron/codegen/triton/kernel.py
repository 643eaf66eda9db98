"""What generating a Triton kernel gives: its text, and what its build and launch need.

In: text, arguments, configurations. Out: `TritonKernel`, of plain values: nothing here needs a GPU,
Triton or torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from deuteron.ir.index import Sym

# A constexpr: whether all tensors' addresses are multiples of 16.
ALIGNED_CONSTEXPR = "ALIGNED"


@dataclass(frozen=True)
class Config:
    """Values of the constexprs, and launch parameters."""

    constexprs: tuple[tuple[str, int], ...]
    num_warps: int
    num_stages: int = 1
    registers: int = 0  # of a thread at most; 0: the compiler's choice


class Box(NamedTuple):
    """A tensor as the copy engine takes it: the tensor's number among the kernel's, bytes from its
    address, and for each dimension, the last one contiguous, elements, elements from one place to
    the next, and elements of a block."""

    tensor: int
    offset: int
    extents: tuple[int, ...]
    strides: tuple[int, ...]
    block: tuple[int, ...]


@dataclass(frozen=True)
class TritonKernel:
    """A kernel's source and launch description.

    args         ("tensor", name), ("size", Sym) or ("flags", ""), in the order of `params`, their
                 names in the function; for the flags see `codegen.triton.exchange`. Last ("box",
                 "") for each of `boxes`, which the variant for addresses that are not aligned has
                 not
    types        Triton types of `params` ("*fp32", "i32"); sizes are "i64" with 64-bit indices
    aligned      params that may be declared divisible by 16 (pointers in bytes): all pointers, and
                 sizes whose hint is. Who launches checks it, and builds without the attribute where
                 it does not hold
    grid_source  Python expression over names of sizes and of constexprs; number of programs, 0
                 where there is nothing to do
    wide_source  Python expression over names of sizes: whether 32-bit indices overflow. None where
                 the sizes are known
    configs      candidates; the first is the heuristic choice
    flag_count_source
                 Python expression over names of sizes and of constexprs; flags by which programs of
                 a scan tell one another results, on one stream; None where the kernel has none, or
                 those of cooperative rows only
    programs_per_row
                 programs that share a row and must run at the same time. Where there are more than
                 one, any multiple of it is a valid number of programs, the grid's is the most
    cluster      whether the programs of a row are a cluster, with `CLUSTER_BYTES` more shared
                 memory
    """

    name: str
    source: str
    args: tuple[tuple[str, str | Sym], ...]
    params: tuple[str, ...]
    types: tuple[str, ...]
    constexprs: tuple[str, ...]
    configs: tuple[Config, ...]
    grid_source: str
    aligned: tuple[str, ...]
    wide_source: str | None = None
    flag_count_source: str | None = None
    debug: bool = False  # build with debug=True (and sanitize_overflow=False): it asserts
    programs_per_row: int = 1
    cluster: bool = False
    fp_fusion: bool = False  # eager rounds after each multiplication, and so does the kernel
    boxes: tuple[Box, ...] = ()

    def signature(self, wide: bool = False, aligned: bool = True) -> dict[str, str]:
        """Parameter -> Triton type, constexprs included; `wide` for sizes that make 32-bit indices
        overflow.
        """
        types = ["i64" if wide and t == "i32" else t for t in self.types]
        if self.boxes and not aligned:
            types[-len(self.boxes) :] = ["constexpr"] * len(self.boxes)
        return dict(zip(self.params, types, strict=True)) | dict.fromkeys(
            self.constexprs, "constexpr"
        )

    def constants(
        self, config: Config, wide: bool = False, aligned: bool = True
    ) -> dict[str, int | None]:
        """Constexpr -> value; `aligned`: whether all `aligned` params are multiples of 16."""
        flags = {"INDEX_BITS": 64 if wide else 32, ALIGNED_CONSTEXPR: int(aligned)}
        own = {n: value for n, value in flags.items() if n in self.constexprs}
        absent = self.params[len(self.params) - len(self.boxes) :] if not aligned else ()
        return dict(config.constexprs) | own | dict.fromkeys(absent)

    def grid(self, config: Config, sizes: Mapping[str, int]) -> int:
        """Number of programs for these sizes (by symbol name)."""
        return _evaluated(self.grid_source, config, sizes)

    def flag_count(self, sizes: Mapping[str, int]) -> int:
        """Flags that a launch needs for these sizes, in any configuration."""
        if self.flag_count_source is None:
            return 0
        return max(_evaluated(self.flag_count_source, c, sizes) for c in self.configs)

    def is_wide(self, sizes: Mapping[str, int]) -> bool:
        """Whether these sizes need the 64-bit variant."""
        return self.wide_source is not None and bool(
            eval(self.wide_source, {"min": min, "max": max}, dict(sizes))
        )


def _evaluated(source: str, config: Config, sizes: Mapping[str, int]) -> int:
    names = {**sizes, **dict(config.constexprs)}
    return int(eval(source, {"min": min, "max": max}, names))


__all__ = ["ALIGNED_CONSTEXPR", "Box", "Config", "TritonKernel"]
