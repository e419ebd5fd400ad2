"""Random numbers that a step draws on the host, and that get into tensors: they are drawn before each replay."""

from __future__ import annotations

import operator
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from test_host_draws import train
from torch import Tensor, nn
from training import Diary, adamw, both, differs

from pygraph_train.random_state import HostRandomState
from pygraph_train.tracing.reproducing import ReproducingTrace

Make = Callable[[Tensor], Tensor]
"""What a step makes of its batch of 4 rows with 6 columns."""


def mixed(x: Tensor, number: Any) -> Tensor:
    return number * x + (1 - number) * x[torch.randperm(len(x))]


def shuffled(count: int) -> list[int]:
    order = list(range(count))
    random.shuffle(order)
    return order


def masked(x: Tensor) -> Tensor:
    mask = np.random.rand(*x.shape) < 0.3
    return torch.where(torch.from_numpy(mask).to(x.device), 0.0, x)


def in_place(x: Tensor) -> Tensor:
    order = torch.tensor(random.sample(range(4), 4))
    order += 1
    return x[order % 4] + order[:, None]


def changed_list(x: Tensor) -> Tensor:
    order = random.sample(range(4), 3)
    same, before = order, torch.tensor(order)
    order.append(1)
    same[0] = 2
    order += [random.randint(0, 3)]
    first, *_, last = same
    return x[before[:2]] * len(same) + x[torch.tensor(order)[2:4]] * torch.tensor([first, last])[:, None]


def items(x: Tensor) -> Tensor:
    for k, number in enumerate(random.choices(range(4), k=2)):
        x = x + torch.tensor(number) * (k + 1)
    first, second = np.random.rand(2)
    return x * float(first) + float(second)


def jittered(x: Tensor) -> Tensor:
    for number in np.random.uniform(0.9, 1.1, size=3).tolist():
        x = x * number
    return x


MADE: dict[str, Make] = {
    "mixup": lambda x: mixed(x, np.random.beta(0.4, 0.4)),
    "mixup of the other library": lambda x: mixed(x, random.betavariate(0.4, 0.4)),
    "a factor": lambda x: x * random.random(),
    "a quotient": lambda x: x / (1 + np.random.rand()),
    "a quotient, turned around": lambda x: (0.5 + random.random()) / (x.square() + 1),
    "a difference": lambda x: random.uniform(-1, 1) - x,
    "a number in a tensor": lambda x: x * torch.tensor(random.gauss(0, 1)),
    "numbers in a tensor": lambda x: x * torch.tensor([random.random() for _ in range(6)]),
    "a sample": lambda x: x[torch.tensor(random.sample(range(4), 3)).to(x.device)],
    "a sample as an index": lambda x: x[random.sample(range(4), 3)],
    "a sample of columns": lambda x: x[:, random.sample(range(6), 2)],
    "choices": lambda x: x[torch.tensor(random.choices(range(4), k=5), device=x.device)],
    "shuffled": lambda x: x[torch.tensor(shuffled(4))],
    "a part of what is shuffled": lambda x: x[torch.tensor(shuffled(4)[:2])],
    "a permutation": lambda x: x[torch.from_numpy(np.random.permutation(4))],
    "a permutation as an index": lambda x: x[np.random.permutation(4)],
    "a permutation, sorted and cut": lambda x: x[torch.as_tensor(np.sort(np.random.permutation(4)[:2]))],
    "a permutation of a permutation": lambda x: x[
        torch.tensor(np.random.permutation(np.random.permutation(4)))
    ],
    "a choice": lambda x: x[torch.tensor(np.random.choice(4, 2, replace=False))],
    "an array": lambda x: x + torch.from_numpy(np.random.randn(4, 6)).float(),
    "an array of single precision": lambda x: x + torch.from_numpy(np.random.rand(6).astype(np.float32)),
    "an array, computed": lambda x: x * torch.tensor(2 * np.random.rand(6) - 1, dtype=x.dtype),
    "a sum": lambda x: x * float(np.random.rand(3).sum()),
    "a list of numbers": jittered,
    "a mask": masked,
    "a list that is changed": changed_list,
    "items": items,
    "changed in place": in_place,
    "torch, a permutation": lambda x: x[torch.randperm(4).to(x.device)],
    "torch, a number": lambda x: x * torch.rand(()).item(),
    "torch, numbers": lambda x: x + torch.rand(4, 6).to(x.device),
    "torch, an index": lambda x: x[:, torch.randint(0, 6, (3,))],
}


