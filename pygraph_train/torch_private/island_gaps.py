"""The operation that an island is in a graph of Dynamo's, and the gaps that a capture of it leaves. (2.11, 2.13)"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pygraph_train.gaps import leave_gap, may_leave_gap
from pygraph_train.problems import NotLegal, Problem
from pygraph_train.torch_private.autograd import backward_keeps_graph
from pygraph_train.torch_private.dispatch import FakeTensor
from pygraph_train.torch_private.gap_modes import present_modes, refuse_second_gradient
from pygraph_train.torch_private.islands import BackwardChanged, Island, IslandRun, Look, known_island
from pygraph_train.torch_private.memory import borrower
from pygraph_train.torch_private.module_state import ModuleState
from pygraph_train.torch_private.switches import SWITCHES, switches

__all__ = ["island", "island_of_node"]


def island(number: int, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Call an island.

    Args:
        tensors: among its arguments, its parameters, those that are trained first, and its buffers.

    Returns:
        Its results, and second names of those of its arguments through which gradients go.
    """
    one = known_island(number)
    assert one is not None
    given = tensors[: len(one.requires)]
    aliases = [x for x, requires in zip(given, one.requires, strict=True) if requires]
    if isinstance(tensors[0], FakeTensor) or may_leave_gap():
        pass
    elif not (one.shows and _differentiates(tensors)):
        results = one.call(given)
        for result, look in zip(results, one.tensors, strict=True):
            if (result.shape, result.dtype) != (look.shape, look.dtype):
                raise one.differs(f"a result is {Look.at(result)}, and was {look}")
        return (*results, *aliases)
    if _differentiates(tensors):
        made: tuple[Tensor, ...] = _Island.apply(one, *tensors)  # type: ignore[no-untyped-call]
        return made
    results = [look.empty(tensors[0]) for look in one.tensors]
    if may_leave_gap():
        leave_gap(_Gap(one, given, results, differentiates=False).forward)
    return (*results, *aliases)


def _differentiates(tensors: Sequence[Tensor]) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def island_of_node(node: Any) -> Island | None:
    """The island of a node in a graph of Dynamo's, or in one of autograd's; None where it is none."""
    if isinstance(node, torch.fx.Node):
        return known_island(node.args[0]) if node.target is island else None
    found = getattr(node, "island", None)
    return found if isinstance(found, Island) else None


