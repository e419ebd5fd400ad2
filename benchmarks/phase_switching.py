"""What switching phases by measurement gains and costs in a stock Lightning Trainer, defaults only.

    python -m benchmarks.phase_switching --json results.json            # one CUDA GPU, every case
    python -m benchmarks.phase_switching --cases compute --steps 520
    python -m benchmarks.phase_switching --scale tiny                   # does the script work? (CPU)

Cases, each with its target:

    models       each model settles on `{F B O}` with Inductor's kernels, and is as fast as if that had been asked for
    compute      large matrices: at most 1% slower than without the callback, exploration included
    hooks        bert, gradient norms logged in on_before_optimizer_step: 1.3x over reduce-overhead
    metric       bert, a metric with Python state in training_step: 1.3x over reduce-overhead
    hostread     a forward that reads on the host: graphs of backward and optimizer, faster than without
"""

from __future__ import annotations

import argparse
import functools
import gc
import io
import logging
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from benchmarks.command import NO_CLAIM, new_record, settle_choices, settle_defaults, settle_device
from benchmarks.lightning_step import CycledBatches
from benchmarks.limit import StepTimeout, time_limit
from benchmarks.record import DASH, print_table, write_json
from benchmarks.workloads import (
    WORKLOADS,
    Batch,
    Workload,
    WorkloadUnavailable,
    build,
    classification_loss,
    input_batches,
)
from pygraph_train import PyGraphCallback

CASES = ("models", "compute", "hooks", "metric", "hostread")
FOREVER = 1_000_000  # steps that the Trainer believes in: what a long run is worth compiling for
KEPT_LOSSES = 20
SETTLED_STEPS = 10  # after the last decision, before the timing


class Metric(nn.Module):
    """Accuracy as torchmetrics keeps it: sums in buffers, counts and a cache in Python."""

    correct: Tensor
    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        self._update_count = 0
        self._computed: Tensor | None = None
        self.register_buffer("correct", torch.zeros((), dtype=torch.int64))
        self.register_buffer("total", torch.zeros((), dtype=torch.int64))

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        self._update_count += 1
        self._computed = None
        self.correct += (logits.argmax(-1) == labels).sum()
        self.total += labels.numel()
        self._computed = self.correct / self.total
        return self._computed


class ReadsOnHost(nn.Module):
    """A transformer that looks at its activations halfway."""

    def __init__(self, depth: int, width: int, heads: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True)
            for _ in range(depth)
        )
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        half = len(self.blocks) // 2
        for block in self.blocks[:half]:
            x = block(x)
        print(x.detach().abs().amax().item(), file=io.StringIO())  # a print is in no graph
        for block in self.blocks[half:]:
            x = block(x)
        return self.head(x.mean(1))


class Trained(pl.LightningModule):
    """A workload as a user would write it.

    Args:
        case: what stands in the way of one graph.
        mode: of `torch.compile` around the model, None leaves the model alone.
    """

    def __init__(self, workload: Workload, case: str, mode: str | None = None) -> None:
        super().__init__()
        self.net = workload.module
        self.workload_loss = workload.loss
        self.metric = Metric() if case == "metric" else None
        self.forward_and_loss = self._forward_and_loss
        if mode is not None:
            self.forward_and_loss = torch.compile(self._forward_and_loss, mode=mode)

    def _forward_and_loss(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        if self.metric is None:
            return self.workload_loss(self.net, batch), None
        out = self.net(**batch)
        return out.loss, out.logits

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss, logits = self.forward_and_loss(batch)
        if self.metric is not None and logits is not None:
            self.log("accuracy", self.metric(logits.detach(), batch["labels"]))
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4, fused=True)


class LogsNorms(Trained):
    """Looks at gradients between backward and the optimizer."""

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        norms = torch._foreach_norm([p.grad for p in self.parameters() if p.grad is not None])
        self.log("gradient_norm", torch.stack(norms).norm())


