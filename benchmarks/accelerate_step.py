"""Step time, memory and losses of an Accelerate loop: eager, dynamo_backend, reduce-overhead, PyGraph.

    python -m benchmarks.accelerate_step --json accelerate.json               # one CUDA GPU
    python -m benchmarks.accelerate_step --models bert --modes inductor,graphed-step
    python -m benchmarks.accelerate_step --accumulate 4                       # the loop of pytorch #169545
    python -m benchmarks.accelerate_step --scale tiny                         # does the script work? (CPU)

Every mode runs the same loop under bf16 with outputs converted to fp32 (accelerate #2645): model, loss,
`accelerator.backward`, `optimizer.step`, `zero_grad`. `pygraph` is that loop with the plugin; `graphed-step` has the
body in `accelerator.graphed_step`. Batches are on the device.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import accelerate
import torch
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import TorchDynamoPlugin

from benchmarks.command import (
    NO_CLAIM,
    measured_rows,
    new_record,
    settle_choices,
    settle_defaults,
    settle_device,
    told_in,
)
from benchmarks.graph_coverage import profiled
from benchmarks.record import DASH, print_table, write_json
from benchmarks.workloads import WORKLOADS, Batch, Workload, build
from pygraph_train import Accelerator, PyGraph

Row = dict[str, Any]

TRIAL_OVER = 40
"""Replays after which graphs have been timed."""

# reduce-overhead comes last: it warms up in a stream of its own, which slows every later graph of the process
MODES = ("eager", "inductor", "pygraph", "graphed-step", "reduce-overhead")
KEPT_LOSSES = 20
MIB = 2**20


def make_accelerator(mode: str, args: argparse.Namespace) -> Any:
    """The Accelerator of a mode. Accelerate keeps its state in class attributes: it is reset first."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    options: dict[str, Any] = {
        "cpu": args.device == "cpu",
        "mixed_precision": "bf16",
        "gradient_accumulation_steps": args.accumulate,
    }
    if mode in ("pygraph", "graphed-step"):
        engine = "cuda" if args.device == "cuda" else "emulated"
        compile_ = True if mode == "graphed-step" else "auto"
        return Accelerator(plugins=[PyGraph(engine=engine, compile=compile_)], **options)
    if mode == "inductor":
        return accelerate.Accelerator(dynamo_backend="inductor", **options)
    if mode == "reduce-overhead":
        plugin = TorchDynamoPlugin(backend="inductor", mode="reduce-overhead")
        return accelerate.Accelerator(dynamo_plugin=plugin, **options)
    return accelerate.Accelerator(**options)


class Trial:
    """One workload in one mode; `iterate()` is one micro-batch."""

    def __init__(self, workload: Workload, mode: str, args: argparse.Namespace) -> None:
        self.accelerator = make_accelerator(mode, args)
        self.device = self.accelerator.device
        optimizer = torch.optim.AdamW(workload.module.parameters(), lr=1e-4, fused=True)
        self.model, self.optimizer = self.accelerator.prepare(workload.module, optimizer)
        self.batches: Iterator[Batch] = itertools.cycle(
            [{k: v.to(self.device) for k, v in batch.items()} for batch in workload.batches]
        )
        self.loss_of = workload.loss
        self.marks_steps = mode == "reduce-overhead"
        self.graphed = self.accelerator.graphed_step(self.step) if mode == "graphed-step" else self.step
        self.plugin: PyGraph | None = getattr(self.accelerator, "pygraph", None)

    def step(self, batch: Batch) -> torch.Tensor:
        """The body of the loop."""
        with self.accelerator.accumulate(self.model):
            loss = self.loss_of(self.model, batch)
            self.accelerator.backward(loss)
            self.optimizer.step()
            self.optimizer.zero_grad()
        return loss.detach()

    def iterate(self) -> torch.Tensor:
        """One micro-batch, on the next batch."""
        if self.marks_steps:
            torch.compiler.cudagraph_mark_step_begin()
        return self.graphed(next(self.batches))

    def settled(self) -> bool:
        """Whether nothing more is going to be measured, compiled or captured."""
        if self.plugin is None:
            return True
        return self.plugin.report().steps_replayed >= TRIAL_OVER

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def measure(model: str, mode: str, args: argparse.Namespace) -> Row:
    """One row. A crash or a time-out is part of the row, never raised."""
    row: Row = {"model": model, "mode": mode, "error": None, "skipped": None}
    if args.device == "cpu" and mode in ("inductor", "reduce-overhead"):
        return {**row, "skipped": "needs CUDA: on a CPU it would be compared with an emulation"}
    torch._dynamo.reset()
    _empty(args.device)
    trial: Trial | None = None
    with told_in(row, args.timeout_s):
        torch.manual_seed(0)
        trial = Trial(build(model, args.scale), mode, args)
        row.update(_measured(trial, args))
    if trial is not None:
        if trial.plugin is not None:
            row["report"] = trial.plugin.report().to_dict()
        trial.accelerator.free_memory()
    return row


