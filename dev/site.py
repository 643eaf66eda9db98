"""The documentation site's pages that are made: options, reference, errors, changelog.

A hook of mkdocs (`mkdocs.yml`); ``make docs`` builds the site into ``build/site``. In: docstrings
and tables of the package, CHANGELOG.md. Out: pages.
"""

from __future__ import annotations

import inspect
from dataclasses import fields
from typing import Any

from mkdocs.structure.files import File, Files

import deuteron
from deuteron.base import errors
from deuteron.base.errors import DeuteronError
from deuteron.base.options import ENVIRONMENT_ALIASES, MODES, Options
from dev import ROOT


def on_files(files: Files, config: Any) -> Files:
    """mkdocs asks for pages that are no files."""
    for name, text in pages().items():
        files.append(File.generated(config, name, content=text))
    return files


def pages() -> dict[str, str]:
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    return {
        "options.md": options(),
        "reference.md": reference(),
        "errors.md": error_page(),
        "changelog.md": changelog,
    }


def options() -> str:
    lines = [
        "# Options",
        "",
        'Given as `torch.compile(model, backend="deuteron", options={...})`, '
        "`deuteron.compile(model, options={...})`, or as environment variables. An option wins "
        "over the environment, which wins over the mode. An unknown one is an error that names "
        "the nearest.",
        "",
        "| option | default | variable | what it decides |",
        "|---|---|---|---|",
    ]
    short = {v: k for k, v in ENVIRONMENT_ALIASES.items()}
    for f in fields(Options):
        variable = f"DEUTERON_{short.get(f.name, f.name.upper())}"
        choices = f.metadata["choices"]
        doc = f.metadata["doc"] + (f" One of {', '.join(choices)}." if choices else "")
        lines.append(f"| `{f.name}` | `{f.default!r}` | `{variable}` | {doc} |")
    lines += ["", "## Modes", "", "| mode | the same as |", "|---|---|"]
    for mode, values in MODES.items():
        text = ", ".join(f"`{k}={v!r}`" for k, v in values.items()) or "the defaults"
        lines.append(f"| `{mode}` | {text} |")
    return "\n".join(lines) + "\n"


def reference() -> str:
    lines = ["# Reference", "", "What `import deuteron` gives.", ""]
    for name in sorted(deuteron.__all__, key=lambda n: (n[0].isupper(), n)):
        thing = getattr(deuteron, name)
        lines += [f"## `deuteron.{name}`", "", *described(thing, name)]
        if inspect.isclass(thing) and not issubclass(thing, Exception):
            for member, value in inspect.getmembers(thing):
                doc = inspect.getdoc(value)
                if not member.startswith("_") and doc and member in vars(thing):
                    lines += [f"### `{member}`", "", *described(value, member)]
    return "\n".join(lines) + "\n"


def described(thing: Any, name: str) -> list[str]:
    """Signature and docstring."""
    signature = ""
    if inspect.isroutine(thing):
        signature = f"```text\n{name}{inspect.signature(thing)}\n```"
    doc = (inspect.getdoc(thing) or "").replace("``", "`")
    return [*([signature, ""] if signature else []), doc, ""]


def error_page() -> str:
    lines = [
        "# Errors",
        "",
        "Every error is a `deuteron.DeuteronError`. It says what is wrong, in your code's line "
        "where there is one, and what to do:",
        "",
        "```text\nmessage\n  at: model.py:12: your code\n  hint: what to do\n```",
        "",
        "| error | when |",
        "|---|---|",
    ]
    for cls in sorted(subclasses(), key=lambda c: c.__name__):
        doc = " ".join((inspect.getdoc(cls) or "").split())
        lines.append(f"| `{cls.__name__}` | {doc} |")
    return "\n".join(lines) + "\n"


def subclasses() -> set[type[DeuteronError]]:
    """All that the package defines."""
    import deuteron.pipeline
    import deuteron.tools.calibration
    import deuteron.tools.report  # noqa: F401

    found: set[type[DeuteronError]] = set()
    left = [errors.DeuteronError]
    while left:
        cls = left.pop()
        found.add(cls)
        left += [c for c in cls.__subclasses__() if c.__module__.startswith("deuteron")]
    return found
