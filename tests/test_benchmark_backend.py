"""The benchmark of the compile backend runs without a GPU, and what it computes from its rows is right."""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import backend_step
from benchmarks.backend_summary import disagreements, ratio_table, summarize, time_table, verdicts
from benchmarks.backend_trial import Trial
from benchmarks.graph_coverage import coverage_of
from benchmarks.paper_workloads import PAPER_WORKLOADS, build, density

pytestmark = pytest.mark.quick

ROOT = Path(__file__).parents[1]
CPU = torch.device("cpu")


def run(json_file: Path, modes: str) -> list[dict[str, Any]]:
    """The rows of the tiny MLP; the script has to succeed."""
    options = ["--scale=tiny", "--device=cpu", "--models=mlp", f"--modes={modes}", f"--json={json_file}"]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.backend_step", *options, "--timeout-s=0"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "NO TIMING CLAIM" in done.stdout
    record = json.loads(json_file.read_text())
    assert record["timing_claim"] is False
    assert all(entry["speedup"] is None for entry in record["summary"]["entries"])
    return record["rows"]


@pytest.mark.slow
def test_script_measures_both_kinds_of_iteration(tmp_path):
    rows = run(tmp_path / "backend.json", "default,eager")
    assert [(row["mode"], row["kind"]) for row in rows] == [
        (mode, kind) for mode in ("default", "eager") for kind in ("fb", "step")
    ]
    for row in rows:
        assert row["error"] is None and row["ms"] > 0 and len(row["windows_ms"]) == 2
    compiled, eager = (next(r for r in rows if r["mode"] == mode) for mode in ("default", "eager"))
    assert compiled["losses"] == pytest.approx(eager["losses"], rel=1e-2)
    assert compiled["gradient_norms"] == pytest.approx(eager["gradient_norms"], rel=5e-2)


@pytest.mark.slow
@pytest.mark.skipif(
    backend_step._skip_reason("pygraph", "cpu") is not None, reason="the backend is not there"
)
def test_script_measures_the_emulated_backend(tmp_path):
    rows = run(tmp_path / "backend.json", "default,pygraph")
    for default, ours in zip(rows[:2], rows[2:], strict=True):
        assert ours["error"] is None and ours["skipped"] is None and ours["settled"]
        assert ours["losses"] == pytest.approx(default["losses"], rel=1e-2)
        assert {region["phase"] for region in ours["regions"]} >= {"forward", "backward"}


@pytest.mark.parametrize("name", PAPER_WORKLOADS)
def test_workload_trains(name):
    if name in ("t5", "mobilebert"):
        pytest.importorskip("transformers")
    workload = build(name, "tiny")
    trial = Trial(workload, None, CPU)
    if trial.parameters:
        trial.start("step")
    losses, norms = trial.compared_iterations()
    assert all(map(math.isfinite, losses)) and len(set(losses)) > 1  # the batches differ
    assert all(math.isfinite(norm) and norm > 0 for norm in norms)
    same = Trial(build(name, "tiny"), None, CPU)
    assert all(
        torch.equal(a, b) for a, b in zip(trial.batches[0].values(), same.batches[0].values(), strict=True)
    )


