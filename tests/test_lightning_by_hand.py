"""Lightning's manual optimization as one graph, with and without the callback: the same numbers, bit for bit."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pl = pytest.importorskip("lightning.pytorch")

from fabric_training import fresh  # noqa: E402, F401
from lightning_training import (  # noqa: E402
    MemoryLogger,
    assert_nothing_left,
    emulated,
    fit,
    loader,
    parity,
)
from test_lightning_manual import MIXED, Classifier, Gan, Hooks, Manual, Saves, Teacher, adamw  # noqa: E402
from training import Net, differs, frozen  # noqa: E402

from pygraph_train import explain  # noqa: E402

WHOLE = {"plan": "{F B O}", "replays": 30}


@pytest.mark.parametrize(
    "options", [{}, MIXED, {"precision": "64-true"}, {"precision": "bf16-true"}], ids=str
)
def test_a_gan_whose_optimizers_are_toggled(options):
    parity(Gan, logger=MemoryLogger(), **WHOLE, **options)


class JudgesFirst(Gan):
    """The generator is first called while it is toggled off."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        first, second = self.optimizers()
        z = torch.randn(len(batch[0]), 4, device=self.device)
        for optimizer, detached in ((second, True), (first, False)):
            self.toggle_optimizer(optimizer)
            made = self.generator(z)
            loss = self.adversarial(self.discriminator(made.detach() if detached else made), not detached)
            if detached:
                loss = loss + self.adversarial(self.discriminator(batch[0]), True)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.untoggle_optimizer(optimizer)
        self.log("loss", loss)


@pytest.mark.parametrize(
    ("config", "told"), [({}, WHOLE), ({"fuse": "off"}, {"replays": 100, "plan": "{F} {B} {O}"})], ids=str
)
def test_a_network_that_is_first_called_while_it_is_toggled_off(config, told):
    parity(JudgesFirst, logger=MemoryLogger(), config=config, **told)


def test_each_replay_may_be_compared_with_the_step():
    _, graphed = parity(Gan, config={"verify": "always"}, **WHOLE)
    assert graphed.report.audits >= 30, str(graphed.report)


