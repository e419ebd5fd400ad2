"""Training steps that are nothing but a function for the loss: everything else of the step is the library's to do."""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pygraph_train.boundary import (
    SETTING_UP,
    UPDATE,
    Boundary,
    arranged,
    done,
    executes,
    not_needed,
    plainly,
    quietly,
    surely,
    theirs,
    tried,
)
from pygraph_train.config import PyGraphConfig
from pygraph_train.core.node import made_directly
from pygraph_train.graphs.engine import Engine
from pygraph_train.optimizers.clipped import ClippedParameters
from pygraph_train.optimizers.preparation import OptimizerPreparation
from pygraph_train.optimizers.program import CLIPS_OTHERS, optimized
from pygraph_train.parallel.replication import replication_of
from pygraph_train.problems import Problem
from pygraph_train.report.announcements import tell_once, tell_why_off
from pygraph_train.report.step_report import StepReport
from pygraph_train.step.after_first import AfterFirstStep
from pygraph_train.step.by_hand import StepsByHand
from pygraph_train.step.function_step import NotCopied
from pygraph_train.step.phase_runner import PhaseRunner
from pygraph_train.step.program import Call, StepProgram, plain_call
from pygraph_train.trees import detached_results

_BACKWARD = operator.methodcaller("backward")
_ALONE = nullcontext()
SECOND_BACKWARD = "a second time"  # what torch says of it
BACKWARD_MADE = Problem(
    "the function for the loss makes the backward itself",
    fix="Let it return the loss only, without backward() and optimizer.step(), or pass manual_optimization=True",
)

_all: weakref.WeakSet[LossSteps] = weakref.WeakSet()
"""Those that exist: several may share an optimizer."""


class LossSteps(NotCopied):
    """Makes the steps of a `LossProgram`, from graphs where that changes nothing.

    Args:
        program: what a step is.
        config: options.
        engine: where graphs are made; None makes all steps as they are.

    Attributes:
        program: as given.
    """

    apart: StepsByHand | None = None  # makes steps of a sharded model, whose parts alone have graphs
    _runner: PhaseRunner | None = None
    _after_first: AfterFirstStep | None = None
    _at_rest = False  # every further step is nothing but a plain one

    def __init__(
        self,
        program: LossProgram,
        config: PyGraphConfig,
        engine: Engine | None,
    ) -> None:
        self.program = program
        self._report = surely(StepReport, SETTING_UP) if self.apart is None else self.apart.loop.report
        self._boundary = Boundary(self._report.failed, self._let_go)
        self._pending = False
        self._made = False
        _all.add(self)
        if engine is None and self.apart is None:
            self._report.note(tell_why_off(config))
        elif engine is not None:
            self._runner = arranged(
                lambda: PhaseRunner(program, config, engine, self._report), self._report.failed
            )

    def report(self) -> StepReport:
        """What became of the steps so far. Prints as a table."""
        return self._report

    def close(self) -> None:
        """Release all graphs and give the optimizer back as it was. Later steps run without graphs."""
        if self._after_first is not None:
            quietly(self._after_first.close)
        if self.apart is not None:
            quietly(self.apart.close)
            self.apart = None
        if self._runner is not None:
            quietly(self._runner.release)
            self._runner = None

    def _make(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, update: bool) -> Any:
        """Make one step.

        Args:
            args, kwargs: what the function for the loss is called with.
            update: whether the optimizer steps; otherwise gradients are added up.
        Returns:
            What that function returned, detached: tensors of their own.
        """
        if self._at_rest:
            return plainly(lambda: self._make_plainly(args, kwargs, update=update))
        counted = self._report.steps
        return self._boundary.make(
            functools.partial(self._make_by_runner, args, kwargs, update),
            lambda: self._make_plainly(args, kwargs, update=update, counts=self._report.steps == counted),
        )

    def _make_by_runner(self, args: tuple[Any, ...], kwargs: dict[str, Any], update: bool) -> Any:
        program = self.program
        if self._after_first is not None:
            self._second_step(self._after_first)
        updates = update and program.optimizer is not None
        place: Any = {"first": not self._pending, "last": update}
        runner = self._runner
        if self.apart is not None:
            result = self.apart((args, kwargs), {"update": updates, "counts": False})
        elif runner is None:
            self._report.step_began()
            result = program.run(args, kwargs, plain_update, plain_call, **place)
        else:
            runner.begin(updates)
            update_at_once = functools.partial(runner.update, at_once=True)
            result = runner.make(functools.partial(program.run, args, kwargs, update_at_once, **place))
        self._pending = not updates  # only now: a step that raised is not part of an accumulation
        done(result)
        if runner is not None:
            runner.finish()
        if not self._made:
            self._made = True
            self._after_first = AfterFirstStep(result, program.optimizer if updates else None)
        elif runner is not None and not runner.replayed:
            self._at_rest = runner.at_rest
        elif runner is None:
            self._at_rest = not program.replication.shared
        return result

    def _make_plainly(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], *, update: bool, counts: bool = True
    ) -> Any:
        """Make one step that has no graph: what the user's own loop would do. Hot path."""
        program = self.program
        if counts:
            try:  # as `quietly`, which is called
                if self._runner is not None:
                    self._runner.made_elsewhere(update and program.optimizer is not None)
                else:
                    self._report.step_began()
            except Exception as error:
                not_needed(error)
        if program.replication.shared or not program.nothing_but_steps:
            place: Any = {"first": not self._pending, "last": update}
            result = program.run(args, kwargs, plain_update, plain_call, **place)
            self._pending = not update
            return result
        optimizer = program.optimizer
        if optimizer is not None and not self._pending:
            optimizer.zero_grad()
        result = program.step_fn(*args, **kwargs)
        loss_in(result).backward()
        if update and optimizer is not None:
            optimizer.step()
        self._pending = not update
        return result.detach() if type(result) is Tensor else detached_results(result)

    def _let_go(self) -> None:
        """The library has failed too often: every further step is a plain one."""
        self._at_rest = True
        self.close()

    def _second_step(self, first: AfterFirstStep) -> None:
        """Tell what the caller has done since the first one."""
        told = first.end()
        self._after_first = None
        if told is not None and not self._shares_optimizer():
            self._report.note(told)
            tell_once(told)

    def _shares_optimizer(self) -> bool:
        """Whether another one, which has made steps, updates some of the same parameters."""
        mine = _updated_by(self)
        return any(
            other is not self and other._made and not mine.isdisjoint(_updated_by(other))
            for other in list(_all)
        )


def _updated_by(steps: LossSteps) -> set[int]:
    """Ids of the parameters that these steps update."""
    return set(map(id, optimized(steps.program.optimizer)))


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
            update: gives what makes its optimizer phase, see `PhaseRunner.update`.
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
