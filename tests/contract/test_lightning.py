"""`PyGraphCallback`: Lightning's Trainer under automatic optimization."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from .compare import Run, same_as_plain
from .frameworks import ACCELERATOR, fit, loader, memory_logger
from .models import DEVICE, Net, adamw, batches, cross_entropy

pl = pytest.importorskip("lightning.pytorch")

from .lightning_module import Module  # noqa: E402


@pytest.mark.notices("the last tensor of a batch is not copied", "a recording leaves its traces")
@same_as_plain(replays=15)
def test_a_fit(run: Run) -> None:
    fit(run, Module(), loader(batches(12)), max_epochs=2)


@same_as_plain(replays=15)
def test_everything_that_is_logged(run: Run) -> None:
    fit(run, Module(), loader(batches(12)), max_epochs=2, logger=memory_logger()())


@same_as_plain(replays=15)
def test_validation_between_batches(run: Run) -> None:
    loaders = loader(batches(12)), loader(batches(3, seed=2))
    fit(run, Module(), loaders[0], validation=loaders[1], max_epochs=2, val_check_interval=4)


@pytest.mark.parametrize("precision", ["bf16-mixed", "64-true"])
@pytest.mark.quick
@same_as_plain(replays=12, updates=12 if DEVICE == "cpu" else 0)  # on CUDA float64 has no graph of the update
def test_other_precisions(run: Run, precision: str) -> None:
    fit(run, Module(), loader(batches(24)), precision=precision)


@same_as_plain(replays=8)
def test_a_step_that_returns_a_dict(run: Run) -> None:
    class Returning(Module):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            out = self.net(batch[0])
            return {"loss": cross_entropy(out, batch[1]), "out": out.detach(), "number": batch_idx}

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            run.note("outputs of the module's hook", outputs)

    fit(run, Returning(), loader(batches(24)))


@same_as_plain(replays=12)
def test_hooks_of_module_and_callback_run_in_lightnings_order(run: Run) -> None:
    called: list[str] = []

    def hook(owner: type, name: str) -> Any:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            called.append(f"{owner.__name__}.{name}")
            return getattr(owner, name)(self, *args, **kwargs)

        return call

    def with_hooks(owner: type) -> Any:
        names = [name for name in dir(owner) if name.startswith("on_")]
        return type("Hooked", (owner,), {name: hook(owner, name) for name in names})()

    callbacks, validation = [with_hooks(pl.Callback)], loader(batches(2))
    fit(run, with_hooks(Module), loader(batches(24)), validation=validation, callbacks=callbacks)
    run.note("called", called)


@same_as_plain(replays=12)
def test_gradients_that_a_hook_changes(run: Run) -> None:
    class Scaling(Module):
        def on_after_backward(self) -> None:
            for p in self.parameters():
                p.grad *= 0.5

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            run.note("norm", torch.stack([p.grad.norm() for p in self.parameters()]).norm().item())

    fit(run, Scaling(), loader(batches(24)))


@same_as_plain(replays=15, updates=10)
def test_updates_that_an_override_leaves_out(run: Run) -> None:
    """They are no updates without a graph."""

    class Rare(Module):
        def optimizer_step(self, *given: Any, **named: Any) -> None:
            if given[1] % 2:
                given[3]()
            else:
                super().optimizer_step(*given, **named)

    fit(run, Rare(), loader(batches(32)))
    assert "the optimizer in" not in str(run)


@same_as_plain(replays=15)
def test_a_step_reads_gradients_of_the_step_before(run: Run) -> None:
    """So it does when a shape is recorded, whose comparison computes gradients at the same place."""

    class Reading(Module):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = cross_entropy(self.net(batch[0]), batch[1])
            before = self.net.second.weight.grad
            return {"loss": loss, "norm": torch.zeros_like(loss) if before is None else before.norm()}

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            run.note("norm", outputs["norm"].detach().clone())

    fit(run, Reading(), loader(2 * [*batches(13), *batches(1, size=3)]))


@same_as_plain(replays=12)
def test_a_data_set_without_a_length(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    class Stream(IterableDataset):
        def __iter__(self) -> Any:
            return iter([(x[0], y[0]) for x, y in batches(50)])

    fit(run, Module(), DataLoader(Stream(), batch_size=4), max_epochs=2)
    assert not [record for record in caplog.records if record.name == "pygraph_train"]


@pytest.mark.parametrize("by_hand", [False, True])
@same_as_plain(replays=15)
def test_the_package_of_another_name(run: Run, *, by_hand: bool) -> None:
    """`import pytorch_lightning as pl`: a copy of Lightning, with classes of its own."""
    other = pytest.importorskip("pytorch_lightning")

    class Watched(other.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()
            self.automatic_optimization = not by_hand

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = cross_entropy(self.net(batch[0]), batch[1])
            self.log("loss", loss, on_epoch=True)
            if by_hand:
                optimizer = self.optimizers()
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()
            return loss

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            run.note("metrics", self.trainer.callback_metrics)
            run.watch(self, *self.trainer.optimizers)
            run.snapshot()

        def configure_optimizers(self) -> Any:
            return adamw(self)

    fit(run, Watched(), loader(batches()), package=other)


@same_as_plain(replays=12, updates=0)
def test_the_compile_backend_in_a_stock_trainer(run: Run) -> None:
    module = Module()
    run.compile(module.net, in_place=True)
    quiet = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    trainer = pl.Trainer(accelerator=ACCELERATOR, devices=1, max_epochs=1, **quiet)
    trainer.fit(module, loader(batches(16)))
    run.note("metrics", trainer.callback_metrics)
    run.snapshot()
