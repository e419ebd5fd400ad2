"""The report on a loop whose modules and optimizers have graphs of their own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pygraph_train.report.step_report import StepReport

_NO_OPTIMIZER = (
    "no step is counted, because no prepared optimizer made a step. Pass the optimizer to accelerator.prepare (in "
    "Fabric: fabric.setup)"
)


@dataclass
class LoopReport(StepReport):
    """A `StepReport` of a loop whose modules and optimizers have graphs of their own.

    A step counts as replayed when all graphs of modules that it ran, and all optimizers, were replayed.
    """

    _with_update = True

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {**super().to_dict(), "plan": self.running_plan}

    @property
    def why_no_step(self) -> str:
        """Why no step is counted, where something is known of that."""
        nothing = self.engine != "off" and not self.steps and not self.fallbacks
        return _NO_OPTIMIZER if nothing else super().why_no_step
