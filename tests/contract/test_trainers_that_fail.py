"""What goes wrong in a Lightning Trainer: exceptions, Ctrl-C, and what is left behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from .compare import Run, same_as_plain
from .frameworks import fit, loader
from .models import DEVICE, batches

pl = pytest.importorskip("lightning.pytorch")

from .lightning_module import Module  # noqa: E402


class Failing(Module):
    """Raises in a hook or in the step of one batch."""

    place, kind, at = "", ValueError, 15

    def fail(self, place: str, batch_idx: int) -> None:
        if place == self.place and batch_idx == self.at:
            raise self.kind(f"raised in {place}")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.fail("the step", batch_idx)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.fail("a hook", batch_idx)

    def on_exception(self, exception: BaseException) -> None:
        """Lightning calls callbacks only; this is for the reader."""


@pytest.mark.parametrize("place", ["the step", "a hook"])
@pytest.mark.parametrize("at", [0, 15])
@pytest.mark.quick
@same_as_plain(replays=0)
def test_an_exception_ends_the_fit_and_another_fit_goes_on(run: Run, place: str, at: int) -> None:
    seen: list[str] = []

    class Noting(pl.Callback):
        def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
            seen.append(f"{type(exception).__name__}: {exception}")

    module = Failing()
    module.place, module.at = place, at
    with run.may_raise(ValueError):
        fit(run, module, loader(batches(24)), callbacks=[Noting()])
    run.note("seen", seen)
    run.note("attributes", [sorted(vars(m)) for m in module.modules()])
    module.at = -1
    fit(run, module, loader(batches(8)))


@same_as_plain(replays=6)
def test_ctrl_c_ends_the_fit_as_without_the_library(run: Run) -> None:
    module = Failing()
    module.place, module.kind = "a hook", KeyboardInterrupt
    with run.may_raise(KeyboardInterrupt, SystemExit):
        fit(run, module, loader(batches(24)))
    run.note("module", module)
    run.note("attributes", [sorted(vars(m)) for m in module.modules()])


@pytest.mark.skipif(DEVICE == "cuda", reason="CUDA is of no use to a process behind a bad label")
@same_as_plain(replays=12)
def test_a_batch_that_is_bad_ends_the_fit_with_torchs_error(run: Run) -> None:
    data = batches(24)
    data[18] = (data[18][0], torch.full((8,), 7))
    module = Module()
    with run.may_raise(IndexError):
        fit(run, module, loader(data))
    run.note("module", module)
