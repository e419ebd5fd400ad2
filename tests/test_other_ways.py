"""Steps that values of their own lead another way than their graph: now and then, often, and every second time."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning_training import parity
from torch import Tensor, nn
from training import CONFIG, Diary, Net, adamw, batches, both, line_of

from pygraph_train import GraphedStep
from pygraph_train.problems import NotLegal, PyGraphError
from pygraph_train.step.advancing import Advancing
from pygraph_train.step.capture_maker import CaptureMaker
from pygraph_train.step.other_ways import OtherWays, StepCosts
from pygraph_train.step.replays import Replays
from pygraph_train.step.watching import Watching
from pygraph_train.torch_private.late_decisions import OtherWay
from pygraph_train.tracing.refusals import OUT_OF_MEMORY

Batch = tuple[Tensor, Tensor]
Step = Callable[[nn.Module, Batch, list[Any]], Any]

ALTERNATING = 2


class Wide(nn.Module):
    """What a replay writes before it is taken back: dropout, statistics, and rows of a table."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 6, max_norm=1.0)
        self.net = Net()

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.net(x + self.table(x.argmax(1)))
        return found


def train(fn: Step, rare: int, *, steps: int = 60, first: bool = False, **expected: Any) -> Any:
    """Train. Each so many steps the batch is large, and the loss with it.

    Args:
        first: whether the first batches are large as well.
    """

    def script(diary: Diary) -> None:
        model = Wide()
        optimizer = adamw(model)
        seen: list[Any] = []
        step = diary.step(lambda batch: fn(model, batch, seen), model=model, optimizer=optimizer)
        for number, (x, y) in enumerate(batches(steps)):
            large = number % rare == rare - 1 or (first and number < 4)
            try:
                diary.write("returned", step((x * 100 if large else x, y)))
            except ValueError as error:
                diary.write("error", str(error))
            diary.write("seen", list(seen))
            diary.write_state(model, optimizer)

    return both(script, **{"plan": "{F B O}", **expected})


@pytest.fixture
def taken_back(monkeypatch: pytest.MonkeyPatch) -> list[Exception]:
    """What replays have raised, and were taken back for."""
    found: list[Exception] = []
    make, compare = Replays.__call__, Advancing._compared

    def replayed(self: Any, *arguments: Any) -> Any:
        made = make(self, *arguments)
        found.extend([made] if isinstance(made, Exception) else [])
        return made

    def compared(self: Any, *arguments: Any) -> Any:
        try:
            return compare(self, *arguments)
        except Exception as error:
            found.append(error)
            raise

    monkeypatch.setattr(Replays, "__call__", replayed)
    monkeypatch.setattr(Advancing, "_compared", compared)
    return found


def loss_for(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1]) * batch[0].abs().max()


def skips(model: nn.Module, batch: Batch, seen: list[Any]) -> Tensor:
    """As a scaler does it: nothing of this batch gets into the parameters."""
    loss = loss_for(model, batch)
    if not torch.isfinite(loss.detach() * 1e37):
        seen.append("skipped")
        return loss * 0.0
    return loss


def halves(model: nn.Module, batch: Batch, seen: list[Any]) -> Tensor:
    loss = loss_for(model, batch)
    if loss.item() > 20:
        loss = loss * 0.5
    return loss


def clips(model: nn.Module, batch: Batch, seen: list[Any]) -> Tensor:
    """Clips what goes into the loss, where its norm is large, in place."""
    found = model(batch[0]) * batch[0].abs().max()
    norm = found.detach().norm()
    if norm > 100:
        found = found * (100 / norm)
        seen.append(norm.item())
    return F.cross_entropy(found, batch[1])


def raises(model: nn.Module, batch: Batch, seen: list[Any]) -> Tensor:
    loss = loss_for(model, batch)
    seen.append("before")
    if loss.item() > 20:
        raise ValueError(f"diverged: {loss.item()}")
    return loss


@pytest.mark.parametrize("fn", [skips, halves, clips, raises])
def test_one_spike_in_fifty_steps(fn: Step, taken_back: list[Exception]) -> None:
    report = train(fn, 50, steps=200, replays=180)
    assert len(taken_back) == 4 and all(isinstance(error, OtherWay) for error in taken_back)
    assert not report.fallbacks, str(report)


@pytest.mark.parametrize("fn", [skips, halves, clips, raises])
def test_a_decision_that_keeps_flipping_is_left(fn: Step, taken_back: list[Exception]) -> None:
    """What is lost by then is less than six steps, and no replay is tried afterwards."""
    report = train(fn, ALTERNATING, replays=1, plan=None)
    assert 0 < len(taken_back) <= 6, taken_back
    (reason,) = [row for row in report.fallbacks if "went another way" in row.reason]
    assert reason.count == 1 and reason.where == line_of(fn, "    if "), str(report)
    assert reason.step < 40 and "{F B" not in report.plan, str(report)


