"""Train the digits model of `lightning_digits.py` in two processes, with PyGraph in a Lightning Trainer.

    pip install lightning scikit-learn
    torchrun --nproc-per-node 2 examples/lightning_ddp.py                     # two GPUs, or two processes on a CPU
    torchrun --nproc-per-node 2 examples/lightning_ddp.py --engine off        # the same training without PyGraph

Forward, backward and optimizer each run from a graph on each rank. DDP exchanges gradients as it always does. Losses
and accuracy are the same with every engine.
"""

from __future__ import annotations

import argparse
import os
import warnings

import lightning.pytorch as pl
import torch
from lightning_digits import DigitClassifier, loaders

from pygraph_train import PyGraphCallback


def main() -> None:
    parser = argparse.ArgumentParser(description="Digits with Lightning, DDP and PyGraph")
    parser.add_argument("--engine", choices=("auto", "cuda", "emulated", "off"), default="auto")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=32)
    args = parser.parse_args()
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    engine = args.engine
    if engine == "auto":
        engine = "cuda" if torch.cuda.device_count() >= processes else "emulated"
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")  # the data is in memory

    pl.seed_everything(0)
    train, val = loaders(args.batch_size)
    trainer = pl.Trainer(
        accelerator="cpu" if engine == "emulated" else "auto",
        devices=processes,
        strategy="ddp",
        max_epochs=args.epochs,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        callbacks=[PyGraphCallback(engine=engine)],  # the first process prints its report when training ends
    )
    trainer.fit(DigitClassifier(), train, val)
    if trainer.is_global_zero:
        print(f"validation accuracy: {trainer.callback_metrics['val_accuracy']:.3f}")


if __name__ == "__main__":
    main()
