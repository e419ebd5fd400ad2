"""How often Inductor compiles for batches of changing shapes: once, and again where that has been paid for."""

from __future__ import annotations

import copy
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_changing_shapes import drawn, let_inductor_compile, train, train_on_lengths
from torch import nn
from training import CONFIG, PlainStep, adamw, batches, both, loss_of

from pygraph_train import GraphedStep
from pygraph_train.problems import NotLegal, Problem
from pygraph_train.regions import inductor
from pygraph_train.selection.returns import Costs
from pygraph_train.step.capturing import Capturing
from pygraph_train.step.code_for_shapes import CodeForShapes
from pygraph_train.step.families import Families, Family, volume_of
from pygraph_train.step.shapes import Shapes
from pygraph_train.step.ungraphed import UngraphedSteps
from pygraph_train.tracing.signature import family_of, flattened, key_of
from pygraph_train.tracing.trace import Trace


def family(seconds: float | None, eager: float, compiled: float) -> Family:
    """One whose kernels were measured, after 200 steps for which Inductor has no code."""
    made = Family(())
    made.timed_compiled = 0
    made.ran_without_graph(eager, compiled=False)
    made.ran_without_graph(compiled, compiled=True)
    made.compile_seconds, made.steps_without_inductor = seconds, 200
    return made


@pytest.mark.quick
@pytest.mark.passes_without_graphs("numbers only")
@pytest.mark.parametrize(
    ("seconds", "eager", "compiled", "may"),
    [
        (1.0, 0.020, 0.013, True),
        (40.0, 0.020, 0.013, False),
        (40.0, 0.300, 0.013, True),
        (0.1, 0.013, 0.013, False),
        (0.1, 0.013, 0.020, False),
        (None, 0.020, 0.013, True),
    ],
)
def test_inductor_compiles_again_when_its_kernels_would_have_saved_that_time(
    seconds: float | None, eager: float, compiled: float, may: bool
) -> None:
    lead: Any = SimpleNamespace(trace=object())
    assert family(seconds, eager, compiled).may_recompile(lead) is may


@pytest.mark.quick
@pytest.mark.passes_without_graphs("numbers only")
def test_compiled_steps_that_were_slow_at_first_are_timed_again() -> None:
    """The host was busy in the first ones. Few of the steps with eager kernels make way for them."""
    made = family(None, 0.010, 0.020)
    made.timed_compiled = 3
    timed = []
    for number in range(100):
        if made.looks_at_compiled():
            timed.append(number)
        else:
            made.ran_with_eager()
    assert timed == [1, 3, 6, 11, 20, 37, 70] and not made.compiled_is_faster()
    made.ran_without_graph(0.005, compiled=True)
    assert made.compiled_is_faster() and not made.times_compiled()


@pytest.mark.quick
@pytest.mark.passes_without_graphs("an object without a step")
def test_graphs_of_shapes_that_code_is_not_for_stay_however_often_they_are_replayed() -> None:
    """There is code of Inductor for other shapes: nothing is thrown away before there is some for these."""
    asked = object.__new__(CodeForShapes)
    lead: Any = SimpleNamespace(
        compiled=object(), one_of_many=False, compile_next=False, lead=None, family=None
    )
    asked.ask_for(SimpleNamespace(lead=lead, family=None, compiled=None))  # type: ignore[arg-type]
    assert not lead.compile_next


@pytest.mark.slow
@pytest.mark.passes_without_graphs("no shape comes back")
@pytest.mark.parametrize(("seconds", "codes"), [(1e9, 1), (0.0, 2)])
def test_code_for_other_lengths_is_compiled_when_it_pays(
    seconds: float, codes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inductor's code is for even lengths or for odd ones, as where kernels for attention ask about alignment."""
    compiled = CodeForShapes.compile

    def measured(self: CodeForShapes, step: Any, lead: Any, *args: Any) -> Any:
        result = compiled(self, step, lead, *args)
        lead.family.compile_seconds = seconds
        return result

    let_inductor_compile(monkeypatch, asks=True)
    monkeypatch.setattr(CodeForShapes, "compile", measured)
    monkeypatch.setattr(Costs, "saved_by_kernels", lambda self, steps, replays: float(steps))
    step, model, twin, found = train_on_lengths(range(3, 80))
    assert len(found) == 2 + codes, (
        "a trace of the first length, one of all lengths, and those that are compiled"
    )
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-4)
    step.close()


