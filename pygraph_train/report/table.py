"""The lines of a report's table. docs/report.md explains each of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from pygraph_train.report.headline import Headline, counts_of

if TYPE_CHECKING:
    from pygraph_train.report.step_report import StepReport


def rows_of(report: StepReport, above: Headline) -> list[tuple[str, str]]:
    """What a report says, each line with its name.

    Args:
        above: the first line of the report, which no line repeats.
    """
    rows = [
        ("engine", report.engine),
        ("plan", f"{report.progress().plan}  (forward, backward, optimizer; {{ }} is a graph)"),
    ]
    if report.steps and report.engine != "off":
        rows.append(("from graphs", counts_of(report.progress())))
    if others := report.progress().others():
        rows.append(("other steps", others))
    rows += _speed(report) if report.measured else ()
    if report.measured:
        memory = "{peak_reserved_mib} MiB reserved, {peak_allocated_mib} MiB allocated"
        rows.append(("peak memory", memory.format(**peak_memory_mib())))
    return [*rows, *reasons_of(report, above)]


def reasons_of(report: StepReport, above: Headline) -> Iterator[tuple[str, str]]:
    """The lines that say why something runs without a graph, and those with notes. Each says something new."""
    reasons = [("without a graph", f) for f in report.fallbacks]
    for name, f in [*reasons, *(("graph break", cut) for cut in report.cuts)]:
        if not above.tells(f):
            where = f"\n  at {f.where}" if f.where else ""
            fix = f"\n  {f.fix}" if f.fix else ""
            yield name, f"{f.reason} (from step {f.step}){where}{fix}"
    for text in report.notes:
        if not (any(text in f.reason for f in report.fallbacks) or above.says(text)):
            yield "note", text


def _speed(report: StepReport) -> Iterator[tuple[str, str]]:
    if report.ms_without_graph is not None:
        yield "step without graph", f"{report.ms_without_graph:.2f} ms (timed in the first steps)"
    if report.ms_with_graph is not None:
        yield "step with graph", f"{report.ms_with_graph:.2f} ms (median, data loading included)"
    if report.speedup is not None:
        yield "speed-up", f"{report.speedup:.2f}x"


def peak_memory_mib() -> dict[str, int]:
    """Of the CUDA device since the process began."""
    return {
        "peak_reserved_mib": torch.cuda.max_memory_reserved() >> 20,
        "peak_allocated_mib": torch.cuda.max_memory_allocated() >> 20,
    }
