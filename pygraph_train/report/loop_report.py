"""The report on a loop that the user wrote: regions, optimizer graphs, and whole steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pygraph_train.report.headline import Headline
from pygraph_train.report.step_report import StepReport
from pygraph_train.report.table import reasons_of, rows_of

_NO_OPTIMIZER = (
    "no step is counted, because no prepared optimizer made a step without a closure. Pass the optimizer to "
    "accelerator.prepare (in Fabric: fabric.setup), and call step() without a closure"
)


@dataclass
class LoopReport(StepReport):
    """A `StepReport` of a loop whose modules and optimizers have graphs of their own.

    A step counts as replayed when all graphs of modules that it ran, and all optimizers, were replayed.

    Attributes:
        whole_steps: reports of the steps that were graphed as a whole, by the name of their function.
    """

    whole_steps: dict[str, StepReport] = field(default_factory=dict)
    _with_update = True

    def whole_step(self, name: str, report: StepReport) -> None:
        """A step is graphed as a whole from now on; another one of that name keeps its rows."""
        number, unique = 1, name
        while unique in self.whole_steps:
            number += 1
            unique = f"{name} ({number})"
        self.whole_steps[unique] = report

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        plain, whole = super().to_dict(), list(self.whole_steps.values())
        plain["plan"] = whole[0].plan if len(whole) == 1 and not self.steps else str(self.progress().plan)
        if whole and not self.steps:  # nothing ran outside of steps that were graphed as a whole
            plain["steps"] = sum(report.steps for report in whole)
            plain["steps_replayed"] = sum(report.steps_replayed for report in whole)
        return {
            **plain,
            "whole_steps": {name: report.to_dict() for name, report in self.whole_steps.items()},
        }

    def parts(self) -> Sequence[StepReport]:
        """The loop, and the steps that were graphed as a whole."""
        return [self, *self.whole_steps.values()]

    def rows(self) -> list[tuple[str, str]]:
        """The lines of the table. There is one line for a graphed step where there is something beside it."""
        self.plan = str(self.progress().plan)
        above = Headline(self)
        rows = list(reasons_of(self, above)) if self.whole_steps and not self.steps else rows_of(self, above)
        if len(self.whole_steps) == 1 and not self.steps:
            (whole,) = self.whole_steps.values()
            return [*rows_of(whole, above), *rows]
        steps = self.whole_steps.items()
        return rows + [(f"graphed step {name}", Headline(report).beside(above)) for name, report in steps]

    @property
    def why_no_step(self) -> str:
        """Why no step is counted, where something is known of that."""
        nothing = self.engine != "off" and not self.steps and not self.whole_steps
        return _NO_OPTIMIZER if nothing and not self.fallbacks else super().why_no_step
