"""Lightning's manual optimization as one graph: a whole `training_step`, with its backwards and its updates.

Dynamo looks at `training_step` while stand-ins take the place of `manual_backward`, of the optimizers, and of what
toggles and clips. If the step is one graph then, and writes nothing to Python, each replay does what the step would
do. The step itself is captured as the user wrote it.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from lightning.pytorch import LightningModule, Trainer

from pygraph_train.boundary import Boundary, done, quietly
from pygraph_train.config import PyGraphConfig
from pygraph_train.integrations.lightning.hooks import (
    INSIDE_FORWARD_BACKWARD,
    INSIDE_UPDATE,
    overridden,
    overrides,
    where_overridden,
)
from pygraph_train.integrations.lightning.package import base_of
from pygraph_train.integrations.lightning.program_by_hand import ManualProgram
from pygraph_train.integrations.lightning.stand_ins import METHODS
from pygraph_train.optimizers.preparation import OptimizerPreparation
from pygraph_train.parallel.sharing import replication_of
from pygraph_train.patches import standing_in
from pygraph_train.problems import Problem, defined_at
from pygraph_train.step.flight import Replayed
from pygraph_train.step.phase_runner import Runner
from pygraph_train.step.program import Call, StepProgram, plain_call

__all__ = ["StepsByHand", "why_not_whole"]

_PATIENCE = 25
"""Steps in which a graph of the whole step has to come, besides the warm-up."""

_SERIOUS = 5
"""As many steps count for one of a kind that will have no graph."""


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
    for name in METHODS:
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
        warmup_steps: before a capture.
        tell: called with the reason where the library fails in itself.
    """

    def __init__(
        self,
        trainer: Trainer,
        module: LightningModule,
        runner: Callable[[StepProgram], Runner],
        warmup_steps: int,
        tell: Callable[[Problem], None],
    ) -> None:
        self._trainer = trainer
        self._program = ManualProgram(trainer, module)
        self._runner = runner(self._program)
        self._boundary = Boundary(tell, self._runner.close)
        self._loop = trainer.fit_loop.epoch_loop.manual_optimization
        self._patches = ExitStack()
        self._lost = 0  # how many more steps ran as they are than were replayed
        self._patience = _PATIENCE + 2 * warmup_steps
        self._callbacks = list(trainer.callbacks)  # type: ignore[attr-defined]

    @property
    def over(self) -> bool:
        """Whether no further step can be one graph, or hardly any is."""
        return self._runner.stopped or self._lost >= self._patience

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
        quietly(self._patches.close, self._runner.close)

    def _training_step(self, *args: Any, **kwargs: Any) -> Any:
        """In the place of the strategy's: one batch."""
        return self._boundary.make(
            lambda: self._make_step(args, kwargs), lambda: self._program.run(plain_call, args, kwargs)
        )

    def _make_step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
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
        step = self._runner.begin(program.position())
        outcome = self._runner.make(step, args, kwargs, run)
        if not isinstance(outcome, Replayed):
            done(outcome.result)
            step.finish()
            program.book.ran()
            self._lost += _SERIOUS if step.given_up else 1
            return outcome.result
        self._lost = max(0, self._lost - 1)
        output, logged, updates = outcome.outputs
        quietly(lambda: program.book.replayed(logged))
        for _ in range(updates):
            self._loop._on_before_step()
            self._loop._on_after_step()
        done(output)
        step.finish()
        return output

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
