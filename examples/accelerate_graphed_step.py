"""Train a GPT on the source of Python's standard library with Accelerate, the step as one function.

    pip install accelerate
    python examples/accelerate_graphed_step.py               # tiny model on a CPU, small on a GPU
    python examples/accelerate_graphed_step.py --engine off  # the same training without PyGraph

`@accelerator.graphed_step` takes the body of the loop of examples/accelerate_gpt.py, accumulation and clipping
included. It gets the graphs of that loop, and has a report of its own. Data and model are those of that example.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from accelerate_gpt import GPT, excerpts_of_text
from torch import Tensor
from torch.utils.data import DataLoader

from pygraph_train import Accelerator, PyGraph


def main() -> None:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description="A GPT with Accelerate, its training step as one function")
    parser.add_argument("--engine", choices=("auto", "cuda", "emulated", "off"), default="auto")
    parser.add_argument("--steps", type=int, default=4000 if cuda else 80, help="micro-batches")
    parser.add_argument("--accumulate", type=int, default=2, help="micro-batches for one optimizer step")
    args = parser.parse_args()
    engine = args.engine
    if engine == "auto":
        engine = "cuda" if cuda else "emulated"
    on_cpu = engine == "emulated" or not cuda
    context, width, layers, batch = (32, 64, 2, 16) if on_cpu else (256, 384, 6, 32)

    torch.manual_seed(0)
    excerpts, vocabulary = excerpts_of_text(context + 1, args.steps * batch)
    accelerator = Accelerator(
        cpu=on_cpu,
        mixed_precision="no" if on_cpu else "bf16",
        gradient_accumulation_steps=args.accumulate,
        plugins=[PyGraph(engine=engine, compile=not on_cpu)],  # Inductor's kernels, where it pays
    )
    model = GPT(vocabulary, context, width, layers, heads=4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.steps)
    model, optimizer, loader, schedule = accelerator.prepare(
        model, optimizer, DataLoader(excerpts, batch), schedule
    )

    @accelerator.graphed_step
    def step(excerpt: Tensor) -> Tensor:
        with accelerator.accumulate(model):
            logits = model(excerpt[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), excerpt[:, 1:].flatten())
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
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
