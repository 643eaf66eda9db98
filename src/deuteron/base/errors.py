"""The errors that Deuteron raises: a class each, with a message, a hint and the place in the
user's code.

Every error survives pickling (build errors cross process borders) and prints as::

    message
      at: model.py:12 in forward
      hint: what to do about it
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def _rebuild(cls: type[DeuteronError], fields: dict[str, Any]) -> DeuteronError:
    return cls(**fields)


class DeuteronError(RuntimeError):
    """Base of all errors. `hint` says what the user can do; `where` is the user's file and line."""

    def __init__(self, message: str, hint: str = "", where: str = "") -> None:
        super().__init__(message)
        self.message, self.hint, self.where = message, hint, where

    def fields(self) -> dict[str, Any]:
        """The constructor's arguments."""
        return {"message": self.message, "hint": self.hint, "where": self.where}

    def __reduce__(self) -> tuple[Callable[..., DeuteronError], tuple[Any, ...]]:
        return _rebuild, (type(self), self.fields())

    def lines(self) -> list[str]:
        out = [self.message]
        if self.where:
            out.append(f"  at: {self.where}")
        if self.hint:
            out.append(f"  hint: {self.hint}")
        return out

    def __str__(self) -> str:
        return "\n".join(self.lines())


class OptionError(DeuteronError):
    """A mode, an option or an environment variable that does not exist or has a wrong value."""


class UnsupportedOp(DeuteronError):
    """An operator that can be neither generated nor called."""

    def __init__(self, message: str, hint: str = "", where: str = "", op: str = "") -> None:
        super().__init__(message, hint, where)
        self.op = op

    def fields(self) -> dict[str, Any]:
        return {**super().fields(), "op": self.op}


class VerifyError(DeuteronError):
    """A stage produced an artifact that breaks an invariant. Names the invariant, the node and the
    guilty pass."""

    def __init__(
        self,
        message: str,
        hint: str = "",
        where: str = "",
        invariant: str = "",
        node: str = "",
        guilty: str = "",
    ) -> None:
        super().__init__(message, hint, where)
        self.invariant, self.node, self.guilty = invariant, node, guilty

    def fields(self) -> dict[str, Any]:
        return {
            **super().fields(),
            "invariant": self.invariant,
            "node": self.node,
            "guilty": self.guilty,
        }

    def lines(self) -> list[str]:
        named = (("invariant", self.invariant), ("node", self.node), ("after pass", self.guilty))
        return super().lines() + [f"  {k}: {v}" for k, v in named if v]


class BuildError(DeuteronError):
    """A compiler refused generated source. `command` reproduces it on the file at `source`."""

    def __init__(
        self,
        message: str,
        hint: str = "",
        where: str = "",
        source: str = "",
        output: str = "",
        command: str = "",
    ) -> None:
        super().__init__(message, hint, where)
        self.source, self.output, self.command = source, output, command

    def fields(self) -> dict[str, Any]:
        return {
            **super().fields(),
            "source": self.source,
            "output": self.output,
            "command": self.command,
        }

    def lines(self) -> list[str]:
        out = super().lines()
        if self.source:
            out.append(f"  source: {self.source}")
        if self.command:
            out.append(f"  reproduce: {self.command}")
        if self.output:
            out += ["  output:", *("    " + line for line in self.output.splitlines()[:60])]
        return out


class UntrueFakeKernel(DeuteronError):
    """An operator returned something else than its fake kernel said when the program was traced,
    and kernels were about to read it as that."""

    def __init__(self, message: str, hint: str = "", where: str = "", op: str = "") -> None:
        super().__init__(message, hint, where)
        self.op = op

    def fields(self) -> dict[str, Any]:
        return {**super().fields(), "op": self.op}


class FailedAssertion(DeuteronError):
    """What the program asserts of a number that is known only when it runs does not hold; the
    message is the program's own, where it has one."""


class CacheError(DeuteronError):
    """The cache folder cannot be used (not ours, not writable). A bad entry is rebuilt and is no
    error."""