class _Island(torch.autograd.Function):
    """In a capture the two gaps; otherwise a run that shows what its gradients are like: see `Island.shows`."""

    @staticmethod
    def forward(ctx: Any, one: Island, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.island, ctx.gap, ctx.made = one, None, None
        ctx.set_materialize_grads(False)
        given = tensors[: len(one.requires)]
        fake = isinstance(tensors[0], FakeTensor)
        if fake or may_leave_gap():
            results = [look.empty(tensors[0]) for look in one.tensors]
        else:
            state = ModuleState(one.present())
            ctx.made = IslandRun(one, given)
            if (name := state.changed()) is not None:
                state.restore()
                raise one.differs(f"it has changed its attribute {name}")
            one.reached = ctx.made.reached
            results = [x.detach() for x in ctx.made.results]
        if may_leave_gap():
            if one.gradients is None:
                raise NotLegal(Problem(f"no backward of {one.name} was seen before the capture"))
            ctx.save_for_backward(*given)  # the backward may read their memory
            ctx.gap = _Gap(one, given, results, differentiates=True)
            leave_gap(ctx.gap.forward)
        fixed = [x for x, look in zip(results, one.tensors, strict=True) if not look.requires_grad]
        ctx.mark_non_differentiable(*fixed)
        aliases = [x for x, requires in zip(given, one.requires, strict=True) if requires]
        return (*results, *aliases)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        one: Island = ctx.island
        rest = [None] * (len(one.frozen) + len(one.buffers))
        if ctx.gap is None:
            keep = backward_keeps_graph()
            found = ctx.made.backward(grads, keep=keep)
            ctx.made = ctx.made if keep else None
            one.gradients = [None if x is None else Look.at(x.detach()) for x in found]
            return (None, *found, *rest)
        refuse_second_gradient(f"a module that runs on the host ({one.name})")
        assert one.gradients is not None
        like = ctx.saved_tensors[0] if ctx.saved_tensors else next(x for x in grads if x is not None)
        places = [None if look is None else look.empty(like) for look in one.gradients]
        leave_gap(ctx.gap.backward(grads, places))
        return (None, *places, *rest)


class _Gap:
    """An island in one replay after the other.

    Args:
        one: the island.
        tensors: among its arguments. What is captured owns their memory.
        results: get its results.
    """

    def __init__(
        self, one: Island, tensors: Sequence[Tensor], results: Sequence[Tensor], *, differentiates: bool
    ) -> None:
        self._one, self._differentiates = one, differentiates
        self._tensors = [borrower(x.detach()) for x in tensors]
        self._results = [borrower(x.detach()) for x in results]
        self._modes, self._grad = (
            present_modes(results[0].device.type),
            differentiates or torch.is_grad_enabled(),
        )
        self._switches = _switches()
        self._backwards = 0

    def forward(self) -> None:
        """The results of this replay."""
        one = self._one
        one.made = None
        one.calls += 1
        state = ModuleState(one.present())
        tensors = [borrow() for borrow in self._tensors]
        try:
            with self._modes():
                if _switches() != self._switches:  # a context of the step that replays are not in
                    raise one.differs("switches of torch are not those of its place in the step")
                if self._differentiates and self._backwards:
                    made = IslandRun(one, tensors)
                    if made.reached != one.reached:
                        raise one.differs("gradients reach other parameters or arguments than before")
                    results, one.made = made.results, made
                else:
                    with torch.set_grad_enabled(self._grad):
                        results = one.call(tensors)
            if (name := state.changed()) is not None:
                raise one.differs(f"it has changed its attribute {name}")
            _copy(one, results, self._results)
        except BaseException:
            one.made = None
            state.restore()
            raise

    def backward(self, grads: Sequence[Tensor | None], places: Sequence[Tensor | None]) -> Callable[[], None]:
        """What computes the gradients of this replay.

        Args:
            grads: of the results, and of the second names of arguments.
            places: get the gradients.
        """
        given = [None if x is None else borrower(x.detach().resolve_neg()) for x in grads]
        into = [None if x is None else borrower(x) for x in places]
        self._backwards += 1
        number = self._backwards

        def work() -> None:
            one, made = self._one, self._one.made
            assert made is not None
            further = number < self._backwards
            one.made = made if further else None
            try:
                with self._modes():
                    found = made.backward([None if x is None else x() for x in given], keep=further)
                if [x is None for x in found] != [x is None for x in into]:
                    raise one.differs("other gradients are None than before")
                pairs = [
                    (x, place)
                    for x, place in zip(found, into, strict=True)
                    if x is not None and place is not None
                ]
                _copy(one, [x for x, _ in pairs], [place for _, place in pairs])
            except Exception as error:
                raise BackwardChanged(str(error)) from error

        return work


def _switches() -> list[Any]:
    return [value for name, value in zip(SWITCHES, switches(), strict=True) if name != "function_modes"]


def _copy(one: Island, made: Sequence[Tensor], places: Sequence[Callable[[], Tensor]]) -> None:
    with torch.no_grad():
        for x, borrow in zip(made, places, strict=True):
            place = borrow()
            if (x.shape, x.stride(), x.dtype) != (place.shape, place.stride(), place.dtype):
                raise one.differs(
                    f"it has made {Look.at(x)} and strides {x.stride()}, its graph takes {Look.at(place)}"
                )
            _each_once(place).copy_(_each_once(x))


def _each_once(x: Tensor) -> Tensor:
    """One of those elements of a tensor that have their memory in common."""
    for dim, (size, stride) in enumerate(zip(x.shape, x.stride(), strict=True)):
        x = x.narrow(dim, 0, 1) if size > 1 and not stride else x
    return x
