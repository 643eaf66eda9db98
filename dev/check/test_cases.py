"""A program in a file: how it is written, read, run through a backend and judged.

In: a `Straight` program (lines without branches, inputs as tensors). Out: `check`'s verdict, and
files that run by themselves::

    def fn(x0, x1): ...
    def inputs(): return [x0, x1]            or a list of such lists, run one after the other

`BACKWARD`, `DYNAMIC` and `OPTIONS` in such a file say how it is run; `python FILE` runs it and
prints what is wrong.
"""

from __future__ import annotations

import ast
import runpy
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch.fx import GraphModule

from dev.check.differences import MISSING_GRADIENT, differences
from dev.check.oracle import Oracle, Seen, copies, observed, see

MAX_WRITTEN_ELEMENTS = 400  # elements of a tensor that is written out; a larger one is drawn
HALF_NAMES = ("float32", "float16", "bfloat16")
# Backends that draw eager's random numbers when asked: the compiler, and the compiler with Triton
# kernels that are interpreted on the CPU (in a process started with TRITON_INTERPRET=1).
OUR_BACKENDS = ("deuteron", "interpreted")
# Backends that run what torch captured as it is: with AOTAutograd, so with views that may copy (the
# strides that it knows are not always a kernel's), and without it.
CAPTURE_BACKENDS = ("aot_eager", "aot_reshaped", "eager")


# What a program's file imports anyway.
DEFAULT_IMPORTS = (
    "import torch",
    "import torch.nn.functional as F",
    "from dev.check.test_cases import main, tensor",
)


class Unusable(Exception):
    """A program that eager itself does not run."""


@dataclass(frozen=True)
class Failure:
    """`kind`: wrong, error, or torch (its capture alone fails in the same way)."""

    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"

    def like(self, other: Failure | None) -> bool:
        """Whether another is the same failure, as far as one can tell."""
        if other is None or other.kind != self.kind:
            return False
        if self.kind == "wrong":
            return True
        return self.text.split(":")[0] == other.text.split(":")[0]


@dataclass(frozen=True)
class How:
    """How a program is run."""

    backward: bool = False
    dynamic: bool = False
    backend: Any = "deuteron"
    options: dict[str, Any] = field(default_factory=dict)


Fn = Callable[..., Any]


# -- judging ---------------------------------------------------------------------------------------
def check(fn: Fn, wide: Fn, sets: Sequence[Sequence[Tensor]], how: How) -> Failure | None:
    """Compiles `fn`, calls it on each set of inputs some times, and compares with eager. `wide` is
    the same program in float64."""
    oracles, drew = [], False
    for given in sets:
        torch.manual_seed(0)
        before = generators()
        try:
            oracles.append(
                Oracle(
                    lambda xs: see(lambda ys: fn(*ys), xs, how.backward),
                    lambda xs: see(lambda ys: wide(*ys), xs, how.backward),
                    given,
                )
            )
            settle()
        except Exception as e:  # noqa: BLE001 - eager's own refusal
            raise Unusable(f"{type(e).__name__}: {e}") from None
        drew |= any(not torch.equal(a, b) for a, b in zip(before, generators()))
    if drew and how.backend in OUR_BACKENDS:
        how = replace(how, options={**how.options, "eager_random": True})
    try:
        wrong = problems(run(fn, sets, how), oracles)
    except Exception as e:  # noqa: BLE001 - whatever the compiler or its program raises
        return blame(fn, sets, how, oracles, e)
    if wrong:
        torch_too = wrong_without(fn, sets, how, oracles, wrong)
        own = [p for p in wrong if without_values(p) not in torch_too]
        return Failure("wrong" if own else "torch", "; ".join(own or wrong))
    return None


def wrong_without(
    fn: Fn, sets: Sequence[Sequence[Tensor]], how: How, oracles: Sequence[Oracle], wrong: list[str]
) -> set[str]:
    """Where torch's capture is wrong without a compiler. Where AOTAutograd cannot run what Dynamo
    found out (a size may be wrong), where Dynamo's alone is, and what a backend does not decide."""
    torch_too = of_no_memory(oracles, 3 if how.backward else 2)
    for capture in CAPTURE_BACKENDS:
        try:
            seen = run(fn, sets, witness(how, capture))
        except Exception:  # noqa: BLE001 - no excuse, but for what a backend does not decide
            torch_too |= {without_values(p) for p in wrong if p.endswith(MISSING_GRADIENT)}
            continue
        return torch_too | set(map(without_values, problems(seen, oracles)))
    return torch_too


