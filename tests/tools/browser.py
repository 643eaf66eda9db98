"""A page in headless Chromium (Debian's package `chromium`): its DOM after its script, screenshots.

Tests that need it are skipped only where there is none.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
needs_browser = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium (Debian: apt-get install chromium)"
)


def chromium(
    page: str, *flags: str, dark: bool = False, size: tuple[int, int] = (1500, 1000)
) -> str:
    """What Chromium prints for a page, given as a URL."""
    assert CHROMIUM is not None
    command = [
        CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
        f"--blink-settings=preferredColorScheme={0 if dark else 1}",
        f"--window-size={size[0]},{size[1]}", "--virtual-time-budget=4000", *flags, page,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout


def dom(file: Path, anchor: str = "") -> str:
    """The page's HTML after its script has run."""
    return chromium(f"{file.as_uri()}{anchor}", "--dump-dom")


def screenshot(
    file: Path, to: Path, dark: bool = False, size: tuple[int, int] = (1500, 1000)
) -> None:
    chromium(file.as_uri(), f"--screenshot={to}", dark=dark, size=size)
