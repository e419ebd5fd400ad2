"""What asks in each run of a graph whether values of the step lead the way that was traced."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, fx, nn

from pygraph_train.gaps import leave_gap, may_leave_gap
from pygraph_train.torch_private.dispatch import FakeTensor
from pygraph_train.torch_private.late_decisions import OtherWay
from pygraph_train.torch_private.memory import borrower

__all__ = ["Check"]


class Check(nn.Module):
    """In a graph: values of the step have to lead the way that was traced. A capture leaves a gap for it.

    Args:
        compute: takes tensors and returns answers.
        answers: of the call that was traced.
        lines: `file:line` of each question.
        tensors: what is read, in the graph that was traced.
    """

    _is_impure = True  # for fx: it has no result, and is no dead code

    def __init__(
        self,
        compute: Callable[..., tuple[Any, ...]],
        answers: Sequence[bool],
        lines: Sequence[str],
        tensors: Sequence[fx.Node],
    ) -> None:
        super().__init__()
        self.lines = tuple(lines)
        self.tensors = list(tensors)
        self._compute, self._answers = compute, tuple(answers)

    def forward(self, *tensors: Tensor) -> None:
        """Ask.

        Raises:
            OtherWay: they lead another way.
        """
        if may_leave_gap():
            places = [borrower(tensor) for tensor in tensors]
            leave_gap(lambda: self._ask([place() for place in places]))
        elif not isinstance(tensors[0], FakeTensor):
            self._ask(tensors)

    def _ask(self, tensors: Sequence[Tensor]) -> None:
        for found, answer, line in zip(self._compute(*tensors), self._answers, self.lines, strict=True):
            if bool(found) is not answer:
                raise OtherWay(line)
