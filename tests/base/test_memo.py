"""What the process remembers of compilations is forgotten when asked, and never grows for ever."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch

import deuteron  # noqa: F401
from deuteron.base import memo
from deuteron.base.memo import MEMO, Memo
from deuteron.ir.expr import load, op
from deuteron.ir.index import Axis, Sym, atom


class Node:
    def __init__(self, key: str) -> None:
        self.key = key


def test_answers_go_and_nodes_that_are_held_stay() -> None:
    tables = Memo()
    answers, nodes = tables.answers(), tables.nodes(lambda n: n.key)
    held = nodes["held"] = Node("held")
    nodes["free"] = Node("free")
    answers[held] = 1
    assert len(tables) == 3
    tables.clear()
    assert not answers and nodes == {"held": held}


def test_nothing_goes_while_a_compilation_runs() -> None:
    tables = Memo()
    answers = tables.answers()
    with tables.compiling():
        with tables.compiling():
            answers[1] = 1
            thread = threading.Thread(target=tables.clear)
            thread.start()
            thread.join()
            assert answers
        assert answers
    assert not answers


def test_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memo, "MAX_ENTRIES", 5)
    tables = Memo()
    answers = tables.answers()
    for n in (3, 6):
        with tables.compiling():
            answers.update((k, k) for k in range(n))
        assert len(answers) == (3 if n == 3 else 0)


def test_nodes_of_the_ir() -> None:
    """Equal nodes are one node before and after, and what nobody holds is freed."""
    i = Axis("i", atom(Sym("memo_n")) + 3)
    x = load("x", (i.index * 4 + 1,), "f32")
    y = op("add", x, x)
    z = weakref.ref(op("mul", y, load("z", (i.index // 7,), "f32")))
    gc.collect()
    MEMO.clear()
    assert z() is None
    again = Axis("i", atom(Sym("memo_n")) + 3)
    assert again is i
    assert op("add", load("x", (again.index * 4 + 1,), "f32"), x) is y


def test_nodes_made_meanwhile() -> None:
    """By threads that are in no compilation: nothing fails."""
    failures: list[Exception] = []
    stop = threading.Event()

    def make() -> None:
        k = 0
        try:
            while not stop.is_set():
                k += 1
                load("made", (Axis("k", k).index,), "f32")
        except Exception as e:  # noqa: BLE001 - it is compared below
            failures.append(e)

    thread = threading.Thread(target=make)
    thread.start()
    for _ in range(50):
        MEMO.clear()
    stop.set()
    thread.join()
    assert not failures


def test_dynamo_reset_reaches_it() -> None:
    """A service that compiles anew and anew has no more in memory than after the first program."""

    def entries(n: int) -> int:
        f = torch.compile(lambda x: (x * n + 1).softmax(-1).sum(0), backend="deuteron")
        f(torch.randn(n, n + 1))
        size = len(MEMO)
        torch._dynamo.reset()
        gc.collect()
        assert len(MEMO) < size
        return len(MEMO)

    sizes = [entries(n) for n in range(5, 15)]
    assert max(sizes[2:]) <= sizes[1] + 20, sizes
