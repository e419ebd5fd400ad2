"""The optimizer's graph works on the gradients of regions where they lie, and copies those that move.

Regions run on the engine that overwrites whatever a replay may overwrite.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_backend import hostile  # noqa: F401  (a fixture)
from test_regions import in_regions, with_print
from torch import Tensor, nn
from training import Diary, Net, adamw, batches, both, loss_of, sgd

from pygraph_train import PyGraphConfig
from pygraph_train.gradients import places as gradient_places
from pygraph_train.graphs.emulated import EmulatedEngine
from pygraph_train.graphs.engine import MemoryUse
from pygraph_train.integrations.loop import Loop
from pygraph_train.optimizers.captured_update import CapturedUpdate
from pygraph_train.optimizers.graph import OptimizerGraph
from pygraph_train.optimizers.phase import OptimizerPhase


class Seen:
    """What replays of the optimizer's graph did with gradients."""

    def __init__(self) -> None:
        self.replays = 0
        self.copies: list[int] = []  # replays that copied
        self.captures: list[CapturedUpdate] = []


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    """Watches copies of lists of tensors during replays; what is read in place has to lie there."""
    notes = Seen()
    replay, copy, capture = OptimizerPhase._replay, torch._foreach_copy_, OptimizerPhase._capture
    replaying = False

    def watched_copy(*args: Any, **kwargs: Any) -> Any:
        if replaying:
            notes.copies.append(notes.replays)
        return copy(*args, **kwargs)

    def watched(self: OptimizerPhase, captured: CapturedUpdate, gradients: list[Tensor | None]) -> None:
        nonlocal replaying
        if captured.buffers is None:
            present = [g.data_ptr() for g in gradients if g is not None]
            assert present == captured.gradients.addresses
        notes.replays += 1
        replaying = True
        replay(self, captured, gradients)
        replaying = False

    def noted(*args: Any) -> Any:
        made = capture(*args)
        notes.captures += [] if made is None else [made]
        return made

    monkeypatch.setattr(torch, "_foreach_copy_", watched_copy)
    monkeypatch.setattr(OptimizerPhase, "_replay", watched)
    monkeypatch.setattr(OptimizerPhase, "_capture", noted)
    return notes


def training(steps: int = 45, accumulate: int = 1, make_optimizer: Any = adamw, **options: Any) -> Any:
    def script(diary: Diary) -> None:
        model = Net()
        optimizer = make_optimizer(model)
        step = diary.step(with_print(model, diary), model=model, optimizer=optimizer, **options)
        for index, batch in enumerate(batches(steps)):
            last = index % accumulate == accumulate - 1
            diary.write("loss", (step if last else step.accumulate)(batch))
            diary.write_state(model, optimizer)

    return script


@pytest.mark.parametrize("make_optimizer", [adamw, sgd])
@pytest.mark.parametrize("clip", [None, 0.05])
def test_gradients_of_regions_are_not_copied(make_optimizer, clip, seen):
    report = in_regions(both(training(make_optimizer=make_optimizer, max_grad_norm=clip), replays=85))
    assert report.optimizer_steps_replayed >= 25, str(report)
    assert [c.buffers for c in seen.captures] == [None]
    assert seen.copies == []


@pytest.mark.parametrize("accumulate", [2, 3])
def test_sums_of_micro_batches_are_not_copied(accumulate, seen):
    report = in_regions(both(training(45 * accumulate, accumulate, max_grad_norm=0.05), replays=155))
    assert report.optimizer_steps_replayed >= 20, str(report)
    assert seen.captures[-1].buffers is None
    assert seen.copies == []


def test_gradients_that_are_zeroed_stay_where_they_are(seen):
    def script(diary: Diary) -> None:
        model = Net()
        optimizer = adamw(model)
        empty = optimizer.zero_grad
        optimizer.zero_grad = lambda set_to_none=True: empty(set_to_none=False)  # type: ignore[method-assign]
        step = diary.step(with_print(model, diary), model=model, optimizer=optimizer)
        for batch in batches(60):
            diary.write("loss", step(batch))
            diary.write_state(model, optimizer)

    report = both(script, replays=120)
    assert report.optimizer_steps_replayed >= 25, str(report)
    assert seen.captures[-1].buffers is None


