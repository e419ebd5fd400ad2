"""Step time, memory and losses of a stock Lightning Trainer: eager, compiled, reduce-overhead, PyGraph.

    python -m benchmarks.lightning_step --json results.json                   # one CUDA GPU, everything
    python -m benchmarks.lightning_step --models bert,mlp --modes compile,pygraph
    python -m benchmarks.lightning_step --scale tiny                          # does the script work? (CPU)

benchmarks/README.md says what the columns mean.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import statistics
import time
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader, IterableDataset

from benchmarks.command import (
    NO_CLAIM,
    begin_anew,
    measured_rows,
    new_parser,
    new_record,
    settle,
    settle_defaults,
    told_in,
)
from benchmarks.record import DASH, print_table, write_json
from benchmarks.workloads import WORKLOADS, Batch, Workload, build
from pygraph_train import PyGraphCallback

# reduce-overhead comes last: it warms up in a stream of its own, which slows every later graph of the process
MODES = ("eager", "compile", "pygraph-eager", "pygraph", "reduce-overhead")
COMPILE_OPTIONS: dict[str, dict[str, Any]] = {"compile": {}, "reduce-overhead": {"mode": "reduce-overhead"}}
BUSY_MODES = ("eager", "compile")  # modes whose GPU time is also profiled
BUSY_STEPS = 5
KEPT_LOSSES = 50
STEADY_STEPS = 20  # steps after the first replay before a pygraph mode counts as steady
DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
MIB = 2**20


class CycledBatches(IterableDataset):
    """The same few batches in turn, without end."""

    def __init__(self, batches: list[Batch]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Batch]:
        return itertools.cycle(self.batches)


class TrainedModule(pl.LightningModule):
    """The workload as a user would write it; `mode` compiles the forward with the loss, or nothing."""

    def __init__(self, workload: Workload, mode: str) -> None:
        super().__init__()
        self.net = workload.module
        self.batches, self.loss_function = workload.batches, workload.loss
        self.forward_and_loss = self._forward_and_loss
        if mode in COMPILE_OPTIONS:
            self.forward_and_loss = torch.compile(self._forward_and_loss, **COMPILE_OPTIONS[mode])

    def _forward_and_loss(self, batch: Batch) -> torch.Tensor:
        return self.loss_function(self.net, batch)

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        loss = self.forward_and_loss(batch)
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4, fused=True)


class Measurement(pl.Callback):
    """Warm up, time whole windows of steps, optionally profile a few more steps, stop the fit.

    Args:
        args: the command line, which has the numbers of steps and windows.
        pygraph: the callback that must have replayed `STEADY_STEPS` steps ago before timing starts.
        busy: profile the GPU's work after the windows.
    """

    def __init__(self, args: argparse.Namespace, pygraph: PyGraphCallback | None, *, busy: bool) -> None:
        self.warmup, self.max_warmup = args.warmup, args.max_warmup
        self.windows, self.steps = args.windows, args.steps
        self.pygraph, self.busy, self.cuda = pygraph, busy, args.device == "cuda"
        self.wait = torch.get_device_module(args.device).synchronize
        self.done = 0  # training steps so far
        self.timed_from: int | None = None
        self.steady = True
        self.windows_ms: list[float] = []
        self.memory: dict[str, int] = {}
        self.busy_ms: float | None = None
        self.device_events: float | None = None
        self._border = 0.0
        self._losses: list[torch.Tensor] = []
        self._final_loss: torch.Tensor | None = None
        self._profile: profile | None = None

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, *_: Any
    ) -> None:
        self.done += 1
        if len(self._losses) < KEPT_LOSSES:
            self._losses.append(outputs["loss"].detach())
        if self.timed_from is None:
            if self._warm():
                self._start_timing()
            return
        since = self.done - self.timed_from
        if since <= self.windows * self.steps and since % self.steps == 0:
            self._end_window()
        if since == self.windows * self.steps:
            self._read_memory("after_warmup")
            if self.busy:
                self._profile = profile(activities=[ProfilerActivity.CUDA])
                self._profile.start()
            else:
                self._finish(trainer, outputs)
        elif since == self.windows * self.steps + BUSY_STEPS:
            self._read_busy()
            self._finish(trainer, outputs)

    def on_exception(self, *_: Any) -> None:
        if self._profile is not None:  # left running, it would break the next one
            self._profile.stop()

    def results(self) -> dict[str, Any]:
        """What was measured so far; also valid after a fit that crashed or timed out."""
        median = statistics.median(self.windows_ms) if len(self.windows_ms) == self.windows else None
        return {
            "step_ms": median,
            "windows_ms": self.windows_ms,
            "busy_ms": self.busy_ms,
            "device_events": self.device_events,
            "warmup_steps": self.timed_from,
            "steady": self.steady,
            "steps_run": self.done,
            **self.memory,
        }

    def losses(self) -> dict[str, Any]:
        """The first losses and the last one, read from the device: call it after the fit."""
        first = torch.stack(self._losses).float().tolist() if self._losses else []
        final = None if self._final_loss is None else float(self._final_loss)
        return {"first_losses": first, "final_loss": final, "final_step": self.done}

    def _warm(self) -> bool:
        if self.done < self.warmup:
            return False
        if self.done >= self.max_warmup:
            self.steady = self._replaying()
            return True
        # a report may cost more than a step: do not ask for it at each one
        return (self.done - self.warmup) % 10 == 0 and self._replaying()

    def _replaying(self) -> bool:
        if self.pygraph is None:
            return True
        first = self.pygraph.report().to_dict().get("first_replay_step")
        return first is not None and self.done >= first + STEADY_STEPS

    def _start_timing(self) -> None:
        self.wait()
        self._read_memory("warmup")
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
        self.timed_from = self.done
        self._border = time.perf_counter()

    def _end_window(self) -> None:
        self.wait()
        now = time.perf_counter()
        self.windows_ms.append((now - self._border) / self.steps * 1e3)
        self._border = now

    def _finish(self, trainer: pl.Trainer, outputs: Any) -> None:
        self._final_loss = outputs["loss"].detach()
        trainer.should_stop = True

    def _read_memory(self, when: str) -> None:
        if self.cuda:
            self.memory[f"reserved_{when}_mib"] = round(torch.cuda.max_memory_reserved() / MIB)
            self.memory[f"allocated_{when}_mib"] = round(torch.cuda.max_memory_allocated() / MIB)

    def _read_busy(self) -> None:
        assert self._profile is not None
        self.wait()
        self._profile.stop()
        work = [e for e in self._profile.events() if _is_device_work(e)]
        if work:  # none at all means that the profiler saw nothing, not that the GPU rested
            self.busy_ms = sum(e.time_range.elapsed_us() for e in work) / BUSY_STEPS / 1e3
            self.device_events = len(work) / BUSY_STEPS
        self._profile = None


def _is_device_work(event: Any) -> bool:
    """A kernel, memcpy or memset; annotations and synchronisations are on the GPU's time line as well."""
    if event.device_type != torch.autograd.DeviceType.CUDA or getattr(event, "is_user_annotation", False):
        return False
    kind = getattr(event, "activity_type", None)  # torch 2.11 does not say
    return kind is None or kind in DEVICE_WORK


