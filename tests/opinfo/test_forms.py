"""The forms of `python -m dev coverage`: each changes what it says, and what is wrong shows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dev.coverage.forms import FORMS, Case, tensors_of
from dev.coverage.worker import Job, Row, Runner, Unsuitable, trial


@pytest.fixture(autouse=True)
def again() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def case_of(op: Callable[..., Any], *args: Any, **kwargs: Any) -> Case:
    tree = (list(args), kwargs)
    return Case("sample", op, tree, tensors_of(tree))


def formed(part: str, case: Case) -> list[Case]:
    return list(FORMS[part](case, case.tensors[0].dtype))


def runner(part: str, backend: Any) -> Runner:
    job = Job("op", "float32", part, backend=backend)
    return Runner(job, Row("", "op", "float32", part))


def test_lists_of_one_element() -> None:
    """Only what eager takes, argument by argument."""
    x = torch.randn(1, 2, 6, 6)
    cases = formed("lists", case_of(F.avg_pool2d, x, 3, stride=(2, 2), ceil_mode=True))
    assert [c.tree for c in cases] == [
        ([x, [3]], {"stride": (2, 2), "ceil_mode": True}),
        ([x, 3], {"stride": [2], "ceil_mode": True}),
    ]
    assert not formed("lists", case_of(F.avg_pool2d, x, (3, 2)))
    assert not formed("lists", case_of(torch.cumsum, x, 1))


def test_other_numbers() -> None:
    x = torch.randn(3, 4)
    same, other = formed("numbers", case_of(torch.add, x, x, alpha=2.0))
    assert same.tree[1] == {"alpha": 2.0} and other.tree[1] == {"alpha": 3.0}
    assert len(formed("numbers", case_of(torch.add, x, x))) == 1, "no number"
    assert len(formed("numbers", case_of(torch.sum, x, 1))) == 1, "eager refuses the next"


def test_elements_and_dtypes() -> None:
    x, y = torch.randn(40), torch.randn(40)
    zeros, infinities = formed("zeros", case_of(torch.add, x, y))
    for t in zeros.tensors:
        assert (t == 0).any() and t[t == 0].signbit().any() and not t[t == 0].signbit().all()
    for t in infinities.tensors:
        assert t.isnan().any() and (t == torch.inf).any() and (t == -torch.inf).any()
    dtypes = [[t.dtype for t in c.tensors] for c in formed("mixed", case_of(torch.add, x, y))]
    assert [torch.float32, torch.int64] in dtypes and [torch.float32, torch.bfloat16] in dtypes
    assert not formed("mixed", case_of(torch.neg, x))


def test_chains_are_judged_by_float64() -> None:
    """Rounding between operators may stay or go; a wrong factor shows."""
    [chain] = formed("chains", case_of(torch.softmax, torch.randn(8, 50).bfloat16(), -1))
    checker = runner("chains", "deuteron")
    checker.check([trial(chain, False)])
    assert checker.row.right == 1 and not checker.row.wrong
    one = trial(chain, False)
    seen = one.oracle.run([t.clone() for t in chain.tensors])
    seen.values["out0"] = seen.values["out0"] * 1.05
    assert checker.problems(one, seen)


def constant_numbers(gm: Any, inputs: Any) -> Any:
    """A backend that takes every number that is an argument for the one of the first call."""
    first = list(inputs)

    def call(*args: Any) -> Any:
        return gm(*[a if isinstance(a, Tensor) and a.dim() else b for a, b in zip(args, first)])

    return call


def test_numbers_that_are_taken_for_constants_show() -> None:
    cases = formed("numbers", case_of(torch.add, torch.randn(3, 4), torch.randn(3, 4), alpha=2.0))
    for backend, right in (("deuteron", 2), (constant_numbers, 1)):
        checker = runner("numbers", backend)
        checker.check([trial(c, False) for c in cases])
        assert (checker.row.right, len(checker.row.wrong)) == (right, 2 - right), checker.row


def test_what_eager_refuses_must_be_refused() -> None:
    """By a backend that casts the operands it is not."""
    x = torch.randn(4, 4)
    case = case_of(torch.mm, x, x.double())
    with pytest.raises(Unsuitable) as refusal:
        trial(case, False)
    error = refusal.value.__cause__
    assert isinstance(error, RuntimeError)
    checker = runner("mixed", "deuteron")
    checker.refused(case, error)
    assert checker.row.right == 1 and not checker.row.wrong

    def casting(gm: Any, inputs: Any) -> Any:
        return lambda *args: (args[0].double() @ args[1].double(),)

    def broken(gm: Any, inputs: Any) -> Any:
        raise KeyError("no operator")

    for backend in (casting, broken):
        checker = runner("mixed", backend)
        checker.refused(case, error)
        assert checker.row.wrong and not checker.row.right, checker.row