def moving(diary: Diary, model: Net) -> Any:
    """A step function after which gradients lie elsewhere on each step."""
    kept: dict[Tensor, list[Any]] = {p: [] for p in model.parameters()}

    def move(p: Tensor) -> None:
        kept[p].append(p.grad)  # its address is in use
        p.grad = p.grad.clone()  # type: ignore[union-attr]
        kept[p].append(p.grad)

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(move)
    return with_print(model, diary), kept.values()


@pytest.mark.parametrize("config", [{}, {"forward": "off", "backward": "off"}], ids=["regions", "autograd"])
@pytest.mark.parametrize("clip", [None, 0.05])
def test_gradients_that_move_are_copied(clip, config, seen):
    """Also back, where clipping changes them: whoever holds one sees what it sees without graphs."""

    def script(diary: Diary) -> None:
        model = Net()
        optimizer = adamw(model)
        step_fn, kept = moving(diary, model)
        step = diary.step(step_fn, model=model, optimizer=optimizer, max_grad_norm=clip)
        for batch in batches(60):
            diary.write("loss", step(batch))
            diary.write_state(model, optimizer)
        diary.write("kept", list(kept))

    report = both(script, **config, replays=40)
    assert report.optimizer_steps_replayed >= 20, str(report)
    (capture,) = seen.captures
    assert capture.buffers is not None


