"""Modules whose compiled kernels never get graphs keep these kernels."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("lightning")

import torch
from lightning_training import emulated, fit
from test_lightning_manual import Gan


@pytest.mark.passes_without_graphs("no graph is ever made")
def test_modules_that_run_compiled_without_graphs_are_not_given_back() -> None:
    """A warm-up that never ends: their state changes with each call, and something compiled runs all the same."""
    callback: Any = emulated(warmup_steps=10**6, fuse="off")
    torch.manual_seed(0)
    fit([callback], module=Gan(), max_epochs=10)
    regions = callback.report().regions()
    assert regions and all(region.replays == 0 for region in regions)
    assert min(region.plain_runs for region in regions) >= 90, [region.plain_runs for region in regions]