def of_no_memory(oracles: Sequence[Oracle], calls: int) -> set[str]:
    """Where eager's own result depends on memory that nobody wrote, in any of the calls."""
    many = len(oracles) > 1
    return {
        f"{call_name(k, n, many)}{name}: elements"
        for k, oracle in enumerate(oracles)
        for name in oracle.unwritten()
        for n in range(calls)
    }


def settle() -> None:
    """Waits for GPUs: what is refused there, as probabilities that are NaN, shows only then."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def spent() -> bool:
    """Whether an assertion failed on a GPU: nothing runs there any more in this process."""
    try:
        settle()
    except Exception:  # noqa: BLE001 - its class has changed over torch's versions
        return True
    return False


def generators() -> list[Tensor]:
    """The states of the random number generators."""
    gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return [torch.random.get_rng_state(), *gpus]


def problems(seen: list[list[Seen]], oracles: Sequence[Oracle]) -> list[str]:
    out = []
    for k, (calls, oracle) in enumerate(zip(seen, oracles)):
        for n, s in enumerate(calls):
            where = call_name(k, n, len(oracles) > 1)
            out += [where + p for p in differences(s, oracle)]
    return out


def call_name(k: int, n: int, many: bool) -> str:
    """What problems of call `n` on the inputs `k` begin with; `many`: sets of inputs."""
    return (f"inputs {k}, " if many else "") + (f"call {n + 1}, " if n else "")


def without_values(problem: str) -> str:
    """What is wrong and in which tensor, without the values and their number, which differ by
    rounding."""
    name, what = problem.split(": ", 1)
    return f"{name}: elements" if ", first at" in what else problem


def run(fn: Fn, sets: Sequence[Sequence[Tensor]], how: How) -> list[list[Seen]]:
    """What two calls on each set of inputs show, or three training steps, of which the third goes
    around AOTAutograd in both directions (`runtime.aot_bypass`). Results of the first call are
    looked at after the others: they must not have changed."""
    torch._dynamo.reset()
    given = {"options": how.options} if how.options else {}
    compiled = torch.compile(
        fn, backend=backend(how), fullgraph=True, dynamic=how.dynamic or None, **given
    )
    out = []
    with torch._dynamo.config.patch(
        automatic_dynamic_shapes=how.dynamic, assume_static_by_default=not how.dynamic
    ):
        for inputs in sets:
            calls = []
            for _ in range(3 if how.backward else 2):
                mine = copies(inputs)
                torch.manual_seed(0)
                calls.append((compiled(*mine), mine))
            out.append([observed([c], how.backward)[0] for c in calls])
    return out


def backend(how: How) -> Any:
    """What `torch.compile` takes."""
    if how.backend == "aot_reshaped":
        return aot_autograd(fw_compiler=reshaped)
    if how.backend != "interpreted":
        return how.backend
    from dev.check.interpret import interpreted  # brings Triton

    return interpreted


def reshaped(graph: GraphModule, inputs: Any) -> Any:
    """Runs the graph as it is, but for views of what has other strides than it says."""
    for node in graph.graph.find_nodes(op="call_function", target=torch.ops.aten.view.default):
        node.target = torch.ops.aten.reshape.default
    graph.recompile()
    return make_boxed_func(graph)


def witness(how: How, capture: str = CAPTURE_BACKENDS[0]) -> How:
    """The same capture without a compiler."""
    return replace(how, backend=capture, options={})


def blame(
    fn: Fn, sets: Sequence[Sequence[Tensor]], how: How, oracles: Sequence[Oracle], error: Exception
) -> Failure:
    """Whose an error is: torch's, where its capture alone fails as well, or takes a result for
    one of another shape (torch 2.11: the norm of a vector of one element)."""
    text = described(error)
    if spent():  # whatever runs now fails as well: eager did not
        return Failure("error", text)
    try:
        seen = run(fn, sets, witness(how))
    except Exception as e:  # noqa: BLE001 - torch's capture fails as well
        return Failure("torch", described(e))
    same = all(sizes(s) == sizes(o.eager) for calls, o in zip(seen, oracles) for s in calls)
    return Failure("error" if same else "torch", text)


def sizes(seen: Seen) -> list[torch.Size]:
    return [v.shape for v in seen.values.values() if isinstance(v, Tensor)]


def described(error: Exception) -> str:
    inner = getattr(error, "inner_exception", None) or error
    return f"{type(inner).__name__}: {inner}"


# -- straight programs -----------------------------------------------------------------------------
@dataclass(frozen=True)
class Line:
    """``target = text``, or `text` alone where it changes something in place."""

    text: str
    target: str | None

    def __str__(self) -> str:
        return self.text if self.target is None else f"{self.target} = {self.text}"

    def words(self) -> set[str]:
        return words(self.text)


def words(text: str) -> set[str]:
    """Names in a text."""
    return set("".join(c if c.isalnum() or c == "_" else " " for c in text).split())


@dataclass(frozen=True)
class Straight:
    """`inputs`: name -> its tensor in each set. `imports`: what the lines use beyond torch and
    F."""

    inputs: dict[str, tuple[Tensor, ...]]
    lines: tuple[Line, ...]
    outputs: tuple[str, ...]
    imports: tuple[str, ...] = ()

    def text(self) -> str:
        body = "".join(f"    {x}\n" for x in self.lines)
        results = "".join(f"{o}, " for o in self.outputs)
        return f"def fn({', '.join(self.inputs)}):\n{body}    return ({results})\n"

    def function(self, wide: bool = False) -> Fn:
        text = widened_text(self.text()) if wide else self.text()
        space = self.space()
        exec(compile(text, "<program>", "exec"), space)
        return space["fn"]

    def space(self) -> dict[str, Any]:
        space: dict[str, Any] = {}
        exec("\n".join(("import torch", "import torch.nn.functional as F", *self.imports)), space)
        return space

    def sets(self) -> list[list[Tensor]]:
        count = len(next(iter(self.inputs.values()))) if self.inputs else 1
        return [[ts[k] for ts in self.inputs.values()] for k in range(count)]

    def check(self, how: How) -> Failure | None:
        return check(self.function(), self.function(wide=True), self.sets(), how)


def widened_text(text: str) -> str:
    """The program's text with float64 for the floating dtypes that it names."""
    for name in HALF_NAMES:
        text = text.replace(f"torch.{name}", "torch.float64")
    return text


