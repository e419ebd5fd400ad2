"""What Dynamo traces of a training step: the step's function, or a module of a loop that the user wrote."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar

from torch import Tensor, nn

from pygraph_train.boundary import quietly
from pygraph_train.core.region import PhaseRegions
from pygraph_train.problems import Problem
from pygraph_train.step.outside import around_the_step, uninitialized
from pygraph_train.step.sizes import Sizes
from pygraph_train.torch_private.stock_dynamo import call_of, compiled_by_user, traces_of_others

R = TypeVar("R")

COMPILED_PART = Problem(
    "a part of the model is compiled by torch.compile, and graphs would hold other kernels than it has",
    fix="Pass the model without torch.compile, and compile=True to pygraph-train: graphs hold Inductor's kernels then",
)


class TracedCall:
    """Something that is called through `torch.compile` where that is a part of each training step.

    Args:
        model: whose tensors are trained.
        regions: the graphs.
        even: see `Sizes`.

    Attributes:
        regions: as given.
        sizes: of its arguments.
        paused: whether calls run as they are for now.
        spent: seconds of the host in each call that is timed; the loop empties it.
        patience: see `CompiledFunction`.
        hopeless: steps in a row in which no part of it may have a graph.
    """

    def __init__(self, model: nn.Module, regions: PhaseRegions, even: Callable[[], bool]) -> None:
        self._model, self.regions = model, regions
        self.sizes = Sizes(fixed=regions.compiles, even=even)
        self._initialized = self.paused = False
        self.spent: list[float] = []
        self.patience, self.hopeless = math.inf, 0

    def may_replay(self) -> bool:
        """Whether nothing around the present call speaks against it. Hot path."""
        if not self._initialized:
            self._initialized = uninitialized(self._model) is None
        if not self._initialized:
            return False
        problem = next(around_the_step(), None)
        if problem is not None:
            self.regions.tell(problem)
        return problem is None

    def first(self, make: Callable[[], R]) -> R:
        """Make the first call, in which caches of the user's code fill, and parts that the user compiled are traced."""
        before = traces_of_others()
        made = make()
        if traces_of_others() != before:
            quietly(lambda: self.regions.tell(COMPILED_PART), self.remove)
        return made

    def begin(self) -> None:
        """The calls that ran as they are were enough: later ones may have graphs."""

    def remove(self) -> None:
        """Release all graphs. Further calls run as they are."""
        quietly(self.regions.close)


def compiled_part(model: nn.Module) -> Problem | None:
    """Why a model that the user compiled, or a part of it, has no graphs."""
    if any(compiled_by_user(m) and not isinstance(call_of(m), TracedCall) for m in model.modules()):
        return COMPILED_PART
    return None


def tensors_of(model: nn.Module | None) -> list[Tensor]:
    """The parameters and buffers of a model, none of one that is gone."""
    return [] if model is None else [*model.parameters(), *model.buffers()]
