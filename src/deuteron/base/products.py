"""How fast a library and generated loops multiply matrices: the figures behind the choice.

In: sizes, dtype and memory order of a product, and the device. Out: microseconds of both. The
tables are data: ``python -m dev.measure.products`` measures them again.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from deuteron.base.device import DeviceSpec

# Multiplications per ns of one core (EPYC with AVX-512, 512 x 1536 in the caches, torch 2.13), by
# how many rows the smaller operand has at least, where the larger one is contiguous along the sum,
# and where it is not.
RATE_ROWS = (1, 2, 4, 8, 32)
Rates = tuple[float, ...]
LIBRARY_RATES: dict[str, tuple[Rates, Rates]] = {
    "f32": ((18.5, 20, 23, 32, 44), (22, 23, 23, 33, 47)),
    "f64": ((9.2, 9.2, 11, 18, 27), (11, 11, 11, 18, 25)),
    "bf16": ((13.8, 27, 54, 87, 166), (13.2, 22, 53, 81, 162)),
    "f16": ((12, 12, 12, 12, 11), (1.2, 1.2, 1.2, 0.3, 0.1)),
}
# At most so many of f32 for each column of a result of few (MKL on the same EPYC, 4096 x 256 by 256
# x 3, 8, 12: 2.0, 5.5, 16; along the sum 6.7, 10, 16), by whether the second operand is contiguous
# along the sum; and nanoseconds of each matrix of a batch (4 x 16 by 16 x 16 to 8 x 64 by 64 x 64).
NARROW_RATES, NARROW = (0.7, 1.3), 12
MATRIX_NS = 200.0
# Generated loops: more than a few rows of more than a few columns may go through the caches again
# and again.
GENERATED_RATES: dict[str, tuple[Rates, Rates]] = {
    "f32": ((20, 21, 22, 22, 0.2), (14.5, 20, 20, 20, 0.3)),
    "f64": ((10.8, 12, 12, 12, 0.1), (8.7, 11, 11, 11, 0.1)),
    "bf16": ((21, 21, 21, 21, 0.3), (28, 29, 32, 34, 0.3)),
    "f16": ((9, 9, 9, 9, 0.1), (15, 15, 15, 15, 0.1)),
}
# The least that they reach, with both operands along the sum and otherwise, where each has at most
# SMALL_OPERAND elements and stays in the second cache (Xeon with AVX-512, torch 2.13, 24 x 128 by
# 128 x 48 to 128 x 256 by 256 x 256: medians of ten).
SMALL_OPERAND = 1 << 16
SMALL_RATES = {"f32": (15.0, 24.0), "f64": (8.4, 13.0), "bf16": (6.4, 14.0), "f16": (3.3, 5.9)}
# Nanoseconds that ending a sum takes where its lanes lie along the sum, beyond the share of it in
# SMALL_RATES, which are of sums of 128 (EPYC with AVX-512, f32, 1 M multiplications in the caches:
# sums of 16, 32 and 64 reach 12, 7.4 and 12).
END_NS, USUAL_SUM = 3.5, 128
# What of memory's bandwidth generated loops reach in products of one row whose larger operand is
# not contiguous along the sum: they walk down blocks of its columns, 2 KiB of each row. EPYC, us,
# one row of 2048 by 2048: f32 305 (library 220), f64 1650 (950).
ACROSS_BANDWIDTH = 0.7
# Products up to this many multiplications, and those of up to FEW_ROWS rows or columns, have no
# tile worth sharing: they are loops, or the library's, before anything is fused. The second figure
# is of those whose operands both lie along the sum: loops multiply these as fast (EPYC with
# AVX-512, us, loops and tiles: 4 x 1024 x 256 29 and 19, both along the sum 27 and 37).
SMALL_PRODUCT, FEW_ROWS = 32**3, (3, 8)
# GPUs whose tensor cores multiply bf16, and the least side of what they multiply at once.
TENSOR_CORES_SINCE, MIN_TENSOR_CORE_SIDE = (8, 0), 16
# Nanoseconds of a program of tiles on a CPU beside its arithmetic (EPYC with AVX-512, 4 x 4 by 4 x
# 4 to 24 x 24 by 24 x 24: 42 to 140): many matrices of a few elements are loops.
PROGRAM_NS = 80.0
# A library call's own time, through ATen and with its result's tensor (8 x 8 alone: 1.2 us).
CALL_US, KERNEL_US = 2.5, 0.3
# What it takes longer on several threads, which it uses from so many multiplications on, beside the
# share of each: between other kernels, two threads, twelve products of 0.2 to 0.9 M (EPYC with
# AVX-512: 4 to 9 us, by where its host runs the two; Xeon: 8). MKL: 20 x 20 0.1, 24 x 24 1.5.
TEAM_US, TEAM_SINCE = 6.0, 24**3
# The same of half precision from so many multiplications on, which go to oneDNN (the Xeon: bf16 16
# x 16 2.8 us, 20 x 20 16.4, 64 x 64 16.9; f16 3.6, 15.0, 18.4).
HALF_CALL_US, HALF_CALL_SINCE = 15.0, 16**3
# Bytes per ns of one core where a product fits into the last cache (the same EPYC). What does
# not waits for memory beside its arithmetic (Cascade Lake, 8 of 2048 x 64 by 64 x 2048: 64
# ms, of which 24 computed; 512 long, in the cache: 1.7, of which 1.5).
CACHE_BYTES_PER_NS = 70.0
# On a GPU: what of the f32 units generated loops reach without tensor cores, and what of them the
# library reaches at least. Products of one row are bound by memory on both sides.
GPU_GENERATED_SHARE, GPU_LIBRARY_SHARE = 0.05, 0.5


# The longest axis that a program holds whole: a product that sums over no more may be computed
# block by block inside the loop of another (attention's scores).
MAX_WHOLE = 256


def share_kernels(dtype: str, spec: DeviceSpec) -> bool:
    """Whether products of this dtype may be in one kernel with what surrounds them: f32 on a CPU;
    those of devices whose tensor cores multiply them, or tf32. `schedule.contract` decides where
    they are."""
    if spec.kind == "cpu":
        return dtype == "f32"
    cores = spec.capability is not None and spec.capability >= TENSOR_CORES_SINCE
    return cores and dtype in ("bf16", "f16", "f32")


def computed_again(dtype: str, kind: str) -> bool:
    """Whether products of this dtype on this kind of device ("cpu", "cuda") are so cheap that their
    results may be computed again rather than kept: not exact ones of f32 on a GPU."""
    return dtype != "f32" or kind == "cpu" or tf32()


def tf32() -> bool:
    """Whether the user lets products of f32 on a GPU round their operands; Dynamo guards it."""
    precision = getattr(torch._C, "_get_fp32_precision_getter", None)
    if precision is None:
        return bool(torch.backends.cuda.matmul.allow_tf32)
    return bool(precision("cuda", "matmul") == "tf32")


@dataclass(frozen=True)
class Product:
    """``a[batch, m, k] @ b[batch, k, n]`` at hinted sizes.

    `sides`: whether each operand is contiguous along k. `around`: whether something pointwise would
    share its kernel, which is a kernel and a round trip of the result beside a library call.
    """

    batch: int
    m: int
    k: int
    n: int
    dtype: str
    itemsize: int
    sides: tuple[bool, bool]
    around: bool

    @property
    def along(self) -> bool:
        """Whether the larger operand is contiguous along k."""
        return self.sides[self.n >= self.m]

    @property
    def dots(self) -> bool:
        """Whether both are: loops have no vectors along the result."""
        return all(self.sides)

    @property
    def work(self) -> int:
        return self.batch * self.m * self.k * self.n

    @property
    def result(self) -> int:
        """Bytes of the result."""
        return self.batch * self.m * self.n * self.itemsize

    @property
    def moved(self) -> int:
        """Bytes of the operands and the result."""
        return self.batch * (self.m * self.k + self.k * self.n) * self.itemsize + self.result

    def __str__(self) -> str:
        times = f"{self.batch} of " if self.batch != 1 else ""
        return f"{times}{self.m}x{self.k} by {self.k}x{self.n}"


def rate(table: dict[str, tuple[Rates, Rates]], p: Product, up: bool = False) -> float:
    """Multiplications per ns of one core: those of the next smaller number of rows that was
    measured, or (`up`) of the next larger one."""
    along, across = table.get(p.dtype, table["f32"])
    row, least = along if p.along else across, max(1, min(p.m, p.n))
    if up:
        return next((r for n, r in zip(RATE_ROWS, row, strict=True) if n >= least), row[-1])
    return next(r for n, r in zip(reversed(RATE_ROWS), reversed(row), strict=True) if n <= least)


def memory_us(moved: int, spec: DeviceSpec) -> float:
    """Moving operands and result, in bytes: what a CPU's last cache keeps is there."""
    cached = moved / (CACHE_BYTES_PER_NS * 1e3 * spec.cores)
    return cached if spec.keeps(moved) else spec.memory_us(moved)


