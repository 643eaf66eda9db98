"""Runs one program of the demo under several compilers in one process, and reports as it goes.

In: the program's name, the compilers (the first is eager), the device, a folder. Out: lines of JSON
on standard output, each after `MESSAGE_PREFIX`: ``{"stage": text, "done": fraction}``, ``{"losses":
...}`` and last ``{"result": ...}``. The caches of the compilers are fresh folders, so that compile
times are cold; what Dynamo itself needs once is warmed up before, for all alike.

Rounds are interleaved, compiler by compiler, so that a change in the machine's speed meets all.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import os
import re
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

MESSAGE_PREFIX = "@deuteron-demo "
# A busy machine gets fewer rounds, so that the demo stays within five minutes.
ROUNDS_SECONDS, FEWEST_ROUNDS = 35.0, 4


def emit(**message: Any) -> None:
    print(MESSAGE_PREFIX + json.dumps(message), flush=True)


class Contender:
    """One compiler's copy of the program."""

    def __init__(self, backend: str, program: Any, scratch: Path) -> None:
        import torch

        from deuteron.tools.measuring import distinct

        self.backend, self.train = backend, program.train
        self.batches = program.batches
        self.module = copy.deepcopy(program.module)
        self.cuda = program.batches[0][0].is_cuda
        self.optimizer = (
            torch.optim.AdamW(self.module.parameters(), lr=2e-3, fused=True) if self.train else None
        )
        self.call: Callable[..., Any] = distinct(self.module, backend)
        if backend != "eager":
            options = {"cache_dir": str(scratch / "kernels")} if backend == "deuteron" else None
            self.call = torch.compile(
                self.call, backend=backend, dynamic=program.dynamic, options=options
            )
        self.seconds: list[float] = []
        self.losses: list[float] = []
        self.facts: dict[str, Any] = {}

    def step(self, i: int) -> Any:
        """One training step (returns the loss), or one pass over the batches (returns results)."""
        if self.optimizer is None:
            return [self.infer(k) for k in range(len(self.batches))]
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.call(*self.batches[i % len(self.batches)])
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def infer(self, k: int) -> Any:
        import torch

        with torch.no_grad():
            return self.call(*self.batches[k])

    def timed(self, i: int) -> Any:
        start = time.perf_counter()
        out = self.step(i)
        self.synchronize()
        self.seconds.append(time.perf_counter() - start)
        if self.train:
            self.losses.append(out.item())
        return out

    def synchronize(self) -> None:
        if self.cuda:
            import torch

            torch.cuda.synchronize()

    def numbers(self, out: Any) -> list[Any]:
        """What is compared: the results, or loss and gradients of the step just run."""
        if not self.train:
            return [t.detach().double().cpu() for t in out]
        grads = [p.grad for p in self.module.parameters() if p.grad is not None]
        return [t.detach().double().cpu() for t in (out, *grads)]


# ------------------------------------------------------------------------------- measurements


def relative_error(reference: list[Any], got: list[Any]) -> float:
    """Root of summed squares of all differences over that of all values."""
    wrong = sum(float((g - r).square().sum()) for r, g in zip(reference, got))
    return (wrong / sum(float(r.square().sum()) for r in reference)) ** 0.5


def reference_numbers(program: Any) -> list[Any]:
    """The first step in float64 (on the same device)."""
    import torch

    module = copy.deepcopy(program.module).double()

    def wide(batch: Any) -> list[Any]:
        return [t.double() if t.is_floating_point() else t for t in batch]

    if not program.train:
        with torch.no_grad():
            return [module(*wide(b)).cpu() for b in program.batches]
    loss = module(*wide(program.batches[0]))
    loss.backward()
    grads = [p.grad for p in module.parameters() if p.grad is not None]
    return [t.detach().cpu() for t in (loss, *grads)]


def count_eager(contender: Contender) -> dict[str, int]:
    """ATen calls that compute (views do not). Returns library calls only: eager has no others."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Count(TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            self.calls += not getattr(func, "is_view", False)
            return func(*args, **(kwargs or {}))

    with Count() as count:
        contender.step(0)
    # An inference is one pass over all batches; the others count one call of the program.
    passes = 1 if contender.train else len(contender.batches)
    return {"kernels": 0, "library": count.calls // passes}


def count_inductor(sources: list[str]) -> dict[str, int]:
    """Launches and library calls in the `call` functions of Inductor's generated modules."""
    kernels = library = 0
    for source in dict.fromkeys(sources):
        kernels += len(re.findall(r"^\s+(?:cpp_fused\w*|triton_\w+\.run)\(", source, re.M))
        library += len(re.findall(r"(?:extern_kernels\.|torch\.ops\.\w+\.)\w+[\w.]*\(", source))
    return {"kernels": kernels, "library": library}


def records(backend: str) -> Any:
    """A context that yields what the compiler records of the graphs compiled in it."""
    if backend != "deuteron":
        return contextlib.nullcontext([])
    from deuteron.backend import collecting

    return collecting()


def count_deuteron(compiled: list[Any]) -> dict[str, int]:
    return {
        "kernels": sum(len(record.of("kernel")) for record in compiled),
        "library": sum(len(record.of("library")) for record in compiled),
    }


