"""What of a step runs between the parts of its graph, and what of it is for eager kernels alone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from pygraph_train.torch_private import ctc_loss, cudnn_flags, host_backwards, late_decisions
from pygraph_train.tracing.late_numbers import Check
from pygraph_train.tracing.rehearsal import value_in_rehearsal

__all__ = ["Gaps"]


class Gaps:
    """Of one trace.

    Args:
        device: of the step.

    Attributes:
        allowed: whether a graph of the step may have gaps. To be set before the first call.
        decide: whether values that the step computes may decide which way it takes: a replay that leads another way
            has to be taken back. To be set before the first call.
        left: whether a capture of what was traced leaves gaps.
        decided: whether such values have decided.
        only_eager: whether what was traced has parts that Inductor does not know.
    """

    def __init__(self, device: torch.device) -> None:
        self.allowed = self.decide = False
        self.left = self.only_eager = self.decided = False
        self._device = device

    def around(self, changes: Iterable[tuple[Any, str, Any]]) -> tuple[tuple[Any, str, Any], ...]:
        """How Dynamo traces differently, besides other changes."""
        if not self.allowed:
            return tuple(changes)
        before, after = late_decisions.changes(self._answer) if self.decide else ([], [])
        of_operations = (*ctc_loss.changes(), *host_backwards.changes(), *cudnn_flags.changes())
        return (*before, *changes, *of_operations, *after)

    def _answer(self, node: fx.Node, question: str) -> bool | None:
        try:
            return bool(late_decisions.QUESTIONS[question](value_in_rehearsal(node, self._device)))
        except Exception:  # the step itself will say what is wrong
            return None

    def look_at(self, graph: torch.fx.GraphModule) -> None:
        """After a trace."""
        targets = {node.target for node in graph.graph.nodes if node.op == "call_function"}
        self.decided = any(isinstance(module, Check) for module in graph.children())
        self.left = self.decided or not targets.isdisjoint(
            (ctc_loss.ctc_loss, host_backwards.backward_in_gap)
        )
        self.only_eager = self.left or cudnn_flags.set_flags in targets
