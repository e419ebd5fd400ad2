"""`torch._check_tensor_all` under Dynamo, which reads a truth on the host: models of transformers for images do it.

Where the tensor follows from what a step is given, the answer is asked for ahead, and the graph holds no check. If it
does not hold, the step raises its exception itself. (2.11, 2.13)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from pygraph_train.torch_private.changes import Around
from pygraph_train.torch_private.drawn_numbers import CallResult, DrawRecorder
from pygraph_train.torch_private.host_numbers import end_graph

__all__ = ["changes"]


class Hooks(Protocol):
    """What a check asks."""

    recorder: DrawRecorder

    def read(self, tx: Any, variable: Any) -> CallResult | None:
        """What the recorder has for a variable whose value the step reads here."""

    def answer(self, tx: Any, slot: CallResult) -> bool:
        """The answer to a condition."""


def changes(hooks: Hooks) -> tuple[tuple[Any, str, Any], ...]:
    """(owner, attribute, value), for one trace."""
    from torch._dynamo.variables.constant import ConstantVariable
    from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

    checks = ((torch._check_tensor_all, 0), (torch._check_tensor_all_with, 1))  # and where the tensor is

    def checking(call_function: Callable[..., Any]) -> Callable[..., Any]:
        def called(variable: Any, tx: Any, args: Any, kwargs: Any) -> Any:
            place = next((place for fn, place in checks if variable.value is fn), len(args))
            slot = hooks.read(tx, args[place]) if place < len(args) else None
            if slot is None:
                return call_function(variable, tx, args, kwargs)
            if not hooks.answer(tx, hooks.recorder.make(torch.all, [slot], {})):
                end_graph("a check of the step does not hold")
            return ConstantVariable.create(None)

        return called

    return ((TorchInGraphFunctionVariable, "call_function", Around(checking)),)
