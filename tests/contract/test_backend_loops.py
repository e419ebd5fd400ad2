"""`torch.compile(model, backend="pygraph")`: any loop at all."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import pygraph_train
import pygraph_train.backend

from .compare import ENGINE, Run, same_as_plain
from .models import DEVICE, Net, adamw, batches, cross_entropy


@pytest.mark.notices("the last tensor of a batch is not copied")
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


@pytest.mark.notices("pending forwards share a recording")
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


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(torch.tanh(self.linear(x)))


@same_as_plain(replays=36, updates=0)
def test_blocks_of_one_class_are_compiled_one_by_one(run: Run) -> None:
    """Dynamo has one graph for all of them."""
    blocks = [Block() for _ in range(3)]
    model = nn.Sequential(nn.Linear(6, 6), *map(run.compile, blocks), nn.Linear(6, 3))
    optimizer = adamw(model)
    for x, y in run.each(batches(16)):
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        run.note("loss", loss)


@pytest.mark.parametrize("compile", [True, False] if DEVICE == "cpu" else [False])
@same_as_plain(replays=20, updates=0)
def test_backwards_in_the_order_of_their_forwards(run: Run, compile: bool) -> None:
    """What is saved for the second one must be there after the first one, and after a prediction."""
    model = Net(dropout=0.0)
    compiled = run.compile(model, compile=compile)
    for x, y in run.each(batches(16)):
        losses = [cross_entropy(compiled(x), y), cross_entropy(compiled(x * 2), y)]
        with torch.no_grad():
            run.note("prediction", compiled(x))
        for loss in losses:
            loss.backward(retain_graph=True)
        losses[0].backward()


@same_as_plain(replays=12, updates=0)
def test_gradients_of_some_parameters_alone(run: Run) -> None:
    model = Net()
    optimizer, compiled = adamw(model), run.compile(model)
    for number, (x, y) in enumerate(run.each(batches(16))):
        optimizer.zero_grad()
        inputs = list(model.second.parameters()) if number % 3 == 2 else None
        cross_entropy(compiled(x), y).backward(inputs=inputs)
        optimizer.step()


@same_as_plain(refused="AOTAutograd cannot compile it")
def test_what_cannot_be_compiled_runs_as_it_is(run: Run) -> None:
    class Power(Net):
        exponent = 2

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.sigmoid() ** self.exponent)

    model = Power()
    compiled = run.compile(model)
    with torch._dynamo.config.patch(allow_unspec_int_on_nn_module=True):
        for number, (x, y) in enumerate(run.each(batches(8))):
            model.exponent = 2 + number % 3
            cross_entropy(compiled(x), y).backward()


@pytest.mark.passes_without_graphs("Dynamo has none")
def test_a_model_without_any_graph_is_told_where_to_look() -> None:
    """A recurrent layer breaks the graph of the model around it, and a loop all others."""

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.GRU(6, 8)

        def forward(self, x: Tensor) -> Tensor:
            return sum(self.cell(x[:, None])[0] for _ in range(2))

    torch.compiler.reset()
    pygraph_train.backend.reset()
    compiled = torch.compile(Recurrent(), backend="pygraph", options={"engine": ENGINE})
    for x, _ in batches(6):
        compiled(x).sum().backward()
    told = pygraph_train.backend.report()
    assert not told.regions and "graph_breaks" in told.headline()


def test_a_wrong_option_is_named_at_once() -> None:
    with pytest.raises(TypeError, match="no_such_option"):
        pygraph_train.compile(Net(), no_such_option=1)
