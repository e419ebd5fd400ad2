"""Which plans a step may run with, and where a micro-batch stands."""

from __future__ import annotations

from typing import Any, NamedTuple

from pygraph_train.config import PyGraphConfig
from pygraph_train.selection.arms import (
    FORWARD_BACKWARD,
    NOTHING,
    OPTIMIZER,
    SPLIT,
    WHOLE,
    Phase,
    Plan,
)

__all__ = ["Phase", "Plan", "PositionInAccumulation", "legal_plans"]


class PositionInAccumulation(NamedTuple):
    """Where a micro-batch stands.

    Attributes:
        fresh: gradients start from nothing (the first, or the only micro-batch).
        update: the optimizer steps after it (the last, or the only micro-batch).
        constants: Python values of the loop around the step that a capture bakes in (Lightning: what the
            loss is divided by, the clipping threshold).
        sync: gradients are exchanged with the other processes after it.
    """

    fresh: bool = True
    update: bool = True
    constants: tuple[Any, ...] = ()
    sync: bool = True

    def __str__(self) -> str:
        """`{F B O}`, `{F B}`, and with a + where gradients are added to earlier ones."""
        return ("{F B O}" if self.update else "{F B}") + ("" if self.fresh else "+")

    def told(self) -> str:
        """The numbers and words among `constants`, for a sentence."""
        values = [str(value) for value in self.constants if isinstance(value, (int, float, str))]
        return f" (batches to accumulate, clipping, loss scale; now {', '.join(values)})" if values else ""

    def without_update(self) -> PositionInAccumulation:
        """What a graph of forward and backward holds at this position."""
        return self._replace(update=False) if self.update else self


def legal_plans(
    config: PyGraphConfig, *, forward_backward: bool, optimizer: bool, between: bool, regions: bool = False
) -> tuple[Plan, ...]:
    """Every plan that is allowed, the one with the fewest launches first. Never empty.

    Args:
        config: options; "off" is obeyed exactly, "on" leaves out the plans without that phase while there
            are others.
        forward_backward: may forward and backward be captured.
        optimizer: may the optimizer phase be captured.
        between: something in Python acts between backward and the optimizer.
        regions: may forward and backward have graphs of their own. One of them alone has one where the
            other is "off".
    """
    forward_backward &= config.fuse != "off" and "off" not in (config.forward, config.backward)
    optimizer &= config.optimizer != "off"
    switches = {Phase.FORWARD: config.forward, Phase.BACKWARD: config.backward}
    alone = tuple((phase,) for phase, switch in switches.items() if switch != "off")
    regions &= bool(alone)
    allowed = {
        WHOLE: forward_backward and optimizer and not between,
        SPLIT: forward_backward and optimizer,
        FORWARD_BACKWARD: forward_backward,
        Plan((*alone, (Phase.OPTIMIZER,))): regions and optimizer,  # with both off, the two below
        Plan(alone): regions,
        OPTIMIZER: optimizer,
        NOTHING: True,
    }
    plans = [plan for plan, legal in allowed.items() if legal]
    if config.fuse == "on":
        plans = [p for p in plans if p.fused] or plans
    if "on" in (config.forward, config.backward):
        plans = [p for p in plans if p.forward_backward or p.regions] or plans
    if config.optimizer == "on":
        plans = [p for p in plans if p.fused or p.optimizer_alone] or plans
    return tuple(plans)