def test_regions_follow() -> None:
    """As for a step that cannot be traced whole."""
    report = train(halves, ALTERNATING, steps=120, replays=1, plan=None)
    backwards = sum(region.replays for region in report.regions() if region.phase == "backward")
    assert backwards > 60, str(report)
    assert report.steps_replayed < 10, str(report)


def two(model: nn.Module, batch: Batch, seen: list[Any]) -> Tensor:
    loss = loss_for(model, batch)
    if torch.isnan(loss):
        raise ValueError("not a number")
    elif loss.detach() * 2 > 40:  # this one
        loss = loss / 100
    value = loss.item()
    loss = loss + 0.1 * model.net.second.weight.square().sum()
    if value > 1e6 and loss.item() > 3:
        seen.append(value)
    return loss


def test_two_decisions(taken_back: list[Exception]) -> None:
    assert not train(two, 25, replays=40).fallbacks
    assert len(taken_back) == 2


def test_the_reason_names_the_one_that_flips() -> None:
    report = train(two, ALTERNATING, replays=1, plan=None)
    (reason,) = [row for row in report.fallbacks if "went another way" in row.reason]
    assert reason.where == line_of(two, "# this one")


@pytest.mark.parametrize("fn", [halves, skips])
def test_a_graph_for_the_way_that_is_seldom_taken_is_made_anew(fn: Step) -> None:
    report = train(fn, 50, first=True, steps=70, replays=40)
    assert not report.fallbacks, str(report)


