"""Two versions of the library in one run: the host's cost of a replayed step, steps of a Trainer, and their losses.

    git worktree add ../old <commit>
    python -m benchmarks.before_and_after --before ../old --json both.json      # one CUDA GPU
    python -m benchmarks.before_and_after --before . --scale tiny               # does the script work? (CPU)

benchmarks/README.md says what is compared.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch

import pygraph_train
from benchmarks import host_cost, lightning_step
from benchmarks.children import Job, Turns, run_jobs
from benchmarks.command import NO_CLAIM, new_record, settle_defaults, settle_device
from benchmarks.record import DASH, commit_of, print_table, write_json
from benchmarks.workloads import WORKLOADS
from pygraph_train import integrations

VERSIONS = ("before", "after")
AGAIN = "after, again"
"""A second run of the present version: do two runs of one version have the same losses?"""
HOST_ROWS = tuple(f"host:{model}:{kernels}" for model in host_cost.MODELS for kernels in host_cost.KERNELS)
FIT_ROWS = tuple(f"fit:{model}:{mode}" for model in WORKLOADS for mode in ("pygraph-eager", "pygraph"))
DEFAULT_ROWS = (
    *HOST_ROWS,
    *(f"fit:{model}:pygraph-eager" for model in WORKLOADS),
    "fit:mlp:pygraph",
    "fit:bert:pygraph",
)
LONGEST_WAIT = 60.0
"""Seconds until a version is measured without the other one, which may have crashed."""
BETWEEN = 0.3
"""Seconds after a measurement in which another process gets its turn."""

Row = dict[str, Any]


class MeasuredInTurns(lightning_step.Measurement):
    """Times each window while no other process runs."""

    def __init__(self, turns: Turns, **options: Any) -> None:
        super().__init__(**options)
        self._turns = turns
        self._turn: AbstractContextManager[None] | None = None

    def _begin(self) -> None:
        self._synchronize()
        self._turn = self._turns.alone()
        self._turn.__enter__()
        self._border = time.perf_counter()

    def _start_timing(self) -> None:
        super()._start_timing()
        self._begin()

    def _end_window(self) -> None:
        super()._end_window()
        assert self._turn is not None
        self._turn.__exit__(None, None, None)
        self._turn = None
        if len(self.windows_ms) < self.windows:
            time.sleep(BETWEEN)
            self._begin()


def measure(name: str, args: argparse.Namespace, turns: Turns) -> Row:
    """One row of one version, in a process whose `pygraph_train` is of that version."""
    kind, model, way = name.split(":")
    if kind == "fit":
        return lightning_step.measured(
            model,
            way,
            args,
            lambda: lightning_step.make_module(model, way, args),
            measurement_of=lambda **options: MeasuredInTurns(turns, **options),
        )
    device = torch.device(args.device)
    step, batches, row = host_cost.prepared(model, way, args)
    rounds: list[list[float]] = []
    if args.processes > 1:
        _wait_for_the_other_version(Path(args.child[1]))
    for _ in range(args.windows):
        with turns.alone(), _one_processor():
            times: list[float] = []
            while len(times) < args.calls:
                times += host_cost.host_us(step, batches, device)
        rounds.append(times)
        time.sleep(BETWEEN)
    with turns.alone(), _one_processor():
        parts = host_cost.parts_us(step, batches, device, args.calls)
    return row | {
        "windows_us": [statistics.median(times) for times in rounds],
        "shortest_us": min(map(min, rounds)),
        "parts_us": parts,
        "report": step.report().to_dict(),
        "error": None,
    }


def _wait_for_the_other_version(result: Path) -> None:
    """Begin to measure when both versions of a row are ready, so that their windows follow each other in turns."""
    result.with_suffix(".ready").touch()
    number = result.name.partition("_")[0]
    both = [result.with_name(f"{number}_{version}.ready") for version in VERSIONS]
    end = time.monotonic() + LONGEST_WAIT
    while time.monotonic() < end and not all(ready.exists() for ready in both):
        time.sleep(0.01)


@contextmanager
def _one_processor() -> Iterator[None]:
    """Inside, this thread runs on one processor, which is the same one for both versions."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(allowed)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)


