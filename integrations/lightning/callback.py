"""PyTorch Lightning: `Trainer(callbacks=[PyGraphCallback()])`.

The callback stands between the training loop and its automatic optimization. A step that the runner
replays leaves the same traces as one that ran: progress counters, logged values, outputs. Everything else
runs through Lightning's own code.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from types import MethodType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from pygraph_train.boundary import (
    BACKWARD,
    SETTING_UP,
    STEP,
    UPDATE,
    Boundary,
    arranged,
    done,
    executes,
    quietly,
    surely,
    theirs,
    tried,
)
from pygraph_train.config import PyGraphConfig
from pygraph_train.core.node import made_directly
from pygraph_train.integrations.lightning.hooks import (
    CLIPPING,
    INSIDE_FORWARD_BACKWARD,
    INSIDE_UPDATE,
    ON_EACH_BATCH,
    TRANSFER,
    overridden,
    overrides,
)
from pygraph_train.integrations.lightning.log import LogBook, Recorder
from pygraph_train.integrations.lightning.manual import ManualOptimization
from pygraph_train.integrations.lightning.package import batches_left, package_of, root_of
from pygraph_train.optimizers.preparation import OptimizerPreparation
from pygraph_train.parallel.replication import Replication, replication_of, why_not_spread
from pygraph_train.patches import nothing, standing_in
from pygraph_train.problems import Problem, defined_at
from pygraph_train.report.announcements import give_reason, metrics_of, show, switched_off, tell_why_off
from pygraph_train.report.step_report import StepReport
from pygraph_train.step.phase_runner import PhaseRunner
from pygraph_train.step.program import Call, StepProgram, plain_call
from pygraph_train.step.sizes import rows_stay
from pygraph_train.step.transfer import Transfer

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from pygraph_train.config import PyGraphOptions


class PyGraphCallback(Callback):
    """Replays forward, backward and update of a stock Trainer's steps from CUDA graphs, if the results stay the same.

    Losses, logged values, parameters and checkpoints are the same as without the callback. Hooks run as always. Steps
    that cannot be replayed run as before, and `report()` says why. Under manual optimization the modules that
    `training_step` calls have graphs, and so has each optimizer's step.

    Warning: a replay overwrites the gradients of the previous step. Keep a clone if you need a gradient longer.

    Args:
        config: options; the defaults suit most runs.
        **overrides: single options, as `PyGraphCallback(compile=False)`.

    Raises:
        ValueError, TypeError: an option is unknown or has a value that is not allowed.
        MisconfigurationException: (from `Trainer.fit`) two PyGraph callbacks in one Trainer, or
            `engine="cuda"` without a CUDA device.
    """

    def __init__(self, config: PyGraphConfig | None = None, **overrides: Unpack[PyGraphOptions]) -> None:
        self.config = PyGraphConfig.of(config, overrides)
        self._report = surely(StepReport, SETTING_UP)
        self._step: _AutomaticStep | ManualOptimization | None = None
        self._logged = -1

    def report(self) -> StepReport:
        """The report of the training steps so far. It prints as a table."""
        return self._report

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse a second callback of this kind: two would capture each other."""
        others = [c for c in trainer.callbacks if isinstance(c, PyGraphCallback)]  # type: ignore[attr-defined]
        if len(others) > 1:
            raise _misconfiguration(trainer)(
                f"this Trainer has {len(others)} PyGraphCallbacks: keep one of them in Trainer(callbacks=[...])"
            )
        if self.config.engine == "cuda" and not torch.cuda.is_available():
            raise _misconfiguration(trainer)(
                "PyGraphCallback(engine='cuda') needs a CUDA device, and torch finds none. engine='auto' trains "
                "without graphs here"
            )

    def __getstate__(self) -> dict[str, Any]:
        """All but graphs and their report, which are those of one process: `ddp_spawn` sends callbacks to others."""
        return {**vars(self), "_report": StepReport(), "_step": None, "_logged": -1}

    def on_init_end(self, *_: Any, **__: Any) -> None:
        """Refuse to serve the Trainer of transformers, which calls this.

        Raises:
            TypeError: always.
        """
        raise TypeError(
            "PyGraphCallback is for the Trainer of Lightning. For the Trainer of transformers use "
            "callbacks=[pygraph_train.PyGraphTrainerCallback()]"
        )

    def on_after_setup(self, fabric: Any = None) -> None:
        """Refuse to serve a Fabric, which calls this: it has no Trainer's loop.

        Raises:
            MisconfigurationException: always.
        """
        raise MisconfigurationException(
            "PyGraphCallback is for Trainer(callbacks=[...]). In Lightning Fabric call "
            "PyGraphFabric().attach(fabric)"
        )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Optimizers exist and checkpoints are restored: take over the optimization of batches."""
        self._report, self._logged = StepReport(), -1
        arranged(lambda: self._start(trainer, pl_module), self._could_not_start)

    def _could_not_start(self, problem: Problem) -> None:
        quietly(self._detach)
        self._report.failed(problem)

    def _start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if switched_off() or self.config.engine == "off":
            return self._report.note(tell_why_off(self.config))
        problem = _unsupported(trainer, pl_module)
        if problem is not None:
            told = f"training runs without graphs: {problem}"
            return give_reason(self._report, problem, 0, self.config, told)
        replication = replication_of(trainer.strategy.model or pl_module)
        if replication.sharded or not pl_module.automatic_optimization:
            self._step = manual = ManualOptimization(trainer, pl_module, replication, self.config)
            self._report = manual.report
            return manual.attach()
        program = _LightningProgram(trainer, pl_module, replication)
        runner = PhaseRunner(
            program,
            self.config,
            self._report,
            left=lambda: batches_left(trainer),
            even=lambda: rows_stay(trainer.train_dataloader),
        )
        if runner.active:
            self._step = automatic = _AutomaticStep(trainer, program, runner, self)
            automatic.attach()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Tell the loggers, as often as the Trainer tells them anything, where `log_metrics=True` asks for it."""
        quietly(lambda: self._end_batch(trainer, pl_module))

    def _end_batch(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self.config.log_metrics or not trainer.loggers:
            return
        step = trainer.fit_loop.epoch_loop._batches_that_stepped
        every = trainer.log_every_n_steps  # type: ignore[attr-defined]
        if step == self._logged or not every or step % every:
            return
        self._logged = step
        if metrics := metrics_of(self._report):
            for logger in trainer.loggers:
                quietly(functools.partial(logger.log_metrics, metrics, step=step))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        quietly(self._detach)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Give everything back. After Ctrl-C no `teardown` follows."""
        quietly(self._detach)
        if isinstance(exception, KeyboardInterrupt):
            self.teardown(trainer, pl_module, trainer.state.fn or "")

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Give everything back, and show what happened."""
        quietly(self._detach)
        if self.config.print_report and stage == "fit" and trainer.is_global_zero:
            show(self._report)

    def _detach(self) -> None:
        if self._step is not None:
            step, self._step = self._step, None
            quietly(step.detach)


class _AutomaticStep:
    """Takes the place of `run` of Lightning's automatic optimization loop while attached."""

    def __init__(
        self, trainer: Trainer, program: _LightningProgram, runner: PhaseRunner, callback: PyGraphCallback
    ) -> None:
        self._trainer = trainer
        self._callback = callback
        self._program = program
        self._runner = runner
        self._boundary = program.boundary = Boundary(callback.report().failed, self._let_go)
        self._loop = trainer.fit_loop.epoch_loop.automatic_optimization
        self._lightning_run = self._loop.run
        self._callbacks = list(trainer.callbacks)  # type: ignore[attr-defined]
        self._patches = ExitStack()

    def attach(self) -> None:
        precision = self._trainer.precision_plugin
        self._lightning_optimizer_step = precision.optimizer_step
        self._lightning_backward = precision.backward
        make = self._boundary.make
        step = functools.partial(make, self._optimizer_step, precision.optimizer_step)
        backward = functools.partial(make, self._backward, precision.backward)
        ours = [(self._loop, "run", self.run), (precision, "optimizer_step", step)]
        others = (precision, "backward", backward), self._program.book.stands_in()
        self._patches.enter_context(standing_in([*ours, *others, *_overlapped_transfer(self._trainer)]))

    def detach(self) -> None:
        quietly(self._patches.close, self._runner.release)

    def _let_go(self) -> None:
        """The library has failed too often: every further batch is Lightning's alone."""
        self._runner.release()
        self._only_count()

    def _only_count(self) -> None:
        """No step can have a graph any more: Lightning makes them, and the report counts them."""
        self._program.book.ran()
        quietly(self._patches.close)
        self._runner.within = False
        loop, fit_loop, run, runner = self._loop, self._trainer.fit_loop, self._lightning_run, self._runner

        def counted(optimizer: Any, batch_idx: int, kwargs: Any) -> dict[str, Any]:
            if not loop._skip_backward:
                runner.made_elsewhere(not fit_loop._should_accumulate())
            return run(optimizer, batch_idx, kwargs)

        # Lightning measures the time of all hooks that can be called, and passes over those that are None
        idle = [hook for hook in ON_EACH_BATCH if not overrides(self._callback, hook)]
        ours = [(loop, "run", counted), *((self._callback, hook, None) for hook in idle)]
        self._patches.enter_context(standing_in(ours))

    def _meet_callbacks(self) -> None:
        """Some came or went during training: what graphs hold was decided without them."""
        new = [c for c in self._trainer.callbacks if c not in self._callbacks]  # type: ignore[attr-defined]
        self._callbacks = list(self._trainer.callbacks)  # type: ignore[attr-defined]
        for callback, hook in itertools.product(new, (*INSIDE_FORWARD_BACKWARD, *INSIDE_UPDATE)):
            if overrides(callback, hook) and not self._runner.stopped:
                name = f"{type(callback).__name__}.{hook}"
                where = defined_at(getattr(callback, hook))
                self._runner.stop(
                    Problem(
                        f"the callback {name} was added during training, and it acts inside the step",
                        where,
                        "Pass the callback to the Trainer when you make the Trainer",
                    )
                )

    def run(self, optimizer: torch.optim.Optimizer, batch_idx: int, kwargs: Any) -> dict[str, Any]:
        """One batch: forward, backward and, at the end of an accumulation, the optimizer."""
        return self._boundary.make(
            lambda: self._run(optimizer, batch_idx, kwargs),
            lambda: self._run_plainly(optimizer, batch_idx, kwargs),
        )

    def _run_plainly(self, optimizer: torch.optim.Optimizer, batch_idx: int, kwargs: Any) -> dict[str, Any]:
        """One batch as Lightning makes it, after the library has failed."""
        self._runner.within = False
        quietly(self._program.book.ran)
        return self._lightning_run(optimizer, batch_idx, kwargs)

    def _run(self, optimizer: torch.optim.Optimizer, batch_idx: int, kwargs: Any) -> dict[str, Any]:
        loop, trainer = self._loop, self._trainer
        if loop._skip_backward:
            self._program.book.ran()
            return self._lightning_run(optimizer, batch_idx, kwargs)
        if optimizer is not self._program.optimizer and not self._runner.stopped:
            self._runner.stop(Problem("the Trainer's optimizer was replaced during training"))
        if trainer.callbacks != self._callbacks:  # type: ignore[attr-defined]
            self._meet_callbacks()
        update = not trainer.fit_loop._should_accumulate()

        def run(call: Call) -> dict[str, Any]:
            timed = self._logs_timed() if self._runner.timing else nullcontext()
            with timed, self._program.running_through(call):
                executes(STEP)
                return self._lightning_run(optimizer, batch_idx, kwargs)

        runner = self._runner
        runner.begin(update)
        output = runner.make(run)
        done(output)
        runner.finish()
        if not output:
            self._callback.report().note("training_step returned None in some steps, which train nothing")
        if runner.replayed:
            quietly(self._program.book.replayed)
        else:
            self._program.book.ran()
            if runner.at_rest:
                self._only_count()
        return output

    def _backward(self, tensor: Any, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        """In the place of the precision plugin's."""
        loss, self._program.loss = self._program.loss, None
        others = self._program.scaling.on or args or kwargs or overrides(model, "backward")
        by = self._trainer.accumulate_grad_batches
        if others or loss is None or not tried(lambda: made_directly(loss, by, tensor)):
            executes(BACKWARD)
            self._lightning_backward(tensor, model, optimizer, *args, **kwargs)

    def _logs_timed(self) -> AbstractContextManager[None]:
        """Around a plain step that is timed: what Lightning does to log takes as long with graphs."""
        chooser, model = self._runner.chooser, self._program.model
        log = model.log

        def timed(*args: Any, **kwargs: Any) -> None:
            began = time.perf_counter()
            log(*args, **kwargs)
            if chooser is not None:
                quietly(lambda: chooser.worked(began - time.perf_counter()))

        return standing_in([(model, "log", timed)])

    def _optimizer_step(
        self, optimizer: torch.optim.Optimizer, model: Any, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        """In the place of the precision plugin's: what it does, with the end of it from a graph."""
        runner, others = self._runner, kwargs or self._loop._skip_backward
        if others or not runner.within or optimizer is not self._program.optimizer:
            executes(STEP)
            return self._lightning_optimizer_step(optimizer, model=model, closure=closure, **kwargs)
        if not runner.graphs_update:

            def marked() -> Any:
                executes(STEP)
                return closure()

            return self._lightning_optimizer_step(optimizer, model=model, closure=marked, **kwargs)
        between, body = self._program.update_in_parts(optimizer)
        trainer = self._trainer
        update = runner.updating(body, lambda: (trainer.gradient_clip_val, trainer.gradient_clip_algorithm))
        executes(STEP)
        result = closure()
        if result is None:  # the batch is skipped, and plugins differ in what remains to be done
            return self._lightning_optimizer_step(optimizer, model=model, closure=lambda: result)
        if between is not None:
            between()
        update()
        return done(result)


class _LightningProgram(StepProgram):
    """A step of a LightningModule."""

    def __init__(self, trainer: Trainer, module: LightningModule, replication: Replication) -> None:
        precision = trainer.precision_plugin
        scaler = getattr(precision, "scaler", None)
        super().__init__(trainer.optimizers[0], trainer.strategy.root_device, scaler)
        self.model: LightningModule = module
        self.differentiates = any(overridden(trainer, module, hook) for hook in INSIDE_FORWARD_BACKWARD)
        self._trainer, self._precision = trainer, precision
        self.replication = replication
        self.book = LogBook(trainer)
        self.boundary = Boundary()
        self.loss: Tensor | None = None  # of a forward through `torch.compile`, until its backward
        self._recorder = Recorder()

    def running_through(self, call: Call) -> AbstractContextManager[None]:
        """Make Lightning's own loop call `training_step` through `call`, and log for real afterwards."""
        if call is plain_call:
            return nullcontext()
        training_step = MethodType(type(self.model).training_step, self.model)

        def recorded(*args: Any, **kwargs: Any) -> Any:
            with self._precision.train_step_context():
                recorder = self._recorder
                recorder.records.clear()  # of a step that raised
                with standing_in([(self.model, "log", recorder)]), self.replication.around():
                    output = call(training_step, args, kwargs)
                self.loss = output.get("loss") if isinstance(output, Mapping) else output
                records = list(recorder.records)
                recorder.records.clear()
                done(output)
                try:
                    # in the context as well: it sets the default dtype
                    for name, value, args, kwargs in records:
                        self.model.log(name, value, *args, **kwargs)
                except Exception as error:
                    theirs(error)
                    raise
            return output

        made = functools.partial(self.boundary.make, recorded, self._plain_training_step)
        # on the strategy, not on the module: attributes of the module are guarded
        return standing_in([(self._trainer.strategy, "training_step", made)])

    def _plain_training_step(self, *args: Any, **kwargs: Any) -> Any:
        strategy = self._trainer.strategy
        executes(STEP)
        return type(strategy).training_step(strategy, *args, **kwargs)

    def _whole_update(self) -> None:
        assert self.optimizer is not None
        self.scaling.unscale(in_kernels=True)
        if most := self._trainer.gradient_clip_val:
            executes(UPDATE)
            algorithm: Any = self._trainer.gradient_clip_algorithm or "norm"
            # the base class: MixedPrecision refuses fused optimizers, whose gradients are unscaled here
            Precision.clip_gradients(self._precision, self.optimizer, most, algorithm)
        self.scaling.step()

    def update_in_parts(
        self, optimizer: torch.optim.Optimizer
    ) -> tuple[Callable[[], None] | None, Callable[[], None]]:
        """What acts between backward and the optimizer, None for nothing, and the rest of the phase."""
        precision = self._precision
        if self.scaling.on:  # then nobody acts there, see `why_update_stays_outside`
            return None, self._whole_update
        clips = any(overridden(self._trainer, self.model, hook) for hook in CLIPPING)

        def between() -> None:
            with standing_in([] if clips else [(precision, "clip_gradients", nothing)]):
                precision._after_closure(self.model, optimizer)

        return between, self.scaling.step if clips else self._whole_update

    def why_update_stays_outside(self, preparation: OptimizerPreparation) -> str | None:
        if not self.scaling.on:
            return None
        for hook in ("on_before_optimizer_step", *CLIPPING):
            owner = overridden(self._trainer, self.model, hook)
            if owner is not None:
                return f"{owner} runs in Python between unscaling and the optimizer's step"
        reason = self.scaling.why_update_stays_outside(preparation, other_kernels=True)
        if reason is not None:
            return reason
        if self._trainer.gradient_clip_val and not self.scaling.unscales_itself:
            return "Lightning does not clip gradients of an optimizer that unscales them in its kernels"
        return None


def _overlapped_transfer(trainer: Trainer) -> list[tuple[Any, str, Any]]:
    """What stands in to move training batches while the device still works on the step before, see `standing_in`.

    They get a stream of their own. In the stream of the kernels a copy waits for all of them. Transfer hooks of the
    user may compute on the device and expect that order, so with such hooks nothing is changed.
    """
    strategy = trainer.strategy
    module, data = trainer.lightning_module, trainer.datamodule  # type: ignore[attr-defined]
    owned = any(overrides(owner, hook) for owner in (module, data) for hook in TRANSFER)
    if strategy.root_device.type != "cuda" or owned:
        return []
    move = strategy.batch_to_device
    transfer = Transfer(strategy.root_device)

    def batch_to_device(batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        if not trainer.training:
            return move(batch, device, dataloader_idx)
        return transfer(lambda: move(batch, device, dataloader_idx))

    return [(strategy, "batch_to_device", batch_to_device)]


def _unsupported(trainer: Trainer, module: LightningModule) -> Problem | None:
    """Why nothing of this run can be replayed, seen before the first step."""
    package = package_of(trainer)
    if package is None:
        return Problem(
            f"the Trainer comes from `import {root_of(trainer)}`, which PyGraphCallback does not support",
            fix="Take the Trainer from `import lightning.pytorch as pl` or from `import pytorch_lightning as pl`",
        )
    strategy = type(trainer.strategy)
    shared = strategy is package.ddp and isinstance(trainer.strategy.model, DistributedDataParallel)
    shared |= strategy is package.model_parallel
    problem = why_not_spread(None if strategy is package.single_device or shared else strategy.__name__)
    if problem is not None:
        return problem
    if type(trainer.precision_plugin) not in package.precisions:
        return Problem(
            f"the precision plugin {type(trainer.precision_plugin).__name__} is not one of Lightning's own"
        )
    if module.automatic_optimization:
        problem = _not_automatic(trainer, module, package)
        if problem is not None:
            return problem
    elif type(trainer.fit_loop.epoch_loop.manual_optimization) is not package.manual_optimization:
        return Problem("the Trainer's loop for manual optimization is not Lightning's own")
    if "training_step" in vars(module):
        return Problem(
            "training_step was replaced on the module object (torch.compile(module) does that)",
            fix="Give the Trainer the module without torch.compile. PyGraphCallback(compile=True) compiles the step",
        )
    if torch.is_anomaly_enabled() or trainer._detect_anomaly:
        return Problem("detect_anomaly reads every gradient on the host", fix="Trainer(detect_anomaly=False)")
    return None


def _not_automatic(trainer: Trainer, module: LightningModule, package: SimpleNamespace) -> Problem | None:
    """Why steps under automatic optimization cannot be replayed."""
    if len(trainer.optimizers) != 1:
        return Problem(
            f"there are {len(trainer.optimizers)} optimizers under automatic optimization, and a graph holds one"
        )
    if type(trainer.fit_loop.epoch_loop.automatic_optimization) is not package.automatic_optimization:
        return Problem("the Trainer's loop for automatic optimization is not Lightning's own")
    if isinstance(trainer.optimizers[0], package.mock_optimizer):
        return Problem("there is no optimizer: configure_optimizers returned None")
    if is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
        return Problem("training_step(dataloader_iter) fetches its batches in Python")
    return None


def _misconfiguration(trainer: Trainer) -> type[Exception]:
    package = package_of(trainer)
    return MisconfigurationException if package is None else package.misconfiguration
