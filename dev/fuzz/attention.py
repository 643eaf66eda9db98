"""Random chains of products with scores between them, and losses on products.

In: a seed. Out: a program (`fuzz_draft.Drawn`): scores of queries and keys under biases and masks,
a softmax over any axis (or what is used in its place), joins, heads that are shared, and what
stands behind; or logits of a linear layer and what is made of them row by row.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from unittest import mock

import torch

from deuteron.schedule import contract
from dev.check.test_cases import Failure, How, Straight
from dev.fuzz.draft import Draft, Drawn, Refused

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LENGTHS = (1, 3, 16, 17, 31, 40, 64, 65)
WIDTHS = (4, 8, 16, 24, 32, 33)
INF = "float('-inf')"
LEAST = "torch.finfo({s}.dtype).min"
# Of queries [.., n, d] and keys [.., m, d].
PRODUCTS = (
    "({q} @ {k}.mT)",
    "({q} @ {k}.transpose(-2, -1))",
    "torch.einsum('bhsd,bhtd->bhst', {q}, {k})",
    "torch.matmul({q} * 0.5, {k}.mT)",
    "({q}.unsqueeze(-2) * {k}.unsqueeze(-3)).sum(-1)",
    "({k} @ {q}.mT).mT",
)
# Of scores [b, h, n, m]. {i} and {j}: positions of queries and keys; {g}: how many keys come before
# the first query's; {hs}: a number for each head, {bias}, {row}: of every score, of every key;
# {table}: [9, h]; {hide}: truth values [n, m]; {ids}: numbers of the keys; {c}: of each batch.
SCORES = (
    "{s} * 0.25",
    "{s} / 3 + {hs}[:, None, None]",
    "{s} * (1 + 0 * {hs}[:, None, None])",
    "{s} + {bias}",
    "{s} + {row}[:, None, None, :]",
    "{s} + {table}[({j} - {i}).clamp(-4, 4) + 4].permute(2, 0, 1)",
    "{s} + {hs}[:, None, None] * ({j} - {i} - {g})",
    "20.0 * torch.tanh({s} / 20.0)",
    "{s}.masked_fill({j} > {i} + {g}, " + INF + ")",
    "{s}.masked_fill(({j} > {i} + {g}) | ({j} + 5 < {i}) & ({j} > 0), " + INF + ")",
    "torch.where({j} <= {i} + {g}, {s}, " + LEAST + ")",
    "torch.where(({j} // 8 == {i} // 8) | ({j} == 0), {s}, " + LEAST + ")",
    "{s}.masked_fill({hide} & ({j} > 0), " + INF + ")",
    "{s}.masked_fill(({ids} != {ids}[:1]) & ({j} > 2), " + INF + ")",
    "{s}.masked_fill(({ids} != {ids}[:, None]) & ({j} < {n}) if {n} == {m} else {hide} & False, "
    + INF
    + ")",
    "{s}.masked_fill({j} >= {c}[:, None, None, None].clamp(min=1), " + INF + ")",
    "{s} + torch.zeros_like{s}.masked_fill({hide} & ({j} > 0), " + LEAST + ")",
    "{s}.float()",
    "{s} - {s}.mean(-1, keepdim=True)",
    "{s}.transpose(2, 3).contiguous().transpose(2, 3)",
    "{s}.flip(-1)",
    "{s}.clamp(-3, 3)",
)
# {sink}: a number for each head.
WEIGHTS = (
    "torch.softmax({s}, -1)",
    "torch.softmax({s}, -1)",
    "torch.softmax({s}, -1)",
    "torch.softmax({s}.nan_to_num(neginf=-9.0), -2)",
    "torch.softmax({s}.nan_to_num(neginf=-9.0), 1)",
    "torch.softmax({s}.float(), -1).to({v}.dtype)",
    "torch.sigmoid{s}",
    "F.relu{s}.square()",
    "F.relu({s}.nan_to_num(neginf=0.0)) / {m}",
    "torch.log_softmax({s}, -1).exp()",
    "(lambda e: e / e.sum(-1, keepdim=True))(({s} - {s}.amax(-1, keepdim=True)).exp())",
    "(lambda e: e / e.sum(-1, keepdim=True))(torch.exp2({s} - {s}.amax(-1, True).detach()))",
    "(lambda e: e / (1 + e.sum(-1, keepdim=True)))(torch.exp({s} - 2))",
    "torch.softmax(torch.cat([{s}, {sink}[:, None, None].to({s}.dtype)"
    ".expand({b}, {h}, {n}, 1)], -1), -1)[..., :-1]",
    "(torch.softmax({s}, -1) - 0.3 * torch.softmax(0.5 * {s}, -1))",
    "F.dropout(torch.softmax({s}, -1), 0.25, True)",
    "torch.softmax({s}, -1) * {hs}[:, None, None]",
    "(lambda p: p / p.sum(-2, keepdim=True).add(1e-2))(torch.softmax({s}, -1))",
    "torch.exp({s} - torch.logsumexp({s}, -1, keepdim=True))",
    "torch.tanh({s}.nan_to_num(neginf=0.0))",
)
OUTPUTS = (
    "{p}.to({v}.dtype) @ {v}",
    "{p}.to({v}.dtype) @ {v}",
    "torch.einsum('bhst,bhte->bhse', {p}.to({v}.dtype), {v})",
    "({p}.to({v}.dtype) @ {v}).transpose(1, 2).reshape({b}, {n}, -1)",
    "({v}.mT @ {p}.to({v}.dtype).mT).mT",
    "({p}.to({v}.dtype) @ {v}) * torch.sigmoid({gate})",
    "({p}.to({v}.dtype) @ {v}) @ {proj}",
    "({p}.to({v}.dtype) @ {v}) + {gate}",
    "F.rms_norm({p}.to({v}.dtype) @ {v}, ({e},))",
)
BESIDE = ("torch.logsumexp({s}, -1)", "{s}.amax(-1)", "{p}.sum(-2)", "{p}", "{p}.amax(-1)")
CALLS = (
    "F.scaled_dot_product_attention({q}, {k}, {v})",
    "F.scaled_dot_product_attention({q}, {k}, {v}, is_causal=True)",
    "F.scaled_dot_product_attention({q}, {k}, {v}, attn_mask={j} <= {i} + {g}, scale=0.3)",
    "F.scaled_dot_product_attention({q}, {k}, {v}, attn_mask={bias})",
    "F.scaled_dot_product_attention({q}, {k}, {v}, "
    "attn_mask={bias}.masked_fill({hide} & ({j} > 0), " + INF + "))",
    "F.scaled_dot_product_attention({q}, {k}, {v}, attn_mask=~{hide} | ({j} == 0))",
)


def attention(seed: int) -> Drawn:
    """Attention-like chains of a seed; a later one's queries may be an earlier one's results."""
    draft = Draft(seed)
    rng = draft.rng
    dtype = rng.choices(DTYPES, (6, 3, 1))[0]
    backward = rng.random() < 0.5
    outputs: list[str] = []
    for _ in range(1 if rng.random() < 0.8 else 2):
        for _ in range(6):
            try:
                outputs += chain(draft, dtype, backward)
            except Refused:
                continue
            break
    if not outputs:
        x = draft.new_input((3, 4), dtype, grad=True)
        outputs = [draft.add(f"torch.softmax({x} @ {x}.mT, -1) @ {x}")]
    return draft.finish(outputs, backward)


def chain(draft: Draft, dtype: torch.dtype, backward: bool) -> list[str]:
    rng = draft.rng
    b, h = rng.choice((1, 2)), rng.choice((1, 2, 3, 4))
    n = rng.choice(LENGTHS)
    m = n if rng.random() < 0.6 else rng.choice(LENGTHS)
    d = rng.choice(WIDTHS)
    e = d if rng.random() < 0.7 else rng.choice(WIDTHS)
    own = rng.choice([x for x in (1, 2, h) if h % x == 0])

    def heads(count: int, length: int, width: int) -> str:
        text = of_heads(draft, (b, count, length, width), dtype, backward)
        if count == h:
            return text
        return draft.add(
            rng.choice(
                (
                    f"{text}.repeat_interleave({h // count}, 1)",
                    f"{text}[:, :, None].expand(-1, -1, {h // count}, -1, -1)"
                    f".reshape({b}, {h}, {length}, {width})",
                )
            )
        )

    def made(*shape: int, dtype: torch.dtype = dtype) -> Callable[[], str]:
        grad = backward and dtype.is_floating_point and rng.random() < 0.5
        form = rng.choices(("dense", "permuted", "stepped"), (6, 1, 1))[0]
        return lambda: draft.new_input(shape, dtype, form, grad=grad)

    bias = rng.choice(((h, n, m), (n, m), (b, h, n, m), (b, 1, n, m), (b, 1, 1, m), (1, 1, n, 1)))
    words = Words(
        {
            "hs": made(h),
            "sink": made(h),
            "bias": made(*bias),
            "row": made(b, m),
            "table": made(9, h),
            "hide": made(n, m, dtype=torch.bool),
            "ids": lambda: draft.add(f"{draft.new_input((m,), torch.int64)} // 8"),
            "c": made(b, dtype=torch.int64),
            "gate": made(b, h, n, e),
            "proj": made(e, rng.choice(WIDTHS)),
        },
        {
            "q": (q := heads(h, n, d)),
            "k": heads(own, m, d),
            "v": heads(own, m, e),
            "i": f"torch.arange({n}, device={q}.device)[:, None]",
            "j": f"torch.arange({m}, device={q}.device)",
            "g": str(max(0, m - n)),
            **{name: str(x) for name, x in zip("bhnmde", (b, h, n, m, d, e))},
        },
    )
    if rng.random() < 0.2:
        return [draft.add(words.fill(rng.choice(CALLS)))]
    s = draft.add(f"{words.fill(rng.choice(PRODUCTS))} * {round(d**-0.5, 4)}")
    for _ in range(rng.choice((0, 1, 1, 2, 3))):
        s = draft.add(words.fill(rng.choice(SCORES), s=s), finite=False)
    p = draft.add(words.fill(rng.choice(WEIGHTS), s=s))
    out = [draft.add(words.fill(rng.choice(OUTPUTS), p=p))]
    if rng.random() < 0.25:
        with suppress(Refused):
            out.append(draft.add(words.fill(rng.choice(BESIDE), s=s, p=p)))
    return out


def of_heads(draft: Draft, shape: tuple[int, ...], dtype: torch.dtype, backward: bool) -> str:
    """A tensor [b, h, n, d], as models have it."""
    rng, (b, h, n, d) = draft.rng, shape
    grad = backward and rng.random() < 0.9
    how = rng.random()
    if how < 0.25:
        x = draft.new_input((b, n, h, d), dtype, grad=grad)
        return draft.add(f"{x}.transpose(1, 2)")
    if how < 0.4:  # projected
        x = draft.new_input((b, n, 24), dtype, grad=grad)
        w = draft.new_input((h * d, 24), dtype, grad=grad, scale=0.2)
        return draft.add(f"F.linear({x}, {w}).view({b}, {n}, {h}, {d}).transpose(1, 2)")
    form = rng.choices(("dense", "permuted", "stepped"), (6, 1, 1))[0]
    return draft.new_input(shape, dtype, form, grad=grad)


class Words:
    """What stands in braces: `known`, and inputs that are made when they are asked for."""

    def __init__(self, lazy: dict[str, Callable[[], str]], known: dict[str, str]) -> None:
        self.lazy, self.known = lazy, known

    def fill(self, text: str, **more: str) -> str:
        for name in [n for n in self.lazy if n not in self.known and "{" + n + "}" in text]:
            self.known[name] = self.lazy[name]()
        return text.format(**self.known, **more)


# Of logits {y} [n, c]; {t}: classes of rows, {w}: of classes, {z}: other logits, {r}: of rows.
LOSSES = (
    "F.cross_entropy({y}, {t})",
    "F.cross_entropy({y}.float(), {t}, label_smoothing=0.1)",
    "F.cross_entropy({y}, {t}.masked_fill({t} < 3, -100))",
    "F.cross_entropy({y}, {t}, ignore_index=5, reduction='sum') / {n}",
    "F.cross_entropy({y}, {t}, weight={w}.abs())",
    "(F.cross_entropy({y}, {t}, reduction='none') * {r}).mean()",
    "F.cross_entropy({y}, {t}) + 1e-2 * torch.logsumexp({y}, -1).square().mean()",
    "F.cross_entropy(15 * torch.tanh({y} / 15), {t})",
    "F.nll_loss(torch.log_softmax({y} + {w}, -1), {t})",
    "F.kl_div(F.log_softmax({y}, -1), F.log_softmax({z}, -1), reduction='batchmean', "
    "log_target=True)",
    "(torch.softmax({z}, -1) * (F.log_softmax({z}, -1) - F.log_softmax({y}, -1))).sum(-1).mean()",
    "-torch.gather(F.log_softmax({y}, -1), 1, {t}[:, None]).squeeze(1).mul({r}).mean()",
    "F.binary_cross_entropy_with_logits({y}, torch.zeros_like({y}))",
    "F.mse_loss(torch.tanh({y}), {z}.detach())",
    "torch.logsumexp({y}, -1).mul({r}).sum() / {n}",
    "(1 - torch.softmax({y}, -1).gather(1, {t}[:, None])).square().mean()",
    "F.relu({y}).pow(2).mean() + F.cross_entropy({y}, {t})",
)


def losses(seed: int) -> Drawn:
    """A loss on a linear layer, of a seed; its logits have more than a MiB."""
    draft = Draft(seed)
    rng = draft.rng
    dtype = rng.choices(DTYPES, (6, 3, 1))[0]
    rows, classes = rng.choice(((300, 1000), (519, 1030), (128, 4099), (1031, 520)))
    k = rng.choice((8, 16, 33))
    x = draft.new_input((rows, k), dtype, grad=True)

    def layer() -> str:
        form = rng.choice(("dense", "dense", "permuted"))
        w = draft.new_input((classes, k), dtype, form, grad=rng.random() < 0.9, scale=k**-0.5)
        text = rng.choice(("F.linear({x}, {w})", "{x} @ {w}.t()", "F.linear({x}, {w}, {b})"))
        b = draft.new_input((classes,), dtype, grad=True) if "{b}" in text else ""
        return draft.add(text.format(x=x, w=w, b=b))

    words = Words(
        {
            "z": layer,
            "w": lambda: draft.new_input((classes,), dtype, grad=False),
            "r": lambda: draft.new_input((rows,), dtype, grad=rng.random() < 0.5),
            "t": lambda: draft.add(
                f"({draft.new_input((rows,), torch.int64)}.abs() * 37) % {classes}"
            ),
        },
        {"y": layer(), "n": str(rows)},
    )
    for _ in range(6):
        try:
            out = draft.add(words.fill(rng.choice(LOSSES)))
        except Refused:
            continue
        if rng.random() < 0.2:  # the logits escape
            return draft.finish([out, words.known["y"]], backward=True)
        break
    else:
        out = draft.add(words.fill("{y}.sum(-1)"))
    return draft.finish([out], backward=True)


def always(whole: Straight, how: How) -> Failure | None:
    """Kernels with products whether they pay or not, in most programs."""
    if random.Random(whole.text()).random() < 0.25:
        return whole.check(how)
    with mock.patch.object(contract, "MIN_GAIN", -1e9):
        return whole.check(how)


def chunked(whole: Straight, how: How) -> Failure | None:
    """In chunks of a MiB."""
    return whole.check(How(how.backward, how.dynamic, how.backend, how.options | {"chunk_mib": 1}))


__all__ = ["always", "attention", "chunked", "losses"]