class Times(pl.Callback):
    """Times of steps, without making them wait except at the borders of what is timed.

    Args:
        warmup, max_warmup: steps before the timing, at least and at most; between the two it begins when
            `ready` says so.
        steps: timed steps; then the fit stops.
    """

    def __init__(
        self, *, warmup: int, max_warmup: int, steps: int, ready: Callable[[int], bool], cuda: bool
    ) -> None:
        self.warmup, self.max_warmup, self.steps = warmup, max_warmup, steps
        self.ready, self.cuda = ready, cuda
        self.done = 0
        self.timed_from: int | None = None
        self.mean_ms: float | None = None
        self.losses: list[Tensor] = []
        self._began = 0.0

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if self.timed_from is None and self._warm():
            self.timed_from = self.done
            self._began = self._now()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        self.done += 1
        if len(self.losses) < KEPT_LOSSES:
            self.losses.append(outputs["loss"].detach().clone())
        if self.timed_from is not None and self.done == self.timed_from + self.steps:
            self.mean_ms = (self._now() - self._began) / self.steps * 1e3
            trainer.should_stop = True

    def _warm(self) -> bool:
        return self.done >= self.warmup and (self.done >= self.max_warmup or self.ready(self.done))

    def _now(self) -> float:
        if self.cuda:
            torch.cuda.synchronize()
        return time.perf_counter()


def compute_workload(scale: str) -> Workload:
    """Eight linear layers of width 8192 on 8192 rows: some 50 ms of matrix products."""
    depth, width, rows = (8, 8192, 8192) if scale == "full" else (2, 32, 8)
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(width, width), nn.GELU()]
    module = nn.Sequential(*layers, nn.Linear(width, 10))
    return Workload(module, input_batches((rows, width), 10), classification_loss)


def hostread_workload(scale: str) -> Workload:
    """Twelve blocks of width 512, 8 x 64 tokens."""
    depth, width, heads, batch, length = (12, 512, 8, 8, 64) if scale == "full" else (2, 16, 2, 2, 4)
    module = ReadsOnHost(depth, width, heads)
    return Workload(
        module, input_batches((batch, length, width), 10), lambda m, b: F.cross_entropy(m(b["x"]), b["y"])
    )


def bert_workload(scale: str) -> Workload:
    """The bert of lightning_step without dropout, so that losses of different kernels can be compared."""
    workload = build("bert", "full" if scale == "full" else "tiny")
    for module in workload.module.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if hasattr(module, "dropout_prob"):
            module.dropout_prob = 0.0
    return workload


def fit(
    args: argparse.Namespace,
    case: str,
    make: Callable[[str], Workload],
    *,
    mode: str | None = None,
    pygraph: bool = False,
    warmup: int,
    max_warmup: int,
    steps: int,
    planned: int,
    **options: Any,
) -> dict[str, Any]:
    """Train once and time `steps` steps. A crash or a time-out is part of the row, never raised."""
    cuda = args.device == "cuda"
    name = "pygraph" if pygraph else mode or "eager"
    row: dict[str, Any] = {"case": case, "mode": name, "error": None, "skipped": None, "step_ms": None}
    if not cuda and mode is not None:
        row["skipped"] = "needs CUDA: on a CPU it would be compared with an emulation"
        return row
    torch._dynamo.reset()
    gc.collect()
    if cuda:
        torch.cuda.empty_cache()
    callback = PyGraphCallback(engine="cuda" if cuda else "emulated", **options) if pygraph else None

    def ready(done: int) -> bool:
        if callback is None:
            return True
        report = callback.report()
        last = max((s.step for s in report.switches), default=None)
        settled = bool(report.controllers) and all(c.settled for c in report.controllers)
        return settled and last is not None and done >= last + SETTLED_STEPS

    times = Times(warmup=warmup, max_warmup=max_warmup, steps=steps, ready=ready, cuda=cuda)
    started = time.perf_counter()
    try:
        with time_limit(args.timeout_s):
            pl.seed_everything(0, verbose=False)
            workload = make(args.scale)
            trainer = pl.Trainer(
                accelerator="gpu" if cuda else "cpu",
                devices=1,
                precision="bf16-mixed",
                max_steps=planned,
                logger=False,
                enable_checkpointing=False,
                enable_model_summary=False,
                enable_progress_bar=False,
                callbacks=[c for c in (callback, times) if c is not None],
            )
            loader = DataLoader(CycledBatches(workload.batches), batch_size=None)
            kind = LogsNorms if case == "hooks" else Trained
            trainer.fit(kind(workload, case, mode), loader)
            row["losses"] = torch.stack(times.losses).float().tolist()
    except WorkloadUnavailable as unavailable:
        row["skipped"] = str(unavailable)
    except StepTimeout:
        row["error"] = f"timed out after {args.timeout_s} s"
    except Exception as error:
        row["error"] = f"{type(error).__name__}: {error}"[:2000]
    row |= {"step_ms": times.mean_ms, "timed_from": times.timed_from, "timed_steps": steps}
    row["seconds"] = round(time.perf_counter() - started, 1)
    if callback is not None:
        row["report"] = callback.report().to_dict()
        row["plan"] = row["report"]["plan"]
    return row


