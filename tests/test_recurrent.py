"""Recurrent networks of torch in a whole step: `nn.LSTM`, `nn.GRU`, `nn.RNN`."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo.config
from torch import Tensor, nn
from training import Diary, both

from pygraph_train.problems import NotLegal
from pygraph_train.regions.inductor import compile_whole
from pygraph_train.tracing.recurrent import draws_of_cudnn
from pygraph_train.tracing.refusals import compiler_problem
from pygraph_train.tracing.trace import Trace

KINDS = (nn.LSTM, nn.GRU, nn.RNN)


class Recurrent(nn.Module):
    """Two layers with dropout between them, and a head."""

    def __init__(self, kind: Any = nn.LSTM, **options: Any) -> None:
        super().__init__()
        options = {"num_layers": 2, "dropout": 0.3, "batch_first": True} | options
        self.rnn = kind(6, 8, **options)
        self.head = nn.LazyLinear(3)
        with torch.no_grad():
            self.head(self.rnn(torch.zeros(2, 5, 6))[0])

    def forward(self, x: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        out, state = self.rnn(x, state)
        return self.head(out[:, -1]), state


def sequences(count: int, size: int = 4, length: int = 5) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(size, length, 6, generator=generator), torch.randint(0, 3, (size,), generator=generator))
        for _ in range(count)
    ]


def loss_of(model: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    def step_fn(x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(model(x)[0], y)

    return step_fn


def trained(
    make: Callable[[], nn.Module],
    *,
    step_of: Callable[[Any], Callable[..., Tensor]] = loss_of,
    between: Callable[[int, Any], None] = lambda index, model: None,
    count: int = 28,
) -> Callable[[Diary], None]:
    """A script: so many steps, with something done before each of them."""

    def script(diary: Diary) -> None:
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
        step = diary.step(step_of(model), model=model, optimizer=optimizer)
        for index, (x, y) in enumerate(sequences(count)):
            between(index, model)
            diary.write("loss", step(x, y))
            diary.write_state(model, optimizer)

    return script


@pytest.mark.slow_after(4)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [{}, {"bidirectional": True, "bias": False}, {"batch_first": False}])
def test_a_recurrent_network_is_replayed_with_the_whole_step(kind: Any, options: dict[str, Any]) -> None:
    both(trained(lambda: Recurrent(kind, **options)), replays=20, plan="{F B O}")


def test_a_projected_lstm_is_replayed() -> None:
    both(trained(lambda: Recurrent(nn.LSTM, proj_size=4)), replays=20, plan="{F B O}")


def test_the_option_of_dynamo_is_as_before() -> None:
    both(trained(Recurrent), replays=20, plan="{F B O}")
    assert torch._dynamo.config.allow_rnn is False


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_is_passed_from_step_to_step(kind: Any) -> None:
    """Truncated backpropagation through time."""

    def script(diary: Diary) -> None:
        model = Recurrent(kind)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)

        def step_fn(x: Tensor, y: Tensor, state: Any) -> dict[str, Any]:
            out, state = model(x, state)
            return {"loss": nn.functional.cross_entropy(out, y), "state": state}

        step = diary.step(step_fn, model=model, optimizer=optimizer)
        state: Any = torch.zeros(2, 4, 8)
        state = (state, torch.zeros(2, 4, 8)) if kind is nn.LSTM else state
        for x, y in sequences(28):
            result = step(x, y, state)
            state = result["state"]
            state = tuple(s.detach() for s in state) if kind is nn.LSTM else state.detach()
            diary.write("state", state)
            diary.write_state(model, optimizer)

    both(script, replays=20, plan="{F B O}")


class Flattening(Recurrent):
    """As many models do, for copies of them that lost the flat memory of their weights."""

    def forward(self, x: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        self.rnn.flatten_parameters()
        return super().forward(x, state)


def test_weights_may_be_flattened_in_each_step() -> None:
    both(trained(Flattening), replays=20, plan="{F B O}")


def test_flattening_moves_nothing_while_it_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU it asks where the weights lie, which Dynamo does not trace."""

    def flatten(rnn: nn.RNNBase) -> None:
        if len({weight.data_ptr() for weight in rnn._flat_weights}) != len(rnn._flat_weights):
            raise AssertionError

    monkeypatch.setattr(nn.RNNBase, "flatten_parameters", flatten)
    both(trained(Flattening), replays=20, plan="{F B O}")
    assert nn.RNNBase.flatten_parameters is flatten


