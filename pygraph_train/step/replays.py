"""Replays with all that their steps do. Those that raise what an operation of the step raises are taken back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from pygraph_train.boundary import put_back as put_all_back
from pygraph_train.boundary import taken_back
from pygraph_train.putting_back import HostCopy, ScratchState
from pygraph_train.step.capture_maker import CaptureMaker
from pygraph_train.step.flight import Replayed, StepInFlight
from pygraph_train.step.program import StepProgram
from pygraph_train.step.python_writes import PythonWrites
from pygraph_train.step.training_run import TrainingRun
from pygraph_train.step.updates import Updates
from pygraph_train.step.variants import Capture, Variant

__all__ = ["Replays"]


class Replays:
    """Makes replays.

    A replay makes the step's writes to Python, and draws its random numbers of the host, all at once. So if it fails,
    it is taken back, and the step has to run as it is written, as far as it comes. If the step does neither, a replay
    that fails leaves what the step leaves. Operations in a CUDA graph raise nothing, but those in its gaps do, and the
    step may catch what they raise.

    Args:
        training, updates, maker, writes: of the runner.
        alone: makes a replay without writes to Python.

    Attributes:
        alone: as given.
    """

    def __init__(
        self,
        training: TrainingRun,
        updates: Updates,
        maker: CaptureMaker,
        writes: PythonWrites,
        alone: Callable[[Variant, Capture, Sequence[Any]], Replayed],
    ) -> None:
        self._program = training.program
        self._updates, self._maker, self._writes, self.alone = updates, maker, writes, alone
        self._may_fail = training.engine.name == "emulated"

    def __call__(
        self,
        step: StepInFlight,
        variant: Variant,
        capture: Capture,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        leaves: Sequence[Any],
    ) -> Replayed | Exception:
        """Make a replay, or return what it has raised, and was taken back for. Hot path."""
        step.replayed = True
        all_at_once = capture.writer is not None or variant.trace.host_draws is not None
        fails = variant.trace.gaps.left or (self._may_fail and all_at_once)
        undo = self._undoing(variant, capture, args, kwargs) if fails else None
        try:
            made = self.alone(variant, capture, leaves)
        except Exception as error:
            if undo is None or isinstance(error, torch.OutOfMemoryError):
                raise
            undo()
            step.replayed = False
            error.__cause__ = error.__context__ = None
            return error.with_traceback(None)  # its frames hold tensors, and the step runs next
        return made if capture.writer is None else self._writes.finished(capture, args, kwargs, made)

    def _undoing(
        self, variant: Variant, capture: Capture, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Callable[[], None]:
        """Before a replay: what takes it back."""
        if variant.trace.gaps.left:  # what raises there comes before anything writes gradients
            backup: ScratchState | HostCopy = _before_gradients(self._program, variant)
        else:
            backup = self._maker.backup(variant, capture, args, kwargs, self._updates.preparation)
        return _taking_back(capture, backup)


def _before_gradients(program: StepProgram, variant: Variant) -> ScratchState:
    """What the forward of a replay may change. Hot path: the lookup has read the tensors."""
    names, tensors = set(variant.trace.written), variant.trace.latest_tensors
    written = [t for name, t in zip(variant.trace.inputs, tensors, strict=True) if name in names]
    return ScratchState(program.device, [*written, *program.extra_state()])


def _taking_back(capture: Capture, backup: ScratchState | HostCopy) -> Callable[[], None]:
    """What puts everything back that a replay changes: this, and which tensors are the gradients."""
    before = capture.gradients.snapshot()

    def undo() -> None:
        put_all_back(backup.restore, lambda: capture.gradients.restore(before))
        taken_back()

    return undo
