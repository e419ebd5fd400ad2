"""The benchmark scripts run without a GPU, on tiny models, and then claim no times."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning.pytorch")

from benchmarks.children import row_of_process

ROOT = Path(__file__).parents[1]


def run(module: str, json_file: Path, *options: str, **more: Any) -> dict[str, Any]:
    """What the script wrote; for the arguments see `printed`."""
    printed(module, json_file, *options, **more)
    return json.loads(json_file.read_text())


def printed(
    module: str, json_file: Path, *options: str, before: Path | None = None, timeout: int = 120
) -> str:
    """What the script printed; it has to succeed.

    Args:
        module: the script.
        json_file: where it writes to.
        options: of its command line.
        before: a folder whose modules, `sitecustomize` among them, are found before others.
        timeout: seconds.
    """
    folders = {} if before is None else {"PYTHONPATH": f"{before}{os.pathsep}{ROOT}"}
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
        timeout=timeout,
        env={**os.environ, "OMP_NUM_THREADS": "1", **folders},
    )
    assert done.returncode == 0, done.stderr
    assert "NO TIMING CLAIM" in done.stdout
    return done.stdout


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


def test_phases(tmp_path):
    record = run("benchmarks.phases", tmp_path / "phases.json", "--models", "mlp", "--seconds", "0.1")
    assert record["timing_claim"] is False
    (row,) = record["rows"]
    assert row["error"] is None and row["bits"] is True
    assert row["ours_us"] > 0 and row["report"]["steps_replayed"] > 60


def test_recipes(tmp_path):
    options = ("--recipes", "tabular,ppo", "--ways", "plain,ours", "--steps", "30", "--timeout", "100")
    record = run("benchmarks.recipes", tmp_path / "recipes.json", *options, timeout=400)
    assert record["timing_claim"] is False
    rows = record["rows"]
    assert [(row["recipe"], row["way"]) for row in rows] == list(
        product(("tabular", "ppo"), ("plain", "ours"))
    )
    for plain, ours in zip(rows[::2], rows[1::2], strict=True):
        assert plain["error"] is None and ours["error"] is None, (plain["error"], ours["error"])
        assert plain["steps_made"] == ours["steps_made"] == 30 and len(plain["losses"]) == 30
        assert ours["losses"] == plain["losses"]
        assert ours["report"]["phases_from_graphs"]["B"] >= 20 and ours["said"].startswith("pygraph-train:")
        assert plain["whole_s"] >= sum(plain["windows_ms"]) / 1e3 > 0
    cut = row_of_process(
        "benchmarks.recipes", ("ppo", "plain"), ["--scale=tiny", "--device=cpu"], timeout_s=1
    )
    assert cut == {"error": "timed out after 1 s"}


@pytest.mark.slow
def test_zoo(tmp_path):
    options = ("--names", "PPO;SimCLR;resnet18", "--processes", "2", "--logs", str(tmp_path))
    record = run("benchmarks.zoo", tmp_path / "zoo.json", *options)
    assert record["timing_claim"] is False and record["not_run"] == []
    rows = {row["name"]: row for row in record["rows"]}
    for name in ("PPO", "SimCLR"):
        assert rows[name]["stage"] == "done" and rows[name]["error"] is None
        assert {len(found.get("windows_ms", ())) for found in rows[name]["modes"].values()} == {0, 2}
    assert record["summary"]["whole"] >= 2 and record["summary"]["losses_differ"] == []
    cut = run("benchmarks.zoo", tmp_path / "cut.json", "--names", "PPO", "--seconds", "0.5")
    assert cut["rows"][0]["error"] == "the time for the whole run was over"
