"""Where cold compile time goes on a GPU: Deuteron beside Inductor, each in a fresh process.

    python -m dev.gpu.compile [--programs sin,softmax,norm,gpt2] [--cpu] [--small]

For each program: seconds of the first call (training step for the model) with empty caches, Dynamo
and AOTAutograd included, imports and CUDA's start excluded; then the same in a new process with the
cache that the first one left. For Deuteron also its stages, the time that calls waited for builds,
and how many kernels there are, how many differ, how many were built.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from time import perf_counter
from typing import Any

PROGRAMS = ("sin", "softmax", "norm", "gpt2")
STAGES = (
    *("capture", "partition", "prepare", "rewrite", "lower", "schedule", "memory", "generate"),
    *("emit", "load", "wait"),
)


def program(name: str, device: str, small: bool) -> Any:
    """A call that compiles when it is made first."""
    import torch
    import torch.nn.functional as F

    if name == "gpt2":
        from deuteron.tools.models import Gpt

        vocab, width, heads, layers = (512, 48, 3, 12) if small else (50257, 768, 12, 12)
        model = Gpt(vocab, width, heads, layers, 1024).to(device)
        ids = torch.randint(0, vocab, (2, 64) if small else (4, 1024), device=device)
        return model, lambda ids: F.cross_entropy(model(ids).view(-1, vocab), ids.view(-1)), ids
    x = torch.randn(1 << 20, device=device) if name == "sin" else torch.randn(4096, 1024).to(device)
    f = {
        "sin": lambda x: ((x + 1) * 2).sin(),
        "softmax": lambda x: x.softmax(-1),
        "norm": lambda x: F.layer_norm(x, (1024,)),
    }[name]
    return None, f, x


def worker(name: str, backend: str, device: str, small: bool) -> dict[str, Any]:
    import torch
    import torch._dynamo
    import torch._inductor.compile_fx

    import deuteron.pipeline  # noqa: F401
    from deuteron.backend import collecting, deuteron_backend
    from deuteron.runtime.workers import Task

    waited = 0.0
    result = Task.result

    def timed(self: Task) -> Any:
        nonlocal waited
        start = perf_counter()
        try:
            return result(self)
        finally:
            waited += perf_counter() - start

    Task.result = timed  # type: ignore[method-assign]
    torch.manual_seed(0)
    _, f, x = program(name, device, small)
    used = deuteron_backend if backend == "deuteron" else backend
    y = torch.randn(64, 64, device=device, requires_grad=True)  # what both need once
    torch.compile(lambda y: (y @ y - 1).sum(), backend="aot_eager")(y).backward()
    if device == "cuda":
        torch.cuda.synchronize()
    start = perf_counter()
    with collecting() as records:
        out = torch.compile(f, backend=used)(x)
        if out.requires_grad:
            out.backward()
    if device == "cuda":
        torch.cuda.synchronize()
    row: dict[str, Any] = {"seconds": perf_counter() - start, "wait": waited}
    times: Counter[str] = Counter()
    for r in records:
        for e in r.of("stage"):
            times[e["name"]] += e["seconds"]
    kernels = [k for r in records for k in r.of("kernel")]
    row |= {s: times[s] for s in STAGES if s != "wait"}
    row["kernels"] = len(kernels)
    row["distinct"] = sum(not k["same_code_as"] for k in kernels)
    return row


def measured(name: str, backend: str, folder: str, asked: argparse.Namespace) -> dict[str, Any]:
    env = dict(os.environ)
    env |= {"TORCHINDUCTOR_CACHE_DIR": folder + "/i", "DEUTERON_CACHE_DIR": folder + "/d"}
    env |= {"TRITON_CACHE_DIR": folder + "/t"}
    command = [sys.executable, "-m", "dev.gpu.compile", "--worker", name, backend]
    command += [f"--{k}" for k in ("cpu", "small") if getattr(asked, k)]
    before = entries(folder)
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    if done.returncode:
        return {"error": done.stderr.strip().splitlines()[-1:]}
    row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    row["built"] = entries(folder) - before
    return row


def entries(folder: str) -> int:
    return sum(1 for p in Path(folder).glob("d/**/*.sha256"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", default=",".join(PROGRAMS))
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--worker", nargs=2, metavar=("PROGRAM", "BACKEND"))
    asked = parser.parse_args()
    if asked.worker:
        name, backend = asked.worker
        device = "cpu" if asked.cpu else "cuda"
        print(json.dumps(worker(name, backend, device, asked.small)))
        return
    columns = (*STAGES, "kernels", "distinct", "built")
    print(f"{'program':9}{'':15}{'s':>7}{'ratio':>7}" + "".join(f"{c:>10}" for c in columns))
    for name in asked.programs.split(","):
        theirs: list[float] = []
        for backend in ("inductor", "deuteron"):
            with tempfile.TemporaryDirectory() as folder:
                for k, when in enumerate(("cold", "warm")):
                    row = measured(name, backend, folder, asked)
                    label = f"{name:9}{backend:10}{when:5}"
                    if "error" in row:
                        print(label, row["error"], flush=True)
                        theirs.append(float("nan"))
                        continue
                    if backend == "inductor":
                        theirs.append(row["seconds"])
                        print(f"{label}{row['seconds']:7.2f}", flush=True)
                        continue
                    text = "".join(
                        f"{row[c]:10}" if isinstance(row[c], int) else f"{row[c]:10.2f}"
                        for c in columns
                    )
                    ratio = row["seconds"] / theirs[k]
                    print(f"{label}{row['seconds']:7.2f}{ratio:7.2f}{text}", flush=True)


if __name__ == "__main__":
    main()
