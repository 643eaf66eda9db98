"""`deuteron explain FILE:FUNCTION`: finds the function and makes its arguments.

In: the command line's words. Out: what `deuteron.explain` returns. Raises `UsageError` with what to
write instead.
"""

from __future__ import annotations

import importlib.util
import inspect
import re
import sys
from pathlib import Path
from typing import Any

import torch

from deuteron.base.device import demand


class UsageError(ValueError):
    """The command line names something that is not there."""


def load(target: str) -> tuple[Any, Any]:
    """``FILE:FUNCTION`` -> (the function, its module)."""
    file, _, name = target.rpartition(":")
    path = Path(file)
    if not file or not name.isidentifier():
        raise UsageError(f"{target!r} is not of the form FILE:FUNCTION, as in model.py:forward")
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


def tensor(text: str, device: str) -> torch.Tensor:
    """``float32[8,128]`` -> a tensor: normal numbers, or integers 0 and 1."""
    match = re.fullmatch(r"(\w+)\[([\d,\s]*)\]", text.strip())
    dtype = getattr(torch, match[1], None) if match else None
    if match is None or not isinstance(dtype, torch.dtype):
        raise UsageError(f"--input {text!r} is not of the form float32[8,128]")
    shape = [int(n) for n in match[2].split(",") if n.strip()]
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(shape, device=device).to(dtype)
    return torch.randint(0, 2, shape, device=device).to(dtype)


def explain_target(target: str, shapes: list[str], device: str, backward: bool) -> Any:
    import deuteron

    demand(device)
    function, module = load(target)
    if shapes:
        args: tuple[Any, ...] = tuple(tensor(s, device) for s in shapes)
    elif callable(getattr(module, "inputs", None)):
        made = module.inputs()
        args = tuple(made) if isinstance(made, (tuple, list)) else (made,)
    else:
        args = ()
    if inspect.isclass(function) or (args and not inspect.signature(function).parameters):
        function = function()
    if isinstance(function, torch.nn.Module):
        function = function.to(device)
    try:
        inspect.signature(function).bind(*args)
    except TypeError as error:
        raise UsageError(
            f"{target} does not take {len(args)} arguments ({error}); give one --input each, as "
            f"--input float32[8,128], or write inputs() in the file"
        ) from None
    return deuteron.explain(function, *args, backward=backward)
