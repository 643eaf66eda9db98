"""The files of a report: HTML for people, JSON for programs.

In: a report's data, a path. Out: files. Raises `ReportError` where a path or a file is wrong.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deuteron.base.errors import DeuteronError
from deuteron.tools.report_data import SCHEMA, SCHEMA_VERSION, Report


class ReportError(DeuteronError):
    """A report cannot be written, or a file is none."""


def html_path(path: str | os.PathLike[str]) -> Path:
    """The path, if it names an HTML file."""
    html = Path(path).expanduser()
    if html.suffix not in (".html", ".htm"):
        raise ReportError(f"{html} is no name of an HTML file", hint="let it end in .html")
    return html


def write(
    data: Report, path: str | os.PathLike[str], against: Mapping[str, Any] | None = None
) -> tuple[Path, Path]:
    """The HTML file and its JSON file."""
    from deuteron.tools.report_page import page

    html = html_path(path)
    other = html.with_suffix(".json")
    try:
        html.parent.mkdir(parents=True, exist_ok=True)
        html.write_text(page(data, other.name, against), encoding="utf-8")
        other.write_text(json.dumps(data, default=str), encoding="utf-8")
    except OSError as e:
        raise ReportError(
            f"the report cannot be written: {e}", hint="name another folder"
        ) from None
    return html, other


def load(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The data of a report's JSON file (or of the file beside its HTML)."""
    file = Path(path).with_suffix(".json")
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except OSError as e:
        raise ReportError(
            f"{file} cannot be read: {e.strerror}", hint="`deuteron report` writes such a file"
        ) from None
    except ValueError as e:
        raise ReportError(f"{file} is not a report: {e}") from None
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        raise ReportError(f"{file} is not a report of Deuteron's")
    if data["version"] != SCHEMA_VERSION:
        raise ReportError(
            f"{file} has version {data['version']} of the schema, this is {SCHEMA_VERSION}",
            hint="make it again with this Deuteron",
        )
    return data


__all__ = ["ReportError", "html_path", "load", "write"]
