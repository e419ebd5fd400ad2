"""What the rows of backend_step.py add up to: ratios per workload, their means, the targets beside them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.record import DASH

__all__ = ["LOSS_TOLERANCE", "disagreements", "ratio_table", "summarize", "time_table", "verdicts"]

Row = dict[str, Any]

COMPETITORS = ("default", "reduce-overhead")
UNGRAPHED = ("default", "eager")  # what is left to compare with where reduce-overhead crashes
COVERED = ("speech", "dlrm")  # workloads that cannot be captured as they are written
LOSS_TOLERANCE = 1e-2  # relative; bf16, and kernels whose sums have no fixed order
TARGETS = {
    "speedup": ("geometric mean over reduce-overhead", ">=", 1.29),
    "worst": ("worst against the better of default and reduce-overhead", ">=", 0.98),
    "memory": ("worst reserved memory over default", "<=", 1.02),
    "settle": ("worst time to compile and choose over default", "<=", 1.3),
    **{f"coverage_{model}": (f"{model}: kernels in graphs", ">=", 0.99) for model in COVERED},
}


def summarize(rows: Sequence[Row], device: str) -> dict[str, Any]:
    """`entries`, one a workload and kind of iteration, and `totals` by kind. Ratios only for a GPU."""
    names = dict.fromkeys((row["model"], row["kind"]) for row in rows)
    entries = [_entry(_by_mode(rows, *name), *name, device=device) for name in names]
    kinds = dict.fromkeys(kind for _, kind in names)
    return {
        "entries": entries,
        "totals": {kind: _totals([e for e in entries if e["kind"] == kind]) for kind in kinds},
    }


def _by_mode(rows: Iterable[Row], model: str, kind: str) -> dict[str, Row]:
    return {row["mode"]: row for row in rows if (row["model"], row["kind"]) == (model, kind)}


def _entry(by_mode: dict[str, Row], model: str, kind: str, *, device: str) -> dict[str, Any]:
    def value(mode: str, key: str) -> Any:
        return by_mode.get(mode, {}).get(key)

    def ratio(above: float | None, below: float | None) -> float | None:
        return above / below if device == "cuda" and above is not None and below else None

    comparable = all(row.get("caches") != "shared" for row in by_mode.values())
    times = {mode: row.get("ms") for mode, row in by_mode.items()}
    baseline = "reduce-overhead" if times.get("reduce-overhead") else _fastest(times, UNGRAPHED)
    best = _fastest(times, COMPETITORS)
    ours = times.get("pygraph")
    return {
        "model": model,
        "kind": kind,
        "ms": times,
        "baseline": baseline,
        "speedup": ratio(times.get(baseline), ours) if baseline else None,
        "best": best,
        "speedup_over_best": ratio(times.get(best), ours) if best else None,
        "busy_ms": value("default", "busy_ms"),
        "pygraph_over_busy": ratio(ours, value("default", "busy_ms")),
        **{
            f"{key}_ratio": ratio(value("pygraph", name), value("default", name))
            if comparable or key not in ("compile", "settle")
            else None
            for key, name in (
                ("memory", "reserved_mib"),
                ("allocated", "allocated_mib"),
                ("compile", "compile_s"),
                ("settle", "settle_s"),
            )
        },
        "coverage": {mode: row.get("coverage") for mode, row in by_mode.items()},
        "gaps": {
            mode: _gaps(row, by_mode["default"]) for mode, row in by_mode.items() if "default" in by_mode
        },
    }


def _fastest(times: dict[str, float | None], modes: Iterable[str]) -> str | None:
    running = {mode: time for mode in modes if (time := times.get(mode))}
    return min(running, key=running.__getitem__, default=None)


def _gaps(row: Row, reference: Row) -> dict[str, float | None]:
    """The largest difference of the same losses and gradient norms, relative to the largest of the reference."""
    return {
        key: _gap(row.get(key), reference.get(key)) for key in ("first_losses", "losses", "gradient_norms")
    }


def _gap(one: Sequence[float] | None, other: Sequence[float] | None) -> float | None:
    if not one or not other:
        return None
    scale = max(map(abs, other)) or 1.0
    differences = [abs(a - b) / scale for a, b in zip(one, other, strict=False)]
    return math.nan if any(map(math.isnan, differences)) else max(differences)  # max() overlooks nan


def _totals(entries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    def values(key: str) -> dict[str, float]:
        return {e["model"]: e[key] for e in entries if e[key] is not None}

    speedups, over_best = values("speedup"), values("speedup_over_best")
    memory, compile_time, settle = (values(f"{key}_ratio") for key in ("memory", "compile", "settle"))
    covered = {e["model"]: e["coverage"].get("pygraph") for e in entries if e["model"] in COVERED}
    return {
        "workloads": len(speedups),
        "speedup": _mean(speedups),
        "worst": min(over_best.values(), default=None),
        "worst_model": min(over_best, key=over_best.__getitem__, default=None),
        "memory": max(memory.values(), default=None),
        "memory_mean": _mean(memory),
        "compile": max(compile_time.values(), default=None),
        "compile_mean": _mean(compile_time),
        "settle": max(settle.values(), default=None),
        "settle_mean": _mean(settle),
        **{f"coverage_{model}": covered.get(model) for model in COVERED},
    }


def _mean(ratios: dict[str, float]) -> float | None:
    return statistics.geometric_mean(ratios.values()) if ratios else None


def verdicts(totals: dict[str, dict[str, Any]]) -> list[str]:
    """One line a kind and target: what was measured, what it should be. Coverage: without the optimizer."""
    lines = []
    for kind, found in totals.items():
        for key, (text, relation, target) in TARGETS.items():
            value = found.get(key)
            if value is None or (key.startswith("coverage") and kind != "fb"):
                continue
            met = value >= target if relation == ">=" else value <= target
            number, wanted = (f"{v:.1%}" if "coverage" in key else f"{v:.3g}x" for v in (value, target))
            lines.append(f"{kind}: {text} {number}, target {relation} {wanted}: {'met' if met else 'MISSED'}")
    return lines


def disagreements(entries: Iterable[dict[str, Any]]) -> list[str]:
    """Compiled modes whose losses or gradients are not those of default.

    Not eager: Inductor draws dropout masks of its own.
    """
    return [
        f"{entry['model']} {entry['kind']} {mode}: {key} differ from default by {gap:.2g} (relative)"
        for entry in entries
        for mode, gaps in entry["gaps"].items()
        for key, gap in gaps.items()
        if mode != "eager" and gap is not None and not gap <= LOSS_TOLERANCE
    ]


def time_table(rows: Sequence[Row], summary: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Columns and cells: milliseconds of each mode that was asked for, and the GPU's part of them."""
    modes = list(dict.fromkeys(row["mode"] for row in rows))
    lines = []
    for entry in summary["entries"]:
        by_mode = _by_mode(rows, entry["model"], entry["kind"])
        host = [_number(by_mode.get(mode, {}).get("host_ms")) for mode in ("default", "pygraph")]
        cells = [_cell(by_mode.get(mode)) for mode in modes]
        lines.append([f"{entry['model']} {entry['kind']}", *cells, _number(entry["busy_ms"]), *host])
    return ["workload", *modes, "busy", "host default", "host pygraph"], lines


