"""Random chains of products of one row, as a model computes them that makes token after token:
norms and gates before, biases, activations and residuals after, weights of several orders, dtypes.

In: a seed. Out: a program (`fuzz_draft.Drawn`).
"""

from __future__ import annotations

import torch

from dev.fuzz.draft import Draft, Drawn, Refused

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
SIZES = (1, 3, 8, 16, 31, 64, 65, 96, 128, 200, 257)
# Before a product: {x} is the row, [..., K]; {g} a vector of K.
LINES_BEFORE = (
    "{x}",
    "{x}",
    "F.layer_norm({x}, {x}.shape[-1:], {g}, {g})",
    "{x} * torch.rsqrt({x}.square().mean(-1, keepdim=True) + 1e-6) * {g}",
    "F.silu({x}) * {g}",
    "F.relu({x} + {g})",
    "F.gelu({x})",
    "torch.softmax({x}, -1)",
    "{x} / {x}.norm(dim=-1, keepdim=True).clamp(min=1e-3)",
    "{x}.float().tanh().to({x}.dtype)",
    "torch.cat([-{x}[..., {x}.shape[-1] // 2:], {x}[..., : {x}.shape[-1] // 2]], -1)",
)
# The product: {w} is [N, K], {b} a vector of N. Rows of one or two axes more than K.
PRODUCTS = (
    "F.linear({x}, {w})",
    "F.linear({x}, {w}, {b})",
    "{x} @ {w}.t()",
    "torch.matmul({x}, {w}.mT) + {b}",
    "torch.addmm({b}, {x}.reshape(1, -1), {w}.t()).reshape(*{x}.shape[:-1], -1)",
    "torch.mv({w}, {x}.flatten()).reshape(*{x}.shape[:-1], -1)",
    "torch.addmv({b}, {w}, {x}.flatten(), beta=0.5).reshape(*{x}.shape[:-1], -1)",
    "({w} @ {x}.reshape(-1, 1)).reshape(*{x}.shape[:-1], -1)",
    "torch.bmm({x}.reshape(1, 1, -1), {w}.t()[None]).reshape(*{x}.shape[:-1], -1)",
    "torch.einsum('nk,k->n', {w}, {x}.flatten()).reshape(*{x}.shape[:-1], -1)",
    "({w} * {x}.reshape(1, -1)).sum(-1).reshape(*{x}.shape[:-1], -1)",
)
# After it: {y} is the result, {r} a row of its shape.
LINES_AFTER = (
    "{y}",
    "{y} + {r}",
    "F.gelu({y})",
    "F.silu({y}) * {r}",
    "F.relu({y}).square()",
    "torch.softmax({y}, -1)",
    "torch.log_softmax({y}.float(), -1).to({y}.dtype)",
    "{y} + F.layer_norm({y}, {y}.shape[-1:])",
    "torch.tanh({y} / 3) * 3",
    "{y}.clamp(-1, 1).to(torch.float32).to({y}.dtype)",
    "torch.where({y} > {y}.mean(-1, keepdim=True), {y}, -{y})",
)
WEIGHTS = ("{w}", "{w}", "{w}", "({w}.to({s}.dtype) * {s}[:, None])")


def vectors(seed: int) -> Drawn:
    """The chain of a seed."""
    draft = Draft(seed)
    rng = draft.rng
    dtype = rng.choices(DTYPES, (6, 3, 1, 1))[0]
    backward = rng.random() < 0.35
    k = rng.choice(SIZES)
    lead = rng.choice(((), (1,), (1,), (1, 1)))
    x = draft.new_input((*lead, k), dtype, grad=backward)
    rows, outputs = [x], []
    for _ in range(rng.randint(1, 4)):
        try:
            x = product(draft, rng.choice(rows[-2:]), dtype, backward)
        except Refused:
            continue
        rows.append(x)
        if rng.random() < 0.3:
            outputs.append(x)
        if rng.random() < 0.15:  # the same row, several products: of a head's queries and keys
            try:
                rows.append(product(draft, rows[-2], dtype, backward))
                outputs.append(rows[-1])
            except Refused:
                pass
    return draft.finish([*outputs, rows[-1]] if draft.lines else [x], backward)


def product(draft: Draft, x: str, dtype: torch.dtype, backward: bool) -> str:
    """A product of the row `x` with what stands before and after it; the result's name."""
    rng, row = draft.rng, draft.value(x)
    n, k = rng.choice(SIZES), row.shape[-1]
    form = rng.choices(("dense", "permuted", "stepped"), (6, 2, 1))[0]
    how = rng.choice(WEIGHTS)
    scale = round(k**-0.5, 4)
    if "{s}" in how:  # quantized weights with a scale for each row
        w = draft.new_input((n, k), torch.int8, form)
        s = draft.new_input((n,), dtype, scale=0.1 * scale)
        weight = draft.add(how.format(w=w, s=s))
    else:
        w = draft.new_input((n, k), dtype, form, grad=backward and rng.random() < 0.7, scale=scale)
        weight = w
    g = draft.new_input((k,), dtype, grad=backward and rng.random() < 0.5)
    b = draft.new_input((n,), dtype, grad=backward and rng.random() < 0.5)
    before = draft.add(rng.choice(LINES_BEFORE).format(x=x, g=g))
    y = draft.add(rng.choice(PRODUCTS).format(x=before, w=weight, b=b))
    r = draft.new_input(draft.value(y).shape, draft.value(y).dtype)
    return draft.add(rng.choice(LINES_AFTER).format(y=y, r=r))