def callback_of(mode: str, device: str) -> PyGraphCallback | None:
    """The library's callback, in the modes that have one."""
    if not mode.startswith("pygraph"):
        return None
    return PyGraphCallback(compile=mode == "pygraph", engine="cuda" if device == "cuda" else "emulated")


def train(module: TrainedModule, measurement: Measurement, args: argparse.Namespace) -> None:
    """Fit in a Trainer, until the measurement ends it."""
    trainer = pl.Trainer(
        accelerator="gpu" if measurement.cuda else "cpu",
        devices=1,
        precision="bf16-mixed",
        max_steps=args.max_warmup + args.windows * args.steps + BUSY_STEPS,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
        callbacks=[c for c in (measurement.pygraph, measurement) if c is not None],
    )
    trainer.fit(module, DataLoader(CycledBatches(module.batches), batch_size=None))


def measure(model: str, mode: str, args: argparse.Namespace) -> dict[str, Any]:
    """One row: train `model` in `mode`. A crash or a time-out is part of the row, never raised."""
    row: dict[str, Any] = {"model": model, "mode": mode, "error": None, "skipped": None}
    if args.device == "cpu" and mode in COMPILE_OPTIONS:
        return row | {"skipped": "needs CUDA: on a CPU it would be compared with an emulation"}
    cuda = args.device == "cuda"
    begin_anew(args.device)
    if cuda:
        row["reserved_before_mib"] = round(torch.cuda.memory_reserved() / MIB)
    measurement: Measurement | None = None
    pygraph: PyGraphCallback | None = None
    with told_in(row, args.timeout_s):
        pl.seed_everything(0, verbose=False)
        workload = build(model, args.scale)
        pygraph = callback_of(mode, args.device)
        measurement = Measurement(args, pygraph, busy=cuda and mode in BUSY_MODES)
        train(TrainedModule(workload, mode), measurement, args)
        row.update(measurement.losses())
    if measurement is not None:
        row.update(measurement.results())
    if pygraph is not None:
        row.update(_replay_facts(pygraph))
    if "reserved_warmup_mib" in row:
        for kind in ("reserved", "allocated"):
            parts = [row.get(f"{kind}_{when}_mib", 0) for when in ("warmup", "after_warmup")]
            row[f"{kind}_whole_fit_mib"] = max(parts)
    return row


