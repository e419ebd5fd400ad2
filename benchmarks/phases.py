"""What replayed phases cost and save: a plain loop and `GraphedStep` beside each other, from one start.

    python -m benchmarks.phases --json phases.json              # one CUDA GPU
    python -m benchmarks.phases --scale tiny                    # does the script work? (CPU)

Columns: milliseconds of a step in a loop that never waits (plain, ours), microseconds of the host until a step returns
in bursts of four, seconds to the first replay, peak of reserved memory of the whole run in MiB, and whether the losses
and parameters have the bits of the plain loop.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.command import NO_CLAIM, begin_anew, new_parser, new_record, settle, told_in
from benchmarks.record import print_table, write_json
from benchmarks.workloads import Training, build_training
from pygraph_train import GraphedStep

MODELS = ("mlp", "bert", "gpt2", "mobilenetv3", "vit_small")
COMPARED = 60
"""Steps whose losses are compared."""

BURST = 4


def main() -> None:
    """The command."""
    parser = new_parser(__doc__)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--seconds", type=float, default=2.0, help="of each timed loop")
    parser.add_argument("--timeout", type=int, default=90, help="seconds for each model")
    args = parser.parse_args()
    settle(parser, args, models=MODELS)
    record = new_record("phases", args)
    rows = record["rows"] = []
    for model in args.models:
        row: dict[str, Any] = {"model": model, "error": None}
        with told_in(row, args.timeout):
            row |= measure(model, args)
        rows.append(row)
        write_json(args.json, record)
    times = [f"{way}_{unit}" for unit in ("ms", "us") for way in ("plain", "ours")]
    shown = ["model", *times, "first_replay_s", "plain_mib", "ours_mib", "bits", "error"]
    title = NO_CLAIM if args.scale == "tiny" else "Training step, each phase with its graph"
    print_table(title, shown, [[_cell(row.get(name)) for name in shown] for row in rows])


def _cell(value: Any) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def measure(model: str, args: argparse.Namespace) -> dict[str, Any]:
    """One row."""
    plain, losses, parameters = _run(model, args, ours=False)
    ours, our_losses, our_parameters = _run(model, args, ours=True)
    same = all(map(torch.equal, losses, our_losses)) and all(map(torch.equal, parameters, our_parameters))
    row = {f"plain_{name}": value for name, value in plain.items()}
    row |= {f"ours_{name}": value for name, value in ours.items() if name not in ("report", "first_replay_s")}
    return row | {"bits": same, "first_replay_s": ours["first_replay_s"], "report": ours["report"]}


def _run(model: str, args: argparse.Namespace, *, ours: bool) -> tuple[dict[str, Any], list[Any], list[Any]]:
    cuda = args.device == "cuda"
    begin_anew(args.device)
    training = build_training(model, args.scale, torch.device(args.device))
    made = _ours(training, args) if ours else None
    step = made or _plain(training)
    losses = [step(training.batches[n % len(training.batches)]).detach().clone() for n in range(COMPARED)]
    parameters = [p.detach().to("cpu", copy=True) for p in training.module.parameters()]
    found: dict[str, Any] = {
        "ms": _loop_ms(step, training.batches, args),
        "us": _host_us(step, training.batches, args),
    }
    found["mib"] = torch.cuda.max_memory_reserved() >> 20 if cuda else None
    if made is not None:
        found["report"] = told = made.report().to_dict()
        found["first_replay_s"] = told["first_replay_seconds"]
        made.close()
    return found, losses, parameters


def _plain(training: Training) -> Callable[[Any], torch.Tensor]:
    def step(batch: Any) -> torch.Tensor:
        training.optimizer.zero_grad()
        loss: torch.Tensor = training.loss(batch)
        loss.backward()
        training.optimizer.step()
        return loss

    return step


def _ours(training: Training, args: argparse.Namespace) -> GraphedStep:
    engine = "cuda" if args.device == "cuda" else "emulated"
    module, optimizer = training.module, training.optimizer
    return GraphedStep(training.loss, model=module, optimizer=optimizer, engine=engine)


def _loop_ms(step: Callable[[Any], Any], batches: list[Any], args: argparse.Namespace) -> float:
    """The median of five windows."""
    windows, wait = [], torch.get_device_module(args.device).synchronize
    for _ in range(5):
        wait()
        count, begun = 0, time.perf_counter()
        while time.perf_counter() - begun < args.seconds / 5 or count < 3:
            step(batches[count % len(batches)])
            count += 1
        wait()
        windows.append((time.perf_counter() - begun) / count * 1e3)
    return statistics.median(windows)


def _host_us(step: Callable[[Any], Any], batches: list[Any], args: argparse.Namespace) -> float:
    """The median of the calls in bursts, which never wait for the device."""
    times, wait = [], torch.get_device_module(args.device).synchronize
    for _ in range(20):
        wait()
        for n in range(BURST):
            begun = time.perf_counter()
            step(batches[n % len(batches)])
            times.append((time.perf_counter() - begun) * 1e6)
    return statistics.median(times)


if __name__ == "__main__":
    main()
