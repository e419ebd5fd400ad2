"""Loops of Lightning Fabric, with and without PyGraphFabric: the same numbers, bit for bit."""

from __future__ import annotations

import functools
import gc
import subprocess
import sys
import tempfile
import weakref
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("lightning.fabric")

from fabric_training import Script, both, fresh, loss_of, run, setup  # noqa: F401
from lightning.fabric import Fabric
from lightning.fabric.loggers.logger import Logger
from lightning.fabric.plugins.precision import MixedPrecision, Precision
from lightning.fabric.strategies import DDPStrategy
from training import Net

from pygraph_train import PyGraphError, PyGraphFabric

NORM = {"max_norm": 0.5, "error_if_nonfinite": False}
CLIPPINGS = {"none": {}, "norm": NORM, "checked norm": {"max_norm": 0.5}, "value": {"clip_val": 0.01}}


def stock(script: Script, **options: Any) -> None:
    """The loop of Fabric's documentation."""
    clipping = options.pop("clipping", {})
    fabric = script.fabric
    model, optimizer, loader, schedule = setup(script, **options)
    for batch in loader:
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        fabric.backward(loss)
        if clipping:
            script.write("norm", fabric.clip_gradients(model, optimizer, **clipping))
        optimizer.step()
        schedule.step()
        script.write("loss", loss)
        script.write("rate", schedule.get_last_lr())
    script.write_state(model, optimizer)


def stepwise(script: Script, **options: Any) -> None:
    """The same with all of the step in one function."""
    clipping = options.pop("clipping", {})
    model, optimizer, loader, schedule = setup(script, **options)
    step = script.whole(functools.partial(loss_of, model), model, optimizer, **clipping)
    for batch in loader:
        script.write("loss", step(batch))
        schedule.step()
        script.write("rate", schedule.get_last_lr())
    script.write_state(model, optimizer)


def whole(report: Any, least: int = 20, plan: str = "{F} {B} {O}") -> Any:
    """The report of steps that were graphed, which have to have replayed."""
    assert report.phases_from_graphs["F"] >= least, str(report)
    assert report.running_plan == plan, str(report)
    return report


def phases(report: Any, least: int = 20) -> None:
    assert report.steps_replayed >= least, str(report)
    assert report.running_plan == "{F} {B} {O}", str(report)


# -- the stock loop -----------------------------------------------------------------------------------


@pytest.mark.notices(
    "the last tensor of a batch is not copied", "learning rates are not copied to the device"
)
@pytest.mark.parametrize("clipping", list(CLIPPINGS))
def test_the_stock_loop(clipping: str) -> None:
    phases(both(functools.partial(stock, clipping=CLIPPINGS[clipping]), replays=51))


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "64-true"])
def test_the_stock_loop_in_other_precisions(precision: str) -> None:
    # AOTAutograd may fuse casts: compare with the same graphs of operations, run without CUDA graphs
    phases(both(stock, precision=precision, compiled_reference=True, replays=51))


def test_the_stock_loop_adds_up_gradients_without_synchronisation() -> None:
    def script(script: Script) -> None:
        fabric = script.fabric
        model, optimizer, loader, _ = setup(script, steps=80)
        for index, batch in enumerate(loader):
            adding = index % 4 != 3
            with fabric.no_backward_sync(model, enabled=adding):
                loss = loss_of(model, batch)
                fabric.backward(loss / 4)
            script.write("loss", loss)
            if not adding:
                fabric.clip_gradients(model, optimizer, max_norm=0.5)
                optimizer.step()
                optimizer.zero_grad()
        script.write_state(model, optimizer)

    report = both(script, replays=33)
    assert report.optimizer_steps_replayed >= 10, str(report)


def test_the_stock_loop_with_model_and_optimizer_set_up_apart() -> None:
    def script(script: Script) -> None:
        fabric = script.fabric
        model = fabric.setup_module(Net())
        optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True))
        for _ in range(30):
            optimizer.zero_grad()
            loss = loss_of(model, [torch.randn(8, 6), torch.randint(0, 3, (8,))])
            fabric.backward(loss)
            optimizer.step()
            script.write("loss", loss)
        script.write_state(model, optimizer)

    phases(both(script, replays=51))


