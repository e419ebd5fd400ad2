"""Loops of the user's own run as they were written until compiling their modules is expected to pay."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("accelerate")
pytest.importorskip("lightning.fabric")

import accelerate_training
import torch
from accelerate_training import fresh  # noqa: F401
from replays import text_of
from test_whole_loop import LOOPS, Loops
from torch import nn
from training import Net, differs, frozen

from pygraph_train import PyGraph, PyGraphConfig, backend
from pygraph_train.selection.compile_time import compile_seconds
from pygraph_train.step import compile_wait
from pygraph_train.step.compile_wait import CompileWait, declared_price
from pygraph_train.torch_private.autograd import operations_behind
from pygraph_train.torch_private.dynamo import compiled_call

STEP = 0.01

SIXTY_STEPS = 60.5 * STEP / 3
"""What compiled code is taken to save in sixty steps, and a little more."""


class Clock:
    """A step takes as long as `STEP` from one look at the clock to the next one, where nobody pauses."""

    def __init__(self) -> None:
        self.now, self.looks = 0.0, 0

    def perf_counter(self) -> float:
        self.looks += 1
        self.now += STEP
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(compile_wait, "time", made)
    return made


class FirstRegion:
    """Notes after which step a loop has regions, and what its report says after some steps."""

    def __init__(self, *told: int, each: Callable[[int], None] = lambda step: None) -> None:
        self.step: int | None = None
        self.told = dict.fromkeys(told, "")
        self._each = each

    def __call__(self, step: int, model: nn.Module, plugin: Any) -> None:
        if plugin is None:
            return
        if self.step is None and plugin.report().regions():
            self.step = step
        if step in self.told:
            self.told[step] = plugin.report().headline()
        self._each(step)


@LOOPS
def test_a_short_loop_never_compiles(kind: str, clock: Clock) -> None:
    first = FirstRegion()
    with declared_price(SIXTY_STEPS):
        report = getattr(Loops(steps=60, each=first), kind)()
    assert first.step is None and not backend.report().regions, str(report)
    assert report.optimizer_steps_replayed > 20 and not report.fallbacks, str(report)
    assert all(not arm.compiled for controller in report.controllers for arm in controller.times), str(report)


@LOOPS
def test_a_long_loop_compiles_when_that_has_paid(kind: str, clock: Clock) -> None:
    first = FirstRegion()
    with declared_price(SIXTY_STEPS):
        report = getattr(Loops(each=first), kind)()
    assert first.step == 62, str(report)
    assert clock.looks == 61  # one for each step until then
    assert report.plan == report.running_plan == "{F} {B} {O}", str(report)
    assert report.steps_from_graphs > 150, str(report)
    assert any(arm.plan.regions for arm in report.controllers[-1].times), str(report)


def test_a_loop_that_rests_goes_on_to_count(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    from pygraph_train.selection import timing
    from pygraph_train.selection.arms import OPTIMIZER

    plain = timing.declared_seconds
    # the graph of the update alone is slower than none
    monkeypatch.setattr(timing, "declared_seconds", lambda arm: plain(arm) + (arm.plan == OPTIMIZER))
    rested, first = [], FirstRegion()

    def each(step: int, model: nn.Module, plugin: Any) -> None:
        first(step, model, plugin)
        if plugin is not None:
            rested.append(plugin._loop._whole.rests)

    with declared_price(5 * SIXTY_STEPS):
        report = Loops(steps=450, each=each).accelerate()
    assert sum(rested[:300]) > 100
    assert first.step == 304 and report.running_plan == "{F} {B} {O}", str(report)


def test_pauses_between_steps_do_not_count(clock: Clock) -> None:
    def pause(step: int) -> None:
        clock.now += 100 * (step % 5 == 0)

    first = FirstRegion(each=pause)
    with declared_price(SIXTY_STEPS):
        report = Loops(each=first).accelerate()
    assert first.step == 62, str(report)


@pytest.mark.parametrize("options", [{"compile": True}, {"forward": "on"}, {"backward": "on"}])
def test_who_asks_for_compiled_code_does_not_wait(options: dict[str, Any], clock: Clock) -> None:
    first = FirstRegion()
    with declared_price(SIXTY_STEPS):
        report = Loops(steps=50, each=first, **options).accelerate()
    assert first.step == 2 and clock.looks == 0, str(report)


def train(plugin: PyGraph | None, *modules: nn.Module, steps: int = 100, **options: Any) -> Any:
    """A loop of Accelerate without an optimizer that it knows, and what has to be equal."""

    def script(script: Any) -> None:
        made = [script.accelerator.prepare(module) for module in modules or (Net(),)]
        parameters = [p for module in made for p in module.parameters()]
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        for _ in range(steps):
            loss = sum(module(torch.randn(8, 6)).square().mean() for module in made)
            script.accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            script.write("loss", loss)
        for module in made:
            script.write("parameters", dict(module.named_parameters()))

    return accelerate_training.run(script, plugin, **options)


def test_a_compiler_that_the_user_has_asked_for_does_not_wait(clock: Clock) -> None:
    with declared_price(SIXTY_STEPS):
        plugin = PyGraph(engine="emulated", warmup_steps=2)
        train(plugin, steps=30, dynamo_backend="inductor")
    assert plugin.report().regions() and clock.looks == 0, str(plugin.report())


def test_without_a_prepared_optimizer_calls_stand_for_steps(clock: Clock) -> None:
    plugin = PyGraph(engine="emulated", warmup_steps=2)
    expected = train(None)
    with declared_price(SIXTY_STEPS):
        found = train(plugin)
    assert differs(*([list(entry) for entry in run.entries] for run in (expected, found))) is None
    rows = plugin.report().regions()
    assert 10 <= min(row.replays for row in rows) <= max(row.replays for row in rows) <= 100 - 16 - 60, rows


def test_calls_of_another_module_stand_for_steps_where_the_first_one_is_not_called_any_more(
    clock: Clock,
) -> None:
    """As in a loop whose first phase trains another model."""

    def script(script: Any) -> None:
        made = [script.accelerator.prepare(Net()) for _ in range(2)]
        for module, steps in zip(made, (30, 300), strict=True):
            optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
            for _ in range(steps):
                loss = module(torch.randn(8, 6)).square().mean()
                script.accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                script.write("loss", loss)
            script.write("parameters", dict(module.named_parameters()))

    plugin = PyGraph(engine="emulated", warmup_steps=2)
    expected = accelerate_training.run(script, None)
    with declared_price(SIXTY_STEPS):
        found = accelerate_training.run(script, plugin)
    assert differs(*([list(entry) for entry in run.entries] for run in (expected, found))) is None
    rows = plugin.report().regions()
    assert rows and min(row.replays for row in rows) >= 100, str(plugin.report())


def test_a_module_that_was_compiled_before_does_not_wait(clock: Clock) -> None:
    module = Net()
    with declared_price(SIXTY_STEPS):
        train(PyGraph(engine="emulated", warmup_steps=2), module)
        looks = clock.looks
        plugin = PyGraph(engine="emulated", warmup_steps=2)
        train(plugin, module, steps=30)
    assert looks > 60 and clock.looks == looks
    assert plugin.report().regions(), str(plugin.report())


def test_a_module_that_is_compiled_keeps_its_graphs_when_another_one_begins_to_wait(clock: Clock) -> None:
    """Even where it is called in another way then."""
    replays = []

    def script(script: Any, plugin: PyGraph | None) -> None:
        accelerator = script.accelerator
        model, further = Net(), Net()
        optimizer = torch.optim.SGD([*model.parameters(), *further.parameters()], lr=0.1)
        model, optimizer = accelerator.prepare(model, optimizer)
        for step in range(150):
            x = torch.randn(8, 6, requires_grad=step > 110)
            loss = model(x).square().mean()
            if step == 100:
                further = accelerator.prepare(further)
            if step >= 100:
                loss = loss + further(x).square().mean() + model(x.detach()).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            script.write("loss", loss)
            if plugin is not None:
                replays.append(sum(row.replays for row in plugin.report().regions()))
        script.write_state(model, optimizer)

    plugin = PyGraph(engine="emulated", warmup_steps=2)
    expected = accelerate_training.run(lambda made: script(made, None), None)
    with declared_price(SIXTY_STEPS):
        found = accelerate_training.run(lambda made: script(made, plugin), plugin)
    assert differs(*([list(entry) for entry in run.entries] for run in (expected, found))) is None
    assert replays[99] > 0 and replays[149] - replays[119] >= 2 * 30, replays


@LOOPS
def test_the_report_says_what_waits(kind: str, clock: Clock) -> None:
    first = FirstRegion(2, 40, 100)
    with declared_price(SIXTY_STEPS):
        getattr(Loops(steps=100, each=first), kind)()
    begins = (
        "Forward and backward run as you wrote them: compiling them is expected to take about 0.2 s, and "
    )
    ends = "Set compile=True to compile at once."
    assert first.told[2].endswith(f"{begins}it is not known yet whether that pays. {ends}")
    assert first.told[40].endswith(
        f"{begins}in the 40 steps so far compiled code could have saved 0.13 s. "
        f"Inductor compiles them after about 21 more steps. {ends}"
    )
    assert "as you wrote them" not in first.told[100]


def test_the_report_of_a_loop_that_has_ended_says_what_did_not_pay(clock: Clock) -> None:
    with declared_price(500.0):
        report = Loops(steps=60).accelerate()
    told = (
        "forward and backward ran as you wrote them: compiling them is expected to take about 500 s, and in the 60 "
        "steps so far compiled code could have saved 0.2 s. Set compile=True to compile at once"
    )
    assert told[1:] in report.headline() and report.to_dict()["waits"] == told
    assert text_of(report).count(told[1:]) == 2  # in the headline, and in the table that has everything
    assert " ".join(str(report).split()).count(told[1:]) == 1


def test_nothing_waits_for_the_emulated_engine_unless_a_price_is_declared(clock: Clock) -> None:
    config = PyGraphConfig()
    assert CompileWait.wanted(config, "cuda") and not CompileWait.wanted(config, "emulated")
    with declared_price(0.0):
        assert not CompileWait.wanted(config, "cuda")
        with declared_price(None):
            assert CompileWait.wanted(config, "cuda")
    assert not CompileWait.wanted(PyGraphConfig(compile=False), "cuda")


# -- with the transformers Trainer, which knows how many steps there will be ----------------------------


@pytest.fixture
def trainers() -> Any:
    pytest.importorskip("transformers")
    import test_transformers_trainer

    return test_transformers_trainer


class Overridden:
    """`training_step` of the user's, which no graph of the whole step can hold."""

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        return super().training_step(*args, **kwargs)  # type: ignore[misc]


