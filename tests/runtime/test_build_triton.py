"""Triton builds: once, in processes without torch, anywhere; errors can be reproduced."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from deuteron.base.errors import BuildError
from deuteron.base.options import Options
from deuteron.codegen.triton.generate import Config, TritonKernel, generate
from deuteron.runtime import build_triton
from deuteron.runtime.build_triton import Binary, build, submit
from tests.schedule.tools import scheduled, spec_of

SOURCE = """import triton
import triton.language as tl

from deuteron.codegen.triton import libm


@triton.jit
def kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n)
    tl.store(y_ptr + i, {value}, mask=i < n)
"""
CONFIG = Config((("BLOCK", 256),), num_warps=4)


def kernel(value: str = "libm.exp(x) + 1") -> TritonKernel:
    return TritonKernel(
        name="kernel",
        source=SOURCE.format(value=value),
        args=(),
        params=("x_ptr", "y_ptr", "n"),
        types=("*fp32", "*fp32", "i32"),
        constexprs=("BLOCK",),
        configs=(CONFIG,),
        grid_source="1",
        aligned=("x_ptr", "y_ptr", "n"),
    )


@pytest.fixture(autouse=True)
def own_builders() -> Iterator[None]:
    build_triton._builder.cache_clear()
    yield
    build_triton._builder.cache_clear()


def options(folder: Path, **others: object) -> Options:
    return Options.make(options={"cache_dir": str(folder), **others})


@pytest.mark.parametrize("workers", [1, 2])
def test_builds_once(tmp_path: Path, workers: int) -> None:
    asked = options(tmp_path, workers=workers)
    first = submit(kernel(), CONFIG, 90, asked)
    assert not isinstance(first, Binary)
    binary = first.result()
    assert binary.code[:4] == b"\x7fELF" and binary.num_warps == 4 and binary.name == "kernel"
    assert submit(kernel(), CONFIG, 90, asked) == binary
    assert build(kernel(), CONFIG, 90, asked) == binary
    other = build(kernel(), CONFIG, 90, asked, aligned=False)
    assert other.code != binary.code
    assert build(kernel(), CONFIG, 80, asked).code != binary.code
    kept = {p.suffix for p in (tmp_path / "kernels").glob("??/*")}
    assert kept == {".cubin", ".json", ".py", ".sha256"}
    assert not [p for p in (tmp_path / "kernels" / "tmp").iterdir() if p.suffix != ".lock"]


def test_warm_starts_start_nothing(tmp_path: Path) -> None:
    """Neither a process nor Triton."""
    build(kernel(), CONFIG, 90, options(tmp_path))
    code = f"""
    import sys
    sys.path.insert(0, {str(Path(__file__).parent)!r})
    import test_build_triton as t
    import subprocess
    def none(*args, **kwargs): raise AssertionError("a process")
    subprocess.Popen = none
    assert isinstance(t.submit(t.kernel(), t.CONFIG, 90, t.options({str(tmp_path)!r})), t.Binary)
    assert "triton.compiler" not in sys.modules
    """
    code = textwrap.dedent(code).replace('pytest.importorskip("triton")', "")
    head = "import pytest; pytest.importorskip = lambda name: None\n"
    done = subprocess.run([sys.executable, "-c", head + code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_process_that_builds_has_no_torch(tmp_path: Path) -> None:
    """Its import takes longer than the build: 5 s where files are slow."""
    made = build_triton.job_of(kernel(), CONFIG, 90, True, False)
    code = f"""
    import sys
    from deuteron.base.options import Options
    from deuteron.runtime import build_triton, workers
    from deuteron.runtime.build_triton import Job
    workers.serving = True
    asked = Options.make(options={{"cache_dir": {str(tmp_path)!r}}})
    build_triton.warm_up(90, asked)
    library = [m for m in sys.modules if m.startswith("deuteron.codegen.triton.")]
    assert build_triton.built({made!r}, asked).code
    loaded = {{m for m in sys.modules if m.startswith("deuteron.codegen.triton.")}}
    assert library and loaded == set(library), loaded
    assert "torch" not in sys.modules
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("workers", [1, 2])
def test_refused(tmp_path: Path, workers: int) -> None:
    with pytest.raises(BuildError, match="Triton refused") as caught:
        build(kernel("tl.no_such_function(x)"), CONFIG, 90, options(tmp_path, workers=workers))
    error = caught.value
    assert "no_such_function" in Path(error.source).read_text()
    assert "no_such_function" in error.output
    again = subprocess.run(error.command, shell=True, capture_output=True, text=True)
    assert again.returncode == 1 and "no_such_function" in again.stderr


