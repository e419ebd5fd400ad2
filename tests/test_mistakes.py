"""Mistakes that newcomers make, and the sentences that they read."""

from __future__ import annotations

import copy
import dataclasses
import logging
import pickle
import typing
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from training import CONFIG, Net, adamw, batches, loss_of

import pygraph_train
import pygraph_train.backend
from pygraph_train import GraphedStep, PyGraphConfig
from pygraph_train.config import PyGraphOptions, StepOptions
from pygraph_train.report.announcements import tell_once

pytestmark = pytest.mark.passes_without_graphs("what is wrong is told before anything is replayed")


@pytest.fixture(autouse=True)
def _told_again() -> Iterator[None]:
    tell_once.cache_clear()
    yield
    tell_once.cache_clear()


def test_single_options_have_the_types_of_the_configuration() -> None:
    fields = {field.name: field.type for field in dataclasses.fields(PyGraphConfig)}
    assert typing.get_type_hints(PyGraphOptions) == typing.get_type_hints(PyGraphConfig)
    assert set(PyGraphOptions.__annotations__) == set(fields)
    assert set(StepOptions.__annotations__) == set(fields) - {"optimizer"}


def test_a_graphed_step_takes_single_options() -> None:
    model = Net()
    step = GraphedStep(loss_of(model), model=model, optimizer=adamw(model), engine="emulated", compile=False)
    for batch in batches(20):
        step(batch)
    assert step.report().engine == "emulated"
    with pytest.raises(TypeError, match="no option 'engin'"):
        GraphedStep(loss_of(model), model=model, engin="emulated")  # type: ignore[call-arg]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_step_without_a_device_says_so(caplog: pytest.LogCaptureFixture) -> None:
    model = Net()
    with caplog.at_level(logging.WARNING, "pygraph_train"):
        for _ in range(2):
            GraphedStep(loss_of(model), model=model)
    (record,) = caplog.records
    assert "no CUDA device: training runs as it is" in record.getMessage()


def test_a_disabled_library_says_so(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYGRAPH_DISABLE", "1")
    model = Net()
    with caplog.at_level(logging.WARNING, "pygraph_train"):
        GraphedStep(loss_of(model), model=model, config=CONFIG)
    (record,) = caplog.records
    assert record.getMessage() == "pygraph: PYGRAPH_DISABLE is set: training runs as it is"


def test_graphs_that_were_switched_off_are_no_news(caplog: pytest.LogCaptureFixture) -> None:
    model = Net()
    with caplog.at_level(logging.WARNING, "pygraph_train"):
        GraphedStep(loss_of(model), model=model, engine="off")
    assert not caplog.records


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_the_backend_without_a_device_says_so() -> None:
    model = nn.Linear(4, 3, bias=False)  # no kernel is left to a C++ compiler, which takes seconds
    before = len(pygraph_train.backend.report().regions)
    torch.compile(model, backend="pygraph")(torch.randn(2, 4)).sum().backward()
    rows = pygraph_train.backend.report().regions[before:]
    assert rows and all(row.reason.startswith("no CUDA device") for row in rows), rows


def test_the_callback_of_lightning_in_the_trainer_of_transformers(tmp_path: Any) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("lightning")
    arguments = transformers.TrainingArguments(str(tmp_path), report_to=[], use_cpu=True)
    with pytest.raises(TypeError, match=r"callbacks=\[pygraph_train.PyGraphTrainerCallback\(\)\]"):
        transformers.Trainer(
            model=nn.Linear(4, 3), args=arguments, callbacks=[pygraph_train.PyGraphCallback()]
        )


def test_the_callback_of_transformers_in_the_trainer_of_lightning() -> None:
    pytest.importorskip("transformers")
    pl = pytest.importorskip("lightning.pytorch")
    from lightning.pytorch.demos.boring_classes import BoringModel

    trainer = pl.Trainer(
        accelerator="cpu",
        callbacks=[pygraph_train.PyGraphTrainerCallback()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with pytest.raises(TypeError, match=r"callbacks=\[pygraph_train.PyGraphCallback\(\)\]"):
        trainer.fit(BoringModel())


@pytest.mark.parametrize("kind", ["PyGraphCallback", "PyGraphTrainerCallback"])
def test_callbacks_are_sent_to_other_processes_and_copied(kind: str) -> None:
    pytest.importorskip("lightning")
    pytest.importorskip("transformers")
    callback = getattr(pygraph_train, kind)(engine="emulated", warmup_steps=5)
    for other in (pickle.loads(pickle.dumps(callback)), copy.deepcopy(callback)):
        assert other.config == callback.config
        assert other.report() is not callback.report()
        assert other.report().steps == 0


def test_an_optimizer_that_was_not_prepared_is_told() -> None:
    pytest.importorskip("accelerate")
    from accelerate_training import fresh_state

    with fresh_state():
        accelerator = pygraph_train.Accelerator(cpu=True, plugins=[pygraph_train.PyGraph(engine="emulated")])
        model = accelerator.prepare(Net())
        optimizer = adamw(model)
        for x, y in batches(6):
            accelerator.backward(nn.functional.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
        assert "give the optimizer to accelerator.prepare" in str(accelerator.pygraph.report())
        accelerator.end_training()
