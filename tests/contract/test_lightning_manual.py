"""`PyGraphCallback`: Lightning's Trainer under manual optimization."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from .compare import Run, same_as_plain
from .frameworks import fit, loader, memory_logger
from .models import Net, adamw, batches, cross_entropy, sgd

pl = pytest.importorskip("lightning.pytorch")


class Manual(pl.LightningModule):
    """Has two networks: a classifier, or generator and discriminator."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.net = Net()
        self.maker = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 6))

    def configure_optimizers(self) -> Any:
        return [adamw(self.net), adamw(self.maker)]

    def loss(self, batch: Any) -> Tensor:
        return cross_entropy(self.net(batch[0]), batch[1])


@same_as_plain(replays=12)
def test_a_gan_with_two_optimizers_that_are_toggled(run: Run) -> None:
    class Gan(Manual):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            of_net, of_maker = self.optimizers()
            noise = torch.randn(len(batch[0]), 4)
            self.toggle_optimizer(of_maker)
            loss = softplus(-self.net(self.maker(noise))).mean()
            self.log("maker", loss, prog_bar=True)
            of_maker.zero_grad()
            self.manual_backward(loss)
            of_maker.step()
            self.untoggle_optimizer(of_maker)
            self.toggle_optimizer(of_net)
            made = self.maker(noise).detach()
            loss = softplus(-self.net(batch[0])).mean() + softplus(self.net(made)).mean()
            self.log("judge", loss, on_step=True, on_epoch=True)
            of_net.zero_grad()
            self.manual_backward(loss)
            of_net.step()
            self.untoggle_optimizer(of_net)

    fit(run, Gan(), loader(batches()), logger=memory_logger()())


@same_as_plain(replays=12)
def test_one_optimizer_with_clipping_and_a_scheduler(run: Run) -> None:
    class Clipping(Manual):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            optimizer = self.optimizers()
            loss = self.loss(batch)
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
            optimizer.step()
            self.lr_schedulers().step()
            return loss.detach()

        def configure_optimizers(self) -> Any:
            optimizer = sgd(self.net)
            return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]

    fit(run, Clipping(), loader(batches()))


class Accumulating(Manual):
    """Steps its optimizer after so many batches."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        self.manual_backward(self.loss(batch) / self.count)
        if (batch_idx + 1) % self.count == 0:
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        return adamw(self.net)


@same_as_plain(replays=12, updates=4)
def test_accumulation_by_hand(run: Run) -> None:
    fit(run, Accumulating(3), loader(batches(48)))


@same_as_plain(replays=12, updates=0)
def test_an_optimizer_that_lightning_does_not_know(run: Run) -> None:
    class Own(Manual):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            self.optimizer.step()

        def configure_optimizers(self) -> None:
            self.optimizer = adamw(self.net)

    trainer = fit(run, Own(), loader(batches(32)))
    if run.ours:
        headline = trainer.callbacks[0].report().headline()
        assert "called step() of no optimizer" in headline and "step one of self.optimizers()" in headline


@same_as_plain(replays=40, updates=1)
def test_more_batches_than_the_report_waits_for_are_accumulated(run: Run) -> None:
    """What the report says of optimizers that nobody steps is withdrawn with the first step."""
    trainer = fit(run, Accumulating(24), loader(batches(96)))
    if run.ours:
        assert "Nothing stands in the way of more" in trainer.callbacks[0].report().headline()


@same_as_plain(replays=6, last_bits=True)
def test_arguments_of_a_backward_by_position(run: Run) -> None:
    """Late backwards are made to be differentiated themselves, and parameters get their gradients all the same."""

    class Positional(Manual):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            _, optimizer = self.optimizers()
            optimizer.zero_grad()
            loss = self.maker(batch[0][:, :4]).square().mean()
            self.manual_backward(loss, *([None, True, True] if batch_idx == 12 else []))
            optimizer.step()
            run.note("loss", loss)

    fit(run, Positional(), loader(batches()), logger=False)


@same_as_plain(replays=6)
def test_several_updates_of_one_part_for_one_of_the_other(run: Run) -> None:
    """A Wasserstein GAN, whose weights are clipped in place."""

    class Critic(Manual):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            of_net, of_maker = self.optimizers()
            noise = torch.randn(len(batch[0]), 4)
            of_net.zero_grad()
            self.manual_backward(self.net(self.maker(noise).detach()).mean() - self.net(batch[0]).mean())
            of_net.step()
            with torch.no_grad():
                for p in self.net.parameters():
                    p.clamp_(-0.1, 0.1)
            if batch_idx % 3 == 2:
                of_maker.zero_grad()
                self.manual_backward(-self.net(self.maker(noise)).mean())
                of_maker.step()

    fit(run, Critic(), loader(batches(48)))


@same_as_plain(replays=12)
def test_an_optimizer_with_a_closure(run: Run) -> None:
    class Closing(Manual):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()

            def closure() -> Tensor:
                optimizer.zero_grad()
                loss = self.loss(batch)
                self.manual_backward(loss)
                return loss

            optimizer.step(closure=closure)

        def configure_optimizers(self) -> Any:
            return adamw(self.net)

    fit(run, Closing(), loader(batches()))
