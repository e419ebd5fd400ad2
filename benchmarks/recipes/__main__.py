"""Runs recipes, each (recipe, way) in a process of its own, and prints one table.

    python -m benchmarks.recipes --json recipes.json                               # one CUDA GPU
    python -m benchmarks.recipes --recipes nanogpt,ppo --steps 300 --ways plain,ours --repeats 3
    python -m benchmarks.recipes --scale tiny                                      # do the scripts work? (CPU)

benchmarks/README.md says what the columns mean.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import statistics
import traceback
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy
import torch

from benchmarks.children import row_of_process
from benchmarks.command import NO_CLAIM, new_parser, new_record, settle, settle_defaults
from benchmarks.recipes import RECIPES
from benchmarks.recipes.run import Run
from benchmarks.record import DASH, print_table, write_json

WAYS = ("plain", "compile", "ours")

WARM = 12
"""Plain steps before the rows of a recipe: who uses kernels first waits for the disk, up to 12 seconds."""


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = new_parser(__doc__)
    parser.add_argument("--recipes", default=",".join(RECIPES), help=f"of {', '.join(RECIPES)}")
    parser.add_argument("--ways", default=",".join(WAYS), help=f"of {', '.join(WAYS)} (default: all)")
    parser.add_argument("--steps", type=int, help="of a run (default: 300; CPU: 24)")
    parser.add_argument("--repeats", type=int, default=1, help="of each recipe and way")
    parser.add_argument("--timeout", type=int, default=120, help="seconds for each run; 0: none")
    parser.add_argument("--row", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    settle(parser, args, recipes=tuple(RECIPES), ways=WAYS)
    settle_defaults(args, steps=(300, 24))
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print one table, write the JSON. Returns 1 if any row has an error."""
    args = parse(argv)
    if args.row is not None:
        name, way, out = args.row
        write_json(Path(out), run_row(name, way, Path(out), args))
        return 0
    record = new_record("recipes", args) | {"rows": []}
    rows: list[dict[str, Any]] = record["rows"]
    same = [f"--{option}={getattr(args, option)}" for option in ("scale", "device")]
    options = [*same, f"--steps={args.steps}"]
    for repeat, name, way in itertools.product(range(args.repeats), args.recipes, args.ways):
        if record["timing_claim"] and repeat == 0 and way == args.ways[0]:
            row_of_process("benchmarks.recipes", (name, "plain"), [*same, f"--steps={WARM}"], args.timeout)
        row = row_of_process("benchmarks.recipes", (name, way), options, args.timeout)
        rows.append({"recipe": name, "way": way, "repeat": repeat, **row})
        write_json(args.json, record)
        said = (row["error"] or row.get("said") or "").strip().split("\n\n")[0]
        print(f"{name} {way}: {row.get('whole_s', 0):.1f} s.", *said[:400].split(), flush=True)
    title = f"Runs of {args.steps} steps: plain / compile / ours" if record["timing_claim"] else NO_CLAIM
    columns = ["recipe", "seconds", "ms, last quarter", "MiB reserved", "last loss", "ours/plain"]
    print_table(title, columns, [_cells(name, rows) for name in args.recipes])
    return int(any(row["error"] for row in rows))


def run_row(name: str, way: str, out: Path, args: argparse.Namespace) -> dict[str, Any]:
    """One run, in this process."""
    run = Run(args.steps, args.device, way, args.scale, out)
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)
    row: dict[str, Any] = {"error": None}
    try:
        made = getattr(import_module(f"benchmarks.recipes.{RECIPES[name]}"), name)(run)
        if run.made != args.steps:
            row["error"] = f"the loop ended after {run.made} of {args.steps} steps"
        if run.ours:
            row |= {"said": str(made.report()), "report": made.report().to_dict()}
    except Exception as problem:
        row["error"] = f"{type(problem).__name__}: {problem}"[:2000]
        row["traceback"] = traceback.format_exc().splitlines()[-20:]
    return run.told() | row


def _cells(name: str, rows: Sequence[dict[str, Any]]) -> list[str]:
    """A line of the table: medians over the repeats."""

    def median(way: str, key: str) -> float:
        found = [row[key] for row in rows if (row["recipe"], row["way"], row["error"]) == (name, way, None)]
        return statistics.median([float(value) for value in found if value is not None] or [math.nan])

    def shown(value: float, digits: str) -> str:
        return DASH if math.isnan(value) else f"{value:{digits}}"

    kinds = {"whole_s": ".1f", "last_quarter_ms": ".2f", "reserved_mib": ".0f", "last_loss": ".4g"}
    cells = [" / ".join(shown(median(way, key), kinds[key]) for way in WAYS) for key in kinds]
    return [name, *cells, shown(median("ours", "whole_s") / median("plain", "whole_s"), ".2f")]


if __name__ == "__main__":
    raise SystemExit(main())
