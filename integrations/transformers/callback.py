"""The callback for a stock `transformers.Trainer`: forward, backward and optimizer from graphs of their own."""

from __future__ import annotations

import atexit
import functools
import logging
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn
from transformers import TrainerCallback
from transformers.training_args import ParallelMode

from pygraph_train.boundary import SETTING_UP, arranged, quietly, surely
from pygraph_train.config import PyGraphConfig
from pygraph_train.integrations.accelerate.plugin import graph_steps
from pygraph_train.parallel.replication import Replicas, why_not_spread
from pygraph_train.patches import nothing
from pygraph_train.problems import Problem
from pygraph_train.report.announcements import metrics_of, show
from pygraph_train.report.loop_report import LoopReport
from pygraph_train.step.loop import Loop
from pygraph_train.step.sizes import rows_stay

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from pygraph_train.config import PyGraphOptions

log = logging.getLogger("pygraph_train")

_TWICE = (
    "this Trainer has a PyGraphTrainerCallback beside another one, or beside PyGraphTrainer, which graphs the same "
    "steps: this one does nothing. Keep one of them"
)

_served: weakref.WeakSet[Any] = weakref.WeakSet()
"""Optimizers of trainings that have such a callback."""


class PyGraphTrainerCallback(TrainerCallback):
    """Runs forward, backward and optimizer of a stock `transformers.Trainer` from graphs of their own.

    Losses, logs and checkpoints are those of training without it; with `compile=True`, on CUDA, those of
    `Trainer(torch_compile=True)`. `report()` says how many steps ran from graphs.

    Args:
        config: options; the defaults suit most runs.
        **overrides: single options, as `PyGraphTrainerCallback(engine="emulated")`.

    Raises:
        ValueError, TypeError: an option is unknown or has a value that is not allowed.
    """

    def __init__(self, config: PyGraphConfig | None = None, **overrides: Unpack[PyGraphOptions]) -> None:
        self.config = PyGraphConfig.of(config, overrides)
        self._report = surely(LoopReport, SETTING_UP)
        self._loop: Loop | None = None
        self._undo: Callable[[], None] = nothing
        self._at_exit: Callable[[], None] = nothing  # registered while training

    def __getstate__(self) -> dict[str, Any]:
        """All but graphs and their report, which are those of one process."""
        return {**vars(self), "_report": LoopReport(), "_loop": None, "_undo": nothing, "_at_exit": nothing}

    def setup(self, *_: Any, **__: Any) -> None:
        """Refuse to serve the Trainer of Lightning, which calls this.

        Raises:
            TypeError: always.
        """
        raise TypeError(
            "PyGraphTrainerCallback is for the Trainer of transformers. For the Trainer of Lightning use "
            "callbacks=[pygraph_train.PyGraphCallback()]"
        )

    on_exception = setup
    state_key = "PyGraphTrainerCallback"  # Lightning asks for it on the way

    def report(self) -> LoopReport:
        """The report of the training steps so far. It prints as a table."""
        return self._report

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Model and optimizer are prepared: take them over."""
        quietly(self._end)  # a training that ended with an exception
        arranged(lambda: self._start(args, state, **kwargs), self._report.failed)

    def _start(self, args: Any, state: Any, **kwargs: Any) -> None:
        if kwargs["optimizer"] in _served:
            self._report = LoopReport()
            self._report.note(_TWICE)
            return log.warning("pygraph: %s", _TWICE)
        even = rows_stay(kwargs.get("train_dataloader"))
        loop = self._loop = Loop(
            self.config, args.device, unsupported(args), left=lambda: steps_left(state), even=lambda: even
        )
        self._report = loop.report
        # a Trainer tells its callbacks of no exception and no Ctrl-C
        self._at_exit = atexit.register(functools.partial(show_report, loop.report, args, self.config))
        if not loop.active:
            return
        if args.torch_compile:
            loop.refuse(
                "torch_compile=True is set, so torch.compile runs forward and backward without graphs of "
                "pygraph-train",
                "Remove torch_compile=True, and pass compile=True to pygraph-train: graphs hold Inductor's kernels "
                "then",
            )
        elif args.world_size > 1:  # callbacks get the model without its wrapper
            loop.take_module(kwargs["model"], replication=Replicas(kwargs["model"]))
        else:
            self.take_model(loop, kwargs["model"])
        optimizer = kwargs["optimizer"]
        undo = graph_steps(loop, optimizer)
        _served.add(optimizer)

        def release() -> None:
            _served.discard(optimizer)
            undo()

        self._undo = release

    def take_model(self, loop: Loop, model: nn.Module) -> None:
        """Have a loop make the calls of the model, in a training of one process."""
        loop.take_module(model)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Tell the history and the callbacks behind this one, where `log_metrics=True` asks for it."""
        if self._loop is not None:
            quietly(lambda: add_metrics(self._report, self.config, logs, *state.log_history[-1:]))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Give everything back, and show what happened."""
        quietly(self._end, lambda: show_report(self._report, args, self.config))

    def _end(self) -> None:
        atexit.unregister(self._at_exit)
        self.release()

    def release(self) -> None:
        """Give model and optimizer back as they were."""
        if self._loop is not None:
            quietly(self._undo, self._loop.release)
            self._loop = None
            self._undo = nothing


def show_report(report: LoopReport, args: Any, config: PyGraphConfig) -> None:
    """Print the report, as the Trainer prints its own last line: in the first process."""
    if config.print_report and args.process_index == 0:
        show(report)


def add_metrics(report: LoopReport, config: PyGraphConfig, logs: Any, *further: Any) -> None:
    """Add what loggers get of the report to logs of a training step, which have its loss, where it is asked for."""
    if config.log_metrics and "loss" in logs:
        for one in (logs, *further):
            one.update(metrics_of(report))


def steps_left(state: Any) -> int:
    """Updates that a Trainer has yet to make."""
    left: int = state.max_steps - state.global_step
    return left


def unsupported(args: Any) -> Problem | None:
    """Why nothing of this training can be graphed."""
    several = args.world_size > 1 and args.parallel_mode != ParallelMode.DISTRIBUTED
    over = "training on several devices" if several or args.n_gpu > 1 else None
    over = "a parallelism_config" if getattr(args, "parallelism_config", None) is not None else over
    return why_not_spread("DeepSpeed" if args.deepspeed else "FSDP" if args.fsdp else over)
