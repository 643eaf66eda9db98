"""Cold compile time of one-kernel programs: Deuteron beside Inductor, each in a fresh process with
empty caches.

    python -m dev.measure.cold_compile

Prints for each program the seconds of the first call (Dynamo and AOTAutograd included, their own
imports excluded), and the ratio.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile

PROGRAMS = ("sin((x+1)*2), 10 M", "softmax, 4096 x 1024", "layer norm, 4096 x 1024")
WORKER_SOURCE = """
import json, sys, time
import torch, torch.nn.functional as F
import torch._inductor.compile_fx
name, backend = sys.argv[1:]
if backend == "deuteron":
    import deuteron.backend, deuteron.pipeline
x = torch.randn(10_000_000) if "sin" in name else torch.randn(4096, 1024)
f = {
    "sin": lambda x: ((x + 1) * 2).sin(),
    "sof": lambda x: x.softmax(-1),
    "lay": lambda x: F.layer_norm(x, (1024,)),
}[name[:3]]
torch.compile(lambda x: x - 1, backend="aot_eager")(torch.randn(3))  # what both need once
start = time.perf_counter()
out = torch.compile(f, backend=backend)(x)
took = time.perf_counter() - start
torch.testing.assert_close(out, f(x), rtol=1e-5, atol=1e-5)
print(json.dumps({"seconds": took}))
"""


def seconds(name: str, backend: str) -> float:
    with tempfile.TemporaryDirectory() as folder:
        env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": folder, "DEUTERON_CACHE_DIR": folder}
        done = subprocess.run(
            [sys.executable, "-c", WORKER_SOURCE, name, backend],
            env=env,
            capture_output=True,
            text=True,
            check=True,
        )
    return float(json.loads(done.stdout.splitlines()[-1])["seconds"])


def main() -> None:
    print(f"{'program':28}{'inductor s':>12}{'deuteron s':>12}{'ratio':>8}")
    for name in PROGRAMS:
        theirs, ours = seconds(name, "inductor"), seconds(name, "deuteron")
        print(f"{name:28}{theirs:12.2f}{ours:12.2f}{ours / theirs:8.3f}", flush=True)


if __name__ == "__main__":
    main()
