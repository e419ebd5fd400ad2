"""From autograd straight to the regions, past the runtime of AOTAutograd.

AOTAutograd's runtime puts right what a compiled graph cannot express: aliases, mutations, subclasses, tokens. A
compiled function that has none of that pays for it all the same, some hundred microseconds of Python a step. Here
such a function is called through an autograd function of our own. It is told by watching one call that goes the
long way: what went into the regions must be what the caller gave, and what he got what they returned.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter, itemgetter
from typing import Any

import torch

from pygraph_train.boundary import Boundary, done
from pygraph_train.regions.absent import Absent, what_changed
from pygraph_train.regions.lazy_bits import without_lazy_bits
from pygraph_train.regions.pair import Pair, Tangent
from pygraph_train.regions.region import Region
from pygraph_train.regions.zeros import Zeros
from pygraph_train.torch_private.aot import mark_dynamic
from pygraph_train.torch_private.autograd import (
    autograd_is_traced,
    autograd_is_watched,
    backward_keeps_graph,
    refuse_retaining,
    refuse_second_backward,
)
from pygraph_train.torch_private.dispatch import autocast_enabled, no_autocast
from pygraph_train.torch_private.dynamo import untraced
from pygraph_train.torch_private.memory import no_view, storage_key

__all__ = ["LOOKS", "Direct", "run_uncast", "watched"]

_version = attrgetter("_version")
LOOKS = 3  # calls that are watched before a function counts as one that needs AOTAutograd's runtime


@dataclass(frozen=True, kw_only=True)
class Route:
    """How a call gets to the regions and back.

    Args:
        forward, backward: the regions.
        pick: arguments of the call -> inputs of the forward.
        detached: inputs of the forward that get no gradient, though their arguments would.
        returns: so many outputs of the forward are the call's.
        constant: those of them that need no gradient.
        viewed: those that are views of what the forward computes: the caller must be able to change them in place.
        arrange: [*saved, *tangents] -> inputs of the backward.
        tangents: by output that needs a gradient, what the backward expects of it.
        shared: what is saved of the caller's outputs: without its history, which would hold itself alive.
        checked: inputs of the forward that are saved, or views of them: nobody may change them before the backward.
        gradients: by argument, which of (None, *outputs of the backward) is its gradient.
        absent: which gradients of arguments are not there when some of outputs are not; which outputs are saved.
        donates: whether the backward writes over what is saved.
        zeros: stand for gradients of outputs that nothing depends on.
        sized: outputs whose gradients have sizes that change.
        dynamic: see `Pair`.
    """

    forward: Region
    backward: Region
    pick: Callable[[Sequence[Any]], Sequence[Any]]
    detached: tuple[int, ...]
    returns: int
    constant: tuple[int, ...]
    viewed: tuple[int, ...]
    arrange: Callable[[Sequence[Any]], Sequence[Any]]
    tangents: tuple[tuple[int, Tangent], ...]
    shared: tuple[int, ...]
    checked: tuple[int, ...]
    gradients: tuple[int, ...]
    absent: Absent
    donates: bool
    zeros: Zeros
    sized: tuple[int, ...]
    dynamic: tuple[tuple[int, set[int]], ...]
    pickers: dict[tuple[int, ...], Callable[[Sequence[Any]], Sequence[Any]] | None] = field(
        default_factory=dict
    )

    def picker(self, missing: tuple[int, ...]) -> Callable[[Sequence[Any]], Sequence[Any]] | None:
        """(None, *outputs of the backward) -> gradients of the arguments, where these of outputs are not there.

        None where no argument has a gradient then.
        """
        if missing not in self.pickers:
            gone = self.absent.without(missing)
            picked = [0, *(0 if k - 1 in gone else k for k in self.gradients)]
            self.pickers[missing] = _picker(picked) if any(picked) else None
        return self.pickers[missing]


class Direct:
    """A compiled function with gradients, in the plain convention.

    Args:
        compiled: calls the regions through AOTAutograd's runtime.
        pair: the regions.
    """

    def __init__(self, compiled: Callable[..., Any], pair: Pair) -> None:
        self._compiled = compiled
        self._pair = pair
        self._looks = LOOKS
        self._route: Route | None = None
        self._boundary = Boundary(rest=self._end)

    def __call__(self, *args: Any) -> Any:
        if self._route is None and not self._looks:
            return self._compiled(*args)
        return self._boundary.make(self._call, self._compiled, *args)

    def _call(self, *args: Any) -> Any:
        route = self._route
        if route is not None and not autograd_is_watched():
            result = done(_apply(route, *args))
            for i, dims in route.dynamic:
                mark_dynamic(result[i], dims)
            return result
        if self._looks and route is None:
            return self._look(args)
        return self._compiled(*args)

    def _end(self) -> None:
        self._looks, self._route = 0, None

    def _look(self, args: tuple[Any, ...]) -> Any:
        """Call the long way, and find out whether there is a short one."""
        forward = self._pair.forward
        if forward is None or type(forward) is not Region:
            self._looks = 0
            return self._compiled(*args)
        result, seen = watched(forward, self._compiled, args)
        if self._pair.backward is not None:  # else it is compiled when it is needed
            self._looks -= 1
            self._route = _route(self._pair, args, seen, result) if self._pair.direct else None
        return result


class Seen:
    """What one run of a region was given, and what it returned."""

    def __init__(self) -> None:
        self.runs: list[tuple[list[Any], list[Any]]] = []

    def __call__(self, inputs: list[Any], run: Callable[[list[Any]], Any]) -> Any:
        given = list(inputs)
        outputs = run(inputs)
        self.runs.append((given, list(outputs)))
        return outputs


def watched(region: Region, compiled: Callable[..., Any], args: Sequence[Any]) -> tuple[Any, Seen]:
    """The result of a call that goes the long way, and what its region was given and returned."""
    region.witness = seen = Seen()
    try:
        return compiled(*args), seen
    finally:
        region.witness = None


class _Boxed(type(torch.autograd.Function)):  # type: ignore[misc]
    @property
    def boxed_grads_call(cls) -> bool:
        """Torch 2.13 hands gradients over in a list then, and holds them nowhere else. No trace takes such a list."""
        return not autograd_is_traced()


class _Regions(torch.autograd.Function, metaclass=_Boxed):
    """One forward and its backward."""

    @staticmethod
    def forward(ctx: Any, route: Route, *args: Any) -> Any:
        inputs = list(route.pick(args))
        for i in route.detached:
            inputs[i] = inputs[i].detach()
        checked = [inputs[i] for i in route.checked]
        outputs = run_uncast(route.forward, inputs)
        saved = outputs[route.returns :]
        for i in route.shared:
            saved[i] = saved[i].detach()
        ctx.set_materialize_grads(False)
        for i in route.viewed:
            constant = i in route.constant  # shares the version, so that changes in place are noticed
            outputs[i] = outputs[i].detach() if constant else no_view(outputs[i])
        # what is saved may be a copy of what the caller gets, and a change must be noticed all the same
        checked += [outputs[i].detach() for i in route.absent.saved]
        ctx.route, ctx.kept = route, [saved, checked]  # emptied, not replaced: compiled autograd proxies ctx
        ctx.versions = list(map(_version, checked))
        ctx.sizes = {i: outputs[i].size() for i in route.sized}
        if route.constant:
            ctx.mark_non_differentiable(*[outputs[i] for i in route.constant])
        return tuple(outputs[: route.returns])

    @staticmethod
    @untraced
    def backward(ctx: Any, *gradients: Any) -> Any:
        given = gradients[0] if type(gradients[0]) is list else list(gradients)
        route, kept = ctx.route, ctx.kept
        if not kept:
            raise RuntimeError(
                "Trying to backward through the graph a second time (or directly access saved tensors after they "
                "have already been freed). Saved intermediate values of the graph are freed when you call "
                ".backward() or autograd.grad(). Specify retain_graph=True if you need to backward through the "
                "graph a second time or if you need to access saved tensors after calling backward."
            )
        saved, checked = kept
        if list(map(_version, checked)) != ctx.versions:
            raise RuntimeError(what_changed(checked, ctx.versions))
        if not backward_keeps_graph():
            kept.clear()
        elif route.donates:
            refuse_retaining()
        del checked
        missing = tuple([k for k, (i, _) in enumerate(route.tangents) if given[i] is None])
        pick = route.picker(missing)
        if pick is None:
            return (None,) * (1 + len(route.gradients))
        zeros = route.zeros
        tangents = [
            zeros.of(i, tangent, ctx.sizes.get(i)) if given[i] is None else _coerced(given[i], tangent)
            for i, tangent in route.tangents
        ]
        given.clear()
        inputs = list(route.arrange([*saved, *tangents]))
        del saved, tangents, gradients
        others = route.absent.others(missing)
        if not torch.is_grad_enabled():
            return _differentiated(route, inputs, pick, others)
        differentiated = any(isinstance(x, torch.Tensor) and x.requires_grad for x in inputs)
        with torch.no_grad():
            found = _differentiated(route, inputs, pick, others)
        return refuse_second_backward(found) if differentiated else found


def _differentiated(
    route: Route,
    inputs: list[Any],
    pick: Callable[[Sequence[Any]], Sequence[Any]],
    others: Callable[[list[Any]], Any] | None,
) -> Sequence[Any]:
    run = route.backward if others is None else functools.partial(route.backward.run_others, others)
    outputs = run_uncast(run, inputs)
    route.zeros.look(outputs)
    return pick([None, *outputs])


_apply: Any = super(torch.autograd.Function, _Regions).apply  # below what functorch adds


def run_uncast(region: Callable[[list[Any]], Any], inputs: list[Any]) -> list[Any]:
    """A region's own kernels have their types already."""
    if not autocast_enabled():
        return list(region(inputs))
    with no_autocast():
        return list(region(inputs))


