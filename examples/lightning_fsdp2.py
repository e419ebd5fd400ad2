"""Train the GPT of `accelerate_gpt.py` with Lightning in processes that share its parameters (FSDP2), and PyGraph.

    pip install lightning
    torchrun --nproc-per-node 2 examples/lightning_fsdp2.py                   # two GPUs, or two processes on a CPU
    torchrun --nproc-per-node 2 examples/lightning_fsdp2.py --engine off      # the same training without PyGraph

Forward and backward of each block have graphs, and so has the update.
"""

from __future__ import annotations

import argparse
import os
import warnings

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from accelerate_gpt import GPT, excerpts_of_text
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from pygraph_train import PyGraphCallback


class ShardedGPT(pl.LightningModule):
    """A GPT whose blocks, and the rest of it, are gathered when they are needed."""

    def __init__(self, vocabulary: int, context: int, width: int, layers: int) -> None:
        super().__init__()
        self.gpt = GPT(vocabulary, context, width, layers, heads=4)

    def configure_model(self) -> None:
        mesh = self.device_mesh["data_parallel"]
        for block in self.gpt.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self.gpt, mesh=mesh)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        (excerpt,) = batch
        logits = self.gpt(excerpt[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), excerpt[:, 1:].flatten())
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=2e-3, fused=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="A GPT with Lightning, FSDP2 and PyGraph")
    parser.add_argument("--engine", choices=("auto", "cuda", "emulated", "off"), default="auto")
    parser.add_argument("--steps", type=int, default=0, help="0 for a size that suits the machine")
    args = parser.parse_args()
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    engine = args.engine
    if engine == "auto":
        engine = "cuda" if torch.cuda.device_count() >= processes else "emulated"
    on_cpu = engine == "emulated" or not torch.cuda.is_available()
    context, width, layers, batch = (32, 64, 2, 16) if on_cpu else (256, 384, 6, 32)
    steps = args.steps or (60 if on_cpu else 2000)
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")  # the data is in memory

    pl.seed_everything(0)
    excerpts, vocabulary = excerpts_of_text(context + 1, steps * batch * processes)
    trainer = pl.Trainer(
        accelerator="cpu" if on_cpu else "gpu",
        devices=processes,
        strategy=ModelParallelStrategy(data_parallel_size=processes, tensor_parallel_size=1),
        precision="32-true" if on_cpu else "bf16-mixed",
        max_steps=steps,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        callbacks=[PyGraphCallback(engine=engine)],  # the first process prints its report when training ends
    )
    trainer.fit(ShardedGPT(vocabulary, context, width, layers), DataLoader(excerpts, batch))
    if trainer.is_global_zero:
        print(f"last loss: {trainer.callback_metrics['loss']:.3f}")


if __name__ == "__main__":
    main()
