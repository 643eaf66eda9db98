"""The suites `models` and `launch`: whole networks, and programs whose cost is that of the call.

They are timed by the wall clock, in which the host counts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from torch import nn

from dev.bench import networks
from dev.bench.cases import Case, Program, Spec
from dev.bench.families import FAMILIES
from dev.bench.seeds import sin_chain


def network(build: Callable[[], nn.Module], inputs: tuple[Spec, ...]) -> Program:
    return Program(_module_runs, inputs, module=build)


def _module_runs(*_: object) -> None:
    raise AssertionError("a network's module runs, not the program's function")


def ids(high: int, *shape: int) -> Spec:
    return Spec(shape, "i64", high=high)


def image(dtype: str, *shape: int, channels_last: bool = False) -> Spec:
    return Spec(shape, dtype, channels_last=channels_last)


def models(device: str) -> list[Case]:
    large, dtype = device == "cuda", "bf16" if device == "cuda" else "fp32"
    b, side = (64, 224) if large else (4, 64)
    vocabulary = 50257 if large else 2000
    tokens = (8, 1024) if large else (4, 256)
    block = (4, 2048, 4096) if large else (2, 256, 256)
    patches = 224 if large else 64
    u = (8, 256, 64) if large else (2, 64, 16)
    clicks, tables, rows = (8192, 26, 100_000) if large else (512, 8, 2000)
    picture = image(dtype, b, 3, side, side, channels_last=True)
    labels = ids(1000, b)
    width = 64 if large else 16
    part = functools.partial
    programs = (
        (
            f"GPT-2 train {tokens[0]}x{tokens[1]}",
            part(networks.gpt2, large, True),
            (ids(vocabulary, *tokens), ids(vocabulary, *tokens)),
        ),
        ("GPT-2 forward 1x128", part(networks.gpt2, large, False), (ids(vocabulary, 1, 128),)),
        ("Llama block train", part(networks.llama, large), (image(dtype, *block),)),
        (
            f"ResNet-18 train {b}",
            part(networks.resnet, (2, 2, 2, 2), False, width),
            (picture, labels),
        ),
        (
            f"ResNet-50 train {b}",
            part(networks.resnet, (3, 4, 6, 3), True, width),
            (picture, labels),
        ),
        (
            f"ViT train {b}",
            part(networks.vit, large),
            (image(dtype, b, 3, patches, patches), labels),
        ),
        (
            f"U-Net forward {u[0]}",
            part(networks.UNet, u[2]),
            (image(dtype, u[0], 3, u[1], u[1]),),
        ),
        (
            f"DLRM train {clicks}",
            part(networks.dlrm, large),
            (image(dtype, clicks, 13), ids(rows, clicks, tables), ids(2, clicks)),
        ),
    )
    return [
        Case(
            "models",
            n,
            dtype,
            "train" in n,
            functools.partial(network, build, inputs),
            True,
            "wall",
        )
        for n, build, inputs in programs
    ]


def launch(device: str) -> list[Case]:
    rows = 32768 if device == "cuda" else 2048
    blocks = functools.partial(network, networks.small_blocks, (Spec((8, 256), "fp32"),))
    norm = functools.partial(FAMILIES["rms_norm"], (rows, 1024), "bf16")
    train = functools.partial(FAMILIES["layer_norm_gelu"], (16, 256), "fp32")
    programs = (
        ("12 blocks forward 8x256", "fp32", False, blocks),
        ("12 blocks train 8x256", "fp32", True, blocks),
        (f"rms_norm train {rows}x1024", "bf16", True, norm),
        ("sin chain 1000", "fp32", False, functools.partial(sin_chain, 1000)),
        ("layer_norm_gelu train 16x256", "fp32", True, train),
    )
    return [Case("launch", n, d, backward, make, True, "wall") for n, d, backward, make in programs]
