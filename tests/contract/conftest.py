"""What the tests of the contract share."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from pygraph_train.core.recording import RecordedRegion
from pygraph_train.report.announcements import tell_once

from .models import DEVICE
from .overwriting import replays_overwrite

torch.set_num_threads(1)  # threads that wait for each other take longer than these models


@pytest.fixture(autouse=True)
def _tensors_are_made_on_the_device(request: pytest.FixtureRequest) -> Iterator[None]:
    if DEVICE == "cpu" or request.node.get_closest_marker("places_its_tensors"):
        yield
        return
    torch.set_default_device(DEVICE)
    yield
    torch.set_default_device(None)


@pytest.fixture(autouse=True)
def _replays_overwrite_what_they_may(monkeypatch: pytest.MonkeyPatch) -> None:
    """As graphs of a device do, which share the memory of a pool."""
    replays_overwrite(monkeypatch)


@pytest.fixture(autouse=True)
def _nobody_writes_where_activations_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where gradients lie in the memory of activations, a forward has overwritten all of them, and then nobody else."""
    replay = RecordedRegion.replay_backward

    def looked(self: RecordedRegion, backward: Any, *given: Any) -> Any:
        if self.overwrites and backward is not None and self._backed != self.generation and DEVICE == "cpu":
            assert all(g.isnan().all() for g in backward.placed), "somebody writes where activations wait"
        return replay(self, backward, *given)

    monkeypatch.setattr(RecordedRegion, "replay_backward", looked)


@pytest.fixture(autouse=True)
def _nobody_reads_inputs_of_other_recordings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once another recording in the same memory is replayed, nothing reads the inputs of this one."""
    made: weakref.WeakSet[RecordedRegion] = weakref.WeakSet()
    begin, replay = RecordedRegion.__init__, RecordedRegion.replay_forward

    def begun(self: RecordedRegion, *given: Any, **named: Any) -> None:
        begin(self, *given, **named)
        made.add(self)

    def replayed(self: RecordedRegion, *given: Any) -> Any:
        for other in made:
            if other is not self and other._memory is self._memory:
                for inputs in other._targets:
                    inputs.fill_(math.nan if inputs.is_floating_point() else 0)
        return replay(self, *given)

    if DEVICE == "cpu":
        monkeypatch.setattr(RecordedRegion, "__init__", begun)
        monkeypatch.setattr(RecordedRegion, "replay_forward", replayed)


@pytest.fixture(autouse=True)
def _nothing_was_told_yet() -> None:
    """What is told once in a process is told in each test."""
    tell_once.cache_clear()


@pytest.fixture(autouse=True)
def _earlier_tests_are_not_looked_through_for_garbage() -> None:
    """What they left in caches of Dynamo costs a fifth of a second for each `gc.collect()`."""
    gc.freeze()
