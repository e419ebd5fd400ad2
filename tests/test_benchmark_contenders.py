"""Contenders in processes of their own: they take turns, and one that crashes leaves the others' windows."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from test_benchmarks import run

from benchmarks import children, entries_run
from benchmarks.children import CUT, END, OVER, Ask, Job, TimeOver, run_jobs
from benchmarks.contenders import windows
from benchmarks.noise import TWIN
from benchmarks.nursery import Nursery
from benchmarks.zoo_models import ENTRIES

ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.passes_without_graphs("what a benchmark measures and adds up")

_CHILD = f"""
import os, subprocess, sys, threading, time
sys.path.insert(0, {str(ROOT)!r})
from benchmarks.children import Turns
turns = Turns()
name, path, fault = sys.argv[1:]
def say(what):
    with open(path, "a") as file:
        file.write(f"{{name}} {{what}}\\n")
def tick():
    while True:
        say("beside")
        time.sleep(0.01)
threading.Thread(target=tick, daemon=True).start()
if fault == "begins another":
    another = [sys.executable, __file__.replace("child", "another"), path]
    subprocess.Popen(another, start_new_session=True)
    while not os.path.exists(path) or "another beside" not in open(path).read():
        time.sleep(0.01)
if fault == "raises":
    raise ValueError("a contender that raises")
if fault == "hangs":
    time.sleep(60)
asked = 0
def answer(line):
    global asked
    asked += 1
    if fault == "is killed" and asked == 3:
        os.kill(os.getpid(), 9)
    if fault == "stays away" and asked == 2:
        time.sleep(60)
    say("begins")
    time.sleep(0.1)
    say("ends")
    return line + "!"
turns.answer(answer)
"""
_ANOTHER = """
import os, sys, time
parent = os.getppid()
while os.getppid() == parent:
    with open(sys.argv[1], "a") as file:
        file.write("another beside\\n")
    time.sleep(0.01)
"""


def _jobs(folder: Path, faults: dict[str, str], group: str | None) -> list[Job]:
    (folder / "child.py").write_text(_CHILD)
    (folder / "another.py").write_text(_ANOTHER)
    told = str(folder / "told")
    return [
        Job(name, [str(folder / "child.py"), name, told, fault], folder / f"{name}.log", group)
        for name, fault in faults.items()
    ]


class _Rounds:
    """Asks each job in turns, and keeps the answers."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.groups: list[list[str]] = []
        self.answers: dict[str, list[str | None]] = {}
        self.ends: dict[str, str | None] = {}

    def measure(self, jobs: Sequence[Job], ask: Ask) -> None:
        self.groups.append([job.name for job in jobs])
        for number in range(self.count):
            for job in jobs:
                self.answers.setdefault(job.name, []).append(ask(job, str(number)))
        for job in jobs:
            ask(job, END)

    def ended(self, job: Job, why: str | None) -> None:
        self.ends[job.name] = why


def test_one_process_answers_while_all_others_are_stopped(tmp_path: Path) -> None:
    rounds = _Rounds(3)
    jobs = _jobs(tmp_path, {"a": "begins another", "b": ""}, "group") + _jobs(tmp_path, {"c": ""}, None)
    left = run_jobs(jobs, rounds.ended, processes=3, timeout_s=60, measure=rounds.measure)
    assert left == [] and rounds.ends == {"a": None, "b": None, "c": None}
    assert sorted(rounds.groups) == [["a", "b"], ["c"]]
    assert rounds.answers == {name: ["0!", "1!", "2!"] for name in "abc"}
    lines = [line.split() for line in (tmp_path / "told").read_text().splitlines()]
    begun = [n for n, line in enumerate(lines) if line[1] == "begins"]
    assert len(begun) == 9 and ["another", "beside"] in lines
    for n in begun:
        name = lines[n][0]
        during = lines[n + 1 : lines.index([name, "ends"], n)]
        assert len(during) > 3, "its own threads go on"
        # one that was writing when it was stopped may have finished its line
        assert {who for who, _ in during[1:]} == {name}


