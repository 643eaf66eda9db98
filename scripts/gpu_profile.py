"""Where a model's training step spends its time on a GPU: the longest kernels under two compilers.

python scripts/gpu_profile.py MODEL [DTYPE]
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src"), str(ROOT / "scripts")]

import torch  # noqa: E402
from gpu_models import Runner, cast  # noqa: E402
from torch.profiler import ProfilerActivity, profile  # noqa: E402

from tests.models.zoo import BY_NAME  # noqa: E402


def main() -> None:
    case = BY_NAME[sys.argv[1]]
    dtype = getattr(torch, sys.argv[2] if len(sys.argv) > 2 else "bfloat16")
    for name in sys.argv[3:] or ["inductor", "deuteron"]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        step = case.step(True).to("cuda", dtype)
        inputs = cast(case.make_inputs(True), dtype, "cuda")
        runner = Runner(name, step, inputs)
        for _ in range(3):
            runner()
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as trace:
            for _ in range(3):
                runner()
            torch.cuda.synchronize()
        events = [e for e in trace.key_averages() if e.device_time_total > 0]
        events.sort(key=lambda e: -e.device_time_total)
        total = sum(e.device_time_total for e in events) / 3e3
        print(f"== {name}: {total:.2f} ms, {sum(e.count for e in events) // 3} kernels")
        for e in events[:14]:
            print(f"{e.device_time_total / 3e3:8.3f} ms {e.count // 3:4d} {e.key[:130]}")


if __name__ == "__main__":
    main()
