"""Many architectures with random weights: what of a training step is replayed, and how much faster it is.

    python -m benchmarks.zoo --json zoo.json --seconds 560 --processes 12     # one CUDA GPU
    python -m benchmarks.zoo --json zoo.json --seconds 560 --resume           # what the first run did not reach
    python -m benchmarks.zoo --modes compiled --json zoo_compiled.json        # a part, with Inductor's kernels
    python -m benchmarks.zoo --scale tiny                                     # does the script work? (CPU)

Each entry has a process of its own; benchmarks/README.md says how they share the machine, and what is measured.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import tempfile
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.children import Job, Turns, run_jobs
from benchmarks.command import NO_CLAIM, new_record, settle_defaults, settle_device
from benchmarks.contenders import Contender, Setting, first_losses, settle, start, windows
from benchmarks.record import print_table, write_json
from benchmarks.zoo_models import ENTRIES, FULL, TINY, NotInstalled
from benchmarks.zoo_summary import lines_of, summarize, table_of

Row = dict[str, Any]

SETS = {
    "eager": ("eager", "graphed-eager"),
    "compiled": ("eager", "compile", "reduce-overhead", "graphed-compiled"),
}
"""What is compared: with eager kernels, and with Inductor's."""

LOSSES = 20
"""Steps of which the losses are compared."""


def measure(name: str, modes: Sequence[str], args: argparse.Namespace, turns: Turns) -> Row:
    """The row of one entry, written to `args.child` after each part of it."""
    row: Row = {"name": name, "family": ENTRIES[name].family, "modes": {}, "stage": "made", "error": None}
    torch.set_float32_matmul_precision("high" if args.autocast else "highest")
    try:
        _measure(row, name, modes, args, turns)
        row["stage"] = "done"
    except NotInstalled as reason:
        row["not_installed"] = str(reason)
    except Exception as error:
        row["error"] = f"{type(error).__name__}: {error}"[:1000]
        row["error_at"] = traceback.format_exc().strip().splitlines()[-8:]
    write_json(args.child, row)
    return row


def _measure(row: Row, name: str, modes: Sequence[str], args: argparse.Namespace, turns: Turns) -> None:
    def stage(text: str) -> None:
        row["stage"] = text
        write_json(args.child, row)

    size = FULL if args.scale == "full" else TINY
    setting = Setting(
        lambda: ENTRIES[name].build(size), torch.device(args.device), args.autocast, args.engine
    )
    # the same step again and again in a process of many contenders; what one of them compiled counts for all
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 32)
    if "graphed-eager" in modes:  # whose losses may differ where those of plain runs do
        for again in ("eager", "eager again"):
            stage(again)
            plain = start("eager", setting)
            first_losses(plain, LOSSES)
            settle(plain, least=1, most=1, seconds=args.settle_s)
            row["modes"][again] = {"losses": plain.losses, "reserved_mib": plain.reserved_mib}
            del plain
    kept: list[Contender] = []
    for mode in [m for m in modes if m != "eager"] + ["eager"]:  # eager last: it needs no warm-up
        stage(mode)
        try:
            contender = start(mode, setting)
            first_losses(contender, LOSSES)
            library = contender.report is not None
            least, most = (args.least, args.most) if library or mode == "backend" else (5, 5)
            settle(contender, least=least, most=most, seconds=args.settle_s)
        except Exception as error:
            if mode == "eager":
                raise
            row["modes"][mode] = {"error": f"{type(error).__name__}: {error}"[:1000]}
            continue
        found = row["modes"].setdefault(mode, {})
        found |= {"losses": contender.losses, "reserved_mib": contender.reserved_mib}
        if contender.report is not None:
            found |= _told_by(contender)
        kept.append(contender)
    stage("waits for its turn")
    with turns.alone():
        stage("timed")
        times = windows(kept, count=args.windows, seconds=args.window_s)
    for contender in kept:
        found = row["modes"][contender.mode]
        found |= {"windows_ms": times[contender.mode]}
        if contender.report is not None:  # plans change while they are timed, too
            found |= _told_by(contender)


def _told_by(contender: Contender) -> Row:
    """What the library says of its steps."""
    assert contender.report is not None
    told = contender.report().to_dict()
    names = (
        "headline",
        "running_plan",
        "steps",
        "steps_from_graphs",
        "fallbacks",
        "notes",
        "first_replay_step",
    )
    regions = [f"{region['name']}: {region['reason']}" for region in told["regions"] if region["reason"]]
    return {key: told[key] for key in names} | {"regions": regions[:10]}


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line, with the defaults of the device filled in."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--names", help="entries, separated by semicolons (default: all)")
    parser.add_argument("--families", help="a part of the names of families: transformers, timm, ...")
    parser.add_argument("--modes", choices=tuple(SETS), default="eager", help="which kernels are compared")
    parser.add_argument("--processes", type=int, help="at a time (default: 12; CPU: 1)")
    parser.add_argument("--seconds", type=float, help="for the whole run: what is done by then is kept")
    parser.add_argument("--timeout-s", type=float, default=150, help="for one entry")
    parser.add_argument("--settle-s", type=float, default=20, help="at most, until plans are chosen")
    parser.add_argument("--windows", type=int, help="of each mode (default: 7; CPU: 2)")
    parser.add_argument("--window-s", type=float, help="seconds a window (default: 0.07; CPU: 0)")
    parser.add_argument("--autocast", action="store_true", help="train under bf16 autocast")
    parser.add_argument("--scale", choices=("full", "tiny"), default="full")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument("--json", type=Path, help="write rows and environment there, after each entry")
    parser.add_argument("--resume", action="store_true", help="keep the finished rows of the --json file")
    parser.add_argument("--merge", type=Path, nargs="+", help="measure nothing; join these files into --json")
    parser.add_argument("--table", action="store_true", help="with --merge: print the table of the docs")
    parser.add_argument("--logs", type=Path, help="folder of what the processes print")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    parser.set_defaults(least=None, most=None)  # steps until plans are chosen
    args = parser.parse_args(argv)
    settle_device(parser, args)
    args.engine = "cuda" if args.device == "cuda" else "emulated"
    settle_defaults(
        args, processes=(12, 1), windows=(7, 2), window_s=(0.07, 0.0), least=(40, 15), most=(160, 30)
    )
    args.names = _chosen(parser, args)
    if args.resume and not args.json:
        parser.error("--resume needs --json FILE, the record of the run to go on with")
    return args