def _measured(trial: Trial, args: argparse.Namespace) -> Row:
    start = time.perf_counter()
    losses = [trial.iterate() for _ in range(args.warmup)]
    trial.synchronize()
    row: Row = {"first_losses": torch.stack(losses).float().tolist()[:KEPT_LOSSES]}
    done = args.warmup
    while not (steady := trial.settled()) and done < args.max_warmup:
        for _ in range(10):
            trial.iterate()
        done += 10
    trial.synchronize()
    row |= {"warmup_steps": done, "warmup_s": time.perf_counter() - start, "steady": steady}
    row["reserved_warmup_mib"] = _memory("max_memory_reserved", trial.device)
    _empty(args.device)
    times = [_window(trial, args.steps) for _ in range(args.windows)]
    row |= {"step_ms": statistics.median(times), "windows_ms": times}
    for kind in ("reserved", "allocated"):
        row[f"{kind}_mib"] = _memory(f"max_memory_{kind}", trial.device)
    if args.device == "cuda":
        row.update(profiled(trial.iterate, 4 * args.accumulate))
    row["final_loss"] = float(trial.iterate())
    return row


def _window(trial: Trial, steps: int) -> float:
    """Milliseconds a micro-batch, by the wall clock."""
    trial.synchronize()
    start = time.perf_counter()
    for _ in range(steps):
        trial.iterate()
    trial.synchronize()
    return (time.perf_counter() - start) / steps * 1e3


def _empty(device: str) -> None:
    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def _memory(what: str, device: torch.device) -> int | None:
    return round(getattr(torch.cuda, what)() / MIB) if device.type == "cuda" else None


def summarize(rows: Sequence[Row], device: str) -> list[Row]:
    """One entry a model: times by mode, and ratios where both sides were measured on a GPU."""
    entries = []
    for model in dict.fromkeys(row["model"] for row in rows):
        of = {row["mode"]: row for row in rows if row["model"] == model}
        times = {mode: of.get(mode, {}).get("step_ms") for mode in MODES}
        busy = of.get("inductor", {}).get("busy_ms")

        def ratio(above: float | None, below: float | None) -> float | None:
            return above / below if device == "cuda" and above and below else None

        entry: Row = {"model": model, "step_ms": times, "busy_ms": busy}
        for mode in ("pygraph", "graphed-step"):
            entry[f"{mode}_over_busy"] = ratio(times[mode], busy)
            for other in ("eager", "reduce-overhead"):
                entry[f"{mode}_speedup_over_{other}"] = ratio(times[other], times[mode])
            entry[f"{mode}_reserved_ratio"] = ratio(
                of.get(mode, {}).get("reserved_mib"), of.get("inductor", {}).get("reserved_mib")
            )
            entry[f"{mode}_loss_gap"] = _loss_gap(
                of.get(mode), of.get("inductor" if device == "cuda" else "eager")
            )
        entries.append(entry)
    return entries


