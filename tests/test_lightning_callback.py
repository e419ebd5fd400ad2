"""Training with `PyGraphCallback` leaves the traces of training without it, bit for bit, while it replays."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

pl = pytest.importorskip("lightning.pytorch")

import torchmetrics  # noqa: E402
from lightning.pytorch.callbacks import (  # noqa: E402
    LambdaCallback,
    ModelCheckpoint,
)
from lightning.pytorch.plugins.precision import MixedPrecision  # noqa: E402
from lightning.pytorch.utilities import CombinedLoader  # noqa: E402
from lightning_training import (  # noqa: E402
    Data,
    MemoryLogger,
    Module,
    compare,
    emulated,
    fit,
    listed,
    loader,
    parity,
    replayed,
)
from training import batches, differs, frozen  # noqa: E402

from pygraph_train.integrations.lightning import log as lightning_log  # noqa: E402

OPTIMIZERS = pytest.mark.parametrize("optimizer", ["adamw", "sgd"])


def scaled_on_cpu(*, enabled: bool = True) -> MixedPrecision:
    """Mixed precision with a scaler, which the Trainer makes for a GPU only."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=6, enabled=enabled)
    return MixedPrecision("16-mixed", "cpu", scaler)


def named(options: Any) -> str:
    return ",".join(f"{k}={v}" for k, v in options.items()) if isinstance(options, dict) else str(options)


# -- options of the Trainer ----------------------------------------------------------------------------


@pytest.mark.notices("the last tensor of a batch is not copied")
@pytest.mark.slow_after(6)
@OPTIMIZERS
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"precision": "bf16-mixed"},
        {"precision": "64-true"},
        {"gradient_clip_val": 0.1},
        {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
        {"accumulate_grad_batches": 3, "gradient_clip_val": 0.1},
        {"accumulate_grad_batches": 3, "val_check_interval": 0.5, "validate": True},
        {"validate": True, "limit_val_batches": 2},
    ],
    ids=named,
)
def test_parity_under_trainer_options(optimizer, options):
    parity(lambda: Module(optimizer), **options, replays=24, plan="{F} {B} {O}")


@pytest.mark.parametrize(("fused", "clip"), [(True, None), (False, None), (False, 0.1)])
def test_a_scaler_skips_steps_with_overflow(fused, clip):
    """The Trainer itself refuses to clip gradients that the optimizer unscales in its kernels."""

    class Overflows(Module):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            factor = torch.where(batch[0].max() > 2.2, float("inf"), 1.0)
            self.log("factor", factor, reduce_fx="max", on_step=False, on_epoch=True)
            return self.loss(batch) * factor

    plain, graphed = parity(
        lambda: Overflows("adamw" if fused else "sgd", fused=fused),
        plugins=[scaled_on_cpu()],
        gradient_clip_val=clip,
        replays=24,
        plan="{F} {B} {O}" if fused else "{F} {B} O",
    )
    assert plain.trainer.callback_metrics["factor"] == float("inf")
    scales = [fit.trainer.precision_plugin.scaler.state_dict() for fit in (plain, graphed)]
    assert scales[0] == scales[1]


def test_after_a_scaler_that_is_switched_off_hooks_run_before_the_optimizers_graph():
    class Hooked(Module):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            self.log("largest", max(p.grad.abs().max() for p in self.parameters()))

    _, graphed = parity(Hooked, plugins=[scaled_on_cpu(enabled=False)], replays=24, plan="{F} {B} {O}")
    assert graphed.report.optimizer_steps_replayed >= 24, str(graphed.report)


@pytest.mark.slow_after(3)
@pytest.mark.parametrize(
    "options",
    [
        {"limit_train_batches": 9},
        {"max_epochs": -1, "max_steps": 40},
        {"max_epochs": 40, "overfit_batches": 1},
        {"profiler": "simple"},
        {"barebones": True, "log_every_n_steps": None},
        {"enable_model_summary": True},
        {"precision": "bf16-true"},  # fused SGD on a CPU rounds bfloat16 now this way, now that
    ],
    ids=named,
)
def test_parity_under_more_trainer_options(options):
    parity(**options, replays=24, plan="{F} {B} {O}")


