"""Plans with separate phases in a Lightning Trainer, and what the callback shows of its decisions."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import nn

pl = pytest.importorskip("lightning.pytorch")

from lightning.pytorch.callbacks import ProgressBar  # noqa: E402
from lightning_training import MemoryLogger, Module, emulated, fit, parity, refused, replayed  # noqa: E402

from pygraph_train import PyGraphCallback  # noqa: E402

OFF = {"forward": "off", "backward": "off"}


@pytest.mark.slow_after(3)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_clip_val": 0.05},
        {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
        {"accumulate_grad_batches": 3, "max_epochs": 6},
        {"accumulate_grad_batches": 2, "precision": "bf16-mixed"},
        {"precision": "64-true"},
    ],
    ids=str,
)
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_the_optimizer_alone(optimizer, options):
    # two steps without a graph, four to see whether gradients stay where they are, and a first replay
    least = 36 // options.get("accumulate_grad_batches", 1) - 7
    make = lambda: Module(optimizer, "step")  # noqa: E731
    parity(make, config=OFF, logger=MemoryLogger(), **options, replays=least, plan="F B {O}")


@pytest.mark.slow_after(2)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_clip_val": 0.05},
        {"accumulate_grad_batches": 2, "max_epochs": 8},
        {"precision": "bf16-mixed"},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"backward": "off"}, {"replays": 15}),
        ({"forward": "off"}, {"replays": 15}),
        ({"backward": "off", "optimizer": "off"}, {"replays": 15}),
        (
            {"forward": "off", "optimizer": "off"},
            {"never": "eager kernels have no graph of a backward alone"},
        ),
    ],
    ids=str,
)
def test_forward_or_backward_alone(config, expected, options):
    parity(lambda: Module(scheduler="step"), config=config, logger=MemoryLogger(), **options, **expected)


def test_a_step_that_reads_on_the_host_keeps_its_optimizer_graph():
    class Reads(Module):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss(batch)
            print("loss", float(loss), file=io.StringIO())
            return loss

    parity(Reads, gradient_clip_val=0.05, replays=25)


class Accuracy(nn.Module):
    """Like a torchmetrics metric: Python state beside its tensors."""

    def __init__(self) -> None:
        super().__init__()
        self._update_count = 0
        self._computed: Any = None
        self.register_buffer("right", torch.zeros(()))

    def forward(self, out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        self._update_count += 1
        self._computed = None
        self.right += (out.argmax(1) == target).sum()
        self._computed = self.right / (self._update_count * len(target))
        return self._computed


class Measures(Module):
    """A metric object, and a read of `global_step`."""

    def __init__(self) -> None:
        super().__init__()
        self.metric = Accuracy()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        out = self.net(batch[0])
        loss = nn.functional.cross_entropy(out, batch[1])
        self.log("accuracy", self.metric(out.detach(), batch[1]), on_step=True, on_epoch=True)
        self.log("weighted", loss.clamp(max=0.1 * self.global_step), prog_bar=True)
        return loss


class Weighted(Module):
    """Numbers that change with each step, as tensors are multiplied with them."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("weighted", loss * self.global_step, prog_bar=True)
        return loss * (1 + 0.01 * batch_idx) + 0.9**self.global_step


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    "options", [{}, {"accumulate_grad_batches": 2}, {"precision": "bf16-mixed"}], ids=str
)
def test_the_numbers_of_step_and_batch_are_read_before_each_replay(options):
    fits = parity(Weighted, logger=MemoryLogger(), max_epochs=3, replays=20, **options)
    report = fits[1].report
    assert report is not None and report.running_plan == "{F} {B} {O}", str(report)


@pytest.mark.parametrize(
    "options",
    [{}, {"gradient_clip_val": 0.05}, {"accumulate_grad_batches": 2}, {"precision": "bf16-mixed"}],
    ids=str,
)
def test_a_metric_and_the_step_number_are_python_on_every_step(options):
    parity(
        Measures,
        logger=MemoryLogger(),
        max_epochs=6 * options.get("accumulate_grad_batches", 1),
        **options,
        replays=120,
    )


