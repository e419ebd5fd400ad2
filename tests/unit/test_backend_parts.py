"""Parts of the compile backend by themselves: choosing, staging."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import fx

from pygraph_train.regions.arena import Arena, Occupant
from pygraph_train.regions.blocks import Block
from pygraph_train.regions.measurements import Cost, Measurements, choose
from pygraph_train.regions.pair import WORTH_POINTING, Pair
from pygraph_train.regions.recording import _Repeatable, record
from pygraph_train.regions.region_capture import Handing, RegionCapture
from pygraph_train.regions.staging import Staged
from pygraph_train.regions.transform import Transformed
from pygraph_train.report.backend_report import RegionRecord
from pygraph_train.torch_private.memory import borrow_memory

pytestmark = pytest.mark.quick


class Clock:
    """Time that passes when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Stub:
    """A region of which only the costs are real."""

    def __init__(self, phase: str, pair: Pair, serves: bool = False) -> None:
        self.clock = Clock()
        self.plain_only = self.feeds = False
        self.serves = serves
        self.points: list[tuple[bool, bool]] = []
        self.record = RegionRecord(phase, phase, plain_runs=1)
        self.measurements = Measurements(True, self.wait, self.clock)
        self.pair = pair
        self.enqueued = 0.0
        setattr(pair, phase, self)

    def wait(self) -> None:
        self.clock.now += self.enqueued
        self.enqueued = 0.0

    def measure(
        self, way: Any, host: float, noise: tuple[float, ...] = (1.0, 1.0, 1.0, 1.0), device: float = 0.0
    ) -> None:
        def run(factor: float) -> None:
            self.clock.now += host * factor
            self.enqueued = device

        if way != "plain":
            self.measurements.time(way, lambda: run(100.0))  # the first replay after a capture
        for factor in noise:
            self.measurements.time(way, lambda factor=factor: run(factor))
        self.pair.settle()

    def decide(self, decision: str, reason: str) -> None:
        self.record.decision, self.record.reason = decision, reason

    def give_up(self, reason: str) -> None:
        self.plain_only = True
        self.decide("plain", reason)
        backward: Any = self.pair.backward
        if backward is not None and backward is not self and not backward.plain_only:
            backward.give_up("its forward runs without a graph")

    def point(self, pointing: bool, for_good: bool) -> None:
        self.points.append((pointing, for_good))


def both(plain: tuple[float, float], graph: tuple[float, float], **options: Any) -> tuple[Stub, Stub]:
    pair = Pair("auto", True)
    forward, backward = Stub("forward", pair, **options), Stub("backward", pair)
    for stub, without, with_graph in zip((forward, backward), plain, graph, strict=True):
        stub.measure("plain", without)
        stub.measure("graph", with_graph)
    return forward, backward


@pytest.mark.parametrize(
    ("plain", "graph", "decisions"),
    [
        ((4.0, 4.0), (1.0, 1.0), ["graph", "graph"]),
        ((4.0, 1.0), (1.0, 2.0), ["graph", "plain"]),
        ((1.0, 4.0), (2.0, 1.0), ["graph", "graph"]),  # together they gain, and neither is possible alone
        ((1.0, 1.0), (2.0, 2.0), ["plain", "plain"]),
        ((1.0, 1.1), (2.0, 1.0), ["plain", "plain"]),
    ],
)
def test_pair_keeps_what_is_fastest(
    plain: tuple[float, float], graph: tuple[float, float], decisions: list[str]
) -> None:
    assert [stub.record.decision for stub in both(plain, graph)] == decisions


