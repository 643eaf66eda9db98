"""Pieces of real models, and small changes to them: what random programs start from.

In: nothing. Out: `BLOCKS`, each the axes of its inputs (names that begin with i are integers) and
its lines (target, text). Fields in braces are inputs and earlier targets. A line whose change eager
does not take stays as it was; one that eager does not take at all is left out.
"""

# ruff: noqa: E501 - a line of a program is one line
from __future__ import annotations

import random

Block = tuple[dict[str, str], list[tuple[str, str]]]

ATTENTION: Block = (
    {"x": "AB", "wq": "BC", "wk": "BC", "wv": "BC", "wo": "CB", "g": "B"},
    [
        ("h", "F.layer_norm({x}, {x}.shape[-1:], {g}, {g})"),
        ("q", "{h} @ {wq}"),
        ("k", "{h} @ {wk}"),
        ("v", "{h} @ {wv}"),
        ("s", "({q} @ {k}.mT) / {k}.shape[-1] ** 0.5"),
        ("m", "torch.ones_like({s}, dtype=torch.bool).tril()"),
        ("t", "{s}.masked_fill(~{m}, float('-inf'))"),
        ("p", "torch.softmax({t}, -1)"),
        ("o", "({p} @ {v}) @ {wo}"),
        ("y", "{x} + {o}"),
    ],
)
MLP: Block = (
    {"x": "AB", "w": "BC", "b": "C", "u": "CB", "g": "B"},
    [
        (
            "n",
            "({x} - {x}.mean(-1, keepdim=True)) * torch.rsqrt({x}.var(-1, correction=0, keepdim=True) + 1e-5)",
        ),
        ("h", "({n} * {g}) @ {w} + {b}"),
        ("a", "F.gelu({h})"),
        ("y", "{a} @ {u} + {x}"),
    ],
)
SWIGLU: Block = (
    {"x": "AB", "w": "BC", "v": "BC", "u": "CB", "g": "B"},
    [
        ("n", "{x} * torch.rsqrt({x}.square().mean(-1, keepdim=True) + 1e-6) * {g}"),
        ("a", "F.silu({n} @ {w}) * ({n} @ {v})"),
        ("y", "{a} @ {u} + {x}"),
    ],
)
ROPE: Block = (
    {"x": "AB", "c": "AB", "s": "AB"},
    [
        ("r", "torch.cat([-{x}[..., {x}.shape[-1] // 2:], {x}[..., : {x}.shape[-1] // 2]], -1)"),
        ("y", "{x} * {c}.cos() + {r} * {s}.sin()"),
        ("z", "{y}.transpose(0, 1)"),
    ],
)
NORMS: Block = (
    {"x": "ABC", "g": "B", "b": "B"},
    [
        ("n", "F.group_norm({x}, 1, {g}, {b})"),
        ("m", "F.batch_norm({x}, None, None, {g}, {b}, True)"),
        ("i", "F.instance_norm({x})"),
        ("y", "F.silu({n}) + {m} * {i}"),
    ],
)
CONVOLUTION: Block = (
    {"x": "ABC", "w": "BB", "g": "B"},
    [
        ("c", "F.conv1d({x}, {w}[:, :, None])"),
        ("n", "F.batch_norm({c}, None, None, {g}, {g}, True)"),
        ("r", "F.relu({n} + {x})"),
        ("p", "F.max_pool1d({r}, 2)"),
        ("y", "{p}.mean(-1)"),
    ],
)
LOSS: Block = (
    {"x": "AB", "i": "A"},
    [
        ("t", "({i} % {x}.shape[-1]).long()"),
        ("l", "F.cross_entropy({x}, {t}, label_smoothing=0.1)"),
        ("k", "F.nll_loss(F.log_softmax({x}, -1), {t}, reduction='none')"),
        ("y", "{l} + {k}.mean()"),
    ],
)
EMBEDDING: Block = (
    {"x": "AB", "i": "C", "g": "B"},
    [
        ("e", "F.embedding({i} % {x}.shape[0], {x})"),
        ("q", "torch.arange({e}.shape[0], device={e}.device)"),
        ("h", "{e} + torch.sin({q}[:, None] / 10).to({e}.dtype)"),
        ("n", "F.layer_norm({h}, {h}.shape[-1:], {g})"),
        ("y", "{n} @ {x}.mT"),
    ],
)
EXPERTS: Block = (
    {"x": "AB", "w": "BC", "v": "CB"},
    [
        ("s", "torch.softmax({x} @ {w}, -1)"),
        ("e", "{s}.argmax(-1)"),
        ("p", "torch.take_along_dim({s}, {e}[:, None], -1)"),
        ("h", "{v}[{e}] * {x}"),
        ("c", "torch.zeros_like({v}).index_add(0, {e}, {h})"),
        ("y", "{h} * {p} + {c}.sum(0)"),
    ],
)
TOKENS: Block = (
    {"x": "ABC", "w": "BB", "g": "B"},
    [
        ("t", "{x}.transpose(1, 2)"),
        ("s", "{t}.sin() + {t}.mean(1, keepdim=True)"),
        ("n", "F.layer_norm({s}, {s}.shape[-1:], {g}, {g})"),
        ("r", "{s} + {n} @ {w}"),
        ("m", "F.layer_norm({r}, {r}.shape[-1:], {g})"),
        ("y", "{r} + F.gelu({m} @ {w})"),
        ("z", "{y}.mT.unflatten(-1, (1, -1))"),
    ],
)
OPTIMIZER: Block = (
    {"x": "AB", "g": "AB", "m": "AB", "v": "AB"},
    [
        ("", "{m}.mul_(0.9).add_({g}, alpha=0.1)"),
        ("", "{v}.mul_(0.99).addcmul_({g}, {g}, value=0.01)"),
        ("d", "{v}.abs().sqrt() + 1e-3"),
        ("", "{x}.addcdiv_({m}, {d}, value=-0.1)"),
        ("y", "{x}.norm() + {m}.mean()"),
    ],
)
QUANTISE: Block = (
    {"x": "AB"},
    [
        ("a", "{x}.abs().amax(-1, keepdim=True).clamp(min=1e-4)"),
        ("q", "({x} / {a} * 127).round().clamp(-127, 127).to(torch.int8)"),
        ("y", "{q}.to({x}.dtype) * ({a} / 127)"),
    ],
)
BLOCKS: list[Block] = [
    ATTENTION, MLP, SWIGLU, ROPE, NORMS, CONVOLUTION, LOSS, EMBEDDING, EXPERTS, TOKENS, OPTIMIZER, QUANTISE,
]  # fmt: skip

# One of a group takes the place of another.
WORD_GROUPS: tuple[tuple[str, ...], ...] = (
    ("F.gelu", "F.silu", "F.relu", "torch.tanh", "torch.sigmoid", "torch.sin"),
    ("torch.softmax", "torch.log_softmax", "torch.cumsum"),
    (", -1)", ", 0)"),
    ("(-1, keepdim", "(0, keepdim"),
    (".mean(", ".sum(", ".amax("),
    (" + ", " * ", " - "),
    (".mT", ".mT.contiguous()"),
    (".tril()", ".triu()", ".tril(1)"),
    ("[..., :", "[..., 1:"),
)


def mutated(text: str, rng: random.Random) -> str:
    """`text` with at most one change."""
    if rng.random() < 0.6:
        return text
    possible = [(g, w) for g in WORD_GROUPS for w in g if w in text]
    if not possible:
        return text
    group, word = rng.choice(possible)
    return text.replace(word, rng.choice(group), 1)