def _coerced(gradient: Any, tangent: Tangent) -> Any:
    """A gradient in the layout that the backward was compiled for."""
    if gradient.is_neg() or (gradient.dtype.is_complex and gradient.is_conj()):
        (gradient,) = without_lazy_bits([gradient])
    if tangent.layout is not None:
        return gradient.contiguous(memory_format=tangent.layout)
    if gradient.stride() == tangent.stride:
        return gradient
    return torch.empty_strided(
        tangent.size, tangent.stride, dtype=gradient.dtype, device=gradient.device
    ).copy_(gradient)


# ----------------------------------------------------------------------------------- finding the route


def _route(pair: Pair, args: Sequence[Any], seen: Seen, result: Any) -> Route | None:
    """The short way of a call that was watched, None where there is none."""
    forward, backward = pair.forward, pair.backward
    if type(forward) is not Region or type(backward) is not Region or len(seen.runs) != 1:
        return None
    ((inputs, outputs),) = seen.runs
    spec, returns = forward.spec, forward.spec.saved_from
    if spec.phase != "forward" or spec.mutations or spec.mutated or backward.spec.mutated:
        return None
    if not isinstance(result, (tuple, list)) or len(result) != returns:
        return None
    if not all(isinstance(x, torch.Tensor) for x in outputs[:returns]):
        return None
    if not all(type(x) is int or isinstance(x, torch.Tensor) for x in (*inputs, *outputs)):
        return None  # AOTAutograd has None where an operator has no such result
    picks = [_position(x, args) if isinstance(x, torch.Tensor) else i for i, x in enumerate(inputs)]
    tensors = [x for x in (*inputs, *args) if type(x) is not int]
    if None in picks or len(set(picks)) < len(picks) or not all(map(_plain, tensors)):
        return None
    if any(type(x) is int for x in args) and (
        picks != list(range(len(args))) or _numbers_differ(inputs, args)
    ):
        return None  # which number is which cannot be told
    given = set(map(id, args))
    if not all(_same(x, y) and id(x) not in given for x, y in zip(result, outputs[:returns], strict=True)):
        return None
    if len(set(map(id, result))) < returns:
        return None
    differentiable = [i for i, x in enumerate(result) if x.requires_grad]
    saved, tangents = pair.outputs[returns:], pair.tangents
    if len(tangents) != len(differentiable) or pair.gradients != len(inputs):
        return None
    expected = tuple(zip(differentiable, tangents, strict=True))
    if not all(t.layout or t.size == result[i].size() for i, t in expected):
        return None
    if not all(t.dtype == result[i].dtype for i, t in expected):
        return None
    order = [*saved, *(t.name for t in tangents)]
    if sorted(order) != sorted(pair.arriving) or len(set(order)) < len(order):
        return None
    given_memory = {storage_key(x.untyped_storage()) for x in args if type(x) is not int}
    if any(storage_key(x.untyped_storage()) in given_memory for x in result):
        return None  # an alias of an argument: it has to share its version
    back = {pick: j + 1 for j, pick in enumerate(picks)}
    return Route(
        forward=forward,
        backward=backward,
        pick=_picker([p for p in picks if p is not None]),
        detached=tuple(
            i
            for i, p in enumerate(picks)
            if p is not None and inputs[i] is not args[p] and type(inputs[i]) is not int
        ),
        returns=returns,
        constant=tuple(i for i, x in enumerate(result) if not x.requires_grad),
        viewed=tuple(i for i, x in enumerate(result) if x is not outputs[i]),
        arrange=_picker([order.index(name) for name in pair.arriving]),
        tangents=expected,
        shared=pair.shared,
        checked=tuple(sorted(pair.kept)),
        gradients=tuple(back.get(k, 0) for k in range(len(args))),
        absent=pair.absent,
        donates=pair.donates,
        zeros=Zeros(backward),
        sized=tuple(i for i, t in expected if t.layout is not None),
        dynamic=pair.dynamic,
    )


