"""Runs of a stock Accelerate loop. A step is a batch."""

from __future__ import annotations

from typing import Any

import accelerate
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import TensorDataset

import pygraph_train
from benchmarks.recipes.run import Run
from pygraph_train import PyGraph


def accelerator_of(run: Run, **options: Any) -> Any:
    """Accelerate's own, under bf16; for the library `Accelerator(plugins=[PyGraph()])`."""
    options |= {"mixed_precision": "bf16", "cpu": not run.cuda}
    if run.ours:
        return pygraph_train.Accelerator(plugins=[PyGraph(**run.options)], **options)
    return accelerate.Accelerator(dynamo_backend="inductor" if run.compiled else None, **options)


def report_of(run: Run, accelerator: Any) -> Any:
    """The library's report."""
    return accelerator.pygraph.report() if run.ours else None


def convolutions(before: int, after: int) -> nn.Sequential:
    """Two of them, each with its norm."""
    layers = [nn.Conv2d(before, after, 3, padding=1), nn.GroupNorm(8, after), nn.SiLU()]
    return nn.Sequential(*layers, nn.Conv2d(after, after, 3, padding=1), nn.GroupNorm(8, after), nn.SiLU())


class UNet(nn.Module):
    """Predicts the noise in images (batch, 3, size, size) at times (batch,)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        c = width
        self.time = nn.Sequential(nn.Linear(1, 4 * c), nn.SiLU(), nn.Linear(4 * c, 4 * c))
        self.first, self.last = nn.Conv2d(3, c, 3, padding=1), nn.Conv2d(c, 3, 1)
        self.down = nn.ModuleList([convolutions(c, c), convolutions(c, 2 * c), convolutions(2 * c, 4 * c)])
        self.middle = convolutions(4 * c, 4 * c)
        self.up = nn.ModuleList([convolutions(8 * c, 2 * c), convolutions(4 * c, c), convolutions(2 * c, c)])

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        h, kept = self.time(t[:, None])[:, :, None, None], []
        x = self.first(x)
        for down in self.down:
            x = down(x)
            kept.append(x)
            x = F.avg_pool2d(x, 2)
        x = self.middle(x + h)
        for up in self.up:
            x = up(torch.cat([F.interpolate(x, scale_factor=2.0), kept.pop()], 1))
        return self.last(x)


def diffusion(run: Run) -> Any:
    """A small diffusion model with averaged weights, two micro-batches a step and clipping."""
    accelerator = accelerator_of(run, gradient_accumulation_steps=2)
    size, width, count, batch = run.sized((32, 64, 5000, 64), (16, 8, 64, 8))
    model = UNet(width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, run.steps)
    loader = run.loader(TensorDataset(torch.randn(count, 3, size, size)), batch)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    ema = AveragedModel(accelerator.unwrap_model(model), multi_avg_fn=get_ema_multi_avg_fn(0.999))
    alphas = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 1000, device=accelerator.device), 0)
    run.clock.start()
    while True:
        for (images,) in loader:
            with accelerator.accumulate(model):
                noise = torch.randn_like(images)
                times = torch.randint(0, 1000, (len(images),), device=images.device)
                kept = alphas[times].view(-1, 1, 1, 1)
                predicted = model(kept.sqrt() * images + (1 - kept).sqrt() * noise, times / 1000)
                loss = F.mse_loss(predicted.float(), noise)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                ema.update_parameters(accelerator.unwrap_model(model))
            if run.clock.step(loss):
                return report_of(run, accelerator)
