"""Notes what one trace draws on the host, and which answers its way depends on."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx

from pygraph_train.problems import NotLegal, Problem
from pygraph_train.random_state import HostRandomState
from pygraph_train.torch_private.dispatch import (
    HigherOrderOperator,
    has_symbols,
    no_autocast,
    no_fake_mode,
)
from pygraph_train.torch_private.drawn_numbers import CallResult
from pygraph_train.tracing.graph_calls import (
    alike,
    draws,
    function_of,
    is_write,
    memory_of,
    slots_in,
    tensors_in,
    zeros,
)
from pygraph_train.tracing.host_draws import Asked, Given, HostDraws, Made, filled
from pygraph_train.tracing.reasons import line_of
from pygraph_train.tracing.recompute import RandomDraws

__all__ = ["Recording"]

_DIVISIONS = (operator.truediv, operator.floordiv, operator.mod, operator.pow)

MOST_CALLS = 4096
"""Calls of one step that are made before each replay."""


class Recording:
    """Notes what one trace draws on the host. Draws for real, and leaves all generators where they are.

    Args:
        device: of the step. On a CPU, numbers that tensors are filled with come from the same generator: they are drawn
            in their turn as well.

    Attributes:
        where: `file:line` of the first question.
        end: where the generators are after what was drawn so far; None before.
        has_read: whether anything was read ahead.
    """

    has_read = False

    def __init__(self, device: torch.device) -> None:
        self.where: str | None = None
        self.end: HostRandomState | None = None
        self._on_cpu = device.type == "cpu"
        self._begin(None)

    def _begin(self, trace: Any) -> None:
        self._trace = trace
        self.end = None
        self._steps: list[Given | Made | Asked] = []
        self._values: list[Any] = []
        self._slots: dict[fx.Node, CallResult] = {}  # nodes of the graph that are computed on the host
        self._looked_at: set[fx.Node] = set()
        self._asked_of: set[fx.Node] = set()
        self._drawn: set[int] = set()
        self._drawn_memory: set[Any] = set()
        self._lost = False  # an operation before may have drawn nobody knows how many numbers

    # -- what Dynamo's hooks call: see `torch_private.host_draws.DrawRecorder` -----------------------------

    def begin(self, trace: Any) -> None:
        """Dynamo traces: anew, where `trace` is another object than before."""
        if trace is not self._trace:
            self._begin(trace)

    def make(
        self, fn: Callable[..., Any], args: Any, kwargs: Mapping[str, Any], generator: str | None = None
    ) -> CallResult:
        """Call a function with values and slots."""
        return self._made(fn, tuple(args), dict(kwargs), generator)[0]

    def value(self, slot: CallResult) -> Any:
        """What a call has returned. It must not decide anything in the trace: `ask` is for that."""
        return self._values[slot.place]

    def ask(self, slot: CallResult, where: str | None) -> Any:
        """What a call has returned. The trace goes on with that, so a graph is only for steps that have the same."""
        value = self._values[slot.place]
        self._steps.append(Asked(slot.place, value))
        self.where = self.where or where
        return value

    def read(self, node: fx.Node, where: str | None, *, trained: bool = True) -> CallResult | None:
        """What a node of the graph computes from tensors that the step is given: nothing is read ahead here."""
        return None

    def may_ask(self, slot: CallResult) -> bool:
        """Whether the trace may depend on what is in a slot."""
        return True

    def is_constant(self, slot: CallResult) -> bool:
        """Whether a call returns the same in each step: nothing is known of that here."""
        return False

    def leave(self, slot: CallResult) -> bool:
        """Whether something that was read ahead went into a result. It is left to the step from now on."""
        return False

    def slot_of(self, node: fx.Node) -> CallResult | None:
        """What a node of the graph computes, made now, if it follows from random numbers of the host alone."""
        self._catch_up(node.graph)
        slot = self._slots.get(node)
        if slot is None or self._lost or not self._is_drawn(node):
            return None
        self._asked_of.add(node)
        return slot

    # -- at the end of a trace ---------------------------------------------------------------------------

    def finish(self, graph: fx.GraphModule) -> HostDraws | None:
        """What was noted; None where nothing was drawn.

        On a device, the graph loses what is computed on the host for conditions alone.

        Raises:
            NotLegal: a number decides about the step's way, and tensors are computed from it as well.
        """
        if self._trace is None and self._on_cpu:
            return None
        if self._trace is not None and self._trace is not graph.graph:
            raise NotLegal(
                Problem("the step draws random numbers on the host, and its trace began anew", self.where)
            )
        if not self._on_cpu:
            self._catch_up(graph.graph)
        for node in self._asked_of:
            self._refuse_other_uses(node)
        if not self._on_cpu:
            self._take_out(graph)
        generators = frozenset(s.generator for s in self._steps if type(s) is Made and s.generator)
        if generators and len(self._steps) > MOST_CALLS:
            raise NotLegal(Problem("the step draws thousands of numbers on the host", self.where))
        found = HostDraws(self._needed(), generators, self.where)
        return found if generators or found.inputs else None

    def _needed(self) -> tuple[Given | Made | Asked, ...]:
        """Without calls that nothing follows from. Slots are numbered anew."""
        wanted: set[int] = set()
        keep: set[int] = set()
        index = len(self._values)
        for at in reversed(range(len(self._steps))):
            step = self._steps[at]
            if type(step) is Asked:
                wanted.add(step.slot)
                keep.add(at)
                continue
            index -= 1
            if type(step) is Given:
                keep |= {at} if index in wanted else set()
                continue
            assert type(step) is Made
            if step.generator or index in wanted or is_write(step.fn) or self._may_raise(step):
                keep.add(at)
                wanted |= slots_in((step.args, step.kwargs))
        places: dict[int, int] = {}
        kept: list[Given | Made | Asked] = []
        index = 0
        for at, step in enumerate(self._steps):
            if type(step) is Asked:
                kept.append(Asked(places[step.slot], step.outcome))
                continue
            if at in keep:
                places[index] = len(places)
                slots = {old: CallResult(new) for old, new in places.items()}
                if type(step) is Made:
                    args, kwargs = filled((step.args, dict(step.kwargs)), slots)  # type: ignore[arg-type]
                    step = step._replace(args=args, kwargs=kwargs)
                kept.append(step)
            index += 1
        return tuple(kept)

    def _may_raise(self, call: Made) -> bool:
        """Whether Python raises an error at other numbers: nothing else need follow from the call."""
        if call.fn in _DIVISIONS:
            return type(call.args[-1]) is CallResult
        if call.fn not in (int, round) or type(call.args[0]) is not CallResult:
            return False
        value = self._values[call.args[0].place]
        return value.is_floating_point() if isinstance(value, Tensor) else type(value) is float

    def _take_out(self, graph: fx.GraphModule) -> None:
        """Remove what is drawn on the host, and what follows from that alone, from the graph.

        Raises:
            NotLegal: the graph would draw other numbers then, because something else in it may draw on the host.
        """
        changed = False
        for node in reversed(graph.graph.nodes):
            if (
                node in self._slots
                and not node.users
                and (self._is_drawn(node) or not is_write(function_of(node)))
            ):
                graph.graph.erase_node(node)
                changed = True
        if not changed:
            return
        for node in graph.graph.nodes:
            if node.op in ("call_function", "call_method") and self._may_draw(node):
                raise NotLegal(
                    Problem(
                        "random numbers of the host decide which way the step takes, and the step computes with others",
                        line_of(node),
                        "Draw the numbers that tensors are computed from on the device",
                    )
                )
        graph.recompile()

    def _may_draw(self, node: fx.Node) -> bool:
        """Whether a node that is left in the graph of a device draws on the host, as far as that is known."""
        if node in self._slots:
            return self._is_drawn(node)
        if all(t.device.type != "cpu" for t in tensors_in([node.meta.get("example_value")])):
            return False
        examples = tensors_in([x.meta.get("example_value") for x in (node, *node.all_input_nodes)])
        if isinstance(node.target, HigherOrderOperator) or has_symbols(examples):
            return True
        try:
            return draws(node, examples)
        except Exception:
            return True

    def _refuse_other_uses(self, node: fx.Node) -> None:
        """Raise where a tensor that the step computes with follows from a number that decides about its way."""
        family, waiting = {node}, [node]  # all that is computed from what this is computed from
        while waiting:
            node = waiting.pop()
            near = [*node.all_input_nodes, *node.users] if self._is_drawn(node) else ()
            for other in near:
                if other not in self._slots:
                    raise NotLegal(
                        Problem(
                            "a random number of the host decides which way the step takes, and the step also computes "
                            "with it",
                            line_of(other) or line_of(node),
                            "Draw one number for the decision and another one for the computation",
                        )
                    )
                if other not in family:
                    family.add(other)
                    waiting.append(other)

    # -- the graph so far --------------------------------------------------------------------------------

    def _catch_up(self, graph: fx.Graph) -> None:
        """Compute what the graph computes on the host, as far as it has come."""
        for node in graph.nodes:
            if node in self._looked_at:
                continue
            self._looked_at.add(node)
            if node.op not in ("call_function", "call_method"):
                continue
            if self._is_of_host(node):
                self._compute(node)
            elif self._on_cpu:
                self._pass_over(node)

    def _is_of_host(self, node: fx.Node) -> bool:
        example = node.meta.get("example_value")
        if isinstance(example, Tensor) and (example.device.type != "cpu" or example.requires_grad):
            return False
        if not isinstance(example, (Tensor, int, float, bool, torch.Size)):
            return False
        if not node.all_input_nodes and not isinstance(example, Tensor):
            return False
        if str(getattr(node.target, "__module__", "")).startswith(("torch._ops", "torch.ops")):
            return False  # an operator of somebody else may do what it likes
        return all(x in self._slots for x in node.all_input_nodes)

    def _compute(self, node: fx.Node) -> None:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), self._slots.__getitem__)
        fn = function_of(node)
        try:
            slot, drew = self._made(fn, tuple(args), dict(kwargs), None, look=True)
        except Exception:  # the step itself will say what is wrong
            return
        if not alike(
            self._values[slot.place], node.meta["example_value"]
        ):  # autocast had it computed in another way
            self._lost |= drew
            return
        self._slots[node] = slot
        if drew:
            made = self._steps[-1]
            assert type(made) is Made
            self._steps[-1] = made._replace(generator="torch")
        if drew or any(map(self._is_drawn, node.all_input_nodes)):
            self._drawn.add(slot.place)
            # also what shares the memory was drawn
            self._drawn_memory.add(memory_of(self._values[slot.place]))

    def _pass_over(self, node: fx.Node) -> None:
        """An operation of the step itself on a CPU: if it draws, the generator goes on by as many numbers."""
        if not tensors_in([node.meta.get("example_value")]):  # an autocast that begins, and the like
            self._lost |= isinstance(node.target, HigherOrderOperator)
            return
        fn = function_of(node)
        examples = [x.meta.get("example_value") for x in (node, *node.all_input_nodes)]
        numbers = any(isinstance(x, (torch.SymInt, torch.SymFloat, torch.SymBool)) for x in examples)
        if numbers or has_symbols(tensors_in(examples)):
            self._lost = (
                True  # its shape depends on values: to compute it would make symbols that Dynamo misses
            )
            return
        try:
            if draws(node, tensors_in(examples)):
                args, kwargs = fx.node.map_arg((node.args, node.kwargs), zeros)
                self._made(fn, tuple(args), dict(kwargs), "torch")
        except Exception:
            self._lost = True

    def _is_drawn(self, node: fx.Node) -> bool:
        """Whether random numbers went into what a node computes on the host."""
        slot = self._slots.get(node)
        if slot is None:
            return False
        return slot.place in self._drawn or memory_of(self._values[slot.place]) in self._drawn_memory

    def _made(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        generator: str | None,
        *,
        look: bool = False,
    ) -> tuple[CallResult, bool]:
        """Make a call with the generators where this trace has left them, and note it."""
        outside = HostRandomState()
        if self.end is not None:
            self.end.restore()
        try:
            given, named = filled((args, kwargs), self._values)
            drew = False
            with no_fake_mode(), no_autocast(), torch.no_grad():
                if look:
                    with RandomDraws() as mode:
                        value = fn(*given, **named)
                    drew = mode.seen
                else:
                    value = fn(*given, **named)
            self.end = HostRandomState()
        finally:
            outside.restore()
        self._steps.append(Made(fn, args, kwargs, generator, bool(slots_in((args, kwargs)))))
        self._values.append(value)
        return CallResult(len(self._values) - 1), drew
