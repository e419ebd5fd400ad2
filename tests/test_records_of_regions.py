"""The records of regions do not pile up in a process, and each report has those of its own loop."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

from pygraph_train import backend
from pygraph_train.integrations.loop_report import LoopReport
from pygraph_train.regions import inductor


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch.compiler.reset()
    backend.reset()


def trained() -> None:
    """One training of a sweep; nothing of it is left."""
    torch.compiler.reset()
    model = nn.Linear(4, 4)
    compiled = torch.compile(model, backend="pygraph", options={"engine": "emulated", "warmup_runs": 1})
    for _ in range(4):
        compiled(torch.randn(2, 4)).sum().backward()


def test_a_sweep_of_trainings_does_not_make_the_report_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inductor, "_MOST_OVER", 4)
    seen = []
    for _ in range(8):
        trained()
        rows = backend.report().regions
        assert rows[-1].phase == "backward" and rows[-1].replays > 0, rows
        gc.collect()
        seen.append(len(rows))
    assert seen[:3] == [2, 4, 6] and max(seen[4:]) <= 8, seen


def test_regions_that_exist_stay_in_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inductor, "_MOST_OVER", 0)
    models = [nn.Sequential(nn.Linear(4, size), nn.ReLU()) for size in (4, 5, 6)]
    calls = [torch.compile(m, backend="pygraph", options={"engine": "emulated"}) for m in models]
    for call in calls:
        call(torch.randn(2, 4)).sum().backward()
    assert len(backend.report().regions) == 6, backend.report()


def test_a_report_knows_new_records_from_old_ones_after_a_reset() -> None:
    trained()
    report = LoopReport()
    old = {id(row) for row in backend.report().regions}
    backend.reset()
    torch.compiler.reset()
    gc.collect()
    for _ in range(8):
        trained()
    assert not old & {id(row) for row in report.regions()}
    assert len(report.regions()) == 16
