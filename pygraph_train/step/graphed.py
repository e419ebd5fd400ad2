"""`GraphedStep`: a plain PyTorch training step that replays itself."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from pygraph_train.boundary import (
    SETTING_UP,
    Boundary,
    arranged,
    done,
    not_needed,
    plainly,
    quietly,
    surely,
)
from pygraph_train.config import PyGraphConfig
from pygraph_train.optimizers.program import optimized
from pygraph_train.optimizers.several import OptimizerSet
from pygraph_train.report.announcements import tell_once
from pygraph_train.report.step_report import StepReport
from pygraph_train.step.after_first import AfterFirstStep
from pygraph_train.step.by_hand import StepsByHand
from pygraph_train.step.function_step import NotCopied
from pygraph_train.step.loss_program import LossProgram, loss_in, plain_update
from pygraph_train.step.phase_runner import PhaseRunner
from pygraph_train.step.program import plain_call
from pygraph_train.step.transfer import Transfer
from pygraph_train.torch_private.stock_dynamo import break_graph, untraced
from pygraph_train.trees import detached_results, map_leaves

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from pygraph_train.config import StepOptions

_NO_TENSORS = (bool, int, float, str, type(None))

_all: weakref.WeakSet[GraphedStep] = weakref.WeakSet()
"""Those that exist, but for manual optimization: several may share an optimizer."""


class GraphedStep(NotCopied):
    """One training step of a plain PyTorch loop: forward, loss, backward, clipping, optimizer.

    ```python
    step = GraphedStep(lambda batch: loss_fn(model(batch["x"]), batch["y"]), model=model, optimizer=opt)
    for batch in loader:
        loss = step(batch)      # instead of zero_grad, forward, backward, step
        scheduler.step()
    ```

    Forward, backward and the optimizer's update have graphs of their own. The first steps run without them, and a
    comparison shows that they compute the same. Gradients are emptied before each step and are in `.grad` after it.
    With eager kernels, the default, steps have the bits of plain training.

    Warning: the next replay overwrites the memory of these gradients. Keep a clone if you need a gradient longer.

    Args:
        step_fn: computes the loss from the arguments of the call. Returns a 0-dim tensor that requires
            grad, or a dict with such a tensor under "loss"; the call returns the other entries as well.
        model: the module whose parameters are trained. All its tensors are on one device.
        optimizer: the step calls its `step` after backward. With None the caller calls `zero_grad` and `step`. The
            step calls several optimizers one after the other, in order; no two of them hold the same parameter.
        config: options.
        scaler: a GradScaler for fp16.
        max_grad_norm: clip gradients before the optimizer, as
            `clip_grad_norm_(model.parameters(), max_grad_norm)` does.
        manual_optimization: `step_fn` makes the whole step itself: it calls `loss.backward()`, `optimizer.step()` and
            `optimizer.zero_grad()`, for several losses and optimizers where it has them. It returns what it likes.
            Forwards and backwards of the modules that it calls, and each optimizer's step, have graphs of their own.
        move_inputs: move CPU tensors among the arguments to the model's CUDA device before `step_fn` sees
            them, while the device still works on the previous step (pinned memory helps). Set it to False if
            `step_fn` needs tensors on the CPU.
        **overrides: single options, as `GraphedStep(..., engine="emulated")`. The option `optimizer` can only be set
            in `config`, because `optimizer=` is the optimizer itself.

    Attributes:
        manual: whether `step_fn` makes the whole step itself.
        program: what a step is, but for manual optimization.
        parts: makes steps of which only parts have graphs: those of manual optimization, and those of a sharded model.

    Raises:
        ValueError: an option has a value that is not allowed, the engine cannot work on the model's device, two
            optimizers share a parameter, there is a scaler for several optimizers, or manual optimization comes
            without an optimizer, or with `scaler` or `max_grad_norm`.
        TypeError: an option is unknown, or `optimizer` is neither an optimizer nor a list of optimizers.
    """

    _made_by = "GraphedStep"
    program: LossProgram
    parts: StepsByHand | None = None
    _runner: PhaseRunner | None = None
    _after_first: AfterFirstStep | None = None
    _pending = _made = False
    _at_rest = False  # every further step is nothing but a plain one

    def __init__(
        self,
        step_fn: Callable[..., Any],
        *,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
        config: PyGraphConfig | None = None,
        scaler: torch.amp.GradScaler | None = None,
        max_grad_norm: float | None = None,
        manual_optimization: bool = False,
        move_inputs: bool = True,
        **overrides: Unpack[StepOptions],
    ) -> None:
        config = PyGraphConfig.of(config, overrides)
        stepped = surely(lambda: _one(optimizer, scaler), SETTING_UP)
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self._device, self.manual = device, manual_optimization
        self._transfer = Transfer(device) if move_inputs and device.type == "cuda" else None
        steps = [] if stepped is None else getattr(stepped, "members", [stepped])
        if manual_optimization:
            _check_manual(stepped, scaler, max_grad_norm)
            self.parts = StepsByHand(step_fn, model, steps, device, config)
            self._report: StepReport = self.parts.loop.report
            return
        self.program = program = surely(
            lambda: LossProgram(step_fn, model, stepped, device, scaler, max_grad_norm), SETTING_UP
        )
        if program.replication.sharded:
            self.parts = StepsByHand(self._make_plainly, model, steps, device, config, scaler)
            self._report = self.parts.loop.report
        else:
            self._report = surely(StepReport, SETTING_UP)
            runner = arranged(lambda: PhaseRunner(program, config, self._report), self._report.failed)
            self._runner = runner if runner is not None and runner.active else None
        self._boundary = Boundary(self._report.failed, self._let_go)
        _all.add(self)

    @untraced
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Make one step, optimizer included.

        Returns:
            The result of `step_fn`, detached. No later step overwrites its tensors.
        """
        if self._transfer is not None or self.manual or torch.compiler.is_dynamo_compiling():
            return self._step(args, kwargs, update=True)
        make = self._make_plainly if self._at_rest else self._make
        return make(args, kwargs, update=True)

    @untraced
    def accumulate(self, *args: Any, **kwargs: Any) -> Any:
        """Run forward and backward of a micro-batch, and add up its gradients. The next `step(...)` updates.

        Raises:
            RuntimeError: under manual optimization.
        """
        if self.manual:
            raise RuntimeError(
                "a step_fn under manual_optimization=True makes its own updates: call the step, and let step_fn leave "
                "out optimizer.step()"
            )
        return self._step(args, kwargs, update=False)

    def _step(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, update: bool) -> Any:
        if torch.compiler.is_dynamo_compiling():  # a step inside of another one runs as it does alone
            break_graph()
        if self._transfer is not None and not (_are_there(args) and _are_there(kwargs)):
            given, move = (args, kwargs), _mover(self._device)
            args, kwargs = self._transfer(lambda: map_leaves(move, given))
        if self.manual:
            assert self.parts is not None
            return self.parts(*args, **kwargs)
        return self._make(args, kwargs, update=update)

    def report(self) -> StepReport:
        """What became of the steps so far. Prints as a table."""
        return self._report

    def close(self) -> None:
        """Release all graphs and give the optimizer back as it was. Later steps run without graphs."""
        if self._after_first is not None:
            quietly(self._after_first.close)
        if self.parts is not None:
            quietly(self.parts.close)
            self.parts = self.parts if self.manual else None
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
        if self.parts is not None:
            result = self.parts(args, kwargs, update=updates, counts=False)
        elif runner is None:
            self._report.step_began()
            result = program.run(args, kwargs, plain_update, plain_call, **place)
        else:
            runner.begin(updates)
            update_at_once = functools.partial(runner.updating, at_once=True)
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
        """Tell what the caller has done since the first one, unless other steps update some of the same parameters."""
        told, mine = first.end(), set(map(id, optimized(self.program.optimizer)))
        self._after_first = None
        others = [other.program.optimizer for other in list(_all) if other is not self and other._made]
        if told is not None and all(mine.isdisjoint(map(id, optimized(other))) for other in others):
            self._report.note(told)
            tell_once(told)

    def __enter__(self) -> GraphedStep:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _check_manual(optimizer: Any, scaler: Any, max_grad_norm: float | None) -> None:
    if optimizer is None:
        raise ValueError(
            "manual_optimization=True needs the optimizers that step_fn steps: pass optimizer=[...]"
        )
    if scaler is not None or max_grad_norm is not None:
        raise ValueError(
            "under manual_optimization=True step_fn scales and clips by itself: leave out scaler= and max_grad_norm="
        )


