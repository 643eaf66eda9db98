"""Planted bugs: are they caught, and does the self-check name the guilty kernel?

    python -m dev.planted.bugs [--only NAME] [--fuzz SECONDS] [--document]

All runs on one copy of the last commit. First without any bug: tests and witnesses must be right
there. Then each row of `BUGS` changes one line of the copy; the tests that belong to the line run,
and where they pass, random programs do. A bug is caught when either fails. Its witnesses
(`planted_witnesses.py`) then run without and with ``options={"verify": True}``: where one gives a
wrong result, the self-check must name a kernel. Prints a line per bug and a Markdown table; with
--document the table replaces the one in docs/testing.md.
"""

from __future__ import annotations

import argparse
import io
import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from deuteron.base.options import environment
from dev import ROOT

DOCUMENT = ROOT / "docs" / "testing.md"
TABLE_BEGIN = "<!-- planted bugs: written by dev/planted/bugs.py -->"
TABLE_END = "<!-- planted bugs: end -->"
TESTS_LIMIT = 900.0  # seconds for the tests of one bug
WITNESS_LIMIT = 400.0


@dataclass(frozen=True)
class Bug:
    """In `file`, `right` becomes `wrong`. `witnesses`: programs of `planted_witnesses.py` that it
    may make wrong; those of Triton kernels are interpreted."""

    name: str
    file: str
    right: str
    wrong: str
    tests: str
    witnesses: str = ""

    @property
    def triton(self) -> bool:
        return "triton" in self.file


INDEX_TESTS = "tests/ir/test_index.py"
SCHEDULE_TESTS = "tests/schedule/test_refusals.py tests/schedule/test_fusion.py::test_counts"
VALUES = "tests/codegen/test_triton_programs.py::test_values"
MEMORY_TESTS = "tests/memory/test_plan.py"
CPP_TESTS = (
    "tests/codegen/test_cpp.py::test_softmax tests/codegen/test_cpp.py::test_reductions"
    " tests/codegen/test_cpp_more.py::test_index_out_of_range_is_reported"
)
TRITON_TESTS = "tests/codegen/test_triton.py::test_values"

