"""Rewrites of ATen FX graphs before lowering. A graph goes in and the same graph, smaller, comes
out."""

from __future__ import annotations

from deuteron.graph.rewrite import rewrite

__all__ = ["rewrite"]