def models(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Defaults against the plan that is expected of them; compiled kernels come from the same cache."""
    timing = {"warmup": args.warmup, "max_warmup": args.max_warmup, "steps": args.timed, "planned": FOREVER}
    for name in args.models:
        case = f"models: {name}"
        make = functools.partial(build, name)
        ours = fit(args, case, make, pygraph=True, **timing)
        yield ours
        if ours["skipped"]:
            continue
        asked = fit(args, case, make, pygraph=True, compile=True, fuse="on", **timing)
        yield asked
        switches = ours.get("report", {}).get("switches") or [{"arm": None}]
        plan, expected = switches[-1]["arm"], "{F B O} compiled"
        yield _verdict(case, "plan of the defaults", plan, expected, plan == expected)
        ratio = _ratio(ours, asked)
        yield _verdict(
            case, "time / with that plan asked for", ratio, "<= 1.02", ratio is not None and ratio <= 1.02
        )


def compute(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """All steps count, the first ones too."""
    timing = {"warmup": 1, "max_warmup": 1, "steps": args.steps, "planned": args.steps + 1}
    plain = fit(args, "compute", compute_workload, **timing)
    yield plain
    ours = fit(args, "compute", compute_workload, pygraph=True, **timing)
    yield ours
    ratio = _ratio(ours, plain)
    yield _verdict(
        "compute", "time with the callback / without", ratio, "<= 1.01", ratio is not None and ratio <= 1.01
    )


def against_reduce_overhead(args: argparse.Namespace, case: str) -> Iterator[dict[str, Any]]:
    """Steady steps; losses of the first ones are compared with eager kernels."""
    few = {"warmup": KEPT_LOSSES, "max_warmup": KEPT_LOSSES, "steps": 10, "planned": FOREVER}
    eager = fit(args, case, bert_workload, **few)
    yield eager
    timing = {"warmup": args.warmup, "max_warmup": args.max_warmup, "steps": args.timed, "planned": FOREVER}
    ours = fit(args, case, bert_workload, pygraph=True, **timing)
    yield ours
    # last, because it warms up in a stream of its own, which slows every later graph of the process
    other = fit(args, case, bert_workload, mode="reduce-overhead", **timing)
    yield other
    ratio = _ratio(other, ours)
    yield _verdict(case, "speed-up over reduce-overhead", ratio, ">= 1.3", ratio is not None and ratio >= 1.3)
    split = "{O}" in ours.get("plan", "") and "B" in ours["plan"]
    yield _verdict(case, "plan", ours.get("plan"), "split", split and ours["plan"] != "F B {O}")
    gap, usual = _loss_gap(eager, ours), _loss_gap(eager, other)
    # bf16 and other kernels than eager's: torch.compile itself is that far from eager
    allowed = max(0.05, usual or 0.0)
    met = gap is not None and gap <= allowed
    yield _verdict(case, "largest loss difference", gap, f"<= {allowed:.3f}", met)


def hostread(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Against the same training without the callback."""
    timing = {"warmup": args.warmup, "max_warmup": args.max_warmup, "steps": args.timed, "planned": FOREVER}
    plain = fit(args, "hostread", hostread_workload, **timing)
    yield plain
    ours = fit(args, "hostread", hostread_workload, pygraph=True, **timing)
    yield ours
    ratio = _ratio(plain, ours)
    yield _verdict("hostread", "speed-up over eager", ratio, "> 1", ratio is not None and ratio > 1)
    plan = ours.get("plan", "")
    yield _verdict("hostread", "plan", plan, "{B} {O}", "{B}" in plan and "{O}" in plan)


def _ratio(above: dict[str, Any], below: dict[str, Any]) -> float | None:
    return above["step_ms"] / below["step_ms"] if above["step_ms"] and below["step_ms"] else None


def _loss_gap(one: dict[str, Any], other: dict[str, Any]) -> float | None:
    if not one.get("losses") or not other.get("losses"):
        return None
    return max(abs(a - b) for a, b in zip(one["losses"], other["losses"], strict=False))


def _verdict(case: str, what: str, figure: Any, target: str, met: bool) -> dict[str, Any]:
    return {"case": case, "claim": what, "figure": figure, "target": target, "met": met}


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line, with the defaults of the device filled in."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", default=",".join(CASES), help="comma-separated (default: all)")
    parser.add_argument("--models", default=",".join(WORKLOADS), help="of the case models (default: all)")
    parser.add_argument("--steps", type=int, help="steps of the case compute (default: 520; CPU: 40)")
    parser.add_argument("--timed", type=int, help="steady steps that are timed (default: 100; CPU: 5)")
    parser.add_argument("--warmup", type=int, help="least steps before them (default: 40; CPU: 10)")
    parser.add_argument("--max-warmup", type=int, help="most steps before them (default: 400; CPU: 60)")
    parser.add_argument("--scale", choices=("full", "tiny"), default="full")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument("--timeout-s", type=int, default=300, help="limit of one fit; 0: none")
    parser.add_argument("--json", type=Path, help="write rows and environment there, after each row")
    args = parser.parse_args(argv)
    settle_choices(parser, args, cases=CASES, models=list(WORKLOADS))
    settle_device(parser, args)
    settle_defaults(
        args,
        steps=(520, 40),
        timed=(100, 5),
        warmup=(40, 10),
        max_warmup=(400, 60),
    )
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print figures beside targets, write the JSON. Returns 1 if a fit crashed or timed out."""
    args = parse(argv)
    warnings.filterwarnings("ignore", module="lightning")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_float32_matmul_precision("high")
    rows: list[dict[str, Any]] = []
    claims: list[dict[str, Any]] = []
    record = new_record("phase_switching", args) | {"rows": rows, "claims": claims}
    claim = record["timing_claim"]
    title = "Phases switched by measurement" if claim else NO_CLAIM
    if not claim:
        print(title)
    for row in _measured(args):
        (claims if "claim" in row else rows).append(row)
        write_json(args.json, record)
        print(_line(row, claim), flush=True)
    columns = ["case", "claim", "figure", "target", "met"]
    print_table(
        title, columns, [[c["case"], c["claim"], _figure(c), c["target"], _met(c, claim)] for c in claims]
    )
    return int(any(row["error"] for row in rows))


def _measured(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    if "models" in args.cases:
        yield from models(args)
    if "compute" in args.cases:
        yield from compute(args)
    for case in ("hooks", "metric"):
        if case in args.cases:
            yield from against_reduce_overhead(args, case)
    if "hostread" in args.cases:
        yield from hostread(args)


def _line(row: dict[str, Any], counts: bool) -> str:
    if "claim" in row:
        return f"{row['case']}: {row['claim']} {_figure(row)}, target {row['target']}: {_met(row, counts)}"
    name = f"{row['case']} {row['mode']}:"
    if row["skipped"]:
        return f"{name} skipped: {row['skipped']}"
    if row["error"]:
        return f"{name} {row['error'].splitlines()[0]}"
    ms = DASH if row["step_ms"] is None else f"{row['step_ms']:.3f} ms a step"
    plan = f", {row['plan']}" if "plan" in row else ""
    return f"{name} {ms}{plan}, {row['seconds']} s in all"


def _figure(claim: dict[str, Any]) -> str:
    value = claim["figure"]
    return DASH if value is None else f"{value:.3f}" if isinstance(value, float) else str(value)


def _met(claim: dict[str, Any], counts: bool) -> str:
    return ("met" if claim["met"] else "MISSED") if counts else DASH


if __name__ == "__main__":
    raise SystemExit(main())
