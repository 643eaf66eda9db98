"""How an emitted module names its tensors: variables, views, places in a workspace, arguments."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Any

import torch

from deuteron.codegen.assemble import SUPPORT_NAMES, KernelCode, Request
from deuteron.codegen.launch_groups import Address, Launches, LaunchGroup
from deuteron.codegen.products import Product
from deuteron.codegen.results import (
    FIRST_CALL,
    relied_on,
)
from deuteron.codegen.text import dtype_text, identifier, sizes_text, source
from deuteron.ir.index import Index
from deuteron.ir.operations import ITEMSIZE
from deuteron.ir.program import (
    Given,
    Output,
    Program,
    ViewArg,
    names_in,
)
from deuteron.memory.plan import MemoryPlan
from deuteron.schedule.kernel import Schedule


@dataclass
class CachedWorkspace:
    """A workspace that stays from call to call: the lines that make it and the views of it, and
    the names that the calls use."""

    lines: list[str]
    names: list[str]
    known: dict[str, str] = field(default_factory=dict)

    def view_name(self, text: str, k: int) -> str:
        """The name of a view."""
        name = self.known.get(text)
        if name is None:
            name = self.known[text] = f"view_{k}_{len(self.known)}"
            self.lines.append(f"{name} = {text}")
            self.names.append(name)
        return name


def is_gpu(device: str) -> bool:
    return device.split(":")[0] == "cuda"


class TensorText:
    """The names and texts of tensors, sizes and objects in ``call``."""

    def __init__(
        self,
        program: Program,
        schedule: Schedule,
        plan: MemoryPlan,
        kernels: dict[str, KernelCode],
        request: Request,
    ) -> None:
        self.program, self.schedule, self.plan = program, schedule, plan
        self.kernels, self.request = kernels, request
        self.lines: list[str] = []
        self.head: list[str] = []
        self.launch_groups: list[LaunchGroup] = []
        self.sequences: list[Launches] = []
        self.products: dict[str, tuple[Product, str]] = {}
        self.objects: dict[str, Any] = {}
        self.ops: dict[str, str] = {}
        self.variables: dict[str, str] = {}
        self.taken = {*SUPPORT_NAMES, *(s.name for s, _ in program.sizes), "torch", "math", "args"}
        self.taken |= {
            FIRST_CALL,
            "min",
            "max",
            "call",
            "run",
            "layout",
            "sizes",
            "known",
            "before",
            "main",
            "donated",
        }
        self.checks = list(program.checks)
        self.relied_on = relied_on(program, schedule)
        # Results whose sizes are not all known: variable, those sizes, lines.
        self.unchecked: list[tuple[str, set[str], list[str]]] = []
        self.to_delete: list[str] = []
        self.open_group: LaunchGroup | None = None
        self.count = 0
        self.symbols = [s for s, (kind, _, _) in program.sizes if kind != "result"]
        self.result_sizes = {s: where for s, where in program.sizes if where[0] == "result"}
        self.pending = {s.name: str(where[1]) for s, where in program.sizes if where[0] == "expr"}
        known = {s.name for s, where in program.sizes if where[0] in ("int", "shape", "stride")}
        self.known = known
        early = (s for s in self.symbols if s.name not in self.pending or self.computable(s.name))
        self.symbols = list(early)
        self.static = not self.symbols
        self.arrays: list[tuple[str, str]] = []  # name, text of an array that depends on sizes
        self.offsets: dict[str, list[int]] = {}
        self.totals: dict[str, int] = {}
        self.workspaces: dict[str, CachedWorkspace] = {}
        self.views: dict[tuple[str, str], str] = {}  # (device, dtype) -> typed workspace
        if self.static:
            for device, arena in plan.arenas.items():
                self.offsets[device], self.totals[device] = arena.offsets({})
        gpus = dict.fromkeys(lay.device for lay in schedule.layouts.values() if is_gpu(lay.device))
        self.gpus = tuple(gpus)

    def variable(self, name: str) -> str:
        """The Python variable that holds a tensor."""
        root = self.plan.home.get(name, name)
        variable = self.variables.get(root)
        if variable is None:
            variable = identifier(root, self.taken)
            if re.match(
                r"(cpu|gpu|mul|op|at|total|space|base|z|array|view|cached|workspace|now|CACHED)_",
                variable,
            ):
                variable = identifier("t_" + variable, self.taken)
            self.variables[root] = variable
            self.taken.add(variable)
        return variable

    def object(self, value: Any, wish: str) -> str:
        for k, v in self.objects.items():
            if v is value:
                return k
        name = identifier(f"{wish}_{len(self.objects)}", self.taken)
        self.taken.add(name)
        self.objects[name] = value
        return name

    def arena(self, device: str) -> int:
        return list(self.plan.arenas).index(device)

    def workspace_slot(self, name: str) -> tuple[str, str] | None:
        """(device, text of the offset in bytes) of a tensor in a workspace."""
        slot = self.plan.slot.get(self.plan.home.get(name, name))
        if slot is None:
            return None
        device, k = slot
        if self.static:
            return device, str(self.offsets[device][k])
        return device, f"at_{self.arena(device)}_{k}"

    def address(self, name: str) -> Address:
        slot = self.workspace_slot(name)
        if slot is None:
            return f"{self.variable(name)}.data_ptr()", None
        return f"base_{self.arena(slot[0])}", slot[1]

    def computable(self, name: str) -> bool:
        """Whether a size that is computed from others can be computed now."""
        return names_in(self.pending[name]) <= self.known

    def operand(self, v: ViewArg) -> str:
        """The address of a view."""
        text, offset = self.address(v.tensor)
        itemsize = ITEMSIZE[self.schedule.layouts[v.tensor].dtype]
        assert v.offset.value is not None
        total = v.offset.value * itemsize + (int(offset) if offset and offset.isdigit() else 0)
        if offset and not offset.isdigit():
            text = f"{text} + {offset}"
        return f"{text} + {total}" if total else text

    def array_packer(self, count: int) -> str:
        """The function that packs so many addresses."""
        text = f"array_{count} = address_array({count})"
        if text not in self.head:
            self.head.append(text)
        return f"array_{count}"

    def operator(self, op: str) -> str:
        name = self.ops.get(op)
        if name is None:
            name = identifier("op_" + op.removesuffix(".default"), self.taken)
            self.taken.add(name)
            self.ops[op] = name
            if op in self.program.callables:
                self.objects[name] = self.program.callables[op]
            else:
                self.head.append(f"{name} = torch.ops.{op}")
        return name

    def argument(self, x: Any, listed: bool = True) -> str:
        if isinstance(x, ViewArg):
            return self.view(x.tensor, x.shape, x.strides, x.offset)
        if isinstance(x, Index):
            return source(x)
        if isinstance(x, Given):
            return self.variable(f"given {x.position}")
        if isinstance(x, (tuple, list)):
            inside = "".join(self.argument(y, listed) + ", " for y in x)
            return f"[{inside.rstrip(', ')}]" if listed else f"({inside.rstrip()})"
        if x is None or isinstance(x, (bool, int, str)):
            return repr(x)
        if isinstance(x, float):
            return repr(x) if math.isfinite(x) else f"float({str(x)!r})"
        if isinstance(x, (torch.dtype, torch.layout, torch.memory_format)):
            return repr(x)
        if isinstance(x, torch.device):
            return f"torch.device({str(x)!r})"
        key = getattr(x, "key", None)
        if isinstance(key, str) and key in self.program.callables:
            return self.object(self.program.callables[key], "object")
        return self.object(x, "object")

    def view(
        self, name: str, shape: tuple[Index, ...], strides: tuple[Index, ...], offset: Index
    ) -> str:
        """A strided view of a tensor; the tensor itself where that is what it is."""
        lay = self.schedule.layouts[name]
        slot = self.workspace_slot(name)
        if slot is not None:
            at = self.shifted(slot[1], ITEMSIZE[lay.dtype], offset)
            base = self.typed(slot[0], lay.dtype)
            text = f"view({base}, {sizes_text(shape)}, {sizes_text(strides)}, {at})"
            cached = self.workspaces.get(slot[0])
            return text if cached is None else cached.view_name(text, self.arena(slot[0]))
        v = self.variable(name)
        home = self.schedule.layouts.get(self.plan.home.get(name, name), lay)
        if home.dtype != lay.dtype:
            v = f"as_dtype({v}, {dtype_text(lay.dtype)})"
        same = home.shape == shape and all(
            a is b or n.value == 1 for a, b, n in zip(home.strides, strides, shape, strict=True)
        )
        if same and offset.value == 0:
            return v
        return f"view({v}, {sizes_text(shape)}, {sizes_text(strides)}, {source(offset)})"

    def shifted(self, at: str, itemsize: int, offset: Index) -> str:
        """Elements from the start of a workspace."""
        start = str(int(at) // itemsize) if at.isdigit() else f"{at}//{itemsize}"
        if offset.value is not None and start.isdigit():
            return str(int(start) + offset.value)
        return start if offset.value == 0 else f"{start} + {source(offset)}"

    def typed(self, device: str, dtype: str) -> str:
        """The variable that holds a device's workspace as a tensor of a dtype."""
        variable = self.views.get((device, dtype))
        if variable is None:
            k = self.arena(device)
            variable = self.views[device, dtype] = f"space_{k}_{dtype}"
            if device in self.workspaces:
                text = f"{variable} = as_dtype(space_{k}, {dtype_text(dtype)})"
                self.workspaces[device].lines.append(text)
                return variable
            made = next(j for j, x in enumerate(self.lines) if x.startswith(f"base_{k} = "))
            self.lines.insert(made + 1, f"{variable} = as_dtype(space_{k}, {dtype_text(dtype)})")
        return variable

    def output(self, o: Output) -> str:
        if o.tensor is None:
            return self.argument(o.value)
        lay = self.schedule.layouts[o.tensor]
        whole = lay.shape == o.shape and lay.strides == o.strides and o.offset.value == 0
        if whole and not o.distinct:
            home = self.schedule.layouts[self.plan.home.get(o.tensor, o.tensor)]
            if (home.shape, home.strides, home.dtype) == (lay.shape, lay.strides, lay.dtype):
                return self.variable(o.tensor)
        v = self.variable(o.tensor)
        home = self.schedule.layouts[self.plan.home.get(o.tensor, o.tensor)]
        if home.dtype != lay.dtype:
            v = f"as_dtype({v}, {dtype_text(lay.dtype)})"
        return f"view({v}, {sizes_text(o.shape)}, {sizes_text(o.strides)}, {source(o.offset)})"
