"""Recurrent networks with dropout between their layers, on a GPU: cuDNN draws from memory of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_same_as_plain_gpu import STEPS, Make, both
from torch import Tensor, nn
from torch.nn import functional as F

from pygraph_train.dropout_of_layers import DropoutOfLayers
from pygraph_train.torch_private.cudnn_dropout import begin_dropout_anew, dropout_memory, set_random_state

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DEVICE = torch.device("cuda", 0)


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 32)
        self.rnn = kind(32, 32, 2, batch_first=True, dropout=0.3, **options)
        self.head = nn.LazyLinear(50)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.rnn(F.dropout(self.embedding(x), 0.1, self.training))[0])
        return found


def network() -> nn.LSTM:
    return nn.LSTM(8, 8, 2, dropout=0.5).to(DEVICE)


@pytest.mark.passes_without_graphs("nothing is captured")
def test_a_random_state_that_is_put_back_lets_networks_go_on() -> None:
    rnn, x = network(), torch.ones(3, 2, 8, device=DEVICE)
    torch.manual_seed(3)
    assert dropout_memory(DEVICE) is None  # the next network begins anew
    state = torch.cuda.get_rng_state(DEVICE)
    rnn(x)
    memory = dropout_memory(DEVICE)
    assert memory is not None and dropout_memory(DEVICE) is memory
    assert not torch.equal(torch.cuda.get_rng_state(DEVICE), state)  # a seed was drawn
    before = memory.clone()
    first = rnn(x)[0]
    assert not torch.equal(memory, before)  # the kernels write there
    set_random_state(DEVICE, torch.cuda.get_rng_state(DEVICE))
    assert dropout_memory(DEVICE) is memory
    memory.data.copy_(before)
    assert torch.equal(rnn(x)[0], first)
    begin_dropout_anew(DEVICE)
    state = torch.cuda.get_rng_state(DEVICE)
    assert dropout_memory(DEVICE) is None and torch.equal(torch.cuda.get_rng_state(DEVICE), state)
    made = dropout_memory(DEVICE, begins=True)
    assert made is not None and dropout_memory(DEVICE) is made
    assert torch.equal(torch.cuda.get_rng_state(DEVICE), state)


@pytest.mark.passes_without_graphs("nothing is captured")
def test_memory_that_is_made_anew_comes_to_lie_where_it_lay() -> None:
    rnn, x, layers = network(), torch.ones(3, 2, 8, device=DEVICE), DropoutOfLayers(DEVICE)
    torch.manual_seed(3)
    assert not layers.goes_on()
    rnn(x)
    assert layers.goes_on()
    first = dropout_memory(DEVICE)
    assert first is not None
    address = first.data_ptr()
    for seed in (4, 5):
        torch.manual_seed(seed)
        expected = rnn(x)[0], rnn(x)[0]
        torch.manual_seed(seed)
        assert not layers.goes_on()
        found = [rnn(x)[0]]
        assert layers.goes_on()
        now = dropout_memory(DEVICE)
        assert now is not None and now.data_ptr() == address
        place = layers.place()
        found.append(rnn(x)[0])
        assert all(map(torch.equal, expected, found))
        torch.cuda.manual_seed(9)
        rnn(x)
        layers.put_back(place)
        assert torch.equal(rnn(x)[0], expected[1])


def trained(
    make_model: Callable[[], Recurrent],
    between: Callable[[int, Recurrent, Tensor], None] = lambda index, model, x: None,
) -> Callable[[Make], list[Any]]:
    def script(make: Make) -> list[Any]:
        model = make_model().to(DEVICE)
        found: list[Any] = []
        generator = torch.Generator().manual_seed(1)
        batches = [torch.randint(0, 50, (4, 12), generator=generator).to(DEVICE) for _ in range(STEPS)]
        with torch.no_grad():
            model.eval()(batches[0])  # the head has no shape before
        model.train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=2.0**-9, fused=True)

        def step_fn(x: Tensor) -> Tensor:
            return F.cross_entropy(model(x).flatten(0, 1), x.flatten())

        step = make(step_fn, model, optimizer)
        for index, x in enumerate(batches):
            between(index, model, x)
            found.append(step(x).clone())
        found += [p.detach().clone() for p in model.parameters()]
        return [*found, torch.cuda.get_rng_state(DEVICE)]

    return script


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("options", [{}, {"bidirectional": True}])
def test_networks_with_dropout_are_replayed(kind: Any, options: dict[str, Any]) -> None:
    both(trained(lambda: Recurrent(kind, **options)), replays=70)


def test_the_random_state_is_set_in_mid_run() -> None:
    def between(index: int, model: Recurrent, x: Tensor) -> None:
        if index == 40:
            torch.manual_seed(index)
        if index == 60:
            with torch.random.fork_rng([0]), torch.no_grad():
                model(x)

    report = both(trained(lambda: Recurrent(nn.LSTM), between), replays=60)
    assert len({record.plan for record in report.captures}) == len(report.captures), str(report)


def test_another_network_draws_between_the_steps() -> None:
    def between(index: int, model: Recurrent, x: Tensor) -> None:
        if index % 7 == 0:
            with torch.no_grad():
                model(x)

    both(trained(lambda: Recurrent(nn.GRU), between), replays=70)


def test_the_update_alone_has_a_graph_and_networks_draw_as_before() -> None:
    """Also where no graph holds the network: random states that are put back do not let it begin anew."""

    def script(make: Make) -> list[Any]:
        model = Recurrent(nn.LSTM).to(DEVICE)
        x = torch.randint(0, 50, (4, 12), device=DEVICE)
        with torch.no_grad():
            model.eval()(x)
        model.train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=2.0**-9, fused=True)

        def step_fn(x: Tensor) -> Tensor:
            loss = F.cross_entropy(model(x).flatten(0, 1), x.flatten())
            float(loss)  # which no graph holds
            return loss

        step = make(step_fn, model, optimizer)
        return [step(x).clone() for _ in range(STEPS)]

    both(script, replays=1)
