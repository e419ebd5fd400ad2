"""Lightning's manual optimization, with a graph for each phase and without: the same numbers, bit for bit.

`test_lightning_by_hand.py` has the steps that are one graph.
"""

from __future__ import annotations

import copy
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pl = pytest.importorskip("lightning.pytorch")

from fabric_training import fresh  # noqa: E402, F401
from lightning.pytorch.plugins.precision import Precision  # noqa: E402
from lightning_training import (  # noqa: E402
    QUIET,
    MemoryLogger,
    assert_nothing_left,
    emulated,
    fit,
    loader,
    parity,
)
from test_lightning_callback import scaled_on_cpu  # noqa: E402
from training import Net, differs, frozen  # noqa: E402

from pygraph_train import PyGraphError  # noqa: E402
from pygraph_train.report.announcements import metrics_of  # noqa: E402

MIXED = {"precision": "bf16-mixed"}


def phases(*args: Any, config: dict[str, Any] | None = None, **options: Any) -> Any:
    """`parity` of steps whose phases have graphs of their own."""
    return parity(*args, config=config, **options)


def adamw(module: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), **{"lr": 1e-2, "fused": True, **options})


class Manual(pl.LightningModule):
    """What the modules here have in common."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def cross_entropy(self, out: Tensor, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(out, batch[1])


class Gan(Manual):
    """The GAN of Lightning's documentation: two optimizers, each of which toggles the parameters of the other one."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 6))
        self.discriminator = nn.Sequential(
            nn.Linear(6, 16), nn.LeakyReLU(0.2), nn.Dropout(0.1), nn.Linear(16, 1)
        )

    def forward(self, z: Tensor) -> Tensor:
        return self.generator(z)

    def adversarial(self, out: Tensor, real: bool) -> Tensor:
        return nn.functional.binary_cross_entropy_with_logits(out, torch.full_like(out, float(real)))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        first, second = self.optimizers()
        x = batch[0]
        z = torch.randn(len(x), 4, device=x.device)
        self.toggle_optimizer(first)
        loss = self.adversarial(self.discriminator(self(z)), True)
        self.log("g_loss", loss, prog_bar=True)
        first.zero_grad()
        self.manual_backward(loss)
        first.step()
        self.untoggle_optimizer(first)

        self.toggle_optimizer(second)
        real = self.adversarial(self.discriminator(x), True)
        fake = self.adversarial(self.discriminator(self(z).detach()), False)
        loss = (real + fake) / 2
        self.log("d_loss", loss, prog_bar=True, on_step=True, on_epoch=True)
        second.zero_grad()
        self.manual_backward(loss)
        second.step()
        self.untoggle_optimizer(second)

    def configure_optimizers(self) -> Any:
        return [adamw(self.generator, betas=(0.5, 0.999)), adamw(self.discriminator, betas=(0.5, 0.999))]


@pytest.mark.parametrize(
    "options", [{}, MIXED, {"precision": "64-true"}, {"precision": "bf16-true"}], ids=str
)
def test_a_gan_whose_optimizers_are_toggled(options):
    phases(Gan, logger=MemoryLogger(), replays=111, plan="{F} {B} {O}", **options)