def summarize(rows: Sequence[Row]) -> list[Row]:
    """One entry for each row that both versions have: times, their ratio, and whether all losses are equal."""
    found = {(row["name"], row["version"]): row for row in rows}
    names = dict.fromkeys(row["name"] for row in rows)
    versions = (*VERSIONS, AGAIN)
    return [_compared(name, *(found.get((name, version)) for version in versions)) for name in names]


def _compared(name: str, before: Row | None, after: Row | None, again: Row | None = None) -> Row:
    entry: Row = {"name": name, "unit": "us" if name.startswith("host") else "ms"}
    for version, row in zip(VERSIONS, (before, after), strict=True):
        entry[version] = None if row is None else _median(row)
        if row is not None and name.startswith("host"):
            entry[f"shortest_{version}"] = row.get("shortest_us")
    if entry["before"] and entry["after"]:
        pairs = zip(_windows(before), _windows(after), strict=False)
        entry["after_over_before"] = statistics.median(ours / theirs for theirs, ours in pairs)
    if after and after.get("first_losses"):
        for key, other in (("losses_equal", before), ("losses_equal_again", again)):
            if other and other.get("first_losses"):
                ours, theirs = after["first_losses"], other["first_losses"]
                count = min(len(ours), len(theirs))
                entry["losses_compared"], entry[key] = count, ours[:count] == theirs[:count]
    return entry


def _windows(row: Row | None) -> list[float]:
    return (row or {}).get("windows_us") or (row or {}).get("windows_ms") or []


