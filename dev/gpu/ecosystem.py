"""Deuteron in the tools that people have, on a GPU: every row of docs/ecosystem.md beside eager.

    python -m dev.gpu.ecosystem [ROW ...] [--device cpu] [--seconds 140]

In: rows by name, all without names. Out: a line for each: `right`, `FAILED` with the error's last
line, `not installed` with the packages that are missing, or `not run` where `--seconds` were over;
exit status 1 where one failed. Processes are one (NCCL, or gloo on the CPU, with one rank): several
are in the documentation's tests.
"""

from __future__ import annotations

import argparse
import copy
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch
import torch._dynamo
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from deuteron.backend import deuteron_backend

Row = Callable[[str], None]
ROWS: dict[str, tuple[Row, tuple[str, ...]]] = {}
# Of float32, where a GPU's library calls sum in another order than the generated kernels.
TOLERANCE = 1e-4
ATTEMPT = "deuteron_row"  # what a notebook's cell is called in tracebacks


def row(name: str, *packages: str) -> Callable[[Row], Row]:
    """A row of the table, and what has to be installed for it."""

    def add(f: Row) -> Row:
        ROWS[name] = (f, packages)
        return f

    return add


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return out


def compiled(f: Any, **more: Any) -> Any:
    return torch.compile(f, backend=deuteron_backend, **more)


def close(ours: Tensor, theirs: Tensor, tolerance: float = TOLERANCE) -> None:
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def net_and_rows(device: str) -> tuple[Net, Tensor]:
    return Net().to(device), torch.randn(32, 64, device=device)


def same_gradients(net: nn.Module, eager: nn.Module, tolerance: float = TOLERANCE) -> None:
    pairs = list(zip(net.parameters(), eager.parameters(), strict=True))
    assert pairs
    for ours, theirs in pairs:
        if theirs.grad is None:
            assert ours.grad is None
            continue
        assert ours.grad is not None
        full = getattr(ours.grad, "full_tensor", lambda grad=ours.grad: grad)()
        close(full, theirs.grad, tolerance)


def trained(net: Callable[[Tensor], Tensor], x: Tensor) -> None:
    net(x).square().mean().backward()


def gpt(device: str) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=2, n_head=2, n_embd=64, vocab_size=97, n_positions=64, bos_token_id=1,
        pad_token_id=0, eos_token_id=None, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return GPT2LMHeadModel(config).to(device)


@row("generate, static cache", "transformers")
def generate(device: str) -> None:
    model = gpt(device).eval()
    ids = torch.randint(2, 97, (2, 5), device=device)
    greedy = {"max_new_tokens": 6, "do_sample": False, "cache_implementation": "static"}
    expected = model.generate(ids, **greedy)
    ours = copy.deepcopy(model)
    ours.forward = compiled(ours.forward)
    assert torch.equal(ours.generate(ids, **greedy), expected), "other tokens than eager's"


@row("Trainer", "transformers", "accelerate")
def trainer(device: str) -> None:
    from transformers import Trainer, TrainingArguments

    data = [{k: torch.randint(2, 97, (16,)) for k in ("input_ids", "labels")} for _ in range(8)]
    initial = gpt("cpu")

    def losses(compile_it: bool) -> Tensor:
        torch.manual_seed(0)
        model = copy.deepcopy(initial)
        if compile_it:
            model.compile(backend=deuteron_backend)
        with tempfile.TemporaryDirectory() as folder:
            arguments = TrainingArguments(
                output_dir=folder, max_steps=4, per_device_train_batch_size=2, learning_rate=1e-3,
                use_cpu=device == "cpu", logging_steps=1, save_strategy="no", report_to=[],
                disable_tqdm=True, seed=0,
            )  # fmt: skip
            run = Trainer(model=model, args=arguments, train_dataset=data)
            run.train()
        return torch.tensor([step["loss"] for step in run.state.log_history if "loss" in step])

    close(losses(True), losses(False), 2e-3)


@row("accelerate", "accelerate")
def accelerated(device: str) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=device == "cpu")
    eager, x = net_and_rows(device)
    net = copy.deepcopy(eager)
    net.compile(backend=deuteron_backend)
    net, _ = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    accelerator.backward(net(x).square().mean())
    trained(eager, x)
    same_gradients(net, eager)


