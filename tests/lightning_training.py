"""Runs one Lightning training twice, without and with the callback, and compares everything bit for bit."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers.logger import Logger
from replays import enough
from torch import Tensor, nn
from training import Net, differs, frozen

from pygraph_train import PyGraphCallback, StepReport

# threads that wait for each other on a busy machine take a hundred times longer than these models
torch.set_num_threads(1)

SAMPLES = 44  # at a batch size of 4: eleven batches, so that groups of three do not fit
QUIET: dict[str, Any] = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
PATCHED = {
    "log",
    "training_step",
    "run",
    "batch_to_device",
    "metrics",
    "optimizer_step",
    "_compiled_call_impl",
    "_broadcast_sigterm_tensor",
}


class Module(pl.LightningModule):
    """A classifier with dropout and batch norm, which logs a little of everything."""

    def __init__(
        self, optimizer: str = "adamw", scheduler: str | None = None, *, dropout: float = 0.2, **options: Any
    ) -> None:
        super().__init__()
        self.net = Net(dropout=dropout)
        self.optimizer, self.scheduler, self.options = optimizer, scheduler, options

    def loss(self, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        out = self.net(batch[0])
        loss = nn.functional.cross_entropy(out, batch[1])
        self.log("loss", loss, prog_bar=True, on_step=True, on_epoch=True)
        self.log("accuracy", (out.argmax(1) == batch[1]).float().mean(), on_step=False, on_epoch=True)
        self.log("worst", loss, reduce_fx="max", on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch))

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0])

    def configure_optimizers(self) -> Any:
        parameters = [p for p in self.parameters() if p.requires_grad]
        if self.optimizer == "adamw":
            optimizer: torch.optim.Optimizer = torch.optim.AdamW(
                parameters, **{"lr": 1e-2, "fused": True, **self.options}
            )
        else:
            optimizer = torch.optim.SGD(
                parameters, **{"lr": 1e-2, "momentum": 0.9, "fused": True, **self.options}
            )
        schedulers = torch.optim.lr_scheduler
        if self.scheduler == "step":
            cosine = schedulers.CosineAnnealingLR(optimizer, T_max=60)
            return [optimizer], [{"scheduler": cosine, "interval": "step"}]
        if self.scheduler == "one cycle":  # which changes betas and momentum as well
            cycle = schedulers.OneCycleLR(optimizer, max_lr=0.1, total_steps=200)
            return [optimizer], [{"scheduler": cycle, "interval": "step"}]
        if self.scheduler == "epoch":
            return [optimizer], [schedulers.ExponentialLR(optimizer, 0.7)]
        if self.scheduler == "plateau":
            plateau = schedulers.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"}}
        return optimizer


class MemoryLogger(Logger):
    """Keeps what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.received: list[tuple[Any, dict[str, float]]] = []

    name = "memory"
    version = 0

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.received.append((step, dict(metrics)))

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Nothing of interest."""


class Diary(pl.Callback):
    """Copies of everything that a callback can see."""

    def __init__(self) -> None:
        self.entries: list[tuple[str, Any]] = []

    def _write(self, name: str, value: Any) -> None:
        self.entries.append((name, frozen(value)))

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._write(f"learning rates before batch {batch_idx}", _rates(trainer))

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        place = f"at the end of batch {batch_idx} of epoch {trainer.current_epoch}"
        self._write(f"outputs {place}", outputs)
        self._write(f"callback_metrics {place}", dict(trainer.callback_metrics))
        self._write(f"progress_bar_metrics {place}", dict(trainer.progress_bar_metrics))
        self._write(f"gradients {place}", [p.grad for p in pl_module.parameters()])
        self._write(f"parameters {place}", pl_module.state_dict())
        self._write(f"global step {place}", trainer.global_step)
        self._write(f"random state {place}", torch.get_rng_state())

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self._metrics("at the end of an epoch", trainer)
        self._write("progress", _plain(trainer.fit_loop.state_dict()))

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self._metrics("after validation", trainer)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._metrics("at the end", trainer)
        for optimizer in trainer.optimizers:
            self._write("optimizer", optimizer.state_dict())
        self._write("progress", _plain(trainer.fit_loop.state_dict()))
        self._write("schedulers", [_plain(c.scheduler.state_dict()) for c in trainer.lr_scheduler_configs])

    def _metrics(self, place: str, trainer: Any) -> None:
        for name in ("callback_metrics", "logged_metrics", "progress_bar_metrics"):
            self._write(f"{name} {place}", dict(getattr(trainer, name)))


@dataclass
class Fit:
    """One finished training.

    Attributes:
        entries: what the diary holds, and the state after the fit.
        report: the callback's, None without it.
    """

    trainer: pl.Trainer
    module: pl.LightningModule
    entries: list[tuple[str, Any]] = field(repr=False)
    report: StepReport | None


def fit(
    callbacks: Sequence[pl.Callback] = (),
    *,
    module: pl.LightningModule | None = None,
    batches: Any = None,
    validate: bool = False,
    ckpt_path: Any = None,
    **options: Any,
) -> Fit:
    """Train for four epochs of eleven batches, or what `batches` and `options` (of the Trainer) say."""
    pl.seed_everything(1, verbose=False)
    module = Module() if module is None else module
    diary = Diary()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = pl.Trainer(
            **{
                "accelerator": "cpu",
                "devices": 1,
                "max_epochs": 4,
                "log_every_n_steps": 5,
                "num_sanity_val_steps": 0,
                **QUIET,
                **options,
            },
            callbacks=[*callbacks, diary],
        )
        trainer.fit(
            module,
            loader() if batches is None else batches,
            loader(shuffle=False) if validate else None,
            ckpt_path=ckpt_path,
            **({"weights_only": False} if ckpt_path else {}),
        )
    entries = list(diary.entries)
    entries.append(("parameters after the fit", frozen(module.state_dict())))
    entries.append(("random state after the fit", torch.get_rng_state()))
    for logger in trainer.loggers:
        if isinstance(logger, MemoryLogger):
            entries += [(f"logged at step {step}", (step, metrics)) for step, metrics in logger.received]
    assert_nothing_left(trainer, module)
    callback = next((c for c in callbacks if isinstance(c, PyGraphCallback)), None)
    return Fit(trainer, module, entries, callback.report() if callback else None)


def emulated(**options: Any) -> PyGraphCallback:
    """The callback under test."""
    return PyGraphCallback(**{"engine": "emulated", "warmup_steps": 2, **options})


def parity(
    make_module: Callable[[], pl.LightningModule] | None = None,
    make_callbacks: Callable[[], Sequence[pl.Callback]] = lambda: (),
    make_batches: Callable[[], Any] = lambda: None,
    *,
    replays: int | None = None,
    plan: str | None = None,
    refused: str | None = None,
    never: str | None = None,
    config: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[Fit, Fit]:
    """`fit` without and with the callback; asserts that nothing differs. Returns both.

    How often graphs have to run (`replays`), the `plan`, and why nothing runs from a graph (`refused`, `never`): see
    `replays.enough`.
    """

    def run(first: list[pl.Callback]) -> Fit:
        torch.manual_seed(0)
        # options may hold objects that a fit changes (loggers)
        return fit(
            [*first, *make_callbacks()],
            module=(make_module or Module)(),
            batches=make_batches(),
            **copy.deepcopy(options),
        )

    plain, graphed = run([]), run([emulated(**(config or {}))])
    compare(plain, graphed)
    enough([graphed.report], replays, plan, refused, never)
    return plain, graphed


def compare(plain: Fit, graphed: Fit) -> None:
    """Assert that two fits left the same traces, bit for bit."""
    assert plain.entries, "the fit compared nothing"
    assert [name for name, _ in plain.entries] == [name for name, _ in graphed.entries]
    for (name, expected), (_, found) in zip(plain.entries, graphed.entries, strict=True):
        difference = differs(frozen(expected), frozen(found))
        assert difference is None, f"{name}{difference}\n{graphed.report}"


def replayed(fits: tuple[Fit, Fit] | Fit, *, least: int = 20, plan: str = "{F} {B} {O}") -> StepReport:
    """Assert that a test which claims parity really replayed."""
    report = (fits if isinstance(fits, Fit) else fits[1]).report
    assert report is not None
    assert report.steps_replayed >= least, (
        f"only {report.steps_replayed} of {report.steps} replayed\n{report}"
    )
    assert report.running_plan == plan, str(report)
    return report


def refused(fits: tuple[Fit, Fit] | Fit, *parts: str, where: str | None = None) -> StepReport:
    """Assert that nothing was replayed, for a reason that contains `parts` and names the place `where`."""
    report = (fits if isinstance(fits, Fit) else fits[1]).report
    assert report is not None
    assert report.steps_replayed == 0, str(report)
    text = "\n".join(f"{f.reason} {f.fix}" for f in report.fallbacks)
    for part in parts:
        assert part in text, str(report)
    if where is not None:
        assert where in [f.where for f in report.fallbacks], f"{where}\n{report}"
    return report


def assert_nothing_left(trainer: pl.Trainer, module: pl.LightningModule) -> None:
    """Assert that no patch of the callback is left on Lightning's or the user's objects."""
    epoch_loop = trainer.fit_loop.epoch_loop
    loops = (epoch_loop, epoch_loop.automatic_optimization, epoch_loop.manual_optimization)
    owners = (trainer, trainer.strategy, trainer.precision_plugin, *loops, epoch_loop._results)
    for owner in (*module.modules(), *owners):
        assert not PATCHED & set(vars(owner)), f"{type(owner).__name__}: {PATCHED & set(vars(owner))}"
    for optimizer in trainer.optimizers:
        assert "step" not in vars(optimizer) or hasattr(optimizer.step, "_wrapped_by_lr_sched")
        for group in optimizer.param_groups:
            assert not isinstance(group.get("lr"), Tensor)


class Data(torch.utils.data.Dataset):
    """Random samples, the same in every run; they leave the default random state alone."""

    def __init__(self, count: int = SAMPLES) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(count, 6, generator=generator)
        self.y = torch.randint(0, 3, (count,), generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        return self.x[index], self.y[index]


def loader(
    count: int = SAMPLES, batch_size: int = 4, *, shuffle: bool = True, **options: Any
) -> torch.utils.data.DataLoader:
    """A DataLoader over `Data`."""
    return torch.utils.data.DataLoader(Data(count), batch_size, shuffle=shuffle, **options)


class Listed(torch.utils.data.Dataset):
    """Ready batches, for a DataLoader without collation."""

    def __init__(self, batches: Sequence[Any]) -> None:
        self.batches = list(batches)

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> Any:
        return self.batches[index]


def listed(batches: Sequence[Any]) -> torch.utils.data.DataLoader:
    """A DataLoader that yields these objects."""
    return torch.utils.data.DataLoader(Listed(batches), batch_size=None)


def _rates(trainer: pl.Trainer) -> list[Any]:
    return [group.get("lr") for optimizer in trainer.optimizers for group in optimizer.param_groups]


def _plain(state: dict[str, Any]) -> dict[str, Any]:
    """Without objects that compare by identity."""
    return {name: value for name, value in state.items() if not callable(value)}
