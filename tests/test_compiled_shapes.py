"""How often Inductor compiles for batches of changing shapes: once, and again where that has been paid for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_changing_shapes import let_inductor_compile, train_on_lengths

from pygraph_train.step.families import Families, Family
from pygraph_train.step.shapes import Shapes
from pygraph_train.tracing.signature import flattened, key_of


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
@pytest.mark.passes_without_graphs("an object without a step")
def test_graphs_of_shapes_that_code_is_not_for_stay_however_often_they_are_replayed() -> None:
    """There is code of Inductor for other shapes: nothing is thrown away before there is some for these."""
    asked = object.__new__(Shapes)
    lead: Any = SimpleNamespace(
        compiled=object(), one_of_many=False, compile_next=False, lead=None, family=None
    )
    asked.wants_inductor(SimpleNamespace(lead=lead, family=None, compiled=None))  # type: ignore[arg-type]
    assert not lead.compile_next


@pytest.mark.slow
@pytest.mark.passes_without_graphs("no shape comes back")
@pytest.mark.parametrize(("seconds", "codes"), [(1e9, 1), (0.0, 2)])
def test_code_for_other_lengths_is_compiled_when_it_pays(
    seconds: float, codes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inductor's code is for even lengths or for odd ones, as where kernels for attention ask about alignment."""
    compiled = Shapes._compiled

    def measured(self: Shapes, step: Any, lead: Any, *args: Any) -> Any:
        result = compiled(self, step, lead, *args)
        lead.family.compile_seconds = seconds
        lead.family._eager, lead.family._compiled = 2.0, 1.0
        return result

    let_inductor_compile(monkeypatch, asks=True)
    monkeypatch.setattr(Shapes, "_compiled", measured)
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
        return family.is_typical(keys[length])

    assert [n for n in keys if is_typical(n)] == list(range(33, 48))
    family = Families().meet(keys[20])
    assert family.is_typical(keys[20]), "the only one"
    family.meet(((4, 40),))
    family.meet(((4, 60),))
    waits = [family.is_typical(keys[20]) for _ in range(40)]
    assert waits.index(True) == 15, "no other one comes"
