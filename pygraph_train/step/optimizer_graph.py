"""`optimizer.step()` of a loop that the user wrote, as a graph of its own."""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from pygraph_train import torch_internals
from pygraph_train.config import PyGraphConfig
from pygraph_train.diagnose.report import Fallback, StepReport
from pygraph_train.graphs.engine import Engine
from pygraph_train.step.legality import Problem
from pygraph_train.step.optimizer import OptimizerPreparation
from pygraph_train.step.optimizer_phase import OptimizerPhase
from pygraph_train.step.program import StepProgram

__all__ = ["OptimizerGraph"]

log = logging.getLogger("pygraph_train")

_SAME_PLACE = 3
"""So many steps in a row must find the gradients at the same addresses before a graph reads them there."""

_PATIENCE = 16
"""Steps to wait for that; later the graph gets buffers of its own, into which gradients are copied."""

_MOST_MOVES = 3
"""So often gradients may settle at other addresses before the graph gets buffers of its own."""

_RUNS_PER_MOVE = 50
"""A capture that served this many steps has paid for one more."""

_grad = operator.attrgetter("grad")
_dtype = operator.attrgetter("dtype")
_is_sparse = operator.attrgetter("is_sparse")


class OptimizerGraph:
    """Runs one optimizer's step, from a graph where that is proved to be the same.

    Gradients are wherever the user's backward left them. Where that is the same place on every step (the
    regions of the compile backend see to it) the graph reads them there, without keeping them alive:
    whoever owns that memory may reuse it as soon as the user lets go of the gradients. Elsewhere they are
    copied into buffers of the graph.

    Args:
        optimizer: stepped by the user's loop.
        engine: where graphs are made; may be shared with other optimizers.
        config: options.
        report: filled while running.
        scaler: the GradScaler of the loop, if there is one.

    Attributes:
        runs: steps made so far.
        replayed: whether the last one ran from a graph.
        suspended: whether something else looks after this optimizer.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        engine: Engine,
        config: PyGraphConfig,
        report: StepReport,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        self.optimizer = optimizer
        self.runs = 0
        self.replayed = False
        self.suspended = False
        self._engine = engine
        self._config = config
        self._report = report
        self._program = _OptimizerProgram(optimizer, engine.device, scaler)
        self._preparation: OptimizerPreparation | None = None
        self._phase: OptimizerPhase | None = None
        self._off = config.optimizer == "off"
        self._layout = _Layout([], [], True)
        self._places: list[int] = []
        self._same = 0
        self._waited = 0
        self._moves = 0
        self._gradient_moves = 0
        self._buffers = False  # gradients are to be copied
        self._copied = False
        self._stand_ins: list[Tensor | None] = []

    def run(self, body: Callable[[], None], constants: Any = ()) -> None:
        """Make one step.

        Args:
            body: the step in Python.
            constants: Python values that a capture of `body` bakes in.
        """
        self.runs += 1
        self.replayed = False
        if self._off or self.suspended or self._refused():
            return body()
        assert self._preparation is not None
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        gradients = list(map(_grad, parameters))
        self._follow_parameters(parameters)
        self._follow(gradients)
        if self._off:
            return body()
        if self._program.unscaled or (not self._buffers and self._same < _SAME_PLACE):
            with self._preparation.prepared():  # the kernels of the graph from the first step on
                return body()
        for p, stand_in in zip(parameters, self._stand_ins, strict=True):
            p.grad = stand_in
        try:
            self._run_phase(body, constants)
        finally:
            for p, g in zip(parameters, gradients, strict=True):
                p.grad = g

    def suspend(self) -> None:
        """Release the graph and give the optimizer back as it was, until `resume`."""
        self.suspended = True
        self._give_back()

    def resume(self) -> None:
        """Look after the optimizer again."""
        self.suspended = False

    def close(self) -> None:
        """Release the graph and give the optimizer back as it was. Later steps run as they are."""
        self._off = True
        self._give_back()

    def _give_back(self) -> None:
        self._drop_phase()
        if self._preparation is not None:
            self._preparation.close()
            self._preparation = None

    def _run_phase(self, body: Callable[[], None], constants: Any) -> None:
        assert self._preparation is not None
        if self._phase is None:
            self._phase = OptimizerPhase(
                cast(StepProgram, self._program),
                self._preparation,
                self._engine,
                self._config,
                self._report,
            )
        self._phase.run(body, constants, owned=False, step=self.runs)
        self.replayed = self._phase.replayed
        self._report.optimizer_steps_replayed += self.replayed
        if self._phase.problem is not None:
            self._turn_off(self._phase.problem)

    def _follow_parameters(self, parameters: list[Tensor]) -> None:
        """A graph writes to where the parameters were."""
        places = list(map(Tensor.data_ptr, parameters))
        if places == self._places:
            return
        self._places = places
        if self._phase is not None:
            self._drop_phase()
            self._moves += 1
            if self._moves > _MOST_MOVES + self.runs // _RUNS_PER_MOVE:
                self._turn_off(Problem("parameters live at new addresses again and again"))

    def _follow(self, gradients: list[Tensor | None]) -> None:
        """Let the stand-ins hold the gradients, by lying where they are or as copies."""
        present = [g for g in gradients if g is not None]
        if any(map(_is_sparse, present)):
            return self._turn_off(Problem("the optimizer runs outside of graphs: it gets sparse gradients"))
        layout = _Layout(
            [-1 if g is None else g.data_ptr() for g in gradients],
            list(map(_dtype, present)),
            all(map(Tensor.is_contiguous, present)) or [(g.shape, g.stride()) for g in present],
        )
        if self._buffers:
            return self._copy(gradients, layout)
        if layout == self._layout:
            self._same += 1
            return
        if self._phase is not None:
            self._drop_phase()
            self._gradient_moves += 1
        self._waited += 1
        self._layout, self._same = layout, 1
        odd = any(type(g) is not Tensor or g.layout is not torch.strided or not g.numel() for g in present)
        self._buffers = odd or self._waited > _PATIENCE or self._gradient_moves > _MOST_MOVES
        if self._buffers:
            return self._copy(gradients, layout)
        self._stand_ins = [None if g is None else torch_internals.borrow_memory(g) for g in gradients]

    def _copy(self, gradients: list[Tensor | None], layout: _Layout) -> None:
        if not self._copied or not layout.fits(self._layout):
            self._copied, self._layout = True, layout
            self._stand_ins = [None if g is None else g.clone() for g in gradients]
            return
        with torch.no_grad():
            torch._foreach_copy_(
                [s for s in self._stand_ins if s is not None], [g for g in gradients if g is not None]
            )

    def _refused(self) -> bool:
        if self._preparation is None:
            self._preparation = OptimizerPreparation(self.optimizer, emulated=self._engine.name == "emulated")
            reason = self._preparation.reason or self._program.reason(self._preparation)
            if reason is not None:
                self._turn_off(Problem(f"the optimizer runs outside of graphs: {reason}"))
        return self._off

    def _turn_off(self, problem: Problem) -> None:
        self.close()
        if self._report.fell_back(Fallback(problem.reason, problem.where, problem.fix, self.runs)):
            level = logging.WARNING if self._config.optimizer == "on" else logging.INFO
            log.log(level, "pygraph: %s", problem)
        if self._config.on_failure == "raise":
            from pygraph_train.step.runner import PyGraphError

            raise PyGraphError(str(problem))

    def _drop_phase(self) -> None:
        if self._phase is not None:
            self._phase.close()
            self._phase = None


class _Layout(NamedTuple):
    """Where gradients are (-1: nowhere), and what they look like."""

    addresses: list[int]
    dtypes: list[torch.dtype]
    geometry: bool | list[Any]

    def fits(self, other: _Layout) -> bool:
        """Whether these gradients can be copied to copies of the others."""
        missing, others = ([a == -1 for a in layout.addresses] for layout in (self, other))
        return missing == others and self.dtypes == other.dtypes and self.geometry == other.geometry


class _OptimizerProgram:
    """The part of `StepProgram` that the optimizer phase needs."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        scaler: torch.amp.GradScaler | None,
    ) -> None:
        self.optimizer = optimizer
        self.device = device
        self._scaler = scaler
        # as the user made it: does it unscale in its own kernels, without telling the host of overflows?
        self._unscales_itself = bool(getattr(optimizer, "_step_supports_amp_scaling", False))

    def reason(self, preparation: OptimizerPreparation) -> str | None:
        if self._scaler is not None and not (self._unscales_itself and preparation.step_supports_scaler):
            return "the GradScaler reads on the host whether gradients overflowed; AdamW(fused=True) does not need that"
        return None

    @property
    def unscaled(self) -> bool:
        """Clipping has unscaled the gradients: what it found out is in tensors that are new on every step."""
        return self._scaler is not None and torch_internals.scaler_unscaled(self._scaler, self.optimizer)

    def abandon(self) -> None:
        if self._scaler is not None:
            torch_internals.refresh_scaler_state(self._scaler, self.optimizer)

    def extra_state(self) -> Iterable[Tensor]:
        return torch_internals.scaler_tensors(self._scaler) if self._scaler is not None else ()