def _one(
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None,
    scaler: torch.amp.GradScaler | None,
) -> Any:
    """The optimizer, or all of them as one."""
    if optimizer is None or hasattr(optimizer, "param_groups"):
        return optimizer
    members = list(optimizer) if isinstance(optimizer, (list, tuple)) else []
    if not members or not all(hasattr(member, "param_groups") for member in members):
        raise TypeError(
            f"GraphedStep steps an optimizer, or a list of optimizers, got a {type(optimizer).__name__}; give it what "
            "torch.optim.AdamW(...) and the like return"
        )
    if len(members) == 1:
        return members[0]
    held = [id(p) for member in members for group in member.param_groups for p in group["params"]]
    if len(held) != len(set(held)):
        raise ValueError("two of the optimizers hold the same parameter: give each parameter to one of them")
    if scaler is not None and scaler.is_enabled():
        raise ValueError(
            "a GradScaler steps one optimizer of a GraphedStep: train with bf16, or make one optimizer with a "
            "parameter group for each"
        )
    return OptimizerSet(members)


def _are_there(value: Any) -> bool:
    """Whether all tensors in a value are on a CUDA device, as far as a glance shows: False needs a closer look."""
    kind = type(value)
    if kind is Tensor:
        on_device: bool = value.is_cuda
        return on_device
    if kind is tuple or kind is list:
        return all(map(_are_there, value))
    if kind is dict:
        return all(map(_are_there, value.values()))
    return kind in _NO_TENSORS


def _mover(device: torch.device) -> Callable[[Any], Any]:
    """Moves the leaves of one batch from the host to the device. One that comes twice stays one tensor."""
    known: dict[int, Tensor] = {}

    def move(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or leaf.device.type != "cpu":
            return leaf
        if id(leaf) not in known:
            known[id(leaf)] = leaf.to(device, non_blocking=True)
        return known[id(leaf)]

    return move
