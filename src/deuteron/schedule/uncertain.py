"""Kernels whose predicted time may be far from the truth: what the guard measures.

In: a `Kernel`. Out: why its prediction is uncertain, or nothing. Plain maps and reductions along
memory are predicted well; what follows here has been wrong by more than 3 x before.
"""

from __future__ import annotations

from collections.abc import Mapping

from deuteron.base.device import DeviceSpec
from deuteron.ir.expr import Expr
from deuteron.ir.index import Axis, hint, product
from deuteron.ir.program import Layout
from deuteron.schedule.kernel import Kernel, Nest, Reduce, Store
from deuteron.schedule.strides import steps

# Conditions in one nest from which their instructions may decide; a stride, in elements, from which
# a walk leaves lines unused.
MANY_CONDITIONS, LONG_STRIDE = 4, 8
# Shorter kernels are not worth a measurement.
MIN_MEASURED_US = 2.0


def uncertain(kernel: Kernel, spec: DeviceSpec) -> str:
    """Why the kernel's prediction is not to be relied on; empty where it is."""
    if kernel.predicted_us < MIN_MEASURED_US or len(kernel.origins) < 2:
        return ""
    layouts = dict(kernel.reads) | dict(kernel.writes)
    for nest in kernel.nests:
        nodes = {n for e in nest.exprs() for n in e.walk()}
        if nest.row_split is not None:
            return "persistent programs keep sums across rows"
        if any(_contracts(s.body) for s in nest.stmts if isinstance(s, Reduce)):
            return "a matrix product inside"
        if any(n.op == "reduce" for n in nodes):
            return "windows"
        if (
            sum(n.op == "where" or n.op == "load" and bool(n.args) for n in nodes)
            >= MANY_CONDITIONS
        ):
            return "many conditions"
        rows = hint(product(a.extent for a in nest.parallel))
        if any(isinstance(s, Reduce) for s in nest.stmts) and rows < spec.cores:
            return "fewer rows than cores"
        if _strided(nest, nodes, layouts):
            return "a walk across memory"
    return ""


def _contracts(body: Expr) -> bool:
    """Whether it is a product of two tensors that do not both have all axes."""
    while body.op == "cast":
        body = body.args[0]
    if body.op != "mul":
        return False
    a, b = (
        frozenset(x for r in part.loads() for i in r.attr[1] for x in i.axes())
        for part in body.args
    )
    return bool(a - b) or bool(b - a)


def _strided(nest: Nest, nodes: set[Expr], layouts: Mapping[str, Layout]) -> bool:
    """Whether two tensors of the nest's size are contiguous along different loops."""
    local = nest.locals()
    places = [
        (n.attr[1], n.attr[0]) for n in nodes if n.op == "load" and n.attr[0] not in local
    ] + [(s.index, s.tensor) for s in nest.stmts if isinstance(s, Store)]
    inner: set[Axis] = set()
    for index, name in places:
        strides = steps(index, layouts[name]) if name in layouts else None
        if strides and len(strides) > 1:
            best = min(strides, key=lambda a: abs(strides[a]) or LONG_STRIDE)
            inner.add(best)
    return len(inner) > 1


__all__ = ["uncertain"]
