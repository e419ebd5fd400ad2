"""Training in Lightning's loop in which no step can have a graph any more, or none has one for a while."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pygraph_train.step.phase_runner import PhaseRunner

__all__ = ["ON_EACH_BATCH", "only_count", "pass_over"]

ON_EACH_BATCH = (
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
)
"""Hooks of callbacks that Lightning calls for each batch."""


def only_count(
    loop: Any, runner: PhaseRunner, run: Callable[..., dict[str, Any]], callback: Any, idle: list[str]
) -> Callable[[], None]:
    """Let Lightning make the steps, and the report count them. Returns what undoes it.

    Args:
        loop: of automatic optimization.
        run: Lightning's method, whose place in `loop` is free.
        callback: ours.
        idle: those of `ON_EACH_BATCH` that do nothing in it.
    """

    fit_loop = loop.trainer.fit_loop

    def counted(optimizer: Any, batch_idx: int, kwargs: Any) -> dict[str, Any]:
        if not loop._skip_backward:
            runner.count(not fit_loop._should_accumulate())
        return run(optimizer, batch_idx, kwargs)

    loop.run = counted
    show = pass_over(callback, idle)

    def undo() -> None:
        loop.__dict__.pop("run", None)
        show()

    return undo


def pass_over(callback: Any, idle: list[str]) -> Callable[[], None]:
    """Let Lightning pass over hooks of a callback that do nothing: it measures the time of all that can be called.

    Returns what undoes it.
    """
    attributes = vars(callback)
    attributes.update(dict.fromkeys(idle))

    def undo() -> None:
        for hook in idle:
            attributes.pop(hook, None)

    return undo
