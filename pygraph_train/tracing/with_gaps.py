"""What of a step runs between the parts of its graph, and what of it is for eager kernels alone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from pygraph_train.config import PyGraphConfig
from pygraph_train.problems import Problem
from pygraph_train.torch_private import ctc_loss, cudnn_flags, host_backwards, late_decisions
from pygraph_train.tracing.late_numbers import Check
from pygraph_train.tracing.reasons import line_of
from pygraph_train.tracing.rehearsal import value_in_rehearsal

__all__ = ["Gaps"]


_SOME, _EACH = 5, 10
"""Steps may go another way so often, and once more in so many replays."""


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
        where: `file:line` of the last one.
        only_eager: whether what was traced has parts that Inductor does not know.
    """

    def __init__(self, device: torch.device) -> None:
        self.allowed = self.decide = False
        self.left = self.only_eager = self.decided = False
        self._device = device
        self.where: str | None = None
        self._others = 0  # steps that went another way

    def limit(self, config: PyGraphConfig) -> None:
        """Inductor knows none of what is in gaps, and a replay that nobody compares is never taken back."""
        self.allowed &= config.compile is not True
        self.decide &= self.allowed and config.verify != "off"

    def took_other_way(self, replays: int) -> Problem | None:
        """After a step that went another way: why its kind gets no graph any more, if that was too often.

        Args:
            replays: of this kind of step.
        """
        self._others += 1
        if self._others <= _SOME + replays // _EACH:
            return None
        return Problem(
            f"values that the step computes decide which way it takes, and {self._others} steps went another way than "
            f"its graph, which was replayed in {replays}",
            self.where,
            "Compute the result with tensors (torch.where)",
        )

    def around(self, changes: Iterable[tuple[Any, str, Any]]) -> tuple[tuple[Any, str, Any], ...]:
        """How Dynamo traces differently, besides other changes."""
        if not self.allowed:
            return tuple(changes)
        before, after = late_decisions.changes(self._answer) if self.decide else ([], [])
        of_operations = (*ctc_loss.changes(), *host_backwards.changes(), *cudnn_flags.changes())
        return (*before, *changes, *of_operations, *after)

    def _answer(self, node: fx.Node, question: str) -> bool | None:
        try:
            self.where = line_of(node) or self.where
            return bool(late_decisions.QUESTIONS[question](value_in_rehearsal(node, self._device)))
        except Exception:  # the step itself will say what is wrong
            return None

    def look_at(self, graph: torch.fx.GraphModule) -> None:
        """After a trace."""
        graphs = [module.graph for module in graph.modules() if isinstance(module, torch.fx.GraphModule)]
        targets = {node.target for each in graphs for node in each.nodes if node.op == "call_function"}
        checks = [node for node in graph.graph.nodes if node.op == "call_module"]
        self.decided = any(isinstance(getattr(graph, str(node.target), None), Check) for node in checks)
        of_operations = (ctc_loss.ctc_loss, host_backwards.backward_in_gap)
        self.left = self.decided or not targets.isdisjoint(of_operations)
        self.only_eager = self.left or cudnn_flags.set_flags in targets
