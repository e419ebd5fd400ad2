"""Steps whose device never waits for the host are left as they are."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from replays import text_of
from torch import nn

from pygraph_train import GraphedStep
from pygraph_train.config import PyGraphConfig
from pygraph_train.report.step_report import StepReport
from pygraph_train.step import decisions
from pygraph_train.step.launch_bound import LaunchBoundCheck


class Machine:
    """A simulated host and device: a step holds the one for `host` seconds, the other for `whole`."""

    def __init__(self, host: float, whole: float) -> None:
        self.host, self.whole = host, whole
        self.now = 0.0
        self.done = 0.0
        self.waits = 0

    def clock(self) -> float:
        return self.now

    def step(self) -> str:
        self.done = max(self.now, self.done) + self.whole
        self.now += self.host
        return "made"

    def synchronize(self) -> None:
        self.waits += 1
        self.now = max(self.now, self.done)


def check_on(
    machine: Machine, *, compile_seconds: float | None = None, left: float | None = None
) -> tuple[LaunchBoundCheck, list[str]]:
    said: list[str] = []
    check = LaunchBoundCheck(
        machine.synchronize, compile_seconds, lambda: left, said.append, clock=machine.clock
    )
    return check, said


def run(check: LaunchBoundCheck, machine: Machine, steps: int) -> int:
    """Steps made through the check until it opened."""
    for made in range(1, steps + 1):
        assert check.run(machine.step) == "made"
        if check.open:
            return made
    return steps


def test_a_launch_bound_step_is_handed_on_after_one_measurement() -> None:
    machine = Machine(host=10.0, whole=10.5)
    check, said = check_on(machine)
    assert run(check, machine, 10) == 2
    assert check.open and not said


def test_a_compute_bound_step_is_left_alone_and_looked_at_now_and_then() -> None:
    machine = Machine(host=1e-3, whole=40e-3)
    check, said = check_on(machine)
    assert run(check, machine, 1000) == 1000
    assert not check.open
    assert said == [
        "the GPU does not wait for the host: launching a step takes 1 ms, and the step takes 40 ms"
    ]
    assert machine.waits == 2 * 4  # in steps 2, 3, 259 and 771


@pytest.mark.parametrize("share", [0.3, 0.49])
def test_a_host_that_launches_whole_steps_ahead_is_left_alone(share: float) -> None:
    machine = Machine(host=share * 10e-3, whole=10e-3)
    check, said = check_on(machine)
    assert run(check, machine, 3000) == 3000
    assert not check.open and len(said) == 1 and "the GPU does not wait for the host" in said[0]
    assert machine.waits == 2 * 5  # in steps 2, 6, 262, 774 and 1798


def test_a_loop_that_waits_for_each_step_is_not_ahead() -> None:
    machine = Machine(host=3e-3, whole=10e-3)
    check, said = check_on(machine)
    for _ in range(10):
        check.run(machine.step)
        machine.now = max(machine.now, machine.done)  # `loss.item()`
        if check.open:
            break
    assert check.open and not said


def test_one_pause_of_the_loop_does_not_open_it() -> None:
    machine = Machine(host=3e-3, whole=10e-3)
    check, _ = check_on(machine)
    for made in range(3000):
        if made % 261 == 0:  # the look in step 262 is the first one after a checkpoint, for example
            machine.synchronize()
        check.run(machine.step)
    assert not check.open


def test_graphs_are_tried_where_the_trial_is_a_small_part_of_the_run() -> None:
    for left, opens in ((20_000.0, False), (100_000.0, True)):
        machine = Machine(host=4e-3, whole=10e-3)
        check, _ = check_on(machine, left=left)
        run(check, machine, 100)
        assert check.open is opens
    machine = Machine(host=4e-3, whole=10e-3)
    check, said = check_on(machine)
    made = run(check, machine, 100_000)
    assert check.open and said and 30_000 <= made <= 35_000


def test_looks_that_find_the_same_are_made_more_and_more_rarely() -> None:
    machine = Machine(host=1e-3, whole=40e-3)
    check, _ = check_on(machine)
    looks, before = [], 0
    for made in range(1, 20_001):
        check.run(machine.step)
        if machine.waits > before:
            looks.append(made)
        before = machine.waits
    distances = [b - a for a, b in itertools.pairwise(looks)]
    assert distances == [1, 256, 512, 1024, 2048, 4096, 4096, 4096]


def test_steps_that_are_made_elsewhere_bring_the_next_look_nearer() -> None:
    machine = Machine(host=1e-3, whole=40e-3)
    check, _ = check_on(machine)
    run(check, machine, 2)
    assert check.rest == 0
    run(check, machine, 1)
    assert check.rest == 255
    check.skip(check.rest)
    assert check.rest == 0
    waits = machine.waits
    run(check, machine, 1)
    assert machine.waits == waits + 2 and check.rest == 511


def test_it_opens_when_steps_become_launch_bound() -> None:
    machine = Machine(host=1e-3, whole=40e-3)
    check, _ = check_on(machine)
    run(check, machine, 100)
    machine.whole = 1.1e-3
    assert run(check, machine, 1000) < 300
    assert check.open


def test_it_opens_where_compiling_pays() -> None:
    for left, opens in ((100.0, False), (100_000.0, True)):
        machine = Machine(host=1e-3, whole=40e-3)
        check, _ = check_on(machine, compile_seconds=120.0, left=left)
        run(check, machine, 20)
        assert check.open is opens


def test_an_unknown_number_of_steps_counts_as_many_as_were_made() -> None:
    machine = Machine(host=1e-3, whole=40e-3)
    check, _ = check_on(machine, compile_seconds=120.0)
    made = run(check, machine, 20_000)
    assert check.open and 9_000 <= made <= 9_000 + 256


@pytest.mark.parametrize(
    ("options", "engine", "wanted"),
    [
        ({}, "cuda", True),
        ({}, "emulated", False),
        ({"compile": False}, "cuda", True),
        ({"compile": True}, "cuda", False),
        ({"fuse": "on"}, "cuda", False),
        ({"optimizer": "on"}, "cuda", False),
        ({"verify": "always"}, "cuda", False),
    ],
)
def test_only_undecided_options_ask(options: dict[str, Any], engine: str, wanted: bool) -> None:
    assert LaunchBoundCheck.wanted(PyGraphConfig(**options), engine) is wanted


def trained(config: PyGraphConfig | None) -> tuple[list[torch.Tensor], StepReport | None]:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss_of(x: torch.Tensor) -> torch.Tensor:
        return model(x).square().mean()

    step = GraphedStep(loss_of, model=model, optimizer=optimizer, config=config) if config else None
    for i in range(30):
        x = torch.full((3, 4), float(i % 5))
        if step is not None:
            step(x)
        else:
            optimizer.zero_grad()
            loss_of(x).backward()
            optimizer.step()
    return list(model.parameters()), step.report() if step is not None else None


@pytest.mark.parametrize(("whole", "replays"), [(40e-3, False), (2.5e-3, False), (1.1e-3, True)])
def test_the_runner_leaves_such_steps_untouched(
    whole: float, replays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(host=1e-3, whole=whole)

    class Simulated(LaunchBoundCheck):
        def __init__(self, synchronize: Any, compile_seconds: Any, steps_left: Any, settled: Any) -> None:
            super().__init__(machine.synchronize, compile_seconds, steps_left, settled, clock=machine.clock)

        @staticmethod
        def wanted(config: PyGraphConfig, engine: str) -> bool:
            return True

        def run(self, step: Any) -> Any:
            return super().run(lambda: (machine.step(), step())[1])

    monkeypatch.setattr(decisions, "LaunchBoundCheck", Simulated)
    plain, _ = trained(None)
    ours, report = trained(PyGraphConfig(engine="emulated"))
    assert all(map(torch.equal, plain, ours))
    assert report is not None and (report.steps_replayed > 0) is replays
    if not replays:
        assert report.plan == "F B O"
        assert "the GPU does not wait for the host" in text_of(report)
        assert report.phases()[0].why == report.why_nothing
