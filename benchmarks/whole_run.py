"""Whole runs in a stock Lightning Trainer, with cold caches: from the first step to the last.

    python -m benchmarks.whole_run --json whole.json                              # one CUDA GPU
    python -m benchmarks.whole_run --models bert --arms eager,defaults --steps 1000
    python -m benchmarks.whole_run --scale tiny                                   # does the script work? (CPU)

Each row is a process of its own. benchmarks/README.md says what the columns mean.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

from benchmarks.changing_shapes import batches_of, loss_of, model_of
from benchmarks.children import row_of_process
from benchmarks.command import NO_CLAIM, new_record, settle_choices, settle_defaults, settle_device
from benchmarks.lightning_step import COMPILE_OPTIONS, CycledBatches, TrainedModule
from benchmarks.record import DASH, print_table, write_json
from benchmarks.workloads import WORKLOADS, Workload, build
from pygraph_train import PyGraphCallback

OPTIONS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "compile=False": {"compile": False},
    "compile=True": {"compile": True},
}
OTHERS = ("eager", *COMPILE_OPTIONS)
ARMS = ("defaults", "compile=False", "compile=True", *OTHERS)

MODELS = (*WORKLOADS, "lengths")
"""`lengths` is the model of `changing_shapes.py` on batches of 49 lengths."""

Row = dict[str, Any]


class Clock(pl.Callback):
    """Times windows of steps, from the moment before the first step on. Stops the fit after `last` steps."""

    def __init__(self, window: int, last: int, cuda: bool) -> None:
        self.window, self.last, self.cuda = window, last, cuda
        self.windows_s: list[float] = []
        self.made = 0
        self._border = 0.0

    def on_train_batch_start(self, *_: Any) -> None:
        if not self.made:
            self._border = self._now()

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.made += 1
        if self.made % self.window == 0:
            now = self._now()
            self.windows_s.append(now - self._border)
            self._border = now
        if self.made >= self.last:
            trainer.should_stop = True

    def _now(self) -> float:
        if self.cuda:
            torch.cuda.synchronize()
        return time.perf_counter()


def workload_of(model: str, args: argparse.Namespace) -> Workload:
    """A model with its batches."""
    if model != "lengths":
        return build(model, args.scale)
    return Workload(model_of("49", args.scale), list(batches_of("49", args.scale, args.steps)), loss_of)


def run_row(model: str, arm: str, args: argparse.Namespace) -> Row:
    """One row, in this process."""
    pl.seed_everything(0, verbose=False)
    cuda, workload = args.device == "cuda", workload_of(model, args)
    last = args.plain_steps if arm in OTHERS else args.steps
    clock, pygraph = Clock(args.window, min(last, args.steps), cuda), None
    if arm in OPTIONS:
        pygraph = PyGraphCallback(engine="cuda" if cuda else "emulated", **OPTIONS[arm])
    trainer = pl.Trainer(
        accelerator="gpu" if cuda else "cpu",
        devices=1,
        precision="bf16-mixed",
        max_steps=args.steps,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
        callbacks=[clock] if pygraph is None else [pygraph, clock],
    )
    trainer.fit(TrainedModule(workload, arm), DataLoader(CycledBatches(workload.batches), batch_size=None))
    steady_s = statistics.median(clock.windows_s[len(clock.windows_s) // 2 :])
    left = (args.steps - clock.made) / args.window
    row: Row = {
        "whole_s": sum(clock.windows_s) + left * steady_s,
        "steps_made": clock.made,
        "steady_ms": steady_s / args.window * 1e3,
        "windows_ms": [seconds / args.window * 1e3 for seconds in clock.windows_s],
        "reserved_mib": torch.cuda.max_memory_reserved() >> 20 if cuda else None,
    }
    if pygraph is not None:
        told = pygraph.report().to_dict()
        names = ("plan", "running_plan", "first_replay_step", "steps_replayed")
        row |= {name: told.get(name) for name in names}
    return row


def measure(model: str, arm: str, args: argparse.Namespace) -> Row:
    """One row, in a process of its own with cold caches. A crash or a time-out is part of the row."""
    options = [
        f"--{name}={getattr(args, name.replace('-', '_'))}" for name in ("steps", "plain-steps", "window")
    ]
    options += ["--scale", args.scale, "--device", args.device]
    found = row_of_process("benchmarks.whole_run", (model, arm), options, args.timeout_s)
    return {"model": model, "arm": arm, "steps": args.steps, **found}


def summarize(rows: Sequence[Row]) -> dict[str, Any]:
    """For each model: the run with defaults over the better of both options, and over the best of the others."""
    found: dict[str, Any] = {}
    for model in dict.fromkeys(row["model"] for row in rows):
        whole = {row["arm"]: row["whole_s"] for row in rows if row["model"] == model and not row["error"]}
        ours = whole.get("defaults")
        found[model] = {
            "over_the_better_option": _over(ours, [whole.get("compile=False"), whole.get("compile=True")]),
            "over_the_best_of_the_others": _over(ours, [whole.get(arm) for arm in OTHERS]),
        }
    return found


def _over(ours: float | None, others: Sequence[float | None]) -> float | None:
    known = [seconds for seconds in others if seconds is not None]
    return ours / min(known) if ours is not None and known else None


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", default="bert,gpt2", help=f"of {', '.join(MODELS)}")
    parser.add_argument("--arms", default=",".join(ARMS), help=f"of {', '.join(ARMS)} (default: all)")
    parser.add_argument("--steps", type=int, help="of a run (default: 3000; CPU: 60)")
    parser.add_argument(
        "--plain-steps",
        type=int,
        help="that are made without the library; others take as long (600; CPU: 20)",
    )
    parser.add_argument(
        "--window", type=int, help="steps between two looks at the clock (default: 20; CPU: 5)"
    )
    parser.add_argument("--timeout-s", type=int, default=300, help="for each row; 0: none")
    parser.add_argument("--scale", choices=("full", "tiny"), default="full")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument("--json", type=Path, help="write rows and environment there, after each row")
    parser.add_argument("--row", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    settle_device(parser, args)
    settle_choices(parser, args, models=MODELS, arms=ARMS)
    settle_defaults(args, steps=(3000, 60), plain_steps=(600, 20), window=(20, 5))
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print one table, write the JSON. Returns 1 if any row crashed."""
    args = parse(argv)
    if args.row is not None:
        model, arm, out = args.row
        Path(out).write_text(json.dumps(run_row(model, arm, args)))
        return 0
    record = new_record("whole_run", args) | {"rows": [], "summary": {}}
    for model in args.models:
        for arm in args.arms:
            record["rows"].append(measure(model, arm, args))
            record["summary"] = summarize(record["rows"])
            write_json(args.json, record)
            print("  ".join(_cells(record["rows"][-1])), flush=True)
    title = f"Runs of {args.steps} steps" if record["timing_claim"] else NO_CLAIM
    columns = ["model", "arm", "whole s", "steady ms", "first replay", "plan", "reserved MiB"]
    print_table(title, columns, list(map(_cells, record["rows"])))
    print(record["summary"])
    return int(any(row["error"] for row in record["rows"]))


def _cells(row: Row) -> list[str]:
    if row["error"]:
        return [row["model"], row["arm"], row["error"].splitlines()[-1][:60], *[DASH] * 4]
    keys = ("first_replay_step", "running_plan", "reserved_mib")
    told = [DASH if row.get(key) is None else str(row[key]) for key in keys]
    return [row["model"], row["arm"], f"{row['whole_s']:.1f}", f"{row['steady_ms']:.2f}", *told]


if __name__ == "__main__":
    raise SystemExit(main())