def _replay_facts(pygraph: PyGraphCallback) -> dict[str, Any]:
    try:
        report = pygraph.report().to_dict()
    except Exception as error:
        return {"report_error": f"{type(error).__name__}: {error}"[:2000]}
    keys = ("first_replay_step", "first_replay_seconds")
    return {**{key: report.get(key) for key in keys}, "report": report}


def summarize(rows: Sequence[dict[str, Any]], device: str) -> list[dict[str, Any]]:
    """One entry a model: times by mode, and ratios where both sides were measured on a GPU."""
    models = dict.fromkeys(row["model"] for row in rows)
    return [
        _summary({row["mode"]: row for row in rows if row["model"] == model}, model, device)
        for model in models
    ]


def _summary(by_mode: dict[str, dict[str, Any]], model: str, device: str) -> dict[str, Any]:
    def value(mode: str, key: str) -> float | None:
        return by_mode.get(mode, {}).get(key)

    def ratio(above: float | None, below: float | None) -> float | None:
        return above / below if device == "cuda" and above is not None and below else None

    times = {mode: value(mode, "step_ms") for mode in MODES}
    busy = value("compile", "busy_ms")
    entry: dict[str, Any] = {
        "model": model,
        "step_ms": times,
        "busy_ms": busy,
        "eager_busy_ms": value("eager", "busy_ms"),
        "pygraph_over_busy": ratio(times["pygraph"], busy),
        "speedup_over_reduce_overhead": ratio(times["reduce-overhead"], times["pygraph"]),
    }
    for when in ("after_warmup", "whole_fit"):
        key = f"reserved_{when}_mib"
        entry[f"reserved_ratio_{when}"] = ratio(value("pygraph", key), value("compile", key))
    for one, other in (("pygraph-eager", "eager"), ("pygraph", "compile")):
        gap = _loss_gap(by_mode.get(one), by_mode.get(other))
        entry[f"loss_gap_{one.replace('-', '_')}_vs_{other}"] = gap
    return entry


def _loss_gap(one: dict[str, Any] | None, other: dict[str, Any] | None) -> float | None:
    """The largest difference between the losses of the same step; nan if either has one."""
    losses = [row.get("first_losses") if row else None for row in (one, other)]
    if not losses[0] or not losses[1]:
        return None
    count = min(len(kept) for kept in losses)
    gap = (torch.tensor(losses[0][:count]) - torch.tensor(losses[1][:count])).abs().max()
    return float(gap)


