"""A `training_step` that optimizes by hand, as the pieces that graphs of whole steps are made of."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import MethodType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn

from pygraph_train.gradients.old import OldGradients
from pygraph_train.integrations.lightning.log import LogBook, Recorder
from pygraph_train.integrations.lightning.package import base_of
from pygraph_train.integrations.lightning.stand_ins import do_nothing, stand_ins
from pygraph_train.integrations.patches import standing_in
from pygraph_train.optimizers.scaling import Scaling
from pygraph_train.optimizers.several import OptimizerSet, SeveralPreparations
from pygraph_train.parallel.replication import Alone
from pygraph_train.problems import Problem
from pygraph_train.step.program import Call, plain_call
from pygraph_train.torch_private.cuda import told_whether_capturing
from pygraph_train.tracing.opened_trace import OpenedTrace
from pygraph_train.tracing.trace import Trace

__all__ = ["ManualProgram", "called_parts"]


class ManualProgram:
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
        self._old: OldGradients | None = None
        self._dropped: WeakKeyDictionary[Trace, set[Tensor]] = WeakKeyDictionary()
        self._stand_ins = stand_ins(module, trainer.optimizers)

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
        old = self._old = OldGradients(self.parameters)
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
            (optimizer, name, do_nothing)
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

    def __init__(self, program: ManualProgram) -> None:
        super().__init__(
            program.device,
            lambda: nullcontext(frozenset()),
            recorder=program.recorder,
            asked_in=program.seen_by_dynamo,
        )
        self._program = weakref.proxy(program)  # which knows this trace

    def run(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run `fn(*args, **kwargs)` in Python, as it runs in a capture."""
        with self._program.observing(self):
            return super().run(fn, args, kwargs)


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
