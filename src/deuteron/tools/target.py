"""FILE:FUNCTION of the command line: finds the function and makes its arguments.

In: the words of the command line. Out: a `Target`. Raises `UsageError` with what to write instead.
"""

from __future__ import annotations

import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from deuteron.base.device import demand


class UsageError(ValueError):
    """The command line names something that is not there."""


@dataclass(frozen=True)
class Target:
    """What a command works on. `function` may be a module."""

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors among the arguments, and the parameters of a module."""
        given = [t for t in tree_leaves(self.args) if isinstance(t, Tensor)]
        own = self.function.parameters() if isinstance(self.function, nn.Module) else ()
        return [*given, *own]


def target_of(words: str, shapes: Sequence[str], device: str, backward: bool) -> Target:
    """``FILE:FUNCTION`` and the --input options -> the function and its arguments on `device`.

    Without --input the arguments are what the file's inputs() returns; without that there are none.
    A class, or a function without parameters where there are arguments, makes what is meant. Where
    a backward is asked for and nothing requires a gradient, all floating arguments do.
    """
    demand(device)
    function, module = load(words)
    if shapes:
        args: tuple[Any, ...] = tuple(tensor(s, device) for s in shapes)
    elif callable(getattr(module, "inputs", None)):
        made = module.inputs()
        args = tuple(made) if isinstance(made, (tuple, list)) else (made,)
        args = tree_map(lambda x: moved(x, device) if isinstance(x, Tensor) else x, args)
    else:
        args = ()
    if inspect.isclass(function) or (args and not inspect.signature(function).parameters):
        function = function()
    if isinstance(function, nn.Module):
        function = function.to(device)
    try:
        inspect.signature(function).bind(*args)
    except TypeError as error:
        raise UsageError(
            f"{words} does not take {len(args)} arguments ({error}); give one --input each, as "
            f"--input float32[8,128], or write inputs() in the file"
        ) from None
    target = Target(words, function, args)
    if backward and not any(t.requires_grad for t in target.tensors):
        for t in target.tensors:
            t.requires_grad_(t.is_floating_point() or t.is_complex())
    return target


def load(words: str) -> tuple[Any, Any]:
    """``FILE:FUNCTION`` -> (the function, its module)."""
    file, _, name = words.rpartition(":")
    path = Path(file)
    if not file or not name.isidentifier():
        raise UsageError(f"{words!r} is not of the form FILE:FUNCTION, as in model.py:forward")
    if not path.is_file():
        raise UsageError(f"there is no file {file}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{file} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and torch look a class's module up there
    sys.path.insert(0, str(path.resolve().parent))  # as `python FILE` would
    spec.loader.exec_module(module)
    function = getattr(module, name, None)
    if not callable(function):
        names = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        raise UsageError(f"{file} has no function {name!r}; it has {', '.join(names) or 'none'}")
    return function, module


def tensor(text: str, device: str) -> Tensor:
    """``float32[8,128]`` -> a tensor: normal numbers, or integers 0 and 1."""
    match = re.fullmatch(r"(\w+)\[([\d,\s]*)\]", text.strip())
    dtype = getattr(torch, match[1], None) if match else None
    if match is None or not isinstance(dtype, torch.dtype):
        raise UsageError(f"--input {text!r} is not of the form float32[8,128]")
    shape = [int(n) for n in match[2].split(",") if n.strip()]
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(shape, device=device).to(dtype)
    return torch.randint(0, 2, shape, device=device).to(dtype)


def moved(t: Tensor, device: str) -> Tensor:
    """`t` itself if it lies on the device; else a leaf there with its value."""
    if t.device.type == torch.device(device).type:
        return t
    return t.detach().to(device).requires_grad_(t.requires_grad)
