"""Trains with a strategy of Lightning's that starts the processes itself, with and without the callback.

    python tests/spawned_training.py ddp_spawn

Prints whether the parameters are equal, and how many steps were replayed.
"""

from __future__ import annotations

import logging
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning_training import QUIET, Module, loader
from torch import Tensor

from pygraph_train import PyGraphCallback


class Tell(pl.Callback):
    """Leaves the number of replays in a file: the report of a process ends with it."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        ours = [c for c in trainer.callbacks if isinstance(c, PyGraphCallback)]
        if ours and trainer.is_global_zero:
            self._file.write_text(str(ours[0].report().steps_replayed), encoding="utf-8")


def trained(strategy: str, callbacks: list[Any]) -> list[Tensor]:
    """The parameters and buffers after a training of two processes."""
    pl.seed_everything(1, verbose=False)
    module = Module()
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, strategy=strategy, max_epochs=6, callbacks=callbacks, **QUIET
    )
    trainer.fit(module, loader())
    return [t.clone() for t in module.state_dict().values()]


def main() -> None:
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    strategy = sys.argv[1]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "replays"
        plain = trained(strategy, [])
        graphed = trained(strategy, [PyGraphCallback(engine="emulated"), Tell(file)])
        print(f"equal: {all(map(torch.equal, plain, graphed))}, replays: {file.read_text(encoding='utf-8')}")


if __name__ == "__main__":
    main()
