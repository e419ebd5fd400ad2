"""The autograd node of a replayed forward."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from pygraph_train.boundary import BACKWARD, surely, theirs
from pygraph_train.core.recording import NONE, Slot, gradient_of, needs_gradient
from pygraph_train.problems import PyGraphError
from pygraph_train.torch_private.memory import (
    as_part_of,
    copy_all,
    local_tensor,
    local_tensors,
    tensor_version,
)
from pygraph_train.torch_private.phases import (
    accumulation_hooks_of,
    add_all,
    at_end_of_backward,
    backward_keeps_graph,
    hooks_of,
    present_backward,
    reaches,
)
from pygraph_train.torch_private.stock_dynamo import untraced


class Token:
    """Lives as long as the backward of a forward may come."""

    __slots__ = ("__weakref__",)


class Delivery:
    """Puts gradients of parameters where the loop expects them, as autograd's own accumulation does.

    A leaf of ours stands for all parameters, because autograd takes microseconds for each input. It is reached by
    backwards that put gradients of all leaves in place, and not by those that somebody asks for some gradients.

    Attributes:
        made: the recorded backward whose gradients are all that parameters have in this step, None where nothing is
            known of them.
    """

    def __init__(self) -> None:
        self.made: Any = None
        self._leaves: dict[torch.device, tuple[Tensor, Any]] = {}
        self._sums: dict[int, Tensor] = {}
        self._ones: dict[Any, Tensor] = {}
        self._task: int | None = None
        self._waiting: list[tuple[Sequence[Tensor], Sequence[Tensor | None]]] = []

    def leaf(self, device: torch.device) -> tuple[Tensor, Any]:
        """The leaf on a device, and its node. Hot path."""
        if device not in self._leaves:
            leaf = torch.empty(0, device=device, requires_grad=True)
            self._leaves[device] = leaf, torch.autograd.graph.get_gradient_edge(leaf).node
        return self._leaves[device]

    def one(self, like: Tensor, by: float) -> Tensor:
        """The gradient of `like / by` with respect to `like`, a tensor without dimensions. Hot path."""
        key = like.device, like.dtype, by
        if key not in self._ones:
            self._ones[key] = torch.ones((), device=like.device, dtype=like.dtype) / by
        return self._ones[key]

    def deliver(
        self, parameters: Sequence[Tensor], found: Sequence[Tensor | None], first: bool = False
    ) -> None:
        """Put gradients in place outside of autograd's backwards. What a failed backward has left is dropped.

        Args:
            first: whether no parameter has a gradient.
        """
        self._task, self._waiting = None, []
        self._deliver(parameters, found, first)

    def begin(self) -> None:
        """A node of the present backward is about to be replayed. What a failed backward has left is dropped."""
        task = present_backward()
        if task != self._task:
            at_end_of_backward(self._end)
            self._task, self._waiting = task, []  # only now: where it fails, all of this is done again
        else:
            self._flush()

    def take(self, parameters: Sequence[Tensor], found: Sequence[Tensor | None]) -> None:
        """Gradients to deliver at the end of the present backward."""
        self._waiting.append((parameters, found))

    @untraced
    def _end(self) -> None:
        self._task = None
        surely(self._flush, BACKWARD)

    def _flush(self) -> None:
        while self._waiting:
            self._deliver(*self._waiting[0])
            del self._waiting[0]

    def _deliver(
        self, parameters: Sequence[Tensor], found: Sequence[Tensor | None], first: bool = False
    ) -> None:
        """Add the gradients of a backward. Where there was none, `.grad` is what later backwards overwrite."""
        if first or NONE.issuperset(map(gradient_of, parameters)):
            for p, g in zip(parameters, found, strict=True):
                p.grad = g
            return
        if all(map(operator.is_, map(gradient_of, parameters), found)):  # they were added in the graph
            return
        old: list[Tensor] = []
        new: list[Tensor] = []
        for p, g in zip(parameters, found, strict=True):
            if g is None:
                continue
            if (before := p.grad) is None:
                p.grad = g
            elif before is not g:  # a delivery that failed has put it there
                old.append(before)
                new.append(g)
        if old:
            add_all(local_tensors(old), local_tensors(new))

    def make_way(self, parameters: Sequence[Tensor], found: Sequence[Tensor | None]) -> bool:
        """Move gradients out of `found`, which a replay overwrites; whether no parameter has any. Hot path."""
        if NONE.issuperset(map(gradient_of, parameters)):
            return True
        moved: list[Tensor] = []
        totals: list[Tensor] = []
        there: list[Tensor] = []
        for p, g in zip(parameters, found, strict=True):
            if g is not None and lies_at(p.grad, g):
                total = self._sums.get(id(p))
                if total is None or total is g or looks(total) != looks(g):
                    total = self._sums[id(p)] = torch.empty_like(g)
                moved.append(p)
                totals.append(total)
                there.append(g)
        if moved:
            copy_all(local_tensors(totals), local_tensors(there))
        for p, total in zip(moved, totals, strict=True):
            p.grad = total
        return False


def lies_at(gradient: Tensor | None, place: Tensor) -> bool:
    """Whether a gradient lies at a place, where autograd keeps tensors of its own."""
    if gradient is None:
        return False
    part = local_tensor(gradient)
    return gradient is place or (type(part) is Tensor and part.data_ptr() == local_tensor(place).data_ptr())


def looks(tensor: Tensor) -> tuple[Any, ...]:
    """What has to be the same of a gradient that takes the place of another one."""
    return tensor.shape, tensor.stride(), tensor.dtype


def is_asked_for(tensor: Tensor) -> bool:
    """Whether somebody wants the gradient of this result itself, as it is seen in a backward.

    Hooks that Fabric registers on results do not count: they look where a backward comes from.
    """
    if _is_listened_to(tensor):
        return True
    node = tensor.grad_fn
    if node is None:  # a leaf of the step's own: whoever has it may read its gradient
        return reaches(get_gradient_edge(tensor).node, asked=True)
    if not reaches(node):
        return False
    return not any(reaches(behind, asked=True) for behind, _ in node.next_functions if behind is not None)


_NOTHING = torch.empty(0, device="cpu")


class Way:
    """A tensor from which autograd goes on to many parameters, for backwards that deliver nothing.

    It is made once: autograd takes microseconds for each input of a node.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._task: int | None = None
        self._waiting: list[Sequence[Tensor | None]] = []
        with torch.enable_grad():
            self.tensor: Tensor = _Way.apply(self, *parameters)

    def send(self, gradients: Sequence[Tensor | None]) -> Tensor:
        """Send gradients in the present backward, and return that of `tensor`."""
        if (task := present_backward()) != self._task:
            self._task, self._waiting = task, []
        gradient = torch.zeros_like(self.tensor)
        self._waiting.append(gradients)  # last: where this fails, it is done again
        return gradient

    def arrived(self) -> list[Tensor | None]:
        """The gradients that were sent, added up as autograd does."""
        total, *others = self._waiting
        found = list(total)
        for gradients in others:
            found = [
                a if b is None else b if a is None else a + b for a, b in zip(found, gradients, strict=True)
            ]
        self._waiting = []
        return found


