"""A long time without a graph of forward and backward has a row that says why."""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch

from pygraph_train.integrations.backend_for_calls import begins
from pygraph_train.integrations.loop_report import LoopReport
from pygraph_train.integrations.regioned_call import RegionedCall
from pygraph_train.problems import Problem
from pygraph_train.report.step_report import Fallback

__all__ = ["Silence"]

_STEPS = 20
"""Steps in which no region of forward and backward came from a graph, and none says why, after which it is found
out."""


class Silence:
    """Counts steps in which no region came from a graph, and finds out why.

    Args:
        calls: of the loop's modules, at any time.
        report: of the loop.
        device: of the modules.
        warm_up: runs of a region without a graph that nobody wonders about.
    """

    def __init__(
        self, calls: Collection[RegionedCall], report: LoopReport, device: torch.device, warm_up: int
    ) -> None:
        self._calls, self._report, self._device = calls, report, device
        self._warm_up = warm_up
        self._steps = 0
        self._asked_why = False  # in the present silence

    def goes_on(self, broken: bool, tell: Callable[[Problem], None], *, ran: bool) -> bool:
        """Note a step.

        Args:
            broken: a region came from a graph in the step, or nobody expects that.
            tell: called with the reason, where one is found.
            ran: whether some region ran without a graph.

        Returns:
            Whether it was asked why, and still no graph came.
        """
        self._steps = 0 if broken else self._steps + 1
        if not self._steps or self._steps % _STEPS:
            return False
        self._asked_why &= self._steps > _STEPS
        if ran and self._regions_wait():
            return False
        if not self._asked_why:
            self._ask_why(tell)
            return False
        return True

    def _regions_wait(self) -> bool:
        """Whether regions may still get graphs: in warm-up, or when shapes of batches come back.

        A region that computes with a number which is another one in each step gets none. One that runs for the first
        time was compiled just now, maybe once more in each step.
        """
        forwards = [r for r in self._report.regions() if r.phase != "backward" and r.decision != "plain"]
        return any(r.plain_runs > 1 and (r.plain_runs <= self._warm_up or not r.numbers) for r in forwards)

    def _ask_why(self, tell: Callable[[Problem], None]) -> None:
        self._asked_why = True
        if any(region.reason for region in self._report.regions()):
            return
        if self._calls and not any(call.called for call in self._calls):
            names = ", ".join(type(call.module).__name__ for call in self._calls)
            reason = (
                f"forward and backward get no graphs: in {_STEPS} steps the loop did not call {names} with gradients"
                ", or only inside of transforms (torch.func)"
            )
            fix = "Call the module itself, as in module(x), instead of a method of the module"
            self._report.fell_back(Fallback(reason, None, fix, self._report.steps))
        for call in self._calls:
            start = begins(type(call.module).__name__)
            if not any(row.reason.startswith(start) for row in self._report.fallbacks):
                call.explain(self._device, tell)
