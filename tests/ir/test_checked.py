"""Positions that are compared and not loaded: checked by the reference, printed and read back."""

from __future__ import annotations

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


def test_proven() -> None:
    i = Axis("i0", 3)
    assert E.checked(E.index_value(i.index), const(4)) == E.index_value(i.index)
