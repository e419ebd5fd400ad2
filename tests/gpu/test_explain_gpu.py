"""`explain` on a GPU: tensors that stay on the CPU, and the time that graphs save."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor, nn
from training import Net, adamw, batches, differs, frozen, loss_of

from pygraph_train import explain

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.passes_without_graphs("a step is explained without any capture"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_a_tensor_that_is_sent_to_the_device_is_no_obstacle() -> None:
    """Each step sends it in front of its graph."""
    model = nn.Linear(4, 3).cuda()
    scale = torch.ones(1 << 20)

    def step_fn(x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        return loss * scale.to("cuda").sum()

    found = explain(step_fn, torch.randn(6, 4), model=model, optimizer=adamw(model))
    assert found.plan == "{F} {B} {O}" and not found.obstacles, found


def test_what_is_fetched_from_the_device_is_found() -> None:
    model = nn.Linear(4, 3).cuda()

    def step_fn(x: Tensor) -> Tensor:
        made = model(x)
        largest = made.detach().cpu().max()
        return (made / largest.to("cuda")).square().mean()

    found = explain(step_fn, torch.randn(6, 4), model=model, optimizer=adamw(model))
    assert found.plan == "F B {O}" and [str(p.where).startswith(__file__) for p in found.obstacles] == [
        True
    ], found


def test_the_gain_is_measured_and_nothing_changes() -> None:
    layers = [layer for _ in range(24) for layer in (nn.Linear(6, 6), nn.GELU())]
    model = nn.Sequential(*layers, Net()).cuda()  # graphs save more of it than other tests on the device take
    optimizer = adamw(model)
    (batch,) = batches(1)
    loss_of(model)([t.cuda() for t in batch]).backward()
    optimizer.step()

    def state() -> object:
        gradients = {name: p.grad for name, p in model.named_parameters()}
        states = [torch.get_rng_state(), torch.cuda.get_rng_state()]
        return frozen([model.state_dict(), gradients, optimizer.state_dict(), states])

    before = state()
    found = explain(loss_of(model), batch, model=model, optimizer=optimizer)
    assert found.is_one_graph, found
    plain, graphed = map(float, re.findall(r"([0-9.]+) ms", found.gain))
    assert 0 < graphed < plain, found.gain
    assert differs(before, state()) is None
