"""Planted bugs: are they caught, and does the self-check name the guilty kernel?

    python scripts/planted_bugs.py [--only NAME] [--fuzz SECONDS] [--out FILE]

Each row of `BUGS` changes one line of a copy of the sources. The tests that belong to the line run
on the copy; where they pass, random programs do. A bug is caught when either fails. For those that
make kernels give wrong results, programs then run with ``options={"verify": True}``: the error
must be a `VerifyError` that names a kernel. Prints a line per bug and a Markdown table.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src")]

from deuteron.base.options import environment  # noqa: E402

TESTS_LIMIT = 400.0  # seconds for the tests of one bug


@dataclass(frozen=True)
class Bug:
    """In `file`, `right` becomes `wrong`. `program`: a program of `WITNESSES` that it makes wrong
    on the CPU, where there is one."""

    name: str
    file: str
    right: str
    wrong: str
    tests: str
    program: str = ""


INDEX = "tests/ir/test_index.py"
SCHEDULE = "tests/schedule/test_fusion.py tests/schedule/test_refusals.py"
MEMORY = "tests/memory/test_plan.py"
CPP = "tests/codegen/test_cpp.py tests/codegen/test_cpp_more.py"
TRITON = "tests/codegen/test_triton.py"

BUGS = (
    # -- index algebra
    Bug("quotient of what is just below", "ir/index.py",
        "        return quotient - 1\n", "        return quotient\n", INDEX),
    Bug("remainder forgets its small part", "ir/index.py",
        "* g + small\n", "* g\n", INDEX),
    Bug("divisors added, not multiplied", "ir/index.py",
        "floordiv(inner.num, inner.den * den)", "floordiv(inner.num, inner.den + den)", INDEX),
    Bug("remainder of any remainder", "ir/index.py",
        "if isinstance(inner, Mod) and divide_exact(inner.den, den) is not None:",
        "if isinstance(inner, Mod):", INDEX),
    Bug("minimum is maximum", "ir/index.py",
        'return atom(MinMax("min",', 'return atom(MinMax("max",', INDEX),
    Bug("division that is not exact", "ir/index.py", "    if c % dc:\n", "    if c < dc:\n", INDEX),
    Bug("one beyond the end is in range", "ir/ranges.py",
        "is_nonneg(as_index(extent) - 1 - index)", "is_nonneg(as_index(extent) - index)", INDEX),
    Bug("substitution adds factors", "ir/evaluate.py",
        "part = part * _substitute_atom(a, table)", "part = part + _substitute_atom(a, table)",
        INDEX),
    # -- legality and dependences
    Bug("any element will do", "schedule/legality.py",
        "if not same_element(p.index, r.index, layouts[r.tensor].shape):", "if False:",
        SCHEDULE, "shifted"),
    Bug("partial results read at once", "schedule/legality.py",
        "if r.tensor in partial:", "if False:", SCHEDULE),
    Bug("rows read points", "schedule/legality.py",
        'if m.level == "row" and p.level == "point" and m.kind not in ("fold", "scan"):',
        "if False:", SCHEDULE),
    Bug("overwritten although read elsewhere", "schedule/legality.py",
        "if r.index != m.index or j > k and other is not m:", "if j > k and other is not m:",
        SCHEDULE, "overwritten"),
    Bug("scans along any loops", "schedule/legality.py",
        "    return not more and len(loops) == 1 and m.at[along] is loops[0].index\n",
        "    return True\n", SCHEDULE),
    Bug("writers do not wait for readers", "schedule/dag.py",
        "                for other in since.get(memory, ()):\n",
        "                for other in ():\n", f"{SCHEDULE} tests/schedule/test_dag.py",
        "written after reading"),
    Bug("readers do not wait for writers", "schedule/dag.py",
        "                if name in dag.home:\n", "                if not dag.home:\n", SCHEDULE),
    # -- memory
    Bug("lives that touch share memory", "memory/plan.py",
        "if lives[j][0] <= last and first <= lives[j][1]",
        "if lives[j][0] < last and first < lives[j][1]", MEMORY, "long"),
    Bug("gaps too small", "memory/plan.py",
        "if low - at >= need[k]:", "if low - at > 0:", MEMORY),
    Bug("dies at its first use", "memory/lifetimes.py",
        "                last[root(name)] = k\n",
        "                last.setdefault(root(name), k)\n",
        MEMORY, "long"),
    Bug("written over a neighbour", "memory/lifetimes.py",
        "        if any(n.attr[1] != store.index for n in _loads(s) if n.attr[0] == read):\n",
        "        if False:\n", MEMORY, "turned"),
    Bug("written over what still lives", "memory/plan.py",
        "if n in ours and life.last[n] == k and life.first[n] < k and n not in untouchable",
        "if n in ours and life.first[n] < k and n not in untouchable", MEMORY, "long"),
    # -- C++
    Bug("first partial sum left out", "codegen/cpp/folds.py",
        'f"for (long long c = 0; c < {count}; ++c) {n}_d += {n}_p[c];"',
        'f"for (long long c = 1; c < {count}; ++c) {n}_d += {n}_p[c];"', CPP),
    Bug("last of equal ones", "codegen/cpp/folds.py",
        "else if ({tie} && {position} < {at})", "else if ({tie} && {position} > {at})", CPP,
        "positions"),
    Bug("segment begins at its block", "codegen/cpp/points.py",
        'f"const long long {start} = {difference(low, s)};"',
        'f"const long long {start} = {low};"', f"{CPP} tests/fuzz/test_found.py", "joined"),
    Bug("integer minimum is maximum", "codegen/cpp/scalars.py",
        'return f"({args[0]} < {args[1]} ? {args[0]} : {args[1]})"',
        'return f"({args[0]} > {args[1]} ? {args[0]} : {args[1]})"',
        "tests/fuzz/test_found.py", "whole numbers"),
    Bug("remainder has the wrong sign", "codegen/cpp/prelude.h",
        "(b < 0) != (r < 0) ? r + b : r", "(b < 0) != (r < 0) ? r - b : r",
        "tests/codegen/test_prelude.py", "whole numbers"),
    Bug("indices are not checked", "codegen/cpp/emit.py",
        'scope.add(f"bad |= {outside}{mask};"', 'scope.add(f"bad |= 0;"', CPP),
    # -- Triton
    Bug("rows are filled with zeros", "codegen/triton/folds.py",
        'text = f"tl.where({mask}, {text}, {identity(f.kind, dtype)})"',
        'text = f"tl.where({mask}, {text}, {identity(\'sum\', dtype)})"', TRITON),
    Bug("sums are not rescaled", "codegen/triton/folds.py",
        "{name} = {name} * {e} + tl.sum({terms}, 2)", "{name} = {name} + tl.sum({terms}, 2)",
        "tests/codegen/test_triton_programs.py"),
    Bug("nests side by side mixed up", "codegen/triton/generate.py",
        "{' + '.join(start[: i + 1])}", "{' + '.join(start[: i])} + 1",
        f"{TRITON} tests/codegen/test_triton_programs.py"),
    Bug("last of equal ones (Triton)", "codegen/triton/libm.py",
        "first = (a > b) | ((a != a) & (b == b)) | (((a == b) | ((a != a) & (b != b))) & (i < j))",
        "first = (a > b) | ((a != a) & (b == b)) | (((a == b) | ((a != a) & (b != b))) & (i > j))",
        f"{TRITON} tests/codegen/test_triton_programs.py"),
)  # fmt: skip

# Programs that run with the self-check: each shows the bugs that name it.
WITNESSES = """
import sys
import torch

