"""Loops of Accelerate and Fabric are compared as a whole with the loops that they were."""

from __future__ import annotations

import functools
import gc
import itertools
import random
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("accelerate")
pytest.importorskip("lightning.fabric")

import accelerate_training
import fabric_training
import torch
from accelerate_training import fresh  # noqa: F401
from replays import runs_of_graphs, text_of
from torch import nn
from training import Net, differs

from pygraph_train import PyGraph, PyGraphConfig, PyGraphFabric, StepReport
from pygraph_train.graphs import make_engine
from pygraph_train.integrations.loop_report import LoopReport
from pygraph_train.optimizers.graph import OptimizerGraph
from pygraph_train.regions import inductor
from pygraph_train.regions.inductor import close_graphs
from pygraph_train.regions.region import Region
from pygraph_train.report.whole_loop import of_whole_loop
from pygraph_train.selection import comparison, timing
from pygraph_train.selection.arms import NOTHING, OPTIMIZER, REGIONS, SEPARATE, Arm, Plan
from pygraph_train.selection.controller import Controller, Estimate, Rules
from pygraph_train.step import whole_loop
from pygraph_train.step.region_memory import RegionMemory
from pygraph_train.step.whole_loop import WholeLoop
from pygraph_train.torch_private.dynamo import compiled_call


class Machine:
    """Declares how long steps take, and notes which were timed.

    Attributes:
        best: the plan that is declared to be the fastest.
        timed: the plans of the steps that were timed, in their order.
    """

    def __init__(self) -> None:
        self.best: Plan | None = None
        self.worst = 3e-3
        self.timed: list[Plan] = []

    def __call__(self, arm: Arm) -> float:
        if self.best is None:
            return self.worst
        if arm.plan == self.best:
            return 1e-3
        return 2e-3 if arm.plan == NOTHING else self.worst


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine()
    monkeypatch.setattr(timing, "declared_seconds", made)
    stop = timing.DeclaredStopwatch.stop

    def noted(watch: Any, arm: Arm, deliver: Any) -> None:
        made.timed.append(arm.plan)
        stop(watch, arm, deliver)

    monkeypatch.setattr(timing.DeclaredStopwatch, "stop", noted)
    return made


