"""What the oracle allows for results of expanded inputs, whose elements move together."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dev.check.differences import differences
from dev.check.oracle import Oracle, Seen, see


def normalized(xs: list[Tensor]) -> Tensor:
    return F.batch_norm(xs[0], None, None, xs[1], xs[2], training=True)


def oracle_of(xs: list[Tensor]) -> Oracle:
    return Oracle(
        lambda t, seed=0: see(normalized, t, False), lambda t: see(normalized, t, False), xs
    )


def shown(xs: list[Tensor], moved: float) -> Seen:
    """As if the mean of each channel were `moved` units in the last place off."""
    seen = see(normalized, [x.clone() for x in xs], False)
    unit = moved * torch.finfo(torch.float32).eps * xs[0].abs()
    seen.values["out0"] = seen.values["out0"] + unit * 1e-5**-0.5 * xs[1]
    return seen


def test_the_mean_of_equal_numbers_may_be_rounded() -> None:
    """Eager's is exact: without noise of its own, the result is no measure of what is allowed."""
    xs = [torch.tensor([[8.3]]).expand(3, 1), torch.tensor([3.0]), torch.tensor([2.0])]
    assert not differences(shown(xs, 1.0), oracle_of(xs))
    assert differences(shown(xs, 100.0), oracle_of(xs))


def test_storage_that_is_read_otherwise_is_no_measure() -> None:
    """A program that sees the memory of its input does something else with an input of its own."""

    def read(xs: list[Tensor]) -> Tensor:
        return xs[0].as_strided((2,), (1,))

    x = [torch.tensor([1.0, 2.0, 3.0]).view(1, 3).expand(2, 3)]
    oracle = Oracle(lambda t, seed=0: see(read, t, False), lambda t: see(read, t, False), x)
    assert oracle.unexpanded is not None  # the first two are the same
    y = [torch.tensor([[1.0], [2.0]]).expand(2, 3)]
    oracle = Oracle(lambda t, seed=0: see(read, t, False), lambda t: see(read, t, False), y)
    assert oracle.unexpanded is None