def shifted(x):
    y = x.exp()
    return (y[1:] * y[:-1]).sum(0), y

def overwritten(x):
    x.add_(x.clone().roll(1, 0))
    return x * 2

def after(x):
    y = torch.sort(x, 0)[0] + x
    x.mul_(3)
    return y, x + y.sum()

def long(x):
    a = torch.sort(x, 0)[0].cumsum(1)
    b = torch.sort(a * x, 0)[0].cumsum(1)
    c = torch.sort(b - a, 0)[0].cumsum(0)
    d = torch.sort(c + b, 1)[0].cumsum(0)
    return torch.sort(d * c + b, 0)[0] + a

def turned(x):
    a = torch.sort(x.sin(), 0)[0].cumsum(1)
    b = a.cumsum(0) + a.flip(0)
    return torch.sort(b, 0)[0].cumsum(0).flip(1) * 2

def positions(x):
    return (x * 2).round().argmax(1), (x * 2).round().argmin(0)

def joined(x):
    y = x.repeat(1, 200)
    return torch.cat([y[:, 1:5000] * 2, y[:, :3000]], 1)

def whole(x):
    i = (x * 9).round().int()
    return torch.minimum(i, i.flip(0)), i.remainder(5), i.remainder(-3)

programs = {"shifted": shifted, "overwritten": overwritten, "written after reading": after,
            "long": long, "turned": turned, "positions": positions, "joined": joined,
            "whole numbers": whole}
