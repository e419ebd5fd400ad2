"""What the rows of zoo.py add up to: shares, means, entries that differ, a table."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.record import DASH

Row = dict[str, Any]

WHOLE = "{F} {B} {O}"
OURS = ("graphed-eager", "graphed-compiled")


def ours_of(row: Row) -> Row:
    """What the library made of the entry's step; empty where it did not run."""
    return next((row["modes"][mode] for mode in OURS if mode in row["modes"]), {})


def part_of(row: Row) -> str | None:
    """What of the step runs from graphs: the whole step, forward or backward, the optimizer only, or none."""
    plan = ours_of(row).get("running_plan")
    if plan is None:
        return None
    if plan == WHOLE:
        return "whole"
    graphs = plan.replace("}", "{").split("{")[1::2]
    if any("F" in graph or "B" in graph for graph in graphs):
        return "regions"
    return "optimizer" if graphs else "none"


def speedup(row: Row, over: str = "eager") -> float | None:
    """How many times faster the library is: the median of windows that follow each other."""
    times, others = ours_of(row).get("windows_ms"), row["modes"].get(over, {}).get("windows_ms")
    if not times or not others:
        return None
    return statistics.median(b / a for a, b in zip(times, others, strict=True))


def differs(row: Row) -> bool | None:
    """Whether the losses differ from those of plain runs; None where plain runs differ, or were not made."""
    first, second = (row["modes"].get(mode, {}).get("losses") for mode in ("eager again", "eager"))
    ours = row["modes"].get("graphed-eager", {}).get("losses")
    if not first or not ours or first != second:
        return None
    return ours != first


def cause_of(row: Row) -> tuple[str, str | None]:
    """The first reason against graphs of all phases, and its line; both empty where there is none."""
    ours = ours_of(row)
    if part_of(row) == "whole" or not ours:
        return "", None
    for fallback in ours.get("fallbacks", ()):
        return fallback["reason"], fallback["where"]
    told = ours.get("notes", ())
    return (told[0] if told else ours.get("headline", "")), None


def summarize(rows: Sequence[Row]) -> dict[str, Any]:
    """Counts, shares and means over the entries that could be made."""
    made = [row for row in rows if part_of(row) is not None]
    parts = [part_of(row) for row in made]
    found = {row["name"]: ratio for row in made if (ratio := speedup(row)) is not None}
    whole = [found[row["name"]] for row in made if part_of(row) == "whole" and row["name"] in found]
    slowest = min(found, key=lambda name: found[name], default=None)
    without_line = [row["name"] for row in made if cause_of(row)[0] and not cause_of(row)[1]]
    failed = [row for row in rows if "not_installed" not in row and row not in made]
    return {
        "entries": len(rows),
        "not_installed": [row["name"] for row in rows if "not_installed" in row],
        "measured": len(made),
        "whole": parts.count("whole"),
        "share_whole": _share(parts.count("whole"), len(made)),
        "share_regions_or_better": _share(parts.count("whole") + parts.count("regions"), len(made)),
        "geometric_mean_over_eager": mean_of(list(found.values())),
        "geometric_mean_over_eager_of_whole_steps": mean_of(whole),
        "slowest_over_eager": None if slowest is None else found[slowest],
        "slowest": slowest,
        "below_0.98": {name: ratio for name, ratio in found.items() if ratio < 0.98},
        "largest_memory_over_eager": max(filter(None, map(memory, made)), default=None),
        "losses_compared": sum(differs(row) is not None for row in made),
        "losses_differ": [row["name"] for row in made if differs(row)],
        "reasons_without_a_line": without_line,
        "failed": {row["name"]: _error(row) for row in failed},
        "failed_with_the_library": [
            row["name"]
            for row in failed
            if row["modes"].get("eager again", {}).get("losses") and row["stage"] != "waits for its turn"
        ],
        **_over_the_best(made),
    }


def _over_the_best(rows: Sequence[Row]) -> dict[str, Any]:
    """Against the fastest of eager, `torch.compile` and `reduce-overhead`, where these were measured."""
    found: dict[str, float] = {}
    for row in rows:
        others = [
            m for m in ("eager", "compile", "reduce-overhead") if row["modes"].get(m, {}).get("windows_ms")
        ]
        if len(others) > 1:
            ratios = [speedup(row, over=mode) for mode in others]
            found[row["name"]] = min(r for r in ratios if r is not None)
    if not found:
        return {}
    below = {name: ratio for name, ratio in found.items() if ratio < 0.98}
    return {
        "geometric_mean_over_the_best_other": mean_of(list(found.values())),
        "below_0.98_of_the_best_other": below,
    }


def memory(row: Row) -> float | None:
    """Peak reserved memory over that of eager."""
    ours, plain = ours_of(row).get("reserved_mib"), row["modes"].get("eager", {}).get("reserved_mib")
    return ours / plain if ours and plain else None


def lines_of(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """The table on the terminal."""
    columns = ["entry", "plan", "eager ms", "ours ms", "faster", "memory", "losses", "reason"]
    return columns, [_cells(row) for row in rows]


def _cells(row: Row) -> list[str]:
    if part_of(row) is None:
        why = "not installed" if "not_installed" in row else _error(row)
        return [row["name"], *[DASH] * 6, why.splitlines()[0][:60]]
    ours = ours_of(row)
    ms = [
        statistics.median(t) if (t := m.get("windows_ms")) else None
        for m in (row["modes"].get("eager", {}), ours)
    ]
    same = {None: DASH, True: "DIFFER", False: "equal"}[differs(row)]
    reason, where = cause_of(row)
    cells = [*(_number(value) for value in (*ms, speedup(row), memory(row))), same]
    return [row["name"], ours["running_plan"], *cells, f"{where or ''} {reason}".strip()[:90]]


def _error(row: Row) -> str:
    """Why the library's step was not measured."""
    return row["error"] or ours_of(row).get("error") or f"ended: {row['stage']}"


def _number(value: float | None) -> str:
    return DASH if value is None else f"{value:.2f}"


def _share(count: int, of: int) -> float | None:
    return round(count / of, 4) if of else None


def mean_of(values: Sequence[float]) -> float | None:
    """The geometric mean; None of nothing."""
    return statistics.geometric_mean(values) if values else None
