"""The report on a loop that the user wrote: regions, optimizer graphs, and whole steps."""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from pygraph_train import backend
from pygraph_train.backend import RegionRecord
from pygraph_train.report.headline import Headline
from pygraph_train.report.step_report import StepReport
from pygraph_train.report.table import reasons_of, rows_of
from pygraph_train.report.whole_loop import of_whole_loop
from pygraph_train.selection.arms import graphs_apart
from pygraph_train.selection.controller import Controller

__all__ = ["LoopReport"]


_NO_OPTIMIZER = (
    "no step is counted, because no prepared optimizer made a step without a closure. Pass the optimizer to "
    "accelerator.prepare (in Fabric: fabric.setup), and call step() without a closure"
)


@dataclass
class LoopReport(StepReport):
    """A `StepReport` whose forwards and backwards are regions of the compile backend.

    A step counts as replayed when all regions that it ran, and all optimizers, came from graphs.

    Attributes:
        whole_steps: reports of the steps that were graphed as a whole, by the name of their function.
        what_waits: says which modules run as they are until compiling them pays, "" where none does.
    """

    whole_steps: dict[str, StepReport] = field(default_factory=dict)
    what_waits: Callable[[], str] = field(default=str, repr=False)
    started: float = field(default_factory=time.perf_counter, repr=False)
    _before: dict[int, tuple[int, RegionRecord]] = field(
        default_factory=lambda: _runs(backend.report().regions), repr=False
    )
    _frozen: list[RegionRecord] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        self.replay_intervals = deque(maxlen=2048)
        self.regions = self._regions_since

    def __getstate__(self) -> dict[str, Any]:
        """See `StepReport`."""
        waits = functools.partial(str, self.waits)
        now = {"plan": self.present_plan(), "what_waits": waits, "_before": {}, "_frozen": self.regions()}
        return {**super().__getstate__(), **now}

    def _regions_since(self) -> list[RegionRecord]:
        """The regions that ran since the loop was taken over; some may have been compiled before."""
        if self._frozen is not None:
            return self._frozen
        before = self._before
        return [
            r for r in backend.report().regions if r.replays + r.plain_runs > before.get(id(r), (0, r))[0]
        ]

    def whole_step(self, name: str, report: StepReport) -> None:
        """A step is graphed as a whole from now on; another one of that name keeps its rows."""
        number, unique = 1, name
        while unique in self.whole_steps:
            number += 1
            unique = f"{name} ({number})"
        self.whole_steps[unique] = report

    def goes_on_from(self, before: StepReport) -> None:
        """Earlier steps of the loop were tried as a whole. If none was replayed, what they leave are reasons."""
        if before.steps_replayed:
            return self.whole_step("training_step", before)
        for text in before.notes:
            self.note(text)
        for row in before.fallbacks:
            self.fell_back(row)
        for _ in range(before.steps):
            self.step_began()

    def region_counts(self) -> tuple[int, int]:
        """Replays, and runs without a graph, of all regions."""
        regions = self.regions()
        return sum(r.replays for r in regions), sum(r.plain_runs for r in regions)

    def freeze(self) -> None:
        """The loop has ended: what is compiled later is not part of it."""
        self.plan, self._frozen = self.present_plan(), self._regions_since()

    def present_plan(self) -> str:
        """Which phases run from graphs now."""
        if self._frozen is not None:
            return self.plan
        graphed = {r.phase for r in self.regions() if r.replays and r.decision != "plain"}
        best = self._whole_loop.best if self._whole_loop is not None else None
        if best is not None and not best.regions:
            graphed.clear()
        updates = self.optimizer_steps_replayed > 0 and (best is None or best.plan.optimizer_alone)
        return str(graphs_apart("forward" in graphed, "backward" in graphed, updates))

    @property
    def waits(self) -> str:
        return self.what_waits()

    @property
    def _whole_loop(self) -> Controller | None:
        """The comparison of the loop as a whole, while it holds."""
        return self.controllers[-1] if self.controllers else None

    @property
    def compared_as_a_whole(self) -> str:
        """What the comparison of the loop with what it was has found: a sentence, "" while nothing is known."""
        return "" if self._whole_loop is None else of_whole_loop(self._whole_loop, measured=self.measured)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        plain, whole = super().to_dict(), list(self.whole_steps.values())
        if whole and not self.steps:  # nothing ran outside of steps that were graphed as a whole
            plain["steps"] = sum(report.steps for report in whole)
            plain["steps_replayed"] = sum(report.steps_replayed for report in whole)
        return {
            **plain,
            "plan": whole[0].plan if len(whole) == 1 and not self.steps else self.present_plan(),
            "compared_as_a_whole": self.compared_as_a_whole,
            "waits": self.waits,
            "whole_steps": {name: report.to_dict() for name, report in self.whole_steps.items()},
        }

    def parts(self) -> Sequence[StepReport]:
        """The loop, and the steps that were graphed as a whole."""
        return [self, *self.whole_steps.values()]

    def rows(self, *, verbose: bool = False) -> list[tuple[str, str]]:
        """The lines of the table. Its short form has one line for a graphed step where there is something beside it."""
        self.plan = self.present_plan()
        above = None if verbose else Headline(self)
        rows = list(reasons_of(self, above)) if self.whole_steps and not self.steps else rows_of(self, above)
        if len(self.whole_steps) == 1 and not self.steps and not verbose:
            (whole,) = self.whole_steps.values()
            return [*rows_of(whole, above), *rows]
        for name, report in self.whole_steps.items():
            if verbose:
                rows += [("graphed step", name), *report.rows(verbose=True)]
            else:
                rows.append((f"graphed step {name}", Headline(report).beside(above)))
        return rows

    @property
    def why_no_step(self) -> str:
        """Why no step is counted, where something is known of that."""
        nothing = self.engine != "off" and not self.steps and not self.whole_steps
        return _NO_OPTIMIZER if nothing and not self.fallbacks else ""


def _runs(regions: list[RegionRecord]) -> dict[int, tuple[int, RegionRecord]]:
    """How often each ran. The records are held, so that no other one gets an id of theirs."""
    return {id(r): (r.replays + r.plain_runs, r) for r in regions}
