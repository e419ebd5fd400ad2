"""What of a step runs between the parts of its graph, and what of it is for eager kernels alone."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from typing import Any

import torch
from torch import Tensor, fx

from pygraph_train.config import PyGraphConfig
from pygraph_train.problems import NotLegal, Problem
from pygraph_train.torch_private import ctc_loss, cudnn_flags, host_backwards, late_decisions
from pygraph_train.torch_private.island_gaps import island
from pygraph_train.tracing.decided_by_values import first_decided
from pygraph_train.tracing.islands import Islands, check_order, give_second_names
from pygraph_train.tracing.late_checks import Check
from pygraph_train.tracing.rehearsal import value_in_rehearsal

__all__ = ["Gaps"]

_MOST = 64
"""Conditions in a step: what comes before each of them is computed once more when the step is traced."""


class Gaps:
    """Of one trace.

    Args:
        device: of the step.
        islands: whether it may have modules in gaps.

    Attributes:
        allowed: whether a graph of the step may have gaps. To be set before the first call.
        decide: whether values that the step computes may decide which way it takes: a replay that leads another way
            has to be taken back. To be set before the first call.
        left: whether a capture of what was traced leaves gaps.
        not_at: `file:line` of conditions that go another way too often: they decide nothing.
        lines: of those that have decided.
        in_modules: of those in modules that might run in gaps instead.
        only_eager: whether what was traced has parts that Inductor does not know.
        islands: modules that run in gaps.
    """

    def __init__(self, device: torch.device, *, islands: bool = True) -> None:
        self.allowed = self.decide = False
        self.left = self.only_eager = False
        self.not_at: Container[str] = ()
        self.lines: list[str] = []
        self.in_modules: set[str] = set()
        self.islands = Islands(off=not islands)
        self._device, self._asked = device, 0

    @property
    def decided(self) -> bool:
        """Whether values that the step computes have decided which way it takes."""
        return bool(self.lines)

    def limit(self, config: PyGraphConfig, not_at: Container[str]) -> None:
        """Inductor knows none of what is in gaps, and a replay that nobody compares is never taken back."""
        self.allowed &= config.compile is not True
        self.decide &= self.allowed and config.verify != "off"
        self.not_at = not_at

    def around(self, changes: Iterable[tuple[Any, str, Any]]) -> tuple[tuple[Any, str, Any], ...]:
        """How Dynamo traces differently, besides other changes."""
        if not self.allowed:
            return tuple(changes)
        self._asked = 0
        before, after = late_decisions.changes(self._answer) if self.decide else ([], [])
        of_operations = (*ctc_loss.changes(), *host_backwards.changes(), *cudnn_flags.changes())
        return (*before, *changes, *of_operations, *self.islands.changes(), *after)

    def _answer(self, node: fx.Node, question: str, where: str) -> bool | None:
        if where in self.not_at or self._asked == _MOST:
            return None
        self._asked += 1
        if self.islands.may_be_inside():
            self.in_modules.add(where)
        try:
            return bool(late_decisions.QUESTIONS[question](value_in_rehearsal(node, self._device)))
        except Exception:  # the step itself will say what is wrong
            return None

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
        calls = [node for node in graph.graph.nodes if node.op == "call_module"]
        called = [getattr(graph, str(node.target), None) for node in calls]
        self.lines = [line for check in called if isinstance(check, Check) for line in check.lines]
        of_operations = (ctc_loss.ctc_loss, host_backwards.backward_in_gap, island)
        self.left = self.decided or not targets.isdisjoint(of_operations)
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
