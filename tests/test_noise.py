"""Steps whose runs differ among themselves: a replay may differ as much, and no more."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from replays import text_of
from torch import Tensor, nn
from training import CONFIG, Net, adamw, batches, loss_of

from pygraph_train import GraphedStep, StepReport
from pygraph_train.graphs.emulated import EmulatedEngine, EmulatedGraph
from pygraph_train.step.capture_maker import CaptureMaker
from pygraph_train.step.comparing import Comparing
from pygraph_train.step.inputs import StaticInputs
from pygraph_train.verification import SAFETY, Fingerprint, PlainRuns


def run_of(
    noise: float, seed: int, *, outlier: float = 0.0, dtype: torch.dtype = torch.float32
) -> Fingerprint:
    """A loss and gradients of four sizes, one of which is a single number, with relative noise."""
    fixed, drawn = torch.Generator().manual_seed(0), torch.Generator().manual_seed(seed)
    gradients = []
    for index, size in enumerate((4000, 300, 8, 1)):
        g = torch.randn(size, generator=fixed, dtype=torch.float64) * 10.0**-index
        g = g + noise * g.norm() / size**0.5 * torch.randn(size, generator=drawn, dtype=torch.float64)
        gradients.append((g * (1 + outlier * (index == 1))).to(dtype))
    return Fingerprint.of(torch.tensor(2.5), gradients)


def plain_runs(noise: float, **options: Any) -> PlainRuns:
    runs = PlainRuns(run_of(noise, 1, **options))
    seed = 2
    found = run_of(noise, 50, **options)
    while not runs.enough(found):
        runs.add(run_of(noise, seed, **options))
        seed += 1
    return runs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("noise", [1e-5, 1.5e-3, 1e-2])
def test_runs_of_one_kind_are_accepted(noise: float, dtype: torch.dtype) -> None:
    runs = plain_runs(noise, dtype=dtype)
    refused = [runs.refuse(run_of(noise, seed, dtype=dtype)) for seed in range(100, 200)]
    assert [why for why in refused if why] == []


@pytest.mark.parametrize("noise", [1e-5, 1.5e-3])
def test_what_differs_by_more_is_refused_with_both_figures(noise: float) -> None:
    runs = plain_runs(noise)
    why = runs.refuse(run_of(noise, 100, outlier=4 * SAFETY * noise))
    assert why is not None
    found = re.fullmatch(r"gradient 1 differs by (\S+) of its size, and runs without the graph by (\S+)", why)
    assert found, why
    apart, usual = map(float, found.groups())
    assert apart > SAFETY * usual and noise / 2 < usual < 4 * noise


def test_nothing_but_equal_bits_is_accepted_where_plain_runs_agree() -> None:
    runs = plain_runs(0.0)
    assert len(runs._runs) == PlainRuns.MOST_THAT_AGREE, "rare noise shows in one run out of many"
    assert runs.refuse(run_of(0.0, 7)) is None
    why = runs.refuse(run_of(1e-7, 7))
    assert why is not None and "6 runs without the graph agree bit for bit" in why


def test_noise_that_few_runs_show_in_a_gradient_is_waited_for() -> None:
    """One gradient is noisy in every run, another one in every fourth."""

    def run(seed: int) -> Fingerprint:
        noisy = torch.ones(500) + 1e-4 * torch.randn(500, generator=torch.Generator().manual_seed(seed))
        rare = torch.ones(500)
        rare[seed % 500] += 1e-3 * (seed % 4 == 0)
        return Fingerprint.of(torch.tensor(1.0), [noisy, rare])

    found, runs = run(8), PlainRuns(run(1))
    for seed in range(2, 12):
        if runs.enough(found):
            break
        runs.add(run(seed))
    assert len(runs._runs) == 4 and runs.refuse(found) is None

    runs = PlainRuns(run(1))
    for seed in (2, 3, 5, 6, 7, 9, 10, 11, 13):
        assert not runs.enough(found)
        runs.add(run(seed))
    assert runs.enough(found) and "gradient 1 differs" in (runs.refuse(found) or "")


def test_runs_that_differ_by_much_show_nothing() -> None:
    why = plain_runs(0.3).refuse(run_of(0.3, 100))
    assert why is not None and "runs without the graph by too much" in why


def test_a_gradient_that_plain_runs_agree_on_may_differ_by_roundings_only() -> None:
    def run(seed: int, last: float) -> Fingerprint:
        generator = torch.Generator().manual_seed(seed)
        noisy = torch.ones(500) + 1e-3 * torch.randn(500, generator=generator)
        return Fingerprint.of(torch.ones(()), [noisy, torch.full((4,), last)])

    runs = PlainRuns(run(1, 1.0))
    runs.add(run(2, 1.0))
    runs.add(run(3, 1.0))
    assert runs.refuse(run(4, 1.0 + 2e-7)) is None
    assert "gradient 1" in (runs.refuse(run(4, 1.0 + 1e-4)) or "")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_overflows_count_as_equal_and_as_different_from_numbers(value: float) -> None:
    def run(seed: int, last: float) -> Fingerprint:
        generator = torch.Generator().manual_seed(seed)
        noisy = torch.ones(500) + 1e-3 * torch.randn(500, generator=generator)
        return Fingerprint.of(torch.tensor(last), [noisy, torch.full((4,), last)])

    runs = PlainRuns(run(1, value))
    runs.add(run(2, value))
    runs.add(run(3, value))
    assert runs.refuse(run(4, value)) is None
    assert "by inf" in (runs.refuse(run(4, 1.0)) or "")


def test_other_gradients_are_refused() -> None:
    one, two = Fingerprint.of(torch.ones(()), [torch.ones(3)]), Fingerprint.of(torch.ones(()), [])
    runs = PlainRuns(one)
    assert runs.refuse(two) == "0 gradients instead of 1"
    assert PlainRuns(two).refuse(two) is None


# --- whole steps on the emulated engine, with a kernel that adds noise from outside of the random state ------


class _Noise:
    amplitude = 0.0
    draws = torch.Generator()


@torch.library.custom_op("tests::noisy", mutates_args=())
def noisy(x: Tensor) -> Tensor:
    return x * (1 + _Noise.amplitude * torch.randn(x.shape, generator=_Noise.draws))


@noisy.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


torch.library.register_autograd(
    "tests::noisy",
    lambda ctx, grad: torch.ops.tests.noisy(grad),
    setup_context=lambda ctx, inputs, output: None,
)


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = Net(dropout=0.0)

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.tests.noisy(self.net(x))  # type: ignore[no-any-return]


@pytest.fixture
def noise() -> Iterator[type[_Noise]]:
    _Noise.draws.manual_seed(0)
    yield _Noise
    _Noise.amplitude = 0.0


@pytest.fixture
def references(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many runs without a graph were made to compare with."""
    made: list[int] = []
    reference = CaptureMaker.reference

    def counted(self: CaptureMaker, *args: Any, **kwargs: Any) -> Fingerprint:
        made.append(1)
        return reference(self, *args, **kwargs)

    monkeypatch.setattr(CaptureMaker, "reference", counted)
    return made


