"""How exact half precision is: logits of five models, by eager, Deuteron and Inductor.

``python -m dev.measure.half_precision [--dtype bfloat16] [--device cpu]`` prints a table. Models
are transformers' with random weights, in inference; an error is the root mean square of the
difference to a float64 run of the same weights and inputs, over that of the float64 run, in
percent, over three sets of inputs. Dependencies: those of the demo.
"""

from __future__ import annotations

import argparse
import copy
import math
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn

VOCABULARY, WIDTH, LAYERS, HEADS, LENGTH = 1000, 256, 8, 4, 64
INPUTS_PER_MODEL = 3
SIZES = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS}


def llama() -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, intermediate_size=2 * WIDTH, num_key_value_heads=2, **SIZES
    )
    return transformers.LlamaForCausalLM(config)


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS, n_positions=LENGTH
    )
    return transformers.GPT2LMHeadModel(config)


def bert() -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=VOCABULARY, intermediate_size=4 * WIDTH, max_position_embeddings=LENGTH, **SIZES
    )
    return transformers.BertForMaskedLM(config)


def t5() -> nn.Module:
    config = transformers.T5Config(
        vocab_size=VOCABULARY,
        d_model=WIDTH,
        d_ff=2 * WIDTH,
        num_layers=LAYERS // 2,
        num_heads=HEADS,
        feed_forward_proj="gated-gelu",
        decoder_start_token_id=0,
    )
    return transformers.T5ForConditionalGeneration(config)


def vit() -> nn.Module:
    config = transformers.ViTConfig(
        image_size=64, patch_size=8, intermediate_size=4 * WIDTH, num_labels=100, **SIZES
    )
    return transformers.ViTForImageClassification(config)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "Llama": llama,
    "GPT-2": gpt2,
    "BERT": bert,
    "T5": t5,
    "ViT": vit,
}


class Logits(nn.Module):
    """A model whose result is its logits. Dropout is off, nothing is cached."""

    def __init__(self, model: nn.Module, kind: str) -> None:
        super().__init__()
        self.model, self.kind = model.eval(), kind

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "T5":
            return self.model(input_ids=x, decoder_input_ids=x.flip(-1), use_cache=False).logits
        if self.kind in ("Llama", "GPT-2"):
            return self.model(x, use_cache=False).logits
        return self.model(x).logits


def inputs(kind: str, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if kind == "ViT":
        return torch.randn(4, 3, 64, 64, generator=generator)
    return torch.randint(VOCABULARY, (4, LENGTH), generator=generator)


def error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want).square().mean() / want.square().mean())


def contenders() -> dict[str, dict[str, Any] | None]:
    """What ``torch.compile`` is given; None: eager."""
    return {
        "eager": None,
        "Deuteron, precision eager": {"backend": "deuteron", "options": {"precision": "eager"}},
        "Deuteron": {"backend": "deuteron"},
        "Inductor": {"backend": "inductor"},
    }


def errors(kind: str, dtype: torch.dtype, device: str) -> dict[str, float]:
    torch.manual_seed(0)
    model = Logits(MODELS[kind](), kind).to(device, dtype)
    wide = copy.deepcopy(model).double()
    given = [inputs(kind, seed).to(device) for seed in range(INPUTS_PER_MODEL)]
    given = [x.to(dtype) if x.is_floating_point() else x for x in given]
    out = {}
    with torch.no_grad():
        exact = [wide(x.double() if x.is_floating_point() else x) for x in given]
        for name, how in contenders().items():
            torch._dynamo.reset()
            run = model if how is None else torch.compile(model, **how)
            squares = [error(run(x), e) for x, e in zip(given, exact, strict=True)]
            out[name] = 100 * math.sqrt(sum(squares) / INPUTS_PER_MODEL)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--models", default=",".join(MODELS))
    asked = parser.parse_args()
    print("| model | " + " | ".join(contenders()) + " |")
    print("|---|" + "---|" * len(contenders()))
    for kind in asked.models.split(","):
        percent = errors(kind, getattr(torch, asked.dtype), asked.device)
        print(f"| {kind} | " + " | ".join(f"{e:.3f}" for e in percent.values()) + " |", flush=True)


if __name__ == "__main__":
    main()
