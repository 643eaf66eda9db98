"""The suite `real`: models drawn by date from timm's and transformers' registries.

`python scripts/real.py --help` says how it is used; `deuteron.tools.real` is how it works.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent.parent / "src")]

from deuteron.tools.real.command import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
