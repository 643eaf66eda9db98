"""Builds a drawn model with random weights, and inputs for it, by rules that name no model.

In: a `Candidate` and the device. Out: `Built`: a module that runs in eager, and its keyword inputs.
What cannot be built, is too large, or does not run raises `Unfit` with the reason.

timm's models are taken as they are. Configurations of transformers are shrunk by the names of their
attributes: widths, heads and feed-forward sizes by one power of two (so that the size of a head
stays), depths, vocabularies and numbers of experts to a cap. Inputs follow from the signature of
``forward`` and the configuration. Both have a ladder: where a rung does not run, the next is tried.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from deuteron.tools.measuring import error_line
from dev.real.draw import Candidate, import_timm

Inputs = dict[str, Tensor]


class Unfit(Exception):
    """A candidate that this run does not take."""


@dataclass(frozen=True)
class Caps:
    """How large models and inputs get. `parameters`: a larger model is not taken."""

    parameters: int
    batch: int
    side: int  # of an image, pixels; a model of a fixed size keeps that
    tokens: int
    width: int
    depth: int
    vocabulary: int
    experts: int = 8
    positions: int = 4096
    frames: int = 3000  # of a spectrogram
    samples: int = 32000  # of a waveform


CAPS_OF_DEVICE = {
    # Kernels of some 10 us and more: 8 images of 224 x 224, 8 x 512 tokens.
    "cuda": Caps(150_000_000, 8, 224, 512, 1024, 4, 16384),
    # Seconds per model on two cores.
    "cpu": Caps(25_000_000, 2, 96, 64, 192, 2, 1000, positions=1024, frames=256, samples=8000),
}


@dataclass
class Built:
    module: nn.Module
    inputs: Inputs
    rung: str  # of the ladder


def build(candidate: Candidate, device: str, train: bool) -> Built:
    """On `device`, in float32; dropout and other draws are off, training or not."""
    ladder = timm_rungs if candidate.package == "timm" else transformers_rungs
    caps, reasons = CAPS_OF_DEVICE[device], []
    try:
        for rung, make in ladder(candidate, caps):
            try:
                with torch.device("meta"):
                    size = sum(p.numel() for p in make()[0].parameters())
            except Unfit:
                raise
            except Exception:  # noqa: BLE001 - not every model can be made of nothing
                size = 0
            if size > caps.parameters:
                reasons.append(f"{rung}: {size / 1e6:.0f} million parameters")
                continue
            built = attempt(rung, make, device, train, reasons)
            if built is not None:
                return built
    except Unfit:
        raise
    except Exception as error:  # noqa: BLE001
        if broken(error):
            raise
        reasons.append(error_line(error))
    raise Unfit("; ".join(reasons[-3:]) or "no rung")


Make = Callable[[], tuple[nn.Module, Iterator[Inputs]]]


def attempt(rung: str, make: Make, device: str, train: bool, reasons: list[str]) -> Built | None:
    """The model of one rung with the first inputs that it takes; a reason where there is none."""
    try:
        torch.manual_seed(0)
        module, ladder = make()
        if sum(p.numel() for p in module.parameters()) > CAPS_OF_DEVICE[device].parameters:
            raise Unfit("too many parameters")
        module = with_statistics(without_draws(module.train(train)).to(device, torch.float32))
    except Exception as error:  # noqa: BLE001 - the next rung
        reasons.append(f"{rung}: {error_line(error)}")
        return None
    for inputs in ladder:
        there = {k: t.to(device) for k, t in inputs.items()}
        try:
            with torch.no_grad():
                module(**there)
        except Exception as error:  # noqa: BLE001
            if broken(error):
                raise
            reasons.append(f"{rung}, {', '.join(inputs)}: {error_line(error)}")
            continue
        return Built(module, there, rung)
    return None


def without_draws(module: nn.Module) -> nn.Module:
    """Results must not be random: dropout and dropped paths get probability 0."""
    for m in module.modules():
        for name in ("p", "drop_prob", "layerdrop", "drop_path", "dropout", "attention_dropout"):
            if isinstance(getattr(m, name, None), float) and "norm" not in type(m).__name__.lower():
                setattr(m, name, 0.0)
    return module


def with_statistics(module: nn.Module) -> nn.Module:
    """Batch norms have seen something. With a mean of 0 and a variance of 1 they multiply by
    1 / sqrt(1 + epsilon): halves stay what they are where a norm rounds, and where it does not, all
    ties of the sums behind it round to the same side (1 % of HRNet's results; Inductor's, too)."""
    generator = torch.Generator().manual_seed(5)
    for m in module.modules():
        if isinstance(getattr(m, "running_var", None), Tensor):
            mean, variance = torch.randn(2, *m.running_var.shape, generator=generator)
            m.running_mean.copy_(0.1 * mean)
            m.running_var.copy_(1.0 + 0.5 * variance.tanh())
    return module


def broken(error: BaseException) -> bool:
    """Whether the process cannot use its GPU any more: it ends, and the run starts another."""
    return "CUDA error" in str(error) or "illegal memory access" in str(error)


# ---------------------------------------------------------------------------------------- timm
def timm_rungs(candidate: Candidate, caps: Caps) -> Iterator[tuple[str, Make]]:
    timm = import_timm()
    settings = timm.get_pretrained_cfg(candidate.name)
    channels, high, wide = settings.input_size if settings else (3, 224, 224)
    fixed = bool(settings and settings.fixed_input_size)

    def make(h: int, w: int) -> tuple[nn.Module, Iterator[Inputs]]:
        module = timm.create_model(candidate.name, pretrained=False)
        parameter = next(iter(inspect.signature(module.forward).parameters))
        return module, iter([{parameter: torch.randn(caps.batch, channels, h, w)}])

    if not fixed and max(high, wide) > caps.side:
        yield f"{caps.side} pixels", lambda: make(caps.side, caps.side)
    yield f"{high} pixels", lambda: make(high, wide)


# ------------------------------------------------------------------------------- transformers
DEPTH_FIELDS = re.compile(r"(^|_)(n_?layers?|num_\w*layers|\w*_layers|depth|num_blocks|n_blocks)$")
WIDTH_FIELDS = re.compile(
    r"(^|_)(hidden_size|d_model|n_embd|embed_dim|hidden_dim|dim|embedding_size)$"
)
HEAD_FIELDS = re.compile(r"(^|_)(n_heads?|num_heads|num_\w*heads|\w*attention_heads|num_kv_heads)$")
INNER_FIELDS = re.compile(
    r"(^|_)(\w*intermediate_size|ffn_dim|\w*ffn_dim|d_ff|n_inner|mlp_dim|mlp_hidden_size)$"
)
VOCABULARY_FIELDS = re.compile(r"vocab_size$")
EXPERT_FIELDS = re.compile(r"(^|_)(num_(local_|routed_)?experts|n_routed_experts|moe_num_experts)$")
POSITION_FIELDS = re.compile(r"(^|_)(max_position_embeddings|n_positions|max_sequence_length)$")
RANDOM_FIELDS = re.compile(r"drop|mask_(time|feature)_prob|jitter|noise")


def transformers_rungs(candidate: Candidate, caps: Caps) -> Iterator[tuple[str, Make]]:
    transformers = importlib.import_module("transformers")
    configs = importlib.import_module("transformers.models.auto.configuration_auto").CONFIG_MAPPING

    def make(widths: bool, images: bool) -> tuple[nn.Module, Iterator[Inputs]]:
        config = configs[candidate.model_type]()
        shrink(config, caps, widths, images)
        kind = getattr(transformers, candidate.name)
        module = kind._from_config(config) if hasattr(kind, "_from_config") else kind(config)
        return module, inputs_of(module, config, caps)

    yield "shrunk", lambda: make(True, True)
    yield "images whole", lambda: make(True, False)
    yield "widths whole", lambda: make(False, False)


def shrink(config: Any, caps: Caps, widths: bool, images: bool) -> None:
    """Makes a configuration small, and those inside it."""
    inner = [v for v in vars(config).values() if hasattr(v, "to_dict") and hasattr(v, "model_type")]
    for c in inner:
        shrink(c, caps, widths, images)
    numbers = {k: v for k, v in vars(config).items() if is_number(v)}
    wide = max((v for k, v in numbers.items() if WIDTH_FIELDS.search(k)), default=0)
    by = 1
    while widths and wide // by > caps.width and wide % (2 * by) == 0:
        by *= 2
    layers = {v for k, v in numbers.items() if DEPTH_FIELDS.search(k)}
    vocabulary = caps.vocabulary
    for key, value in list(vars(config).items()):
        put(config, key, shrunk(key, value, caps, by, layers, vocabulary))
    if images and is_number(getattr(config, "image_size", None)):
        patch = getattr(config, "patch_size", 1)
        patch = patch if is_number(patch) else 1
        if config.image_size > caps.side:
            put(config, "image_size", patch * max(1, caps.side // patch))
    put(config, "use_cache", False)


def shrunk(key: str, value: Any, caps: Caps, by: int, layers: set[int], vocabulary: int) -> Any:
    """An attribute's new value. `layers`: the depths that the configuration has had; a list of such
    a length says something of every layer."""
    if isinstance(value, float) and RANDOM_FIELDS.search(key):
        return 0.0
    if key == "depths" and isinstance(value, (list, tuple)):
        return type(value)(min(v, caps.depth) for v in value)
    if isinstance(value, list) and len(value) in layers and len(value) > caps.depth:
        # The last ones: patterns of kinds of layers often end with the rarer one.
        return value[-caps.depth :]
    if not is_number(value):
        return value
    if VOCABULARY_FIELDS.search(key):
        return min(value, vocabulary)
    if key.endswith(("_token_id", "_token_index", "_idx")) and value >= vocabulary:
        return vocabulary - 1
    rules = (
        (DEPTH_FIELDS, min(value, caps.depth)),
        (WIDTH_FIELDS, max(1, value // by)),
        (HEAD_FIELDS, max(1, value // by)),
        (INNER_FIELDS, max(1, value // by)),
        (EXPERT_FIELDS, min(value, caps.experts)),
        (POSITION_FIELDS, min(value, caps.positions)),
    )
    return next((new for rule, new in rules if rule.search(key)), value)


def is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def put(config: Any, key: str, value: Any) -> None:
    """Sets what a configuration has; some of its attributes are read only."""
    if getattr(config, key, None) != value:
        with contextlib.suppress(AttributeError, TypeError, ValueError, NotImplementedError):
            setattr(config, key, value)


def inputs_of(module: nn.Module, config: Any, caps: Caps) -> Iterator[Inputs]:
    """Inputs that a model may take: all kinds that its ``forward`` names, then the main one."""
    names = inspect.signature(module.forward).parameters
    main = getattr(module, "main_input_name", "input_ids")
    made = {n: list(v) for n in names if (v := INPUT_MAKERS.get(n, nothing)(config, caps))}
    needed = [
        n for n, p in names.items() if p.default is p.empty and p.kind == p.POSITIONAL_OR_KEYWORD
    ]
    unknown = [n for n in needed if n not in made]
    if unknown:
        raise Unfit(f"no rule makes {', '.join(unknown)}")
    if not getattr(config, "is_encoder_decoder", False):
        made = {n: v for n, v in made.items() if not n.startswith("decoder_")}
    choices = [set(made), {main, *needed, *(n for n in made if n.startswith("decoder_"))}]
    for choice in choices + [{main, *needed}]:
        given = {n: made[n] for n in made if n in choice}
        for k in range(max(map(len, given.values()), default=0)):
            yield {n: v[min(k, len(v) - 1)] for n, v in given.items()}


def nothing(config: Any, caps: Caps) -> list[Tensor]:
    return []


def find(config: Any, *names: str, default: Any = None) -> Any:
    """The first attribute that a configuration, or one inside it, has."""
    inner = [v for v in vars(config).values() if hasattr(v, "to_dict") and hasattr(v, "model_type")]
    for c in [config, *inner]:
        for n in names:
            value = getattr(c, n, None)
            if value is not None:
                return value
    return default


def ids(config: Any, caps: Caps) -> list[Tensor]:
    high = find(config, "vocab_size", default=0)
    if not is_number(high) or high < 32:
        return []
    generator = torch.Generator().manual_seed(1)
    longest = find(config, "max_position_embeddings", "n_positions", default=caps.tokens)
    tokens = min(caps.tokens, longest) if is_number(longest) else caps.tokens
    # The last ids are special ones, since larger ones are moved there.
    return [torch.randint(3, high - 8, (caps.batch, t), generator=generator) for t in (tokens, 16)]


def pixels(config: Any, caps: Caps) -> list[Tensor]:
    side = find(config, "image_size", "input_size", "img_size", "crop_size", default=caps.side)
    if isinstance(side, dict):
        side = list(side.values())
    pair = tuple(side)[-2:] if isinstance(side, (list, tuple)) else (side, side)
    if not all(map(is_number, pair)):
        pair = (caps.side, caps.side)
    if len(pair) == 1:
        pair = (*pair, *pair)
    channels = find(config, "num_channels", "in_channels", "in_chans", default=3)
    channels = channels if is_number(channels) else 3
    frames = find(config, "num_frames", default=8)
    shapes = [(caps.batch, channels, *pair), (caps.batch, frames, channels, *pair)]
    if pair != (224, 224):
        shapes.append((caps.batch, channels, 224, 224))
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(s, generator=generator) for s in shapes]


def waveform(config: Any, caps: Caps) -> list[Tensor]:
    bins = find(config, "num_mel_bins", default=128)
    long = find(config, "max_length", default=1024)
    shapes = [(caps.batch, caps.samples), (caps.batch, 1, caps.samples), (caps.batch, long, bins)]
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(s, generator=generator) for s in shapes]


def spectrogram(config: Any, caps: Caps) -> list[Tensor]:
    bins = find(config, "num_mel_bins", "feature_size", "input_feat_per_channel", default=80)
    long = 2 * find(config, "max_source_positions", default=caps.frames // 2)
    shapes = [(caps.batch, bins, long), (caps.batch, caps.frames, bins)]
    generator = torch.Generator().manual_seed(4)
    return [torch.randn(s, generator=generator) for s in shapes]


INPUT_MAKERS: dict[str, Callable[[Any, Caps], list[Tensor]]] = {
    "input_ids": ids,
    "decoder_input_ids": ids,
    "pixel_values": pixels,
    "pixel_values_videos": pixels,
    "input_values": waveform,
    "input_features": spectrogram,
}
