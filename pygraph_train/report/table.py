"""The lines of a report's table, in its short form and in the verbose one. docs/report.md explains each of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from pygraph_train.report.headline import Headline, counts_of

if TYPE_CHECKING:
    from pygraph_train.report.plans import PhaseRow
    from pygraph_train.report.step_report import StepReport

__all__ = ["peak_memory_mib", "reasons_of", "rows_of"]


def rows_of(report: StepReport, above: Headline | None) -> list[tuple[str, str]]:
    """What a report says, each line with its name.

    Args:
        above: the first line of the report, which no line repeats. None in the verbose form, which has every line.
    """
    verbose = above is None
    rows = [
        ("engine", report.engine),
        (
            "plan",
            f"{report.progress().plan}  (forward, backward, optimizer; {{ }} is a graph)",
        ),
    ]
    if report.steps:
        rows.append(("from graphs", counts_of(report.progress())))
    if report.shapes.rare_steps or (verbose and report.shapes.met > 1):
        rows.append(("shapes", str(report.shapes)))
    rows += _speed(report, verbose=verbose)
    if (
        report.why_nothing
        and not report.controllers
        and (above is None or not above.says(report.why_nothing))
    ):
        rows.append(("no graphs", report.why_nothing))
    if (found := report.compared_as_a_whole) and (above is None or not above.says(found)):
        rows.append(("whole loop", found))
    if (text := report.waits) and (above is None or not above.says(text)):
        rows.append(("not compiled", text))
    if verbose:
        rows += [*_phases(report), *_plans(report), *_captures(report)]
    rows += _regions(report, above)
    if verbose:
        rows += _costs(report)
    if report.engine == "cuda":
        memory = peak_memory_mib()
        text = "{peak_reserved_mib} MiB reserved, {peak_allocated_mib} MiB allocated".format(**memory)
        rows.append(("peak memory", text))
    return [*rows, *reasons_of(report, above)]


def reasons_of(report: StepReport, above: Headline | None) -> Iterator[tuple[str, str]]:
    """The lines that say why something runs without a graph, and those with notes. Each says something new."""
    for f in report.fallbacks:
        if above is None or not above.tells(f):
            where = f"\n  at {f.where}" if f.where else ""
            fix = f"\n  {f.fix}" if f.fix else ""
            often = f", met {f.count} times" if above is None and f.count > 1 else ""
            yield "without a graph", f"{f.reason} (from step {f.step}{often}){where}{fix}"
    for text in report.notes:
        if not any(text in f.reason for f in report.fallbacks) and (above is None or not above.says(text)):
            yield "note", text


def _speed(report: StepReport, *, verbose: bool) -> Iterator[tuple[str, str]]:
    if verbose and report.first_replay_step is not None:
        yield "first replay", f"step {report.first_replay_step}, after {report.first_replay_seconds:.1f} s"
    if not report.measured:
        return
    if report.ms_without_graph is not None:
        how = "fastest of the warm-up" if report.ungraphed_seconds else "when plans were compared"
        yield "step without graph", f"{report.ms_without_graph:.2f} ms ({how})"
    if report.ms_with_graph is not None:
        how = "median, data loading included" if report.replay_intervals else "when it was measured last"
        yield "step with graph", f"{report.ms_with_graph:.2f} ms ({how})"
    if report.speedup is not None:
        yield "speed-up", f"{report.speedup:.2f}x"
    idle = report.gpu_idle_fraction_without_graphs
    if idle is not None and idle >= 0.1:
        yield "launch-bound", f"without graphs the GPU waited {idle:.0%} of the step"


def _phases(report: StepReport) -> Iterator[tuple[str, str]]:
    for row in report.phases() if report.controllers else []:
        times = [f"{ms:.2f} ms {how}" for ms, how in _times(row) if ms is not None]
        kept = "in a graph" if row.kept else "without a graph"
        why = f": {row.why}" if row.why not in ("", "kept", *(f.reason for f in report.fallbacks)) else ""
        if times or why:
            yield f"phase {row.phases}", ", ".join([kept, *times]) + why


def _times(row: PhaseRow) -> tuple[tuple[float | None, str], ...]:
    return (row.on_ms, "in a graph"), (row.off_ms, "without one")


def _plans(report: StepReport) -> Iterator[tuple[str, str]]:
    """Plans that were compared have a line each, and all others one line together."""
    untried: dict[str, list[str]] = {}
    kept = str(report.controllers[0].best) if report.controllers else ""
    for arm in (arm for arm in report.arms() if arm.arm != kept):
        verdict, _, why = arm.verdict.partition(":")
        if verdict == "not tried":
            untried.setdefault(why.strip(), []).append(arm.arm)
        elif arm.ms is not None or arm.verdict:
            ms = [f"{arm.ms:.2f} ms"] if arm.ms is not None else []
            yield f"plan {arm.arm}", ", ".join([*ms, *filter(None, [arm.verdict])])
    if untried:
        yield (
            "plans not tried",
            "\n".join(", ".join(arms) + (f": {why}" if why else "") for why, arms in untried.items()),
        )
    if report.exploration_steps:
        yield "exploration", f"{report.exploration_steps} steps with other plans than the best one known"
    for switch in report.switches:
        if switch.before != switch.arm:
            why = f": {switch.why}" if switch.why else ""
            yield f"switch at {switch.step}", f"{switch.before} -> {switch.arm}{why}"


def _captures(report: StepReport) -> Iterator[tuple[str, str]]:
    if report.optimizer_steps_replayed:
        yield "optimizer", f"{report.optimizer_steps_replayed} replays from a graph of its own"
    for c in report.captures:
        kernels = "Inductor kernels" if c.compiled else "eager kernels"
        nodes = f"{c.nodes} nodes, " if c.nodes >= 0 else ""
        yield f"captured {c.plan}", f"step {c.step}: {nodes}{kernels}, {c.seconds:.2f} s"


def _regions(report: StepReport, above: Headline | None) -> Iterator[tuple[str, str]]:
    for r in report.regions():
        if above is not None and (r.replays or not r.reason or above.says(r.reason)):
            continue
        where = f"\n  from {r.where}" if r.where else ""
        text = f"{r.decision}, {r.nodes} nodes, {r.replays} replays, {r.plain_runs} without a graph"
        yield r.name, f"{text}{': ' if r.reason else ''}{r.reason}{where}"


def _costs(report: StepReport) -> Iterator[tuple[str, str]]:
    if report.compile_seconds:
        yield "compiled", f"{report.compile_seconds:.1f} s"
    if report.verify_seconds and report.measured:
        later = f", and {report.audits} later ones" if report.audits else ""
        yield (
            "verified",
            f"first replays{later} were compared with plain steps: {report.verify_seconds:.2f} s",
        )


def peak_memory_mib() -> dict[str, int]:
    """Of the CUDA device since the process began."""
    return {
        "peak_reserved_mib": torch.cuda.max_memory_reserved() >> 20,
        "peak_allocated_mib": torch.cuda.max_memory_allocated() >> 20,
    }
