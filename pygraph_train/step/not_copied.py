"""Graphed steps are not copied: a copy would have the graphs, and the function, of another model."""

from __future__ import annotations

from typing import Any, ClassVar, NoReturn


class NotCopied:
    """Base of graphed steps. `copy.copy`, `copy.deepcopy` and `pickle` raise a TypeError that says what to do.

    This is so before the first step as well: `copy.deepcopy` leaves functions as they are, and the copied optimizer
    would wait for gradients that the function computes for the first model.
    """

    _made_by: ClassVar[str]
    """What makes such steps."""

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "a graphed step cannot be copied or pickled: its graphs are for the tensors of one model and "
            "one optimizer. Copy the model and the optimizer together, copy.deepcopy((model, optimizer)), or save "
            f"their state_dict(), and make a new graphed step for the copies with {self._made_by}"
        )
