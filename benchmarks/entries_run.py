"""Entries of the zoo, measured in processes of their own: what zoo.py and never_slower.py share.

A process makes one contender of an entry (never_slower.py) or all of them (zoo.py), and says when they are ready. The
parent has the windows of an entry made in turns, while all other processes of the run are stopped.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.children import CUT, END, LAST_S, OVER, Ask, Job, run_jobs
from benchmarks.command import new_record, settle_defaults, settle_device
from benchmarks.contenders import windows
from benchmarks.noise import TWIN, noise_of, spread_of_twins
from benchmarks.nursery import Nursery
from benchmarks.record import write_json
from benchmarks.settling import Loop, Turn, first_turn, second_turn
from benchmarks.zoo_models import Entry

__all__ = ["add_options", "run_entries", "settle_options"]

Row = dict[str, Any]


def add_options(
    parser: argparse.ArgumentParser,
    *,
    timeout_s: float,
    processes: int,
    of: str = "entries",
    windows: int = 7,
    window_s: float = 0.05,
) -> None:
    """The options of a run of many entries; `of` says what has a process of its own."""
    parser.add_argument("--names", help="entries, separated by semicolons (default: all)")
    parser.add_argument("--processes", type=int, help=f"{of} at a time (default: {processes}; CPU: 1)")
    parser.add_argument(
        "--seconds",
        type=float,
        help=f"for the whole run; what is ready then is timed in up to {LAST_S:.0f} s more",
    )
    parser.add_argument("--timeout-s", type=float, default=timeout_s, help="for one entry")
    parser.add_argument("--mode-s", type=int, default=120, help="until one mode is ready; 0: no limit")
    parser.add_argument("--settle-s", type=float, default=20, help="at most, until plans are chosen")
    parser.add_argument("--windows", type=int, help=f"of each mode (default: {windows}; CPU: 2)")
    parser.add_argument("--window-s", type=float, help=f"seconds a window (default: {window_s}; CPU: 0)")
    parser.add_argument("--scale", choices=("full", "tiny"), default="full")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument("--json", type=Path, help="write rows and environment there, after each entry")
    parser.add_argument("--resume", action="store_true", help="keep the finished rows of the --json file")
    parser.add_argument("--logs", type=Path, help="folder of what the processes print")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    parser.set_defaults(least=None, most=None)  # steps until plans are chosen
    parser.set_defaults(of_the_gpu={"processes": processes, "windows": windows, "window_s": window_s})


def settle_options(
    parser: argparse.ArgumentParser,
    args: argparse.Namespace,
    entries: Mapping[str, Entry],
) -> None:
    """Fill in the defaults of the device, and make a list of the names that were given, if any."""
    settle_device(parser, args)
    args.engine = "cuda" if args.device == "cuda" else "emulated"
    on_cpu = {"processes": 1, "windows": 2, "window_s": 0.0}
    settle_defaults(args, **{name: (value, on_cpu[name]) for name, value in args.of_the_gpu.items()})
    settle_defaults(args, least=(40, 15), most=(1500, 30))
    if args.names is not None:
        args.names = [name.strip() for name in args.names.split(";")]
        if unknown := [name for name in args.names if name not in entries]:
            parser.error(f"--names: unknown {'; '.join(unknown)}")
    if args.resume and not args.json:
        parser.error("--resume needs --json FILE, the record of the run to go on with")


@dataclass(frozen=True)
class _Process(Job):
    """A process with contenders of the entry that `group` names."""

    modes: Sequence[str] = ()

    def part(self) -> Row:
        """What it has written of the entry's row."""
        path = self.log.with_suffix(".json")
        return json.loads(path.read_text()) if path.exists() else {"stage": "began", "modes": {}}