def library_us(p: Product, spec: DeviceSpec) -> float:
    """A call of the library, and what else is then a kernel of its own."""
    beside = spec.memory_us(2 * p.result) if p.around else 0.0
    if spec.kind == "cpu":
        each = rate(LIBRARY_RATES, p)
        if p.dtype == "f32" and 1 < p.n < NARROW:
            each = min(each, NARROW_RATES[p.sides[1]] * p.n)
        computed = p.work / (each * 1e3 * spec.cores)
        computed += p.batch * MATRIX_NS / 1e3 / spec.cores if p.batch > 1 else 0.0
        beside += KERNEL_US if p.around else 0.0
        moving = memory_us(p.moved, spec)
        apart = not spec.keeps(p.moved) and min(p.m, p.n) >= RATE_ROWS[-1]
        half = p.dtype in ("bf16", "f16") and p.work > HALF_CALL_SINCE
        team = TEAM_US if spec.cores > 1 and p.work >= TEAM_SINCE else 0.0
        call = HALF_CALL_US if half else CALL_US + team
        return call + beside + (moving + computed if apart else max(moving, computed))
    unit = p.dtype if p.dtype in ("bf16", "f16") else "f64" if p.dtype == "f64" else "f32"
    computed = spec.compute_us(2 * p.work, unit) / GPU_LIBRARY_SHARE
    beside += spec.launch_us if p.around else 0.0
    return spec.launch_us + beside + max(memory_us(p.moved, spec), computed)


