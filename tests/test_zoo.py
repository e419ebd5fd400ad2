"""The zoo of architectures: entries can be made, children take turns, rows add up."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import never_slower
from benchmarks.children import Job, run_jobs
from benchmarks.zoo_models import ENTRIES, TINY, NotInstalled
from benchmarks.zoo_models.entry import seed
from benchmarks.zoo_summary import part_of, summarize, table_of

ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.passes_without_graphs("what a benchmark measures and adds up")


def test_the_zoo_is_large_and_has_a_subset_for_inductor() -> None:
    assert len(ENTRIES) >= 110 and sum(entry.compiled for entry in ENTRIES.values()) >= 40


def _train(name: str) -> list[float]:
    seed(0)
    model, make_batch, loss_of = ENTRIES[name].build(TINY)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = loss_of(model, make_batch())
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("name", list(ENTRIES))
def test_an_entry_trains_and_is_made_again_from_its_seed(name: str) -> None:
    try:
        losses = _train(name)
    except NotInstalled as reason:
        pytest.skip(str(reason))
    assert all(loss == loss and abs(loss) < 1e6 for loss in losses)
    assert losses == _train(name)


_CHILD = """
import sys, time
from benchmarks import never_slower
from benchmarks.children import Turns
turns = Turns()
name, path, alone = sys.argv[1:]
def tick(what, seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with open(path, "a") as file:
            file.write(f"{name} {what}\\n")
        time.sleep(0.02)
tick("side", 0.3)
with turns.alone():
    tick("alone", float(alone))
tick("side", 0.2)
print("said on the way")
if name == "b":
    raise SystemExit("a child that fails")
"""


def test_one_child_is_measured_while_all_others_are_stopped(tmp_path: Path) -> None:
    (tmp_path / "child.py").write_text(f"import sys; sys.path.insert(0, {str(ROOT)!r})\n" + _CHILD)
    told, ends = tmp_path / "told", {}
    jobs = [
        Job(name, [str(tmp_path / "child.py"), name, str(told), "0.3"], tmp_path / f"{name}.log")
        for name in "abc"
    ]

    left = run_jobs(jobs, lambda job, why: ends.update({job.name: why}), processes=3, timeout_s=30)

    assert left == [] and ends["a"] is None and ends["c"] is None
    assert "a child that fails" in ends["b"]
    lines = [line.split() for line in told.read_text().splitlines()]
    for name in "abc":
        turns = [n for n, line in enumerate(lines) if line == [name, "alone"]]
        assert len(turns) > 5
        others = {who for who, _ in lines[turns[1] : turns[-1]]}  # one may be writing when it is stopped
        assert others == {name}
    assert "said on the way" in (tmp_path / "a.log").read_text()


def test_children_end_with_the_time_of_the_run(tmp_path: Path) -> None:
    ends: dict[str, Any] = {}
    jobs = [Job(name, ["-c", "import time; time.sleep(60)"], tmp_path / name) for name in "abc"]
    begun = time.monotonic()
    left = run_jobs(jobs, lambda job, why: ends.update({job.name: why}), processes=2, timeout_s=30, seconds=1)
    assert time.monotonic() - begun < 20
    assert [job.name for job in left] == ["c"] and set(ends) == {"a", "b"}
    assert all("the time for the whole run" in why for why in ends.values())


def test_a_child_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    ends: dict[str, Any] = {}
    jobs = [Job("a", ["-c", "import time; time.sleep(60)"], tmp_path / "a")]
    run_jobs(jobs, lambda job, why: ends.update({job.name: why}), processes=2, timeout_s=0.5)
    assert ends["a"] == "timed out after 0.5 s"


def _row(
    name: str, plan: str, ms: float, *, losses: list[float] | None = None, where: str | None = None
) -> Any:
    plain = {"losses": [1.0, 0.5], "reserved_mib": 100}
    ours = {
        "running_plan": plan,
        "losses": losses or [1.0, 0.5],
        "windows_ms": [ms, ms],
        "reserved_mib": 104,
        "fallbacks": [] if plan == "{F B O}" else [{"reason": "a reason", "where": where}],
        "headline": "",
    }
    modes = {"eager": plain | {"windows_ms": [4.0, 4.0]}, "eager again": plain, "graphed-eager": ours}
    return {"name": name, "family": "made up", "modes": modes, "stage": "done", "error": None}


def test_rows_add_up() -> None:
    rows = [
        _row("a", "{F B O}", 1.0),
        _row("b", "{F} {B} {O}", 2.0, where="net.py:3"),
        _row("c", "F B {O}", 4.0, losses=[1.0, 0.6]),
        _row("d", "F B O", 5.0),
        {
            "name": "e",
            "family": "made up",
            "modes": {},
            "stage": "made",
            "error": None,
            "not_installed": "timm",
        },
        {"name": "f", "family": "made up", "modes": {}, "stage": "eager", "error": "timed out"},
        _row("g", "", 1.0),
    ]
    rows[-1]["modes"]["graphed-eager"] = {"error": "a crash"}
    assert [part_of(row) for row in rows] == ["whole", "regions", "optimizer", "none", None, None, None]
    found = summarize(rows)
    assert (found["entries"], found["measured"], found["not_installed"]) == (7, 4, ["e"])
    assert (found["share_whole"], found["share_regions_or_better"]) == (0.25, 0.5)
    assert found["geometric_mean_over_eager"] == pytest.approx((4 * 2 * 1 * 0.8) ** 0.25)
    assert found["slowest"] == "d" and set(found["below_0.98"]) == {"d"}
    assert found["losses_compared"] == 4 and found["losses_differ"] == ["c"]
    assert found["reasons_without_a_line"] == ["c", "d"] and found["failed_with_the_library"] == ["g"]
    assert found["failed"] == {"f": "timed out", "g": "a crash"}
    assert found["largest_memory_over_eager"] == pytest.approx(1.04)
    assert table_of(rows).splitlines()[-1] == "| all | 4 | 1 | 2 | 1.59x | 0.80x | 3 of 4 |"


@pytest.mark.slow
def test_never_slower(tmp_path: Path) -> None:
    path = tmp_path / "never.json"
    command = [sys.executable, "-m", "benchmarks.never_slower", "--scale", "tiny", "--device", "cpu"]
    options = [
        "--names",
        "case: PPO",
        "--modes",
        "eager,graphed,accelerate,accelerate-eager",
        "--json",
        str(path),
    ]
    done = subprocess.run([*command, *options], cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0 and "NO TIMING CLAIM" in done.stdout, done.stderr
    record = json.loads(path.read_text())
    (row,) = record["rows"]
    assert row["stage"] == "done" and row["modes"]["graphed"]["steps_from_graphs"] > 10
    assert row["modes"]["accelerate"]["windows_ms"]  # whose model is not called as a whole
    assert row["modes"]["graphed"]["losses"] == row["modes"]["eager"]["losses"]
    assert record["summary"]["graphed"]["measured"] == 1 and record["summary"]["crashed"] == {}


def test_never_slower_compares_with_the_best_of_the_others() -> None:
    def mode(ms: float, mib: int) -> dict[str, Any]:
        return {"windows_ms": [ms, ms], "reserved_mib": mib}

    modes = {"eager": mode(9, 90), "compile": mode(6, 100), "reduce-overhead": mode(3, 110)}
    modes |= {"graphed-compiled": mode(2, 120), "backend": mode(4, 100), "graphed": {"error": "no\nway"}}
    modes |= {"accelerate": mode(5, 100), "accelerate-eager": mode(10, 90)}
    row = {"name": "a", "stage": "done", "error": None, "modes": modes}
    found = never_slower.summarize([row])
    assert found["graphed-compiled"]["geometric_mean_over_the_best"] == pytest.approx(1.5)
    assert found["graphed-compiled"]["memory_above_1.10"] == {"a": 1.2}
    assert found["backend"]["below_0.98"] == {"a": 0.75} and found["crashed"] == {"a, graphed": "no"}
    assert found["accelerate"]["geometric_mean_over_the_best"] == pytest.approx(2), "in the same loop"
    in_part = row | {"stage": "timed in part", "error": "the time was over"}
    assert never_slower.summarize([in_part])["graphed-compiled"]["measured"] == 0, "the best may be missing"
    assert len(never_slower.FROM_ZOO) >= 30 and len(never_slower.CASES) == 12


@pytest.mark.slow
def test_a_run_is_cut_and_resumed_and_merged(tmp_path: Path) -> None:
    first, second, both = (tmp_path / f"{name}.json" for name in ("first", "second", "both"))

    def run(*options: str) -> str:
        command = [sys.executable, "-m", "benchmarks.zoo", "--scale", "tiny", "--device", "cpu", *options]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stderr
        assert "NO TIMING CLAIM" in done.stdout
        return done.stdout

    run("--names", "PPO", "--json", str(first))
    said = run("--names", "PPO;VAE", "--json", str(first), "--resume")
    assert "VAE:" in said and "PPO:" not in said
    run("--names", "resnet18;BERT", "--json", str(second))
    run("--merge", str(first), str(second), "--json", str(both))
    record = json.loads(both.read_text())
    rows = {row["name"]: row for row in record["rows"]}
    assert set(rows) == {"PPO", "VAE", "resnet18", "BERT"} and record["timing_claim"] is False
    for name in ("PPO", "VAE", "BERT"):
        ours = rows[name]["modes"]["graphed-eager"]
        assert rows[name]["stage"] == "done" and ours["running_plan"] == "{F B O}"
        assert ours["losses"] == rows[name]["modes"]["eager"]["losses"] and ours["steps_from_graphs"] > 10