class Critic(Gan):
    """Three steps of the critic in each training step, with weights that are clamped, and one of the generator."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        generator, critic = self.optimizers()
        x = batch[0]
        for _ in range(3):
            z = torch.randn(len(x), 4, device=x.device)
            with self.toggled_optimizer(critic):
                critic.zero_grad()
                loss = self.discriminator(self(z).detach()).mean() - self.discriminator(x).mean()
                self.manual_backward(loss)
                critic.step()
                with torch.no_grad():
                    for p in self.discriminator.parameters():
                        p.clamp_(-0.05, 0.05)
        self.log("critic", loss)
        with generator.toggle_model():
            loss = -self.discriminator(self(z)).mean()
            generator.zero_grad()
            self.manual_backward(loss)
            generator.step()
        self.log_dict({"generator": loss, "rate": generator.param_groups[0]["lr"]})
        return loss


def test_several_steps_of_one_optimizer():
    plain, graphed = parity(Critic, logger=MemoryLogger(), validate=False, **WHOLE)
    assert plain.module.trainer.global_step == graphed.module.trainer.global_step == 4 * 44


def test_a_teacher_that_follows_the_student():
    parity(Teacher, logger=MemoryLogger(), **WHOLE)


class ActorCritic(Manual):
    """An actor and a critic, clipped by hand, with a schedule that the end of each epoch steps."""

    def __init__(self) -> None:
        super().__init__()
        self.actor, self.critic = Net(), nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        first, second = self.optimizers()
        value = self.critic(batch[0]).squeeze(1)
        advantage = batch[1].float() - value.detach()
        chosen = self.actor(batch[0]).log_softmax(-1)[:, 0]
        losses = -(chosen * advantage).mean(), nn.functional.mse_loss(value, batch[1].float())
        for optimizer, loss in zip((first, second), losses, strict=True):
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
            optimizer.step()
        self.log("actor", losses[0], on_step=True, on_epoch=True)
        return {"loss": losses[0], "value": losses[1].detach()}

    def on_train_epoch_end(self) -> None:
        for schedule in self.lr_schedulers():
            schedule.step()

    def configure_optimizers(self) -> Any:
        optimizers = [adamw(self.actor), torch.optim.SGD(self.critic.parameters(), lr=0.1, fused=True)]
        return optimizers, [torch.optim.lr_scheduler.ExponentialLR(o, 0.5) for o in optimizers]


@pytest.mark.parametrize("options", [{}, {"validate": True, "val_check_interval": 0.25}], ids=str)
def test_an_actor_and_a_critic_clipped_by_hand_with_a_schedule(options):
    _, graphed = parity(ActorCritic, logger=MemoryLogger(), **WHOLE, **options)
    assert graphed.report.captures[0].step < 10 and len(graphed.report.captures) == 1


class Replays(Manual):
    """An actor, a critic and its slow copy, trained on samples of a replay buffer that each batch is written to."""

    def __init__(self) -> None:
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2), nn.Tanh())
        self.critic = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
        self.slow = copy.deepcopy(self.critic).requires_grad_(False)
        self.register_buffer("seen", torch.zeros(32, 6))
        self.register_buffer("rewards", torch.zeros(32))
        self.register_buffer("place", torch.zeros((), dtype=torch.long))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        of_actor, of_critic = self.optimizers()
        rows = (self.place + torch.arange(len(batch[0]), device=self.device)) % len(self.seen)
        self.seen[rows], self.rewards[rows] = batch[0], batch[1].float()
        self.place.add_(len(batch[0]))
        sampled = torch.randint(0, len(self.seen), (16,), device=self.device)
        state, reward = self.seen[sampled], self.rewards[sampled]
        with torch.no_grad():
            target = reward + 0.9 * self.slow(torch.cat([state, self.actor(state)], 1)).squeeze(1)
        action = torch.rand(16, 2, device=self.device) * 2 - 1
        error = nn.functional.mse_loss(self.critic(torch.cat([state, action], 1)).squeeze(1), target)
        of_critic.zero_grad()
        self.manual_backward(error)
        of_critic.step()
        with self.toggled_optimizer(of_actor):
            loss = -self.critic(torch.cat([state, self.actor(state)], 1)).mean()
            of_actor.zero_grad()
            self.manual_backward(loss)
            of_actor.step()
        with torch.no_grad():
            for slow, fast in zip(self.slow.parameters(), self.critic.parameters(), strict=True):
                slow.lerp_(fast, 0.05)
        self.log_dict({"error": error, "loss": loss}, on_step=True, on_epoch=True)

    def configure_optimizers(self) -> Any:
        return [adamw(self.actor), adamw(self.critic)]


def test_an_actor_and_a_critic_with_a_replay_buffer():
    parity(Replays, logger=MemoryLogger(), **WHOLE)


class Sums(Classifier):
    """Two backwards are added up in each step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        for part in (slice(None, 4), slice(4, None)):
            loss = nn.functional.cross_entropy(self.net(batch[0][part]), batch[1][part])
            self.manual_backward(loss / 2)
        optimizer.step()
        optimizer.zero_grad(set_to_none=self.empties)
        return {"loss": loss}

    empties = True


class SumsInPlace(Sums):
    """Gradients are filled with zeros."""

    empties = False


class NeverEmptied(Classifier):
    """Gradients are added up for as long as training lasts."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        loss = self.cross_entropy(self.net(batch[0]), batch)
        self.manual_backward(loss)
        optimizer.step()
        self.log("loss", loss)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 2:
            self.optimizers().zero_grad()


class UpdatesFirst(Classifier):
    """Each step applies the gradients of the step before."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        optimizer.step()
        optimizer.zero_grad()
        loss = self.cross_entropy(self.net(batch[0]), batch)
        self.manual_backward(loss)
        self.log("loss", loss)