class Loops:
    """One loop, of Accelerate and of Fabric, plain and with the library.

    Args:
        steps: of the optimizer.
        accumulate: micro-batches of each.
        each: called after each step of the optimizer with its number, the model as it was prepared and the plugin
            (None in the plain loop).
        options: of the library.
    """

    def __init__(
        self,
        steps: int = 300,
        accumulate: int = 1,
        each: Callable[[int, nn.Module, Any], None] = lambda step, model, plugin: None,
        net: Callable[[], nn.Module] = Net,
        **options: Any,
    ) -> None:
        self.steps, self.accumulate, self.each, self.net = steps, accumulate, each, net
        self.options = {"engine": "emulated", "warmup_steps": 2, **options}

    def accelerate(self) -> LoopReport:
        plugin = PyGraph(**self.options)

        def script(plugin: PyGraph | None) -> Callable[[Any], None]:
            def run(script: Any) -> None:
                model, optimizer = self._made()
                model, optimizer = script.accelerator.prepare(model, optimizer)
                accelerator, loss = script.accelerator, None
                for index, (x, y) in enumerate(self._batches()):
                    with accelerator.accumulate(model):
                        loss = nn.functional.cross_entropy(model(x), y)
                        accelerator.backward(loss)
                        optimizer.step()
                        optimizer.zero_grad()
                    script.write("loss", loss)
                    if index % self.accumulate == self.accumulate - 1:
                        self.each(index // self.accumulate + 1, model, plugin)
                script.write_state(model, optimizer)

            return run

        options = {"gradient_accumulation_steps": self.accumulate}
        plain = accelerate_training.run(script(None), None, **options)
        ours = accelerate_training.run(script(plugin), plugin, **options)
        return self._compared(plain, ours, plugin.report())

    def fabric(self) -> LoopReport:
        pygraph = PyGraphFabric(**self.options)

        def script(script: Any) -> None:
            model, optimizer = self._made()
            module = model
            fabric = script.fabric
            model, optimizer = fabric.setup(model, optimizer)
            for index, (x, y) in enumerate(self._batches()):
                last = index % self.accumulate == self.accumulate - 1
                with fabric.no_backward_sync(model, enabled=not last):
                    loss = nn.functional.cross_entropy(model(x), y)
                    fabric.backward(loss / self.accumulate)
                script.write("loss", loss)
                if last:
                    optimizer.step()
                    optimizer.zero_grad()
                    self.each(index // self.accumulate + 1, module, script.pygraph)
            script.write_state(model, optimizer)

        plain, ours = fabric_training.run(script, None), fabric_training.run(script, pygraph)
        return self._compared(plain, ours, pygraph.report())

    def _made(self) -> tuple[nn.Module, Any]:
        model = self.net()
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)

    def _batches(self) -> Any:
        generator = torch.Generator().manual_seed(1)
        for _ in range(self.steps * self.accumulate):
            yield (
                torch.randn(8, 6, generator=generator),
                torch.randint(0, 3, (8,), generator=generator),
            )

    def _compared(self, plain: Any, ours: Any, report: LoopReport) -> LoopReport:
        assert plain.entries and len(plain.entries) == len(ours.entries)
        for index, (expected, found) in enumerate(zip(plain.entries, ours.entries, strict=True)):
            difference = differs(expected[1], found[1])
            assert difference is None, f"entry {index}, {expected[0]}{difference}\n{report}"
        assert runs_of_graphs(report) >= 20, str(report)
        return report


LOOPS = pytest.mark.parametrize("kind", ["accelerate", "fabric"])


@LOOPS
def test_a_loop_that_is_slower_with_regions_ends_as_the_user_wrote_it(kind: str, machine: Machine) -> None:
    machine.best = NOTHING
    runs, aside = Counter[str](), []

    def each(step: int, model: nn.Module, plugin: Any) -> None:
        if plugin is not None and step > 250:
            runs[plugin.report().running_plan] += 1
            aside.append(compiled_call(model) is None)
            mine = {id(record) for record in plugin._loop._whole.records}
            owners = [o for arena in inductor._arenas.values() for o in arena.owners()]
            assert mine and not any(isinstance(o, Region) and id(o.record) in mine for o in owners)

    report = getattr(Loops(each=each), kind)()
    assert report.plan == "F B O" and report.to_dict()["plan"] == "F B O", str(report)
    assert report.running_plan == "F B O" and set(runs) == {"F B O"}, runs
    assert all(aside) and aside
    assert report.steps == 300 and report.exploration_steps > 0


@LOOPS
def test_a_loop_that_is_faster_with_regions_keeps_them(kind: str, machine: Machine) -> None:
    machine.best = SEPARATE
    report = getattr(Loops(), kind)()
    assert report.plan == report.running_plan == "{F} {B} {O}", str(report)
    assert report.steps_from_graphs > 250, str(report)
    assert report.exploration_steps == 0  # estimates show that all others are hopeless


@LOOPS
@pytest.mark.parametrize("best", [REGIONS, OPTIMIZER], ids=str)
def test_regions_and_the_graph_of_the_update_are_decided_apart(
    kind: str, best: Plan, machine: Machine
) -> None:
    machine.best = best
    report = getattr(Loops(steps=400), kind)()
    assert report.plan == report.running_plan == str(best), str(report)


@LOOPS
def test_micro_batches_belong_to_the_step_that_ends_with_the_update(kind: str, machine: Machine) -> None:
    machine.best = NOTHING
    report = getattr(Loops(steps=200, accumulate=3), kind)()
    assert report.plan == report.running_plan == "F B O", str(report)


def test_regions_are_tried_again_when_the_loop_has_become_slower(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(whole_loop, "_LOOK_EVERY", 16)
    machine.best = NOTHING
    plans = {}

    def each(step: int, model: nn.Module, plugin: Any) -> None:
        if plugin is None:
            return
        plans[step] = plugin.report().running_plan
        if step == 250:
            machine.best, machine.worst = SEPARATE, 2.5e-3

    report = Loops(steps=700, each=each).accelerate()
    assert plans[250] == "F B O" and report.plan == report.running_plan == "{F} {B} {O}", str(report)


def test_with_compile_the_code_stays_and_only_graphs_go(machine: Machine) -> None:
    machine.best = NOTHING
    called = []

    def each(step: int, model: nn.Module, plugin: Any) -> None:
        if plugin is not None and step == 280:
            called.append(compiled_call(model) is not None)
            called.append(sum(r.plain_runs for r in plugin.report().regions()))
        if plugin is not None and step == 290:
            called.append(sum(r.plain_runs for r in plugin.report().regions()))

    report = Loops(each=each, compile=True).accelerate()
    assert report.plan == report.running_plan == "F B O", str(report)
    assert called[0] and called[2] - called[1] == 20  # forward and backward of ten steps


@LOOPS
@pytest.mark.parametrize("best", [NOTHING, SEPARATE], ids=str)
def test_steps_of_a_decided_loop_are_not_timed(kind: str, best: Plan, machine: Machine) -> None:
    machine.best = best
    timed = []

    def each(step: int, model: nn.Module, plugin: Any) -> None:
        if plugin is not None and step in (180, 250):
            timed.append(len(machine.timed))

    getattr(Loops(each=each), kind)()
    assert timed[0] > 0 and timed[0] == timed[1]


def test_a_step_of_the_plain_loop_needs_nothing_but_to_be_counted(machine: Machine) -> None:
    machine.best = NOTHING
    patched = pytest.MonkeyPatch()

    def each(step: int, model: nn.Module, plugin: Any) -> None:
        if plugin is not None and step == 100:
            loop = plugin._loop
            for owner, name in ((loop, "_count"), (loop.report, "region_counts"), (Region, "__call__")):
                patched.setattr(owner, name, None)
        if plugin is not None and step == 250:
            patched.undo()

    report = Loops(each=each).accelerate()
    assert report.steps == 300 and report.running_plan == "F B O"


def test_nothing_is_compared_before_regions_are_decided(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.best = NOTHING
    loops = Loops(steps=120, warmup_steps=100)
    undecided = []

    def each(step: int, model: nn.Module, plugin: Any) -> None:
        if plugin is not None and any(not r.settled for r in plugin.report().regions()):
            undecided.append(len(plugin.report().controllers))

    loops.each = each
    loops.accelerate()
    assert undecided and not any(undecided)


@pytest.fixture
def unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is known of a plan before it is tried, as on a GPU."""
    monkeypatch.setattr(whole_loop, "Estimate", lambda **known: Estimate())


@LOOPS
@pytest.mark.parametrize("best", [SEPARATE, REGIONS, OPTIMIZER, NOTHING], ids=str)
@pytest.mark.parametrize("short", [False, True])
@pytest.mark.slow_after(3)
def test_any_way_may_win_and_nothing_that_is_computed_changes(
    kind: str, best: Plan, short: bool, machine: Machine, unknown: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With memory for graphs beside steps without them, and without."""
    monkeypatch.setattr(RegionMemory, "is_short", lambda self: short)
    machine.best = best
    report = getattr(Loops(steps=500), kind)()
    assert report.plan == report.running_plan == str(best), str(report)
    assert 0 < report.exploration_steps <= 96
    assert {arm.plan for arm in report.controllers[-1].times} >= {SEPARATE, NOTHING}


@LOOPS
@pytest.mark.parametrize("accumulate", [1, 2])
def test_costs_that_change_all_the_time_change_no_parameter(
    kind: str, accumulate: int, machine: Machine, unknown: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(accumulate)
    monkeypatch.setattr(timing, "declared_seconds", lambda arm: rng.choice([1e-3, 1e-2]))
    monkeypatch.setattr(RegionMemory, "is_short", lambda self: rng.random() < 0.2)
    monkeypatch.setattr(comparison, "_FARTHEST", 2)
    monkeypatch.setattr(whole_loop, "_LOOK_EVERY", 3)
    rules = functools.partial(Rules, window=2, probe=2, patience=1, drift=0.0)
    monkeypatch.setattr(whole_loop, "Rules", rules)
    report = getattr(Loops(steps=300, accumulate=accumulate), kind)()
    assert {SEPARATE, REGIONS, OPTIMIZER, NOTHING} == set(machine.timed), str(report)
    assert sum(one != other for one, other in itertools.pairwise(machine.timed)) > 20


def test_compiled_code_without_graphs_may_be_slower_than_the_loop_that_was(
    machine: Machine, unknown: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timing, "declared_seconds", lambda arm: 3e-3 if arm.compiled else 2e-3)

    def each(step: int, model: nn.Module, plugin: Any) -> None:
        if plugin is not None and step == 4:
            close_graphs(plugin._loop._whole.records, "slower as a graph")
        if plugin is not None and step == 250:
            assert compiled_call(model) is None

    report = Loops(each=each).accelerate()
    assert report.controllers[-1].history[0].before == Arm(OPTIMIZER, compiled=True)
    assert not report.controllers[-1].best.compiled
    assert report.plan == report.running_plan == str(report.controllers[-1].best.plan), str(report)


def test_a_loop_that_is_captured_again_and_again_keeps_what_it_has(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.best = NOTHING
    monkeypatch.setattr(WholeLoop, "_ran_as", lambda self, arm: False)
    report = Loops(steps=300).accelerate()
    assert report.plan == report.running_plan == "{F} {B} {O}" and not report.switches, str(report)


def test_several_processes_compare_nothing(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.best = NOTHING
    monkeypatch.setattr(whole_loop, "why_no_comparison", lambda: "several processes")
    report = Loops(steps=100).accelerate()
    assert report.plan == "{F} {B} {O}" and not report.controllers, str(report)
    assert any("several processes" in note for note in report.notes)


@pytest.mark.parametrize(
    ("options", "plan"),
    [
        ({"forward": "on", "optimizer": "on"}, "{F} {B} {O}"),
        ({"forward": "on"}, "{F} {B} O"),
        ({"optimizer": "on"}, "F B {O}"),
        ({"verify": "always"}, "{F} {B} {O}"),
    ],
    ids=str,
)
def test_what_was_asked_for_is_not_taken_away(options: Any, plan: str, machine: Machine) -> None:
    machine.best = {"{F} {B} O": REGIONS, "F B {O}": OPTIMIZER}.get(plan, NOTHING)
    report = Loops(steps=300, **options).accelerate()
    assert report.plan == report.running_plan == plan, str(report)


def test_a_loop_without_regions_asks_for_the_graph_of_its_update_only(machine: Machine) -> None:
    machine.best = NOTHING
    report = Loops(steps=200, compile=False).accelerate()
    assert report.plan == report.running_plan == "F B O", str(report)
    assert {arm.plan for arm in report.controllers[-1].times} == {OPTIMIZER, NOTHING}


def test_everything_is_given_back_while_modules_stand_aside(machine: Machine) -> None:
    machine.best = NOTHING
    models = []

    def each(step: int, model: nn.Module, plugin: Any) -> None:
        if plugin is not None and step == 250:
            models.append(model)
            plugin.release()
            assert compiled_call(model) is None

    report = Loops(each=each).accelerate()
    assert report.plan == "F B O" and compiled_call(models[0]) is None


def test_another_model_has_the_loop_compared_again(machine: Machine) -> None:
    machine.best = NOTHING
    compared = []

    def each(step: int, model: nn.Module, plugin: Any) -> None:
        if plugin is None:
            return
        if step == 200:
            with torch.random.fork_rng():
                plugin._accelerator.prepare(Net())
            compared.append(len(plugin.report().controllers))
            assert plugin.report().plan == "{F} {B} {O}"
            assert compiled_call(model) is not None
        if step == 205:
            compared.append(plugin.report().running_plan)

    report = Loops(steps=400, each=each).accelerate()
    assert compared[0] == 0 and len(report.controllers) == 1
    assert report.plan == report.running_plan == "F B O", str(report)


@pytest.mark.parametrize("best", [NOTHING, OPTIMIZER, REGIONS], ids=str)
@pytest.mark.parametrize("comes_back", [False, True])
@pytest.mark.slow_after(2)
def test_everything_of_a_fold_is_gone_when_the_user_has_let_go_of_it(
    best: Plan, comes_back: bool, machine: Machine
) -> None:
    """After the loop was compared as a whole, and where another model has ended what was found out then."""
    machine.best = best
    loops = Loops(steps=300)

    def regions() -> list[Region]:
        return [
            one for arena in inductor._arenas.values() for one in arena.owners() if isinstance(one, Region)
        ]

    of_others = weakref.WeakSet(regions())  # what earlier tests have left

    def fold(script: Any) -> list[Any]:
        module, optimizer = loops._made()
        model, wrapped = script.fabric.setup(module, optimizer)
        existing = [weakref.ref(one) for one in (module, module.first.weight, model, optimizer, wrapped)]
        for index, (x, y) in enumerate(loops._batches()):
            loss = nn.functional.cross_entropy(model(x), y)
            script.fabric.backward(loss)
            wrapped.step()
            wrapped.zero_grad()
            script.write("loss", loss)
            if script.pygraph is not None and index == 250:
                loop = script.pygraph._loop
                assert script.pygraph.report().running_plan == str(best), str(script.pygraph.report())
                assert (compiled_call(module) is None) == (best != REGIONS)
                (call,), (graph,) = loop._calls, loop._optimizers
                existing.extend(map(weakref.ref, (call, graph)))
                del call, graph
            if comes_back and index == 290:
                other = script.fabric.setup(loops.net())
                existing.append(weakref.ref(other.module))
                assert script.pygraph is None or compiled_call(module) is not None
        script.write_state(model, wrapped)
        return existing

    def script(script: Any) -> None:
        existing = []
        for _ in range(2):
            existing += fold(script)
            gc.collect()
            gc.collect()  # Dynamo lets go of compiled code when the first one has found out that nobody calls it
            assert [one for reference in existing if (one := reference()) is not None] == []
            if script.pygraph is not None:
                loop = script.pygraph._loop
                assert not [*loop._calls, *loop._optimizers, *loop._taken, *loop._kept]
                assert [one for one in regions() if one not in of_others] == []

    pygraph = PyGraphFabric(**loops.options)
    plain, ours = fabric_training.run(script, None), fabric_training.run(script, pygraph)
    report = loops._compared(plain, ours, pygraph.report())
    assert report.steps == 600, str(report)


@pytest.mark.parametrize("scaled", [False, True])
def test_an_update_that_rests_and_wakes_computes_the_same(scaled: bool) -> None:
    """In turns: its graph, the same kernels without it, its graph, the optimizer of the loop, and its graph."""

    def train(engine: Any) -> tuple[list[Any], set[int]]:
        torch.manual_seed(0)
        p = nn.Parameter(torch.randn(4))
        optimizer = torch.optim.AdamW([p], lr=1e-2, fused=True)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**126, growth_interval=4, enabled=scaled)
        graph = None
        if engine is not None:
            graph = OptimizerGraph(optimizer, engine, PyGraphConfig(engine="emulated"), StepReport(), scaler)
        found: list[Any] = []
        replayed = set[int]()
        for step in range(120):
            scaler.scale((p * torch.randn(4)).square().sum()).backward()

            def body() -> None:
                scaler.step(optimizer)
                scaler.update()

            if graph is None:
                body()
            else:
                if step in (20, 60):
                    graph.rest(give_back=step == 60)
                if step in (40, 80):
                    graph.wake("regions", only=step == 80)
                graph.run(body)
                if graph.replayed:
                    replayed.add(step // 20)
            optimizer.zero_grad(set_to_none=False)  # gradients stay where they are
            state = {key: value.clone() for key, value in optimizer.state.get(p, {}).items()}
            groups = optimizer.state_dict()["param_groups"]
            found.append([p.detach().clone(), state, scaler.state_dict(), groups])
        if graph is not None:
            graph.close()
        return found, replayed

    plain, (ours, replayed) = train(None)[0], train(make_engine("emulated", torch.device("cpu")))
    assert differs(plain, ours) is None
    assert replayed == {0, 2, 4, 5}


# -- the report ----------------------------------------------------------------------------------------


def compared(first: Arm, times: dict[Arm, float]) -> Controller:
    controller = Controller([first, *(arm for arm in times if arm != first)])
    window = controller.next_window()
    for _ in itertools.takewhile(lambda _: not controller.settled, range(100)):
        window.samples.extend([times[window.arm]] * window.measured)
        window = controller.next_window()
    return controller


GRAPHS, PLAIN = Arm(SEPARATE, compiled=True), Arm(NOTHING)


@pytest.mark.parametrize(
    ("first", "times", "sentence"),
    [
        (
            GRAPHS,
            {GRAPHS: 7.7e-3, PLAIN: 6.65e-3},
            "the loop was compared as a whole: a step takes 6.65 ms as you wrote it, and 7.7 ms as plan {F} {B} {O}. "
            "It runs as you wrote it",
        ),
        (
            GRAPHS,
            {GRAPHS: 3.1e-3, PLAIN: 6.65e-3},
            "the loop was compared as a whole: a step takes 3.1 ms as plan {F} {B} {O}, and 6.65 ms as you wrote it. "
            "It runs as plan {F} {B} {O}",
        ),
        (
            Arm(OPTIMIZER, compiled=True),
            {Arm(OPTIMIZER, compiled=True): 7.7e-3, Arm(OPTIMIZER): 6e-3},
            "the loop was compared as a whole: a step takes 6 ms as plan F B {O}, and 7.7 ms as plan F B {O} with "
            "compiled code. It runs as plan F B {O}",
        ),
        (
            GRAPHS,
            {GRAPHS: 7.7e-3, Arm(NOTHING, compiled=True): 6e-3},
            "the loop was compared as a whole: a step takes 6 ms with compiled code and no graphs, and 7.7 ms as plan "
            "{F} {B} {O}. It runs with compiled code and no graphs",
        ),
    ],
)
def test_the_sentence_has_both_figures(first: Arm, times: dict[Arm, float], sentence: str) -> None:
    controller = compared(first, times)
    assert of_whole_loop(controller, measured=True) == sentence
    assert "ms" not in of_whole_loop(controller, measured=False)


@LOOPS
def test_the_report_says_so(kind: str, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.best = NOTHING
    report = getattr(Loops(), kind)()
    told = "was compared as a whole, and is faster as you wrote it than as plan {F} {B} {O}"
    assert told in report.headline() and told in report.to_dict()["compared_as_a_whole"]
    assert text_of(report).count(told) == 2  # in the headline, and in the table that has everything
    assert " ".join(str(report).split()).count(told) == 1
    monkeypatch.setattr(LoopReport, "measured", True)  # the declared times, to see where they are printed
    assert "a step takes 1 ms as you wrote it, and 3 ms as plan {F} {B} {O}." in report.headline()


@LOOPS
@pytest.mark.parametrize("best", [NOTHING, OPTIMIZER])
def test_the_first_line_names_the_plan_that_was_chosen_at_once(
    kind: str, best: Plan, machine: Machine
) -> None:
    """A loop may end right after its comparison, whose last steps ran with another plan."""
    machine.best = best
    named = []

    def each(step: int, model: nn.Module, plugin: Any) -> None:
        controllers = plugin.report().controllers if plugin is not None else []
        if controllers and controllers[-1].settled:
            named.append(plugin.report().running_plan)

    getattr(Loops(steps=100, each=each), kind)()
    assert len(named) > 20 and set(named) == {str(best)}, named


def test_the_report_says_that_graphs_were_found_to_be_faster(machine: Machine, unknown: None) -> None:
    machine.best = SEPARATE
    report = Loops().accelerate()
    told = "the loop was compared as a whole, and is faster as plan {F} {B} {O} than as you wrote it"
    assert dict(report.rows())["whole loop"] == told and told not in report.headline()
