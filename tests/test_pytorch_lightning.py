"""`import pytorch_lightning as pl`, the copy of Lightning under another name, and other places for the callback."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

pytest.importorskip("lightning.pytorch")
pl = pytest.importorskip("pytorch_lightning")

from lightning.fabric import Fabric  # noqa: E402
from lightning.fabric.utilities.exceptions import MisconfigurationException  # noqa: E402
from training import Net, batches, differs, frozen  # noqa: E402

from pygraph_train import PyGraphCallback, PyGraphError, PyGraphFabric, StepReport  # noqa: E402
from pygraph_train.integrations.lightning.package import base_of, package_of, root_of  # noqa: E402


class Diary(pl.Callback):
    """Writes down what has to be equal: logged values after each step, and parameters at the end."""

    def __init__(self) -> None:
        self.entries: list[Any] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.entries.append(frozen({"loss": outputs["loss"], **trainer.callback_metrics}))

    def on_train_end(self, trainer: Any, module: Any) -> None:
        self.entries.append(frozen([module.state_dict(), trainer.optimizers[0].state_dict()]))


class Module(pl.LightningModule):
    """A classifier that logs."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()
        self.norms: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("logged", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("validated", nn.functional.cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2, fused=True)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=90)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class AfterBackward(Module):
    """Acts between backward and the optimizer."""

    def on_after_backward(self) -> None:
        assert self.net.first.weight.grad is not None
        self.norms.append(float(self.net.first.weight.grad.norm()))


def train(make: Callable[[], Any], callbacks: list[Any], **options: Any) -> list[Any]:
    """Ninety batches with the Trainer of `pytorch_lightning`. Returns the diary."""
    torch.manual_seed(0)
    module = make()
    xs, ys = zip(*batches(30), strict=True)
    loader = DataLoader(TensorDataset(torch.cat(xs), torch.cat(ys)), batch_size=8)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    diary = Diary()
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, max_epochs=3, callbacks=[diary, *callbacks], **{**quiet, **options}
    )
    trainer.fit(module, loader, loader)
    return [*diary.entries, module.norms]


def same(
    make: Callable[[], Any] = Module, more: Callable[[], list[Any]] = list, **options: Any
) -> StepReport:
    """Train without and with the callback; nothing differs."""
    callback = PyGraphCallback(engine="emulated", warmup_steps=2)
    expected, found = train(make, more(), **options), train(make, [*more(), callback], **options)
    assert differs(expected, found) is None, str(callback.report())
    return callback.report()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_clip_val": 0.5},
        {"precision": "bf16-mixed"},
        {"precision": "64-true"},
        {"accumulate_grad_batches": 3},
    ],
    ids=str,
)
def test_the_same_training_under_the_other_name(options: dict[str, Any]) -> None:
    report = same(**options)
    assert report.steps_replayed >= 75, str(report)
    assert report.plan == "{F B O}", str(report)


class Manual(Module):
    """Optimizes by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        loss = super().training_step(batch, batch_idx)
        optimizer.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
        optimizer.step()
        self.lr_schedulers().step()
        return loss


def test_manual_optimization_under_the_other_name() -> None:
    report = same(Manual)
    assert report.steps_replayed >= 60, str(report)
    assert report.plan == "{F} {B} {O}", str(report)


def test_a_hook_after_backward_runs_on_every_step() -> None:
    report = same(AfterBackward)
    assert report.plan == "{F B} {O}", str(report)
    assert report.steps_replayed >= 75, str(report)
    assert any("AfterBackward.on_after_backward" in row.reason for row in report.fallbacks)


def test_callbacks_of_the_other_package_count_as_callbacks() -> None:
    scheduling = pl.callbacks.GradientAccumulationScheduler
    report = same(more=lambda: [scheduling({0: 1, 1: 2}), pl.callbacks.LambdaCallback()])
    assert report.steps_replayed >= 60, str(report)
    assert report.plan == "{F B O}", str(report)


def test_checkpoints_hold_the_parameters(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    callback = PyGraphCallback(engine="emulated", warmup_steps=2)
    keeping = pl.callbacks.ModelCheckpoint(dirpath=path, save_last=True)
    module = Module()
    found = train(lambda: module, [keeping, callback], enable_checkpointing=True)
    assert callback.report().steps_replayed >= 75 and len(found) == 92
    state = torch.load(path / "last.ckpt", weights_only=False)["state_dict"]
    assert differs(frozen(dict(module.state_dict())), frozen(dict(state))) is None


def test_two_callbacks_are_refused_by_the_exception_of_the_package() -> None:
    misconfiguration = import_module("pytorch_lightning.utilities.exceptions").MisconfigurationException
    with pytest.raises(misconfiguration, match="2 PyGraphCallbacks"):
        train(Module, [PyGraphCallback(), PyGraphCallback()])


def test_a_subclass_comes_from_the_package_of_its_base() -> None:
    class Trainer(pl.Trainer):
        pass

    other = Trainer(accelerator="cpu", devices=1, logger=False)
    assert root_of(other) == "pytorch_lightning"
    package = package_of(other)
    assert package is not None and package.module is pl.LightningModule
    assert base_of(Module()) is pl.LightningModule and base_of(Diary()) is pl.Callback
    assert base_of(PyGraphCallback()) is import_module("lightning.pytorch").Callback
    assert base_of(nn.Linear(1, 1)) is None


def test_a_trainer_of_neither_is_refused_by_its_import() -> None:
    stranger = type("Trainer", (), {"__module__": "other_lightning.trainer.trainer"})()
    callback = PyGraphCallback(engine="emulated")
    callback.on_train_start(stranger, Module())
    (row,) = callback.report().fallbacks
    assert (
        row.reason
        == "the Trainer comes from `import other_lightning`, which PyGraphCallback does not support"
    )
    assert (
        row.fix
        == "Take the Trainer from `import lightning.pytorch as pl` or from `import pytorch_lightning as pl`"
    )
    with pytest.raises(PyGraphError, match="comes from `import other_lightning`"):
        PyGraphCallback(engine="emulated", on_failure="raise").on_train_start(stranger, Module())


def test_without_the_package_the_error_names_it() -> None:
    script = "import sys; sys.modules['lightning'] = None; from pygraph_train import PyGraphCallback"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(
        "ImportError: PyGraphCallback needs the package `lightning`, also for the Trainer of"
    )


def test_callbacks_in_the_wrong_place_say_where_they_belong() -> None:
    with pytest.raises(
        MisconfigurationException, match=r"In Lightning Fabric call PyGraphFabric\(\)\.attach"
    ):
        Fabric(accelerator="cpu", devices=1, callbacks=[PyGraphCallback()]).setup(Net())
    with pytest.raises(
        TypeError, match=r"is no callback of Fabric: call PyGraphFabric\(\)\.attach\(fabric\)"
    ):
        Fabric(accelerator="cpu", devices=1, callbacks=[PyGraphFabric()]).setup(Net())
