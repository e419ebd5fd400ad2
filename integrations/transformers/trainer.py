"""`PyGraphTrainer` in the place of `transformers.Trainer`: the step's loss, backward and update from graphs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import transformers
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from pygraph_train.boundary import (
    SETTING_UP,
    STEP,
    Boundary,
    arranged,
    done,
    executes,
    once,
    quietly,
    surely,
    tried,
)
from pygraph_train.config import PyGraphConfig
from pygraph_train.core.node import made_directly
from pygraph_train.graphs import make_engine
from pygraph_train.integrations.accelerate.plugin import graph_steps, route_step
from pygraph_train.integrations.transformers.callback import (
    PyGraphTrainerCallback,
    add_metrics,
    show_report,
    steps_left,
    unsupported,
)
from pygraph_train.parallel.replication import Replication, replication_of
from pygraph_train.problems import Problem, defined_at
from pygraph_train.report.announcements import give_reason
from pygraph_train.report.loop_report import LoopReport
from pygraph_train.report.step_report import StepReport
from pygraph_train.step.loop import Loop
from pygraph_train.step.phase_runner import PhaseRunner
from pygraph_train.step.program import Call, StepProgram, plain_call
from pygraph_train.step.sizes import rows_stay


class PyGraphTrainerMixin(transformers.Trainer):
    """Replays training steps from graphs. Put it before your Trainer class: `class T(PyGraphTrainerMixin, Mine)`.

    Args:
        *args, **kwargs: as in the Trainer.
        pygraph: options of pygraph-train.
    """

    def __init__(self, *args: Any, pygraph: PyGraphConfig | None = None, **kwargs: Any) -> None:
        self._pygraph_config = PyGraphConfig.of(pygraph, {})
        self._pygraph_report = surely(LoopReport, SETTING_UP)
        self._pygraph_loop: Loop | None = None
        self._whole: _WholeStep | None = None
        super().__init__(*args, **kwargs)

    def report(self) -> LoopReport:
        """The report of the training steps so far. It prints as a table."""
        return self._pygraph_report

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        config, device = self._pygraph_config, self.args.device
        self._pygraph_loop = surely(lambda: Loop(config, device, unsupported(self.args)), SETTING_UP)
        self._pygraph_report = self._pygraph_loop.report
        callbacks = [c for c in self.callback_handler.callbacks if isinstance(c, PyGraphTrainerCallback)]
        for callback in callbacks:
            callback.others_graph = True
        try:
            result = super()._inner_training_loop(*args, **kwargs)
        except KeyboardInterrupt:
            quietly(lambda: show_report(self._pygraph_report, self.args, config))
            raise
        finally:
            for callback in callbacks:
                callback.others_graph = False
            if self._whole is not None:
                quietly(self._whole.close)
            self._whole = None
            quietly(self._pygraph_loop.release)
            self._pygraph_loop = None
        show_report(self._pygraph_report, self.args, self._pygraph_config)
        return result

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if self._pygraph_loop is not None:
            quietly(lambda: add_metrics(self._pygraph_report, self._pygraph_config, logs))
        super().log(logs, *args, **kwargs)

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        loop = self._pygraph_loop
        if loop is None or not loop.active:
            return super().training_step(model, inputs, num_items_in_batch)
        if self._whole is None:
            self._whole = arranged(lambda: _WholeStep(self, loop), self._pygraph_report.failed)
        if self._whole is None:
            loop.active = False
            return super().training_step(model, inputs, num_items_in_batch)
        step = functools.partial(super().training_step, num_items_in_batch=num_items_in_batch)
        return self._whole.forward_and_backward(step, model, inputs, num_items_in_batch)


class PyGraphTrainer(PyGraphTrainerMixin):
    """`transformers.Trainer` that replays forward with the loss, backward and update from graphs.

    ```python
    trainer = PyGraphTrainer(model=model, args=args, train_dataset=data, pygraph=PyGraphConfig(compile=True))
    trainer.train()
    print(trainer.report())
    ```
    """


class _WholeStep:
    """The training steps of one `train()`: forward and backward here, the optimizer where the Trainer calls it."""

    def __init__(self, trainer: PyGraphTrainerMixin, loop: Loop) -> None:
        self._trainer = trainer
        self._loop = loop
        self._report = StepReport()
        self._runner: PhaseRunner | None = None
        self._at_rest = False  # every further step is the Trainer's alone
        self._undo: Callable[[], None] = lambda: None
        self._boundary = Boundary(self._report.failed, self.close)
        problem = _not_whole(trainer)
        self._replication = replication_of(trainer.model_wrapped)
        if problem is None:
            self._start()
        else:
            self._fall_back(problem)

    def forward_and_backward(
        self, step: Callable[..., Tensor], model: nn.Module, inputs: Any, num_items: Any
    ) -> Tensor:
        """The Trainer's `training_step`."""
        runner = self._runner
        if runner is None:
            return step(model, inputs)

        def plainly() -> Tensor:
            """The Trainer's own step, after the library has failed."""
            runner.within = False
            executes(STEP)
            return step(model, inputs)

        ours = functools.partial(self._make, runner, step, model, inputs, num_items)
        return self._boundary.make(ours, plainly)

    def _make(
        self, runner: PhaseRunner, step: Callable[..., Tensor], model: nn.Module, inputs: Any, num_items: Any
    ) -> Tensor:
        trainer, program = self._trainer, self._program
        if self._at_rest:
            runner.made_elsewhere(trainer.accelerator.sync_gradients)
            return step(model, inputs)
        program.model.train()
        inputs = dict(trainer._prepare_inputs(inputs))
        program.scale = _loss_scale(trainer, num_items)
        update, replication = trainer.accelerator.sync_gradients, self._replication
        runner.begin(update)
        accelerator = trainer.accelerator
        others = accelerator.scaler is not None or "backward" in vars(accelerator)

        def run(call: Call) -> Tensor:
            with replication.micro_batch(last=update):
                if call is plain_call:
                    executes(STEP)
                    return step(program.model, inputs)
                loss = program.forward(call, (inputs, num_items))
                if others or not tried(lambda: made_directly(loss, accelerator.gradient_accumulation_steps)):
                    accelerator.backward(loss)
            return loss.detach()

        loss = runner.make(run)
        done(loss)
        if not update:
            self._end(runner)
        return loss

    def _end(self, runner: PhaseRunner) -> None:
        """The step has ended, its update included."""
        runner.finish()
        if not runner.replayed:
            self._at_rest = runner.at_rest

    def close(self) -> None:
        """Release all graphs and give the optimizer back."""
        self._undo()
        self._undo = lambda: None
        if self._runner is not None:
            self._runner.release()
            self._runner = None

    def _start(self) -> None:
        trainer, loop = self._trainer, self._loop
        engine = make_engine(loop.config.engine, trainer.args.device)
        assert engine is not None
        self._program = _TrainerProgram(trainer, self._replication)
        self._runner = PhaseRunner(
            self._program,
            loop.config,
            engine,
            self._report,
            left=lambda: steps_left(trainer.state) * trainer.args.gradient_accumulation_steps,
            even=lambda: rows_stay(trainer.callback_handler.train_dataloader),
        )
        loop.report.whole_step("training_step", self._report)
        self._undo = route_step(trainer.optimizer, self._optimizer_step)

    def _optimizer_step(self, body: Callable[[], None]) -> None:
        """In the place of the optimizer's."""
        made = once(body)
        self._boundary.make(lambda: self._update(made), made)

    def _update(self, body: Callable[[], None]) -> None:
        runner = self._runner
        if runner is None or not runner.within:
            return body()
        runner.update(body)()
        done(None)
        self._end(runner)
        if runner.hopeless:
            self._fall_back(None)

    def _fall_back(self, problem: Problem | None) -> None:
        """Forward, backward and optimizer by themselves, as under the callback."""
        self.close()
        trainer, loop = self._trainer, self._loop
        if problem is not None:
            self._report.failed(problem)
            told = f"training steps are not graphed as a whole: {problem}"
            give_reason(loop.report, problem, self._report.steps, loop.config, told)
        if not trainer.args.torch_compile and trainer.model is not None:
            loop.take_module(trainer.model if not self._replication.shared else trainer.model_wrapped)
        optimizer: Any = trainer.optimizer
        if hasattr(optimizer, "scaler"):
            self._undo = graph_steps(loop, optimizer)