@pytest.mark.parametrize(
    ("feeds", "graph", "decision"), [(True, 1.0, "graph"), (True, 1.05, "plain"), (False, 1.0, "plain")]
)
def test_a_graph_that_another_one_reads_from_is_kept_unless_it_is_slower(
    feeds: bool, graph: float, decision: str
) -> None:
    pair = Pair("auto", True)
    forward, backward = Stub("forward", pair), Stub("backward", pair)
    backward.feeds = feeds  # a gradient that the backward before it would have to copy
    for stub in (forward, backward):
        stub.measure("plain", 1.0)
        stub.measure("graph", graph)
    assert forward.record.decision == backward.record.decision == decision
    assert ("another graph reads" in forward.record.reason) == (decision == "graph")


def test_slow_runs_do_not_decide() -> None:
    pair = Pair("auto", True)
    stub = Stub("forward", pair)
    stub.measure("plain", 2.0)
    stub.measure("graph", 1.0, noise=(50.0, 1.0, 50.0, 50.0))
    assert stub.record.decision == "graph"


@pytest.mark.parametrize(
    ("indirect", "decision"), [(0.5, "graph, indirect"), (1.5, "graph"), (1.002, "graph, indirect")]
)
def test_indirection_is_kept_where_it_is_no_slower_than_copies(indirect: float, decision: str) -> None:
    forward, backward = both((4.0, 4.0), (1.0, 1.0), serves=True)
    assert forward.pair.way == "indirect"
    assert not forward.record.settled and not backward.record.settled
    assert forward.points == [(True, False)] and backward.points == []
    for stub in (forward, backward):
        stub.measure("indirect", indirect)
    assert forward.record.decision == decision and backward.record.decision == "graph"
    assert forward.pair.way is None
    assert forward.points[-1] == (indirect < 1.5, True)


@pytest.mark.parametrize(
    ("host", "device", "decision"),
    [
        (0.30, 3.99, "graph, indirect"),  # 5% longer, of which the loop sees nothing
        (0.30, 4.02, "graph, indirect"),  # as long as with copies, as far as anyone can tell
        (0.30, 4.05, "graph"),  # the device has more to do
        (2.10, 3.99, "graph"),  # too much of it to be sure that it is hidden
    ],
)
def test_time_of_a_host_that_waits_is_not_time_of_the_loop(host: float, device: float, decision: str) -> None:
    pair = Pair("auto", True)
    stub = Stub("forward", pair, serves=True)
    stub.measure("plain", 8.0)
    stub.measure("graph", 0.10, device=4.0)
    stub.measure("indirect", host, device=device)
    assert stub.record.decision == decision


def test_few_copied_bytes_are_not_worth_indirection() -> None:
    pair = Pair("auto", True)
    assert pair.prefer_for(WORTH_POINTING) == "device" and pair.prefer_for(WORTH_POINTING - 1) is None
    assert Pair("copy", True).prefer_for(10 * WORTH_POINTING) is None
    assert Pair("host", True).prefer_for(1) == "host"
    assert Pair("auto", False).prefer_for(10 * WORTH_POINTING) is None  # not measured, not chosen


def test_graph_must_save_something() -> None:
    keep, why = choose(Cost(1.0, 0.001), Cost(1.0, 0.0005))
    assert not keep and "nothing to gain" in why
    assert choose(Cost(1.0, 0.9), Cost(1.0, 0.1))[0]  # as long on the device, but the host is free
    assert not choose(Cost(1.0, 0.9), Cost(1.05, 0.1))[0]


def identity_graph(n: int) -> fx.GraphModule:
    graph = fx.Graph()
    graph.output(tuple(graph.placeholder(f"x{i}") for i in range(n)))
    return fx.GraphModule(torch.nn.Module(), graph)


