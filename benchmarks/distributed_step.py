"""Training steps of several processes, one GPU each: plain, and with the library on defaults.

    torchrun --nproc-per-node 2 -m benchmarks.distributed_step --json ranks.json
    torchrun --nproc-per-node 2 -m benchmarks.distributed_step --scale tiny        # does the script work? (CPU)

Every process trains; the first one prints and writes. benchmarks/README.md says what the columns mean.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import time
from collections.abc import Sequence
from typing import Any

import accelerate
import torch
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.optim import AdamW

import pygraph_train
from benchmarks.command import NO_CLAIM, begin_anew, new_parser, new_record, settle, told_in
from benchmarks.record import print_table, write_json
from benchmarks.workloads import WORKLOADS, Batch, Workload, build
from pygraph_train import GraphedStep, PyGraph

LOOPS = ("ddp", "ddp-accumulate", "fsdp", "tp")
WAYS = ("plain", "ours")


def measure(model: str, loop: str, way: str, args: argparse.Namespace) -> dict[str, Any]:
    """One row of this rank, with the sum of all parameters at the end. A crash is part of the row."""
    row: dict[str, Any] = {"model": model, "loop": loop, "way": way, "error": None}
    begin_anew(args.device)
    with told_in(row, args.timeout_s):
        workload, device = build(model, args.scale), torch.device(args.device)
        module = workload.module.to(device)
        batches = [{k: v.to(device) for k, v in batch.items()} for batch in workload.batches]
        torch.manual_seed(distributed.get_rank())
        options = {} if args.device == "cuda" else {"engine": "emulated"}
        made = {"fsdp": sharded, "tp": divided}.get(loop, replicated)
        step, module, report = made(workload, module, 2 if "accumulate" in loop else 1, way, options)
        losses, seconds = [], []
        for batch in itertools.islice(itertools.cycle(batches), args.steps):
            began = time.perf_counter()
            losses.append(step(batch))
            torch.get_device_module(args.device).synchronize()
            seconds.append(time.perf_counter() - began)
        parts = [getattr(p, "_local_tensor", p) for p in module.parameters()]
        row["sum_of_parameters"] = float(sum(part.detach().double().sum() for part in parts))
        row["losses"] = torch.stack(losses[-5:]).tolist()
        row["step_ms"] = statistics.median(seconds[-(len(seconds) // 3) :]) * 1e3
        row["whole_s"] = sum(seconds)
        row["report"] = report()
        getattr(step, "close", bool)()  # NCCL ends only after graphs that hold collectives
    if args.device == "cuda":
        row["reserved_mib"] = torch.cuda.max_memory_reserved() >> 20
    return row


def replicated(workload: Workload, module: nn.Module, accumulate: int, way: str, options: Any) -> Any:
    """A stock loop of Accelerate: DDP, bf16 autocast, clipping."""
    known: dict[str, Any] = {
        "gradient_accumulation_steps": accumulate,
        "mixed_precision": "bf16",
        "cpu": "engine" in options,
    }
    accelerate.state.AcceleratorState._reset_state()
    if way == "ours":
        accelerator = pygraph_train.Accelerator(plugins=[PyGraph(print_report=False, **options)], **known)
    else:
        accelerator = accelerate.Accelerator(**known)
    prepared, optimizer = accelerator.prepare(module, AdamW(module.parameters(), 1e-4, fused=True))

    def step(batch: Batch) -> Tensor:
        with accelerator.accumulate(prepared):
            loss = workload.loss(prepared, batch)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(prepared.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    return step, prepared, lambda: accelerator.pygraph.report().to_dict() if way == "ours" else None


def divided(workload: Workload, module: nn.Module, accumulate: int, way: str, options: Any) -> Any:
    """A plain loop: each process computes a part of the heads and of the width of all layers of a Llama."""
    kind = "cpu" if "engine" in options else "cuda"
    mesh = distributed.init_device_mesh(kind, (distributed.get_world_size(),))
    for layer in module.model.layers:
        first = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
        second = ("self_attn.o_proj", "mlp.down_proj")
        plan = {name: ColwiseParallel() for name in first} | {name: RowwiseParallel() for name in second}
        parallelize_module(layer, mesh, plan)
    parts: list[list[nn.Parameter]] = [[], []]  # kernels for many tensors take no mixture
    for p in module.parameters():
        parts[isinstance(p, DTensor)].append(p)
    optimizer = AdamW([{"params": part} for part in parts], 1e-4, fused=True)
    return by_hand(workload, module, optimizer, way, options, clips=False)


def sharded(workload: Workload, module: nn.Module, accumulate: int, way: str, options: Any) -> Any:
    """A plain loop: each block of the longest list of blocks is a unit of `fully_shard`, and so is the rest."""
    lists = [m for m in module.modules() if isinstance(m, (nn.ModuleList, nn.Sequential))]
    for block in max(lists, key=len):
        if any(True for _ in block.parameters()):
            fully_shard(block)
    fully_shard(module)
    optimizer = AdamW(module.parameters(), 1e-4, fused=True)
    return by_hand(workload, module, optimizer, way, options, clips=True)


def by_hand(
    workload: Workload, module: nn.Module, optimizer: AdamW, way: str, options: Any, *, clips: bool
) -> Any:
    """A step of a plain loop, with bf16 autocast."""

    def step(batch: Batch) -> Tensor:
        with torch.autocast(next(iter(batch.values())).device.type, dtype=torch.bfloat16):
            loss = workload.loss(module, batch)
        loss.backward()
        if clips:
            nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    if way == "plain":
        return step, module, lambda: None
    graphed = GraphedStep(step, model=module, optimizer=optimizer, manual_optimization=True, **options)
    return graphed, module, lambda: graphed.report().to_dict()


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = new_parser(__doc__)
    parser.add_argument("--models", default="bert,gpt2,llama", help=f"of {', '.join(WORKLOADS)}")
    parser.add_argument("--loops", default=",".join(LOOPS), help="comma-separated (default: all)")
    parser.add_argument("--steps", type=int, default=120, help="batches of a row")
    parser.add_argument("--timeout-s", type=int, default=120, help="limit of one row")
    args = parser.parse_args(argv)
    settle(parser, args, models=list(WORKLOADS), loops=LOOPS)
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Measure on all ranks; the first one prints one table and writes the JSON."""
    args = parse(argv)
    torch.set_float32_matmul_precision("high")
    if args.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    distributed.init_process_group("nccl" if args.device == "cuda" else "gloo")
    first = distributed.get_rank() == 0
    rows: list[dict[str, Any]] = []
    record = new_record("distributed_step", args) | {"ranks": distributed.get_world_size(), "rows": rows}
    for model, loop, way in itertools.product(args.models, args.loops, WAYS):
        if loop == "tp" and model != "llama":
            continue
        rows.append(measure(model, loop, way, args))
        if first:
            write_json(args.json, record)
        if rows[-1]["error"]:
            break  # the other ranks may be anywhere
    if first:
        columns = ("model", "loop", "way", "step_ms", "whole_s", "reserved_mib", "sum_of_parameters", "error")
        cells = [
            [f"{v:.6g}" if isinstance(v := row.get(c), float) else str(v) for c in columns] for row in rows
        ]
        print_table("Training step" if record["timing_claim"] else NO_CLAIM, columns, cells)
    distributed.destroy_process_group()
    return int(any(row["error"] for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
