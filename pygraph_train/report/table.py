"""The lines of a report's table, in its short form and in the verbose one. docs/report.md explains each of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from pygraph_train.report.headline import Headline, counts_of

if TYPE_CHECKING:
    from pygraph_train.report.step_report import StepReport


def rows_of(report: StepReport, above: Headline | None) -> list[tuple[str, str]]:
    """What a report says, each line with its name.

    Args:
        above: the first line of the report, which no line repeats. None in the verbose form, which has every line.
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
    rows += _graphs(report) if above is None else ()
    if report.measured:
        memory = "{peak_reserved_mib} MiB reserved, {peak_allocated_mib} MiB allocated"
        rows.append(("peak memory", memory.format(**peak_memory_mib())))
    return [*rows, *reasons_of(report, above)]


def reasons_of(report: StepReport, above: Headline | None) -> Iterator[tuple[str, str]]:
    """The lines that say why something runs without a graph, and those with notes. Each says something new."""
    reasons = [("without a graph", f) for f in report.fallbacks]
    for name, f in [*reasons, *(("graph break", cut) for cut in report.cuts)]:
        if above is None or not above.tells(f):
            where = f"\n  at {f.where}" if f.where else ""
            fix = f"\n  {f.fix}" if f.fix else ""
            often = f", met {f.count} times" if above is None and f.count > 1 else ""
            yield name, f"{f.reason} (from step {f.step}{often}){where}{fix}"
    for text in report.notes:
        if not any(text in f.reason for f in report.fallbacks) and (above is None or not above.says(text)):
            yield "note", text


def _speed(report: StepReport) -> Iterator[tuple[str, str]]:
    if report.ms_without_graph is not None:
        yield "step without graph", f"{report.ms_without_graph:.2f} ms (timed in the first steps)"
    if report.ms_with_graph is not None:
        yield "step with graph", f"{report.ms_with_graph:.2f} ms (median, data loading included)"
    if report.speedup is not None:
        yield "speed-up", f"{report.speedup:.2f}x"


def _graphs(report: StepReport) -> Iterator[tuple[str, str]]:
    if report.first_replay_step is not None:
        yield "first replay", f"step {report.first_replay_step}, after {report.first_replay_seconds:.1f} s"
    for c in report.captures:
        kernels = "Inductor kernels" if c.compiled else "eager kernels"
        nodes = f"{c.nodes} nodes, " if c.nodes >= 0 else ""
        sizes = f", for inputs of {c.sizes}" if c.sizes else ""
        yield f"captured {c.plan}", f"step {c.step}: {nodes}{kernels}, {c.seconds:.2f} s{sizes}"
    if report.verify_seconds and report.measured:
        later = f", and {report.audits} later ones" if report.audits else ""
        yield "verified", f"first replays{later} were compared with plain ones: {report.verify_seconds:.2f} s"


def peak_memory_mib() -> dict[str, int]:
    """Of the CUDA device since the process began."""
    return {
        "peak_reserved_mib": torch.cuda.max_memory_reserved() >> 20,
        "peak_allocated_mib": torch.cuda.max_memory_allocated() >> 20,
    }
