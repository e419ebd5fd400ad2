"""Decisions are kept between runs, and a broken cache never stands in the way."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest
from test_phases import PLANS, training
from torch import nn
from training import Net, adamw, both, sgd

from pygraph_train import PyGraphConfig
from pygraph_train.selection import timing
from pygraph_train.selection.arms import NOTHING, SPLIT, WHOLE, Arm
from pygraph_train.selection.cache import Decision, DecisionCache
from pygraph_train.selection.controller import Estimate
from pygraph_train.step.decisions import Decisions
from pygraph_train.step.identity import identity

DECISION = Decision(Arm(SPLIT, compiled=True), 0.0125)


@pytest.fixture
def declared(monkeypatch: pytest.MonkeyPatch) -> dict[Any, float]:
    table: dict[Any, float] = dict.fromkeys(PLANS, 1.0)
    monkeypatch.setattr(timing, "declared_seconds", lambda arm: table[arm.plan])
    monkeypatch.setattr(Decisions, "_estimate", lambda *args: Estimate())
    return table


def test_what_is_put_is_got(tmp_path):
    DecisionCache(tmp_path / "new").put({"model": "a"}, DECISION)
    cache = DecisionCache(tmp_path / "new")
    assert cache.get({"model": "a"}) == DECISION
    assert cache.get({"model": "b"}) is None
    assert DecisionCache(None).get({"model": "a"}) is None
    assert [p.suffix for p in (tmp_path / "new").iterdir()] == [".json"]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda text: "",
        lambda text: text[: len(text) // 2],
        lambda text: "[]",
        lambda text: text.replace('"format": 1', '"format": 99'),
        lambda text: text.replace('"a"', '"another model"'),
        lambda text: text.replace('"F"', '"X"'),
        lambda text: text.replace("0.0125", "-1"),
        lambda text: text.replace("0.0125", '"fast"'),
        lambda text: text.replace("0.0125", "NaN"),
    ],
)
def test_a_corrupt_or_foreign_file_is_ignored_with_one_warning(spoil, tmp_path, caplog):
    cache = DecisionCache(tmp_path)
    cache.put({"model": "a"}, DECISION)
    (file,) = tmp_path.iterdir()
    text = file.read_text()
    assert spoil(text) != text
    file.write_text(spoil(text))
    assert cache.get({"model": "a"}) is None
    assert cache.get({"model": "a"}) is None
    assert [r.levelno for r in caplog.records] == [logging.WARNING]
    cache.put({"model": "a"}, DECISION)
    assert cache.get({"model": "a"}) == DECISION


def test_a_directory_that_cannot_be_written_warns_once(tmp_path, caplog):
    blocked = tmp_path / "file"
    blocked.write_text("not a directory")
    report = both(training(steps=60), cache_dir=blocked, replays=40)
    assert report.steps_replayed >= 50
    warnings = [r for r in caplog.records if "pygraph" in r.getMessage() and r.levelno >= logging.WARNING]
    assert len(warnings) == 1, caplog.text


def write(directory: str, name: int) -> None:
    cache = DecisionCache(directory)
    for index in range(30):
        cache.put({"writer": name, "index": index}, Decision(Arm(WHOLE), 1 + name + index))
        cache.put({"writer": "all"}, Decision(Arm(WHOLE), 1.0 + name))


def test_concurrent_writers_lose_nothing(tmp_path, caplog):
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=write, args=(str(tmp_path), name)) for name in range(4)]
    for writer in writers:
        writer.start()
    cache = DecisionCache(tmp_path)
    while any(w.is_alive() for w in writers):
        found = cache.get({"writer": "all"})
        assert found is None or found.seconds in (1.0, 2.0, 3.0, 4.0)
    for writer in writers:
        writer.join(60)
        assert writer.exitcode == 0
    for name in range(4):
        for index in range(30):
            found = cache.get({"writer": name, "index": index})
            assert found is not None and found.seconds == 1 + name + index
    assert not caplog.records
    assert all(p.suffix == ".json" for p in tmp_path.iterdir())


def test_the_second_run_starts_with_the_winner_and_verifies_it(tmp_path, declared):
    declared[SPLIT] = 0.5
    first = both(training(steps=170), cache_dir=tmp_path, replays=200)
    assert first.plan == "{F B} {O}" and first.controllers[0].exploration_steps > 0
    second = both(training(steps=40), cache_dir=tmp_path, replays=50)
    assert [str(s.arm) for s in second.switches] == ["{F B} {O}"]
    assert "earlier run" in second.switches[0].why
    assert second.controllers[0].exploration_steps == 0
    assert second.first_replay_step is not None and second.first_replay_step < 20
    assert [c.plan for c in second.captures] == ["{F B}", "{O}"]


def test_a_winner_without_graphs_is_remembered_too(tmp_path, declared):
    declared[NOTHING] = 0.5
    assert both(training(steps=170), cache_dir=tmp_path, replays=40).plan == "F B O"
    second = both(training(steps=40), cache_dir=tmp_path, plan="F B O", never="without graphs won before")
    assert not second.captures


def test_a_winner_that_is_slow_now_is_found_out(tmp_path, declared):
    declared[SPLIT] = 0.5
    both(training(steps=170), cache_dir=tmp_path, replays=200)
    declared.update({SPLIT: 3.0, WHOLE: 0.7})
    assert both(training(steps=170), cache_dir=tmp_path, replays=120).plan == "{F B O}"
    assert both(training(steps=40), cache_dir=tmp_path, replays=25).plan == "{F B O}"


def test_another_question_has_another_answer(tmp_path, declared):
    declared[SPLIT] = 0.5
    both(training(steps=170), cache_dir=tmp_path, replays=200)
    other = both(training(sgd, steps=20), cache_dir=tmp_path, replays=8)
    assert [c.plan for c in other.captures] == ["{F B O}"]
    assert len(list(Path(tmp_path).iterdir())) == 1


def test_keys_differ_with_what_decides():
    import torch

    def key(
        model: nn.Module | None = None, make: Any = adamw, signature: Any = ("x",), **options: Any
    ) -> str:
        model = model or Net()
        config = PyGraphConfig(**options)
        found = identity(model, make(model), torch.device("cpu"), "emulated", config, signature)
        return json.dumps(found, sort_keys=True)

    frozen, wide = Net(), Net(features=7)
    frozen.first.requires_grad_(False)
    keys = [
        key(),
        key(frozen),
        key(wide),
        key(nn.Sequential(Net())),
        key(make=sgd),
        key(signature=("y",)),
        key(optimizer="off"),
    ]
    assert len(set(keys)) == len(keys)
    assert key() == keys[0] == key(warmup_steps=7, cache_dir=os.devnull)
