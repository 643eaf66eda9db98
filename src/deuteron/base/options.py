"""Options: one frozen value that a compilation receives. The only reader of the environment.

In: the `mode` or `options` of ``torch.compile`` and the variables ``DEUTERON_<FIELD>``. Out: an
`Options`. An explicit option wins over the environment, which wins over the mode, which wins over
the default. Every field names its unit and whether generated code depends on it (`codegen=True` in
its metadata); `Options.codegen_key` covers exactly those.
"""

from __future__ import annotations

import difflib
import hashlib
import os
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, get_type_hints

from deuteron.base.errors import OptionError

ENVIRONMENT_PREFIX = "DEUTERON_"
# The environment may say it shorter than the field does.
ENVIRONMENT_ALIASES = {"DEBUG": "debug_dir"}


def _option(
    default: Any,
    doc: str,
    *,
    codegen: bool = False,
    choices: tuple[str, ...] = (),
    low: int | None = None,
) -> Any:
    return field(
        default=default, metadata={"doc": doc, "codegen": codegen, "choices": choices, "low": low}
    )


@dataclass(frozen=True)
class Options:
    """What a user can decide about a compilation. See each field's ``doc``, or
    `Options.describe`."""

    mode: str = _option(
        "default",
        "The mode that the other defaults came from.",
        choices=("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"),
    )
    fallback: str = _option(
        "error",
        "When a graph cannot be compiled: raise ('error'), or run it through ATen and "
        "say so in the Record ('aten').",
        choices=("error", "aten"),
    )
    verify: bool = _option(
        False,
        "Check what each pass makes, and each kernel's results at run time, against the reference "
        "executor and the traced graph (slow).",
    )
    debug_dir: str | None = _option(
        None, "Folder that receives what each pass makes of each graph, as text."
    )
    report: str | None = _option(
        None,
        "HTML file that receives a report of what was compiled, when the program ends, with JSON.",
    )
    cache_dir: str | None = _option(
        None, "Folder of built kernels; default: the user's cache folder / deuteron."
    )
    cache: bool = _option(True, "Read and write the cache of built kernels.")
    keep_graphs: bool = _option(
        True, "Keep compiled graphs in the cache, so that another process need not compile them."
    )
    workers: int = _option(0, "Processes that build kernels; 0: one per core, at most 16.", low=0)
    build_timeout: int = _option(
        300, "Seconds after which a build is given up; the compiler is then killed.", low=1
    )
    cxx: str | None = _option(
        None, "C++ compiler (GNU), perhaps with arguments; default: the first of c++, g++."
    )
    recompute: bool = _option(
        True, "Recompute cheap values in the backward pass instead of saving them."
    )
    chunk_mib: int = _option(
        256,
        "MiB from which on the result of a product, and what is computed of it, is made in chunks "
        "of rows (a loss on a linear layer keeps no logits), each of at most so many; 0: whole.",
        low=0,
        codegen=True,
    )
    eager_random: bool = _option(
        False,
        "Draw random numbers as eager does (same numbers for the same seed), at "
        "the price of library calls and saved masks.",
        codegen=True,
    )
    precision: str = _option(
        "float32",
        "What float16 and bfloat16 values are inside a kernel, between operations: the float32 "
        "that was computed ('float32'; what is stored is rounded), or rounded after each "
        "operation, as eager does ('eager').",
        codegen=True,
        choices=("float32", "eager"),
    )
    fusion: bool = _option(
        True,
        "Let operations share kernels. False: one kernel per operation (to bisect).",
        codegen=True,
    )
    threads: int = _option(
        0, "Threads of CPU kernels; 0: torch.get_num_threads() at each call.", low=0, codegen=True
    )
    device_spec: str | None = _option(
        None,
        "JSON file that overrides the measured device figures of the cost model.",
        codegen=True,
    )
    cudagraphs: bool = _option(
        False, "Replay captured CUDA graphs where a call's addresses and sizes allow it."
    )
    autotune: bool = _option(
        False,
        "Measure candidate configurations where the cost model finds them close.",
        codegen=True,
    )
    guard: str = _option(
        "off",
        "Measure fused kernels against the unfused form or the library in the first call, where "
        "the cost model is uncertain ('measure'), and keep the better.",
        choices=("off", "measure"),
    )
    bounds_check: bool = _option(
        True, "Check indices that are loaded from tensors, as eager does.", codegen=True
    )
    check_accesses: bool = _option(
        False,
        "Check at run time that every load and store of generated kernels is inside its tensor "
        "(slow: to find faults of the compiler).",
        codegen=True,
    )

    @staticmethod
    def make(mode: str | None = None, options: Mapping[str, Any] | None = None) -> Options:
        """The options of one ``torch.compile`` call; raises `OptionError` for what does not
        exist."""
        return _make(mode, options, os.environ)

    def codegen_key(self) -> str:
        """A stable string of the options that generated code depends on. Files count with their
        content."""
        parts = []
        for f in fields(self):
            if not f.metadata["codegen"]:
                continue
            value = getattr(self, f.name)
            if f.name == "device_spec" and value is not None:
                value = hashlib.sha256(Path(value).read_bytes()).hexdigest()[:16]
            parts.append(f"{f.name}={value}")
        return ";".join(parts)

    @staticmethod
    def describe() -> dict[str, str]:
        """Field name -> documentation, for the command line's help."""
        return {f.name: f.metadata["doc"] for f in fields(Options)}

    def cache_folder(self) -> Path:
        """Where built kernels live."""
        if self.cache_dir is not None:
            return Path(self.cache_dir).expanduser()
        base = os.environ.get("XDG_CACHE_HOME")
        return (Path(base) if base else Path.home() / ".cache") / "deuteron"

    def worker_count(self) -> int:
        """Processes to build with: the cores that this process may use, at most 16."""
        if self.workers:
            return self.workers
        try:
            cores = len(os.sched_getaffinity(0))
        except AttributeError:  # not on macOS
            cores = os.cpu_count() or 1
        return min(16, cores)


