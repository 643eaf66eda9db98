"""FILE:FUNCTION of the command line: finds the function and makes its arguments.

In: the words of the command line. Out: a `Target`. Raises `UsageError` with what to write instead.
"""

from __future__ import annotations

import difflib
import importlib.util
import inspect
import re
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from deuteron.base.device import demand
from deuteron.tools.measuring import error_line

WAYS_TO_GIVE = "give one --input each, as --input float32[8,128], or write inputs() in the file"


class UsageError(ValueError):
    """The command line names something that is not there."""


@dataclass(frozen=True)
class Target:
    """What a command works on. `function` may be a module."""

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]

    def named_tensors(self) -> dict[str, Tensor]:
        """The tensors that a call can reach: arguments, and parameters and buffers of the module,
        or of the modules and tensors that a function names."""
        given = [t for t in tree_leaves(self.args) if isinstance(t, Tensor)]
        named = {f"argument {k}": t for k, t in enumerate(given)}
        for name, owner in owners(self.function).items():
            own = {name: owner} if isinstance(owner, Tensor) else state_of(owner, name)
            named.update({k: t for k, t in own.items() if all(t is not x for x in named.values())})
        return named

    def eager_failure(self) -> str | None:
        """What is wrong with the function itself: how it fails without a compiler, if it does."""
        try:
            self.function(*self.args)
        except Exception as error:  # noqa: BLE001 - the user's
            return f"{self.name} fails without a compiler: {error_line(error)}"
        return None

    @cached_property
    def leaves(self) -> dict[str, Tensor]:
        """Those of them whose gradients a backward computes."""
        return {k: t for k, t in self.named_tensors().items() if t.requires_grad and t.is_leaf}


def owners(function: Any) -> dict[str, nn.Module | Tensor]:
    """A module itself; of a method its object; of a function what its text names outside of it."""
    if isinstance(function, nn.Module):
        return {"": function}
    named: dict[str, Any] = {"": getattr(function, "__self__", None)}
    if inspect.isfunction(function):
        outside = inspect.getclosurevars(function)
        named |= {**outside.globals, **outside.nonlocals}
    return {k: v for k, v in named.items() if isinstance(v, (nn.Module, Tensor))}


def state_of(module: nn.Module, name: str) -> dict[str, Tensor]:
    """Parameters and buffers by name."""
    prefix = f"{name}." if name else ""
    own = [*module.named_parameters(), *module.named_buffers()]
    return {prefix + k: t for k, t in own}


def target_of(words: str, shapes: Sequence[str], device: str, backward: bool) -> Target:
    """``FILE:FUNCTION`` and the --input options -> the function and its arguments on `device`.

    Without --input the arguments are what the file's inputs() returns; without that there are none.
    A dictionary whose keys are parameters of the function goes to these.
    A class, or a function without parameters where there are arguments, makes what is meant. Where
    a backward is asked for and nothing requires a gradient, all floating arguments do.
    """
    demand(device)
    function, module = load(words)
    file = words.rpartition(":")[0]
    # What the file has compiled is taken as it was written.
    function = getattr(function, "_orig_mod", function)
    function = getattr(function, "_torchdynamo_orig_callable", function)
    made: Any = ()
    if shapes:
        made = tuple(tensor(s, device) for s in shapes)
    elif callable(getattr(module, "inputs", None)):
        made = called(module.inputs, file, "inputs()")
    given = not isinstance(made, tuple) or made
    if inspect.isclass(function) or (given and (s := signature(function)) and not s.parameters):
        function = called(function, file, words.rpartition(":")[2])
    elif not given and (s := signature(function)) and not s.parameters:
        refuse_factory(function, words, file)
    args = positional(function, made)
    args = tree_map(lambda x: moved(x, device) if isinstance(x, Tensor) else x, args)
    for owner in owners(function).values():
        if isinstance(owner, nn.Module):
            owner.to(device)
    parameters = signature(function.forward if isinstance(function, nn.Module) else function)
    try:
        if parameters is not None:
            parameters.bind(*args)
    except TypeError as error:
        raise UsageError(
            f"{words} does not take {len(args)} arguments ({error}); {WAYS_TO_GIVE}"
        ) from None
    target = Target(words, function, args)
    if backward and not target.leaves:
        args = tuple(tree_map(differentiable, a) for a in args)
        target = Target(words, function, args)
    return target


def refuse_factory(function: Callable[[], Any], words: str, file: str) -> None:
    """Of a function that makes a module, nothing is known with which to call that."""
    made = called(function, file, words.rpartition(":")[2])
    if isinstance(made, nn.Module):
        kind = type(made).__name__
        raise UsageError(f"{words} makes a {kind}, and nothing says what that gets: {WAYS_TO_GIVE}")


