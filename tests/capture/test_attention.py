"""FlexAttention as plain code: values, gradients and memory layout against eager's, over the forms
in which people write scores and masks. Eager refuses gradients on a CPU by a check of its own,
which these tests leave out."""

import pytest
import torch
from torch.nn.attention import flex_attention as module
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint

from deuteron.backend import collecting

BIAS = torch.randn(4, 40, 40, generator=torch.Generator().manual_seed(1)).requires_grad_()
RELATIVE = torch.randn(4, 79, generator=torch.Generator().manual_seed(2)).requires_grad_()
DOCUMENT = torch.arange(40) // 13


@pytest.fixture(autouse=True)
def gradients_anywhere(monkeypatch):
    monkeypatch.setattr(module, "_validate_device", lambda *tensors: None)


def blocks(mask, m=40, n=40):
    return create_block_mask(mask, None, None, m, n, device="cpu", BLOCK_SIZE=16)


CAUSAL = blocks(lambda b, h, i, j: i >= j)
WINDOW = blocks(lambda b, h, i, j: (i >= j) & (i - j < 11))
SAME = blocks(lambda b, h, i, j: DOCUMENT[i] == DOCUMENT[j])
EMPTY_ROWS = blocks(lambda b, h, i, j: (i >= j) & (i > 6))
SHORTER = blocks(lambda b, h, i, j: i + 16 >= j, 24, 40)


def with_mask(mask, **more):
    return lambda q, k, v: flex_attention(q, k, v, block_mask=mask, **more)


def with_scores(score, mask=None):
    return lambda q, k, v: flex_attention(q, k, v, score_mod=score, block_mask=mask)


def finite_totals(q, k, v):
    out, lse = flex_attention(q, k, v, block_mask=EMPTY_ROWS, return_lse=True)
    return out, torch.where(lse == -float("inf"), 0.0, lse)


def repeated(q, k, v):
    inner = lambda q, k, v: flex_attention(q.sin(), k, v, block_mask=CAUSAL)  # noqa: E731
    return checkpoint(inner, q, k, v, use_reentrant=False)


PROGRAMS = {
    "causal": with_mask(CAUSAL),
    "window": with_mask(WINDOW),
    "documents": with_mask(SAME),
    "rows without any": with_mask(EMPTY_ROWS),
    "options of kernels": with_mask(CAUSAL, kernel_options={"BLOCK_M": 16}),
    "slopes": with_scores(lambda s, b, h, i, j: s - (i - j) * torch.exp2(-(h + 1.0))),
    "soft cap": with_scores(lambda s, b, h, i, j: 20 * torch.tanh(s / 20), CAUSAL),
    "bias": with_scores(lambda s, b, h, i, j: s + BIAS[h, i, j]),
    "relative bias": with_scores(lambda s, b, h, i, j: s + RELATIVE[h, i - j + 39], CAUSAL),
    "totals": finite_totals,
    "checkpoint": repeated,
}


def tensors(batch=1, heads=4, rows=40, keys=40, width=8, out=8, groups=None, **how):
    dtype, swapped = how.get("dtype", torch.float32), how.get("swapped", False)
    made = []
    for h, n, e in (
        (heads, rows, width),
        (groups or heads, keys, width),
        (groups or heads, keys, out),
    ):
        x = torch.randn(batch, n, h, e).transpose(1, 2) if swapped else torch.randn(batch, h, n, e)
        made.append(x.to(dtype).requires_grad_())
    return made


def step(f, xs):
    xs = [x.detach().clone().requires_grad_() for x in xs]
    BIAS.grad = RELATIVE.grad = None
    out = torch.utils._pytree.tree_leaves(f(*xs))
    weight = [torch.linspace(-1, 1, t.numel()).reshape(t.shape) for t in out]
    sum((t.float() * w).sum() for t, w in zip(out, weight, strict=True)).backward()
    captured = [p.grad for p in (BIAS, RELATIVE) if p.grad is not None]
    return [t.detach() for t in out], [*(x.grad for x in xs), *captured]


