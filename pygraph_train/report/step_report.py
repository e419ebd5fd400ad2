"""The report: what ran from a graph, what it gained, and why the rest did not."""

from __future__ import annotations

import dataclasses
import logging
import statistics
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any, ClassVar

from pygraph_train.plans import NOTHING, Phase, Plan
from pygraph_train.problems import Problem
from pygraph_train.report.headline import Headline
from pygraph_train.report.printing import Printed
from pygraph_train.report.progress import RECENT, Progress
from pygraph_train.report.table import peak_memory_mib, rows_of

log = logging.getLogger("pygraph_train")

_MANY_SHAPES, _FEW_SHAPES = 8, 3
_FORWARD, _, _UPDATE = Phase
_RECORDED = "a part of the step was recorded for"


@dataclass(frozen=True)
class CaptureRecord:
    """One capture.

    Attributes:
        plan: what it holds, as in `{F} {B}`.
        seconds: host time it took, verification included.
        nodes: device operations in it, -1 where they cannot be counted.
        compiled: whether it holds Inductor's kernels.
        step: the training step in which it was made.
        shapes: for so many sets of shapes one part of the step has recordings now.
        sizes: those of its inputs, as in "8x128, 8"; "" where it has none.
    """

    plan: str
    seconds: float
    nodes: int
    compiled: bool
    step: int
    shapes: int = 1
    sizes: str = ""


@dataclass
class Fallback:
    """A reason to run without a graph.

    Attributes:
        reason: one sentence.
        where: `file:line` in the user's code, or None.
        fix: what to do about it, or "".
        step: the step in which it was met first.
        count: how often it was met.
    """

    reason: str
    where: str | None
    fix: str
    step: int
    count: int = 1