def in_one_buffer() -> Recurrent:
    """Weights that are parts of one tensor, as cuDNN has them."""
    model = Recurrent()
    weights = list(model.rnn.parameters())
    flat = torch.cat([weight.detach().flatten() for weight in weights])
    for weight, part in zip(weights, flat.split([w.numel() for w in weights]), strict=True):
        weight.data = part.view_as(weight)
    return model


def test_weights_may_be_parts_of_one_tensor() -> None:
    both(trained(in_one_buffer), replays=20, plan="{F B O}")


def _other_weight(model: Recurrent) -> None:
    weight = model.rnn.weight_hh_l0
    weight.data = weight.data * 0.5


def _weight_of_the_list_alone(model: Recurrent) -> None:
    model.rnn._flat_weights[0] = nn.Parameter(model.rnn._flat_weights[0].detach() * 0.5)


def _other_parameter_in_the_dict(model: Recurrent) -> None:
    model.rnn._parameters["weight_hh_l1"] = nn.Parameter(model.rnn.weight_hh_l1.detach() * 0.5)


def _other_parameter(model: Recurrent) -> None:
    model.rnn.weight_ih_l0 = nn.Parameter(model.rnn.weight_ih_l0.detach() * 0.5)


def _assigned(model: Recurrent) -> None:
    state = copy.deepcopy(model.state_dict())
    model.load_state_dict({name: value * 0.5 for name, value in state.items()}, assign=True)


def _all_flat(model: Recurrent) -> None:
    made = in_one_buffer()
    with torch.no_grad():
        for own, other in zip(model.parameters(), made.parameters(), strict=True):
            other.copy_(own)
            own.data = other.data


def _converted(model: Recurrent) -> None:
    model.double().float()


@pytest.mark.parametrize(
    "change",
    [
        _other_weight,
        _weight_of_the_list_alone,
        _other_parameter_in_the_dict,
        _other_parameter,
        _assigned,
        _all_flat,
        _converted,
    ],
)
def test_weights_change_in_mid_run(change: Callable[[Recurrent], None]) -> None:
    def between(index: int, model: Any) -> None:
        if index == 14:
            change(model)

    both(trained(Recurrent, between=between, count=36), replays=20)


def _more_dropout(model: Recurrent) -> None:
    model.rnn.dropout = 0.6


def _evaluated(model: Recurrent) -> None:
    model.eval()


@pytest.mark.parametrize("change", [_more_dropout, _evaluated])
def test_the_dropout_of_a_recurrent_network_changes_in_mid_run(change: Callable[[Recurrent], None]) -> None:
    def between(index: int, model: Any) -> None:
        if index == 14:
            change(model)

    both(trained(Recurrent, between=between, count=36), replays=20, plan="{F B O}")


