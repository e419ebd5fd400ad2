"""Clipping is of the parameters that the model has in each step, whichever it had before."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn
from training import Diary, Net, adamw, batches, both, loss_of

import pygraph_train.optimizers.clipped as clipped
from pygraph_train.optimizers.clipped import ClippedParameters

OFF = {"forward": "off", "backward": "off"}


def _loaded(model: nn.Module) -> None:
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)


def _same_memory(model: Any) -> None:
    model.second.weight = nn.Parameter(model.second.weight.data)


@pytest.fixture(params=["numbers of dicts", "entries of dicts"])
def python(request, monkeypatch):
    if request.param == "entries of dicts":
        monkeypatch.setattr(clipped, "versions_are_known", lambda: False)


@pytest.mark.parametrize("change", [_loaded, _same_memory])
def test_a_graph_of_the_update_clips_the_parameters_that_the_model_has(change, python):
    """The parameters change before the last micro-batch: those that the optimizer holds have gradients of others."""

    def script(diary: Diary) -> None:
        model = Net()
        optimizer = adamw(model)
        step = diary.step(loss_of(model), model=model, optimizer=optimizer, max_grad_norm=0.05)
        for index, batch in enumerate(batches(90)):
            if index == 71:
                change(model)
            diary.write("loss", (step if index % 3 == 2 else step.accumulate)(batch))
            diary.write_state(model, optimizer)

    report = both(script, **OFF, replays=15)
    assert report.optimizer_steps_replayed >= 15, str(report)


def test_a_graph_of_the_update_notices_parameters_that_the_step_itself_replaces():
    def script(diary: Diary) -> None:
        model, made = Net(), []
        optimizer = adamw(model)

        def step_fn(batch: Any) -> Any:
            made.append(batch)
            loss = loss_of(model)(batch)
            if len(made) in (41, 42):
                _same_memory(model)
            return loss

        step = diary.step(step_fn, model=model, optimizer=optimizer, max_grad_norm=0.05)
        for batch in batches(60):
            diary.write("loss", step(batch))
            diary.write_state(model, optimizer)

    report = both(script, **OFF, replays=20)
    assert report.optimizer_steps_replayed >= 20, str(report)


@pytest.mark.parametrize("fuse", ["auto", "off"])
def test_a_graph_of_the_step_does_not_clip_what_has_left_the_model(fuse, python):
    """The step goes on to read the layer, and the optimizer to hold it."""

    def script(diary: Diary) -> None:
        model = Net()
        head = nn.Linear(3, 3)
        model.heads = nn.ModuleList([head])
        optimizer = adamw(model)

        def step_fn(batch: Any) -> Any:
            return nn.functional.cross_entropy(head(model(batch[0])), batch[1])

        step = diary.step(step_fn, model=model, optimizer=optimizer, max_grad_norm=0.05)
        for index, batch in enumerate(batches(60)):
            if index == 30:
                del model.heads[0]
            diary.write("loss", step(batch))
            diary.write_state(model, optimizer)
            diary.write("head", [p.detach().clone() for p in head.parameters()])

    report = both(script, fuse=fuse, replays=40)
    graphs = report.steps_replayed if fuse == "auto" else report.optimizer_steps_replayed
    assert graphs >= 45, str(report)


def test_other_changes_of_modules_are_none_of_the_parameters(python):
    model = Net()
    parameters = ClippedParameters(model, adamw(model), fixed=False)
    model.note = 1
    model.unused = nn.ReLU()
    model.first.weight.data = model.first.weight.data.clone()
    parameters.look()
    assert parameters.changes == 0 and not parameters.others()
    model.late = nn.Linear(2, 2)
    parameters.look()
    parameters.look()
    assert parameters.changes == 1 and parameters.others()
