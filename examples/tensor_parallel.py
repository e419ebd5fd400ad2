"""Train a GPT whose layers are split between processes (tensor parallelism), in a plain loop with a GraphedStep.

    torchrun --nproc-per-node 2 examples/tensor_parallel.py                   # two GPUs, or two processes on a CPU
    torchrun --nproc-per-node 2 examples/tensor_parallel.py --engine off      # the same training without PyGraph

Each process computes with a part of each layer. Graphs hold what processes exchange within forward and backward.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, distributed, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from pygraph_train import GraphedStep


class Block(nn.Module):
    """Attention to what came before, and an MLP."""

    def __init__(self, width: int, head: int) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.LayerNorm(width), nn.LayerNorm(width), head
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        q, k, v = (
            layer(y).unflatten(-1, (-1, self.head)).transpose(1, 2) for layer in (self.q, self.k, self.v)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.second(x))))


def main() -> None:
    parser = argparse.ArgumentParser(description="A GPT with tensor parallelism and PyGraph")
    parser.add_argument("--engine", choices=("auto", "cuda", "emulated", "off"), default="auto")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--small", action="store_true", help="a tiny model")
    args = parser.parse_args()
    context, width, layers, batch = (16, 32, 2, 4) if args.small else (256, 768, 12, 16)

    kind = "cuda" if torch.cuda.is_available() else "cpu"
    distributed.init_process_group("nccl" if kind == "cuda" else "gloo")
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    if kind == "cuda":
        torch.cuda.set_device(rank)
    mesh = distributed.init_device_mesh(kind, (ranks,))

    torch.manual_seed(0)  # all processes have the same weights and the same batches
    blocks = [Block(width, 8) for _ in range(layers)]
    model = nn.Sequential(nn.Embedding(64, width), *blocks, nn.LayerNorm(width), nn.Linear(width, 64)).to(
        kind
    )
    columns, rows = ("q", "k", "v", "up"), ("o", "down")
    plan = dict.fromkeys(columns, ColwiseParallel()) | dict.fromkeys(rows, RowwiseParallel())
    for block in blocks:
        parallelize_module(block, mesh, plan)
    # fused kernels take no parameters with and without parts at once
    groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for p in model.parameters():
        groups[isinstance(p, DTensor)].append(p)
    optimizer = torch.optim.AdamW([{"params": group} for group in groups.values()], lr=1e-3, fused=True)

    def step_fn(text: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        return loss

    step = GraphedStep(
        step_fn, model=model, optimizer=optimizer, manual_optimization=True, engine=args.engine
    )
    loss = torch.zeros(())
    for index in range(args.steps):
        counts = torch.arange(context + 1, device=kind) + torch.randint(64, (batch, 1), device=kind)
        loss = step(counts % 64)  # to be told what comes after 63
        if rank == 0 and index % max(1, args.steps // 10) == 0:
            print(f"step {index}: loss {loss.item():.3f}")
    if rank == 0:
        print(f"last loss: {loss.item():.3f}")
        print(step.report())
    step.close()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