@pytest.mark.parametrize("kind", [Sums, SumsInPlace, NeverEmptied, UpdatesFirst])
def test_gradients_that_outlive_a_step(kind):
    parity(kind, logger=MemoryLogger(), **WHOLE)


class Meddles(pl.Callback):
    """Drops, or scales, gradients between the steps of some batches."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        done = trainer.fit_loop.total_batch_idx
        for p in pl_module.parameters() if done % 7 == 3 else ():
            p.grad = None
        for p in pl_module.parameters() if done % 5 == 2 else ():
            if p.grad is not None:
                p.grad.mul_(0.5)


@pytest.mark.parametrize("kind", [Gan, SumsInPlace, NeverEmptied])
def test_gradients_that_somebody_changes_between_steps(kind):
    parity(kind, lambda: [Meddles()], logger=MemoryLogger(), plan="{F B O}", replays=20)


@pytest.mark.parametrize("kind", [Gan, ActorCritic, Replays])
def test_saved_and_resumed(kind, tmp_path):
    parity(kind, lambda: [Saves(tmp_path / f"{len(list(tmp_path.iterdir()))}", 1)], **WHOLE)
    plain, graphed = (
        torch.load(path, weights_only=False) for path in sorted(tmp_path.iterdir(), key=lambda p: p.name)
    )
    for saved in (plain, graphed):
        saved["callbacks"] = saved["pytorch-lightning_version"] = None
    assert differs(frozen(plain), frozen(graphed)) is None
    assert plain["global_step"] == 44  # at the end of the second epoch
    parity(kind, ckpt_path=tmp_path / "1", max_epochs=7, **WHOLE)


# -- what changes in mid-run ------------------------------------------------------------------------


class Changes(pl.Callback):
    """Does something to the module at the start of the third epoch."""

    def __init__(self, change: Any) -> None:
        self.change = change

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == 2:
            self.change(trainer, pl_module)


def frozen_layer(trainer: Any, module: Any) -> None:
    module.discriminator[0].requires_grad_(False)


def other_betas(trainer: Any, module: Any) -> None:
    trainer.optimizers[1].param_groups[0]["betas"] = (0.7, 0.9)


def other_rate(trainer: Any, module: Any) -> None:
    trainer.optimizers[0].param_groups[0]["lr"] = 3e-3


def no_state(trainer: Any, module: Any) -> None:
    trainer.optimizers[0].state.clear()


def moved_parameter(trainer: Any, module: Any) -> None:
    layer = module.generator[0]
    layer.weight.data = layer.weight.data.clone()


def step_hook(trainer: Any, module: Any) -> None:
    def halve(optimizer: Any, args: Any, kwargs: Any) -> None:
        for p in optimizer.param_groups[0]["params"]:
            p.grad.mul_(0.5)

    trainer.optimizers[0].register_step_pre_hook(halve)


def gradient_hook(trainer: Any, module: Any) -> None:
    module.generator[0].weight.register_hook(lambda gradient: gradient * 0.5)


def forward_hook(trainer: Any, module: Any) -> None:
    module.generator[0].register_forward_hook(lambda layer, args, out: out * 0.5)


def evaluated(trainer: Any, module: Any) -> None:
    module.discriminator.eval()


def another_group(trainer: Any, module: Any) -> None:
    extra = nn.Parameter(torch.ones(3))
    module.register_parameter("extra", extra)
    trainer.optimizers[0].add_param_group({"params": [extra]})


def more_hooks(trainer: Any, module: Any) -> None:
    diary = next(c for c in trainer.callbacks if hasattr(c, "entries"))
    trainer.callbacks.append(Hooks())
    assert diary in trainer.callbacks


def renewed(trainer: Any, module: Any) -> None:
    trainer.strategy.setup_optimizers(trainer)


@pytest.mark.parametrize(
    "change",
    [
        frozen_layer,
        other_betas,
        other_rate,
        no_state,
        moved_parameter,
        step_hook,
        gradient_hook,
        forward_hook,
        evaluated,
        another_group,
        more_hooks,
        renewed,
    ],
)
def test_what_changes_in_mid_run(change):
    _, graphed = parity(
        Gan, lambda: [Changes(change)], logger=MemoryLogger(), max_epochs=7, replays=30, plan=None
    )
    assert sum(part.steps for part in graphed.report.parts()) == 77, str(graphed.report)


def test_batches_of_two_shapes():
    draw = torch.Generator().manual_seed(3)
    batches = [
        (torch.randn(size, 6, generator=draw), torch.randint(0, 3, (size,), generator=draw))
        for size in [8, 8, 5] * 5
    ]
    _, graphed = parity(
        Gan,
        make_batches=lambda: torch.utils.data.DataLoader(batches, batch_size=None),
        logger=MemoryLogger(),
        **WHOLE,
    )
    assert len(graphed.report.captures) == 2, str(graphed.report)


# -- what no graph can hold: each phase has a graph of its own then ---------------------------------------


class Counts(Gan):
    """Counts in Python."""

    seen = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        super().training_step(batch, batch_idx)
        self.seen += 1


class Reads(Gan):
    """Reads a loss on the host."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        super().training_step(batch, batch_idx)
        if self.discriminator(batch[0]).mean().item() > 1e9:
            raise AssertionError