class WithLoss(Net):
    """Returns its loss and what the loss is computed from, as models of transformers do."""

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        out = super().forward(x)
        return {"loss": nn.functional.cross_entropy(out, y), "logits": out}


# -- whole steps --------------------------------------------------------------------------------------


@pytest.mark.notices(
    "the last tensor of a batch is not copied",
    "learning rates are not copied to the device",
)
@pytest.mark.parametrize("clipping", list(CLIPPINGS))
def test_a_whole_step(clipping: str) -> None:
    report = both(functools.partial(stepwise, clipping=CLIPPINGS[clipping]), replays=20)
    step = whole(report, plan="{F} {B} {O}")
    if clipping == "checked norm":  # which Fabric reads on the host, between two graphs
        assert step.optimizer_steps_replayed >= 20 and not step.fallbacks


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "64-true"])
@pytest.mark.parametrize("clipping", ["none", "norm"])
def test_a_whole_step_in_other_precisions(precision: str, clipping: str) -> None:
    script = functools.partial(stepwise, clipping=CLIPPINGS[clipping])
    whole(both(script, precision=precision, replays=20))


class Maker(Net):
    """Makes a tensor in its forward, of the default dtype: a precision plugin sets that."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + torch.linspace(0, 1, x.shape[1], device=x.device))


@pytest.mark.parametrize("precision", ["bf16-true", "64-true", "bf16-mixed"])
def test_a_model_that_makes_tensors_gets_those_of_the_precision(precision: str) -> None:
    whole(both(functools.partial(stepwise, net=Maker), precision=precision, replays=20))


def scaled() -> MixedPrecision:
    """Fabric itself has no float16 on a CPU."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**126, growth_interval=4)
    return MixedPrecision("16-mixed", device="cpu", scaler=scaler)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("loop", ["stock", "whole"])
def test_a_scaler_skips_steps_with_overflow(fused: bool, loop: str) -> None:
    def script(script: Script) -> None:
        fabric = script.fabric
        model, optimizer, loader, _ = setup(script, fused=fused)
        scaler: Any = fabric.strategy.precision.scaler
        step = None
        if loop == "whole":
            step = script.whole(lambda batch: loss_of(model, batch) * 64, model, optimizer)
        scales = []
        for batch in loader:
            if step is not None:
                script.write("loss", step(batch))
            else:
                optimizer.zero_grad()
                loss = loss_of(model, batch) * 64  # overflows whenever the scale has grown
                fabric.backward(loss)
                optimizer.step()
                script.write("loss", loss)
            script.write("scaler", scaler.state_dict())
            scales.append(scaler.get_scale())
        script.write_state(model, optimizer)
        assert sum(now < before for before, now in pairwise(scales)) > 5, "few steps were skipped"

    report = both(script, plugins=scaled, compiled_reference=loop == "stock", replays=20)
    if loop == "whole":
        whole(report, plan="{F} {B} {O}" if fused else "{F} {B} O")


def test_a_scaler_and_clipping() -> None:
    script = functools.partial(stepwise, fused=False, clipping=NORM)
    whole(both(script, plugins=scaled, replays=20), plan="{F} {B} O")


@pytest.mark.parametrize("clipping", ["none", "norm", "checked norm"])
def test_gradients_add_up_inside_of_no_backward_sync(clipping: str) -> None:
    def script(script: Script) -> None:
        model, optimizer, loader, schedule = setup(script, steps=90)
        step = script.whole(lambda batch: loss_of(model, batch) / 3, model, optimizer, **CLIPPINGS[clipping])
        for index, batch in enumerate(loader):
            update = index % 3 == 2
            script.write("loss", step(batch, update=update))
            if update:
                schedule.step()
            elif index > 60:
                script.write("gradients", {n: p.grad for n, p in model.named_parameters()})
        script.write_state(model, optimizer)

    plan = "{F} {B} {O}"
    whole(both(script, replays=60), least=60, plan=plan)


