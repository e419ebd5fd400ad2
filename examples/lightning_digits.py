"""Train a small convolutional network on scikit-learn's bundled digits, with PyGraph in a Lightning Trainer.

    pip install lightning scikit-learn
    python examples/lightning_digits.py                      # CUDA graphs on a GPU, their emulation elsewhere
    python examples/lightning_digits.py --engine off         # the same training without PyGraph

The emulation replays a step under the rules of CUDA graphs on any machine. It is not faster than plain
training: it shows the mechanism. Losses and accuracy are the same with every engine.
"""

from __future__ import annotations

import argparse
import warnings

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from pygraph_train import PyGraphCallback


class DigitClassifier(pl.LightningModule):
    """Two convolutions with batch normalisation, dropout, and a linear head for 8 x 8 images."""

    def __init__(self, learning_rate: float = 3e-3) -> None:
        super().__init__()
        self.learning_rate = learning_rate
        self.net = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Dropout(0.25),
            nn.Linear(32 * 4 * 4, 10),
        )

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        images, digits = batch
        loss = F.cross_entropy(self.net(images), digits)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        images, digits = batch
        accuracy = (self.net(images).argmax(dim=1) == digits).float().mean()
        self.log("val_accuracy", accuracy, prog_bar=True)

    def configure_optimizers(self) -> dict:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.learning_rate, fused=True)
        steps = int(self.trainer.estimated_stepping_batches)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def loaders(batch_size: int) -> tuple[DataLoader, DataLoader]:
    """Training and validation data: 8 x 8 grey images scaled to 0..1, and their digits."""
    images, digits = load_digits(return_X_y=True)
    split = train_test_split(images, digits, test_size=0.2, random_state=0, stratify=digits)
    train_images, val_images = (
        torch.tensor(x / 16, dtype=torch.float32).view(-1, 1, 8, 8) for x in split[:2]
    )
    train_digits, val_digits = (torch.tensor(y) for y in split[2:])
    pin = torch.cuda.is_available()
    train = DataLoader(TensorDataset(train_images, train_digits), batch_size, shuffle=True, pin_memory=pin)
    val = DataLoader(TensorDataset(val_images, val_digits), batch_size, pin_memory=pin)
    return train, val


def main() -> None:
    parser = argparse.ArgumentParser(description="Digits with Lightning and PyGraph")
    parser.add_argument("--engine", choices=("auto", "cuda", "emulated", "off"), default="auto")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=64)
    args = parser.parse_args()
    engine = args.engine
    if engine == "auto":
        engine = "cuda" if torch.cuda.is_available() else "emulated"
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")  # the data is in memory

    pl.seed_everything(0)
    train, val = loaders(args.batch_size)
    trainer = pl.Trainer(
        accelerator="cpu" if engine == "emulated" else "auto",
        devices=1,
        max_epochs=args.epochs,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        # prints its report when training ends; without forward="on" a GPU is left alone in so short a run
        callbacks=[PyGraphCallback(engine=engine, forward="on")],
    )
    trainer.fit(DigitClassifier(), train, val)
    print(f"validation accuracy: {trainer.callback_metrics['val_accuracy']:.3f}")


if __name__ == "__main__":
    main()
