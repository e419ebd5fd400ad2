"""The report: what ran from a graph, what it gained, and why the rest did not."""

from __future__ import annotations

import dataclasses
import statistics
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch

__all__ = ["CaptureRecord", "Fallback", "StepReport"]


@dataclass(frozen=True)
class CaptureRecord:
    """One capture.

    Attributes:
        plan: what it holds, as in `{F B O}`.
        seconds: host time it took, verification included.
        nodes: device operations in it, -1 where they cannot be counted.
        compiled: whether it holds Inductor's kernels.
        step: the training step in which it was made.
    """

    plan: str
    seconds: float
    nodes: int
    compiled: bool
    step: int


@dataclass
class Fallback:
    """A reason to run without a graph.

    Attributes:
        reason: one sentence.
        where: `file:line` in the user's code, or None.
        fix: what to do about it, or "".
        step: the step in which it was met first.
        count: how often it was met.
    """

    reason: str
    where: str | None
    fix: str
    step: int
    count: int = 1


@dataclass
class StepReport:
    """What became of the training steps. Prints as a table; `to_dict` for programs. Times in ms or s as named."""

    engine: str = "off"
    plan: str = "F B O"
    steps: int = 0
    steps_replayed: int = 0
    first_replay_step: int | None = None
    first_replay_seconds: float | None = None
    compile_seconds: float = 0.0
    captures: list[CaptureRecord] = field(default_factory=list)
    fallbacks: list[Fallback] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    ungraphed_seconds: list[float] = field(default_factory=list, repr=False)
    replay_intervals: deque[float] = field(default_factory=deque, repr=False)

    def captured(self, record: CaptureRecord) -> None:
        """Note a capture."""
        self.captures.append(record)

    def fell_back(self, fallback: Fallback) -> bool:
        """Note a reason; True when it was not known yet."""
        for known in self.fallbacks:
            if (known.reason, known.where) == (fallback.reason, fallback.where):
                known.count += 1
                return False
        self.fallbacks.append(fallback)
        return True

    def note(self, text: str) -> None:
        """Note something worth knowing, once."""
        if text not in self.notes:
            self.notes.append(text)

    @property
    def ms_without_graph(self) -> float | None:
        """Fastest step that ran without a graph in warm-up, in ms: first steps carry one-time costs."""
        return min(self.ungraphed_seconds) * 1e3 if self.ungraphed_seconds else None

    @property
    def ms_with_graph(self) -> float | None:
        """Median time from one replayed step to the next, in ms, data loading included."""
        return statistics.median(self.replay_intervals) * 1e3 if self.replay_intervals else None

    @property
    def speedup(self) -> float | None:
        """`ms_without_graph / ms_with_graph`; None on the emulated engine, which is not about speed."""
        before, after = self.ms_without_graph, self.ms_with_graph
        return before / after if before and after and self.engine == "cuda" else None

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, strings, lists and dicts: ready for JSON."""
        memory = _peak_memory_mib() if self.engine == "cuda" else {}
        return {
            "engine": self.engine,
            "plan": self.plan,
            "steps": self.steps,
            "steps_replayed": self.steps_replayed,
            "first_replay_step": self.first_replay_step,
            "first_replay_seconds": self.first_replay_seconds,
            "ms_without_graph": self.ms_without_graph,
            "ms_with_graph": self.ms_with_graph,
            "speedup": self.speedup,
            "compile_seconds": self.compile_seconds,
            "captures": [dataclasses.asdict(c) for c in self.captures],
            "capture_seconds": sum(c.seconds for c in self.captures),
            "fallbacks": [dataclasses.asdict(f) for f in self.fallbacks],
            "notes": list(self.notes),
            **memory,
        }

    def rows(self) -> list[tuple[str, str]]:
        """The lines of the table."""
        rows = [
            ("engine", self.engine),
            ("plan", f"{self.plan}   (F forward, B backward, O optimizer; {{ }} is one graph)"),
            ("steps replayed", f"{self.steps_replayed} of {self.steps}"),
        ]
        if self.first_replay_step is not None:
            rows.append(
                ("first replay", f"step {self.first_replay_step}, after {self.first_replay_seconds:.1f} s")
            )
        if self.ms_without_graph is not None:
            rows.append(("step without graph", f"{self.ms_without_graph:.2f} ms (fastest of the warm-up)"))
        if self.ms_with_graph is not None:
            rows.append(("step with graph", f"{self.ms_with_graph:.2f} ms (median, data loading included)"))
        if self.speedup is not None:
            rows.append(("speed-up", f"{self.speedup:.2f}x"))
        for c in self.captures:
            kernels = "Inductor kernels" if c.compiled else "eager kernels"
            nodes = f"{c.nodes} nodes, " if c.nodes >= 0 else ""
            rows.append((f"captured {c.plan}", f"step {c.step}: {nodes}{kernels}, {c.seconds:.2f} s"))
        if self.compile_seconds:
            rows.append(("compiled", f"{self.compile_seconds:.1f} s"))
        if self.engine == "cuda":
            memory = _peak_memory_mib()
            rows.append(
                (
                    "peak memory",
                    "{peak_reserved_mib} MiB reserved, {peak_allocated_mib} MiB allocated".format(**memory),
                )
            )
        for f in self.fallbacks:
            where = f"\n  at {f.where}" if f.where else ""
            fix = f"\n  {f.fix}" if f.fix else ""
            rows.append(("without a graph", f"{f.reason} (from step {f.step}){where}{fix}"))
        rows += [("note", text) for text in self.notes]
        return rows

    def __str__(self) -> str:
        rows = self.rows()
        width = max(len(name) for name, _ in rows)
        indent = "\n" + " " * (width + 2)
        lines = [f"{name:<{width}}  " + text.replace("\n", indent) for name, text in rows]
        return "\n".join(["pygraph-train", *lines])

    def __rich__(self) -> Any:
        """A rich table, for `rich.print`."""
        from rich.table import Table
        from rich.text import Text

        table = Table(title="pygraph-train", show_header=False, title_justify="left")
        for name, text in self.rows():
            table.add_row(name, Text(text))
        return table


def _peak_memory_mib() -> dict[str, int]:
    return {
        "peak_reserved_mib": torch.cuda.max_memory_reserved() >> 20,
        "peak_allocated_mib": torch.cuda.max_memory_allocated() >> 20,
    }
