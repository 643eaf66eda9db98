"""Kernels written by hand, beside what Deuteron generates; see README.md. Each file runs alone."""
