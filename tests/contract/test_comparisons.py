"""The comparison that all tests here rest on: it notices what is different, and that no graph ran."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from pygraph_train.core.recording import RecordedRegion
from tests.faults import nothing_is_captured

from .compare import Run, compare
from .models import Net, adamw, batches, cross_entropy, loss_of

pytestmark = pytest.mark.passes_without_graphs("it is about runs without graphs, or with differences")


def graphed(run: Run) -> None:
    model = Net()
    step = run.step(loss_of(model), model=model, optimizer=adamw(model))
    for batch in batches(12):
        step(batch)


def compiled(run: Run) -> None:
    model = Net()
    call = run.compile(model)
    for x, y in run.each(batches(12)):
        cross_entropy(call(x), y).backward()


@pytest.mark.parametrize("training", [graphed, compiled])
@pytest.mark.quick
def test_a_test_that_asks_for_replays_notices_when_captures_fail(
    training: Callable[[Run], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each such test counts them in one place."""
    tried = nothing_is_captured(monkeypatch)
    with pytest.raises(AssertionError, match="from graphs ran"):
        compare(training, replays=1)
    assert tried() > 0


def a_weight(model: Net) -> None:
    model.first.weight.data[0, 0] += 1e-6


def a_buffer(model: Net) -> None:
    model.norm.num_batches_tracked += 1


def a_gradient(model: Net) -> None:
    model.first.weight.grad = torch.zeros_like(model.first.weight)


def a_mode(model: Net) -> None:
    model.dropout.eval()


def a_random_state(model: Net) -> None:
    torch.rand(1)


@pytest.mark.parametrize("change", [a_weight, a_buffer, a_gradient, a_mode, a_random_state])
@pytest.mark.quick
def test_a_difference_is_noticed(change: Callable[[Any], None]) -> None:
    def training(run: Run) -> None:
        model = Net()
        run.watch(model)
        if run.ours:
            change(model)
        run.snapshot()

    with pytest.raises(AssertionError, match="became"):
        compare(training, replays=0)


@pytest.mark.parametrize("other", [1.0, True, torch.ones(1), torch.tensor(1.0), [1], "1"], ids=repr)
@pytest.mark.quick
def test_another_type_is_noticed(other: Any) -> None:
    with pytest.raises(AssertionError, match="became"):
        compare(lambda run: run.note("value", other if run.ours else 1), replays=0)


def test_an_entry_too_many_is_noticed() -> None:
    with pytest.raises(AssertionError, match="became"):
        compare(lambda run: [run.note("value", 1) for _ in range(1 + run.ours)], replays=0)


@pytest.mark.parametrize("differing", [1, 2])
def test_what_one_replay_of_three_differs_by_is_no_other_computation(
    differing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels that add in no fixed order may give a rare sum in the very replay that is compared."""
    replayed, left = RecordedRegion.replayed, differing

    def rare(self: RecordedRegion, *given: Any) -> Any:
        nonlocal left
        outputs, gradients = replayed(self, *given)
        if left:
            left -= 1
            gradients = [g if g is None else g * (1 + 1e-6) for g in gradients]
        return outputs, gradients

    monkeypatch.setattr(RecordedRegion, "replayed", rare)
    if differing == 1:
        compare(graphed, replays=1)
    else:
        with pytest.raises(AssertionError, match="its replay computes something else"):
            compare(graphed, replays=1)
