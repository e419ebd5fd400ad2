"""A replay is judged by what runs without a graph differ by among themselves."""

from __future__ import annotations

import pytest
import torch

from pygraph_train.verification import Fingerprint, PlainRuns, fixed_order

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


@pytest.mark.parametrize(
    ("ordered", "apart", "allowed"), [(1e-7, 1e-6, True), (0, 1e-6, False), (1e-7, 1e-3, False)]
)
def test_runs_agree_by_chance_where_a_run_in_fixed_order_differs(
    ordered: float, apart: float, allowed: bool
) -> None:
    """Measured: few messages between the nodes of a graph are added by atomics, which agree in six runs of seven."""
    known = runs(0.0)
    known.in_order(run(ordered, 5))
    assert (known.refuse(run(apart, 9)) is None) == allowed


def test_a_run_in_fixed_order_leaves_the_mode_as_it_was() -> None:
    with fixed_order():
        assert (
            torch.are_deterministic_algorithms_enabled()
            and torch.is_deterministic_algorithms_warn_only_enabled()
        )
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize(("apart", "allowed"), [(6e-6, True), (1e-4, False)])
def test_a_tensor_in_which_noisy_runs_agree_may_differ_by_rounding(apart: float, allowed: bool) -> None:
    """Measured: gradients of positions that a bicubic kernel adds up, beside the noise of other gradients."""

    def both(noise: float, seed: int, apart: float = 0.0) -> Fingerprint:
        drawn = torch.randn(2, 64, generator=torch.Generator().manual_seed(seed))
        return Fingerprint.of([1 + noise * drawn[0], 1 + apart * drawn[1]])

    known = PlainRuns(both(1e-7, 0))
    for seed in range(1, 4):
        known.add(both(1e-7, seed))
    assert (known.refuse(both(1e-7, 9, apart)) is None) == allowed