def run_entries(
    benchmark: str,
    entries: Mapping[str, Entry],
    modes: Sequence[str],
    args: argparse.Namespace,
    argv: Sequence[str],
    summarize: Callable[[Sequence[Row]], dict[str, Any]],
    line: Callable[[Row], str],
    *,
    apart: bool = False,
    loops: Sequence[Loop] = (),
    compiled: Sequence[str] = (),
    first: Sequence[str] = (),
) -> dict[str, Any]:
    """The record of a run, written to `args.json` after each entry.

    Args:
        benchmark: the module `benchmarks.<benchmark>` is what a child runs, with `argv`, its name and its file.
        entries: what can be measured; `args.names` are measured.
        modes: of each entry.
        line: what is printed of a row.
        apart: whether each mode has a process of its own, which gets it as `--modes`.
        loops: what is compared. What cannot be told is measured again beside twins. Without loops all modes get the
            same windows.
        compiled: of modes apart, those that begin when the first one of them is ready: they find its kernels on disk.
        first: entries that are begun before the others, in this order.
    """
    record = new_record(benchmark, args) | {"rows": [], "summary": {}, "not_run": []}
    rows: list[Row] = record["rows"]
    if args.resume and args.json.exists():
        before = json.loads(args.json.read_text())["rows"]
        rows += [row for row in before if row["stage"] == "done" and not row.get("without_twin")]
    done = {row["name"] for row in rows}
    names = [name for name in args.names if name not in done]
    random.Random(0).shuffle(names)  # of a run that is cut, the rows are a sample
    names.sort(key=lambda name: first.index(name) if name in first else len(first))
    ends: dict[str, str | None] = {}
    turns: dict[str, Turn] = {}

    def measure(ready: Sequence[Any], ask: Ask) -> Sequence[Job]:
        name, again = ready[0].team, ready[0].team in turns
        turn = turns.setdefault(name, Turn({}))
        home = {
            mode: job for job in ready for mode, found in job.part()["modes"].items() if _counts(mode, found)
        }

        def window(mode: str, steps: int) -> float | None:
            answer = ask(home[mode], f"{mode} {steps}") if mode in home else None  # it may have ended since
            return float(answer) if answer else None

        if not loops:
            turn.times["windows_ms"] = windows(list(home), window, count=args.windows, seconds=args.window_s)
        elif not again:
            first_turn(turn, list(home), loops, window, args)
        elif any(mode.endswith(TWIN) for mode in home):
            second_turn(turn, loops, window, args, spread_of_twins(rows))
        more = [process(name, [mode + TWIN]) for mode in turn.best if not again]
        jobs[name] += more
        for job in ready:
            if not more or not set(job.modes) & set(turn.kept):
                ask(job, END)
        return more

    def ended(job: Job, why: str | None) -> None:
        ends[job.name] = why
        if all(other.name in ends for other in jobs[job.team]):
            over(job.team)

    def over(name: str) -> None:
        turn = turns.get(name)
        row = _row(entries[name], jobs[name], ends, turn and turn.times)
        if loops:
            row |= {"noise": noise_of(row), "without_twin": turn.without_twin() if turn else []}
        if turn and turn.cut and row["stage"] == "done":
            row |= {"stage": "timed in part", "error": OVER}
        rows.append(row)
        record["summary"] = summarize(rows)
        write_json(args.json, record)
        print(_failure(row) or line(row), flush=True)

    with tempfile.TemporaryDirectory() as made:
        logs = args.logs or Path(made)
        logs.mkdir(parents=True, exist_ok=True)
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

        def title_of(name: str, *modes: str) -> str:
            return "-".join([f"{args.names.index(name):03}", *(modes if apart else ())]).replace(" ", "-")

        def process(name: str, modes: Sequence[str]) -> _Process:
            title = title_of(name, *modes)
            log = logs / f"{title}.log"
            log.with_suffix(".json").unlink(missing_ok=True)  # of an earlier run with this --logs
            own = ["--names", name, "--child", str(log.with_suffix(".json"))]
            own += ["--modes", *modes] if apart else []
            arguments = ["-W", "ignore", "-m", f"benchmarks.{benchmark}", *argv, *own]
            follows = apart and leader not in modes and set(modes) <= set(compiled)
            after = title_of(name, leader) if follows and leader else None
            return _Process(title, arguments, log, name, after, modes)

        leader = next((mode for mode in modes if mode in compiled), None)
        parts = [[mode] for mode in modes] if apart else [modes]
        jobs = {name: [process(name, part) for part in parts] for name in names}
        nursery = Nursery(args.device) if apart and args.fork else None
        forked = {"begin": nursery.begin} if nursery and nursery.works else {}
        record["forked"] = bool(forked)
        left = run_jobs(
            [job for group in jobs.values() for job in group],
            ended,
            processes=args.processes,
            timeout_s=args.timeout_s,
            ready_s=args.mode_s if apart and args.mode_s else math.inf,
            seconds=args.seconds,
            measure=measure,
            **forked,
        )
        if nursery:
            nursery.close()
        for name in dict.fromkeys(job.team for job in left):
            if any(job.name in ends for job in jobs[name]):
                over(name)
            else:
                record["not_run"].append(name)
    rows.sort(key=lambda row: list(entries).index(row["name"]))
    record["summary"] = summarize(rows)
    write_json(args.json, record)
    return record


def _counts(mode: str, found: Row) -> bool:
    """Whether a mode is timed."""
    return "losses" in found and "error" not in found and mode != "eager again"


def _row(
    entry: Entry,
    jobs: Sequence[_Process],
    ends: Mapping[str, str | None],
    windows: Mapping[str, Mapping[str, list[float]]] | None,
) -> Row:
    """What the processes of an entry have written, and why they ended, with the windows by kind; None: not timed."""
    times = None if windows is None else windows.get("windows_ms", {})
    row = {"name": entry.name, "family": entry.family, "modes": {}, "stage": "began", "error": None}
    for job in jobs:
        part, why = job.part(), ends.get(job.name, OVER)
        found = row["modes"] = row["modes"] | part.pop("modes")
        row |= part
        missing = [mode for mode in job.modes if mode not in (times or {})]
        if why in CUT and missing == list(job.modes):
            if not all(mode.endswith(TWIN) for mode in job.modes):
                row["error"] = why
        elif why not in CUT and why is not None:
            for mode in missing:
                found.setdefault(mode, {}).setdefault("error", why)
    for kind, found_of_kind in (windows or {}).items():
        for mode, ms in found_of_kind.items():
            row["modes"][mode][kind] = ms
    if times:
        row["stage"] = "done" if row["error"] is None else "timed in part"
    else:
        errors = [found["error"] for found in row["modes"].values() if "error" in found]
        row["error"] = row["error"] or next(iter(errors), None)
        row["stage"] = row["stage"] if times is None else "timed"
    return row


def _failure(row: Row) -> str | None:
    if "not_installed" in row:
        return f"{row['name']}: not installed ({row['not_installed']})"
    if row["error"]:
        return f"{row['name']}: {row['error'].splitlines()[0]} ({row['stage']})"
    return None