def train(model: nn.Module, steps: int = 40, **options: Any) -> StepReport:
    torch.manual_seed(0)
    optimizer = adamw(model)
    config = dataclasses.replace(CONFIG, **options)
    with GraphedStep(loss_of(model), model=model, optimizer=optimizer, config=config) as step:
        for batch in batches(steps):
            step(batch)
        return step.report()


def test_a_step_whose_runs_differ_is_replayed(noise: type[_Noise], references: list[int]) -> None:
    noise.amplitude = 1e-3
    report = train(Noisy())
    assert report.steps_replayed >= 30 and report.plan == report.running_plan == "{F B O}", str(report)
    assert "runs of a step without a graph differ among themselves" in text_of(report)
    assert len(references) == PlainRuns.ENOUGH
    assert not report.fallbacks, str(report)


@pytest.mark.parametrize(("amplitude", "runs"), [(1e-3, PlainRuns.ENOUGH), (0.0, 2)])
def test_where_graphs_share_memory_runs_come_before_the_capture(
    amplitude: float, runs: int, noise: type[_Noise], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run after the capture would need its memory beside that of the graph."""
    made: list[str] = []
    for owner, name in ((CaptureMaker, "reference"), (EmulatedEngine, "capture"), (EmulatedGraph, "replay")):
        own = getattr(owner, name)

        def told(self: Any, *args: Any, _own: Any = own, _name: str = name, **kwargs: Any) -> Any:
            made.append(_name)
            return _own(self, *args, **kwargs)

        monkeypatch.setattr(owner, name, told)
    monkeypatch.setattr(EmulatedEngine, "shares_memory", True)
    noise.amplitude = amplitude
    report = train(Noisy())
    assert report.steps_replayed >= 30 and not report.fallbacks, str(report)
    assert made == ["reference"] * runs + ["capture"] + ["replay"] * report.steps_replayed
    assert ("differ among themselves" in text_of(report)) is (amplitude > 0)


@pytest.mark.notices("any difference of a replay counts as noise")
def test_a_replay_that_differs_by_more_than_its_step_is_refused_with_both_figures(
    noise: type[_Noise], monkeypatch: pytest.MonkeyPatch
) -> None:
    replay = EmulatedGraph.replay

    def louder(self: EmulatedGraph) -> None:
        noise.amplitude = 3e-2
        replay(self)
        noise.amplitude = 1e-4

    monkeypatch.setattr(EmulatedGraph, "replay", louder)
    noise.amplitude = 1e-4
    report = train(Noisy())
    assert report.steps_replayed == 0, str(report)
    (why,) = [f.reason for f in report.fallbacks if "the first replay of {F B O} differs" in f.reason]
    assert re.search(r"differs by \S+ of its size, and runs without the graph by \d", why), why


@pytest.fixture
def replays(noise: type[_Noise], monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What the noise of the next replays is multiplied with."""
    factors: list[float] = []
    replay = EmulatedGraph.replay

    def louder(self: EmulatedGraph) -> None:
        usual = noise.amplitude
        noise.amplitude *= factors.pop(0) if factors else 1.0
        replay(self)
        noise.amplitude = usual

    monkeypatch.setattr(EmulatedGraph, "replay", louder)
    return factors


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Has an entry for each replay that was compared."""
    made: list[int] = []
    left = Comparing._left_by

    def counted(self: Comparing, capture: Any) -> Fingerprint:
        made.append(1)
        return left(self, capture)

    monkeypatch.setattr(Comparing, "_left_by", counted)
    return made


@pytest.mark.parametrize("rare", [[12.0], [12.0, 12.0], [1.0, 12.0], [12.0, 1.0, 1.0]])
def test_what_one_replay_of_several_meets_is_no_difference_of_the_graph(
    rare: list[float], noise: type[_Noise], replays: list[float], compared: list[int]
) -> None:
    """As an activation that comes to the other side of zero, in one of many runs."""
    noise.amplitude = 1e-5
    replays += rare
    report = train(Noisy())
    assert report.steps_replayed >= 30 and not report.fallbacks, str(report)
    assert len(compared) in (2, 3)


@pytest.mark.notices("any difference of a replay counts as noise")
def test_what_each_replay_meets_is_a_difference_of_the_graph(
    noise: type[_Noise], replays: list[float], compared: list[int]
) -> None:
    noise.amplitude = 1e-5
    replays += [20.0] * 3
    report = train(Noisy(), optimizer="off")
    assert "{F B" not in report.plan and "the first replay of {F B" in text_of(report), str(report)
    assert len(compared) == 3


@pytest.mark.notices("any difference of a replay counts as noise")
def test_a_graph_that_reads_other_memory_is_refused_at_once(
    noise: type[_Noise], compared: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    load, loaded = StaticInputs.load, []

    def wrong_in_replays(self: StaticInputs, leaves: Any) -> None:
        load(self, leaves)
        if loaded:
            self.tensors[0][0].mul_(1.1)
        loaded.append(1)

    monkeypatch.setattr(StaticInputs, "load", wrong_in_replays)
    noise.amplitude = 1e-5
    report = train(Noisy(), optimizer="off")
    assert "{F B" not in report.plan and "the first replay of {F B" in text_of(report), str(report)
    assert len(compared) == 1


@pytest.mark.notices("any difference of a replay counts as noise")
def test_a_step_whose_runs_agree_has_no_tolerance(
    noise: type[_Noise], monkeypatch: pytest.MonkeyPatch, references: list[int]
) -> None:
    replay = EmulatedGraph.replay

    def louder(self: EmulatedGraph) -> None:
        noise.amplitude = 1e-5
        replay(self)
        noise.amplitude = 0.0

    monkeypatch.setattr(EmulatedGraph, "replay", louder)
    report = train(Noisy())
    assert report.steps_replayed == 0, str(report)
    assert "agree bit for bit" in text_of(report)
    assert len(references) == PlainRuns.MOST_THAT_AGREE


def test_a_comparison_that_agrees_at_once_makes_one_run(references: list[int]) -> None:
    assert train(Net()).steps_replayed >= 30
    assert len(references) == 1


def test_runs_for_comparison_leave_training_as_it_is(
    monkeypatch: pytest.MonkeyPatch, references: list[int]
) -> None:
    """The first replay is undone, compared with more runs, and made again: the same parameters in the end."""

    def trained() -> list[Tensor]:
        torch.compiler.reset()
        torch.manual_seed(3)
        model = Net()
        assert train(model).steps_replayed >= 30
        return [*model.state_dict().values(), torch.get_rng_state()]

    expected, once = trained(), len(references)
    compare = Fingerprint.compare
    asked: list[int] = []

    def differs_first(self: Fingerprint, other: Fingerprint, *, bits: bool = False) -> str | None:
        asked.append(1)
        return "planted" if len(asked) == 1 else compare(self, other, bits=bits)

    monkeypatch.setattr(Fingerprint, "compare", differs_first)
    found = trained()
    assert len(asked) == 2 and len(references) == once + PlainRuns.MOST_THAT_AGREE
    assert all(map(torch.equal, expected, found))


def test_without_memory_for_further_runs_the_step_runs_without_a_graph(
    noise: type[_Noise], monkeypatch: pytest.MonkeyPatch
) -> None:
    reference, made = CaptureMaker.reference, []

    def once(self: CaptureMaker, *args: Any, **kwargs: Any) -> Fingerprint:
        made.append(1)
        if len(made) > 1:
            raise torch.OutOfMemoryError("planted")
        return reference(self, *args, **kwargs)

    monkeypatch.setattr(CaptureMaker, "reference", once)
    noise.amplitude = 1e-4
    report = train(Noisy())
    assert report.steps_replayed == 0 and report.steps == 40 and len(made) == 2, str(report)
    assert "memory" in text_of(report)


@pytest.mark.notices("any difference of a replay counts as noise")
@pytest.mark.parametrize("options", [{}, {"optimizer": "off"}, {"fuse": "on"}])
def test_the_plan_of_the_report_is_the_plan_that_runs_after_a_refusal(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    load, loaded = StaticInputs.load, []

    def wrong_in_replays(self: StaticInputs, leaves: Any) -> None:
        load(self, leaves)
        if loaded:  # the first time it is for the capture and what that is compared with
            self.tensors[-1].zero_()
        loaded.append(1)

    monkeypatch.setattr(StaticInputs, "load", wrong_in_replays)
    model = Net(dropout=0.0)
    optimizer = adamw(model)
    seen = []
    config = dataclasses.replace(CONFIG, **options)
    with GraphedStep(loss_of(model), model=model, optimizer=optimizer, config=config) as step:
        for batch in batches(40):
            step(batch)
            seen.append((step.report().plan, step.report().running_plan))
        report = step.report()
    assert "differs from the step without a graph" in report.fallbacks[0].reason, str(report)
    assert report.steps_replayed == 0 and len(report.captures) >= 1
    assert all("{F B" not in plan for planned in seen for plan in planned), seen
    assert seen[-1][0] == seen[-1][1] == report.plan != "F B O", seen
