"""What a step reads on the host of tensors that it is given: noted while the step is traced, and read ahead later.

Dynamo ends a graph at `if labels.max() >= classes`. Where the value follows from tensors that the step is given, by a
few cheap operations, it can be computed before the step is made. So the trace goes on with the value of its own call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx

from pygraph_train.torch_private.dispatch import (
    FakeTensor,
    HigherOrderOperator,
    TorchDispatchMode,
    has_symbols,
    is_expensive,
    is_operator_of_torch,
    mode_of_fakes,
    no_autocast,
    no_fake_mode,
    operator_draws,
)
from pygraph_train.torch_private.drawn_numbers import CallResult
from pygraph_train.torch_private.dynamo import placeholder_source, placeholder_value
from pygraph_train.torch_private.memory import storage_key, tensor_version
from pygraph_train.tracing.draw_recording import Recording
from pygraph_train.tracing.graph_calls import (
    alike,
    function_of,
    is_write,
    slots_in,
    tensors_in,
    without_gradient,
)
from pygraph_train.tracing.host_draws import Given, HostDraws, Made, filled
from pygraph_train.tracing.signature import ARGUMENTS
from pygraph_train.tracing.writes import written_arguments

__all__ = ["ReadingAhead"]

MOST_OPERATIONS = 64
"""That lead to one value. More are left to the step."""

_OF_TORCH = (
    *("torch", "torch.functional", "torch.nn.functional", "torch._tensor", "torch._C._nn", "torch._refs"),
    *("_operator", "builtins"),
)
"""Modules whose functions do nothing but compute. Methods of tensors have none."""


class ReadingAhead(Recording):
    """Notes what one trace draws on the host, and what it reads of tensors that it is given.

    Args:
        device: of the step.
        left: places (`file:line`) whose values the step has to read itself: more than a decision follows from them. It
            gets those that are found here.
        among: returns keys of the questions that may be asked of tensors; None for all.
        of_buffers: returns whether buffers are before the step what the step finds: processes may exchange them.
    """

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
        self._keys: dict[int, int] = {}  # of what is in slots, where it follows from given tensors alone
        self._read_at: dict[int, frozenset[str]] = {}  # where that was read

    # -- what Dynamo's hooks call -------------------------------------------------------------------------

    def read(self, node: fx.Node, where: str | None) -> CallResult | None:
        """What a node of the graph computes, made now, if it follows from tensors that the step is given."""
        if where is None or where in self._left:
            return None
        try:
            chain = _chain(node)
            if chain is None or any(self._is_drawn(x) or not self._may_be_given(x) for x in chain):
                return None
            if None in [self._follow(x) for x in chain]:
                return None
        except Exception:  # the step itself will say what is wrong
            return None
        slot = self._followed[node]
        self._read_at[slot.place] = self._read_at.get(slot.place, frozenset()) | {where}
        self.has_read = True
        return slot

    def make(
        self, fn: Callable[..., Any], args: Any, kwargs: Mapping[str, Any], generator: str | None = None
    ) -> CallResult:
        """See `Recording.make`."""
        slot = super().make(fn, args, kwargs, generator)
        given = slots_in((tuple(args), dict(kwargs)))
        self._read_at[slot.place] = frozenset().union(*(self._read_at.get(x, ()) for x in given))
        self._name(slot, given)
        return slot

    def may_ask(self, slot: CallResult) -> bool:
        """Whether the trace may depend on what is in a slot."""
        among = self._among()
        return among is None or not self._read_at.get(slot.place) or self._keys.get(slot.place) in among

    def leave(self, slot: CallResult) -> bool:
        """See `Recording.leave`."""
        places = self._read_at.get(slot.place, frozenset())
        self._left |= places
        return bool(places)

    # -- at the end of a trace ----------------------------------------------------------------------------

    def finish(self, graph: fx.GraphModule) -> HostDraws | None:
        """See `Recording.finish`. The graph loses what is computed for conditions alone."""
        if self._trace is graph.graph:
            for node in reversed(graph.graph.nodes):
                if node in self._followed and node.op != "placeholder" and not node.users:
                    graph.graph.erase_node(node)
            graph.recompile()
        found = super().finish(graph)
        self._values.clear()  # they hold tensors of the batch
        self._followed.clear()
        return found

    def _may_be_given(self, node: fx.Node) -> bool:
        """Whether a tensor is before the step what the step finds, if the node is one that it is given."""
        example = node.meta.get("example_value")
        if (
            node.op != "placeholder"
            or self._of_buffers()
            or (isinstance(example, Tensor) and example.requires_grad)
        ):
            return True
        return str(placeholder_source(node)).startswith(ARGUMENTS)

    # -- the graph so far -----------------------------------------------------------------------------------

    def _follow(self, node: fx.Node) -> CallResult | None:
        """Compute a node whose inputs were computed. None where it gives something else than the graph has there."""
        if node in self._followed:
            return self._followed[node]
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
        self._steps.append(step)
        self._values.append(value)
        slot = self._followed[node] = CallResult(len(self._values) - 1)
        self._name(slot, slots_in((step.args, step.kwargs)) if isinstance(step, Made) else set())
        return slot

    def _name(self, slot: CallResult, given: set[int]) -> None:
        """Give the latest step a key, if it follows from given tensors alone."""
        step = self._steps[-1]
        if isinstance(step, Given):
            self._keys[slot.place] = _key_of(step)
        elif isinstance(step, Made) and step.generator is None and all(x in self._keys for x in given):
            try:
                key = _key_of((step.fn, _hashable((step.args, dict(step.kwargs)), self._keys)))
            except TypeError:  # an argument that has no hash
                return
            self._keys[slot.place] = key
            self._steps[-1] = step._replace(key=key)


def _chain(node: fx.Node) -> list[fx.Node] | None:
    """The nodes that lead to a value, inputs first; None where it has to be read in the step.

    That is so where it follows from something that the step has changed before, from random numbers, or by expensive
    operations: these would be made twice.
    """
    found: dict[fx.Node, None] = {}
    waiting = [(node, False)]
    while waiting:
        node, ready = waiting.pop()
        if node in found:
            continue
        if ready:
            found[node] = None
        elif not _may_follow(node) or len(found) > 2 * MOST_OPERATIONS:
            return None
        else:
            waiting += [(node, True), *((x, False) for x in node.all_input_nodes)]
    chain = list(found)
    operations = [x for x in chain if x.op != "placeholder"]
    if len(operations) > MOST_OPERATIONS or not all(map(_is_cheap, operations)) or _is_changed(chain):
        return None
    return chain


def _may_follow(node: fx.Node) -> bool:
    """Whether a node may be computed ahead, as far as it shows itself."""
    example = node.meta.get("example_value")
    tensors = tensors_in([example])
    if has_symbols(tensors) or any(type(x) is not FakeTensor for x in tensors):
        return False
    if node.op == "placeholder":
        return placeholder_source(node) is not None and type(placeholder_value(node)) in (
            Tensor,
            torch.nn.Parameter,
        )
    if not isinstance(example, (Tensor, tuple, int, float, bool, torch.Size)):
        return False
    fn = function_of(node)
    if node.op == "call_function":
        computes = is_operator_of_torch(fn) or getattr(fn, "__module__", None) in _OF_TORCH
    else:
        computes = node.op == "call_method"
    return computes and not is_write(fn)


def _is_cheap(node: fx.Node) -> bool:
    """Whether an operation draws nothing, and moves memory rather than to compute. Nothing is executed."""
    examples = tensors_in([x.meta.get("example_value") for x in (node, *node.all_input_nodes)])
    try:
        with mode_of_fakes(examples), _Cost() as cost, torch.no_grad():
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), without_gradient)
            function_of(node)(*args, **kwargs)
    except Exception:
        return False
    return cost.low


class _Cost(TorchDispatchMode):
    """Sees whether operations are cheap, and pure.

    Attributes:
        low: whether they are.
    """

    low = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.low &= not (is_expensive(func) or operator_draws(func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def _is_changed(chain: list[fx.Node]) -> bool:
    """Whether the step has changed memory that one of these nodes lies in, or may have."""
    nodes = list(chain[0].graph.nodes)
    real = set().union(*map(_real_memory, chain))
    same = [x for x in nodes if not real.isdisjoint(_real_memory(x))]  # given as another tensor as well
    memory = set().union(*map(_memory, chain), *map(_memory, same))
    for node in nodes:
        shared = [x for x in (node, *node.all_input_nodes) if not memory.isdisjoint(_memory(x))]
        if any(tensor_version(t) for x in shared for t in tensors_in([x.meta.get("example_value")])):
            return True
        if any(not memory.isdisjoint(_memory(x)) for x in written_arguments(node)):
            return True  # in a list, or by an operator that does not count it
        if shared and node.op == "call_function" and not _is_known(node.target):
            return True  # a checkpoint, or an operator of somebody else
    return False


def _is_known(fn: Any) -> bool:
    """Whether what a function changes is seen at the versions of tensors."""
    if isinstance(fn, HigherOrderOperator) or fn is Tensor.set_:  # `x.data = y`, which takes its count back
        return False
    return is_operator_of_torch(fn) or not str(getattr(fn, "__module__", "")).startswith(
        ("torch._ops", "torch.ops")
    )


def _memory(node: fx.Node) -> set[int]:
    """Where tensors of a node lie in the trace."""
    return {storage_key(x.untyped_storage()) for x in tensors_in([node.meta.get("example_value")])}


def _real_memory(node: fx.Node) -> set[int]:
    """Where a tensor lies that the step is given."""
    value = placeholder_value(node) if node.op == "placeholder" else None
    try:
        return {value.untyped_storage().data_ptr()} if isinstance(value, Tensor) else set()
    except (NotImplementedError, RuntimeError):  # it has no memory of its own
        return set()


def _are_alike(value: Any, example: Any) -> bool:
    """Whether what was computed is of the kind that the graph has there, and where."""
    if isinstance(example, tuple) and not isinstance(example, torch.Size):
        return (
            isinstance(value, tuple) and len(value) == len(example) and all(map(_are_alike, value, example))
        )
    if isinstance(value, Tensor) and isinstance(example, Tensor) and value.device.type != example.device.type:
        return False
    return alike(value, example)


_keys: dict[Any, int] = {}


def _key_of(call: Any) -> int:
    """The same number for the same call with what follows from the same tensors."""
    return _keys.setdefault(call, len(_keys))


def _hashable(tree: Any, keys: Mapping[int, int]) -> Any:
    """Arguments with keys in the place of slots, where equal ones are the same ones.

    Raises:
        TypeError: one has no hash.
    """
    if isinstance(tree, CallResult):
        return "slot", keys[tree.place]
    if isinstance(tree, (tuple, list)):
        return type(tree), *[_hashable(x, keys) for x in tree]
    if isinstance(tree, Mapping):
        return dict, *[(name, _hashable(x, keys)) for name, x in sorted(tree.items())]
    if isinstance(tree, slice):
        return slice, _hashable((tree.start, tree.stop, tree.step), keys)
    hash(tree)
    return type(tree), repr(tree) if type(tree) in (float, complex) else tree  # 0.0 == -0.0