def straight(source: str, sets: Sequence[Sequence[Tensor]], name: str = "fn") -> Straight | None:
    """A function without branches, read from its source; None where it has any other form."""
    tree = ast.parse(source)
    [function] = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == name]
    imports = [ast.unparse(n) for n in tree.body if isinstance(n, (ast.Import, ast.ImportFrom))]
    lines: list[Line] = []
    for node in function.body[:-1]:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue
        if isinstance(node, ast.Assign) and all(isinstance(t, ast.Name) for t in node.targets):
            if isinstance(node.value, ast.Constant) and node.value.value is None:
                continue  # how FX says that a name is no longer used
            first = ast.unparse(node.targets[0])
            lines.append(Line(ast.unparse(node.value), first))
            lines += [Line(first, ast.unparse(t)) for t in node.targets[1:]]
        elif isinstance(node, (ast.Expr, ast.AugAssign, ast.Assign)):
            lines.append(Line(ast.unparse(node), None))
        else:
            return None
    last = function.body[-1]
    if not isinstance(last, ast.Return) or last.value is None:
        return None
    results = last.value.elts if isinstance(last.value, (ast.Tuple, ast.List)) else [last.value]
    outputs = []
    for k, value in enumerate(results):
        if not isinstance(value, ast.Name):
            lines.append(Line(ast.unparse(value), f"result{k}"))
        outputs.append(value.id if isinstance(value, ast.Name) else f"result{k}")
    names = [a.arg for a in function.args.args]
    if any(len(s) != len(names) for s in sets):
        return None
    inputs = {n: tuple(s[k] for s in sets) for k, n in enumerate(names)}
    return Straight(inputs, tuple(lines), tuple(outputs), tuple(imports))


# -- files -----------------------------------------------------------------------------------------
def tensor(
    shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype, data: Any, offset: int = 0
) -> Tensor:
    """A tensor of a file: `data` is its storage from its first element on, as a list, or a seed to
    draw it from and a length."""
    if isinstance(data, list):
        flat = torch.tensor(data, dtype=dtype)
    else:
        seed, count = data
        g = torch.Generator().manual_seed(seed)
        if dtype.is_floating_point:
            flat = torch.randn(count, generator=g).to(dtype)
        else:
            flat = torch.randint(0, 2, (count,), generator=g).to(dtype)
    return torch.cat((flat.new_zeros(offset), flat)).as_strided(shape, strides, offset)


