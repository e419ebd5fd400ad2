"""What a step reads on the host of tensors that it is given: noted while the step is traced, and read ahead later.

Dynamo ends a graph at `if labels.max() >= classes`. Where the value follows from tensors that the step is given, by a
few cheap operations, it can be computed before the step is made. So the trace goes on with the value of its own call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from pygraph_train.problems import NotLegal, Problem
from pygraph_train.random_state import HostRandomState
from pygraph_train.torch_private.compiling import called_plainly
from pygraph_train.torch_private.dispatch import no_autocast, no_fake_mode
from pygraph_train.torch_private.drawn_numbers import CallResult
from pygraph_train.torch_private.dynamo import placeholder_source, placeholder_value
from pygraph_train.torch_private.memory import tensor_version
from pygraph_train.torch_private.selections import changed_mask
from pygraph_train.tracing.call_keys import hashable, key_of
from pygraph_train.tracing.chains import chain_of, chain_with_writes
from pygraph_train.tracing.draw_recording import Recording
from pygraph_train.tracing.graph_calls import alike, function_of, is_apart, is_write, slots_in, tensors_in
from pygraph_train.tracing.host_draws import Given, HostDraws, Made, filled
from pygraph_train.tracing.reasons import line_of
from pygraph_train.tracing.signature import ARGUMENTS

__all__ = ["ReadingAhead"]


class ReadingAhead(Recording):
    """Notes what one trace draws on the host, and what it reads of tensors that it is given.

    Args:
        device: of the step.
        left: places (`file:line`) whose values the step has to read itself: more than a decision follows from them. It
            gets those that are found here.
        among: returns keys of the questions that may be asked of tensors; None for all.
        of_buffers: returns whether buffers are before the step what the step finds: processes may exchange them.
    """

    takes = True

    def __init__(
        self,
        device: torch.device,
        left: set[str],
        among: Callable[[], frozenset[int] | None] = lambda: None,
        of_buffers: Callable[[], bool] = lambda: True,
    ) -> None:
        self._left = left
        self._among = among
        self._of_buffers = of_buffers
        super().__init__(device)

    def _begin(self, trace: Any) -> None:
        super()._begin(trace)
        self.has_read = False
        self._followed: dict[fx.Node, CallResult] = {}  # nodes of the graph that are computed ahead
        self._on_the_way: set[fx.Node] = set()  # others, which lead to such
        self._keys: dict[int, int] = {}  # of what is in slots, where it follows from given tensors alone
        self._read_at: dict[int, frozenset[str]] = {}  # where that was read
        self._constants: set[int] = set()  # what follows from no tensor that the step is given

    # -- what Dynamo's hooks call -------------------------------------------------------------------------

    def read(self, node: fx.Node, where: str | None, *, trained: bool = True) -> CallResult | None:
        """What a node of the graph computes, made now, if it follows from tensors that the step is given.

        Parameters are among them if `trained`.
        """
        if where is None or where in self._left:
            return None
        try:
            chain = chain_of(node)
            together = chain_with_writes(node) if chain is None else None
            follows = chain or together
            if not follows or any(self._is_drawn(x) or not self._may_be_given(x) for x in follows):
                return None
            if not trained and any(map(_requires_gradient, follows)):
                return None  # it is another value in each step
            drawn = [self._drawn_for(x) is not None for x in follows if x.op == "placeholder"]
            if chain and all(drawn) and not any(map(_has_fractions, chain)):
                return self._follow_on_host(chain)
            if None in [self._follow(x) for x in chain or ()]:
                return None
            if together and not self._follow_together(together, node):
                return None
        except Exception:  # the step itself will say what is wrong
            return None
        slot = self._followed[node]
        if not any(drawn):  # what is drawn may get anywhere
            self._read_at[slot.place] = self._read_at.get(slot.place, frozenset()) | {where}
        self.has_read = True
        return slot

    def call(
        self, fn: Callable[..., Any], args: Any, kwargs: Mapping[str, Any], generator: str
    ) -> CallResult | None:
        """See `DrawRecorder.call`. What it returns is as good as drawn, whatever it has read."""
        end, before = self.end, self.end or HostRandomState()
        known = {place: self._values[place] for place in slots_in((tuple(args), dict(kwargs)))}
        copies = {place: x.clone() for place, x in known.items() if isinstance(x, Tensor)}
        given = list(copies.values())
        for (
            place,
            copy,
        ) in copies.items():  # of a function that changes what it is given, nobody shall see that
            self._values[place] = copy
        try:
            with called_plainly():
                slot = self.make(fn, args, kwargs, generator)
        except Exception:  # the step itself will say what is wrong
            return None
        finally:
            for place, value in known.items():
                self._values[place] = value
        assert self.end is not None
        self._read_at[slot.place] = frozenset()
        value = self._values[slot.place]
        if (
            before.moved(self.end) <= {generator}
            and not any(map(tensor_version, given))
            and is_apart(value, given)
        ):
            return slot
        self._steps.pop()
        self._values.pop()
        self.end = end
        return None

    def make(
        self, fn: Callable[..., Any], args: Any, kwargs: Mapping[str, Any], generator: str | None = None
    ) -> CallResult:
        """See `Recording.make`."""
        slot = super().make(fn, args, kwargs, generator)
        given = slots_in((tuple(args), dict(kwargs)))
        self._read_at[slot.place] = frozenset().union(*(self._read_at.get(x, ()) for x in given))
        self._name(slot, given)
        return slot

    def is_constant(self, slot: CallResult) -> bool:
        """See `Recording.is_constant`."""
        return slot.place in self._constants

    def ask(self, slot: CallResult, where: str | None) -> Any:
        """See `Recording.ask`. Nothing depends on a constant."""
        return self.value(slot) if self.is_constant(slot) else super().ask(slot, where)

    def may_ask(self, slot: CallResult) -> bool:
        """Whether the trace may depend on what is in a slot."""
        among = self._among()
        if among is None or self.is_constant(slot):
            return True
        return not self._read_at.get(slot.place) or self._keys.get(slot.place) in among

    def leave(self, slot: CallResult) -> bool:
        """See `Recording.leave`."""
        places = self._read_at.get(slot.place, frozenset())
        self._left |= places
        return bool(places)

    def was_read(self, slot: CallResult) -> bool:
        """See `Recording.was_read`."""
        return bool(self._read_at.get(slot.place))

    # -- at the end of a trace ----------------------------------------------------------------------------

    def finish(self, graph: fx.GraphModule) -> HostDraws | None:
        """See `Recording.finish`. The graph loses what is computed for conditions alone."""
        if (changed := changed_mask(graph.graph)) is not None:
            raise NotLegal(_changed_later(changed))
        if self._trace is graph.graph:
            for node in reversed(graph.graph.nodes):
                known = node in self._followed or node in self._on_the_way
                if known and node.op != "placeholder" and not node.users and not _writes(node):
                    graph.graph.erase_node(node)
            graph.recompile()
        found = super().finish(graph)
        self._values.clear()  # they hold tensors of the batch
        self._followed.clear()
        self._on_the_way.clear()
        return found

    def _may_be_given(self, node: fx.Node) -> bool:
        """Whether a tensor is before the step what the step finds, if the node is one that it is given."""
        if self._drawn_for(node) is not None:
            return True
        if node.op != "placeholder" or self._of_buffers() or _requires_gradient(node):
            return True
        return str(placeholder_source(node)).startswith(ARGUMENTS)

    def _drawn_for(self, node: fx.Node) -> CallResult | None:
        """What is drawn for an input of the graph; None for another node."""
        value = placeholder_value(node) if node.op == "placeholder" else None
        return next((slot for slot, tensor in self._taken if tensor is value), None)

    # -- the graph so far -----------------------------------------------------------------------------------

    def _follow_on_host(self, chain: list[fx.Node]) -> CallResult | None:
        """Compute whole numbers and truth values of what is drawn there, where nobody waits for the device."""
        made: dict[fx.Node, CallResult] = {}
        for node in chain:
            drawn = self._drawn_for(node)
            if drawn is None:
                args, kwargs = fx.node.map_arg((node.args, node.kwargs), made.__getitem__)
                with called_plainly():
                    drawn = self.make(function_of(node), args, kwargs)
                if not alike(self._values[drawn.place], node.meta["example_value"]):
                    return None
            made[node] = drawn
        self.has_read = True
        self._on_the_way.update(x for x in chain if x.op != "placeholder")
        return made[chain[-1]]

    def _follow(self, node: fx.Node) -> CallResult | None:
        """Compute a node whose inputs were computed. None where it gives something else than the graph has there."""
        if node in self._followed:
            return self._followed[node]
        drawn = self._drawn_for(node)
        if drawn is not None:
            example = node.meta["example_value"]
            if self._values[drawn.place].device.type != example.device.type:
                drawn = self.make(Tensor.to, [drawn, example.device], {})
            self._followed[node] = drawn
            return drawn
        if node.op == "placeholder":
            expression = str(placeholder_source(node))
            step: Given | Made = Given(expression)
            value: Any = placeholder_value(node)
            value = value.detach()
        else:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), self._followed.__getitem__)
            fn, tree = function_of(node), (tuple(args), dict(kwargs))
            step = Made(fn, *tree, None, bool(slots_in(tree)))
            given, named = filled(tree, self._values)
            with no_fake_mode(), no_autocast(), torch.no_grad():
                value = fn(*given, **named)
            if not _are_alike(value, node.meta["example_value"]):
                return None  # autocast has it computed in another way
        return self._note(node, step, value)

    def _follow_together(self, chain: list[fx.Node], node: fx.Node) -> bool:
        """Compute nodes that change what others have made in one piece. False where one gives something else."""
        inputs = [x for x in chain if x.op == "placeholder"]
        places = {x: CallResult(i) for i, x in enumerate(inputs)}
        calls: list[tuple[Callable[..., Any], Any, Any]] = []
        for x in chain:
            if x not in places:
                args, kwargs = fx.node.map_arg((x.args, x.kwargs), places.__getitem__)
                places[x] = CallResult(len(places))
                calls.append((function_of(x), tuple(args), dict(kwargs)))
        piece = CallsInOrder(tuple(calls), places[node].place)
        slots = [self._follow(x) for x in inputs]
        if None in slots:
            return False
        with no_fake_mode(), no_autocast(), torch.no_grad():
            values = piece.values([self._values[slot.place] for slot in slots if slot is not None])
        made = [x for x in chain if x.op != "placeholder"]
        if not all(
            _are_alike(value, x.meta["example_value"])
            for x, value in zip(made, values[len(inputs) :], strict=True)
            if not _writes(x)
        ):
            return False
        self._on_the_way.update(made)
        self._note(node, Made(piece, tuple(slots), {}, None, bool(slots)), values[places[node].place])
        return True

    def _note(self, node: fx.Node, step: Given | Made, value: Any) -> CallResult:
        self._steps.append(step)
        self._values.append(value)
        slot = self._followed[node] = CallResult(len(self._values) - 1)
        self._name(slot, slots_in((step.args, step.kwargs)) if isinstance(step, Made) else set())
        return slot

    def _name(self, slot: CallResult, given: set[int]) -> None:
        """Give the latest step a key, if it follows from given tensors alone."""
        step = self._steps[-1]
        if isinstance(step, Made) and step.generator is None and given <= self._constants:
            self._constants.add(slot.place)
        if isinstance(step, Given):
            self._keys[slot.place] = key_of(step)
        elif isinstance(step, Made) and step.generator is None and all(x in self._keys for x in given):
            try:
                key = key_of((step.fn, hashable((step.args, dict(step.kwargs)), self._keys)))
            except TypeError:  # an argument that has no hash
                return
            self._keys[slot.place] = key
            self._steps[-1] = step._replace(key=key)


class CallsInOrder:
    """Calls that are made one after the other, as one function. Two that make the same ones are equal.

    Args:
        calls: function, arguments and named arguments. Slots are results of earlier ones; the first are given.
        result: the slot of what is returned.
    """

    def __init__(self, calls: tuple[tuple[Callable[..., Any], Any, Any], ...], result: int) -> None:
        self._calls = calls
        self._result = result

    def values(self, given: Sequence[Any]) -> list[Any]:
        """What is given, and what each call returns."""
        found = list(given)
        for fn, args, kwargs in self._calls:
            args, kwargs = filled((args, kwargs), found)
            found.append(fn(*args, **kwargs))
        return found

    def __call__(self, *given: Any) -> Any:
        return self.values(given)[self._result]

    def _says(self) -> Any:
        slots = {place: place for place in range(self._result + len(self._calls) + 1)}
        return self._result, [(fn, hashable((args, kwargs), slots)) for fn, args, kwargs in self._calls]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CallsInOrder) and self._says() == other._says()

    def __hash__(self) -> int:
        result, calls = self._says()
        return hash((result, *calls))


def _changed_later(places: fx.Node) -> Problem:
    return Problem(
        "a boolean mask is changed after it was an index, and a graph has the places that it stood for",
        line_of(places),
        "Make another mask instead of changing this one",
    )


def _requires_gradient(node: fx.Node) -> bool:
    example = node.meta.get("example_value")
    return isinstance(example, Tensor) and example.requires_grad


def _has_fractions(node: fx.Node) -> bool:
    examples = tensors_in([node.meta.get("example_value")])
    return any(x.is_floating_point() or x.is_complex() for x in examples)


def _writes(node: fx.Node) -> bool:
    return node.op != "placeholder" and is_write(function_of(node))


def _are_alike(value: Any, example: Any) -> bool:
    """Whether what was computed is of the kind that the graph has there, and where."""
    if isinstance(example, tuple) and not isinstance(example, torch.Size):
        return (
            isinstance(value, tuple) and len(value) == len(example) and all(map(_are_alike, value, example))
        )
    if isinstance(value, Tensor) and isinstance(example, Tensor) and value.device.type != example.device.type:
        return False
    return alike(value, example)
