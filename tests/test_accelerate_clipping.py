"""`accelerator.clip_grad_norm_` in a graphed step clips what the step hands to it, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("accelerate")

from accelerate_training import Script, both, fresh, loss_of, setup  # noqa: F401

STEPS = 60
CHANGED_AT = 30


def replace_module(model: Any, optimizer: Any) -> None:
    model.first = nn.Linear(6, 8)


def swap_parameter(model: Any, optimizer: Any) -> None:
    """`swap_tensors` refuses tensors that have weak references."""
    torch.utils.swap_tensors(model.second.bias, nn.Parameter(torch.full((3,), 0.1)))


def replace_parameter(model: Any, optimizer: Any) -> None:
    model.second.bias = nn.Parameter(torch.full((3,), 0.1))


def add_module(model: Any, optimizer: Any) -> None:
    model.second = nn.Sequential(model.second, nn.Linear(3, 3))


def replace_and_optimize(model: Any, optimizer: Any) -> None:
    model.first = nn.Linear(6, 8)
    optimizer.add_param_group({"params": list(model.first.parameters())})


CHANGES = [replace_module, swap_parameter, replace_parameter, add_module, replace_and_optimize]


def train(
    script: Script,
    change: Callable[[Any, Any], None],
    clip: Callable[[Any, Any, Any], Any],
    **options: Any,
) -> None:
    """Steps that clip, and a change of the model in the middle of them."""
    accelerator = script.accelerator
    model, optimizer, loader, _ = setup(script, count=8 * STEPS, **options)

    @script.graphed
    def step(batch: dict[str, Tensor]) -> dict[str, Tensor]:
        with accelerator.accumulate(model):
            loss = loss_of(model, batch)
            accelerator.backward(loss)
            result = {"loss": loss}
            if accelerator.sync_gradients and (norm := clip(accelerator, model, optimizer)) is not None:
                result["norm"] = norm
            optimizer.step()
            optimizer.zero_grad()
        return result

    for index, batch in enumerate(loader):
        if index == CHANGED_AT:
            change(model, optimizer)
        script.write("result", step(batch))
        script.write("parameters", dict(model.named_parameters()))
        script.write("gradients", {name: p.grad for name, p in model.named_parameters()})
    script.write_state(model, optimizer)


def norm_of_model(accelerator: Any, model: Any, optimizer: Any) -> Tensor:
    return accelerator.clip_grad_norm_(model.parameters(), 0.1)


def norm_of_optimizer(accelerator: Any, model: Any, optimizer: Any) -> Tensor:
    held = [p for group in optimizer.param_groups for p in group["params"]]
    return accelerator.clip_grad_norm_(held, 0.1)


def norm_by_name(accelerator: Any, model: Any, optimizer: Any) -> Tensor:
    return accelerator.clip_grad_norm_(norm_type=1.0, max_norm=0.2, parameters=model.parameters())


def trained_only(accelerator: Any, model: Any, optimizer: Any) -> Tensor:
    return accelerator.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 0.1)


def values(accelerator: Any, model: Any, optimizer: Any) -> None:
    accelerator.clip_grad_value_(model.parameters(), 0.005)


CLIPS = [norm_of_model, norm_of_optimizer, norm_by_name, trained_only, values]


def replays(report: Any) -> int:
    """Of the step as a whole, and of its forward and backward."""
    ((_, step),) = report.whole_steps.items()
    return step.steps_replayed


@pytest.mark.slow_after(3)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("clip", CLIPS)
def test_what_is_clipped_after_a_change(
    change: Callable[[Any, Any], None], clip: Callable[[Any, Any, Any], Any]
) -> None:
    report = both(lambda script: train(script, change, clip), replays=40)
    assert replays(report) >= 40, str(report)  # of 60: after the change, too


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_clipped_after_a_change_between_micro_batches(change: Callable[[Any, Any], None]) -> None:
    report = both(
        lambda script: train(script, change, norm_of_model), gradient_accumulation_steps=2, replays=25
    )
    assert replays(report) >= 30, str(report)


def test_the_norm_is_added_up_in_the_order_of_the_call() -> None:
    def script(script: Script) -> None:
        accelerator = script.accelerator
        torch.manual_seed(3)
        model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(9)), nn.Linear(6, 3))
        groups = [[p for p in model.parameters() if p.dim() == n] for n in (2, 1)]
        optimizer = torch.optim.AdamW([{"params": group} for group in groups], lr=1e-2, fused=True)
        model, optimizer = accelerator.prepare(model, optimizer)

        @script.graphed
        def step(x: Tensor) -> Tensor:
            loss = model(x).square().mean()
            accelerator.backward(loss)
            norm = accelerator.clip_grad_norm_(model.parameters(), 0.01)
            optimizer.step()
            optimizer.zero_grad()
            return norm

        for _ in range(30):
            script.write("norm", step(torch.randn(5, 6)))
        script.write_state(model, optimizer)

    assert replays(both(script, replays=20)) >= 20
