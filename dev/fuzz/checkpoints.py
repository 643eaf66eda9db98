"""Random training steps with checkpointed regions: their forward runs again in the backward, with
the same random numbers (or, if the program says so, with others, and then none are drawn there).

In: a seed. Out: a program (`fuzz_draft.Drawn`) whose regions are lambdas. Dropout is compared with
eager under ``eager_random``.
"""

from __future__ import annotations

import torch

from dev.fuzz.draft import Draft, Drawn, Refused

CHECKPOINT_IMPORT = "from torch.utils.checkpoint import checkpoint"
WIDTHS = (1, 4, 8, 16, 17, 33)
# A region's body: {a} is what comes before it in the region, b and c are its matrix and vector.
REGION_LINES = (
    "torch.tanh({a} @ b)",
    "F.gelu({a} + c)",
    "F.layer_norm({a}, {a}.shape[-1:], c)",
    "({a} @ b).softmax(-1) * {a}",
    "{a} * torch.sigmoid({a} @ b + c)",
    "{a}.sin() + {a}.mean(-1, keepdim=True)",
    "F.silu({a}) - {a}.cumsum(-1) / 16",
    "{a}.clamp(-1, 1).exp()",
    "torch.where({a} > c, {a}, -{a})",
)
RANDOM_LINES = (
    "F.dropout({a}, 0.3, True)",
    "F.dropout({a} @ b, 0.1, True) + {a}",
    "{a} * torch.rand_like({a})",
    "{a} + 0.1 * torch.randn_like({a})",
    "F.alpha_dropout({a}, 0.2, True)",
    "F.gelu(F.dropout({a}, 0.5, True))",
)
LINES_AFTER = (
    "{x} * 2",
    "{x} + {y}",
    "F.relu({x})",
    "{x}.sin()",
    "{x} / (1 + {x}.abs())",
    "F.layer_norm({x}, {x}.shape[-1:])",
    "F.dropout({x}, 0.25, True)",
)


def checkpoints(seed: int) -> Drawn:
    """The program of a seed."""
    draft = Draft(seed, [CHECKPOINT_IMPORT])
    rng = draft.rng
    dtype = rng.choices((torch.float32, torch.float64, torch.bfloat16), (7, 2, 1))[0]
    width, rows = rng.choice(WIDTHS), rng.choice((1, 2, 5, 8))
    is_random = rng.random() < 0.5
    x = draft.new_input((rows, width), dtype, grad=True)
    b = draft.new_input((width, width), dtype, grad=True, scale=round(width**-0.5, 3))
    c = draft.new_input((width,), dtype, grad=rng.random() < 0.7)
    names = [x]
    for _ in range(rng.randint(1, 4)):
        a = rng.choice(names[-2:])
        try:
            if rng.random() < 0.6 or len(names) == 1:
                names.append(draft.add(region(draft, a, b, c, is_random)))
            else:
                text = rng.choice(LINES_AFTER if is_random else LINES_AFTER[:-1])
                names.append(draft.add(text.format(x=a, y=rng.choice(names))))
        except Refused:
            continue
    outputs = [names[-1], *(n for n in names[1:-1] if rng.random() < 0.2)]
    return draft.finish(outputs, backward=True)


def region(draft: Draft, x: str, b: str, c: str, is_random: bool) -> str:
    """A call of a checkpointed function; perhaps with another one inside."""
    rng = draft.rng
    text = "a"
    for _ in range(rng.randint(1, 3)):
        rows = REGION_LINES + RANDOM_LINES if is_random else REGION_LINES
        text = rng.choice(rows).format(a=f"({text})" if text != "a" else "a")
    if rng.random() < 0.2:
        inner = f"checkpoint(lambda a, b, c: {text}, a, b, c, use_reentrant=False)"
        text = f"torch.tanh({inner})"
    if rng.random() < 0.3:
        text = f"({text}) + a" if rng.random() < 0.5 else f"({text}).to(torch.float32).to(a.dtype)"
    keeps = "" if is_random or rng.random() < 0.7 else ", preserve_rng_state=False"
    return f"checkpoint(lambda a, b, c: {text}, {x}, {b}, {c}, use_reentrant=False{keeps})"
