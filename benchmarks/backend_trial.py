"""One workload in one mode: its iteration, and how that is timed."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.graph_coverage import profiled
from benchmarks.workloads import Batch, Workload

__all__ = ["Trial", "memory_mib", "profile_kind", "settle", "time_kind"]

Row = dict[str, Any]

MAX_SETTLE = 60  # iterations that pygraph has for measuring and choosing
LASTING = 5  # iterations that choices stand before the measurement begins: captures follow from them
COMPARED = 3  # losses and gradient norms that are compared with default's
BURST, BURSTS = 4, 10
MIB = 2**20


class Trial:
    """One workload in one mode; `iterate()` is one iteration.

    Args:
        options: arguments of `torch.compile`; None to run without.
    """

    def __init__(self, workload: Workload, options: dict[str, Any] | None, device: torch.device) -> None:
        self.device = device
        self.module = workload.module.to(device)
        self.batches = [{k: v.to(device) for k, v in batch.items()} for batch in workload.batches]
        self.parameters = list(self.module.parameters())
        self.leaves = self.parameters or _require_gradients(self.batches)
        self.optimizer: torch.optim.Optimizer | None = None
        given = options or {}
        self.marks_steps = given.get("mode") == "reduce-overhead" or "triton.cudagraphs" in given.get(
            "options", {}
        )
        self.turn = 0

        def loss_of(batch: Batch) -> torch.Tensor:
            with torch.autocast(device.type, dtype=torch.bfloat16):
                return workload.loss(self.module, batch)

        self.loss_of = loss_of if options is None else torch.compile(loss_of, **options)

    def iterate(self) -> torch.Tensor:
        """Forward and backward on the next batch, and the optimizer if there is one. Gradients stay to be read."""
        if self.optimizer is not None:
            self.optimizer.zero_grad(set_to_none=True)
        else:
            for leaf in self.leaves:
                leaf.grad = None
        if self.marks_steps:
            torch.compiler.cudagraph_mark_step_begin()
        loss = self.loss_of(self.batches[self.turn % len(self.batches)])
        self.turn += 1
        loss.backward()
        if self.optimizer is not None:
            self.optimizer.step()
        return loss

    def start(self, kind: str) -> None:
        """From here on iterations are of `kind`, and start with the first batch and the same random numbers."""
        adamw = kind == "step"
        self.optimizer = torch.optim.AdamW(self.parameters, lr=1e-4, fused=True) if adamw else None
        self.turn = 0
        torch.manual_seed(1)

    def compared_iterations(self) -> tuple[list[float], list[float]]:
        """Losses and gradient norms of the next `COMPARED` iterations."""
        losses, norms = [], []
        for _ in range(COMPARED):
            losses.append(float(self.iterate().detach()))
            norms.append(self.gradient_norm())
        return losses, norms

    def gradient_norm(self) -> float:
        gradients = [leaf.grad for leaf in self.leaves if leaf.grad is not None]
        return float(torch.linalg.vector_norm(torch.stack([g.float().norm() for g in gradients])))

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def _require_gradients(batches: list[Batch]) -> list[torch.Tensor]:
    """A workload without parameters is differentiated by its inputs."""
    return [t.requires_grad_() for batch in batches for t in batch.values() if t.is_floating_point()]


def settle(trial: Trial, choices: Callable[[], object]) -> Row:
    """Compile and warm up until `choices()` last: `compile_s` is the first iteration, `settle_s` all of them.

    Args:
        choices: what was chosen so far; None while something is still open.
    """
    start = time.perf_counter()
    trial.iterate()
    trial.synchronize()
    compile_s = time.perf_counter() - start
    trial.turn = 0
    first_losses, _ = trial.compared_iterations()
    done, ready = 1 + COMPARED, False
    seen: list[object] = []
    while done < MAX_SETTLE and not ready:
        trial.iterate()
        trial.synchronize()
        done += 1
        seen = [*seen, choices()][-LASTING:]
        last = seen[-1]
        ready = last is not None and seen == [last] * LASTING
    return {
        "compile_s": compile_s,
        "settle_s": time.perf_counter() - start,
        "settle_iterations": done,
        "settled": ready,
        "first_losses": first_losses,
    }


def time_kind(trial: Trial, kind: str, *, windows: int, window_s: float) -> Row:
    """Milliseconds an iteration of `kind` over `windows` windows of about `window_s`, memory, the host's share."""
    trial.start(kind)
    losses, norms = trial.compared_iterations()
    row: Row = {"losses": losses, "gradient_norms": norms}
    row["reserved_warmup_mib"] = memory_mib("max_memory_reserved", trial.device)
    _release(trial)
    count = _window_length(trial, window_s)
    times = [_window(trial, count) for _ in range(windows)]
    row |= {"ms": statistics.median(times), "min_ms": min(times), "windows_ms": times}
    row["iterations_a_window"] = count
    for what in ("reserved", "allocated"):
        row[f"{what}_mib"] = memory_mib(f"max_memory_{what}", trial.device)
    row["host_ms"] = statistics.median(t for _ in range(BURSTS) for t in _burst(trial))
    return row


def profile_kind(trial: Trial, kind: str, count: int) -> Row:
    """What the GPU does in an iteration of `kind`, and which of it comes from graphs.

    After all timing: `after_profile_ms`, a window of `count` iterations, shows whether a profiler that was
    started once still costs something. Without CUDA there is nothing to see.
    """
    if trial.device.type != "cuda":
        return {}
    trial.start(kind)
    for _ in range(COMPARED):
        trial.iterate()
    row = profiled(trial.iterate, len(trial.batches))
    return {**row, "after_profile_ms": _window(trial, count)}


def _release(trial: Trial) -> None:
    """What compiling and choosing left in the allocator is not what an iteration needs."""
    gc.collect()
    if trial.device.type == "cuda":
        trial.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def _window_length(trial: Trial, seconds: float) -> int:
    """Iterations that take about `seconds`, at least as many as there are batches."""
    _window(trial, 5)
    return max(len(trial.batches), min(2000, round(seconds * 1e3 / _window(trial, 10))))


def _window(trial: Trial, count: int) -> float:
    """Milliseconds an iteration, by the wall clock, over `count` iterations."""
    trial.synchronize()
    start = time.perf_counter()
    for _ in range(count):
        trial.iterate()
    trial.synchronize()
    return (time.perf_counter() - start) / count * 1e3


def _burst(trial: Trial) -> list[float]:
    """Milliseconds that the host is held, of the later iterations of a burst that does not fill the launch queue.

    The first ones after the wait find cold caches and a sleeping processor; they are left out.
    """
    trial.synchronize()
    times = []
    for _ in range(BURST):
        start = time.perf_counter()
        trial.iterate()
        times.append((time.perf_counter() - start) * 1e3)
    return times[BURST // 2 :]


def memory_mib(what: str, device: torch.device) -> int | None:
    """`torch.cuda.<what>()` in MiB; None without CUDA."""
    return round(getattr(torch.cuda, what)() / MIB) if device.type == "cuda" else None
