"""Positions that are compared and not loaded: checked by the reference, printed and read back."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from deuteron.ir import expr as E
from deuteron.ir.index import Axis, const
from deuteron.ir.parser import parse_program
from deuteron.ir.printer import print_program
from deuteron.ir.program import Compute, Input, Output, Program, contiguous
from deuteron.ir.reference import run_program
from deuteron.ir.verify import verify_program


def one_hot() -> Program:
    i, j = Axis("i0", 3), Axis("i1", 4)
    place = E.checked(E.load("x", (i.index,), "i64"), const(4))
    body = E.op("eq", E.index_value(j.index), place)
    layout = contiguous((const(3), const(4)), "bool")
    x = Input("x", contiguous((const(3),), "i64"), 0)
    y = Compute("y", (i, j), body, layout)
    return Program((x, y), (Output("y", layout.shape, layout.strides),), (), {}, {}, 1)


def test_checked() -> None:
    p = one_hot()
    verify_program(p, "test")
    assert parse_program(print_program(p)) == p
    x = torch.tensor([3, 0, 2])
    assert torch.equal(run_program(p, [x])[0], torch.nn.functional.one_hot(x, 4).bool())
    with pytest.raises(IndexError):
        run_program(p, [torch.tensor([3, 4, 2])])


def test_masked() -> None:
    """What is outside is not reported where the mask does not hold."""
    [x, y] = one_hot().defs
    assert isinstance(y, Compute)
    i, j = y.axes
    shifted = E.checked(E.index_value(i.index + 3), const(4))  # inside for i = 0 alone
    for n in (1, 2):
        mask = E.op("lt", E.index_value(i.index), E.literal(n, "i64"))
        body = E.op("eq", E.index_value(j.index), E.with_mask(shifted, mask))
        p = Program((x, replace(y, body=body)), one_hot().outputs, (), {}, {}, 1)
        verify_program(p, "test")
        assert parse_program(print_program(p)) == p
        if n == 1:
            assert run_program(p, [torch.zeros(3, dtype=torch.int64)])[0][0, 3]
        else:
            with pytest.raises(IndexError):
                run_program(p, [torch.zeros(3, dtype=torch.int64)])


def test_proven() -> None:
    i = Axis("i0", 3)
    assert E.checked(E.index_value(i.index), const(4)) == E.index_value(i.index)
