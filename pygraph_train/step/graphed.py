"""`GraphedStep`: a plain PyTorch training step that replays itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from pygraph_train.config import PyGraphConfig, disabled_by_environment
from pygraph_train.graphs import make_engine
from pygraph_train.optimizers.preparation import OptimizerPreparation
from pygraph_train.optimizers.program import CLIPS_OTHERS, not_optimized
from pygraph_train.optimizers.scaling import Scaling
from pygraph_train.problems import Problem
from pygraph_train.report.step_report import StepReport
from pygraph_train.step.flight import Replayed
from pygraph_train.step.inputs import Transfer
from pygraph_train.step.plan import PositionInAccumulation
from pygraph_train.step.program import Call, plain_call
from pygraph_train.step.runner import StepRunner
from pygraph_train.torch_private.dynamo import end_trace_here, leave_to_python
from pygraph_train.tracing.signature import flattened, map_leaves

__all__ = ["GraphedStep"]


class GraphedStep:
    """One training step of a plain PyTorch loop: forward, loss, backward, clipping, optimizer.

    ```python
    step = GraphedStep(lambda batch: loss_fn(model(batch["x"]), batch["y"]), model=model, optimizer=opt)
    for batch in loader:
        loss = step(batch)      # instead of zero_grad, forward, backward, step
        scheduler.step()
    ```

    The first steps run as they are; once the step is proved to be the same from a graph, it is replayed.
    Results never depend on it. Gradients are emptied before each step (`set_to_none=True`) and stay in
    `.grad` after it, in memory that the next step overwrites.

    Args:
        step_fn: computes the loss from what the object is called with. Returns a 0-dim tensor that requires
            grad, or a dict with such a tensor under "loss"; the other entries are handed back as well.
        model: the module whose parameters are trained. Everything is on one device.
        optimizer: stepped after backward; None leaves `zero_grad` and `step` to the caller.
        config: options.
        scaler: a GradScaler for fp16.
        max_grad_norm: clip gradients before the optimizer, as
            `clip_grad_norm_(model.parameters(), max_grad_norm)` does.
        move_inputs: move CPU tensors among the arguments to the model's CUDA device before `step_fn` sees
            them, while the device still works on the step before (pinned memory helps). False when
            `step_fn` wants tensors on the CPU.

    Raises:
        ValueError: the engine asked for cannot work on the model's device.
    """

    def __init__(
        self,
        step_fn: Callable[..., Any],
        *,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        config: PyGraphConfig | None = None,
        scaler: torch.amp.GradScaler | None = None,
        max_grad_norm: float | None = None,
        move_inputs: bool = True,
    ) -> None:
        self._config = PyGraphConfig.of(config, {})
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self._program = _PlainProgram(step_fn, model, optimizer, device, scaler, max_grad_norm)
        self._report = StepReport()
        self._runner: StepRunner | None = None
        engine = None if disabled_by_environment() else make_engine(self._config.engine, device)
        if engine is None:
            self._report.note("graphs are off: steps run as they are")
        else:
            self._runner = StepRunner(self._program, self._config, engine, self._report)
            # a step inside of another one runs as it does alone
            leave_to_python(GraphedStep.__call__)
            leave_to_python(GraphedStep.accumulate)
        self._transfer = Transfer(device) if move_inputs and device.type == "cuda" else None
        self._pending = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Make one step, optimizer included.

        Returns:
            What `step_fn` returned, detached: tensors of their own.
        """
        return self._step(args, kwargs, update=True)

    def accumulate(self, *args: Any, **kwargs: Any) -> Any:
        """Forward and backward of a micro-batch whose gradients are added up; the next call steps."""
        return self._step(args, kwargs, update=False)

    def _step(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, update: bool) -> Any:
        if torch.compiler.is_dynamo_compiling():
            end_trace_here()
        flat = None
        if self._transfer is not None:
            flat = flattened((args, kwargs))
            if not all(leaf.is_cuda for leaf in flat[1] if isinstance(leaf, Tensor)):
                args, kwargs = self._moved_to_device(args, kwargs)
                flat = flattened((args, kwargs))
        program = self._program
        update = update and program.optimizer is not None
        fresh = program.starts_fresh() if program.optimizer is None else not self._pending
        position = PositionInAccumulation(fresh=fresh, update=update, constants=program.constants())

        if self._runner is None:
            self._report.step_began()
            result = program.run(plain_call, args, kwargs, position, plain_update)
        else:
            step = self._runner.begin(position)

            def run(call: Call) -> Any:
                return program.run(call, args, kwargs, position, step.update)

            outcome = self._runner.make(step, args, kwargs, run, flat)
            if isinstance(outcome, Replayed):
                result = outcome.outputs
                if update and not outcome.updated:
                    step.update(program.update_phase, position.constants)
            else:
                result = outcome.result
            step.finish()
        self._pending = not update  # only now: a step that raised is not part of an accumulation
        return result

    def _moved_to_device(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        device = self._program.device
        assert self._transfer is not None
        return self._transfer(lambda: map_leaves(lambda leaf: _moved(leaf, device), (args, kwargs)))

    def report(self) -> StepReport:
        """What became of the steps so far. Prints as a table."""
        return self._report

    def close(self) -> None:
        """Release all graphs and give the optimizer back as it was. Later steps run without graphs."""
        if self._runner is not None:
            self._runner.close()
            self._runner = None

    def __enter__(self) -> GraphedStep:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class _PlainProgram:
    """`StepProgram` over a function, a model and an optimizer."""

    recorder: str | None = None
    empties_first: bool = True
    detaches_results: bool = True

    def __init__(
        self,
        step_fn: Callable[..., Any],
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        device: torch.device,
        scaler: torch.amp.GradScaler | None,
        max_grad_norm: float | None,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.device = device
        self._step_fn = step_fn
        self.scaling = Scaling(scaler, optimizer)
        self._max_grad_norm = max_grad_norm
        self._preparation: OptimizerPreparation | None = None
        self._others: list[Tensor] = []  # that are clipped, and not the optimizer's

    def function(self) -> Callable[..., Any]:
        return self._step_fn

    def context(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def forward(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Any]:
        preparation = self._preparation
        # a step_fn that looks at its learning rate sees the Python number
        with nullcontext() if preparation is None else preparation.suspended():
            result = call(self._step_fn, args, kwargs)
        loss = result.get("loss") if isinstance(result, Mapping) else result
        if not isinstance(loss, Tensor) or loss.dim() != 0 or not loss.requires_grad:
            raise TypeError(
                "step_fn must return the loss, a 0-dim tensor that requires grad, or a dict with it under "
                f"'loss'; got {_describe(result)}"
            )
        return loss, result

    def backward(self, loss: Tensor) -> None:
        self.scaling.scale(loss).backward()

    def transform_gradients(self, *, in_kernels: bool = True) -> None:
        if self.optimizer is None:
            return
        self.scaling.unscale()
        if self._max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._max_grad_norm)

    def update(self) -> None:
        self.scaling.step()

    def why_update_stays_outside(self, preparation: OptimizerPreparation) -> str | None:
        self._preparation = preparation
        reason = self.scaling.why_update_stays_outside(preparation, other_kernels=True)
        if reason is not None:
            return reason
        if self._max_grad_norm is not None and self.optimizer is not None:
            self._others = not_optimized(self.model, self.optimizer)
            if self.constants():
                return CLIPS_OTHERS
        return None

    def constants(self) -> tuple[Any, ...]:
        """What a capture bakes in: whether others than the optimizer's gradients are clipped."""
        others = self._others
        return (True,) if others and any(p.requires_grad or p.grad is not None for p in others) else ()

    def acts_before_backward(self) -> Problem | None:
        return None

    def acts_before_update(self) -> str | None:
        return None

    def update_phase(self) -> None:
        """Everything between backward and the end of the step."""
        self.transform_gradients()
        self.update()

    def extra_state(self) -> Iterable[Tensor]:
        return self.scaling.tensors()

    def starts_fresh(self) -> bool:
        """Without an optimizer of ours: whether the caller emptied the gradients."""
        return all(p.grad is None for p in self.model.parameters())

    def run(
        self,
        call: Call,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        position: PositionInAccumulation,
        update: Callable[[Callable[[], None], Any], None],
    ) -> Any:
        """The whole step without a graph; `update` makes its optimizer phase."""
        if self.optimizer is not None and position.fresh:
            self.optimizer.zero_grad(set_to_none=True)
        loss, result = self.forward(call, args, kwargs)
        self.backward(loss)
        if position.update:
            update(self.update_phase, position.constants)
        return _detached(result)


def plain_update(body: Callable[[], None], constants: Any = ()) -> None:
    """The optimizer phase as it is."""
    body()


def _moved(leaf: Any, device: torch.device) -> Any:
    on_host = isinstance(leaf, Tensor) and leaf.device.type == "cpu"
    return leaf.to(device, non_blocking=True) if on_host else leaf


def _detached(result: Any) -> Any:
    try:
        return map_leaves(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, result)
    except TypeError:
        return result  # a container that only its author can rebuild; such a step is never replayed


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}, requires_grad={value.requires_grad}"
    if isinstance(value, Mapping):
        return f"a {type(value).__name__} with the keys {list(value)}"
    return "None" if value is None else f"a {type(value).__name__}"
