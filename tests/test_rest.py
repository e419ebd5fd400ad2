"""Runs that have settled on no graphs: steps are those of the plain loop, and are looked at now and then."""

from __future__ import annotations

import collections
import dataclasses
import importlib
import math
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from test_given_up import Counting, calls_of, loss_of
from torch import nn
from training import CONFIG, Diary, PlainStep, adamw, batches, both

from pygraph_train import GraphedStep
from pygraph_train.optimizers.preparation import OptimizerPreparation
from pygraph_train.selection import timing
from pygraph_train.selection.arms import NOTHING, Arm, Plan
from pygraph_train.step import graphed, launch_bound, runner
from pygraph_train.step.launch_bound import LaunchBoundCheck
from pygraph_train.step.lookup import Lookup
from pygraph_train.step.runner import StepRunner

KERNELS = importlib.import_module("torch.optim.adam")


class Declared:
    """Which plan is declared to be the fastest one."""

    def __init__(self, best: str) -> None:
        self.best = best

    def __call__(self, arm: Any) -> float:
        plan: Plan = arm.plan
        return 1e-3 if str(plan) == self.best else 2e-3 if plan == NOTHING else 3e-3


@pytest.fixture
def declared(monkeypatch: pytest.MonkeyPatch) -> Declared:
    """Steps without a graph are, until a test sets `best`."""
    made = Declared("F B O")
    monkeypatch.setattr(timing, "declared_seconds", made)
    return made


def trained(diary: Diary, model: nn.Module, optimizer: Any) -> Callable[[int], Any]:
    """Makes so many steps; everything is written to the diary, and the schedule goes on. Returns the step."""
    step = diary.step(lambda b: loss_of(model, b), model=model, optimizer=optimizer)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.999)

    def run(count: int) -> Any:
        for batch in batches(count):
            diary.write("loss", step(batch))
            diary.write_state(model, optimizer)
            diary.write("learning rate", optimizer.param_groups[0]["lr"])
            scheduler.step()
        return step

    return run


