"""One job of `python -m dev coverage`: the cases of one operator, dtype and part, compiled and
compared.

In: a `Job`. Out: a row of plain values. Many cases go into one graph, because compiling a graph
costs more than its cases; a graph that fails is halved until the case is found that fails alone.

What Dynamo cannot take is traced with make_fx and given to the backend directly. A failure is ours
unless `aot_eager`, which runs the same capture without a compiler, fails in the same way.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_flatten, tree_unflatten

import deuteron
from deuteron.backend import collecting
from deuteron.base.device import device_spec
from dev.check.differences import ZERO_SIGN, coarser, differences
from dev.check.oracle import Oracle, Seen, copies, observed, see
from dev.coverage.cases import Unsuitable, cases, entries, suitable
from dev.coverage.forms import Case, whole_numbers

BATCH_CASES = 12  # cases in one graph
MAX_DESCRIBED = 4  # failures of a job that are described
EAGER_PREFIX = "eager: "  # what a worker says before eager runs a case
Results = list[tuple[Any, Sequence[Tensor]]]


@dataclass(frozen=True)
class Job:
    op: str
    dtype: str
    part: str
    device: str = "cpu"
    most: int = 48  # cases; 0: all
    backend: str = "deuteron"
    without: tuple[str, ...] = ()  # names of cases at which eager ends the process

    @property
    def key(self) -> str:
        return f"{self.op}|{self.dtype}|{self.part}|{self.device}"


@dataclass
class Row:
    """The outcome of a job. `captured` says how the graph was made; `why` what Dynamo said."""

    key: str
    op: str
    dtype: str
    part: str
    right: int = 0
    wrong: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)
    noted: Counter[str] = field(default_factory=Counter)
    captured: str = "dynamo"
    why: str = ""
    kernels: int = 0
    library: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    most: int = 0
    torch: str = torch.__version__
    machine: str = ""
    source: str = ""  # a digest of Deuteron's own files

    def plain(self) -> dict[str, Any]:
        return {**asdict(self), "skipped": dict(self.skipped), "noted": dict(self.noted)}


@dataclass
class Trial:
    """A case and what eager makes of it."""

    case: Case
    oracle: Oracle
    random: bool  # it draws numbers
    unset: frozenset[str] = frozenset()  # results whose elements are what memory held


class Uncaptured(Exception):
    """Neither Dynamo nor make_fx makes a graph of a case."""


class Runner:
    """Runs cases of one job through a backend."""

    def __init__(self, job: Job, row: Row) -> None:
        self.job, self.row = job, row
        self.backward = job.part == "backward"
        self.dynamic = job.part in ("dynamic", "numbers")
        self.in_turn = job.part == "numbers"  # one compiled function is called for each case
        self.direct = False  # Dynamo has declined: trace with make_fx

    # -- capture ----------------------------------------------------------------------------------
    def run(
        self, trials: Sequence[Trial], backend: Any, options: dict[str, Any] | None
    ) -> list[Seen]:
        """The cases as one graph."""
        made = [copies(t.case.tensors) for t in trials]
        torch._dynamo.reset()
        torch.manual_seed(0)
        call = self.by_make_fx if self.direct else self.by_dynamo
        results = call(trials, made, backend, options)
        return observed(list(zip(results, made)), self.backward)

    def by_dynamo(
        self, trials: Sequence[Trial], made: list[list[Tensor]], backend: Any, options: Any
    ) -> list[Any]:
        op = trials[0].case.op
        calls = [t.case.arguments(x) for t, x in zip(trials, made)]

        def program(calls: list[Any]) -> list[Any]:
            return [op(*args, **kwargs) for args, kwargs in calls]

        compiled = torch.compile(
            program, backend=backend, fullgraph=True, dynamic=self.dynamic, options=options
        )
        return [compiled([c])[0] for c in calls] if self.in_turn else compiled(calls)

    def by_make_fx(
        self, trials: Sequence[Trial], made: list[list[Tensor]], backend: Any, options: Any
    ) -> list[Any]:
        form: list[Any] = []

        def program(*flat: Tensor) -> list[Any]:
            rest, out = list(flat), []
            for t in trials:
                mine, rest = rest[: len(t.case.tensors)], rest[len(t.case.tensors) :]
                out.append(t.case.run(mine))
            leaves, spec = tree_flatten(out)
            form[:] = [spec, leaves]
            return [x for x in leaves if isinstance(x, Tensor)]

        flat = [x for xs in made for x in xs]
        plain = [x.detach() for x in copies(flat)]
        gm = make_fx(program)(*plain)
        lookup = torch._dynamo.lookup_backend(backend) if isinstance(backend, str) else backend
        given = {"options": options} if options else {}
        with torch.set_grad_enabled(self.backward):
            results = iter(lookup(gm, flat, **given)(*flat))
        leaves = [next(results) if isinstance(x, Tensor) else x for x in form[1]]
        return tree_unflatten(leaves, form[0])

    # -- verdicts ---------------------------------------------------------------------------------
    def check(self, trials: list[Trial]) -> None:
        """Compiles, compares, and takes the trials apart where that fails."""
        options = {"eager_random": True} if any(t.random for t in trials) else None
        if self.job.backend != "deuteron":
            options = None
        try:
            with collecting() as records:
                seen = self.run(trials, self.job.backend, options)
        except Exception as e:  # noqa: BLE001 - whatever it is, it belongs to some case
            self.failed(trials, e)
            return
        self.count(records)
        for k, (t, s) in enumerate(zip(trials, seen)):
            wrong = self.problems(t, s)
            if not wrong:
                self.row.right += 1
            elif len(trials) > 1:
                self.check_alone(trials, k, wrong)
            else:
                self.judge(trials, 0, wrong)

    def problems(self, trial: Trial, seen: Seen) -> list[str]:
        wrong = [
            p
            for p in differences(seen, trial.oracle)
            if not ("elements, first at" in p and p.split(": ", 1)[0] in trial.unset)
        ]
        return wrong or (coarser(seen, trial.oracle) if self.job.part == "chains" else [])

    def check_alone(self, trials: list[Trial], at: int, wrong: list[str]) -> None:
        """A case that is wrong beside others counts even when it is right alone."""
        trial = trials[at]
        try:
            wrong_alone = self.problems(trial, self.run([trial], self.job.backend, None)[0])
        except Exception:  # noqa: BLE001 - alone it fails otherwise: `check` tells how
            self.check([trial])
            return
        if wrong_alone:
            self.judge([trial], 0, wrong_alone)
        else:
            self.judge(trials, at, wrong, "only beside others: ")

    def judge(self, trials: list[Trial], at: int, problems: list[str], how: str = "") -> None:
        """What torch's own capture of the same graph shows in the same way is noted and not
        wrong."""
        trial = trials[at]
        if traced_otherwise(trial):
            self.row.noted["torch traces another shape than eager gives"] += 1
            self.row.right += 1
            return
        witness = self.witness(trials, at)
        if isinstance(witness, Seen):
            same = set(differences(witness, trial.oracle))
            signs = {p.split(":")[0] for p in same if ZERO_SIGN in p}  # of other elements, perhaps
            same.update(p for p in problems if ZERO_SIGN in p and p.split(":")[0] in signs)
            for p in problems:
                if p in same:
                    self.row.noted["as aot_eager: " + p] += 1
            problems = [p for p in problems if p not in same]
        if problems:
            self.wrong(trial, how + "; ".join(problems))
        else:
            self.row.right += 1

    def witness(self, trials: list[Trial], at: int = 0) -> Seen | Exception:
        try:
            return self.run(trials, "aot_eager", None)[at]
        except Exception as e:  # noqa: BLE001 - it is returned
            return e

    def wrong(self, trial: Trial, text: str) -> None:
        self.row.wrong.append(f"{trial.case.name}: {text}")

    def failed(self, trials: list[Trial], error: Exception) -> None:
        if self.in_turn:
            self.failed_in_turn(trials, error)
            return
        if len(trials) > 1 and not (not self.direct and uncapturable(error)):
            half = len(trials) // 2
            self.check(trials[:half])
            self.check(trials[half:])
            return
        if not self.direct and uncapturable(error):
            self.direct = True
            self.row.captured, self.row.why = "make_fx", reason(error)
            self.check(trials)
            self.direct = len(trials) > 1 or self.row.right == 0
            return
        [trial] = trials
        witness = self.witness(trials)
        if isinstance(witness, Seen):
            self.row.errors.append(f"{trial.case.name}: {reason(error)}")
        else:
            self.row.skipped["torch's capture fails: " + reason(witness)] += 1
            if self.direct:
                self.row.captured = "none"

    def failed_in_turn(self, trials: list[Trial], error: Exception) -> None:
        """make_fx would make constants of numbers: what Dynamo does not take is not run."""
        witness = self.witness(trials)
        names = ", then ".join(t.case.name for t in trials)
        if isinstance(witness, Seen):
            self.row.errors.append(f"{names}: {reason(error)}")
        elif len(trials) > 1:
            for t in trials:
                self.check([t])
        else:
            self.row.skipped["torch's capture fails: " + reason(witness)] += 1

    def refused(self, case: Case, error: Exception) -> None:
        """What eager refuses is refused, with the same kind of error or by torch's capture."""

        def tried(backend: Any) -> Exception | None:
            torch._dynamo.reset()
            op, (args, kwargs) = case.op, case.arguments(copies(case.tensors))
            try:
                torch.compile(op, backend=backend, fullgraph=True)(*args, **kwargs)
            except Exception as e:  # noqa: BLE001 - its kind is compared
                return e
            return None

        raised = tried(self.job.backend)
        if raised is not None and of_kind(raised, error):
            self.row.right += 1
            return
        witness = tried("aot_eager")
        alike = (witness is None) == (raised is None)
        if alike and (witness is None or reason(witness) == reason(raised or witness)):
            what = "runs" if raised is None else f"raises {type(inner(raised)).__name__}"
            self.row.noted[f"as aot_eager: {what} where eager has {in_general(error)}"] += 1
            self.row.right += 1
            return
        text = "runs" if raised is None else reason(raised)
        self.row.wrong.append(f"{case.name}: {text}, where eager has {in_general(error)}")

    def count(self, records: Sequence[Any]) -> None:
        for r in records:
            self.row.kernels += len(r.of("kernel"))
            for e in r.of("library"):
                self.row.library.setdefault(str(e["op"]), str(e["reason"]))
            for e in r.of("fallback"):
                self.row.library.setdefault(str(e["what"]), str(e["reason"]))


