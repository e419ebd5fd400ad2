"""Random numbers that a step draws on the host decide which way it takes: each way has a graph of its own."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from training import Diary, Net, adamw, batches, both

from pygraph_train import StepReport
from pygraph_train.problems import NotLegal
from pygraph_train.tracing.trace import Trace


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x).tanh()


class LayerDrop(nn.Module):
    """As the encoders of transformers' BART, Whisper and OPT do it."""

    def __init__(self, layerdrop: float, layers: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer() for _ in range(layers)])
        self.head = nn.Linear(6, 1)
        self.layerdrop = layerdrop

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            to_drop = False
            if self.training:
                dropout_probability = torch.rand([])
                if dropout_probability < self.layerdrop:
                    to_drop = True
            if not to_drop:
                x = layer(x)
        return self.head(x).square().mean()


def train(
    function: Callable[[Any], Callable[[Tensor], Tensor]],
    *,
    whole: int,
    model: Callable[[], nn.Module] = lambda: LayerDrop(0.0),
    steps: int = 40,
    between: Callable[[int], None] = lambda step: None,
    **config: Any,
) -> StepReport:
    """Train plainly and graphed; losses, parameters and the states of all three generators must be the same.

    Args:
        function: makes the step's function for a model.
        whole: how many steps have to run from one graph at least; 0 where none may. (Regions are another plan, for
            which nothing has to be drawn ahead.)
        model, steps, between: what is trained, how long, and what happens between steps.
        **config: options of the graphed step.
    """

    def script(diary: Any) -> None:
        random.seed(1)
        np.random.seed(2)
        GENERATOR.manual_seed(5)
        OWN.seed(6)
        net = model()
        optimizer = adamw(net)
        step = diary.step(function(net), model=net, optimizer=optimizer)
        inputs = torch.randn(steps, 4, 6, generator=torch.Generator().manual_seed(3))
        for number, x in enumerate(inputs):
            between(number)
            diary.write("loss", step(x))
            diary.write_state(net, optimizer)
            _, numbers, place, *_ = np.random.get_state()
            diary.write("random", [hash(random.getstate()), numbers.tobytes(), place, hash(OWN.getstate())])

    report = both(script, replays=whole or 1, **config)
    assert (report.steps_replayed > 0) == (whole > 0) and report.steps_replayed >= whole, str(report)
    return report


def line_of(function: Any, text: str) -> str:
    """`file:line` of the first line of a function's source that contains the text."""
    lines, first = inspect.getsourcelines(function)
    return f"{__file__}:{first + next(i for i, line in enumerate(lines) if text in line)}"


