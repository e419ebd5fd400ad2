"""Optimizers of other libraries: tried in a graph of their own, and left out as soon as that shows.

Nothing is known of their kernels, so nothing about them is changed: learning rates are baked in, and a new one
means a new capture. A host read makes the capture fail. What Python a step changes, a replay would not: that is
looked for while the step still runs. What Python it reads has to have guards, see `optimizer_trace`. The first
replays are compared with the step without a graph, bit for bit.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from pygraph_train.graphs.engine import Engine
from pygraph_train.optimizers.numbers import LiveNumbers
from pygraph_train.optimizers.preparation import OptimizerPreparation
from pygraph_train.optimizers.trace import OptimizerTrace
from pygraph_train.problems import Problem, defined_at
from pygraph_train.torch_private.optim import (
    count_optimizer_step,
    optimizer_step_function,
    optimizer_step_hook_tables,
    optimizer_step_override,
    runs_step_hooks,
)

__all__ = ["OptimizerTrial"]


class OptimizerTrial(OptimizerPreparation):
    """Takes the place of `OptimizerPreparation`, and does nothing of what it does: see there for the promises.

    Args:
        optimizer: of a class that is none of torch's.
        emulated: the graphs are CPU tapes and everything lives on the CPU.
    """

    def __init__(self, optimizer: Optimizer, *, emulated: bool) -> None:
        super().__init__(optimizer, emulated=emulated)
        self.optimizer = optimizer
        self._name = type(optimizer).__qualname__
        self._problem: Problem | None = None
        self._runs = 0
        self._seen: Any = None
        self._trace: OptimizerTrace | None = None
        self._tensors: list[Tensor] = []
        self._read: list[Tensor] = []
        self._addresses: list[int] = []

    @property
    def reason(self) -> str | None:
        """Why the step cannot be captured, None while nothing is known against it."""
        if self._problem is not None:
            return self._problem.reason
        optimizer = self._optimizer
        if not runs_step_hooks(optimizer):
            return f"{self._name} is a wrapper, whose step a replay would not run"
        if optimizer_step_override(optimizer) is not None:
            return f"{self._name}.step was replaced, and a replay would not run what it is now"
        if any(optimizer_step_hook_tables(optimizer)):
            return f"a step hook of {self._name} would not run in a replay"
        params = list(self._parameters())
        if any(p.is_cpu != self._emulated for p in params):
            return f"{self._name}'s parameters are not on the device of the graphs"
        if any(p.grad is not None and p.grad.is_sparse for p in params):
            return f"{self._name} gets sparse gradients, whose sizes are known only on the host"
        return None

    @property
    def step_supports_scaler(self) -> bool:
        """Nobody knows."""
        return False

    @property
    def problem(self) -> Problem | None:
        """The same, with the line where it is known."""
        return self._problem or super().problem

    @contextmanager
    def prepared(self) -> Iterator[None]:
        """Nothing is changed."""
        yield

    @property
    def active(self) -> bool:
        """Never: nothing is changed."""
        return False

    @contextmanager
    def warm_up(self) -> Iterator[None]:
        """Watch what the step that runs inside changes in Python."""
        self._seen = self.hyperparameters()
        before = self._python_state()
        yield
        after = self._python_state()
        changed = next((what for what, value in before.items() if after.get(what, value) != value), None)
        if changed is not None and self._runs and self._problem is None:  # the first step sets things up
            self._problem = Problem(
                f"the optimizer runs outside of the graph: {self._name}.step changes {changed} in Python, which a "
                "replay would not",
                defined_at(inspect.unwrap(optimizer_step_function(self._optimizer))),
                "Numbers that change belong in tensors on the device",
            )
        self._runs += 1

    @property
    def steady(self) -> bool:
        """Whether the last step had the same learning rate and the like, so that a trace may pay."""
        return bool(self._seen == self.hyperparameters())

    def prove(self) -> Problem | None:
        """Trace the step as it is now: why a replay might do something else, None where it cannot."""
        if self._problem is None:
            trace = OptimizerTrace(self._optimizer, next(self._parameters()).device)
            self._problem = trace.problem
            if trace.problem is None:
                self._trace = trace
                self._tensors = self._held()
                self._read = self._without_gradients(trace.read())
                self._addresses = list(map(Tensor.data_ptr, self._read))
        return self._problem

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Nothing was changed."""
        yield

    def sync(self) -> None:
        """Learning rates are baked in; schedulers know of the call."""
        count_optimizer_step(self._optimizer)

    def settle(self, engine: Engine) -> None:
        """State stays where it is."""

    def hyperparameters(self) -> tuple[Any, ...]:
        """What a capture bakes in: every value of the groups, and Python numbers on the optimizer."""
        baked: list[Any] = [tuple(self._attributes())]
        for group in self._optimizer.param_groups:
            baked.append(tuple(map(id, group["params"])))
            baked += [
                (k, id(v) if isinstance(v, Tensor) else _comparable(v))
                for k, v in group.items()
                if k != "params"
            ]
        return tuple(baked)

    def live_numbers(self, engine: Engine) -> LiveNumbers:
        """None: what its kernels make of a number is not known."""
        return LiveNumbers(self._optimizer, (), engine)

    def state_tensors(self) -> list[Tensor]:
        """Every tensor that a step may write, besides parameters."""
        return [*self._held(), *self._read]

    def _held(self) -> list[Tensor]:
        places = chain(self._optimizer.state.values(), self._optimizer.param_groups, (vars(self._optimizer),))
        return [
            v for place in places if isinstance(place, dict) for v in place.values() if isinstance(v, Tensor)
        ]

    def remember(self) -> None:
        """`prove` did, right before the capture."""

    def state_unchanged(self) -> bool:
        """Whether they are the same objects at the same addresses, and every guard of the step holds."""
        held, trace = self._held(), self._trace
        if self._problem is not None or trace is None:
            return False
        if len(held) != len(self._tensors) or not all(map(operator.is_, held, self._tensors)):
            return False
        if not trace.still_holds():
            return False
        read = self._without_gradients(trace.read())
        return (
            len(read) == len(self._read)
            and all(map(operator.is_, read, self._read))
            and list(map(Tensor.data_ptr, read)) == self._addresses
        )

    def what_changed(self) -> Problem:
        """The guard of the step that does not hold, if it is one."""
        if self._trace is not None and not self._trace.still_holds():
            return self._trace.what_changed()
        return Problem(
            f"the optimizer runs outside of the graph: {self._name} is none of torch.optim's, a graph bakes in its "
            "learning rate and other numbers, and one of them changes again and again, or which parameters have "
            "gradients"
        )

    def close(self) -> None:
        """There is nothing to undo."""
        self._problem = self._problem or Problem("the preparation was closed")
        self._trace = None

    def _without_gradients(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Gradients are others on every step; the phase knows where they lie."""
        gradients = {id(p.grad) for p in self._parameters()}
        return [t for t in tensors if id(t) not in gradients]

    def _parameters(self) -> Iterator[Tensor]:
        for group in self._optimizer.param_groups:
            yield from group["params"]

    def _attributes(self) -> Iterator[tuple[str, Any]]:
        for name, value in vars(self._optimizer).items():
            if isinstance(value, (bool, int, float, str)):
                yield name, value

    def _python_state(self) -> dict[str, Any]:
        found = {f"its attribute {name}": value for name, value in self._attributes()}
        for index, group in enumerate(self._optimizer.param_groups):
            found |= {
                f"{k!r} of parameter group {index}": _comparable(v) for k, v in group.items() if k != "params"
            }
        for index, p in enumerate(self._parameters()):
            state = self._optimizer.state.get(p)
            for key, value in state.items() if isinstance(state, dict) else ():
                found[f"the state {key!r} of parameter {index}"] = _comparable(value)
        return found


def _comparable(value: Any) -> Any:
    """A value that is equal to itself later only if nothing has changed."""
    if isinstance(value, (bool, int, float, str, bytes, complex, type(None))):
        return value
    if isinstance(value, Tensor):
        return id(value)
    if isinstance(value, (list, tuple)):
        return tuple(map(_comparable, value))
    if isinstance(value, dict):
        return tuple((str(k), _comparable(v)) for k, v in value.items())
    return id(value)
