"""Several threads of one process train at once, each as it would alone."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from replays import regions_ran, text_of
from torch import Tensor, nn
from training import CONFIG, PlainStep, adamw, batches, replayed

from pygraph_train import GraphedStep, backend

THREADS = 4

pytestmark = pytest.mark.skipif(
    torch.version.cuda is not None and not torch.cuda.is_available() and torch.__version__ < "2.13",
    reason="torch 2.11 for CUDA ends the process where several threads compile and there is no GPU",
)

Batches = list[tuple[Tensor, Tensor]]


def model_of(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 16 + seed), nn.Tanh(), nn.Linear(16 + seed, 3))


def in_threads(train: Callable[[nn.Module, Batches], Any], *, at_once: bool = True) -> list[Any]:
    """What `train(model, batches)` returns in each thread."""
    work = [
        (model_of(seed), batches(40)) for seed in range(THREADS)
    ]  # a generator of their own for none of them
    found: list[Any] = [None] * THREADS
    together = threading.Barrier(THREADS, timeout=60)

    def run(index: int) -> None:
        if at_once:
            together.wait()
        try:
            found[index] = train(*work[index])
        except BaseException as error:
            found[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(THREADS)]
    for thread in threads:
        thread.start()
        if not at_once:
            thread.join()
    for thread in threads:
        thread.join()
    for one in found:
        if isinstance(one, BaseException):
            raise one
    return found


def process_wide() -> list[Any]:
    """What traces and captures change for a while."""
    import torch._dynamo.config as config
    from torch._dynamo import convert_frame, guards, symbolic_convert
    from torch._dynamo.variables import builder, user_defined

    owners = (convert_frame.CatchErrorsWrapper, guards, symbolic_convert, builder, user_defined, torch.Tensor)
    held = [(owner.__name__, name, id(value)) for owner in owners for name, value in vars(owner).items()]
    settings = [(name, repr(value)) for name, value in config.get_config_copy().items()]
    return [held, settings, gc.get_threshold(), torch.is_anomaly_enabled()]


def test_steps_of_several_threads() -> None:
    def train(model: nn.Module, data: Batches, make: Any) -> Any:
        step = make(lambda batch: nn.functional.cross_entropy(model(batch[0]), batch[1]), model)
        losses = [step(batch).item() for batch in data]
        return losses, [p.detach().clone() for p in model.parameters()], step

    def plain(step_fn: Any, model: nn.Module) -> Any:
        return PlainStep(step_fn, model=model, optimizer=adamw(model))

    def graphed(step_fn: Any, model: nn.Module) -> Any:
        return GraphedStep(step_fn, model=model, optimizer=adamw(model), config=CONFIG)

    in_threads(lambda model, data: train(model, data, graphed))  # imports of torch change what it holds
    before = process_wide()
    expected = in_threads(lambda model, data: train(model, data, plain))
    found = in_threads(lambda model, data: train(model, data, graphed))
    for (losses, weights, _), (other_losses, other_weights, step) in zip(expected, found, strict=True):
        assert losses == other_losses
        assert all(map(torch.equal, weights, other_weights))
        replayed(step.report())
    assert process_wide() == before


@pytest.mark.skipif(
    torch.__version__ < "2.13", reason="torch 2.11 calls nothing compiled while a thread traces"
)
def test_compiled_models_of_several_threads() -> None:
    """The backend in two threads, torch's in two others: each as after the threads before it."""

    def train(model: nn.Module, data: Batches) -> Any:
        optimizer = adamw(model)
        options: dict[str, Any] = {
            "backend": backend.pygraph,
            "options": {"engine": "emulated", "warmup_runs": 1},
        }
        if model[0].out_features % 2:
            options = {"backend": "aot_eager"}
        call, losses = torch.compile(model, **options), []
        for inputs, classes in data:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(call(inputs), classes)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses, [p.detach().clone() for p in model.parameters()]

    expected = in_threads(train, at_once=False)
    torch.compiler.reset()
    before = process_wide()
    backend.reset()
    found = in_threads(train)
    regions_ran(100)
    for (losses, weights), (other_losses, other_weights) in zip(expected, found, strict=True):
        assert losses == other_losses
        assert all(map(torch.equal, weights, other_weights))
    assert process_wide() == before


def test_a_step_that_waits_for_a_step_of_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both go on, without graphs where it has to be."""
    from pygraph_train.step import turns

    monkeypatch.setattr(turns._Mine, "patience", 0.5)
    meet = threading.Barrier(THREADS, timeout=60)

    def train(model: nn.Module, data: Batches, make: Any) -> Any:
        def loss(batch: Any) -> Tensor:
            met()
            return nn.functional.cross_entropy(model(batch[0]), batch[1])

        @torch.compiler.disable
        def met() -> None:
            meet.wait()

        step = make(loss, model=model, optimizer=adamw(model))
        return [step(batch).item() for batch in data], step

    expected = in_threads(lambda model, data: train(model, data, PlainStep))
    found = in_threads(
        lambda model, data: train(model, data, lambda *a, **k: GraphedStep(*a, config=CONFIG, **k))
    )
    assert [losses for losses, _ in expected] == [losses for losses, _ in found]
    assert any("another thread of this process" in text_of(step.report()) for _, step in found)