def test_two_graphed_steps_for_two_optimizers() -> None:
    def script(script: Script) -> None:
        fabric = script.fabric
        first, second = nn.Linear(6, 6), nn.Linear(6, 1)
        one = torch.optim.AdamW(first.parameters(), lr=1e-2, fused=True)
        two = torch.optim.AdamW(second.parameters(), lr=1e-2, fused=True)
        first, one = fabric.setup(first, one)
        second, two = fabric.setup(second, two)

        def judge(x: Tensor) -> Tensor:
            return nn.functional.softplus(second(first(x).detach())).mean()

        def make(x: Tensor) -> Tensor:
            return nn.functional.softplus(-second(first(x))).mean()

        judges = script.whole(judge, second, two)
        makes = script.whole(make, first, one)
        for x in torch.randn(30, 8, 6):
            script.write("losses", [judges(x), makes(x)])
        script.write_state(first, one)
        script.write_state(second, two)

    whole(both(script, precision="bf16-mixed", replays=32), least=50)


def test_two_graphed_steps_share_an_optimizer() -> None:
    def script(script: Script) -> None:
        model, optimizer, loader, schedule = setup(script, steps=60)
        steps = [
            script.whole(lambda batch: loss_of(model, batch), model, optimizer),
            script.whole(lambda batch: model(batch[0]).square().mean(), model, optimizer),
        ]
        for index, batch in enumerate(loader):
            script.write("loss", steps[index % 2](batch))
            schedule.step()
        script.write_state(model, optimizer)

    whole(both(script, replays=50), least=50)


def test_a_graphed_step_that_writes_to_python_shares_an_optimizer() -> None:
    def script(script: Script) -> None:
        model, optimizer, loader, _ = setup(script, steps=80)
        seen: list[int] = []

        def writes(batch: list[Tensor]) -> Tensor:
            seen.append(len(seen))
            return loss_of(model, batch)

        steps = [
            script.whole(writes, model, optimizer),
            script.whole(functools.partial(loss_of, model), model, optimizer),
        ]
        for index, batch in enumerate(loader):
            script.write("loss", steps[index < 20 or index % 2](batch))
        script.write_state(model, optimizer)

    whole(both(script, replays=60), least=60)


def test_layers_frozen_for_a_while() -> None:
    def script(script: Script) -> None:
        model, optimizer, loader, _ = setup(script, steps=60)
        step = script.whole(functools.partial(loss_of, model), model, optimizer, **NORM)
        for index, batch in enumerate(loader):
            model.module.first.requires_grad_(not 20 <= index < 40)
            script.write("loss", step(batch))
        script.write_state(model, optimizer)

    whole(both(script, precision="bf16-mixed", replays=30), least=30)


def test_a_hook_on_the_model_that_comes_in_mid_run_is_called() -> None:
    def script(script: Script) -> None:
        model, optimizer, loader, _ = setup(script)
        step = script.whole(functools.partial(loss_of, model), model, optimizer)
        seen: list[int] = []
        for index, batch in enumerate(loader):
            if index == 20:
                model.register_forward_hook(lambda module, args, output: seen.append(1))
            script.write("loss", step(batch))
        script.write("seen", len(seen))
        script.write_state(model, optimizer)

    both(script, replays=15)


def test_a_scaler_clips_no_optimizer_that_unscales_itself() -> None:
    def script(script: Script) -> None:
        with pytest.raises(NotImplementedError) as error:
            stepwise(script, fused=True, clipping=NORM)
        script.write("error", str(error.value))

    both(script, plugins=scaled, never="Fabric raises in the first step")


def test_model_and_optimizer_used_outside_of_the_step_in_between() -> None:
    def script(script: Script) -> None:
        fabric = script.fabric
        model, optimizer, loader, _ = setup(script, steps=60)
        step = script.whole(functools.partial(loss_of, model), model, optimizer)
        for index, batch in enumerate(loader):
            script.write("loss", step(batch))
            if index % 5 == 4:  # a step by hand
                optimizer.zero_grad()
                fabric.backward(loss_of(model, batch))
                optimizer.step()
        script.write_state(model, optimizer)

    whole(both(script, precision="bf16-mixed", compiled_reference=True, replays=40), least=40)