class ReadsGradients(Gan):
    """Logs the norm of a gradient."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        super().training_step(batch, batch_idx)
        self.log("norm", self.generator[0].weight.grad.norm())


class CountsGradients(Gan):
    """Counts the gradients that exist after a backward. When the step begins there are none."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("counted", torch.zeros(()))
        self.found = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()[0]
        loss = self.adversarial(self.discriminator(self(torch.randn(8, 4))), True)
        self.manual_backward(loss)
        for p in self.parameters():
            if p.grad is not None:
                self.found += 1
        optimizer.step()
        self.zero_grad()

    def on_train_batch_end(self, *args: Any) -> None:
        self.counted.fill_(self.found)


class LeavesToggled(Gan):
    """Toggles an optimizer, and does not toggle it back before the step ends."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        first, _ = self.optimizers()
        self.toggle_optimizer(first)
        loss = self.adversarial(self.discriminator(self(torch.randn(8, 4))), True)
        first.zero_grad()
        self.manual_backward(loss)
        first.step()

    def on_train_batch_end(self, *args: Any) -> None:
        self.untoggle_optimizer(self.optimizers()[0])


class StepsByOtherName(Gan):
    """Steps an optimizer that it has kept."""

    def on_train_start(self) -> None:
        self.kept = self.trainer.optimizers[0]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        super().training_step(batch, batch_idx)
        self.kept.step()


class Backwards(Gan):
    """Calls `backward` of a loss itself."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        first, _ = self.optimizers()
        loss = self.adversarial(self.discriminator(self(torch.randn(8, 4))), True)
        first.zero_grad()
        loss.backward()
        first.step()