BUGS = (
    # -- index algebra
    Bug("quotient of what is just below", "ir/division.py",
        "        return quotient - 1\n", "        return quotient\n", INDEX_TESTS),
    Bug("remainder forgets its small part", "ir/division.py",
        "* g + small\n", "* g\n", INDEX_TESTS, "shuffled"),
    Bug("divisors added, not multiplied", "ir/division.py",
        "floordiv(inner.num, inner.den * den)", "floordiv(inner.num, inner.den + den)", INDEX_TESTS,
        "reshaped"),
    Bug("remainder of any remainder", "ir/division.py",
        "if isinstance(inner, Mod) and divide_exact(inner.den, den) is not None:",
        "if isinstance(inner, Mod):", INDEX_TESTS, "gathered"),
    Bug("minimum is maximum", "ir/division.py",
        'return atom(MinMax("min",', 'return atom(MinMax("max",', INDEX_TESTS),
    Bug("division that is not exact", "ir/polynomial.py",
        "    if c % dc:\n", "    if c < dc:\n", INDEX_TESTS, "reshaped"),
    Bug("one beyond the end is in range", "ir/division.py",
        "is_nonneg(as_index(extent) - 1 - index)", "is_nonneg(as_index(extent) - index)",
        INDEX_TESTS),
    Bug("substitution adds factors", "ir/division.py",
        "part = part * _substitute_atom(a, table)", "part = part + _substitute_atom(a, table)",
        INDEX_TESTS, "reshaped"),
    # -- legality and dependences
    Bug("any element will do", "schedule/legality.py",
        "if not same_element(p.index, r.index, layouts[r.tensor].shape):", "if False:",
        SCHEDULE_TESTS, "neighbours"),
    Bug("partial results read at once", "schedule/legality.py",
        "if r.tensor in partial:", "if False:", SCHEDULE_TESTS, "chained"),
    Bug("rows read points", "schedule/legality.py",
        "if LEVELS.index(m.level) < LEVELS.index(p.level) and ",
        "if False and ", SCHEDULE_TESTS, "norms"),
    Bug("members in any order", "schedule/legality.py",
        "            if p.name not in seen:\n", "            if False:\n",
        SCHEDULE_TESTS, "neighbours"),
    Bug("overwritten although read elsewhere", "schedule/legality.py",
        "if r.index != m.index or j > k and other is not m:", "if j > k and other is not m:",
        SCHEDULE_TESTS, "flipped_first"),
    Bug("scans along any loops", "schedule/legality.py",
        "    return not more and len(loops) == 1 and m.at[along] is loops[0].index\n",
        "    return True\n", SCHEDULE_TESTS, "scans"),
    Bug("writers do not wait for readers", "schedule/dag.py",
        "                for other in since.get(memory, ()):\n",
        "                for other in ():\n", "tests/schedule/test_dag.py", "flipped_first"),
    Bug("readers do not wait for writers", "schedule/dag.py",
        "                if name in dag.home:\n", "                if not dag.home:\n",
        SCHEDULE_TESTS,
        "shifted"),
    # -- memory
    Bug("lives that touch share memory", "memory/plan.py",
        "if lives[j][0] <= last and first <= lives[j][1]",
        "if lives[j][0] < last and first < lives[j][1]", MEMORY_TESTS, "turned"),
    Bug("gaps too small", "memory/plan.py",
        "if low - at >= need[k]:", "if low - at > 0:", MEMORY_TESTS, "sizes"),
    Bug("dies at its first use", "memory/lifetimes.py",
        "                last[root(name)] = k\n",
        "                last.setdefault(root(name), k)\n",
        MEMORY_TESTS, "long"),
    Bug("written over a neighbour", "memory/lifetimes.py",
        "        if any(n.attr[1] != store.index for n in _loads(s) if n.attr[0] == read):\n",
        "        if False:\n", MEMORY_TESTS, "neighbour"),
    Bug("written over what still lives", "memory/planning.py",
        "if n in ours and life.last[n] == k and life.first[n] < k and n not in untouchable",
        "if n in ours and life.first[n] < k and n not in untouchable", MEMORY_TESTS, "long"),
    # -- C++
    Bug("first partial sum left out", "codegen/cpp/reductions.py",
        'f"for (long long c = 0; c < {count}; ++c) {n}_d += {n}_p[c];"',
        'f"for (long long c = 1; c < {count}; ++c) {n}_d += {n}_p[c];"', CPP_TESTS, "reductions"),
    Bug("last of equal ones", "codegen/cpp/reductions.py",
        "({value} == {best} && {position} < {at})", "({value} == {best} && {position} > {at})",
        CPP_TESTS, "positions"),
    Bug("index set begins at its block", "codegen/cpp/points.py",
        'f"const long long {start} = {difference(low, s)};"',
        'f"const long long {start} = {low};"', "tests/fuzz/test_regressions.py", "index_sets"),
    Bug("integer minimum is maximum", "codegen/cpp/scalars.py",
        'return f"({args[0]} < {args[1]} ? {args[0]} : {args[1]})"',
        'return f"({args[0]} > {args[1]} ? {args[0]} : {args[1]})"',
        "tests/fuzz/test_regressions.py", "wholes"),
    Bug("remainder has the wrong sign", "codegen/cpp/prelude.h",
        "(b < 0) != (r < 0) ? r + b : r", "(b < 0) != (r < 0) ? r - b : r",
        "tests/codegen/test_prelude.py", "wholes"),
    Bug("indices are not checked", "codegen/cpp/emit.py",
        'scope.add(f"bad |= {seen};"', 'scope.add(f"bad |= 0;"', CPP_TESTS),
    # -- Triton
    Bug("rows are filled with zeros", "codegen/triton/reductions.py",
        'text = f"tl.where({mask}, {text}, {identity(f.kind, dtype)})"',
        'text = f"tl.where({mask}, {text}, {identity(\'sum\', dtype)})"', TRITON_TESTS, "rows"),
    Bug("sums are not rescaled", "codegen/triton/reductions.py",
        "{name} = {name} * {e} + tl.sum({terms}, ", "{name} = {name} + tl.sum({terms}, ",
        VALUES, "long_rows"),
    Bug("nests side by side mixed up", "codegen/triton/source.py",
        "{' + '.join(start[: i + 1])}", "{' + '.join(start[: i])} + 1",
        f"{TRITON_TESTS} {VALUES}", "side_by_side"),
    Bug("last of equal ones (Triton)", "codegen/triton/merging.py",
        "first = (a > b) | ((a != a) & (b == b)) | (((a == b) | ((a != a) & (b != b))) & (i < j))",
        "first = (a > b) | ((a != a) & (b == b)) | (((a == b) | ((a != a) & (b != b))) & (i > j))",
        f"{TRITON_TESTS} {VALUES}", "positions"),
    Bug("parts of rows overlap", "codegen/triton/emit.py",
        'offset = f"{offset} % rspan"', 'offset = f"{offset} % rlength"', VALUES, "in_parts"),
    Bug("positions from the end", "codegen/triton/scalars.py",
        "constant += 1", "constant += 2", VALUES, "flipped"),
    Bug("the next place is picked", "schedule/picked.py",
        "index_value(place.index))", "index_value(place.index + 1))", VALUES),
    Bug("rows add what comes to the next", "lower/compared.py",
        'op("eq", at[d], index_value(idx[d]))', 'op("eq", at[d], index_value(idx[d] + 1))',
        "tests/codegen/test_triton_ordered.py"),
    Bug("far numbers are scaled", "codegen/powers.py",
        "FAR = 2.0**27", "FAR = 1e37", "tests/codegen/test_powers.py"),
    Bug("descriptors stay whole", "runtime/ptx.py",
        "if not shared or", "if shared or", "tests/codegen/test_contractions.py"),
)  # fmt: skip


