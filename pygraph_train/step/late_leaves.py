"""Steps that ask for the gradient of an input, where the first steps asked for none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

__all__ = ["LATE_LEAVES", "RegionKernels", "is_leaf"]

LATE_LEAVES = (
    "a step that asks for the gradient of an input runs the rest with eager kernels: the first steps asked for no such "
    "gradient"
)


class RegionKernels:
    """Which kernels the regions of a step run with.

    A step that asks for the gradient of an input, when the first steps did not, is most often a step with a gradient
    penalty, which differentiates that gradient. Compiled kernels cannot do that, so the rest of that step is eager.

    Attributes:
        eager: whether it is such a step.
    """

    def __init__(self) -> None:
        self.eager = False

    def either(self, compiled: Callable[..., Any], eager: Callable[..., Any]) -> Callable[..., Any]:
        """A region of every step."""
        return lambda *args: (eager if self.eager else compiled)(*args)

    def eager_from_here(self, eager: Callable[..., Any]) -> Callable[..., Any]:
        """A region whose inputs make the step such a step."""

        def run(*args: Any) -> Any:
            self.eager = True
            return eager(*args)

        return run


def is_leaf(value: object) -> bool:
    """Whether somebody may ask for the gradient of an input that is no parameter."""
    wanted = isinstance(value, Tensor) and value.requires_grad and value.is_leaf
    return wanted and not isinstance(value, nn.Parameter)