class Schedules(ActorCritic):
    """Steps a schedule in each batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        found = super().training_step(batch, batch_idx)
        for schedule in self.lr_schedulers():
            schedule.step()
        return found

    def on_train_epoch_end(self) -> None:
        pass


class Overrides(Gan):
    """Doubles each loss."""

    def manual_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        super().manual_backward(loss * 2, *args, **kwargs)


@pytest.mark.parametrize(
    "kind",
    [
        Counts,
        Reads,
        ReadsGradients,
        CountsGradients,
        LeavesToggled,
        StepsByOtherName,
        Backwards,
        Schedules,
        Overrides,
    ],
)
def test_what_is_no_graph_has_graphs_of_its_phases(kind):
    _, graphed = parity(kind, logger=MemoryLogger(), max_epochs=6, replays=30)
    report = graphed.report
    assert report.steps == 66 and "{F B O}" not in str(report.plan), str(report)
    assert report.notes or report.fallbacks, str(report)


def test_explain_looks_at_steps_by_hand():
    batch = torch.randn(8, 6), torch.randint(0, 3, (8,))
    state = torch.get_rng_state()
    for kind in (Gan, ActorCritic, Replays):
        module = kind()
        before = copy.deepcopy(module.state_dict())
        torch.set_rng_state(state)
        found = explain(module, batch)
        assert not found.obstacles, str(found)
        assert torch.equal(torch.get_rng_state(), state), "nothing was executed"
        assert differs(before, module.state_dict()) is None
        assert not set(vars(module)) & {"log", "optimizers", "manual_backward"}
    found = explain(Counts(), batch)
    (obstacle,) = found.obstacles
    assert "self.seen is written by the step" in obstacle.reason and "by_hand.py" in str(obstacle.where)


def test_hooks_run_in_the_middle_of_a_step():
    _, graphed = parity(Gan, lambda: [Hooks()], logger=MemoryLogger(), replays=200, plan="{F} {B} {O}")
    assert any("Hooks.on_before_zero_grad runs in Python" in note for note in graphed.report.notes)


@pytest.mark.parametrize("batch", [0, 3, 5, 30])
def test_exceptions_leave_everything_as_it_was(batch):
    class Stops(pl.Callback):
        def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
            if trainer.fit_loop.total_batch_idx + 1 == batch:
                raise ValueError("boom")

    module, callback = Gan(), emulated()
    attributes = set(vars(module))
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=4,
        callbacks=[callback, Stops()],
        logger=False,
        enable_checkpointing=False,
    )
    if batch:
        with pytest.raises(ValueError, match="boom"):
            trainer.fit(module, loader())
    else:
        trainer.fit(module, loader())
    assert_nothing_left(trainer, module)
    assert {name for name in set(vars(module)) - attributes if not name.startswith("_")} <= {
        "prepare_data_per_node"
    }
    for optimizer in trainer.optimizers:
        assert not optimizer._optimizer_step_pre_hooks and not optimizer._optimizer_state_dict_post_hooks
    again = fit([emulated()], module=copy.deepcopy(module))
    assert again.report.steps_replayed >= 30, str(again.report)


class Checkpointed(Gan):
    """A checkpoint with dropout: a capture of it is given up while parameters are toggled."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.2)

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        made = torch.utils.checkpoint.checkpoint(
            lambda z: self.generator(self.drop(z)), z, use_reentrant=False
        )
        assert isinstance(made, torch.Tensor)
        return made


def test_an_attempt_that_is_given_up_in_its_middle():
    _, graphed = parity(Checkpointed, logger=MemoryLogger(), max_epochs=6, replays=30)
    assert "{F B O}" not in str(graphed.report.plan)


class Unheld(Gan):
    """A network that no optimizer holds: its gradients add up, until a hook empties them."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(6, 6)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        first, second = self.optimizers()
        loss = self.discriminator(self.extra(self(torch.randn(8, 4)))).mean()
        for optimizer in (first, second):
            optimizer.zero_grad()
        self.manual_backward(loss)
        first.step()
        second.step()
        self.log("loss", loss)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx % 4 == 0:
            self.extra.zero_grad()

    def on_train_batch_end(self, *args: Any) -> None:
        self.log("norm", self.extra.weight.grad.norm())


class ReadsGroup(Gan):
    """The step reads a tensor in a parameter group."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        super().training_step(batch, batch_idx)
        self.log("noise", self.optimizers()[0].param_groups[0]["noise"])

    def configure_optimizers(self) -> Any:
        optimizers = [adamw(self.generator), adamw(self.discriminator)]
        for optimizer in optimizers:
            optimizer.param_groups[0]["noise"] = torch.tensor(0.5)
        return optimizers

    def on_train_epoch_start(self) -> None:
        self.trainer.optimizers[0].param_groups[0]["noise"].mul_(0.5)


@pytest.mark.parametrize("kind", [Unheld, ReadsGroup])
def test_tensors_outside_of_the_optimizers_parameters(kind):
    parity(kind, logger=MemoryLogger(), **WHOLE)