def extent(t: Tensor) -> int:
    """Elements of memory that a tensor reaches over."""
    if t.numel() == 0:
        return 0
    return 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride()))


def storage_of(t: Tensor) -> Tensor:
    return t.detach().as_strided((extent(t),), (1,))


def tensor_text(t: Tensor) -> str:
    """Source text of a tensor, exactly where it is small."""
    moved = ".cuda()" if t.is_cuda else ""
    t = t.detach().resolve_conj().resolve_neg().cpu()
    shape, strides = tuple(t.shape), tuple(t.stride())
    flat = storage_of(t)
    data = str(flat.tolist()) if flat.numel() <= MAX_WRITTEN_ELEMENTS else f"(0, {flat.numel()})"
    for word in ("inf", "nan"):
        data = data.replace(word, f'float("{word}")')
    offset = f", {t.storage_offset()}" if t.storage_offset() else ""
    return f"tensor({shape}, {strides}, {t.dtype}, {data}{offset}){moved}"


def drawn(p: Straight) -> Straight:
    """The program with those inputs that its file would draw."""

    def other(t: Tensor) -> Tensor:
        if extent(t) <= MAX_WRITTEN_ELEMENTS:
            return t
        data, at = (0, extent(t)), t.storage_offset()
        made = tensor(tuple(t.shape), tuple(t.stride()), t.dtype, data, at)
        return made.to(t.device).requires_grad_(t.requires_grad)

    return replace(p, inputs={n: tuple(map(other, ts)) for n, ts in p.inputs.items()})


def file_text(p: Straight, how: How, about: str) -> str:
    """A runnable file."""
    rows = []
    for given in p.sets():
        row = [
            f"            {tensor_text(t)}{'.requires_grad_()' if t.requires_grad else ''},\n"
            for t in given
        ]
        rows.append("        [\n" + "".join(row) + "        ],\n")
    comment = "".join(f"# {line}\n" for line in about.splitlines())
    imports = "".join(f"{x}\n" for x in p.imports if x not in DEFAULT_IMPORTS)
    backend = f"BACKEND = {how.backend!r}\n" if isinstance(how.backend, str) else ""
    return (
        f"{comment}import torch\nimport torch.nn.functional as F\n{imports}\n"
        f"{DEFAULT_IMPORTS[-1]}\n\n"
        f"BACKWARD = {how.backward}\nDYNAMIC = {how.dynamic}\nOPTIONS = {how.options!r}\n{backend}"
        f"\n\n{p.text()}\n\n"
        f"def inputs():\n    return [\n{''.join(rows)}    ]\n\n\n"
        f'if __name__ == "__main__":\n    main(__file__)\n'
    )


@dataclass(frozen=True)
class Loaded:
    """A file's program."""

    fn: Fn
    sets: list[list[Tensor]]
    how: How
    source: str


def load(path: Path, backend: str | None = None) -> Loaded:
    """A file with `fn` and `inputs()`. Without `BACKWARD`, the backward runs where inputs require
    gradients."""
    space = runpy.run_path(str(path))
    missing = [n for n in ("fn", "inputs") if not callable(space.get(n))]
    if missing:
        raise Unusable(f"{path} has no {' and no '.join(missing)}")
    given = space["inputs"]()
    sets = [list(s) for s in given] if isinstance(given[0], (list, tuple)) else [list(given)]
    wants = any(t.requires_grad for s in sets for t in s)
    how = How(
        bool(space.get("BACKWARD", wants)),
        bool(space.get("DYNAMIC", len(sets) > 1)),
        backend or space.get("BACKEND", "deuteron"),
        dict(space.get("OPTIONS", {})),
    )
    return Loaded(space["fn"], sets, how, path.read_text(encoding="utf-8"))


def wide_function(case: Loaded) -> Fn:
    """The file's function in float64."""
    space: dict[str, Any] = {"torch": torch, "F": F, "__name__": "wide", "__file__": "wide"}
    exec(compile(widened_text(case.source), "<wide>", "exec"), space)
    return space["fn"]


def main(file: str) -> None:
    """Runs a file's program; exit status 1 and the failure in words where it fails."""
    case = load(Path(file))
    failure = check(case.fn, wide_function(case), case.sets, case.how)
    print("right" if failure is None else failure)
    sys.exit(0 if failure is None else 1)


__all__ = ["Failure", "How", "Line", "Straight", "check", "file_text", "load", "main", "straight"]