def ratio_table(rows: Sequence[Row], summary: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Columns and cells: pygraph against the others."""
    lines = []
    for entry in summary["entries"]:
        other = entry["speedup"] is not None and entry["baseline"] != "reduce-overhead"
        instead = f" ({entry['baseline']})" if other else ""
        coverage = [_percent(entry["coverage"].get(mode)) for mode in ("reduce-overhead", "pygraph")]
        lines.append(
            [
                f"{entry['model']} {entry['kind']}",
                _times(entry["speedup"]) + instead,
                *(_times(entry[key]) for key in ("speedup_over_best", "pygraph_over_busy")),
                *(_times(entry[f"{key}_ratio"]) for key in ("memory", "compile", "settle")),
                *coverage,
            ]
        )
    columns = ["pygraph", "vs reduce-overhead", "vs best", "/busy", "reserved", "compile", "settle"]
    return [*columns, "in graphs: r-o", "pygraph"], lines


def _cell(row: Row | None) -> str:
    if row is None or row["skipped"]:
        return DASH
    if row["error"]:
        return "time-out" if row["error"].startswith("timed out") else "crash"
    return _number(row.get("ms")) + ("" if row.get("settled", True) else " unsettled")


def _number(value: float | None) -> str:
    return DASH if value is None else f"{value:.3f}"


def _times(value: float | None) -> str:
    return DASH if value is None else f"{value:.2f}x"


def _percent(value: float | None) -> str:
    return DASH if value is None else f"{value:.1%}"
