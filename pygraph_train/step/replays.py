"""Replays with all that their steps do. Those that raise what an operation of the step raises are taken back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pygraph_train.putting_back import HostCopy, ScratchState
from pygraph_train.step.capture_maker import CaptureMaker
from pygraph_train.step.flight import Replayed, StepInFlight
from pygraph_train.step.python_writes import PythonWrites
from pygraph_train.step.training_run import TrainingRun
from pygraph_train.step.updates import Updates
from pygraph_train.step.variants import Capture, Variant

__all__ = ["Replays"]


class Replays:
    """Makes replays.

    A replay makes the step's writes to Python, and draws its random numbers of the host, all at once. So if it fails,
    it is taken back, and the step has to run as it is written, as far as it comes. If the step does neither, a replay
    that fails leaves what the step leaves. Operations in a CUDA graph raise nothing, but work in a gap of it may (a CTC
    loss of lengths that torch refuses), and there it has come no further than its forward.

    Args:
        training, updates, maker, writes: of the runner.
        replay: makes a replay without writes to Python.
    """

    def __init__(
        self,
        training: TrainingRun,
        updates: Updates,
        maker: CaptureMaker,
        writes: PythonWrites,
        replay: Callable[[Variant, Capture, Sequence[Any]], Replayed],
    ) -> None:
        self._updates, self._maker, self._writes, self._replay = updates, maker, writes, replay
        self._device, self._anywhere = training.program.device, training.engine.name == "emulated"

    def __call__(
        self,
        step: StepInFlight,
        variant: Variant,
        capture: Capture,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        leaves: Sequence[Any],
    ) -> Replayed | None:
        """Make a replay; None where it has failed and was taken back. Hot path."""
        step.replayed = True
        gaps = variant.trace.gaps
        all_at_once = capture.writer is not None or variant.trace.host_draws is not None or gaps.decided
        may_fail = self._anywhere or gaps.left
        undo = self._undoing(variant, capture, args, kwargs) if may_fail and all_at_once else None
        try:
            made = self._replay(variant, capture, leaves)
        except Exception:
            if undo is None:
                raise
            undo()
            step.replayed = False
            return None
        return made if capture.writer is None else self._writes.finished(capture, args, kwargs, made)

    def _undoing(
        self, variant: Variant, capture: Capture, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Callable[[], None]:
        """Before a replay: what takes it back."""
        before = capture.gradients.snapshot()
        backup: HostCopy | ScratchState
        if self._anywhere:
            backup = self._maker.backup(variant, capture, args, kwargs, self._updates.preparation)
        else:
            backup = ScratchState(self._device, self._maker.beside_parameters(variant, args, kwargs))

        def undo() -> None:
            backup.restore()
            capture.gradients.restore(before)

        return undo
