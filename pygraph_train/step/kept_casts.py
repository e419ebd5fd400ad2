"""Casts of weights that autocast keeps for as long as its outermost block: after an update they are out of date."""

from __future__ import annotations

import heapq

import torch
from torch import Tensor, nn

from pygraph_train.problems import Problem

__all__ = ["KEPT_CASTS", "KeptCasts"]

KEPT_CASTS = Problem(
    "one autocast block is around several steps: until it ends, autocast uses casts of the weights as they were in its "
    "first step, and updates have no effect",
    fix="Enter autocast in each step, or with cache_enabled=False",
)

_WEIGHTS = 4
"""Weights that are looked at, the smallest ones: some may belong to a part that no loss depends on."""

_LOOKS = 16
"""Steps that are looked at where no weight changes (micro-batches)."""


class KeptCasts:
    """Looks, in the first steps, whether an autocast block of an earlier step is still open.

    A weight of its own changes when a weight of the model has changed, and is cast under autocast. A cast of what it
    was before comes from an earlier step.

    Args:
        model: with the weights.
        device_type: of the steps.
    """

    def __init__(self, model: nn.Module, device_type: str) -> None:
        self._device_type = device_type
        plain = (p for p in model.parameters() if p.requires_grad and type(p) is nn.Parameter)
        self._weights: list[nn.Parameter] = heapq.nsmallest(_WEIGHTS, plain, key=Tensor.numel)
        self._before: list[Tensor] = []
        self._probe = nn.Parameter(torch.zeros(1, 1, dtype=torch.float32, device="cpu"))
        self._one = torch.ones(1, 1, dtype=torch.float32, device="cpu")
        self._changes = self._looks = 0

    @property
    def settled(self) -> bool:
        """Whether there is nothing more to see."""
        return not self._weights or self._changes > 0 or self._looks >= _LOOKS

    def look(self) -> bool:
        """Before a step: whether its weights would be cast as they were in an earlier one."""
        self._looks += 1
        if not self._weights or not self._are_kept():
            self._weights.clear()
            return False
        before, self._before = self._before, [weight.detach().clone() for weight in self._weights]
        self._changes += not all(map(torch.equal, before, self._before))
        with torch.no_grad():
            self._probe.fill_(self._changes)
        torch.autocast_increment_nesting()  # the end of an outermost block would empty the cache
        try:
            with torch.autocast("cpu", torch.bfloat16):  # all devices have one cache
                found = torch.mm(self._probe, self._one).item()
        finally:
            torch.autocast_decrement_nesting()
        if self.settled:
            self._weights.clear()
            self._before.clear()
        return found != self._changes

    def _are_kept(self) -> bool:
        return torch.is_autocast_enabled(self._device_type) and torch.is_autocast_cache_enabled()
