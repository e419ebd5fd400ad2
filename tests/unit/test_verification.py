"""A replay is judged by what runs without a graph differ by among themselves."""

from __future__ import annotations

import pytest
import torch

from pygraph_train.core.passes import adds_in_any_order
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


@pytest.mark.parametrize(
    ("unordered", "apart", "allowed"), [(True, 1e-6, True), (False, 1e-6, False), (True, 1e-3, False)]
)
def test_runs_that_add_in_no_fixed_order_agree_by_chance(
    unordered: bool, apart: float, allowed: bool
) -> None:
    """Measured: few messages between the nodes of a graph are added by atomics, which agree in six runs of seven."""
    known = PlainRuns(run(0.0, 0), unordered=unordered)
    for seed in range(1, 4):
        known.add(run(0.0, seed))
    assert (known.refuse(run(apart, 9)) is None) == allowed


def test_which_graphs_add_in_no_fixed_order() -> None:
    def messages(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(x).index_add_(0, index, x)

    def chosen(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return x.index_select(0, index)  # PyG has another torch.index_select

    def summed(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, x).sum()

    def attends(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(x, x, x)

    functions = messages, chosen, attends, summed
    found = [adds_in_any_order(torch.fx.symbolic_trace(fn)) for fn in functions]
    assert found == [True, True, True, False]


@pytest.mark.parametrize(
    ("replays", "noisy", "refused"),
    [
        ([None, None], False, None),
        (["1.7e-3", None, None], True, None),
        (["1.7e-3", None, "1.6e-3", None], True, None),
        (["1.7e-3", None, None], False, "1.7e-3"),
        (["1.7e-3", "1.7e-3", "1.8e-3"], True, "1.8e-3"),
        (["1.7e-3", None, "1.7e-3", "1.8e-3"], True, "1.8e-3"),
    ],
)
def test_a_rare_replay_may_differ_where_kernels_add_in_no_fixed_order(
    replays: list[str | None], noisy: bool, refused: str | None
) -> None:
    assert runs(1e-7 if noisy else 0.0).again(iter(replays)) == refused


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


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.bool, torch.complex64])
@pytest.mark.parametrize("numel", [0, 1, 3, 8, 1001])
def test_equal_bits_give_equal_fingerprints_wherever_they_lie(dtype: torch.dtype, numel: int) -> None:
    held = torch.randn(numel + 1).to(dtype)
    for tensor in (held[:numel], held[1:], torch.stack([held] * 3).t()):
        there, copy = (Fingerprint.of([t], distances=False) for t in (tensor, tensor.clone()))
        assert there.same_bits(copy)
        if tensor.numel():
            other = tensor.clone()
            other[-1] = ~tensor[-1] if dtype == torch.bool else tensor[-1] + 1
            assert not there.same_bits(Fingerprint.of([other], distances=False))