@pytest.mark.slow
def test_a_hook_before_the_optimizer_and_a_metric():
    class Both(Measures):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            norms = [p.grad.norm() for p in self.parameters() if p.grad is not None]
            self.log("norm", torch.stack(norms).norm())

    report = parity(Both, logger=MemoryLogger(), max_epochs=6, replays=120)[1].report
    assert report is not None and report.running_plan == "{F} {B} {O}", str(report)


def in_regions(report: Any, plan: str = "{F} {B} {O}") -> None:
    """Assert that a test which claims parity really replayed, and no phase that the plan leaves out."""
    assert report.running_plan == plan, str(report)
    found = report.phases_from_graphs
    assert all((found[phase] >= 15) == ("{" + phase + "}" in plan) for phase in "FB"), str(report)


class Norms(Module):
    """Logs the gradient norm between backward and the optimizer."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        norms = [p.grad.norm() for p in self.parameters() if p.grad is not None]
        self.log("norm", torch.stack(norms).norm(), on_step=True, on_epoch=True)


@pytest.mark.parametrize(
    "options", [{}, {"gradient_clip_val": 0.05}, {"accumulate_grad_batches": 2}], ids=str
)
def test_gradient_norms_are_logged_in_a_split_plan(options):
    """Unclipped, as without graphs: clipping is part of the optimizer's graph."""
    report = parity(Norms, logger=MemoryLogger(), **options, replays=20, plan="{F} {B} {O}")[1].report
    # an update of a single micro-batch, at the end of an epoch, finds gradients elsewhere
    assert report.optimizer_steps_replayed >= 15, str(report)


def test_a_batch_without_a_loss_is_skipped_as_lightning_skips_it():
    class Skips(Module):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None if batch_idx % 4 == 3 else self.loss(batch)

    parity(Skips, config=OFF, replays=20)


def test_a_clipping_threshold_that_changes_is_obeyed():
    class Changes(pl.Callback):
        def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
            trainer.gradient_clip_val = 0.05 if trainer.current_epoch < 2 else 0.01

    fits = parity(make_callbacks=lambda: [Changes()], config=OFF, gradient_clip_val=0.05, replays=25)
    report = refused(fits)
    assert [c.plan for c in report.captures] == ["{O}", "{O}"]


def test_a_progress_bar_that_cannot_be_switched_off():
    class Bar(ProgressBar):
        pass

    replayed(fit([emulated(), Bar()], enable_progress_bar=True))


class Measured(PyGraphCallback):
    """Looks as if the engine had measured."""

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        engine, self._report.engine = self._report.engine, "cuda"
        try:
            super().on_train_batch_end(trainer, *args)
        finally:
            self._report.engine = engine


def test_loggers_get_what_was_measured_at_the_trainers_cadence():
    logger = MemoryLogger()
    fit([Measured(engine="emulated", warmup_steps=2, log_metrics=True)], logger=logger, log_every_n_steps=5)
    ours = [(step, m) for step, m in logger.received if "pygraph/step_ms" in m]
    assert ours and all(step % 5 == 0 for step, _ in ours)
    assert len({step for step, _ in ours}) == len(ours)
    names = {"pygraph/share_from_graphs", "pygraph/step_ms"}
    assert set(ours[-1][1]) == names and ours[-1][1]["pygraph/share_from_graphs"] > 0.8


@pytest.mark.parametrize("asked", [False, True])
def test_loggers_get_nothing_unless_asked_and_no_declared_times(asked):
    logger = MemoryLogger()
    replayed(fit([emulated(log_metrics=asked)], logger=logger))
    names = {name for _, metrics in logger.received for name in metrics if name.startswith("pygraph/")}
    assert names == ({"pygraph/share_from_graphs"} if asked else set())


def test_a_trainer_that_logs_in_no_step():
    logger = MemoryLogger()
    replayed(fit([emulated(log_metrics=True)], logger=logger, log_every_n_steps=0))
    assert not any(name.startswith("pygraph/") for _, metrics in logger.received for name in metrics)
