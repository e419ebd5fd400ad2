"""Lightning's manual optimization as one graph: a whole `training_step`, with its backwards and its updates.

Dynamo looks at `training_step` while stand-ins take the place of `manual_backward`, of the optimizers, and of what
toggles and clips. If the step is one graph then, and writes nothing to Python, each replay does what the step would
do. The step itself is captured as the user wrote it.
"""

from __future__ import annotations

import itertools
import operator
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from types import MethodType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn

from pygraph_train.config import PyGraphConfig
from pygraph_train.integrations.lightning.hooks import (
    INSIDE_FORWARD_BACKWARD,
    INSIDE_UPDATE,
    overridden,
    overrides,
    where_overridden,
)
from pygraph_train.integrations.lightning.log import LogBook, Recorder
from pygraph_train.integrations.lightning.package import base_of
from pygraph_train.integrations.patches import standing_in
from pygraph_train.optimizers.preparation import OptimizerPreparation
from pygraph_train.optimizers.scaling import Scaling
from pygraph_train.optimizers.several import OptimizerSet, SeveralPreparations
from pygraph_train.parallel.replication import Alone
from pygraph_train.parallel.sharing import replication_of
from pygraph_train.problems import Problem, defined_at
from pygraph_train.step.flight import Replayed
from pygraph_train.step.plan import PositionInAccumulation
from pygraph_train.step.program import Call, StepProgram, plain_call
from pygraph_train.step.runner import StepRunner
from pygraph_train.torch_private.cuda import told_whether_capturing
from pygraph_train.torch_private.memory import tensor_version
from pygraph_train.tracing.opened_trace import OpenedTrace
from pygraph_train.tracing.trace import Trace, guard_constants

__all__ = ["StepsByHand", "called_parts", "why_not_whole"]

_STANDING_IN = ("manual_backward", "toggle_optimizer", "untoggle_optimizer", "clip_gradients", "optimizers")


def why_not_whole(trainer: Trainer, module: LightningModule, config: PyGraphConfig) -> Problem | None:
    """Why no graph can hold a whole `training_step`, seen before the first one."""
    off = [f"{p}='off'" for p in ("forward", "backward", "optimizer", "fuse") if getattr(config, p) == "off"]
    if off:
        return Problem(f"{', '.join(off)} was asked for: each phase of training_step has a graph of its own")
    if replication_of(trainer.strategy.model or module).name:
        return Problem("several processes train: each phase of training_step has a graph of its own")
    if getattr(trainer.precision_plugin, "scaler", None) is not None:
        return Problem("a GradScaler is used: each phase of training_step has a graph of its own")
    for hook in (*INSIDE_FORWARD_BACKWARD, *INSIDE_UPDATE):
        owner = overridden(trainer, module, hook)
        if owner is not None:
            return Problem(
                f"{owner} runs in Python in the middle of training_step: each phase has a graph of its own",
                where_overridden(trainer, module, hook),
                "on_train_batch_start and on_train_batch_end are outside of the graph",
            )
    for name in _STANDING_IN:
        if getattr(type(module), name) is not getattr(base_of(module), name) or name in vars(module):
            return Problem(
                f"{type(module).__name__}.{name} is the user's own: each phase has a graph of its own"
            )
    held = [id(p) for o in trainer.optimizers for group in o.param_groups for p in group["params"]]
    if not held or len(held) != len(set(held)):
        return Problem("the optimizers hold no parameters, or share some: each phase has a graph of its own")
    for optimizer in trainer.optimizers:
        preparation = OptimizerPreparation(optimizer, emulated=config.engine == "emulated")
        reason = preparation.reason
        preparation.close()
        if reason is not None:
            return Problem(f"{reason}: each phase of training_step has a graph of its own")
    return None


