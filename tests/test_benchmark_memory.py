"""The benchmark of memory runs without a GPU, and then claims nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lightning.pytorch")

from benchmarks import memory
from benchmarks.memory_phases import Phases

ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.passes_without_graphs("what a benchmark measures and adds up")


def run(json_file: Path, *options: str) -> dict[str, Any]:
    """What the script wrote; it has to succeed."""
    own = ("--scale", "tiny", "--device", "cpu", "--json", str(json_file))
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.memory", *own, *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "NO MEMORY CLAIM" in done.stdout
    return json.loads(json_file.read_text())


@pytest.mark.slow
def test_a_run_tells_the_phases_of_each_arm_and_goes_on_where_it_ended(tmp_path: Path) -> None:
    path = tmp_path / "memory.json"
    record = run(path, "--models", "mlp", "--arms", "graphed-eager")
    (graphed,) = record["rows"]
    assert record["memory_claim"] is False and record["claims"] == [] and "commit" in record["environment"]
    assert graphed["running_plan"] == "{F B O}" and graphed["steps_from_graphs"] > 10
    assert {"plain steps", "preparation of the optimizer", "capture", "comparison", "replaying"} <= set(
        graphed["phases"]
    )
    assert graphed["reserved_mib"] is None
    record = run(
        path, "--models", "mlp", "--arms", "lightning,graphed-eager,lightning-graphed-eager", "--resume"
    )
    again, plain, lightning = record["rows"]
    assert again == graphed, "it was not measured again"
    assert plain["last_loss"] > 0 and "capture" not in plain["phases"]
    assert lightning["running_plan"] == "{F B O}" and "comparison" in lightning["phases"]


@pytest.mark.slow
def test_a_row_without_time_is_an_error_and_the_others_are_measured(tmp_path: Path) -> None:
    path = tmp_path / "memory.json"
    options = [
        "--scale",
        "tiny",
        "--device",
        "cpu",
        "--models",
        "mlp",
        "--arms",
        "eager",
        "--timeout-s",
        "0.1",
        "--json",
    ]
    code = memory.main([*options, str(path)])
    (row,) = json.loads(path.read_text())["rows"]
    assert code == 1 and "timed out" in row["error"] and row["stage"] == "began"


def row_of(arm: str, whole: int, replaying: int) -> dict[str, Any]:
    return memory._no_row("mlp", arm) | {"reserved_mib": whole, "replaying_mib": replaying}


def test_claims_compare_with_what_the_user_had() -> None:
    rows = [
        row_of("eager", 1000, 1000),
        row_of("compile", 800, 800),
        row_of("graphed-eager", 1050, 1050),
        row_of("backend", 890, 790),
        row_of("lightning-graphed-eager", 9999, 9999),  # there is nothing to compare it with
        row_of("accelerate", 9999, 9999) | {"error": "crashed"},
    ]
    found = [(c["arm"], c["when"], c["ratio"], c["met"]) for c in memory.claims_of(rows)]
    assert found == [
        ("graphed-eager", "in the whole run", 1.05, True),
        ("backend", "in the whole run", 890 / 800, False),
        ("backend", "while replaying", 790 / 800, True),
    ]


def test_a_phase_within_another_has_the_peak_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    peak = 0

    def read() -> int:
        return peak << 20

    def reset() -> None:
        nonlocal peak
        peak = 0

    for name, stand_in in (
        ("max_memory_reserved", read),
        ("max_memory_allocated", read),
        ("reset_peak_memory_stats", reset),
        ("empty_cache", lambda: None),
        ("synchronize", lambda: None),
    ):
        monkeypatch.setattr(torch.cuda, name, stand_in)
    phases = Phases(torch.device("cuda"))
    phases.go_on("plain steps")
    peak = 10
    with phases.within("comparison"):
        peak = 30
        with phases.within("capture"):
            peak = 20
        peak = 25
    phases.go_on("replaying")
    peak = 15
    phases.note()
    found = {name: peaks["reserved_mib"] for name, peaks in phases.peaks.items()}
    assert found == {
        **{"before the first step": 0, "plain steps": 10, "comparison": 30, "capture": 20, "replaying": 15}
    }
    assert phases.most("reserved") == 30 and phases.most("reserved", ("replaying",)) == 15
