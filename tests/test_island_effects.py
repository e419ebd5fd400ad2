"""An island's Python happens as often as in plain training, or there is no island."""

from __future__ import annotations

import io
import itertools
import logging
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_islands import EXPERTS, WIDTH, Experts, Model, a_batch, loss_of
from torch import Tensor, nn
from training import Diary, both, line_of, sgd

NOTED: list[int] = []
COUNTS = {"calls": 0}
SCALES = {"one": 1.0, "two": 2.0}
PER_EXPERT = torch.zeros(EXPERTS)
FILE = io.StringIO()
TOTAL = 0
LOG = logging.getLogger("island effects")
LOG.setLevel(logging.INFO)
LOG.propagate = False


class Handler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        FILE.write(record.getMessage())


LOG.addHandler(Handler())


class Object:
    calls = 0


OBJECT = Object()


class Appends(Experts):
    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        found = super().forward(x, chosen, weights)
        NOTED.append(len(chosen))
        return found


class AppendsRarely(Experts):
    """Not in the steps that are watched."""

    calls: Any = None

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        found = super().forward(x, chosen, weights)
        if not self.dropout:
            note()
        return found


def note() -> None:
    NOTED.append(1)


class CountsInDict(Experts):
    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        found = super().forward(x, chosen, weights)
        COUNTS["calls"] += 1
        return found


class CountsInGlobal(Experts):
    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        global TOTAL
        found = super().forward(x, chosen, weights)
        TOTAL += 1
        return found


class CountsInObject(Experts):
    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        found = super().forward(x, chosen, weights)
        OBJECT.calls += 1
        return found


class CountsInClass(Experts):
    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        found = super().forward(x, chosen, weights)
        type(self).calls = getattr(self, "calls", 0) + 1  # type: ignore[attr-defined]
        return found


class CountsDeep(Experts):
    def __init__(self) -> None:
        super().__init__()
        self.noted: dict[str, list[int]] = {"calls": []}

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        found = super().forward(x, chosen, weights)
        self.noted["calls"].append(1)
        NOTED[:] = self.noted["calls"]
        return found


class CountsInDefault(Experts):
    def forward(  # type: ignore[override]
        self, x: Tensor, chosen: Tensor, weights: Tensor, noted: list[int] = NOTED
    ) -> Tensor:
        found = super().forward(x, chosen, weights)
        noted.append(1)
        return found


class Iterates(Experts):
    def __init__(self) -> None:
        super().__init__()
        self.numbers = itertools.count(1)

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        return super().forward(x, chosen, weights) * self.numbers.__next__()


class Prints(Experts):
    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        found = super().forward(x, chosen, weights)
        print("called", file=FILE)
        return found


class Logs(Experts):
    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        found = super().forward(x, chosen, weights)
        LOG.info("called")
        return found


class Warns(Experts):
    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        found = super().forward(x, chosen, weights)
        if NOTED:
            warnings.warn("noted", stacklevel=2)
        return found


