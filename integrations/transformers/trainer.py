"""`PyGraphTrainer` in the place of `transformers.Trainer`: the Trainer's loss is in the graph of the forward."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from pygraph_train.boundary import STEP, executes, quietly, tried
from pygraph_train.config import PyGraphConfig
from pygraph_train.core.node import made_directly
from pygraph_train.integrations.accelerate.plugin import make_backward
from pygraph_train.integrations.transformers.callback import PyGraphTrainerCallback, add_metrics
from pygraph_train.patches import standing_in
from pygraph_train.report.loop_report import LoopReport
from pygraph_train.step.loop import Loop


class PyGraphTrainerMixin(transformers.Trainer):
    """Replays training steps from graphs. Put it before your Trainer class: `class T(PyGraphTrainerMixin, Mine)`.

    Args:
        *args, **kwargs: as in the Trainer.
        pygraph: options of pygraph-train.
    """

    def __init__(self, *args: Any, pygraph: PyGraphConfig | None = None, **kwargs: Any) -> None:
        self._pygraph = _CallbackOfTrainer(self, pygraph)
        super().__init__(*args, **kwargs)
        self.callback_handler.callbacks.insert(0, self._pygraph)

    def report(self) -> LoopReport:
        """The report of the training steps so far. It prints as a table."""
        return self._pygraph.report()

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super()._inner_training_loop(*args, **kwargs)
        finally:  # a Trainer tells its callbacks of no exception
            quietly(self._pygraph.release)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        quietly(lambda: self._pygraph.tell(logs))
        super().log(logs, *args, **kwargs)


class PyGraphTrainer(PyGraphTrainerMixin):
    """`transformers.Trainer` that replays forward with the loss, backward and update from graphs.

    ```python
    trainer = PyGraphTrainer(model=model, args=args, train_dataset=data, pygraph=PyGraphConfig(compile=True))
    trainer.train()
    print(trainer.report())
    ```
    """


class _CallbackOfTrainer(PyGraphTrainerCallback):  # type: ignore[misc]  # mypy does not find its module
    """The callback of a `PyGraphTrainer`: graphs hold `compute_loss`, and the backward is made without autograd."""

    def __init__(self, trainer: PyGraphTrainerMixin, config: PyGraphConfig | None) -> None:
        super().__init__(config)
        self._trainer = trainer
        self._patches = ExitStack()
        self._made: Any = None  # by `compute_loss`, until its backward

    def tell(self, logs: dict[str, float]) -> None:
        """Add numbers of the report to a log, while training."""
        if self._loop is not None:
            add_metrics(self.report(), self.config, logs)

    def take_model(self, loop: Loop, model: nn.Module) -> None:
        trainer = self._trainer
        if trainer.model_wrapped is not model:  # by torchrun with one process
            return super().take_model(loop, model)
        compute_loss, accelerator = trainer.compute_loss, trainer.accelerator
        graphed = ComputeLoss(compute_loss, model)
        loop.take_module(graphed)

        def loss_of(given: nn.Module, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
            if given is not model or return_outputs or not torch.is_grad_enabled():
                return compute_loss(given, inputs, return_outputs=return_outputs, **kwargs)
            executes(STEP)
            self._made = graphed(inputs, kwargs)
            return self._made

        # a fault of ours, before anything has happened, leaves the loss and its backward to the Trainer
        make = loop.boundary.make
        replaced: list[Any] = [(trainer, "compute_loss", functools.partial(make, loss_of, compute_loss))]
        if "backward" not in vars(accelerator):
            stock = accelerator.backward
            backward = functools.partial(self._backward, loop, accelerator, stock)
            replaced.append((accelerator, "backward", functools.partial(make, backward, stock)))
        self._patches.enter_context(standing_in(replaced))

    def _backward(
        self, loop: Loop, accelerator: Any, stock: Callable[..., None], loss: Any, **kwargs: Any
    ) -> None:
        """In the place of the Accelerator's: `training_step` of the Trainer may have divided the loss."""
        trainer, (made, self._made) = self._trainer, (self._made, None)
        divided = made is not None and made is not loss
        if divided and type(trainer).training_step is transformers.Trainer.training_step:
            by = trainer.current_gradient_accumulation_steps * accelerator.gradient_accumulation_steps
            others = kwargs or accelerator.scaler is not None
            if not others and tried(lambda: made_directly(made, by, loss)):
                return
        make_backward(loop, accelerator, stock, loss, **kwargs)

    def release(self) -> None:
        self._made = None
        quietly(self._patches.close)
        super().release()


class ComputeLoss(nn.Module):
    """`compute_loss` of a Trainer as a module, whose calls have graphs."""

    def __init__(self, compute_loss: Any, model: nn.Module) -> None:
        super().__init__()
        self._compute_loss, self.model = compute_loss, model

    def forward(self, inputs: Any, options: dict[str, Any]) -> Tensor:
        loss: Tensor = self._compute_loss(self.model, {**inputs}, **options)
        return loss
