"""Lightning's own callbacks beside `PyGraphCallback`: the same training, and they find what they find without it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

pl = pytest.importorskip("lightning.pytorch")

from lightning.pytorch import callbacks as of_lightning  # noqa: E402
from lightning.pytorch.accelerators import CPUAccelerator  # noqa: E402
from lightning.pytorch.callbacks import (  # noqa: E402
    BackboneFinetuning,
    BaseFinetuning,
    BatchSizeFinder,
    DeviceStatsMonitor,
    EarlyStopping,
    GradientAccumulationScheduler,
    LearningRateFinder,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelPruning,
    OnExceptionCheckpoint,
    RichProgressBar,
    StochasticWeightAveraging,
    Timer,
    TQDMProgressBar,
)
from lightning_training import Data, Fit, MemoryLogger, Module, emulated, fit, loader, parity  # noqa: E402
from test_lightning_callback import contents, without_paths  # noqa: E402
from training import differs, frozen  # noqa: E402

EMAWeightAveraging = getattr(of_lightning, "EMAWeightAveraging", None)
WeightAveraging = getattr(of_lightning, "WeightAveraging", None)
averages = pytest.mark.skipif(WeightAveraging is None, reason="this Lightning has no WeightAveraging")

Made = Sequence[pl.Callback]


def trained(
    make: Callable[[], Made],
    found: Callable[[Any], Any] = lambda callback: callback.state_dict(),
    make_module: Callable[[], pl.LightningModule] = Module,
    **options: Any,
) -> tuple[Fit, Fit]:
    """`parity` with these callbacks. Asserts that they hold the same afterwards, too.

    Args:
        make: the callbacks of one training.
        found: what a callback has found out.
        make_module, **options: of `parity`.
    """
    made: list[Made] = []

    def callbacks() -> Made:
        made.append(make())
        return made[-1]

    fits = parity(make_module, callbacks, **options)
    expected, theirs = [[frozen(found(callback)) for callback in group] for group in made]
    assert expected, "no callback was made"
    difference = differs(expected, theirs)
    assert difference is None, difference
    return fits


# -- averages of weights -----------------------------------------------------------------------------------


def averaged(callback: Any) -> Any:
    """The averaged model, and how many were averaged."""
    return [callback.state_dict(), callback._average_model.state_dict()]


@averages
@pytest.mark.parametrize(
    "options",
    [{}, {"update_every_n_steps": 3}, {"update_starting_at_epoch": 1}, {"use_buffers": False}],
    ids=str,
)
def test_exponential_moving_average(options: dict[str, Any]) -> None:
    assert EMAWeightAveraging is not None
    make = lambda: [EMAWeightAveraging(decay=0.9, **options)]  # noqa: E731
    trained(make, averaged, validate=True, replays=36, plan="{F} {B} {O}")


@averages
def test_average_of_the_weights_of_some_steps() -> None:
    class Every(WeightAveraging):  # type: ignore[misc, valid-type]
        """The mean of the weights after every fifth step and after every epoch."""

        def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
            return epoch_idx is not None or (step_idx is not None and step_idx % 5 == 4)

    trained(lambda: [Every()], averaged, validate=True, replays=36, plan="{F} {B} {O}")


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 3}, {"validate": True}], ids=str)
def test_stochastic_weight_averaging(optimizer: str, options: dict[str, Any]) -> None:
    def swa() -> Made:
        return [StochasticWeightAveraging(swa_lrs=1e-3, swa_epoch_start=2, annealing_epochs=2)]

    def weights(callback: Any) -> Any:
        return [callback.n_averaged, callback._average_model.state_dict()]

    make_module = lambda: Module(optimizer, "epoch")  # noqa: E731
    trained(swa, weights, make_module, max_epochs=6, replays=40, plan="{F} {B} {O}", **options)


# -- what trains -------------------------------------------------------------------------------------------


class WithBackbone(Module):
    """Its optimizer begins with what is not frozen."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.backbone = self.net.first

    def configure_optimizers(self) -> Any:
        parameters = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.AdamW(parameters, lr=1e-2, fused=True)


