"""Which operators TorchInductor generates code for: the measure of Deuteron's own share.

In: operators of `op_db`. Out: for each, whether Inductor's lowering makes at least one computation
of its own from the samples (fallbacks and extern kernels are not). Its code generation is not run:
whether there is a kernel is known when a graph is lowered.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch

PEER_NAME = "deuteron_peer"  # the backend's name while it is measured
PEER_FILE = "inductor.json"


def generated_by_peer() -> frozenset[str]:
    """The operators that the kept measurement names."""
    text = files(__package__).joinpath(PEER_FILE).read_text(encoding="utf-8")
    return frozenset(json.loads(text)["generated"])


def counting_backend(counts: list[int]) -> Callable[..., Any]:
    """A torch.compile backend that runs graphs as traced, and notes in `counts` how many
    computations of its own Inductor makes of each."""
    from torch._inductor import config, ir
    from torch._inductor.compile_fx import compile_fx, record_original_output_strides
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V

    def inner(gm: torch.fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Any:
        from torch._dynamo.utils import detect_fake_mode

        mode = detect_fake_mode(example_inputs)
        record_original_output_strides(gm)
        lowering = GraphLowering(
            gm, example_inputs=example_inputs, shape_env=mode.shape_env if mode else None
        )
        with V.set_graph_handler(lowering), V.set_fake_mode(mode):
            lowering.run(*example_inputs)
            own = [b for b in lowering.buffers if isinstance(b, ir.ComputedBuffer)]
        counts.append(len(own))

        def call(args: list[Any]) -> Any:
            given = list(args)
            args.clear()
            return torch.fx.Interpreter(gm).run(*given)

        call._boxed_call = True  # type: ignore[attr-defined]
        return call

    def backend(gm: torch.fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
        with config.patch(fallback_random=True, fx_graph_cache=False):
            return compile_fx(gm, inputs, inner_compile=inner)

    return backend


def measure(names: Sequence[str], say: Callable[[str], None]) -> dict[str, Any]:
    """The file's content: operators with code of their own, and those that could not be asked."""
    from dev.coverage.cases import Unsuitable, applies, cases, entries
    from dev.coverage.worker import Job, Row, Runner, capturing, seedless
    from dev.coverage.worker import trial as tried

    seedless()
    table = entries()
    generated: list[str] = []
    unknown: dict[str, str] = {}
    for name in names:
        op = table[name]
        dtype = next((d for d in PEER_DTYPES if applies(op, d, "forward", "cpu")), None)
        if dtype is None:
            unknown[name] = "no dtype"
            continue
        job = Job(name, str(dtype).removeprefix("torch."), "forward")
        counts: list[int] = []
        runner = Runner(job, Row(job.key, name, job.dtype, "forward"))
        backend = counting_backend(counts)
        for case in cases(op, dtype, "forward", "cpu", PEER_SAMPLES):
            try:
                one = tried(case, False)
                with capturing():
                    runner.run([one], backend, None)
            except Unsuitable:
                continue
            except Exception as e:  # noqa: BLE001 - listed with its name
                unknown.setdefault(name, f"{type(e).__name__}")
            if sum(counts):
                break
        if sum(counts):
            generated.append(name)
            unknown.pop(name, None)
        say(f"{name}: {sum(counts)}")
    return {"torch": torch.__version__, "generated": generated, "unknown": unknown}


def write_peer(pattern: str, path: Path) -> int:
    """`python -m dev coverage --peer FILE`."""
    from dev.coverage.cases import entries, matching_names

    measured = measure(
        matching_names(pattern, list(entries())), lambda text: print(text, flush=True)
    )
    path.write_text(json.dumps(measured, indent=1) + "\n", encoding="utf-8")
    print(f"{len(measured['generated'])} operators, {len(measured['unknown'])} unknown: {path}")
    return 0


PEER_SAMPLES = 5
PEER_DTYPES = (torch.float32, torch.int64, torch.bool, torch.complex64)
__all__ = ["counting_backend", "generated_by_peer", "measure", "write_peer"]
