"""Copies of graphed steps: refused in a sentence, and what the sentence says to do."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
from training import CONFIG, Diary, Net, adamw, batches, both, loss_of

from pygraph_train import GraphedStep


@pytest.mark.passes_without_graphs("steps are not copied, with graphs or without")
@pytest.mark.parametrize("steps", [0, 12])
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_graphed_step_is_not_copied(copied: Callable[[Any], Any], steps: int) -> None:
    """A copy made before the first step would compute the loss of the model that it was made from."""
    model = Net()
    step = GraphedStep(loss_of(model), model=model, optimizer=adamw(model), config=CONFIG)
    for batch in batches(steps):
        step(batch)
    raises(copied, step, "GraphedStep")


def raises(copied: Callable[[Any], Any], step: Any, made_by: str) -> None:
    with pytest.raises(TypeError, match=f"a graphed step cannot be copied.*make a new .* with {made_by}$"):
        copied(step)


def test_a_copied_model_gets_a_step_of_its_own_in_mid_run() -> None:
    def script(diary: Diary) -> None:
        model = Net()
        optimizer = adamw(model)
        step = diary.step(loss_of(model), model=model, optimizer=optimizer)
        for index, batch in enumerate(batches(60)):
            if index == 15:
                other, of_other = copy.deepcopy((model, optimizer))
                another = diary.step(loss_of(other), model=other, optimizer=of_other)
            diary.write("loss", step(batch))
            if index >= 15:
                diary.write("loss of the copy", another(batch))
                diary.write_state(other, of_other)
            diary.write_state(model, optimizer)

    both(script, replays=35, plan="{F B O}")


def test_model_and_optimizer_are_pickled_in_mid_run() -> None:
    def script(diary: Diary) -> None:
        model = Net()
        optimizer = adamw(model)
        for part in (batches(25), batches(25)):
            step = diary.step(loss_of(model), model=model, optimizer=optimizer)
            for batch in part:
                diary.write("loss", step(batch))
            diary.write_state(model, optimizer)
            model, optimizer = pickle.loads(pickle.dumps((model, optimizer)))

    both(script, replays=20, plan="{F B O}")


@pytest.mark.passes_without_graphs("steps are not copied, with graphs or without")
@pytest.mark.parametrize("copied", [copy.deepcopy, pickle.dumps])
def test_steps_of_accelerate_and_fabric_are_not_copied(copied: Callable[[Any], Any]) -> None:
    accelerate_training = pytest.importorskip("accelerate_training", exc_type=ImportError)
    fabric_training = pytest.importorskip("fabric_training", exc_type=ImportError)
    from pygraph_train import PyGraph, PyGraphFabric

    def accelerate(script: Any) -> None:
        model, optimizer, *_ = accelerate_training.setup(script)

        def step(batch: Any) -> None:
            script.accelerator.backward(loss_of(model)(batch))
            optimizer.step()
            optimizer.zero_grad()

        graphed = script.graphed(step)
        for batch in batches(8):
            graphed(batch)
        raises(copied, graphed, "accelerator.graphed_step")

    def fabric(script: Any) -> None:
        model, optimizer, *_ = fabric_training.setup(script)
        graphed = script.pygraph.graphed_step(loss_of(model), model=model, optimizer=optimizer)
        for batch in batches(8):
            graphed(batch)
        raises(copied, graphed, "PyGraphFabric.graphed_step")

    accelerate_training.run(accelerate, PyGraph(engine="emulated", warmup_steps=2))
    fabric_training.run(fabric, PyGraphFabric(engine="emulated", warmup_steps=2))
