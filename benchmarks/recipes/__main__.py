"""Runs recipes, each (recipe, way) in a process of its own, and prints one table.

    python -m benchmarks.recipes --json recipes.json                               # one CUDA GPU
    python -m benchmarks.recipes --recipes nanogpt,ppo --steps 300 --ways plain,ours --repeats 3
    python -m benchmarks.recipes --scale tiny                                      # do the scripts work? (CPU)

benchmarks/README.md says what the columns mean.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.children import end_with_parent
from benchmarks.command import NO_CLAIM, new_record, settle_choices, settle_defaults, settle_device
from benchmarks.recipes import RECIPES, WAYS, Clock, Run, recipe
from benchmarks.record import DASH, print_table, write_json

Row = dict[str, Any]

TOLD = (
    "headline",
    "running_plan",
    "steps",
    "steps_from_graphs",
    "phases_from_graphs",
    "first_replay_step",
    "first_replay_seconds",
    "ms_without_graph",
    "ms_with_graph",
    "verify_seconds",
    "captures",
    "fallbacks",
    "notes",
    "regions",
    "whole_steps",
)
"""What a row has of the library's report."""


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipes", default=",".join(RECIPES), help=f"of {', '.join(RECIPES)}")
    parser.add_argument("--ways", default=",".join(WAYS), help=f"of {', '.join(WAYS)} (default: all)")
    parser.add_argument("--steps", type=int, help="of a run (default: 300; CPU: 24)")
    parser.add_argument("--repeats", type=int, default=1, help="of each recipe and way")
    parser.add_argument("--timeout", type=int, default=120, help="seconds for each run")
    parser.add_argument("--scale", choices=("full", "tiny"), default="full")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument("--json", type=Path, help="write rows and environment there, after each row")
    parser.add_argument("--row", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    settle_device(parser, args)
    settle_choices(parser, args, recipes=RECIPES, ways=WAYS)
    settle_defaults(args, steps=(300, 24))
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print one table, write the JSON. Returns 1 if any row has an error."""
    args = parse(argv)
    if args.row is not None:
        return run_row(*args.row, args)
    record = new_record("recipes", args) | {"rows": []}
    rows: list[Row] = record["rows"]
    for repeat in range(args.repeats):
        for name in args.recipes:
            for way in args.ways:
                rows.append({"recipe": name, "way": way, "repeat": repeat} | row_of_child(name, way, args))
                write_json(args.json, record)
                print(_line(rows[-1]), flush=True)
    title = f"Runs of {args.steps} steps: plain / compile / ours" if record["timing_claim"] else NO_CLAIM
    columns = ["recipe", "seconds", "ms, last quarter", "MiB reserved", "last loss", "ours/plain"]
    print_table(title, columns, [_cells(name, rows) for name in args.recipes])
    return int(any(row["error"] for row in rows))


def row_of_child(name: str, way: str, args: argparse.Namespace) -> Row:
    """What a process of its own has measured, with caches of its own. A crash or a time-out is part of the row."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        out, log = folder / "row.json", folder / "log"
        caches = {"TORCHINDUCTOR_CACHE_DIR": f"{made}/inductor", "TRITON_CACHE_DIR": f"{made}/triton"}
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.recipes", "--row", name, way, str(out)]
        for option in ("steps", "scale", "device"):
            command += [f"--{option}", str(getattr(args, option))]
        began, error = time.perf_counter(), None
        with log.open("wb") as written:
            child = subprocess.Popen(
                command,
                stdout=written,
                stderr=subprocess.STDOUT,
                env={**os.environ, **caches},
                cwd=Path(__file__).parents[2],
                start_new_session=True,  # so that its own children are ended with it
                preexec_fn=end_with_parent,
            )
            try:
                if child.wait(args.timeout) < 0:
                    error = f"ended by signal {-child.returncode}"
            except subprocess.TimeoutExpired:
                error = f"timed out after {args.timeout} s"
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
                child.wait()
        row = json.loads(out.read_text()) if out.exists() else {}
        if error is None and "error" not in row:
            error = f"ended with status {child.returncode}"
        said = log.read_text(errors="replace").strip().splitlines()[-15:] if error else None
        return {
            **row,
            "error": error or row.get("error"),
            "said": said,
            "process_s": time.perf_counter() - began,
        }


def run_row(name: str, way: str, out: str, args: argparse.Namespace) -> int:
    """One run, in this process; the row is written to `out`."""
    clock = Clock(args.steps, args.device == "cuda", progress=Path(out))
    random.seed(0)
    torch.manual_seed(0)
    with contextlib.suppress(ImportError):
        import numpy

        numpy.random.seed(0)
    row: Row = {"error": None, "report": None}
    try:
        report = recipe(name)(Run(args.steps, args.device, way, args.scale, clock))
        if clock.made < args.steps:
            row["error"] = f"the loop ended after {clock.made} of {args.steps} steps"
        if report is not None:
            told = report.to_dict()
            row["report"] = {"text": str(report)} | {key: told[key] for key in TOLD if key in told}
    except Exception as problem:
        row["error"] = f"{type(problem).__name__}: {problem}"[:2000]
        row["traceback"] = traceback.format_exc().splitlines()[-12:]
    Path(out).write_text(json.dumps(clock.told() | row, default=str))
    return 0


def _line(row: Row) -> str:
    """What is printed as soon as a row is there."""
    found = f"{row['recipe']} {row['way']}: {row.get('whole_s', 0):.1f} s, {row.get('steps_made', 0)} steps"
    if row["error"]:
        return f"{found}; {row['error'].splitlines()[0][:160]}"
    if row["report"] is None:
        return found
    return f"{found}; {' '.join(row['report']['text'].split(chr(10) * 2)[0].split())}"


def _cells(name: str, rows: Sequence[Row]) -> list[str]:
    """A line of the table: medians over the repeats."""

    def median(way: str, key: str) -> float | None:
        of_way = [row for row in rows if row["recipe"] == name and row["way"] == way]
        found = [row[key] for row in of_way if not row["error"] and row[key] is not None]
        return statistics.median(found) if found else None

    def cell(key: str, shown: Callable[[float], str]) -> str:
        found = [median(way, key) for way in WAYS]
        return " / ".join(DASH if value is None else shown(value) for value in found)

    plain, ours = median("plain", "whole_s"), median("ours", "whole_s")
    return [
        name,
        cell("whole_s", lambda value: f"{value:.1f}"),
        cell("last_quarter_ms", lambda value: f"{value:.2f}"),
        cell("reserved_mib", lambda value: f"{value:.0f}"),
        cell("last_loss", lambda value: f"{value:.4g}"),
        DASH if not plain or ours is None else f"{ours / plain:.2f}",
    ]


if __name__ == "__main__":
    raise SystemExit(main())
