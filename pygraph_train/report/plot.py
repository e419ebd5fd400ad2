"""Draws a report: what each plan takes, and which one ran when."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pygraph_train.report.step_report import StepReport

__all__ = ["draw"]


def draw(report: StepReport, path: str | os.PathLike[str]) -> None:
    """See `StepReport.plot`."""
    try:
        from matplotlib.figure import Figure  # no pyplot: it would choose a window system
    except ImportError as error:
        raise ImportError(
            "StepReport.plot needs matplotlib: pip install matplotlib, or pip install 'pygraph-train[plot]'"
        ) from error
    figure = Figure(figsize=(9, 6), layout="constrained")
    times, history = figure.subplots(2, 1)

    rows = [row for row in report.arms() if row.ms is not None]
    times.barh([row.arm for row in rows], [row.ms for row in rows])
    times.invert_yaxis()
    times.set_xlabel("ms a step")
    times.set_title("plans" if rows else "plans (no times were measured)")

    steps = [switch.step for switch in report.switches]
    arms = [str(switch.arm) for switch in report.switches]
    if steps:
        history.step([*steps, max(report.steps, steps[-1])], [*arms, arms[-1]], where="post", marker="o")
    history.set_xlim(0, max(report.steps, 1))
    history.set_xlabel("step")
    history.set_title(f"what ran ({report.exploration_steps} steps of exploration)")
    figure.savefig(path)
