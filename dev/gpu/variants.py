"""All variants of attention that the tests have, on a GPU: values and gradients against float64.

    python -m dev.gpu.variants [--lengths 130] [--jobs 12] [NAME...]

Several lengths, by comma, are calls of one graph. Prints a line for each variant that is less exact
than twice eager's error, was compiled again, or raises; then how many were right.
"""

from __future__ import annotations

import argparse
import multiprocessing
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial

import torch

from tests.codegen.attention_values import problems
from tests.schedule.attention_variants import VARIANTS


def tried(name: str, lengths: list[int]) -> tuple[str, list[str]]:
    torch.set_num_threads(1)
    try:
        return name, problems(name, lengths, torch.bfloat16, "deuteron", "cuda")
    except Exception as e:
        return name, [f"{type(e).__name__}: {str(e)[:300]}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="of tests/schedule/attention_variants.py")
    parser.add_argument("--lengths", default="130")
    parser.add_argument("--jobs", type=int, default=12)
    asked = parser.parse_args()
    names = asked.names or list(VARIANTS)
    run = partial(tried, lengths=[int(n) for n in asked.lengths.split(",")])
    right = 0
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(asked.jobs, context) as pool:
        for done in as_completed([pool.submit(run, n) for n in names]):
            name, found = done.result()
            right += not found
            for text in found:
                print(f"{name}: {text}", flush=True)
    print(f"{right} of {len(names)} right, lengths {asked.lengths}")


if __name__ == "__main__":
    main()