def test_validation_between_steps() -> None:
    def script(script: Script) -> None:
        model, optimizer, loader, schedule = setup(script)
        step = script.whole(functools.partial(loss_of, model), model, optimizer)
        for index, batch in enumerate(loader):
            script.write("loss", step(batch))
            schedule.step()
            if index % 5 == 4:
                model.eval()
                with torch.no_grad():
                    script.write("guess", model(batch[0]))
                model.train()
        script.write_state(model, optimizer)

    whole(both(script, replays=20))


@pytest.mark.parametrize("loop", ["stock", "whole"])
def test_saved_and_loaded_in_mid_run(loop: str, tmp_path: Path) -> None:
    def script(script: Script) -> None:
        fabric = script.fabric
        model, optimizer, loader, schedule = setup(script)
        path = tmp_path / f"{loop} {script.pygraph is None}"
        step = None
        if loop == "whole":
            step = script.whole(functools.partial(loss_of, model), model, optimizer)

        def steps(some: list[Any]) -> None:
            for batch in some:
                if step is not None:
                    script.write("loss", step(batch))
                else:
                    optimizer.zero_grad()
                    loss = loss_of(model, batch)
                    fabric.backward(loss)
                    optimizer.step()
                    script.write("loss", loss)
                schedule.step()

        some = list(loader)
        state = {"model": model, "optimizer": optimizer, "schedule": schedule, "step": 15}
        steps(some[:15])
        fabric.save(path, state)
        script.write("saved", torch.load(path, weights_only=False))
        steps(some[15:])
        script.write("left over", fabric.load(path, state))
        steps(some[15:])
        script.write_state(model, optimizer)

    report = both(script, replays=21)
    if loop == "whole":
        whole(report, least=21)


def test_a_checkpoint_goes_on_without_and_with_graphs(tmp_path: Path) -> None:
    """What was saved with graphs is loaded by the plain loop, and the other way round."""
    path = tmp_path / "checkpoint"

    def save(script: Script) -> None:
        model, optimizer, loader, _ = setup(script)
        step = script.whole(functools.partial(loss_of, model), model, optimizer)
        for batch in loader:
            step(batch)
        script.fabric.save(path, {"model": model, "optimizer": optimizer})

    def resume(script: Script) -> None:
        model, optimizer, loader, _ = setup(script)
        step = script.whole(functools.partial(loss_of, model), model, optimizer)
        script.fabric.load(path, {"model": model, "optimizer": optimizer})
        for batch in loader:
            script.write("loss", step(batch))
        script.write_state(model, optimizer)

    for pygraph in (PyGraphFabric(engine="emulated", warmup_steps=2), None):
        run(save, pygraph)
        whole(both(resume, replays=20))


@pytest.mark.parametrize("loop", ["stock", "whole"])
def test_an_exception_in_mid_run(loop: str) -> None:
    def script(script: Script) -> None:
        fabric = script.fabric
        model, optimizer, loader, _ = setup(script)
        failing = [False]

        def loss(batch: list[Tensor]) -> Tensor:
            if failing[0]:
                raise KeyError("a fault of the user")
            return loss_of(model, batch)

        step = script.whole(loss, model, optimizer) if loop == "whole" else None
        for index, batch in enumerate(loader):
            failing[0] = index in (3, 20)
            try:
                if step is not None:
                    script.write("loss", step(batch))
                else:
                    optimizer.zero_grad()
                    found = loss(batch)
                    fabric.backward(found)
                    optimizer.step()
                    script.write("loss", found)
            except KeyError as error:
                script.write("error", str(error))
        script.write_state(model, optimizer)

    both(script, replays=15)


def test_gradients_that_are_not_finite_raise_fabrics_error() -> None:
    def script(script: Script) -> None:
        model, optimizer, loader, _ = setup(script)
        step = script.whole(
            lambda batch, factor: loss_of(model, batch) * factor, model, optimizer, max_norm=0.5
        )
        for index, batch in enumerate(loader):
            factor = torch.tensor(float("inf") if index == 20 else 1.0)
            try:
                script.write("loss", step(batch, factor))
            except RuntimeError as error:
                script.write("error", [index, str(error)])
        script.write_state(model, optimizer)

    whole(both(script, replays=20), plan="{F} {B} {O}")


