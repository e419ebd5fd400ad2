"""With `compile=False` a step whose regions hold eager kernels comes out bit for bit as in plain training.

The first step runs in plain Python, and shows whether autocast's casts are shared. In each step with a part that has
not run before, it is looked at how gradients will be added. And each part is compared, see `ProvedPart`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pygraph_train.report.backend_report import RegionRecord
from pygraph_train.step.program import Call
from pygraph_train.tracing.gradient_order import GradientOrder, casts_are_shared
from pygraph_train.tracing.signature import flattened

__all__ = ["ExactSteps", "lies_as"]


class ExactSteps:
    """What the parts of a step have to agree in.

    Args:
        refuse: called with a reason against regions.

    Attributes:
        compared: whether a part was compared in the present step.
        left: why parts run as they are, for good; None where their records say it.
    """

    def __init__(self, refuse: Callable[[str], None]) -> None:
        self.compared = False
        self.left: list[str | None] = []
        self._refuse = refuse
        self._casts_shared: bool | None = None
        self._order: GradientOrder | None = None  # of the present step

    @property
    def began(self) -> bool:
        """Whether a step in plain Python was looked at."""
        return self._casts_shared is not None

    @property
    def shares_casts(self) -> bool:
        """Whether that step has used a cast of a weight more than once."""
        return bool(self._casts_shared)

    def begin(self) -> None:
        """A step begins."""
        self.compared = False
        self._order = GradientOrder()

    def end(self) -> None:
        """It has ended, or failed."""
        self._order = None

    def looked_at(self, call: Call) -> Call:
        """`call`, and a look at the step's graph of autograd after it."""

        def looked_at(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            result = call(fn, args, kwargs)
            order, self._order = self._order, None  # it holds the step's nodes
            if self._casts_shared is None:
                self._casts_shared = casts_are_shared(_with_history(result))
            elif (
                order is not None and order.anew and (why := order.why_not(_with_history(result))) is not None
            ):
                self._refuse(why)
            return result

        return looked_at

    def run(self, forward: Callable[..., Any], inputs: Sequence[Any]) -> tuple[Any, Sequence[int]]:
        """Run a part with eager kernels, and say which of its inputs it uses more than once."""
        if (order := self._order) is None:
            return forward(*inputs), ()
        sources = order.sources(inputs)
        outputs = forward(*inputs)
        return outputs, order.ran(sources, outputs)

    def ran_compiled(self, several: Sequence[Any], outputs: Sequence[Any]) -> None:
        """See `GradientOrder.ran_compiled`."""
        if self._order is not None:
            self._order.ran_compiled(several, outputs)

    def nothing_left(self, records: Sequence[RegionRecord]) -> str:
        """The reason where all parts of the step run as they are.

        Args:
            records: of regions that were made.
        """
        reasons = [why for why in self.left if why is not None]
        reasons += [r.reason for r in records if r.phase != "backward" and r.reason]
        return reasons[0] if reasons else "no part of the step has any"


def lies_as(gradient: Tensor, layout: torch.memory_format) -> bool:
    """Whether compiled code takes a gradient as it is."""
    return gradient.layout is torch.strided and gradient.is_contiguous(memory_format=layout)


def _with_history(result: Any) -> list[Tensor]:
    return [x for x in flattened(result)[1] if isinstance(x, Tensor) and x.grad_fn is not None]