def positional(function: Any, made: Any) -> tuple[Any, ...]:
    """What inputs() returns, as arguments in their order: several, by name, or one."""
    if isinstance(made, (tuple, list)):
        return tuple(made)
    known = signature(getattr(function, "forward", function))
    names = list(known.parameters) if known is not None else []
    kinds = [p.kind for p in known.parameters.values()] if known is not None else []
    by_name = bool(kinds) and min(kinds) > inspect.Parameter.VAR_POSITIONAL
    if isinstance(made, Mapping) and by_name and not made.keys() <= {*names}:
        raise UsageError(
            f"inputs() returns a dictionary ({', '.join(map(str, made))}), and the function takes "
            f"nothing by position {known}: write one of positional parameters around it"
        )
    if known is None or not isinstance(made, Mapping) or not made or not made.keys() <= {*names}:
        return (made,)
    try:
        bound = known.bind(**made)
    except TypeError as error:
        raise UsageError(f"inputs() returns {', '.join(made)}: {error}") from None
    bound.apply_defaults()
    if not made.keys().isdisjoint(bound.kwargs):
        alone = ", ".join(k for k in made if k in bound.kwargs)
        raise UsageError(
            f"inputs() returns {alone}, which can be given by keyword only: write a function of "
            "positional parameters around it"
        )
    return bound.args[: max(map(names.index, made)) + 1]


def parsed(words: str) -> tuple[Path, str]:
    """``FILE:FUNCTION`` -> (a file that exists, a name)."""
    file, _, name = words.rpartition(":")
    if not file or not name.isidentifier():
        raise UsageError(f"{words!r} is not of the form FILE:FUNCTION, as in model.py:forward")
    if not Path(file).is_file():
        raise UsageError(f"there is no file {file}")
    return Path(file), name


def load(words: str) -> tuple[Any, Any]:
    """``FILE:FUNCTION`` -> (the function, its module)."""
    path, name = parsed(words)
    file = str(path)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{file} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and torch look a class's module up there
    sys.path.insert(0, str(path.resolve().parent))  # as `python FILE` would
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # noqa: BLE001 - the user's
        raise UsageError(f"{place(error, file)}: {error_line(error)}") from None
    except SystemExit:
        raise UsageError(
            f"{file} ends the program when it is imported: put what runs it behind "
            '`if __name__ == "__main__":`'
        ) from None
    function = getattr(module, name, None)
    if not callable(function):
        own = (n for n, v in vars(module).items() if getattr(v, "__module__", None) == spec.name)
        names = [n for n in own if callable(getattr(module, n)) and n[0] != "_" and n != "inputs"]
        close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise UsageError(
            f"{file} has no function {name!r}; {hint}it has {', '.join(names) or 'none'}"
        )
    return function, module


def place(error: BaseException, file: str) -> str:
    """Where in the user's file an error comes from: ``model.py:12``."""
    if isinstance(error, SyntaxError):
        return f"{error.filename or file}:{error.lineno}"
    own = str(Path(file).resolve())
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename in (file, own)]
    return f"{file}:{frames[-1].lineno}" if frames else file


def called(function: Callable[[], Any], file: str, name: str) -> Any:
    """What a function of the user's file gives."""
    try:
        return function()
    except Exception as error:  # noqa: BLE001 - the user's
        raise UsageError(f"{place(error, file)}: {name} fails: {error_line(error)}") from None


def chosen_device(device: str) -> str:
    """cpu or cuda (cuda:1, ...), where "auto" is a GPU if there is one."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return device


def signature(function: Any) -> inspect.Signature | None:
    """None where it says none (builtin functions)."""
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):
        return None


def tensor(text: str, device: str) -> Tensor:
    """``float32[8,128]`` -> a tensor: normal numbers, or integers 0 and 1."""
    match = re.fullmatch(r"(\w+)\[([\d,\s]*)\]", text.strip())
    dtype = getattr(torch, match[1], None) if match else None
    if match is None or not isinstance(dtype, torch.dtype):
        raise UsageError(f"--input {text!r} is not of the form float32[8,128]")
    shape = [int(n) for n in match[2].split(",") if n.strip()]
    try:
        if dtype.is_floating_point or dtype.is_complex:
            return torch.randn(shape, device=device).to(dtype)
        return torch.randint(0, 2, shape, device=device).to(dtype)
    except (RuntimeError, NotImplementedError) as error:
        raise UsageError(f"--input {text!r} cannot be made: {error_line(error)}") from None


def moved(t: Tensor, device: str) -> Tensor:
    """`t` itself if it lies on the device; else a leaf there with its value."""
    if t.device.type == torch.device(device).type:
        return t
    return t.detach().to(device).requires_grad_(t.requires_grad)


def differentiable(x: Any) -> Any:
    """A tensor of floats as a leaf that requires a gradient; anything else as it is."""
    if not isinstance(x, Tensor) or not (x.is_floating_point() or x.is_complex()):
        return x
    return x.detach().requires_grad_()