def uncapturable(error: Exception) -> bool:
    """Dynamo says that it cannot make one graph of the program."""
    import torch._dynamo.exc as exc

    backend = getattr(exc, "BackendCompilerFailed", ())
    return isinstance(error, exc.TorchDynamoException) and not isinstance(error, backend)


def inner(error: Exception) -> Exception:
    """What Dynamo says that its backend raised, or the error itself."""
    return getattr(error, "inner_exception", None) or error


def of_kind(raised: Exception, error: Exception) -> bool:
    """Whether a user gets the kind of error that eager raises, or hears of it from Dynamo."""
    return uncapturable(raised) or isinstance(inner(raised), type(error))


def reason(error: Exception) -> str:
    said = inner(error)
    lines = [x.strip() for x in str(said).splitlines() if x.strip()]
    return f"{type(said).__name__}: {' | '.join(lines[:3])}"[:400]


# -- a job -----------------------------------------------------------------------------------------
# Operators of which eager promises no values: two runs may agree by chance.
UNWRITTEN_RESULTS = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty"}
UNWRITTEN_RESULTS |= {"new_empty_strided", "resize_", "resize_as_"}


def in_general(error: Exception) -> str:
    """What an error says, without the numbers and names of one sample."""
    text = re.sub(r"\d+(\.\d+)?", "N", " ".join(str(error).splitlines()[:1]))
    return f"{type(error).__name__}: {text}"[:120]