def test_the_loops_own_optimizer_makes_the_update(declared):
    def script(diary: Diary) -> None:
        model = Counting()
        run = trained(diary, model, adamw(model))
        run(60)
        with (
            mock.patch.object(OptimizerPreparation, "prepared") as prepared,
            mock.patch.object(KERNELS, "adam", wraps=KERNELS.adam) as kernels,
        ):
            run(30)
        assert not prepared.called
        assert {type(call.kwargs["lr"]) for call in kernels.call_args_list} == {float}

    report = both(script, replays=3)
    assert report.plan == report.running_plan == "F B O", str(report)


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device is said never to wait for the host."""
    monkeypatch.setattr(launch_bound, "_SHARE", 2.0)
    monkeypatch.setattr(LaunchBoundCheck, "wanted", staticmethod(lambda config, engine: True))


KINDS: dict[str, Callable[[], tuple[nn.Module, dict[str, Any]]]] = {
    "slower": lambda: (Counting(), {}),
    "slower for these batches": lambda: (nn.Linear(6, 3), {}),
    "regions only": lambda: (Counting(), {"optimizer": "off"}),
    "waits": lambda: (Counting(), {"compile": False}),
    "off": lambda: (Counting(), {"engine": "off"}),
}


@pytest.mark.passes_without_graphs("steps run without graphs")
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_at_rest_looks_at_nothing(kind, request, declared):
    """Neither its batch, nor a key, a clock, guards or the optimizer; and it calls few functions more than the loop."""
    if kind == "waits":
        request.getfixturevalue("waits")
    counts = []
    for made in (PlainStep, GraphedStep):
        torch.manual_seed(0)
        model, options = KINDS[kind]()
        optimizer, batch = adamw(model), batches(1)[0]
        given = {"config": dataclasses.replace(CONFIG, **options)} if made is GraphedStep else {}
        step = made(lambda b, model=model: loss_of(model, b), model=model, optimizer=optimizer, **given)
        for _ in range(80):
            step(batch)
        if made is GraphedStep:
            while not step._rest:
                step(batch)
            before = step.report().steps
        with (
            mock.patch.object(runner, "flattened") as flattened,
            mock.patch.object(runner, "key_of") as key_of,
            mock.patch.object(OptimizerPreparation, "prepared") as prepared,
            mock.patch.object(time, "perf_counter") as clock,
        ):
            counts.append(calls_of(lambda step=step, batch=batch: step(batch)))
        for never in (flattened, key_of, prepared, clock):
            assert not never.called, never
    assert step.report().steps == before + 2
    plain, ours = counts
    assert sum(ours.values()) - sum(plain.values()) <= 7, ours - plain


@pytest.mark.passes_without_graphs("steps run without graphs")
@pytest.mark.parametrize("accumulate", [1, 3])
def test_rests_begin_and_end_anywhere_in_an_accumulation(accumulate, waits):
    def script(diary: Diary) -> None:
        model = Counting()
        optimizer = adamw(model)
        step = diary.step(lambda b: loss_of(model, b), model=model, optimizer=optimizer)
        if diary.graphed:
            step._runner._launch_bound._distance = 8
        for index, batch in enumerate(batches(90)):
            last = index % accumulate == accumulate - 1
            diary.write("loss", (step if last else step.accumulate)(batch))
            diary.write_state(model, optimizer)
        if diary.graphed:
            check = step._runner._launch_bound
            assert (
                check._steps == 90 + step._rest and step._runner._training.step == 90 == step.report().steps
            )
            assert "does not wait" in step.report().why_nothing

    both(script, never="the device does not wait for the host", compile=False)


@pytest.mark.passes_without_graphs("steps run without graphs")
class Corrected(timing.DeclaredStopwatch):
    """Declares that all plans take nearly the same time, and that whatever it is told to add or subtract is 100 µs."""

    def start(self) -> None:
        super().start()
        self.added = 0.0

    def add(self, seconds: float) -> None:
        self.added += math.copysign(1e-4, seconds)

    def stop(self, arm: Arm, deliver: Callable[[timing.StepTime], None]) -> None:
        seconds = timing.declared_seconds(arm) + self.added
        deliver(timing.StepTime(seconds, seconds))


@pytest.mark.parametrize("adds", [True, False])
def test_a_graph_of_the_update_is_compared_with_the_plain_loop(
    adds: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not adds:
        monkeypatch.setattr(Corrected, "add", lambda *_: None)
    monkeypatch.setattr(timing, "DeclaredStopwatch", Corrected)
    monkeypatch.setattr(timing, "declared_seconds", lambda arm: 0.99e-3 if arm.plan.graphs else 1e-3)
    model = Counting()
    step = GraphedStep(lambda b: loss_of(model, b), model=model, optimizer=adamw(model), engine="emulated")
    for batch in batches(200):
        step(batch)
    report = step.report()
    assert report.optimizer_steps_replayed > 0, report
    # 10 µs less pay neither for a look at each batch nor for the preparation of the optimizer
    assert report.running_plan == ("F B O" if adds else "F B {O}"), report


def test_steps_are_looked_at_more_and_more_rarely(declared):
    torch.manual_seed(0)
    model = Counting()
    step = GraphedStep(lambda b: loss_of(model, b), model=model, optimizer=adamw(model), config=CONFIG)
    looked, batch = [], batches(1)[0]
    for index in range(4000):
        if not step._rest:
            looked.append(index)
        step(batch)
    late = [index for index in looked if index > 2000]
    assert len(late) <= 30, len(late)
    assert step.report().steps == 4000


@pytest.mark.passes_without_graphs("nothing is made")
def test_a_batch_on_the_device_is_not_flattened_at_rest(declared, monkeypatch):
    model, moved = Counting(), []
    step = GraphedStep(lambda b: loss_of(model, b), model=model, optimizer=adamw(model), config=CONFIG)
    step._transfer = lambda move: moved.append(1) or move()  # as on CUDA
    monkeypatch.setattr(graphed, "_are_there", lambda value: True)
    for batch in batches(150):
        at_rest = step._rest > 0
        with mock.patch.object(graphed, "flattened", wraps=graphed.flattened) as flattened:
            step(batch)
        assert flattened.called is not at_rest
    assert at_rest


@pytest.mark.passes_without_graphs("nothing is made")
def test_a_glance_at_a_batch_never_takes_the_host_for_the_device():
    there, here = mock.Mock(is_cuda=True), torch.zeros(1)
    assert graphed._are_there((1, "x", None, 2.0, [True], {"a": ()}))
    for value in (
        here,
        [here],
        {"a": (1, here)},
        there,
        object(),
        collections.OrderedDict(a=1),
        nn.Parameter(here),
    ):
        assert not graphed._are_there(value)


@pytest.mark.parametrize("graphable", [False, True])
def test_a_later_look_finds_that_graphs_are_faster(graphable, declared):
    """The optimizer is prepared again, and a run that goes back to no graphs gives it back again."""
    best = "{F B O}" if graphable else "F B {O}"

    def script(diary: Diary) -> None:
        declared.best = "F B O"
        torch.manual_seed(1)
        model = nn.Linear(6, 3) if graphable else Counting()
        run = trained(diary, model, adamw(model))
        for best_now, steps in (("F B O", 150), (best, 700), ("F B O", 500)):
            declared.best = best_now
            step = run(steps)
            if diary.graphed:
                assert step.report().running_plan == best_now, str(step.report())
                assert step._runner._updates.at_rest is (best_now == "F B O"), str(step.report())

    both(script, replays=200)


def test_an_optimizer_that_is_refused_meanwhile_stays_as_it_is(declared):
    """A step hook came while no graph needed the optimizer: when one is to be tried again there is none."""

    def script(diary: Diary) -> None:
        declared.best = "F B O"
        model, calls = Counting(), []
        optimizer = adamw(model)
        run = trained(diary, model, optimizer)
        run(150)
        optimizer.register_step_post_hook(lambda *given: calls.append(1))
        declared.best = "F B {O}"
        step = run(500)
        diary.write("calls", len(calls))
        if diary.graphed:
            assert any("hook" in row.reason for row in step.report().fallbacks), str(step.report())
            assert step.report().running_plan == "F B O"

    both(script, replays=3)


def test_other_batches_may_still_have_graphs(declared):
    """A shape that comes later begins with a graph of the whole step, for which the optimizer is prepared."""

    def script(diary: Diary) -> None:
        declared.best = "F B O"
        model = nn.Linear(6, 3)
        optimizer = adamw(model)
        step = diary.step(lambda b: loss_of(model, b), model=model, optimizer=optimizer)
        for count, size in ((90, 8), (90, 5), (20, 8)):
            for batch in batches(count, size):
                diary.write("loss", step(batch))
                diary.write_state(model, optimizer)

    both(script, replays=6)


class Reads(nn.Module):
    """No graph can hold it for batches of another size than eight."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] != 8:
            x = x * (1 + 0 * x.sum().item())  # more than a decision: nothing reads it ahead
        result: torch.Tensor = self.layer(x)
        return result


