"""Many architectures with random weights: what of a training step is replayed, and how much faster it is.

    python -m benchmarks.zoo --json zoo.json --seconds 560 --processes 12     # one CUDA GPU
    python -m benchmarks.zoo --json zoo.json --seconds 560 --resume           # what the first run did not reach
    python -m benchmarks.zoo --modes compiled --json zoo_compiled.json        # a part, with Inductor's kernels
    python -m benchmarks.zoo --scale tiny                                     # does the script work? (CPU)

Each entry has a process of its own; benchmarks/README.md says how they share the machine, and what is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.children import Job, run_jobs
from benchmarks.command import NO_CLAIM, new_parser, new_record, settle, settle_defaults
from benchmarks.entry_child import AGAIN, be_child
from benchmarks.record import print_table, write_json
from benchmarks.zoo_models import ENTRIES
from benchmarks.zoo_summary import lines_of, summarize

Row = dict[str, Any]

SETS = {
    "eager": (AGAIN, "graphed-eager", "eager"),
    "compiled": ("compile", "reduce-overhead", "graphed-compiled", "eager"),
}
"""What is compared, with eager kernels and with Inductor's; in this order, since eager needs no warm-up."""


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line, with the defaults of the device filled in."""
    parser = new_parser(__doc__)
    parser.add_argument("--names", help="entries, separated by semicolons (default: all)")
    parser.add_argument(
        "--families", default="", help="a part of the names of families: transformers, timm, ..."
    )
    parser.add_argument("--modes", choices=tuple(SETS), default="eager", help="which kernels are compared")
    parser.add_argument("--autocast", action="store_true", help="train under bf16 autocast")
    parser.add_argument("--processes", type=int, help="entries at a time (default: 12; CPU: 1)")
    parser.add_argument("--seconds", type=float, help="for the whole run")
    parser.add_argument("--timeout-s", type=float, default=150, help="for one entry")
    parser.add_argument("--mode-s", type=int, default=120, help="until one mode is ready; 0: no limit")
    parser.add_argument("--settle-s", type=float, default=20, help="at most, until plans are chosen")
    parser.add_argument("--windows", type=int, help="of each mode (default: 7; CPU: 2)")
    parser.add_argument("--window-s", type=float, help="seconds a window (default: 0.05; CPU: 0)")
    parser.add_argument("--resume", action="store_true", help="keep the finished rows of the --json file")
    parser.add_argument("--logs", type=Path, help="folder of what the processes print")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    parser.set_defaults(least=None, most=None)  # steps until plans are chosen
    args = parser.parse_args(argv)
    settle(parser, args)
    settle_defaults(args, processes=(12, 1), windows=(7, 2), window_s=(0.05, 0.0))
    settle_defaults(args, least=(40, 15), most=(1500, 30))
    if args.names is None:
        chosen = [e for e in ENTRIES.values() if args.modes == "eager" or e.compiled]
        args.names = [e.name for e in chosen if args.families in e.family]
    else:
        args.names = [name.strip() for name in args.names.split(";")]
    if unknown := [name for name in args.names if name not in ENTRIES]:
        parser.error(f"--names: unknown {'; '.join(unknown)}")
    if args.resume and not args.json:
        parser.error("--resume needs --json FILE, the record of the run to go on with")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the table, write the JSON. Returns 1 if an entry trains in the plain loop only."""
    argv = sys.argv[1:] if argv is None else list(argv)
    args = parse(argv)
    warnings.filterwarnings("ignore")
    if args.child:
        be_child(ENTRIES[args.names[0]], SETS[args.modes], args)
        return 0
    record = run_entries(args, argv)
    print_table("Training step" if record["timing_claim"] else NO_CLAIM, *lines_of(record["rows"]))
    for key, value in record["summary"].items():
        print(f"{key}: {value}")
    return int(bool(record["summary"]["failed_with_the_library"]))


def run_entries(args: argparse.Namespace, argv: Sequence[str]) -> dict[str, Any]:
    """The record of a run, written to `args.json` after each entry."""
    record = new_record("zoo", args) | {"rows": [], "summary": {}, "not_run": []}
    rows: list[Row] = record["rows"]
    if args.resume and args.json.exists():
        rows += [row for row in json.loads(args.json.read_text())["rows"] if row["stage"] == "done"]
    done = {row["name"] for row in rows}
    names = [name for name in args.names if name not in done]
    random.Random(0).shuffle(names)  # of a run that is cut, the rows are a sample
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    with tempfile.TemporaryDirectory() as made:
        logs = args.logs or Path(made)
        logs.mkdir(parents=True, exist_ok=True)

        def job(name: str) -> Job:
            log = logs / f"{args.names.index(name):03}.log"
            out = log.with_suffix(".json")
            out.unlink(missing_ok=True)  # of an earlier run with this --logs
            own = ["--names", name, "--child", str(out)]
            return Job(name, ["-W", "ignore", "-m", "benchmarks.zoo", *argv, *own], log)

        def ended(job: Job, why: str | None) -> None:
            rows.append(_row(job, why))
            record["summary"] = summarize(rows)
            write_json(args.json, record)
            print(_line(rows[-1]), flush=True)

        jobs = [job(name) for name in names]
        limits = {"processes": args.processes, "timeout_s": args.timeout_s, "seconds": args.seconds}
        record["not_run"] = [job.name for job in run_jobs(jobs, ended, **limits)]
    rows.sort(key=lambda row: list(ENTRIES).index(row["name"]))
    record["summary"] = summarize(rows)
    write_json(args.json, record)
    return record


def _row(job: Job, why: str | None) -> Row:
    """What the process of an entry has written, and what was wrong: with its end, or else with a mode."""
    out = job.log.with_suffix(".json")
    part = json.loads(out.read_text()) if out.exists() else {"stage": "began", "modes": {}}
    errors = [found["error"] for found in part["modes"].values() if "error" in found]
    return {
        "name": job.name,
        "family": ENTRIES[job.name].family,
        **part,
        "error": why or next(iter(errors), None),
    }


def _line(row: Row) -> str:
    if "not_installed" in row:
        return f"{row['name']}: not installed ({row['not_installed']})"
    if row["error"]:
        return f"{row['name']}: {row['error'].splitlines()[0]} ({row['stage']})"
    _, ((_, *cells),) = lines_of([row])
    return f"{row['name']}: {'  '.join(cells)}"


if __name__ == "__main__":
    raise SystemExit(main())
