"""Batches with tensors that require a gradient, which they get from a replay as from backward."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from replays import text_of
from torch import Tensor, nn
from training import CONFIG, Diary, both

from pygraph_train import GraphedStep, PyGraphConfig

Batch = dict[str, Tensor]
Between = Callable[[int, Batch, Diary], None]
STEPS = 40


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 1))

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        found: Tensor = self.layers(torch.cat([x, t], 1))
        return found


def slope(of: Tensor, by: Tensor) -> Tensor:
    return torch.autograd.grad(of.sum(), by, create_graph=True)[0]


def burgers(model: nn.Module, batch: Batch) -> Tensor:
    x, t = batch["x"], batch["t"]
    u = model(x, t)
    u_x = slope(u, x)
    return (slope(u, t) + u * u_x - 0.01 * slope(u_x, x)).square().mean()


def plainly(model: nn.Module, batch: Batch) -> Tensor:
    return model(batch["x"], batch["t"]).square().mean()


def batches(count: int, sizes: Sequence[int] = (6,)) -> list[Batch]:
    generator, of = torch.Generator().manual_seed(2), itertools.cycle(sizes)
    rows = [next(of) for _ in range(count)]
    made = [[torch.rand(n, 1, generator=generator).requires_grad_() for _ in range(2)] for n in rows]
    return [dict(zip(("x", "t"), points, strict=True)) for points in made]


def script(
    loss_of: Callable[[nn.Module, Any], Any] = burgers,
    *,
    made: int = STEPS,
    between: Between = lambda index, batch, diary: None,
    make: Callable[[int], Sequence[Batch]] = batches,
    trains: Callable[[Sequence[Batch]], list[Tensor]] = lambda found: [],
) -> Callable[[Diary], None]:
    """Trains on so many batches in turn.

    Args:
        between: is done before each step.
        trains: what the optimizer holds beside the parameters.
    """

    def run(diary: Diary) -> None:
        model, found = Net(), make(made)
        optimizer = torch.optim.AdamW([*model.parameters(), *trains(found)], lr=2.0**-6, fused=True)
        step = diary.step(lambda batch: loss_of(model, batch), model=model, optimizer=optimizer)
        seen: list[Tensor | None] = []
        for index in range(STEPS):
            batch = found[index % made]
            between(index, batch, diary)
            diary.write("result", step(batch))
            leaves = [tensor for tensor in batch.values() if tensor.is_leaf]
            diary.write(
                "flags", [(t.requires_grad, t.grad is None or t.grad.is_contiguous()) for t in leaves]
            )
            diary.write("gradients", [tensor.grad for tensor in leaves])
            seen += [tensor.grad for tensor in leaves]
            diary.write_state(model, optimizer)
        diary.write("all of them", seen)  # nobody has written to those of earlier steps
        same = len({id(gradient) for gradient in seen if gradient is not None})
        diary.write("how many tensors", same)

    return run


@pytest.mark.parametrize("loss_of", [burgers, plainly])
@pytest.mark.parametrize("verify", ["sample", "always", "off"])
def test_new_tensors_get_their_gradients(loss_of: Any, verify: str) -> None:
    report = both(script(loss_of), replays=30, plan="{F B O}", verify=verify)
    assert not report.fallbacks


@pytest.mark.parametrize("verify", ["sample", "always"])
def test_tensors_that_come_again_add_up_their_gradients(verify: str) -> None:
    both(script(made=4), replays=30, plan="{F B O}", verify=verify)


def test_the_loop_empties_gradients_of_the_batch() -> None:
    def between(index: int, batch: Batch, diary: Diary) -> None:
        if index % 3 == 0:
            batch["x"].grad = None
        elif batch["x"].grad is not None:
            batch["x"].grad.zero_()

    both(script(made=4, between=between), replays=30, plan="{F B O}")


def test_batches_of_several_sizes() -> None:
    both(script(make=lambda count: batches(count, (6, 6, 5, 6, 9))), replays=15)


def test_a_later_micro_batch_gives_its_batch_its_gradient() -> None:
    def run(diary: Diary) -> None:
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
        step = diary.step(lambda batch: burgers(model, batch), model=model, optimizer=optimizer)
        for index, batch in enumerate(batches(STEPS)):
            diary.write("loss", (step if index % 2 else step.accumulate)(batch))
            diary.write("gradients", [tensor.grad for tensor in batch.values()])
            diary.write_state(model, optimizer)

    both(run, replays=24, plan="{F B O}")


def returned(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    return {"loss": plainly(model, batch), "x": batch["x"], "part": batch["x"][1:], "twice": batch["x"] * 2}


def test_results_that_are_the_batch_are_detached() -> None:
    def with_flags(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        return returned(model, batch)

    def run(diary: Diary) -> None:
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
        step = diary.step(lambda batch: with_flags(model, batch), model=model, optimizer=optimizer)
        for batch in batches(STEPS):
            result = step(batch)
            if not diary.graphed:
                result = {name: value.detach() for name, value in result.items()}
            diary.write("result", result)
            diary.write("flags", [value.requires_grad for value in result.values()])
            diary.write("gradient", batch["x"].grad)

    both(run, replays=30, plan="{F B O}")


def test_one_tensor_comes_twice() -> None:
    def make(count: int) -> list[Batch]:
        return [{"x": batch["x"], "t": batch["x"]} for batch in batches(count)]

    both(script(made=5, make=make), replays=30, plan="{F B O}")


def test_a_tensor_that_the_step_does_not_differentiate_gets_nothing() -> None:
    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        return model(batch["x"], batch["t"].detach()).square().mean()

    both(script(loss_of, made=4), replays=30, plan="{F B O}")


def test_a_hook_in_mid_run_is_called() -> None:
    def between(index: int, batch: Batch, diary: Diary) -> None:
        if index in (20, 24):
            batch["x"].register_hook(lambda gradient: diary.write("hook", gradient))
        if index == 22:
            batch["t"].register_post_accumulate_grad_hook(lambda tensor: diary.write("later", tensor.grad))

    both(script(between=between), replays=27, plan="{F B O}")


def test_a_gradient_with_a_history_in_mid_run() -> None:
    def between(index: int, batch: Batch, diary: Diary) -> None:
        if index == 20:
            batch["x"].grad = torch.ones(6, 1, requires_grad=True) * 2

    both(script(between=between), replays=28, plan="{F B O}")


def computed(count: int) -> list[Batch]:
    return [{"x": batch["x"] * 1, "t": batch["t"]} for batch in batches(count)]


def hooked(count: int) -> list[Batch]:
    made = batches(count)
    for batch in made:
        batch["x"].register_hook(lambda gradient: gradient * 2)
    return made


def expanded(count: int) -> list[Batch]:
    return [b | {"t": b["t"].detach()[:1].expand(6, 1).requires_grad_()} for b in batches(count)]


@pytest.mark.parametrize("make", [computed, hooked, expanded])
def test_other_tensors_stay_with_python(make: Any) -> None:
    report = both(script(make=make), replays=1, optimizer="auto")
    assert report.steps_replayed == 0 and "requires a gradient, and a graph" in text_of(report)


def test_a_tensor_that_was_computed_comes_in_mid_run() -> None:
    def make(count: int) -> list[Batch]:
        return [
            c if k == 20 else b for k, (b, c) in enumerate(zip(batches(count), computed(count), strict=True))
        ]

    both(script(make=make), replays=28, plan="{F B O}")


def test_the_optimizer_holds_the_batch() -> None:
    both(script(made=1, trains=lambda found: list(found[0].values())), replays=1)


def test_the_optimizer_holds_one_batch_of_several() -> None:
    """Its gradient is emptied before the step, and read by the update."""
    both(script(made=4, trains=lambda found: [found[2]["x"]]), replays=1)


def test_the_model_has_the_batch_as_well() -> None:
    def run(diary: Diary) -> None:
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
        (batch,) = batches(1)
        model.points = batch["x"]  # type: ignore[assignment]

        def loss_of(batch: Batch) -> Tensor:
            return plainly(model, batch) + model.points.square().mean()  # type: ignore[operator]

        step = diary.step(loss_of, model=model, optimizer=optimizer)
        for _ in range(STEPS):
            diary.write("loss", step(batch))
            diary.write("gradients", [tensor.grad for tensor in batch.values()])
            diary.write_state(model, optimizer)

    assert both(run, replays=1).steps_replayed == 0


def test_gradients_of_the_batch_stay_scaled() -> None:
    def run(diary: Diary) -> None:
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=2.0**-6, fused=True)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=9)
        step = diary.step(lambda b: burgers(model, b), model=model, optimizer=optimizer, scaler=scaler)
        for index, batch in enumerate(batches(STEPS)):
            if index == 25:
                with torch.no_grad():
                    batch["x"][0] = torch.inf
            diary.write("loss", step(batch))
            diary.write("gradients", [tensor.grad for tensor in batch.values()])
            diary.write_state(model, optimizer)

    both(run, replays=25)


@pytest.mark.slow
@pytest.mark.parametrize("loss_of", [burgers, plainly])
def test_inductors_kernels_compute_them_as_well(loss_of: Any) -> None:
    def trained(config: PyGraphConfig) -> list[Tensor]:
        torch.manual_seed(0)
        model, found = Net().eval(), batches(4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
        with GraphedStep(
            lambda b: loss_of(model, b), model=model, optimizer=optimizer, config=config
        ) as step:
            for index in range(STEPS):
                step(found[index % 4])
            assert config.engine == "off" or step.report().steps_replayed >= 20, str(step.report())
        gradients = [tensor.grad for batch in found for tensor in batch.values()]
        return [gradient for gradient in gradients if gradient is not None]

    expected = trained(PyGraphConfig(engine="off"))
    assert len(expected) == 8
    found = trained(dataclasses.replace(CONFIG, compile=True))
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)
