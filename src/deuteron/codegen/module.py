"""The emitted module: a Python program that is one compiled graph.

In: the schedule, its memory plan, the generated kernels. Out: the text of a module with the
kernels' sources and a function ``call(args)``, which takes the graph's inputs as a list, clears it
and returns the outputs. It is what runs inside ``torch.compile``, and what a person reads; started
by itself (``python module.py``) it makes inputs of the traced sizes and times a call.

Nothing of the user's (file names, source lines) leaves the comments and strings it is put in.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch

from deuteron.codegen.assemble import Body
from deuteron.codegen.cpp.kernels import CppKernel
from deuteron.codegen.launch_groups import LaunchGroup
from deuteron.codegen.products import product_of
from deuteron.codegen.results import (
    FIRST_CALL,
    KNOWN_NAMESPACES,
    comparison,
    is_compared,
)
from deuteron.codegen.tensor_text import CachedWorkspace, TensorText, is_gpu
from deuteron.codegen.text import comment, dtype_text, sizes_text, source, wrapped
from deuteron.ir.index import const
from deuteron.ir.operations import ITEMSIZE
from deuteron.ir.program import (
    Constant,
    Extern,
    Input,
    Layout,
    ViewArg,
    names_in,
    objects_used,
)
from deuteron.memory.out_variants import out_variant
from deuteron.memory.plan import MAX_CACHED_WORKSPACE, MIN_POOLED_BYTES, span
from deuteron.schedule.kernel import Kernel


class Writer(TensorText):
    """Writes ``call`` step by step."""

    # -- names ------------------------------------------------------------------------------------

    # -- the whole --------------------------------------------------------------------------------
    def write(self) -> Body:
        self.inputs()
        if not self.static:
            self.lines.append("LAYOUT")  # replaced when everything is known
        made: dict[int, list[str]] = {}
        for name, k in self.plan.buffers.items():
            made.setdefault(k, []).append(name)
        for k, step in enumerate(self.schedule.steps):
            for device, arena in self.plan.arenas.items():
                if arena.first == k:
                    self.workspace(device)
            for name in made.get(k, ()):
                made_as = self.empty(self.schedule.layouts[name])
                if name in self.plan.given:
                    made_as = f"{self.variable(self.plan.given[name])} if donated else {made_as}"
                self.line(f"{self.variable(name)} = {made_as}")
            if self.request.clock:
                self.call_group()
                self.line(f"stop = clock({k})")
            if isinstance(step, Extern):
                self.call_group()
                self.extern(step)
            else:
                self.generated_kernel(step)
            if self.request.clock:
                self.call_group()
                self.line("stop()")
            self.free_after(k)
        self.call_group()
        for device in self.workspaces:
            self.write_workspace(device)
        outs = [self.output(o) for o in self.program.outputs]
        if any(x.startswith("if ") and f" or {FIRST_CALL} or " in x for x in self.lines):
            self.head.append(f"{FIRST_CALL} = [True]")
            self.line(f"if {FIRST_CALL}:")
            self.line(f"    {FIRST_CALL}.clear()")
        self.add("return (", outs, ",)" if len(outs) == 1 else ")")
        layout = [] if self.static else self.layout()
        variables = {self.variable(n): t for n, t in self.program.constants.items()}
        return Body(
            self.head,
            layout,
            self.lines,
            self.launch_groups,
            self.sequences,
            self.objects,
            {v: t for v, t in variables.items() if v in self.objects},
            self.gpus,
            self.products,
        )

    def line(self, text: str) -> None:
        if self.to_delete:
            names, self.to_delete = self.to_delete, []
            rows = wrapped("del (", names, ")", "    ")
            self.lines += [r[4:] for r in rows] if len(rows) > 1 else [f"del {', '.join(names)}"]
        self.lines.append(text)

    def add(self, head: str, parts: Sequence[str], tail: str) -> None:
        for text in wrapped(head, parts, tail, "    "):
            self.line(text[4:])

    def free_after(self, k: int) -> None:
        """Deletes what is not needed after step k, once the open launch group has run."""
        names = [self.variable(n) for n in self.plan.dies.get(k, ()) if n not in self.plan.slot]
        for device in self.plan.spaces.get(k, ()):
            if device in self.workspaces:
                continue
            names.append(f"space_{self.arena(device)}")
            names += [v for (d, _), v in self.views.items() if d == device]
        self.unchecked = [x for x in self.unchecked if x[0] not in names]
        if self.open_group is None:
            self.to_delete += names
        else:
            self.open_group.after += names

    def inputs(self) -> None:
        names = ["_"] * self.program.num_inputs
        for s, (kind, where, _) in self.program.sizes:
            if kind == "int":
                names[where] = s.name
        for d in self.program.defs:
            if isinstance(d, Input):
                names[d.position] = self.variable(d.name)
            elif isinstance(d, Constant):
                self.objects[self.variable(d.name)] = self.program.constants[d.name]
        for given in objects_used(self.program):
            names[given.position] = self.argument(given)
        if names:
            self.add("(", names, ",) = args" if len(names) == 1 else ") = args")
        self.line("args.clear()")
        for device in self.gpus:
            number = torch.device(device).index or 0
            self.line(f"now_{number} = stream({number})")
        if self.plan.given:
            self.line("donated = not (HOOKS_SEEN or keeps_graph())")
        for s, (kind, where, dim) in self.program.sizes:
            if kind in ("shape", "stride"):
                what = f"shape[{dim}]" if kind == "shape" else f"stride({dim})"
                self.line(f"{s.name} = {names[where]}.{what}")
        self.compute_sizes()
        if self.request.phase == "forward":
            self.line("look_for_hooks()")
        if self.request.phase == "backward":
            self.restore_strides()

    def restore_strides(self) -> None:
        """Gives what came through hooks on saved tensors the strides that it was saved with."""
        given = [d for d in self.program.defs if isinstance(d, Input) and d.layout.strides]
        if given:
            self.line("if HOOKS_SEEN:")
        for d in given:
            v = self.variable(d.name)
            self.line(f"    {v} = with_strides({v}, {sizes_text(d.layout.strides)})")

    def compute_sizes(self) -> None:
        """Sizes that are computed from those known so far."""
        # One may need another.
        while ready := [n for n in self.pending if self.computable(n)]:
            for name in ready:
                self.line(f"{name} = {self.pending.pop(name)}")
                self.known.add(name)
        for c in [c for c in self.checks if names_in(c.condition) <= self.known]:
            self.checks.remove(c)
            self.line(f"if not {c.condition}:")
            seen = "".join(f", {n}={n}" for n in sorted(names_in(c.condition)))
            self.line(f"    fail_assertion({c.message!r}, {c.where!r}{seen})")
        # After the program's own assertions.
        for x in [x for x in self.unchecked if x[1] <= self.known]:
            self.unchecked.remove(x)
            for text in x[2]:
                self.line(text)

    def workspace(self, device: str) -> None:
        k = self.arena(device)
        total = str(self.totals[device]) if self.static else f"total_{k}"
        nbytes = self.totals[device] if self.static else None
        made_as = self.allocate(f"({total},)", "(1,)", "torch.uint8", device, nbytes)
        made = [f"space_{k} = {made_as}", f"base_{k} = space_{k}.data_ptr()"]
        if not self.caches_workspace(device):
            for text in made:
                self.line(text)
            return
        self.workspaces[device] = CachedWorkspace(made, [f"space_{k}", f"base_{k}"])
        self.line("try:")
        self.line(f"    cached_{k} = CACHED_{k}.pop()")
        self.line("except IndexError:  # the first call, or others are running")
        self.line(f"    cached_{k} = workspace_{k}()")
        self.line(f"CACHED_{k}")  # replaced when the views are known

    def caches_workspace(self, device: str) -> bool:
        """Whether a device's workspace stays for the next call, with the views of it: making
        those takes longer than to start a small kernel."""
        return self.static and device == "cpu" and self.totals[device] <= MAX_CACHED_WORKSPACE

    def write_workspace(self, device: str) -> None:
        """Writes the function that makes a cached workspace, and its use."""
        k, cached = self.arena(device), self.workspaces[device]
        self.head += [f"CACHED_{k} = []", "", "", f"def workspace_{k}():"]
        self.head += [f"    {x}" for x in cached.lines]
        self.head += [*wrapped("return (", cached.names, ")", "    "), "", ""]
        at = self.lines.index(f"CACHED_{k}")
        self.lines[at : at + 1] = [
            x[4:] for x in wrapped("(", cached.names, f") = cached_{k}", "    ")
        ]
        self.line(f"CACHED_{k}.append(cached_{k})")

    def empty(self, lay: Layout) -> str:
        shape, strides = sizes_text(lay.shape), sizes_text(lay.strides)
        nbytes = (span(lay) * ITEMSIZE.get(lay.dtype, 16)).value
        return self.allocate(shape, strides, dtype_text(lay.dtype), lay.device, nbytes)

    def allocate(
        self, shape: str, strides: str, dtype: str, device: str, nbytes: int | None
    ) -> str:
        if device == "cpu":
            small = nbytes is not None and nbytes < MIN_POOLED_BYTES
            return f"{'empty_small' if small else 'empty_cpu'}({shape}, {strides}, {dtype})"
        if self.gpus == (device,):  # the current one during the call
            return f"empty_cuda({shape}, {strides}, {dtype})"
        return f"empty({shape}, {strides}, {dtype}, {device!r})"

    # -- generated kernels ------------------------------------------------------------------------
    def generated_kernel(self, step: Kernel) -> None:
        """Adds a kernel to the open launch group, or opens one."""
        if self.open_group is not None and self.open_group.device != step.device:
            self.call_group()
        if self.request.watch:
            self.watch_operands(step)
        if self.open_group is None:
            kind = "cpu" if step.device == "cpu" else "gpu"
            self.open_group = LaunchGroup(f"{kind}_{self.count}", step.device)
            self.count += 1
        k = self.kernels[step.name]
        tensors = [self.address(str(what)) for kind, what in k.args if kind == "tensor"]
        if isinstance(k, CppKernel):
            self.open_group.cpu(step.name, k, tensors)
        else:
            self.open_group.gpu(step.name, k, tensors)
        if self.request.watch:
            self.call_group()
            self.line("check()")

    def watch_operands(self, step: Kernel) -> None:
        """Keeps a kernel's operands, to compare its results with the reference afterwards."""
        tensors = []
        for name, lay in (dict(step.reads) | dict(step.writes)).items():
            tensors.append(f"{name!r}: {self.view(name, lay.shape, lay.strides, const(0))}")
        sizes = [f"{name!r}: {name}" for name in sorted(self.known)]
        self.add(f"check = watch({step.name!r}, {{", tensors, f"}}, {{{', '.join(sizes)}}})")

    def call_group(self) -> None:
        """Calls the open launch group."""
        group, self.open_group = self.open_group, None
        if group is None:
            return
        for name in group.kernels:
            same = self.kernels[name].name.removeprefix("triton_")
            self.line(comment(name if same == name else f"{name}, the code of {same}"))
        array = self.array_packer(len(group.pointers))
        if group.device == "cpu":
            if not self.launch_groups and not self.request.threads:
                self.line("threads()")
            self.launch_groups.append(group)
            numbers = self.sizes_array(group)
            self.add(f"{group.name}({array}(", list(group.pointers), f"), {numbers})")
        else:
            self.sequences.append(group.launches())
            sizes = "".join(n + ", " for n in group.numbers).rstrip()
            now = f"now_{torch.device(group.device).index or 0}"
            several = len(self.gpus) > 1
            if several:
                self.line(f"enter_device({torch.device(group.device).index or 0})")
            self.add(f"{group.name}({now}, {array}(", list(group.pointers), f"), ({sizes}))")
        if group.checks_accesses:
            self.line("check_accesses()")
        if group.index_checked:
            self.line(f"check_indices({self.check_location(group)!r})")
        self.to_delete += group.after

    def check_location(self, group: LaunchGroup) -> str:
        """Where in the user's code the group's loaded indices come from."""
        kernels = {s.name: s for s in self.schedule.steps if isinstance(s, Kernel)}
        origins = [o for n in group.index_checked for o in kernels[n].origins]
        stems = (
            *("index", "gather", "scatter", "embedding", "select", "take", "put"),
            *("div", "remainder", "fmod"),
        )
        some = [o for o in origins if any(w in o.op for w in stems)] or origins
        return "; ".join(dict.fromkeys(f"{o.op} at {o.line}" if o.line else o.op for o in some))

    def sizes_array(self, group: LaunchGroup) -> str:
        """The sizes that a group takes, as an array: known once for all calls of these sizes,
        unless a library call of this very call decides one."""
        if not group.numbers:
            return "None"
        text = f"size_array({len(group.numbers)})({', '.join(group.numbers)})"
        early = {s.name for s in self.symbols}
        if not all(n in early or n.startswith("at_") for n in group.numbers):
            return text
        self.arrays.append((f"z_{group.name}", text))
        return f"z_{group.name}"

    # -- library calls ----------------------------------------------------------------------------
    def extern(self, d: Extern) -> None:
        for o in d.origins[:1]:
            if o.line:
                self.line(comment(o.line))
        if self.product(d):
            return
        # ATen takes lists; functions of Python's (higher-order operators) were given tuples.
        listed = d.op not in self.program.callables
        args = [self.argument(a, listed) for a in d.args]
        args += [f"{k}={self.argument(v, listed)}" for k, v in d.kwargs]
        out_call = out_variant(d)
        if out_call is not None:
            assert d.names[0] is not None
            lay = self.schedule.layouts[d.names[0]]
            args.append(f"out={self.view(d.names[0], lay.shape, lay.strides, lay.offset)}")
            self.add(f"{out_call}(", args, ")")
            return
        operator = self.operator(d.op)
        names = [self.variable(n) if n is not None else "_" for n in d.names]
        for k, s in enumerate(d.sizes):
            if s is not None:
                names[k] = s.name
        if not names or all(n == "_" for n in names):
            self.add(f"{operator}(", args, ")")
            return
        flat = self.returns_flat(d)
        to = ", ".join(names) + ("," if len(names) == 1 and not flat else "")
        if flat:
            self.add(f"{to} = {operator}(", args, ")")
        elif d.op.startswith(KNOWN_NAMESPACES) or d.op in self.program.callables:
            self.add(f"{to} = leaves({operator}(", args, "))")
        else:
            where = next((o.line for o in d.origins if o.line), "")
            tail = f")), {len(names)}, {d.op!r}, {where!r})"
            self.add(f"{to} = exact_count(leaves({operator}(", args, tail)
        self.results(d)

    def product(self, d: Extern) -> bool:
        """A matrix product that is made without ATen; False where it is not."""
        matched = product_of(d, self.schedule.layouts)
        if matched is None or d.names[0] is None:
            return False
        product, operands = matched
        lay = self.schedule.layouts[d.names[0]]
        if not is_gpu(lay.device) or not self.request.products(product, lay.device):
            return False
        name = next((n for n, p in self.products.items() if p == (product, lay.device)), None)
        if name is None:
            name = f"mul_{len(self.products)}"
            self.products[name] = (product, lay.device)
        out = ViewArg(d.names[0], lay.shape, lay.strides, lay.offset)
        views = [*operands[:2], out, *operands[2:]]
        parts = [self.operand(v) for v in views]
        number = torch.device(lay.device).index or 0
        if len(self.gpus) > 1:
            self.line(f"enter_device({number})")
        array = self.array_packer(len(parts))
        self.add(f"{name}(now_{number}, {array}(", parts, "))")
        return True

    def results(self, d: Extern) -> None:
        """Sizes that only the results tell, and strides that the program was compiled for."""
        for k, n in enumerate(d.names):
            if n is not None:
                for s, (_, tensor, dim) in self.result_sizes.items():
                    if tensor == n:
                        self.line(f"{s.name} = {self.variable(n)}.shape[{dim}]")
                        self.known.add(s.name)
            size = d.sizes[k] if d.sizes else None
            if size is not None:
                self.known.add(size.name)
        for k, n in enumerate(d.names):
            if n is not None and is_compared(d, k):
                v = self.variable(n)
                lay = self.schedule.layouts[n]
                needs = {s.name for i in (*lay.shape, *lay.strides) for s in i.syms()}
                self.unchecked.append((v, needs, comparison(d, k, v, n in self.relied_on)))
        self.compute_sizes()

    def returns_flat(self, d: Extern) -> bool:
        """Whether the operator returns its tensors directly, not in lists."""
        if d.op in self.program.callables:
            return False
        operator: Any = torch.ops
        for part in d.op.split("."):
            operator = getattr(operator, part)
        returns = operator._schema.returns
        return len(returns) == len(d.names) and all(
            str(r.type) in ("Tensor", "int", "number", "Scalar", "SymInt", "bool") for r in returns
        )

    # -- the text ---------------------------------------------------------------------------------
    def layout(self) -> list[str]:
        """The function that places the workspace for given sizes, and its use in ``call``."""
        out: list[str] = []
        results: list[str] = []
        for device, arena in self.plan.arenas.items():
            k = self.arena(device)
            need = ", ".join(source(s.nbytes) for s in arena.slots)
            ats = [f"at_{k}_{j}" for j in range(len(arena.slots))]
            unpack = "".join(a + ", " for a in ats)
            out.append(f"    ({unpack.rstrip()}), total_{k} = assign_offsets([{need}], LIVES_{k})")
            self.head.append(f"LIVES_{k} = {arena.lives!r}")
            results += [f"total_{k}", *ats]
        for name, text in self.arrays:
            out.append(f"    {name} = {text}")
            results.append(name)
        out.append(f"    return ({''.join(r + ', ' for r in results).rstrip()})")
        at = self.lines.index("LAYOUT")
        named = set(re.findall(r"\w+", "\n".join(out)))
        sizes = [s.name for s in self.symbols if s.name in named]  # not numbers that are no sizes
        out.insert(0, f"def layout({', '.join(sizes)}):")
        use = [f"sizes = ({''.join(n + ', ' for n in sizes).rstrip()})"]
        use += ["known = LAYOUTS.get(sizes)", "if known is None:"]
        use += ["    known = cache_layout(LAYOUTS, sizes, layout)"]
        if results:
            use.append(f"({''.join(r + ', ' for r in results).rstrip()}) = known")
            self.head.append("LAYOUTS = {}")
        else:
            out, use = [], []
        self.lines[at : at + 1] = use
        return [*out, "", ""] if out else []


__all__ = ["Writer"]