def test_layers_are_unfrozen_and_replayed_again() -> None:
    make = lambda: [BackboneFinetuning(unfreeze_backbone_at_epoch=3, verbose=False)]  # noqa: E731
    fits = trained(make, make_module=WithBackbone, max_epochs=6, replays=50, plan="{F} {B} {O}")
    report = fits[1].report
    assert report is not None and max(c.step for c in report.captures) > 33
    assert len(fits[1].trainer.optimizers[0].param_groups) == 2


def test_layers_are_unfrozen_one_after_the_other() -> None:
    class OneByOne(BaseFinetuning):
        def freeze_before_training(self, pl_module: Any) -> None:
            self.freeze([pl_module.net.first, pl_module.net.norm])

        def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
            if epoch == 2:
                self.unfreeze_and_add_param_group(pl_module.net.norm, optimizer, lr=1e-3)
            if epoch == 4:
                self.unfreeze_and_add_param_group(pl_module.net.first, optimizer)

    trained(lambda: [OneByOne()], make_module=WithBackbone, max_epochs=7, replays=50, plan="{F} {B} {O}")


@pytest.mark.parametrize(
    "options",
    [
        {"pruning_fn": "l1_unstructured", "parameter_names": ["weight"]},
        {"pruning_fn": "random_unstructured", "use_lottery_ticket_hypothesis": False},
    ],
    ids=str,
)
def test_pruned_layers(options: dict[str, Any]) -> None:
    """Torch masks weights in a hook, which stores the masked weight in an attribute on every step."""
    callbacks = lambda: [ModelPruning(amount=0.2, **options)]  # noqa: E731
    fits = trained(callbacks, max_epochs=6, replays=40, plan="{F} {B} {O}")
    zeros = [(p == 0).sum() for name, p in fits[1].module.named_parameters() if "weight" in name]
    assert sum(zeros) > 40


