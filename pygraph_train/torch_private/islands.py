"""Islands: modules of a step whose own Python runs in gaps, because values decide what they compute. (2.11, 2.13)

A module that loops over the experts that tokens were sent to has no graph. What it takes and returns has shapes that
are the same in each step, though. So a capture leaves a gap for its forward, which keeps its autograd graph, and one
for the backward through that graph. The rest of the step is in the parts of the graph before and behind.

Gradients of a tensor are added in the order of plain training: backwards run in the reverse order of forwards. What
comes behind the island takes a second name of the island's argument (`aliases`). So its gradients arrive at the
island, and those of the uses inside of the island are added to them one by one, as plain training adds them.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pygraph_train.torch_private.autograd import is_function_in_python, nodes_behind
from pygraph_train.torch_private.dynamo import untraced
from pygraph_train.torch_private.hooks import gradient_hooks
from pygraph_train.torch_private.memory import no_view, storage_key, tensor_version

__all__ = ["BackwardChanged", "Island", "IslandRun", "Look", "Unlike", "flat_results", "known_island"]


class Unlike(RuntimeError):
    """An island has computed something of another kind than its graph has. Nothing of its step counts."""


class BackwardChanged(RuntimeError):
    """The same in a backward: gradients may have been written."""


@dataclass(frozen=True)
class Look:
    """What a tensor is like."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = False

    @classmethod
    def at(cls, x: Tensor) -> Look:
        return cls(tuple(x.shape), tuple(x.stride()), x.dtype, x.requires_grad)

    def empty(self, like: Tensor) -> Tensor:
        """Such a tensor on the device of another one. Whole numbers in it may be used as indices."""
        made = like.new_empty_strided(self.shape, self.stride, dtype=self.dtype)
        return made if self.dtype.is_floating_point or self.dtype.is_complex else made.zero_()

    def __str__(self) -> str:
        return f"{self.dtype} of shape {self.shape}"


def flat_results(results: Any) -> list[Any] | None:
    """What a module has returned, if a graph can have it: a tensor, or a tuple of tensors and None."""
    flat = list(results) if type(results) is tuple else [results]
    fits = all(x is None or (type(x) is Tensor and x.layout is torch.strided) for x in flat)
    return flat if fits and any(x is not None for x in flat) else None


_numbers = itertools.count(1)
_known: weakref.WeakValueDictionary[int, Island] = weakref.WeakValueDictionary()


