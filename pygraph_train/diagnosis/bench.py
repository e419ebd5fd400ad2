"""`python -m pygraph_train bench`: somebody's script, run once without the library and once with it.

Each run is a process of its own, in which this module counts and times the optimizer's steps. It changes no step.
"""

from __future__ import annotations

import functools
import json
import os
import runpy
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pygraph_train.report.printing import Printed

__all__ = ["Comparison", "Failed", "Figures", "compare"]

_PENDING = 256
"""Ends of steps that are kept until their times are asked for: the device reaches them later than the host."""


class Failed(Exception):
    """A run brought no figures. The message is a sentence."""


class _Enough(BaseException):
    """The run has made all steps that were asked for. No `except Exception` of the script takes it."""


@dataclass(frozen=True)
class Figures:
    """One run of the script.

    Attributes:
        steps: how many steps optimizers made.
        ms: median time from one to the next, in the last half of them.
        seconds: that the script ran.
        memory_mib, memory_of: peak, of the "device" (reserved by torch) or of the "process".
        loss: on which `backward()` was called last, None where it was no single number.
        headline: first line of the report on the training with the most steps, or why there is none.
    """

    steps: int
    ms: float
    seconds: float
    memory_mib: float
    memory_of: str
    loss: float | None
    headline: str


@dataclass(frozen=True)
class Comparison(Printed):
    """Both runs. Prints as a table."""

    without: Figures
    graphed: Figures

    @property
    def ratio(self) -> float:
        """Time of a step without the library, divided by that with it."""
        return self.without.ms / self.graphed.ms

    def headline(self) -> str:
        """See `Printed`."""
        return (
            f"a step takes {self.graphed.ms:.2f} ms with the library and {self.without.ms:.2f} ms without it, so it is "
            f"{self.ratio:.2f} times as fast. The report of the run with it: {self.graphed.headline}"
        )

    def rows(self) -> list[tuple[str, str]]:
        """See `Printed`."""
        both = self.without, self.graphed
        table: list[tuple[str, Sequence[str]]] = [
            ("", ("without", "with")),
            ("ms per step", [f"{run.ms:.2f}" for run in both]),
            ("seconds of the whole run", [f"{run.seconds:.1f}" for run in both]),
            (f"peak MiB of the {self.without.memory_of}", [f"{run.memory_mib:.0f}" for run in both]),
            ("last loss", ["not known" if run.loss is None else f"{run.loss:.6g}" for run in both]),
            ("optimizer steps", [str(run.steps) for run in both]),
        ]
        return [(name, "{:>12} {:>12}".format(*cells)) for name, cells in table]

    def to_dict(self) -> dict[str, Any]:
        """All of it as dicts, numbers, strings and None, for `json.dumps`."""
        return {"without": asdict(self.without), "with": asdict(self.graphed), "ratio": self.ratio}


def compare(script: str, arguments: Sequence[str], steps: int | None) -> Comparison:
    """Run a script twice.

    Args:
        script: a file, which runs as `python script.py` runs it. What it prints goes to stderr.
        arguments: of the script.
        steps: after so many steps of optimizers a run ends. None: when the script ends.

    Raises:
        Failed: a run has failed, or made fewer than two steps.
    """
    if not Path(script).is_file():
        raise Failed(f"there is no file {script}")
    with tempfile.TemporaryDirectory() as folder:
        runs = [_run(Path(folder, value), value, script, arguments, steps) for value in ("1", "0")]
    return Comparison(*runs)


def _run(out: Path, disable: str, script: str, arguments: Sequence[str], steps: int | None) -> Figures:
    command = [sys.executable, "-m", "pygraph_train.diagnosis.bench", str(out), str(steps or 0), script]
    environment = {**os.environ, "PYGRAPH_DISABLE": disable}
    done = subprocess.run([*command, *arguments], env=environment, stdout=2, check=False)
    which = f"in the run {'without' if disable == '1' else 'with'} pygraph-train (PYGRAPH_DISABLE={disable})"
    if done.returncode or not out.exists():
        raise Failed(f"{script} failed {which}, with exit status {done.returncode}. What it said is above")
    found = json.loads(out.read_text())
    if found["steps"] < 2:
        raise Failed(
            f"{script} made {found['steps']} steps of optimizers of torch {which}, and times need two at least"
        )
    return Figures(**found)


# -- in the process of a run ----------------------------------------------------------------------------


