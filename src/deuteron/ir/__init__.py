"""The loop IR: index algebra, scalar expressions, programs; printed, read, verified, executed."""

# Its parts (`ranges`, `evaluate`) import one another; entering by `index` is what makes that work.
import deuteron.ir.index  # noqa: F401
