"""What tests of the compile backend do on a CPU and on a GPU alike."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pygraph_train.regions import region

__all__ = ["Square", "emptied_after_the_forward", "guard_what_is_read"]


class Square(nn.Module):
    """With as many rows as it is wide, what is saved is as large as gradients of weights: those come to lie there."""

    def __init__(self, width: int = 6, depth: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def emptied_after_the_forward(
    batches: Iterable[tuple[torch.Tensor, torch.Tensor]], addresses: list[list[int]]
) -> Callable[[nn.Module, Callable[..., Any], torch.optim.Optimizer], list[torch.Tensor]]:
    """Training in Lightning's order: gradients of the step before are alive during a forward, and keep their values.

    Args:
        batches: inputs and classes.
        addresses: gets those of the gradients of each compiled step.
    """

    def body(model: nn.Module, call: Any, opt: torch.optim.Optimizer) -> list[torch.Tensor]:
        losses = []
        for x, y in batches:
            before = [p.grad.clone() for p in model.parameters() if p.grad is not None]
            loss = F.cross_entropy(call(x), y)
            assert all(map(torch.equal, before, [p.grad for p in model.parameters()]))
            opt.zero_grad()
            loss.backward()
            opt.step()
            losses.append(loss.detach())
            if call is not model:
                addresses.append([p.grad.data_ptr() for p in model.parameters()])
        return losses

    return body


def guard_what_is_read(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Check before each run of a region that the arena knows what is in use. Returns the graphs that backwards read."""
    run = region.Region._run
    seen = []

    def guarded(self: region.Region, inputs: list[Any]) -> Any:
        active = self._arena._active
        source = self._source(inputs) if self.spec.phase == "backward" else None
        if source is not None:
            seen.append(source)
            assert source.occupant in active and source.occupant.alive()
        if self.spec.phase == "forward":  # its last backward is over
            assert not any(o.alive() for o in active if o.owner is self and not o.visible)
        return run(self, inputs)

    monkeypatch.setattr(region.Region, "_run", guarded)
    return seen
