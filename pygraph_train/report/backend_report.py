"""What the compile backend did with each region."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from pygraph_train.random_state import random_numbers_kept
from pygraph_train.selection.arms import Plan, graphs_apart

__all__ = ["BackendReport", "RegionRecord", "RegionRuns"]


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
        numbers: whether it computes with numbers of the host, each value of which needs a graph of its own.
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
    numbers: bool = False

    @property
    def ran(self) -> bool:
        """Whether the region ran at all."""
        return self.replays + self.plain_runs > 0

    @property
    def settled(self) -> bool:
        """Whether the decision stands."""
        return self.decision not in ("warming up", "measuring")


class RegionRuns:
    """Looks at the counters of regions, to tell which of a step's phases ran from their graphs.

    Args:
        records: of all regions of the training.

    Attributes:
        parts: whether a phase ran in part from graphs at the last look.
    """

    def __init__(self, records: Callable[[], Sequence[RegionRecord]]) -> None:
        self._records = records
        self._before = self._totals()
        self.parts = False

    def plan(self, *, optimizer: bool) -> Plan:
        """What ran from graphs since the last look: phases all of whose regions were replayed, and the optimizer.

        Args:
            optimizer: whether its step ran from a graph of its own.
        """
        before, self._before = self._before, self._totals()
        (forward, plain_forward), (backward, plain_backward) = (
            (replays - old_replays, plain - old_plain)
            for (replays, plain), (old_replays, old_plain) in zip(self._before, before, strict=True)
        )
        self.parts = bool((forward and plain_forward) or (backward and plain_backward))
        return graphs_apart(forward > 0 and not plain_forward, backward > 0 and not plain_backward, optimizer)

    def _totals(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Replays, and runs without a graph, of forwards and of backwards."""
        forward, backward, plain_forward, plain_backward = 0, 0, 0, 0
        for record in self._records():
            if record.phase in ("forward", "function"):
                forward, plain_forward = forward + record.replays, plain_forward + record.plain_runs
            if record.phase in ("backward", "function"):
                backward, plain_backward = backward + record.replays, plain_backward + record.plain_runs
        return (forward, plain_forward), (backward, plain_backward)


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
