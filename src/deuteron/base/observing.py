"""Who looks at graphs while they are compiled: `explain`, reports, measurements of the cost model.

An observer is called with each graph that Dynamo hands over, and gives a watcher of it. A watcher
is shown what the stages made of each part (forward, backward, inference), with its `Context`, and
gives what shall be called in its stead: what it was shown, or something that does the same and
measures. An observed graph is compiled anew: the graph cache, which keeps no artifacts, is left
aside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol


class Watcher(Protocol):
    """Of one graph of Dynamo's."""

    def compiled(self, loaded: Any, context: Any) -> Callable[[list[Any]], Sequence[Any]]:
        """What is to be called: ``loaded.call`` or another callable of the same kind."""


Observer = Callable[[Any, Sequence[Any]], Watcher]  # (Dynamo's graph, example inputs)

_OBSERVERS: ContextVar[tuple[Observer, ...]] = ContextVar("deuteron_observers", default=())
# Give the observers that options and torch's logs ask for; from the file that the option `report`
# names. The package puts them here: they are of a later layer.
MAKERS: list[Callable[[str | None], tuple[Observer, ...]]] = []


@contextmanager
def observed_by(observer: Observer) -> Iterator[None]:
    """Shows it the graphs whose forward compiles inside the block, and their backwards."""
    token = _OBSERVERS.set((*_OBSERVERS.get(), observer))
    try:
        yield
    finally:
        _OBSERVERS.reset(token)


def observers(report: str | None) -> tuple[Observer, ...]:
    """Those of this moment, and those that are asked for."""
    return (*_OBSERVERS.get(), *(o for make in MAKERS for o in make(report)))


__all__ = ["MAKERS", "Observer", "Watcher", "observed_by", "observers"]
