"""What became of each phase and of each plan that was compared."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pygraph_train.selection.arms import Phase

if TYPE_CHECKING:
    from pygraph_train.report.step_report import StepReport

__all__ = ["ArmRow", "PhaseRow", "arms_of", "phases_of"]


@dataclass(frozen=True)
class PhaseRow:
    """What became of a phase, or of several that share a graph.

    Attributes:
        phases: as in `F B`.
        off_ms: without a graph, fastest step of the warm-up; None where it was not measured.
        on_ms: in a graph; None where there is none, or other phases run beside it.
        kept: whether a graph is kept.
        why: one sentence.
    """

    phases: str
    off_ms: float | None
    on_ms: float | None
    kept: bool
    why: str


@dataclass(frozen=True)
class ArmRow:
    """One plan that was compared.

    Attributes:
        arm: as it prints.
        ms: a step of it; None where it was not measured.
        verdict: why it is kept or not.
    """

    arm: str
    ms: float | None
    verdict: str


def arms_of(report: StepReport) -> list[ArmRow]:
    """See `StepReport.arms`."""
    if not report.controllers:
        return []
    controller = report.controllers[0]
    times, verdicts = controller.times, controller.verdicts
    arms = sorted({*times, *verdicts}, key=lambda arm: (arm != controller.best, str(arm)))
    return [
        ArmRow(
            str(arm),
            times[arm] * 1e3 if arm in times and report.measured else None,
            verdicts.get(arm, "") if report.measured else verdicts.get(arm, "").partition(":")[0],
        )
        for arm in arms
    ]


def phases_of(report: StepReport) -> list[PhaseRow]:
    """See `StepReport.phases`."""
    off = {p: s * 1e3 for p, s in report.phase_seconds.items()} if report.measured else {}
    best = report.controllers[0].best if report.controllers else None
    graphs = best.plan.graphs if best is not None else ()
    rows = []
    for phase in Phase:
        graph = next((g for g in graphs if phase in g), None)
        if graph is not None and graph[0] is not phase:
            continue
        names = [p.value for p in graph or (phase,)]
        known = [off[name] for name in names if name in off]
        alone = graph is not None and len(graphs) == 1 and len(graph) == len(Phase)
        on = report.controllers[0].times.get(best) if best is not None and alone and report.measured else None
        rows.append(
            PhaseRow(
                " ".join(names),
                sum(known) if len(known) == len(names) else None,
                on * 1e3 if on is not None else None,
                graph is not None,
                _why(report, phase, kept=graph is not None),
            )
        )
    return rows


def _why(report: StepReport, phase: Phase, *, kept: bool) -> str:
    if not report.controllers:
        return report.why_nothing or (
            report.fallbacks[0].reason if report.fallbacks else "no plan was tried yet"
        )
    controller = report.controllers[0]
    verdict = controller.verdicts.get(controller.best, "")
    if kept:
        return verdict if report.measured else verdict.partition(":")[0]
    of_optimizer = phase is Phase.OPTIMIZER
    about = [f for f in report.fallbacks if f.reason.startswith("the optimizer") == of_optimizer]
    return about[0].reason if about else verdict