def after(make: Make) -> Callable[[nn.Module], Callable[[Tensor], Tensor]]:
    """A step that draws before a layer, and once more after it."""
    return lambda net: lambda x: net(make(x)).square().mean() * (0.5 + random.random())


@pytest.mark.slow_after(6)
@pytest.mark.parametrize("name", MADE)
def test_what_is_drawn_gets_into_tensors(name: str) -> None:
    columns = {"a sample of columns": 2, "torch, an index": 3}.get(name, 6)
    report = train(
        after(MADE[name]), model=lambda: nn.Linear(columns, 6), whole=30, compile=False, plan="{F B O}"
    )
    assert not report.fallbacks, report


@pytest.fixture
def _as_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The generator of the CPU is for the host alone, and `.to(...)` copies to the device."""
    from pygraph_train.tracing import draw_recording, drawn_tensors, trace

    def copied(node: torch.fx.Node, device: torch.device) -> bool:
        whole = node.target is operator.getitem and node.args[0].meta["example_value"].dim() == 2
        return whole or node.target in ("to", "type_as")

    monkeypatch.setattr(draw_recording, "is_drawn_on_device", lambda device: False)
    monkeypatch.setattr(trace, "is_drawn_on_device", lambda device: False)
    monkeypatch.setattr(drawn_tensors, "is_of_device", copied)


def two_copies(x: Tensor) -> Tensor:
    order = torch.randperm(4)
    first = order.to(x.device, copy=True)
    order.add_(1).remainder_(4)
    return x[first] + x[order.to(x.device)]


def of_two_draws(x: Tensor) -> Tensor:
    numbers = torch.empty(4)
    numbers.uniform_()
    order = torch.randperm(4)
    return (
        x * numbers[order].to(x)[:, None] + torch.normal(0.0, 1.0, (6,)).to(x.device, torch.float64).float()
    )


def also_deciding(x: Tensor) -> Tensor:
    numbers = torch.rand(6)
    if numbers[0] < 0.5:
        x = x + 1
    return x * numbers.to(x.device)


def beside_a_layer_that_is_dropped(x: Tensor) -> Tensor:
    if torch.rand([]) < 0.4:
        x = x * 2
    return x[torch.randperm(4).to(x.device)]


ON_A_DEVICE: dict[str, Make] = {
    "a permutation": lambda x: x[torch.randperm(4).to(x.device)],
    "numbers": lambda x: x * torch.rand(6).to(x.device),
    "numbers of another type": lambda x: x + (3 * torch.rand(4, 6)).to(x.device, torch.long),
    "an index as it is": lambda x: x[:, torch.randint(0, 6, (6,))],
    "a bernoulli mask": lambda x: x * torch.bernoulli(torch.full((6,), 0.5)).type_as(x),
    "two copies of one": two_copies,
    "of two draws": of_two_draws,
    "beside a layer that is dropped": beside_a_layer_that_is_dropped,
    "also deciding": also_deciding,
    "a sample": lambda x: x[torch.tensor(random.sample(range(4), 4)).to(x.device)],
    "a mixture": lambda x: mixed(x[torch.randperm(4).to(x.device)], np.random.beta(1, 1)),
}


@pytest.mark.slow_after(4)
@pytest.mark.usefixtures("_as_on_a_device")
@pytest.mark.parametrize("name", ON_A_DEVICE)
def test_what_torch_draws_on_the_host_is_copied_to_a_device(name: str) -> None:
    report = train(
        after(ON_A_DEVICE[name]), model=lambda: nn.Linear(6, 6), whole=25, compile=False, plan="{F B O}"
    )
    assert not report.fallbacks, report


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("name", ["mixup", "a sample", "an array", "shuffled", "a function of transformers"])
def test_with_compiled_kernels(name: str) -> None:
    report = train(after(MADE[name]), model=lambda: nn.Linear(6, 6), whole=20, compile=True)
    assert not report.fallbacks, report


def states() -> list[Any]:
    _, numbers, place, *_ = np.random.get_state()
    return [hash(random.getstate()), numbers.tobytes(), place, torch.get_rng_state()]


def trained(
    step_fn: Callable[[nn.Module, Any], Any], inputs: list[Any], *, least: int, **options: Any
) -> None:
    """Train plainly and graphed; what steps return or raise is the same, and so are all states afterwards."""

    def script(diary: Diary) -> None:
        random.seed(1)
        np.random.seed(2)
        model = nn.Linear(6, 6)
        optimizer = adamw(model)
        step = diary.step(lambda given: step_fn(model, given), model=model, optimizer=optimizer)
        kept = []
        for number, given in enumerate(inputs):
            if number % 7 == 3:
                diary.write("drawn between steps", [random.random(), np.random.rand(), torch.rand(1)])
            try:
                kept.append(step(given))
            except (IndexError, ValueError) as error:
                diary.write("error", type(error).__name__)
            diary.write("random", states())
            diary.write_state(model, optimizer)
        diary.write("kept", kept)

    both(script, replays=least, plan="{F B O}", compile=False, **options)


def rows(count: int, *sizes: int) -> list[Tensor]:
    numbers = torch.Generator().manual_seed(3)
    return [torch.randn(sizes[i % len(sizes)], 6, generator=numbers) for i in range(count)]


def test_a_step_that_raises() -> None:
    """With the index that it has computed of what was drawn, or while it draws."""

    def step_fn(model: nn.Module, given: tuple[Tensor, Tensor]) -> Tensor:
        x, offset = given
        first = random.random()
        order = torch.tensor(random.sample(range(4), 3))
        loss = model(x[order + offset]).square().mean() * first
        return loss * np.random.rand()

    batches = [(x, torch.tensor(9 if i in (14, 15, 22) else 0)) for i, x in enumerate(rows(40, 4))]
    trained(step_fn, batches, least=20)


def test_a_step_that_raises_while_it_draws() -> None:
    def step_fn(model: nn.Module, x: Tensor) -> Tensor:
        count = random.choices([3, 5], weights=[9, 1])[0]
        order = torch.tensor(random.sample(range(4), count))
        return model(x[order]).square().mean() * random.random()

    trained(step_fn, rows(60, 4), least=25)


def test_shapes_that_change() -> None:
    def step_fn(model: nn.Module, x: Tensor) -> Tensor:
        order = torch.from_numpy(np.random.permutation(len(x))).to(x.device)
        share = np.random.beta(0.5, 0.5)
        return (share * model(x) + (1 - share) * model(x[order])).square().mean()

    trained(step_fn, rows(60, 4, 5), least=25)


def test_counts_that_are_drawn() -> None:
    """The shape of what is drawn leads the way of the step."""

    def step_fn(model: nn.Module, x: Tensor) -> Tensor:
        order = torch.tensor(random.sample(range(4), random.randint(2, 3)))
        return model(x[order]).square().mean()

    trained(step_fn, rows(80, 4), least=40)


def test_what_is_returned_is_kept() -> None:
    def step_fn(model: nn.Module, x: Tensor) -> dict[str, Any]:
        order = torch.tensor(np.random.permutation(4))
        return {"loss": model(x[order]).square().mean(), "order": order, "twice": 2 * order}

    trained(step_fn, rows(40, 4), least=20)


def test_what_is_drawn_is_kept_by_the_model() -> None:
    def step_fn(model: Any, x: Tensor) -> Tensor:
        order = torch.tensor(random.sample(range(4), 4))
        seen.append(order)
        model.steps = getattr(model, "steps", 0) + 1
        return model(x[order]).square().mean()  # type: ignore[no-any-return]

    seen: list[Tensor] = []
    trained(step_fn, rows(40, 4), least=20)
    found = torch.stack(seen)
    assert torch.equal(found[:40], found[40:]) and len(found[:40].unique(dim=0)) > 10


def test_gradients_that_are_accumulated() -> None:
    def script(diary: Diary) -> None:
        random.seed(4)
        model = nn.Linear(6, 6)
        optimizer = adamw(model)

        def step_fn(x: Tensor) -> Tensor:
            return model(x[random.sample(range(4), 3)]).square().mean() * random.random()

        step = diary.step(step_fn, model=model, optimizer=optimizer)
        for number, x in enumerate(rows(60, 4)):
            diary.write("loss", step(x) if number % 2 else step.accumulate(x))
            diary.write("random", states())
            diary.write_state(model, optimizer)

    assert both(script, replays=30, compile=False).steps_replayed >= 15


def test_replays_are_compared_in_mid_run() -> None:
    report = train(
        after(MADE["mixup"]), model=lambda: nn.Linear(6, 6), whole=20, compile=False, verify="always"
    )
    assert not report.fallbacks, report


class Halves(nn.Module):
    """Numbers of small types are computed with in single precision, and rounded."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6, dtype=dtype)
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        share = random.random()
        return (share * self.layer(x.to(self.dtype)) / (1 + random.random())).square().mean().float()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_types(dtype: torch.dtype) -> None:
    train(lambda net: lambda x: net(x), model=lambda: Halves(dtype), whole=25, compile=False, plan="{F B O}")


