"""What whole runs do: validation, checkpoints and resuming, several fits, callbacks, loggers, options of Trainers."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from pygraph_train import PyGraph, PyGraphCallback, PyGraphTrainerCallback

from .compare import ALWAYS, ENGINE, Run, same_as_plain
from .frameworks import ACCELERATOR, fit, loader, memory_logger
from .models import DEVICE, Net, adamw, batches, loss_of, sgd

pl = pytest.importorskip("lightning.pytorch")

from lightning.pytorch.callbacks import (  # noqa: E402
    EarlyStopping,
    GradientAccumulationScheduler,
    LearningRateMonitor,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.plugins.precision import MixedPrecision  # noqa: E402

from .lightning_module import Module  # noqa: E402


@same_as_plain(replays=15)
def test_a_checkpoint_of_model_and_optimizer_is_loaded_in_mid_run(run: Run) -> None:
    model = Net()
    optimizer = adamw(model)
    step = run.step(loss_of(model), model=model, optimizer=optimizer)
    for number, batch in enumerate(batches(36)):
        if number == 12:
            saved = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
        if number == 24:
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
        step(batch)
    run.note("saved", saved)


@same_as_plain(replays=15)
def test_a_run_goes_on_in_new_objects(run: Run) -> None:
    """What is written to a file trains on as a plain run's, and holds plain Python floats."""
    model = Net()
    for part in range(2):
        optimizer = adamw(model)
        if part:
            saved = torch.load(run.folder / "saved.pt")
            model, optimizer = Net(), None
            model.load_state_dict(saved["model"])
            optimizer = adamw(model)
            optimizer.load_state_dict(saved["optimizer"])
        schedule = lr_scheduler.ExponentialLR(optimizer, 0.9)
        step = run.step(loss_of(model), model=model, optimizer=optimizer)
        for batch in batches(16, seed=part):
            step(batch)
            schedule.step()
        torch.save(
            {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, run.folder / "saved.pt"
        )
    run.note("file", torch.load(run.folder / "saved.pt"))


@same_as_plain(replays=20)
def test_a_trainer_resumes_from_a_checkpoint(run: Run) -> None:
    checkpoint = ModelCheckpoint(run.folder, every_n_train_steps=9, save_top_k=-1)
    options: dict[str, Any] = {"enable_checkpointing": True, "callbacks": [checkpoint]}
    fit(run, Module(), loader(batches(12)), max_epochs=2, **options)
    files = sorted(run.folder.glob("*.ckpt"))
    run.note("files", [file.name for file in files])
    saved = [torch.load(file, weights_only=False) for file in files]
    run.note("saved", [[s["state_dict"], s["optimizer_states"], s["global_step"]] for s in saved])
    fit(run, Module(), loader(batches(12)), max_epochs=3, ckpt_path=files[0])


@same_as_plain(replays=20)
def test_one_module_is_fitted_twice(run: Run) -> None:
    module = Module()
    fit(run, module, loader(batches(16)))
    fit(run, module, loader(batches(16, seed=2)))


@same_as_plain(replays=10)
def test_one_trainer_fits_twice(run: Run) -> None:
    module = Module()
    trainer = fit(run, module, loader(batches(16)))
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, loader(batches(16)))
    run.note("module", module)


TRAINER_OPTIONS: dict[str, dict[str, Any]] = {
    "accumulation": {"accumulate_grad_batches": 4},
    "norm": {"gradient_clip_val": 0.1},
    "value": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    "accumulation and norm": {"accumulate_grad_batches": 3, "gradient_clip_val": 0.1},
    "limits": {"limit_train_batches": 20, "limit_val_batches": 1, "max_epochs": 2},
}


@pytest.mark.parametrize("name", TRAINER_OPTIONS)
@pytest.mark.slow_after(5)
@same_as_plain(replays=12, updates=3)
def test_options_of_a_trainer(run: Run, name: str) -> None:
    loaders = loader(batches(30)), loader(batches(2))
    fit(run, Module(), loaders[0], validation=loaders[1], **TRAINER_OPTIONS[name])


@same_as_plain(refused="anomaly detection reads every gradient on the host")
def test_anomaly_detection(run: Run) -> None:
    fit(run, Module(), loader(batches(12)), detect_anomaly=True)