def option_of(text: str) -> tuple[str, Any]:
    """``name=value`` of a command line, as the option and its value; raises `OptionError`."""
    name, equals, value = text.partition("=")
    if not equals or name not in {f.name for f in fields(Options)}:
        hint = "as in --option guard=measure; " + _nearest(name, Options.describe())
        raise OptionError(f"no option {name!r}" if equals else f"{text!r} has no value", hint=hint)
    return name, _parse(name, value, f"--option {name}")


def environment(**changes: str) -> dict[str, str]:
    """The environment of a program that is started: ours, with some changes."""
    return {**os.environ, **changes}


def set_environment(**values: str) -> None:
    """Changes the environment of this process, which those that it starts inherit."""
    os.environ.update(values)


MODES: dict[str, dict[str, Any]] = {
    "default": {},
    "reduce-overhead": {"cudagraphs": True},
    "max-autotune": {"cudagraphs": True, "autotune": True, "guard": "measure"},
    "max-autotune-no-cudagraphs": {"autotune": True, "guard": "measure"},
}


def _make(
    mode: str | None, options: Mapping[str, Any] | None, environment: Mapping[str, str]
) -> Options:
    if mode is not None and mode not in MODES:
        raise OptionError(f"no mode {mode!r}", hint=_nearest(mode, MODES))
    known = {f.name: f for f in fields(Options)}
    values: dict[str, Any] = {"mode": mode or "default", **MODES[mode or "default"]}
    for name, text in sorted(environment.items()):
        if not name.startswith(ENVIRONMENT_PREFIX):
            continue
        short = name[len(ENVIRONMENT_PREFIX) :]
        target = ENVIRONMENT_ALIASES.get(short, short.lower())
        if target not in known:
            raise OptionError(
                f"no option for environment variable {name}",
                hint=_nearest(name, [ENVIRONMENT_PREFIX + k.upper() for k in known]),
            )
        values[target] = _parse(target, text, name)
    for name, value in (options or {}).items():
        if name not in known:
            raise OptionError(f"no option {name!r}", hint=_nearest(name, known))
        values[name] = _checked(name, value)
    if values["mode"] not in MODES:
        raise OptionError(f"no mode {values['mode']!r}", hint=_nearest(str(values["mode"]), MODES))
    if mode is None and values["mode"] != "default":  # options={"mode": ...} or DEUTERON_MODE
        values = {**MODES[values["mode"]], **values}
    return Options(**values)


def _nearest(wrong: str, known: Iterable[str]) -> str:
    names = list(known)
    close = difflib.get_close_matches(wrong, names, n=1, cutoff=0.5)
    listing = "known: " + ", ".join(sorted(names))
    return f"did you mean {close[0]!r}? {listing}" if close else listing


def _kind(name: str) -> type:
    """The type of an option; `str | None` counts as `str`."""
    hint = str(get_type_hints(Options)[name])
    for t in (bool, int, str):
        if t.__name__ in hint:
            return t
    raise AssertionError(f"option {name} has an unknown type {hint}")


def _parse(name: str, text: str, source: str) -> Any:
    kind = _kind(name)
    if kind is bool:
        table = {
            "1": True,
            "true": True,
            "yes": True,
            "on": True,
            "0": False,
            "false": False,
            "no": False,
            "off": False,
            "": False,
        }
        if text.strip().lower() not in table:
            raise OptionError(f"{source}={text!r} is not a boolean", hint="use 0 or 1")
        return table[text.strip().lower()]
    if kind is int:
        try:
            return _checked(name, int(text))
        except ValueError:
            raise OptionError(f"{source}={text!r} is not a whole number") from None
    return _checked(name, text or _default(name))


def _default(name: str) -> Any:
    value = next(f.default for f in fields(Options) if f.name == name)
    assert value is not MISSING
    return value


def _checked(name: str, value: Any) -> Any:
    meta = next(f.metadata for f in fields(Options) if f.name == name)
    kind = _kind(name)
    if isinstance(value, os.PathLike) and kind is str:
        value = os.fspath(value)
    if value is None and _default(name) is None:
        return None
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise OptionError(f"option {name!r} takes {kind.__name__}, not {value!r}", hint=meta["doc"])
    if meta["choices"] and value not in meta["choices"]:
        raise OptionError(
            f"option {name!r} has no value {value!r}", hint=_nearest(str(value), meta["choices"])
        )
    if meta["low"] is not None and value < meta["low"]:
        raise OptionError(
            f"option {name!r} is at least {meta['low']}, not {value}", hint=meta["doc"]
        )
    return value
