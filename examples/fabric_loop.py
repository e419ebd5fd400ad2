"""Train a small convolutional network on scikit-learn's bundled digits, in a loop of Lightning Fabric.

    pip install lightning scikit-learn
    python examples/fabric_loop.py                      # CUDA graphs on a GPU, their emulation elsewhere
    python examples/fabric_loop.py --engine off         # the same training without PyGraph
    python examples/fabric_loop.py --whole              # the body of the loop as one graphed step

The emulation replays a step under the rules of CUDA graphs on any machine. It is not faster than plain
training: it shows the mechanism.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from pygraph_train import PyGraphFabric


def network() -> nn.Module:
    """Two convolutions with batch normalisation, dropout, and a linear head for 8 x 8 images."""
    return nn.Sequential(
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
    parser = argparse.ArgumentParser(description="Digits with Lightning Fabric and PyGraph")
    parser.add_argument("--engine", choices=("auto", "cuda", "emulated", "off"), default="auto")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--whole", action="store_true")
    args = parser.parse_args()
    engine = args.engine
    if engine == "auto":
        engine = "cuda" if torch.cuda.is_available() else "emulated"

    accelerator = "cpu" if engine == "emulated" else "auto"
    fabric = Fabric(accelerator=accelerator, devices=1, precision=args.precision)
    # by default Inductor waits until the loop has run long enough to be worth it, and this one is short
    compiles = True if engine == "cuda" and not args.whole else "auto"
    pygraph = PyGraphFabric(engine=engine, compile=compiles).attach(fabric)
    fabric.launch()
    fabric.seed_everything(0, verbose=False)

    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    model, optimizer = fabric.setup(model, optimizer)
    train, val = fabric.setup_dataloaders(*loaders(args.batch_size))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.epochs * len(train))

    def loss_of(images: Tensor, digits: Tensor) -> Tensor:
        return F.cross_entropy(model(images), digits)

    def stock_step(images: Tensor, digits: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(images, digits)
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=1.0, error_if_nonfinite=False)
        optimizer.step()
        return loss.detach()

    step = stock_step
    if args.whole:  # the same as one function
        step = pygraph.graphed_step(
            loss_of, model=model, optimizer=optimizer, max_norm=1.0, error_if_nonfinite=False
        )

    for epoch in range(args.epochs):
        model.train()
        loss = torch.zeros(())
        for images, digits in train:
            loss = step(images, digits)
            schedule.step()
        model.eval()
        with torch.no_grad():
            correct = sum((model(images).argmax(dim=1) == digits).sum() for images, digits in val)
        accuracy = float(correct) / len(val.dataset)
        fabric.print(f"epoch {epoch}: last loss {loss.item():.3f}, validation accuracy: {accuracy:.3f}")
    print(pygraph.report())
    pygraph.detach()


if __name__ == "__main__":
    main()
