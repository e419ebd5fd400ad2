"""A `training_step` of Lightning that optimizes by hand, as the pieces that graphs of whole steps are made of."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import MethodType
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn

from pygraph_train.gradients.old import OldGradients
from pygraph_train.integrations.lightning.log import LogBook, Recorder
from pygraph_train.integrations.lightning.package import base_of
from pygraph_train.integrations.lightning.stand_ins import do_nothing, stand_ins
from pygraph_train.optimizers.several import OptimizerSet
from pygraph_train.patches import standing_in
from pygraph_train.step.program import Call, plain_call
from pygraph_train.step.program_by_hand import ProgramByHand
from pygraph_train.step.program_by_hand import called_parts as parts_of

__all__ = ["ManualProgram", "called_parts"]


class ManualProgram(ProgramByHand):
    """`StepProgram` over a `training_step` that optimizes by itself."""

    recorder: str | tuple[str, ...] | None = (".log.records", ".manual_backward.losses")
    detaches_results: bool = False
    model: LightningModule

    def __init__(self, trainer: Trainer, module: LightningModule) -> None:
        super().__init__(module, OptimizerSet(trainer.optimizers), trainer.strategy.root_device, called_parts)
        self.book = LogBook(trainer, module, self.replication)
        self._trainer = trainer
        self._recorder = Recorder()
        self._updates = 0  # of the optimizers, in the present step
        self._stand_ins = stand_ins(module, trainer.optimizers)

    # -- what is traced -----------------------------------------------------------------------------

    def function(self) -> Callable[..., Any]:
        return MethodType(type(self.model).training_step, self.model)

    @contextmanager
    def context(self) -> Iterator[None]:
        with self._recording(), self.seen_by_dynamo(), self._trainer.precision_plugin.train_step_context():
            yield

    def seen_by_dynamo(self) -> AbstractContextManager[None]:
        """What Dynamo, and the guards of its trace, meet in the place of Lightning's methods."""
        return standing_in(self._stand_ins)

    def readers(self, old: OldGradients) -> Iterable[tuple[Any, str, Any]]:
        strategy, precision = self._trainer.strategy, self._trainer.precision_plugin
        yield strategy, "backward", old.looked_at_after(strategy.backward)
        yield precision, "clip_gradients", old.read_by(precision.clip_gradients)

    @contextmanager
    def _recording(self) -> Iterator[Recorder]:
        """`self.log` appends to a list instead."""
        self._recorder.records.clear()
        with standing_in([(self.model, "log", self._recorder)]):
            yield self._recorder

    # -- what is run --------------------------------------------------------------------------------

    def run(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The whole step in Python. Lightning logs and counts."""
        with self.training(), self.as_outside():
            if call is plain_call:
                strategy = self._trainer.strategy
                return type(strategy).training_step(strategy, *args, **kwargs)
            with self._trainer.precision_plugin.train_step_context():
                with self._recording() as recorder:
                    output = call(self.function(), args, kwargs)
                    records = list(recorder.records)
                    recorder.records.clear()
                for record in records:  # in the context as well: it sets the default dtype
                    self.model.log(record.name, record.value, *record.args, **record.kwargs)
        self.book.know(records)
        return output

    def forward(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Any]:
        """The whole step, of which Lightning counts nothing."""
        uncounted = [
            (optimizer, name, do_nothing)
            for optimizer in self._trainer.strategy._lightning_optimizers
            for name in ("_on_before_step", "_on_after_step")
        ]
        self._updates = 0
        toggled = self.model._param_requires_grad_state
        with (
            self.attempting(),
            standing_in([(self.model, "_param_requires_grad_state", dict(toggled))]),
            self.as_outside(),
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
            with self.updating(optimizer):
                return stock(optimizer, *args, **kwargs)

        return optimizer_step

    def extra_state(self) -> Iterable[Tensor]:
        yield from self.book.accumulators()
        yield from super().extra_state()


def called_parts(module: nn.Module) -> Iterator[nn.Module]:
    """What `training_step` may call."""
    return parts_of(module, base_of(module) or nn.Module)
