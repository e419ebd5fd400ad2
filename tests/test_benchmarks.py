"""The benchmark scripts run without a GPU, on tiny models, and then claim no times."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning.pytorch")

from benchmarks import before_and_after, known_issues

ROOT = Path(__file__).parents[1]


def run(module: str, json_file: Path, *options: str) -> dict[str, Any]:
    """What the script wrote; it has to succeed."""
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            module,
            "--scale",
            "tiny",
            "--device",
            "cpu",
            "--json",
            str(json_file),
            *options,
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert "NO TIMING CLAIM" in done.stdout
    return json.loads(json_file.read_text())


@pytest.mark.slow
def test_lightning_step(tmp_path):
    options = ("--models", "mlp", "--modes", "eager,pygraph-eager", "--timeout-s", "0")
    record = run("benchmarks.lightning_step", tmp_path / "steps.json", *options)
    assert record["timing_claim"] is False
    eager, graphed = record["rows"]
    assert eager["error"] is None and graphed["error"] is None
    assert graphed["report"]["steps_replayed"] > 0
    losses = eager["first_losses"]  # the other row warms up for longer
    assert len(losses) > 10 and graphed["first_losses"][: len(losses)] == losses


@pytest.mark.slow
def test_manual_step(tmp_path):
    record = run(
        "benchmarks.manual_step", tmp_path / "manual.json", "--modes", "eager,pygraph", "--timeout-s", "0"
    )
    rows = record["rows"]
    assert record["timing_claim"] is False and len(rows) == 6
    for eager, graphed in zip(rows[::2], rows[1::2], strict=True):
        assert eager["model"] == graphed["model"]
        assert eager["error"] is None and graphed["error"] is None
        assert graphed["report"]["steps_replayed"] > 0 and graphed["step_ms"] is not None
        losses = eager["first_losses"]
        assert len(losses) > 10 and graphed["first_losses"][: len(losses)] == losses


@pytest.mark.slow
def test_audit_cost(tmp_path):
    record = run("benchmarks.audit_cost", tmp_path / "audits.json", "--models", "mlp", "--seconds", "1")
    (row,) = record["rows"]
    assert row["error"] is None and row["audit_ms"] > 0 and row["replayed"] > 0
    assert row["share"] == row["audits_s"] / row["run_s"]


def test_host_cost(tmp_path):
    record = run("benchmarks.host_cost", tmp_path / "host.json", "--models", "mlp", "--calls", "5")
    assert record["timing_claim"] is False
    (row,) = record["rows"]
    assert row["error"] is None and row["steady"] and row["median_us"] > 0
    assert set(row["parts_us"]) == {"batch in", "launch", "results out", "rest"}
    assert all(us > 0 for us in row["parts_us"].values())


@pytest.mark.slow
def test_before_and_after(tmp_path):
    rows = ("host:mlp:eager", "fit:mlp:pygraph-eager")
    options = ("--before", str(ROOT), "--rows", ",".join(rows), "--processes", "1", "--commits", "one,two")
    record = run("benchmarks.before_and_after", tmp_path / "both.json", *options)
    assert record["commits"] == {"before": "one", "after": "two"} and record["not_run"] == []
    assert [(row["name"], row["version"], row["error"]) for row in record["rows"]] == [
        (name, version, None) for name in rows for version in ("before", "after")
    ]
    host, fit = record["summary"]
    assert host["before"] > 0 and host["after"] > 0 and host["shortest_after"] <= host["after"]
    assert fit["losses_equal"] is True and fit["losses_compared"] > 10
    assert all(row["report"]["steps_replayed"] > 0 for row in record["rows"])


def test_before_and_after_notices_losses_that_differ():
    rows = [
        {"name": "fit:mlp:pygraph", "version": version, "windows_ms": [1.0, 2.0, 4.0], "first_losses": losses}
        for version, losses in (("before", [3.0, 2.0, 1.0]), ("after", [3.0, 2.5]))
    ]
    (entry,) = before_and_after.summarize(rows)
    assert entry["losses_compared"] == 2 and entry["losses_equal"] is False
    assert entry["before"] == 2.0 and entry["after_over_before"] == 1.0


def test_before_and_after_notices_another_package(tmp_path):
    result = tmp_path / "row.json"
    child = ["--before", ".", "--scale", "tiny", "--device", "cpu", "--child", "host:mlp:eager", str(result)]
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); "
    code += f"from benchmarks import before_and_after; before_and_after.main({child!r})"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, timeout=120, check=True)
    assert (
        "pygraph_train is not of the version that this row is for" in json.loads(result.read_text())["error"]
    )


@pytest.mark.slow
def test_fallback_cost(tmp_path):
    pytest.importorskip("accelerate")
    record = run("benchmarks.fallback_cost", tmp_path / "fallback.json", "--windows", "2", "--steps", "5")
    assert record["timing_claim"] is False
    assert [row["loop"] for row in record["rows"]] == [
        *("graphed-step", "lightning", "accelerate-step", "accelerate-loop")
    ]
    for row in record["rows"]:
        assert row["error"] is None and row["ratio"] > 0 and not row["graphs_ran"], row


@pytest.mark.slow
def test_changing_shapes(tmp_path):
    pytest.importorskip("transformers")
    options = ("--cases", "5", "--arms", "eager,graphed-eager", "--steps", "80", "--timeout-s", "60")
    record = run("benchmarks.changing_shapes", tmp_path / "shapes.json", *options)
    assert record["timing_claim"] is False
    eager, graphed = record["rows"]
    assert eager["error"] is None and graphed["error"] is None, (eager["error"], graphed["error"])
    assert graphed["first_losses"] == eager["first_losses"] and graphed["last_loss"] == eager["last_loss"]
    assert graphed["replays"] > 30 and graphed["shapes"]["met"] >= 4


@pytest.mark.slow
def test_accelerate_step(tmp_path):
    pytest.importorskip("accelerate")
    options = ("--models", "mlp", "--modes", "eager,pygraph,graphed-step", "--timeout-s", "0")
    record = run("benchmarks.accelerate_step", tmp_path / "accelerate.json", *options)
    assert record["timing_claim"] is False
    eager, loop, whole = record["rows"]
    assert eager["error"] is None and loop["error"] is None and whole["error"] is None
    assert loop["report"]["steps_replayed"] > 0
    assert whole["report"]["whole_steps"]["step"]["steps_replayed"] > 0
    assert loop["first_losses"] == eager["first_losses"] == whole["first_losses"]


@pytest.mark.slow
def test_phase_switching(tmp_path):
    options = ("--cases", "models,metric,hostread", "--models", "mlp", "--timed", "3", "--timeout-s", "0")
    record = run("benchmarks.phase_switching", tmp_path / "phases.json", *options)
    assert record["timing_claim"] is False
    assert all(row["error"] is None for row in record["rows"]), record["rows"]
    plans = {row["case"]: row["plan"] for row in record["rows"] if "plan" in row}
    assert plans == {"models: mlp": "{F B O}", "metric": "{F B O}", "hostread": "{F} {B} {O}"}
    correct = {c["claim"]: c["met"] for c in record["claims"]}
    assert correct["plan"] and correct["largest loss difference"]


@pytest.mark.slow
def test_known_issues(tmp_path):
    path = tmp_path / "issues.json"
    assert known_issues.main(["--device", "cpu", "--json", str(path)]) == 0
    rows = json.loads(path.read_text())["rows"]
    assert len(rows) == 5 and {row["mode"] for row in rows} == {"pygraph"}


@pytest.mark.slow
def test_transformers_trainer(tmp_path):
    pytest.importorskip("transformers")
    record = run("benchmarks.transformers_trainer", tmp_path / "rows.json")
    assert [row["mode"] for row in record["rows"] if row["error"] is None] == [
        "eager",
        "torch-compile",
        "callback",
        "trainer-eager",
        "trainer",
    ]
    assert record["summary"]["trainer"]["largest_loss_difference_from_eager"] == 0.0
