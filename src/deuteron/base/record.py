"""The Record: what every stage did and why. Logs, `explain`, the report and the tests are views of
it.

A record is a list of entries ``{"kind": ..., ...}`` with plain values (numbers, strings, lists,
dicts), in the order in which the stages wrote them. Passes only add; nobody edits. Kinds in use:

    stage       name, seconds (see `base.passes`)
    pass        stage, name (behind those of the passes around it: "cpp/loops"), seconds of all its
                runs; before the entry of its stage
    decision    subject ("fuse", "inline", "save", ...), accepted, reason (class), detail, first,
                second, bytes, us. Of a rewrite that failed: subject "rewrite", first its name,
                second the node at which it was, detail the error and its place in the code. Of a
                matrix product: subject "product", accepted where it is generated, generated_us and
                library_us what both were predicted to take (None: no tiles), along:
                whether each operand is contiguous along the sum
                Subject "tables": accepted where the kernels that store `second` tell the one that
                stores `first` what its mask leaves. Subject "phases": a sum whose terms in a small
                period are written out, both predictions in the detail
    kernel      name, target, ops, origins, bytes, flops, predicted_us, source
    library     op, reason, origins
    fallback    what, reason
    unordered   what (a kernel or a library call whose results may differ from run to run), reason,
                origins
    buffer      name, bytes, first, last, reuse
    accesses    proven, masked, loaded, open (numbers of loads and stores), which (those that are
                open); with a debug folder or the option `verify`
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Record:
    entries: list[dict[str, Any]] = field(default_factory=list)

    def add(self, kind: str, **fields: Any) -> None:
        self.entries.append({"kind": kind, **fields})

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [e for e in self.entries if e["kind"] == kind]

    def to_json(self) -> str:
        return json.dumps(self.entries, indent=1)
