"""Runs of a stock Accelerate loop. A step is a batch."""

from __future__ import annotations

from typing import Any

import accelerate
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import pygraph_train
from benchmarks.recipes.run import Run, images
from pygraph_train import PyGraph


def accelerator_of(run: Run, **options: Any) -> Any:
    """Accelerate's own, under bf16; for the library `Accelerator(plugins=[PyGraph()])`."""
    options |= {"mixed_precision": "bf16", "cpu": not run.cuda}
    if run.ours:
        return pygraph_train.Accelerator(plugins=[PyGraph(**run.options)], **options)
    return accelerate.Accelerator(dynamo_backend="inductor" if run.compiled else None, **options)


def block(i: int, o: int) -> nn.Sequential:
    """Two convolutions, each with its norm."""
    layers = [nn.Conv2d(i, o, 3, padding=1), nn.GroupNorm(8, o), nn.SiLU()]
    return nn.Sequential(*layers, nn.Conv2d(o, o, 3, padding=1), nn.GroupNorm(8, o), nn.SiLU())


class UNet(nn.Module):
    """Predicts the noise in images (batch, 3, size, size) at times (batch,)."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(1, 4 * c), nn.SiLU(), nn.Linear(4 * c, 4 * c))
        self.down = nn.ModuleList([block(3, c), block(c, 2 * c), block(2 * c, 4 * c)])
        self.middle, self.last = block(4 * c, 4 * c), nn.Conv2d(c, 3, 1)
        self.up = nn.ModuleList([block(8 * c, 2 * c), block(4 * c, c), block(2 * c, c)])

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        h, kept = self.time(t[:, None])[:, :, None, None], []
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
    prepared = accelerator.prepare(model, optimizer, run.loader(images(count, size), batch), schedule)
    model, optimizer, loader, schedule = prepared
    ema = AveragedModel(accelerator.unwrap_model(model), multi_avg_fn=get_ema_multi_avg_fn(0.999))
    alphas = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 1000, device=accelerator.device), 0)
    for x, _ in run.batches(loader):
        with accelerator.accumulate(model):
            noise = torch.randn_like(x)
            times = torch.randint(0, 1000, (len(x),), device=x.device)
            kept = alphas[times].view(-1, 1, 1, 1)
            predicted = model(kept.sqrt() * x + (1 - kept).sqrt() * noise, times / 1000)
            loss = F.mse_loss(predicted.float(), noise)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            ema.update_parameters(accelerator.unwrap_model(model))
        run.step(loss)
    return getattr(accelerator, "pygraph", None)


def convnext_mixup(run: Run) -> Any:
    """ConvNeXt-T with mixup and cutmix, stochastic depth and clipping."""
    import timm
    from timm.data import Mixup

    accelerator = accelerator_of(run)
    name, size, count, batch = run.sized(("convnext_tiny", 96, 2000, 64), ("test_convnext", 32, 32, 4))
    model = timm.create_model(name, num_classes=100, drop_path_rate=0.1)
    mixup = Mixup(mixup_alpha=0.8, cutmix_alpha=1.0, label_smoothing=0.1, num_classes=100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=run.steps + 1)
    prepared = accelerator.prepare(model, optimizer, run.loader(images(count, size), batch), schedule)
    model, optimizer, loader, schedule = prepared
    for x, y in run.batches(loader):
        x, y = mixup(x, y)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        run.step(loss)
    return getattr(accelerator, "pygraph", None)


def detection(run: Run) -> Any:
    """A small YOLOS, whose loss matches boxes on the host; each image has another number of them."""
    from transformers import YolosConfig, YolosForObjectDetection

    accelerator = accelerator_of(run)
    (width, layers, side), (count, batch) = run.sized(((192, 8, 256), (1000, 8)), ((64, 2, 32), (32, 4)))
    sizes = {"hidden_size": width, "num_hidden_layers": layers, "intermediate_size": 4 * width}
    sizes |= {"num_attention_heads": width // 64, "image_size": (side, side), "num_labels": 20}
    model = YolosForObjectDetection(YolosConfig(**sizes))
    data = []
    for boxes in torch.randint(1, 16, (count,)).tolist():
        labels = {"class_labels": torch.randint(20, (boxes,)), "boxes": 0.3 + 0.4 * torch.rand(boxes, 4)}
        data.append((torch.randn(3, side, side), labels))

    def collate(rows: Any) -> dict[str, Any]:
        pictures, labels = zip(*rows, strict=True)
        return {"pixel_values": torch.stack(pictures), "labels": list(labels)}

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, run.steps)
    prepared = accelerator.prepare(model, optimizer, run.loader(data, batch, collate_fn=collate), schedule)
    model, optimizer, loader, schedule = prepared
    for rows in run.batches(loader):
        loss = model(**rows).loss
        accelerator.backward(loss)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        run.step(loss)
    return getattr(accelerator, "pygraph", None)