class _Clock:
    """Counts and times the steps of optimizers.

    Args:
        most: after so many the run ends; 0: never.
    """

    def __init__(self, most: int) -> None:
        self.steps, self._most = 0, most
        self.loss: Any = None
        self._within = self._on_device = False  # within: a step that is counted at its end
        self._ends: deque[Any] = deque()
        self._ms: list[float] = []

    def updated(self, *_: Any) -> None:
        """An optimizer has made a step: a hook of all optimizers, which no replay needs."""
        import torch

        if self._within:
            return
        self._on_device = self._on_device or (self.steps == 0 and torch.cuda.is_initialized())
        self.steps += 1
        if self._on_device:
            self._ends.append(torch.cuda.Event(enable_timing=True))
            self._ends[-1].record()
        else:
            self._ends.append(time.perf_counter())
        if len(self._ends) > _PENDING:
            self._read()
        if 0 < self._most <= self.steps:
            raise _Enough

    updated.__pygraph_counts__ = True  # type: ignore[attr-defined]

    def around(self, owner: Any, name: str) -> None:
        """Count each call of a method as one step, whatever it calls."""
        stock = getattr(owner, name)

        @functools.wraps(stock)
        def made(*args: Any, **kwargs: Any) -> Any:
            before, self._within = self._within, True
            try:
                result = stock(*args, **kwargs)
            finally:
                self._within = before
            self.updated()
            return result

        setattr(owner, name, made)

    def keep_loss(self, backward: Callable[..., Any]) -> Callable[..., Any]:
        """`Tensor.backward`, which keeps the value of its tensor where the run may end with this step."""

        @functools.wraps(backward)
        def made(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            if self.steps + 1 >= self._most:
                self.loss = tensor.detach().clone() if tensor.numel() == 1 else None
            return backward(tensor, *args, **kwargs)

        return made

    def median(self) -> float:
        """Milliseconds of a step in the last half of them, 0 where there were fewer than two."""
        while len(self._ends) > 1:
            self._read()
        return statistics.median(self._ms[len(self._ms) // 2 :] or [0.0])

    def _read(self) -> None:
        first, second = self._ends.popleft(), self._ends[0]
        if self._on_device:
            second.synchronize()
            self._ms.append(first.elapsed_time(second))
        else:
            self._ms.append((second - first) * 1e3)


def _observe(clock: _Clock) -> list[Any]:
    """Let the clock see each step of an optimizer. Returns a list to which each report is added that is made."""
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook

    from pygraph_train.optimizers.phase import OptimizerPhase
    from pygraph_train.optimizers.several import OptimizerSet
    from pygraph_train.report.loop_report import LoopReport
    from pygraph_train.report.step_report import StepReport

    register_optimizer_step_post_hook(clock.updated)
    clock.around(
        OptimizerPhase, "run"
    )  # a replay calls no step of the optimizer, and a capture calls several
    clock.around(OptimizerSet, "step")
    torch.Tensor.backward = clock.keep_loss(torch.Tensor.backward)  # type: ignore[method-assign, assignment]
    reports: list[Any] = []
    for kind in (StepReport, LoopReport):
        stock = kind.__init__

        def made(report: Any, *args: Any, _stock: Any = stock, **kwargs: Any) -> None:
            _stock(report, *args, **kwargs)
            reports.append(report)

        kind.__init__ = made  # type: ignore[method-assign, assignment]
    return reports


def _headline(reports: Sequence[Any]) -> str:
    def size(report: Any) -> tuple[int, int]:
        return sum(part.progress().made for part in report.parts()), len(report.notes + report.fallbacks)

    largest = max(reports, key=size, default=None)
    backend: Any = sys.modules.get("pygraph_train.backend")
    if backend is not None and (largest is None or not size(largest)[0]) and backend.report().regions:
        return str(backend.report().headline())
    return "The script uses nothing of pygraph-train." if largest is None else str(largest.headline())


def _memory() -> dict[str, Any]:
    import resource

    import torch

    if torch.cuda.is_initialized():
        return {"memory_mib": torch.cuda.max_memory_reserved() / 2**20, "memory_of": "device"}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS, KiB elsewhere
    return {"memory_mib": peak / (2**20 if sys.platform == "darwin" else 2**10), "memory_of": "process"}


def _measure(out: str, steps: str, script: str, *arguments: str) -> None:
    clock = _Clock(int(steps))
    reports = _observe(clock)
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).resolve().parent)
    started = time.perf_counter()
    try:
        runpy.run_path(script, run_name="__main__")
    except _Enough:
        pass
    except SystemExit as error:
        if error.code:
            raise
    ms = clock.median()  # waits for the device
    seconds = time.perf_counter() - started
    loss = None if clock.loss is None else float(clock.loss)
    found = Figures(clock.steps, ms, seconds, **_memory(), loss=loss, headline=_headline(reports))
    Path(out).write_text(json.dumps(asdict(found)))


if __name__ == "__main__":
    _measure(*sys.argv[1:])