def table(rows: Sequence[dict[str, Any]], device: str) -> tuple[list[str], list[list[str]]]:
    """Columns and cells of the closing table."""
    columns = ["model", *MODES, "busy", "pygraph/busy", "vs reduce-overhead", "reserved pygraph/compile"]
    found = {(row["model"], row["mode"]): row for row in rows}
    lines = []
    for entry in summarize(rows, device):
        ratios = ("pygraph_over_busy", "speedup_over_reduce_overhead", "reserved_ratio_after_warmup")
        lines.append(
            [
                entry["model"],
                *(_cell(found.get((entry["model"], mode))) for mode in MODES),
                DASH if entry["busy_ms"] is None else f"{entry['busy_ms']:.3f}",
                *(DASH if entry[key] is None else f"{entry[key]:.2f}x" for key in ratios),
            ]
        )
    return columns, lines


def _cell(row: dict[str, Any] | None) -> str:
    if row is None or row["skipped"]:
        return DASH
    if row["error"]:
        return "time-out" if row["error"].startswith("timed out") else "crash"
    if row.get("step_ms") is None:
        return DASH
    never_replayed = row["mode"].startswith("pygraph") and row.get("first_replay_step") is None
    mark = " no replay" if never_replayed else "" if row["steady"] else " unsteady"
    return f"{row['step_ms']:.3f}{mark}"


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line, with the defaults of the device filled in."""
    parser = new_parser(__doc__)
    parser.add_argument("--models", default=",".join(WORKLOADS), help="comma-separated (default: all)")
    parser.add_argument("--modes", default=",".join(MODES), help="comma-separated (default: all)")
    parser.add_argument("--windows", type=int, help="timed windows (default: 5; CPU: 2)")
    parser.add_argument("--steps", type=int, help="steps a window (default: 40; CPU: 5)")
    parser.add_argument("--warmup", type=int, help="least steps before timing (default: 60; CPU: 8)")
    parser.add_argument("--max-warmup", type=int, help="most steps before timing (default: 300; CPU: 60)")
    parser.add_argument("--timeout-s", type=int, default=600, help="limit of one model in one mode; 0: none")
    args = parser.parse_args(argv)
    settle(parser, args, models=list(WORKLOADS), modes=MODES)
    settle_defaults(args, windows=(5, 2), steps=(40, 5), warmup=(60, 8), max_warmup=(300, 60))
    if args.scale == "full" and (args.windows < 3 or args.steps < 40):
        parser.error("--scale full: a median needs at least 3 windows of at least 40 steps")
    args.max_warmup = max(args.warmup, args.max_warmup)
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print one table, write the JSON. Returns 1 if any mode crashed or timed out."""
    args = parse(argv)
    warnings.filterwarnings("ignore", module="lightning")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_float32_matmul_precision("high")
    rows: list[dict[str, Any]] = []
    record = new_record("lightning_step", args) | {"rows": rows, "summary": []}
    title = "Lightning training step, ms" if record["timing_claim"] else NO_CLAIM
    if not record["timing_claim"]:
        print(title)
    write_json(args.json, record)
    for row in measured_rows(args, measure):
        rows.append(row)
        record["summary"] = summarize(rows, args.device)
        write_json(args.json, record)
        print(_line(row), flush=True)
    print_table(title, *table(rows, args.device))
    return int(any(row["error"] for row in rows))


def _line(row: dict[str, Any]) -> str:
    name = f"{row['model']} {row['mode']}:"
    if row["skipped"]:
        return f"{name} skipped: {row['skipped']}"
    if row["error"]:
        return f"{name} {row['error'].splitlines()[0]}"
    return f"{name} {_cell(row)} ms a step, {row['seconds']} s in all"


if __name__ == "__main__":
    raise SystemExit(main())
