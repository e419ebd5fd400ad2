"""Gradients that eager kernels have and compiled ones have not: of activations, and of gradients.

One compiled function has one backward. The gradient of a result that other results are computed from is not in it,
and it cannot be differentiated again.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdRef

from pygraph_train.boundary import quietly
from pygraph_train.problems import Problem, PyGraphError, user_location
from pygraph_train.step.again import Again
from pygraph_train.torch_private.autograd import (
    backward_ends_at,
    backward_keeps_graph,
    nodes_behind,
    refuse_second_backward,
)
from pygraph_train.torch_private.dynamo import untraced
from pygraph_train.torch_private.hooks import gradient_hooks

__all__ = ["Activation", "activations_among", "asks_for_no_gradient", "explained", "handed_out"]

_FIX = "Ask for this gradient in the first step, too: then the code is not compiled. Or set forward='off', "
"backward='off'"


_FRAMEWORKS: list[Callable[..., Any]] = []


def asks_for_no_gradient(hook: Callable[..., Any]) -> None:
    """Say of a function that a framework registers on results, alone or in a `partial`, that nobody asks with it."""
    if hook not in _FRAMEWORKS:
        _FRAMEWORKS.append(hook)


def _asking(hooks: Mapping[int, Any] | None) -> int:
    """How many hooks of a tensor may be somebody's who asks for its gradient."""
    found = [getattr(hook, "func", hook) for hook in (hooks or {}).values()]
    return sum(not any(hook is known for known in _FRAMEWORKS) for hook in found)


class Activation:
    """A result that other results are computed from. Somebody may ask for its gradient.

    It does not keep the tensor: a hook that did would hold the memory of a whole step.

    Args:
        tensor: after all hooks that are not the user's were registered.
        eager: whether it was made by an operation of its own, at which a backward may end.
    """

    def __init__(self, tensor: Tensor, *, eager: bool) -> None:
        self._tensor = WeakIdRef(tensor)
        self._eager = eager
        tensor.register_hook(_nothing)
        self._hooks = gradient_hooks(tensor)
        self._registered = _asking(self._hooks)

    def is_asked_for(self) -> bool:
        """Inside a backward: whether somebody wants its gradient."""
        if _asking(self._hooks) > self._registered:
            return True
        tensor = self._tensor()
        if tensor is None:
            return False
        return tensor.retains_grad or (self._eager and backward_ends_at(tensor))


def _nothing(gradient: Tensor) -> None:
    """The hook that makes a tensor's table of hooks."""


def activations_among(results: Iterable[Tensor]) -> list[Tensor]:
    """Those of eager results that other ones are computed from."""
    nodes = {result.grad_fn: result for result in results if result.grad_fn is not None}
    found: dict[Any, Tensor] = {}
    for node in nodes:
        for source in nodes_behind(*(source for source, _ in node.next_functions)):
            if source in nodes:
                found[source] = nodes[source]
    return list(found.values())


def handed_out(graph: torch.fx.GraphModule) -> list[int]:
    """Positions of the results of a traced function that other results are computed from."""
    (outputs,) = graph.graph.output_node().args
    if not isinstance(outputs, (list, tuple)):
        return []
    results = {x for x in outputs if isinstance(x, torch.fx.Node) and _differentiable(x)}
    return [k for k, x in enumerate(outputs) if x in results and _leads_to(x, results)]


def explained(
    compiled: Callable[..., Any],
    activations: Sequence[int],
    name: str,
    eager: Callable[..., Any] | None,
    late: Callable[[Problem], None],
) -> Callable[..., Any]:
    """`compiled`, which says what it cannot where torch would say little, or give None for a gradient.

    Its backward is differentiated itself by way of `eager`, where that gives the same.

    Args:
        compiled: a function of tensors that gives a list of them.
        activations: see `handed_out`.
        name: of the module, for the sentences.
        eager: the same with eager kernels, None where there is none.
        late: called with the problem where the backward was differentiated.
    """
    thread = threading.get_ident()
    checked: list[int] | None = None

    def message(what: str) -> str:
        where = user_location(thread=thread)
        return str(Problem(what, where, _FIX))

    def let_go(again: Again) -> None:
        if not backward_keeps_graph():
            again.forget()

    def differentiable(again: Again, given: Any, tangents: Any) -> Any:
        if not torch.is_grad_enabled():
            quietly(lambda: let_go(again))
            return None
        found = again.gradients(given, tangents)
        if found is not None:
            why = "its backward is differentiated itself (create_graph=True)"
            late(Problem(f"{name} runs without graphs: {why}", user_location(thread=thread)))
            return found
        what = message(
            f"the backward of {name} is differentiated (create_graph=True), and its compiled code cannot be "
            "differentiated"
        )
        return tuple(
            g if g is None or not g.requires_grad else refuse_second_backward([g], what) for g in given
        )

    def run(*args: Any) -> Any:
        nonlocal checked
        if checked is None:
            checked = [
                i for i, x in enumerate(args) if isinstance(x, Tensor) and not isinstance(x, nn.Parameter)
            ]
        again = Again(eager, args, checked)
        outputs = compiled(*args)
        results = [x for x in outputs if _has_history(x)]
        if not results:
            return outputs
        node = results[-1].grad_fn
        if isinstance(node, torch.autograd.function.BackwardCFunction):  # and no view of what it gives
            again.ran(outputs, node)
            node.register_hook(untraced(functools.partial(differentiable, again)))
        watched = [Activation(x, eager=False) for k in activations if _has_history(x := outputs[k])]
        if watched:

            @untraced
            def look(_: Tensor) -> None:
                quietly(see)

            def see() -> None:
                if any(activation.is_asked_for() for activation in watched):
                    what = f"the gradient of an activation that {name} returns is asked for, and its compiled code"
                    raise PyGraphError(message(f"{what} has none"))

            ends = [x for k, x in enumerate(outputs) if k not in activations and _has_history(x)]
            (ends or results)[-1].register_hook(look)
        return outputs

    return run


def _has_history(value: object) -> bool:
    return isinstance(value, Tensor) and value.grad_fn is not None


def _leads_to(result: torch.fx.Node, results: set[torch.fx.Node]) -> bool:
    left, seen = list(result.users), set()
    while left:
        node = left.pop()
        if node in results:
            return True
        if node not in seen and _differentiable(node):
            seen.add(node)
            left += node.users
    return False


def _differentiable(node: torch.fx.Node) -> bool:
    value = node.meta.get("example_value")
    values = value if isinstance(value, (list, tuple)) else [value]
    return node.op != "placeholder" and any(isinstance(x, Tensor) and x.requires_grad for x in values)
