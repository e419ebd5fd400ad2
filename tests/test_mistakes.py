"""Mistakes that newcomers make, and the sentences that they read."""

from __future__ import annotations

import copy
import dataclasses
import gc
import logging
import pickle
import subprocess
import sys
import typing
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from replays import text_of
from torch import nn
from training import CONFIG, Net, adam, adamw, batches, line_of, loss_of, sgd

import pygraph_train
import pygraph_train.backend
from pygraph_train import GraphedStep, PyGraphConfig, PyGraphError
from pygraph_train.config import PyGraphOptions, StepOptions
from pygraph_train.report.announcements import tell_once

pytestmark = pytest.mark.passes_without_graphs("what is wrong is told before anything is replayed")


def fstring(model: nn.Module, x: torch.Tensor) -> Any:
    loss = model(x).square().mean()
    f"loss {loss:.3f}"  # here
    return loss


def formatted(model: nn.Module, x: torch.Tensor) -> Any:
    loss = model(x).square().mean()
    "{:.3f}".format(loss)  # noqa: UP032  # here
    return loss


def returned(model: nn.Module, x: torch.Tensor) -> Any:
    loss = model(x).square().mean()
    return {"loss": loss, "text": f"{loss:.3f}"}  # here


def by_format(model: nn.Module, x: torch.Tensor) -> Any:
    loss = model(x).square().mean()
    format(loss, ".3f")  # here
    return loss


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
    assert "no CUDA device: training runs without graphs" in record.getMessage()