def test_other_shapes_ask_nothing_that_was_left() -> None:
    """Each of them would have to be taken back as often."""

    def script(diary: Diary) -> None:
        model = Wide()
        optimizer = adamw(model)
        step = diary.step(lambda batch: halves(model, batch, []), model=model, optimizer=optimizer)
        for number in range(120):
            x, y = batches(1, size=4 + number // 30)[0]
            diary.write("loss", step((x * 100 if number % 2 else x, y)))
            diary.write_state(model, optimizer)

    report = both(script, replays=1)
    assert len([row for row in report.fallbacks if "went another way" in row.reason]) == 1, str(report)


def test_other_calls_keep_their_graphs_and_new_ones_ask_nothing_that_was_left() -> None:
    def script(diary: Diary) -> None:
        model = Wide()
        optimizer = adamw(model)

        def step_fn(batch: Batch, weights: dict[str, Tensor]) -> Tensor:
            loss = loss_for(model, batch) * sum(weights.values())
            if "plain" not in weights and loss.item() > 20:  # here
                loss = loss * 0.5
            return loss

        step = diary.step(step_fn, model=model, optimizer=optimizer)
        for number, (x, y) in enumerate(batches(160)):
            kind = "plain" if number < 20 or number % 4 > 1 else "first" if number < 80 else "second"
            batch = (x * 100 if number % 2 else x, y)
            diary.write("loss", step(batch, {kind: torch.ones(()), "other": torch.zeros(())}))
            diary.write_state(model, optimizer)

    report = both(script, replays=70)
    left, asked = [row for row in report.fallbacks if row.where == line_of(script, "# here")]
    assert "went another way" in left.reason and left.count == 1, str(report)
    assert "read on the host" in asked.reason, str(report)


def drawn_too(model: nn.Module, batch: Batch, seen: list[Any]) -> Tensor:
    """Numbers of the host decide as well, and are drawn before each replay."""
    loss = loss_for(model, batch)
    if torch.rand(()).item() < 0.3:
        loss = loss * 0.9
    if loss.item() > 15:
        loss = loss * 0.5
        seen.append(torch.rand(()).item())
    return loss


@pytest.mark.parametrize("rare", [ALTERNATING, 7, 25])
def test_with_ways_that_are_drawn(rare: int) -> None:
    train(drawn_too, rare, steps=100, replays=1, plan=None)


@pytest.mark.parametrize("keeps", [False, True])
def test_with_numbers_that_change(keeps: bool) -> None:
    """They are in the value that decides, and in what is kept of it."""

    def script(diary: Diary) -> None:
        model = Wide()
        optimizer = adamw(model)
        seen: list[float] = []

        def step_fn(batch: Batch, weight: float) -> Tensor:
            loss = loss_for(model, batch) * weight
            if keeps:
                seen.append(loss.item())
            if loss.item() > 20:
                loss = loss * 0.5
            return loss

        step = diary.step(step_fn, model=model, optimizer=optimizer)
        for number, (x, y) in enumerate(batches(80)):
            diary.write("loss", step((x * 100 if number % 30 == 29 else x, y), 1 + number / 100))
            diary.write("seen", list(seen))
            diary.write_state(model, optimizer)

    report = both(script, replays=50, plan="{F B O}")
    assert not [row for row in report.fallbacks if "went another way" in row.reason], str(report)


def index(model: nn.Module, batch: Batch, seen: list[Any]) -> Tensor:
    """An index that is only right where the answer is: on a GPU a wrong one would stop the device."""
    loss = loss_for(model, batch)
    places = loss.detach().reshape(1).long() // 4
    if places.max() >= 10:
        places = places.clamp(max=9)
    return loss + model.table(places).sum()


def test_what_rests_on_an_answer_does_not_run_without_it(taken_back: list[Exception]) -> None:
    """Otherwise torch would say here that the index is out of range."""
    train(index, 20, replays=40)
    assert taken_back and all(isinstance(error, OtherWay) for error in taken_back), taken_back


def frees(model: nn.Module, batch: Batch, seen: list[Any]) -> Tensor:
    """Gives a parameter other memory, which nobody takes back."""
    weight = model.net.second.weight
    loss = loss_for(model, batch)
    weight.data = weight.data * 0.999
    if loss.item() > 20:
        loss = loss * 0.5
    return loss


def returns_the_answer(model: nn.Module, batch: Batch, seen: list[Any]) -> Any:
    loss = loss_for(model, batch)
    large = loss.item() > 20
    if large:
        loss = loss * 0.5
    return {"loss": loss, "large": large}


def computes_with_it(model: nn.Module, batch: Batch, seen: list[Any]) -> Any:
    loss = loss_for(model, batch)
    value = loss.item()
    if value > 20:
        loss = loss * 0.5
    return loss * value


@pytest.mark.parametrize("fn", [frees, returns_the_answer, computes_with_it])
@pytest.mark.parametrize("rare", [ALTERNATING, 3, 4])
def test_what_cannot_be_taken_back_is_refused_with_a_line(
    fn: Step, rare: int, taken_back: list[Exception]
) -> None:
    report = train(fn, rare, replays=1, plan=None)
    assert not taken_back
    assert report.fallbacks[0].where in {line_of(fn, "    if "), line_of(fn, "item()")}, str(report)
    assert "read on the host" in report.fallbacks[0].reason and report.fallbacks[0].fix, str(report)


def test_by_hand_the_norm_of_gradients_decides_nothing() -> None:
    def script(diary: Diary) -> None:
        model = Wide()
        optimizer = adamw(model)

        def step_fn(x: Tensor, y: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            if norm.item() < 3:  # here
                optimizer.step()
            return loss.detach()

        step = diary.step(step_fn, model=model, optimizer=optimizer, manual_optimization=True)
        for x, y in batches(30):
            diary.write("loss", step(x, y))
            diary.write_state(model, optimizer)

    report = both(script, never="a decision between backward and update")
    assert report.fallbacks[0].where == line_of(script, "# here"), str(report)


def test_an_audit_without_memory_is_taken_back(
    taken_back: list[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a replay is not compared, and all the same it has changed something."""
    reference, counts = CaptureMaker.reference, Counter[str]()

    def fails(self: Any, *arguments: Any, **options: Any) -> Any:
        counts["runs"] += 1
        if counts["runs"] > 2:
            raise NotLegal(OUT_OF_MEMORY)
        return reference(self, *arguments, **options)

    monkeypatch.setattr(CaptureMaker, "reference", fails)
    train(halves, 5, steps=20, verify="always", replays=4, plan=None)
    assert counts["runs"] > 4 and taken_back


def test_errors_of_gaps_are_no_other_ways() -> None:
    """A loss whose lengths torch refuses, in a step with a decision."""

    def script(diary: Diary) -> None:
        model = nn.Linear(4, 5)
        optimizer = adamw(model)

        def step_fn(x: Tensor, y: Tensor, ends: Tensor, sizes: Tensor) -> Tensor:
            loss = F.ctc_loss(model(x).log_softmax(-1), y, ends, sizes)
            if loss.isnan():
                raise ValueError("not a number")
            return loss

        step = diary.step(step_fn, model=model, optimizer=optimizer)
        generator = torch.Generator().manual_seed(1)
        for number in range(60):
            x, y = torch.randn(9, 2, 4, generator=generator), torch.tensor([[1, 2], [3, 4]])
            ends = torch.tensor([9, 30 if number > 10 and number % 3 == 0 else 8])
            try:
                diary.write("loss", step(x, y, ends, torch.tensor([2, 2])))
            except RuntimeError as error:
                diary.write("error", str(error).splitlines()[0])
            diary.write_state(model, optimizer)

    report = both(script, replays=30, plan="{F B O}")
    assert not [row for row in report.fallbacks if "went another way" in row.reason], str(report)


def test_a_watched_step_that_goes_another_way_runs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is captured, too: the graph of Dynamo is for the way that was traced."""
    ran = Counter[str]()
    watch = Watching.__call__

    def watched(self: Any, *arguments: Any) -> Any:
        ran["watched"] += 1
        return watch(self, *arguments)

    monkeypatch.setattr(Watching, "__call__", watched)

    def script(diary: Diary) -> None:
        model = Wide()
        optimizer = adamw(model)
        seen: list[Any] = []
        step = diary.step(lambda batch: clips(model, batch, seen), model=model, optimizer=optimizer)
        for number, (x, y) in enumerate(batches(40)):
            diary.write("loss", step((x * 100 if number in (1, 2, 3) else x, y)))
            diary.write("seen", list(seen))
            diary.write_state(model, optimizer)

    both(script, replays=25, plan="{F B O}", warmup_steps=5)
    assert ran["watched"] >= 4


class Clipped(pl.LightningModule):
    """Its own clipping, where the norm of the gradients decides: after the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()
        self.clipped = 0

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        if loss.item() > 5:
            loss = loss * 0.5
        return loss

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        norm = nn.utils.get_total_norm([p.grad for p in self.parameters()])
        if norm > 0.5:
            nn.utils.clip_grad_norm_(self.parameters(), 0.5)
            self.clipped += 1

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return adamw(self)


def test_a_hook_that_decides_by_gradients_runs_in_each_step() -> None:
    plain, graphed = parity(Clipped, replays=10, max_epochs=3)
    assert plain.module.clipped == graphed.module.clipped > 0


def test_whoever_wants_failures_gets_one() -> None:
    model = Wide()
    config = dataclasses.replace(CONFIG, on_failure="raise")
    step = GraphedStep(
        lambda batch: halves(model, batch, []), model=model, optimizer=adamw(model), config=config
    )
    with pytest.raises(PyGraphError, match="6 steps went another way"):
        for number, (x, y) in enumerate(batches(60)):
            before = [p.detach().clone() for p in model.parameters()]
            step((x * 100 if number % 2 else x, y))
    assert all(map(torch.equal, before, model.parameters()))
    step.close()


def test_with_a_scaler() -> None:
    def script(diary: Diary) -> None:
        model = Wide()
        optimizer = adamw(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=5)
        step = diary.step(
            lambda batch: halves(model, batch, []), model=model, optimizer=optimizer, scaler=scaler
        )
        for number, (x, y) in enumerate(batches(60)):
            diary.write("loss", step((x * 100 if number % 25 == 24 else x, y)))
            diary.write("scale", scaler.get_scale())
            diary.write_state(model, optimizer)

    assert not [row for row in both(script, replays=40).fallbacks if "another way" in row.reason]


def test_what_was_gained_long_before_is_not_spent_again() -> None:
    ways, costs, others = OtherWays(), StepCosts(1, 9, 9), 0
    while ways.problem("a.py:1", 10_000, costs) is None:
        ways.took("a.py:1")
        others += 1
    assert others <= 40
    ways = OtherWays()
    for number in range(1000):  # one in ten
        ways.took("a.py:1")
        assert ways.problem("a.py:1", 10 * number, costs) is None


def test_a_step_is_traced_once_more_at_most() -> None:
    ways = OtherWays()
    found = []
    for _ in range(9):
        ways.took("a.py:1")
        found.append(ways.begins_anew("a.py:1", 0))
    assert found == [False, False, True] + [False] * 6
    assert not any(ways.begins_anew("a.py:2", replays) for replays in (0, 1))


@pytest.mark.parametrize(
    ("replays", "others", "costs", "stays"),
    [
        (0, 5, StepCosts(1, 9, 9), True),
        (0, 6, StepCosts(1, 9, 9), False),  # they have gained nothing
        (1, 6, StepCosts(1, 9, 9), True),  # 1 + 6 * 10 against 7 * 9
        (6, 6, StepCosts(1, 9, 3), False),  # regions are better than plain steps
        (25, 6, StepCosts(1, 9, 3), True),
        (1000, 6, StepCosts(9, 9, 9), False),  # nothing to gain
        (59, 6, None, False),
        (60, 6, None, True),
    ],
)
def test_replays_that_are_taken_back_have_to_pay(
    replays: int, others: int, costs: StepCosts | None, stays: bool
) -> None:
    ways = OtherWays()
    for _ in range(others):
        ways.took("a.py:1")
    assert (ways.problem("a.py:1", replays, costs) is None) is stays
    assert ("a.py:1" in ways.left) is not stays
    assert ways.problem("a.py:2", replays, costs) is None