@row("Lightning", "pytorch_lightning")
def lightning(device: str) -> None:
    import pytorch_lightning as pl

    initial, rows = Net(), torch.randn(64, 64)

    class Module(pl.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = copy.deepcopy(initial)
            self.seen: list[float] = []

        def training_step(self, batch: Any, index: int) -> Tensor:
            loss: Tensor = self.net(batch[0]).square().mean()
            self.seen.append(loss.item())
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def fit(compile_it: bool) -> Tensor:
        module = Module()
        loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(rows), batch_size=16)
        run = pl.Trainer(
            max_epochs=1, accelerator="cpu" if device == "cpu" else "gpu", devices=1, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        run.fit(compiled(module) if compile_it else module, loader)
        return torch.tensor(module.seen)

    close(fit(True), fit(False))


@row("PEFT", "peft", "transformers")
def peft(device: str) -> None:
    from peft import LoraConfig, get_peft_model

    lora = LoraConfig(target_modules=["c_attn"], r=4, fan_in_fan_out=True, init_lora_weights=False)
    eager = get_peft_model(gpt(device), lora)
    ours = copy.deepcopy(eager)
    ids = torch.randint(2, 97, (2, 16), device=device)
    eager(ids, labels=ids).loss.backward()
    compiled(ours)(ids, labels=ids).loss.backward()
    same_gradients(ours, eager)


@row("torchao, int8 weights", "torchao")
def torchao(device: str) -> None:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    net = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)).eval().to(device)
    quantize_(net, Int8WeightOnlyConfig())
    rows = torch.randn(8, 64, device=device)
    with torch.no_grad():
        close(compiled(net)(rows), net(rows), 1e-2)


@contextmanager
def group(device: str) -> Iterator[Any]:
    """A process group of this process, as a mesh."""
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(
            "gloo" if device == "cpu" else "nccl", init_method=f"file://{folder}/store", rank=0,
            world_size=1, device_id=None if device == "cpu" else torch.device(device, 0),
        )  # fmt: skip
        try:
            yield dist.init_device_mesh(device, (1,))
        finally:
            dist.destroy_process_group()


def distributed(device: str, wrap: Callable[[nn.Module, Any], nn.Module]) -> None:
    eager, x = net_and_rows(device)
    with group(device) as mesh:
        ours = wrap(copy.deepcopy(eager), mesh)
        trained(compiled(ours), x)
        trained(eager, x)
        same_gradients(ours, eager)


@row("DDP")
def ddp(device: str) -> None:
    from torch.nn.parallel import DistributedDataParallel

    distributed(device, lambda net, mesh: DistributedDataParallel(net))


@row("FSDP2")
def fsdp(device: str) -> None:
    from torch.distributed.fsdp import fully_shard

    distributed(device, lambda net, mesh: fully_shard(net, mesh=mesh))


@row("tensor parallel")
def tensor_parallel(device: str) -> None:
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    distributed(device, lambda net, mesh: parallelize_module(net, mesh, plan))


@row("optimizer")
def optimizer(device: str) -> None:
    initial, x = net_and_rows(device)

    def parameters(compile_it: bool) -> list[Tensor]:
        net = copy.deepcopy(initial)
        adam = torch.optim.Adam(net.parameters(), lr=1e-2)
        step = compiled(lambda: adam.step()) if compile_it else adam.step
        for _ in range(3):
            adam.zero_grad()
            trained(net, x)
            step()
        return [p.detach() for p in net.parameters()]

    for ours, theirs in zip(parameters(True), parameters(False), strict=True):
        close(ours, theirs)


@row("compiled autograd")
def compiled_autograd(device: str) -> None:
    eager, x = net_and_rows(device)
    net = copy.deepcopy(eager)
    with torch._dynamo.config.patch(compiled_autograd=True):
        compiled(lambda x: trained(net, x))(x)
    trained(eager, x)
    same_gradients(net, eager)


@row("regions")
def regions(device: str) -> None:
    layers = nn.Sequential(*(Net() for _ in range(4))).to(device)
    x = torch.randn(32, 64, device=device)
    expected = layers(x).detach()
    for layer in layers:
        layer.compile(backend=deuteron_backend)
    close(layers(x), expected, 5e-4)


@row("checkpointing")
def checkpointing(device: str) -> None:
    from torch.utils.checkpoint import checkpoint

    eager, x = net_and_rows(device)
    net = copy.deepcopy(eager)
    trained(compiled(lambda x: checkpoint(net, x, use_reentrant=False)), x)
    trained(eager, x)
    same_gradients(net, eager)


class Rows(torch.utils.data.Dataset[Tensor]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, k: int) -> Tensor:
        return torch.full((64,), float(k)).sin()


