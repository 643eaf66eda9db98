"""Buffers of shared memory that a loop fills while products still read them.

In: the text of a kernel in Triton's GPU IR, its loops pipelined. Out: whether that may happen.

Hopper's tensor cores read their factors from shared memory while the program goes on. Triton 3.6
has a buffer more than it looks ahead where a product alone uses what is loaded. Where something
else does so, too (the sum over a row of gradients times results, beside their product), it has not,
but leaves that product running all the same when it fills the buffer again: on an H200 gradients
of attention were wrong, other ones in each call.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

NAME = re.compile(r"%[\w#]+")
MADE = re.compile(r"\s*(%\w+)(?::\d+)? = ")
BUFFERS = re.compile(r"ttg\.local_alloc : \(\) -> !ttg\.memdesc<(\d+)x")
VIEW = re.compile(r"= ttg\.memdesc_\w+ (%\w+)")
COPIES = ("ttng.async_tma_copy_global_to_local", "ttg.async_copy_global_to_local")
PENDING = re.compile(r"pendings = (\d+)")


@dataclass
class Buffers:
    """What is known at a line: the buffers of a name, how many it has, copies before the loop."""

    of: dict[str, str] = field(default_factory=dict)
    count: dict[str, int] = field(default_factory=dict)
    ahead: dict[str, int] = field(default_factory=dict)

    def see(self, line: str) -> None:
        made = MADE.match(line)
        if made and (buffers := BUFFERS.search(line)):
            self.of[made[1]] = made[1]
            self.count[made[1]], self.ahead[made[1]] = int(buffers[1]), 0
        elif made and (view := VIEW.search(line)) and view[1] in self.of:
            self.of[made[1]] = self.of[view[1]]

    def used(self, line: str) -> set[str]:
        return {self.of[n] for n in NAME.findall(line) if n in self.of}


def overwritten(text: str) -> bool:
    """Whether a loop of a kernel fills a buffer that a running product may read."""
    lines = text.split("\n")
    known = Buffers()
    for number, line in enumerate(lines):
        known.see(line)
        if "scf.for" in line:
            if in_loop(body(lines, number), known):
                return True
        elif any(c in line for c in COPIES):
            for buffers in known.used(line):
                known.ahead[buffers] += 1
    return False


def body(lines: list[str], start: int) -> list[str]:
    """A loop's lines."""
    indent = len(lines[start]) - len(lines[start].lstrip())
    close = " " * indent + "}"
    end = next(k for k in range(start + 1, len(lines)) if lines[k].startswith(close))
    return lines[start + 1 : end]


def in_loop(lines: list[str], known: Buffers) -> bool:
    """Of two passes through a loop."""
    running: list[tuple[int, set[str]]] = []
    for turn in (0, 1):
        for line in lines:
            known.see(line)
            if "ttng.warp_group_dot_wait" in line:
                pending = PENDING.search(line)
                left = int(pending[1]) if pending else 0
                running = running[max(0, len(running) - left) :]
            elif "ttng.warp_group_dot " in line and "isAsync = true" in line:
                running.append((turn, known.used(line.split("=", 1)[1])))
            elif any(c in line for c in COPIES):
                for buffers in known.used(line):
                    ahead, count = known.ahead[buffers], known.count[buffers]
                    reads = (t for t, read in running if buffers in read)
                    if any((turn + ahead - t) % count == 0 for t in reads):
                        return True
    return False


__all__ = ["overwritten"]
