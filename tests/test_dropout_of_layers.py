"""Recurrent networks whose dropout cuDNN draws from memory of its own. An operation that does the same stands in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from replays import text_of
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from training import Diary, both

from pygraph_train import dropout_of_layers
from pygraph_train.dropout_of_layers import DropoutOfLayers
from pygraph_train.tracing import trace
from pygraph_train.tracing.trace import Trace


class Generator:
    """As ATen keeps cuDNN's: made by the first network that draws, and anew once the random state was set."""

    def __init__(self) -> None:
        self.memory: Tensor | None = None
        self.begins_anew = True
        self.made = self.looks = self.drawn = 0
        self.counts_elsewhere = False

    def _make(self) -> None:
        seed = int(torch.empty((), dtype=torch.int64).random_().item())  # which no capture allows
        self.memory = torch.tensor([seed % 1000003, 0])
        self.begins_anew = False
        self.made += 1

    def of_next_network(self) -> Tensor:
        if self.begins_anew or self.memory is None:
            self._make()
        assert self.memory is not None
        return self.memory

    # what stands in for `torch_private.cudnn_dropout`

    def look(self, device: torch.device, *, begins: bool = False) -> Tensor | None:
        self.looks += 1
        if not self.begins_anew:
            return self.memory
        if not begins:
            return None
        before = torch.get_rng_state()
        self._make()
        torch.set_rng_state(before)
        return self.memory

    def begin_anew(self, device: torch.device) -> None:
        self.begins_anew = True


GENERATOR = Generator()
_LIBRARY = torch.library.Library("stands_in", "DEF")
_LIBRARY.define("dropout(Tensor x, float p) -> Tensor", tags=())
_LIBRARY.define("mask(Tensor x, Tensor memory, float p) -> Tensor")


def _dropout(x: Tensor, p: float) -> Tensor:
    if isinstance(x, FakeTensor):
        return torch.empty_like(x)
    return x * torch.ops.stands_in.mask(x.detach(), GENERATOR.of_next_network(), p)


def _mask(x: Tensor, memory: Tensor, p: float) -> Tensor:
    seed, drawn = memory.tolist()
    if GENERATOR.counts_elsewhere:
        drawn = GENERATOR.drawn = GENERATOR.drawn + 1
    generator = torch.Generator().manual_seed(seed + 7919 * drawn)
    memory.numpy()[1] += not GENERATOR.counts_elsewhere  # as kernels of cuDNN write: no operator says so
    return (torch.rand(x.shape, generator=generator) > p) / (1 - p)


_LIBRARY.impl("dropout", _dropout, "CompositeImplicitAutograd")
_LIBRARY.impl("mask", _mask, "CPU")


@pytest.fixture(autouse=True)
def _stands_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def draws(graph: torch.fx.GraphModule, device: torch.device) -> list[torch.fx.Node]:
        targets = (torch.ops.stands_in.dropout, torch.ops.stands_in.dropout.default)
        return [node for node in graph.graph.nodes if node.target in targets]

    monkeypatch.setattr(trace, "draws_of_cudnn", draws)
    monkeypatch.setattr(dropout_of_layers, "dropout_memory", GENERATOR.look)
    monkeypatch.setattr(dropout_of_layers, "begin_dropout_anew", GENERATOR.begin_anew)
    monkeypatch.setattr(dropout_of_layers, "_of_devices", {})
    yield
    GENERATOR.__init__()  # type: ignore[misc]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.ops.stands_in.dropout(self.first(x).tanh(), 0.3)
        return self.last(nn.functional.dropout(hidden, 0.1))


def trained(
    between: Callable[[int, nn.Module, Tensor], None] = lambda index, model, x: None, count: int = 40
) -> Callable[[Diary], None]:
    """A script: steps, with something done before each of them."""

    def script(diary: Diary) -> None:
        GENERATOR.begins_anew, GENERATOR.drawn = True, 0  # both runs begin with the same seed
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)

        def step_fn(x: Tensor, y: Tensor) -> Tensor:
            return nn.functional.cross_entropy(model(x), y)

        step = diary.step(step_fn, model=model, optimizer=optimizer)
        generator = torch.Generator().manual_seed(1)
        for index in range(count):
            x = torch.randn(4, 6, generator=generator)
            y = torch.randint(0, 3, (4,), generator=generator)
            between(index, model, x)
            diary.write("loss", step(x, y))
            diary.write_state(model, optimizer)
            diary.write("memory", [] if GENERATOR.begins_anew else GENERATOR.memory)

    return script


