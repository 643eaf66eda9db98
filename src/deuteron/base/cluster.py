"""What planning, generated code and launches agree on where programs of a GPU share a row.

In a module that imports nothing: device functions read it too, in processes that build kernels and
have no use for torch.
"""

from __future__ import annotations

# Cooperating programs that may be a cluster, whose programs reach one another's shared memory.
MAX_CLUSTER = 16
# Rounds of an exchange that have flags of their own, a power of two; and the shared memory in bytes
# that a cluster's programs have for them (see `codegen.triton.exchange`).
EXCHANGE_ROUNDS, CLUSTER_BYTES = 4, 2048

__all__ = ["CLUSTER_BYTES", "MAX_CLUSTER", "EXCHANGE_ROUNDS"]