class _TrainerProgram(StepProgram):
    """A step of a transformers Trainer. Its replicas have the same gradients, so the update exchanges nothing."""

    def __init__(self, trainer: PyGraphTrainerMixin, replication: Replication) -> None:
        accelerated: Any = trainer.optimizer
        super().__init__(accelerated.optimizer, trainer.args.device, trainer.accelerator.scaler)
        self.replication = replication
        self.model = trainer.model_wrapped
        if not replication.shared:  # without what torch_compile=True would compile again
            self.model = trainer.accelerator.unwrap_model(self.model, keep_torch_compile=False)
        self.scale = 1
        self._trainer = trainer
        model = self.model

        def loss_of(inputs: Any, num_items_in_batch: Any) -> Any:
            return trainer.compute_loss(model, {**inputs}, num_items_in_batch=num_items_in_batch)

        self._function = loss_of

    def forward(self, call: Call, args: tuple[Any, ...]) -> Tensor:
        """The loss with its autograd graph, divided as the Trainer does."""
        with self._trainer.compute_loss_context_manager():
            loss: Tensor = call(self._function, args, {})
        return loss / self.scale if self.scale != 1 else loss


def _not_whole(trainer: transformers.Trainer) -> Problem | None:
    """Why steps of this Trainer cannot be graphed as a whole, seen before the first one."""
    if not hasattr(transformers.Trainer, "_clip_grad_norm"):
        return Problem(
            "this version of transformers clips gradients inside its loop, where no graph can hold the clipping",
            fix="Use version 5",
        )
    optimizer: Any = trainer.optimizer
    if not hasattr(optimizer, "scaler"):
        return Problem("the Trainer's optimizer was not prepared by Accelerate")
    if callable(getattr(optimizer.optimizer, "train", None)):
        return Problem(
            f"{type(optimizer.optimizer).__name__} switches between train and eval mode in Python on every step"
        )
    if trainer.args.torch_empty_cache_steps is not None:
        return Problem("torch_empty_cache_steps frees memory inside the step")
    if trainer.args.optim in ("lomo", "adalomo"):
        return Problem(f"the optimizer {trainer.args.optim} updates parameters during backward")
    if trainer.args.torch_compile and isinstance(trainer.model_wrapped, DistributedDataParallel):
        return Problem(
            "torch_compile=True under DistributedDataParallel: the model is already compiled, and no graph can "
            "hold it"
        )
    if getattr(trainer.accelerator, "parallelism_config", None) is not None:
        return Problem("a parallelism_config is set, and it changes the calls around the loss")
    for name in ("training_step", "_clip_grad_norm"):  # graphs hold what the Trainer's own do
        around, inside = getattr(type(trainer), name), getattr(super(PyGraphTrainerMixin, trainer), name)
        if around is not getattr(PyGraphTrainerMixin, name):
            return _overridden(around)
        if inside.__func__ is not getattr(transformers.Trainer, name):
            return _overridden(inside.__func__)
    return None


def _overridden(method: Callable[..., Any]) -> Problem:
    return Problem(
        f"{method.__qualname__} is overridden, and runs in Python on every step", defined_at(method)
    )


def _loss_scale(trainer: transformers.Trainer, num_items: Any) -> int:
    """What the Trainer divides the loss by, besides what the model does."""
    scaled = getattr(trainer, "loss_is_scaled_for_ga", None)
    if scaled is None:
        normalized = trainer.model_accepts_loss_kwargs and num_items is not None
        scaled = normalized or trainer.compute_loss_func is not None
    return 1 if scaled else trainer.current_gradient_accumulation_steps
