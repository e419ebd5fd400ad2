"""What operations with gaps share: where Dynamo may put them, and in which modes they compute. (2.11, 2.13)"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch import fx

from pygraph_train.problems import NotLegal, Problem
from pygraph_train.torch_private.cudnn_flags import present_flags, put_back, set_flags

__all__ = ["is_of_step", "present_modes", "refuse_second_gradient"]


def is_of_step(node: fx.Node, tx: Any) -> bool:
    """Whether a node is in the graph of the step itself.

    A graph inside of it (a checkpoint, an autograd function) runs in another order and more than once.

    Args:
        node, tx: see `changes.before_examples`.
    """
    return bool(tx.output.root_tracer.graph is node.graph)


def refuse_second_gradient(name: str) -> None:
    """In the capture of a backward that leaves a gap: its result has no gradient of its own, but looks constant.

    Raises:
        NotLegal: somebody may ask for that gradient.
    """
    if torch.is_grad_enabled():
        raise NotLegal(
            Problem(
                f"the step differentiates the gradient of torch.{name} (create_graph=True), which is computed on the "
                "host between two parts of a graph"
            )
        )


def present_modes(device: str) -> Callable[[], AbstractContextManager[Any]]:
    """Makes contexts of the modes that decide about the loss, as they are now: replays run outside of these."""
    dtype, casts = torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
    cache = torch.is_autocast_cache_enabled()
    flags = present_flags()

    def modes() -> AbstractContextManager[Any]:
        stack = ExitStack()
        stack.enter_context(torch.autocast(device, dtype=dtype, enabled=casts, cache_enabled=cache))
        stack.callback(put_back, set_flags(*flags))
        return stack

    return modes