class _Way(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, way: Way, *parameters: Tensor) -> Tensor:
        ctx.way = weakref.ref(way)  # which holds the tensor, and with it this node
        ctx.set_materialize_grads(False)
        return torch.empty(0, device=parameters[0].device)

    @staticmethod
    @untraced
    def backward(ctx: Any, asked: Tensor | None) -> Any:
        if asked is None:
            return (None,) * len(ctx.needs_input_grad)
        return None, *surely(ctx.way().arrived, BACKWARD)


def _stream_of(slot: Slot) -> Any:
    """The present stream of a slot's device; None on a CPU."""
    device = slot.region.owner.engine.device
    # of the accelerator: that of torch.cuda takes four times as many calls of Python
    return torch.accelerator.current_stream(device.index) if device.type == "cuda" else None


class _Replay(torch.autograd.Function):
    """Its inputs lead to gradients; a leaf of ours stands for all parameters whose gradients are delivered."""

    @staticmethod
    def forward(ctx: Any, call: tuple[Any, ...], *inputs: Tensor) -> tuple[Tensor, ...]:
        slot, given, delivery, routes, way, ctx.beside, made = call  # torch looks at each argument in Python
        token = Token()
        ctx.stream = _stream_of(slot)
        made += slot.replay_forward(given, token)
        ctx.slot, ctx.generation, ctx.token, ctx.delivery = slot, slot.generation, token, delivery
        ctx.delivered, ctx.returned, parameters, saved = routes
        ctx.parameters, ctx.way, ctx.saved, ctx.inner = parameters(given), way, saved(given), ()
        ctx.versions = list(map(tensor_version, ctx.saved))
        ctx.save_for_backward(_NOTHING)  # a second backward gets torch's own error
        ctx.set_materialize_grads(False)
        return tuple(map(made.__getitem__, slot.differ))

    @staticmethod
    @untraced
    def backward(ctx: Any, *asked: Tensor | None) -> Any:
        try:
            ctx.saved_tensors  # noqa: B018
            if ctx.token is None:  # `made_directly`
                raise RuntimeError("Trying to backward through the graph a second time")
        except RuntimeError as error:
            raise theirs(error)  # noqa: B904
        slot: Slot = ctx.slot
        if (list(map(tensor_version, ctx.saved)) != ctx.versions or ctx.inner) and (why := _changed(ctx)):
            if isinstance(why, PyGraphError):
                slot.region.inner_is_asked_for()
            raise why
        seeds = {i: g for i, g in zip(slot.differ, asked, strict=True) if g is not None}
        if not torch.is_grad_enabled() and slot.generation == ctx.generation:
            return surely(lambda: _made_backward(ctx, slot, seeds), BACKWARD)
        found = None
        if slot.generation == ctx.generation and len(ctx.delivered) == len(slot.leads):
            found = slot.differentiable(ctx.parameters, seeds)
        if found is None:
            raise PyGraphError(
                "the backward of a forward that pygraph-train replayed is differentiated itself (create_graph=True), "
                "for the first time. Set PYGRAPH_DISABLE=1 in the environment"
            )
        return _for_autograd(ctx, found)


