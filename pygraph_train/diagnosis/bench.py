"""`python -m pygraph_train bench`: a user's script, run in a process without the library and in one with it."""

from __future__ import annotations

import itertools
import json
import os
import resource
import runpy
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from pygraph_train.core.node import Delivery
from pygraph_train.optimizers.graph import OptimizerGraph
from pygraph_train.optimizers.several import OptimizerSet
from pygraph_train.report import announcements
from pygraph_train.report.printing import Printed
from pygraph_train.report.step_report import StepReport

_SAME = "No step ran from a graph, so both runs are the same work and the difference of their times is noise"
_NAMES = {"ms_per_step": "ms per optimizer step", "steps": "optimizer steps"}
_WITHOUT = "this is the run of bench without the library, so steps run as you wrote them"
_UNUSED = (
    "uses nothing of pygraph-train, so a run with it would be the same work. Put the library into the script, as the "
    "README shows"
)


class _Enough(BaseException):
    """The run has made all steps that were asked for. No `except Exception` of the script takes it."""


@dataclass(frozen=True)
class Comparison(Printed):
    """The figures of both runs, as `_measure` writes them. Prints as a table."""

    without: dict[str, Any]
    graphed: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """For `json.dumps`. `ratio` says how many times as fast a step is with the library: None without graphs."""
        ratio = self.without["ms_per_step"] / self.graphed["ms_per_step"] if self.graphed["graphs"] else None
        return {"without": self.without, "with": self.graphed, "ratio": ratio}

    def headline(self) -> str:
        if not self.graphed["graphs"]:
            return f"{_SAME}."
        of_both = self.graphed, self.without
        (ms, plain_ms), (seconds, plain_seconds) = (
            [run[k] for run in of_both] for k in ("ms_per_step", "seconds")
        )
        told = (
            f"A step takes {ms:.2f} ms with the library and {plain_ms:.2f} ms without ({_ratio(ms, plain_ms)}), and "
            f"the whole run {seconds:.1f} s and {plain_seconds:.1f} s ({_ratio(seconds, plain_seconds)})."
        )
        if ms < plain_ms and seconds > plain_seconds:
            gains = self.graphed["steps"] + 1e3 * (seconds - plain_seconds) / (plain_ms - ms)
            told += f" The run gains from some {float(f'{gains:.2g}'):.0f} steps on."
        emulated = "on the emulated engine" in self.graphed["headline"]
        return f"{told} The emulation claims no speed." if emulated else told

    def rows(self) -> list[tuple[str, str]]:
        rows = [(_NAMES.get(key, key.replace("_", " ")), key) for key in self.without]
        pairs = [(name, self.without[key], self.graphed[key]) for name, key in rows[:-2]]
        table = [(name, f"{a!s:>12} {b!s:>12}") for name, a, b in [("", "without", "with"), *pairs]]
        return [*table, ("report with the library", self.graphed["headline"])]


def _ratio(now: float, before: float) -> str:
    slower = now > before
    return (
        f"{(now / before if slower else before / (now or 1.0)):.2f} times as {'long' if slower else 'fast'}"
    )


