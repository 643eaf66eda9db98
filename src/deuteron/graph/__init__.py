"""Rewrites of ATen FX graphs before lowering. A graph goes in and the same graph, smaller, comes
out."""
