"""Objects are told apart by what they are, and never by their values."""

from __future__ import annotations

import pytest
import torch
from training import Diary, Net, adamw, batches, both, loss_of

from pygraph_train import identity
from pygraph_train.identity import identities


def test_equal_objects_are_told_apart() -> None:
    one, other = torch.ones(1), torch.ones(1)
    assert identities((one, None)) == identities((one, None))
    assert identities((one,)) != identities((other,))
    assert identities((1,)) != identities((True,)) != identities((1.0,))
    assert identities((one, other)) != identities((other, one))
    assert identities((one,)) != identities((one, other))
    assert identities(()) == b""


@pytest.mark.parametrize("count", [0, 1, 2, 1000])
def test_memory_of_a_tuple_holds_what_its_items_say(count: int) -> None:
    items = tuple(object() for _ in range(count))
    assert identities(items) == identity._one_by_one(items) == identity._by_memory(items)


def test_a_python_with_other_tuples_asks_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity, "_ITEMS", 0)
    assert not identity._tuples_are_as_expected()


def test_gradients_that_the_loop_empties_come_back_with_the_next_replay() -> None:
    def script(diary: Diary) -> None:
        model = Net()
        optimizer = adamw(model)
        step = diary.step(loss_of(model), model=model, optimizer=optimizer)
        for number, batch in enumerate(batches(20)):
            diary.write("loss", step(batch))
            diary.write_state(model, optimizer)
            if number % 2:
                model.zero_grad()

    both(script, replays=12, plan="{F} {B} {O}")


@pytest.mark.notices("objects of the optimizer are never told apart")
def test_state_of_the_optimizer_that_is_replaced_by_an_equal_copy_is_used() -> None:
    def script(diary: Diary) -> None:
        model = Net()
        optimizer = adamw(model)
        step = diary.step(loss_of(model), model=model, optimizer=optimizer)
        for number, batch in enumerate(batches(30)):
            diary.write("loss", step(batch))
            diary.write_state(model, optimizer)
            if number == 14:
                for state in optimizer.state.values():
                    state["step"] = state["step"].clone()

    both(script, replays=15, plan="{F} {B} {O}")