@pytest.fixture
def little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole training has needed little more than the gradients."""
    monkeypatch.setattr(EmulatedEngine, "memory", lambda self: MemoryUse(1000, 1000, 0, 10**9))
    monkeypatch.setattr(gradient_places, "_FEW_COPIES", 0)


@pytest.mark.parametrize(
    "config",
    [{"replays": 40}, {"forward": "off", "backward": "off", "refused": "copies of them would take"}],
    ids=["regions", "autograd"],
)
def test_gradients_that_move_are_not_copied_where_copies_need_much_memory(config, seen, little_memory):
    def script(diary: Diary) -> None:
        model = Net()
        optimizer = adamw(model)
        step_fn, kept = moving(diary, model)
        step = diary.step(step_fn, model=model, optimizer=optimizer)
        for batch in batches(60):
            diary.write("loss", step(batch))
            diary.write_state(model, optimizer)
        diary.write("kept", list(kept))

    report = both(script, **config)
    assert report.optimizer_steps_replayed == 0 and not seen.captures, str(report)
    assert "copies of them would take" in " ".join(str(report).split()), str(report)
    assert report.plan == report.running_plan == ("F B O" if "forward" in config else "{F} {B} O"), str(
        report
    )


def moved_update(
    steps: int, moves: Callable[[int], bool], turns: int | None = None
) -> tuple[Loop, OptimizerGraph]:
    """Train where nothing but the optimizer is taken over, beside plain training.

    Args:
        steps: so many.
        moves: whether gradients lie elsewhere from this step on.
        turns: the step from which on the loss is to grow.
    """
    model, plain = (nn.Linear(6, 3) for _ in range(2))
    plain.load_state_dict(model.state_dict())
    optimizer, other = (torch.optim.AdamW(m.parameters(), lr=1e-2, fused=True) for m in (model, plain))
    loop, places = Loop(PyGraphConfig(engine="emulated"), torch.device("cpu")), list[list[Tensor]]()
    graph = loop.take_optimizer(optimizer)
    assert graph is not None
    for index in range(steps):
        if index == turns:
            optimizer.param_groups[0]["maximize"] = other.param_groups[0]["maximize"] = True
        x = torch.randn(4, 6)
        for each in (model, plain):
            each(x).square().mean().backward()
        if moves(index):
            places.append([torch.empty_like(p) for p in model.parameters()])
        for p, place in zip(model.parameters(), places[-1], strict=True):
            p.grad = place.copy_(p.grad)  # type: ignore[arg-type]
        loop.step(graph, optimizer.step)
        other.step()
        optimizer.zero_grad()
        other.zero_grad()
    assert all(map(torch.equal, model.parameters(), plain.parameters()))
    return loop, graph


def test_the_optimizer_of_a_loop_is_given_back_where_its_gradients_move(seen, little_memory):
    loop, graph = moved_update(200, lambda index: True)
    assert seen.replays == 0 and not graph.serves(), loop.report
    (row,) = loop.report.fallbacks
    assert "copies of them would take" in row.reason, row
    assert not graph.optimizer.param_groups[0].get("capturable")
    graph.wake("regions", only=False)
    assert graph.serves(), "regions will leave gradients where they are"


def test_the_optimizer_of_a_loop_gets_its_graph_when_gradients_have_come_to_rest(seen, little_memory):
    loop, _ = moved_update(200, lambda index: index <= 20)
    assert not any(capture.buffers for capture in seen.captures)
    assert seen.replays > 100 and not loop.report.fallbacks, loop.report


def test_an_optimizer_whose_graph_serves_most_steps_is_not_given_back(seen, little_memory):
    """Gradients move for a while now and then, and come to rest in between."""
    model, plain = (nn.Linear(6, 3) for _ in range(2))
    plain.load_state_dict(model.state_dict())
    optimizer, other = (torch.optim.AdamW(m.parameters(), lr=1e-2, fused=True) for m in (model, plain))
    loop, kept = Loop(PyGraphConfig(engine="emulated"), torch.device("cpu")), []
    graph = loop.take_optimizer(optimizer)
    for index in range(1600):
        x = torch.randn(4, 6)
        for each in (model, plain):
            each(x).square().mean().backward()
        if index % 200 < 40:
            kept.append([p.grad.clone() for p in model.parameters()])
        for p, place in zip(model.parameters(), kept[-1], strict=True):
            p.grad = place.copy_(p.grad)
        loop.step(graph, optimizer.step)
        other.step()
        for each in (optimizer, other):
            each.zero_grad()
    assert all(map(torch.equal, model.parameters(), plain.parameters()))
    assert not any(capture.buffers for capture in seen.captures)
    assert graph.replayed and not loop.report.fallbacks, loop.report


def test_gradients_that_settle_elsewhere_are_found_again(seen):
    """Those of one step are kept, so that from then on regions leave theirs elsewhere."""

    def script(diary: Diary) -> None:
        model = Net()
        optimizer = adamw(model)
        step = diary.step(with_print(model, diary), model=model, optimizer=optimizer)
        for index, batch in enumerate(batches(80)):
            diary.write("loss", step(batch))
            if index == 40:
                kept = [p.grad for p in model.parameters()]
            diary.write_state(model, optimizer)
        diary.write("kept", kept)

    report = in_regions(both(script, replays=160))
    assert report.optimizer_steps_replayed >= 40, str(report)
    assert [c.buffers for c in seen.captures] == [None, None]
    assert seen.copies == []


@pytest.mark.parametrize("config", [{}, {"forward": "off"}, {"optimizer": "off"}], ids=str)
@pytest.mark.parametrize("every", [1, 7])
def test_gradients_that_the_user_keeps_keep_their_values(every, config):
    def script(diary: Diary) -> None:
        model = Net()
        optimizer = adamw(model)
        step = diary.step(with_print(model, diary), model=model, optimizer=optimizer, max_grad_norm=0.05)
        kept = []
        for index, batch in enumerate(batches(60)):
            diary.write("loss", step(batch))
            if index % every == 0:
                kept += [p.grad for p in model.parameters()]
            diary.write_state(model, optimizer)
        diary.write("kept", kept)

    both(script, **config, replays=70)


def test_gradients_after_a_step_are_the_ones_of_the_backward():
    held: list[list[int]] = []

    def script(diary: Diary) -> None:
        model = Net()
        optimizer = adamw(model)
        left: dict[int, int] = {}
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(lambda p: left.update({id(p): p.grad.data_ptr()}))
        step = diary.step(loss_of(model), model=model, optimizer=optimizer, max_grad_norm=0.05)
        for batch in batches(40):
            step(batch)
            held.append([p.grad.data_ptr() - left[id(p)] for p in model.parameters()])
            diary.write_state(model, optimizer)

    report = both(script, fuse="off", replays=75)
    assert report.optimizer_steps_replayed >= 20, str(report)
    assert not any(map(any, held))


def test_parameters_that_move_all_the_time_end_it():
    def script(diary: Diary) -> None:
        model = Net()
        optimizer = adamw(model)
        step = diary.step(loss_of(model), model=model, optimizer=optimizer)
        for batch in batches(40):
            for p in model.parameters():
                p.data = p.data.clone()
            diary.write("loss", step(batch))
            diary.write_state(model, optimizer)

    report = both(script, forward="off", replays=25)
    assert 0 < len(report.captures) <= 5
    assert any("parameters live at new addresses" in f.reason for f in report.fallbacks), str(report)


@pytest.mark.parametrize("optimizer", ["auto", "off"])
def test_parameters_with_the_same_gradient_get_one_each(optimizer):
    """The backward returns one tensor for two parameters; clipping must not scale it twice."""

    class Sums(Net):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.Linear(6, 8, bias=False), nn.Linear(6, 8, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x + (x @ (self.one.weight + self.other.weight).t()).mean())

    def script(diary: Diary) -> None:
        model = Sums()
        step = diary.step(
            with_print(model, diary), model=model, optimizer=(opt := adamw(model)), max_grad_norm=0.05
        )
        for batch in batches(45):
            diary.write("loss", step(batch))
            diary.write_state(model, opt)
            assert len({p.grad.data_ptr() for p in model.parameters()}) == len(list(model.parameters()))

    in_regions(
        both(script, optimizer=optimizer, replays=55),
        plan="{F} {B} O" if optimizer == "off" else "{F} {B} {O}",
    )


def test_a_place_is_waited_for_only_so_long():
    place = gradient_places.Place("regions")
    layouts = [gradient_places.Layout([address], ()) for address in range(40)]
    found = []
    for layout in layouts:
        place.follow(layout)
        found.append(place.settled(replays=0))
    assert found.index(True) == gradient_places._PATIENCE["regions"] and all(found[16:]) and place.buffers


def test_a_place_is_where_gradients_were_three_times():
    place = gradient_places.Place("autograd")
    found = []
    for address in (1, 1, 2, 2, 2, 2):
        place.follow(gradient_places.Layout([address], ()))
        found.append(place.settled(replays=0))
    assert found == [False, False, False, False, True, True] and not place.buffers


def test_a_graph_that_finds_no_gradients_is_made_again_when_that_pays():
    """A validation between two steps may move them: a capture after each one would cost more than it saves."""
    paying = gradient_places._REPLAYS_PER_CAPTURE

    def waits(latest: int) -> int:
        """Steps at another address until a graph is made."""
        place = gradient_places.Place("regions", weighs=True)
        place._again = gradient_places._FREE
        for step in range(200):
            place.follow(gradient_places.Layout([1], ()))
            if place.settled(replays=latest, latest=latest):
                return step
        raise AssertionError("never")

    settled = gradient_places._SAME_PLACE - 1
    assert waits(paying) == waits(10 * paying) == settled
    assert waits(10) == settled + paying - 10 - 1 and waits(0) == settled + paying - 1


def test_steps_without_a_graph_count_where_others_come_between_them() -> None:
    """An epoch may be short, and its last batch smaller, so that gradients lie elsewhere for one step."""
    place, made = gradient_places.Place("regions", weighs=True), 0
    place._again = gradient_places._FREE
    for _ in range(4):
        for address in (*[1] * 60, 2):
            place.follow(gradient_places.Layout([address], ()))
            made += place.settled(replays=0, latest=0)
    assert made == 2 and not place.buffers, "of 232 steps that had a graph in vain"


def test_gradients_that_move_now_and_then_get_few_captures(seen):
    loop, _ = moved_update(400, lambda index: index % 20 == 0)
    assert 2 <= len(seen.captures) <= 6 and seen.replays >= 20, loop.report


@pytest.mark.parametrize("turns", [None, 250])
def test_of_graphs_that_follow_moved_gradients_a_sample_is_compared(turns, seen, monkeypatch):
    numbers, verified_replay = [], OptimizerPhase._verified_replay

    def noted(self: OptimizerPhase, capture: CapturedUpdate, *args: Any) -> None:
        numbers.append(capture.number)
        verified_replay(self, capture, *args)

    monkeypatch.setattr(OptimizerPhase, "_verified_replay", noted)
    loop, _ = moved_update(400, lambda index: index % 20 == 0, turns)
    made = [capture.number for capture in seen.captures]
    alike = [
        before.buffers is after.buffers is None and before.hyperparameters == after.hyperparameters
        for before, after in itertools.pairwise(seen.captures)
    ]
    assert alike.count(True) >= 2 and alike.count(False) >= (turns is not None), loop.report
    assert made == [1, *(number + 1 if same else 1 for number, same in zip(made, alike, strict=False))]
    assert numbers == [number for number in made if number in (1, 2, 4)], (numbers, made)
