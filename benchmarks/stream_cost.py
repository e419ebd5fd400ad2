"""What launches in another stream than the default one cost the kernels of every CUDA graph from then on.

    python -m benchmarks.stream_cost --json streams.json       # one CUDA GPU

A graph of kernels that wait for each other is replayed; between measurements one more piece of work is put into
another stream. Each kind of work is tried in a process of its own: what happens to a process lasts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.command import new_record, settle_choices
from benchmarks.record import DASH, print_table, write_json
from pygraph_train.torch_private.cuda import begin_capture

KINDS = (
    "nothing",
    "kernel",
    "memset",
    "device copy",
    "host copy",
    "event",
    "graph",
    "capture",
    "quiet capture",
)
NODES = 400
LAUNCHES = 12
REPLAYS, WINDOWS = 30, 3


def curve(kind: str) -> dict[str, list[float]]:
    """Microseconds a kernel in a graph, before and after each of `LAUNCHES` pieces of work; by kind of kernel."""
    device = torch.device("cuda", torch.cuda.current_device())
    x = torch.zeros(1 << 16, device=device)
    a = torch.zeros(512, 512, device=device, dtype=torch.bfloat16)
    pair = [torch.zeros_like(a), torch.zeros_like(a)]
    capturing, other = torch.cuda.Stream(), torch.cuda.Stream()

    def pointwise() -> None:
        for _ in range(NODES):
            x.add_(1.0)

    def matmul() -> None:
        for i in range(NODES):
            torch.mm(a, pair[i % 2], out=pair[(i + 1) % 2])

    graphs = {}
    for work in (pointwise, matmul):
        work()
        torch.cuda.synchronize()
        graphs[work.__name__] = _captured(work, capturing)
    does = _work(kind, other, graphs["pointwise"])
    found: dict[str, list[float]] = {name: [] for name in graphs}
    for launched in range(LAUNCHES + 1):
        if launched:
            does()
        torch.cuda.synchronize()
        for name, graph in graphs.items():
            found[name].append(_microseconds(graph) / NODES)
    return found


def _captured(work: Callable[[], object], stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
    """A graph whose capture launches nothing."""

    graph = torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        begin_capture(graph, None)
        work()
        graph.capture_end()
    return graph


def _work(kind: str, stream: torch.cuda.Stream, graph: torch.cuda.CUDAGraph) -> Callable[[], None]:
    here = [torch.zeros(1 << 16, device="cuda") for _ in range(2)]
    host = torch.zeros(1 << 16).pin_memory()
    kept = []

    def capture() -> None:
        captured = torch.cuda.CUDAGraph()
        captured.capture_begin(capture_error_mode="thread_local")
        here[0].add_(1.0)
        captured.capture_end()
        kept.append(captured)

    kinds: dict[str, Callable[[], object]] = {
        "nothing": lambda: None,
        "kernel": lambda: here[0].add_(1.0),
        "memset": lambda: here[0].zero_(),
        "device copy": lambda: here[0].copy_(here[1]),
        "host copy": lambda: here[0].copy_(host, non_blocking=True),
        "event": lambda: torch.cuda.Event().record(),
        "graph": graph.replay,
        "capture": capture,
        "quiet capture": lambda: kept.append(_captured(lambda: here[0].add_(1.0), stream)),
    }

    def does() -> None:
        with torch.cuda.stream(stream):
            kinds[kind]()

    return does


def _microseconds(graph: torch.cuda.CUDAGraph) -> float:
    graph.replay()
    windows = []
    for _ in range(WINDOWS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(REPLAYS):
            graph.replay()
        torch.cuda.synchronize()
        windows.append((time.perf_counter() - start) / REPLAYS * 1e6)
    return statistics.median(windows)


def measure(kind: str, timeout_s: float) -> dict[str, Any]:
    """One row, from a process of its own."""
    command = [sys.executable, "-m", "benchmarks.stream_cost", "--one", kind]
    row: dict[str, Any] = {"kind": kind, "error": None}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=True)
        row["us_a_kernel"] = json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        row["error"] = f"timed out after {timeout_s} s"
    except (subprocess.CalledProcessError, ValueError, IndexError) as error:
        row["error"] = (getattr(error, "stderr", None) or str(error))[-2000:]
    return row


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kinds", default=",".join(KINDS), help="what is put there (default: all)")
    parser.add_argument("--timeout-s", type=float, default=120.0, help="seconds for one kind")
    parser.add_argument("--json", type=Path, help="write rows and environment there, after each row")
    parser.add_argument("--one", choices=KINDS, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    settle_choices(parser, args, kinds=KINDS)
    if not torch.cuda.is_available():
        parser.error("a CUDA GPU is needed")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print one table, write the JSON. Returns 1 if any row crashed."""
    args = parse(argv)
    if args.one is not None:
        print(json.dumps(curve(args.one)))
        return 0
    args.device, args.scale = "cuda", "full"
    rows: list[dict[str, Any]] = []
    record = new_record("stream_cost", args) | {"rows": rows}
    for kind in args.kinds:
        rows.append(measure(kind, args.timeout_s))
        write_json(args.json, record)
    cells = [line for row in rows for line in _lines(row)]
    columns = ["work", "kernels of the graph", *map(str, range(LAUNCHES + 1))]
    print_table(
        "Microseconds a kernel in a graph, after so many pieces of work in another stream", columns, cells
    )
    return int(any(row["error"] for row in rows))


def _lines(row: dict[str, Any]) -> list[list[str]]:
    if row["error"]:
        return [[row["kind"], "crash", *[DASH] * (LAUNCHES + 1)]]
    return [[row["kind"], name, *(f"{t:.2f}" for t in times)] for name, times in row["us_a_kernel"].items()]


if __name__ == "__main__":
    raise SystemExit(main())