class Manual(WithBackbone):
    """Optimizes by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        optimizer.step()
        return loss


MANUAL: dict[str, tuple[Callable[[], pl.Callback], Callable[[Any], Any]]] = {
    "averages": (lambda: StochasticWeightAveraging(1e-3, swa_epoch_start=3), lambda c: c.n_averaged),
    "unfreezes": (lambda: BackboneFinetuning(unfreeze_backbone_at_epoch=3), lambda c: c.state_dict()),
    "monitors": (lambda: LearningRateMonitor("step"), lambda c: c.lrs),
}


@pytest.mark.parametrize("what", MANUAL)
def test_other_callbacks_under_manual_optimization(what: str) -> None:
    make, found = MANUAL[what]
    trained(
        lambda: [make()],
        found,
        Manual,
        max_epochs=6,
        logger=MemoryLogger(),
        validate=True,
        replays=120,
    )


@pytest.mark.parametrize(
    ("numbers", "epochs", "replays"), [({0: 1, 2: 3, 5: 2}, 8, 60), ({0: 1, 6: 3, 8: 4, 10: 2}, 12, 100)]
)
def test_accumulation_that_changes_between_epochs(numbers: dict[int, int], epochs: int, replays: int) -> None:
    make = lambda: [GradientAccumulationScheduler(numbers)]  # noqa: E731
    trained(
        make, lambda callback: callback.scheduling, max_epochs=epochs, replays=replays, plan="{F} {B} {O}"
    )


# -- when training ends ------------------------------------------------------------------------------------


@pytest.mark.parametrize("monitor", ["loss_epoch", "val_loss"])
def test_early_stopping_stops_at_the_same_step(monitor: str) -> None:
    make = lambda: [EarlyStopping(monitor, patience=1, min_delta=0.05)]  # noqa: E731
    plain, graphed = trained(
        make, max_epochs=30, validate=monitor == "val_loss", replays=20, plan="{F} {B} {O}"
    )
    assert plain.trainer.global_step == graphed.trainer.global_step < 30 * 11


def test_early_stopping_at_a_loss_that_is_not_finite() -> None:
    class Breaks(Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("broken", torch.zeros(()))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx) + self.broken
            self.log("all of it", loss, on_step=False, on_epoch=True)
            return loss

        def on_train_epoch_start(self) -> None:
            if self.current_epoch == 3:
                self.broken.fill_(float("nan"))

    make = lambda: [EarlyStopping("all of it", patience=9)]  # noqa: E731
    plain, graphed = trained(make, make_module=Breaks, max_epochs=9, replays=36, plan="{F} {B} {O}")
    assert plain.trainer.global_step == graphed.trainer.global_step == 44


class StepTimer(Timer):
    """A timer that takes a step for a second."""

    step = 0

    def time_elapsed(self, *_: Any) -> float:
        return float(self.step)

    def on_train_batch_end(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        self.step = trainer.global_step
        super().on_train_batch_end(trainer, *args, **kwargs)


@pytest.mark.parametrize("interval", ["step", "epoch"])
def test_a_timer_stops_at_the_same_step(interval: str) -> None:
    def timed() -> Made:
        return [
            StepTimer({"seconds": 31}, interval=interval),
            GradientAccumulationScheduler({0: 1, 2: 2}),
        ]

    plain, graphed = trained(timed, max_epochs=20, replays=20, plan="{F} {B} {O}")
    assert plain.trainer.global_step == graphed.trainer.global_step == (31 if interval == "step" else 34)


# -- what is shown and logged --------------------------------------------------------------------------------


@pytest.mark.parametrize("bar", [TQDMProgressBar, RichProgressBar])
def test_progress_bars_are_shown_and_not_stale(bar: Any, capsys: pytest.CaptureFixture[str]) -> None:
    trained(lambda: [bar()], enable_progress_bar=True, replays=20, plan="{F} {B} {O}")
    assert "loss_step" in capsys.readouterr().out + capsys.readouterr().err


@pytest.mark.parametrize("interval", ["step", "epoch"])
def test_learning_rate_monitor(interval: str) -> None:
    trained(
        lambda: [LearningRateMonitor(interval, log_momentum=True, log_weight_decay=True)],
        lambda callback: callback.lrs,
        lambda: Module("adamw", "step"),
        logger=MemoryLogger(),
        log_every_n_steps=1,
        replays=36,
        plan="{F} {B} {O}",
    )


def test_device_stats_are_read_before_and_after_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    read = 0

    def stats(self: Any, device: Any) -> dict[str, float]:
        nonlocal read
        read += 1
        return {"a number": float(read % 88)}

    monkeypatch.setattr(CPUAccelerator, "get_device_stats", stats)
    _, graphed = trained(
        lambda: [DeviceStatsMonitor()],
        logger=MemoryLogger(),
        log_every_n_steps=1,
        replays=36,
        plan="{F} {B} {O}",
    )
    assert read == 2 * 88
    assert any("DeviceStatsMonitor.on_train_batch_end/a number" in str(entry) for entry in graphed.entries)


# -- what is searched before training, and in mid-run --------------------------------------------------------


class Rated(Module):
    """A learning rate that is searched for."""

    def __init__(self) -> None:
        super().__init__()
        self.lr = 1e-2

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.lr, fused=True)


class SearchesLater(LearningRateFinder):
    """As the documentation of Lightning has it: a search at the beginning of some epochs."""

    def on_fit_start(self, *args: Any) -> None:
        """Not yet."""

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch in (0, 3):
            self.lr_find(trainer, pl_module)


@pytest.mark.parametrize("finder", [LearningRateFinder, SearchesLater])
def test_a_learning_rate_is_found(finder: type[LearningRateFinder], tmp_path: Path) -> None:
    def found(callback: Any) -> Any:
        return [callback.optimal_lr.results, callback.optimal_lr.suggestion()]

    plain, graphed = trained(
        lambda: [finder(num_training_steps=30, early_stop_threshold=None)],
        found,
        Rated,
        max_epochs=6,
        default_root_dir=tmp_path,
        replays=36,
        plan="{F} {B} {O}",
    )
    assert plain.module.lr == graphed.module.lr != 1e-2


class Sized(pl.LightningDataModule):
    """A batch size that is searched for."""

    def __init__(self) -> None:
        super().__init__()
        self.batch_size = 2

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(Data(), self.batch_size, shuffle=True)

    def val_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(Data(), self.batch_size)


class SizesLater(BatchSizeFinder):
    """A search at the beginning of some epochs."""

    def on_fit_start(self, *args: Any) -> None:
        """Not yet."""

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch in (0, 3):
            self.scale_batch_size(trainer, pl_module)


@pytest.mark.parametrize("finder", [BatchSizeFinder, SizesLater])
def test_a_batch_size_is_found(finder: type[BatchSizeFinder], tmp_path: Path) -> None:
    plain, graphed = trained(
        lambda: [finder("power", steps_per_trial=2, max_trials=2, init_val=2)],
        lambda callback: callback.optimal_batch_size,
        make_batches=Sized,
        max_epochs=12,
        default_root_dir=tmp_path,
        replays=20,
        plan="{F} {B} {O}",
    )
    assert plain.trainer.datamodule.batch_size == graphed.trainer.datamodule.batch_size > 2


# -- checkpoints ---------------------------------------------------------------------------------------------


def test_checkpoints_of_steps_are_the_same(tmp_path: Path) -> None:
    folders: list[Path] = []

    def checkpoints() -> Made:
        folders.append(tmp_path / str(len(folders)))
        every = {"every_n_train_steps": 4, "filename": "{step}"}
        best = {"monitor": "loss_step", "save_top_k": 2, "every_n_train_steps": 3}
        averages = [] if EMAWeightAveraging is None else [EMAWeightAveraging(decay=0.9)]
        return [
            ModelCheckpoint(folders[-1], save_top_k=-1, **every),
            ModelCheckpoint(folders[-1] / "best", **best),
            ModelCheckpoint(
                folders[-1] / "weights", save_weights_only=True, every_n_train_steps=6, save_top_k=-1
            ),
            *averages,
        ]

    trained(checkpoints, lambda callback: None, enable_checkpointing=True, replays=36, plan="{F} {B} {O}")
    expected, theirs = [without_paths(contents(folder), folder) for folder in folders]
    assert len(expected) > 10
    difference = differs(frozen(expected), frozen(theirs))
    assert difference is None, difference


class Breaks(pl.Callback):
    """An error in the middle of training."""

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == 30:
            raise KeyError("in mid-run")


@pytest.mark.parametrize("place", ["before", "after"])
@pytest.mark.parametrize("kind", [OnExceptionCheckpoint, ModelCheckpoint])
def test_a_checkpoint_after_an_exception_is_the_same(kind: Any, place: str, tmp_path: Path) -> None:
    """Wherever `PyGraphCallback` stands among the callbacks."""
    if kind is ModelCheckpoint and "save_on_exception" not in inspect.signature(kind).parameters:
        pytest.skip("this Lightning saves with OnExceptionCheckpoint only")

    def run(name: str, mine: list[pl.Callback]) -> Any:
        torch.manual_seed(0)
        save = (
            kind(tmp_path / name, "saved")
            if kind is OnExceptionCheckpoint
            else kind(tmp_path / name, "saved", save_on_exception=True, every_n_epochs=99)
        )
        others = [save, Breaks()]
        module = Module("adamw", "step")
        with pytest.raises(KeyError, match="in mid-run"):
            fit([*mine, *others] if place == "before" else [*others, *mine], module=module,
                batches=loader(), enable_checkpointing=True)  # fmt: skip
        return [without_paths(contents(tmp_path / name), tmp_path / name), module.state_dict()]

    callback = emulated()
    expected, theirs = run("plain", []), run("graphed", [callback])
    assert expected[0], "nothing was saved"
    difference = differs(frozen(expected), frozen(theirs))
    assert difference is None, difference
    assert callback.report().steps_replayed > 20, str(callback.report())
