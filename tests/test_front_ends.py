"""One loop of each front end trains as plain training does, on any torch (`make test-newest`)."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

for package in ("lightning.pytorch", "accelerate", "transformers"):
    pytest.importorskip(package)

import accelerate  # noqa: E402
import lightning.pytorch as pl  # noqa: E402
import transformers  # noqa: E402
from accelerate_training import fresh_state  # noqa: E402
from lightning.fabric import Fabric  # noqa: E402
from lightning_training import QUIET  # noqa: E402
from replays import runs_of_graphs  # noqa: E402
from training import Net, batches, differs, frozen, loss_of  # noqa: E402

from pygraph_train import (  # noqa: E402
    Accelerator,
    GraphedStep,
    PyGraph,
    PyGraphCallback,
    PyGraphConfig,
    PyGraphFabric,
    PyGraphTrainer,
    PyGraphTrainerCallback,
    backend,
)
from pygraph_train.report.announcements import tell_once  # noqa: E402
from pygraph_train.step import sizes  # noqa: E402
from pygraph_train.torch_private.names import lacking  # noqa: E402
from pygraph_train.versions import tell_if_newer  # noqa: E402

STEPS = 30
OPTIONS: dict[str, Any] = {"engine": "emulated", "warmup_steps": 2}
ROWS = {"of a batch": 8}


class Run:
    """One training: what of it has to be equal, and how often graphs ran."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.losses: list[Tensor] = []
        self.model: nn.Module = Net()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, fused=True)
        self.report: Any = None

    @property
    def graphs(self) -> int:
        if isinstance(self.report, backend.BackendReport):
            return sum(row.replays for row in self.report.regions)
        return runs_of_graphs(self.report)

    def state(self) -> list[Any]:
        return [frozen(self.losses), frozen(self.model.state_dict()), torch.get_rng_state()]


def loader() -> DataLoader:
    xs, ys = zip(*batches(STEPS), strict=True)
    return DataLoader(TensorDataset(torch.cat(xs), torch.cat(ys)), batch_size=ROWS["of a batch"])


class Module(pl.LightningModule):
    def __init__(self, run: Run) -> None:
        super().__init__()
        self.net, self.run_of = run.model, [run]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.run_of[0].losses.append(self.trainer.callback_metrics["loss"].clone())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.run_of[0].optimizer


class Manual(Module):
    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.manual_backward(loss)
        optimizer.step()
        self.log("loss", loss)
        return loss.detach()


def lightning(run: Run, graphed: bool, kind: type[Module] = Module) -> None:
    callback = PyGraphCallback(**OPTIONS)
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, max_epochs=1, callbacks=[callback] if graphed else [], **QUIET
    )
    trainer.fit(kind(run), loader())
    run.report = callback.report() if graphed else None


def lightning_manual(run: Run, graphed: bool) -> None:
    lightning(run, graphed, Manual)


def graphed_step(run: Run, graphed: bool) -> None:
    loss_fn = loss_of(run.model)
    step = GraphedStep(loss_fn, model=run.model, optimizer=run.optimizer, config=PyGraphConfig(**OPTIONS))
    for batch in batches(STEPS):
        if graphed:
            loss = step(batch)
        else:
            run.optimizer.zero_grad()
            loss = loss_fn(batch)
            loss.backward()
            run.optimizer.step()
        run.losses.append(loss.detach().clone())
    run.report = step.report()
    step.close()


def compile_backend(run: Run, graphed: bool) -> None:
    torch.compiler.reset()
    backend.reset()
    options = {"engine": OPTIONS["engine"], "warmup_runs": 1, "compile": False}
    model = torch.compile(run.model, backend="pygraph", options=options) if graphed else run.model
    loss_fn = loss_of(model)
    for batch in batches(STEPS):
        run.optimizer.zero_grad()
        loss = loss_fn(batch)
        loss.backward()
        run.optimizer.step()
        run.losses.append(loss.detach().clone())
    run.report = backend.report()


def accelerate_loop(run: Run, graphed: bool, whole: bool = False) -> None:
    with fresh_state():
        made: Any = (
            Accelerator(cpu=True, plugins=[PyGraph(**OPTIONS)])
            if graphed
            else accelerate.Accelerator(cpu=True)
        )
        model, optimizer, batches_of = made.prepare(run.model, run.optimizer, loader())

        def step(x: Tensor, y: Tensor) -> Tensor:
            loss = nn.functional.cross_entropy(model(x), y)
            made.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            return loss

        if whole and graphed:
            step = made.graphed_step(step)
        for x, y in batches_of:
            run.losses.append(step(x, y).detach().clone())
        run.report = made.pygraph.report() if graphed else None
        made.end_training()


def accelerate_whole(run: Run, graphed: bool) -> None:
    accelerate_loop(run, graphed, whole=True)


def fabric(run: Run, graphed: bool) -> None:
    made = Fabric(accelerator="cpu", devices=1)
    pygraph = PyGraphFabric(**OPTIONS)
    if graphed:
        pygraph.attach(made)
    model, optimizer = made.setup(run.model, run.optimizer)
    for x, y in made.setup_dataloaders(loader()):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        made.backward(loss)
        optimizer.step()
        run.losses.append(loss.detach().clone())
    if graphed:
        run.report = pygraph.report()
        pygraph.detach()