def drawn_twice() -> Tensor:
    numbers = torch.rand(6)
    numbers.mul_(2)
    return numbers


ON_META: dict[str, tuple[Make, Callable[[], list[Tensor]]]] = {
    "a permutation": (lambda x: x[torch.randperm(4).to(x.device)], lambda: [torch.randperm(4)]),
    "an index": (lambda x: x[:, torch.randint(0, 6, (3,))], lambda: [torch.randint(0, 6, (3,))]),
    "a number": (lambda x: x * torch.rand(()), lambda: [torch.rand(())]),
    "computed on the host": (lambda x: x * drawn_twice().to(x), lambda: [drawn_twice()]),
    "a sample": (
        lambda x: x[torch.tensor(random.sample(range(4), 3)).to(x.device)],
        lambda: [torch.tensor(random.sample(range(4), 3))],
    ),
    "a sample as an index": (
        lambda x: x[random.sample(range(4), 3)],
        lambda: [torch.tensor(random.sample(range(4), 3))],
    ),
    "an array": (
        lambda x: x + torch.from_numpy(np.random.rand(6)).float().to(x.device),
        lambda: [torch.from_numpy(np.random.rand(6)).float()],
    ),
    "made on the device": (
        lambda x: x + torch.tensor(np.random.rand(6), device=x.device, dtype=x.dtype),
        lambda: [torch.tensor(np.random.rand(6), dtype=torch.float32)],
    ),
    "a fraction": (lambda x: random.random() * x, lambda: [torch.tensor(random.random())]),
    "two": (
        lambda x: x[torch.randperm(4).to(x.device)] * np.random.beta(1, 1),
        lambda: [torch.randperm(4), torch.tensor(np.random.beta(1, 1))],
    ),
}