def _loss_gap(one: Row | None, other: Row | None) -> float | None:
    """The largest difference between the losses of the same step."""
    losses = [(row or {}).get("first_losses") for row in (one, other)]
    if not losses[0] or not losses[1]:
        return None
    return max(abs(a - b) for a, b in zip(losses[0], losses[1], strict=False))


def table(rows: Sequence[Row], device: str) -> tuple[list[str], list[list[str]]]:
    """Columns and cells of the closing table."""
    ratios = {
        "pygraph/eager": "pygraph_speedup_over_eager",
        "pygraph/r-o": "pygraph_speedup_over_reduce-overhead",
        "graphed-step/busy": "graphed-step_over_busy",
        "reserved": "graphed-step_reserved_ratio",
    }
    found = {(row["model"], row["mode"]): row for row in rows}
    lines = []
    for entry in summarize(rows, device):
        cells = [_cell(found.get((entry["model"], mode))) for mode in MODES]
        busy = DASH if entry["busy_ms"] is None else f"{entry['busy_ms']:.3f}"
        told = [DASH if entry[key] is None else f"{entry[key]:.2f}x" for key in ratios.values()]
        lines.append([entry["model"], *cells, busy, *told])
    return ["model", *MODES, "busy", *ratios], lines


def _cell(row: Row | None) -> str:
    if row is None or row["skipped"]:
        return DASH
    if row["error"]:
        return "time-out" if row["error"].startswith("timed out") else "crash"
    return f"{row['step_ms']:.3f}{'' if row['steady'] else ' unsteady'}"


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line, with the defaults of the device filled in."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", default="bert,mlp", help=f"of {', '.join(WORKLOADS)}")
    parser.add_argument("--modes", default=",".join(MODES), help="comma-separated (default: all)")
    parser.add_argument("--accumulate", type=int, default=1, help="gradient_accumulation_steps")
    parser.add_argument("--windows", type=int, help="timed windows (default: 5; CPU: 2)")
    parser.add_argument("--steps", type=int, help="micro-batches a window (default: 40; CPU: 4)")
    parser.add_argument("--warmup", type=int, help="least micro-batches before timing (default: 60; CPU: 12)")
    parser.add_argument("--max-warmup", type=int, help="most of them (default: 400; CPU: 60)")
    parser.add_argument("--scale", choices=("full", "tiny"), default="full")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument("--timeout-s", type=int, default=300, help="limit of one row; 0: none")
    parser.add_argument("--json", type=Path, help="write rows and environment there, after each row")
    args = parser.parse_args(argv)
    settle_choices(parser, args, models=list(WORKLOADS), modes=MODES)
    settle_device(parser, args)
    settle_defaults(args, windows=(5, 2), steps=(40, 4), warmup=(60, 12), max_warmup=(400, 60))
    if args.scale == "full" and (args.windows < 3 or args.steps < 40):
        parser.error("--scale full: a median needs at least 3 windows of at least 40 steps")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print one table, write the JSON. Returns 1 if any mode crashed or timed out."""
    args = parse(argv)
    torch.set_float32_matmul_precision("high")
    rows: list[Row] = []
    record = new_record("accelerate_step", args)
    record |= {"accumulate": args.accumulate, "rows": rows, "summary": []}
    record["environment"]["accelerate"] = accelerate.__version__
    title = "Accelerate training step, ms" if record["timing_claim"] else NO_CLAIM
    if not record["timing_claim"]:
        print(title)
    for row in measured_rows(args, measure):
        rows.append(row)
        record["summary"] = summarize(rows, args.device)
        write_json(args.json, record)
        told = row["skipped"] or (row["error"] or "").partition("\n")[0] or f"{_cell(row)} ms a step"
        print(f"{row['model']} {row['mode']}: {told}", flush=True)
    print_table(title, *table(rows, args.device))
    return int(any(row["error"] for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
