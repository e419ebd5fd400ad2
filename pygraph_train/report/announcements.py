"""What the library prints or logs: a report at the end of training, a line where graphs are off, and numbers."""

from __future__ import annotations

import functools
import logging

from pygraph_train.boundary import arranged, quietly
from pygraph_train.config import BackendOptions, PyGraphConfig, disabled_by_environment
from pygraph_train.problems import Problem, PyGraphError
from pygraph_train.report.step_report import StepReport
from pygraph_train.torch_private.names import lacking

log = logging.getLogger("pygraph_train")

_DISABLED = "PYGRAPH_DISABLE is set, so steps run as you wrote them"
FORWARD_IS_OFF = (
    "forward='off' is set, so forward and backward run without graphs: "
    "eager kernels have no graph of a backward alone"
)
NO_DEVICE = (
    "no CUDA device holds the model, so steps run as you wrote them (engine='emulated' shows how graphs work)"
)


def give_reason(
    report: StepReport,
    problem: Problem,
    step: int,
    config: PyGraphConfig,
    told: str = "",
) -> None:
    """Note and log why something runs without a graph, in these words (`told`) if they are given.

    It is a warning where the options ask for graphs.

    Raises:
        PyGraphError: the user wants failures to be raised.
    """
    if report.failed(problem, step):
        wanted = "on" in (config.forward, config.backward, config.optimizer)
        told = told or f"step {step} runs without a graph: {problem}"
        log.log(logging.WARNING if wanted else logging.INFO, "pygraph: %s", told)
    if config.on_failure == "raise":
        raise PyGraphError(str(problem))


def switched_off() -> str | None:
    """Why nothing in this process has graphs, whatever the options say. None where something may have some."""
    if disabled_by_environment():
        return _DISABLED
    problem = arranged(lacking)
    return None if problem is None else str(problem)


@functools.cache
def tell_once(text: str) -> None:
    """Warn on the library's logger, once in a process."""
    log.warning("pygraph: %s", text)


def tell_why_off(config: PyGraphConfig | BackendOptions) -> str:
    """Warn that graphs are off, unless `engine="off"` was asked for. Returns the note for the report."""
    problem = lacking()  # which says so itself
    if disabled_by_environment():
        tell_once(_DISABLED)
        return f"graphs are off: {_DISABLED}"
    if problem is not None:
        return str(problem)
    if config.engine == "off":
        return "graphs are off: steps run as you wrote them"
    tell_once(NO_DEVICE)
    return NO_DEVICE


def show(report: StepReport) -> None:
    """Print a report that says anything, wherever that is possible."""

    def shown() -> None:
        if report.steps or report.fallbacks or report.notes:
            print(report)

    quietly(shown)


def metrics_of(report: StepReport) -> dict[str, float]:
    """What loggers and trackers get of a report, where the user asks for it with `log_metrics=True`: numbers by name.

    Times are those of the machine, or none: the emulated engine has only the share.

    Returns:
        `pygraph/share_from_graphs` (of the steps so far, see `StepReport.steps_from_graphs`) and `pygraph/step_ms` (of
        the present steps). Nothing before the first step.
    """
    progress = report.progress()
    if not progress.steps:
        return {}
    metrics = {"pygraph/share_from_graphs": progress.from_graphs / progress.steps}
    step_ms = report.ms_with_graph if progress.plan.graphs else report.ms_without_graph
    if report.measured and step_ms is not None:
        metrics["pygraph/step_ms"] = step_ms
    return metrics