@pytest.mark.parametrize("works", [2, 16, 64])
def test_passes_that_fail_are_tried_with_other_warps(
    works: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass of Triton 3.6 fails for some tiles of fewer elements than threads (seed 41101150), and
    for some of more (58000815)."""
    import triton

    whole, asked = triton.compile, []

    def compiled(source: object, target: object, options: dict[str, int]) -> object:
        asked.append(options["num_warps"])
        if asked[-1] != works:
            raise RuntimeError("PassManager::run failed")
        return whole(source, target=target, options=options)

    monkeypatch.setattr(triton, "compile", compiled)
    tries = [4, 2, 1, 8, 16, 32]
    asked_for = options(tmp_path)
    job = build_triton.job_of(kernel(), CONFIG, 90, True, False)
    if works in tries:
        made = build_triton.built(job, asked_for)
        assert asked == tries[: tries.index(works) + 1] and made.num_warps == works
        again = build_triton.built(job, asked_for)
        assert len(asked) == tries.index(works) + 1 and again == made
    else:
        with pytest.raises(BuildError, match="Triton refused"):
            build_triton.built(job, asked_for)
        assert asked == tries
        del asked[:]
        with pytest.raises(BuildError, match="Triton refused"):  # a block has 65,536 registers
            build_triton.built(replace(job, registers=128), asked_for)
        assert asked == tries[:5]


def test_processes_that_die_are_followed_by_other_warps(tmp_path: Path) -> None:
    """LLVM may end the process in which it runs, for some numbers of warps (seed 65101685)."""
    deaths = tmp_path / "deaths"
    deaths.mkdir()
    text = f"""import os
died = len(os.listdir({str(deaths)!r}))
if died < 3:
    open({str(deaths)!r} + f"/{{died}}", "x").close()
    os.abort()
"""
    bad = replace(kernel(), source=text + SOURCE.format(value="x"))
    binary = build(bad, CONFIG, 90, options(tmp_path, workers=1))
    assert binary.num_warps == 1  # after 4, 4 again and 2


def test_a_kernel_that_llvm_dies_of_is_built(tmp_path: Path) -> None:
    """Its vectorizer, of Triton 3.6, at 4 warps and blocks of 128 elements."""

    def rows(x: torch.Tensor) -> torch.Tensor:
        half = torch.nn.functional.gelu(x.t(), approximate="tanh")
        places = half.std(-2, correction=0).nan_to_num(0.0).clamp(-99, 99).to(torch.int64)
        rest = torch.remainder(x.t(), half.abs() + 0.5)
        return rest[places % rest.shape[0], places % rest.shape[1]]

    x = torch.randn(129, 11, dtype=torch.bfloat16)
    for k in scheduled(rows, x, device="H200").kernels:
        made = generate(k, spec_of("H200"))
        for config in made.configs:
            assert build(made, config, 90, options(tmp_path)).code


def test_commands_build(tmp_path: Path) -> None:
    """What an error suggests works, where the cause is gone."""
    job = build_triton.job_of(kernel(), CONFIG, 90, True, False)
    error = build_triton._explained(BuildError("oh"), job, options(tmp_path))
    done = subprocess.run(error.command, shell=True, capture_output=True, text=True)
    assert done.returncode == 0 and "4 warps" in done.stdout, done.stderr


def test_hangs_and_crashes(tmp_path: Path) -> None:
    """The building process ends, and the error shows what it was building."""
    for text, words, seconds in (
        ("import time\ntime.sleep(1000)\n", "in time", 2),
        ("import os\nos.abort()\n", "signal 6", 100),
    ):
        bad = replace(kernel(), source=text + SOURCE.format(value="x"))
        asked = options(tmp_path, workers=2, build_timeout=seconds)
        with pytest.raises(BuildError, match=words) as caught:
            build(bad, CONFIG, 90, asked)
        assert Path(caught.value.source).read_text() == bad.source
        assert "build_triton" in caught.value.command


@pytest.mark.parametrize("workers", [1, 2])
def test_no_home(tmp_path: Path, workers: int) -> None:
    """Triton's own folder in the user's home is neither needed nor made."""
    code = f"""
    import sys
    sys.path.insert(0, {str(Path(__file__).parent)!r})
    import test_build_triton as t
    asked = t.options({str(tmp_path / "cache")!r}, workers={workers})
    assert t.build(t.kernel(), t.CONFIG, 90, asked).code
    """
    home = tmp_path / "home"
    home.write_text("not a folder")
    env = {**os.environ, "HOME": str(home)}
    env.pop("TRITON_CACHE_DIR", None)
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, env=env
    )
    assert done.returncode == 0, done.stderr


def test_no_triton(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.metadata

    def none(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", none)
    build_triton.version.cache_clear()
    with pytest.raises(build_triton.NoTriton, match="not installed"):
        submit(kernel(), CONFIG, 90, options(tmp_path))
    build_triton.version.cache_clear()


def test_too_much_shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shorter pipeline, or another configuration (LeViT in training asked for more than an H200's
    program may have)."""
    x = torch.randn(65536, 768)
    program = scheduled(lambda x: ((x * 2).sum(0), x.sin().sum(0)), x, device="H200", check=False)
    made = generate(program.kernels[0], spec_of("H200"))
    config = next(c for c in made.configs if c.num_stages > 1)
    job = build_triton.job_of(made, config, 90, aligned=True, wide=False)
    most = build_triton.built(job, options(tmp_path / "a")).shared
    monkeypatch.setattr(
        build_triton, "MAX_SHARED_BYTES", {90: most - 1 + build_triton.CLUSTER_BYTES}
    )
    assert build_triton.built(job, options(tmp_path / "b")).shared < most
    monkeypatch.setattr(build_triton, "MAX_SHARED_BYTES", {90: 0})
    with pytest.raises(build_triton.TooLarge, match="shared memory"):
        build_triton.built(job, options(tmp_path / "c"))
    refused = build_triton.TooLarge("too much")
    told = build_triton._explained(refused, job, options(tmp_path / "c"))
    assert isinstance(told, build_triton.TooLarge) and told.command
