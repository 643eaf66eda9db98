"""The planted bugs are of today's source: each changes a line that is there."""

from __future__ import annotations

import pytest

from dev import ROOT
from dev.planted.bugs import BUGS, Bug


@pytest.mark.parametrize("bug", BUGS, ids=lambda b: b.name)
def test_the_line_is_there(bug: Bug) -> None:
    text = (ROOT / "src" / "deuteron" / bug.file).read_text(encoding="utf-8")
    assert bug.right in text and bug.right != bug.wrong
    for test in bug.tests.split():
        file, _, function = test.partition("::")
        name = f"def {function.partition('[')[0]}"
        assert name.strip() in (ROOT / file).read_text(encoding="utf-8"), test
