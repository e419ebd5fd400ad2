"""What eager kernels allow between a forward and the end of its backward, and compiled ones do not."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pygraph_train.problems import user_location
from pygraph_train.step.exact_regions import lies_as
from pygraph_train.torch_private.aot import suggest_memory_format
from pygraph_train.torch_private.autograd import backward_ends_at, backward_keeps_graph, nodes_behind
from pygraph_train.torch_private.dynamo import untraced
from pygraph_train.torch_private.hooks import gradient_hooks
from pygraph_train.torch_private.memory import tensor_version

__all__ = ["BackwardWatch"]


class BackwardWatch:
    """Looks at backwards of parts that run with eager kernels.

    Args:
        refuse: called with a reason against regions, and the user's line.
        exact: whether regions hold eager kernels.

    Attributes:
        retains: whether a backward was seen that may be called again.
    """

    def __init__(self, refuse: Callable[[str, str | None], None], *, exact: bool) -> None:
        self.retains = False
        self._refuse = refuse
        self._exact = exact
        self._activations: list[list[Tensor]] = []  # one in each, for the hooks of the present step

    def forget(self) -> None:
        """The step has ended."""
        for held in self._activations:  # else it would hold its hook, and the hook it, for good
            held.clear()
        self._activations.clear()

    def look(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> set[int]:
        """Look at the backward of a part that has run with eager kernels.

        Returns:
            Filled by the backward: which of the outputs have got a gradient.
        """
        exact, parameters = self._exact, [x for x in inputs if isinstance(x, nn.Parameter)]
        versions = list(map(tensor_version, parameters))
        results = [x for x in outputs if isinstance(x, Tensor) and x.grad_fn is not None]
        thread, there = threading.get_ident(), set[int]()
        for result in results:
            index = next(i for i, x in enumerate(outputs) if x is result)
            others = [x.grad_fn for x in results if x is not result]
            activation = [result] if any(node is result.grad_fn for node in nodes_behind(*others)) else []
            self._activations.append(activation)
            hooks = len(gradient_hooks(result) or ()) + 1  # and the one that is registered here
            layout = suggest_memory_format(result)

            @untraced
            def look(
                gradient: Tensor | None,
                activation: list[Tensor] = activation,
                hooks: int = hooks,
                layout: torch.memory_format = layout,
                index: int = index,
            ) -> None:
                why = None
                if gradient is not None:
                    there.add(index)
                self.retains |= backward_keeps_graph()
                if torch.is_grad_enabled():
                    why = "the backward is differentiated itself (create_graph=True)"
                elif versions != list(map(tensor_version, parameters)):
                    why = "parameters are changed between forward and backward"
                elif activation and _is_asked_for(activation[0], hooks):
                    why = "the gradient of an activation is asked for, and compiled code has no such gradient"
                elif gradient is None:
                    why = "only some results of an operation have a gradient" if exact else None
                elif exact and not lies_as(gradient, layout):
                    why = "a gradient comes in another layout than compiled code has for it"
                if why is not None:
                    self._refuse(why, user_location(thread=thread))

            result.register_hook(look)
        return there


def _is_asked_for(activation: Tensor, hooks: int) -> bool:
    """Whether somebody wants the gradient of what is just a step on the way.

    Args:
        hooks: number of those that are not for that.
    """
    watched = activation.retains_grad or len(gradient_hooks(activation) or ()) > hooks
    return watched or backward_ends_at(activation)
