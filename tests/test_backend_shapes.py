"""The compile backend with shapes that change: the numbers of plain PyTorch, and a graph only where it pays.

Traces, captures and replays are counted. On the emulated engine a capture is declared to cost as much as
`warmup_runs` runs save, so the counts are exact.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from replays import regions_ran
from test_backend import (  # noqa: F401
    Net,
    compiled,
    graphed_regions,
    hostile,
    net,
    regions,
    replays,
    same_as_plain,
    update,
)
from torch import nn

from pygraph_train.graphs.engine import MemoryUse
from pygraph_train.regions import direct, inductor
from pygraph_train.regions import pair as pair_module
from pygraph_train.regions import region as region_module
from pygraph_train.regions import zeros as zeros_module
from pygraph_train.regions.arena import Arena
from pygraph_train.regions.measurements import Measurements
from pygraph_train.regions.pool_room import PoolRoom
from pygraph_train.regions.region_capture import RegionCapture
from pygraph_train.selection.break_even import BreakEven, Sightings


class Reader(nn.Module):
    """A small model of text: the length of its batches changes."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.first = nn.Embedding(11, 6), nn.Linear(6, 8)
        self.norm, self.last = nn.LayerNorm(8), nn.Linear(8, 3)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        hidden = F.gelu(self.first(self.words(words)))
        hidden = self.norm(hidden + hidden @ hidden.transpose(1, 2) @ hidden)
        return self.last(F.dropout(hidden, 0.3, self.training).mean(1))


class WithLogits(Reader):
    """Besides the loss it returns what nobody differentiates."""

    def forward(self, words: torch.Tensor) -> Any:
        hidden = F.gelu(self.first(self.words(words)))
        return self.last(hidden).square().mean(), hidden