def _median(row: Row) -> float | None:
    windows = _windows(row)
    return statistics.median(windows) if windows else None


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--before", type=Path, required=True, help="a checkout of the version to compare with"
    )
    parser.add_argument(
        "--rows", default=",".join(DEFAULT_ROWS), help="comma-separated, as host:bert:compiled"
    )
    parser.add_argument("--processes", type=int, default=6, help="that set up side by side")
    parser.add_argument("--windows", type=int, help="timed windows of a row (default: 15; CPU: 2)")
    parser.add_argument("--steps", type=int, help="steps a window of a Trainer (default: 40; CPU: 5)")
    parser.add_argument("--calls", type=int, help="calls a window of host rows (default: 60; CPU: 4)")
    parser.add_argument("--timeout-s", type=float, default=300, help="of a row in one version")
    parser.add_argument(
        "--seconds", type=float, help="of the whole run; rows that are not done by then are left out"
    )
    parser.add_argument(
        "--commits", default=",", help="of both versions, where git cannot tell: BEFORE,AFTER"
    )
    parser.add_argument(
        "--again", action="store_true", help="a second run of the Trainer's rows, for its losses"
    )
    parser.add_argument("--scale", choices=("full", "tiny"), default="full")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument("--json", type=Path, help="write rows and environment there, after each row")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)  # a row, and the file for it
    args = parser.parse_args(argv)
    settle_device(parser, args)
    settle_defaults(args, windows=(15, 2), steps=(40, 5), calls=(60, 4))
    args.warmup, args.max_warmup = (8, 60) if args.device == "cpu" else (60, 300)
    args.progress_bar = False
    args.rows = args.rows.split(",")
    if unknown := [name for name in args.rows if name not in HOST_ROWS + FIT_ROWS]:
        parser.error(f"--rows: unknown {', '.join(unknown)}; choose from {', '.join(HOST_ROWS + FIT_ROWS)}")
    if not (args.before / "pygraph_train").is_dir():
        parser.error(f"--before: {args.before} has no folder pygraph_train")
    args.commits = args.commits.split(",")
    if len(args.commits) != len(VERSIONS):
        parser.error("--commits: two commits with a comma between them")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print one table, write the JSON. Returns 1 if a row crashed or losses differ."""
    argv = sys.argv[1:] if argv is None else list(argv)
    args = parse(argv)
    warnings.filterwarnings("ignore")
    if args.child:
        return _be_child(args)
    record = new_record("before_and_after", args) | {"rows": [], "summary": [], "not_run": []}
    trees = (args.before, Path(__file__).parents[1])
    commits = [given or commit_of(tree) for given, tree in zip(args.commits, trees, strict=True)]
    record["commits"] = dict(zip(VERSIONS, commits, strict=True))
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    with tempfile.TemporaryDirectory() as made:
        record["not_run"] = _run(args, argv, trees, Path(made), record)
    title = "Before and after" if record["timing_claim"] else NO_CLAIM
    columns = ["row", *VERSIONS, "after/before", "shortest before", "shortest after", "losses"]
    print_table(title, columns, [_cells(entry) for entry in record["summary"]])
    failed = any(row["error"] for row in record["rows"])
    return int(failed or any(map(_differs, record["summary"])))


def _differs(entry: Row) -> bool:
    """Whether losses differ, and not between two runs of one version too."""
    return entry.get("losses_equal") is False and entry.get("losses_equal_again") is not False


def _run(
    args: argparse.Namespace, argv: list[str], trees: Sequence[Path], made: Path, record: Row
) -> list[str]:
    """Measure all rows; returns the names of those that were not begun."""
    jobs: dict[str, tuple[str, str, Path]] = {}
    queue: list[Job] = []
    places = {version: _package(tree, made / version) for version, tree in zip(VERSIONS, trees, strict=True)}
    places[AGAIN] = places["after"]
    for number, name in enumerate(args.rows):
        for version in (*VERSIONS, AGAIN)[: 3 if args.again and name.startswith("fit") else 2]:
            result = made / f"{number}_{version}.json"
            child = [*argv, "--child", name, str(result)]
            begin = f"import sys; sys.path.insert(0, {str(places[version])!r}); "
            begin += (
                f"from benchmarks import before_and_after; raise SystemExit(before_and_after.main({child!r}))"
            )
            title = f"{name} {version}"
            jobs[title] = (name, version, result)
            queue.append(Job(title, ["-W", "ignore", "-c", begin], result.with_suffix(".log")))

    def ended(job: Job, why: str | None) -> None:
        name, version, result = jobs[job.name]
        row = json.loads(result.read_text()) if result.exists() else {"error": None}
        row |= {"name": name, "version": version, "error": row["error"] or why}
        record["rows"].append(row)
        record["summary"] = summarize(record["rows"])
        write_json(args.json, record)
        print(f"{job.name}: {row['error'] or _median(row)}", flush=True)

    left = run_jobs(queue, ended, processes=args.processes, timeout_s=args.timeout_s, seconds=args.seconds)
    return [job.name for job in left]


def _be_child(args: argparse.Namespace) -> int:
    name, result = args.child
    turns = Turns()
    torch.set_float32_matmul_precision("high")
    args.timeout_s = 0  # the parent has the time limit: a process that waits for its turn is not late
    try:
        for package in (pygraph_train, integrations):
            if not str(package.__file__).startswith(sys.path[0]):
                raise ImportError(f"{package.__name__} is not of the version that this row is for")
        row = measure(name, args, turns)
    except Exception as error:
        row = {"error": f"{type(error).__name__}: {error}"[:2000]}
    write_json(Path(result), row)
    return 0


def _package(tree: Path, place: Path) -> Path:
    """A folder from which `pygraph_train` and `pygraph_train.integrations` of a checkout can be imported."""
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(tree / "pygraph_train", place / "pygraph_train", ignore=ignored)
    shutil.copytree(
        tree / "integrations", place / "pygraph_train" / "integrations", ignore=ignored, dirs_exist_ok=True
    )
    return place


def _cells(entry: Row) -> list[str]:
    def cell(key: str, form: str) -> str:
        return DASH if entry.get(key) is None else format(entry[key], form)

    losses = {True: "equal", False: "DIFFER"}.get(entry.get("losses_equal"), DASH)  # type: ignore[arg-type]
    if entry.get("losses_equal_again") is False:
        losses += ", also between two runs of one version"
    times = [cell("before", ".2f"), cell("after", ".2f"), cell("after_over_before", ".3f")]
    return [entry["name"], *times, *(cell(f"shortest_{version}", ".1f") for version in VERSIONS), losses]


if __name__ == "__main__":
    raise SystemExit(main())