def as_eager(f, xs, tolerance=None, **kw):
    want, gradients = step(f, xs)
    compiled = torch.compile(f, backend="deuteron", **kw)
    with collecting() as records:
        for _ in range(2):
            got, grads = step(compiled, xs)
    limits = {} if tolerance is None else {"rtol": tolerance, "atol": tolerance}
    for a, b in zip((*got, *grads), (*want, *gradients), strict=True):
        torch.testing.assert_close(a, b, **limits)
    for a, b in zip(got, want, strict=True):
        assert strides(a) == strides(b)
    decisions = [e for r in records for e in r.of("decision") if e["subject"] == "attention"]
    assert decisions and all(e["accepted"] for e in decisions), decisions
    assert not [e for r in records for e in r.of("library") if "flex" in e["op"]]


def strides(t):
    return [s for s, n in zip(t.stride(), t.shape, strict=True) if n != 1]


@pytest.mark.parametrize("name", PROGRAMS)
def test_as_eager(name):
    as_eager(PROGRAMS[name], tensors())


@pytest.mark.parametrize(
    ("f", "how", "tolerance"),
    [
        (with_mask(CAUSAL, enable_gqa=True), {"groups": 2, "batch": 2}, None),
        (with_mask(SHORTER), {"rows": 24, "out": 12}, None),
        (with_mask(WINDOW), {"swapped": True, "batch": 2}, None),
        (with_mask(CAUSAL), {"dtype": torch.bfloat16}, 2e-2),
        (with_mask(CAUSAL), {"dtype": torch.float64}, None),
    ],
    ids=["groups", "lengths", "swapped", "bf16", "f64"],
)
def test_forms_of_inputs(f, how, tolerance):
    as_eager(f, tensors(**how), tolerance)


def test_changing_sizes():
    f = with_scores(lambda s, b, h, i, j: torch.where(i >= j, s * 0.5, s - 1))
    as_eager(f, tensors(rows=17, keys=17), dynamic=True)
    compiled = torch.compile(f, backend="deuteron", dynamic=True)
    with collecting() as records:
        for rows in (30, 23):
            xs = tensors(rows=rows, keys=rows)
            for got, want in zip(step(compiled, xs), step(f, xs), strict=True):
                torch.testing.assert_close(got, want)
    assert not records  # compiled once for all sizes


def test_autocast():
    def f(q, k, v):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return flex_attention(q @ torch.eye(8), k, v, block_mask=CAUSAL)

    as_eager(f, tensors(), 2e-2)


def test_scores_are_fused():
    """Scaling, masking and normalising of scores take one kernel that reads them once."""
    q, k, v = (x.detach() for x in tensors())
    with collecting() as records:
        torch.compile(with_mask(CAUSAL), backend="deuteron")(q, k, v)
    kernels = [e for r in records for e in r.of("kernel")]
    assert len(kernels) <= 3


def test_what_cannot_be_applied_everywhere_stays_a_call(monkeypatch):
    """Whatever torch refuses to vectorise: the call remains, and the Record says what it costs."""
    from deuteron.capture import attention

    def refuse(*args):
        raise RuntimeError("vmap: not like this")

    monkeypatch.setattr(attention, "attended", refuse)
    q, k, v = (x.detach() for x in tensors())
    f = with_mask(CAUSAL)
    with collecting() as records:
        y = torch.compile(f, backend="deuteron")(q, k, v)
    torch.testing.assert_close(y, f(q, k, v))
    (decision,) = [e for e in records[0].of("decision") if e["subject"] == "attention"]
    assert not decision["accepted"] and "not like this" in decision["detail"]
    assert decision["bytes"] == 4 * 4 * 40 * 40
    assert any("flex" in e["op"] for e in records[0].of("library"))
