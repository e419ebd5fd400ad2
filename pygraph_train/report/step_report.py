"""The report: what ran from a graph, what it gained, and why the rest did not."""

from __future__ import annotations

import dataclasses
import functools
import os
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pygraph_train.problems import Problem
from pygraph_train.report.headline import Headline
from pygraph_train.report.plans import ArmRow, PhaseRow, arms_of, phases_of
from pygraph_train.report.printing import VerboseReport, as_rich, as_text
from pygraph_train.report.progress import Progress
from pygraph_train.report.shapes import ShapeCounts
from pygraph_train.report.table import peak_memory_mib, rows_of
from pygraph_train.selection.arms import NOTHING, Arm, Phase, Plan
from pygraph_train.selection.controller import Controller, Switch
from pygraph_train.selection.timing import StepTime

if TYPE_CHECKING:
    from pygraph_train.report.backend_report import RegionRecord

__all__ = ["ArmRow", "CaptureRecord", "Fallback", "PhaseRow", "StepReport", "VerboseReport"]


@dataclass(frozen=True)
class CaptureRecord:
    """One capture.

    Attributes:
        plan: what it holds, as in `{F B O}`.
        seconds: host time it took, verification included.
        nodes: device operations in it, -1 where they cannot be counted.
        compiled: whether it holds Inductor's kernels.
        step: the training step in which it was made.
    """

    plan: str
    seconds: float
    nodes: int
    compiled: bool
    step: int


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
class StepReport:
    """What became of the training steps. Prints as a table; `to_dict` for programs. Times in ms or s as named."""

    engine: str = "off"
    plan: str = "F B O"
    steps: int = 0
    steps_replayed: int = 0
    first_replay_step: int | None = None
    first_replay_seconds: float | None = None
    optimizer_steps_replayed: int = 0
    compile_seconds: float = 0.0
    verify_seconds: float = 0.0
    audits: int = 0
    captures: list[CaptureRecord] = field(default_factory=list)
    shapes: ShapeCounts = field(default_factory=ShapeCounts)
    fallbacks: list[Fallback] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    ungraphed_seconds: list[float] = field(default_factory=list, repr=False)
    replay_intervals: deque[float] = field(default_factory=lambda: deque(maxlen=2048), repr=False)
    switches: list[Switch] = field(default_factory=list)
    controllers: list[Controller] = field(default_factory=list, repr=False)
    why_nothing: str | None = None  # why steps are left alone without a comparison
    phase_seconds: dict[str, float] = field(default_factory=dict, repr=False)
    latest: dict[Arm, StepTime] = field(default_factory=dict, repr=False)
    _explored: int = field(default=0, repr=False)  # with controllers that are gone
    _progress: Progress = field(default_factory=Progress, repr=False)
    regions: Callable[[], Sequence[RegionRecord]] = field(default=tuple, repr=False)
    """What the compile backend says of the graphs of a forward or a backward."""

    # -- events: everything that is written here ------------------------------------------------------

    def began(
        self,
        engine: str,
        *,
        latest: dict[Arm, StepTime] | None = None,
        phase_seconds: dict[str, float] | None = None,
        regions: Callable[[], Sequence[RegionRecord]] | None = None,
    ) -> None:
        """Training has begun.

        Args:
            engine: where graphs are made.
            latest, phase_seconds, regions: see the attributes; looked at when somebody reads the report.
        """
        self.engine = engine
        self.latest = self.latest if latest is None else latest
        self.phase_seconds = self.phase_seconds if phase_seconds is None else phase_seconds
        self.regions = regions or self.regions

    def step_began(self, *, elsewhere: bool = False) -> None:
        """One more step, or micro-batch.

        Args:
            elsewhere: whether another report counts the step too, and what of it runs from graphs.
        """
        self.steps += 1
        if elsewhere:
            self._progress.elsewhere += 1

    def step_ended(self, plan: Plan, *, updated: bool) -> None:
        """A step ended.

        Args:
            plan: what of it ran from graphs.
            updated: whether it had an optimizer step.
        """
        self._progress.step_ended(plan, updated=updated)

    def replayed(self, step: int, *, since_start: float, interval: float | None) -> None:
        """A step came from a graph.

        Args:
            step: its number.
            since_start: seconds.
            interval: seconds since the step before it, None where something else was done in between.
        """
        self.steps_replayed += 1
        if self.first_replay_step is None:
            self.first_replay_step, self.first_replay_seconds = step, since_start
        if interval is not None:
            self.replay_intervals.append(interval)

    def replay_undone(self) -> None:
        """The last replay was put back."""
        self.steps_replayed -= 1
        if self.steps_replayed == 0:
            self.first_replay_step = self.first_replay_seconds = None

    def update_replayed(self) -> None:
        """An update came from a graph of its own."""
        self.optimizer_steps_replayed += 1

    def ran_without_graph(self, seconds: float) -> None:
        """A step of the warm-up."""
        self.ungraphed_seconds.append(seconds)

    def compiled(self, seconds: float, *, in_step: bool = False) -> None:
        """Something was compiled, perhaps in the last step of the warm-up, whose time says nothing then."""
        self.compile_seconds += seconds
        if in_step and self.ungraphed_seconds:
            self.ungraphed_seconds.pop()

    def compared(self, seconds: float, *, audit: bool) -> None:
        """A replay was compared with the step without a graph: the first one of a capture, or a later one (`audit`)."""
        self.verify_seconds += seconds
        self.audits += audit

    def runs_with(self, plan: object) -> None:
        """Steps run with this plan until one is chosen."""
        self.plan = str(plan)

    def compares(self, controller: Controller) -> None:
        """A comparison of plans has begun."""
        self.controllers.append(controller)

    def left_alone(self, why: str) -> None:
        """Steps run without graphs, and nothing was compared for that."""
        self.why_nothing = why

    def captured(self, record: CaptureRecord) -> None:
        """Note a capture."""
        self.captures.append(record)

    def fell_back(self, fallback: Fallback) -> bool:
        """Note a reason; True when it was not known yet."""
        for known in self.fallbacks:
            if (known.reason, known.where) == (fallback.reason, fallback.where):
                known.count += 1
                return False
        self.fallbacks.append(fallback)
        return True

    def start_over(self, only: Controller | None = None) -> None:
        """What was compared so far, or in that comparison, is of plans that are not legal any more."""
        gone = [c for c in self.controllers if only is None or c is only]
        self._explored += sum(c.exploration_steps for c in gone)
        self.controllers = [c for c in self.controllers if all(c is not other for other in gone)]

    def decided(self, switch: Switch) -> None:
        """Note which arm runs from now on."""
        self.switches.append(switch)
        self.plan = str(switch.arm.plan)
        self._progress.decided(switch)

    def failed(self, problem: Problem) -> None:
        """The library has failed in itself."""
        self.fell_back(Fallback(problem.reason, problem.where, problem.fix, self.steps))

    def note(self, text: str) -> None:
        """Note something worth knowing, once, and where no fallback says it."""
        if text not in self.notes and not any(text.startswith(f.reason) for f in self.fallbacks):
            self.notes.append(text)

    def __getstate__(self) -> dict[str, Any]:
        """What holds now: a copy looks at nothing of the training."""
        return {**vars(self), "regions": functools.partial(list, list(self.regions()))}

    # -- what is read -----------------------------------------------------------------------------------

    def parts(self) -> Sequence[StepReport]:
        """The reports that this one is made of, itself included."""
        return [self]

    @property
    def why_no_step(self) -> str:
        """Why no step is counted, where something is known of that."""
        return ""

    @property
    def compared_as_a_whole(self) -> str:
        """What the comparison of a loop with what it was has found, in words."""
        return ""

    @property
    def waits(self) -> str:
        """Which modules run as they are until compiling them pays, in words."""
        return ""

    def progress(self) -> Progress:
        """How much of the steps ran from graphs. Steps of other parts are not in it."""
        self._progress.steps = self.steps
        return self._progress

    @property
    def steps_from_graphs(self) -> int:
        """Steps of which everything ran from graphs: forward, backward, and the optimizer where the step had one.

        This number means the same for every framework and every plan. `steps_replayed` counts other things: replays
        of one graph with forward and backward, with or without the optimizer.
        """
        return Progress.of(part.progress() for part in self.parts()).from_graphs

    @property
    def running_plan(self) -> str:
        """What the last steps ran from, as in `{F B O}`. `plan` is the plan that was chosen."""
        return str(Progress.of(part.progress() for part in self.parts()).plan)

    @property
    def ms_without_graph(self) -> float | None:
        """A step without a graph, in ms: the fastest of the warm-up, because first steps carry one-time costs.

        Steps in which something is traced or compiled are left out. Without others it is the time of the comparison.
        """
        if self.ungraphed_seconds:
            return min(self.ungraphed_seconds) * 1e3
        return self._ms_compared(NOTHING)

    @property
    def ms_with_graph(self) -> float | None:
        """Median time from one replayed step to the next, in ms, data loading included.

        A loop that never waits for the GPU launches steps faster than the GPU makes them: it is no less than what the
        GPU was measured to need. Where forward and backward have graphs of their own it is the time that was measured
        last for the plan. None while steps run without graphs.
        """
        plan = self.progress().plan
        if not plan.graphs:
            return None
        if self.replay_intervals:
            needed = [t.device for arm, t in self.latest.items() if arm.plan == plan and self.measured]
            return max(statistics.median(self.replay_intervals), min(needed, default=0.0)) * 1e3
        return self._ms_compared(plan)

    def _ms_compared(self, plan: Plan) -> float | None:
        found = [t.seconds for arm, t in self.latest.items() if arm.plan == plan]
        return min(found) * 1e3 if self.measured and found else None

    @property
    def speedup(self) -> float | None:
        """`ms_without_graph / ms_with_graph`; None on the emulated engine, which is not about speed."""
        before, after = self.ms_without_graph, self.ms_with_graph
        return before / after if before and after and self.engine == "cuda" else None

    @property
    def measured(self) -> bool:
        """Whether times are the machine's: the emulated engine's are declared, and shown nowhere."""
        return self.engine == "cuda"

    @property
    def exploration_steps(self) -> int:
        """Steps made with other plans than the best one known."""
        return self._explored + sum(c.exploration_steps for c in self.controllers)

    @property
    def gpu_idle_fraction_without_graphs(self) -> float | None:
        """The share of a step without graphs in which the GPU waited for the host."""
        busy = min((t.device for arm, t in self.latest.items() if arm.plan.forward_backward), default=None)
        tried = [t.seconds for arm, t in self.latest.items() if not arm.plan.graphs]
        whole = tried[0] if tried else min(self.ungraphed_seconds, default=None)
        return max(0.0, 1 - busy / whole) if self.measured and busy and whole else None

    @property
    def gpu_idle_fraction(self) -> float | None:
        """The share of the present steps in which the GPU waits, data loading included."""
        last = next((t for arm, t in self.latest.items() if str(arm.plan) == self.plan), None)
        if not self.measured or last is None:
            return None
        if last.device < last.seconds or not self.replay_intervals:
            return max(0.0, 1 - last.device / last.seconds)
        return max(0.0, 1 - last.device / statistics.median(self.replay_intervals))

    def arms(self) -> list[ArmRow]:
        """The plans that were compared for the first signature, the kept one first."""
        return arms_of(self)

    def phases(self) -> list[PhaseRow]:
        """What became of forward, backward and optimizer (for the first signature)."""
        return phases_of(self)

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw the compared plans and the history of switches.

        Args:
            path: of the picture; its suffix names the format (.png, .svg, .pdf).
        Raises:
            ImportError: matplotlib is not installed.
        """
        from pygraph_train.report.plot import draw

        draw(self, path)

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, strings, lists and dicts: ready for JSON."""
        total = Progress.of(part.progress() for part in self.parts())
        return {
            "engine": self.engine,
            "plan": self.plan,
            "steps": self.steps,
            "headline": self.headline(),
            "running_plan": self.running_plan,
            "steps_from_graphs": total.from_graphs,
            "phases_from_graphs": {phase.value: total.phase(phase) for phase in Phase},
            "steps_replayed": self.steps_replayed,
            "first_replay_step": self.first_replay_step,
            "first_replay_seconds": self.first_replay_seconds,
            "ms_without_graph": self.ms_without_graph,
            "ms_with_graph": self.ms_with_graph,
            "speedup": self.speedup,
            "compile_seconds": self.compile_seconds,
            "verify_seconds": self.verify_seconds,
            "audits": self.audits,
            "shapes": self.shapes.to_dict(),
            "captures": [dataclasses.asdict(c) for c in self.captures],
            "capture_seconds": sum(c.seconds for c in self.captures),
            "optimizer_steps_replayed": self.optimizer_steps_replayed,
            "phases": [dataclasses.asdict(row) for row in self.phases()],
            "arms": [dataclasses.asdict(row) for row in self.arms()],
            "switches": [{"step": s.step, "arm": str(s.arm), "why": s.why} for s in self.switches],
            "exploration_steps": self.exploration_steps,
            "gpu_idle_fraction": self.gpu_idle_fraction,
            "gpu_idle_fraction_without_graphs": self.gpu_idle_fraction_without_graphs,
            "fallbacks": [dataclasses.asdict(f) for f in self.fallbacks],
            "notes": list(self.notes),
            "regions": [dataclasses.asdict(r) for r in self.regions()],
            **(peak_memory_mib() if self.engine == "cuda" else {}),
        }

    def rows(self, *, verbose: bool = False) -> list[tuple[str, str]]:
        """The lines of the table, of the verbose one on demand."""
        return rows_of(self, None if verbose else Headline(self))

    def headline(self) -> str:
        """What ran from graphs, how much faster, and what stands in the way of more."""
        return Headline(self).text

    def verbose(self) -> VerboseReport:
        """The report with all of its rows, to be printed: `print(report.verbose())`."""
        return VerboseReport(self)

    def __str__(self) -> str:
        return as_text(self.headline(), self.rows())

    def __rich__(self) -> Any:
        """The first line and a table, for `rich.print`."""
        return as_rich(self.headline(), self.rows())
