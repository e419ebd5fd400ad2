"""A function of a plain loop that makes its backwards and updates itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from pygraph_train.gradients.old import OldGradients
from pygraph_train.optimizers.several import OptimizerSet
from pygraph_train.parallel.replication import RECORDER
from pygraph_train.patches import standing_in
from pygraph_train.step.outputs import detached_results
from pygraph_train.step.plan import PositionInAccumulation
from pygraph_train.step.program import Call, plain_call
from pygraph_train.step.program_by_hand import ProgramByHand, called_parts
from pygraph_train.torch_private.replaced_calls import replaced_in_traces
from pygraph_train.tracing.traced_code import guard_constants

__all__ = [
    "FunctionByHand",
    "stand_ins_of",
    "traced_backward",
    "traced_clip_grad_norm",
    "traced_clip_grad_value",
]


class FunctionByHand(ProgramByHand):
    """`StepProgram` over a function that calls `loss.backward()`, `optimizer.step()` and the like.

    Args:
        step_fn: makes a whole training step.
        model: holds all modules of the step.
        optimizers: all that the function steps.
        device: where the step's tensors live.
    """

    recorder: str | tuple[str, ...] | None = RECORDER
    detaches_results: bool = True

    def __init__(
        self,
        step_fn: Callable[..., Any],
        model: nn.Module,
        optimizers: OptimizerSet,
        device: torch.device,
    ) -> None:
        super().__init__(model, optimizers, device, called_parts)
        self._step_fn = step_fn
        self._optimizers = optimizers.members
        self._stand_ins = stand_ins_of(self._optimizers)

    # -- what is traced -----------------------------------------------------------------------------

    def function(self) -> Callable[..., Any]:
        return self._step_fn

    def context(self) -> Any:
        return standing_in(self._stand_ins)

    @contextmanager
    def seen_by_dynamo(self) -> Iterator[None]:
        with standing_in(self._stand_ins), replaced_in_traces(_REPLACED, traced_backward):
            yield

    def readers(self, old: OldGradients) -> Iterable[tuple[Any, str, Any]]:
        yield Tensor, "backward", old.looked_at_after(Tensor.backward)

    # -- what is run --------------------------------------------------------------------------------

    def constants(self) -> tuple[Any, ...]:
        """What a capture bakes in: which parameters have gradients when the step begins. Hot path."""
        return self.position().constants

    def run(
        self,
        call: Call,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        position: PositionInAccumulation,
        update: Callable[..., None],
    ) -> Any:
        """The whole step without a graph."""
        if call is plain_call and self._preparation is None:
            return detached_results(self._step_fn(*args, **kwargs))
        with self.training(), self.as_outside(), standing_in(self._steps()):
            return detached_results(call(self._step_fn, args, kwargs))

    def forward(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Any]:
        """The whole step."""
        with self.attempting(), self.as_outside(), standing_in(self._steps()):
            result = call(self._step_fn, args, kwargs)
        return torch.zeros((), device=self.device), detached_results(result)

    def _steps(self) -> Iterator[tuple[Any, str, Any]]:
        """The step of each optimizer, with the kernels that graphs hold."""
        for optimizer in self._optimizers:
            yield optimizer, "step", self._step_of(optimizer, optimizer.step)

    def _step_of(self, optimizer: torch.optim.Optimizer, stock: Callable[..., Any]) -> Callable[..., Any]:
        def step(*args: Any, **kwargs: Any) -> Any:
            with self.updating(optimizer):
                return stock(*args, **kwargs)

        return step


def stand_ins_of(optimizers: Iterable[Any]) -> list[tuple[Any, str, Any]]:
    """What Dynamo meets in the place of methods of these optimizers, as `standing_in` takes it."""
    return [
        (optimizer, name, call)
        for optimizer in optimizers
        for name, call in (("step", _Step(optimizer)), ("zero_grad", _zero_grad))
    ]


class _Step:
    """In the place of `optimizer.step`."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def __call__(self, closure: Any = None) -> None:
        if closure is not None:
            raise NotImplementedError("a graph cannot hold step(closure)")


def _zero_grad(set_to_none: bool = True) -> None:
    """In the place of `optimizer.zero_grad`."""
    guard_constants(set_to_none)


def _zero_grad_of_module(module: nn.Module, set_to_none: bool = True) -> None:
    guard_constants(set_to_none)


def traced_backward(
    loss: Tensor,
    gradient: Any = None,
    retain_graph: Any = None,
    create_graph: Any = False,
    inputs: Any = None,
) -> None:
    """In the place of `Tensor.backward`."""
    guard_constants((retain_graph, create_graph))
    if create_graph:
        raise NotImplementedError("a graph cannot hold backward(create_graph=True)")
    if inputs is not None:
        raise NotImplementedError("a graph cannot hold backward(inputs=...)")


def traced_clip_grad_norm(
    parameters: Any,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """In the place of `clip_grad_norm_`."""
    guard_constants((max_norm, norm_type, error_if_nonfinite, foreach))
    if error_if_nonfinite:
        raise NotImplementedError("a graph cannot hold clip_grad_norm_(error_if_nonfinite=True)")
    held = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    return torch.zeros((), device=held[0].device)  # the capture computes it


def traced_clip_grad_value(parameters: Any, clip_value: float, foreach: bool | None = None) -> None:
    """In the place of `clip_grad_value_`."""
    guard_constants((clip_value, foreach))
    if not isinstance(parameters, Tensor):
        list(parameters)


_REPLACED: dict[Callable[..., Any], Any] = {
    nn.Module.zero_grad: _zero_grad_of_module,
    torch.nn.utils.clip_grad_norm_: traced_clip_grad_norm,
    torch.nn.utils.clip_grad_value_: traced_clip_grad_value,
}
"""Functions that read or write gradients, which a trace does not know: what it traces in their place."""