class StepsByHand:
    """Makes every `training_step` of a Trainer, from one graph where that changes nothing.

    Args:
        trainer: its optimizers exist, and checkpoints are restored.
        module: under manual optimization, and `why_not_whole` has found nothing.
        runner: makes the runner of a program.
    """

    def __init__(
        self, trainer: Trainer, module: LightningModule, runner: Callable[[StepProgram], StepRunner]
    ) -> None:
        self._trainer = trainer
        self._program = _ManualProgram(trainer, module)
        self._runner = runner(self._program)
        self._loop = trainer.fit_loop.epoch_loop.manual_optimization
        self._patches = ExitStack()
        self._present = PositionInAccumulation()
        self._callbacks = list(trainer.callbacks)  # type: ignore[attr-defined]

    @property
    def over(self) -> bool:
        """Whether no further step will be one graph."""
        return self._runner.stopped or self._runner.settled_on_no_graphs

    def attach(self) -> None:
        """Take the place of the strategy's `training_step`."""
        strategy, precision = self._trainer.strategy, self._trainer.precision_plugin
        self._patches.callback(self._program.book.attach())
        self._patches.enter_context(
            standing_in(
                [
                    (strategy, "training_step", self._training_step),
                    (precision, "optimizer_step", self._program.optimizer_step(precision.optimizer_step)),
                ]
            )
        )

    def detach(self) -> None:
        """Release all graphs and give Lightning's objects and the optimizers back as they were."""
        self._patches.close()
        self._runner.close()

    def _training_step(self, *args: Any, **kwargs: Any) -> Any:
        """In the place of the strategy's: one batch."""
        program, progress = self._program, self._loop.optim_step_progress
        before: Any = None

        def run(call: Call) -> Any:
            nonlocal before
            if before is not None:  # the first attempt was given up and undone, but Lightning had counted it
                progress.load_state_dict(before)
            before = progress.state_dict()
            return program.run(call, args, kwargs)

        self._look_at_trainer()
        program.book.start_step()
        step = self._runner.begin(self._position())
        outcome = self._runner.make(step, args, kwargs, run)
        if not isinstance(outcome, Replayed):
            step.finish()
            program.book.ran()
            return outcome.result
        output, logged, updates = outcome.outputs
        program.book.replayed(logged)
        for _ in range(updates):
            self._loop._on_before_step()
            self._loop._on_after_step()
        step.finish()
        return output

    def _position(self) -> PositionInAccumulation:
        """A step is captured once for each set of gradients that it has begun with. Hot path."""
        present = bytes(map(_has_gradient, self._program.parameters))
        if self._present.constants != (present,):
            self._present = PositionInAccumulation(constants=(present,))
        return self._present

    def _look_at_trainer(self) -> None:
        """Stop where optimizers or callbacks came or went: what a graph holds was decided without them."""
        optimizers, known = self._trainer.optimizers, self._program.optimizer.members
        if len(optimizers) != len(known) or not all(map(operator.is_, optimizers, known)):
            self._runner.stop(Problem("the Trainer's optimizers were replaced during training"))
        callbacks = self._trainer.callbacks  # type: ignore[attr-defined]
        if callbacks == self._callbacks:
            return
        for callback, hook in itertools.product(callbacks, (*INSIDE_FORWARD_BACKWARD, *INSIDE_UPDATE)):
            if callback not in self._callbacks and overrides(callback, hook):
                name = f"{type(callback).__name__}.{hook}"
                where = defined_at(getattr(callback, hook))
                self._runner.stop(
                    Problem(f"{name} was added during training", where, "Give it to the Trainer at the start")
                )
        self._callbacks = list(callbacks)