class Wgan(Gan):
    """Three steps of the critic for one of the generator, and weights clipped in place."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        generator, critic = self.optimizers()
        x = batch[0]
        z = torch.randn(len(x), 4, device=x.device)
        with self.toggled_optimizer(critic):
            critic.zero_grad()
            loss = self.discriminator(self(z).detach()).mean() - self.discriminator(x).mean()
            self.manual_backward(loss)
            critic.step()
            for p in self.discriminator.parameters():
                p.data.clamp_(-0.05, 0.05)
        self.log("critic", loss)
        if batch_idx % 3 == 2:
            with generator.toggle_model():
                loss = -self.discriminator(self(z)).mean()
                generator.zero_grad()
                self.manual_backward(loss)
                generator.step()
            self.log("generator", loss)
        return loss


def test_a_wgan_with_several_steps_of_the_critic():
    _, graphed = phases(Wgan, logger=MemoryLogger(), max_epochs=8, replays=179, plan="{F} {B} {O}")
    assert graphed.report.optimizer_steps_replayed >= 60, str(graphed.report)
    assert graphed.report.steps == 88


def test_optimizers_without_kernels_for_graphs_step_as_they_are():
    class Rmsprop(Wgan):
        def configure_optimizers(self) -> Any:
            return tuple(
                torch.optim.RMSprop(m.parameters(), lr=1e-3) for m in (self.generator, self.discriminator)
            )

    _, graphed = phases(Rmsprop, logger=MemoryLogger(), replays=31, plan="{F} {B} O")
    (row,) = graphed.report.fallbacks
    assert row.reason.startswith("the optimizer runs outside of graphs: RMSprop has no fused CPU kernels")
    assert row.step == 1


class Classifier(Manual):
    """Adds up gradients over three batches, clips them, and steps a schedule by hand."""

    def __init__(self, algorithm: str | None = None, schedule: str = "cosine", **options: Any) -> None:
        super().__init__()
        self.net = Net()
        self.algorithm, self.schedule, self.options = algorithm, schedule, options

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        every = 1 if self.algorithm is None else 3
        loss = self.cross_entropy(self.net(batch[0]), batch)
        self.manual_backward(loss / every)
        if (batch_idx + 1) % every == 0:
            if self.algorithm is not None:
                value = 0.1 if self.algorithm == "norm" else 0.01
                self.clip_gradients(
                    optimizer, gradient_clip_val=value, gradient_clip_algorithm=self.algorithm
                )
            optimizer.step()
            optimizer.zero_grad()
            if self.schedule == "cosine":
                self.lr_schedulers().step()
        self.log("loss", loss, prog_bar=True, on_step=True, on_epoch=True)
        self.log("rate", optimizer.param_groups[0]["lr"])
        return {"loss": loss, "count": batch_idx}

    def on_train_epoch_end(self) -> None:
        if self.schedule == "plateau":
            self.lr_schedulers().step(self.trainer.callback_metrics["loss_epoch"])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("validated", self.cross_entropy(self.net(batch[0]), batch))

    def configure_optimizers(self) -> Any:
        optimizer = adamw(self.net, **self.options)
        schedulers = torch.optim.lr_scheduler
        if self.schedule == "plateau":
            return [optimizer], [schedulers.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)]
        return [optimizer], [schedulers.CosineAnnealingLR(optimizer, T_max=30)]


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_gradients_added_up_and_clipped_by_hand(algorithm):
    _, graphed = phases(
        lambda: Classifier(algorithm), max_epochs=8, validate=True, replays=104, plan="{F} {B} {O}"
    )
    assert graphed.report.optimizer_steps_replayed >= 10, str(graphed.report)
    assert graphed.report.steps == 88


@pytest.mark.parametrize("schedule", ["cosine", "plateau"])
@pytest.mark.parametrize("options", [{}, MIXED], ids=str)
def test_a_schedule_stepped_by_hand(schedule, options):
    phases(
        lambda: Classifier(schedule=schedule),
        logger=MemoryLogger(),
        replays=79,
        plan="{F} {B} {O}",
        **options,
    )


def test_validation_in_between():
    phases(
        Classifier,
        logger=MemoryLogger(),
        validate=True,
        val_check_interval=0.25,
        replays=79,
        plan="{F} {B} {O}",
    )


class Teacher(Classifier):
    """A student, and a teacher that follows it: the mean of the weights of earlier steps."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        with torch.no_grad():
            told = self.teacher(batch[0]).softmax(1)
        out = self.net(batch[0])
        loss = self.cross_entropy(out, batch) + nn.functional.mse_loss(out.softmax(1), told)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        with torch.no_grad():
            for slow, fast in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
                slow.lerp_(fast, 0.1)
        self.log("loss", loss)
        return loss


def test_a_teacher_that_follows_the_student():
    phases(Teacher, logger=MemoryLogger(), replays=79, plan="{F} {B} {O}")