@row("DataLoader workers")
def workers(device: str) -> None:
    """They are forked after the first compiled call."""
    net, x = net_and_rows(device)
    ours = compiled(net)
    close(ours(x), net(x))
    loader = torch.utils.data.DataLoader(
        Rows(), 32, num_workers=2, pin_memory=device != "cpu", multiprocessing_context="fork"
    )
    for batch in loader:
        rows = batch.to(device)
        close(ours(rows), net(rows))


FORKED = """
import os, sys
import torch
from dev.gpu import ecosystem

torch.manual_seed(0)
eager, x = ecosystem.net_and_rows("cpu")
net = ecosystem.compiled(eager)
if sys.argv[1] == "cpu":
    ecosystem.close(net(x), eager(x))
assert not torch.cuda.is_initialized()
child = os.fork()
eager, x = eager.to(sys.argv[1]), x.to(sys.argv[1])
ecosystem.close(net(x), eager(x))
if child:
    assert os.waitpid(child, 0)[1] == 0, "the child's result is another, or it ended"
"""


@row("fork")
def forked(device: str) -> None:
    """What eager can do: a fork after the first compiled call on the CPU; on a GPU one before CUDA
    is used, after which both compile (CUDA refuses a process that was forked later)."""
    done = subprocess.run(
        [sys.executable, "-c", FORKED, device], capture_output=True, text=True, timeout=120,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr.strip().splitlines()[-1]


def spawned_call(device: str) -> None:
    torch.manual_seed(0)
    eager, x = net_and_rows(device)
    close(compiled(eager)(x), eager(x))


@row("spawn")
def spawned(device: str) -> None:
    """A process that CUDA takes whatever its parent has done."""
    spawned_call(device)
    child = torch.multiprocessing.get_context("spawn").Process(target=spawned_call, args=(device,))
    child.start()
    child.join()
    assert child.exitcode == 0, "the child's result is another, or it ended"


@row("threads that serve")
def threads(device: str) -> None:
    net, _ = net_and_rows(device)
    ours = compiled(net)
    batches = [torch.randn(4 + k % 3, 64, device=device) for k in range(24)]

    def serve(rows: Tensor) -> Tensor:
        with torch.no_grad():
            out: Tensor = ours(rows)
            return out

    with ThreadPoolExecutor(4) as pool:
        for rows in batches[:2]:  # torch's tracing is not safe beside other threads' calls
            pool.submit(serve, rows).result()
        for result, rows in zip(pool.map(serve, batches), batches, strict=True):
            close(result, net(rows))


@row("notebook")
def notebook(device: str) -> None:
    """A function without a file, and its explanation as HTML."""
    import deuteron

    cell: dict[str, Any] = {"torch": torch}
    exec(compile("def f(x):\n    return (x.softmax(-1) * 2).sin()", ATTEMPT, "exec"), cell)
    x = torch.randn(32, 64, device=device)
    close(compiled(cell["f"])(x), cell["f"](x))
    page = deuteron.explain(cell["f"], x)._repr_html_()
    assert page.startswith("<details") and "7 operations → 1 kernel" in page, page


def tried(name: str, device: str) -> str:
    """Runs a row; `right`, or what is the matter."""
    run, packages = ROWS[name]
    missing = [p for p in packages if find_spec(p) is None]
    if missing:
        return f"not installed: {', '.join(missing)}"
    torch._dynamo.reset()
    torch.manual_seed(0)
    start = time.perf_counter()
    try:
        run(device)
    except Exception as e:  # reported, and the exit status says so
        traceback.print_exc()
        return f"FAILED: {type(e).__name__}: {str(e).strip().splitlines()[0] if str(e) else ''}"
    return f"right ({time.perf_counter() - start:.1f} s)"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m dev.gpu.ecosystem")
    parser.add_argument("rows", nargs="*", choices=[*ROWS, []], metavar="ROW")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=float, default=140.0)
    args = parser.parse_args()
    start, told = time.perf_counter(), {}
    for name in args.rows or ROWS:
        over = time.perf_counter() - start > args.seconds
        told[name] = "not run: the seconds are over" if over else tried(name, args.device)
        print(f"{name:24} {args.device:5} {told[name]}", flush=True)
    words = [text.partition(":")[0].partition(" (")[0] for text in told.values()]
    print(", ".join(f"{words.count(w)} {w}" for w in dict.fromkeys(words)))
    return int("FAILED" in words)


if __name__ == "__main__":
    sys.exit(main())
