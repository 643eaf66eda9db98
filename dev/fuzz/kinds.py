"""The kinds of random programs, and which kind a seed is.

A row: how often, what makes the program of a seed (and a number of lines at most), and what judges
it. Programs of lines of any operators are `mixed`; the others are of one kind of work.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dev.check.test_cases import Failure, How, Straight
from dev.fuzz.assertions import assertions, judge
from dev.fuzz.attention import always, attention, chunked, losses
from dev.fuzz.checkpoints import checkpoints
from dev.fuzz.convolutions import network
from dev.fuzz.programs import program
from dev.fuzz.vectors import vectors

Judge = Callable[[Straight, How], Failure | None]


def checked(whole: Straight, how: How) -> Failure | None:
    return whole.check(how)


@dataclass(frozen=True)
class Kind:
    """`sets`: sets of inputs that eager refuses belong to the program, too."""

    share: float
    make: Callable[[int, int], Any]
    judge: Judge = checked
    sets: bool = False


def of_seed(make: Callable[[int], Any]) -> Callable[[int, int], Any]:
    return lambda seed, lines: make(seed)


KINDS = {
    "mixed": Kind(5, program),
    "networks": Kind(2, of_seed(network)),
    "vectors": Kind(1.5, of_seed(vectors)),
    "assertions": Kind(1, of_seed(assertions), judge, sets=True),
    "checkpoints": Kind(1, of_seed(checkpoints)),
    "attention": Kind(1.5, of_seed(attention), always),
    "losses": Kind(0.5, of_seed(losses), chunked),
}


def kind_of(seed: int, asked: str) -> str:
    """The kind that was asked for; of "all", the seed's."""
    if asked != "all":
        return asked
    names = list(KINDS)
    return random.Random(f"kind {seed}").choices(names, [KINDS[n].share for n in names])[0]
