"""What one replayed step costs the host: time until `GraphedStep` returns, in short bursts.

    python -m benchmarks.host_cost --json host.json            # one CUDA GPU
    python -m benchmarks.host_cost --scale tiny                # does the script work? (CPU)

benchmarks/README.md says what the columns mean.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from benchmarks.command import NO_CLAIM, new_record, settle_choices, settle_device
from benchmarks.record import DASH, print_table, write_json
from benchmarks.workloads import Batch, build_training
from pygraph_train import GraphedStep, PyGraphConfig

MODELS = ("mlp", "bert")
KERNELS = ("eager", "compiled")
BURST = 4
PARTS = {
    "cuda": {
        "batch in": ("pygraph_train.core.recording", "RecordedRegion", "_load"),
        "launch": ("pygraph_train.graphs.cuda_graph", "CudaGraph", "replay"),
    },
}
PARTS["cpu"] = PARTS["cuda"] | {"launch": ("pygraph_train.graphs.emulated", "EmulatedGraph", "replay")}
STEADY_STEPS = 20  # steps after the first replay before the calls are timed


def measure(model: str, kernels: str, args: argparse.Namespace) -> dict[str, Any]:
    """One row: host microseconds of `args.calls` calls. A crash is part of the row, never raised."""
    row: dict[str, Any] = {"model": model, "kernels": kernels, "error": None}
    torch._dynamo.reset()
    gc.collect()
    try:
        row.update(_measure(model, kernels, args))
    except Exception as error:
        row["error"] = f"{type(error).__name__}: {error}"[:2000]
    return row


def _measure(model: str, kernels: str, args: argparse.Namespace) -> dict[str, Any]:
    device = torch.device(args.device)
    step, batches, row = prepared(model, kernels, args)
    times: list[float] = []
    while len(times) < args.calls:
        times += host_us(step, batches, device)
    row["median_us"] = statistics.median(times)
    row["p90_us"] = statistics.quantiles(times, n=10)[-1]
    row["min_us"] = min(times)
    row["parts_us"] = parts_us(step, batches, device, args.calls)
    row["report"] = step.report().to_dict()
    return row


def parts_us(step: GraphedStep, batches: list[Batch], device: torch.device, calls: int) -> dict[str, float]:
    """Median microseconds of what the device asks for (`PARTS`), and of all the rest, in further calls."""
    spent: dict[str, float] = {}
    whole: list[float] = []
    each: dict[str, list[float]] = {}
    with ExitStack() as stack:
        for part, (module, owner, method) in PARTS[device.type].items():
            with suppress(ImportError, AttributeError):  # another version of the library
                stack.enter_context(
                    _timed(getattr(importlib.import_module(module), owner), method, part, spent)
                )
        while len(whole) < calls:
            for keep, us in _burst(step, batches, device, spent):
                if keep:
                    whole.append(us - sum(spent.values()))
                    for part, seconds in spent.items():
                        each.setdefault(part, []).append(seconds)
    return {part: statistics.median(times) for part, times in (each | {"rest": whole}).items()}


@contextmanager
def _timed(owner: type, method: str, part: str, spent: dict[str, float]) -> Iterator[None]:
    """Inside, `spent[part]` is the time of all calls of a method since `spent` was emptied."""
    own = owner.__dict__[method]

    def timed(self: Any, *args: Any) -> Any:
        start = time.perf_counter()
        try:
            return own(self, *args)
        finally:
            spent[part] = spent.get(part, 0.0) + (time.perf_counter() - start) * 1e6

    setattr(owner, method, timed)
    try:
        yield
    finally:
        setattr(owner, method, own)


def prepared(
    model: str, kernels: str, args: argparse.Namespace
) -> tuple[GraphedStep, list[Batch], dict[str, Any]]:
    """A step that has been replayed for a while, its batches, and a row that says whether it was."""
    device = torch.device(args.device)
    training = build_training(model, args.scale, device)
    batches = training.batches
    engine = "cuda" if device.type == "cuda" else "emulated"
    config = PyGraphConfig(compile=kernels == "compiled", engine=engine)
    step = GraphedStep(training.loss, model=training.module, optimizer=training.optimizer, config=config)
    row: dict[str, Any] = {"warmup_steps": 0, "steady": False}
    while not row["steady"] and row["warmup_steps"] < args.max_warmup:
        for _ in range(10):
            step(batches[row["warmup_steps"] % len(batches)])
            row["warmup_steps"] += 1
        first = step.report().to_dict().get("first_replay_step")
        row["steady"] = first is not None and row["warmup_steps"] >= first + STEADY_STEPS
    return step, batches, row


def host_us(step: GraphedStep, batches: list[Batch], device: torch.device) -> list[float]:
    """Microseconds of the calls of one burst that count.

    The first calls after the wait find cold caches and a sleeping processor; they are left out.
    """
    return [us for keep, us in _burst(step, batches, device) if keep]


def _burst(
    step: GraphedStep, batches: list[Batch], device: torch.device, spent: dict[str, float] | None = None
) -> Iterator[tuple[bool, float]]:
    """Calls that follow each other as in training, short enough not to fill the launch queue."""
    if device.type == "cuda":
        torch.cuda.synchronize()  # a full launch queue would make a call wait for the GPU
    for i in range(BURST):
        if spent is not None:
            spent.clear()
        start = time.perf_counter()
        step(batches[i % len(batches)])
        yield i >= BURST // 2, (time.perf_counter() - start) * 1e6


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", default=",".join(MODELS), help=f"of {', '.join(MODELS)} (default: both)")
    parser.add_argument("--kernels", help=f"of {', '.join(KERNELS)} (default: both; CPU: eager)")
    parser.add_argument("--calls", type=int, default=300, help="timed calls")
    parser.add_argument("--max-warmup", type=int, default=300, help="most steps before timing")
    parser.add_argument("--scale", choices=("full", "tiny"), default="full")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument("--json", type=Path, help="write rows and environment there, after each row")
    args = parser.parse_args(argv)
    settle_device(parser, args)
    if args.calls < 2:
        parser.error("--calls: a median and a 90th percentile need at least 2")
    args.kernels = args.kernels or ("eager" if args.device == "cpu" else ",".join(KERNELS))
    settle_choices(parser, args, models=MODELS, kernels=KERNELS)
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print one table, write the JSON. Returns 1 if any row crashed."""
    args = parse(argv)
    torch.set_float32_matmul_precision("high")
    rows: list[dict[str, Any]] = []
    record = new_record("host_cost", args) | {"rows": rows}
    title = "Host time of one replayed step, µs" if record["timing_claim"] else NO_CLAIM
    for model in args.models:
        for kernels in args.kernels:
            rows.append(measure(model, kernels, args))
            write_json(args.json, record)
            if rows[-1]["error"]:
                print(f"{model} {kernels}: {rows[-1]['error'].splitlines()[0]}", flush=True)
    print_table(
        title, ["model", "kernels", "median", "p90", "min", "replayed"], [_cells(row) for row in rows]
    )
    for row in rows:
        if row.get("parts_us"):
            parts = ", ".join(f"{part} {us:.1f}" for part, us in row["parts_us"].items())
            print(f"{row['model']} {row['kernels']}: {parts}")
    return int(any(row["error"] for row in rows))


def _cells(row: dict[str, Any]) -> list[str]:
    if row["error"]:
        return [row["model"], row["kernels"], "crash", DASH, DASH, DASH]
    times = [f"{row[key]:.1f}" for key in ("median_us", "p90_us", "min_us")]
    return [row["model"], row["kernels"], *times, "yes" if row["steady"] else "NO"]


if __name__ == "__main__":
    raise SystemExit(main())