def cold(contender: Contender) -> None:
    """The first step: the time that compiling takes, and what Inductor generated."""
    sources: list[str] = []
    if contender.backend == "inductor":
        from torch._inductor.graph import GraphLowering

        GraphLowering.save_output_code = staticmethod(sources.append)
    with records(contender.backend) as compiled:
        start = time.perf_counter()
        out = contender.step(0) if contender.train else contender.infer(0)
        contender.synchronize()
        contender.facts["compile_s"] = time.perf_counter() - start
    out = out if contender.train else contender.step(0)
    if contender.train:
        contender.losses.append(out.item())
    contender.facts["numbers"] = contender.numbers(out)
    if sources:
        contender.facts.update(count_inductor(sources))
    if contender.backend == "deuteron":
        contender.facts.update(count_deuteron(compiled))


def explain(program: Any, out: Path) -> dict[str, Any]:
    """Writes the explanation of the program as text and JSON; returns paths and kernel counts."""
    import deuteron

    module = copy.deepcopy(program.module)
    report = deuteron.explain(module, *program.batches[0], backward=program.train)
    text, data = out / f"{program.name}.explain.txt", out / f"{program.name}.explain.json"
    text.write_text(str(report))
    data.write_text(report.to_json())
    return {"explain": str(text)}


# --------------------------------------------------------------------------------------- main


def failed(contender: Contender, error: Exception) -> None:
    traceback.print_exc()
    message = " ".join(str(error).split()) or "no message"
    contender.facts = {"error": f"{type(error).__name__}: {message[:400]}"}


def rows_of(contenders: list[Contender], program: Any) -> list[dict[str, Any]]:
    """What is reported of each compiler: its facts, median time, errors against float64."""
    from torch.nn.functional import cosine_similarity

    reference = reference_numbers(program)
    eager = contenders[0].facts["numbers"]
    rows = []
    for c in contenders:
        numbers = c.facts.pop("numbers", None)
        row = {"backend": c.backend, **c.facts, "losses": c.losses}
        if numbers is not None:
            row["error_f64"] = relative_error(reference, numbers)
        if numbers is not None and not program.train:
            row["cosine"] = min(
                float(cosine_similarity(a, b).min()) for a, b in zip(eager, numbers)
            )
        if c.seconds:
            row["ms"] = statistics.median(c.seconds) * 1e3
        rows.append(row)
    return rows


def run(name: str, backends: list[str], device: str, out: Path, scratch: Path) -> None:
    emit(stage="loading", done=0.0)
    import torch

    from deuteron.tools.demo_programs import PROGRAMS
    from deuteron.tools.measuring import peak_bytes, warm_up

    device = device if device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    program = PROGRAMS[name](device)
    emit(title=program.title)
    emit(stage="warming up Dynamo", done=0.05)
    warm_up(device)
    contenders = [Contender(b, program, scratch) for b in backends]
    for k, c in enumerate(contenders):
        verb = "running eager" if c.backend == "eager" else f"compiling with {c.backend}, cold"
        emit(stage=verb, done=0.1 + 0.5 * k / len(contenders))
        try:
            cold(c)
        except Exception as error:
            if c.backend == "eager":
                raise
            failed(c, error)
    running = [c for c in contenders if "error" not in c.facts]
    start = time.perf_counter()
    for i in range(
        1, program.rounds + (not program.train)
    ):  # training: the cold step was the first
        if i > FEWEST_ROUNDS and time.perf_counter() - start > ROUNDS_SECONDS:
            break
        emit(stage=f"round {i} of {program.rounds}", done=0.6 + 0.25 * i / program.rounds)
        for c in running:
            c.timed(i)
        if program.train:
            emit(losses={c.backend: c.losses[-1] for c in running})
    emit(stage="memory", done=0.87)
    kind = "cuda" if contenders[0].cuda else "cpu"
    for c in running:
        if c.optimizer is not None:
            c.optimizer.zero_grad(set_to_none=True)
        c.facts["peak_mb"] = peak_bytes(functools.partial(c.step, 0), kind) / 1e6
    contenders[0].facts.update(count_eager(contenders[0]), compile_s=0.0)
    result: dict[str, Any] = {"name": name, "title": program.title, "train": program.train}
    if "deuteron" in backends:
        emit(stage="explaining", done=0.93)
        try:
            result.update(explain(program, out))
        except Exception as error:
            traceback.print_exc()
            result["explain_error"] = f"{type(error).__name__}: {error}"
    emit(stage="comparing with float64", done=0.97)
    result["rows"] = rows_of(contenders, program)
    result["notes"] = {k: v for k, v in program.notes.items() if k != "texts"}
    if "texts" in program.notes:
        result["notes"].update(nearest(program, contenders[-1]))
    result["device"] = torch.cuda.get_device_name() if device == "cuda" else device
    result["threads"], result["torch"] = torch.get_num_threads(), torch.__version__
    emit(result=result)


def nearest(program: Any, contender: Contender) -> dict[str, Any]:
    """The pair of sentences whose embeddings are closest: what the numbers are for."""
    import torch

    vectors = torch.cat([v.float().cpu() for v in contender.step(0)])
    close = vectors @ vectors.T - 2 * torch.eye(len(vectors))
    best = int(close.argmax())
    a, b = divmod(best, len(vectors))
    texts = program.notes["texts"]
    return {"closest": [texts[a], texts[b]], "similarity": float(close.flatten()[best])}


def main() -> None:
    name, backends, device, out, scratch = sys.argv[1:6]
    # Written before torch is imported; each compiler gets folders that nothing has used.
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path(scratch) / "inductor")
    os.environ["TRITON_CACHE_DIR"] = str(Path(scratch) / "triton")
    os.environ["HF_HUB_OFFLINE"] = "1"
    run(name, backends.split(","), device, Path(out), Path(scratch))


if __name__ == "__main__":
    main()
