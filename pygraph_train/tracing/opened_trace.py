"""A trace of modules whose own hooks Dynamo cannot follow: it looks at them without these, and executes nothing."""

from __future__ import annotations

import re
import types
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from torch import Tensor

from pygraph_train.problems import Problem
from pygraph_train.torch_private.checkpoints import checkpoints_leave_generators
from pygraph_train.torch_private.cuda import told_as_capturing
from pygraph_train.torch_private.dynamo import dynamo_cache_entries
from pygraph_train.torch_private.guards import guarded_expression
from pygraph_train.tracing.recompute import draws_numbers
from pygraph_train.tracing.trace import Trace
from pygraph_train.tracing.traced_code import guard_constants, held_weakly

__all__ = ["OpenedTrace"]


class _Stopped(Exception):
    """In the place of the execution of what was traced."""


class OpenedTrace(Trace):
    """One function, traced while its modules are opened. Each call runs the function as it runs in a capture.

    Args:
        device: where the step's tensors live.
        opened: a context in which Dynamo can see the modules. It yields what stands in for their hooks: no guard is
            kept of it.
        recorder: see `Trace`.
        asked_in: the context in which the guards of the trace are asked. What stands in there is guarded.

    Attributes:
        draws: whether the step draws random numbers.
    """

    runs_graph = False

    def __init__(
        self,
        device: torch.device,
        opened: Callable[[], AbstractContextManager[frozenset[Any]]],
        *,
        recorder: str | tuple[str, ...] | None = None,
        asked_in: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        super().__init__(device, compiler=held_weakly(self._stop), recorder=recorder)
        self.draws = True
        self._go_through_dynamo(
            types.FunctionType(_only_traced.__code__.replace(co_name="traced_step"), globals())
        )
        self._opened = opened
        self._asked_in = asked_in
        self._stand_ins: frozenset[Any] = frozenset()
        self._frame: dict[str, Any] = {}

    def __call__(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run `fn(*args, **kwargs)` in Python. The first call is traced before.

        Raises:
            NotLegal: the function cannot be traced as one graph; nothing was executed.
        """
        self.look(fn, args, kwargs)
        return self.run(fn, args, kwargs)

    def look(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Trace the first call, and find out whether the trace is valid for any other one.

        Raises:
            NotLegal: the function cannot be traced as one graph; nothing was executed.
        """
        if self.problem is None and not self.traced:
            with self._asked_in():
                self._look(fn, args, kwargs)
        elif self.problem is None:
            with self._asked_in():
                if not self.holds(fn, args, kwargs):
                    self.problem = self.why_not(fn, args, kwargs)

    def tensors(
        self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Tensor, ...]:
        """The tensors behind `inputs`, read now: some may be read from a stand-in."""
        with self._asked_in():
            return super().tensors(fn, args, kwargs)

    def argument_tensors(
        self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[tuple[str, Tensor]]:
        """See `Trace.argument_tensors`."""
        with self._asked_in():
            return super().argument_tensors(fn, args, kwargs)

    def run(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run `fn(*args, **kwargs)` in Python, as it runs in a capture."""
        with ExitStack() as around:
            if self.device.type == "cuda":
                # models that ask whether they are captured do the same in every run that is compared with the capture
                around.enter_context(told_as_capturing())
            if not self.draws:  # a capture cannot ask generators where they are, and checkpoints would
                around.enter_context(checkpoints_leave_generators())
            return fn(*args, **kwargs)

    def _look(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        frame = self._frame = {"fn": fn, "args": args, "kwargs": kwargs}
        try:
            with self._opened() as self._stand_ins:
                super().__call__(fn, args, kwargs)
        except _Stopped:
            pass
        finally:
            self._frame = {}
        self.problem = self.problem or self._given.problem
        entries = dynamo_cache_entries(self._code.__code__)
        if not entries:
            self.problem = self.problem or Problem("Dynamo did not trace the step")
            return
        try:
            self._take_guards(entries[0], frame)
        except Exception as error:  # an expression that only Dynamo's own code understands
            self.problem = self.problem or Problem(
                f"the step reads a tensor that pygraph-train cannot find again: {error}"
            )

    def _stop(
        self, graph: torch.fx.GraphModule, example_inputs: list[Any], left: list[str]
    ) -> Callable[..., Any]:
        """In the place of a compiler: nothing is executed."""

        def stop(*inputs: Any) -> Any:
            raise _Stopped

        self.draws = draws_numbers(graph)
        return stop

    def _keep_guards(self, guards: Sequence[Any]) -> list[bool]:
        kept = super()._keep_guards(guards)
        ours = (self._is_of_stand_in(guarded_expression(guard)) for guard in guards)
        return [keep and not our for keep, our in zip(kept, ours, strict=True)]

    def _is_of_stand_in(self, expression: str) -> bool:
        """Whether a guard is about something that is reached through a hook that is there only during the trace."""
        found = _TABLE.search(expression)
        if found is None:
            return False
        end, depth = found.end(), 1
        while depth and end < len(expression):
            depth += {"[": 1, "]": -1}.get(expression[end], 0)
            end += 1
        try:
            hook = eval(expression[:end], {"L": self._frame, "G": self._code.__globals__})
        except Exception:  # no expression of Python's alone
            return False
        return hook in self._stand_ins


_TABLE = re.compile(r"\._forward(?:_pre)?_hooks\[")


def _only_traced(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not torch.compiler.is_dynamo_compiling():  # Dynamo is off: nothing may be executed all the same
        raise _Stopped
    result = fn(*args, **kwargs)
    guard_constants(result)
    return result
