"""Training steps that are nothing but a function for the loss: everything else of the step is the library's to do."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pygraph_train.boundary import UPDATE, executes, theirs, tried
from pygraph_train.core.node import made_directly
from pygraph_train.optimizers.clipped import ClippedParameters
from pygraph_train.optimizers.preparation import OptimizerPreparation
from pygraph_train.optimizers.program import CLIPS_OTHERS
from pygraph_train.parallel.replication import replication_of
from pygraph_train.problems import Problem
from pygraph_train.report.announcements import tell_once
from pygraph_train.step.program import Call, StepProgram
from pygraph_train.trees import detached_results

_BACKWARD = operator.methodcaller("backward")
_ALONE = nullcontext()
SECOND_BACKWARD = "a second time"  # what torch says of it
BACKWARD_MADE = Problem(
    "the function for the loss makes the backward itself",
    fix="Let it return the loss only, without backward() and optimizer.step(), or pass manual_optimization=True",
)


class LossProgram(StepProgram):
    """A function that computes the loss, a model and an optimizer."""

    by_hand = False

    def __init__(
        self,
        step_fn: Callable[..., Any],
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        device: torch.device,
        scaler: torch.amp.GradScaler | None,
        max_grad_norm: float | None,
    ) -> None:
        super().__init__(optimizer, device, scaler)
        self.model = model
        self.replication = replication_of(model)
        self.step_fn = step_fn
        self._max_grad_norm = max_grad_norm
        self._clipped: ClippedParameters | None = None

    @functools.cached_property
    def nothing_but_steps(self) -> bool:
        """Whether backward and update are those of torch: nothing is scaled or clipped."""
        return self._max_grad_norm is None and not self.scaling.on

    def forward(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Any]:
        """The loss, and all that the function returns."""
        result = call(self.step_fn, args, kwargs)
        return loss_in(result), result

    @functools.cached_property
    def backward(self) -> Callable[[Tensor], object]:
        """What makes the backward of a loss by autograd."""
        return (lambda loss: self.scaling.scale(loss).backward()) if self.scaling.on else _BACKWARD

    def why_update_stays_outside(self, preparation: OptimizerPreparation) -> str | None:
        reason = self.scaling.why_update_stays_outside(preparation, other_kernels=True)
        if reason is not None:
            return reason
        if self._max_grad_norm is not None and self.optimizer is not None:
            if self._clipped is None:
                self._clipped = ClippedParameters(self.model, self.optimizer)
            self._clipped.compare()
            if self._clipped.others():
                return CLIPS_OTHERS
        return None

    def constants(self) -> tuple[Any, ...]:
        """What a capture bakes in: which parameters are clipped, and whether others than the optimizer's are."""
        clipped = self._clipped
        if clipped is None:
            return ()
        clipped.look()
        others = clipped.others()
        return ("clipped parameters", clipped.changes, others) if others or clipped.changes else ()

    def update(self) -> None:
        """Everything between the backward and the end of the step."""
        self.scaling.unscale()
        if self._max_grad_norm is not None:
            executes(UPDATE)
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._max_grad_norm)
        self.scaling.step()

    def run(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        update: Callable[..., Callable[[], None]],
        call: Call,
        *,
        first: bool,
        last: bool,
    ) -> Any:
        """The whole step without a graph.

        Args:
            args, kwargs: of its function, which `call` runs.
            update: gives what makes its optimizer phase, see `PhaseRunner.updating`.
            first, last: whether gradients begin with nothing, and an update follows.
        """
        if self.optimizer is not None and first:
            _empty_gradients(self.optimizer)
        # all of this now: nothing has happened yet that could not be made twice
        backward = self.backward
        make_update = update(self.update, self.constants)
        with self.replication.micro_batch(last=last) if self.replication.shared else _ALONE:
            loss, result = self.forward(call, args, kwargs)
            try:
                if self.scaling.on or not tried(functools.partial(made_directly, loss)):
                    backward(loss)
            except RuntimeError as error:
                if SECOND_BACKWARD in str(error):  # or it uses what an earlier step has computed
                    tell_once(f"Perhaps {BACKWARD_MADE}")
                raise
        if last and self.optimizer is not None:
            make_update()
        return result.detach() if type(result) is Tensor else detached_results(result)


def _empty_gradients(optimizer: Any) -> None:
    """What `optimizer.zero_grad()` does. torch's own measures its time, which takes longer. Hot path."""
    if type(optimizer).zero_grad is not Optimizer.zero_grad or "zero_grad" in vars(optimizer):
        return optimizer.zero_grad()
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = None


def plain_update(body: Callable[[], None], constants: object) -> Callable[[], None]:
    """The optimizer phase as it is."""
    return body


def loss_in(result: Any) -> Tensor:
    """The loss in what a function for it has returned. Hot path."""
    if type(result) is Tensor and result.requires_grad and result.dim() == 0:
        return result
    loss = result.get("loss") if type(result) is not Tensor and isinstance(result, Mapping) else result
    if isinstance(loss, Tensor) and loss.dim() == 0 and not loss.requires_grad:
        torch.autograd.backward(loss)  # raises what it raises in a plain loop
    if not isinstance(loss, Tensor) or loss.dim() != 0 or not loss.requires_grad:
        raise theirs(
            TypeError(
                "step_fn must return the loss, a 0-dim tensor that requires grad, or a dict with it under "
                f"'loss'; got {_describe(result)}. If step_fn makes the backward and the update itself, pass "
                "manual_optimization=True"
            )
        )
    return loss


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}, requires_grad={value.requires_grad}"
    if isinstance(value, Mapping):
        return f"a {type(value).__name__} with the keys {list(value)}"
    return "None" if value is None else f"a {type(value).__name__}"
