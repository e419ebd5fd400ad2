"""Which windows are made again, and what they tell beside those of a twin."""

from __future__ import annotations

import argparse
import json
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_benchmarks import printed

from benchmarks import never_slower
from benchmarks.children import TimeOver
from benchmarks.noise import TWIN, is_below_noise, median_ratio, spread_of_twins, surely
from benchmarks.settling import Loop, Turn, first_turn, second_turn

pytestmark = pytest.mark.passes_without_graphs("what a benchmark measures and adds up")

LOOPS = never_slower.LOOPS
ARGS = argparse.Namespace(short_windows=5, short_s=0.05, windows=8, window_s=0.3, most_windows=24)


def test_windows_tell_where_a_coin_would_seldom_fall_so() -> None:
    assert surely([True] * 6) and surely([True] * 10 + [False] * 2) and surely([True] * 18 + [False] * 6)
    assert not surely([True] * 5) and not surely([True] * 7 + [False]) and not surely([True, False] * 12)
    assert not surely([])


class _Machine:
    """Answers with milliseconds a step, and counts the steps and the windows that it makes."""

    def __init__(self, ms: dict[str, float], drift: float = 1.0, noise: float = 0.0) -> None:
        self.ms, self.drift, self.noise = dict(ms), drift, noise
        self.made: list[tuple[str, int]] = []
        self.crashes: Callable[[str], bool] = lambda mode: False
        self.random = random.Random(3)

    def __call__(self, mode: str, steps: int) -> float | None:
        self.made.append((mode, steps))
        if self.crashes(mode):
            return None
        jitter = 1 + self.noise * self.random.uniform(-1, 1)
        return self.ms[mode] * self.drift ** len(self.made) * jitter

    def first(self) -> Turn:
        turn = Turn({})
        first_turn(turn, list(self.ms), LOOPS, self, ARGS)
        return turn

    def second(self, turn: Turn, spread: float = 1.0) -> None:
        second_turn(turn, LOOPS, self, ARGS, spread)


def _row(turn: Turn, name: str = "a") -> dict[str, Any]:
    modes: dict[str, dict[str, Any]] = {}
    for kind, times in turn.times.items():
        for mode, found in times.items():
            modes.setdefault(mode, {})[kind] = found
    return {"name": name, "stage": "done", "error": None, "modes": modes, "noise": {}}


PLAIN = {"eager": 9.0, "compile": 6.0, "reduce-overhead": 3.0}


def test_what_is_far_from_the_best_makes_short_windows_only() -> None:
    machine = _Machine(PLAIN | {"graphed-compiled": 1.0, "graphed": 2.0})
    turn = machine.first()
    assert {mode: len(found) for mode, found in turn.times["windows_ms"].items()} == dict.fromkeys(
        machine.ms, 5
    )
    assert list(turn.times) == ["windows_ms"] and turn.kept == turn.best == []
    assert max(steps * machine.ms[mode] for mode, steps in machine.made) < 60
    assert never_slower.over_the_best(_row(turn), "graphed-compiled") == pytest.approx(3.0)


def test_what_is_near_the_best_makes_long_windows_and_needs_no_twin_where_they_tell() -> None:
    machine = _Machine(PLAIN | {"graphed-compiled": 1.0, "backend": 2.95, "accelerate": 9.0})
    machine.ms |= {"accelerate-eager": 8.9, "accelerate-compile": 9.5}
    turn = machine.first()
    long = turn.times["long_ms"]
    assert list(long) == [
        "reduce-overhead",
        "backend",
        "accelerate-eager",
        "accelerate-compile",
        "accelerate",
    ]
    assert {len(found) for found in long.values()} == {8}
    assert ("backend", round(300 / 2.95)) in machine.made
    assert turn.kept == turn.best == [], "0.989 in each window is allowed"