@dataclass
class StepReport(Printed):
    """What became of the training steps. Prints as a table; `to_dict` for programs. Times in ms or s as named."""

    engine: str = "off"
    plan: str = "F B O"
    steps: int = 0
    steps_replayed: int = 0
    first_replay_step: int | None = None
    first_replay_seconds: float | None = None
    optimizer_steps_replayed: int = 0
    update_waits: str = ""
    verify_seconds: float = 0.0
    audits: int = 0
    captures: list[CaptureRecord] = field(default_factory=list)
    fallbacks: list[Fallback] = field(default_factory=list)
    cuts: list[Fallback] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    replay_intervals: deque[float] = field(default_factory=lambda: deque(maxlen=2048), repr=False)
    trial_seconds: tuple[float, float] | None = None  # of a step with graphs, and of one without
    worked_seconds: float | None = None  # of the host in forward, backward and update of one without
    _with_update: ClassVar[bool] = False  # whether a step is replayed with its update only
    _progress: Progress = field(default_factory=Progress, repr=False)
    _settled: Plan = field(default=NOTHING, repr=False)
    _started: float = field(default_factory=time.perf_counter, repr=False, compare=False)
    # when the step before ended, if it was replayed
    _last: float | None = field(default=None, repr=False, compare=False)

    # -- events: everything that is written here ------------------------------------------------------

    def began(self, engine: str) -> None:
        """Training has begun, and graphs are made there."""
        self.engine = engine

    def step_began(self) -> None:
        """One more step, or micro-batch."""
        self.steps += 1

    def step_ended(self, plan: Plan, *, updated: bool | None) -> None:
        """See `Progress.step_ended`. The log tells of each plan that many steps in a row have had. Hot path."""
        progress = self._progress
        progress.steps = self.steps
        progress.step_ended(plan, updated=updated)
        if plan is not self._settled and (count := progress.recent.count(plan)) == RECENT:
            self._settled = plan
            log.info("pygraph: the latest %d of %d steps ran as plan %s", count, self.steps, plan)
        now, last, self._last = time.perf_counter(), self._last, None
        if _FORWARD not in plan.graphs or (self._with_update and (_UPDATE in plan.graphs) != updated):
            return
        self._last = now
        self.steps_replayed += 1
        if self.first_replay_step is None:
            self.first_replay_step, self.first_replay_seconds = self.steps, now - self._started
        if last is not None:
            self.replay_intervals.append(now - last)

    def update_ended(self, replayed: bool, waits: str) -> None:
        """An update came from a graph of its own, or waits for one, for this reason. Hot path."""
        self.optimizer_steps_replayed += replayed
        self.update_waits = waits or self.update_waits

    def timed(self, with_graphs: float, without: float, work: float) -> None:
        """See `Chooser`: steps with graphs and steps without were timed. Seconds of one step."""
        self.trial_seconds, self.worked_seconds = (with_graphs, without), work

    def compared(self, seconds: float, *, audit: bool) -> None:
        """A replay was compared with the step without a graph: the first one of a capture, or a later one (`audit`)."""
        self.verify_seconds += seconds
        self.audits += audit

    def runs_with(self, plan: object) -> None:
        """Steps run with this plan from now on, where nothing speaks against it."""
        self.plan = str(plan)
        self._progress.recent.clear()

    def captured(self, record: CaptureRecord) -> None:
        """Note a capture."""
        self.captures.append(record)
        if record.shapes > _MANY_SHAPES:
            few = "; ".join([*dict.fromkeys(c.sizes for c in self.captures if c.sizes)][-_FEW_SHAPES:])
            took = f"{sum(c.seconds for c in self.captures if c.sizes):.1f} s"
            self.notes = [note for note in self.notes if not note.startswith(_RECORDED)]
            self.notes.append(
                f"{_RECORDED} {record.shapes} sets of shapes in {took}, such as {few}. Fewer sizes save time"
            )

    def cut(self, problem: Problem) -> None:
        """A graph break cuts the forward into several graphs, and all of them are replayed: a hint, and no failure."""
        if all((c.reason, c.where) != (problem.reason, problem.where) for c in self.cuts):
            self.cuts.append(Fallback(problem.reason, problem.where, problem.fix, self.steps))

    def fell_back(self, fallback: Fallback) -> bool:
        """Note a reason; True when it was not known yet."""
        for known in self.fallbacks:
            if (known.reason, known.where) == (fallback.reason, fallback.where):
                known.count += 1
                return False
        self.fallbacks.append(fallback)
        return True

    def failed(self, problem: Problem, step: int | None = None) -> bool:
        """Note why there is no graph, in the present step or in that one; True when it was not known yet."""
        step = self.steps if step is None else step
        return self.fell_back(Fallback(problem.reason, problem.where, problem.fix, step))

    def withdrawn(self, problem: Problem) -> None:
        """What was noted does not hold any more."""
        self.fallbacks = [f for f in self.fallbacks if f.reason != problem.reason]

    def note(self, text: str) -> None:
        """Note something worth knowing, once, and where no fallback says it."""
        if text not in self.notes and not any(text.startswith(f.reason) for f in self.fallbacks):
            self.notes.append(text)

    # -- what is read -----------------------------------------------------------------------------------

    @property
    def why_no_step(self) -> str:
        """Why no step is counted or has graphs, where something is known of that."""
        return self.notes[0] if self.engine == "off" and self.notes else ""

    def progress(self) -> Progress:
        """How much of the steps ran from graphs."""
        self._progress.steps = self.steps
        return self._progress

    @property
    def steps_from_graphs(self) -> int:
        """Steps of which everything ran from graphs: forward, backward, and the optimizer where the step had one."""
        return self.progress().from_graphs

    @property
    def phases_from_graphs(self) -> dict[str, int]:
        """How many steps ran each phase from a graph, by "F", "B" and "O"."""
        total = self.progress()
        return {phase.value: total.phase(phase) for phase in Phase}

    @property
    def running_plan(self) -> str:
        """What the last steps ran from, as in `{F} {B} {O}`. `plan` is what they are meant to run from."""
        return str(self.progress().plan)

    @property
    def ms_without_graph(self) -> float | None:
        """A step without graphs, in ms: the least of the first ones. None before steps with graphs are timed."""
        return None if self.trial_seconds is None else self.trial_seconds[1] * 1e3

    @property
    def ms_with_graph(self) -> float | None:
        """Median time from one replayed step to the next, in ms, data loading included.

        A loop that never waits for the GPU launches steps faster than the GPU makes them: it is no less than what
        was timed when the loop waited for it. None while steps run without graphs.
        """
        if not self.progress().plan.graphs or not self.replay_intervals:
            return None
        timed = 0.0 if self.trial_seconds is None else self.trial_seconds[0]
        return max(statistics.median(self.replay_intervals), timed) * 1e3

    @property
    def speedup(self) -> float | None:
        """`ms_without_graph / ms_with_graph`; None on the emulated engine, which is not about speed."""
        before, after = self.ms_without_graph, self.ms_with_graph
        return before / after if before and after and self.measured else None

    @property
    def measured(self) -> bool:
        """Whether times are the machine's: those of the emulated engine say nothing, and are shown nowhere."""
        return self.engine == "cuda"

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, strings, lists and dicts: ready for JSON."""
        return {
            "engine": self.engine,
            "plan": self.plan,
            "running_plan": self.running_plan,
            "steps": self.steps,
            "headline": self.headline(),
            "steps_from_graphs": self.steps_from_graphs,
            "phases_from_graphs": self.phases_from_graphs,
            "steps_replayed": self.steps_replayed,
            "optimizer_steps_replayed": self.optimizer_steps_replayed,
            "first_replay_step": self.first_replay_step,
            "first_replay_seconds": self.first_replay_seconds,
            "ms_without_graph": self.ms_without_graph,
            "ms_with_graph": self.ms_with_graph,
            "speedup": self.speedup,
            "verify_seconds": self.verify_seconds,
            "audits": self.audits,
            "captures": [dataclasses.asdict(c) for c in self.captures],
            "fallbacks": [dataclasses.asdict(f) for f in self.fallbacks],
            "cuts": [dataclasses.asdict(c) for c in self.cuts],
            "notes": list(self.notes),
            **(peak_memory_mib() if self.measured else {}),
        }

    def rows(self) -> list[tuple[str, str]]:
        """The lines of the table."""
        return rows_of(self, Headline(self))

    def headline(self) -> str:
        """What ran from graphs, how much faster, and what stands in the way of more."""
        return Headline(self).text
