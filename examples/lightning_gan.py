"""Train a small GAN on scikit-learn's bundled digits: manual optimization in a Lightning Trainer, with PyGraph.

    pip install lightning scikit-learn
    python examples/lightning_gan.py                         # CUDA graphs on a GPU, their emulation elsewhere
    python examples/lightning_gan.py --engine off            # the same training without PyGraph

`training_step` runs as it is written. Forward and backward of both networks, and the steps of both optimizers, run from
graphs.
The emulation is not faster than plain training: it shows the mechanism.
"""

from __future__ import annotations

import argparse
import warnings

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from pygraph_train import PyGraphCallback

LATENT = 16


class DigitGan(pl.LightningModule):
    """A generator of 8 x 8 images, and a discriminator that tells them from handwritten digits."""

    def __init__(self, learning_rate: float = 1e-3) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.learning_rate = learning_rate
        self.generator = nn.Sequential(
            nn.Linear(LATENT, 128),
            nn.BatchNorm1d(128),
            nn.ReLU(),
            nn.Linear(128, 128),
            nn.BatchNorm1d(128),
            nn.ReLU(),
            nn.Linear(128, 64),
            nn.Sigmoid(),
        )
        self.discriminator = nn.Sequential(
            nn.Linear(64, 128),
            nn.LeakyReLU(0.2),
            nn.Dropout(0.3),
            nn.Linear(128, 64),
            nn.LeakyReLU(0.2),
            nn.Linear(64, 1),
        )

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        (images,) = batch
        generator, discriminator = self.optimizers()
        noise = torch.randn(len(images), LATENT, device=self.device)

        with self.toggled_optimizer(discriminator):
            real = self.discriminator(images)
            fake = self.discriminator(self.generator(noise).detach())
            loss = F.softplus(-real).mean() + F.softplus(fake).mean()
            discriminator.zero_grad()
            self.manual_backward(loss)
            discriminator.step()
            self.log("discriminator_loss", loss, prog_bar=True)

        with self.toggled_optimizer(generator):
            loss = F.softplus(-self.discriminator(self.generator(noise))).mean()
            generator.zero_grad()
            self.manual_backward(loss)
            generator.step()
            self.log("generator_loss", loss, prog_bar=True)

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [
            torch.optim.AdamW(part.parameters(), lr=self.learning_rate, betas=(0.5, 0.999), fused=True)
            for part in (self.generator, self.discriminator)
        ]


def main() -> None:
    parser = argparse.ArgumentParser(description="A GAN of digits with Lightning and PyGraph")
    parser.add_argument("--engine", choices=("auto", "cuda", "emulated", "off"), default="auto")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=64)
    args = parser.parse_args()
    engine = args.engine
    if engine == "auto":
        engine = "cuda" if torch.cuda.is_available() else "emulated"
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")  # the data is in memory

    pl.seed_everything(0)
    images = torch.tensor(load_digits().data / 16, dtype=torch.float32)
    pin = torch.cuda.is_available()
    # without the last, smaller batch all batches have one shape
    loader = DataLoader(TensorDataset(images), args.batch_size, shuffle=True, drop_last=True, pin_memory=pin)
    trainer = pl.Trainer(
        accelerator="cpu" if engine == "emulated" else "auto",
        devices=1,
        max_epochs=args.epochs,
        logger=False,
        enable_checkpointing=False,
        callbacks=[PyGraphCallback(engine=engine)],  # prints its report when training ends
    )
    gan = DigitGan()
    trainer.fit(gan, loader)
    gan.eval()
    with torch.no_grad():
        made = gan.generator(torch.randn(1000, LATENT))
    distance = (made.mean(dim=0) - images.mean(dim=0)).abs().mean()
    print(f"distance of the mean images: {distance:.3f}")


if __name__ == "__main__":
    main()