class Dropped(Recurrent):
    """Drops out weights, and not activations: what the network computes with is a new tensor in each step."""

    def __init__(self) -> None:
        super().__init__(nn.LSTM, num_layers=1, dropout=0.0)
        self.raw = nn.Parameter(self.rnn.weight_hh_l0.detach().clone())
        del self.rnn._parameters["weight_hh_l0"]

    def forward(self, x: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        self.rnn.weight_hh_l0 = nn.functional.dropout(self.raw, 0.3)
        return super().forward(x, state)


def test_a_weight_that_is_computed_in_each_step() -> None:
    both(trained(Dropped), replays=20, plan="{F B O}")


class Normed(Recurrent):
    def __init__(self) -> None:
        super().__init__()
        nn.utils.parametrizations.weight_norm(self.rnn, "weight_hh_l0")


def test_a_weight_that_is_parametrized() -> None:
    both(trained(Normed), replays=1)


def packed_loss_of(model: Any) -> Callable[[Tensor, Tensor], Tensor]:
    def step_fn(x: Tensor, y: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([5, 4, 3, 1]), batch_first=True)
        out, _ = model.rnn(packed)
        padded, _ = nn.utils.rnn.pad_packed_sequence(out, batch_first=True)
        return nn.functional.cross_entropy(model.head(padded[:, 0]), y)

    return step_fn


def listed_loss_of(model: Any) -> Callable[[Tensor, Tensor], Tensor]:
    def step_fn(x: Tensor, y: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_sequence([x[0], x[1, :4], x[2, :2], x[3, :1]])
        _, (state, _) = model.rnn(packed)
        return nn.functional.cross_entropy(model.head(state[-1]), y)

    return step_fn


@pytest.mark.parametrize(("step_of", "call"), [(packed_loss_of, "pack_padded"), (listed_loss_of, "pack_seq")])
def test_packed_sequences_are_named(step_of: Any, call: str) -> None:
    report = both(trained(Recurrent, step_of=step_of), replays=1)
    (row,) = [row for row in report.fallbacks if "packs sequences" in row.reason]
    lines, first = inspect.getsourcelines(step_of)
    line = first + next(i for i, text in enumerate(lines) if f"{call}" in text)
    assert row.where is not None and row.where.endswith(f"test_recurrent.py:{line}"), row
    assert "Pad" in row.fix and report.steps_replayed == 0


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("given", [False, True])
def test_a_batch_of_packed_sequences_whose_lengths_change(kind: Any, given: bool) -> None:
    """All of them have the same shapes, and kernels read the lengths on the host."""

    def script(diary: Diary) -> None:
        model = Recurrent(kind)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
        zeros = torch.zeros(2, 4, 8)

        def step_fn(packed: Any, y: Tensor) -> Tensor:
            state = ((zeros, zeros) if kind is nn.LSTM else zeros) if given else None
            _, state = model.rnn(packed, state)
            hidden = state[0] if kind is nn.LSTM else state
            return nn.functional.cross_entropy(model.head(hidden[-1]), y)

        step = diary.step(step_fn, model=model, optimizer=optimizer)
        for index, (x, y) in enumerate(sequences(28)):
            lengths = [5, 3, 2, 2] if index % 2 else [5, 4, 2, 1]
            packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor(lengths), batch_first=True)
            diary.write("loss", step(packed, y))
            diary.write_state(model, optimizer)

    report = both(script, replays=1)
    assert report.steps_replayed == 0
    assert any("packed sequences" in row.reason for row in report.fallbacks), str(report)


@pytest.mark.passes_without_graphs("nothing is captured")
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("cudnn", [False, True])
def test_dropout_of_cudnn_is_seen(
    monkeypatch: pytest.MonkeyPatch, dropout: float, training: bool, cudnn: bool
) -> None:
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, inputs: list[Tensor], left: list[str]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(torch.backends.cudnn, "enabled", cudnn)
    for kind in KINDS:
        model, (x, y) = Recurrent(kind, dropout=dropout).train(training), sequences(1)[0]
        Trace(torch.device("cpu"), compiler=keep)(loss_of(model), (x, y), {})
        found = list(draws_of_cudnn(graphs[-1], torch.device("cuda")))
        assert len(found) == (dropout > 0 and training and cudnn)
        assert all("test_recurrent.py" in str(problem.where) and problem.fix for problem in found)
        assert not list(draws_of_cudnn(graphs[-1], torch.device("cpu")))


@pytest.mark.passes_without_graphs("nothing is captured")
def test_inductor_leaves_recurrent_networks_to_eager_kernels() -> None:
    model, (x, y) = Recurrent(), sequences(1)[0]
    trace = Trace(torch.device("cpu"), compiler=compile_whole)
    with pytest.raises(NotLegal) as raised:
        trace(loss_of(model), (x, y), {})
    told = str(compiler_problem(raised.value))
    assert "unrolls recurrent networks" in told and "graphs hold eager kernels" in told
    assert "test_recurrent.py" in told