class Saves(pl.Callback):
    """Saves the training at the end of an epoch."""

    def __init__(self, path: Path, epoch: int) -> None:
        self.path, self.epoch = path, epoch

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == self.epoch:
            trainer.save_checkpoint(self.path)


@pytest.mark.parametrize("kind", [Gan, Classifier])
def test_saved_and_resumed(kind, tmp_path):
    least = 100 if kind is Gan else 80  # of forwards and updates, and of two of each step of the Gan
    phases(
        kind, lambda: [Saves(tmp_path / f"{len(list(tmp_path.iterdir()))}", 1)], max_epochs=4, replays=least
    )
    plain, graphed = (
        torch.load(path, weights_only=False) for path in sorted(tmp_path.iterdir(), key=lambda p: p.name)
    )
    for saved in (plain, graphed):
        saved["callbacks"] = saved["pytorch-lightning_version"] = None
    assert differs(frozen(plain), frozen(graphed)) is None
    assert plain["global_step"] == (44 if kind is Gan else 22)
    phases(kind, ckpt_path=tmp_path / "1", max_epochs=6, replays=least)


# -- what else a training step does ---------------------------------------------------------------------


@pytest.mark.parametrize("fused", [True, False])
def test_a_scaler_skips_steps_with_overflow(fused):
    class Overflows(Gan):
        def adversarial(self, out: Tensor, real: bool) -> Tensor:
            return super().adversarial(out, real) * torch.where(out.max() > 1.0, float("inf"), 1.0)

        def configure_optimizers(self) -> Any:
            parts = (self.generator, self.discriminator)
            return [torch.optim.SGD(m.parameters(), lr=1e-2, momentum=0.9, fused=fused) for m in parts]

        def on_train_batch_end(self, *args: Any) -> None:
            scales.append(self.trainer.precision_plugin.scaler.get_scale())

    scales: list[float] = []
    _, graphed = phases(
        Overflows,
        logger=MemoryLogger(),
        plugins=[scaled_on_cpu()],
        replays=111 if fused else 40,  # without graphs of the two updates
        plan="{F} {B} {O}" if fused else "{F} {B} O",
    )
    assert scales[:44] == scales[44:] and any(now < before for before, now in pairwise(scales[:44]))
    if not fused:
        (row,) = graphed.report.fallbacks
        assert "pass fused=True" in row.reason


def test_closures():
    class Closures(Gan):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            first, second = self.optimizers()
            x = batch[0]
            z = torch.randn(len(x), 4)

            def generator() -> Tensor:
                first.zero_grad()
                loss = self.adversarial(self.discriminator(self(z)), True)
                self.manual_backward(loss)
                return loss.detach()

            def discriminator() -> None:
                second.zero_grad()
                self.manual_backward(
                    self.adversarial(self.discriminator(torch.cat([x, self(z).detach()])), True)
                )

            with first.toggle_model(), torch.no_grad():  # closures run with gradients
                returned = first.step(generator)
            with second.toggle_model():
                assert second.step(closure=discriminator) is None
            self.log("returned", returned)

    phases(Closures, logger=MemoryLogger(), replays=111, plan="{F} {B} {O}")


def test_an_optimizer_that_asks_several_times_for_the_loss():
    class Newton(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            optimizer = self.optimizers()

            def closure() -> Tensor:
                optimizer.zero_grad()
                loss = self.cross_entropy(self.net(batch[0]), batch)
                self.manual_backward(loss)
                return loss

            self.log("loss", optimizer.step(closure))

        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)

    _, graphed = phases(Newton, logger=MemoryLogger(), replays=41, plan="{F} {B} O")
    assert any("LBFGS" in f.reason for f in graphed.report.fallbacks)