def texts(lengths: Sequence[int]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    g = torch.Generator().manual_seed(2)
    for length in lengths:
        yield torch.randint(0, 11, (4, length), generator=g), torch.randint(0, 3, (4,), generator=g)


def drawn(lengths: Sequence[int], steps: int) -> list[int]:
    g = torch.Generator().manual_seed(3)
    return [lengths[i] for i in torch.randint(len(lengths), (steps,), generator=g).tolist()]


def read(lengths: Sequence[int]) -> Callable[..., list[torch.Tensor]]:
    def body(model: nn.Module, call: Any, opt: torch.optim.Optimizer) -> list[torch.Tensor]:
        return [update(F.cross_entropy(call(x), y), opt) for x, y in texts(lengths)]

    return body


def captures(phase: str) -> int:
    return sum(r.captures for r in regions(phase))


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("indirection", ["copy", "device"])
@pytest.mark.parametrize("direct", [True, False])
def test_lengths_that_come_back_are_traced_twice_and_captured_once(direct: bool, indirection: str) -> None:
    lengths = drawn([3, 4, 5, 6, 7], 60)
    same_as_plain(read(lengths), Reader, least=70, warmup_runs=3, direct=direct, indirection=indirection)
    assert len(regions("forward")) == len(regions("backward")) == 2, "one for the first length, one for all"
    assert captures("forward") <= 6 and captures("backward") <= 6
    # each length runs three times without a graph, the first one in both of them
    assert replays("forward") == replays("backward") >= 60 - 6 * 3 - 1


def test_a_length_gets_its_graph_when_it_has_paid_for_it() -> None:
    model = net(Reader)
    call = compiled(model, warmup_runs=5)
    counts = []
    for x, _ in texts([3] + [4, 5, 6] * 8):
        call(x).sum().backward()
        counts.append(captures("forward"))
    assert counts == [0] * 16 + [1, 2] + [3] * 7, "each with its sixth run"
    assert captures("backward") == 3
    regions_ran(2 * 9)


def test_changing_shapes_are_called_past_the_runtime_of_aotautograd(monkeypatch: pytest.MonkeyPatch) -> None:
    taken, apply = [], direct._apply
    monkeypatch.setattr(direct, "_apply", lambda route, *args: (taken.append(route), apply(route, *args))[1])
    same_as_plain(read(drawn([3, 4, 5, 6, 7], 40)), Reader, least=40, warmup_runs=2)
    assert len(taken) >= 35


def test_lengths_that_never_return_leave_no_trace(hostile: Arena) -> None:  # noqa: F811
    class Tiny(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).tanh()

    model, plain = Tiny(2, 2), Tiny(2, 2)
    plain.load_state_dict(model.state_dict())
    call, inner = compiled(model), []

    for size in range(2, 2502):
        x = torch.full((size, 2), 1 / size)
        call(x).sum().backward()
        if size % 500 == 2:
            plain(x).sum().backward()
            assert torch.equal(model.weight.grad, plain.weight.grad)  # type: ignore[arg-type]
        model.weight.grad = plain.weight.grad = None
        if size == 100:
            names = {r.name for r in (*regions("forward"), *regions("backward"))}
            inner = [o for o in gc.get_objects() if type(o) is inductor.Region and o.spec.name in names]
    assert len(regions("forward")) == 2, "traced for the first size, and for all others"
    assert captures("forward") == captures("backward") == 0 and not hostile._occupants
    assert inner and all(len(region._keys) + len(region._sightings) <= 1024 for region in inner)
    assert all(not region._keys for region in inner)
    before = sum(r.plain_runs for r in regions("forward"))
    for _ in range(4):
        call(torch.ones(7, 2)).sum().backward()
    assert captures("forward") == 1 and sum(r.plain_runs for r in regions("forward")) <= before + 2
    regions_ran(4)


def test_lengths_that_come_back_among_ever_new_ones() -> None:
    lengths = [n for k in range(40) for n in (5, 100 + k)]
    same_as_plain(read(lengths), Reader, least=70, warmup_runs=2)
    assert captures("forward") == captures("backward") == 1, "the first one has a graph of its own"


@pytest.mark.slow
def test_graphs_that_made_room_come_back_more_and_more_seldom() -> None:
    model = net(Reader)
    call = compiled(model, max_signatures=2, warmup_runs=2)
    counts = []
    for x, _ in texts([3] + [4, 5, 6, 7, 8] * 80):
        call(x).sum().backward()
        counts.append(captures("forward"))
    # the price of each further graph is four times that of the one before: 2, 8 and 32 runs, and the next 128
    assert counts[-1] <= 5 * 3
    assert captures("backward") <= counts[-1]
    regions_ran(1)


def test_without_a_limit_all_lengths_keep_their_graphs(hostile: Arena) -> None:  # noqa: F811
    lengths = list(range(2, 12))
    same_as_plain(read([30, *lengths * 3]), Reader, least=35, warmup_runs=1)
    assert captures("forward") == captures("backward") == len(lengths)
    (forward,) = [r for r in graphed_regions(hostile) if r.spec.phase == "forward"]
    assert sum(bool(key.captures) for key in forward._keys.values()) == len(lengths)


def test_two_forwards_of_different_lengths_before_their_backwards() -> None:
    def body(model: nn.Module, call: Any, opt: torch.optim.Optimizer) -> list[torch.Tensor]:
        losses = []
        data = list(texts(drawn([3, 5, 6], 60)))
        for step in range(0, 60, 2):
            (x1, y1), (x2, y2) = data[step : step + 2]
            first, second = F.cross_entropy(call(x1), y1), F.cross_entropy(call(x2), y2)
            pair = [first, second] if step % 4 else [second, first]
            for loss in pair:
                loss.backward()
            opt.step()
            opt.zero_grad()
            losses += [first.detach(), second.detach()]
        return losses

    same_as_plain(body, Reader, least=40)


@pytest.mark.slow
def test_a_length_with_another_number_of_saved_tensors() -> None:
    class Branches(Reader):
        def forward(self, words: torch.Tensor) -> torch.Tensor:
            hidden = self.first(self.words(words))
            if words.shape[1] > 5:  # guarded by Dynamo: two functions
                hidden = torch.sin(torch.exp(hidden * 0.1)) * hidden
            return self.last(self.norm(hidden)).mean(1)

    same_as_plain(read(drawn([3, 4, 5, 6, 7, 8], 60)), Branches, least=60, warmup_runs=2)
    assert len(regions("forward")) <= 4


@pytest.mark.slow
def test_sizes_of_one_and_of_two_dimensions_at_once() -> None:
    def body(model: nn.Module, call: Any, opt: torch.optim.Optimizer) -> list[torch.Tensor]:
        g, losses = torch.Generator().manual_seed(5), []
        for step in range(60):
            rows, length = [1, 2, 3][step % 3], [1, 4, 6, 4][step // 3 % 4]
            x, y = (
                torch.randint(0, 11, (rows, length), generator=g),
                torch.randint(0, 3, (rows,), generator=g),
            )
            losses.append(update(F.cross_entropy(call(x), y), opt))
        return losses

    same_as_plain(body, Reader, least=20, warmup_runs=2)
    assert captures("forward") <= 12


@pytest.mark.slow
def test_gradients_accumulate_over_lengths() -> None:
    def body(model: nn.Module, call: Any, opt: torch.optim.Optimizer) -> list[torch.Tensor]:
        losses = []
        for step, (x, y) in enumerate(texts(drawn([3, 5, 6, 8], 60))):
            loss = F.cross_entropy(call(x), y) / 4
            loss.backward()
            losses.append(loss.detach())
            if step % 4 == 3:
                opt.step()
                opt.zero_grad(set_to_none=step % 8 == 3)
        return losses

    same_as_plain(body, Reader, least=60, warmup_runs=2)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("direct", [True, False])
def test_gradients_that_are_not_there_have_the_size_of_the_batch(
    direct: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zeros_module, "LARGE", 1)

    def body(model: nn.Module, call: Any, opt: torch.optim.Optimizer) -> list[torch.Tensor]:
        values = []
        for step, (x, _) in enumerate(texts(drawn([3, 5, 6, 8, 9], 60))):
            loss, hidden = call(x)
            values += [update(loss + hidden.mean() if step in (30, 31) else loss, opt), hidden.detach()]
        return values

    same_as_plain(body, WithLogits, least=60, warmup_runs=2, direct=direct)


@pytest.mark.slow
def test_a_gradient_in_another_order_of_dimensions() -> None:
    def body(model: nn.Module, call: Any, opt: torch.optim.Optimizer) -> list[torch.Tensor]:
        values = []
        for x, _ in texts(drawn([3, 5, 6], 40)):
            _, hidden = call(x)
            weights = torch.arange(hidden.numel(), dtype=torch.float32).view(8, -1, 4).permute(2, 1, 0)
            values.append(update((hidden * weights).sum() * 1e-3, opt))
        return values

    same_as_plain(body, WithLogits, least=40, warmup_runs=2)


def test_gradients_of_what_nobody_differentiates_move_with_no_length(monkeypatch: pytest.MonkeyPatch) -> None:
    # Their zeros lie in memory that lasts. The backward of the first length finds out that its results do not. So the
    # graphs of further lengths read theirs where they are, without a second capture that would show how they move.
    monkeypatch.setattr(zeros_module, "LARGE", 1)
    moving: list[tuple[str, int]] = []
    sort = region_module.Region._sort_inputs

    def sorted_inputs(region: region_module.Region, *given: Any) -> Any:
        moved, settled = sort(region, *given)
        moving.append((region.spec.phase, len(moved)))
        return moved, settled

    monkeypatch.setattr(region_module.Region, "_sort_inputs", sorted_inputs)

    def body(model: nn.Module, call: Any, opt: torch.optim.Optimizer) -> list[torch.Tensor]:
        return [update(call(x)[0], opt) for x, _ in texts([7, 6, 5, 4] * 6)]

    same_as_plain(body, WithLogits, least=24, warmup_runs=1)
    backwards = [count for phase, count in moving if phase == "backward"]
    # the gradient of the loss moves in all of them, and the zeros in none but the first one: the longest text comes
    # last and needs other memory, so the two graphs before it are made once more
    assert backwards == [2, 1, 1, 1, 1, 1], moving


class SmallMemory:
    """An engine's memory: of each capture, and what steps without graphs keep cached until it is given back."""

    def __init__(self, first: int, cached: int, growth: int) -> None:
        self.graphs, self.cached, self.growth = first, cached, growth

    def memory(self) -> MemoryUse:
        reserved = 1000 + self.graphs + self.cached
        return MemoryUse(reserved, 1000 + self.graphs + 500, 0, 10**6)

    def trim(self) -> None:
        self.cached = 0

    def untidied(self) -> AbstractContextManager[None]:
        return nullcontext()

    def capture(self, room: PoolRoom, *, further: bool) -> None:
        with room.growing(further):
            self.graphs += self.growth
        self.cached = 500  # the next step of another shape


@pytest.mark.passes_without_graphs("no region runs: the rule is asked")
def test_graphs_of_further_shapes_may_have_what_steps_without_graphs_have_cached() -> None:
    engine: Any = SmallMemory(first=0, cached=500, growth=600)
    room = PoolRoom(engine)
    engine.capture(room, further=False)
    engine.growth, kept = 100, 0
    while not room.is_used_up():
        engine.capture(room, further=True)
        kept += 1
    # graphs of one shape and what steps without graphs have cached are 600 and 500: there is room for five further
    # captures of 100 each, for a twentieth of the whole memory, and for what the last one takes
    assert kept == 7 and engine.graphs == 1300, (kept, engine.graphs)
    assert room.is_used_up(), "and the next one finds none either"


@pytest.mark.slow
def test_an_inference_between_steps_of_changing_lengths() -> None:
    def body(model: nn.Module, call: Any, opt: torch.optim.Optimizer) -> list[torch.Tensor]:
        values = []
        for step, (x, y) in enumerate(texts(drawn([3, 5, 6, 9], 48))):
            if step % 3 == 2:
                with torch.no_grad():
                    values.append(call(x).clone())
            else:
                values.append(update(F.cross_entropy(call(x), y), opt))
        return values

    same_as_plain(body, Reader, least=40, warmup_runs=2)


# --- where times are measured -------------------------------------------------------------------------


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, hostile: Arena) -> None:  # noqa: F811
    """Runs of a region take 4 seconds without a graph and 1 with it. A capture takes 30, and the first one 120."""
    now = [0.0]
    run, replay, record = region_module.Region._run_compiled, RegionCapture.replay, region_module.record
    captured: set[Any] = set()

    def timed_run(self: Any, inputs: list[Any]) -> Any:
        now[0] += 4
        return run(self, inputs)

    def timed_replay(self: Any, inputs: list[Any], begins: Any) -> Any:
        now[0] += 1
        return replay(self, inputs, begins)

    def timed_record(engine: Any, compiled: Any, *rest: Any) -> Any:
        before, region = now[0], compiled.__self__
        result = record(engine, compiled, *rest)
        now[0] = before + (30 if region in captured else 120)
        captured.add(region)
        return result

    monkeypatch.setattr(region_module.Region, "_run_compiled", timed_run)
    monkeypatch.setattr(RegionCapture, "replay", timed_replay)
    monkeypatch.setattr(region_module, "record", timed_record)
    monkeypatch.setattr(inductor, "Pair", lambda *_: pair_module.Pair("copy", True))
    monkeypatch.setattr(
        region_module,
        "Measurements",
        lambda active, wait: Measurements(active, wait, clock=lambda: now[0]),
    )


@pytest.mark.usefixtures("measured")
def test_further_lengths_wait_for_the_measured_price() -> None:
    lengths = [3] + [4, 5, 6, 7] * 3 + [4, 5, 6, 7, 8, 9] * 20
    same_as_plain(read(lengths), Reader, least=180, warmup_runs=1)
    (_, dynamic), (_, backward) = regions("forward"), regions("backward")
    # Four lengths come three times without a graph, and are captured to measure it. Then a pair of captures is known
    # to cost 60 s and to save 6 s: the other lengths get their graphs in their eleventh run.
    assert dynamic.captures == backward.captures == 6 and dynamic.decision == "graph"
    assert dynamic.plain_runs == backward.plain_runs == 4 * 3 + 2 * 10, dynamic
    assert dynamic.costs["plain"]["total_us"] == 4e6 and dynamic.costs["graph"]["total_us"] == 1e6


@pytest.mark.usefixtures("measured")
def test_a_length_that_was_measured_and_does_not_come_back_holds_up_no_other() -> None:
    lengths = [3] + [4] * 7 + [5, 6] * 40
    same_as_plain(read(lengths), Reader, least=100, warmup_runs=1)
    (_, dynamic) = regions("forward")
    assert dynamic.decision == "graph" and dynamic.captures == 3
    assert dynamic.replays >= 60


@pytest.mark.slow
@pytest.mark.usefixtures("measured")
def test_lengths_that_were_measured_and_do_not_come_back_make_room_for_others() -> None:
    lengths = [3] + [4, 5, 6, 7] * 4 + [8, 9] * 60
    same_as_plain(read(lengths), Reader, least=80, warmup_runs=1)
    (_, dynamic), (_, backward) = regions("forward"), regions("backward")
    assert dynamic.decision == "graph" and dynamic.captures <= 8
    assert backward.decision == "graph" and backward.captures == 4 + 2


# --- the rule -------------------------------------------------------------------------------------------


@pytest.mark.passes_without_graphs("it captures nothing")
def test_shapes_pay_for_their_graph_before_they_get_it() -> None:
    worth = BreakEven()
    assert not worth.known
    worth.captured("forward", 1.2)  # the first one is taken to be four times as dear as others
    worth.captured("backward", 2.0)
    worth.saves(0.1)
    assert worth.known and worth.runs == pytest.approx(8)
    worth.captured("forward", 0.4)
    worth.captured("backward", 0.4)
    assert worth.runs == pytest.approx(8)
    assert not worth.pays(8, 0) and worth.pays(9, 0)
    assert not worth.pays(32, 1) and worth.pays(33, 1), "one that had to go is dearer"
    worth.captured("forward", 0.2)
    assert worth.runs == pytest.approx(7)
    worth.saves(0.0)
    assert not worth.pays(10**9, 0)
    worth.forget()
    assert not worth.known


@pytest.mark.passes_without_graphs("it captures nothing")
@pytest.mark.parametrize("stops_after", [1, 5, 10, 11, 15, 100, 10_000])
def test_no_shape_costs_more_than_twice_the_best_choice(stops_after: int) -> None:
    worth = BreakEven()
    price, saved = 1.0, 0.1
    for _ in range(2):
        worth.captured("forward", price)
    worth.saves(saved)
    graph, spent = False, 0.0
    for run in range(1, stops_after + 1):
        if not graph and worth.pays(run, 0):
            graph, spent = True, spent + price
        spent += 0.0 if graph else saved
    assert spent <= 2 * min(price, saved * stops_after) + 1e-9


@pytest.mark.passes_without_graphs("it captures nothing")
def test_captures_that_nothing_pays_for_come_to_an_end() -> None:
    worth = BreakEven(declared=10)
    made = 0
    for runs in range(1000):
        made += worth.within(made, runs)
    assert made <= 8 + 1000 / 10 + 1
    never = BreakEven()
    never.captured("forward", 1.0)
    never.saves(-1.0)
    assert never.runs == math.inf and never.within(7, 0) and not never.within(9, 10**9)


@pytest.mark.passes_without_graphs("it captures nothing")
def test_what_comes_back_is_counted_among_ever_new_shapes() -> None:
    seen = Sightings(64)
    for new in range(5000):
        seen.see(("new", new))
        often = seen.see("often")
        assert len(seen) <= 64
    assert often >= 20
    seen.forget("often")
    assert seen.see("often") == 1
