"""Tools of Deuteron's developers, outside of the installed package: see dev/README.md.

They run from the root of a checkout: `python -m dev --help`.
"""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