def test_faults_of_some_leave_the_answers_of_the_others(tmp_path: Path) -> None:
    rounds = _Rounds(4)
    faults = {"a": "raises", "b": "", "c": "is killed", "d": "stays away", "e": "", "f": "hangs"}
    run_jobs(
        _jobs(tmp_path, faults, "group"),
        rounds.ended,
        processes=6,
        timeout_s=60,
        ready_s=4,
        measure=rounds.measure,
    )
    assert rounds.groups == [["b", "c", "d", "e"]]
    assert rounds.answers["b"] == rounds.answers["e"] == ["0!", "1!", "2!", "3!"]
    assert rounds.answers["c"] == ["0!", "1!", None, None]
    assert rounds.answers["d"] == ["0!", None, None, None]
    assert "a contender that raises" in rounds.ends.pop("a")  # type: ignore[operator]
    assert "status -9" in rounds.ends.pop("c")  # type: ignore[operator]
    assert rounds.ends.pop("d") == "timed out after 4 s while it was measured"
    assert rounds.ends == {"b": None, "e": None, "f": "timed out after 4 s"}


def test_a_group_may_be_larger_than_the_number_of_processes(tmp_path: Path) -> None:
    rounds = _Rounds(1)
    jobs = [*_jobs(tmp_path, dict.fromkeys("abc", ""), "one"), *_jobs(tmp_path, {"d": "", "e": ""}, "two")]
    run_jobs(jobs, rounds.ended, processes=1, timeout_s=60, measure=rounds.measure)
    assert rounds.groups == [["a", "b", "c"], ["d", "e"]] and set(rounds.ends.values()) == {None}


def test_a_group_is_begun_beside_others_as_long_as_there_is_room_for_all_of_it(tmp_path: Path) -> None:
    teams = {"one": "abc", "two": "def", "three": "ghi"}
    pool = children._Pool(print, lambda *_: None, children._begin, 60, 60, 60)
    jobs = {team: _jobs(tmp_path, dict.fromkeys(names, "hangs"), team) for team, names in teams.items()}
    pool.left += [
        dataclasses.replace(job, after=None if n == 0 else jobs[team][0].name)
        for team in teams
        for n, job in enumerate(jobs[team])
    ]
    try:
        pool.start(2)
        assert [child.job.name for child in pool.children] == ["a", "d"], "two may run, and six have room"
        for child in pool.children:
            child.waits = True
        pool.start(2)
        assert [child.job.name for child in pool.children] == ["a", "d", "b", "c"]
        for child in pool.children:
            child.waits = True
        pool.start(2)
        assert [job.name for job in pool.left] == ["g", "h", "i"], "nine have none"
        pool.start(4)
        assert [job.name for job in pool.left] == ["h", "i"]
    finally:
        pool.stop(pool.children, "over")


def test_those_that_are_ready_when_the_time_is_over_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.children.WAITING", 1)  # no second group beside one that waits
    rounds = _Rounds(2)
    jobs = [*_jobs(tmp_path, {"a": "", "b": "hangs", "c": ""}, "one"), *_jobs(tmp_path, {"d": ""}, "two")]
    begun = time.monotonic()
    left = run_jobs(jobs, rounds.ended, processes=2, timeout_s=60, seconds=4, measure=rounds.measure)
    assert time.monotonic() - begun < 20
    assert rounds.groups == [["a", "c"]] and rounds.answers == {"a": ["0!", "1!"], "c": ["0!", "1!"]}
    assert rounds.ends == {"a": None, "b": OVER, "c": None} and [job.name for job in left] == ["d"]


def test_nothing_is_asked_long_after_the_time_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.children.LAST_S", 1.0)
    rounds = _Rounds(10_000)
    begun = time.monotonic()
    run_jobs(
        _jobs(tmp_path, {"a": "", "b": ""}, "one"),
        rounds.ended,
        processes=2,
        timeout_s=60,
        seconds=3,
        measure=rounds.measure,
    )
    assert time.monotonic() - begun < 20
    assert rounds.ends == {"a": OVER, "b": OVER} and len(rounds.answers["a"]) < 1000


