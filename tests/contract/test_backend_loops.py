"""`torch.compile(model, backend="pygraph")`: any loop at all."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import pygraph_train

from .compare import Run, same_as_plain
from .models import Net, adamw, batches, cross_entropy


@pytest.mark.notices("inputs of regions are not copied")
@same_as_plain(replays=12, updates=0)
def test_a_loop(run: Run) -> None:
    model = Net()
    optimizer, compiled = adamw(model), run.compile(model)
    for x, y in run.each(batches()):
        optimizer.zero_grad()
        loss = cross_entropy(compiled(x), y)
        loss.backward()
        optimizer.step()
        run.note("loss", loss)


@same_as_plain(replays=8, updates=0)
def test_inference_between_training_steps(run: Run) -> None:
    model = Net()
    optimizer, compiled = adamw(model), run.compile(model)
    for number, (x, y) in enumerate(run.each(batches())):
        cross_entropy(compiled(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        if number % 3 == 2:
            model.eval()
            with torch.no_grad():
                run.note("inference", compiled(x))
            model.train()


@same_as_plain(replays=12, updates=0)
def test_two_models_and_two_forwards_before_a_backward(run: Run) -> None:
    one, two = Net(), Net()
    optimizer = adamw(nn.ModuleList([one, two]))
    first, second = run.compile(one), run.compile(two)
    for x, y in run.each(batches()):
        optimizer.zero_grad()
        a, b, c = first(x), second(x), first(x * 2)
        loss = cross_entropy(a, y) + cross_entropy(b, y) + (a - c).square().mean()
        loss.backward()
        optimizer.step()
        run.note("loss", [loss, a, b, c])


@same_as_plain(replays=6, updates=0)
def test_batches_of_several_shapes(run: Run) -> None:
    model = Net()
    optimizer, compiled = adamw(model), run.compile(model)
    for number, (x, y) in enumerate(run.each(batches(36))):
        rows = (8, 6, 4)[number % 3]
        loss = cross_entropy(compiled(x[:rows]), y[:rows])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.note("loss", loss)


@same_as_plain(replays=6, updates=0)
def test_a_second_backward_is_an_error_unless_the_graph_is_kept(run: Run) -> None:
    model = Net(dropout=0.0)
    optimizer, compiled = adamw(model), run.compile(model)
    for x, y in run.each(batches(16)):
        loss = cross_entropy(compiled(x), y)
        loss.backward(retain_graph=True)
        loss.backward()
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def test_a_wrong_option_is_named_at_once() -> None:
    with pytest.raises(TypeError, match="no_such_option"):
        pygraph_train.compile(Net(), no_such_option=1)