@pytest.mark.notices("learning rates are not copied to the device")
@OPTIMIZERS
@pytest.mark.parametrize("scheduler", ["step", "epoch", "plateau"])
def test_schedulers_change_the_learning_rate_of_replays(optimizer, scheduler):
    parity(
        lambda: Module(optimizer, scheduler),
        validate=True,
        limit_val_batches=3,
        replays=30,
        plan="{F} {B} {O}",
    )


@pytest.mark.notices("replays keep the hyperparameters of their capture")
@OPTIMIZERS
def test_one_cycle_with_its_defaults_stays_in_the_graph(optimizer):
    parity(lambda: Module(optimizer, "one cycle"), replays=15, plan="{F} {B} {O}")


@pytest.mark.parametrize("when", ["always", "by turns"])
def test_a_batch_holds_one_tensor_twice(when):
    class Twice(Module):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            factor = 2.0 if batch["input"] is batch["target"] else 3.0
            return (self.net(batch["input"]) - batch["target"][:, :3]).square().mean() * factor

    def collate(items: list[tuple[int, Tensor]]) -> dict[str, Tensor]:
        x = torch.stack([row for _, row in items])
        apart = when == "by turns" and items[0][0] % 8 == 0
        return {"input": x, "target": x.clone() if apart else x}

    rows = list(enumerate(torch.randn(160, 6)))
    parity(
        Twice,
        make_batches=lambda: torch.utils.data.DataLoader(rows, batch_size=4, collate_fn=collate),
        replays=25,
        plan="{F} {B} {O}",
        max_epochs=1,
    )


def test_fast_dev_run():
    _, graphed = parity(fast_dev_run=True, never="there is one step")
    assert graphed.report.steps == 1


# -- logs ----------------------------------------------------------------------------------------------


REDUCTIONS: list[Any] = ["mean", "sum", "min", "max", torch.mean, torch.sum, torch.max, sum, min, max]


