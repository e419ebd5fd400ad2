"""Everybody who makes graphs on a device has memory of its own: no replay overwrites what others still need.

The emulation overwrites here whatever a graph of a CUDA device might overwrite.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from training import Diary, Net, adamw, batches, both, loss_of, sgd

from pygraph_train import GraphedStep, backend
from pygraph_train.graphs.emulated import EmulatedEngine
from pygraph_train.graphs.emulated_pools import EmulatedPool
from pygraph_train.regions import inductor
from pygraph_train.regions.arena import Arena
from pygraph_train.selection import timing

CPU = torch.device("cpu")
OPTIONS = {"engine": "emulated", "warmup_runs": 1}


@pytest.fixture(autouse=True)
def overwriting(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Graphs overwrite what they may."""
    torch.compiler.reset()
    backend.reset()
    monkeypatch.setattr(EmulatedEngine, "overwrites", True)
    monkeypatch.setattr(EmulatedEngine, "shares_memory", True)
    monkeypatch.setattr(inductor, "_arenas", {})
    yield
    torch.compiler.reset()


def regions_of(diary: Diary, model: nn.Module) -> Callable[..., Any]:
    """The model, whose forward and backward are regions in a run with graphs."""
    return torch.compile(model, backend="pygraph", options=OPTIONS) if diary.graphed else model


def region_replays() -> int:
    return sum(row.replays for row in backend.report().regions)


# -- training loops ---------------------------------------------------------------------------------------


