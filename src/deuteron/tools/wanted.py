"""Who wants to see what is compiled: the option `report`, TORCH_LOGS, TORCH_TRACE.

In: the option. Out: observers (`base.observing`). The package gives `observers_wanted` to the
backend, which calls it for every graph: it imports nothing where nobody wants anything.
"""

from __future__ import annotations

from torch._logging import _internal as logging

from deuteron.base.observing import Observer


def observers_wanted(report: str | None) -> tuple[Observer, ...]:
    """Perhaps none."""
    found: list[Observer] = []
    if report is not None:
        from deuteron.tools.report import reporter

        found.append(reporter(report))
    if logging.log_state.artifact_names or logging.trace_log.handlers:
        from deuteron.tools import logs

        if logs.wanted():
            found.append(logs.Logs())
    return tuple(found)


__all__ = ["observers_wanted"]