@pytest.mark.parametrize(
    "values",
    [
        [torch.tensor(2.0, dtype=torch.float64), torch.tensor(3.0, dtype=torch.float64)],
        [torch.arange(3), torch.arange(3) + 5],
        [torch.arange(3).expand(2, 3), torch.arange(3).expand(2, 3) + 1],
        [torch.tensor(float("nan")), torch.tensor(1.0), torch.tensor(float("nan"))],
    ],
    ids=["scalar", "tensor", "overlapping", "nan"],
)
def test_staged_input_has_a_fixed_address_and_new_values(values: list[torch.Tensor]) -> None:
    seen: list[torch.Tensor] = []

    def region(inputs: list[Any]) -> list[Any]:
        seen.append(inputs[0])
        return [inputs[0].clone()]

    staged = Staged(region, Transformed(identity_graph(1), [], staged=(0,)), torch.device("cpu"))
    for value in values:
        (out,) = staged([value])
        torch.testing.assert_close(out, value, equal_nan=True, rtol=0, atol=0)
    assert len({t.data_ptr() for t in seen[:2]}) == (1 if values[0].stride() == values[1].stride() else 2)
    assert all(t.data_ptr() != v.data_ptr() for t, v in zip(seen, values, strict=True))


def test_output_that_was_a_cpu_input_is_the_callers_own_tensor() -> None:
    x, y = torch.randn(3), torch.randn(2)
    changed = Transformed(identity_graph(2), [], staged=(0,), late=(1,), passthrough={0: 0})
    out = Staged(lambda inputs: list(inputs), changed, torch.device("cpu"))([x, y])
    assert out[0] is x and torch.equal(out[1], y)


def test_a_saved_buffer_that_somebody_holds_when_its_pool_gets_memory_back() -> None:
    """Later on it must be seen that somebody holds it."""
    saved, other = torch.randn(4), torch.randn(4)
    occupant = Occupant({0: saved, 1: other}, frozenset({0}), frozenset({0, 1}), frozenset(), 0)
    pending = saved.detach()
    assert occupant.alive()
    occupant.disown()
    assert occupant.alive()
    del pending
    assert not occupant.alive()
    pending = saved.detach()
    assert occupant.alive()
    del pending
    assert not occupant.alive()


class _Graph:
    nodes = 1

    def replay(self) -> None:
        """Nothing happens."""

    def close(self) -> None:
        """Nothing is held."""


class _Reuses:
    """An engine whose allocator hands out freed memory again, as that of a pool does."""

    name, device, shares_memory = "reuses", torch.device("cpu"), True

    def capture(self, fn: Any, *, instantiate: bool = True) -> Any:
        return _Graph(), fn()


class _CountsPools(_Reuses):
    """Notes which pools were let go of."""

    def __init__(self) -> None:
        self.made = 0
        self.gone: list[int] = []

    def fresh_pool(self) -> Any:
        self.made += 1
        return lambda number=self.made: self.gone.append(number)


def test_an_old_pool_goes_when_its_last_tensor_does_also_when_nothing_is_captured_any_more() -> None:
    engine: Any = _CountsPools()
    arena = Arena(engine)

    def occupant() -> Occupant:
        return Occupant({0: torch.randn(4)}, frozenset(), frozenset(), frozenset(), arena.pool(False))

    old = occupant()
    arena.add((old,))
    arena.before_capture(None, False)  # dead: its memory goes back to the pool
    old.tidy()
    held = old.tensors[0].detach()
    arena.ran((old,), None)
    arena.before_capture(None, False)
    assert engine.made == 1 and not engine.gone, "alive, and not its own: captures go on elsewhere"
    new = occupant()
    arena.add((new,))
    arena.remove((old,))
    assert not arena.in_the_way((new,), None) and not engine.gone, "somebody holds a tensor in the old pool"
    del held
    assert not arena.in_the_way((new,), None)
    assert engine.gone == [1]
    arena.in_the_way((new,), None)
    assert engine.gone == [1]