class Makes(nn.Module):
    """Makes samples of noise."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def adversarial(diary: Diary) -> None:
    """A GAN with one step for each of its two models. Both have gradients at the end of a round."""
    maker, judge = Makes(), Net(classes=1)
    of_maker, of_judge = adamw(maker), sgd(judge)

    def judge_loss(x: Tensor) -> Tensor:
        with torch.no_grad():
            made = maker(x)
        return functional.softplus(-judge(x)).mean() + functional.softplus(judge(made)).mean()

    def maker_loss(x: Tensor) -> Tensor:
        return functional.softplus(-judge(maker(x))).mean()

    judges = diary.step(judge_loss, model=judge, optimizer=of_judge)
    makes = diary.step(maker_loss, model=maker, optimizer=of_maker)
    for x, _ in batches(16):
        diary.write("judge", judges(x))
        diary.write("gradients of the maker", [p.grad for p in maker.parameters()])
        judge.requires_grad_(False)
        diary.write("maker", makes(x))
        judge.requires_grad_(True)
        diary.write_state(maker, of_maker)
        diary.write_state(judge, of_judge)


def accumulating_in_turns(diary: Diary) -> None:
    """Two models; the micro-batches of one are mixed with whole steps of the other."""
    one, other = Net(), Net()
    of_one, of_other = adamw(one), sgd(other)
    first = diary.step(loss_of(one), model=one, optimizer=of_one)
    second = diary.step(loss_of(other), model=other, optimizer=of_other)
    found = batches(42)
    for a, b, c in zip(found[::3], found[1::3], found[2::3], strict=True):
        first.accumulate(a)
        diary.write("other", second(b))
        diary.write("one", first(c))
        diary.write_state(one, of_one)
        diary.write_state(other, of_other)


def pending_forward(diary: Diary) -> None:
    """The forward of a compiled model runs, whole steps of another one follow, then comes its backward."""
    model, other = Net(), Net(dropout=0.0)
    optimizer = adamw(model)
    step = diary.step(loss_of(model), model=model, optimizer=optimizer)
    call = regions_of(diary, other)
    for number, batch in enumerate(batches(16)):
        out = call(batch[0])
        for _ in range(1 + number % 2):
            diary.write("loss", step(batch))
        functional.cross_entropy(out, batch[1]).backward()
        diary.write("out", out)
        diary.write("gradients of the other", [p.grad for p in other.parameters()])
        other.zero_grad()
        diary.write_state(model, optimizer)


def validating(diary: Diary) -> None:
    """Between training steps the same model is evaluated as a region. Its gradients and last outputs are kept."""
    model = Net()
    optimizer = adamw(model)
    step = diary.step(loss_of(model), model=model, optimizer=optimizer)
    call, kept = regions_of(diary, model), []
    for number, batch in enumerate(batches(24)):
        diary.write("loss", step(batch))
        if number % 3 == 2:
            model.eval()
            with torch.no_grad():
                kept.append(call(batch[0]))
                call(batch[0] + 1)
            model.train()
            kept = kept[-3:]
            diary.write("kept", kept)
        diary.write_state(model, optimizer)


def failing(diary: Diary) -> None:
    """A batch that the step cannot take comes in the middle, with a forward that waits for its backward."""
    model, other = Net(), Net(dropout=0.0)
    optimizer = adamw(model)
    step = diary.step(loss_of(model), model=model, optimizer=optimizer)
    call = regions_of(diary, other)
    for number, batch in enumerate(batches(20)):
        out = call(batch[0])
        if number in (7, 15):
            with pytest.raises((IndexError, ValueError, RuntimeError)):
                step((batch[0], batch[1][:3]))
            diary.write("random state", torch.get_rng_state())
        diary.write("loss", step(batch))
        functional.cross_entropy(out, batch[1]).backward()
        diary.write("gradients of the other", [p.grad for p in other.parameters()])
        other.zero_grad()
        diary.write_state(model, optimizer)


LOOPS = pytest.mark.parametrize(
    ("loop", "replays"),
    [(adversarial, 16), (accumulating_in_turns, 14), (pending_forward, 12), (validating, 16), (failing, 10)],
    ids=lambda value: getattr(value, "__name__", None),
)


@pytest.mark.slow_after(3)
@LOOPS
@pytest.mark.parametrize("fuse", ["auto", "off"])
def test_nobody_overwrites_what_others_need(loop: Callable[[Diary], None], replays: int, fuse: str) -> None:
    both(loop, replays=replays, fuse=fuse)
    if loop in (pending_forward, failing):
        rows = backend.report().regions
        assert {row.phase for row in rows if row.replays >= 5} >= {"forward", "backward"}, rows
    elif loop is validating:
        assert region_replays() >= 8


@pytest.fixture
def one_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """All engines of the device allocate from one pool, as they would if nothing kept them apart."""
    pool, graphs = EmulatedPool(), EmulatedEngine()._graphs
    build = EmulatedEngine.__init__

    def sharing(self: EmulatedEngine) -> None:
        build(self)
        self._memory, self._graphs = pool, graphs

    monkeypatch.setattr(EmulatedEngine, "__init__", sharing)
    monkeypatch.setattr(EmulatedEngine, "close", lambda self: None)


@pytest.mark.parametrize("loop", [pending_forward, accumulating_in_turns])
def test_one_pool_for_all_would_be_wrong(one_pool: None, loop: Callable[[Diary], None]) -> None:
    """The reason why whole steps and regions have memory apart."""
    with pytest.raises(AssertionError, match=r"entry \d+"):
        both(loop, replays=1)


# -- giving memory back -----------------------------------------------------------------------------------


def _arena() -> Arena:
    return inductor._arenas["emulated", CPU]


def another_training() -> None:
    """It begins and ends."""
    model = Net()
    GraphedStep(loss_of(model), model=model, optimizer=sgd(model), engine="emulated").close()


@pytest.mark.parametrize("waits", [False, True], ids=["nothing is held", "an output is held"])
def test_regions_that_are_gone_give_their_memory_back_when_a_training_ends(waits: bool) -> None:
    def script(diary: Diary) -> None:
        model, other = Net(), Net()
        optimizer = adamw(model)
        step = diary.step(loss_of(model), model=model, optimizer=optimizer)
        call = regions_of(diary, other)
        for batch in batches(12):
            diary.write("loss", step(batch))
            with torch.no_grad():
                kept.append(call(batch[0]))
            del kept[:-1]
        if not (waits and diary.graphed):
            kept.clear()

    kept: list[Tensor] = []
    both(script, replays=8)
    assert region_replays() >= 8
    arena = _arena()
    before = dict(arena._pools)
    torch.compiler.reset()
    gc.collect()
    assert arena.abandoned, "the regions are gone, and their graphs wait to be closed"
    values = [t.clone() for t in kept]
    another_training()
    assert not arena.abandoned and not arena._occupants
    assert arena._pools != before
    assert all(map(torch.equal, kept, values))
    kept.clear()
    another_training()
    assert not arena._retired, "no pool waits for anybody"


def test_the_pool_of_whole_steps_goes_when_regions_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regions have a pool of their own: two of them would be twice the memory that training needs."""
    given_back: list[EmulatedPool] = []
    vanish = EmulatedPool.vanish
    monkeypatch.setattr(EmulatedPool, "vanish", lambda self: [given_back.append(self), vanish(self)])
    monkeypatch.setattr(timing, "declared_seconds", lambda arm: 0.5 if arm.plan.regions else 1.0)

    def script(diary: Diary) -> None:
        model = Net()
        optimizer = adamw(model)
        step = diary.step(loss_of(model), model=model, optimizer=optimizer)
        for batch in batches(60):
            diary.write("loss", step(batch))
            diary.write_state(model, optimizer)

    report = both(script, replays=40)
    assert report.plan == "{F} {B} {O}", str(report)
    assert report.steps_replayed > 0 and len(given_back) == 1
    assert report.optimizer_steps_replayed >= 10, str(report)
