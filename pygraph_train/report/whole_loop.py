"""What the comparison of a loop with what it was has found, in words."""

from __future__ import annotations

from pygraph_train.selection.arms import NOTHING, Arm
from pygraph_train.selection.controller import Controller

__all__ = ["of_whole_loop"]


def of_whole_loop(controller: Controller, *, measured: bool) -> str:
    """One sentence, "" where nothing was compared yet.

    Args:
        controller: of the comparison. The first arm is what the loop had before it.
        measured: whether times are the machine's.
    """
    if not controller.was_settled:
        return ""
    best, first, times = controller.best, controller.history[0].before, controller.times
    others = [arm for arm in times if arm != best]
    if not others or best not in times:
        return ""
    plain = [arm for arm in others if arm.without_graphs]
    other = first if best != first and first in times else min(plain or others, key=times.__getitem__)
    if not measured:
        return f"the loop was compared as a whole, and is faster {_how(best)} than {_how(other)}"
    now = f"It runs {_how(best)}" if controller.settled else "It is being compared once more"
    here, there = f"{times[best] * 1e3:.3g} ms", f"{times[other] * 1e3:.3g} ms"
    return f"the loop was compared as a whole: a step takes {here} {_how(best)}, and {there} {_how(other)}. {now}"


def _how(arm: Arm) -> str:
    """How a step runs."""
    if arm == Arm(NOTHING):
        return "as you wrote it"
    if arm.without_graphs:
        return "with compiled code and no graphs"
    if arm.parts:
        return f"as plan {arm.plan} with graphs of parts of forward and backward"
    return f"as plan {arm.plan}" + (" with compiled code" if arm.compiled and not arm.plan.regions else "")
