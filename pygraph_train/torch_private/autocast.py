"""What AOTAutograd does not know of autocast: its cache, and what surrounds a backward. (2.11, 2.13)

A weight that is used several times under autocast is cast once, and the gradients of all uses are summed in the lower
precision before they are cast back. AOTAutograd traces a cast for each use and sums in single precision. Here a graph
of Dynamo gets the casts that eager kernels make.

A backward is traced under the autocast of its forward. Where a graph begins inside of an autocast block the backward
comes after the block, and its eager kernels are those for what surrounds the whole step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import py_sym_types

from pygraph_train.torch_private.names import FakeTensor, TorchDispatchMode
from pygraph_train.torch_private.traces_of_threads import PerThread

__all__ = [
    "State",
    "around_backward",
    "as_around_backward",
    "as_under",
    "backward_comes_here",
    "breaks_inside",
    "present",
    "share_casts",
]

State = tuple[tuple[str, torch.dtype], ...]
"""Devices with autocast, and the types that it casts to."""

_around: PerThread[State] = PerThread([])


def around_backward() -> State | None:
    """The devices and types of autocast where the backward will be called, None where nobody knows."""
    return _around.innermost


@contextmanager
def backward_comes_here(state: State | None = None) -> Iterator[None]:
    """What is traced inside has its backward called under the autocast of the outermost of these contexts.

    Args:
        state: another one than the present autocast, where it is known.
    """
    own = _around.own
    _around.push(own[-1] if own else present() if state is None else state)
    try:
        yield
    finally:
        _around.pop()


def as_around_backward() -> AbstractContextManager[Any]:
    """Backwards are traced under the autocast that they will be called under."""
    config: Any = torch._functorch.config
    around = around_backward()
    if around is None or around == present():
        return nullcontext()
    modes = [{"device_type": device, "dtype": dtype} for device, dtype in around]
    patched: AbstractContextManager[Any] = config.patch(backward_pass_autocast=modes or "off")
    return patched


def present() -> State:
    """The autocast of this thread."""
    if not torch._C._is_any_autocast_enabled():
        return ()
    devices = torch._C._autocast_supported_devices()
    return tuple((d, torch.get_autocast_dtype(d)) for d in devices if torch.is_autocast_enabled(d))


@contextmanager
def as_under(state: State) -> Iterator[None]:
    """Inside, operations run under another autocast than the present one."""
    wanted = dict(state)
    with ExitStack() as stack:
        for device in {device for device, _ in (*state, *present())}:
            stack.enter_context(torch.autocast(device, wanted.get(device), enabled=device in wanted))
        yield


class _Cast(NamedTuple):
    """A cast of an input that an operation makes by itself."""

    user: fx.Node
    weight: fx.Node
    dtype: torch.dtype


def breaks_inside(gm: fx.GraphModule) -> bool:
    """Whether a graph of Dynamo may end in the middle of an autocast block, as at a graph break. (2.11, 2.13)"""
    reason = getattr(gm, "compile_subgraph_reason", None)
    last = [node for node in gm.graph.nodes if node.op != "output"][-1:]
    ends = any(node.target is torch.amp.autocast_mode._exit_autocast for node in last)
    return ends and bool(getattr(reason, "graph_break", True))


def share_casts(gm: fx.GraphModule) -> fx.Node | None:
    """Cast each weight once where autocast's cache does so.

    Returns an operation whose cast is another one all the same, as the body of a checkpoint has it; None where there is
    none.

    Args:
        gm: from Dynamo; changed. Nothing is changed where its operations cannot be looked at.
    """
    if not _has_work(gm):
        return None
    try:
        each, cached = _casts(gm, cache=False), _casts(gm, cache=True)
    except Exception:  # something that AOTAutograd will complain of, or knows how to treat
        return None
    return _rewrite(gm, each.casts, cached)


def _has_work(gm: fx.GraphModule) -> bool:
    nodes = gm.graph.nodes
    active = torch._C._is_any_autocast_enabled()
    if not active and not any(node.target is torch.amp.autocast_mode._enter_autocast for node in nodes):
        return False
    if any(getattr(node.target, "__module__", None) == "torch._functorch.predispatch" for node in nodes):
        return False  # levels of vmap stay open if anything goes wrong
    return any(_is_weight(node) and _is_cast_often(node) for node in nodes if node.op == "placeholder")


def _is_cast_often(weight: fx.Node) -> bool:
    """Whether several operations may cast it; looking it up in a table casts nothing."""
    users = [user for user in weight.users if user.target is not torch.nn.functional.embedding]
    return len(users) > 1 or any(_uses_inside(user, weight) > 1 for user in users)


def _uses_inside(node: fx.Node, weight: fx.Node) -> int:
    """How many operations of a checkpoint's body use it."""
    if node.target is not torch.ops.higher_order.tag_activation_checkpoint:
        return 1
    body = getattr(node.graph.owning_module, str(node.args[0]))
    inputs = [inner for inner in body.graph.nodes if inner.op == "placeholder"]
    return sum(len(inner.users) for inner, arg in zip(inputs, node.args[1:], strict=False) if arg is weight)


def _is_weight(node: fx.Node) -> bool:
    value = node.meta.get("example_value")
    return (
        isinstance(value, FakeTensor)
        and value.dtype is torch.float32
        and value.requires_grad
        and value.is_leaf
        and not value._is_view()
    )


