"""Tensors of the batch that require a gradient: a graph computes it, and they get what backward would give them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from pygraph_train.problems import NotLegal, Problem
from pygraph_train.tracing.gradient_hooks import may_be_given_gradients

__all__ = ["BatchGradients", "GivenGradients", "check_batch", "undoing"]

_IN_MODEL = Problem(
    "a tensor of the batch that requires a gradient is one that the step reads from elsewhere as well",
    fix="Pass a clone of the tensor (.detach().clone().requires_grad_())",
)
_HAS_OTHER_USES = Problem(
    "a tensor of the batch that requires a gradient is a parameter, or has hooks or a history",
    fix="Pass a tensor that has nothing else to do with the training (.detach().clone().requires_grad_())",
)
_SPARSE = Problem("the gradient of a tensor of the batch is sparse, and a graph adds up dense ones")


def check_batch(leaves: Sequence[Any], parameters: Sequence[Tensor]) -> None:
    """Look at the leaves of a call that is to be captured.

    Raises:
        NotLegal: backward would do more with them than to add up their gradients.
    """
    known = set(map(id, parameters))
    for leaf in leaves:
        differentiated = isinstance(leaf, Tensor) and leaf.requires_grad
        if differentiated and (id(leaf) in known or not may_be_given_gradients(leaf)):
            raise NotLegal(_HAS_OTHER_USES)


def undoing(leaves: Sequence[Any]) -> Callable[[], None]:
    """Before a step or a replay that may be undone: what takes back what tensors of its batch get."""
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad and leaf.is_leaf]
    before = [tensor.grad for tensor in tensors]
    values = [None if grad is None else grad.detach().clone() for grad in before]

    @torch.no_grad()
    def undo() -> None:
        for tensor, grad, value in zip(tensors, before, values, strict=True):
            if grad is not None and value is not None:
                grad.copy_(value)
            tensor.grad = grad

    return undo


class BatchGradients:
    """Around one forward and backward: gradients of its batch begin empty, and become what they were.

    Args:
        leaves: of its arguments.
    """

    def __init__(self, leaves: Sequence[Any]) -> None:
        wanted = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad and leaf.is_leaf]
        self._tensors = list({id(leaf): leaf for leaf in wanted}.values())
        self._before: list[Tensor | None] = []

    def begin(self) -> None:
        """Let them be empty."""
        self._before = self._before or [tensor.grad for tensor in self._tensors]
        for tensor in self._tensors:
            tensor.grad = None

    def found(self) -> list[Tensor | None]:
        """What backward has left."""
        return [tensor.grad for tensor in self._tensors]

    def check_untouched(self) -> None:
        """After a run on copies of the batch.

        Raises:
            NotLegal: the step has tensors of the batch from elsewhere as well.
        """
        if any(gradient is not None for gradient in self.found()):
            raise NotLegal(_IN_MODEL)

    def put_back(self) -> None:
        """Let them be what they were; not where they did not begin."""
        for tensor, before in zip(self._tensors, self._before, strict=False):
            tensor.grad = before
        self._before = []


class GivenGradients:
    """What one graph computes for tensors of its batch. Each replay adds it to their `.grad`, as backward does.

    Args:
        leaves: what the graph was captured with, after its backward.
        elsewhere: ids of tensors whose gradients the step reads or writes in another way, as an optimizer does.
        anchored: places of tensors that the step has from elsewhere as well.
    Raises:
        NotLegal: a replay could not give them what backward gives them.
    """

    def __init__(
        self, leaves: Sequence[Any], elsewhere: Collection[int] = (), anchored: Collection[int] = ()
    ) -> None:
        self._places: list[tuple[int, Tensor]] = []
        self._elsewhere = frozenset(elsewhere)
        known: set[int] = set()
        for place, leaf in enumerate(leaves):
            if not isinstance(leaf, Tensor) or not leaf.requires_grad or leaf.grad is None:
                continue
            if place in anchored:
                raise NotLegal(_IN_MODEL)
            if leaf.grad.layout is not torch.strided:
                raise NotLegal(_SPARSE)
            if id(leaf) not in known:  # one that comes twice has one gradient
                known.add(id(leaf))
                self._places.append((place, leaf.grad))

    @property
    def computed(self) -> list[Tensor]:
        """What the last replay has computed."""
        return [gradient for _, gradient in self._places]

    def fit(self, leaves: Sequence[Any]) -> bool:
        """Whether backward would do no more than to add to them. Hot path."""
        for place, gradient in self._places:
            tensor = leaves[place]
            if id(tensor) in self._elsewhere or not may_be_given_gradients(tensor):
                return False
            has = tensor.grad
            if has is not None and (
                type(has) is not Tensor or has.requires_grad or not _alike(has, gradient)
            ):
                return False
        return True

    @torch.no_grad()
    def give(self, leaves: Sequence[Any]) -> None:
        """After a replay: what backward does with the gradients that it has computed. Hot path."""
        for place, gradient in self._places:
            tensor = leaves[place]
            if tensor.grad is None:
                tensor.grad = gradient.clone()
            else:
                tensor.grad += gradient


def _alike(has: Tensor, gradient: Tensor) -> bool:
    return has.layout is torch.strided and has.dtype == gradient.dtype and has.device == gradient.device
