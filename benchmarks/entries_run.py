"""Entries of the zoo, each measured in a process of its own: what zoo.py and never_slower.py share."""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.children import Job, Turns, run_jobs
from benchmarks.command import new_record, settle_defaults, settle_device
from benchmarks.contenders import Contender, Setting, first_losses, settle, start, windows
from benchmarks.limit import StepTimeout, time_limit
from benchmarks.record import write_json
from benchmarks.zoo_models import FULL, TINY, Entry, NotInstalled

__all__ = ["add_options", "be_child", "run_entries", "settle_options"]

Row = dict[str, Any]

LOSSES = 20
"""Steps of which the losses are compared."""


def add_options(parser: argparse.ArgumentParser, *, timeout_s: float, processes: int) -> None:
    """The options of a run of many entries."""
    parser.add_argument("--names", help="entries, separated by semicolons (default: all)")
    parser.add_argument("--processes", type=int, help=f"at a time (default: {processes}; CPU: 1)")
    parser.add_argument("--seconds", type=float, help="for the whole run: what is done by then is kept")
    parser.add_argument("--timeout-s", type=float, default=timeout_s, help="for one entry")
    parser.add_argument("--mode-s", type=int, default=120, help="for one mode of an entry; 0: no limit")
    parser.add_argument("--settle-s", type=float, default=20, help="at most, until plans are chosen")
    parser.add_argument("--windows", type=int, help="of each mode (default: 7; CPU: 2)")
    parser.add_argument("--window-s", type=float, help="seconds a window (default: 0.05; CPU: 0)")
    parser.add_argument("--scale", choices=("full", "tiny"), default="full")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument("--json", type=Path, help="write rows and environment there, after each entry")
    parser.add_argument("--resume", action="store_true", help="keep the finished rows of the --json file")
    parser.add_argument("--logs", type=Path, help="folder of what the processes print")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    parser.set_defaults(least=None, most=None)  # steps until plans are chosen


def settle_options(
    parser: argparse.ArgumentParser,
    args: argparse.Namespace,
    entries: Mapping[str, Entry],
    *,
    processes: int,
) -> None:
    """Fill in the defaults of the device, and make a list of the names that were given, if any."""
    settle_device(parser, args)
    args.engine = "cuda" if args.device == "cuda" else "emulated"
    settle_defaults(args, processes=(processes, 1), windows=(7, 2), window_s=(0.05, 0.0))
    settle_defaults(args, least=(40, 15), most=(1500, 30))
    if args.names is not None:
        args.names = [name.strip() for name in args.names.split(";")]
        if unknown := [name for name in args.names if name not in entries]:
            parser.error(f"--names: unknown {'; '.join(unknown)}")
    if args.resume and not args.json:
        parser.error("--resume needs --json FILE, the record of the run to go on with")


def be_child(entry: Entry, modes: Sequence[str], args: argparse.Namespace) -> None:
    """Measure one entry, and write its row to `args.child` after each part of it.

    Args:
        modes: of `contenders.MODES`. "eager again" is a second run of the plain loop, of which only the losses count.
        args: has the options above, and `autocast`.
    """
    turns = Turns()
    row: Row = _no_row(entry) | {"stage": "made"}
    torch.set_float32_matmul_precision("high" if args.autocast else "highest")
    try:
        _measure(row, entry, modes, args, turns)
        row["stage"] = "done"
    except NotInstalled as reason:
        row["not_installed"] = str(reason)
    except Exception as error:
        row["error"] = _said(error)
        row["error_at"] = traceback.format_exc().strip().splitlines()[-8:]
    write_json(args.child, row)


def _measure(row: Row, entry: Entry, modes: Sequence[str], args: argparse.Namespace, turns: Turns) -> None:
    def stage(text: str) -> None:
        row["stage"] = text
        write_json(args.child, row)

    size = FULL if args.scale == "full" else TINY
    setting = Setting(lambda: entry.build(size), torch.device(args.device), args.autocast, args.engine)
    _warm_up(setting.device)
    # contenders share the code of the model, and with it the limit of what Dynamo compiles for it
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)
    kept: list[Contender] = []
    for mode in modes:
        stage(mode)
        found = row["modes"].setdefault(mode, {})
        try:
            with time_limit(args.mode_s):
                contender = _settled(mode, setting, args)
        except StepTimeout:
            found["error"] = f"timed out after {args.mode_s} s"
            continue
        except NotInstalled:
            raise
        except Exception as error:
            if mode.startswith("eager"):
                raise
            found["error"] = _said(error)
            continue
        found |= {"losses": contender.losses, "reserved_mib": contender.reserved_mib}
        found |= _told_by(contender)
        if mode != "eager again":
            kept.append(contender)
        del contender
    stage("waits for its turn")
    with turns.alone():
        stage("timed")
        times = windows(kept, count=args.windows, seconds=args.window_s)
    for contender in kept:  # plans change while they are timed, too
        row["modes"][contender.mode] |= {"windows_ms": times[contender.mode]} | _told_by(contender)