def test_callbacks_of_the_optimizer_run_after_each_step() -> None:
    class Counting:
        def __init__(self) -> None:
            self.steps: list[float] = []

        def on_after_optimizer_step(self, strategy: Any, optimizer: Any) -> None:
            self.steps.append(float(optimizer.param_groups[0]["params"][0].detach().sum()))

    def script(script: Script) -> None:
        stepwise(script)
        (callback,) = script.fabric._callbacks
        script.write("steps", callback.steps)
        assert len(callback.steps) == 30

    whole(both(script, callbacks=Counting, replays=20))


def test_schedulers_warn_of_nothing(recwarn: pytest.WarningsRecorder) -> None:
    pygraph = PyGraphFabric(engine="emulated", warmup_steps=2)
    run(stepwise, pygraph)
    whole(pygraph.report())
    assert not [w for w in recwarn if "lr_scheduler.step()" in str(w.message)]


class Overridden(Fabric):
    """A subclass that acts in backward."""

    count = 0

    def backward(self, tensor: Tensor, *args: Any, **kwargs: Any) -> None:
        self.count += 1
        super().backward(tensor, *args, **kwargs)


def test_a_backward_of_the_users_own_runs_on_every_step() -> None:
    fabric = Overridden(accelerator="cpu", devices=1)
    pygraph = PyGraphFabric(engine="emulated", warmup_steps=2).attach(fabric)
    model, optimizer, loader, _ = setup(Script(fabric, pygraph))
    step = pygraph.graphed_step(functools.partial(loss_of, model), model=model, optimizer=optimizer)
    for batch in loader:
        step(batch)
    assert fabric.count == 30
    assert not step.report().fallbacks
    phases(pygraph.report())


@pytest.mark.parametrize("asked", [True, False])
def test_loggers_get_what_was_measured_where_it_is_asked_for(asked: bool) -> None:
    received: list[Any] = []

    class MemoryLogger(Logger):
        name, version = "memory", 0

        def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
            received.append([step, dict(metrics)])

        def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
            """Nothing of interest."""

    def script(script: Script) -> None:
        model, optimizer, loader, _ = setup(script)
        for number, batch in enumerate(loader):
            optimizer.zero_grad()
            script.fabric.backward(loss_of(model, batch))
            optimizer.step()
            script.fabric.log("seen", number, step=number)
        script.fabric.log_dict({"seen": 30}, 30)

    pygraph = PyGraphFabric(engine="emulated", warmup_steps=2, log_metrics=asked)
    made = run(script, pygraph, loggers=lambda: [MemoryLogger()])
    phases(pygraph.report())
    shares = [metrics.pop("pygraph/share_from_graphs", None) for _, metrics in received]
    assert received == [[number, {"seen": number}] for number in range(31)]
    assert (shares[-1] or 0) > 0.6 if asked else shares == [None] * 31
    assert "log_dict" not in vars(made.fabric)


# -- where nothing is graphed -------------------------------------------------------------------------


def test_other_strategies_are_refused_in_one_sentence() -> None:
    class Own(DDPStrategy):
        """Whatever it exchanges."""

    fabric = Fabric(accelerator="cpu", devices=2, strategy=Own())
    pygraph = PyGraphFabric(engine="emulated").attach(fabric)
    (row,) = pygraph.report().fallbacks
    assert row.reason == "Own is not supported yet: its steps run without graphs"
    assert row.fix == 'Graphs need one device, strategy="ddp" or ModelParallelStrategy'
    assert pygraph.report().steps_replayed == 0
    pygraph.detach()
    with pytest.raises(PyGraphError, match="Own is not supported yet"):
        PyGraphFabric(engine="emulated", on_failure="raise").attach(fabric)
    assert "no_backward_sync" not in vars(fabric)


