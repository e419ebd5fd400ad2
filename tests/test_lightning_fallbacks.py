"""What cannot be replayed runs as before, and the report names it; bad input is told clearly."""

from __future__ import annotations

import copy
import inspect
import io
import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

pl = pytest.importorskip("lightning.pytorch")

import torchmetrics  # noqa: E402
from lightning.fabric.utilities.exceptions import MisconfigurationException  # noqa: E402
from lightning.pytorch.callbacks import LambdaCallback  # noqa: E402
from lightning.pytorch.plugins.precision import Precision  # noqa: E402
from lightning_training import (  # noqa: E402
    QUIET,
    MemoryLogger,
    Module,
    assert_nothing_left,
    compare,
    emulated,
    fit,
    loader,
    parity,
    replayed,
)
from test_lightning_phases import in_regions  # noqa: E402

from pygraph_train import PyGraphCallback  # noqa: E402

# -- hooks inside the step ---------------------------------------------------------------------------


def overriding(hook: str, base: type) -> type:
    """A subclass of `base` whose `hook` counts its calls and does what the base class does."""
    parent = getattr(base, hook)
    calls: list[int] = []

    def counting(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return parent(self, *args, **kwargs)

    return type("Overriding", (base,), {hook: counting, "calls": calls})


BETWEEN = ["on_before_zero_grad", "on_before_backward"]
MODULE_BETWEEN = [*BETWEEN, "backward", "optimizer_zero_grad"]
BEFORE_UPDATE = ["on_after_backward", "on_before_optimizer_step"]
MODULE_BEFORE_UPDATE = [*BEFORE_UPDATE, "configure_gradient_clipping", "clip_gradients", "optimizer_step"]


@pytest.mark.slow_after(2)
@pytest.mark.parametrize(
    ("hook", "owner"),
    [*itertools.product(MODULE_BETWEEN, ["module"]), *itertools.product(BETWEEN, ["callback"])],
)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_hooks_between_forward_and_backward_split_the_step_there(hook, owner, accumulate):
    cls = overriding(hook, Module if owner == "module" else pl.Callback)
    options = {"accumulate_grad_batches": accumulate, "max_epochs": 4 * accumulate, "gradient_clip_val": 0.1}
    chosen = {"make_module": cls} if owner == "module" else {"make_callbacks": lambda: [cls()]}
    parity(**chosen, **options, replays=77)


class Between(Module):
    """Sees and changes what is between the phases."""

    seen: ClassVar[list[list[Any]]] = []

    def __init__(self) -> None:
        super().__init__()
        self.seen.append([])

    def write(self, place: str, *tensors: Any) -> None:
        self.seen[-1].append((place, [t.detach().clone() for t in tensors]))

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.write("before zero_grad", *[p.grad for p in self.parameters() if p.grad is not None])

    def on_before_backward(self, loss: Any) -> None:
        self.write("before backward", loss)
        self.log("seen", loss, on_step=True, on_epoch=True)

    def backward(self, loss: Any, *args: Any, **kwargs: Any) -> None:
        super().backward(loss * 2, *args, **kwargs)

    def on_after_backward(self) -> None:
        self.write("after backward", *[p.grad for p in self.parameters()])
        self.net.first.weight.grad.mul_(1.5)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.write("before the step", *[p.grad for p in self.parameters()])


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_hooks_between_all_phases_see_and_change_what_is_there(accumulate, precision, monkeypatch):
    monkeypatch.setattr(Between, "seen", [])
    fits = parity(
        Between,
        logger=MemoryLogger(),
        accumulate_grad_batches=accumulate,
        max_epochs=4 * accumulate,
        precision=precision,
        replays=75,
    )
    in_regions(fits[1].report)
    mine, theirs = Between.seen
    assert [place for place, _ in mine] == [place for place, _ in theirs]
    assert sum(place == "before backward" for place, _ in mine) == 44 * accumulate
    for (place, expected), (_, found) in zip(mine, theirs, strict=True):
        assert len(expected) == len(found) and all(map(torch.equal, expected, found)), place


def test_a_hook_that_differentiates_gradients_keeps_forward_and_backward_out_of_graphs():
    class Penalty(Module):
        def backward(self, loss: Any, *args: Any, **kwargs: Any) -> None:
            weight = self.net.first.weight
            (gradient,) = torch.autograd.grad(loss, [weight], create_graph=True)
            (loss + gradient.square().sum()).backward()

    parity(Penalty, replays=25)


def test_a_hook_that_changes_parameters_keeps_forward_and_backward_out_of_graphs():
    """A compiled backward may read what a plain one does not."""

    class Averages(Module):
        def __init__(self) -> None:
            super().__init__()
            self.teacher = copy.deepcopy(self.net).requires_grad_(False)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.loss(batch) + (self.net(batch[0]) - self.teacher(batch[0])).square().mean()

        def on_before_zero_grad(self, optimizer: Any) -> None:
            with torch.no_grad():
                for mine, theirs in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
                    mine.lerp_(theirs, 0.1)

    parity(Averages, replays=25)


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize(
    ("hook", "owner"),
    [*itertools.product(MODULE_BEFORE_UPDATE, ["module"]), *itertools.product(BEFORE_UPDATE, ["callback"])],
)
def test_hooks_before_the_update_split_the_step_there(hook, owner, accumulate):
    cls = overriding(hook, Module if owner == "module" else pl.Callback)
    options = {"accumulate_grad_batches": accumulate, "gradient_clip_val": 0.1}
    chosen = {"make_module": cls} if owner == "module" else {"make_callbacks": lambda: [cls()]}
    parity(**chosen, **options, replays=24, plan="{F} {B} {O}")


def test_hooks_see_and_change_the_gradients_of_the_step():
    seen: list[list[Any]] = []

    class Hooks(Module):
        def on_after_backward(self) -> None:
            self.write("after backward")
            self.net.first.weight.grad.mul_(1.5)

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            self.write("before the step")
            self.net.second.weight.grad = self.net.second.weight.grad * 0.5

        def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
            self.clip_gradients(optimizer, 0.02, "norm")
            self.write("clipped")
            self.log("norm", self.net.first.weight.grad.norm(), on_step=True, on_epoch=True)

        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any) -> None:
            for group in optimizer.param_groups:
                group["lr"] = 1e-3 * (1 + batch_idx)
            optimizer.step(closure)

        def write(self, place: str) -> None:
            seen[-1].append((place, [p.grad.clone() for p in self.parameters()]))

    def module() -> Hooks:
        seen.append([])
        return Hooks()

    parity(module, replays=36, plan="{F} {B} {O}")
    assert len(seen[0]) == len(seen[1]) == 3 * 44
    for mine, theirs in zip(*seen, strict=True):
        assert mine[0] == theirs[0] and all(map(torch.equal, mine[1], theirs[1]))