def test_what_a_graph_leaves_alone_is_asked_about_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it is alive does not matter then, and to find out costs the host a microsecond for each graph."""
    engine: Any = _CountsPools()
    arena = Arena(engine)
    alive, asked = Occupant.alive, []

    def noted(occupant: Occupant) -> bool:
        asked.append(occupant)
        return alive(occupant)

    monkeypatch.setattr(Occupant, "alive", noted)
    others = [_occupant() for _ in range(3)]
    blocks = frozenset(b for other in others[:2] for b in other.blocks)
    reader = _occupant(keeps=blocks)
    arena.add((*others, reader))
    held = [_replayed(arena, other) for other in others]

    assert arena.in_the_way((reader,), None) == [others[2]]
    assert asked == others
    held.clear()
    asked.clear()
    assert not arena.in_the_way((reader,), None) and asked == [others[2]]
    asked.clear()
    assert not arena.in_the_way((reader,), None) and not asked
    own = _replayed(arena, reader)
    assert arena.in_the_way((reader,), None) == [reader]
    assert arena.in_the_way((others[1],), reader) == [], "it reads that, and nobody else does again"
    del own
    assert not arena.in_the_way((reader,), None)

    own = _replayed(arena, others[0])
    arena.remove((others[0],))
    memory = weakref.ref(others[0].tensors[0])
    asked.clear()
    assert not arena.in_the_way((reader,), None) and asked == [others[0]], "its memory has to go when it can"
    del own
    others.clear()
    asked.clear()
    assert not arena.in_the_way((reader,), None)
    asked.clear()
    assert memory() is None


def _occupant(keeps: frozenset[Block] = frozenset(), pool: int = 0) -> Occupant:
    return Occupant({0: torch.randn(4)}, frozenset(), frozenset(), keeps, pool)


def _replayed(arena: Arena, occupant: Occupant) -> torch.Tensor:
    """An output of its graph, which somebody holds."""
    occupant.tidy()
    arena.ran((occupant,), None)
    return occupant.tensors[0].detach()


def test_an_output_at_the_place_of_what_was_freed_is_no_part_of_it() -> None:
    """A gradient of the size of a saved tensor lies where that was: it is still to be guarded, and nobody's view."""
    memory = [torch.full((4, 4), float(i)) for i in range(3)]  # keeps what the "pool" hands out
    saved = [borrow_memory(x) for x in memory]
    forward = Occupant(dict(enumerate(saved)), frozenset(), frozenset(), frozenset(), 0)
    inputs: list[Any] = [x.detach() for x in saved]

    def backward(given: list[Any]) -> list[Any]:
        first, second, third = given
        given.clear()
        returned = third.t()  # a view of what was saved
        del first, second, third
        return [borrow_memory(memory[0]), torch.ones(2), returned]

    engine: Any = _Reuses()
    work = record(engine, backward, inputs, [], [], forward, [], None)
    assert work.fresh == {0, 1}
    handing = Handing(frozenset(range(3)), frozenset())
    capture = RegionCapture(work, {}, frozenset(), handing, frozenset(), 0, forward)
    assert sorted(capture.occupant.tensors) == [0, 1]
    taken, _, view = capture.replay(list(saved), lambda: None)
    assert taken.data_ptr() == memory[0].data_ptr() and view.data_ptr() == memory[2].data_ptr()
    assert capture.occupant.handed[0] is taken
    kept = taken.detach()
    del taken, view, _
    assert capture.occupant.alive(), "somebody holds a gradient in reused memory"
    del kept
    assert not capture.occupant.alive()


@pytest.mark.parametrize("room", [0, 1 << 30])
def test_what_a_repeated_replay_writes_is_put_back_whether_its_copy_has_room_on_the_device_or_not(
    room: int,
) -> None:
    written = torch.arange(12.0).view(3, 4).t()

    class Adds:
        served: frozenset[int] = frozenset()
        retarget = None

        def replay(self) -> None:
            written.add_(1)

    graph: Any = Adds()
    repeatable = _Repeatable(graph, [written], room)
    for _ in range(3):
        repeatable.replay()
        assert torch.equal(written, torch.arange(1.0, 13.0).view(3, 4).t())
    repeatable.put_back()
    assert torch.equal(written, torch.arange(12.0).view(3, 4).t())