def test_switched_off_gradients_still_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYGRAPH_DISABLE", "1")

    def script(script: Script) -> None:
        model, optimizer, loader, _ = setup(script)
        step = script.whole(functools.partial(loss_of, model), model, optimizer)
        for index, batch in enumerate(loader):
            script.write("loss", step(batch, update=index % 3 == 2))
        script.write_state(model, optimizer)

    both(script, refused="graphs are off")


class Strange(Precision):
    """A precision plugin of somebody else."""


def test_a_precision_plugin_of_somebody_else() -> None:
    both(stock, plugins=Strange, refused="the precision plugin Strange is not one of")


# -- taking over and giving back ----------------------------------------------------------------------


def test_detached_everything_is_as_it_was() -> None:
    fabric = Fabric(accelerator="cpu", devices=1)
    before, strategy = dict(vars(fabric)), dict(vars(fabric.strategy))
    with pytest.raises(KeyError), PyGraphFabric(engine="emulated", warmup_steps=2).attach(fabric) as pygraph:
        model, optimizer, loader, _ = setup(Script(fabric, pygraph))
        inner, attributes = model.module, dict(vars(optimizer.optimizer))
        step = pygraph.graphed_step(functools.partial(loss_of, model), model=model, optimizer=optimizer)
        for batch in loader:
            step(batch)
        whole(pygraph.report())
        raise KeyError("a fault of the user")
    assert vars(fabric) == {**before, "_models_setup": 1}
    assert vars(fabric.strategy) == strategy
    assert "_register_backward_hook" not in vars(model)
    assert inner._compiled_call_impl is None
    assert list(vars(optimizer.optimizer)) == list(attributes)
    assert isinstance(optimizer.param_groups[0]["lr"], float)
    with pytest.raises(RuntimeError, match="detached: make the step again with graphed_step"):
        step(next(iter(loader)))
    PyGraphFabric(engine="emulated").attach(Fabric(accelerator="cpu", devices=1))
    with pytest.raises(RuntimeError, match="call attach"):
        pygraph.graphed_step(lambda: None, model=model, optimizer=optimizer)


def test_misuse_is_refused_in_one_sentence() -> None:
    fabric, other = (Fabric(accelerator="cpu", devices=1) for _ in range(2))
    pygraph = PyGraphFabric(engine="emulated").attach(fabric)
    raw = Net()
    plain = torch.optim.AdamW(raw.parameters(), fused=True)
    model, optimizer = fabric.setup(raw, plain)
    stranger, strange = other.setup(Net(), torch.optim.SGD(raw.parameters()))

    def refused(error: type[Exception], match: str, **options: Any) -> None:
        with pytest.raises(error, match=match):
            pygraph.graphed_step(lambda: None, **{"model": model, "optimizer": optimizer, **options})

    refused(TypeError, r"the model of graphed_step is a Net that Fabric has not set up: use", model=raw)
    refused(
        TypeError,
        r"the optimizer of graphed_step is a AdamW that Fabric has not set up: use",
        optimizer=plain,
    )
    refused(ValueError, "the model of graphed_step was set up with another Fabric", model=stranger)
    refused(ValueError, "the optimizer of graphed_step was set up with another", optimizer=strange)
    refused(ValueError, "leave one of them out", max_norm=1.0, clip_val=1.0)
    with pytest.raises(ValueError, match="is already attached to a Fabric"):
        pygraph.attach(other)
    with pytest.raises(ValueError, match="already has a PyGraphFabric"):
        PyGraphFabric(engine="emulated").attach(fabric)
    with pytest.raises(ValueError, match=r"call attach\(fabric\) before fabric\.setup"):
        PyGraphFabric(engine="emulated").attach(other)
    with pytest.raises(TypeError, match=r"takes a lightning\.fabric\.Fabric, got Net"):
        PyGraphFabric(engine="emulated").attach(raw)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="must return the loss"):
        pygraph.graphed_step(lambda: 1.0, model=model, optimizer=optimizer)()
    with pytest.raises(TypeError, match="set up the model first"):
        fabric.no_backward_sync(raw)


def test_a_fabric_of_the_other_package_is_refused_by_its_import() -> None:
    other = pytest.importorskip("lightning_fabric")
    with pytest.raises(TypeError, match=r"use `from lightning\.fabric import Fabric`"):
        PyGraphFabric(engine="emulated").attach(other.Fabric(accelerator="cpu", devices=1))