@pytest.mark.slow
def test_optimizer_step_hook_of_the_user_is_called_once_a_step():
    calls: list[int] = []

    class Counts(Module):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss(batch)
            print("loss", float(loss), file=io.StringIO())
            return loss

        def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            calls.append(1)
            super().optimizer_step(*args, **kwargs)

    parity(Counts, replays=75)
    assert len(calls) == 88


@pytest.mark.slow
def test_hook_given_as_an_object():
    class Hook:
        calls = 0

        def __call__(self, *args: Any) -> None:
            Hook.calls += 1

    hook = [LambdaCallback(on_before_backward=Hook())]
    in_regions(parity(make_callbacks=lambda: hook, replays=75)[1].report)
    assert Hook.calls == 88


# -- Python in training_step ---------------------------------------------------------------------------


class Counter(Module):
    count = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.count += 1  # here
        return self.loss(batch)


class Growing(Module):
    def __init__(self) -> None:
        super().__init__()
        self.losses: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.losses.append(loss.detach())  # here
        return loss


class GlobalStep(Module):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch) ** (1 + 0.01 * self.global_step)  # here


class BatchIndex(Module):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        if batch_idx % 2:
            self.log("odd", loss, on_epoch=True)
        return loss


class Metric(Module):
    def __init__(self) -> None:
        super().__init__()
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(3)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        out = self.net(batch[0])
        self.accuracy(out, batch[1])  # here
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        return nn.functional.cross_entropy(out, batch[1])


class Prints(Module):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.print("loss", float(loss))  # here
        return loss


class Experiment(Module):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.logger.log_metrics({"mine": float(loss)}, step=batch_idx)
        return loss


class SometimesNone(Module):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        print(loss, file=io.StringIO())  # here
        return None if loss > 1.0 else loss


class AlwaysNone(Module):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        return None


