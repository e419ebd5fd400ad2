"""What the library does beside training never ends a training: reports, loggers, progress bars."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import LambdaCallback, ProgressBar
from lightning_training import MemoryLogger, emulated, fit, parity, replayed

from pygraph_train import StepReport, boundary
from pygraph_train.integrations.accelerate import plugin
from pygraph_train.report.announcements import show

TOLD = "something that no step needs has failed in pygraph-train"


@pytest.fixture(autouse=True)
def _nothing_was_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(boundary, "_quiet", set())


def told(caplog: pytest.LogCaptureFixture, what: str) -> None:
    """Assert that the log has one line of it."""
    lines = [line for record in caplog.records if TOLD in (line := record.getMessage())]
    assert len(lines) == 1 and what in lines[0], lines


class Picky(MemoryLogger):
    """A logger of a user who knows the names of all metrics."""

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        if any(name.startswith("pygraph/") for name in metrics):
            raise KeyError("unknown metric")
        super().log_metrics(metrics, step)


class Broken(ProgressBar):
    """A progress bar that cannot print."""

    def print(self, *args: Any, **kwargs: Any) -> None:
        raise OSError("the terminal is gone")


def test_a_trainer_that_never_logs() -> None:
    replayed(parity(config={"log_metrics": True}, replays=39, logger=MemoryLogger(), log_every_n_steps=0))


def test_a_logger_that_raises(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "pygraph_train"):
        replayed(parity(config={"log_metrics": True}, replays=39, logger=Picky()))
    told(caplog, "KeyError: 'unknown metric'")


def test_a_progress_bar_that_raises(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "pygraph_train"):
        replayed(parity(make_callbacks=lambda: [Broken()], replays=39, enable_progress_bar=True))
    told(caplog, "OSError: the terminal is gone")


def test_a_report_for_a_stdout_that_is_closed(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    closed = (tmp_path / "closed").open("w")
    closed.close()
    with caplog.at_level(logging.WARNING, "pygraph_train"), monkeypatch.context() as patch:
        end = LambdaCallback(on_train_end=lambda *_: patch.setattr(sys, "stdout", closed))
        finished = fit([emulated(), end])
    replayed(finished)
    told(caplog, "I/O operation on closed file")


def test_a_report_that_cannot_be_made(caplog: pytest.LogCaptureFixture) -> None:
    class Unprintable(StepReport):
        def __str__(self) -> str:
            raise ZeroDivisionError

        __rich__ = __repr__ = __str__

    with caplog.at_level(logging.WARNING, "pygraph_train"):
        show(Unprintable())
        show(Unprintable())
    told(caplog, "ZeroDivisionError")


def test_trackers_get_their_values_without_those_of_the_report(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(report: Any) -> Any:
        raise ValueError("no metrics")

    class Tracker:
        name, requires_logging_directory, main_process_only = "mine", False, False
        tracker = None

    monkeypatch.setattr(plugin, "metrics_of", fails)
    found: list[dict[str, Any]] = []
    given = plugin.PyGraph(engine="emulated", log_metrics=True)
    accelerator = plugin.Accelerator(plugins=[given], cpu=True)
    mine: Any = Tracker()
    mine.log = lambda values, step=None, **kwargs: found.append(values)
    accelerator.trackers = [mine]
    with caplog.at_level(logging.WARNING, "pygraph_train"):
        accelerator.log({"loss": 1.0})
    told(caplog, "ValueError: no metrics")
    assert found == [{"loss": 1.0}]