class Logs(Module):
    """Logs in every way that `self.log` has."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        out = self.net(batch[0])
        loss = nn.functional.cross_entropy(out, batch[1])
        for index, reduction in enumerate(REDUCTIONS):
            self.log(f"reduction {index}", loss, reduce_fx=reduction, on_step=True, on_epoch=True)
        self.log("default", loss)
        self.log("step only", loss, on_step=True, on_epoch=False, prog_bar=True)
        self.log("epoch only", loss, on_step=False, on_epoch=True, prog_bar=True)
        self.log("bar only", loss, logger=False, prog_bar=True)
        self.log("constant", 0.1, on_epoch=True)
        self.log("integer", 3, on_step=True, on_epoch=True, reduce_fx="sum")
        self.log("integers", (out.argmax(1) == batch[1]).sum(), on_epoch=True, reduce_fx="sum")
        self.log("sized", loss, batch_size=3, on_epoch=True)
        self.log("positional", loss, True, True, True, True, "mean", False, False, None, True, 5)
        self.log("twice", loss, on_epoch=True)
        self.log("twice", loss * 2, on_epoch=True)
        self.log("one element", loss.reshape(1, 1), on_epoch=True)
        self.log("half", loss.half(), on_epoch=True)
        self.log("double", loss.double(), on_epoch=True)
        self.log("buffer", self.net.norm.running_mean[0], on_epoch=True, on_step=True)
        self.log_dict({"a": loss, "b": out.mean()}, on_step=True, on_epoch=True, prog_bar=True)
        self.log("changed afterwards", loss, on_step=True, on_epoch=True)
        loss += 0.1 * out.square().mean()
        return loss

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.log("default", float(batch_idx), on_step=True)
        self.log("index", float(batch_idx), on_step=True, on_epoch=True)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("after", outputs["loss"] * 2, on_step=True, on_epoch=True)

    def on_train_epoch_end(self) -> None:
        self.log("at the end", 1.0)


@pytest.mark.parametrize("every", [1, 5])
@pytest.mark.parametrize(
    "options",
    [{}, {"accumulate_grad_batches": 3}, {"precision": "64-true"}, {"precision": "bf16-mixed"}],
    ids=named,
)
@pytest.mark.filterwarnings("ignore")
def test_everything_logged_arrives_everywhere(options, every):
    fits = parity(
        Logs,
        logger=MemoryLogger(),
        log_every_n_steps=every,
        validate=True,
        **options,
        replays=24,
        plan="{F} {B} {O}",
    )
    assert sum(name.startswith("logged at step") for name, _ in fits[1].entries) >= 8


def test_a_value_logged_in_some_steps_only():
    class Sometimes(Module):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss(batch)
            if len(batch[0]) < 4:
                self.log("small", loss, prog_bar=True)
            self.log("loss", loss, prog_bar=True, on_epoch=True)
            return loss

    parity(
        Sometimes,
        lambda: (),
        lambda: loader(46),
        max_epochs=8,
        logger=MemoryLogger(),
        replays=60,
        plan="{F} {B} {O}",
    )


def test_numbers_on_the_bar_are_at_most_one_step_late(monkeypatch):
    """On a GPU the host does not wait for the numbers of the present step; here that is imitated."""

    class Late(lightning_log._LateNumbers):
        def __init__(self, device: torch.device) -> None:
            super().__init__(device)
            self._cuda = True

        def _send(self, values: list[Tensor]) -> Any:
            return [value.clone() for value in values], None

    class Names(Module):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss(batch)
            if len(batch[0]) == 4:  # other names in other steps
                self.log("large", loss * 2, prog_bar=True)
            self.log("all", loss, prog_bar=True)
            return loss

    class Watch(pl.Callback):
        def __init__(self) -> None:
            self.right: dict[str, list[float]] = {"large": [], "all": []}
            self.late = 0

        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            for name, values in self.right.items():
                values.append(float(trainer.callback_metrics[name]))
                shown = trainer.progress_bar_metrics[name]
                assert shown in values[-2:], f"{name} at step {trainer.global_step}"
                self.late += shown != values[-1]
            trainer.should_stop = trainer.global_step >= 57

        def on_train_epoch_end(self, trainer: Any, *args: Any) -> None:
            for name, values in self.right.items():
                assert trainer.progress_bar_metrics[name] == values[-1]

    monkeypatch.setattr(lightning_log, "_LateNumbers", Late)
    batch_of_4, batch_of_3 = batches(12, 4), batches(12, 3)
    data = [(batch_of_3 if i % 3 else batch_of_4)[i] for i in range(12)]
    replayed(
        fit([emulated(), watch := Watch()], module=Names(), batches=listed(data), max_epochs=9), least=40
    )
    assert watch.late > 20


def test_results_of_the_step_have_the_history_that_they_have_without():
    class Kept(Module):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            hidden = self.net.first(batch[0])
            loss = nn.functional.cross_entropy(self.net.second(hidden.relu()), batch[1])
            self.log("loss", loss)
            return {"loss": loss, "hidden": hidden, "weight": self.net.first.weight, "x": batch[0]}

    class Look(pl.Callback):
        seen: ClassVar[list[Any]] = []

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
            hidden = outputs["hidden"]
            again = ""
            try:
                hidden.sum().backward()
            except RuntimeError as error:
                again = str(error)[:48]
            hidden.mul_(2)
            self.seen.append(
                (
                    {name: (type(x), x.requires_grad, x.is_leaf) for name, x in outputs.items()},
                    outputs["weight"] is module.net.first.weight,
                    outputs["x"] is batch[0],
                    again,
                    hidden.detach().clone(),
                )
            )

    parity(Kept, lambda: [Look()], replays=20, plan="{F} {B} {O}")
    half = len(Look.seen) // 2
    assert differs(frozen(Look.seen[:half]), frozen(Look.seen[half:])) is None


# -- other callbacks -----------------------------------------------------------------------------------


def test_a_callback_that_stops_in_the_middle_of_an_epoch():
    class Stop(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            trainer.should_stop = trainer.global_step == 37

    plain, _ = parity(make_callbacks=lambda: (Stop(),), max_epochs=9, replays=20, plan="{F} {B} {O}")
    assert plain.trainer.global_step == 37


def test_clipping_threshold_changed_by_a_callback():
    class Clip(pl.Callback):
        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            trainer.gradient_clip_val = 0.1 if trainer.current_epoch < 2 else 0.01

    parity(make_callbacks=lambda: (Clip(),), gradient_clip_val=0.5, replays=30, plan="{F} {B} {O}")


def test_clipping_threshold_changed_on_every_step():
    class Clip(pl.Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            trainer.gradient_clip_val = 0.1 / (1 + trainer.global_step)

    report = parity(make_callbacks=lambda: (Clip(),), gradient_clip_val=0.5, replays=3)[1].report
    assert sum(capture.plan != "{O}" for capture in report.captures) < 8
    assert len(report.captures) < 12
    assert any("again and again" in f.reason for f in report.fallbacks)


def test_lambda_callback_and_hooks_around_the_step():
    seen: list[int] = []

    def watch() -> list[Any]:
        return [LambdaCallback(on_train_batch_end=lambda trainer, *_: seen.append(trainer.global_step))]

    parity(make_callbacks=watch, replays=36, plan="{F} {B} {O}")
    assert seen == [*range(1, 45), *range(1, 45)]


# -- checkpoints ---------------------------------------------------------------------------------------


def checkpoints(folder: Path) -> list[Any]:
    return [
        ModelCheckpoint(folder, "{epoch}-{step}", monitor="loss_epoch", save_top_k=2, save_last=True),
        ModelCheckpoint(folder / "steps", "{step}", every_n_train_steps=7, save_top_k=-1),
    ]


class Resumable(torch.utils.data.DataLoader):
    """Goes on in the middle of an epoch."""

    start = at = 0

    def __iter__(self) -> Any:
        start, self.start = self.start, 0
        for index, batch in enumerate(super().__iter__()):
            if index >= start:
                self.at = index + 1
                yield batch

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at % len(self)}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state["at"]


def contents(folder: Path) -> dict[str, Any]:
    files = sorted(folder.rglob("*.ckpt"))
    return {str(f.relative_to(folder)): torch.load(f, weights_only=False) for f in files}


def without_paths(state: Any, folder: Path) -> Any:
    if isinstance(state, dict):
        return {str(k).replace(str(folder), ""): without_paths(v, folder) for k, v in state.items()}
    if isinstance(state, (list, tuple)):
        return [without_paths(v, folder) for v in state]
    if isinstance(state, (str, Path)):
        return str(state).replace(str(folder), "")
    return state


@pytest.mark.slow
@OPTIMIZERS
def test_checkpoints_are_the_same_and_can_be_exchanged(optimizer, tmp_path):
    def train(name: str, graphed: bool, **options: Any) -> Any:
        torch.manual_seed(0)
        first = [emulated()] if graphed else []
        return fit(
            [*first, *checkpoints(tmp_path / name)],
            module=Module(optimizer, "step", dropout=0.0),  # random states are not in checkpoints
            batches=Resumable(Data(), 4),
            accumulate_grad_batches=2,
            enable_checkpointing=True,
            **{"max_epochs": 6, **options},
        )

    plain, graphed = train("plain", False), train("graphed", True)
    compare(plain, graphed)
    replayed(graphed, least=50)
    expected, found = contents(tmp_path / "plain"), contents(tmp_path / "graphed")
    assert len(expected) > 7 and list(expected) == list(found)
    for name in expected:
        mine, theirs = expected[name], found[name]
        assert mine["optimizer_states"] and mine["lr_schedulers"] and mine["loops"] and mine["callbacks"]
        difference = differs(
            frozen(without_paths(mine, tmp_path / "plain")),
            frozen(without_paths(theirs, tmp_path / "graphed")),
        )
        assert difference is None, f"{name}{difference}"

    whole = train("whole", False, max_epochs=9)
    for checkpoint in ("steps/step=14.ckpt", "last.ckpt"):  # the last ends an epoch
        runs = [
            train(f"{a}-{b}-{checkpoint}", b == "graphed", max_epochs=9, ckpt_path=tmp_path / a / checkpoint)
            for a in ("plain", "graphed")
            for b in ("plain", "graphed")
        ]
        for run in runs[1:]:
            compare(runs[0], run)
        replayed(runs[1])
        replayed(runs[3])
        for name in ("parameters after the fit", "optimizer", "schedulers"):
            mine, theirs = dict(whole.entries)[name], dict(runs[3].entries)[name]
            assert differs(frozen(mine), frozen(theirs)) is None, f"{name} after resuming {checkpoint}"


def test_checkpoint_saved_in_every_step_holds_plain_learning_rates(tmp_path):
    class Save(pl.Callback):
        def __init__(self) -> None:
            self.states: list[Any] = []

        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            trainer.save_checkpoint(tmp_path / "now.ckpt")
            self.states.append(torch.load(tmp_path / "now.ckpt", weights_only=False))

    savers = [Save(), Save()]
    torch.manual_seed(0)
    plain = fit([savers[0]], module=Module("adamw", "step"))
    torch.manual_seed(0)
    graphed = fit([emulated(), savers[1]], module=Module("adamw", "step"))
    compare(plain, graphed)
    replayed(graphed, least=36)
    for mine, theirs in zip(savers[0].states, savers[1].states, strict=True):
        assert differs(frozen(mine), frozen(theirs)) is None
        assert type(theirs["optimizer_states"][0]["param_groups"][0]["lr"]) is float
        assert "callbacks" not in theirs or not any("PyGraph" in key for key in theirs["callbacks"])


# -- batches and outputs -------------------------------------------------------------------------------


@dataclasses.dataclass
class Sample:
    x: Tensor
    y: Tensor
    name: str


PACKERS: dict[str, Any] = {
    "dict": lambda x, y, i: {"x": x, "y": y, "name": f"{i}", "nothing": None},
    "list": lambda x, y, i: [x, y, f"{i}"],
    "tuple": lambda x, y, i: (x, y, f"{i}", None),
    "dataclass": lambda x, y, i: Sample(x, y, f"{i}"),
}


@pytest.mark.parametrize("kind", PACKERS)
def test_batches_of_all_kinds(kind):
    class Unpack(Module):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if isinstance(batch, dict):
                x, y = batch["x"], batch["y"]
            elif isinstance(batch, Sample):
                x, y = batch.x, batch.y
            else:
                x, y = batch[0], batch[1]
            loss = self.loss((x, y))
            self.log("loss", loss, on_epoch=True, prog_bar=True)
            return loss

    data = [PACKERS[kind](x, y, i) for i, (x, y) in enumerate(batches(11))]
    parity(Unpack, make_batches=lambda: listed(data), replays=36, plan="{F} {B} {O}")


def test_batches_of_none_between_others():
    data = [None if i % 4 == 1 else b for i, b in enumerate(batches(12))]
    parity(make_batches=lambda: listed(data), replays=28, plan="{F} {B} {O}")


def test_combined_loader():
    class Two(Module):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss(batch["one"]) + self.loss(batch["two"])
            self.log("loss", loss, on_epoch=True)
            return loss

    def both() -> Any:
        return CombinedLoader({"one": loader(), "two": loader(60, 4)}, "min_size")

    parity(Two, make_batches=both, replays=36, plan="{F} {B} {O}")


def test_step_without_batch_index_and_a_datamodule():
    class Short(Module):
        def training_step(self, batch: Any) -> Any:
            return self.loss(batch)

    class Digits(pl.LightningDataModule):
        def train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(Data(), 4, shuffle=True)

    parity(Short, make_batches=Digits, replays=36, plan="{F} {B} {O}")


def test_dict_with_extras():
    class Extras(Module):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            out = self.net(batch[0])
            loss = nn.functional.cross_entropy(out, batch[1])
            return {"extra": out, "loss": loss, "nested": {"label": batch[1], "n": [1, "text"]}, "same": loss}

    parity(Extras, accumulate_grad_batches=2, replays=30, plan="{F} {B} {O}")


def test_parts_in_eval_mode():
    class Frozen(Module):
        def on_train_epoch_start(self) -> None:
            self.net.norm.eval()
            self.net.dropout.train(self.current_epoch % 2 == 0)

    parity(Frozen, max_epochs=8, replays=60, plan="{F} {B} {O}")


# -- more than one fit ---------------------------------------------------------------------------------


def test_fit_again_then_validate_test_and_predict():
    def run(callbacks: list[Any]) -> tuple[list[Any], Any]:
        torch.manual_seed(0)
        done = fit(callbacks, module=Module("adamw", "epoch"))
        trainer, module, found = done.trainer, done.module, list(done.entries)
        trainer.fit_loop.max_epochs = 8
        trainer.fit(module, loader(), loader(shuffle=False))
        found.append(("fitted again", [frozen(module.state_dict()), dict(trainer.callback_metrics)]))
        for evaluate in (trainer.validate, trainer.test):
            found.append((evaluate.__name__, evaluate(module, loader(shuffle=False), verbose=False)))
        found.append(("predict", trainer.predict(module, loader(shuffle=False))))
        return found, callbacks[0].report() if callbacks else None

    (expected, _), (found, report) = run([]), run([emulated()])
    assert report.steps == 44 and report.steps_replayed > 36  # of the second fit
    for mine, theirs in zip(expected, found, strict=True):
        assert mine[0] == theirs[0] and differs(frozen(mine[1]), frozen(theirs[1])) is None, mine[0]


@pytest.mark.parametrize(
    "config", [{"verify": "always"}, {"verify": "off"}, {"on_failure": "raise"}], ids=named
)
def test_parity_under_options_of_ours(config):
    parity(config=config, replays=36, plan="{F} {B} {O}")


def test_what_training_step_writes_to_python():
    """Beside what it logs: counters, a list, an average, a metric object."""

    class Writes(Module):
        def __init__(self) -> None:
            super().__init__()
            self.seen, self.losses, self.mean = 0, [], torch.zeros(())
            self.metric = torchmetrics.MeanMetric(nan_strategy="disable")

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            self.seen += 1
            value = loss["loss"] if isinstance(loss, dict) else loss
            self.losses.append(value.detach())
            self.mean = 0.9 * self.mean + value.detach()
            self.metric.update(value.detach())
            return loss

        def on_train_epoch_end(self) -> None:
            written.append([self.seen, list(self.losses), self.mean, self.metric.compute()])
            self.losses.clear()
            self.metric.reset()

    written: list[Any] = []
    parity(Writes, replays=20, plan="{F} {B} {O}", max_epochs=4)
    assert len(written) == 8
    assert differs(frozen(written[:4]), frozen(written[4:])) is None


# -- random numbers of the host ------------------------------------------------------------------------


class Decided(Module):
    """A step that takes one of two ways, as random numbers of the host say, and logs which."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        if random.random() < 0.5:
            x = x.flip(0)
            self.log("flipped", 1.0)
        out = self.net(x)
        loss = nn.functional.cross_entropy(out, y)
        if torch.rand([]) < 0.1 * np.random.randint(0, 3):
            loss = 2 * loss
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss


def test_random_numbers_of_the_host_decide() -> None:
    def make() -> Decided:
        random.seed(1)
        np.random.seed(2)
        return Decided(dropout=0.0)

    states: list[Any] = []

    def noted(trainer: pl.Trainer, module: pl.LightningModule) -> None:
        states.append((torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[2]))

    _, graphed = parity(make, lambda: [LambdaCallback(on_train_end=noted)], max_epochs=8, replays=24)
    assert graphed.report is not None and graphed.report.steps_replayed >= 24, str(graphed.report)
    assert states[0] == states[1]