def _warm_up(device: torch.device) -> None:
    """Make what cuBLAS keeps for the whole process, or the first mode alone would seem to need that memory."""
    x = torch.randn(64, 64, device=device, requires_grad=True)
    for kind in (torch.float32, torch.bfloat16):
        torch.nn.functional.linear(x.to(kind), x.to(kind), x[0].to(kind)).sum().backward()


def _settled(mode: str, setting: Setting, args: argparse.Namespace) -> Contender:
    contender = start(mode.removesuffix(" again"), setting)
    first_losses(contender, LOSSES)
    plain = contender.report is None and mode != "backend"
    least, most = (5, 5) if plain else (args.least, args.most)
    settle(contender, least=least, most=most, seconds=args.settle_s)
    if mode.startswith("graphed") and _has_no_graph_of_both(contender):
        # regions are tried when the steps that were made could have paid for them
        end = time.monotonic() + args.settle_s / 2
        for _ in range(args.most):
            contender.step()
            if time.monotonic() > end:
                break
        settle(contender, least=least, most=most, seconds=args.settle_s)
    return contender


def _has_no_graph_of_both(contender: Contender) -> bool:
    assert contender.report is not None
    return str(contender.report().running_plan) in ("F B O", "F B {O}")


def _told_by(contender: Contender) -> Row:
    """What the library says of its steps."""
    if contender.report is None:
        return {}
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


def run_entries(
    benchmark: str,
    entries: Mapping[str, Entry],
    args: argparse.Namespace,
    argv: Sequence[str],
    summarize: Callable[[Sequence[Row]], dict[str, Any]],
    line: Callable[[Row], str],
) -> dict[str, Any]:
    """The record of a run, written to `args.json` after each entry.

    Args:
        benchmark: the module `benchmarks.<benchmark>` is what a child runs, with `argv`, its name and its file.
        entries: what can be measured; `args.names` are measured.
        line: what is printed of a row.
    """
    record = new_record(benchmark, args) | {"rows": [], "summary": {}, "not_run": []}
    rows: list[Row] = record["rows"]
    if args.resume and args.json.exists():
        rows += [row for row in json.loads(args.json.read_text())["rows"] if row["stage"] == "done"]
    done = {row["name"] for row in rows}
    with tempfile.TemporaryDirectory() as made:
        logs = args.logs or Path(made)
        logs.mkdir(parents=True, exist_ok=True)
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
        jobs = []
        for number, name in enumerate(args.names):
            if name not in done:
                log = logs / f"{number:03}.log"
                own = ["--names", name, "--child", str(log.with_suffix(".json"))]
                jobs.append(Job(name, ["-W", "ignore", "-m", f"benchmarks.{benchmark}", *argv, *own], log))

        random.Random(0).shuffle(jobs)  # of a run that is cut, the rows are a sample

        def ended(job: Job, why: str | None) -> None:
            path = job.log.with_suffix(".json")
            row = json.loads(path.read_text()) if path.exists() else _no_row(entries[job.name])
            row["error"] = row["error"] or why
            rows.append(row)
            record["summary"] = summarize(rows)
            write_json(args.json, record)
            print(_failure(row) or line(row), flush=True)

        left = run_jobs(jobs, ended, processes=args.processes, timeout_s=args.timeout_s, seconds=args.seconds)
    record["not_run"] = [job.name for job in left]
    rows.sort(key=lambda row: list(entries).index(row["name"]))
    record["summary"] = summarize(rows)
    write_json(args.json, record)
    return record


def _no_row(entry: Entry) -> Row:
    return {"name": entry.name, "family": entry.family, "modes": {}, "stage": "began", "error": None}


def _failure(row: Row) -> str | None:
    if "not_installed" in row:
        return f"{row['name']}: not installed ({row['not_installed']})"
    if row["error"]:
        return f"{row['name']}: {row['error'].splitlines()[0]} ({row['stage']})"
    return None


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:1000]
