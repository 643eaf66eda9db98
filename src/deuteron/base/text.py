"""Strings of the user's (file names, source lines, names) on their way into artifacts.

In: any text. Out: text that is one line of characters that can be shown and encoded: no line ends,
no control characters (a terminal obeys some), no marks that turn the direction of writing, no lone
surrogates (from file names that are not UTF-8). What a language beyond that treats as special is
for its writer to escape (`codegen.text`, `codegen.cpp.kernels`).
"""

from __future__ import annotations

# A line of generated code may be as long as a file; a comment that names its place need not be.
MAX_COMMENT_LENGTH = 240


def one_line(text: str, longest: int = MAX_COMMENT_LENGTH) -> str:
    """The text with a blank for every character that is not printable, cut off behind `longest`
    characters."""
    out = text[: longest + 1]
    if not out.isprintable():
        out = "".join(c if c.isprintable() else " " for c in out)
    return out if len(out) <= longest else out[: longest - 3] + "..."


def plain_name(name: str) -> str:
    """The name with an underscore for what is no ASCII letter or digit: part of an identifier in
    every language here."""
    return "".join(c if c.isascii() and c.isalnum() else "_" for c in name)


__all__ = ["MAX_COMMENT_LENGTH", "one_line", "plain_name"]