def test_temperature_of_speech_is_a_cpu_tensor_in_the_graph():
    scalars = []

    def backend(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        scalars.extend(t for t in inputs if isinstance(t, torch.Tensor) and t.dtype == torch.float64)
        return graph.forward

    torch._dynamo.reset()
    Trial(build("speech", "tiny"), {"backend": backend}, CPU).iterate()
    assert scalars and all(t.ndim == 0 for t in scalars)


@pytest.mark.parametrize(
    ("salinity", "celsius", "bar", "expected"),
    [(35, 25, 0, 1023.34306), (35, 5, 1000, 1069.48914), (35, 25, 1000, 1062.53817), (0, 5, 0, 999.96675)],
)
def test_density_of_sea_water_has_the_published_check_values(salinity, celsius, bar, expected):
    values = (torch.tensor(float(x), dtype=torch.float64) for x in (salinity, celsius, bar))
    assert float(density(*values)) == pytest.approx(expected, abs=1e-5)


def event(cat: str, name: str, duration: float, **args: int) -> dict[str, Any]:
    names = {key.replace("_", " "): value for key, value in args.items()}
    return {"ph": "X", "cat": cat, "name": name, "ts": 0, "dur": duration, "args": names}


def test_kernels_belong_to_the_launch_with_their_correlation():
    trace = [
        event("cuda_runtime", "cudaGraphLaunch", 9, correlation=1),
        event("cuda_runtime", "cudaLaunchKernel", 3, correlation=2),
        event("cuda_driver", "cuLaunchKernelEx", 3, correlation=3),
        event("cuda_runtime", "cudaMemcpyAsync", 3, correlation=4),
        *(event("kernel", "triton_fused", 100, correlation=1) for _ in range(3)),
        event("kernel", "fill", 40, correlation=2),
        event("kernel", "gemm", 60, correlation=3),
        # launched through a driver call that is not traced
        event("kernel", "patched", 100, correlation=5, graph_id=7),
        event("gpu_memcpy", "Memcpy DtoD", 20, correlation=4),
        event("gpu_user_annotation", "not work", 1000),
        {"ph": "M", "name": "process_name", "args": {"name": "python"}},
    ]
    found = coverage_of(json.loads(json.dumps(trace)), iterations=2)
    assert found["coverage"] == pytest.approx(4 / 6)
    assert (found["kernels"], found["graph_kernels"], found["graph_launches"]) == (3, 2, 0.5)
    assert found["kernel_ms"] == pytest.approx(0.25) and found["busy_ms"] == pytest.approx(0.26)
    assert found["outside"] == {"fill": 0.5, "gemm": 0.5}


def test_coverage_of_an_empty_trace_is_unknown():
    assert coverage_of([], iterations=4)["coverage"] is None


def row(model: str, mode: str, ms: float | None, **more: Any) -> dict[str, Any]:
    facts = {"reserved_mib": 100, "allocated_mib": 90, "compile_s": 10.0, "settle_s": 12.0, "busy_ms": 1.0}
    losses = {"first_losses": [2.0, 1.0], "losses": [2.0, 1.0], "gradient_norms": [3.0]}
    error = None if ms else "InductorError: no"
    names = {"model": model, "mode": mode, "kind": "fb", "error": error, "skipped": None}
    return {**names, **(facts | losses | {"ms": ms} if ms else {}), **more}


ROWS = [
    row("bert", "default", 4.0),
    row("bert", "reduce-overhead", 3.0, coverage=0.9),
    row("bert", "pygraph", 2.0, reserved_mib=110, compile_s=12.0, coverage=1.0, copied_bytes=16),
    row("speech", "default", 8.0),
    row("speech", "reduce-overhead", None),
    row("speech", "eager", 9.0, losses=[99.0, 1.0]),
    row("speech", "pygraph", 2.0, coverage=0.98, losses=[2.0, 1.2]),
]


def test_ratios_are_against_reduce_overhead_or_what_runs():
    summary = summarize(ROWS, "cuda")
    bert, speech = summary["entries"]
    assert bert["speedup"] == pytest.approx(1.5) and bert["best"] == "reduce-overhead"
    assert speech["baseline"] == "default" and speech["speedup"] == pytest.approx(4.0)
    assert (bert["memory_ratio"], bert["compile_ratio"]) == (pytest.approx(1.1), pytest.approx(1.2))
    assert bert["pygraph_over_busy"] == pytest.approx(2.0)
    totals = summary["totals"]["fb"]
    assert totals["speedup"] == pytest.approx(math.sqrt(1.5 * 4.0))
    assert totals["worst"] == pytest.approx(1.5) and totals["worst_model"] == "bert"
    assert totals["memory"] == pytest.approx(1.1) and totals["compile"] == pytest.approx(1.2)


def test_targets_stand_beside_what_was_measured():
    lines = verdicts(summarize(ROWS, "cuda")["totals"])
    assert "fb: geometric mean over reduce-overhead 2.45x, target >= 1.29x: met" in lines
    assert "fb: worst reserved memory over default 1.1x, target <= 1.02x: MISSED" in lines
    assert "fb: speech: kernels in graphs 98.0%, target >= 99.0%: MISSED" in lines


def test_other_losses_than_default_are_named_but_for_eager():
    lines = disagreements(summarize(ROWS, "cuda")["entries"])
    assert lines == ["speech fb pygraph: losses differ from default by 0.1 (relative)"]


def test_a_loss_that_is_no_number_is_a_disagreement():
    rows = [row("mlp", "default", 1.0), row("mlp", "pygraph", 1.0, losses=[2.0, math.nan])]
    (line,) = disagreements(summarize(rows, "cuda")["entries"])
    assert line.startswith("mlp fb pygraph: losses differ from default by nan")


def test_tables_have_a_cell_for_each_column():
    summary = summarize(ROWS, "cuda")
    for columns, lines in (time_table(ROWS, summary), ratio_table(ROWS, summary)):
        assert len(lines) == 2 and all(len(line) == len(columns) for line in lines)
    columns, lines = time_table(ROWS, summary)
    assert lines[1][columns.index("reduce-overhead")] == "crash"


def test_a_cpu_makes_no_ratios():
    (entry, _) = summarize(ROWS, "cpu")["entries"]
    assert entry["speedup"] is None and entry["memory_ratio"] is None


def test_a_mode_that_ends_its_process_costs_only_its_own_row(monkeypatch):
    asked = []

    def child(model: str, mode: str, args: argparse.Namespace, **_: Any) -> tuple[list[Any], int]:
        asked.append(mode)
        return ([], -11) if mode == "pygraph" else ([row(model, mode, 1.0)], 0)

    monkeypatch.setattr(backend_step, "_child", child)
    args = backend_step.parse(["--scale=tiny", "--device=cpu", "--kinds=fb"])
    rows = [
        r for new in backend_step.measure_apart("mlp", ["default", "pygraph", "eager"], args) for r in new
    ]
    assert asked == ["default", "pygraph", "eager"]
    assert {r["mode"]: r["error"] for r in rows} == {
        "default": None,
        "pygraph": "process ended: -11",
        "eager": None,
    }


def test_workloads_on_several_gpus_keep_their_modes_together(monkeypatch):
    order: dict[str, list[tuple[str, int]]] = {}

    def child(model: str, mode: str, args: argparse.Namespace, *, gpu: int) -> tuple[list[Any], int]:
        order.setdefault(model, []).append((mode, gpu))
        return [row(model, mode, 1.0)], 0

    monkeypatch.setattr(backend_step, "_child", child)
    args = backend_step.parse(["--device=cuda", "--gpus=2", "--kinds=fb", "--models=mlp,bert,eos"])
    rows = [r for new in backend_step.measured(args) for r in new]
    assert sorted((r["model"], r["mode"]) for r in rows) == sorted(
        (model, mode) for model in args.models for mode in args.modes
    )
    for asked in order.values():
        assert [mode for mode, _ in asked] == args.modes and len({gpu for _, gpu in asked}) == 1


def test_a_crash_is_a_row_and_the_next_mode_runs(monkeypatch):
    def refuse(*_: Any) -> Any:
        raise RuntimeError("out of something")

    args = backend_step.parse(["--scale=tiny", "--device=cpu", "--timeout-s=0"])
    with monkeypatch.context() as patch:
        patch.setattr(backend_step, "build", refuse)
        crashed = backend_step.measure("mlp", "eager", args)
    assert [r["error"] for r in crashed] == ["RuntimeError: out of something"] * 2
    assert all(r["error"] is None for r in backend_step.measure("mlp", "eager", args))


def test_a_workload_without_parameters_has_no_optimizer_step():
    args = backend_step.parse(["--scale=tiny", "--device=cpu", "--timeout-s=0"])
    forward_backward, step = backend_step.measure("eos", "eager", args)
    assert forward_backward["ms"] > 0 and "no parameters" in step["skipped"]


def test_a_run_that_was_ended_goes_on_with_the_workloads_it_lacks(monkeypatch, tmp_path):
    asked = []
    ends = [("mlp", "pygraph")]  # the last mode of the second workload

    def child(model: str, mode: str, args: argparse.Namespace, **_: Any) -> tuple[list[Any], int]:
        if (model, mode) in ends:
            raise KeyboardInterrupt(ends.pop())
        asked.append((model, mode))
        return [row(model, mode, 1.0)], 0

    monkeypatch.setattr(backend_step, "_child", child)
    monkeypatch.setattr(torch, "set_float32_matmul_precision", lambda precision: None)
    path = tmp_path / "rows.json"
    command = ["--scale=tiny", "--device=cpu", "--kinds=fb", "--models=bert,mlp"]
    command += ["--modes=default,eager,pygraph", f"--json={path}"]
    with pytest.raises(KeyboardInterrupt):
        backend_step.main([*command, "--resume"])  # there is no file yet: it begins
    del asked[3:]
    whole = [(model, mode) for model in ("bert", "mlp") for mode in ("default", "eager", "pygraph")]
    for _ in range(2):  # the second time nothing is left to measure
        backend_step.main([*command, "--resume"])
        assert asked == whole
    assert [(r["model"], r["mode"]) for r in json.loads(path.read_text())["rows"]] == whole

    record = json.loads(path.read_text())
    record["environment"]["torch"] = "1.0"
    path.write_text(json.dumps(record))
    with pytest.raises(SystemExit, match="measured with another torch; name another --json file"):
        backend_step.main([*command, "--resume"])