def _changed(ctx: Any) -> Exception | None:
    """Why a replay would not give the gradients of plain training: what was done since the forward."""
    if (now := list(map(tensor_version, ctx.saved))) != ctx.versions:
        pairs = zip(ctx.saved, now, ctx.versions, strict=True)
        p, is_at, expected = next(pair for pair in pairs if pair[1] != pair[2])
        return theirs(
            RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a "
                f"parameter of shape {list(p.shape)} is at version {is_at}; expected version {expected} instead"
            )
        )
    if ctx.inner and any(_is_listened_to(t) for ref in ctx.inner if (t := ref()) is not None):
        return PyGraphError(
            "a gradient is asked for of a result from which another result is computed, for the first time, and a "
            "replay computes none. Set PYGRAPH_DISABLE=1 in the environment, or ask for it from the first step on"
        )
    return None


def _is_listened_to(result: Tensor) -> bool:
    """Whether the gradient of this result is kept, or hooks are called with it that are not of torch or Fabric."""
    hooks = [getattr(hook, "func", hook) for hook in (hooks_of(result) or {}).values()]
    theirs = ("lightning.", "torch.")
    return result.retains_grad or any(not str(hook.__module__).startswith(theirs) for hook in hooks)


def _made_backward(ctx: Any, slot: Slot, seeds: dict[int, Tensor]) -> Any:
    """The gradients of what `_Replay.forward` takes. It may be made twice: what is delivered is handed over last."""
    delivery, parameters = ctx.delivery, ctx.parameters
    delivery.begin()
    keeps = backward_keeps_graph()
    backward = slot.backward_of(seeds, keeps=keeps)
    if slot.region.votes is not None:
        backward = slot.agreed(backward)
    delivers = parameters and reaches(delivery.leaf(parameters[0].device)[1])
    # autograd gives no gradient to those that were frozen since the forward
    frozen = False in map(needs_gradient, parameters)
    found = _gradients_of(ctx, backward, seeds, adds=slot.adds and delivers and not frozen)
    if not keeps:
        ctx.token = None
    if slot.recorded:
        slot.region.backward_made(backward is not None, expected=keeps and slot.gives_up)
    made = _for_autograd(ctx, found, delivers=delivers, lasting=backward is None)
    if delivers:
        delivered = _of(found, ctx.delivered)
        if frozen:
            delivered = [g if p.requires_grad else None for p, g in zip(parameters, delivered, strict=True)]
        delivery.take(parameters, delivered)
    return made


