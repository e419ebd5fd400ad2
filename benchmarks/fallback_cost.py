"""What a training step costs the host after the library has given up all graphs of it, beside the plain loop.

    python -m benchmarks.fallback_cost --json fallback.json            # one CUDA GPU
    python -m benchmarks.fallback_cost --scale tiny                    # host time on a CPU, with emulated graphs
    python -m benchmarks.fallback_cost --scale tiny --states off,slower --loops graphed-step

Windows of both loops take turns in one process; benchmarks/README.md says what the states and columns mean.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import itertools
import statistics
import warnings
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from benchmarks.command import NO_CLAIM, new_record, settle_choices, settle_device
from benchmarks.fallback_loops import LOOPS, SIZES, Case, measurable, settled
from benchmarks.fallback_states import STATES
from benchmarks.record import DASH, print_table, write_json


def measure(loop: str, state: str, args: argparse.Namespace) -> dict[str, Any]:
    """One row: host microseconds of one step in both loops. A crash is part of the row, never raised."""
    row: dict[str, Any] = {"loop": loop, "state": state, "error": None}
    torch._dynamo.reset()
    gc.collect()
    try:  # Trainers print reports
        with STATES[state].declared(), contextlib.redirect_stdout(io.StringIO()):
            row.update(_measure(loop, state, args))
    except Exception as error:
        row["error"] = f"{type(error).__name__}: {error}"[:2000]
    with suppress(ImportError):  # what Accelerate keeps in its classes
        from accelerate.state import AcceleratorState, GradientState

        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
    return row


def _measure(loop: str, state: str, args: argparse.Namespace) -> dict[str, Any]:
    cases = (Case(args, STATES[state], ours) for ours in (False, True))
    (plain, _), (ours, report) = (settled(loop, case) for case in cases)
    pairs = []
    for index in range(args.windows + 2):
        order = (plain, ours) if index % 2 else (ours, plain)
        times = {window: window(args.steps) / args.steps * 1e6 for window in order}
        pairs.append((times[plain], times[ours]))
    pairs = pairs[2:]  # both have warm caches now
    before, after = (statistics.median(column) for column in zip(*pairs, strict=True))
    told = report().to_dict()
    return {
        "plain_us": before,
        "ours_us": after,
        "more_us": statistics.median(b - a for a, b in pairs),
        "ratio": statistics.median(b / a for a, b in pairs),
        "ratio_of_minima": min(b for _, b in pairs) / min(a for a, _ in pairs),
        "plan": told["running_plan"],
        "graphs_ran": "{" in told["running_plan"],
        "report": told,
    }


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--loops", default=",".join(LOOPS), help=f"of {', '.join(LOOPS)} (default: all)")
    parser.add_argument("--states", default=",".join(STATES), help=f"of {', '.join(STATES)} (default: all)")
    parser.add_argument("--windows", type=int, default=40, help="windows of each loop")
    parser.add_argument("--steps", type=int, default=100, help="steps of a window")
    parser.add_argument("--scale", choices=tuple(SIZES), default="full")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument("--json", type=Path, help="write rows and environment there, after each row")
    args = parser.parse_args(argv)
    settle_device(parser, args)
    settle_choices(parser, args, loops=tuple(LOOPS), states=tuple(STATES))
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print one table, write the JSON. Returns 1 if any row crashed."""
    args = parse(argv)
    warnings.filterwarnings("ignore")
    rows: list[dict[str, Any]] = []
    record = new_record("fallback_cost", args) | {"rows": rows}
    title = "Host time of one step that fell back, µs" if record["timing_claim"] else NO_CLAIM
    for state, loop in itertools.product(args.states, args.loops):
        if not measurable(loop, STATES[state]):
            continue
        rows.append(measure(loop, state, args))
        write_json(args.json, record)
        print(" ".join(_cells(rows[-1])), rows[-1]["error"] or "", flush=True)
    columns = ["state", "loop", "plain", "given up", "more", "ratio", "of minima", "plan"]
    print_table(title, columns, list(map(_cells, rows)))
    return int(any(row["error"] for row in rows))


def _cells(row: dict[str, Any]) -> list[str]:
    if row["error"]:
        return [row["state"], row["loop"], "crash", *[DASH] * 5]
    times = [f"{row[key]:.1f}" for key in ("plain_us", "ours_us", "more_us")]
    ratios = [f"{row[key]:.3f}" for key in ("ratio", "ratio_of_minima")]
    return [row["state"], row["loop"], *times, *ratios, row["plan"]]


if __name__ == "__main__":
    raise SystemExit(main())