class LoggedRate(Module):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("lr", self.optimizers().param_groups[0]["lr"])
        return self.loss(batch)


class LoggedStep(Module):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("step", float(batch_idx))
        return self.loss(batch)


@pytest.mark.slow_after(2)
@pytest.mark.parametrize(
    ("module", "parts"),
    [
        (GlobalStep, []),
        (Metric, []),
        (Prints, []),
        (SometimesNone, []),
    ],
    ids=lambda v: getattr(v, "__name__", None),
)
@pytest.mark.filterwarnings("ignore")
def test_python_in_the_step_runs_on_every_step_and_is_named(module, parts, capsys):
    parity(module, logger=MemoryLogger(), replays=35)


@pytest.mark.parametrize("module", [Counter, Growing, Experiment])
def test_python_that_the_step_writes_is_written_by_replays(module):
    plain, graphed = (f.module for f in parity(module, logger=MemoryLogger(), replays=35, plan="{F} {B} {O}"))
    if module is Counter:
        assert plain.count == graphed.count == 44
    if module is Growing:
        assert len(graphed.losses) == 44 and all(map(torch.equal, plain.losses, graphed.losses))


def test_the_number_of_the_batch_decides_between_two_graphs():
    parity(BatchIndex, logger=MemoryLogger(), replays=30, plan="{F} {B} {O}")


@pytest.mark.parametrize("make", [LoggedRate, lambda: LoggedRate("sgd", "step"), LoggedStep])
@pytest.mark.filterwarnings("ignore")
def test_values_of_python_logged_in_the_step_are_right(make):
    parity(make, logger=MemoryLogger(), log_every_n_steps=1, replays=20)


@pytest.mark.slow
def test_epoch_read_in_the_step_is_read_in_every_epoch():
    class Warm(Module):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss(batch) * (0.5 if self.current_epoch < 2 else 1.0)
            self.log("epoch read", float(self.current_epoch), on_step=True, on_epoch=True)
            return loss

    parity(Warm, max_epochs=6, replays=45)


def test_a_metric_object_updated_outside_of_the_step():
    class Outside(Module):
        def __init__(self) -> None:
            super().__init__()
            self.mean = torchmetrics.MeanMetric()

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.mean(outputs["loss"])
            self.log("mean", self.mean, on_step=True, on_epoch=True)

    parity(Outside, replays=36, plan="{F} {B} {O}")


def test_a_dict_without_loss_is_lightnings_error():
    class NoLoss(Module):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return {"lose": self.loss(batch)}

    for callbacks in ([], [emulated()]):
        with pytest.raises(MisconfigurationException, match="'loss' key needs to be present"):
            fit(callbacks, module=NoLoss())


def test_a_value_with_many_elements_is_lightnings_error():
    class Many(Module):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("out", self.net(batch[0]))
            return self.loss(batch)

    for callbacks in ([], [emulated()]):
        with pytest.raises(ValueError, match="must have a single element"):
            fit(callbacks, module=Many())


# -- optimizers, loops and strategies ------------------------------------------------------------------


def test_an_optimizer_that_asks_several_times_for_the_loss():
    class Newton(Module):
        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)

    parity(Newton, replays=30, plan="{F} {B} O")


class Twice(torch.optim.SGD):
    """Asks for the loss a second time in every `every`th step, after a step away (SAM does)."""

    every = 1
    steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            closure()
        self.steps += 1
        if self.steps % self.every == 0:
            super().step()
            with torch.enable_grad():
                loss = closure()
        else:
            loss = None
        super().step()
        return loss


class Ahead(torch.optim.SGD):
    """Changes parameters before it asks for the loss."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                p.mul_(0.99)
        with torch.enable_grad():
            return super().step(closure)


class Once(torch.optim.SGD):
    """Does as torch's optimizers do."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("cls", [Twice, Ahead])
def test_optimizers_of_others_with_their_own_idea_of_a_step(cls, accumulate):
    class Other(Module):
        def configure_optimizers(self) -> Any:
            return cls(self.parameters(), lr=0.01)

    parity(Other, accumulate_grad_batches=accumulate, replays=30, plan="{F} {B} O")


def test_optimizers_of_others_that_step_like_torchs():
    class Other(Module):
        def configure_optimizers(self) -> Any:
            return Once(self.parameters(), lr=0.01)

    parity(Other, replays=34, plan="{F} {B} O")