class CountsInTensor(Experts):
    """Neither a parameter nor a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = torch.zeros(EXPERTS)

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        self.seen += torch.bincount(chosen.flatten(), minlength=EXPERTS)
        return super().forward(x, chosen, weights) + self.seen[0] * 1e-3


class CountsInGlobalTensor(Experts):
    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        PER_EXPERT.add_(torch.bincount(chosen.flatten(), minlength=EXPERTS))
        return super().forward(x, chosen, weights)


class CountsInFrozen(Experts):
    def __init__(self) -> None:
        super().__init__()
        self.seen = nn.Parameter(torch.zeros(EXPERTS), requires_grad=False)

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        self.seen.data.add_(torch.bincount(chosen.flatten(), minlength=EXPERTS))
        return super().forward(x, chosen, weights)


def counts_in_closure() -> nn.Module:
    calls = 0

    class Counts(Experts):
        def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
            nonlocal calls
            found = Experts.forward(self, x, chosen, weights)
            calls += 1
            OBJECT.calls = calls
            return found

    return Counts()


def train(
    make: Callable[[], nn.Module], each: Callable[[nn.Module, int], None] | None = None, **options: Any
) -> Any:
    """Everything that the classes above write is compared as well."""

    def script(diary: Diary) -> None:
        global TOTAL
        TOTAL, OBJECT.calls, COUNTS["calls"] = 0, 0, 0
        NOTED.clear()
        PER_EXPERT.zero_()
        FILE.truncate(0)
        FILE.seek(0)
        model = Model(make())
        CountsInClass.calls = 0  # type: ignore[attr-defined]
        optimizer = sgd(model)
        step = diary.step(lambda batch: loss_of(model, batch), model=model, optimizer=optimizer)
        generator = torch.Generator().manual_seed(4)
        for number in range(30):
            if each is not None:
                each(model, number)
            diary.write("loss", step(a_batch(generator)))
            counts = len(NOTED), dict(COUNTS), TOTAL, OBJECT.calls, getattr(CountsInClass, "calls", 0)
            diary.write("effects", (*counts, PER_EXPERT, FILE.getvalue()))
            diary.write_state(model, optimizer)

    return both(script, **options)


EFFECTS = [
    (Appends, "NOTED.append"),
    (CountsInDict, "COUNTS["),
    (CountsInGlobal, "TOTAL +="),
    (CountsInObject, "OBJECT.calls"),
    (Prints, "print("),
    (Logs, "LOG.info"),
    (Warns, "warnings.warn"),
    (CountsInGlobalTensor, "PER_EXPERT.add_"),
]


@pytest.mark.parametrize(("make", "line"), EFFECTS)
@pytest.mark.parametrize("verify", ["off", "sample"])
def test_effects_that_the_code_shows(make: Any, line: str, verify: str) -> None:
    report = train(make, replays=1, verify=verify)
    assert not report.steps_replayed
    refused = report.fallbacks[0]
    assert f"{make.__name__} cannot run" in refused.reason and "more often" in refused.reason, str(report)
    assert refused.where == line_of(make, line) and "behind the step" in refused.fix, str(report)


@pytest.mark.parametrize(
    "make",
    [
        AppendsRarely,
        CountsInClass,
        CountsDeep,
        CountsInDefault,
        Iterates,
        CountsInTensor,
        CountsInFrozen,
        counts_in_closure,
    ],
)
def test_effects_on_objects(make: Any) -> None:
    report = train(make, replays=1)
    assert not report.steps_replayed
    assert "more often than in plain training" in report.fallbacks[0].reason, str(report)


def test_an_effect_that_no_watched_step_has() -> None:
    def later(model: nn.Module, number: int) -> None:
        model.blocks[0].experts.dropout = 0.1 if number < 10 else 0.0  # type: ignore[index,union-attr]

    report = train(AppendsRarely, later, replays=1)
    assert report.fallbacks[0].where == line_of(note, "NOTED.append"), str(report)


class Reads(Experts):
    """What is read alone does no harm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.kinds = ["one", "two"]

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        found = (
            self.norm(super().forward(x, chosen, weights))
            * SCALES["two"]
            * SCALES[self.kinds[0]]
            * len(SCALES)
        )
        parts = [found * SCALES.get(kind, 1.0) for kind in self.kinds if kind in SCALES]
        while len(parts) > 1:
            parts.append(parts.pop() + parts.pop())
        scaled = self.kinds and SCALES and self.training  # a copy of a reference, and no write
        return parts[0] if scaled else parts[0] * 2


def test_what_is_read_does_no_harm() -> None:
    report = train(Reads, replays=20, plan="{F B O}")
    assert not report.fallbacks, str(report)


def test_what_the_loop_changes_between_steps_is_read() -> None:
    def change(model: nn.Module, number: int) -> None:
        SCALES["two"] = 2.0 + number / 10

    try:
        train(Reads, change, replays=20, plan="{F B O}")
    finally:
        SCALES["two"] = 2.0


@pytest.mark.parametrize("inside", [False, True])
def test_a_hook_that_comes_in_mid_run(inside: bool) -> None:
    """Also where it is a module inside of the island that gets it, which no guard of the trace is about."""

    def add(model: nn.Module, number: int) -> None:
        if number == 15:
            experts: Any = model.blocks[0].experts  # type: ignore[index,union-attr]
            (experts.norm if inside else experts).register_forward_hook(lambda *_: NOTED.append(1))

    report = train(Reads, add, replays=8)
    assert "hooks" in report.fallbacks[-1].reason, str(report)


class EndsInLinear(Experts):
    def __init__(self) -> None:
        super().__init__()
        self.end = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        return self.end(super().forward(x, chosen, weights))  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", ["end", "up"])
def test_parameters_of_an_island_that_are_frozen_and_trained_again(name: str) -> None:
    """A graph of steps in which they were frozen must not serve others: guards have to see it."""

    def freeze(model: nn.Module, number: int) -> None:
        part: Any = getattr(model.blocks[0].experts, name)  # type: ignore[index,union-attr]
        part.requires_grad_(number % 10 < 7)

    report = train(EndsInLinear, freeze, replays=14, plan="{F B O}")
    assert not report.fallbacks, str(report)


class HooksArgument(Experts):
    """In plain training the hook acts on the gradients of all uses of the argument."""

    late = False

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        if self.late and x.requires_grad:
            x.register_hook(lambda grad: grad * 0.5)
        return super().forward(x, chosen, weights)


class HooksArgumentAtOnce(HooksArgument):
    late = True


def test_a_gradient_hook_of_an_argument() -> None:
    report = train(HooksArgumentAtOnce, replays=1, verify="off")
    assert not report.steps_replayed, str(report)
    assert "gradient hooks act on its arguments" in report.fallbacks[0].reason, str(report)


def test_a_gradient_hook_of_an_argument_that_comes_later() -> None:
    def begin(model: nn.Module, number: int) -> None:
        model.blocks[0].experts.late = number in (15, 16, 20)  # type: ignore[index,union-attr]

    report = train(HooksArgument, begin, replays=18, plan="{F B O}", verify="off")
    assert not report.fallbacks, str(report)
