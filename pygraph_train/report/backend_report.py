"""What the compile backend did with each region."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from pygraph_train.report.printing import Printed


@dataclass
class RegionRecord:
    """One compiled callable.

    Attributes:
        name: phase and number, as in "forward 2".
        phase: "forward", "backward" or "inference"; "function" where nothing was compiled.
        where: `file:line` of the first user code in it, or of what `reason` is about.
        decision: "warming up", "graph" or "plain".
        reason: why, in words.
        captures, replays, plain_runs: how often.
    """

    name: str
    phase: str
    where: str | None = None
    decision: str = "warming up"
    reason: str = ""
    captures: int = 0
    replays: int = 0
    plain_runs: int = 0


@dataclass
class BackendReport(Printed):
    """All regions compiled so far in this process, in the order of compilation, and why others have no graphs."""

    regions: list[RegionRecord]
    notes: list[str] = field(default_factory=list)

    @property
    def settled(self) -> bool:
        """Whether every region that ran has been decided on."""
        return not any(r.decision == "warming up" and r.replays + r.plain_runs for r in self.regions)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {"settled": self.settled, **dataclasses.asdict(self)}

    def headline(self) -> str:
        replays, plain = (sum(getattr(r, name) for r in self.regions) for name in ("replays", "plain_runs"))
        notes = "".join(f" {note[0].upper()}{note[1:]}." for note in self.notes)
        if not self.regions and not self.notes:
            notes = " Dynamo finds no graph so far: TORCH_LOGS=graph_breaks says where it breaks them."
        told = "runs of compiled forwards and backwards came from graphs"
        return f"{replays} of {replays + plain} {told}.{notes}"

    def rows(self) -> list[tuple[str, str]]:
        return [
            (r.name, f"{r.decision}, {r.replays} replays, {r.plain_runs} without a graph{why}{where}")
            for r in self.regions
            for why, where in [(f": {r.reason}" * bool(r.reason), f"\n  from {r.where}" * bool(r.where))]
        ]
