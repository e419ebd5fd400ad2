"""Several optimizers that one step updates, prepared and watched as one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from itertools import chain
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from pygraph_train.graphs.engine import Engine
from pygraph_train.optimizers.numbers import LiveNumbers
from pygraph_train.optimizers.preparation import OptimizerPreparation
from pygraph_train.optimizers.state import StateWatch
from pygraph_train.problems import Problem


class OptimizerSet:
    """The optimizers of one step.

    Args:
        members: of `torch.optim`, in any order.
    """

    def __init__(self, members: Sequence[Optimizer]) -> None:
        self.members = list(members)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups of all members."""
        return list(chain.from_iterable(optimizer.param_groups for optimizer in self.members))

    @property
    def state(self) -> dict[Any, Any]:
        """The state of all members, by parameter: a new dict."""
        return {p: own for optimizer in self.members for p, own in optimizer.state.items()}

    def zero_grad(self) -> None:
        """Empty the gradients of all members, as each does it by default."""
        for optimizer in self.members:
            optimizer.zero_grad()

    def step(self) -> None:
        """Make a step of each member, in order."""
        for optimizer in self.members:
            optimizer.step()


@contextmanager
def _all(contexts: Iterable[AbstractContextManager[None]]) -> Iterator[None]:
    """All of these contexts, one inside of the other."""
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


class SeveralPreparations:
    """What `OptimizerPreparation` is to one optimizer, for all of them: its methods do what they do there.

    Args:
        optimizers: all of a step.
        emulated: see `OptimizerPreparation`.
    """

    step_supports_scaler = False

    def __init__(self, optimizers: OptimizerSet, *, emulated: bool) -> None:
        self._members = [OptimizerPreparation(o, emulated=emulated) for o in optimizers.members]
        self._optimizers = optimizers
        self.state = StateWatch(*optimizers.members)

    @property
    def generation(self) -> int:
        """Grows whenever captures made before have become invalid."""
        return sum(member.generation for member in self._members)

    @property
    def reason(self) -> str | None:
        """Why the steps cannot be captured, None when they can."""
        return next((why for member in self._members if (why := member.reason) is not None), None)

    @property
    def problem(self) -> Problem | None:
        """`reason` as a row of the report."""
        return next((problem for member in self._members if (problem := member.problem) is not None), None)

    def what_changed(self) -> Problem:
        return self._members[0].what_changed()

    @property
    def active(self) -> bool:
        """Whether this is inside of `prepared()`."""
        return any(member.active for member in self._members)

    def prepared(self) -> AbstractContextManager[None]:
        return _all(member.prepared() for member in self._members)

    def suspended(self) -> AbstractContextManager[None]:
        return _all(member.suspended() for member in self._members)

    def sync(self) -> None:
        for member in self._members:
            member.sync()

    def settle(self, engine: Engine) -> None:
        for member in self._members:
            member.settle(engine)

    def hyperparameters(self) -> tuple[Any, ...]:
        return tuple(member.hyperparameters() for member in self._members)

    def live_numbers(self, engine: Engine) -> LiveNumbers:
        """None but the learning rates are read anew."""
        return LiveNumbers(self._optimizers.members[0], (), engine)

    def state_tensors(self) -> list[Tensor]:
        return list(chain.from_iterable(member.state_tensors() for member in self._members))

    def remember(self) -> None:
        for member in self._members:
            member.remember()

    def state_unchanged(self) -> bool:
        return all(member.state_unchanged() for member in self._members)

    def close(self) -> None:
        for member in self._members:
            member.close()


def preparation_of(optimizer: Any, engine: Engine) -> OptimizerPreparation:
    """What prepares an optimizer, or an `OptimizerSet`, for graphs of this engine."""
    # several preparations have all of one that a graph needs
    kind: Any = SeveralPreparations if isinstance(optimizer, OptimizerSet) else OptimizerPreparation
    made: OptimizerPreparation = kind(optimizer, emulated=engine.name == "emulated")
    return made
