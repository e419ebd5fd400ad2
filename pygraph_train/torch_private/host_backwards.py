"""Operations whose backward reads on the host, in a step that becomes a graph: `prod` and `cumprod`. (2.11, 2.13)

Autograd looks there whether the input holds a zero, to choose a formula, and this waits for the device. A capture
leaves a gap for such a backward: torch computes the operation once more there, and its own backward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from pygraph_train.gaps import leave_gap, may_leave_gap
from pygraph_train.torch_private.changes import before_examples
from pygraph_train.torch_private.dispatch import FakeTensor
from pygraph_train.torch_private.dynamo import example_of
from pygraph_train.torch_private.gap_modes import is_of_step, present_modes, refuse_second_gradient
from pygraph_train.torch_private.memory import borrower

__all__ = ["backward_in_gap", "changes"]

_METHODS = ("prod", "cumprod")
_FUNCTIONS = {torch.prod: "prod", torch.cumprod: "cumprod"}


def backward_in_gap(x: Tensor, method: str, *args: Any, **kwargs: Any) -> Tensor:
    """What a method of `x` returns for these arguments. A capture leaves a gap for its backward."""
    if not (may_leave_gap() or isinstance(x, FakeTensor)):
        made: Tensor = getattr(x, method)(*args, **kwargs)
        return made
    made = _BackwardInGap.apply(x, method, args, kwargs)  # type: ignore[no-untyped-call]
    return made


class _BackwardInGap(torch.autograd.Function):
    """The kernel of torch, with a gap for its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        ctx.save_for_backward(x)
        ctx.call, ctx.around = (method, args, kwargs), present_modes(x.device.type)
        made: Tensor = getattr(x, method)(*args, **kwargs)
        return made

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (x,) = ctx.saved_tensors
        found, (method, args, kwargs), around = torch.empty_like(x), ctx.call, ctx.around
        if not may_leave_gap():
            return found, None, None, None
        refuse_second_gradient(method)
        x, grad = x.resolve_neg(), grad.resolve_neg()  # a gap sees memory alone
        of_x, of_grad, result = map(borrower, (x, grad, found))

        def work() -> None:
            with torch.enable_grad(), around():
                given = of_x().requires_grad_()
                made = getattr(given, method)(*args, **kwargs)
            with torch.no_grad():
                result().copy_(torch.autograd.grad(made, given, of_grad())[0])

        leave_gap(work)
        return found, None, None, None


def changes() -> tuple[tuple[Any, str, Any], ...]:
    """(owner, attribute, value), for one trace: such operations leave gaps where their gradient is asked for."""

    def see(node: fx.Node, tx: Any) -> None:
        method = _method_of(node) if is_of_step(node, tx) else None
        if method is None or not {"input", "out", "dtype"}.isdisjoint(node.kwargs):
            return
        x, *rest = node.args
        given = example_of(x)
        if isinstance(given, Tensor) and given.requires_grad and given.dim() and not given.is_complex():
            node.op, node.target, node.args = "call_function", backward_in_gap, (x, method, *rest)

    return before_examples(see)


def _method_of(node: fx.Node) -> str | None:
    if node.op == "call_function":
        return _FUNCTIONS.get(node.target)  # type: ignore[arg-type]
    return node.target if node.op == "call_method" and node.target in _METHODS else None  # type: ignore[return-value]
