"""Where a model's training step spends its time on a GPU: the longest kernels under two compilers.

python -m dev.gpu.profile MODEL [DTYPE]
"""

from __future__ import annotations

import sys

import torch
from torch.profiler import ProfilerActivity, profile

from dev.gpu.models import Runner, cast
from tests.models.zoo import BY_NAME


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