@pytest.mark.passes_without_graphs("a device without values computes nothing")
@pytest.mark.parametrize("name", ON_META)
def test_a_graph_of_a_device_reads_what_the_host_draws(name: str) -> None:
    make, drawn = ON_META[name]
    trace, x = ReproducingTrace(torch.device("meta")), torch.empty(4, 6, device="meta")
    given: tuple[Any, ...] = (lambda x: 2 * make(x), (x,), {})
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(5)
    for _ in range(3):
        before = HostRandomState()
        expected, after = drawn(), states()
        before.restore()
        if trace.traced:
            assert trace.holds(*given)
            assert differs(expected, list(trace.ahead.look({"args": (x,)}).taken)) is None
        result = trace(*given)
        assert trace.problem is None and trace.reproduces, trace.problem
        assert differs(states(), after) is None
        assert result.shape == make(x).shape
        before.restore()
        drawn()


@pytest.mark.passes_without_graphs("a device without values computes nothing")
def test_a_quotient_of_the_host_stays_in_the_step() -> None:
    """A device divides by such a number in another way than by a tensor of its own."""
    trace, x = ReproducingTrace(torch.device("meta")), torch.empty(4, 6, device="meta")
    trace(lambda x: x / torch.rand(()), (x,), {})
    assert trace.problem is not None and "makes a tensor on cpu" in trace.problem.reason


