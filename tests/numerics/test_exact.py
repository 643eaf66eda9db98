"""Values bit by bit as eager's, on the CPU and by Triton's interpreter: constants viewed as another
dtype, numbers where tensors were traced and among integers, promotion that rounds, integers that
wrap around, last bits and the signs of zeros."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.interpreting import reported
from tests.numerics.programs import GROUPS, differences

SCRIPT = Path(__file__).with_name("programs.py")


@pytest.mark.parametrize("name", GROUPS)
def test_on_the_cpu(name: str) -> None:
    assert not differences(name, "deuteron")


@pytest.mark.xdist_group("numerics interpreted")
@pytest.mark.parametrize("name", GROUPS)
def test_interpreted(name: str) -> None:
    (differing,) = [x["differences"] for x in reported(SCRIPT) if x["group"] == name]
    assert not differing