def _numbers_differ(inputs: Sequence[Any], args: Sequence[Any]) -> bool:
    """Whether numbers among the inputs are others than those at the same places of the call."""
    return any(type(x) is int and x != y for x, y in zip(inputs, args, strict=True))


def _plain(x: Any) -> bool:
    return type(x) in (torch.Tensor, torch.nn.Parameter) and not torch.is_inference(x)


def _position(tensor: Any, args: Sequence[Any]) -> int | None:
    """Which argument an input of the forward is; one that needs no gradient comes without its history."""
    for i, x in enumerate(args):
        if x is tensor:
            return i
    for i, x in enumerate(args):
        if isinstance(x, torch.Tensor) and x.requires_grad and not tensor.requires_grad and _same(x, tensor):
            return i
    return None


def _same(one: Any, other: Any) -> bool:
    """Whether two tensors are one, or look at the same elements."""
    if one is other:
        return isinstance(one, torch.Tensor)
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return False
    what = [
        (x.data_ptr(), x.size(), x.stride(), x.dtype, storage_key(x.untyped_storage())) for x in (one, other)
    ]
    return what[0] == what[1]


def _picker(indices: Sequence[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """Elements at these indices, in one call in C where there are several."""
    if len(indices) > 1:
        return itemgetter(*indices)
    return lambda values: [values[i] for i in indices]