@pytest.mark.quick
@pytest.mark.passes_without_graphs("numbers only")
def test_inductor_compiles_for_a_shape_in_the_middle_and_does_not_wait_long() -> None:
    """Where it asks whether a size is above some bound, at least half of the shapes are on the side of that one."""
    keys = {n: key_of(*flattened((torch.zeros(4, n),))) for n in range(16, 65)}

    def is_typical(length: int) -> bool:
        families = Families()
        (family,) = {families.meet(key) for key in keys.values()}
        return family.is_typical(volume_of(keys[length]))

    assert [n for n in keys if is_typical(n)] == list(range(33, 48))
    family = Families().meet(keys[20])
    assert family.is_typical(volume_of(keys[20])), "the only one"
    family.meet(((4, 40),))
    family.meet(((4, 60),))
    waits = [family.is_typical(volume_of(keys[20])) for _ in range(40)]
    assert waits.index(True) == 15, "no other one comes"


def test_guards_of_code_are_checked_once_for_a_shape_without_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """And by Dynamo, as under `torch.compile`. Shapes that code is not for need none of it."""
    checks, made, seen = [0], [0], set()
    holds, with_code = Trace.holds, UngraphedSteps.with_code

    def counted(self: Trace, *args: Any) -> bool:
        checks[0] += 1
        return holds(self, *args)

    def counted_step(self: UngraphedSteps, *args: Any) -> Any:
        made[0] += 1
        return with_code(self, *args)

    def compile_whole(graph: Any, inputs: Any, left: list[str]) -> Any:
        for value in inputs:
            if isinstance(value, torch.SymInt):
                bool(value <= 6)
        return graph

    let_inductor_compile(monkeypatch, asks=False)
    monkeypatch.setattr(inductor, "compile_whole", compile_whole)
    monkeypatch.setattr(Family, "compiled_is_faster", lambda self: True)
    monkeypatch.setattr(Family, "may_recompile", lambda self, lead: False)
    monkeypatch.setattr(Shapes, "_pays", lambda self, *args, **kinds: False)
    monkeypatch.setattr(Capturing, "may_begin", lambda self, *args: False)
    monkeypatch.setattr(Trace, "holds", counted)
    monkeypatch.setattr(UngraphedSteps, "with_code", counted_step)
    lengths = random.Random(0).choices(range(4, 10), k=160)
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.Tanh(), nn.Linear(8, 3))
    twin = copy.deepcopy(model)
    optimizer, other = adamw(model), adamw(twin)
    step = GraphedStep(loss_of(model), model=model, optimizer=optimizer, config=CONFIG, compile=True)
    plain = PlainStep(loss_of(twin), model=twin, optimizer=other)
    x, y = batches(1, size=10)[0]
    for number, length in enumerate(lengths):
        checks[0] = made[0] = 0
        torch.manual_seed(number)
        loss = step((x[:length], y[:length]))
        torch.manual_seed(number)
        assert torch.equal(loss, plain((x[:length], y[:length])).detach())
        if number >= 60 and not _is_lead(step, length):
            seen.add(length)
            code = length > 6
            assert made[0] == checks[0] == code, f"step {number} of length {length}"
    assert len(seen) == 5 and min(seen) <= 6
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p, q)
    step.close()


def _is_lead(step: GraphedStep, length: int) -> bool:
    """Whether this length has a kind of call of its own, which was traced or compiled for it."""
    variants = step._runner._signatures.variants()
    return any(size[:1] == (length,) for v in variants for size in family_of(v.key)[1])


def test_a_trace_that_inductor_has_no_code_for_costs_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of recurrent networks, for example. Shapes go on with eager kernels, and a row says why."""

    def compile_whole(graph: Any, inputs: Any, left: list[str]) -> Any:
        tried.append(len(inputs))
        raise NotLegal(Problem("there is a recurrent network"))

    tried: list[int] = []
    let_inductor_compile(monkeypatch, asks=False)
    monkeypatch.setattr(inductor, "compile_whole", compile_whole)
    report = both(train(drawn([8, 10, 12, 14, 16], 120)), replays=60, plan="{F B O}", compile=True)
    assert len(tried) == 1
    assert any("recurrent network" in row.reason for row in report.fallbacks), str(report)
    assert report.shapes.with_graphs == 5
