"""The states in which `fallback_cost` measures loops: why their steps run without graphs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from pygraph_train.selection import timing
from pygraph_train.selection.arms import NOTHING, WHOLE, Arm
from pygraph_train.step import launch_bound
from pygraph_train.step.compile_wait import declared_price

__all__ = ["STATES", "State"]


@dataclass(frozen=True)
class State:
    """In which a run goes on without graphs.

    Attributes:
        what: one sentence.
        model: `counts` makes each step depend on a counter in Python, `reads` reads a number on the host where a batch
            has another shape; any other model can be graphed.
        update: whether a graph can hold the optimizer.
        options: of the library.
        seconds: what steps of each plan are declared to take, None where they take what they take.
        waits: whether the device is declared never to wait for the host.
        other_shape: whether windows are made of batches of another shape than the first steps.
        whole: whether only loops with one graph of the whole step know the state.
        apart: whether only loops whose phases have graphs of their own know the state.
        price: seconds that compiling is declared to take.
    """

    what: str
    model: str = "counts"
    update: bool = True
    options: dict[str, Any] = field(default_factory=dict)
    seconds: Callable[[Arm], float] | None = None
    waits: bool = False
    other_shape: bool = False
    whole: bool = False
    apart: bool = False
    price: float = 0.0

    @contextlib.contextmanager
    def declared(self) -> Iterator[None]:
        """Inside, times and prices are those that the state declares."""
        with contextlib.ExitStack() as patches:
            patches.enter_context(declared_price(self.price))
            if self.waits:
                patches.enter_context(mock.patch.object(launch_bound, "_SHARE", 2.0))
                always = staticmethod(lambda config, engine: True)
                patches.enter_context(mock.patch.object(launch_bound.LaunchBoundCheck, "wanted", always))
            if (seconds := self.seconds) is not None:
                watch = timing.DeclaredStopwatch(lambda arm: seconds(arm))
                patches.enter_context(mock.patch.object(timing, "CudaStopwatch", return_value=watch))
                patches.enter_context(mock.patch.object(timing, "declared_seconds", seconds))
            yield


def _graphs_lose(arm: Arm) -> float:
    return 1e-3 if arm.plan == NOTHING else 2e-3


def _only_whole_steps_win(arm: Arm) -> float:
    return 1e-4 if arm.plan == WHOLE else _graphs_lose(arm)


STATES = {
    "refused": State("no graph can hold the step or the optimizer", update=False),
    "asked-off": State(
        "the options exclude forward and backward, and no graph can hold the optimizer",
        model="plain",
        update=False,
        options={"forward": "off", "backward": "off"},
    ),
    "update-alone": State("no graph can hold forward and backward: the plan is `F B {O}`"),
    "slower": State(
        "graphs were measured to be slower: the plan is `F B O`", seconds=_graphs_lose, whole=True
    ),
    "launch-bound": State(
        "the GPU does not wait for the host: the plan is `F B O`",
        model="plain",
        options={"compile": False},
        waits=True,
        whole=True,
    ),
    "signatures": State(
        "batches of the first shape have graphs, and no graph can hold batches of another shape",
        model="reads",
        seconds=_only_whole_steps_win,
        other_shape=True,
        whole=True,
    ),
    "waiting": State(
        "compiling forward and backward has not paid yet, and no graph can hold the optimizer",
        model="plain",
        update=False,
        apart=True,
        price=1e9,
    ),
    "off": State("engine='off' is set, or there is no device", model="plain", options={"engine": "off"}),
}
