"""Up to which length a row is best held in registers: softmax and layer norm at several limits.

Prints, for each length and dtype, the time over that of a copy of as many bytes, by limit (elements
of a tile in registers) and most warps. Run on the GPU that `codegen.triton.tiling` is tuned for:

    python -m dev.measure.row_limits [--limits 16384 32768 65536] [--columns 8192 16384 ...]

With ``--blocks 2048,8,1 4096,16,3``: rows in a loop over blocks of so many elements, warps, stages.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from triton.testing import do_bench


def measure(f: Callable[..., Any], *args: Any) -> float:
    """Microseconds."""
    return 1e3 * float(do_bench(lambda: f(*args), warmup=10, rep=40))


def cases(
    columns: int, dtype: torch.dtype
) -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    rows = max(256, (1 << 26) // columns)
    x = torch.randn(rows, columns, device="cuda", dtype=dtype)
    w = torch.ones(columns, device="cuda", dtype=dtype)
    few = torch.randn(16, (1 << 26) // 16, device="cuda", dtype=dtype)
    return {
        "softmax": (lambda x: torch.softmax(x, -1), (x,)),
        "layer norm": (lambda x, w: F.layer_norm(x, (x.shape[-1],), w, w), (x, w)),
        "logsumexp": (lambda x: torch.logsumexp(x, -1), (x,)),
        "softmax, 16 rows": (lambda x: torch.softmax(x, -1), (few,)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--limits", type=int, nargs="+", default=[16384, 32768, 65536])
    parser.add_argument("--warps", type=int, nargs="+", default=[16, 32])
    parser.add_argument(
        "--columns", type=int, nargs="+", default=[8192, 16384, 32768, 65536, 131072]
    )
    parser.add_argument("--blocks", nargs="+", default=[])
    parser.add_argument("--only", default="")
    given = parser.parse_args()
    from deuteron.codegen.triton import access_statistics, tiling

    def warps(most: int) -> Any:
        def limited(elements: int, each: int = 16) -> int:
            return min(most, max(1, access_statistics.below(elements // (32 * each))))

        return limited

    def limits(limit: int, most: int) -> Callable[[], None]:
        def change() -> None:
            tiling.ROW_LIMIT, tiling.warps_for = limit, warps(most)

        return change

    def looped(text: str) -> Callable[[], None]:
        r, n, stages = map(int, text.split(","))

        def change() -> None:
            tiling.ROW_LIMIT = 64
            changed: Any = tiling
            changed._long_rows = lambda *_: (tiling.TileConfig((("x", 1), ("r", r)), n, stages),)

        return change

    changes = [looped(b) for b in given.blocks]
    changes = changes or [limits(n, w) for n in given.limits for w in given.warps]
    for columns in given.columns:
        for dtype in (torch.bfloat16, torch.float32):
            for name, (f, args) in cases(columns, dtype).items():
                if name.endswith("rows") and columns != given.columns[0] or given.only not in name:
                    continue
                moved = args[0]
                out = torch.empty_like(moved)
                copy = measure(lambda a, b: b.copy_(a), moved, out)
                base = copy / 2 if name == "logsumexp" else copy
                ratios = []
                for change in changes:
                    change()
                    with tempfile.TemporaryDirectory() as folder:
                        torch._dynamo.reset()
                        g = torch.compile(f, backend="deuteron", options={"cache_dir": folder})
                        ratios.append(f"{measure(g, *args) / base:.2f}")
                print(f"{name:17} {columns:7} {str(dtype)[6:]:9}", *ratios, flush=True)


if __name__ == "__main__":
    main()
