"""`PyGraphFabric.graphed_step`: a whole training step of a Fabric loop, made by the library."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from lightning.fabric import Fabric
from torch import Tensor, nn

from pygraph_train.boundary import SETTING_UP, UPDATE, arranged, executes, quietly, surely
from pygraph_train.graphs import make_engine
from pygraph_train.optimizers.preparation import OptimizerPreparation
from pygraph_train.patches import standing_in
from pygraph_train.problems import Problem, defined_at
from pygraph_train.report.announcements import give_reason
from pygraph_train.report.step_report import StepReport
from pygraph_train.step.loop import Loop
from pygraph_train.step.loss_program import LossProgram, LossSteps
from pygraph_train.step.program import Call
from pygraph_train.torch_private.optim import count_optimizer_step
from pygraph_train.trees import detached_results


@dataclass(frozen=True)
class Clipping:
    """The arguments of `fabric.clip_gradients`; the default clips nothing.

    Raises:
        ValueError: both `max_norm` and `clip_val` were given.
    """

    max_norm: float | None = None
    norm_type: float = 2.0
    error_if_nonfinite: bool = True
    clip_val: float | None = None

    def __post_init__(self) -> None:
        if self.max_norm is not None and self.clip_val is not None:
            raise ValueError("graphed_step takes max_norm or clip_val, but not both: leave one of them out")

    @property
    def on(self) -> bool:
        """Whether anything is clipped."""
        return self.max_norm is not None or self.clip_val is not None

    @property
    def reads_on_host(self) -> bool:
        """Whether Python looks at the norm, to raise an error, before the optimizer may step."""
        return self.max_norm is not None and self.error_if_nonfinite

    def apply(self, fabric: Fabric, model: nn.Module, optimizer: Any) -> Tensor | None:
        """Clip the gradients of the optimizer's parameters. Returns their norm before, a 0-dim tensor, if it counts."""
        return fabric.clip_gradients(model, optimizer, **vars(self))