def compare(script: str, arguments: Sequence[str], steps: int) -> Comparison:
    """Run a script twice, as `python script.py` runs it, for so many optimizer steps (0: to its end).

    Raises:
        ValueError: a run has failed, or made fewer than two steps, or the script does not use the library.
    """
    if not Path(script).is_file():
        raise ValueError(f"there is no file {script}")
    runs = []
    for disable, title in ("1", "1 of 2: without"), ("0", "2 of 2: with"):
        print(f"== run {title} the library ==", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory() as folder:
            out, run = Path(folder, "figures"), f"the run of {script} with PYGRAPH_DISABLE={disable}"
            command = [sys.executable, "-m", __spec__.name, str(out), str(steps), script, *arguments]
            environment = {**os.environ, "PYGRAPH_DISABLE": disable}
            if status := subprocess.run(command, env=environment, stdout=2, check=False).returncode:
                raise ValueError(f"{run} failed with exit status {status}. What it said is above")
            runs.append(json.loads(out.read_text()))
        if runs[-1]["steps"] < 2:
            raise ValueError(f"{run} made fewer than two steps with optimizers of torch, so it has no times")
        if not runs[-1]["headline"]:
            raise ValueError(f"{script} {_UNUSED}")
    print("== both runs have ended ==", file=sys.stderr, flush=True)
    return Comparison(*runs)


class _Clock:
    """Sees the steps of optimizers, in the process of a run that ends after `most` of them."""

    def __init__(self, most: int) -> None:
        self.ends, self.loss, self._most, self._within = list[Any](), None, most, False

    def updated(self, *_: Any) -> None:
        """An optimizer has made a step: a hook of all optimizers, which no replay needs."""
        if not self._within:
            on_device = torch.cuda.is_initialized()
            self.ends.append(torch.cuda.Event(enable_timing=True) if on_device else time.perf_counter())
            if on_device:
                self.ends[-1].record()
            if 0 < self._most <= len(self.ends):
                raise _Enough

    updated.__pygraph_counts__ = True  # type: ignore[attr-defined]

    def around(self, stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Count a call as one step: a replay calls no step of the optimizer, and a capture several."""
        before, self._within = self._within, True
        try:
            result = stock(*args, **kwargs)
        finally:
            self._within = before
        self.updated()
        return result

    def backward(self, stock: Callable[..., Any], tensor: Any, *args: Any, **kwargs: Any) -> Any:
        """`Tensor.backward`, which keeps the value of its tensor where the run may end with this step."""
        self._keep(tensor)
        return stock(tensor, *args, **kwargs)

    def directly(self, stock: Callable[..., Any], delivery: Any, loss: Any, by: float) -> Any:
        """In the place of that: `Delivery.one`."""
        self._keep(loss, by)
        return stock(delivery, loss, by)

    def _keep(self, loss: Any, by: float = 1) -> None:
        if len(self.ends) + 1 >= self._most and loss.numel() == 1:
            self.loss = loss.detach() / by

    def median(self) -> float:
        """Milliseconds from one step to the next, in the last half of them: of the device, where there is one."""
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        pairs = [(a, b) for a, b in itertools.pairwise(self.ends) if type(a) is type(b)]
        ms = [
            (b - a) * 1e3 if isinstance(b, float) else a.elapsed_time(b) for a, b in pairs[len(pairs) // 2 :]
        ]
        return statistics.median(ms or [0.0])


def _told(reports: list[Any]) -> dict[str, Any]:
    """First line of the report on the training with the most steps, "" without a report; how much came from graphs."""
    size = {id(r): r.steps for r in reports}
    graphs = sum(sum(r.phases_from_graphs.values()) for r in reports)
    backend: Any = sys.modules.get("pygraph_train.backend")
    if backend is not None and not any(size.values()):
        found = backend.report()
        return {"graphs": sum(r.replays for r in found.regions), "headline": found.headline()}
    reports.sort(key=lambda r: (-size[id(r)], -len(r.notes + r.fallbacks)))
    return {"graphs": graphs, "headline": reports[0].headline() if reports else ""}


def _measure(out: str, steps: str, script: str, *arguments: str) -> None:
    clock, reports = _Clock(int(steps)), list[Any]()
    announcements._DISABLED = _WITHOUT
    register_optimizer_step_post_hook(clock.updated)
    replaced = (OptimizerGraph, "run", clock.around), (OptimizerSet, "step", clock.around)
    losses = (torch.Tensor, "backward", clock.backward), (Delivery, "one", clock.directly)
    for owner, name, call in (*replaced, *losses):
        stock = getattr(owner, name)
        setattr(owner, name, lambda *args, _call=call, _stock=stock, **kwargs: _call(_stock, *args, **kwargs))
    StepReport.__new__ = lambda cls, *_, **__: reports.append(object.__new__(cls)) or reports[-1]  # type: ignore
    sys.argv, sys.path[0] = [script, *arguments], str(Path(script).resolve().parent)
    started = time.perf_counter()
    try:
        runpy.run_path(script, run_name="__main__")
    except (_Enough, SystemExit) as error:
        if getattr(error, "code", 0):
            raise
    ms, on_device = clock.median(), torch.cuda.is_initialized()  # the device has finished
    seconds = time.perf_counter() - started
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> (20 if sys.platform == "darwin" else 10)
    loss = None if clock.loss is None else float(f"{clock.loss.item():.7g}")
    found: dict[str, Any] = {
        "ms_per_step": round(ms, 3),
        "seconds": round(seconds, 2),
        "last_loss": loss,
        "steps": len(clock.ends),
    }
    found["peak_mib"] = torch.cuda.max_memory_reserved() >> 20 if on_device else peak
    found |= {"peak_of": "device" if on_device else "process", **_told(reports)}
    Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    _measure(*sys.argv[1:])