def test_an_optimizer_that_asks_a_second_time_late_in_training():
    class Late(Module):
        def configure_optimizers(self) -> Any:
            optimizer = Twice(self.parameters(), lr=0.01)
            optimizer.every = 10
            return optimizer

    parity(Late, replays=30, plan="{F} {B} O")


def test_an_optimizer_replaced_in_mid_run():
    class Renew(pl.Callback):
        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            if trainer.current_epoch == 2:
                trainer.strategy.setup_optimizers(trainer)

    _, graphed = parity(make_callbacks=lambda: [Renew()], replays=11)
    assert graphed.report.steps_replayed > 10
    assert any("replaced" in f.reason for f in graphed.report.fallbacks)


def test_no_optimizer():
    class Without(Module):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx)

        def configure_optimizers(self) -> None:
            return None

    parity(Without, refused="no optimizer")


def test_training_step_that_fetches_its_batches():
    class Fetches(Module):
        def training_step(self, dataloader_iter: Any) -> Any:
            batch, _, _ = next(dataloader_iter)
            return self.loss(batch)

    parity(Fetches, refused="dataloader_iter")


def test_precision_plugin_of_somebody_else():
    class Other(Precision):
        pass

    parity(plugins=[Other()], max_epochs=2, refused="precision plugin Other is not one of")


def test_anomaly_detection():
    parity(detect_anomaly=True, max_epochs=2, refused="detect_anomaly")


def test_compiled_module():
    class Silent(Module):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.loss(batch)

    module = torch.compile(Silent(), backend="eager")
    trainer = pl.Trainer(accelerator="cpu", max_epochs=1, callbacks=[callback := emulated()], **QUIET)
    trainer.fit(module, loader())
    assert callback.report().steps_replayed == 0
    assert "training_step was replaced" in callback.report().fallbacks[0].reason


DDP = """
import sys, torch
sys.path[:0] = [{tests!r}]
from lightning_training import Module, fit, emulated
from lightning.pytorch.strategies import DDPStrategy
states = []
for callbacks in ([], [callback := emulated()]):
    torch.manual_seed(0)
    done = fit(callbacks, module=Module(), strategy=DDPStrategy(process_group_backend="gloo"))
    states.append(done.module.state_dict())
assert all(map(torch.equal, states[0].values(), states[1].values()))
assert callback.report().steps_replayed >= 25 and not callback.report().fallbacks, callback.report()
"""


@pytest.mark.slow
@pytest.mark.passes_without_graphs("the training is a process of its own, and counts its replays")
def test_ddp_of_one_process_trains_as_before():
    script = DDP.format(tests=str(Path(__file__).parent))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


# -- exceptions ------------------------------------------------------------------------------------------


@pytest.mark.slow_after(3)
@pytest.mark.parametrize("error", [ValueError("boom"), KeyboardInterrupt()], ids=["error", "ctrl-c"])
@pytest.mark.parametrize("place", ["on_train_batch_end", "training_step"])
@pytest.mark.parametrize("batch", [0, 1, 2, 4, 5, 9])
def test_exceptions_leave_everything_as_it_was(error, place, batch):
    armed = [True]

    class Fails(Module):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if place == "training_step" and len(batch[0]) == 3:
                raise error
            return super().training_step(batch, batch_idx)

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if armed and place == "on_train_batch_end" and batch_idx == index:
                raise error

    index = batch
    module = Fails()
    data = [loader().dataset[i : i + (3 if i == 4 * index else 4)] for i in range(0, 44, 4)]
    callback = emulated()
    trainer = pl.Trainer(accelerator="cpu", max_epochs=4, callbacks=[callback], **QUIET)
    batches = torch.utils.data.DataLoader(data, batch_size=None)
    with pytest.raises(SystemExit if isinstance(error, KeyboardInterrupt) else ValueError):
        trainer.fit(module, batches)
    assert_nothing_left(trainer, module)
    assert callback.report().steps == index + 1
    assert json.dumps(callback.report().to_dict())
    armed.clear()
    replayed(fit([emulated()], module=module))  # and it trains as ever


# -- the callback itself ---------------------------------------------------------------------------------


