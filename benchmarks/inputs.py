"""What it takes to give a CUDA graph its next input: a copy, or pointers in its nodes that are rewritten.

    python -m benchmarks.inputs --json inputs.json              # one CUDA GPU

One forward graph of 40 operations reads an input that alternates between two places. Columns: microseconds of a replay
in a loop that never waits, and microseconds of the host, for an input that stays where it is ("stay"), for a copy into
the graph's own input, and for pointers that the host rewrites. Commit 57a3ec7 also measures a kernel of the device
that rewrites them: it was slower at each size (results/inputs_h200_1.json, results/inputs_h200_8.json).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.command import new_record, told_in
from benchmarks.record import print_table, write_json
from pygraph_train.graphs.cuda import CudaEngine

SIZES = (0.1, 1, 8, 64, 256)
"""MiB of the input."""

WAYS = ("stay", "copy", "host")
REPLAYS = 200


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--readers", type=int, default=1, help="operations that read the input")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    args.device, args.scale = "cuda", "full"
    record = new_record("inputs", args)
    rows = record["rows"] = []
    for size in SIZES:
        row: dict[str, Any] = {"mib": size, "readers": args.readers, "error": None}
        with told_in(row, 60):
            for way in WAYS:
                row |= measure(way, size, args.readers)
        rows.append(row)
        write_json(args.json, record)
    names = [f"{way}{unit}" for unit in ("", "_host") for way in WAYS]
    shown = [[str(r["mib"]), *(f"{r.get(n, 0.0):.1f}" for n in names), str(r["error"])] for r in rows]
    print_table("One replay and its input (microseconds)", ["MiB", *names, "error"], shown)


def measure(way: str, size: float, readers: int) -> dict[str, float]:
    """Medians of five windows, in microseconds."""
    engine = CudaEngine(torch.device("cuda"))
    width = max(1, round(size * 2**20 / 4 / 1024))
    weight = torch.randn(1024, 64, device="cuda")

    def work(x: Tensor) -> Tensor:
        made = sum((x @ weight).mean() for _ in range(readers))
        for _ in range(40):
            made = made * 1.01
        return made

    places = [torch.randn(width, 1024, device="cuda") for _ in range(2)]
    own = places[0].clone()
    work(own)
    if way in ("stay", "copy"):
        graph, _ = engine.capture(lambda: work(own))
        replay: Any = graph
        moved: Callable[[Tensor], Any] = own.copy_ if way == "copy" else lambda x: None
    else:
        inputs = engine.movable(places[:1])
        replay, _ = engine.capture(lambda: work(inputs.stand_ins[0]))
        inputs.follow(replay)

        def moved(x: Tensor) -> None:
            inputs.take((x,), [x.data_ptr()])

    windows, hosts = [], []
    for _ in range(6):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        for n in range(REPLAYS):
            moved(places[n % 2])
            replay.replay()
        hosts.append((time.perf_counter() - begun) / REPLAYS * 1e6)
        torch.cuda.synchronize()
        windows.append((time.perf_counter() - begun) / REPLAYS * 1e6)
    replay.close()
    engine.close()
    return {way: sorted(windows[1:])[2], f"{way}_host": min(hosts[1:])}


if __name__ == "__main__":
    main()
