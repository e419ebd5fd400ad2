"""Which kernels of a profiled run were launched by CUDA graphs, from the profiler's own trace."""

from __future__ import annotations

import json
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

__all__ = ["coverage_of", "profiled"]

CALLS = ("cuda_runtime", "cuda_driver")
COPIES = ("gpu_memcpy", "gpu_memset")
NAMED_OUTSIDE = 10  # kernels outside of graphs that are listed by name


def coverage_of(events: Iterable[dict[str, Any]], iterations: int) -> dict[str, Any]:
    """GPU work of one iteration, and the share of its kernels that came from graphs.

    A kernel is part of a graph if the launch with its correlation number is one of a graph, or if CUPTI
    gave it a graph id: launches through the driver's API are not all traced.

    Args:
        events: `traceEvents` of a Chrome trace; durations in microseconds.
        iterations: how many the trace spans.

    Returns:
        `coverage` (0 to 1, None without kernels), `kernels`, `graph_kernels`, `graph_launches` and `copies` an
        iteration, `kernel_ms`, `busy_ms` (kernels, copies and memsets), `outside`: names and numbers.
    """
    work = [e for e in events if e.get("ph", "X") == "X"]
    launches = {_args(e).get("correlation"): str(e["name"]) for e in work if e.get("cat") in CALLS}
    kernels = [e for e in work if e.get("cat") == "kernel"]
    copies = [e for e in work if e.get("cat") in COPIES]
    outside = [e for e in kernels if not _from_graph(e, launches)]
    graph_launches = sum("GraphLaunch" in name for name in launches.values())
    inside = len(kernels) - len(outside)
    kernel_ms = sum(e["dur"] for e in kernels) / 1e3 / iterations
    names = Counter(str(e["name"])[:80] for e in outside)
    return {
        "coverage": inside / len(kernels) if kernels else None,
        "kernels": len(kernels) / iterations,
        "graph_kernels": inside / iterations,
        "graph_launches": graph_launches / iterations,
        "copies": len(copies) / iterations,
        "kernel_ms": kernel_ms,
        "busy_ms": kernel_ms + sum(e["dur"] for e in copies) / 1e3 / iterations,
        "outside": {name: count / iterations for name, count in names.most_common(NAMED_OUTSIDE)},
    }


def profiled(iterate: Callable[[], object], iterations: int) -> dict[str, Any]:
    """Run `iterate` under the profiler `iterations` times -> `coverage_of` that."""
    # a CUPTI that is torn down and started again crashes graphs (pytorch #75504)
    os.environ.setdefault("TEARDOWN_CUPTI", "0")
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(iterations):
            iterate()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return coverage_of(events, iterations)


def _from_graph(kernel: dict[str, Any], launches: dict[Any, str]) -> bool:
    args = _args(kernel)
    return bool(args.get("graph id")) or "GraphLaunch" in launches.get(args.get("correlation"), "")


def _args(event: dict[str, Any]) -> dict[str, Any]:
    return event.get("args") or {}
