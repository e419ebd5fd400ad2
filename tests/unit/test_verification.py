"""A replay is judged by what runs without a graph differ by among themselves."""

from __future__ import annotations

import pytest
import torch

from pygraph_train.verification import Fingerprint, PlainRuns

pytestmark = pytest.mark.quick


def run(noise: float, seed: int) -> Fingerprint:
    """The same gradients, with noise of this size."""
    exact = torch.linspace(1.0, 2.0, 64)
    drawn = torch.randn(64, generator=torch.Generator().manual_seed(seed))
    return Fingerprint.of([exact + noise * drawn])


def runs(noise: float) -> PlainRuns:
    made = PlainRuns(run(noise, 0))
    for seed in range(1, 4):
        made.add(run(noise, seed))
    return made


def test_noise_of_the_size_of_plain_runs_is_allowed() -> None:
    assert runs(1e-5).refuse(run(1e-5, 9)) is None


def test_more_than_that_is_refused_with_both_figures() -> None:
    told = runs(1e-5).refuse(run(1e-3, 9))
    assert told is not None and "differs by" in told and "runs without the graph by" in told


def test_one_bit_is_refused_where_plain_runs_agree() -> None:
    told = runs(0.0).refuse(run(1e-6, 9))
    assert told is not None and "agree bit for bit" in told
