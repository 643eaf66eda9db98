"""Deuteron: an operator-fusion compiler for PyTorch. ``torch.compile(model,
backend="deuteron")``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from deuteron.base.errors import DeuteronError
from deuteron.base.observing import MAKERS
from deuteron.base.package import VERSION

if TYPE_CHECKING:
    from deuteron.tools.explain import Explanation, explain
    from deuteron.tools.report import report

__all__ = ["DeuteronError", "Explanation", "compile", "explain", "report"]
__version__ = VERSION


def compile(
    model: Callable[..., Any] | None = None,
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
    dynamic: bool | None = None,
    fullgraph: bool = False,
) -> Any:
    """``torch.compile`` with Deuteron; also a decorator. Options: see
    `deuteron.base.options.Options`.

    A mode and options may be given together; an unknown one raises `OptionError` here, not at the
    first call.
    """
    import torch

    from deuteron.backend import deuteron_backend
    from deuteron.base.options import Options

    Options.make(mode, options)
    given = {**(options or {}), **({"mode": mode} if mode is not None else {})}
    return torch.compile(
        model, backend=deuteron_backend, options=given or None, dynamic=dynamic, fullgraph=fullgraph
    )


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from deuteron.tools import report  # imported when asked for: it brings torch

    return getattr(report, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _observers(report: str | None) -> Any:
    from deuteron.tools.wanted import observers_wanted

    return observers_wanted(report)


MAKERS.append(_observers)