class _ManualProgram:
    """`StepProgram` over a `training_step` that optimizes by itself."""

    recorder: str | tuple[str, ...] | None = (".log.records", ".manual_backward.losses")
    empties_first: bool = False
    detaches_results: bool = False
    by_hand: bool = True

    def __init__(self, trainer: Trainer, module: LightningModule) -> None:
        self.model = module
        self.optimizer: Any = OptimizerSet(trainer.optimizers)
        self.parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        self.device = trainer.strategy.root_device
        self.scaling = Scaling(None, None)
        self.replication = _ByHand(module)
        self.book = LogBook(trainer, module, self.replication)
        self._trainer = trainer
        self._recorder = Recorder()
        self._preparation: SeveralPreparations | None = None
        self._updates = 0  # of the optimizers, in the present step
        self._trains = False  # the present run of `training_step` is the training's, and no capture
        self._old: _OldGradients | None = None
        self._dropped: WeakKeyDictionary[Trace, set[Tensor]] = WeakKeyDictionary()
        optimizers = [_Optimizer(optimizer) for optimizer in trainer.optimizers]
        self._stand_ins: list[tuple[Any, str, Any]] = [
            (module, "manual_backward", _Backward()),
            (module, "toggle_optimizer", _nothing),
            (module, "untoggle_optimizer", _nothing),
            (module, "clip_gradients", _clip_nothing),
            (module, "optimizers", _Optimizers(optimizers)),
        ]
        if hasattr(module, "toggled_optimizer"):
            self._stand_ins.append((module, "toggled_optimizer", _toggled))

    # -- what is traced -----------------------------------------------------------------------------

    def new_trace(self) -> OpenedTrace:
        """A trace of `training_step` with stand-ins for everything that Dynamo cannot follow."""
        return _WatchedTrace(self)

    def function(self) -> Callable[..., Any]:
        return MethodType(type(self.model).training_step, self.model)

    @contextmanager
    def context(self) -> Iterator[None]:
        with self._recording(), self.seen_by_dynamo(), self._trainer.precision_plugin.train_step_context():
            yield

    def seen_by_dynamo(self) -> AbstractContextManager[None]:
        """What Dynamo, and the guards of its trace, meet in the place of Lightning's methods."""
        return standing_in(self._stand_ins)

    @contextmanager
    def _recording(self) -> Iterator[Recorder]:
        """`self.log` appends to a list instead."""
        self._recorder.records.clear()
        with standing_in([(self.model, "log", self._recorder)]):
            yield self._recorder

    # -- what is run --------------------------------------------------------------------------------

    def run(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The whole step in Python. Lightning logs and counts."""
        trained = [p.requires_grad for p in self.model.parameters()]
        with self._as_outside():
            if call is plain_call:
                strategy = self._trainer.strategy
                return type(strategy).training_step(strategy, *args, **kwargs)
            with self._trainer.precision_plugin.train_step_context():
                with self._recording() as recorder:
                    self._trains = True
                    try:
                        output = call(self.function(), args, kwargs)
                    finally:
                        self._trains = False
                    records = list(recorder.records)
                    recorder.records.clear()
                for record in records:  # in the context as well: it sets the default dtype
                    self.model.log(record.name, record.value, *record.args, **record.kwargs)
        self.book.know(records)
        if trained != [p.requires_grad for p in self.model.parameters()]:
            self.replication.changed = Problem(
                "training_step ends with other parameters toggled than it began with",
                fix="Call untoggle_optimizer for each toggle_optimizer",
            )
        return output

    @contextmanager
    def observing(self, trace: Trace) -> Iterator[None]:
        """Around a run of a traced `training_step`: which gradients of earlier steps does it drop unread?"""
        if not self._trains:
            yield
            return
        strategy, precision = self._trainer.strategy, self._trainer.precision_plugin
        old = self._old = _OldGradients(self.parameters)
        try:
            with standing_in(
                [
                    (strategy, "backward", old.looked_at_after(strategy.backward)),
                    (precision, "clip_gradients", old.read_by(precision.clip_gradients)),
                ]
            ):
                yield
        finally:
            self._old = None
        known = self._dropped.setdefault(trace, set())
        known -= old.used
        known |= old.dropped()

    def emptied(self, trace: Trace, owned: list[Tensor]) -> list[Tensor]:
        return list(self._dropped.get(trace, ()))

    def forward(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Any]:
        """The whole step, of which Lightning counts nothing."""
        uncounted = [
            (optimizer, name, _nothing)
            for optimizer in self._trainer.strategy._lightning_optimizers
            for name in ("_on_before_step", "_on_after_step")
        ]
        self._updates = 0
        with (
            self._as_outside(),
            self._recording() as recorder,
            standing_in(uncounted),
            self._trainer.precision_plugin.train_step_context(),
        ):
            output = call(self.function(), args, kwargs)
            records = list(recorder.records)
            recorder.records.clear()
            logged = self.book.accumulate(records)  # in the context, as `self.log` is: of its default dtype
        loop = self._trainer.fit_loop.epoch_loop.manual_optimization
        result = loop.output_result_cls.from_training_step_output(output).asdict()
        return torch.zeros((), device=self.device), (result, logged, self._updates)

    def optimizer_step(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        """In the place of the precision plugin's: the step of one optimizer, with the kernels that graphs hold."""

        def optimizer_step(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            self._updates += 1
            if self._old is not None:
                self._old.read_of(optimizer)
            preparation = self._preparation
            kernels = nullcontext() if preparation is None else preparation.resumed(optimizer)
            with kernels, told_whether_capturing():
                return stock(optimizer, *args, **kwargs)

        return optimizer_step

    def _as_outside(self) -> AbstractContextManager[None]:
        """Learning rates that `training_step` reads are the user's numbers, not tensors of ours."""
        return nullcontext() if self._preparation is None else self._preparation.suspended()

    def backward(self, loss: Tensor) -> None:
        """`forward` has made it."""

    def transform_gradients(self, *, in_kernels: bool = True) -> None:
        """`forward` has clipped."""

    def update(self) -> None:
        """`forward` has made it."""

    # -- what it means for graphs -------------------------------------------------------------------

    def exchanges(self) -> bool:
        return False

    def why_update_stays_outside(self, preparation: Any) -> str | None:
        self._preparation = preparation
        return None

    def acts_before_backward(self) -> Problem | None:
        return None

    def acts_before_update(self) -> str | None:
        return None

    def extra_state(self) -> Iterable[Tensor]:
        yield from self.book.accumulators()
        yield from self.model.parameters()
        if self._preparation is not None:
            yield from self._preparation.state_tensors()

    def left_behind(self) -> list[Tensor]:
        buffers = [b for b in self.model.buffers() if b.device.type == self.device.type]
        return [*self.model.parameters(), *buffers]


class _WatchedTrace(OpenedTrace):
    """A trace of `training_step`, whose runs in Python are watched.

    Args:
        program: of the step.
    """

    def __init__(self, program: _ManualProgram) -> None:
        super().__init__(program.device, _opened, recorder=program.recorder, asked_in=program.seen_by_dynamo)
        self._program = weakref.proxy(program)  # which knows this trace

    def run(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run `fn(*args, **kwargs)` in Python, as it runs in a capture."""
        with self._program.observing(self):
            return super().run(fn, args, kwargs)


class _OldGradients:
    """The gradients that exist when a step begins, and what becomes of them.

    Args:
        parameters: of all optimizers.

    Attributes:
        used: parameters whose old gradients were added to, clipped, or read by an optimizer.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._old = {p: (p.grad, tensor_version(p.grad)) for p in parameters if p.grad is not None}
        self.used: set[Tensor] = set()

    def dropped(self) -> set[Tensor]:
        """At the end of the step: parameters without their old gradients, which nothing has used."""
        self._look()
        return {p for p, (grad, _) in self._old.items() if p.grad is not grad} - self.used

    def _look(self) -> None:
        """Whether old gradients were changed in place since the step began."""
        for p, (grad, version) in self._old.items():
            if p.grad is grad and tensor_version(grad) != version:
                self.used.add(p)

    def looked_at_after(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        """A backward, after which gradients are looked at."""

        def backward(*args: Any, **kwargs: Any) -> Any:
            self._look()
            result = stock(*args, **kwargs)
            self._look()
            return result

        return backward

    def read_by(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        """A function that reads the gradients of the optimizer that it is called with."""

        def read(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            self.read_of(optimizer)
            return stock(optimizer, *args, **kwargs)

        return read

    def read_of(self, optimizer: torch.optim.Optimizer) -> None:
        """The gradients of this optimizer's parameters are read now."""
        for group in optimizer.param_groups:
            self.used |= {p for p in group["params"] if p in self._old and p.grad is self._old[p][0]}


class _ByHand(Alone):
    """One process, whose step is looked at in Python."""

    def __init__(self, module: LightningModule) -> None:
        self._module = module
        self.changed: Problem | None = None

    def not_called_once(self) -> Problem | None:
        """What a step has left in Python that a replay would not."""
        return self.changed

    def units(self) -> list[nn.Module]:
        """The modules that `training_step` calls are compiled one by one."""
        return list(called_parts(self._module))


def called_parts(module: LightningModule) -> Iterator[nn.Module]:
    """What `training_step` may call: the module, where it has a forward, and its parts. Nested calls are one region."""
    if type(module).forward is not getattr(base_of(module), "forward", None):
        yield module
    yield from _parts(module)


def _parts(module: nn.Module) -> Iterator[nn.Module]:
    """The modules directly inside of one that hold parameters, and those inside of lists and dicts of modules."""
    for child in module.children():
        if type(child).forward is nn.Module.forward:  # nobody calls a list or a dict
            yield from _parts(child)
        elif any(True for _ in child.parameters()):
            yield child


def _has_gradient(parameter: Tensor) -> bool:
    return parameter.grad is not None


# -- what stands in while Dynamo looks --------------------------------------------------------------


def _opened() -> AbstractContextManager[frozenset[Any]]:
    return nullcontext(frozenset())


class _Backward:
    """In the place of `manual_backward`: keeps the loss, so that what computes it is looked at."""

    def __init__(self) -> None:
        self.losses: list[Any] = []

    def __call__(self, loss: Any, *args: Any, **kwargs: Any) -> None:
        guard_constants((args, kwargs))
        self.losses.append(loss)


class _Optimizers:
    """In the place of `self.optimizers`."""

    def __init__(self, optimizers: list[_Optimizer]) -> None:
        self._optimizers = optimizers

    def __call__(self, use_pl_optimizer: bool = True) -> Any:
        if not use_pl_optimizer:
            raise NotImplementedError("optimizers(use_pl_optimizer=False)")
        return self._optimizers[0] if len(self._optimizers) == 1 else list(self._optimizers)


class _Optimizer:
    """In the place of one of Lightning's optimizers."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    def step(self, closure: Any = None, **kwargs: Any) -> None:
        if closure is not None or kwargs:
            raise NotImplementedError("step(closure)")

    def zero_grad(self, set_to_none: bool = True) -> None:
        guard_constants(set_to_none)

    def toggle_model(self, sync_grad: bool = True) -> AbstractContextManager[None]:
        return nullcontext()


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


def _clip_nothing(
    optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: str | None = None
) -> None:
    guard_constants((gradient_clip_val, gradient_clip_algorithm))


def _toggled(optimizer: Any) -> AbstractContextManager[None]:
    return nullcontext()
