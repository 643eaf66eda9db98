"""Where the package lies, and its version: parts of the keys under which results are kept."""

from __future__ import annotations

from pathlib import Path

VERSION = "0.1.0"
FOLDER = Path(__file__).resolve().parent.parent
