"""What loggers and trackers get of a report, where the user asks for it with `log_metrics=True`."""

from __future__ import annotations

from pygraph_train.report.progress import Progress
from pygraph_train.report.step_report import StepReport

__all__ = ["metrics_of"]


def metrics_of(report: StepReport) -> dict[str, float]:
    """Numbers by name. Times are those of the machine, or none: the emulated engine has only the share.

    Returns:
        `pygraph/share_from_graphs` (of the steps so far, see `StepReport.steps_from_graphs`), `pygraph/step_ms` and
        `pygraph/gpu_idle_fraction` (of the present steps). Nothing before the first step.
    """
    total = Progress.of(part.progress() for part in report.parts())
    if not total.made:
        return {}
    metrics = {"pygraph/share_from_graphs": total.from_graphs / total.made}
    part = max(report.parts(), key=lambda part: part.progress().made)
    if not part.measured:
        return metrics
    plan = part.progress().plan
    last = next((time.seconds * 1e3 for arm, time in part.latest.items() if arm.plan == plan), None)
    found = {
        "pygraph/step_ms": part.ms_with_graph if last is None else last,
        "pygraph/gpu_idle_fraction": part.gpu_idle_fraction,
    }
    return metrics | {name: value for name, value in found.items() if value is not None}
