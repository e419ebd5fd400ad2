"""Between the first two steps: what a loop does that the step has done already is told."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pygraph_train.problems import PyGraphError, user_location
from pygraph_train.trees import map_leaves

_results: dict[int, Tensor] = {}
"""Results of first steps, by their id, until the second step of the same kind."""

_backward: Callable[..., Any] | None = None
"""`Tensor.backward` as it was, while there are such results."""


class AfterFirstStep:
    """Looks at what is done between the first and the second step of a loop. Later steps cost nothing.

    `loss.backward()` raises autograd's own error, which does not say that the step was the backward. Here it says so.
    An `optimizer.step()` of the caller updates a second time with the same gradients, silently. Here it is told.

    Args:
        result: what the first step returned.
        optimizer: which the step has stepped, None where the caller does so.

    Attributes:
        close: called when there will be no second step.
    """

    def __init__(self, result: Any, optimizer: torch.optim.Optimizer | None) -> None:
        self.close = weakref.finalize(self, _forget, _remember(result))
        self._state = None if optimizer is None else _state_of(optimizer)

    def end(self) -> str | None:
        """Before the second step. Returns a sentence about an update of the caller, None where there was none."""
        self.close()
        if self._state is None:
            return None
        state, key, tensor, value = self._state
        if state.get(key) is not tensor or torch.equal(tensor, value):
            return None
        return (
            "optimizer.step() was called after a step that had already stepped the optimizer, so the same "
            "gradients update the parameters twice. Remove optimizer.step() from the loop, or make the step "
            "without optimizer="
        )


def _state_of(optimizer: torch.optim.Optimizer) -> tuple[dict[str, Any], str, Tensor, Tensor] | None:
    """The smallest tensor that each step of the optimizer writes, with its place and value now; None without any.

    Fused kernels write it without a new version of the tensor, so values are compared: once in a training.
    """
    kept = getattr(optimizer, "state", None)  # wrappers of other libraries may lack it
    found = [
        (state, key, value)
        for state in (kept.values() if isinstance(kept, dict) else ())
        if isinstance(state, dict)
        for key, value in state.items()
        if type(value) is Tensor and value.layout is torch.strided
    ]
    if not found:
        return None
    state, key, tensor = min(found, key=lambda entry: entry[2].numel())
    return state, key, tensor, tensor.detach().clone()


def _remember(result: Any) -> list[int]:
    """Let `backward` of these tensors raise an error that says what has happened."""
    global _backward
    tensors: list[Tensor] = []
    try:
        map_leaves(lambda leaf: tensors.append(leaf) if type(leaf) is Tensor else None, result)
    except TypeError:  # a container that only its author can rebuild
        return []
    fresh = [t for t in tensors if not t.requires_grad and t.dim() == 0]
    _results.update({id(t): t for t in fresh})
    if fresh and _backward is None:
        _backward = Tensor.backward
        Tensor.backward = _told_backward  # type: ignore[method-assign, assignment]
    return [id(t) for t in fresh]


def _forget(keys: list[int]) -> None:
    global _backward
    for key in keys:
        _results.pop(key, None)
    if not _results and _backward is not None and Tensor.backward is _told_backward:
        Tensor.backward = _backward  # type: ignore[method-assign]
        _backward = None


def _told_backward(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Takes the place of `Tensor.backward` between a first and a second step."""
    if _results.get(id(tensor)) is tensor:
        raise PyGraphError(
            f"loss.backward() was called at {user_location()} on the result of a step that has already run the "
            "backward. Remove loss.backward() from the loop: gradients are in .grad after the step"
        )
    assert _backward is not None
    return _backward(tensor, *args, **kwargs)