def _of(gradients: list[Tensor | None], places: Sequence[int]) -> list[Tensor | None]:
    """Those at these places, which are in order. Hot path."""
    whole = len(places) == len(gradients)
    return gradients if whole else list(map(gradients.__getitem__, places))


def _gradients_of(ctx: Any, backward: Any, seeds: dict[int, Tensor], *, adds: bool) -> list[Tensor | None]:
    """Those of `leads`, by a recorded backward, or None.

    Gradients that lie where it writes them move before, unless it `adds` to them.
    """
    fresh: Sequence[Tensor] = ()
    if backward is not None:
        if not adds:
            ctx.delivery.make_way(ctx.parameters, _of(backward.gradients, ctx.delivered))
        if ctx.beside:
            beside, leaves = zip(*ctx.beside, strict=True)
            ctx.delivery.make_way(leaves, _of(backward.gradients, beside))
        if ctx.slot.adds:
            fresh = ctx.slot.fresh(backward, ctx.parameters if adds else ())
    found: list[Tensor | None] = ctx.slot.replay_backward(backward, seeds, fresh)
    return found


def _for_autograd(
    ctx: Any, found: Sequence[Tensor | None], *, delivers: bool = False, lasting: bool = True
) -> tuple[Tensor | None, ...]:
    """One gradient for each argument of `_Replay.forward`.

    Args:
        found: the gradients of `leads`.
        delivers: whether those of parameters are delivered instead.
        lasting: whether no later replay overwrites them.
    """
    way: Way | None = None if delivers else ctx.way
    sent = [found[k] for k in (ctx.returned if way is None else (*ctx.returned, *ctx.delivered))]
    if sent and not lasting:
        stay = () if ctx.delivered else ctx.slot.stay
        if stay and not reaches(ctx.next_functions[min(stay)][0]):  # they go to who asked for them
            stay = ()
        sent = _copies(sent, stay)
    made = [None, *sent[: len(ctx.returned)]]
    if way is not None:
        made.append(way.send(sent[len(ctx.returned) :]))
    return (*made, *[None] * (len(ctx.needs_input_grad) - len(made)))


def _copies(tensors: Sequence[Tensor | None], stay: Collection[int] = ()) -> list[Tensor | None]:
    """Copies, but for those at some positions: autograd keeps a tensor that nobody else has where it lies."""
    made: list[Tensor | None] = list(tensors)
    pairs: list[tuple[Tensor, Tensor]] = []
    for k, t in enumerate(tensors):
        if t is not None and k in stay:
            made[k] = t.detach()
        elif t is not None:
            made[k] = copy = as_part_of(t, torch.empty_like(local_tensor(t)))
            pairs.append((copy, t))
    if pairs:  # kernels for many tensors refuse none
        copy_all(*map(local_tensors, zip(*pairs, strict=True)))
    return made


def replay(
    slot: Slot, given: Sequence[Any], delivery: Delivery, of: frozenset[int], *, leads: bool
) -> list[Any]:
    """Replay the forward of a slot.

    Args:
        slot: no backward of it is pending.
        delivery: of the loop.
        of: the positions of the inputs whose gradients it delivers. Autograd gets the gradients of the others.
        leads: whether autograd leads to the former as well, for backwards that deliver nothing.
    """
    if not slot.leads:
        return list(slot.replay_forward(given, Token()))
    delivered, returned, parameters, _ = routes = slot.routes(of)
    inputs, way = [given[slot.leads[k]] for k in returned] if returned else [], None
    beside = [(k, t) for k, t in zip(returned, inputs, strict=True) if t.is_leaf] if returned else []
    hooked = [k for k, t in beside if hooks_of(t) or accumulation_hooks_of(t)] if beside else []
    for k in reversed(slot.order) if len(hooked) > 1 else ():
        if k in hooked:  # of two views, autograd goes on to the later one first
            inputs[returned.index(k)] = given[slot.leads[k]].view_as(given[slot.leads[k]])
    if delivered:
        if leads:
            if (way := slot.ways.get(of)) is None:
                way = slot.ways[of] = Way(parameters(given))
            inputs.append(way.tensor)
        inputs.append(delivery.leaf(given[slot.leads[delivered[0]]].device)[0])
    made: list[Any] = []
    differ = _Replay.apply((slot, given, delivery, routes, way, beside, made), *inputs)
    for i, output in zip(slot.differ, differ, strict=True):
        made[i] = output
    if slot.inner:
        differ[0].grad_fn.inner = [weakref.ref(made[i]) for i in slot.inner]
    return made