def test_a_job_begins_when_the_one_that_it_follows_is_ready_or_has_ended(tmp_path: Path) -> None:
    rounds = _Rounds(1)
    jobs = _jobs(tmp_path, {"a": "", "b": "", "c": "raises", "d": "", "e": ""}, "one")
    after = {"b": "a", "d": "c"}
    jobs = [dataclasses.replace(job, after=after.get(job.name)) for job in jobs]
    begun: list[tuple[str, set[str]]] = []  # of each job, which ones were ready or had ended before it began
    start, names = children._Pool._start, {job.name for job in jobs}

    def noted(pool: children._Pool, job: Job) -> None:
        unready = {child.job.name for child in pool.children if not child.waits}
        begun.append((job.name, names - unready - {other.name for other in pool.left} - {job.name}))
        start(pool, job)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(children._Pool, "_start", noted)
        run_jobs(jobs, rounds.ended, processes=5, timeout_s=60, measure=rounds.measure)
    assert [name for name, _ in begun[:3]] == ["a", "c", "e"], "the others do not wait for those that do"
    assert "a" in dict(begun)["b"] and "c" in dict(begun)["d"]
    assert rounds.groups == [["a", "e", "b", "d"]] or rounds.groups == [["a", "e", "d", "b"]]


def test_jobs_that_a_measurement_calls_for_are_measured_with_those_that_wait(tmp_path: Path) -> None:
    turns: dict[str, list[list[str]]] = {}
    ends: dict[str, str | None] = {}
    jobs = {team: _jobs(tmp_path, dict.fromkeys(names, ""), team) for team, names in _TEAMS.items()}

    def measure(ready: Sequence[Job], ask: Ask) -> Sequence[Job]:
        team = ready[0].team
        turns.setdefault(team, []).append([job.name for job in ready])
        assert all(ask(job, "0") == "0!" for job in ready)
        if len(turns[team]) == 1:
            ask(ready[0], END)  # the others wait
            return _jobs(tmp_path, {f"{team} again": ""}, team)
        for job in ready:
            ask(job, END)
        return ()

    left = run_jobs(
        [job for group in jobs.values() for job in group],
        lambda job, why: ends.update({job.name: why}),
        processes=2,
        timeout_s=60,
        measure=measure,
    )
    assert left == [] and set(ends.values()) == {None} and len(ends) == 6
    assert turns == {"x": [["a", "b"], ["b", "x again"]], "y": [["c", "d"], ["d", "y again"]]}


_TEAMS = {"x": "ab", "y": "cd"}


def test_forked_processes_are_like_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    faults = {"a": "raises", "b": "", "c": "is killed", "d": "begins another"}
    rounds, told, child = _Rounds(4), tmp_path / "told", tmp_path / "child.py"
    jobs = _jobs(tmp_path, faults, "group")
    (tmp_path / "forked_child.py").write_text(
        "import sys\n\ndef main(argv):\n    sys.argv[1:] = argv\n"
        f"    exec(open({str(child)!r}).read(), {{'__file__': {str(child)!r}}})\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{ROOT}")
    nursery = Nursery("cpu")
    try:
        assert nursery.works
        jobs = [
            dataclasses.replace(job, arguments=["-W", "ignore", "-m", "forked_child", *job.arguments[1:]])
            for job in jobs
        ]
        run_jobs(jobs, rounds.ended, processes=4, timeout_s=60, measure=rounds.measure, begin=nursery.begin)
        hangs = dataclasses.replace(jobs[1], name="e", arguments=[*jobs[1].arguments[:-1], "hangs"])
        with (tmp_path / "e.log").open("wb") as log:
            process = nursery.begin(hangs, log)
        assert _lives(process.pid) and os.getpgid(process.pid) == process.pid
    finally:
        nursery.close()
    _wait_for(lambda: not _lives(process.pid), 10)
    assert sorted(rounds.groups[0]) == ["b", "c", "d"]
    assert rounds.answers["b"] == rounds.answers["d"] == ["0!", "1!", "2!", "3!"]
    assert rounds.answers["c"] == ["0!", "1!", None, None]
    assert "a contender that raises" in rounds.ends.pop("a")  # type: ignore[operator]
    assert "status -9" in rounds.ends.pop("c")  # type: ignore[operator]
    assert rounds.ends == {"b": None, "d": None}
    lines = [line.split() for line in told.read_text().splitlines()]
    assert ["another", "beside"] in lines
    for n in [n for n, line in enumerate(lines) if line == ["b", "begins"]]:
        during = lines[n + 1 : lines.index(["b", "ends"], n)]
        assert {who for who, _ in during[1:]} == {"b"}, "all others are stopped"