@dataclass(eq=False)
class Island:
    """One call of a module in a step.

    Args:
        module: that is called.
        arguments: makes positional and named arguments of its tensors.
        requires: of each tensor among the arguments, whether gradients go through it.
        parameters, frozen, buffers: their names in the module; the parameters are those that are trained. A graph takes
            the frozen ones as well, so that guards see that they are frozen.
        results: what each of its results is like, None for None.

    Attributes:
        number: by which graphs know it.
        reached: the places of those inputs (arguments, then parameters) that a result was computed from.
        gradients: what the gradients of its inputs are like, None before a backward was seen.
        unlike: how often it was not like that.
        calls: in gaps.
        made: the forward of the replay that is under way, for its backward.
        shows: whether it runs as in gaps, and shows what its gradients are like. Nothing of such a run counts.
    """

    module: weakref.ref[torch.nn.Module]
    arguments: Callable[[Sequence[Any]], tuple[tuple[Any, ...], dict[str, Any]]]
    requires: list[bool]
    parameters: list[str]
    frozen: list[str]
    buffers: list[str]
    results: list[Look | None]
    reached: frozenset[int] | None = None
    gradients: list[Look | None] | None = None
    unlike: int = 0
    calls: int = 0
    made: IslandRun | None = None
    shows: bool = False
    number: int = field(default_factory=lambda: next(_numbers))

    def __post_init__(self) -> None:
        _known[self.number] = self

    @property
    def tensors(self) -> list[Look]:
        return [look for look in self.results if look is not None]

    def present(self) -> torch.nn.Module:
        module = self.module()
        if module is None:
            raise Unlike("a module that its graph calls is gone")
        return module

    def trained(self) -> list[Tensor]:
        """Its parameters that are trained."""
        module = self.present()
        return [module.get_parameter(name) for name in self.parameters]

    def call(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Run the module."""
        args, kwargs = self.arguments(tensors)
        found = flat_results(_run(self.present(), args, kwargs))
        if found is None or [x is None for x in found] != [look is None for look in self.results]:
            raise Unlike(f"{self.name} has returned something else than before")
        return [x for x in found if x is not None]

    @property
    def name(self) -> str:
        return type(self.present()).__name__

    def differs(self, what: str) -> Unlike:
        self.unlike += 1
        return Unlike(f"{self.name}: {what}")


@untraced
def _run(module: Any, args: Any, kwargs: Any) -> Any:
    return module(*args, **kwargs)


def known_island(number: Any) -> Island | None:
    """The island of this number, as long as somebody holds it."""
    return _known.get(number)


class IslandRun:
    """A forward of an island with its own autograd graph.

    Args:
        one: the island.
        tensors: among its arguments. They own no history.

    Attributes:
        results: of the module.
        reached: see `Island`.
    """

    def __init__(self, one: Island, tensors: Sequence[Tensor]) -> None:
        self._one = one
        leaves: list[Tensor] = []
        given: list[Tensor] = []
        with torch.enable_grad():
            for x, requires in zip(tensors, one.requires, strict=True):
                leaf = x.detach().requires_grad_(requires)
                leaves.append(leaf)
                given.append(no_view(leaf) if requires else leaf)  # autocast keeps casts of leaves
            versions = [tensor_version(x) for x in given]
            self.results = one.call(given)
        self._inputs = given
        self._trained = one.trained()
        if versions != [tensor_version(x) for x in given]:
            raise one.differs("it has changed an argument in place")
        if any(gradient_hooks(x) for x in given):
            raise one.differs("it has given an argument a gradient hook")
        self._check_results(leaves)
        self.reached = self._leaves_behind(leaves)

    def _check_results(self, leaves: Sequence[Tensor]) -> None:
        one = self._one
        taken = {storage_key(x.untyped_storage()) for x in (*leaves, *one.present().parameters())}
        taken.update(storage_key(x.untyped_storage()) for x in one.present().buffers())
        addresses = {x.untyped_storage().data_ptr() for x in leaves if x.numel()}
        for result, look in zip(self.results, one.tensors, strict=True):
            if Look.at(result) != look:
                raise one.differs(f"a result is {Look.at(result)}, and was {look}")
            memory = result.untyped_storage()
            if storage_key(memory) in taken or (result.numel() and memory.data_ptr() in addresses):
                raise one.differs("a result shares memory with an argument or a parameter")
            taken.add(storage_key(memory))

    def _leaves_behind(self, leaves: Sequence[Tensor]) -> frozenset[int]:
        places = {id(x): i for i, x in enumerate([*leaves, *self._trained])}
        found = set()
        for node in nodes_behind(*(x.grad_fn for x in self.results)):
            if hasattr(node, "variable"):
                if id(node.variable) not in places:
                    raise self._one.differs(
                        "it uses a trained tensor that is neither an argument nor a parameter of it"
                    )
                found.add(places[id(node.variable)])
            elif is_function_in_python(node):
                raise self._one.differs("it calls a torch.autograd.Function, whose gradients may be None")
        return frozenset(found)

    def backward(self, grads: Sequence[Tensor | None], *, keep: bool) -> list[Tensor | None]:
        """Gradients of the arguments and parameters; None where there is none.

        Args:
            grads: of the results, and of the second names of arguments.
            keep: whether this may be called again.
        """
        one = self._one
        differentiable = [x for x, requires in zip(self._inputs, one.requires, strict=True) if requires]
        with torch.enable_grad():
            names = [x.view_as(x) for x in differentiable]  # the latest nodes: their gradients arrive first
        pairs = [
            (x, g)
            for x, g in zip([*self.results, *names], grads, strict=True)
            if g is not None and x.requires_grad
        ]
        asked = [*differentiable, *self._trained]
        found: Sequence[Tensor | None] = [None] * len(asked)
        if pairs:
            ends, given = zip(*pairs, strict=True)
            found = torch.autograd.grad(ends, asked, given, retain_graph=keep, allow_unused=True)
        left = iter(found)
        return [*(next(left) if requires else None for requires in one.requires), *left]
