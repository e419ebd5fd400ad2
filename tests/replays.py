"""How often graphs ran in training that was compared: without replays, equal results prove nothing."""

from __future__ import annotations

from typing import Any

from pygraph_train import StepReport, backend

__all__ = ["enough", "regions_ran", "runs_of_graphs", "text_of"]


def text_of(report: StepReport) -> str:
    """Everything that a report says, in one line."""
    return " ".join(f"{report} {report.to_dict()}".split())


def runs_of_graphs(report: StepReport) -> int:
    """Steps whose forward came from graphs, and updates that did."""
    return report.phases_from_graphs["F"] + report.optimizer_steps_replayed


def regions_ran(least: int, refused: str | None = None) -> None:
    """Assert that graphs of the regions compiled since the backend was reset ran so often in all.

    Where none of them may have a graph, `refused` is a part of the reason that the report gives.
    """
    rows = backend.report().regions
    count = sum(row.replays for row in rows)
    if refused:
        assert count == 0 and any(refused in row.reason for row in rows), rows
    else:
        assert least > 0 and count >= least, f"graphs ran {count} times, not {least}\n{rows}"


def reasons(report: StepReport) -> str:
    """Everything that a report says about what is not replayed."""
    told = [f"{f.reason} {f.fix}" for f in report.fallbacks] + report.notes
    return "\n".join(told)


def enough(
    reports: list[Any],
    replays: int | None = None,
    plan: str | None = None,
    refused: str | None = None,
    never: str | None = None,
) -> None:
    """Assert that training which is compared ran from graphs, or could not.

    Args:
        reports: of everything that was trained with the library.
        replays: the least number of runs of graphs. Where `plan` has graphs of forward and backward, steps of the
            last report are counted, and nothing else.
        plan: what the last step of the last report has to run from.
        refused: where nothing may be replayed, a part of the reason that the report gives.
        never: why nothing is replayed, where the report need not say so.
    """
    told = "\n".join(map(str, reports))
    whole = plan is not None and "{F B" in plan
    count = reports[-1].steps_replayed if whole else sum(map(runs_of_graphs, reports))
    if refused or never:
        assert replays is None and count == 0, f"graphs ran {count} times\n{told}"
        assert never or refused in "\n".join(map(reasons, reports)), told
    else:
        assert replays, "say how often graphs have to run, or why they cannot"
        assert count >= replays, f"graphs ran {count} times, not {replays}\n{told}"
    assert plan is None or reports[-1].running_plan == plan, told