def makers(trainers: Any) -> dict[str, Callable[..., Any]]:
    mixed = type("Mixed", (trainers.PyGraphTrainerMixin, Overridden, trainers.Trainer), {})
    return {"callback": trainers.with_callback, "trainer": trainers.whole(mixed)}


@pytest.mark.parametrize("kind", ["callback", "trainer"])
def test_a_known_number_of_steps_decides_at_once(
    kind: str, trainers: Any, clock: Clock, tmp_path: Path
) -> None:
    with declared_price(20 * STEP / 3):  # 30 steps are made, of which 26 are left
        report = trainers.both(makers(trainers)[kind], tmp_path, replays=30).report()
    assert clock.looks == 4 and report.running_plan == "{F} {B} {O}", str(report)
    assert report.steps_from_graphs > 14, str(report)


@pytest.mark.parametrize("kind", ["callback", "trainer"])
def test_a_training_that_is_known_to_be_too_short_is_left_as_it_is(
    kind: str, trainers: Any, clock: Clock, tmp_path: Path
) -> None:
    given_back = []

    class Look(trainers.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            given_back.append(compiled_call(kwargs["model"]) is None)

    def make(**kwargs: Any) -> Any:
        trainer = makers(trainers)[kind](**kwargs)
        trainer.add_callback(Look())
        return trainer

    with declared_price(30 * STEP / 3):
        report = trainers.both(make, tmp_path, replays=10).report()
    assert clock.looks == 4 and not report.regions(), str(report)
    assert given_back == [step > 4 for step in range(1, 31)] or given_back == [
        step > 3 for step in range(1, 31)
    ]
    told = "the 27 steps that were left could have saved 0.09 s. Set compile=True to compile at once"
    assert told in report.to_dict()["waits"], str(report)


# -- one wait by itself ---------------------------------------------------------------------------------


class Waiting:
    """A module that could be compiled."""

    def __init__(self, operations: int) -> None:
        self.operations = operations
        self.paused = self.removed = False
        self.waits = True

    def remove(self) -> None:
        self.removed = True


class Owner:
    def __init__(self, *modules: Waiting, left: float | None = None) -> None:
        self.ended: list[bool] = []
        self.waits_for_device = 0
        self.modules = list(modules)
        self.wait = CompileWait(self.modules, lambda: left, self.synchronize, self.end)

    def synchronize(self) -> None:
        self.waits_for_device += 1

    def end(self, compiles: bool) -> None:
        self.ended.append(compiles)

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.wait.step_ended()
            for module in self.modules if self.wait.open else ():
                assert self.wait.holds(module)


def test_operations_of_several_modules_add_up(clock: Clock) -> None:
    owner = Owner(Waiting(100), Waiting(400))
    price = compile_seconds(500)
    needed = int(price / (STEP / 3)) + 1
    owner.steps(needed - 3)
    assert owner.wait.open and all(module.paused for module in owner.modules)
    owner.steps(6)
    assert owner.ended == [True] and not owner.wait.open
    assert not owner.wait.holds(owner.modules[0])
    assert owner.waits_for_device == 0  # nobody knows how many steps there will be


def test_a_further_module_begins_a_wait_of_its_own(clock: Clock) -> None:
    owner = Owner(Waiting(0))
    needed = int(compile_seconds(0) / (STEP / 3)) + 1
    owner.steps(needed + 3)
    owner.modules[0].waits = False  # it is compiled
    owner.wait.begin_anew()
    assert owner.wait.open and not owner.wait.under_way
    owner.modules = [Waiting(0)]
    owner.steps(needed - 3)
    assert owner.ended == [True] and owner.wait.open and owner.modules[0].paused
    owner.steps(6)
    assert owner.ended == [True, True]


def test_modules_that_wait_go_on_to_wait_when_further_ones_come(clock: Clock) -> None:
    owner = Owner(Waiting(0))
    owner.steps(100)
    owner.wait.begin_anew()
    assert owner.wait.open and owner.wait.under_way and "not known yet" in owner.wait.sentence()


def test_the_host_may_be_ahead_of_the_device_where_the_first_steps_decide(clock: Clock) -> None:
    owner = Owner(Waiting(0), left=10**6)
    owner.steps(4)
    assert owner.ended == [True] and owner.waits_for_device == 4
    owner = Owner(Waiting(0), left=10)
    owner.steps(4)
    late = Waiting(0)
    assert owner.ended == [False] and owner.wait.holds(late) and late.removed


def test_only_what_a_module_computes_counts() -> None:
    x = torch.randn(4, 6)
    net = nn.Sequential(nn.Linear(6, 6), nn.ReLU())
    first = net(x)
    once = operations_behind([first], [x])
    assert once > 0
    second = net(first.view(2, 12).t().t().view(4, 6).clone())
    assert operations_behind([second], [first]) - once == once // 2  # a clone, and views for nothing
    assert operations_behind([second, first], []) > 2 * once
    assert operations_behind([first.detach()], []) == 0


def test_operations_are_about_those_of_a_graph() -> None:
    from pygraph_train import GraphedStep

    torch.manual_seed(0)
    model = nn.Sequential(*(part for _ in range(8) for part in (nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU())))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = GraphedStep(
        lambda x: model(x).square().mean(), model=model, optimizer=optimizer, engine="emulated", compile=False
    )
    x = torch.randn(4, 8)
    before = frozen(dict(model.named_parameters()))
    for _ in range(8):
        step(x)
    assert differs(before, frozen(dict(model.named_parameters()))) is not None
    nodes = max(capture.nodes for capture in step.report().captures)
    step.close()
    assert nodes / 2 < operations_behind([model(x)], [x]) < 2 * nodes


# -- under Lightning's manual optimization ---------------------------------------------------------------


def test_manual_optimization_of_lightning_waits_as_well(clock: Clock) -> None:
    pytest.importorskip("lightning.pytorch")
    from test_lightning_manual import Gan, phases

    with declared_price(10.5 * STEP / 3):
        _, graphed = phases(Gan, replays=100, plan="{F} {B} {O}")
    assert clock.looks == 11, str(graphed.report)
