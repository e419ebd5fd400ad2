"""What of a step runs between the parts of its graph, and what of it is for eager kernels alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pygraph_train.problems import NotLegal, Problem
from pygraph_train.torch_private import ctc_loss, cudnn_flags, host_backwards
from pygraph_train.torch_private.island_gaps import island
from pygraph_train.tracing.decided_by_values import first_decided
from pygraph_train.tracing.islands import Islands, check_order, give_second_names

__all__ = ["Gaps"]


class Gaps:
    """Of one trace.

    Args:
        islands: whether it may have modules in gaps.

    Attributes:
        allowed: whether a graph of the step may have gaps. To be set before the first call.
        left: whether a capture of what was traced leaves gaps.
        only_eager: whether what was traced has parts that Inductor does not know.
        islands: modules that run in gaps.
    """

    def __init__(self, *, islands: bool = True) -> None:
        self.allowed = False
        self.left = self.only_eager = False
        self.islands = Islands(off=not islands)

    def changes(self) -> tuple[tuple[Any, str, Any], ...]:
        """How Dynamo traces differently."""
        if not self.allowed:
            return ()
        known = (*ctc_loss.changes(), *host_backwards.changes(), *cudnn_flags.changes())
        return (*known, *self.islands.changes())

    def look_at(
        self, graph: torch.fx.GraphModule, constants: frozenset[torch.fx.Node]
    ) -> Callable[[], Problem | None] | None:
        """After a trace.

        Args:
            constants: nodes whose values are the same in each step.

        Returns:
            What tells of changes that parts of the step in gaps depend on, and no guard sees.

        Raises:
            NotLegal: values decide about an operation of the graph, and the next trace may go around it.
        """
        decided = first_decided(graph, constants)
        if decided is not None and self._may_go_around(*decided):
            raise NotLegal(decided[1])
        graphs = [module.graph for module in graph.modules() if isinstance(module, torch.fx.GraphModule)]
        targets = {node.target for each in graphs for node in each.nodes if node.op == "call_function"}
        self.left = not targets.isdisjoint((ctc_loss.ctc_loss, host_backwards.backward_in_gap, island))
        self.only_eager = self.left or cudnn_flags.set_flags in targets
        self.islands.take(graph.graph)
        if self.islands.present:
            give_second_names(graph)
        return self.islands.hooked if self.islands.present else None

    def checked(self, loss: Tensor) -> Tensor:
        """The loss, in a capture, before its backward.

        Raises:
            NotLegal: its gradients would have other bits than those of plain training.
        """
        if self.islands.present:
            check_order(loss)
        return loss

    def _may_go_around(self, node: torch.fx.Node, problem: Problem) -> bool:
        """The same of a trace that has gone on behind a node of its graph."""
        if not self.allowed or self.islands.off:
            return False
        self.islands.ends_at(node)
        return self.islands.may_learn(problem)

    def may_learn(self, refused: Problem) -> bool:
        """Whether a step that is not traced shows what makes the next trace a longer one."""
        return self.allowed and self.islands.may_learn(refused)
