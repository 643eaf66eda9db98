"""Numbers as people read them."""

from __future__ import annotations


def amount(value: float, unit: str) -> str:
    """``1.05 MB``: three digits and a prefix."""
    for scale, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= scale:
            return f"{value / scale:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"


def time_text(us: float) -> str:
    """Microseconds with the unit that fits."""
    if us >= 1e6:
        return f"{us / 1e6:.3g} s"
    if us >= 1e3:
        return f"{us / 1e3:.3g} ms"
    return f"{us:.3g} us"


def counted(n: int, what: str) -> str:
    return f"{n} {what}" if n == 1 else f"{n} {what}s"


__all__ = ["amount", "counted", "time_text"]