@dataclass
class Outcome:
    bug: Bug
    caught: str = ""
    seen: list[dict[str, str]] = field(default_factory=list)  # what witnesses gave
    seconds: float = 0.0

    @property
    def wrong(self) -> list[dict[str, str]]:
        """Witnesses whose compiled program gives a wrong result, or none."""
        return [w for w in self.seen if w["plain"] in ("wrong", "ends the process")]

    @property
    def named(self) -> bool:
        return all(" names " in w["checked"] for w in self.wrong)

    def row(self) -> str:
        witness, check = "none", ""
        if self.seen:
            w = (self.wrong or sorted(self.seen, key=lambda w: w["plain"] == "right"))[0]
            plain = w["plain"].replace("right", "stays right")
            witness = f"`{w['program']}`: {plain}"
            check = w["checked"].replace(" names ", " names `") + "`" * (" names " in w["checked"])
            check = "" if w["checked"] == "right" and w["plain"] != "wrong" else check
        caught = self.caught or "**no**"
        return f"| {self.bug.name} | `{self.bug.file}` | {caught} | {witness} | {check} |"


TABLE_HEAD = (
    "| bug | where | caught by | witness | self-check |",
    "|---|---|---|---|---|",
)


class Copy:
    """A copy of the last commit, with a cache of its own (entries are found by content, so what no
    bug changed is built once)."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        made = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, capture_output=True, check=True)
        with tarfile.open(fileobj=io.BytesIO(made.stdout)) as archive:
            archive.extractall(folder, filter="data")
        shutil.copy(Path(__file__).with_name("witnesses.py"), folder / "dev" / "planted")
        self.variables = environment(
            PYTHONPATH=str(folder / "src"),
            DEUTERON_CACHE_DIR=str(folder / "cache"),
            OMP_NUM_THREADS="2",
            PYTHONDONTWRITEBYTECODE="1",
        )

    @contextmanager
    def planted(self, bug: Bug) -> Iterator[None]:
        path = self.folder / "src" / "deuteron" / bug.file
        text = path.read_text(encoding="utf-8")
        if bug.right not in text:
            raise SystemExit(f"{bug.name}: {bug.file} has no line {bug.right!r}")
        path.write_text(text.replace(bug.right, bug.wrong), encoding="utf-8")
        try:
            yield
        finally:
            path.write_text(text, encoding="utf-8")

    def run(self, command: Sequence[str], seconds: float, **extra: str) -> tuple[int, str]:
        try:
            done = subprocess.run(
                [sys.executable, *command], cwd=self.folder, env={**self.variables, **extra},
                capture_output=True, text=True, timeout=seconds,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return 124, "time is up"
        return done.returncode, done.stdout + done.stderr

    def tests(self, words: Sequence[str], *, first: bool, skip: Sequence[str] = ()) -> list[str]:
        """The tests that fail; `first`: none after the first."""
        command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", *(["-x"] if first else [])]
        command += [*words, *(f"--deselect={s}" for s in skip)]
        code, text = self.run(command, TESTS_LIMIT if first else 4 * TESTS_LIMIT)
        if code == 0:
            return []
        failed = [x.split(" ")[1] for x in text.splitlines() if x.startswith(("FAILED", "ERROR"))]
        return failed or [f"tests end with {code}"]

    def witnesses(self, names: Sequence[str], triton: bool) -> list[dict[str, str]]:
        if not names:
            return []
        command = ["-m", "dev.planted.witnesses", *(["--interpret"] if triton else [])]
        extra = {"TRITON_INTERPRET": "1"} if triton else {}

        def rows(*words: str) -> list[dict[str, str]]:
            _, text = self.run([*command, *words], WITNESS_LIMIT, **extra)
            return [json.loads(x) for x in text.splitlines() if x.startswith("{")]

        seen = rows(*names)
        gone = [n for n in names if n not in {w["program"] for w in seen}][:1]
        return seen + (rows("--accesses", *gone) if gone else [])

    def fuzz(self, seconds: float) -> str:
        command = ["-m", "dev", "fuzz", "--seconds", str(seconds), "--no-cut"]
        code, text = self.run(command, seconds + 200)
        seeds = [x for x in text.splitlines() if x.startswith("seed ")]
        return f"fuzz, {seeds[0].split(':')[0]}" if code == 1 and seeds else ""


def baseline(copy: Copy, bugs: Sequence[Bug]) -> list[str]:
    """Without a bug: the tests that fail all the same (they count for nothing). Witnesses must be
    right."""
    failed = copy.tests(list(dict.fromkeys(w for b in bugs for w in b.tests.split())), first=False)
    for triton in (False, True):
        names = dict.fromkeys(w for b in bugs if b.triton is triton for w in b.witnesses.split())
        for w in copy.witnesses(list(names), triton):
            print(f"no bug  {w}", flush=True)
            if (w["plain"], w["checked"]) != ("right", "right"):
                raise SystemExit(f"without any bug {w['program']} is not right: {w}")
    return failed


def tried(copy: Copy, bug: Bug, fuzz: float, skip: Sequence[str]) -> Outcome:
    out, began = Outcome(bug), time.perf_counter()
    with copy.planted(bug):
        failed = copy.tests(bug.tests.split(), first=True, skip=skip)
        if failed:
            out.caught = f"`{failed[0].split('[')[0]}`"
        elif fuzz:
            out.caught = copy.fuzz(fuzz)
        out.seen = copy.witnesses(bug.witnesses.split(), bug.triton)
    out.seconds = time.perf_counter() - began
    return out


def summary(outcomes: Sequence[Outcome], failed: Sequence[str]) -> str:
    caught = sum(bool(o.caught) for o in outcomes)
    wrong = [o for o in outcomes if o.wrong]
    text = (
        f"{caught} of {len(outcomes)} are caught. {len(wrong)} have a witness whose compiled "
        f"program gives a wrong result or ends the process; the self-check (with "
        f"`check_accesses` where the process ended) names a kernel for "
        f"{sum(o.named for o in wrong)} of these."
    )
    if failed:
        text += f" Tests that fail without any bug, and were left out: {', '.join(failed)}."
    return text


def document(table: str) -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    before, rest = text.split(TABLE_BEGIN)
    after = rest.split(TABLE_END)[1]
    DOCUMENT.write_text(f"{before}{TABLE_BEGIN}\n\n{table}\n\n{TABLE_END}{after}", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="bugs whose names contain this")
    parser.add_argument("--fuzz", type=float, default=300.0, help="seconds of random programs")
    parser.add_argument("--document", action="store_true", help="write docs/testing.md")
    asked = parser.parse_args()
    bugs = [b for b in BUGS if asked.only in b.name]
    with tempfile.TemporaryDirectory(prefix="deuteron-planted-") as name:
        copy = Copy(Path(name))
        for bug in bugs:
            with copy.planted(bug):
                pass  # every line is there
        failed = baseline(copy, bugs)
        print(f"tests that fail without any bug: {failed}", flush=True)
        outcomes = []
        for bug in bugs:
            outcomes.append(tried(copy, bug, asked.fuzz, failed))
            print(f"{outcomes[-1].seconds:5.0f} s  {outcomes[-1].row()}", flush=True)
    table = "\n".join([*TABLE_HEAD, *(o.row() for o in outcomes), "", summary(outcomes, failed)])
    print(table)
    if asked.document:
        document(table)


if __name__ == "__main__":
    main()