class Classifier(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": nn.functional.cross_entropy(self.net(x), labels)}


def trainer(run: Run, graphed: bool, whole: bool = False) -> None:
    args = transformers.TrainingArguments(
        str(run.folder),
        per_device_train_batch_size=ROWS["of a batch"],
        num_train_epochs=1,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        save_strategy="no",
    )
    rows = [{"x": x, "labels": y} for xs, ys in batches(STEPS) for x, y in zip(xs, ys, strict=True)]
    options: dict[str, Any] = {
        "model": Classifier(run.model),
        "args": args,
        "train_dataset": rows,
        "optimizers": (run.optimizer, None),
    }
    callback = PyGraphTrainerCallback(PyGraphConfig(**OPTIONS))
    with fresh_state():
        if whole and graphed:
            made: Any = PyGraphTrainer(pygraph=PyGraphConfig(**OPTIONS), **options)
        else:
            made = transformers.Trainer(callbacks=[callback] if graphed else [], **options)
        made.remove_callback(transformers.PrinterCallback)
        made.train()
    run.losses = [torch.tensor(row["loss"]) for row in made.state.log_history if "loss" in row]
    if graphed:
        run.report = made.report() if whole else callback.report()


def transformers_whole(run: Run, graphed: bool) -> None:
    trainer(run, graphed, whole=True)


FRONT_ENDS: dict[str, tuple[Callable[..., None], int]] = {
    "GraphedStep": (graphed_step, 45),
    "Lightning": (lightning, 45),
    "Lightning manual": (lightning_manual, 24),
    "Accelerate": (accelerate_loop, 45),
    "Accelerate graphed_step": (accelerate_whole, 45),
    "Fabric": (fabric, 45),
    "PyGraphTrainer": (transformers_whole, 45),
    "PyGraphTrainerCallback": (trainer, 45),
    "backend": (compile_backend, 50),
}
"""Each with the least runs of graphs."""


@pytest.mark.quick
@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_a_loop_trains_as_plain_training_does(
    front_end: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _, least = FRONT_ENDS[front_end]
    for once in (lacking, tell_if_newer):  # in a process
        once.cache_clear()
    run = equal_to_plain_training(front_end, tmp_path, caplog)
    assert run.graphs >= least, str(run.report)
    assert not said(caplog, logging.WARNING)
    settled = [text for text in said(caplog, logging.INFO) if "steps ran as plan {F} {B} {O}" in text]
    captured = [text for text in said(caplog, logging.INFO) if "captured {F} {B} in" in text]
    assert len(captured) == 1 and (front_end == "backend" or len(settled) == 1), caplog.text


@pytest.mark.quick
@pytest.mark.parametrize("front_end", FRONT_ENDS)
@pytest.mark.passes_without_graphs("there is no GPU")
def test_training_without_a_gpu_is_plain_and_says_why(
    front_end: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tell_once.cache_clear()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setitem(OPTIONS, "engine", "auto")
    run = equal_to_plain_training(front_end, tmp_path, caplog)
    (text,) = said(caplog, logging.WARNING)
    told = "o CUDA device holds the model, so steps run as you wrote them (engine='emulated' shows how graphs work)"
    assert text == f"pygraph: n{told}"
    printed = " ".join(str(run.report).split())
    assert f"N{told}." in printed and "training step" not in printed
    trains = front_end.startswith(("Lightning", "PyGraphTrainer"))  # a Trainer, which prints the report
    assert capsys.readouterr().out.count("pygraph-train: No CUDA device") == trains


@pytest.mark.parametrize("rows", [8, 7])
@pytest.mark.parametrize("front_end", [name for name in FRONT_ENDS if name not in ("GraphedStep", "backend")])
@pytest.mark.passes_without_graphs("it looks at traces")
def test_rows_are_numbers_in_a_trace_where_they_may_change(
    front_end: str, rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 240 rows, 7 in a batch, the last batch has 2. A trace with numbers takes twice as long."""
    marked, mark = set(), sizes.make_dynamic
    monkeypatch.setattr(sizes, "make_dynamic", lambda t, d: (marked.add(d), mark(t, d)))
    monkeypatch.setitem(ROWS, "of a batch", rows)
    run = Run(tmp_path)
    FRONT_ENDS[front_end][0](run, True)
    assert run.graphs > 0
    assert marked == ({0} if rows == 7 or front_end == "Fabric" else set())


def said(caplog: pytest.LogCaptureFixture, level: int) -> list[str]:
    records = [record for record in caplog.records if record.name == "pygraph_train"]
    return [record.getMessage() for record in records if record.levelno == level]


def equal_to_plain_training(front_end: str, folder: Path, caplog: pytest.LogCaptureFixture) -> Run:
    """Train without the library and with it. Returns the latter."""
    loop, _ = FRONT_ENDS[front_end]
    runs = []
    with caplog.at_level(logging.INFO, "pygraph_train"):
        for graphed in (False, True):
            torch.manual_seed(0)
            runs.append(Run(folder))
            loop(runs[-1], graphed)
    plain, with_library = runs
    assert len(plain.losses) == STEPS
    difference = differs(plain.state(), with_library.state())
    assert difference is None, difference
    return with_library
