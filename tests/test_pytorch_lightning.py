"""`import pytorch_lightning as pl`, the copy of Lightning under another name, and other places for the callback."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

pytest.importorskip("lightning.pytorch")

from lightning.fabric import Fabric
from lightning.fabric.utilities.exceptions import MisconfigurationException
from training import Net, batches, differs, frozen

from pygraph_train import PyGraphCallback, PyGraphFabric, StepReport


def train(pl: Any, callbacks: list[Any]) -> Any:
    """Thirty steps with the Trainer of a package. Returns what the parameters are then."""

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-2, fused=True)

    torch.manual_seed(0)
    module = Module()
    xs, ys = zip(*batches(30), strict=True)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = pl.Trainer(accelerator="cpu", devices=1, max_epochs=1, callbacks=callbacks, **quiet)
    trainer.fit(module, DataLoader(TensorDataset(torch.cat(xs), torch.cat(ys)), batch_size=8))
    return frozen(module.state_dict())


def refused_by_name(report: StepReport, package: str) -> None:
    (row,) = report.fallbacks
    assert row.reason == (
        f"the Trainer comes from `import {package}`, a copy of Lightning that PyGraphCallback does not know"
    )
    assert row.fix == "Write `import lightning.pytorch as pl`: the same classes are there"
    assert report.steps_replayed == 0


def test_the_trainer_of_the_other_package_is_refused_by_its_import() -> None:
    pl = pytest.importorskip("pytorch_lightning")
    callback = PyGraphCallback(engine="emulated", warmup_steps=2)
    assert differs(train(pl, []), train(pl, [callback])) is None
    refused_by_name(callback.report(), "pytorch_lightning")


def test_a_trainer_of_a_subclass_is_refused_by_the_import_of_its_base() -> None:
    pl = pytest.importorskip("pytorch_lightning")

    class Mine(pl.Trainer):
        pass

    callback = PyGraphCallback(engine="emulated")
    callback.on_train_start(Mine(accelerator="cpu", devices=1, logger=False), pl.LightningModule())
    refused_by_name(callback.report(), "pytorch_lightning")


def test_without_the_package_the_error_names_the_import() -> None:
    script = "import sys; sys.modules['lightning'] = None; from pygraph_train import PyGraphCallback"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(
        "ImportError: PyGraphCallback needs the package `lightning` (`import lightning.pytorch"
    )


def test_callbacks_in_the_wrong_place_say_where_they_belong() -> None:
    with pytest.raises(
        MisconfigurationException, match=r"in Lightning Fabric call PyGraphFabric\(\)\.attach"
    ):
        Fabric(accelerator="cpu", devices=1, callbacks=[PyGraphCallback()]).setup(Net())
    with pytest.raises(
        TypeError, match=r"is no callback of Fabric: call PyGraphFabric\(\)\.attach\(fabric\)"
    ):
        Fabric(accelerator="cpu", devices=1, callbacks=[PyGraphFabric()]).setup(Net())