class FabricStep(LossSteps):
    """A training step of a Fabric loop that replays itself. Made by `PyGraphFabric.graphed_step`.

    Args:
        fn: computes the loss.
        fabric: whose `backward` and `clip_gradients` make the step.
        loop: what else of this training is graphed; steps that cannot be graphed as a whole run in it.
        model, optimizer: as Fabric returned them; under manual optimization nothing is done with them.
        clipping: of gradients, before the optimizer.
        models: all that Fabric returned.
        accumulating: the models whose gradients are being added up now.
        manual: whether `fn` makes its backwards and updates itself. It runs as it is written then, in the loop.
    """

    _made_by = "PyGraphFabric.graphed_step"

    def __init__(
        self,
        fn: Callable[..., Any],
        fabric: Fabric,
        loop: Loop,
        model: Any,
        optimizer: Any,
        clipping: Clipping,
        models: Iterable[nn.Module],
        accumulating: list[nn.Module],
        *,
        manual: bool,
    ) -> None:
        functools.update_wrapper(self, fn)
        self._fn, self._manual = fn, manual
        self._name = getattr(fn, "__name__", type(fn).__name__)
        self._fabric = fabric
        self._loop = loop
        self._model = model
        self._fabric_optimizer = optimizer
        self._accumulating = accumulating
        self._retired = False
        engine = arranged(lambda: make_engine(loop.config.engine, fabric.device)) if loop.active else None
        self._loss_program: _FabricProgram | None = None
        if manual:
            self._report = surely(StepReport, SETTING_UP)
            if not loop.active:
                quietly(lambda: self._report.note(loop.why_off))
            return quietly(lambda: loop.report.whole_step(self._name, self._report))
        program = self._loss_program = _FabricProgram(fn, fabric, model, optimizer, clipping, models)
        super().__init__(program, loop.config, engine, loop.why_off)
        if engine is not None:
            quietly(lambda: loop.report.whole_step(self._name, self._report))
            if arranged(self._take_over, self._report.failed) is None:
                quietly(lambda: self._leave(None))

    def _take_over(self) -> bool:
        """From the loop, what the whole step holds."""
        for graph in self._loop.graphs_of(self._fabric_optimizer.optimizer):
            graph.suspend(self)
        problem = _not_whole(self._fabric)
        if problem is not None or self.program.replication.sharded:
            self._leave(problem)
        return True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Make one step; inside of `fabric.no_backward_sync(model)` only add up gradients.

        Returns:
            What the function returned, detached: tensors of their own.

        Raises:
            RuntimeError: the PyGraphFabric that made this step was detached.
        """
        if self._retired:
            raise RuntimeError(
                f"{self._name} belongs to a PyGraphFabric that was detached: make the step again with graphed_step"
            )
        if self._manual:
            quietly(functools.partial(self._report.step_began, elsewhere=self._loop.active))
            return detached_results(self._fn(*args, **kwargs))
        update = not any(model is self._model for model in self._accumulating)
        if self._runner is None:
            result = self._make(args, kwargs, update=update)
        else:
            with ExitStack() as paused:
                quietly(lambda: paused.enter_context(self._loop.paused()))
                result = self._make(args, kwargs, update=update)
            quietly(self._look_at_runner)
        if update:
            optimizer = self._fabric_optimizer
            quietly(functools.partial(count_optimizer_step, optimizer))
            self._fabric.call(
                "on_after_optimizer_step", strategy=self._fabric.strategy, optimizer=optimizer.optimizer
            )
        return result

    def _look_at_runner(self) -> None:
        if self._runner is not None and self._runner.hopeless:
            self._leave(None)

    @property
    def norm(self) -> Tensor | None:
        """What `fabric.clip_gradients` returned in the last update: the norm of gradients before they were clipped.

        A 0-dim tensor of its own on the device, in the type of the gradients; None without `max_norm`, and under
        manual optimization.
        """
        norm = None if self._loss_program is None else self._loss_program.norm
        return None if norm is None else norm.clone()

    def retire(self) -> None:
        """Release all graphs. The step cannot be called any more: nobody says when gradients are added up."""
        self.close()
        self._retired = True

    def _leave(self, problem: Problem | None) -> None:
        """Further steps run as they are, forward, backward and optimizer apart."""
        self.close()
        self._counted_elsewhere = self._loop.active
        for graph in self._loop.graphs_of(self._fabric_optimizer.optimizer):
            graph.resume(self)
        if problem is None:
            return
        told, steps = f"{self._name} is not graphed as a whole: {problem}", self._report.steps
        give_reason(self._report, problem, steps, self._loop.config, told, warn=True)


class _FabricProgram(LossProgram):
    """`StepProgram` over a function that computes the loss of a Fabric loop."""

    def __init__(
        self,
        fn: Callable[..., Any],
        fabric: Fabric,
        model: nn.Module,
        optimizer: Any,
        clipping: Clipping,
        models: Iterable[nn.Module],
    ) -> None:
        scaler = getattr(fabric.strategy.precision, "scaler", None)
        super().__init__(fn, model, optimizer.optimizer, fabric.device, scaler, None)
        self._fabric = fabric
        self._clipping = clipping
        self._models = models
        self.norm: Tensor | None = None  # graphs write it where it lies

    def context(self) -> Any:
        """Fabric hooks every result of a model, to see that backward is its own: here it is."""
        return standing_in((model, "_register_backward_hook", _as_it_is) for model in self._models)

    def forward(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Any]:
        with self.context():
            return super().forward(call, args, kwargs)

    @property
    def backward(self) -> Callable[[Tensor], object]:
        return self._fabric.backward

    def transform_gradients(self) -> None:
        if not self._clipping.on:
            return self.scaling.unscale(in_kernels=True)
        executes(UPDATE)
        found = self._clipping.apply(self._fabric, self.model, self.optimizer)  # this unscales
        if found is not None and self.norm is not None:
            self.norm.copy_(found)
        elif found is not None:  # the first time, when nothing is captured yet
            self.norm = found.clone()

    def update(self) -> None:
        assert self.optimizer is not None
        executes(UPDATE)
        self._fabric.strategy.optimizer_step(self.optimizer)

    def update_in_parts(self) -> tuple[Callable[[], None] | None, Callable[[], None]]:
        split = self._clipping.reads_on_host
        return (self.transform_gradients, self.update) if split else super().update_in_parts()

    def extra_state(self) -> Iterable[Tensor]:
        yield from super().extra_state()
        if self.norm is not None:
            yield self.norm

    def why_update_stays_outside(self, preparation: OptimizerPreparation) -> str | None:
        if self.scaling.on and self._clipping.reads_on_host:
            return (
                "the norm of the gradients is read on the host between unscaling and the optimizer's step. Pass "
                "error_if_nonfinite=False, which does not read it"
            )
        return self.scaling.why_update_stays_outside(preparation)


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def _not_whole(fabric: Fabric) -> Problem | None:
    """Why no step of this Fabric can be graphed as a whole, seen before the first one."""
    for name in ("backward", "clip_gradients"):
        method = getattr(type(fabric), name)
        if method is not getattr(Fabric, name) or name in vars(fabric):
            return Problem(
                f"{type(fabric).__name__}.{name} is not Fabric's own and runs in Python on every step",
                defined_at(method),
                "Use the stock loop without graphed_step: its phases get graphs, and this method runs between them",
            )
    return None
