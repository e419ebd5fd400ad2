"""Small things to train, and batches."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

__all__ = ["DEVICE", "Net", "adamw", "batches", "cross_entropy", "loss_of", "sgd"]


DEVICE = os.environ.get("PYGRAPH_CONTRACT_DEVICE", "cpu")
"""Where the contract trains: with "cuda" graphs are CUDA graphs (`make gpu-test`)."""


class Net(nn.Module):
    """Dropout (random state), BatchNorm (buffers) and two layers that can be frozen; six features, three classes."""

    def __init__(self, dropout: float = 0.2) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.dropout = nn.Dropout(dropout)
        self.second = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.dropout(torch.relu(self.norm(self.first(x)))))


def batches(count: int = 24, size: int = 8, seed: int = 1) -> list[tuple[Tensor, Tensor]]:
    """Inputs (size, 6) and classes (size,), the same in every run; they leave the default random state alone."""
    generator = torch.Generator("cpu").manual_seed(seed)

    def made() -> tuple[Tensor, Tensor]:
        x = torch.randn(size, 6, generator=generator, device="cpu")
        return x.to(DEVICE), torch.randint(0, 3, (size,), generator=generator, device="cpu").to(DEVICE)

    return [made() for _ in range(count)]


def loss_of(model: nn.Module) -> Callable[[Any], Tensor]:
    """The usual step function, for batches `(x, y)`."""
    return lambda batch: cross_entropy(model(batch[0]), batch[1])


def adamw(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    """With kernels that a graph can hold on a CPU, too."""
    return torch.optim.AdamW(model.parameters(), **{"lr": 1e-2, "fused": True, **options})


def sgd(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), **{"lr": 1e-2, "momentum": 0.9, "fused": True, **options})