f = programs[sys.argv[1]]
x = torch.randn(48, 40, generator=torch.Generator().manual_seed(0))
from deuteron.base.errors import VerifyError
for dynamic in (False, True):
    torch._dynamo.reset()
    g = torch.compile(f, backend="deuteron", dynamic=dynamic, options={"verify": True})
    try:
        got = g(x.clone())
    except VerifyError as e:
        print("NAMED", e.node, "after", e.guilty)
        sys.exit()
    want = f(x.clone())
    for a, b in zip(got if isinstance(got, tuple) else [got],
                    want if isinstance(want, tuple) else [want]):
        if not torch.allclose(a, b, atol=1e-4, rtol=1e-4):
            print("WRONG, not named")
            sys.exit()
print("right")
"""


@dataclass
class Outcome:
    bug: Bug
    caught: str = ""
    named: str = ""
    seconds: float = 0.0

    def row(self) -> str:
        said = {"right": "its program stays right", "": "no program"}
        self_check = said.get(self.named, self.named)
        return f"| {self.bug.name} | `{self.bug.file}` | {self.caught or '**no**'} | {self_check} |"


def planted(bug: Bug, folder: Path) -> None:
    """A copy of the repository with the bug."""
    for name in ("src", "tests", "scripts", "docs"):
        shutil.copytree(
            ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info")
        )
    shutil.copy(ROOT / "pyproject.toml", folder)
    path = folder / "src" / "deuteron" / bug.file
    text = path.read_text()
    if bug.right not in text:
        raise SystemExit(f"{bug.name}: {bug.file} has no line {bug.right!r}")
    path.write_text(text.replace(bug.right, bug.wrong))


def run(folder: Path, command: list[str], seconds: float) -> tuple[int, str]:
    variables = environment(
        PYTHONPATH=str(folder / "src"), DEUTERON_CACHE_DIR=str(folder / "cache"),
        OMP_NUM_THREADS="2", PYTHONDONTWRITEBYTECODE="1",
    )  # fmt: skip
    try:
        done = subprocess.run(
            [sys.executable, *command], cwd=folder, env=variables, capture_output=True, text=True,
            timeout=seconds,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return 124, "time is up"
    return done.returncode, done.stdout + done.stderr


def tried(bug: Bug, fuzz: float) -> Outcome:
    out, began = Outcome(bug), time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="deuteron-planted-") as name:
        folder = Path(name)
        planted(bug, folder)
        command = ["-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *bug.tests.split()]
        code, text = run(folder, command, TESTS_LIMIT)
        if code == 1:
            failed = [x for x in text.splitlines() if x.startswith(("FAILED", "ERROR"))]
            test = failed[0].split(" ")[1].split(" - ")[0] if failed else "tests"
            out.caught = f"`{test.split('[')[0]}`"
        elif code not in (0, 124):
            out.caught = f"tests do not start (exit {code})"
        if not out.caught and fuzz:
            command = ["-m", "deuteron.tools.cli", "fuzz", "--seconds", str(fuzz), "--no-cut"]
            code, text = run(folder, command, fuzz + 200)
            seeds = [x for x in text.splitlines() if x.startswith("seed ")]
            if code == 1 and seeds:
                out.caught = f"fuzz, {seeds[0].split(':')[0]}"
        if bug.program:
            (folder / "witness.py").write_text(WITNESSES)
            code, text = run(folder, ["witness.py", bug.program], 200.0)
            last = text.strip().splitlines()[-1] if text.strip() else ""
            out.named = last.removeprefix("NAMED ")[:80] if code == 0 else f"fails: {last[:60]}"
    out.seconds = time.perf_counter() - began
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="bugs whose names contain this")
    parser.add_argument("--fuzz", type=float, default=300.0, help="seconds of random programs")
    parser.add_argument("--out", type=Path, help="the table")
    asked = parser.parse_args()
    found = []
    for bug in BUGS:
        if asked.only in bug.name:
            found.append(tried(bug, asked.fuzz))
            print(f"{found[-1].seconds:5.0f} s  {found[-1].row()}", flush=True)
    caught = sum(bool(o.caught) for o in found)
    table = ["| bug | where | caught by | self-check |", "|---|---|---|---|"]
    table += [o.row() for o in found]
    table.append(f"\n{caught} of {len(found)} caught.")
    if asked.out is not None:
        asked.out.write_text("\n".join(table) + "\n")
    print("\n".join(table))


if __name__ == "__main__":
    main()