def test_three_shapes() -> None:
    def step_fn(model: nn.Module, x: Tensor) -> Tensor:
        order = torch.tensor(random.sample(range(len(x)), 3)).to(x.device)
        return model(x[order] * random.random()).square().mean()

    trained(step_fn, rows(120, 4, 5, 6), least=40)


def test_numbers_of_torch_between_dropouts() -> None:
    """On a CPU the graph draws from the same generator."""

    def step_fn(model: nn.Module, x: Tensor) -> Tensor:
        x = nn.functional.dropout(x, 0.3)
        share = torch.rand(()).item()
        x = nn.functional.dropout(model(x) * share, 0.3)
        if torch.rand(()) < 0.3:
            x = x * 2
        return (x[torch.randperm(4)] * torch.rand(()).item() * random.random()).square().mean()

    trained(step_fn, rows(80, 4), least=30)


def test_a_checkpoint_beside_what_is_drawn() -> None:
    def step_fn(model: nn.Module, x: Tensor) -> Tensor:
        order = torch.tensor(random.sample(range(4), 3))
        scale = torch.tensor(np.random.rand(6)).float()

        def part(y: Tensor) -> Tensor:
            return model(y[order] * scale).tanh()

        found: Tensor = torch.utils.checkpoint.checkpoint(part, x, use_reentrant=False)  # type: ignore[attr-defined]
        return found.square().mean()

    trained(step_fn, rows(40, 4), least=20)


def test_draws_inside_of_a_checkpoint_stay_in_the_step() -> None:
    def step_fn(model: nn.Module, x: Tensor) -> Tensor:
        def part(y: Tensor) -> Tensor:
            return model(y[torch.tensor(random.sample(range(4), 3))]).tanh() * random.random()

        found: Tensor = torch.utils.checkpoint.checkpoint(part, x, use_reentrant=False)  # type: ignore[attr-defined]
        return found.square().mean()

    def script(diary: Diary) -> None:
        random.seed(1)
        model = nn.Linear(6, 6)
        optimizer = adamw(model)
        step = diary.step(lambda x: step_fn(model, x), model=model, optimizer=optimizer)
        for x in rows(20, 4):
            diary.write("loss", step(x))
            diary.write("random", states())
        diary.write_state(model, optimizer)

    assert both(script, replays=1, compile=False).steps_replayed == 0


def test_a_batch_that_is_read_ahead_beside_what_is_drawn() -> None:
    def step_fn(model: nn.Module, x: Tensor) -> Tensor:
        if x.isnan().any():
            raise ValueError("not a number")
        share = np.random.beta(0.4, 0.4)
        if x.sum() > 0:
            x = x * share
        return (model(x)[torch.tensor(random.sample(range(4), 2))] * share).square().mean()

    inputs = rows(80, 4)
    inputs[33] = inputs[33] * float("nan")
    trained(step_fn, inputs, least=35)


def test_what_is_drawn_and_not_used() -> None:
    def step_fn(model: nn.Module, x: Tensor) -> Tensor:
        torch.tensor(random.sample(range(4), 2))
        kept = np.random.permutation(9)[:3]
        _ = torch.from_numpy(kept) + 1, kept[random.randint(0, 3) % 3]
        np.random.rand(2, 3)
        return model(x).square().mean()

    trained(step_fn, rows(40, 4), least=25)


def test_an_error_of_what_is_drawn_and_not_used() -> None:
    """It is the step's own, at the place where it is."""

    def step_fn(model: nn.Module, x: Tensor) -> Tensor:
        kept = np.random.permutation(3)
        _ = kept[random.choices([0, 7], weights=[9, 1])[0]]
        return model(x).square().mean() * np.random.rand()

    trained(step_fn, rows(60, 4), least=25)
