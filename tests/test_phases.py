"""Every plan over forward, backward and optimizer trains as plain PyTorch does, whatever was switched when."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from faults import numbers_are_not_found
from replays import text_of
from torch import Tensor, nn
from training import Diary, Net, adam, adamw, batches, both, loss_of, sgd

from pygraph_train import GraphedStep, PyGraphConfig, StepReport
from pygraph_train.graphs.emulated import EmulatedEngine, EmulatedGraph

OFF = {"forward": "off", "backward": "off"}
OPTIMIZERS = pytest.mark.parametrize("make_optimizer", [adamw, sgd])


def training(make_optimizer: Any = adamw, *, steps: int = 60, accumulate: int = 1, **options: Any) -> Any:
    def script(diary: Diary) -> None:
        model = Net()
        optimizer = make_optimizer(model)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=40)
        step = diary.step(loss_of(model), model=model, optimizer=optimizer, **options)
        for index, batch in enumerate(batches(steps)):
            last = index % accumulate == accumulate - 1
            diary.write("loss", (step if last else step.accumulate)(batch))
            diary.write_state(model, optimizer)
            if last:
                scheduler.step()

    return script


# -- the optimizer as a graph of its own -----------------------------------------------------------------


def test_parameters_that_move_are_not_written_at_their_old_address():
    def script(diary: Diary) -> None:
        model = Net()
        optimizer = adamw(model)
        step = diary.step(loss_of(model), model=model, optimizer=optimizer)
        for index, batch in enumerate(batches(40)):
            if index == 20:
                for p in model.parameters():
                    p.data = p.data.clone()
            diary.write("loss", step(batch))
            diary.write_state(model, optimizer)

    report = both(script, **OFF, replays=25)
    assert report.running_plan == "F B {O}" and report.optimizer_steps_replayed >= 25, str(report)


@OPTIMIZERS
def test_parameters_that_change_their_strides_at_the_same_address(make_optimizer):
    def script(diary: Diary) -> None:
        model = Net()
        square = model.second = nn.Linear(8, 8)
        optimizer = make_optimizer(model)
        step = diary.step(loss_of(model), model=model, optimizer=optimizer)
        for index, batch in enumerate(batches(60)):
            if index in (20, 40):
                square.weight.data = square.weight.data.t()
            if index == 30:
                square.weight.grad = None
            diary.write("loss", step(batch))
            diary.write_state(model, optimizer)

    report = both(script, **OFF, replays=35)
    assert report.optimizer_steps_replayed >= 35, str(report)


def test_the_report_shows_what_runs_after_the_optimizer_has_left_the_graph():
    def script(diary: Diary) -> None:
        model = Net()
        optimizer = adamw(model)
        step = diary.step(loss_of(model), model=model, optimizer=optimizer)
        for index, batch in enumerate(batches(60)):
            if index == 30:
                optimizer.register_step_pre_hook(lambda *args: diary.write("hook", True))
            diary.write("loss", step(batch))

    report = both(script, replays=40)
    assert report.running_plan == "{F} {B} O" and report.steps_replayed >= 40, str(report)
    assert "plan {F} {B} O" in text_of(report) and report.running_plan == "{F} {B} O", str(report)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, OFF], ids=str)
@OPTIMIZERS
def test_state_cleared_at_any_step(make_optimizer, options):
    """A capture right after it would hold the making of new state, which never happens outside of a replay."""

    def script(diary: Diary) -> None:
        for cleared in range(1, 16):
            model = Net()
            optimizer = make_optimizer(model)
            step = diary.step(loss_of(model), model=model, optimizer=optimizer)
            for index, batch in enumerate(batches(24)):
                if index == cleared:
                    optimizer.state.clear()
                diary.write("loss", step(batch))
            diary.write_state(model, optimizer)
            step.close()

    report = both(script, **options, replays=15 * 5)
    assert not any("Please report" in row.fix for row in report.fallbacks), str(report)


def test_state_cleared_again_and_again_ends_the_captures():
    def script(diary: Diary) -> None:
        model = Net()
        optimizer = adamw(model)
        step = diary.step(loss_of(model), model=model, optimizer=optimizer)
        for index, batch in enumerate(batches(100)):
            if index % 6 == 0:
                optimizer.state.clear()
            diary.write("loss", step(batch))
            diary.write_state(model, optimizer)

    both(script, replays=40)


@OPTIMIZERS
@pytest.mark.parametrize("clip", [None, 0.05])
def test_the_optimizer_alone(make_optimizer, clip):
    report = both(training(make_optimizer, max_grad_norm=clip), **OFF, replays=50)
    assert report.running_plan == "F B {O}", str(report)
    assert report.optimizer_steps_replayed >= 50 and report.steps_replayed == 0
    assert [c.plan for c in report.captures] == ["{O}"]
    assert "forward='off' is set" in text_of(report)


@OPTIMIZERS
@pytest.mark.parametrize("accumulate", [1, 3])
def test_the_optimizer_alone_under_accumulation_and_a_read_on_the_host(make_optimizer, accumulate):
    """The forward cannot be graphed as a whole; its regions and the optimizer can."""

    def script(diary: Diary) -> None:
        model = Net()
        optimizer = make_optimizer(model)

        def step_fn(batch: Any) -> Tensor:
            loss = loss_of(model)(batch)
            print(loss.item(), file=io.StringIO())
            return loss

        step = diary.step(step_fn, model=model, optimizer=optimizer, max_grad_norm=0.1)
        for index, batch in enumerate(batches(60)):
            (step if index % accumulate == accumulate - 1 else step.accumulate)(batch)
            diary.write_state(model, optimizer)

    both(script, replays=40)


def test_everything_off_is_obeyed():
    report = both(training(), **OFF, optimizer="off", refused="forward='off' is set")
    assert report.steps_replayed == report.optimizer_steps_replayed == 0
    assert not report.captures and report.running_plan == "F B O"


def test_the_optimizer_alone_that_cannot_be_captured_runs_as_it_is():
    report = both(training(adam), **OFF, never="Adam's default kernels read the step count on the host")
    assert report.optimizer_steps_replayed == 0 and not report.captures


def test_several_parameter_groups_with_rates_of_their_own():
    def groups(model: Net) -> torch.optim.Optimizer:
        return torch.optim.AdamW(
            [
                {"params": [*model.second.parameters(), *model.norm.parameters()]},
                {"params": model.first.parameters(), "lr": 1e-3},
            ],
            lr=1e-2,
            fused=True,
        )

    report = both(training(groups, max_grad_norm=0.05), **OFF, replays=50)
    assert report.optimizer_steps_replayed >= 50


@pytest.mark.parametrize("clip", [None, 0.05])
def test_the_scaler_skips_steps_in_the_optimizers_graph(clip):
    def script(diary: Diary) -> None:
        model = Net()
        optimizer = adamw(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=3)

        def step_fn(batch: Any, factor: Tensor) -> Tensor:
            return loss_of(model)(batch) * factor

        step = diary.step(step_fn, model=model, optimizer=optimizer, scaler=scaler, max_grad_norm=clip)
        for index, batch in enumerate(batches(50)):
            step(batch, torch.tensor(float("inf") if index % 7 == 5 else 1.0))
            diary.write_state(model, optimizer)
            diary.write("scale", scaler.get_scale())

    report = both(script, **OFF, replays=40)
    assert report.optimizer_steps_replayed >= 40, str(report)


@pytest.mark.parametrize(("rewrites", "captures"), [(False, 4), (True, 3)])
def test_hyperparameters_loaded_state_and_new_groups_are_noticed(rewrites, captures, monkeypatch):
    if not rewrites:
        numbers_are_not_found(monkeypatch)

    def script(diary: Diary) -> None:
        model, late = Net(), nn.Linear(6, 3)
        optimizer = adamw(model)
        step = diary.step(
            lambda b: loss_of(model)(b) + late(b[0]).square().mean(), model=model, optimizer=optimizer
        )
        saved = None
        for index, batch in enumerate(batches(120)):
            if index == 30:
                saved = {"state": optimizer.state_dict()}
                optimizer.param_groups[0]["weight_decay"] = 0.5
            if index == 60:
                optimizer.load_state_dict(saved["state"])
            if index == 90:
                optimizer.add_param_group({"params": late.parameters()})
            step(batch)
            diary.write_state(model, optimizer)

    report = both(script, **OFF, replays=90)
    assert report.optimizer_steps_replayed >= 90
    assert len(report.captures) == captures, str(report)


def test_a_hyperparameter_that_changes_on_every_step_ends_it(monkeypatch):
    numbers_are_not_found(monkeypatch)

    def script(diary: Diary) -> None:
        model = Net()
        optimizer = adamw(model)
        step = diary.step(loss_of(model), model=model, optimizer=optimizer)
        for index, batch in enumerate(batches(40)):
            optimizer.param_groups[0]["weight_decay"] = 0.01 * index
            step(batch)
            diary.write_state(model, optimizer)

    report = both(script, **OFF, refused="changes again and again")
    assert len(report.captures) <= 5


def test_a_step_hook_registered_in_mid_run_runs():
    calls: list[list[int]] = []

    def script(diary: Diary) -> None:
        calls.append([])
        mine = calls[-1]
        model = Net()
        optimizer = adamw(model)
        step = diary.step(loss_of(model), model=model, optimizer=optimizer)
        for index, batch in enumerate(batches(50)):
            if index == 25:
                optimizer.register_step_post_hook(lambda *_: mine.append(1))
            step(batch)
            diary.write_state(model, optimizer)

    report = both(script, **OFF, replays=14)
    assert len(calls[0]) == len(calls[1]) == 25
    assert any("hook" in f.reason for f in report.fallbacks)


def test_layers_without_gradients_now_and_then():
    def script(diary: Diary) -> None:
        model = Net()
        optimizer = adamw(model)
        step = diary.step(loss_of(model), model=model, optimizer=optimizer)
        for index, batch in enumerate(batches(80)):
            if index in (30, 50):
                model.first.requires_grad_(index == 50)
            step(batch)
            diary.write_state(model, optimizer)

    assert both(script, **OFF, replays=50).optimizer_steps_replayed >= 50


def test_a_failed_capture_of_the_optimizer_costs_no_step(monkeypatch):
    capture = EmulatedEngine.capture

    def failing(self: EmulatedEngine, fn: Any, **options: Any) -> Any:
        def raising() -> None:
            fn()
            raise RuntimeError("boom")

        return capture(self, raising, **options)

    monkeypatch.setattr(EmulatedEngine, "capture", failing)
    both(training(max_grad_norm=0.1), **OFF, refused="boom")


@pytest.mark.parametrize("verify", ["first", "always"])
def test_a_replay_of_the_optimizer_that_differs_is_undone(verify, monkeypatch, caplog):
    replay = EmulatedGraph.replay

    def wrong(self: EmulatedGraph) -> None:
        replay(self)
        self._operations[-1].run()  # the fused step a second time

    monkeypatch.setattr(EmulatedGraph, "replay", wrong)
    both(training(), **OFF, verify=verify, refused="first replay of {O}")
    assert "first replay of {O}" in caplog.text


@pytest.mark.parametrize("verify", ["off", "always"])
def test_other_verifications_of_the_optimizer(verify):
    report = both(training(max_grad_norm=0.1), **OFF, verify=verify, replays=50)
    assert [c.plan for c in report.captures] == ["{O}"]
    assert report.optimizer_steps_replayed >= 50, str(report)


def test_gradients_read_and_changed_between_steps():
    def script(diary: Diary) -> None:
        model = Net()
        optimizer = adamw(model)
        step = diary.step(loss_of(model), model=model, optimizer=optimizer)
        for index, batch in enumerate(batches(60)):
            if index % 5 == 4:
                step.accumulate(batch)
                model.second.weight.grad = model.second.weight.grad * 0.5
                model.first.weight.grad.mul_(2)
            step(batch)
            diary.write_state(model, optimizer)

    report = both(script, **OFF, replays=45)
    assert report.optimizer_steps_replayed >= 45


# -- switching -------------------------------------------------------------------------------------------


# -- which plans are legal -------------------------------------------------------------------------------


def test_the_report_of_a_step_object_that_was_never_called():
    model = Net()
    step = GraphedStep(
        loss_of(model), model=model, optimizer=adamw(model), config=PyGraphConfig(engine="emulated")
    )
    report: StepReport = step.report()
    assert report.steps == 0 and str(report)


@pytest.mark.parametrize("switch", ["forward", "backward"])
def test_what_was_asked_for_is_no_failure(switch):
    assert both(training(), on_failure="raise", **{switch: "off"}, replays=40).steps == 60
