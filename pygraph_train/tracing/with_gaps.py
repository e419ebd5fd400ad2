"""What of a step runs between the parts of its graph, and what of it is for eager kernels alone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from pygraph_train.config import PyGraphConfig
from pygraph_train.torch_private import ctc_loss, cudnn_flags, host_backwards

__all__ = ["Gaps"]


class Gaps:
    """Of one trace: CTC losses, and backwards of `prod` and `cumprod`, which read on the host.

    Attributes:
        allowed: whether a graph of the step may have gaps. To be set before the first call.
        left: whether a capture of what was traced leaves gaps.
        only_eager: whether what was traced has parts that Inductor does not know.
    """

    def __init__(self) -> None:
        self.allowed = self.left = self.only_eager = False

    def limit(self, config: PyGraphConfig) -> None:
        """Inductor knows none of what is in gaps."""
        self.allowed &= config.compile is not True

    def around(self, changes: Iterable[tuple[Any, str, Any]]) -> tuple[tuple[Any, str, Any], ...]:
        """How Dynamo traces differently, besides other changes."""
        if not self.allowed:
            return tuple(changes)
        return (*changes, *ctc_loss.changes(), *host_backwards.changes(), *cudnn_flags.changes())

    def look_at(self, graph: torch.fx.GraphModule) -> None:
        """After a trace."""
        graphs = [module.graph for module in graph.modules() if isinstance(module, torch.fx.GraphModule)]
        targets = {node.target for each in graphs for node in each.nodes if node.op == "call_function"}
        self.left = not targets.isdisjoint((ctc_loss.ctc_loss, host_backwards.backward_in_gap))
        self.only_eager = self.left or cudnn_flags.set_flags in targets
