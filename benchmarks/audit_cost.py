"""What audits (`verify="sample"`) cost: the time of one, and their share of a run.

    python -m benchmarks.audit_cost --json audits.json          # one CUDA GPU
    python -m benchmarks.audit_cost --scale tiny                # does the script work? (CPU)

benchmarks/README.md says what the columns mean.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks.command import NO_CLAIM, new_record, settle_choices, settle_device
from benchmarks.record import DASH, print_table, write_json
from benchmarks.workloads import Training, build_training
from pygraph_train import GraphedStep, PyGraphConfig
from pygraph_train.verification import Audits

MODELS = ("mlp", "bert")
FORCED = 5  # audits whose time is taken


def measure(model: str, args: argparse.Namespace) -> dict[str, Any]:
    """One row. A crash is part of the row, never raised."""
    row: dict[str, Any] = {"model": model, "error": None}
    torch._dynamo.reset()
    try:
        row.update(_measure(model, args))
    except Exception as error:
        row["error"] = f"{type(error).__name__}: {error}"[:2000]
    return row


def _measure(model: str, args: argparse.Namespace) -> dict[str, Any]:
    device = torch.device(args.device)
    training = build_training(model, args.scale, device)
    batches = training.batches

    def run(count: int) -> float:
        """Seconds of so many steps."""
        started = time.perf_counter()
        for i in range(count):
            step(batches[i % len(batches)])
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - started

    engine = "cuda" if device.type == "cuda" else "emulated"
    step = _graphed(training, engine)
    report = step.report()
    run(60)
    step_seconds = statistics.median(run(20) / 20 for _ in range(5))
    forced = []
    with mock.patch.object(Audits, "SHARE", math.inf):
        while len(forced) < FORCED:
            before, audits = report.verify_seconds, report.audits
            run(1)
            if report.audits > audits:
                forced.append(report.verify_seconds - before)
    step.close()
    return {"step_ms": 1e3 * step_seconds, "audit_ms": 1e3 * statistics.median(forced)} | _whole_run(
        training, engine, args.seconds
    )


def _graphed(training: Training, engine: str) -> GraphedStep:
    return GraphedStep(
        training.loss,
        model=training.module,
        optimizer=training.optimizer,
        config=PyGraphConfig(compile=False, engine=engine),
    )


def _whole_run(training: Training, engine: str, seconds: float) -> dict[str, Any]:
    """A run of its own, as a user's: how many audits it makes, and their share of its time after the capture."""
    step = _graphed(training, engine)
    report, started, count, first = step.report(), 0.0, 0, 0.0
    while not started or time.perf_counter() - started < seconds:
        step(training.batches[count % len(training.batches)])
        count += 1
        if not started and report.steps_replayed:
            started, first = time.perf_counter(), report.verify_seconds
        if count % 50 == 0 and engine == "cuda":
            torch.cuda.synchronize()  # the clock is the host's
    elapsed = time.perf_counter() - started
    spent = report.verify_seconds - first
    return {
        "steps": count,
        "replayed": report.steps_replayed,
        "run_s": elapsed,
        "audits": report.audits,
        "audits_s": spent,
        "share": spent / elapsed,
        "report": report.to_dict(),
    }


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", default=",".join(MODELS), help=f"of {', '.join(MODELS)} (default: both)")
    parser.add_argument("--seconds", type=float, default=30.0, help="of the run whose share is taken")
    parser.add_argument("--scale", choices=("full", "tiny"), default="full")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument("--json", type=Path, help="write rows and environment there, after each row")
    args = parser.parse_args(argv)
    settle_device(parser, args)
    settle_choices(parser, args, models=MODELS)
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print one table, write the JSON. Returns 1 if any row crashed."""
    args = parse(argv)
    rows: list[dict[str, Any]] = []
    record = new_record("audit_cost", args) | {"rows": rows}
    for model in args.models:
        rows.append(measure(model, args))
        write_json(args.json, record)
        if rows[-1]["error"]:
            print(f"{model}: {rows[-1]['error'].splitlines()[0]}", flush=True)
    title = "What audits cost" if record["timing_claim"] else NO_CLAIM
    header = ["model", "step ms", "audit ms", "run s", "audits", "share %"]
    print_table(title, header, [_cells(row) for row in rows])
    return int(any(row["error"] for row in rows))


def _cells(row: dict[str, Any]) -> list[str]:
    if row["error"]:
        return [row["model"], "crash", DASH, DASH, DASH, DASH]
    return [
        row["model"],
        f"{row['step_ms']:.2f}",
        f"{row['audit_ms']:.1f}",
        f"{row['run_s']:.1f}",
        str(row["audits"]),
        f"{100 * row['share']:.3f}",
    ]


if __name__ == "__main__":
    raise SystemExit(main())
