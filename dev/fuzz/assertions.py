"""Random programs whose sizes data decides, and what they assert of these: they must raise where
eager raises, before any memory is touched that is not theirs, and be right elsewhere.

In: a seed. Out: a program (`fuzz_draft.Drawn`) with several sets of inputs of the same sizes, some
of which break what it asserts; and `judge`, which calls one compiled program on all of them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dev.check.oracle import copies
from dev.check.test_cases import CAPTURE_BACKENDS, Failure, How, Line, Straight, backend, described
from dev.fuzz.draft import Draft, Drawn, Refused

INPUT_SETS = 6
# A tensor whose size data decides: {x} floats, {i} small integers, {m} truth values, of one size.
COUNTING_LINES = (
    "{i}.nonzero()[:, 0]",
    "{m}.nonzero().squeeze(1)",
    "torch.masked_select({x}, {m})",
    "{x}[{m}]",
    "{x}[{i} > 0]",
    "torch.nonzero({i} * {m}).flatten()",
)
# A number that data decides, and what of its range must be said for any use: {k} the number.
NUMBER_LINES = ("{i}.sum().item()", "{i}.max().item()", "{m}.sum().item()", "{i}[0].item()")
# Assertions about a size {s}; {n} is what it is for the first set of inputs, {a} the sets' size.
ASSERTED_CONDITIONS = (
    "torch._check({s} == {n})",
    "torch._check({s} <= {n})",
    "torch._check({s} >= {n})",
    "torch._check({s} < {a})",
    "torch._check({s} > 0)",
    "torch._check({s} != {n} + 1)",
    "torch._check({s} % 2 == {n} % 2)",
)
# Uses of {t}, a tensor of size {s}; {y} is a tensor of size {n}, right if the assertion says so.
USING_LINES = (
    "{t} + 3",
    "{t}.float().sin().sum()",
    "{t}[: {n}] * 2",
    "{t} + {y}",
    "torch.cat([{t}.float(), {x}])",
    "{t}.float().softmax(0)",
    "{t}.reshape(-1, 1) * {y}",
    "torch.where({t} > 0, {t}, -{t})",
)
# Uses of a number {k}.
FROM_NUMBERS = (
    "torch.zeros({k}) + 1",
    "{x}[:{k}] * 2",
    "{x}.narrow(0, 0, {k}).sin()",
    "torch.arange({k}) * 3",
    "{x}.new_full(({k},), 0.5).sum()",
    "torch.ones({k}, 2).sum(1)",
)


def assertions(seed: int) -> Drawn:
    """The program of a seed."""
    draft = Draft(seed)
    rng = draft.rng
    size = rng.choice((1, 4, 7, 8, 16, 33))
    sets = inputs(seed, size)
    for n, ts in sets.items():
        draft.env[n] = draft.inputs[n] = ts[0]
    words = {"x": "x0", "i": "x1", "m": "x2", "a": size}
    outputs: list[str] = []
    for _ in range(rng.randint(1, 3)):
        try:
            grow = counted if rng.random() < 0.6 else numbered
            outputs += grow(draft, words)
        except Refused:
            continue
    if not outputs:
        outputs.append(draft.add("x1.nonzero() + 1"))
    return draft.finish(outputs, False, with_sizes(draft, sets))


def inputs(seed: int, size: int) -> dict[str, tuple[Tensor, ...]]:
    """Floats, integers of 0 to 3, truth values; the second set has as many that count as the first
    has, in other places, and the last ones none or all."""
    made: dict[str, list[Tensor]] = {"x0": [], "x1": [], "x2": []}
    for k in range(INPUT_SETS):
        g = torch.Generator().manual_seed(seed * 31 + max(0, k - 1))
        x = torch.randn(size, generator=g)
        i = torch.randint(0, 4, (size,), generator=g)
        m = torch.rand(size, generator=g) < 0.5
        if k == 1:
            x, i, m = x + 1, i.roll(1), m.roll(1)
        if k >= INPUT_SETS - 2:
            i, m = torch.full_like(i, 2 * (k % 2)), torch.full_like(m, bool(k % 2))
        for name, t in zip(made, (x, i, m)):
            made[name].append(t)
    return {n: tuple(ts) for n, ts in made.items()}


def with_sizes(draft: Draft, sets: dict[str, tuple[Tensor, ...]]) -> dict[str, tuple[Tensor, ...]]:
    """Also the inputs that have the sizes of the first set, in every set."""
    return {n: sets.get(n, (t,) * INPUT_SETS) for n, t in draft.inputs.items()}


def counted(draft: Draft, words: dict[str, Any]) -> list[str]:
    """A tensor whose size data decides, an assertion, and uses."""
    rng = draft.rng
    t = draft.add(rng.choice(COUNTING_LINES).format(**words))
    n = draft.value(t).shape[0]
    asserted(draft, f"{t}.size(0)", n, words)
    y = draft.new_input((n,), torch.float32)
    numbers = []
    for text in rng.sample(USING_LINES, rng.randint(1, 3)):
        if "{y}" in text and not said(draft, f"{t}.size(0) == {n}"):
            if rng.random() < 0.7:
                continue  # eager decides at every set; the graph cannot be traced without a word
            draft.lines.append(line(f"torch._check({t}.size(0) == {n})"))
        numbers.append(draft.add(text.format(t=t, y=y, n=n, **words)))
    return numbers


def numbered(draft: Draft, words: dict[str, Any]) -> list[str]:
    """A number that data decides, what is said of it, and uses."""
    rng = draft.rng
    k = draft.add(rng.choice(NUMBER_LINES).format(**words))
    n = int(draft.env[k])
    if n > words["a"]:
        raise Refused
    draft.lines.append(line(f"torch._check({k} >= 0)"))
    draft.lines.append(line(f"torch._check({k} <= {words['a']})"))
    asserted(draft, k, n, words)
    texts = rng.sample(FROM_NUMBERS, rng.randint(1, 2))
    return [draft.add(t.format(k=k, **words)) for t in texts]


def asserted(draft: Draft, size: str, n: int, words: dict[str, Any]) -> None:
    """One or two assertions that hold for the first set of inputs."""
    for text in draft.rng.sample(ASSERTED_CONDITIONS, draft.rng.randint(0, 2)):
        filled = text.format(s=size, n=n, **words)
        try:
            eval(filled, draft.env)
        except Exception:  # noqa: BLE001 - it would never hold
            continue
        draft.lines.append(line(filled))


def said(draft: Draft, what: str) -> bool:
    return any(what in x.text for x in draft.lines)


def line(text: str) -> Line:
    return Line(text, None)


# -------------------------------------------------------------------------------------- judging
def judge(whole: Straight, how: How) -> Failure | None:
    """What is wrong when one compiled program is called on all sets of inputs; `torch` where its
    capture alone does the same."""
    try:
        mine = outcomes(whole, how.backend, how)
    except Exception as e:  # noqa: BLE001 - whatever compiling raises
        return own("error", described(e), whole, how)
    expected = outcomes(whole, None, how)
    for k, (got, right) in enumerate(zip(mine, expected)):
        text = difference(got, right)
        if text:
            return own("wrong", f"inputs {k}: {text}", whole, how)
    return None


def own(kind: str, text: str, whole: Straight, how: How) -> Failure:
    """Whose failure it is: torch's where Dynamo alone shows it. That AOTAutograd drops an assertion
    whose size it then takes for known (``torch._check(n == 4)``) is no excuse."""
    expected = outcomes(whole, None, how)
    try:
        captured = outcomes(whole, CAPTURE_BACKENDS[-1], how)
    except Exception:  # noqa: BLE001 - the capture fails as well
        return Failure("torch", text)
    same = all(not difference(c, e) for c, e in zip(captured, expected))
    return Failure(kind if same else "torch", text)


def outcomes(whole: Straight, name: Any, how: How) -> list[Any]:
    """Of each set: the results, or the error as text. `name`: a backend; nothing for eager. What
    the first set raises when it compiles is raised."""
    fn = whole.function()
    torch._dynamo.reset()
    config = torch._dynamo.config.patch(
        capture_dynamic_output_shape_ops=True, capture_scalar_outputs=True
    )
    made: list[Any] = []
    with config:
        if name is not None:
            given = {"options": how.options} if how.options and name == how.backend else {}
            compiler = backend(replace(how, backend=name))
            fn = torch.compile(fn, backend=compiler, fullgraph=True, **given)
        for k, values in enumerate(whole.sets()):
            try:
                made.append([t.detach().cpu() for t in fn(*copies(values))])
            except Exception as e:  # noqa: BLE001 - an assertion that does not hold
                if k == 0:
                    raise
                made.append(f"{type(e).__name__}: {' '.join(str(e).split())[:120]}")
    return made


def difference(got: Any, right: Any) -> str:
    """What differs; nothing where both raise, or both have the same values."""
    if isinstance(right, str) or isinstance(got, str):
        if isinstance(right, str) and isinstance(got, str):
            return ""
        if isinstance(got, str):
            return f"raises {got}; eager does not"
        return f"returns; eager raises {right}"
    for k, (a, b) in enumerate(zip(got, right)):
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"result {k} is {a.dtype} {tuple(a.shape)}, not {b.dtype} {tuple(b.shape)}"
        if not torch.allclose(a.double(), b.double(), 1e-4, 1e-5, equal_nan=True):
            return f"result {k}: {a.flatten()[:4].tolist()}, not {b.flatten()[:4].tolist()}"
    return ""
