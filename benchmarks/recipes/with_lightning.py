"""Runs of a Lightning Trainer. A step is a batch."""

from __future__ import annotations

import itertools
import math
import tempfile
from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from benchmarks.recipes.run import Clock, Run
from pygraph_train import PyGraphCallback


class Ticks(pl.Callback):
    """Tells the clock, and ends the run."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def on_train_start(self, *_: Any) -> None:
        self.clock.start()

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, *_: Any) -> None:
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        trainer.should_stop = self.clock.step(loss)


def fit(
    run: Run,
    module: pl.LightningModule,
    train: Any,
    val: Any = None,
    *,
    callbacks: Sequence[pl.Callback] = (),
    compiled: bool = True,
    **options: Any,
) -> Any:
    """What each script ends with; `compiled` is False where the script compiles parts of the module itself."""
    ours = [PyGraphCallback(**run.options)] if run.ours else []
    model: Any = torch.compile(module) if run.compiled and compiled else module
    with tempfile.TemporaryDirectory() as folder:
        trainer = pl.Trainer(
            accelerator="gpu" if run.cuda else "cpu",
            devices=1,
            logger=CSVLogger(folder),
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[Ticks(run.clock), *callbacks, *ours],
            **({"max_steps": run.steps, "max_epochs": -1} | options),
        )
        trainer.fit(model, train, val)
    return ours[0].report() if ours else None


class Block(nn.Module):
    """nanoGPT's block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class GPT(pl.LightningModule):
    """nanoGPT, with its groups of weight decay, its schedule and its log."""

    def __init__(self, vocabulary: int, length: int, width: int, layers: int, steps: int) -> None:
        super().__init__()
        self.steps = steps
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, width // 32) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        for weight in (p for p in self.parameters() if p.dim() >= 2):
            nn.init.normal_(weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        (text,) = batch
        logits = self(text[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> Any:
        matrices = [p for p in self.parameters() if p.dim() >= 2]
        others = [p for p in self.parameters() if p.dim() < 2]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=6e-4, betas=(0.9, 0.95))

        def rate(step: int) -> float:
            warmup = max(1, self.steps // 20)
            return min(1.0, (step + 1) / warmup) * (
                0.55 + 0.45 * math.cos(math.pi * min(1.0, step / self.steps))
            )

        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def nanogpt(run: Run) -> Any:
    """nanoGPT under bf16, with clipping."""
    vocabulary, length, width, layers = run.sized((50304, 512, 768, 12), (100, 16, 64, 2))
    texts = torch.randint(vocabulary, (run.sized(4000, 64), length + 1))
    module = GPT(vocabulary, length, width, layers, run.steps)
    loader = run.loader(TensorDataset(texts), run.sized(8, 4))
    return fit(run, module, loader, gradient_clip_val=1.0, precision="bf16-mixed")


class Tabular(pl.LightningModule):
    """A perceptron on numbers and categories."""

    def __init__(self, categories: int, numbers: int, width: int) -> None:
        super().__init__()
        self.embeddings = nn.ModuleList(nn.Embedding(100, 16) for _ in range(categories))
        sizes = [categories * 16 + numbers, *[width] * 4]
        self.layers = nn.Sequential(
            *(
                nn.Sequential(nn.Linear(a, b), nn.BatchNorm1d(b), nn.ReLU(), nn.Dropout(0.1))
                for a, b in itertools.pairwise(sizes)
            ),
            nn.Linear(width, 1),
        )

    def forward(self, categories: Tensor, numbers: Tensor) -> Tensor:
        embedded = [embedding(categories[:, i]) for i, embedding in enumerate(self.embeddings)]
        return self.layers(torch.cat([*embedded, numbers], dim=1)).squeeze(1)

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        categories, numbers, y = batch
        loss = F.binary_cross_entropy_with_logits(self(categories, numbers), y)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Sequence[Tensor], batch_idx: int) -> None:
        categories, numbers, y = batch
        logits = self(categories, numbers)
        self.log("val_loss", F.binary_cross_entropy_with_logits(logits, y), prog_bar=True)
        self.log("val_acc", ((logits > 0) == (y > 0.5)).float().mean(), prog_bar=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def tabular(run: Run) -> Any:
    """A perceptron on tables in float32; each epoch ends with a ragged batch and a validation."""
    count, width, batch = run.sized((25_000, 256, 256), (300, 32, 32))
    categories, numbers = torch.randint(100, (count, 8)), torch.randn(count, 16)
    data = TensorDataset(categories, numbers, (numbers[:, 0] + categories[:, 0] / 50 > 1).float())
    held_out = TensorDataset(*(column[: count // 5] for column in data.tensors))
    return fit(run, Tabular(8, 16, width), run.loader(data, batch), run.loader(held_out, 4 * batch))


class Classifier(pl.LightningModule):
    """An image classifier with a torchmetrics object that `self.log` is given."""

    def __init__(self, net: nn.Module, classes: int) -> None:
        super().__init__()
        from torchmetrics.classification import MulticlassAccuracy

        self.net, self.train_acc = net, MulticlassAccuracy(classes)

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        logits = self.net(images)
        loss = F.cross_entropy(logits, labels)
        self.train_acc(logits, labels)
        self.log("train_loss", loss, prog_bar=True)
        self.log("train_acc", self.train_acc, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
        steps = int(self.trainer.estimated_stepping_batches)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def resnet_metrics(run: Run) -> Any:
    """ResNet-18 with a torchmetrics object, a cycle of learning rates and averaged weights."""
    import timm
    from lightning.pytorch.callbacks import EMAWeightAveraging

    net, size, count, batch = run.sized(("resnet18", 64, 6000, 64), ("resnet10t", 32, 48, 4))
    data = TensorDataset(torch.randn(count, 3, size, size), torch.randint(10, (count,)))
    module = Classifier(timm.create_model(net, num_classes=10), 10)
    precision = run.sized("bf16-mixed", "32-true")  # a CPU takes long for convolutions in bf16
    averaging = EMAWeightAveraging(decay=0.999)
    return fit(run, module, run.loader(data, batch), callbacks=[averaging], precision=precision)