def test_without_a_device_that_copies_can_use_nothing_is_forked() -> None:
    nursery = Nursery("no such device")
    assert not nursery.works
    nursery.close()


_PARENT = """
import sys
from pathlib import Path
from benchmarks.children import Job, run_jobs
folder = Path(sys.argv[1])
child = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); {}; time.sleep(100)"
waits = "sys.path.insert(0, sys.argv[2]); from benchmarks.children import Turns; Turns()._say('ready')"
jobs = [
    Job(name, ["-c", child.format(first), str(folder / name), sys.argv[2]], folder / f"{name}.log")
    for name, first in (("runs", "0"), ("measured", waits))
]
def measure(jobs, ask):
    (folder / "all others are stopped").touch()
    ask(jobs[0], "sleep")
run_jobs(jobs, print, processes=2, timeout_s=100, measure=measure)
"""


def _wait_for(what: Any, seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel ends the children")
def test_children_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    """Also one that is stopped, which could not find out by itself."""
    parent = subprocess.Popen([sys.executable, "-c", _PARENT, str(tmp_path), str(ROOT)], cwd=ROOT)
    pids: list[int] = []
    try:
        _wait_for((tmp_path / "all others are stopped").exists)
        _wait_for(lambda: (tmp_path / "runs").exists() and (tmp_path / "runs").read_text())
        pids = [int((tmp_path / name).read_text()) for name in ("runs", "measured")]
        assert all(map(_lives, pids)) and _state(pids[0]) == "T"
        parent.kill()
        parent.wait()
        _wait_for(lambda: not any(map(_lives, pids)), 10)
    finally:
        parent.kill()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _state(pid: int) -> str:
    """One letter; Z has ended, and nobody has asked how."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "Z"


def _lives(pid: int) -> bool:
    return _state(pid) not in "ZX"


# -- windows and rows -------------------------------------------------------------------------------------


def test_windows_take_turns_after_one_that_is_not_timed() -> None:
    made: list[tuple[str, int]] = []

    def window(mode: str, steps: int) -> float:
        made.append((mode, steps))
        return {"a": 2.0, "b": 500.0}[mode]

    times = windows(["a", "b"], window, count=3, seconds=0.05)
    assert times == {"a": [2.0] * 3, "b": [500.0] * 3}
    a, b = ("a", 25), ("b", 4)
    assert made == [("a", 2), ("a", 4), a, ("b", 2), ("b", 4), b, *(b, a), *(a, b), *(b, a)]


def test_windows_of_a_mode_that_crashes_are_left_out() -> None:
    made: list[str] = []

    def window(mode: str, steps: int) -> float | None:
        made.append(mode)
        crashed = mode == "a" or (mode == "b" and made.count("b") > 4)
        return None if crashed else 1.0

    assert windows(["a", "b", "c"], window, count=3, seconds=0) == {"c": [1.0] * 3}
    assert windows(["a"], window, count=3, seconds=0) == {}


def test_windows_are_whole_rounds_where_the_time_is_over() -> None:
    made: list[str] = []

    def window(mode: str, steps: int) -> float:
        made.append(mode)
        if len(made) > stop_after:
            raise TimeOver
        return 1.0

    stop_after = 6 + 2 * 2 + 1
    assert windows(["a", "b"], window, count=7, seconds=0) == {"a": [1.0] * 2, "b": [1.0] * 2}
    stop_after, made = 4, []
    assert windows(["a", "b"], window, count=7, seconds=0) == {}


def _row(folder: Path, parts: dict[str, Any], ends: dict[str, str | None], times: Any) -> dict[str, Any]:
    jobs = []
    for mode, part in parts.items():
        if part is not None:
            (folder / f"{mode}.json").write_text(json.dumps({"stage": mode, "modes": {mode: part}}))
        jobs.append(entries_run._Process(mode, [], folder / f"{mode}.log", "PPO", modes=[mode]))
    return entries_run._row(ENTRIES["PPO"], jobs, ends, times)


def test_a_row_tells_why_a_contender_has_no_windows(tmp_path: Path) -> None:
    ready, raised = {"losses": [1.0]}, {"error": "ValueError: no"}
    parts = {"eager": ready, "compile": raised, "graphed": ready, "backend": None}
    ends = {"eager": None, "compile": None, "graphed": "ended with status -9: ", "backend": "timed out"}
    row = _row(tmp_path, parts, ends, {"windows_ms": {"eager": [2.0]}})
    assert row["stage"] == "done" and row["error"] is None
    assert row["modes"] == {
        "eager": {"losses": [1.0], "windows_ms": [2.0]},
        "compile": raised,
        "graphed": {"losses": [1.0], "error": "ended with status -9: "},
        "backend": {"error": "timed out"},
    }
    none = _row(tmp_path, {"compile": raised}, {"compile": None}, None)
    assert none["error"] == "ValueError: no" and none["stage"] == "compile"
    last = _row(tmp_path, {"graphed": ready}, {"graphed": "ended with status -9: "}, {})
    assert last["error"] == "ended with status -9: " and last["stage"] == "timed"


@pytest.mark.parametrize("why", [*CUT, None])
def test_a_row_of_a_run_that_was_cut_is_not_done(tmp_path: Path, why: str | None) -> None:
    parts = {"eager": {"losses": [1.0]}, "graphed": {}}
    ends = {"eager": None} | ({} if why is None else {"graphed": why})  # None: it was not begun
    row = _row(tmp_path, parts, ends, {"windows_ms": {"eager": [2.0]}})
    assert row["stage"] == "timed in part" and row["error"] == (why or OVER)
    assert row["modes"] == {"eager": {"losses": [1.0], "windows_ms": [2.0]}, "graphed": {}}, "nothing crashed"


# -- a whole run ------------------------------------------------------------------------------------------

_FAULTS = """
import os
from pathlib import Path
from benchmarks import contenders

def peak(contender):
    status = Path("/proc/self/status").read_text().split()
    return int(status[status.index("VmHWM:") + 1]) // 1024

def large(*made):
    step, report = contenders._eager(*made)
    def larger(batch):
        bytearray(os.urandom(1)) * (500 << 20)
        return step(batch)
    return larger, report

def raises(*made):
    raise ValueError("a contender that raises")

def is_killed(*made):
    os.kill(os.getpid(), 9)

def is_killed_when_timed(*made):
    step, report = contenders._eager(*made)
    count = 0
    def until_it_is_killed(batch):
        nonlocal count
        count += 1
        if count > 20 + 5 + 10:
            os.kill(os.getpid(), 9)
        return step(batch)
    return until_it_is_killed, report

contenders._peak_mib = peak
contenders.MODES |= {"accelerate-eager": large, "compile": raises, "reduce-overhead": is_killed}
contenders.MODES |= {"accelerate-compile": is_killed_when_timed}
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the peak is read from /proc")
def test_faults_of_contenders_leave_the_windows_of_the_others(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(_FAULTS)
    path = tmp_path / "never.json"
    modes = "compile,reduce-overhead,graphed,accelerate-eager,accelerate-compile,eager"
    options = ["--names", "case: PPO", "--modes", modes]
    (row,) = run("benchmarks.never_slower", path, *options, before=tmp_path, timeout=280)["rows"]
    found = row["modes"]
    assert row["stage"] == "done" and row["error"] is None
    assert [mode for mode in found if not mode.endswith(TWIN)] == modes.split(",")
    for mode in ("graphed", "accelerate-eager", "eager"):
        assert len(found[mode]["windows_ms"]) == 2 and "error" not in found[mode]
    assert found["graphed"]["losses"] == found["eager"]["losses"]
    assert found["graphed"]["steps_from_graphs"] > 10
    assert found["compile"]["error"] == "ValueError: a contender that raises"
    assert "status -9" in found["reduce-overhead"]["error"]
    assert "status -9" in found["accelerate-compile"]["error"] and found["accelerate-compile"]["losses"]
    for mode in ("compile", "reduce-overhead", "accelerate-compile"):
        assert "windows_ms" not in found[mode]
    large = found["accelerate-eager"]["reserved_mib"]
    assert max(found[mode]["reserved_mib"] for mode in ("graphed", "eager")) < large - 300, (
        "peaks are their own"
    )
