"""What a captured graph is called, in every process.

In: a graph from Dynamo, and its example inputs. Out: text. Two graphs with one text are compiled to
the same, given the same options, versions and devices (which are the caller's to add). A graph
whose meaning a text does not tell for sure has none (`Unnameable`): one that calls what is not
torch's, that holds tensors or other graphs, whose sizes are symbols, or whose inputs share memory.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

# Where functions are that mean the same in every process with one version of torch and Python.
STABLE_MODULES = (
    "torch",
    "torch._C._nn",
    "torch._C",
    "torch.nn.functional",
    "operator",
    "math",
    "builtins",
)
KNOWN_NAMESPACES = ("aten", "prims")
LITERAL_TYPES = (type(None), bool, int, str, type(Ellipsis))
NAMED_TYPES = (torch.dtype, torch.device, torch.layout, torch.memory_format)
# Settings that graphs and what is made of them depend on, as expressions.
TORCH_SETTINGS = (
    "torch.is_grad_enabled()",
    "torch.is_inference_mode_enabled()",
    "torch.get_default_dtype()",
    "torch.get_default_device()",
    "torch.get_num_threads()",
    "torch.get_float32_matmul_precision()",
    "torch.are_deterministic_algorithms_enabled()",
    "torch.is_deterministic_algorithms_warn_only_enabled()",
    "torch.utils.deterministic.fill_uninitialized_memory",
    "torch._C._is_any_autocast_enabled()",
    "torch.is_autocast_cache_enabled()",
    "torch.backends.cudnn.enabled",
    "torch.backends.cudnn.benchmark",
    "torch.backends.cudnn.deterministic",
    "torch.backends.cudnn.allow_tf32",
    "torch.backends.cuda.matmul.allow_tf32",
    "torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction",
    "torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction",
    "torch.backends.cuda.preferred_linalg_library()",
    "torch.backends.cuda.flash_sdp_enabled()",
    "torch.backends.cuda.mem_efficient_sdp_enabled()",
    "torch.backends.cuda.math_sdp_enabled()",
    "torch.backends.cuda.cudnn_sdp_enabled()",
    "torch.backends.mkldnn.enabled",
    "torch._functorch.config.get_hash()",
)
AUTOCAST_DEVICES = ("cpu", "cuda")


class Unnameable(Exception):
    """Why a graph has no name."""


def graph_key(gm: fx.GraphModule, inputs: Sequence[Any]) -> str:
    """The text. Raises `Unnameable`."""
    described = [*settings(), *map(given, inputs)]
    check_distinct_memory(inputs)
    return "\n".join((*described, *map(line, gm.graph.nodes)))


def settings() -> Iterator[str]:
    if torch._dynamo.config.compiled_autograd:
        raise Unnameable("compiled autograd traces backwards itself")
    if torch._C._len_torch_dispatch_stack():
        raise Unnameable("a dispatch mode is on")
    for text in TORCH_SETTINGS:
        yield f"{text} = {compiled(text)()}"
    for device in AUTOCAST_DEVICES:
        yield f"{device}: {torch.is_autocast_enabled(device)} {torch.get_autocast_dtype(device)}"


@cache
def compiled(text: str) -> Any:
    return eval(f"lambda: {text}", {"torch": torch})


def given(x: Any) -> str:
    """An input. Numbers are symbols."""
    if not isinstance(x, Tensor):
        raise Unnameable(f"an input is a {type(x).__name__}")
    if is_traceable_wrapper_subclass(x) or x.layout != torch.strided or x.is_quantized:
        raise Unnameable("an input is no plain tensor")
    numbers = [*x.shape, *x.stride(), x.storage_offset()]
    if any(type(n) is not int for n in numbers):
        raise Unnameable("sizes are symbols")
    flags = (x.requires_grad, x.is_leaf, x.is_inference(), x.is_conj(), x.is_neg())
    parameter = isinstance(x, torch.nn.Parameter)
    return f"{x.dtype} {x.device} {list(x.shape)} {numbers} {flags} {parameter}"


def check_distinct_memory(inputs: Iterable[Tensor]) -> None:
    """Raises if two inputs share memory: the graph may depend on which parts they share."""
    places = [x.untyped_storage()._cdata for x in inputs if x.numel()]
    if len(set(places)) != len(places):
        raise Unnameable("inputs share memory")


def line(node: fx.Node) -> str:
    """A node, and where it comes from: the Record says so."""
    origin = node.meta.get("stack_trace") or ""
    sized(node.meta.get("example_value"))
    if node.op == "placeholder":
        attributes = node.meta.get("tensor_dict") or {}
        real = getattr(node.meta.get("grapharg"), "example", None)
        if isinstance(real, Tensor) and type(real) not in (Tensor, torch.nn.Parameter):
            raise Unnameable(f"an input is a {type(real).__name__}")
        return f"{node.name} {sorted(attributes)}"
    if node.op in ("get_attr", "call_module"):
        raise Unnameable(f"the graph holds {node.target}")
    target = named(node.target) if node.op == "call_function" else f".{node.target}"
    return f"{node.name} {node.op} {target} {value(node.args)} {value(node.kwargs)} {origin}"


def sized(x: Any) -> None:
    """Raises for sizes and numbers that are known only in a call."""
    if isinstance(x, (tuple, list)):
        for y in x:
            sized(y)
    elif isinstance(x, (torch.SymInt, torch.SymFloat, torch.SymBool)) or (
        isinstance(x, Tensor) and any(type(n) is not int for n in x.shape)
    ):
        raise Unnameable("sizes are symbols")


@cache
def stable_modules() -> tuple[tuple[str, Any], ...]:
    return tuple((name, stable_module(name)) for name in STABLE_MODULES)


def stable_module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:  # a part of an extension module
        out: Any = torch
        for part in name.split(".")[1:]:
            out = getattr(out, part, None)
        return out


def named(f: Any) -> str:
    """A function by a name that leads to it."""
    if isinstance(f, torch._ops.OpOverload):
        if f.namespace in KNOWN_NAMESPACES:
            return str(f)
        raise Unnameable(f"{f} is no operator of torch's")
    if isinstance(f, torch._ops.HigherOrderOperator):  # its numbers may name kernels of the user's
        raise Unnameable(f"{f} runs what the graph does not show")
    name = getattr(f, "__name__", "")
    for home, module in stable_modules():
        if name and getattr(module, name, None) is f:
            return f"{home}.{name}"
    home = getattr(f, "__module__", None) or ""
    if home.split(".")[0] == "torch" and getattr(stable_module(home), name, None) is f:
        return f"{home}.{name}"
    raise Unnameable(f"{getattr(f, '__qualname__', f)} is not torch's, or has no name there")


def value(x: Any) -> str:
    """An argument."""
    if isinstance(x, fx.Node):
        return f"%{x.name}"
    if type(x) in LITERAL_TYPES:
        return repr(x)
    if type(x) in (float, complex):
        return repr(x) if not (type(x) is float and math.isnan(x)) else "nan"
    if isinstance(x, NAMED_TYPES):
        return f"<{x}>"
    if isinstance(x, slice):
        return f"slice({value(x.start)}, {value(x.stop)}, {value(x.step)})"
    if isinstance(x, dict):
        return "{" + ", ".join(f"{value(k)}: {value(v)}" for k, v in x.items()) + "}"
    if isinstance(x, (tuple, list)):
        kind = "" if type(x).__module__ in ("torch.fx.immutable_collections",) else type(x).__name__
        return f"{kind}[{', '.join(map(value, x))}]"
    raise Unnameable(f"an argument is a {type(x).__name__}")


__all__ = ["Unnameable", "graph_key"]
