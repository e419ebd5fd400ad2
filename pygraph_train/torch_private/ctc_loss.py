"""The CTC loss in a step that becomes a graph. (2.11, 2.13)

The kernels of `ctc_loss` get the lengths of inputs and targets from the host: torch reads them there, which waits for
the device, launches kernels whose size depends on them, and copies them to the device from memory that is not pinned.
No graph holds any of it. So a capture leaves gaps, for the loss and for its backward, and torch's own code runs there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from pygraph_train.gaps import leave_gap, may_leave_gap
from pygraph_train.torch_private.changes import before_examples
from pygraph_train.torch_private.dispatch import FakeTensor
from pygraph_train.torch_private.gap_modes import is_of_step, present_modes, refuse_second_gradient
from pygraph_train.torch_private.memory import borrower

__all__ = ["changes", "ctc_loss"]


def ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: str | int = "mean",
    zero_infinity: bool = False,
) -> Tensor:
    """`torch.nn.functional.ctc_loss` and `torch.ctc_loss`, which captures may hold as well: they leave gaps for it."""
    from torch.nn import _reduction as _Reduction

    number = reduction if isinstance(reduction, int) else _Reduction.get_enum(reduction)
    more = (blank, number, zero_infinity)
    if not (may_leave_gap() or isinstance(log_probs, FakeTensor)):
        return torch.ctc_loss(log_probs, targets, input_lengths, target_lengths, *more)
    needs_gradient = torch.is_grad_enabled() and log_probs.requires_grad
    given = (log_probs, targets, input_lengths, target_lengths, *more, needs_gradient)
    made: Tensor = _Loss.apply(*given)  # type: ignore[no-untyped-call]
    return made


class _Loss(torch.autograd.Function):
    """What the loss is like. Its values come from torch, in gaps."""

    @staticmethod
    def forward(ctx: Any, log_probs: Tensor, *given: Any) -> Tensor:
        *given, needs_gradient = given  # type: ignore[assignment]
        loss = _like_loss(log_probs, reduction=given[4])
        ctx.save_for_backward(log_probs, given[0])  # the backward reads the memory of both
        if may_leave_gap():
            ctx.gap = _Gap(loss, log_probs, given, needs_gradient=needs_gradient)
            leave_gap(ctx.gap.forward)
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        log_probs, _ = ctx.saved_tensors
        found = torch.empty_like(log_probs, memory_format=torch.contiguous_format)
        if may_leave_gap():
            refuse_second_gradient("ctc_loss")
            leave_gap(ctx.gap.backward(grad, found))
        return found, *[None] * 7


def _like_loss(log_probs: Tensor, *, reduction: int) -> Tensor:
    """A tensor of the shape and dtype of the loss, without its values."""
    device = log_probs.device.type
    small = log_probs.dtype in (torch.float16, torch.bfloat16)
    dtype = torch.float32 if small and torch.is_autocast_enabled(device) else log_probs.dtype
    batched = log_probs.dim() == 3
    return log_probs.new_empty(log_probs.shape[1:2] if batched and not reduction else (), dtype=dtype)


class _Gap:
    """The loss and its backward in one replay after the other.

    Args:
        loss: gets the loss.
        log_probs, given: arguments of `torch.ctc_loss`. What is captured owns these tensors' memory, not the gap: it
            holds what the backward reads until then.
    """

    def __init__(
        self, loss: Tensor, log_probs: Tensor, given: Sequence[Any], *, needs_gradient: bool
    ) -> None:
        self._loss, self._log_probs = borrower(loss), borrower(log_probs)
        self._given = [reader(x, log_probs.device) if isinstance(x, Tensor) else x for x in given]
        self._needs_gradient = needs_gradient
        self._backwards = 0
        self._around = present_modes(log_probs.device.type)
        self._made: tuple[Tensor, Tensor] | None = None

    def forward(self) -> None:
        """The loss of this replay."""
        given: list[Any] = [x() if callable(x) else x for x in self._given]
        differentiates = self._needs_gradient and self._backwards > 0
        with self._around(), torch.set_grad_enabled(differentiates):
            log_probs = self._log_probs().requires_grad_(differentiates)
            loss = torch.ctc_loss(log_probs, *given)
        self._made = (log_probs, loss) if differentiates else None
        _copy(loss, self._loss())

    def backward(self, grad: Tensor, found: Tensor) -> Callable[[], None]:
        """What computes the gradient of this replay. A step may ask for it more than once (`retain_graph`).

        Args:
            grad: of the loss.
            found: gets the gradient of the probabilities.
        """
        given, result = borrower(grad), borrower(found)
        self._backwards += 1
        number = self._backwards

        def work() -> None:
            assert self._made is not None
            log_probs, loss = self._made
            further = number < self._backwards
            self._made = self._made if further else None
            _copy(torch.autograd.grad(loss, log_probs, given(), retain_graph=further)[0], result())

        return work


def reader(x: Tensor, device: torch.device) -> Callable[[], Tensor]:
    """Gives a tensor of a capture on `device` in replays. One of the host is a constant there, which no graph owns."""
    return borrower(x) if x.device == device else x.detach().clone


def _copy(made: Tensor, place: Tensor) -> None:
    if made.shape != place.shape or made.dtype != place.dtype:
        raise RuntimeError(
            f"torch.ctc_loss made {made.dtype} of shape {tuple(made.shape)}, "
            f"and its graph takes {place.dtype} of shape {tuple(place.shape)}"
        )
    with torch.no_grad():
        place.copy_(made)


_OF_TORCH = (torch.ctc_loss, torch.nn.functional.ctc_loss)


def changes() -> tuple[tuple[Any, str, Any], ...]:
    """(owner, attribute, value), for one trace: the loss is one operation of the graph."""

    def see(node: fx.Node, tx: Any) -> None:
        if node.op == "call_function" and node.target in _OF_TORCH and is_of_step(node, tx):
            node.target = ctc_loss

    return before_examples(see)