def plain(net: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda x: net(x)


def test_layerdrop_of_zero() -> None:
    assert not train(plain, whole=30).fallbacks


def test_layerdrop_with_four_ways() -> None:
    train(plain, model=lambda: LayerDrop(0.5), steps=80, whole=40)


class SmallDropout(LayerDrop):
    """On a CPU the dropouts draw from the same generator, between the layers' draws."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if torch.rand(1).item() < self.layerdrop:
                continue
            x = nn.functional.dropout(layer(x), 0.3, self.training)
        return self.head(x).square().mean()


def test_layerdrop_beside_dropout() -> None:
    train(plain, model=lambda: SmallDropout(0.5), steps=80, whole=40)


def test_layerdrop_under_autocast() -> None:
    """The context of a precision begins in the graph, before the draws."""

    def function(net: nn.Module) -> Callable[[Tensor], Tensor]:
        def step(x: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return net(x)

        return step

    train(function, model=lambda: SmallDropout(0.5), steps=80, whole=40)


def test_stochastic_depth_with_pythons_random() -> None:
    def function(net: nn.Module) -> Callable[[Tensor], Tensor]:
        def step(x: Tensor) -> Tensor:
            for layer in net.layers:  # type: ignore[attr-defined, union-attr]
                if random.random() < 0.3:
                    continue
                x = layer(x)
            return net(x)

        return step

    train(function, steps=80, whole=40)


DRAWS: dict[str, Callable[[], Any]] = {
    "torch": lambda: torch.rand(1) < 0.4,
    "python": lambda: random.random() < 0.4,
    "numpy": lambda: np.random.rand() < 0.4,
    "python, turned around": lambda: not random.random() > 0.4,
    "python, a range": lambda: 0.2 < random.random() < 0.7,
    "python, computed": lambda: int(random.random() * 3) == 1,
    "python, uniform": lambda: random.uniform(-1, 1) > 0,
    "python, a whole number": lambda: random.randint(0, 1),
    "python, of many whole numbers": lambda: random.randint(0, 100000) % 2,
    "python, bits": lambda: random.getrandbits(1),
    "python, a normal number": lambda: random.gauss(0, 1) > 0,
    "python, two numbers": lambda: random.random() < random.random(),
    "python, a choice of a constant": lambda: random.choice([True, False]),
    "python, a choice of texts": lambda: random.choice(("left", "right")) == "left",
    "python, a sample": lambda: random.sample(range(2), 1) == [0],
    "numpy, a whole number": lambda: np.random.randint(2),
    "numpy, uniform": lambda: np.random.uniform() > 0.5,
    "numpy, beta": lambda: np.random.beta(1.0, 1.0) > 0.5,
    "numpy, a choice": lambda: np.random.choice([1, 2]) == 2,
    "torch, a number": lambda: torch.rand(1).item() < 0.4,
    "torch, a float": lambda: float(torch.rand(1)) < 0.4,
    "torch, bool": lambda: bool(torch.rand(()) > 0.5),
    "torch, not": lambda: not torch.rand(()) > 0.5,
    "torch, in place": lambda: torch.empty([]).uniform_() < 0.4,
    "torch, in place by name": lambda: uniform_by_name() < 0.4,
    "torch, a view is written": lambda: view_is_written()[0] < 0.4,
    "torch, normal": lambda: torch.randn(1) > 0,
    "torch, a whole number": lambda: torch.randint(0, 2, (1,)).item(),
    "torch, a bernoulli": lambda: torch.bernoulli(torch.tensor(0.5)) == 1,
    "torch, all of them": lambda: torch.rand(2).max() > 0.7,
    "torch, two numbers": lambda: torch.rand(1) < torch.rand(1),
    "torch, a permutation": lambda: torch.randperm(2).tolist() == [0, 1],
    "torch, and": lambda: True and torch.rand(()) < 0.4,
    "torch, or": lambda: False or torch.rand(()) < 0.4,
    "two generators": lambda: random.random() < float(torch.rand(())),
}


def uniform_by_name() -> Tensor:
    number = torch.empty([])
    number.uniform_()
    return number


def view_is_written() -> Tensor:
    numbers = torch.zeros(2)
    numbers[0].uniform_()
    return numbers


def deciding(draw: Callable[[], Any]) -> Callable[[nn.Module], Callable[[Tensor], Tensor]]:
    """A step whose second layer runs where the number that is drawn says so."""

    def function(net: nn.Module) -> Callable[[Tensor], Tensor]:
        first, second = net.layers  # type: ignore[misc, union-attr]

        def step(x: Tensor) -> Tensor:
            x = first(x)
            if draw():
                x = second(x)
            return x.square().mean()

        return step

    return function


@pytest.mark.slow_after(3)
@pytest.mark.parametrize("draw", DRAWS)
def test_a_draw_that_decides(draw: str) -> None:
    train(deciding(DRAWS[draw]), steps=44, whole=20)


def test_numbers_that_nobody_asks_for() -> None:
    def function(net: nn.Module) -> Callable[[Tensor], Tensor]:
        def step(x: Tensor) -> Tensor:
            torch.rand([])
            random.random()
            np.random.rand()
            return net(x) + 0 * torch.rand(2).sum()

        return step

    assert not train(function, whole=30).fallbacks


def test_seeds_that_are_set_in_the_middle() -> None:
    def between(step: int) -> None:
        if step % 13 == 5:
            torch.manual_seed(step)
            random.seed(step)
            np.random.seed(step)

    def draw() -> bool:
        return random.random() + np.random.rand() + float(torch.rand(())) < 1.5

    train(deciding(draw), between=between, steps=60, whole=35)


def test_a_probability_that_changes() -> None:
    def function(net: LayerDrop) -> Callable[[Tensor], Tensor]:
        models.append(net)
        return lambda x: net(x)

    models: list[LayerDrop] = []

    def between(step: int) -> None:
        models[-1].layerdrop = 0.2 if step < 30 else 0.9

    train(function, model=lambda: LayerDrop(0.2), between=between, steps=80, whole=30)


def test_gradient_accumulation() -> None:
    def script(diary: Any) -> None:
        net = LayerDrop(0.4)
        optimizer = adamw(net)
        step = diary.step(lambda x: net(x), model=net, optimizer=optimizer)
        for number, x in enumerate(torch.randn(120, 4, 6, generator=torch.Generator().manual_seed(3))):
            diary.write("loss", step(x) if number % 2 else step.accumulate(x))
            diary.write_state(net, optimizer)

    assert both(script, replays=40).steps_replayed >= 40


@pytest.mark.slow
def test_no_ways_without_end() -> None:
    """Of 4096 ways none comes again: a few are traced, and then the step is left as it is."""
    report = train(plain, model=lambda: LayerDrop(0.5, layers=12), steps=130, whole=0)
    (told,) = report.fallbacks
    assert "steps went ways that have no graph" in told.reason and told.where == line_of(
        LayerDrop, "if dropout"
    )


REFUSED: dict[str, Callable[[Tensor], Tensor]] = {
    "python, a power": lambda loss: loss ** random.random(),
    "python, a limit": lambda loss: loss.clamp(max=random.betavariate(1, 1)),
    "python, a text": lambda loss: loss * len(f"{random.random()}"),
    "numpy, an array": lambda loss: loss * torch.tensor(np.linalg.norm(np.random.rand(3))),
    "numpy, in place": lambda loss: loss * added_in_place(np.random.rand(3)),
    "numpy, shuffled": lambda loss: loss * shuffled([1, 2, 3])[0],
    "torch, decided and computed": lambda loss: loss * used_twice(torch.rand(())),
    "torch, a generator": lambda loss: loss if torch.rand((), generator=GENERATOR) < 0.5 else 2 * loss,
    "python, a generator": lambda loss: loss if OWN.random() < 0.5 else 2 * loss,
    "python, seeded": lambda loss: loss if seeded() < 0.5 else 2 * loss,
}
GENERATOR, OWN = torch.Generator().manual_seed(0), random.Random(0)


def used_twice(number: Tensor) -> Any:
    return number * 2 if number < 0.5 else number


def shuffled(numbers: list[int]) -> list[int]:
    np.random.shuffle(numbers)
    return numbers


def added_in_place(numbers: np.ndarray) -> Tensor:
    found = torch.from_numpy(numbers)
    found += 1
    return torch.tensor(numbers.sum())


def seeded() -> float:
    random.seed(7)
    return random.random()


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.square().mean()


@pytest.mark.slow_after(3)
@pytest.mark.parametrize("draw", REFUSED)
def test_a_draw_that_no_graph_can_hold(draw: str) -> None:
    def function(net: nn.Module) -> Callable[[Tensor], Tensor]:
        return lambda x: REFUSED[draw](net(x))

    report = train(function, model=lambda: nn.Sequential(Layer(), Mean()), whole=0)
    told = report.fallbacks[0]  # torch 2.11 has more to say
    assert told.where is not None and told.where.startswith(__file__)
    assert any(text in told.reason for text in ("random", "runs on the host", "draws a number")), told


def test_on_a_device_the_graph_holds_no_draws() -> None:
    """There the generator of the CPU is for the host alone: graphs, and Inductor, get nothing of it."""
    net, graphs = LayerDrop(0.5, layers=4), []

    def keep(graph: torch.fx.GraphModule, inputs: list[Any], left: list[str]) -> Callable[..., Any]:
        graphs.append({str(node.target) for node in graph.graph.nodes})
        return graph.forward

    def step(x: Tensor) -> Tensor:
        if torch.bernoulli(torch.tensor(0.5)) == 1:
            x = x * 2
        numbers = torch.empty(2)
        numbers.uniform_()
        torch.rand(3)  # for nothing
        if numbers[0] < numbers[1]:
            x = x + 1
        return net(x) * random.randint(1, 3)

    def states() -> tuple[Any, ...]:
        return torch.get_rng_state().tolist(), random.getstate()

    trace, x = Trace(torch.device("cuda"), compiler=keep), torch.randn(4, 6)
    for seed in (0, 0):
        torch.manual_seed(seed)
        random.seed(seed)
        expected, after = step(x), states()
        torch.manual_seed(seed)
        random.seed(seed)
        assert torch.equal(trace(step, (x,), {}), expected)
        assert states() == after
    assert len(graphs) == 1
    assert not any(
        word in name for name in graphs[0] for word in ("rand", "uniform", "bernoulli", "empty", "tensor")
    )

    torch.manual_seed(1)
    random.seed(1)
    before = states()
    with pytest.raises(NotLegal, match="another way"):
        trace(step, (x,), {})
    assert states() == before


def test_a_number_that_reaches_tensors_stays_in_the_graph_of_a_device() -> None:
    trace, x = Trace(torch.device("cuda")), torch.ones(3)
    trace(lambda x: x * torch.rand(1), (x,), {})
    assert trace.problem is not None


def test_a_step_that_counts_and_lets_draws_decide() -> None:
    """Writes to Python and draws of the host in one step: both are made once in each step."""

    def script(diary: Diary) -> None:
        random.seed(5)
        model = Net()
        optimizer = adamw(model)
        counted = {"steps": 0, "flipped": 0}
        kept: list[Tensor] = []

        def step_fn(batch: Any) -> Tensor:
            x, y = batch
            counted["steps"] += 1
            if random.random() < 0.5:
                counted["flipped"] += 1
                x = x.flip(0)
            loss = nn.functional.cross_entropy(model(x), y)
            kept.append(loss.detach())
            return loss

        step = diary.step(step_fn, model=model, optimizer=optimizer)
        for batch in batches(60):
            diary.write("loss", step(batch))
            diary.write("counted", dict(counted))
            diary.write("kept", list(kept))
            diary.write("state", random.getstate())
        diary.write_state(model, optimizer)

    both(script, replays=1)


def test_a_graph_of_a_device_keeps_no_draw_behind_one_that_was_taken_out() -> None:
    """Without the draws that decide, a draw that is left would be the first one, and would have another number."""
    model = nn.Linear(6, 3)

    def step(x: Tensor) -> Tensor:
        y = model(x)
        if torch.rand([]) < 0.0:
            y = y * 2
        return y.square().mean() * torch.rand(())

    trace, x = Trace(torch.device("cuda")), torch.ones(4, 6)
    torch.manual_seed(3)
    plain = step(x)
    torch.manual_seed(3)
    with pytest.raises(NotLegal, match="computes with others"):
        trace(step, (x,), {})
    assert torch.equal(step(x), plain)  # nothing was drawn
