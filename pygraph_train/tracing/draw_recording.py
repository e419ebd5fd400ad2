"""Notes what one trace draws on the host, and which answers its way depends on."""

from __future__ import annotations

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
from pygraph_train.tracing.drawn_tensors import (
    copied_by,
    hold_copy,
    is_drawn_on_device,
    is_read,
    static_tensor,
    was_written,
)
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
from pygraph_train.tracing.live_numbers import in_tensor
from pygraph_train.tracing.needed_calls import needed
from pygraph_train.tracing.nothing_read import NothingRead
from pygraph_train.tracing.reasons import line_of
from pygraph_train.tracing.recompute import RandomDraws

__all__ = ["Recording"]

MOST_CALLS = 4096
"""Calls of one step that are made before each replay."""


class Recording(NothingRead):
    """Notes what one trace draws on the host. Draws for real, and leaves all generators where they are.

    Args:
        device: of the step. On a CPU, numbers that tensors are filled with come from the same generator: they are drawn
            in their turn as well.

    Attributes:
        where: `file:line` of the first question.
        end: where the generators are after what was drawn so far; None before.
        tensors: those tensors, once the trace has ended. They hold the values of the traced call.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.where: str | None = None
        self.end: HostRandomState | None = None
        self._on_cpu = is_drawn_on_device(device)
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
        self.tensors: list[Tensor] = []
        self._taken: list[tuple[CallResult, Tensor]] = []  # tensors that were made for the graph to read
        self._held: dict[tuple[int, torch.dtype, bool], CallResult] = {}  # numbers as tensors
        self._copied: dict[
            tuple[fx.Node, fx.Node | None], CallResult
        ] = {}  # what the graph copies to the device
        self._shared: list[fx.Node] = []  # what arrays of NumPy have the memory of

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

    def slot_of(self, node: fx.Node) -> CallResult | None:
        """What a node of the graph computes, made now, if it follows from random numbers of the host alone."""
        self._catch_up(node.graph)
        slot = self._slots.get(node)
        if slot is None or self._lost or not self._is_drawn(node):
            return None
        self._asked_of.add(node)
        return slot

    def make_number(self, slot: CallResult, dtype: torch.dtype, *, inverse: bool) -> CallResult:
        """A number, or its reciprocal, as a tensor of the host without dimensions."""
        key = slot.place, dtype, inverse
        if key not in self._held:
            self._held[key] = self.make(in_tensor, [slot, dtype, inverse, self.device], {})
        return self._held[key]

    def take(self, slot: CallResult, device: torch.device | None) -> Tensor:
        """A tensor that holds what is in a slot: a graph may read it, and it is filled before each run."""
        known = next((t for s, t in self._taken if s == slot and not t.dim() and t.device == device), None)
        if known is not None:
            return known
        tensor = static_tensor(self._values[slot.place], device=device)
        self._taken.append((slot, tensor))
        return tensor

    def hold(self, node: fx.Node, slot: CallResult, *, shared: bool) -> None:
        """Say where the graph has such a tensor, and where what it goes on with: whose memory may be an array's."""
        if shared:
            self._shared.append(node)
        if self._on_cpu or node.meta["example_value"].device.type != "cpu":
            return
        self._slots[node] = slot
        self._looked_at.add(node)
        self._drawn.add(slot.place)
        self._drawn_memory.add(memory_of(self._values[slot.place]))

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
        taken = self._take_copies(graph)
        for node in self._asked_of:
            self._refuse_other_uses(node)
        if not self._on_cpu:
            self._take_out(graph)
        taken += [(slot, tensor) for slot, tensor in self._taken if is_read(graph, tensor)]
        generators = frozenset(s.generator for s in self._steps if type(s) is Made and s.generator)
        if generators and len(self._steps) > MOST_CALLS:
            raise NotLegal(Problem("the step draws thousands of numbers on the host", self.where))
        self.tensors = [tensor for _, tensor in taken]
        steps, places = needed(self._steps, self._values, {slot.place for slot, _ in taken})
        found = HostDraws(steps, generators, self.where, tuple(places[slot.place] for slot, _ in taken))
        return found if generators or found.inputs else None

    def _take_copies(self, graph: fx.GraphModule) -> list[tuple[CallResult, Tensor]]:
        """Let the graph read what it copies to the device of what is drawn on the host.

        Raises:
            NotLegal: an array has the memory of a tensor that the step changes.
        """
        for node in filter(was_written, self._shared):
            text = "the step changes a tensor in place that shares memory with an array of random numbers"
            raise NotLegal(Problem(text, line_of(node), "Make the tensor with torch.tensor(...)"))
        taken: list[tuple[CallResult, Tensor]] = []
        for (node, read), slot in self._copied.items():
            tensor = hold_copy(graph, len(taken), node, read, self._values[slot.place])
            taken += [] if tensor is None else [(slot, tensor)]
        return taken

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
            if not self._on_cpu and self._notes_copies(node):
                continue
            if self._is_of_host(node):
                self._compute(node)
            elif self._on_cpu:
                self._pass_over(node)

    def _notes_copies(self, node: fx.Node) -> bool:
        """Whether an operation of the device copies there what was drawn: noted as it is now."""
        copied = copied_by(node, self.device) if self.takes and not self._lost else []
        sources = [(read, node.args[0] if read is None else read) for read in copied]
        drawn = [(read, x) for read, x in sources if isinstance(x, fx.Node) and self._is_drawn(x)]
        for read, source in drawn:
            slot, _ = self._made(torch.clone, (self._slots[source],), {}, None)
            self._drawn.add(slot.place)
            self._copied[node, read] = slot
        return bool(drawn)

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