def test_batches_that_can_have_no_graph_are_looked_at_rarely(monkeypatch):
    """Those of the other size go on from graphs at once, however long the first kind went on."""
    looks: list[int] = []
    stock = Lookup.variant_of

    def looked(lookup: Lookup, signature: Any, args: Any, kwargs: Any, leaves: Any) -> Any:
        looks.append(len(args[0][0]))
        return stock(lookup, signature, args, kwargs, leaves)

    monkeypatch.setattr(Lookup, "variant_of", looked)

    def script(diary: Diary) -> None:
        torch.manual_seed(0)
        model = Reads()
        optimizer = adamw(model)
        step = diary.step(lambda b: loss_of(model, b), model=model, optimizer=optimizer)
        for count, size in ((20, 8), (160, 5), (20, 8)):
            looks.clear()
            for batch in batches(count, size):
                diary.write("loss", step(batch))
            diary.write_state(model, optimizer)
            if diary.graphed:
                assert len(looks) < 70 if size == 5 else len(looks) >= 19, (size, len(looks))

    assert both(script, replays=30).steps_replayed >= 30


def test_batches_that_take_turns_are_all_looked_at():
    """One kind of a size has a graph, the other cannot: no replay is missed."""

    class Turns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.reads = nn.Linear(6, 3), False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.reads:
                x = x * (1 + 0 * x.sum().item())  # more than a decision: nothing reads it ahead
            result: torch.Tensor = self.layer(x)
            return result

    def script(diary: Diary) -> None:
        model = Turns()
        optimizer = adamw(model)
        step = diary.step(lambda b: loss_of(model, b), model=model, optimizer=optimizer)
        for index, batch in enumerate(batches(90)):
            model.reads = index >= 30 and index % 2 == 1
            diary.write("loss", step(batch))
            diary.write_state(model, optimizer)

    report = both(script, replays=45)
    assert report.steps_replayed >= 45, str(report)


def test_closing_the_step_leaves_a_plain_optimizer(declared):
    model = Counting()
    optimizer = adamw(model)
    step = GraphedStep(lambda b: loss_of(model, b), model=model, optimizer=optimizer, config=CONFIG)
    for batch in batches(60):
        step(batch)
    assert step._runner._updates.at_rest
    step.close()
    assert not optimizer._optimizer_step_pre_hooks and not optimizer._optimizer_state_dict_post_hooks
    step(batch)


