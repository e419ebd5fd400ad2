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
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.command import NO_CLAIM
from benchmarks.entries_run import add_options, run_entries, settle_options
from benchmarks.entry_child import be_child
from benchmarks.record import print_table, write_json
from benchmarks.zoo_models import ENTRIES
from benchmarks.zoo_summary import lines_of, summarize, table_of

Row = dict[str, Any]

SETS = {
    "eager": ("eager again", "graphed-eager", "eager"),
    "compiled": ("compile", "reduce-overhead", "graphed-compiled", "eager"),
}
"""What is compared, with eager kernels and with Inductor's; in this order, since eager needs no warm-up."""


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line, with the defaults of the device filled in."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--families", help="a part of the names of families: transformers, timm, ...")
    parser.add_argument("--modes", choices=tuple(SETS), default="eager", help="which kernels are compared")
    parser.add_argument("--autocast", action="store_true", help="train under bf16 autocast")
    parser.add_argument("--merge", type=Path, nargs="+", help="measure nothing; join these files into --json")
    parser.add_argument("--table", action="store_true", help="with --merge: print the table of the docs")
    add_options(parser, timeout_s=150, processes=12)
    args = parser.parse_args(argv)
    settle_options(parser, args, ENTRIES)
    if args.names is None:
        chosen = [e for e in ENTRIES.values() if args.modes == "eager" or e.compiled]
        args.names = [e.name for e in chosen if args.families is None or args.families in e.family]
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the table, write the JSON. Returns 1 if an entry trains in the plain loop only."""
    argv = sys.argv[1:] if argv is None else list(argv)
    args = parse(argv)
    warnings.filterwarnings("ignore")
    if args.child:
        be_child(ENTRIES[args.names[0]], SETS[args.modes], args)
        return 0
    if args.merge:
        record = _merged(args.merge)
        write_json(args.json, record)
    else:
        record = run_entries("zoo", ENTRIES, SETS[args.modes], args, argv, summarize, _line)
    if args.table:
        print(table_of(record["rows"]))
        return 0
    print_table("Training step" if record["timing_claim"] else NO_CLAIM, *lines_of(record["rows"]))
    for key, value in record["summary"].items():
        print(f"{key}: {value}")
    return int(bool(record["summary"]["failed_with_the_library"]))


def _merged(paths: Sequence[Path]) -> dict[str, Any]:
    """The rows of several files. A row that is done stands for one of the same name that is not."""
    records = [json.loads(path.read_text()) for path in paths]
    rows: dict[str, Row] = {}
    for row in itertools.chain.from_iterable(record["rows"] for record in records):
        if row["name"] not in rows or row["stage"] == "done":
            rows[row["name"]] = row
    merged = records[0] | {"rows": list(rows.values()), "files": [path.name for path in paths]}
    for several, one in (("commits", "commit"), ("gpus", "gpu")):  # a file may be of several itself
        found = (record.get(several, [record["environment"].get(one)]) for record in records)
        merged[several] = sorted(set(map(str, itertools.chain.from_iterable(found))))
    return merged | {"summary": summarize(list(rows.values()))}


def _line(row: Row) -> str:
    _, ((_, *cells),) = lines_of([row])
    return f"{row['name']}: {'  '.join(cells)}"


if __name__ == "__main__":
    raise SystemExit(main())