@pytest.mark.parametrize("drift", [1.0, 1.002])
def test_what_is_below_is_measured_again_with_a_twin_of_the_best(drift: float) -> None:
    machine = _Machine(PLAIN | {"graphed-compiled": 1.0, "backend": 3.3, "graphed": 2.99}, drift)
    turn = machine.first()
    assert turn.best == ["reduce-overhead"] and turn.kept == ["reduce-overhead", "backend"]
    assert turn.without_twin() == ["reduce-overhead"]
    machine.ms["reduce-overhead" + TWIN] = 3.0
    begun = len(machine.made)
    machine.second(turn)
    again = turn.times["again_ms"]
    assert {mode: len(found) for mode, found in again.items()} == {
        "reduce-overhead": 8,
        "reduce-overhead twin": 8,
        "backend": 8,
    }
    rounds = [mode for mode, _ in machine.made[begun + 9 :]]
    order = ["reduce-overhead", "reduce-overhead twin", "backend"]
    assert rounds == [*reversed(order), *order] * 4, "a drift falls on both sides"
    assert turn.without_twin() == []
    row = _row(turn)
    ratio = median_ratio(row, "backend", "reduce-overhead")
    assert ratio == pytest.approx(3.0 / 3.3, rel=1e-2 * (drift != 1))
    assert never_slower.below_noise(row, "backend", 1.0) is True
    assert never_slower.below_noise(row, "graphed-compiled", 1.0) is False


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_what_windows_do_not_tell_gets_more_of_them_up_to_a_limit(noise: float) -> None:
    machine = _Machine(PLAIN | {"backend": 3.3})
    turn = machine.first()
    machine.ms["reduce-overhead" + TWIN] = 3.24
    machine.noise = noise
    machine.second(turn)
    (count,) = {len(found) for found in turn.times["again_ms"].values()}
    assert count == 8 if not noise else count > 8


def test_what_is_below_no_more_than_a_twin_is_no_miss_and_is_not_hidden() -> None:
    machine = _Machine(PLAIN | {"backend": 3.1})  # 0.968
    turn = machine.first()
    machine.ms["reduce-overhead" + TWIN] = 3.12  # so is the twin
    machine.second(turn)
    row = _row(turn)
    assert never_slower.over_the_best(row, "backend") == pytest.approx(3.0 / 3.1)
    assert never_slower.below_noise(row, "backend", 1.0) is False
    found = never_slower.summarize([row])["backend"]
    assert found["below_0.98"] == {"a": 0.968} and found["below_noise"] == []
    assert found["below_0.98_without_a_twin"] == []


def test_a_mode_that_was_unlucky_once_is_allowed_when_it_is_measured_again() -> None:
    machine = _Machine(PLAIN | {"backend": 3.2})
    turn = machine.first()
    machine.ms |= {"backend": 2.9, "reduce-overhead" + TWIN: 3.0}
    machine.second(turn)
    assert {len(found) for found in turn.times["again_ms"].values()} == {8}
    row = _row(turn)
    assert never_slower.over_the_best(row, "backend") > 0.98  # type: ignore[operator]
    assert never_slower.below_noise(row, "backend", 1.0) is False


def test_each_loop_has_a_twin_of_its_own_best() -> None:
    machine = _Machine(PLAIN | {"backend": 4.0, "accelerate": 20.0, "accelerate-eager": 10.0})
    turn = machine.first()
    assert turn.best == ["reduce-overhead", "accelerate-eager"]
    machine.ms |= {"reduce-overhead" + TWIN: 3.6, "accelerate-eager" + TWIN: 10.0}
    machine.second(turn)
    times = turn.times["again_ms"]
    assert is_below_noise(times, "accelerate", "accelerate-eager", 1.0) is True
    assert is_below_noise(times, "backend", "reduce-overhead", 1.0) is True  # 0.75 is below 0.98 / 1.2
    assert is_below_noise(times, "backend", "reduce-overhead", 1.4) is False
    assert is_below_noise(times, "backend", "eager", 1.4) is None


def test_modes_that_crash_or_have_no_twin_have_no_verdict() -> None:
    machine = _Machine(PLAIN | {"backend": 4.0, "graphed": 4.0})
    machine.crashes = lambda mode: mode == "backend" and len(machine.made) > 60
    turn = machine.first()
    assert turn.kept == ["reduce-overhead", "graphed"]
    assert not any("backend" in times for times in turn.times.values()), "a crash leaves no windows"
    row = _row(turn)
    assert never_slower.below_noise(row, "graphed", 1.0) is None
    found = never_slower.summarize([row])["graphed"]
    assert found["below_0.98"] == {"a": 0.75} and found["below_0.98_without_a_twin"] == ["a"]
    assert found["below_noise"] == []


def test_a_turn_that_is_cut_keeps_its_whole_rounds_and_calls_for_no_twin() -> None:
    machine = _Machine(PLAIN | {"backend": 4.0})

    def crashes(mode: str) -> bool:
        if len(machine.made) > 32 + 6 + 5:
            raise TimeOver
        return False

    machine.crashes = crashes
    turn = machine.first()
    assert turn.cut and turn.best == [] and 0 < len(turn.times["long_ms"]["backend"]) < 8
    assert len(turn.times["windows_ms"]["backend"]) == 5