@pytest.mark.slow
def test_spawned_processes_train_with_graphs() -> None:
    script = f"""
import os
import sys
from multiprocessing.util import Finalize
sys.path.insert(0, {str(Path(__file__).parent)!r})
import torch
from lightning.fabric import Fabric
from fabric_training import Script, loss_of, setup
from pygraph_train import PyGraphFabric

def train(fabric):
    torch.manual_seed(0)
    script = Script(fabric, vars(fabric).get("_pygraph"))
    model, optimizer, loader, _ = setup(script, steps=60, dropout=0.0)  # 30 for each process
    step = script.whole(lambda batch: loss_of(model, batch), model, optimizer, max_norm=0.5)
    losses = [float(step(batch, update=index % 3 == 2)) for index, batch in enumerate(loader)]
    if fabric.global_rank == 0:
        print("LOSSES", losses, flush=True)
        if script.pygraph is not None:
            print("REPLAYED", script.pygraph.report().to_dict()["steps_replayed"], flush=True)
    fabric.barrier()
    # A group of gloo may wait for ever, or abort the process, while it is freed: the process ends without that.
    kept.append(script)
    kept.append(model)
    Finalize(None, os._exit, args=(0,), exitpriority=-1)

kept = []

if __name__ == "__main__":
    for attach in (False, True):
        fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp_spawn")
        if attach:
            PyGraphFabric(engine="emulated", warmup_steps=2).attach(fabric)
        fabric.launch(train)
"""
    with tempfile.NamedTemporaryFile("w", suffix=".py") as file:
        file.write(script)
        file.flush()
        done = subprocess.run([sys.executable, file.name], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    plain, attached, replayed = (line for line in done.stdout.splitlines() if line[:4] in ("LOSS", "REPL"))
    assert plain == attached
    assert int(replayed.split()[1]) >= 25  # of 30: not steps 1 to 3, nor the updates of steps 6 and 9


@pytest.mark.parametrize("loop", ["stock", "graphed step"])
def test_models_and_optimizers_of_former_folds_are_gone(loop: str) -> None:
    def script(script: Script) -> None:
        before: list[Any] = []
        for _ in range(3):
            model, optimizer, loader, _ = setup(script)
            before += map(weakref.ref, (model, model.module, model.module.first.weight, optimizer.optimizer))
            if loop == "stock":
                for batch in loader:
                    optimizer.zero_grad()
                    loss = loss_of(model, batch)
                    script.fabric.backward(loss)
                    optimizer.step()
                    script.write("loss", loss)
                del loss
            else:
                step = script.whole(functools.partial(loss_of, model), model, optimizer)
                for batch in loader:
                    script.write("loss", step(batch))
                del step
            script.write_state(model, optimizer)
            del model, optimizer, loader, _
            gc.collect()
            script.write("alive", sum(reference() is not None for reference in before))
        assert script.entries[-1] == ("alive", 0)

    report = both(script, replays=60)
    if loop == "stock":
        phases(report, least=60)
        assert report.steps == 90, str(report)


def test_an_optimizer_is_given_back_when_its_graphed_step_was_let_go_of() -> None:
    steps = []

    def script(script: Script) -> None:
        model, optimizer, loader, _ = setup(script)

        def epoch() -> None:
            step = script.whole(functools.partial(loss_of, model), model, optimizer)
            for batch in loader:
                script.write("loss", step(batch))
            if script.pygraph is not None:
                steps.extend(map(weakref.ref, script.pygraph._steps))

        epoch()
        gc.collect()
        script.write_state(model, optimizer)
        if script.pygraph is not None:
            script.pygraph.detach()
        group = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
        script.write("group", [group, *(type(value).__name__ for value in group.values())])
        tables = {name: len(table) for name, table in vars(optimizer.optimizer).items() if "hooks" in name}
        script.write("hooks", tables)
        gc.collect()
        assert not any(step() for step in steps)
        for batch in loader:
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
        script.write_state(model, optimizer)

    both(script, replays=20)
    assert steps
