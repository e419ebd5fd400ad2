"""Steps whose shapes or kernels are decided by values: refused by their line, before anything is captured."""

from __future__ import annotations

import linecache
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from training import Diary, both, sgd

from pygraph_train.graphs.cuda import _reason as cuda_reason
from pygraph_train.graphs.emulated import EmulatedEngine
from pygraph_train.graphs.engine import CaptureError
from pygraph_train.tracing.trace import Trace

SHAPE = "the shape of a tensor depends on the values of another tensor"
ZERO = "looks on the host whether its input holds a zero"


def picked(found: Tensor, x: Tensor) -> Tensor:
    return found[found > 0].square().mean()  # here


def places(found: Tensor, x: Tensor) -> Tensor:
    row, column = torch.where(found > 0)  # here
    return found[row, column].square().mean()


def indices(found: Tensor, x: Tensor) -> Tensor:
    return found.flatten()[torch.nonzero(x.flatten() > 0, as_tuple=True)[0]].sum()  # here


def selected(found: Tensor, x: Tensor) -> Tensor:
    return found.masked_select(x > 0).sum()  # here


def repeated(found: Tensor, x: Tensor) -> Tensor:
    return found.repeat_interleave((x[:, 0] > 0).long() + 1, 0).square().mean()  # here


def written(found: Tensor, x: Tensor) -> Tensor:
    found = found.clone()
    found[x[:, 0] > 0] = found.detach()[0].clone()  # here
    return found.square().mean()


def different(found: Tensor, x: Tensor) -> Tensor:
    return found.square().mean() + torch.unique(x > 0).sum()  # here


def in_checkpoint(found: Tensor, x: Tensor) -> Tensor:
    def inner(found: Tensor, x: Tensor) -> Tensor:
        return found[x > 0].square().mean()  # here

    return checkpoint(inner, found, x, use_reentrant=False)


def running_product(found: Tensor, x: Tensor) -> Tensor:
    return torch.cumprod(found.sigmoid() + 0.5, -1).mean()  # here


def product(found: Tensor, x: Tensor) -> Tensor:
    return found.sigmoid().prod(-1).mean()  # here


def trains(loss: Callable[[Tensor, Tensor], Tensor], **expected: Any) -> Any:
    def script(diary: Diary) -> None:
        model = nn.Linear(4, 4)
        optimizer = sgd(model)

        def step_fn(x: Tensor) -> Tensor:
            return loss(model(x), x)

        step = diary.step(step_fn, model=model, optimizer=optimizer)
        generator = torch.Generator().manual_seed(3)
        for _ in range(14):
            diary.write("loss", step(torch.randn(6, 4, generator=generator)))
            diary.write_state(model, optimizer)

    return both(script, compile=False, **expected)


@pytest.mark.passes_without_graphs("what values decide is found by tracing")
@pytest.mark.parametrize(
    ("loss", "words"),
    [
        *((loss, SHAPE) for loss in (picked, places, indices, selected, repeated, written, different)),
        (in_checkpoint, SHAPE),
        (running_product, ZERO),
        (product, ZERO),
    ],
)
def test_what_values_decide_is_refused_by_its_line(
    loss: Callable[[Tensor, Tensor], Tensor], words: str
) -> None:
    model, trace = nn.Linear(4, 4), Trace(torch.device("cpu"))
    trace(lambda x: loss(model(x), x), (torch.randn(6, 4),), {})
    row = trace.problem
    assert row is not None and words in row.reason and row.fix, row
    file, _, line = str(row.where).rpartition(":")
    assert file == __file__ and "# here" in linecache.getline(file, int(line)), row


@pytest.mark.parametrize("loss", [picked, places, in_checkpoint])
def test_a_step_whose_shapes_values_decide_is_refused_without_a_capture_that_fails(
    loss: Callable[[Tensor, Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    failed, capture = [], EmulatedEngine.capture

    def noted(self: Any, fn: Any, **options: Any) -> Any:
        try:
            return capture(self, fn, **options)
        except Exception as error:
            failed.append(error)
            raise

    monkeypatch.setattr(EmulatedEngine, "capture", noted)
    report = trains(loss, replays=1)  # of the optimizer
    assert SHAPE in report.fallbacks[0].reason and not report.steps_replayed, report
    assert not failed


def filled(found: Tensor, x: Tensor) -> Tensor:
    found = found.clone()
    found[x > 0] = 0.5
    return found.square().mean()


def repeated_to_a_size(found: Tensor, x: Tensor) -> Tensor:
    return found.repeat_interleave(torch.full_like(x[:, 0], 2).long(), 0, output_size=12).square().mean()


def product_of_the_batch(found: Tensor, x: Tensor) -> Tensor:
    return found.square().mean() * x.prod(-1).mean() + torch.cumprod(x, 0).mean()


@pytest.mark.parametrize("loss", [filled, repeated_to_a_size, product_of_the_batch])
def test_what_values_do_not_decide_is_replayed(loss: Callable[[Tensor, Tensor], Tensor]) -> None:
    trains(loss, replays=8, plan="{F B O}")


def test_a_capture_that_fails_without_a_line_is_told_with_the_line_of_the_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(self: Any, fn: Any, **options: Any) -> Any:
        raise CaptureError("the backward of the step does something that a CUDA graph cannot hold")

    monkeypatch.setattr(EmulatedEngine, "capture", fails)
    row = trains(lambda found, x: found.square().mean(), never="no capture succeeds").fallbacks[0]
    file, _, line = str(row.where).rpartition(":")
    assert file == __file__ and "def step_fn" in linecache.getline(file, int(line)), row


@pytest.mark.passes_without_graphs("nothing is captured")
def test_an_error_of_a_backward_is_told_as_such() -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Any:
            return torch.zeros(2, 3)  # of another shape: the error is raised where no Python runs

    with pytest.raises(RuntimeError) as raised:
        Fails.apply(torch.ones(5, requires_grad=True)).sum().backward()
    assert cuda_reason(raised.value).startswith("the backward of the step does something")
    assert cuda_reason(RuntimeError("CUDA error")).startswith("the step does something")


@pytest.mark.passes_without_graphs("a step that is traced raises")
def test_a_batch_that_fails_in_a_traced_step_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    def script(diary: Diary) -> None:
        model = nn.Linear(4, 3)
        step = diary.step(
            lambda x, y: nn.functional.cross_entropy(model(x), y), model=model, optimizer=sgd(model)
        )
        for bad in (0, 1, 0, 1, 0):
            with pytest.raises(IndexError) if bad else torch.no_grad(), torch.enable_grad():
                diary.write("loss", step(torch.ones(2, 4), torch.full((2,), 9 * bad)))

    both(script, never="it is over before a capture")
    told = capfd.readouterr()
    assert "FX-traced" not in told.err + told.out