def made_directly(loss: Any, by: float = 1, quotient: Tensor | None = None) -> bool:
    """Make the backward of a loss that one replayed forward has given, without autograd, which takes the host longer.

    That is possible where all gradients go to parameters that are delivered, and nobody listens on the way.

    Args:
        loss: result of the forward.
        by: what the loss is divided by before its backward.
        quotient: that, where it was computed.

    Returns:
        Whether it was made. Otherwise, and where this fails, autograd makes it as if nothing had been.
    """
    node: Any = loss.grad_fn
    usual = isinstance(getattr(node, "delivery", None), Delivery) and not torch.is_anomaly_enabled()
    if not usual or node.returned or not node.delivered or node.token is None:
        return False
    if False in map(needs_gradient, node.parameters):  # frozen since the forward
        return False
    if loss.dim() or not loss.is_floating_point() or node.slot.generation != node.generation:
        return False
    if node.stream != _stream_of(node.slot):  # autograd goes back to that of the forward
        return False
    if hooks_of(loss) or loss.retains_grad:
        return False
    if (list(map(tensor_version, node.saved)) != node.versions or node.inner) and _changed(node):
        return False
    if quotient is not None and (hooks_of(quotient) or quotient.retains_grad):
        return False
    divided: Any = None if quotient is None else quotient.grad_fn
    if divided is not None and divided.next_functions[0] != (node, loss.output_nr):
        return False
    seeds = {node.slot.differ[loss.output_nr]: node.delivery.one(loss, by)}
    if (backward := node.slot.backward_of(seeds)) is None:
        return False
    there, fresh = _of(backward.gradients, node.delivered), ()
    if node.slot.adds:
        fresh = node.slot.fresh(backward, node.parameters)
        first = NONE.issuperset(map(gradient_of, node.parameters))
    else:
        first = node.delivery.make_way(node.parameters, there)
    found = node.slot.replay_backward(backward, seeds, fresh)
    there = there if found is backward.gradients else _of(found, node.delivered)
    node.delivery.deliver(node.parameters, there, first)
    node.slot.region.backwards += node.slot.recorded
    node.token = None
    node.delivery.made = backward if first and node.slot.recorded else None
    return True


_MOST_NODES = 100
"""So many nodes between a loss and the parts of a step are looked at."""


def leaves_of(loss: Any) -> dict[str, Any]:
    """Arguments for the backward of a loss, with which autograd does not go on to parameters one by one.

    There are none where the backward has to go on to anything but parameters whose gradients are delivered.
    """
    if not isinstance(loss, Tensor) or loss.grad_fn is None:
        return {}
    waiting: list[Any] = [loss.grad_fn]
    seen, leaves = set(waiting), {}
    while waiting:
        node: Any = waiting.pop()
        further = node.next_functions
        if isinstance(getattr(node, "delivery", None), Delivery):
            if not node.delivered:
                return {}
            leaf, _ = node.delivery.leaf(node.parameters[0].device)
            leaves[id(leaf)] = leaf
            further = further[: len(node.returned)]
        elif not further or len(seen) > _MOST_NODES:  # a leaf
            return {}
        for behind, _ in further:
            if behind is not None and behind not in seen:
                seen.add(behind)
                waiting.append(behind)
    return {"inputs": list(leaves.values())} if leaves else {}
