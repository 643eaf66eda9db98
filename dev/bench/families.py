"""All families of programs: norms, losses and reductions, and those that move data."""

from __future__ import annotations

import dev.bench.families_layout
import dev.bench.families_rows  # noqa: F401
from dev.bench.family import FAMILIES

__all__ = ["FAMILIES"]