def _casts(gm: fx.GraphModule, *, cache: bool) -> _Casting:
    """The casts of weights that the operations of a graph make, in their order."""
    inputs = [node for node in gm.graph.nodes if node.op == "placeholder"]
    examples = [node.meta["example_value"] for node in inputs]
    mode = next(value.fake_mode for value in examples if isinstance(value, FakeTensor))
    with ExitStack() as stack:
        if mode.shape_env is not None:
            stack.enter_context(mode.shape_env.ignore_fresh_unbacked_symbols())
        stack.enter_context(torch.set_grad_enabled(torch.is_grad_enabled()))
        stack.enter_context(mode)
        given = [_like(value) for value in examples]
        stack.enter_context(_cache_enabled(cache and torch.is_autocast_cache_enabled()))
        weights = {id(x): node for x, node in zip(given, inputs, strict=True) if _is_weight(node)}
        seen = stack.enter_context(_Casting(weights))
        looking = _Looking(gm, seen, cache)
        stack.callback(looking.leave)
        looking.run(*given)
        return seen


def _like(value: Any) -> Any:
    """Another fake tensor that may be changed."""
    if not isinstance(value, FakeTensor):
        return value
    other = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=value.device)
    other.requires_grad_(value.requires_grad)
    return other if value.is_leaf else other.clone()


@contextmanager
def _cache_enabled(enabled: bool) -> Iterator[None]:
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(enabled)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


class _Casting(TorchDispatchMode):
    """Notes casts of weights.

    Attributes:
        with_history: operations without gradients whose casts have one: autocast keeps a cast for later operations.
    """

    def __init__(self, weights: dict[int, fx.Node]) -> None:
        super().__init__()
        self.weights = weights
        self.node: fx.Node | None = None
        self.grad_enabled = True  # where the operation stands
        self.with_history: set[fx.Node] = set()
        self.casts: list[_Cast] = []
        self.results: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        weight = self.weights.get(id(args[0])) if args else None
        if func is torch.ops.aten._to_copy.default and weight is not None and self.node is not None:
            self.casts.append(_Cast(self.node, weight, result.dtype))
            self.results.append(result)
            if torch.is_grad_enabled() and not self.grad_enabled:
                self.with_history.add(self.node)
        return result


class _Looking(fx.Interpreter):
    """Runs a graph with fake tensors, and closes what it opened."""

    def __init__(self, gm: fx.GraphModule, seen: _Casting, cache: bool) -> None:
        super().__init__(gm)
        self._seen = seen
        self._cache = cache
        self._open: list[Any] = []

    def run_node(self, n: fx.Node) -> Any:
        number = n.meta.get("example_value")
        if n.op != "placeholder" and isinstance(number, py_sym_types):  # fake tensors have no numbers to read
            return number
        self._seen.node, self._seen.grad_enabled = n, torch.is_grad_enabled()
        before = len(self._seen.results)
        result = super().run_node(n)
        if any(x is result for x in self._seen.results[before:]):  # the user's cast, which no cache keeps
            del self._seen.casts[before:], self._seen.results[before:]
        return result

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is torch.amp.autocast_mode._enter_autocast:
            args = args if self._cache else (*args[:3], False)
            self._open.append(super().call_function(target, args, kwargs))
            return self._open[-1]
        if target is torch.amp.autocast_mode._exit_autocast:
            self._open.remove(args[0])
        return super().call_function(target, args, kwargs)

    def leave(self) -> None:
        """Leave the contexts that an error left open."""
        while self._open:
            self._open.pop().__exit__(None, None, None)


def _rewrite(gm: fx.GraphModule, each: list[_Cast], cached: _Casting) -> fx.Node | None:
    """Let operations whose casts the cache has take those of the operation that made one last.

    Returns an operation that cannot.
    """
    casts, made = Counter(each), Counter(cached.casts)
    left = None
    last: dict[tuple[fx.Node, torch.dtype], fx.Node] = {}
    shared: dict[tuple[fx.Node, torch.dtype], fx.Node] = {}
    for cast in casts:
        key = (cast.weight, cast.dtype)
        takes_tensors = _takes_tensors(cast.user)
        if cast in made:
            last[key] = cast.user
            shared.pop(key, None)
            if casts[cast] > made[cast] and not takes_tensors:
                left = left or cast.user
            continue
        first = last.get(key)
        if first is None:
            continue
        if not (takes_tensors and _takes_tensors(first)):
            left = left or cast.user
            continue
        if key not in shared:
            shared[key] = _insert(gm, first, cast, with_history=first in cached.with_history)
            first.replace_input_with(cast.weight, shared[key])
        cast.user.replace_input_with(cast.weight, shared[key])
    gm.recompile()
    return left


def _takes_tensors(node: fx.Node) -> bool:
    """Whether it is an operation, and no graph of its own that would take other tensors then."""
    graphs = isinstance(node.target, torch._ops.HigherOrderOperator)
    return node.op in ("call_function", "call_method") and not graphs


def _insert(gm: fx.GraphModule, before: fx.Node, cast: _Cast, *, with_history: bool) -> fx.Node:
    with gm.graph.inserting_before(before):
        if with_history:
            gm.graph.call_function(torch._C._set_grad_enabled, (True,))
        node = gm.graph.call_method("to", (cast.weight, cast.dtype))
        if with_history:
            gm.graph.call_function(torch._C._set_grad_enabled, (False,))
    node.meta = {name: before.meta[name] for name in before.meta.keys() & {"stack_trace"}}
    value = cast.weight.meta["example_value"]
    with value.fake_mode:
        node.meta["example_value"] = value.detach().to(cast.dtype)
    return node
