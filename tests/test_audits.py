"""A graph that goes wrong long after its first replay is found, and looking for that changes nothing."""

from __future__ import annotations

import dataclasses
import math
import warnings
from typing import Any

import pytest
import torch
from training import CONFIG, Diary, Net, adamw, batches, both, loss_of, replayed

from pygraph_train import GraphedStep
from pygraph_train.graphs.emulated import EmulatedGraph
from pygraph_train.step.advancing import Advancing
from pygraph_train.step.inputs import StaticInputs
from pygraph_train.verification import Audits, Fingerprint


def test_audits_come_at_growing_intervals() -> None:
    audits = Audits("sample", now=0.0)
    audits.took(0.5, first=True)
    steps, at = 0, []
    while len(at) < 4:
        steps += 1
        audits.left -= 1
        if audits.left <= 0 and audits.due(now=1e6):
            audits.took(0.5, first=False)
            at.append(steps)
    assert at == [64, 192, 448, 960]


def test_audits_take_at_most_their_share_of_the_time() -> None:
    audits = Audits("sample", now=0.0)
    audits.took(0.3, first=True)
    spent, cost = 0.0, 0.4
    for step in range(1, 400_000):
        now = 0.005 * step + spent
        audits.left -= 1
        if audits.left <= 0 and audits.due(now):
            audits.took(cost, first=False)
            spent += cost
            cost = 0.7 - cost  # the next one takes 0.3 s or 0.4 s
            assert spent <= Audits.SHARE * now + 1e-9
    assert spent >= 0.3 * 5


@pytest.mark.parametrize(("verify", "compared"), [("off", 0), ("first", 0), ("always", 99)])
def test_other_kinds_of_verification_make_no_audits(verify: str, compared: int) -> None:
    audits = Audits(verify, now=0.0)
    audits.took(0.0, first=True)
    found = 0
    for _ in range(99):
        if audits.left <= 0 and audits.due(now=1e9):
            audits.took(0.0, first=False)
            found += 1
        else:
            audits.left -= 1
    assert found == compared


def test_the_imaginary_part_of_gradients_is_compared() -> None:
    loss, gradient = torch.zeros(()), torch.complex(torch.ones(4), torch.ones(4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        expected = Fingerprint.of(loss, [gradient, gradient.conj()])
        assert expected.compare(Fingerprint.of(loss, [gradient.clone(), gradient.conj()])) is None
        other = torch.complex(torch.ones(4), torch.full((4,), -1.0))
        assert expected.compare(Fingerprint.of(loss, [other, gradient.conj()])) is not None


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Audits, "FIRST", 3)
    monkeypatch.setattr(Audits, "SHARE", math.inf)


def test_an_audit_that_is_put_off_costs_a_look_at_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Audits, "FIRST", 3)
    monkeypatch.setattr(Audits, "SHARE", 0.0)
    away: list[int] = []
    advance = Advancing.__call__

    def counted(self: Advancing, *args: Any) -> Any:
        away.append(self._training.step)
        return advance(self, *args)

    monkeypatch.setattr(Advancing, "__call__", counted)

    def script(diary: Diary) -> None:
        model = Net()
        optimizer = adamw(model)
        step = diary.step(loss_of(model), model=model, optimizer=optimizer)
        for batch in batches(60):
            diary.write("loss", step(batch))

    report = both(script, replays=50, plan="{F B O}")
    assert report.audits == 0
    assert max(away) <= 10, "steps that are replayed never leave the way of replays"


@pytest.mark.usefixtures("often")
@pytest.mark.parametrize("accumulate", [False, True])
def test_an_audit_changes_nothing(accumulate: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    audited: list[bool] = []
    took = Audits.took

    def counted(self: Audits, seconds: float, *, first: bool) -> None:
        audited.append(not first)
        took(self, seconds, first=first)

    monkeypatch.setattr(Audits, "took", counted)

    def script(diary: Diary) -> None:
        model = Net()
        optimizer = adamw(model)
        step = diary.step(loss_of(model), model=model, optimizer=optimizer, max_grad_norm=1.0)
        for index, batch in enumerate(batches(60)):
            made = step.accumulate if accumulate and index % 3 < 2 else step
            diary.write("loss", made(batch))
            diary.write_state(model, optimizer)

    report = both(script, replays=40)
    assert sum(audited) >= 3, "nothing was audited"
    replayed(report, least=30)


@pytest.mark.usefixtures("often")
@pytest.mark.parametrize("verify", ["sample", "always"])
def test_an_audit_of_the_optimizers_graph_changes_nothing(verify: str) -> None:
    def script(diary: Diary) -> None:
        model = Net()
        optimizer = adamw(model)
        step = diary.step(loss_of(model), model=model, optimizer=optimizer, max_grad_norm=1.0)
        for batch in batches(60):
            diary.write("loss", step(batch))
            diary.write_state(model, optimizer)

    report = both(script, forward="off", backward="off", verify=verify, replays=40)
    assert report.audits >= 3 and report.optimizer_steps_replayed >= 50, str(report)


@pytest.mark.usefixtures("often")
def test_a_graph_of_the_optimizer_that_goes_wrong_later_is_turned_off() -> None:
    """Three steps with nothing done, at most: until the next audit."""
    model = Net(dropout=0.0)
    optimizer = adamw(model)
    config = dataclasses.replace(CONFIG, forward="off", backward="off")
    step = GraphedStep(loss_of(model), model=model, optimizer=optimizer, config=config)
    data = batches(60)
    for batch in data[:20]:
        step(batch)
    assert step.report().optimizer_steps_replayed >= 10, str(step.report())
    still = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EmulatedGraph, "replay", lambda self: None)
        for batch in data[20:]:
            before = model.first.weight.detach().clone()
            step(batch)
            still += torch.equal(before, model.first.weight)
    found = [f for f in step.report().fallbacks if "of {O} leaves other parameters" in f.reason]
    assert found and found[0].reason.startswith("replay "), str(step.report())
    assert still <= 24, "audits come at doubling intervals"


@pytest.mark.usefixtures("often")
def test_a_graph_that_goes_wrong_later_is_turned_off(caplog: pytest.LogCaptureFixture) -> None:
    load = StaticInputs.load
    broken: list[int] = []

    def stale(self: StaticInputs, leaves: Any) -> None:
        if not broken:
            load(self, leaves)

    losses = {}
    for kind in ("plain", "graphed"):
        torch.manual_seed(0)
        diary = Diary(None if kind == "plain" else CONFIG)
        model = Net(dropout=0.0)
        optimizer = adamw(model)
        step = diary.step(loss_of(model), model=model, optimizer=optimizer)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(StaticInputs, "load", stale)
            for index, batch in enumerate(batches(40)):
                if kind == "graphed" and index == 20:
                    broken.append(index)
                losses.setdefault(kind, []).append(step(batch).item())
    report = step.report()
    assert losses["plain"][:20] == losses["graphed"][:20]
    found = [f for f in report.fallbacks if "differs" in f.reason]
    assert found[0].reason.startswith("replay ") and found[0].step > 21
    assert report.steps_replayed <= found[-1].step, "no plan with forward and backward in one graph is left"
    assert "differs" in caplog.text
