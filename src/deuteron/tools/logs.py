"""What torch's own logs and traces expect of a compiler: TORCH_LOGS and TORCH_TRACE (tlparse).

In: parts as they are compiled. Out, where it is asked for: of TORCH_LOGS `output_code` (the emitted
module), `kernel_code`, `schedule`, `fusion` (every pair that was merged or refused), `perf_hints`
(refusals with what is at stake); of TORCH_TRACE the module as `inductor_output_code`, where tlparse
looks for code, the schedule and the decisions as artifacts. What Dynamo logs (graph breaks,
recompilations) it logs for every backend.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._logging import _internal as logging

from deuteron.schedule.printer import print_schedule
from deuteron.tools.advice import advice
from deuteron.tools.words import amount

# The logger's place among torch's, which have the handlers.
PLACE = "torch._dynamo.backends.deuteron"
ARTIFACTS = ("output_code", "kernel_code", "schedule", "fusion", "perf_hints")


def wanted() -> bool:
    """Whether anybody listens."""
    enabled = any(logging.log_state.is_artifact_enabled(name) for name in ARTIFACTS)
    return enabled or bool(logging.trace_log.handlers)


class Logs:
    """An observer (`base.observing`) and its own watcher: it changes nothing."""

    def __call__(self, gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Logs:
        return self

    def compiled(self, loaded: Any, context: Any) -> Callable[[list[Any]], Sequence[Any]]:
        for name, text in texts(loaded, context).items():
            if logging.log_state.is_artifact_enabled(name):
                logging.getArtifactLogger(PLACE, name).debug("%s", text())
        if logging.trace_log.handlers:
            trace(loaded, context)
        return loaded.call  # type: ignore[no-any-return]


def texts(loaded: Any, context: Any) -> dict[str, Callable[[], str]]:
    """Artifact -> what makes its text."""
    fused = [d for d in context.record.of("decision") if d["subject"] == "fuse"]
    return {
        "output_code": lambda: loaded.module.text,
        "kernel_code": lambda: "\n\n".join(
            dict.fromkeys(k.source for k in loaded.kernels.values())
        ),
        "schedule": lambda: print_schedule(loaded.schedule),
        "fusion": lambda: "\n".join(map(fusion_line, fused)),
        "perf_hints": lambda: "\n".join(
            f"{d['first']} and {d['second']} share no kernel ({d['reason']}: "
            f"{advice(d['reason']).meaning}): {amount(d['bytes'], 'B')} at stake. "
            f"{advice(d['reason']).change}"
            for d in sorted(fused, key=lambda d: -d["bytes"])
            if not d["accepted"] and d["bytes"]
        ),
    }


def fusion_line(d: dict[str, Any]) -> str:
    verdict = "fused" if d["accepted"] else "not fused"
    detail = f" ({d['detail']})" if d["detail"] else ""
    return f"{verdict}: {d['first']} + {d['second']}: {d['reason']}{detail}"


def trace(loaded: Any, context: Any) -> None:
    """The structured trace's artifacts."""
    name = f"deuteron_{context.phase}_{context.number}"
    torch._logging.trace_structured(
        "inductor_output_code",
        lambda: {"filename": f"{name}.py"},
        payload_fn=lambda: loaded.module.text,
    )
    decisions = context.record.of("decision")
    artifacts: dict[str, tuple[str, Callable[[], str]]] = {
        f"{name}_schedule": ("string", lambda: print_schedule(loaded.schedule)),
        f"{name}_decisions": ("json", lambda: json.dumps(decisions, default=str)),
    }
    for artifact, (encoding, text) in artifacts.items():
        logging.trace_structured_artifact(artifact, encoding, text)


__all__ = ["ARTIFACTS", "Logs", "wanted"]
