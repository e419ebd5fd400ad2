"""Several optimizers that one step updates, prepared and watched as one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import Any, cast

from torch import Tensor
from torch.optim import Optimizer

from pygraph_train.graphs.engine import Engine
from pygraph_train.optimizers.preparation import OptimizerPreparation
from pygraph_train.optimizers.state import StateWatch


class OptimizerSet:
    """The optimizers of one step.

    Args:
        members: of `torch.optim`, in any order.
    """

    def __init__(self, members: Sequence[Optimizer]) -> None:
        self.members = list(members)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
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


class SeveralPreparations(OptimizerPreparation):
    """What `OptimizerPreparation` is to one optimizer, for all of them. None of their numbers but the learning rates
    is read anew.

    Args:
        optimizers: all of a step.
        emulated: see `OptimizerPreparation`.
    """

    def __init__(self, optimizers: OptimizerSet, *, emulated: bool) -> None:
        super().__init__(cast(Optimizer, optimizers), emulated=emulated)  # of no class of torch
        self._members = [OptimizerPreparation(o, emulated=emulated) for o in optimizers.members]
        self.state = StateWatch(*optimizers.members)

    @property
    def generation(self) -> int:  # type: ignore[override]
        return sum(member.generation for member in self._members)

    @property
    def reason(self) -> str | None:
        return next((why for member in self._members if (why := member.reason) is not None), None)

    @contextmanager
    def prepared(self) -> Iterator[None]:
        with ExitStack() as stack:
            for member in self._members:
                stack.enter_context(member.prepared())
            yield

    def sync(self) -> None:
        for member in self._members:
            member.sync()

    def settle(self, engine: Engine) -> None:
        for member in self._members:
            member.settle(engine)

    def hyperparameters(self) -> tuple[Any, ...]:
        return tuple(member.hyperparameters() for member in self._members)

    def counted(self) -> list[Tensor]:
        return [p for member in self._members for p in member.counted()]

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
    kind = SeveralPreparations if isinstance(optimizer, OptimizerSet) else OptimizerPreparation
    return kind(optimizer, emulated=engine.name == "emulated")