def test_two_callbacks_are_refused():
    with pytest.raises(MisconfigurationException, match="2 PyGraphCallbacks"):
        fit([emulated(), emulated()])


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_cuda_engine_without_cuda_is_refused():
    with pytest.raises(MisconfigurationException, match="needs a CUDA device"):
        fit([PyGraphCallback(engine="cuda")])


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_automatic_engine_without_cuda_patches_nothing():
    class Looks(pl.Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, *args: Any) -> None:
            assert_nothing_left(trainer, pl_module)

    done = fit([callback := PyGraphCallback(), Looks()])
    compare(fit([Looks()]), done)
    assert callback.report().steps == 0
    assert "no CUDA device" in callback.report().notes[0]


def test_unknown_options_are_named():
    with pytest.raises(TypeError, match=r"no option 'wamup_steps'; the options are: .*warmup_steps"):
        PyGraphCallback(wamup_steps=3)


@pytest.mark.parametrize("how", ["environment", "engine"])
def test_switched_off(how, monkeypatch):
    if how == "environment":
        monkeypatch.setenv("PYGRAPH_DISABLE", "1")
    callback = emulated() if how == "environment" else PyGraphCallback(engine="off")
    compare(fit([]), fit([callback]))
    assert callback.report().steps == 0 and "off" in callback.report().notes[0]


def test_compile_on_the_emulated_engine_is_noted():
    _, graphed = parity(config={"compile": True}, replays=30)
    assert any("compile=True has no effect" in note for note in replayed(graphed).notes)


def test_the_report_is_printed_once_and_is_json_at_any_time(capsys):
    class Looks(pl.Callback):
        def look(self, *args: Any, **kwargs: Any) -> None:
            data = json.loads(json.dumps(callback.report().to_dict()))
            assert data["steps_replayed"] <= data["steps"]
            assert str(callback.report())

        setup = on_fit_start = on_train_start = on_train_batch_start = look
        on_train_batch_end = on_train_epoch_end = on_train_end = look

    callback = emulated()
    assert json.dumps(callback.report().to_dict())
    done = fit([callback, Looks()])
    replayed(done)
    done.trainer.validate(done.module, loader(), verbose=False)
    done.trainer.test(done.module, loader(), verbose=False)
    assert capsys.readouterr().out.count("pygraph-train: ") == 1


@pytest.mark.slow  # tests/test_failures.py asks the same, and more, of one import
def test_importing_the_package_imports_no_framework():
    code = (
        "import sys, pygraph_train; pygraph_train.PyGraphConfig; pygraph_train.GraphedStep; "
        "assert not {'lightning', 'accelerate', 'transformers'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_hooks_that_are_watched_exist_in_this_lightning():
    for hook in (*MODULE_BETWEEN, *MODULE_BEFORE_UPDATE):
        assert inspect.isfunction(getattr(pl.LightningModule, hook))


def test_a_callback_added_during_training_has_its_hooks_run():
    class Doubles(pl.Callback):
        def on_after_backward(self, trainer: Any, module: Any) -> None:
            for p in module.parameters():
                p.grad.mul_(2)

    class Adds(pl.Callback):
        def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
            if trainer.current_epoch == 2:
                trainer.callbacks += [Doubles(), pl.Callback()]

    report = parity(make_callbacks=lambda: [Adds()], replays=10, plan="F B O")[1].report
    assert any("Doubles.on_after_backward was added during training" in f.reason for f in report.fallbacks)


class KeepsHidden(Module):
    """Hands out an activation, whose gradient others may ask for."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.hidden = self.net.first(batch[0]).relu()
        return nn.functional.cross_entropy(self.net.second(self.hidden), batch[1])


class AsksInAHook(KeepsHidden):
    def on_before_backward(self, loss: Any) -> None:
        (gradient,) = torch.autograd.grad(loss, self.hidden, retain_graph=True)
        self.log("gradient", gradient.norm())


class Retains(KeepsHidden):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.hidden.retain_grad()
        return loss

    def on_after_backward(self) -> None:
        self.log("gradient", self.hidden.grad.norm())


class Hooks(KeepsHidden):
    def on_before_backward(self, loss: Any) -> None:
        self.hidden.register_hook(lambda gradient: gradient * 2)


@pytest.mark.parametrize("kind", [AsksInAHook, Retains, Hooks])
@pytest.mark.parametrize("config", [{}, {"forward": "off"}, {"backward": "off"}], ids=str)
def test_who_asks_for_the_gradient_of_an_activation_gets_it(kind, config):
    parity(kind, config=config, logger=MemoryLogger(), replays=25)
