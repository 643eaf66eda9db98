"""The suites: which programs at which shapes, on a GPU and on a CPU.

A line of a grid is family, dtypes, "fwd" or "train" (forward and backward), shapes by blanks. A
shape that ends in `!` belongs to the short selection of `--quick`. GPU shapes keep an H200 busy for
20 us to 1 ms; CPU shapes take a two-core server tens of milliseconds at most.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator

from dev.bench.cases import Case
from dev.bench.families import FAMILIES

Line = tuple[str, str, str, str]

GPU_SUITES: dict[str, tuple[Line, ...]] = {
    "norms": (
        ("rms_norm", "bf16", "train", "32768x1024! 32768x4096 32768x8192! 16384x16384"),
        ("rms_norm", "bf16", "train", "8192x32768! 4096x65536 2048x131072!"),
        ("layer_norm", "bf16", "train", "32768x1024! 32768x4096 32768x8192! 16384x16384"),
        ("layer_norm", "bf16", "train", "8192x32768! 4096x65536 2048x131072! 262144x256!"),
        ("layer_norm", "bf16", "train", "4096x65535 64x131072"),
        ("layer_norm", "fp32", "train", "32768x2048! 65536x768"),
        ("layer_norm", "bf16", "fwd", "32768x8192! 262144x128 2048x131072"),
        ("layer_norm", "fp32", "fwd", "16384x4096 4096x65535!"),
        ("rms_norm", "bf16", "fwd", "32768x8192 4x4096x32x128!"),
        ("rms_norm_written", "bf16", "train", "32768x8192!"),
        ("add_rms_norm", "bf16", "train", "16384x8192!"),
        ("layer_norm_gelu", "bf16", "train", "32768x4096"),
        ("modulate", "bf16", "train", "64x1024x1152!"),
        ("normalize", "fp32", "train", "262144x256!"),
        ("batch_norm", "bf16", "train", "64x256x56x56!"),
        ("batch_norm", "fp32", "train", "64x64x112x112"),
        ("batch_norm", "bf16", "fwd", "64x256x56x56"),
        ("batch_norm_relu_add", "bf16", "train", "64x256x56x56!"),
        ("batch_norm_eval", "bf16", "fwd", "64x256x56x56"),
        ("group_norm_silu", "bf16", "train", "16x512x64x64!"),
        ("group_norm_silu", "bf16", "fwd", "16x512x64x64"),
        ("instance_norm", "fp32", "train", "16x64x256x256!"),
        ("rms_norm_fp8_rows", "bf16", "fwd", "32768x4096!"),
        ("rms_norm_fp8_blocks", "bf16", "fwd", "32768x4096!"),
    ),
    "losses": (
        ("cross_entropy", "bf16", "train", "4096x128256! 8192x50257 65536x1000! 262144x128"),
        ("cross_entropy", "fp32", "train", "8192x32000!"),
        ("cross_entropy", "bf16", "fwd", "4096x128256!"),
        ("cross_entropy_smooth", "bf16", "train", "8192x32000!"),
        ("cross_entropy_rows", "fp32", "train", "8192x32000"),
        ("cross_entropy_z", "bf16", "train", "4096x128256!"),
        ("cross_entropy_soft", "bf16", "train", "8192x32000!"),
        ("kl_divergence", "bf16", "train", "8192x32000!"),
        ("log_softmax", "bf16", "train", "8192x32768!"),
        ("entropy", "bf16", "train", "4096x128256"),
        ("binary_cross_entropy", "bf16", "train", "32768x4096!"),
        ("focal", "bf16", "train", "32768x4096"),
        ("mean_square", "bf16", "train", "67108864!"),
        ("smooth_l1", "fp32", "train", "33554432"),
        ("cosine", "bf16", "train", "131072x768!"),
    ),
    "reductions": (
        ("softmax", "bf16", "fwd", "32768x8192! 8192x32768! 2048x131072! 1048576x64!"),
        ("softmax", "bf16", "fwd", "4096x65535! 16x4194304!"),
        ("softmax", "fp32", "fwd", "16384x8192! 1048576x64"),
        ("softmax", "bf16", "train", "32768x8192! 8192x32768"),
        ("softmax_outer", "bf16", "fwd", "8192x16384!"),
        ("softmax_outer", "fp32", "train", "4096x16384"),
        ("softmax_middle", "bf16", "train", "64x1024x2048!"),
        ("softmax_masked", "bf16", "train", "16x16x1024x1024!"),
        ("softmax_causal", "bf16", "train", "8x16x2048x2048!"),
        ("sum_rows", "bf16", "fwd", "16x4194304! 1048576x64! 32768x8192"),
        ("sum_rows", "fp32", "fwd", "65536x2048"),
        ("sum_columns", "bf16", "fwd", "262144x1024! 32768x8192"),
        ("sum_columns", "fp32", "fwd", "4096x65535"),
        ("sum_all", "bf16", "fwd", "268435456!"),
        ("sum_rows_and_columns", "bf16", "fwd", "32768x8192!"),
        ("bias_grad", "bf16", "fwd", "32768x4096!"),
        ("channel_sums", "bf16", "fwd", "64x256x56x56!"),
        ("variance", "bf16", "fwd", "16x4194304! 262144x512"),
        ("variance", "fp32", "train", "16384x4096"),
        ("standardize", "fp32", "fwd", "32768x4096!"),
        ("logsumexp", "bf16", "fwd", "4096x65535!"),
        ("maximum", "bf16", "fwd", "262144x1024"),
        ("argmax", "bf16", "fwd", "4096x128256!"),
        ("quantize_rows", "bf16", "fwd", "32768x8192!"),
        ("cumsum", "bf16", "fwd", "32768x4096!"),
        ("cumsum", "fp32", "fwd", "64x1048576!"),
        ("cumsum_outer", "fp32", "fwd", "4096x16384!"),
        ("top_p", "fp32", "fwd", "4096x32000"),
    ),
    "layout": (
        ("cast_transpose", "fp32", "fwd", "16384x8192!"),
        ("transpose", "bf16", "fwd", "16384x16384!"),
        ("cast_and_transpose_fp8", "bf16", "fwd", "16384x8192!"),
        ("transpose_and_sum", "bf16", "fwd", "16384x8192!"),
        ("channels_last_relu", "bf16", "fwd", "64x256x56x56!"),
        ("channels_last_relu", "fp32", "train", "64x256x56x56"),
        ("heads", "bf16", "train", "8x4096x32x128!"),
        ("pad_silu", "bf16", "train", "64x64x112x112!"),
        ("slice_multiply", "bf16", "train", "32768x8192!"),
        ("cat_gelu", "bf16", "train", "32768x2048!"),
        ("rope", "bf16", "fwd", "4x32x4096x128!"),
        ("rope", "bf16", "train", "4x32x4096x128"),
        ("windows", "bf16", "train", "32x64x64x384!"),
        ("pixel_shuffle", "bf16", "fwd", "16x256x128x128"),
        ("upsample", "bf16", "train", "16x128x64x64!"),
        ("upsample_bilinear", "fp32", "fwd", "16x128x64x64"),
        ("max_pool", "bf16", "train", "64x64x112x112!"),
        ("max_pool_forward", "bf16", "fwd", "64x64x112x112"),
        ("avg_pool", "bf16", "train", "64x64x112x112!"),
        ("adaptive_pool", "bf16", "train", "64x512x56x56"),
        ("embedding", "bf16", "train", "50257x768x32768!"),
        ("embedding_layer_norm", "bf16", "train", "50257x768x32768"),
        ("scatter_add", "fp32", "fwd", "65536x128x524288!"),
        ("gather_rows", "bf16", "fwd", "131072x1024x131072!"),
        ("sliding_windows", "fp32", "fwd", "512x16384!"),
        ("repeat_heads", "bf16", "train", "4x8x4096x128"),
    ),
}

CPU_SUITES: dict[str, tuple[Line, ...]] = {
    "norms": (
        ("rms_norm", "fp32", "train", "8192x1024!"),
        ("rms_norm", "bf16", "train", "8192x1024"),
        ("layer_norm", "fp32", "train", "8192x1024! 64x65536"),
        ("layer_norm", "fp32", "fwd", "4096x2048"),
        ("layer_norm", "bf16", "fwd", "4096x2048!"),
        ("add_rms_norm", "fp32", "train", "4096x1024"),
        ("layer_norm_gelu", "fp32", "fwd", "4096x1024"),
        ("batch_norm", "fp32", "train", "16x64x56x56!"),
        ("batch_norm_relu_add", "fp32", "train", "16x64x56x56"),
        ("group_norm_silu", "fp32", "train", "8x128x32x32!"),
        ("instance_norm", "fp32", "fwd", "8x32x128x128"),
        ("rms_norm_fp8_rows", "fp32", "fwd", "4096x1024"),
    ),
    "losses": (
        ("cross_entropy", "fp32", "train", "512x32000! 8192x1000"),
        ("cross_entropy_smooth", "fp32", "train", "512x32000"),
        ("kl_divergence", "fp32", "train", "512x16000!"),
        ("log_softmax", "fp32", "train", "2048x2048"),
        ("binary_cross_entropy", "fp32", "train", "4096x1024"),
        ("mean_square", "fp32", "train", "8388608!"),
        ("cosine", "fp32", "train", "8192x768"),
    ),
    "reductions": (
        ("softmax", "fp32", "fwd", "4096x2048! 128x65536! 131072x64"),
        ("softmax", "bf16", "fwd", "4096x2048"),
        ("softmax", "fp32", "train", "4096x1024"),
        ("softmax_outer", "fp32", "fwd", "1024x4096!"),
        ("softmax_masked", "fp32", "train", "4x8x256x256"),
        ("sum_rows", "fp32", "fwd", "16x1048576! 262144x64"),
        ("sum_columns", "fp32", "fwd", "16384x1024!"),
        ("sum_rows_and_columns", "fp32", "fwd", "8192x1024"),
        ("variance", "fp32", "fwd", "8192x1024"),
        ("logsumexp", "fp32", "fwd", "2048x4095!"),
        ("argmax", "fp32", "fwd", "512x32000"),
        ("quantize_rows", "fp32", "fwd", "4096x2048"),
        ("cumsum", "fp32", "fwd", "4096x2048!"),
    ),
    "layout": (
        ("cast_transpose", "fp32", "fwd", "2048x4096!"),
        ("transpose_and_sum", "fp32", "fwd", "2048x4096"),
        ("channels_last_relu", "fp32", "fwd", "16x64x56x56"),
        ("pad_silu", "fp32", "fwd", "16x64x56x56"),
        ("slice_multiply", "fp32", "train", "4096x2048!"),
        ("cat_gelu", "fp32", "fwd", "4096x512"),
        ("rope", "fp32", "fwd", "2x16x1024x128!"),
        ("windows", "fp32", "fwd", "8x32x32x384"),
        ("upsample_bilinear", "fp32", "fwd", "4x64x64x64"),
        ("max_pool", "fp32", "train", "16x64x56x56!"),
        ("avg_pool", "fp32", "train", "16x64x56x56"),
        ("embedding", "fp32", "train", "30522x256x4096!"),
        ("embedding_layer_norm", "fp32", "train", "30522x256x4096"),
        ("scatter_add", "fp32", "fwd", "16384x64x65536"),
    ),
}

SUITES = ("seeds", "norms", "losses", "reductions", "layout", "launch", "models")
MEMORY_BOUND = ("norms", "losses", "reductions", "layout")


def grid(suite: str, lines: tuple[Line, ...]) -> Iterator[Case]:
    for name, dtypes, direction, shapes in lines:
        for dtype in dtypes.split():
            for text in shapes.split():
                plain = text.removesuffix("!")
                shape = tuple(map(int, plain.split("x")))
                yield Case(
                    suite,
                    f"{name} {direction} {dtype} {plain}",
                    dtype,
                    direction == "train",
                    functools.partial(FAMILIES[name], shape, dtype),
                    text.endswith("!"),
                )


def cases(suite: str, device: str) -> list[Case]:
    """All cases of a suite on "cpu" or "cuda"."""
    if suite == "seeds":
        from dev.bench.seeds import seeds

        return seeds(device)
    if suite in ("launch", "models"):
        from dev.bench import whole

        return whole.launch(device) if suite == "launch" else whole.models(device)
    return list(grid(suite, (GPU_SUITES if device == "cuda" else CPU_SUITES)[suite]))


def select_cases(
    suites: tuple[str, ...], device: str, dtypes: tuple[str, ...], only: str, quick: bool
) -> list[Case]:
    """The cases of the suites with one of `dtypes` (none: all) and a name that `only` matches."""
    return [
        c
        for suite in suites
        for c in cases(suite, device)
        if (not dtypes or c.dtype in dtypes)
        and re.search(only, f"{suite} {c.name}")
        and (c.quick or not quick)
    ]
