"""Functions that clip gradients, and that somebody has replaced, in steps of Accelerate and Fabric."""

from __future__ import annotations

import contextlib
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("accelerate")
pytest.importorskip("lightning")

import accelerate_training
import fabric_training
from accelerate_training import fresh  # noqa: F401
from fabric_training import loss_of
from test_replaced_calls_of_the_loop import counting
from torch import Tensor, nn

OWNERS: dict[str, tuple[Any, str]] = {
    "clipping": (nn.utils, "clip_grad_norm_"),
}


class Replacing:
    """One of `OWNERS` counts its calls from one step on, for some steps."""

    def __init__(self, name: str, first: int, last: int) -> None:
        self.calls: list[int] = []
        self._owner, self._attribute = OWNERS[name]
        self._original = getattr(self._owner, self._attribute)
        self._first, self._last = first, last
        self._patch = contextlib.ExitStack()

    def at(self, index: int) -> None:
        """Before this step."""
        if index == self._first:
            counted = counting(self._original, self.calls, "wrapped")
            self._patch.enter_context(mock.patch.object(self._owner, self._attribute, counted))
        if index == self._last:
            self._patch.close()


@pytest.mark.parametrize("name", OWNERS)
@pytest.mark.quick
def test_a_graphed_step_of_accelerate_calls_it(name: str) -> None:
    def script(script: accelerate_training.Script) -> None:
        replacing = Replacing(name, 12, 20)
        model, optimizer, loader, _ = accelerate_training.setup(script)

        def step(batch: dict[str, Tensor]) -> Tensor:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(batch["x"]), batch["y"])
            script.accelerator.backward(loss)
            script.accelerator.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            return loss.detach()

        graphed = script.graphed(step)
        for index, batch in enumerate(loader):
            replacing.at(index)
            script.write("loss", graphed(batch))
            script.write("calls", len(replacing.calls))
        script.write_state(model, optimizer)

    accelerate_training.both(script, replays=10)


@pytest.mark.parametrize("name", OWNERS)
@pytest.mark.quick
def test_a_graphed_step_of_fabric_calls_it(name: str) -> None:
    def script(script: fabric_training.Script) -> None:
        replacing = Replacing(name, 12, 20)
        model, optimizer, loader, _ = fabric_training.setup(script)
        clipping = {"max_norm": 0.1, "error_if_nonfinite": False}
        step = script.whole(lambda batch: loss_of(model, batch), model, optimizer, **clipping)
        for index, batch in enumerate(loader):
            replacing.at(index)
            script.write("loss", step(batch))
            script.write("calls", len(replacing.calls))
        script.write_state(model, optimizer)

    fabric_training.both(script, replays=10)
