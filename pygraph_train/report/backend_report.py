"""What the compile backend did with each region."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from pygraph_train.random_state import random_numbers_kept

__all__ = ["BackendReport", "RegionRecord"]


@dataclass
class RegionRecord:
    """One compiled callable.

    Attributes:
        name: phase and number, as in "forward 2".
        phase: "forward", "backward" or "inference"; "function" where nothing was compiled.
        where: `file:line` of the first user code in it.
        decision: "warming up", "measuring", "graph", "graph, indirect" or "plain".
        reason: why, in words.
        nodes: nodes of the last captured graph.
        captures, replays, plain_runs: how often.
        copied_bytes: bytes copied into fixed buffers per replay.
        patched_pointers: pointers that the last replay rewrote.
        costs: medians in µs, by way of running.
        changes: what the code transformation changed, with the user's lines.
        left: what keeps parts of it out of graphs.
        unserved: inputs that move and are copied although indirection was tried, and why.
    """

    name: str
    phase: str
    where: str | None = None
    decision: str = "warming up"
    reason: str = ""
    nodes: int = 0
    captures: int = 0
    replays: int = 0
    plain_runs: int = 0
    copied_bytes: int = 0
    patched_pointers: int = 0
    costs: dict[str, Any] = field(default_factory=dict)
    changes: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    unserved: list[str] = field(default_factory=list)

    @property
    def ran(self) -> bool:
        """Whether the region ran at all."""
        return self.replays + self.plain_runs > 0

    @property
    def settled(self) -> bool:
        """Whether the decision stands."""
        return self.decision not in ("warming up", "measuring")


@dataclass
class BackendReport:
    """All regions compiled so far in this process, in the order of compilation."""

    regions: list[RegionRecord]

    @property
    def settled(self) -> bool:
        """Whether every region that ran has been decided on."""
        return all(r.settled for r in self.regions if r.ran)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {"settled": self.settled, "regions": [dataclasses.asdict(r) for r in self.regions]}

    def __str__(self) -> str:
        with random_numbers_kept():
            return self._table()

    def _table(self) -> str:
        from rich.console import Console
        from rich.table import Table

        table = Table(title="pygraph backend")
        for column in ("region", "decision", "nodes", "replays", "plain", "bytes copied", "why"):
            table.add_column(column)
        for r in self.regions:
            notes = "\n".join([r.reason, *r.changes, *r.left, *r.unserved]).strip()
            numbers = (str(n) for n in (r.nodes, r.replays, r.plain_runs, r.copied_bytes))
            table.add_row(f"{r.name}\n{r.where or ''}".strip(), r.decision, *numbers, notes)
        console = Console(width=140)
        with console.capture() as text:
            console.print(table)
        return text.get()
