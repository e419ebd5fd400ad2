"""`Scaling`: what a loop's GradScaler does for one optimizer, and when a graph can hold the update."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from training import Diary, Net, adamw, batches, both, loss_of

from pygraph_train.optimizers.scaling import Scaling


def parameter() -> nn.Parameter:
    return nn.Parameter(torch.tensor([1.0, 2.0]))


def made(*, fused: bool = True, enabled: bool = True, **options: Any) -> tuple[nn.Parameter, Scaling]:
    """One parameter, and the scaling of its optimizer."""
    p = parameter()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=enabled, **options)
    return p, Scaling(scaler, torch.optim.AdamW([p], lr=0.5, fused=fused))


@pytest.mark.parametrize("kind", ["none", "off"])
def test_without_a_scaler_at_work_the_optimizer_steps_and_nothing_else_happens(kind: str) -> None:
    p = parameter()
    optimizer = torch.optim.SGD([p], lr=0.5)
    scaling = Scaling(None if kind == "none" else torch.amp.GradScaler("cpu", enabled=False), optimizer)
    loss = p.sum()
    assert not scaling.on and scaling.scale(loss) is loss
    loss.backward()
    scaling.unscale()
    assert not scaling.unscaled and not scaling.tensors()
    scaling.step()
    assert p.tolist() == [0.5, 1.5]
    scaling.notes()()
    assert scaling.why_update_stays_outside(of(supports=False)) is None


def of(*, supports: bool) -> Any:
    """A preparation whose kernels take what the scaler knows, or do not."""
    return SimpleNamespace(step_supports_scaler=supports)


@pytest.mark.parametrize("other_kernels", [False, True])
@pytest.mark.parametrize("supports", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_a_graph_holds_the_update_where_nothing_reads_overflows_on_the_host(
    fused: bool, supports: bool, other_kernels: bool
) -> None:
    _, scaling = made(fused=fused)
    assert scaling.unscales_itself == fused
    why = scaling.why_update_stays_outside(of(supports=supports), other_kernels=other_kernels)
    if supports and (fused or other_kernels):
        assert why is None
    else:
        assert why is not None and "reads on the host whether gradients overflowed" in why


def test_what_the_optimizer_is_counts_as_the_user_made_it() -> None:
    p = parameter()
    optimizer = torch.optim.SGD([p], lr=0.5)
    scaling = Scaling(torch.amp.GradScaler("cpu"), optimizer)
    optimizer._step_supports_amp_scaling = True  # as a preparation does
    assert not scaling.unscales_itself


@pytest.mark.parametrize("in_kernels", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_gradients_are_unscaled_unless_the_optimizers_kernels_do_that(fused: bool, in_kernels: bool) -> None:
    p, scaling = made(fused=fused)
    scaling.scale(p.sum()).backward()
    scaling.unscale(in_kernels=in_kernels)
    left_to_kernels = fused and in_kernels
    assert scaling.unscaled is not left_to_kernels
    assert p.grad is not None and p.grad.tolist() == ([8.0, 8.0] if left_to_kernels else [1.0, 1.0])


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_whose_gradients_overflow_is_skipped_and_the_scale_goes_down(fused: bool) -> None:
    p, scaling = made(fused=fused)
    scaling.scale(p.sum() * float("inf")).backward()
    scaling.step()
    assert p.tolist() == [1.0, 2.0]
    scale, growth = scaling.tensors()
    assert (scale.item(), growth.item()) == (4.0, 0)


def test_the_scale_is_a_tensor_from_the_first_loss_on() -> None:
    p, scaling = made()
    assert not scaling.tensors()
    scaling.scale(p.sum())
    assert len(scaling.tensors()) == 2


@pytest.mark.parametrize("before", [False, True])
def test_what_is_no_step_leaves_the_scaler_where_it_was(before: bool) -> None:
    p, other = parameter(), parameter()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    optimizers = [torch.optim.SGD([x], lr=0.5) for x in (p, other)]
    scaling = Scaling(scaler, optimizers[0])
    for _ in range(2):  # the scaler refuses to unscale twice in one step
        scaling.scale((p + other).sum()).backward()
        if before:
            for optimizer in optimizers:
                scaler.unscale_(optimizer)
        put_back = scaling.notes()
        if not before:
            for optimizer in optimizers:
                scaler.unscale_(optimizer)
        scaling.step()
        put_back()
        assert scaling.unscaled is before
        if before:
            with pytest.raises(RuntimeError, match="already been called"):
                scaling.unscale()
            scaling.step()


def test_a_step_without_an_optimizer_of_ours_scales_its_loss() -> None:
    p = parameter()
    scaling = Scaling(torch.amp.GradScaler("cpu", init_scale=8.0), None)
    assert scaling.scale(p.sum()).item() == 24.0
    assert not scaling.unscales_itself and not scaling.unscaled
    scaling.notes()()


def _other_numbers(scaler: torch.amp.GradScaler) -> None:
    scaler.set_growth_interval(2)
    scaler.set_growth_factor(4.0)


def _of_a_checkpoint(scaler: torch.amp.GradScaler) -> None:
    scaler.load_state_dict(
        {**scaler.state_dict(), "scale": 64.0, "growth_interval": 2, "backoff_factor": 0.25}
    )


@pytest.mark.parametrize("change", [_other_numbers, _of_a_checkpoint])
@pytest.mark.parametrize(
    "config", [{"plan": "{F} {B} {O}"}, {"forward": "off", "backward": "off", "plan": "F B {O}"}]
)
def test_how_a_scale_grows_is_changed_in_mid_run(config: Any, change: Any) -> None:
    def script(diary: Diary) -> None:
        model, scaler = Net(), torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=5)
        optimizer = adamw(model)
        step = diary.step(loss_of(model), model=model, optimizer=optimizer, scaler=scaler)
        for index, (x, y) in enumerate(batches(40)):
            if index == 20:
                change(scaler)
            diary.write("loss", step((x * torch.inf if index % 11 == 10 else x, y)))
            diary.write("scale", scaler.state_dict())
            diary.write_state(model, optimizer)

    both(script, replays=20, **config)