def _twins(*ratios: float) -> list[dict[str, Any]]:
    return [
        {"modes": {"eager": {"again_ms": [1.0, 1.0]}, "eager" + TWIN: {"again_ms": [1 / r, 1 / r]}}}
        for r in ratios
    ]


def test_the_noise_of_a_run_is_what_nine_of_ten_twins_stay_within() -> None:
    assert spread_of_twins([]) == 1.0 and spread_of_twins([{"modes": {"eager": {}}}]) == 1.0
    assert spread_of_twins(_twins(0.8)) == pytest.approx(1.25), "faster or slower is the same"
    ratios = [1.0, 1.01, 0.99, 1.02, 1.03, 1.04, 0.95, 1.0, 1.1, 2.0]
    assert spread_of_twins(_twins(*ratios)) == pytest.approx(1.1)


def test_modes_as_fast_as_the_best_are_seldom_said_to_be_slower() -> None:
    """Each process is faster or slower than another one of the same code, and so are its windows."""
    chance = random.Random(0)
    counts: Counter[str] = Counter()
    for speed, key in ((1.0, "equal"), (1.35, "slower")):
        rows: list[dict[str, Any]] = []
        for number in range(100):
            process = {mode: chance.gauss(1.0, 0.04) for mode in ("eager", "backend", "eager" + TWIN)}
            machine = _Machine({"eager": 5 * process["eager"], "backend": 5 * speed * process["backend"]})
            machine.noise, machine.random = 0.1, random.Random(number)
            turn = machine.first()
            if turn.best:
                machine.ms["eager" + TWIN] = 5 * process["eager" + TWIN]
                machine.second(turn, spread_of_twins(rows))
            rows.append(_row(turn, str(number)))
        found = never_slower.summarize(rows)["backend"]
        counts[f"{key} below"], counts[f"{key} missed"] = len(found["below_0.98"]), len(found["below_noise"])
    assert counts["equal below"] > 25, "which is why 0.98 alone says nothing"
    assert counts["equal missed"] <= 5
    assert counts["slower below"] == 100 and counts["slower missed"] > 90


# -- a whole run ------------------------------------------------------------------------------------------

_SLOW = """
import time
from benchmarks import contenders

def slow(*made):
    step, report = contenders._eager(*made)
    def slower(batch):
        time.sleep(0.02)
        return step(batch)
    return slower, report

contenders.MODES |= {"backend": slow}
"""


@pytest.mark.slow
@pytest.mark.parametrize("fork", [[], ["--fork"]])
def test_a_mode_that_is_slower_than_the_twin_of_the_best_is_a_miss(tmp_path: Path, fork: list[str]) -> None:
    (tmp_path / "sitecustomize.py").write_text(_SLOW)
    path = tmp_path / "never.json"
    options = ["--names", "case: PPO", "--modes", "backend,eager", "--windows", "6", "--most-windows", "6"]
    options += ["--logs", str(tmp_path), *fork]
    said = printed("benchmarks.never_slower", path, *options, before=tmp_path, timeout=200)
    record = json.loads(path.read_text())
    (row,) = record["rows"]
    assert record["forked"] is bool(fork)
    assert row["stage"] == "done" and row["without_twin"] == []
    assert list(row["modes"]) == ["backend", "eager", "eager twin"]
    assert {len(found["again_ms"]) for found in row["modes"].values()} == {6}
    assert row["modes"]["eager twin"]["losses"] == row["modes"]["eager"]["losses"]
    assert list(row["noise"]) == ["eager"] and 0.3 < row["noise"]["eager"] < 3
    found = record["summary"]["backend"]
    assert list(found["below_0.98"]) == found["below_noise"] == ["case: PPO"]
    assert "below 0.98 of the best: 1; by more than twins of the best differ: 1" in said


def test_ours_and_the_others_are_in_one_loop_each() -> None:
    assert all(isinstance(loop, Loop) for loop in LOOPS)
    assert sorted(never_slower.MODES) == sorted(m for loop in LOOPS for m in (*loop.others, *loop.ours))
    assert never_slower.COMPILED[0] == never_slower.MODES[0] == "compile"
    assert set(never_slower.LONG) <= set(never_slower.ALL)
