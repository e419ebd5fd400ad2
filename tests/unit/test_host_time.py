"""A replayed step calls few functions, and no more of them where a model has more layers: the device waits for them."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from pygraph_train import GraphedStep
from pygraph_train.graphs.emulated import EmulatedGraph
from pygraph_train.graphs.inputs import CopiedInputs
from pygraph_train.patches import nothing
from pygraph_train.problems import is_library_file

_MOST = 99
"""Functions of Python that the library calls in a step, on Python 3.11, where a comprehension is one as well."""


def _calls_of_a_step(patch: pytest.MonkeyPatch, layers: int) -> tuple[int, Counter[tuple[str, str]]]:
    """How many functions of Python the library calls in a replayed step, and all that is called, with how often."""
    model = nn.Sequential(*[layer for _ in range(layers) for layer in (nn.Linear(4, 4), nn.ReLU())])
    optimizer, batch = (
        torch.optim.AdamW(model.parameters(), fused=True),
        (torch.ones(2, 4), torch.zeros(2, 4)),
    )
    step = GraphedStep(
        lambda x, y: mse_loss(model(x), y), model=model, optimizer=optimizer, engine="emulated", forward="on"
    )
    for _ in range(20):
        step(*batch)
    # as a CUDA graph, which is launched, and finds gradients where they lie
    for owner, name in ((EmulatedGraph, "replay"), (CopiedInputs, "take"), (CopiedInputs, "give_back")):
        patch.setattr(owner, name, nothing)
    step(*batch)
    calls: Counter[tuple[str, str]] = Counter()

    def look(frame: Any, event: str, called: Any) -> None:
        if event == "call":
            calls[frame.f_code.co_filename, frame.f_code.co_name] += 1
        elif event == "c_call":
            calls["", called.__name__] += 1

    gc.disable()
    sys.setprofile(look)
    try:
        step(*batch)
    finally:
        sys.setprofile(None)
        gc.enable()
    patch.undo()
    report = step.report()
    assert report.steps_replayed >= 19 and report.optimizer_steps_replayed >= 16
    return sum(count for (file, _), count in calls.items() if file and is_library_file(file)), calls


def test_a_replayed_step_calls_as_few_functions_for_many_layers_as_for_few(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours, calls = _calls_of_a_step(monkeypatch, 3)
    assert ours <= _MOST
    assert _calls_of_a_step(monkeypatch, 12) == (ours, calls)
