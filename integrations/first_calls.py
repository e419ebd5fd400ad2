"""What the first step of a loop does with a module's results, before anything is compiled for it."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pygraph_train.boundary import quietly
from pygraph_train.patches import standing_in
from pygraph_train.problems import Problem, PyGraphError, user_location
from pygraph_train.report.step_report import Fallback
from pygraph_train.step.activations import Activation, activations_among
from pygraph_train.torch_private import autocast
from pygraph_train.torch_private.autograd import differentiated_inside, operations_behind
from pygraph_train.torch_private.dynamo import compiled_calls, untraced
from pygraph_train.tracing.opened import tensors_inside
from pygraph_train.tracing.plain_parts import COMPILED_PART
from pygraph_train.tracing.signature import map_leaves

__all__ = ["FirstCalls", "before_backward", "every_tensor_of", "in_words", "watch_backward"]

_AGAIN = "its backward is differentiated itself (create_graph=True)"

_IN_HOOK = "a hook that its forward registers calls a backward"

_MOST = 16
"""Calls after which it is enough, also where no optimizer makes a step."""


class FirstCalls:
    """Watches the calls of one module until a step is over. They run as they are.

    What is compiled cannot be differentiated twice, and a lazy module has parameters only after its first call.

    Args:
        name: of the module, for the reason.
        steps: how many steps were made so far.
        refuse: called with the reason why the module is never compiled.

    Attributes:
        backward: the autocast that backwards were called under, None where none or several were seen.
        holders: classes of objects in the results that hold tensors, as a cache of keys and values does.
        operations: about how many operations the first call was, with its backward; 0 where nobody asked.
    """

    def __init__(self, name: str, steps: Callable[[], int], refuse: Callable[[Fallback], object]) -> None:
        self.refused = False
        self.holders: set[type] = set()
        self.operations = 0
        self._name = name
        self._steps = steps
        self._refuse = refuse
        self._began: int | None = None
        self._calls = 0
        self._differentiated = False
        self._autocast: set[autocast.State] = set()

    @property
    def backward(self) -> autocast.State | None:
        return next(iter(self._autocast)) if len(self._autocast) == 1 else None

    @property
    def over(self) -> bool:
        """Whether enough was seen, and nothing that speaks against compiling the module."""
        if self.refused or self._began is None:
            return False
        return self._calls >= _MOST or (self._differentiated and self._steps() > self._began)

    def run(self, call: Callable[[], Any]) -> Any:
        """Make a call, and see whether it differentiates itself."""
        if self.refused:
            return call()
        register = torch.Tensor.register_hook

        def noticing(tensor: Tensor, hook: Callable[..., Any]) -> Any:
            @functools.wraps(hook)
            def noticed(gradient: Tensor) -> Any:
                with differentiated_inside(lambda: self._stop(_IN_HOOK), again=False):
                    return hook(gradient)

            return register(tensor, noticed)

        again = differentiated_inside(lambda: self._stop(_AGAIN), again=True)
        compiled = compiled_calls(lambda: self._stop(COMPILED_PART.reason, fix=COMPILED_PART.fix))
        with again, compiled, standing_in([(torch.Tensor, "register_hook", noticing)]):
            return call()

    def _stop(self, why: str, thread: int | None = None, fix: str = "") -> None:
        """The module is never compiled."""
        if not self.refused:
            self.refused = True
            reason = f"{self._name} runs without graphs: {why}"
            where = user_location(thread=thread)
            self._refuse(Fallback(reason, where, fix, self._steps() + 1))

    def look_at(self, result: Any, inputs: Any = None) -> None:
        """Note what becomes of the result of a call.

        Args:
            result: of the call.
            inputs: its arguments, where somebody wants to know how many operations it was.
        """
        if self.refused:
            return
        self._calls += 1
        if self._began is None:
            self._began = self._steps()
        thread = threading.get_ident()

        @untraced
        def look(_: Tensor) -> None:
            quietly(see)

        def see() -> None:
            self._differentiated = True
            self._autocast.add(autocast.present())
            if self.refused:
                return
            why = None
            if len(self._autocast) > 1:
                why = "its backward is called under several autocasts, and a compiled backward supports one"
            elif torch.is_grad_enabled():
                why = _AGAIN
            elif any(activation.is_asked_for() for activation in activations):
                why = (
                    "the gradient of an activation that it returns is asked for, and compiled code has no such "
                    "gradient"
                )
            if why is not None:
                self._stop(why, thread)

        held = dict(tensors_inside(result))
        self.holders.update(held.values())
        watched = list(dict.fromkeys(x for x in (*_tensors(result), *held) if x.grad_fn is not None))
        for tensor in watched:
            tensor.register_hook(look)
        activations = [Activation(x, eager=True) for x in activations_among(watched)]
        self._differentiated |= not watched  # nothing will be
        if inputs is not None and self._calls == 1:
            self.operations = operations_behind(watched, every_tensor_of(inputs))


def watch_backward(result: Any, expected: autocast.State, name: str, late: Callable[[Problem], None]) -> None:
    """Let no compiled backward run under another autocast than it was compiled for.

    Args:
        result: of the call of a compiled module.
        expected: the autocast that its backward was compiled for.
        name: of the module.
        late: called with the problem before `PyGraphError` is raised inside of the backward.
    """
    thread = threading.get_ident()

    def see() -> None:
        if (now := autocast.present()) != expected:
            what = (
                f"the backward of {name} runs with {in_words(now)}, and was compiled for {in_words(expected)}"
            )
            problem = Problem(what, user_location(thread=thread), _ONE_AUTOCAST)
            late(problem)
            raise PyGraphError(str(problem))

    before_backward(result, untraced(lambda _: quietly(see)))


def before_backward(result: Any, look: Callable[..., None]) -> None:
    """Call something when the backward of a module begins.

    Args:
        result: of the module's call.
    """
    # a hook on a tensor would look like one of the user's, who asks for the gradient of an activation
    for node in {x.grad_fn for x in _tensors(result) if x.grad_fn is not None}:
        node.register_prehook(look)


_ONE_AUTOCAST = (
    "Call every backward inside the autocast block, or every backward outside. Or do both in the first "
    "step: then the module is not compiled. Or set forward='off', backward='off'"
)


def in_words(state: autocast.State) -> str:
    """How a sentence names an autocast."""
    kinds = [f"{str(dtype).removeprefix('torch.')} on {device}" for device, dtype in state]
    return f"autocast to {', '.join(kinds)}" if kinds else "no autocast"


def every_tensor_of(arguments: Any) -> list[Tensor]:
    """The tensors in arguments of a call: in containers that are known, and inside of other objects."""
    return [*_tensors(arguments), *(tensor for tensor, _ in tensors_inside(arguments))]


def _tensors(result: Any) -> list[Tensor]:
    found: list[Tensor] = []

    def take(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            found.append(leaf)
        return leaf

    with contextlib.suppress(TypeError):  # a container of somebody else's
        map_leaves(take, result)
    return found