def set_random_state(number: int) -> None:
    """As `torch.manual_seed` does where there is a GPU."""
    torch.manual_seed(number)
    GENERATOR.begins_anew = True


@pytest.mark.parametrize("verify", ["sample", "always", "off"])
def test_what_networks_draw_is_what_they_draw_without_graphs(verify: str) -> None:
    report = both(trained(), replays=30, plan="{F B O}", verify=verify)
    assert not report.fallbacks


def test_runs_that_are_undone_put_the_memory_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above would not notice otherwise that nothing is compared with anything."""
    monkeypatch.setattr(DropoutOfLayers, "put_back", lambda self, place: None)
    with pytest.raises(AssertionError):
        both(trained(), replays=30, plan="{F B O}")


def test_the_random_state_is_set_in_mid_run() -> None:
    def between(index: int, model: nn.Module, x: Tensor) -> None:
        if index in (16, 17, 28):
            set_random_state(index)

    report = both(trained(between), replays=26, plan="{F B O}")
    assert len(report.captures) == 1, str(report)
    (row,) = report.fallbacks
    assert "random state of the device was set" in row.reason and row.count == 3, row


def test_the_random_state_is_set_before_the_step_that_would_be_captured() -> None:
    def between(index: int, model: nn.Module, x: Tensor) -> None:
        if index in (4, 5):
            set_random_state(index)

    both(trained(between), replays=26, plan="{F B O}")


def test_a_generator_that_keeps_count_elsewhere_is_refused() -> None:
    """Replays would draw the same numbers again and again, and the first one would be right."""
    GENERATOR.counts_elsewhere = True
    report = both(trained(), replays=1, plan="F B {O}")
    assert report.steps_replayed == 0 and "stays as it is in a step" in text_of(report)


def test_a_generator_that_nobody_sees_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(device: torch.device, **_: Any) -> Tensor:
        raise RuntimeError("planted")

    monkeypatch.setattr(dropout_of_layers, "dropout_memory", fail)
    report = both(trained(), replays=1, plan="F B {O}")
    assert report.steps_replayed == 0 and "does not show from where (RuntimeError: planted)" in text_of(
        report
    )


def test_others_draw_from_the_same_memory_between_steps() -> None:
    def between(index: int, model: nn.Module, x: Tensor) -> None:
        if index % 3 == 0:
            with torch.no_grad():
                model(x)
        if index == 20:
            set_random_state(index)
            model(x)

    both(trained(between), replays=28, plan="{F B O}")


def test_the_random_state_is_set_before_each_step() -> None:
    def between(index: int, model: nn.Module, x: Tensor) -> None:
        set_random_state(index)

    report = both(trained(between), replays=1, plan="F B {O}")
    assert report.steps_replayed == 0 and "random state of the device was set" in text_of(report)
    assert GENERATOR.looks < 20  # no more of them once it is refused


def test_two_steps_draw_from_one_memory() -> None:
    """Graphs of both hold its address."""

    def script(diary: Diary) -> None:
        GENERATOR.begins_anew = True
        models = [Net(), Net()]
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, fused=True) for model in models]
        steps: list[Any] = []
        for model, optimizer in zip(models, optimizers, strict=True):

            def step_fn(x: Tensor, model: nn.Module = model) -> Tensor:
                return model(x).square().mean()

            steps.append(diary.step(step_fn, model=model, optimizer=optimizer))
        for index in range(30):
            x = torch.full((4, 6), 0.1 * index)
            if index == 20:
                set_random_state(7)
            for model, optimizer, step in zip(models, optimizers, steps, strict=True):
                diary.write("loss", step(x))
                diary.write_state(model, optimizer)

    both(script, replays=20, plan="{F B O}")


class _Shares:
    """A generator of a device, and others that share its state."""

    def __init__(self, shares: bool = False) -> None:
        self.shares = shares

    def graphsafe_get_state(self) -> _Shares:
        return _Shares(shares=True)


@pytest.mark.passes_without_graphs("nothing is captured")
def test_dynamo_puts_random_states_back_in_generators_that_no_network_looks_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It sets those of the device to what they are, and recurrent networks would begin anew then."""
    seen: list[Any] = []

    def look(graph: torch.fx.GraphModule, inputs: list[Tensor], left: list[str]) -> Callable[..., Any]:
        seen.append(torch.cuda.default_generators)
        return graph.forward

    stock = (_Shares(),)
    monkeypatch.setattr(torch.cuda, "default_generators", stock)
    Trace(torch.device("cpu"), compiler=look)(torch.sin, (torch.ones(2),), {})
    ((apart,),) = seen
    assert apart.shares and torch.cuda.default_generators is stock