def test_a_disabled_library_says_so(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYGRAPH_DISABLE", "1")
    model = Net()
    with caplog.at_level(logging.WARNING, "pygraph_train"):
        GraphedStep(loss_of(model), model=model, config=CONFIG)
    (record,) = caplog.records
    assert record.getMessage() == "pygraph: PYGRAPH_DISABLE is set: training runs without graphs"


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


@contextmanager
def emulated_accelerator() -> Iterator[Any]:
    """An Accelerator on the CPU whose plugin has emulated graphs."""
    pytest.importorskip("accelerate")
    from accelerate_training import fresh_state

    with fresh_state():
        yield pygraph_train.Accelerator(cpu=True, plugins=[pygraph_train.PyGraph(engine="emulated")])


def test_an_optimizer_that_was_not_prepared_is_told() -> None:
    with emulated_accelerator() as accelerator:
        model = accelerator.prepare(Net())
        optimizer = adamw(model)
        for x, y in batches(6):
            accelerator.backward(nn.functional.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
        assert "Pass the optimizer to accelerator.prepare" in text_of(accelerator.pygraph.report())
        accelerator.end_training()


def test_backward_after_a_graphed_step_is_told() -> None:
    model = Net()
    step = GraphedStep(loss_of(model), model=model, optimizer=adamw(model), config=CONFIG)
    stock = torch.Tensor.backward
    (first, second) = batches(2)
    loss = step(first)
    with pytest.raises(
        PyGraphError, match=r"loss.backward\(\) was called at .*test_mistakes.py:\d+ on the result"
    ):
        loss.backward()
    other = model(second[0]).square().mean()
    other.backward()  # of the user's own
    step(second)
    assert torch.Tensor.backward is stock


@pytest.mark.parametrize("end", ["close", "forget"])
def test_backward_is_torchs_own_again_when_there_is_no_second_step(end: str) -> None:
    model, stock = Net(), torch.Tensor.backward
    steps = [
        GraphedStep(loss_of(model), model=model, optimizer=adamw(model), config=CONFIG) for _ in range(2)
    ]
    for step in steps:
        step(batches(1)[0])
    assert torch.Tensor.backward is not stock
    if end == "close":
        for step in steps:
            step.close()
    else:
        del step, steps
        gc.collect()
    assert torch.Tensor.backward is stock


@pytest.mark.parametrize("make", [adamw, sgd, adam])
@pytest.mark.parametrize("config", [CONFIG, PyGraphConfig(engine="off")], ids=["emulated", "off"])
@pytest.mark.quick
def test_a_second_update_of_the_caller_is_told(
    make: Any, config: PyGraphConfig, caplog: pytest.LogCaptureFixture
) -> None:
    model = Net()
    optimizer = make(model)
    step = GraphedStep(loss_of(model), model=model, optimizer=optimizer, config=config)
    with caplog.at_level(logging.WARNING, "pygraph_train"):
        for batch in batches(6):
            step(batch)
            optimizer.step()
    (text,) = [r.getMessage() for r in caplog.records if "update the parameters twice" in r.getMessage()]
    assert "Remove optimizer.step() from the loop" in text
    assert text.removeprefix("pygraph: ") in step.report().notes


def test_steps_that_share_an_optimizer_are_no_second_updates(caplog: pytest.LogCaptureFixture) -> None:
    model = Net()
    optimizer = adamw(model)
    first, second = (
        GraphedStep(loss_of(model), model=model, optimizer=optimizer, config=CONFIG) for _ in range(2)
    )
    with caplog.at_level(logging.WARNING, "pygraph_train"):
        for batch in batches(4):
            first(batch)
            second(batch)
    assert not caplog.records and not first.report().notes and not second.report().notes


def test_what_a_loop_may_do_after_a_step_is_no_news(caplog: pytest.LogCaptureFixture) -> None:
    model, averaged = Net(), Net()
    optimizer = adamw(model)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    step = GraphedStep(loss_of(model), model=model, optimizer=optimizer, config=CONFIG)
    with caplog.at_level(logging.WARNING, "pygraph_train"):
        for batch in batches(4):
            step(batch)
            scheduler.step()
            optimizer.load_state_dict(optimizer.state_dict())
            with torch.no_grad():
                for mine, theirs in zip(averaged.parameters(), model.parameters(), strict=True):
                    mine.lerp_(theirs, 0.1)
                    theirs.clamp_(-1, 1)
            optimizer.zero_grad()
    assert not caplog.records
    assert step.report().notes == []


def test_an_optimizer_that_a_graphed_step_of_accelerate_calls_unprepared_is_told() -> None:
    with emulated_accelerator() as accelerator:
        model = accelerator.prepare(Net())
        optimizer = adamw(model)

        @accelerator.graphed_step
        def train_step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            loss = nn.functional.cross_entropy(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            return loss

        for batch in batches(3):
            train_step(*batch)
        (row,) = train_step.report().fallbacks
        assert "the step calls the optimizer AdamW, which this Accelerator did not prepare" in row.reason
        assert "accelerator.prepare(model, optimizer)" in row.fix and f"{__file__}:" in str(row.where)
        accelerator.end_training()


def test_a_graphed_step_of_accelerate_without_prepare_says_what_to_prepare() -> None:
    with emulated_accelerator() as accelerator:
        model = Net()
        optimizer = adamw(model)

        @accelerator.graphed_step
        def train_step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            loss = nn.functional.cross_entropy(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            return loss

        train_step(*batches(1)[0])
        (row,) = train_step.report().fallbacks
        assert "did not prepare" in row.reason and "graph_break" not in str(row)
        assert "model, optimizer = accelerator.prepare(model, optimizer)" in row.fix
        accelerator.end_training()


def test_the_plugin_in_the_accelerator_of_accelerate_is_told(caplog: pytest.LogCaptureFixture) -> None:
    accelerate = pytest.importorskip("accelerate")
    from accelerate_training import fresh_state

    with fresh_state(), caplog.at_level(logging.WARNING, "pygraph_train"):
        try:
            accelerate.Accelerator(cpu=True, plugins=[pygraph_train.PyGraph(engine="emulated")])
        except TypeError:
            pass
        else:
            pytest.fail("accelerate has plugins now")
        gc.collect()
        (record,) = caplog.records
        assert "write pygraph_train.Accelerator(plugins=[PyGraph()])" in record.getMessage()
        caplog.clear()
        tell_once.cache_clear()
        accelerator = pygraph_train.Accelerator(cpu=True, plugins=[pygraph_train.PyGraph(engine="emulated")])
        accelerator.end_training()
        del accelerator
        gc.collect()
        assert not caplog.records


@pytest.mark.parametrize(
    ("name", "package"),
    [
        ("PyGraphCallback", "lightning"),
        ("PyGraphFabric", "lightning"),
        ("Accelerator", "accelerate"),
        ("PyGraphTrainer", "transformers"),
    ],
)
@pytest.mark.quick
def test_a_framework_that_is_missing_is_told_with_how_to_install_it(name: str, package: str) -> None:
    home = pygraph_train._HOMES[name]
    program = f"import sys; sys.modules[{package!r}] = None; import {home}"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    last = run.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: ") and f"pip install 'pygraph-train[{package}]'" in last, run.stderr


def test_a_batch_index_that_changes_is_told_by_its_name() -> None:
    pytest.importorskip("lightning")
    from lightning_training import parity
    from test_reasons import LogsItsLoss

    class Indexed(LogsItsLoss):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
            return loss ** (1 + batch_idx * 0.01)  # here

    _, graphed = parity(lambda: Indexed(float), never="a change on every step", max_epochs=1)
    assert graphed.report is not None
    row = graphed.report.fallbacks[0]
    assert row.reason.startswith("batch_idx is no longer ") and "args[" not in row.reason
    assert row.where == line_of(Indexed.training_step, "# here")


@pytest.mark.quick
@pytest.mark.parametrize("fn", [fstring, formatted, returned, by_format])
def test_a_text_of_a_tensor_is_told_with_what_to_do(fn: Any) -> None:
    torch.compiler.reset()
    model = nn.Linear(4, 3)
    step = GraphedStep(lambda x: fn(model, x), model=model, optimizer=adamw(model), config=CONFIG)
    for _ in range(6):
        step(torch.randn(6, 4))
    row = step.report().fallbacks[0]
    assert row.where == line_of(fn, "# here"), row
    assert row.fix.startswith("Return the tensor from the step"), row


def test_a_number_that_accelerate_converts_is_told_with_a_line_of_the_user() -> None:
    accelerate = pytest.importorskip("accelerate")
    from accelerate_training import fresh_state
    from test_explain import ReadsItsNorm

    with fresh_state():
        accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
        plain = ReadsItsNorm()
        model, optimizer = accelerator.prepare(plain, adamw(plain))

        def loss_fn(batch: Any) -> Any:
            return nn.functional.cross_entropy(model(batch[0])["out"], batch[1])  # here

        step = GraphedStep(loss_fn, model=model, optimizer=optimizer.optimizer, config=CONFIG)
        for batch in batches(4):
            step(batch)
        row = step.report().fallbacks[0]
        assert row.where == line_of(loss_fn, "# here"), row
        assert "the value of a tensor is read on the host" in row.reason and "SymNode" not in str(row), row
        assert row.fix.startswith("Return the tensor from the step"), row


def test_a_logged_item_leaves_no_lines_of_torch_on_the_screen(capfd: pytest.CaptureFixture[str]) -> None:
    torch.compiler.reset()
    model = nn.Linear(4, 3)

    def step_fn(x: torch.Tensor) -> Any:
        loss = model(x).square().mean()
        return {"loss": loss * loss.item(), "value": loss.item()}

    step = GraphedStep(step_fn, model=model, optimizer=adamw(model), config=CONFIG)
    for _ in range(6):
        step(torch.randn(6, 4))
    assert step.report().fallbacks
    printed = capfd.readouterr()
    assert not printed.out and not printed.err
