"""Train the GPT of `accelerate_gpt.py` in several processes that share its parameters, with Accelerate and PyGraph.

    pip install accelerate
    torchrun --nproc-per-node 2 examples/accelerate_fsdp2.py                  # one GPU for each process
    torchrun --nproc-per-node 2 examples/accelerate_fsdp2.py --engine off     # the same training without PyGraph

Accelerate has FSDP2 on devices only. Forward and backward of each sharded layer are replayed. What exchanges parameters
and gradients runs between the graphs.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate_gpt import GPT, excerpts_of_text
from torch import Tensor
from torch.utils.data import DataLoader

from pygraph_train import Accelerator, PyGraph


def main() -> None:
    parser = argparse.ArgumentParser(description="A GPT with Accelerate, FSDP2 and PyGraph")
    parser.add_argument("--engine", choices=("auto", "cuda", "emulated", "off"), default="auto")
    parser.add_argument("--steps", type=int, default=4000, help="micro-batches")
    parser.add_argument("--accumulate", type=int, default=2, help="micro-batches for one optimizer step")
    parser.add_argument("--small", action="store_true", help="a tiny model")
    args = parser.parse_args()
    context, width, layers, batch = (32, 64, 2, 16) if args.small else (256, 384, 6, 32)

    torch.manual_seed(0)
    accelerator = Accelerator(
        mixed_precision="bf16",
        gradient_accumulation_steps=args.accumulate,
        fsdp_plugin=FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["TransformerEncoderLayer"],
        ),
        plugins=[PyGraph(engine=args.engine)],
    )
    if not accelerator.is_fsdp2:
        raise SystemExit(
            "Accelerate's FSDP2 needs several processes with one GPU each: start them with torchrun"
        )
    excerpts, vocabulary = excerpts_of_text(context + 1, args.steps * batch * accelerator.num_processes)
    model = GPT(vocabulary, context, width, layers, heads=4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, fused=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(excerpts, batch))

    @accelerator.graphed_step
    def step(excerpt: Tensor) -> Tensor:
        with accelerator.accumulate(model):
            logits = model(excerpt[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), excerpt[:, 1:].flatten())
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        return loss

    loss = torch.zeros(())
    for index, (excerpt,) in enumerate(loader):
        loss = step(excerpt)
        if index % max(1, args.steps // 10) == 0:
            accelerator.print(f"step {index}: loss {loss.item():.3f}")
    accelerator.print(f"last loss: {loss.item():.3f}")
    accelerator.print(step.report())
    accelerator.end_training()


if __name__ == "__main__":
    main()