def _chosen(parser: argparse.ArgumentParser, args: argparse.Namespace) -> list[str]:
    if args.names:
        names = [name.strip() for name in args.names.split(";")]
        if unknown := [name for name in names if name not in ENTRIES]:
            parser.error(f"--names: unknown {'; '.join(unknown)}")
        return names
    chosen = [e for e in ENTRIES.values() if args.modes == "eager" or e.compiled]
    return [e.name for e in chosen if args.families is None or args.families in e.family]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the table, write the JSON. Returns 1 if a step could be made without the library only."""
    argv = sys.argv[1:] if argv is None else list(argv)
    args = parse(argv)
    warnings.filterwarnings("ignore")
    if args.child:
        measure(args.names[0], SETS[args.modes], args, Turns())
        return 0
    if args.merge:
        record = _merged(args.merge)
        write_json(args.json, record)
    else:
        record = _run(args, argv)
    claim = record["timing_claim"]
    if args.table:
        print(table_of(record["rows"]))
        return 0
    print_table("Training step" if claim else NO_CLAIM, *lines_of(record["rows"]))
    for key, value in record["summary"].items():
        print(f"{key}: {value}")
    return int(bool(record["summary"]["failed_with_the_library"]))


def _run(args: argparse.Namespace, argv: Sequence[str]) -> dict[str, Any]:
    record = new_record("zoo", args) | {"kernels": args.modes, "rows": [], "summary": {}, "not_run": []}
    rows: list[Row] = record["rows"]
    if args.resume and args.json.exists():
        rows += [row for row in json.loads(args.json.read_text())["rows"] if row["stage"] == "done"]
    done = {row["name"] for row in rows}
    with tempfile.TemporaryDirectory() as made:
        logs = args.logs or Path(made)
        logs.mkdir(parents=True, exist_ok=True)
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
        jobs = [_job(name, number, logs, argv) for number, name in enumerate(args.names) if name not in done]

        def ended(job: Job, why: str | None) -> None:
            path = job.log.with_suffix(".json")
            row = json.loads(path.read_text()) if path.exists() else _no_row(job.name)
            row["error"] = row["error"] or why
            rows.append(row)
            record["summary"] = summarize(rows)
            write_json(args.json, record)
            print(_line(row), flush=True)

        left = run_jobs(jobs, ended, processes=args.processes, timeout_s=args.timeout_s, seconds=args.seconds)
    record["not_run"] = [job.name for job in left]
    rows.sort(key=lambda row: list(ENTRIES).index(row["name"]))
    record["summary"] = summarize(rows)
    write_json(args.json, record)
    return record


def _no_row(name: str) -> Row:
    return {"name": name, "family": ENTRIES[name].family, "modes": {}, "stage": "began", "error": None}


def _job(name: str, number: int, logs: Path, argv: Sequence[str]) -> Job:
    log = logs / f"{number:03}.log"
    options = [*argv, "--names", name, "--child", str(log.with_suffix(".json"))]
    return Job(name, ["-W", "ignore", "-m", "benchmarks.zoo", *options], log)


def _merged(paths: Sequence[Path]) -> dict[str, Any]:
    """The rows of several files. A row that is done stands for one of the same name that is not."""
    records = [json.loads(path.read_text()) for path in paths]
    rows: dict[str, Row] = {}
    for row in itertools.chain.from_iterable(record["rows"] for record in records):
        if row["name"] not in rows or row["stage"] == "done":
            rows[row["name"]] = row
    commits = {record["environment"]["commit"] for record in records}
    merged = records[0] | {"rows": list(rows.values()), "files": [path.name for path in paths]}
    merged |= {"commits": sorted(map(str, commits)), "summary": summarize(list(rows.values()))}
    return merged


def _line(row: Row) -> str:
    if "not_installed" in row:
        return f"{row['name']}: not installed ({row['not_installed']})"
    if row["error"]:
        return f"{row['name']}: {row['error'].splitlines()[0]} ({row['stage']})"
    _, ((_, *cells),) = lines_of([row])
    return f"{row['name']}: {'  '.join(cells)}"


if __name__ == "__main__":
    raise SystemExit(main())
