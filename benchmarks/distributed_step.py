"""Step time of a stock Lightning Trainer in several processes: eager, compiled, PyGraph.

    torchrun --nproc-per-node 2 -m benchmarks.distributed_step --json ddp.json     # one GPU for each process
    torchrun --nproc-per-node 2 -m benchmarks.distributed_step --strategy fsdp --models gpt2 --json fsdp.json
    torchrun --nproc-per-node 2 -m benchmarks.distributed_step --scale tiny        # does the script work? (CPU)

Every process measures; the first one prints and writes. benchmarks/README.md says what the columns mean.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import os
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import distributed
from torch.distributed.fsdp import FSDPModule, fully_shard

from benchmarks.command import NO_CLAIM, begin_anew, new_parser, new_record, settle, told_in
from benchmarks.lightning_step import Measurement, TrainedModule, callback_of, train
from benchmarks.record import DASH, print_table, write_json
from benchmarks.workloads import WORKLOADS, build

MODES = ("eager", "compile", "reduce-overhead", "pygraph-eager", "pygraph")


def measure(model: str, mode: str, args: argparse.Namespace) -> dict[str, Any]:
    """One row of this rank. A crash is part of the row: the others run into their time-out then."""
    row: dict[str, Any] = {"model": model, "mode": mode, "error": None, "step_ms": None}
    begin_anew(args.device)
    with told_in(row, args.timeout_s):
        row.update(_trained(model, mode, args))
    if args.device == "cuda":
        row["reserved_mib"] = round(torch.cuda.max_memory_reserved() / 2**20)
    return row


def _trained(model: str, mode: str, args: argparse.Namespace) -> dict[str, Any]:
    ranks = distributed.get_world_size()
    workload = build(model, args.scale, seed=distributed.get_rank())
    pygraph = callback_of(mode, args.device)
    measurement = Measurement(args, pygraph, busy=False)
    strategy: Any = DDPStrategy(gradient_as_bucket_view=args.bucket_view)
    if args.strategy == "fsdp":
        strategy = ModelParallelStrategy(data_parallel_size=ranks, tensor_parallel_size=1)
    module = (ShardedModule if args.strategy == "fsdp" else TrainedModule)(workload, mode)
    options = {"devices": ranks, "strategy": strategy, "enable_progress_bar": False}
    train(module, measurement, args, **options)
    found = {**measurement.losses(), **measurement.results()}
    if pygraph is not None:
        found["report"] = pygraph.report().to_dict()
    return found


def shard(net: torch.nn.Module, mesh: Any) -> None:
    """Make a unit of each block of the longest list of blocks, and one of the rest."""
    lists = [m for m in net.modules() if isinstance(m, (torch.nn.ModuleList, torch.nn.Sequential))]
    for block in max(lists, key=len) if lists else ():
        if any(True for _ in block.parameters()):
            fully_shard(block, mesh=mesh)
    fully_shard(net, mesh=mesh)


class ShardedModule(TrainedModule):
    """The workload under `fully_shard`."""

    def configure_model(self) -> None:
        if not isinstance(self.net, FSDPModule):
            shard(self.net, self.device_mesh["data_parallel"])


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = new_parser(__doc__)
    parser.add_argument("--models", default="mlp,bert,gpt2,vit_small", help=f"of {', '.join(WORKLOADS)}")
    parser.add_argument("--modes", default=",".join(MODES), help="comma-separated (default: all)")
    parser.add_argument(
        "--strategy", choices=("ddp", "fsdp"), default="ddp", help="replicas or sharded parameters"
    )
    parser.add_argument("--bucket-view", action="store_true", help="DDP with gradient_as_bucket_view=True")
    parser.add_argument("--windows", type=int, default=5, help="timed windows")
    parser.add_argument("--steps", type=int, default=40, help="steps a window")
    parser.add_argument("--warmup", type=int, default=60, help="least steps before timing")
    parser.add_argument("--max-warmup", type=int, default=300, help="most steps before timing")
    parser.add_argument("--timeout-s", type=int, default=300, help="limit of one model in one mode")
    args = parser.parse_args(argv)
    settle(parser, args, models=list(WORKLOADS), modes=MODES)
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Measure on all ranks; the first one prints one table and writes the JSON."""
    args = parse(argv)
    warnings.filterwarnings("ignore", module="lightning")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_float32_matmul_precision("high")
    if args.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    distributed.init_process_group("nccl" if args.device == "cuda" else "gloo")
    first = distributed.get_rank() == 0
    rows: list[dict[str, Any]] = []
    record = new_record("distributed_step", args) | {"ranks": distributed.get_world_size(), "rows": rows}
    for model, mode in itertools.product(args.models, args.modes):
        row = measure(model, mode, args)
        rows.append(row)
        if first:
            write_json(args.json, record)
            print(f"{model} {mode}: {row['step_ms']} {row['error'] or ''}"[:300], flush=True)
        if row["error"]:
            break  # the other ranks may be anywhere
    if first:
        title = f"{args.strategy.upper()} training step, ms" if record["timing_claim"] else NO_CLAIM
        by = {(row["model"], row["mode"]): row["step_ms"] for row in rows}
        cells = [
            [model, *(DASH if (ms := by.get((model, mode))) is None else f"{ms:.3f}" for mode in args.modes)]
            for model in args.models
        ]
        print_table(title, ["model", *args.modes], cells)
    distributed.destroy_process_group()
    return int(any(row["error"] for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
