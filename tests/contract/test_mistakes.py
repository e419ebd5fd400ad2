"""Mistakes that newcomers make, and the sentences that they read."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pygraph_train import GraphedStep, PyGraphCallback, PyGraphError, PyGraphTrainerCallback, explain
from pygraph_train.report.announcements import tell_once

from .compare import ENGINE
from .models import Net, adamw, batches, loss_of, sgd


def test_a_backward_of_what_a_step_returned_is_told_with_its_line() -> None:
    model = Net()
    with GraphedStep(loss_of(model), model=model, optimizer=adamw(model), engine=ENGINE) as step:
        with pytest.raises(
            PyGraphError, match=rf"backward\(\) was called at .*{re.escape(Path(__file__).name)}"
        ):
            step(batches(1)[0]).backward()
        model(batches(1)[0][0]).sum().backward()  # the user's own


@pytest.mark.parametrize("make", [adamw, sgd])
@pytest.mark.parametrize("engine", [ENGINE, "off"])
@pytest.mark.quick
@pytest.mark.passes_without_graphs("an update of the user's is told whatever runs")
def test_a_second_update_is_told(make: Any, engine: str) -> None:
    model = Net()
    optimizer = make(model)
    with GraphedStep(loss_of(model), model=model, optimizer=optimizer, engine=engine) as step:
        for batch in batches(6):
            step(batch)
            optimizer.step()
        (note,) = [n for n in step.report().to_dict()["notes"] if "update the parameters twice" in n]
    assert "Remove optimizer.step() from the loop" in note


@pytest.mark.passes_without_graphs("nothing is said whatever runs")
def test_what_a_loop_may_do_between_steps_is_no_news(caplog: pytest.LogCaptureFixture) -> None:
    model = Net()
    optimizer = adamw(model)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    with (
        GraphedStep(loss_of(model), model=model, optimizer=optimizer, engine=ENGINE) as step,
        GraphedStep(loss_of(model), model=model, optimizer=optimizer, engine=ENGINE) as other,
        caplog.at_level(logging.WARNING, "pygraph_train"),
    ):
        for batch in batches(4):
            step(batch)
            schedule.step()
            optimizer.load_state_dict(optimizer.state_dict())
            optimizer.zero_grad()
            other(batch)
    assert not caplog.records


@pytest.mark.parametrize("engine", [ENGINE, "off"])
@pytest.mark.passes_without_graphs("it raises")
def test_a_function_for_the_loss_that_makes_the_whole_step(
    engine: Any, caplog: pytest.LogCaptureFixture
) -> None:
    model = Net()
    optimizer = adamw(model)

    def whole(batch: Any) -> Any:
        loss = loss_of(model)(batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    with caplog.at_level(logging.WARNING, "pygraph_train"), pytest.raises(RuntimeError, match="second time"):
        GraphedStep(whole, model=model, optimizer=optimizer, engine=engine)(batches(1)[0])
    told = caplog.records[-1].getMessage()
    assert "Perhaps the function for the loss makes the backward itself" in told and "manual_optim" in told
    (obstacle,) = explain(whole, batches(1)[0], model=model, optimizer=optimizer).obstacles
    assert "manual_optimization=True" in obstacle.fix


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.passes_without_graphs("a sentence is asked for")
def test_an_optimizer_that_was_not_prepared(*, whole: bool) -> None:
    pytest.importorskip("accelerate")
    from pygraph_train import Accelerator, PyGraph

    accelerator = Accelerator(plugins=[PyGraph(engine=ENGINE, warmup_steps=2, forward="on")])
    model = Net()
    optimizer = adamw(model)
    model = accelerator.prepare(model)

    def step(batch: Any) -> None:
        accelerator.backward(loss_of(model)(batch))
        optimizer.step()
        optimizer.zero_grad()

    made = accelerator.graphed_step(step) if whole else step
    for batch in batches(8):
        made(batch)
    assert "Pass the optimizer to accelerator.prepare" in accelerator.pygraph.report().headline()


@pytest.mark.parametrize("why", ["no CUDA device", "PYGRAPH_DISABLE is set"])
@pytest.mark.quick
def test_why_there_are_no_graphs_is_said_once(
    why: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    tell_once.cache_clear()  # other tests of this process may have told it
    if why == "no CUDA device":
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    else:
        monkeypatch.setenv("PYGRAPH_DISABLE", "1")
    model = Net().cpu()
    with caplog.at_level(logging.WARNING, "pygraph_train"):
        for _ in range(2):
            GraphedStep(loss_of(model), model=model).close()
    (record,) = caplog.records
    assert why in record.getMessage() and "so steps run as you wrote them" in record.getMessage()


def test_the_callback_of_lightning_in_the_trainer_of_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("lightning.pytorch")
    arguments = transformers.TrainingArguments(str(tmp_path), report_to=[], use_cpu=True)
    with pytest.raises(TypeError, match=r"callbacks=\[pygraph_train.PyGraphTrainerCallback\(\)\]"):
        transformers.Trainer(model=nn.Linear(4, 3), args=arguments, callbacks=[PyGraphCallback()])


def test_the_callback_of_transformers_in_the_trainer_of_lightning() -> None:
    pytest.importorskip("transformers")
    pl = pytest.importorskip("lightning.pytorch")
    from lightning.pytorch.demos.boring_classes import BoringModel

    quiet: dict[str, Any] = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
    trainer = pl.Trainer(accelerator="cpu", callbacks=[PyGraphTrainerCallback()], **quiet)
    with pytest.raises(TypeError, match=r"callbacks=\[pygraph_train.PyGraphCallback\(\)\]"):
        trainer.fit(BoringModel())