def generated_us(p: Product, spec: DeviceSpec) -> float:
    """One kernel, with what surrounds the product in it."""
    if spec.kind == "cpu":
        each = rate(GENERATED_RATES, p, up=True)
        if p.k * max(p.m, p.n) <= SMALL_OPERAND:
            small = SMALL_RATES.get(p.dtype, SMALL_RATES["f32"])[not p.dots]
            if p.dots and 0 < p.k < USUAL_SUM:
                each = small = 1 / (1 / small + END_NS * (1 / p.k - 1 / USUAL_SUM))
            each = max(each, small)
        walked = min(p.m, p.n) == 1 and not p.along and p.work > SMALL_PRODUCT
        moving = memory_us(p.moved, spec) / (ACROSS_BANDWIDTH if walked else 1.0)
        return KERNEL_US + max(moving, p.work / (each * 1e3 * spec.cores))
    vector = min(p.m, p.n) == 1 or p.work <= SMALL_PRODUCT
    reached = 1.0 if vector else GPU_GENERATED_SHARE
    computed = spec.compute_us(2 * p.work, "f64" if p.dtype == "f64" else "f32") / reached
    return spec.launch_us + max(memory_us(p.moved, spec), computed)


__all__ = [
    "FEW_ROWS",
    "GENERATED_RATES",
    "LIBRARY_RATES",
    "MAX_WHOLE",
    "MIN_TENSOR_CORE_SIDE",
    "PROGRAM_NS",
    "SMALL_PRODUCT",
    "Product",
    "computed_again",
    "generated_us",
    "library_us",
    "memory_us",
    "share_kernels",
    "tf32",
]
