"""What Inductor would compile, noted for a process beside the training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from pygraph_train.regions.inductor import compile_whole
from pygraph_train.regions.passes.draft import in_one_line
from pygraph_train.torch_private.compile_beside import Order
from pygraph_train.torch_private.dynamo import dynamo_restart
from pygraph_train.tracing.recompute import as_eager, eager_copy

__all__ = ["compile_later"]


def compile_later(
    gm: torch.fx.GraphModule, example_inputs: Sequence[Any], order: Order, failed: list[str]
) -> Callable[..., Any]:
    """Note what `compile_whole` would compile, and run the graph with eager kernels.

    Args:
        order: gets it.
        failed: why that is not possible is added to it.
    """
    eager = eager_copy(gm)
    if eager is None:
        failed.append("it holds graphs of its own (a checkpoint, for example)")
        return as_eager(gm).forward
    try:
        with order.taking():
            compile_whole(gm, example_inputs, [])
    except dynamo_restart():
        raise
    except Exception as error:
        failed.append(in_one_line(error))
    return eager.forward