def random_states() -> list[Tensor]:
    gpu = [torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else []
    return [torch.random.get_rng_state(), *gpu]


def settled() -> None:
    """Waits for the GPU. After a failed assertion on it nothing runs in this process any more."""
    if torch.cuda.is_initialized():
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            os._exit(1)


def trial(case: Case, backward: bool, unset: bool = False) -> Trial:
    """Runs eager; raises `Unsuitable` where eager does. `unset`: its values are what memory
    held."""
    suitable(case)
    refused_on_cpu(case)

    def run(tensors: list[Tensor], seed: int = 0) -> Seen:
        return see(case.run, tensors, backward, seed)

    def wide(tensors: list[Tensor]) -> Seen:
        return see(case.wide, tensors, backward)

    try:
        torch.manual_seed(0)
        before = random_states()
        oracle = Oracle(run, wide, case.tensors)
        drew = any(not torch.equal(a, b) for a, b in zip(before, random_states(), strict=True))
        names = frozenset(oracle.eager.values)
        if not unset:
            names = frozenset(unlike(oracle.eager, run(copies(case.tensors))))
            names |= filled(lambda: run(copies(case.tensors)), oracle.eager)
        settled()
    except Exception as e:  # noqa: BLE001 - eager's own refusal
        settled()
        raise Unsuitable(f"eager: {in_general(e)}") from e
    return Trial(case, oracle, drew, names)


def refused_on_cpu(case: Case) -> None:
    """Raises `Unsuitable` for positions that are out of range: the CPU says so, a GPU's assertion
    ends the process."""
    if not case.changed or not any(t.is_cuda for t in case.tensors) or not whole_numbers(case):
        return
    args, kwargs = case.arguments([t.detach().cpu() for t in case.tensors])
    if any(isinstance(x, (torch.device, torch.Generator)) for x in tree_flatten((args, kwargs))[0]):
        return
    try:
        case.op(*args, **kwargs)
    except NotImplementedError:
        return
    except Exception as e:  # noqa: BLE001 - eager's own refusal
        raise Unsuitable(f"eager on the CPU: {in_general(e)}") from None


def traced_otherwise(trial: Trial) -> bool:
    """Whether torch's own fake kernels say other shapes than eager has: nobody can give both."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        try:
            fakes = [mode.from_tensor(t.detach()) for t in trial.case.tensors]
            traced = tree_flatten(trial.case.run(fakes))[0]
        except Exception:  # noqa: BLE001 - what cannot be faked is judged by values
            return False
    shapes = [x.shape for x in traced if isinstance(x, Tensor) and x.layout == torch.strided]
    real = [
        v.shape
        for k, v in trial.oracle.eager.values.items()
        if k.startswith("out") and " " not in k and isinstance(v, Tensor)
    ]
    known = all(isinstance(n, int) for s in shapes for n in s)
    return known and len(shapes) == len(real) and shapes != real


def unlike(a: Seen, b: Seen) -> list[str]:
    """The values that two runs of eager do not agree on."""
    if list(a.values) != list(b.values):
        return list(a.values)
    return [name for name, x in a.values.items() if not repeats(x, b.values[name])]


def repeats(x: Any, y: Any) -> bool:
    if not (isinstance(x, Tensor) and isinstance(y, Tensor)):
        return bool(x == y or (x != x and y != y))
    if x.shape != y.shape or x.layout != y.layout:
        return False
    return x.layout != torch.strided or torch.equal(bits(x), bits(y))


def filled(run: Callable[[], Seen], plain: Seen) -> frozenset[str]:
    """The results that eager leaves as memory was, like the state of a generator from which nothing
    was drawn. Two runs may agree on them by chance; where torch fills all new memory with one
    value, that is what they hold."""
    with filling():
        try:
            seen = run()
        except RuntimeError:  # eager cannot be asked: then nothing is excused
            return frozenset()
        differing = {name: seen.values.get(name) for name in unlike(plain, seen)}
        return frozenset(n for n, y in differing.items() if isinstance(y, Tensor) and holds_fill(y))


def holds_fill(t: Tensor) -> bool:
    """Whether some element is what new memory is filled with."""
    if t.layout != torch.strided:
        return False
    fill = torch.empty_like(t)
    return bool(((t == fill) | ((t != t) & (fill != fill))).any())


@contextmanager
def filling() -> Iterator[None]:
    """Torch fills new memory, with NaN or the largest number."""
    on = torch.are_deterministic_algorithms_enabled()
    only = torch.is_deterministic_algorithms_warn_only_enabled()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(on, warn_only=only)


def bits(t: Tensor) -> Tensor:
    """NaN is NaN."""
    t = t.resolve_conj().resolve_neg()
    if t.dtype.is_complex:
        t = torch.view_as_real(t)
    return t.nan_to_num(0.125, 1e30, -1e30) if t.dtype.is_floating_point else t


def run_job(job: Job, say: Callable[[str], None] = lambda text: None) -> dict[str, Any]:
    """All cases of one operator, dtype and part. `say` is told what comes next."""
    start = time.perf_counter()
    row = Row(job.key, job.op, job.dtype, job.part, most=job.most)
    row.machine, row.source = device_spec(job.device).name, source_digest()
    op = entries()[job.op]
    runner = Runner(job, row)
    trials: list[Trial] = []
    refused: list[tuple[Case, Exception]] = []
    for case in cases(op, getattr(torch, job.dtype), job.part, job.device, job.most):
        if case.name in job.without:
            row.skipped["eager ends the process"] += 1
            continue
        say(EAGER_PREFIX + case.name)
        try:
            trials.append(trial(case, runner.backward, job.op in UNWRITTEN_RESULTS))
        except Unsuitable as e:
            if job.part == "mixed" and isinstance(e.__cause__, Exception):
                refused.append((case, e.__cause__))
            else:
                row.skipped[str(e)] += 1
    say("compiled")
    with warnings.catch_warnings(), capturing():
        warnings.simplefilter("ignore")
        for random in (False, True):
            some = [t for t in trials if t.random == random]
            size = 1 if random else 4 if runner.dynamic else BATCH_CASES
            for k in range(0, len(some), size):
                runner.check(some[k : k + size])
        for case, error in refused:
            runner.refused(case, error)
    row.seconds = round(time.perf_counter() - start, 2)
    row.wrong, row.errors = brief(row.wrong), brief(row.errors)
    return row.plain()


@cache
def source_digest() -> str:
    """Tells states of Deuteron's source apart; the tools that look at it are no part of it."""
    root = Path(deuteron.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        if path.relative_to(root).parts[0] != "tools":
            digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def brief(texts: list[str]) -> list[str]:
    if len(texts) <= MAX_DESCRIBED:
        return texts
    return [*texts[:MAX_DESCRIBED], f"and {len(texts) - MAX_DESCRIBED} more"]


def capturing() -> AbstractContextManager[None]:
    """Dynamo takes what it can into one graph."""
    return torch._dynamo.config.patch(
        capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True
    )


def seedless() -> None:
    """Torch's samples of random operators set a seed inside the function, which no graph holds;
    here the seed is set outside."""
    import torch.testing._internal.common_methods_invocations as module

    def call(op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return op(*args, **kwargs)

    if hasattr(module, "wrapper_set_seed"):
        module.wrapper_set_seed = call


def work(connection: Any) -> None:
    """A worker process: jobs come, rows go, until the other end closes."""
    import logging

    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    seedless()
    with suppress(KeyboardInterrupt):
        while True:
            try:
                job = connection.recv()
            except EOFError:
                return
            connection.send(run_job(job, connection.send))
