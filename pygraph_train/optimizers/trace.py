"""Is the step of an optimizer that we know nothing of a pure function of tensors? Asked of Dynamo, run by nobody.

What is true of a training step (see `legality`) is true of an optimizer's: a replay runs no Python, so every
Python value that it reads needs a guard, and it may write none. The step is traced from the state in which it is
captured next, and stops where Dynamo would execute it: the only run of that step is the one that the user has.
"""

from __future__ import annotations

import re
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from pygraph_train.problems import Problem
from pygraph_train.torch_private.optim import optimizer_step_function
from pygraph_train.tracing.dry_trace import DryTrace
from pygraph_train.tracing.reasons import readable

__all__ = ["OptimizerTrace"]

_FIX = "Numbers that change belong in tensors on the device, where a graph reads them"
_WORDS = {
    " is written by the step, and replay runs no Python": " is written by it in Python, which a replay would not do",
    ": the step depends on Python state that changes": "",
    "the step is not one graph": "it is not one graph for Dynamo",
}
"""What is said of training steps, as it is said of an optimizer's."""
_STATE = re.compile(r"self\.state\[list\(dict\.keys\(self\.state\)\)\[(\d+)\]\]")


class OptimizerTrace:
    """The guards under which the step of one optimizer does the same to the same tensors.

    Args:
        optimizer: as it is after some of its steps: the first ones set things up.
        device: where its parameters are.

    Attributes:
        problem: why it is no pure function of tensors, None where it is one.
    """

    def __init__(self, optimizer: Optimizer, device: torch.device) -> None:
        self._optimizer = optimizer
        self._trace = DryTrace(device)
        self._trace.look(self._step())
        problem = self._trace.refused or self._trace.problem
        if problem is None and self._trace.asks_dynamo:
            problem = Problem("it does something else under torch.compile (torch.compiler.is_compiling)")
        if problem is None and self._trace.rebound:
            problem = Problem(f"{readable(self._trace.rebound[0])} gets other memory (`.data = ...`)")
        if problem is None and not self.still_holds():
            problem = Problem("its guards do not hold for the step that was traced")
        self.problem = None if problem is None else self._told(problem)

    def still_holds(self) -> bool:
        """Whether the next step does what the traced one did. Hot path."""
        return self._trace.still_holds(self._step())

    def what_changed(self) -> Problem:
        """The guard that does not hold any more."""
        return self._told(self._trace.what_changed(self._step()))

    def read(self) -> tuple[Tensor, ...]:
        """The tensors that the step reads or writes, as `still_holds` saw them last."""
        return self._trace.latest_tensors

    def _step(self) -> Callable[[], Any]:
        return types.MethodType(optimizer_step_function(self._optimizer), self._optimizer)

    def _told(self, problem: Problem) -> Problem:
        reason = _STATE.sub(r"the state of parameter \1", problem.reason)
        for ours, theirs in _WORDS.items():
            reason = reason.replace(ours, theirs)
        text = f"{type(self._optimizer).__qualname__}.step is not known to be the same each time, as {reason}"
        return Problem(f"the optimizer runs outside of the graph: {text}", problem.where, _FIX)
