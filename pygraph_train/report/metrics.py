"""What loggers and trackers get of a report, where the user asks for it with `log_metrics=True`."""

from __future__ import annotations

from pygraph_train.report.progress import Progress
from pygraph_train.report.step_report import StepReport


def metrics_of(report: StepReport) -> dict[str, float]:
    """Numbers by name. Times are those of the machine, or none: the emulated engine has only the share.

    Returns:
        `pygraph/share_from_graphs` (of the steps so far, see `StepReport.steps_from_graphs`) and `pygraph/step_ms` (of
        the present steps). Nothing before the first step.
    """
    total = Progress.of(part.progress() for part in report.parts())
    if not total.made:
        return {}
    metrics = {"pygraph/share_from_graphs": total.from_graphs / total.made}
    part = max(report.parts(), key=lambda part: part.progress().made)
    step_ms = part.ms_with_graph if part.progress().plan.graphs else part.ms_without_graph
    if part.measured and step_ms is not None:
        metrics["pygraph/step_ms"] = step_ms
    return metrics
