"""What may go wrong on one of two ranks while all others go on: used by `tests/ranks_training.py`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from pygraph_train.graphs.cuda import CudaEngine
from pygraph_train.graphs.emulated import EmulatedEngine, EmulatedGraph
from pygraph_train.graphs.engine import NumbersNotFound
from pygraph_train.step.capture_maker import CaptureMaker
from pygraph_train.verification import Fingerprint, PlainRuns

__all__ = ["LOSSES", "trap"]

Loss = Callable[[Tensor, Tensor], Tensor]


def _counts(loss_of: Loss, model: nn.Module) -> Loss:
    class Counter:
        calls = 0

    counter = Counter()

    def counted(x: Tensor, y: Tensor) -> Tensor:
        counter.calls += 1
        return loss_of(x, y)

    return counted


def _reads(loss_of: Loss, model: nn.Module) -> Loss:
    def reading(x: Tensor, y: Tensor) -> Tensor:
        loss = loss_of(x, y)
        return loss if float(loss) > -1 else -loss

    return reading


def _branches(loss_of: Loss, model: nn.Module) -> Loss:
    def branching(x: Tensor, y: Tensor) -> Tensor:
        return loss_of(x, y) * (2 if model.module.doubled else 1)  # type: ignore[union-attr, operator]

    model.module.doubled = False  # type: ignore[union-attr, assignment]
    return branching


LOSSES: dict[str, Callable[[Loss, nn.Module], Loss]] = {
    "a counter": _counts,
    "a host read": _reads,
    "a branch": _branches,
}
"""Ways in which the step of one rank cannot be replayed, or not always."""


@contextmanager
def trap(name: str, rank: int, model: Any) -> Iterator[Callable[[int], None]]:
    """Set a trap for rank 1. Yields what is to be called before each step, with its number from 0."""

    def nothing(step: int) -> None:
        """Most traps need no step."""

    if rank == 0 or not name:
        yield nothing
    elif name == "a branch":

        def branch(step: int) -> None:
            model.module.doubled = step in (14, 15, 20)

        yield branch
    elif name == "the reference fails":
        with mock.patch.object(CaptureMaker, "reference", side_effect=ValueError("planted")):
            yield nothing
    elif name == "the capture fails":
        with mock.patch.object(EmulatedEngine, "capture", side_effect=torch.OutOfMemoryError("planted")):
            yield nothing
    elif name == "the capture fails on the device":
        with mock.patch.object(CudaEngine, "capture", _reading_capture):
            yield nothing
    elif name == "the backward of the capture fails":
        stock = EmulatedEngine.capture

        def capture(self: Any, fn: Any, **kwargs: Any) -> Any:
            def broken() -> Any:
                hook = getattr(model, "module", model).last.register_full_backward_hook(_boom)
                try:
                    return fn()
                finally:
                    hook.remove()

            return stock(self, broken, **kwargs)

        with mock.patch.object(EmulatedEngine, "capture", capture):
            yield nothing
    elif name == "numbers are not found":
        with mock.patch.object(EmulatedGraph, "numbers", side_effect=NumbersNotFound("planted")):
            yield nothing
    elif name == "the backup fails":
        with mock.patch.object(CaptureMaker, "backup", side_effect=ValueError("planted")):
            yield nothing
    elif name == "the comparison fails":
        with (
            mock.patch.object(Fingerprint, "compare", return_value="planted"),
            mock.patch.object(PlainRuns, "refuse", return_value="planted"),
        ):
            yield nothing
    elif name == "a parameter moves":

        def move(step: int) -> None:
            if step == 15:
                weight = model.module.last.weight
                weight.data = weight.data.clone()

        yield move
    elif name == "graphs are off":
        with mock.patch.dict(os.environ, PYGRAPH_DISABLE="1"):
            yield nothing
    elif name == "the process ends":

        def end(step: int) -> None:
            if step == 15:
                os._exit(3)

        yield end
    else:
        yield nothing


_STOCK_CAPTURE = CudaEngine.capture


def _reading_capture(self: Any, fn: Any, **kwargs: Any) -> Any:
    """A capture that ends with a read of the device on the host."""

    def broken() -> Any:
        result = fn()
        torch.ones(1, device=self.device).item()
        return result

    return _STOCK_CAPTURE(self, broken, **kwargs)


def _boom(*args: Any) -> Any:
    raise ValueError("planted")
