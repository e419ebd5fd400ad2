"""Which parameters are clipped where all of a model are, whoever optimizes them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pygraph_train.identity import identities
from pygraph_train.optimizers.program import not_optimized
from pygraph_train.torch_private.stock_dynamo import traces


class ClippedParameters:
    """The parameters of a model, as `clip_grad_norm_(model.parameters())` finds them in each step.

    Args:
        model: the module.
        optimizer: which may hold other parameters than the model has.

    Attributes:
        changes: how often the model came to have other parameters, or the same ones in another order.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._model, self._optimizer = model, optimizer
        self._parameters: tuple[Tensor, ...] = ()
        self._others: list[Tensor] = []
        self.changes, self._traces = 0, -1
        self.look()
        self.changes = 0  # so far there were none

    def look(self) -> None:
        """Notice other parameters of the model: Dynamo has traced a forward that uses them. Hot path."""
        if (now := traces()) != self._traces:
            found = tuple(self._model.parameters())
            changed = identities(found) != identities(self._parameters)
            self._others = not_optimized(self._model, self._optimizer)
            self._parameters, self._traces = found, now  # only now: where it fails, all of this is done again
            self.changes += changed

    def compare(self) -> None:
        """Notice which of them the optimizer holds now."""
        self.look()
        self._others = not_optimized(self._model, self._optimizer)

    def others(self) -> bool:
        """Whether gradients count that the optimizer does not empty. Hot path."""
        return any(p.requires_grad or p.grad is not None for p in self._others)
