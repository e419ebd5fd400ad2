"""Runs of Lightning Fabric. A step is a batch."""

from __future__ import annotations

from typing import Any

import timm
import torch
import torch.nn.functional as F
from lightning.fabric import Fabric

from benchmarks.recipes.run import Run, images
from pygraph_train import PyGraphFabric


def distillation(run: Run) -> Any:
    """A MobileNet learns from a ResNet's logits and from labels; for the library `PyGraphFabric().attach(fabric)`."""
    precision = run.sized("bf16-mixed", "32-true")  # a CPU takes long for convolutions in bf16
    fabric = Fabric(accelerator="gpu" if run.cuda else "cpu", devices=1, precision=precision)
    pygraph = PyGraphFabric(**run.options).attach(fabric) if run.ours else None
    size, count, batch = run.sized((96, 3000, 64), (32, 32, 4))
    names = run.sized(("mobilenetv3_small_100", "resnet34"), ("mobilenetv3_small_050", "resnet10t"))
    student, teacher = (timm.create_model(name, num_classes=100) for name in names)
    optimizer = torch.optim.SGD(student.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, run.steps)
    student, optimizer = fabric.setup(torch.compile(student) if run.compiled else student, optimizer)
    teacher = fabric.setup_module(teacher).eval()
    for x, y in run.batches(fabric.setup_dataloaders(run.loader(images(count, size), batch))):
        with torch.no_grad():
            soft = F.softmax(teacher(x).float() / 4, dim=1)
        logits = student(x).float()
        distance = F.kl_div(F.log_softmax(logits / 4, dim=1), soft, reduction="batchmean") * 16
        loss = 0.7 * distance + 0.3 * F.cross_entropy(logits, y)
        optimizer.zero_grad()
        fabric.backward(loss)
        optimizer.step()
        schedule.step()
        run.step(loss)
    return pygraph
