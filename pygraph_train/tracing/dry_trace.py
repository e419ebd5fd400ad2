"""A trace that executes nothing: what Dynamo says of a call before it is made."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from pygraph_train.problems import NotLegal, Problem
from pygraph_train.torch_private.dynamo import (
    dynamo_asked_whether_compiling,
    dynamo_cache_entries,
    dynamo_error_place,
)
from pygraph_train.tracing.reasons import compiler_failed, forget_frames
from pygraph_train.tracing.required_gradients import GivenTensors
from pygraph_train.tracing.trace import Trace

__all__ = ["DryTrace"]


class _Traced(Exception):
    """In the place of the execution of what was traced."""


class DryTrace(Trace):
    """One call under Dynamo, which stops where the call would be executed.

    Args:
        device: where the tensors of the call live.

    Attributes:
        refused: why the call cannot be traced as one graph, None where it can.
        asks_dynamo: whether it asks if it runs under Dynamo, and may be another one without.
    """

    may_draw = False

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.refused: Problem | None = None
        self.asks_dynamo = False
        self._given = GivenTensors(runs=False)
        self._probe = torch.zeros((), device=device)

    def _function_to_trace(self) -> types.FunctionType:
        return types.FunctionType(_call_and_probe.__code__.replace(co_name="traced_step"), globals())

    def look(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Trace `fn(*args, **kwargs)`."""
        arguments = (*args, self._probe)
        try:
            self(fn, arguments, kwargs)
        except _Traced:
            self._stopped({"fn": fn, "args": arguments, "kwargs": kwargs})
        except NotLegal as refused:
            self.refused = _of_a_branch(refused) or refused.problem
        except Exception as error:  # the real call comes next, and raises what it has to
            self.refused = compiler_failed(error)
            forget_frames(error)

    def _stopped(self, frame: dict[str, Any]) -> None:
        entries = dynamo_cache_entries(self._code.__code__)
        if not entries:
            self.refused = Problem("Dynamo did not trace it")
            return
        try:
            self._take_guards(entries[0], frame)
        except NameError:  # Dynamo's own words, for what it makes tensors of
            self.refused = Problem("it computes with NumPy numbers or arrays")
        self.refused = self.refused or self._given.problem

    def still_holds(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> bool:
        """Whether this call is the one that was traced. Hot path."""
        return self.traced and self.holds(fn, (*args, self._probe), kwargs)

    def what_changed(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Problem:
        """The guard that does not hold for this call."""
        return self.why_not(fn, (*args, self._probe), kwargs)

    def _backend(self, graph: torch.fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        super()._backend(graph, example_inputs)
        self.asks_dynamo |= dynamo_asked_whether_compiling()
        return _stop

    def _reads_gradients(self, graph: torch.fx.GraphModule) -> None:
        """An optimizer reads those of the present step."""


def _of_a_branch(refused: NotLegal) -> Problem | None:
    """A sentence for Python that looks at a value of the device, for which Dynamo has its own words."""
    error = refused.__context__
    if error is None or "data-dependent" not in str(error):
        return None
    return Problem(
        "it branches in Python on a value that is computed on the device",
        dynamo_error_place(error) or refused.problem.where,
    )


def _call_and_probe(fn: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    for group in getattr(getattr(fn, "__self__", None), "param_groups", ()):
        for p in group["params"]:  # where Dynamo meets a gradient first elsewhere, it wants the same object
            p.grad  # noqa: B018
    fn(*args[:-1], **kwargs)
    # without any operation Dynamo would execute the frame and ask no backend
    probe: Tensor = args[-1] + 1
    return probe


def _stop(*inputs: Tensor) -> Any:
    raise _Traced
