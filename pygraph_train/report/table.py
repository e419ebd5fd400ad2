"""The lines of a report's table."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from pygraph_train.report.step_report import StepReport

__all__ = ["peak_memory_mib", "rows_of"]


def rows_of(report: StepReport) -> list[tuple[str, str]]:
    """What a report says, each line with its name."""
    rows = [
        ("engine", report.engine),
        ("plan", f"{report.plan}   (F forward, B backward, O optimizer; {{ }} is one graph)"),
        ("steps replayed", f"{report.steps_replayed} of {report.steps}"),
    ]
    if report.first_replay_step is not None:
        rows.append(
            ("first replay", f"step {report.first_replay_step}, after {report.first_replay_seconds:.1f} s")
        )
    if report.ms_without_graph is not None:
        rows.append(("step without graph", f"{report.ms_without_graph:.2f} ms (fastest of the warm-up)"))
    if report.ms_with_graph is not None:
        rows.append(("step with graph", f"{report.ms_with_graph:.2f} ms (median, data loading included)"))
    if report.speedup is not None:
        rows.append(("speed-up", f"{report.speedup:.2f}x"))
    idle = report.gpu_idle_fraction_without_graphs
    if idle is not None and idle >= 0.1:
        rows.append(("launch-bound", f"without graphs the GPU waited {idle:.0%} of the step"))
    if report.optimizer_steps_replayed:
        rows.append(
            ("optimizer replayed", f"{report.optimizer_steps_replayed} times, from a graph of its own")
        )
    if report.why_nothing and not report.controllers:
        rows.append(("no graphs", report.why_nothing))
    for row in report.phases() if report.controllers else []:
        off = "-" if row.off_ms is None else f"{row.off_ms:.2f} ms"
        on = "-" if row.on_ms is None else f"{row.on_ms:.2f} ms"
        kept = "graph" if row.kept else "no graph"
        rows.append((f"phase {row.phases}", f"off {off}, on {on}, {kept}: {row.why}"))
    for arm in report.arms()[1:]:
        ms = "" if arm.ms is None else f"{arm.ms:.2f} ms, "
        rows.append((f"plan {arm.arm}", f"{ms}{arm.verdict}"))
    if report.exploration_steps:
        rows.append(("exploration", f"{report.exploration_steps} steps"))
    for switch in report.switches:
        if switch.before == switch.arm:
            continue
        rows.append((f"switch at {switch.step}", f"{switch.before} -> {switch.arm}: {switch.why}"))
    for c in report.captures:
        kernels = "Inductor kernels" if c.compiled else "eager kernels"
        nodes = f"{c.nodes} nodes, " if c.nodes >= 0 else ""
        rows.append((f"captured {c.plan}", f"step {c.step}: {nodes}{kernels}, {c.seconds:.2f} s"))
    for r in report.regions():
        where = f"\n  from {r.where}" if r.where else ""
        text = f"{r.decision}, {r.nodes} nodes, {r.replays} replays, {r.plain_runs} without a graph"
        rows.append((r.name, f"{text}{': ' if r.reason else ''}{r.reason}{where}"))
    if report.compile_seconds:
        rows.append(("compiled", f"{report.compile_seconds:.1f} s"))
    if report.verify_seconds and report.measured:
        later = f", and {report.audits} later ones" if report.audits else ""
        text = f"first replays{later} were compared with plain steps: {report.verify_seconds:.2f} s"
        rows.append(("verified", text))
    if report.engine == "cuda":
        memory = peak_memory_mib()
        rows.append(
            (
                "peak memory",
                "{peak_reserved_mib} MiB reserved, {peak_allocated_mib} MiB allocated".format(**memory),
            )
        )
    for f in report.fallbacks:
        where = f"\n  at {f.where}" if f.where else ""
        fix = f"\n  {f.fix}" if f.fix else ""
        rows.append(("without a graph", f"{f.reason} (from step {f.step}){where}{fix}"))
    rows += [("note", text) for text in report.notes]
    return rows


def peak_memory_mib() -> dict[str, int]:
    """Of the CUDA device since the process began."""
    return {
        "peak_reserved_mib": torch.cuda.max_memory_reserved() >> 20,
        "peak_allocated_mib": torch.cuda.max_memory_allocated() >> 20,
    }