class Began:
    """Which steps a runner was asked to begin, and how many there were."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.began: list[int] = []
        stock = StepRunner.begin

        def begin(runner: StepRunner, position: Any) -> Any:
            step = stock(runner, position)
            self.began.append(runner._training.step)
            return step

        monkeypatch.setattr(StepRunner, "begin", begin)

    def between(self, first: int, last: int) -> int:
        return sum(first <= step < last for step in self.began)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Began:
    return Began(monkeypatch)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_trainer_of_lightning_makes_its_steps_at_rest(accumulate, declared, asked):
    """They are logged, validated and counted as ever, and a later look finds that graphs are faster."""
    pytest.importorskip("lightning.pytorch")
    import lightning.pytorch as pl
    from lightning_training import MemoryLogger, Module, parity

    passed_over: list[bool] = []

    class Declares(pl.Callback):
        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            declared.best = "F B O" if trainer.current_epoch < 15 * accumulate else "F B {O}"

        def on_train_batch_end(self, trainer: Any, *given: Any) -> None:
            passed_over.append(any(c.on_after_backward is None for c in trainer.callbacks))

    class Counts(Module):
        def __init__(self) -> None:
            super().__init__(scheduler="step")
            self.net = Counting()

    _, graphed = parity(
        Counts,
        lambda: [Declares()],
        max_epochs=66 * accumulate,
        validate=True,
        accumulate_grad_batches=accumulate,
        logger=MemoryLogger(),
        replays=20,
    )
    steps, progress = graphed.report.steps, graphed.report.progress()
    assert (steps, progress.with_optimizer) == (726 * accumulate, 726 if accumulate == 1 else 792), str(
        graphed.report
    )
    assert graphed.report.running_plan == "F B {O}"
    assert asked.between(1, 165 * accumulate) < 100 * accumulate and sum(passed_over) == steps - len(
        asked.began
    ), asked.began


@pytest.fixture
def waits_for_a_while(waits, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device is said to wait for the host from the fifth look on, which come soon one after the other."""
    judge = LaunchBoundCheck._judge

    def judged(check: LaunchBoundCheck, host: float, whole: float, *, ahead: float) -> None:
        check._looks = getattr(check, "_looks", 0) + 1  # type: ignore[attr-defined]
        judge(check, host if check._looks < 5 else math.inf, whole, ahead=ahead)  # type: ignore[attr-defined]

    monkeypatch.setattr(LaunchBoundCheck, "_judge", judged)
    monkeypatch.setattr(launch_bound, "_FIRST_DISTANCE", 8)


LAST_LOOK = 3 + 8 + 16 + 32
"""The step of the fifth look."""


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_step_of_accelerate_is_the_functions_own_at_rest(accumulate, waits_for_a_while, asked):
    pytest.importorskip("accelerate")
    from accelerate_training import Script, loss_of, setup
    from accelerate_training import both as both_accelerators

    def script(script: Script) -> None:
        accelerator, (model, optimizer, loader, schedule) = script.accelerator, setup(script, count=960)

        def fn(batch: dict[str, Any]) -> Any:
            with accelerator.accumulate(model):
                loss = loss_of(model, batch)
                accelerator.backward(loss)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            return loss

        step = script.graphed(fn)
        for batch in loader:
            script.write("loss", step(batch).detach())
            script.write_state(model, optimizer)

    report = both_accelerators(script, replays=30, gradient_accumulation_steps=accumulate)
    (whole,) = report.whole_steps.values()
    updates = whole.progress().with_optimizer
    assert whole.steps == 120 and updates - 120 // accumulate in (0, accumulate - 1), str(
        whole
    )  # the first is observed
    assert asked.between(1, LAST_LOOK) <= 8, asked.began


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_step_of_fabric_is_the_loops_own_at_rest(accumulate, waits_for_a_while, asked):
    pytest.importorskip("lightning.fabric")
    from fabric_training import Script, loss_of, setup
    from fabric_training import both as both_fabrics

    def script(script: Script) -> None:
        model, optimizer, loader, schedule = setup(script, steps=120)
        step = script.whole(lambda batch: loss_of(model, batch), model, optimizer, max_norm=0.5)
        for index, batch in enumerate(loader):
            last = index % accumulate == accumulate - 1
            script.write("loss", step(batch, update=last))
            script.write("optimizer", optimizer.optimizer.state_dict())
            if last:
                schedule.step()

    report = both_fabrics(script, replays=30)
    (whole,) = report.whole_steps.values()
    assert whole.steps == 120 and whole.progress().with_optimizer == 120 // accumulate, str(whole)
    assert asked.between(1, LAST_LOOK) <= 8, asked.began


@pytest.mark.parametrize("accumulate", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_trainer_of_transformers_makes_its_steps_at_rest(accumulate, waits_for_a_while, asked, tmp_path):
    pytest.importorskip("transformers")
    from test_transformers_trainer import both as both_trainers
    from test_transformers_trainer import whole

    given = {"num_train_epochs": 4, "gradient_accumulation_steps": accumulate, "lr_scheduler_type": "cosine"}
    trainer = both_trainers(whole(), tmp_path, replays=20, **given)
    (report,) = trainer.report().whole_steps.values()
    assert report.steps == 120 and report.progress().with_optimizer == 120 // accumulate, str(report)
    assert asked.between(1, LAST_LOOK) <= 8, asked.began