SCHEDULERS: dict[str, Any] = {
    "one cycle": lambda o: {"scheduler": lr_scheduler.OneCycleLR(o, 0.1, total_steps=40), "interval": "step"},
    "epoch": lambda o: lr_scheduler.ExponentialLR(o, 0.7),
    "plateau": lambda o: {"scheduler": lr_scheduler.ReduceLROnPlateau(o, patience=0), "monitor": "val_loss"},
}


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.quick
@same_as_plain(replays=12)
def test_schedulers_of_a_trainer(run: Run, name: str) -> None:
    class Scheduled(Module):
        def configure_optimizers(self) -> Any:
            optimizer = sgd(self)
            return {"optimizer": optimizer, "lr_scheduler": SCHEDULERS[name](optimizer)}

    callbacks = [LearningRateMonitor(logging_interval="step")]
    data = {"train": loader(batches(12)), "validation": loader(batches(2))}
    fit(run, Scheduled(), max_epochs=2, logger=memory_logger()(), callbacks=callbacks, **data)


@same_as_plain(replays=12)
def test_a_scaler_of_a_trainer_skips_updates_with_overflow(run: Run) -> None:
    scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0**126, growth_interval=4)
    fit(run, Module(), loader(batches(30)), plugins=[MixedPrecision("16-mixed", DEVICE, scaler)])
    run.note("scaler", scaler)


@same_as_plain(replays=12)
def test_callbacks_of_lightning(run: Run) -> None:
    """Early stopping, weights that are averaged, and accumulation that changes between epochs."""
    callbacks = [
        EarlyStopping("val_loss", patience=1),
        StochasticWeightAveraging(1e-2, swa_epoch_start=2),
        GradientAccumulationScheduler({0: 1, 2: 3}),
    ]
    data = {"train": loader(batches(8)), "validation": loader(batches(2))}
    trainer = fit(run, Module(), max_epochs=5, callbacks=callbacks, **data)
    run.note("stopped", [trainer.current_epoch, trainer.should_stop])


@same_as_plain(replays=12)
def test_a_callback_that_changes_weights_and_stops(run: Run) -> None:
    class Changing(pl.Callback):
        def on_train_batch_end(
            self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            with torch.no_grad():
                pl_module.net.second.weight.mul_(0.99)
            trainer.should_stop = outputs["loss"].item() < 0 or batch_idx == 25

    fit(run, Module(), loader(batches(40)), callbacks=[Changing()])


@same_as_plain(replays=8)
def test_layers_thaw_at_an_epoch(run: Run) -> None:
    class Thawing(Module):
        def on_train_epoch_start(self) -> None:
            self.net.first.requires_grad_(self.current_epoch > 0)

    fit(run, Thawing(), loader(batches(16)), max_epochs=2)


@pytest.mark.parametrize("ours", [PyGraphCallback, PyGraphTrainerCallback, PyGraph])
@pytest.mark.quick
def test_what_a_trainer_is_given_can_be_copied_and_sent(ours: Any) -> None:
    """As a strategy does that spawns its processes, and a search over hyperparameters."""
    for made in (copy.deepcopy(ours()), pickle.loads(pickle.dumps(ours()))):
        assert type(made) is ours


def test_a_fit_that_is_over_is_freed() -> None:
    options = {"engine": ENGINE, "warmup_steps": 2, **ALWAYS}
    quiet: dict[str, Any] = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    over = []
    for _ in range(2):
        module, callback = Module(), PyGraphCallback(**options)
        trainer = pl.Trainer(accelerator=ACCELERATOR, devices=1, max_epochs=1, callbacks=[callback], **quiet)
        trainer.fit(module, loader(batches()))
        assert callback.report().to_dict()["steps_from_graphs"] >= 12
        over += [weakref.ref(module), weakref.ref(module.net.first.weight)]
        del module, callback, trainer
    gc.collect()
    assert [reference() for reference in over] == [None] * 4


@pytest.mark.parametrize(("engine", "asked"), [(ENGINE, True), (ENGINE, False), ("off", True)])
@pytest.mark.passes_without_graphs("it is printed whatever runs")
def test_the_report_is_printed_where_it_is_wanted(
    capsys: pytest.CaptureFixture[str], *, engine: str, asked: bool
) -> None:
    quiet: dict[str, Any] = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
    ours = PyGraphCallback(engine=engine, print_report=asked)
    trainer = pl.Trainer(accelerator=ACCELERATOR, devices=1, max_epochs=1, callbacks=[ours], **quiet)
    trainer.fit(Module(), loader(batches(8)))
    assert capsys.readouterr().out.count("pygraph-train: ") == asked
