"""What Inductor is taken to cost lies above what it has cost in the committed runs, and not far above."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from pygraph_train.selection.compile_time import COMPILE_SECONDS, compile_seconds

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def measured() -> Iterator[tuple[int, float]]:
    """Operations of a step with eager kernels, and the seconds that Inductor took for it (some caches were warm)."""
    for file in sorted(RESULTS.glob("*_step_*.json")):
        steps: dict[str, list[dict]] = {}
        for row in json.loads(file.read_text()).get("rows", []):
            if isinstance(report := row.get("report"), dict):
                steps.setdefault(str(row.get("model") or row.get("workload")), []).append(report)
        for reports in steps.values():
            eager = [c["nodes"] for r in reports for c in r["captures"] if not c["compiled"]]
            seconds = [r["compile_seconds"] for r in reports if r["compile_seconds"]]
            if eager and seconds:
                yield max(eager), max(seconds)


def test_the_estimate_lies_above_what_compilations_took() -> None:
    known = list(measured())
    assert len(known) >= 6
    assert all(seconds < compile_seconds(operations) for operations, seconds in known), known


def test_a_small_step_is_taken_to_compile_soon() -> None:
    assert compile_seconds(118) < 10 < compile_seconds(500) < 30


@pytest.mark.parametrize("operations", [None, 10**6])
def test_a_step_of_unknown_or_great_size_is_taken_to_compile_for_two_minutes(operations: int | None) -> None:
    assert compile_seconds(operations) == COMPILE_SECONDS