class Hooks(pl.Callback):
    """Looks at gradients wherever Lightning asks callbacks, and changes them before the update."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_before_zero_grad(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.seen.append("zero")

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        self.seen.append(loss.item())

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        self.seen.append([p.grad is None or p.grad.norm().item() for p in pl_module.parameters()])

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"]]
        for gradient in gradients:
            gradient.mul_(0.5)
        self.seen.append((type(optimizer).__name__, trainer.global_step))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        diary = next(c for c in trainer.callbacks if hasattr(c, "entries"))
        diary.entries.append(("seen by hooks", frozen(self.seen)))


def test_hooks_see_and_change_what_is_there():
    class Overrides(Gan):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            self.log("norm", optimizer.param_groups[0]["params"][0].grad.norm())

        def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
            (loss * 2).backward(*args, **kwargs)

    phases(Overrides, lambda: [Hooks()], logger=MemoryLogger(), replays=111, plan="{F} {B} {O}")


def test_a_step_hook_runs_with_what_lightning_passes():
    class Watched(Classifier):
        def configure_optimizers(self) -> Any:
            found = super().configure_optimizers()
            found[0][0].register_step_pre_hook(self.look)
            self.looked: list[Any] = []
            return found

        def look(self, optimizer: Any, args: Any, kwargs: Any) -> None:
            self.looked.append((len(args), list(kwargs), self.net.first.weight.grad is None))

    plain, graphed = phases(Watched, replays=40, plan="{F} {B} O")
    assert plain.module.looked == graphed.module.looked and len(plain.module.looked) == 44
    assert any("the optimizer step hook" in f.reason for f in graphed.report.fallbacks)


def test_a_forward_that_logs_and_counts():
    class Chatty(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            out = self.net(x)
            self.log("mean", out.mean())
            self.log("calls", float(self.calls))
            return out * 2

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            optimizer = self.optimizers()
            loss = self.cross_entropy(self(batch[0]), batch)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()

    plain, graphed = phases(Chatty, logger=MemoryLogger(), replays=67, plan="{F} {B} {O}")
    assert plain.module.calls == graphed.module.calls == 44


def test_a_forward_called_by_its_name_runs_as_it_is():
    class Named(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(self.cross_entropy(self.net.forward(batch[0]), batch))
            optimizer.step()

    _, graphed = phases(Named, replays=20, plan="F B {O}")
    assert any("the loop did not call Net with gradients" in f.reason for f in graphed.report.fallbacks)


def test_optimizers_that_lightning_does_not_wrap():
    class Raw(Gan):
        def optimizers(self, use_pl_optimizer: bool = True) -> Any:
            return super().optimizers(use_pl_optimizer=False)

    _, graphed = phases(Raw, logger=MemoryLogger(), replays=32, plan="{F} {B} O")
    (told,) = (f for f in graphed.report.fallbacks if "called step() of no optimizer" in f.reason)
    assert "self.optimizers()" in told.fix
    assert graphed.report.steps_replayed == 0, str(graphed.report)


def test_no_optimizer():
    class Without(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.manual_backward(self.cross_entropy(self.net(batch[0]), batch))
            with torch.no_grad():
                for p in self.net.parameters():
                    p -= 0.01 * p.grad
            self.zero_grad()

        def configure_optimizers(self) -> None:
            return None

    _, graphed = phases(Without, replays=40, plan="{F} {B} O")
    (told,) = (f for f in graphed.report.fallbacks if "called step() of no optimizer" in f.reason)
    assert "self.optimizers()" in told.fix
    assert graphed.report.steps_replayed == 0, str(graphed.report)


def test_optimizers_replaced_in_mid_run():
    class Renew(pl.Callback):
        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            if trainer.current_epoch == 2:
                trainer.strategy.setup_optimizers(trainer)

    _, graphed = phases(Gan, lambda: [Renew()], max_epochs=5, replays=138, plan="{F} {B} {O}")
    assert graphed.report.optimizer_steps_replayed > 40, str(graphed.report)


def test_layers_frozen_for_a_while():
    class Freezes(Classifier):
        def on_train_epoch_start(self) -> None:
            self.net.first.requires_grad_(self.current_epoch % 2 == 0)

    phases(Freezes, max_epochs=6, logger=MemoryLogger(), replays=80, plan="{F} {B} {O}")


def test_a_gradient_penalty():
    class Penalty(Wgan):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            _, critic = self.optimizers()
            x = batch[0].clone().requires_grad_(True)
            out = self.discriminator(x)
            (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
            loss = -out.mean() + (slope.norm(dim=1) - 1).square().mean()
            critic.zero_grad()
            self.manual_backward(loss)
            critic.step()
            super().training_step(batch, batch_idx)

    _, graphed = phases(Penalty, logger=MemoryLogger(), replays=75)
    assert any("is differentiated itself (create_graph=True)" in f.reason for f in graphed.report.fallbacks)


# -- the callback itself -----------------------------------------------------------------------------


@pytest.mark.slow_after(4)
@pytest.mark.parametrize("error", [ValueError("boom"), KeyboardInterrupt()], ids=["error", "ctrl-c"])
@pytest.mark.parametrize("batch", [0, 1, 5, 30])
@pytest.mark.parametrize("place", ["training_step", "on_before_optimizer_step"])
def test_exceptions_leave_everything_as_it_was(error, batch, place):
    armed = [True]

    class Fails(Gan):
        def fail(self, where: str) -> None:
            if armed and where == place and self.trainer.global_step >= 2 * batch:
                raise error

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            super().training_step(batch, batch_idx)
            self.fail("training_step")

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            self.fail("on_before_optimizer_step")

    module, callback = Fails(), emulated()
    parts = [module.generator, module.discriminator]
    attributes = [set(vars(part)) for part in parts]
    trainer = pl.Trainer(accelerator="cpu", max_epochs=4, callbacks=[callback], **QUIET)
    with pytest.raises(SystemExit if isinstance(error, KeyboardInterrupt) else ValueError):
        trainer.fit(module, loader())
    assert_nothing_left(trainer, module)
    assert [set(vars(part)) for part in parts] == attributes
    for optimizer in trainer.optimizers:
        assert "step" not in vars(optimizer)
        assert not optimizer._optimizer_step_pre_hooks and not optimizer._optimizer_state_dict_post_hooks
    assert callback.report().optimizer_steps_replayed >= (30 if batch == 30 else 0), str(callback.report())
    assert json.dumps(callback.report().to_dict())
    armed.clear()
    module.requires_grad_(True)  # it was toggled
    again = fit([emulated()], module=module)  # and it trains as ever
    assert again.report.optimizer_steps_replayed >= 40, str(again.report)


def test_on_failure_raise():
    with pytest.raises(PyGraphError, match="detect_anomaly"):
        fit([emulated(on_failure="raise")], module=Gan(), detect_anomaly=True)


def test_what_cannot_be_served_is_told():
    phases(Gan, detect_anomaly=True, max_epochs=2, refused="detect_anomaly")
    phases(Gan, plugins=[Other()], max_epochs=2, refused="precision plugin Other is not one of")


class Other(Precision):
    """A precision plugin of somebody else."""


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_without_an_engine_nothing_is_patched():
    class Looks(pl.Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, *args: Any) -> None:
            assert_nothing_left(trainer, pl_module)

    phases(Gan, lambda: [Looks()], config={"engine": "auto"}, refused="no CUDA device")


def test_the_report_is_printed_once_and_counts_batches(capsys):
    done = fit([emulated()], module=Wgan())
    assert capsys.readouterr().out.count("pygraph-train: ") == 1
    assert done.report.steps == 44 and done.report.steps_replayed >= 20, str(done.report)
    assert done.report.to_dict()["plan"] == "{F} {B} {O}"


def test_global_step_counts_updates_and_the_loss_of_the_step_is_passed_on():
    class Looks(pl.Callback):
        def on_train_batch_end(
            self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            assert list(outputs) == ["loss", "count"] and not outputs["loss"].requires_grad
            assert trainer.global_step == trainer.fit_loop.total_batch_idx + 1

    phases(Classifier, lambda: [Looks()], replays=79, plan="{F} {B} {O}")


def test_loggers_get_the_time_of_a_step_and_how_much_ran_from_graphs():
    report = fit([emulated()], module=Gan()).report
    share = {"pygraph/share_from_graphs": report.steps_from_graphs / report.steps}
    assert metrics_of(report) == share and 0.5 < share["pygraph/share_from_graphs"] < 1
    report.engine = "cuda"
    assert metrics_of(report) == {**share, "pygraph/step_ms": report.ms_with_graph}
