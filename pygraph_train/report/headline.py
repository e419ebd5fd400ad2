"""The first line of a report: what ran from graphs, how much faster, and what stands in the way of more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pygraph_train.plans import Phase
from pygraph_train.problems import ONLY_ON_CPU
from pygraph_train.report.progress import RECENT, Progress

if TYPE_CHECKING:
    from pygraph_train.report.step_report import Fallback, StepReport

_NAMES = {Phase.FORWARD: "forward", Phase.BACKWARD: "backward", Phase.OPTIMIZER: "the optimizer"}

_NO_REASON = "No reason is known. TORCH_LOGS=recompiles,graph_breaks says what Dynamo does in such steps."
_SHORT = "The run is short, and the warm-up took most of its steps."
_WARM_UP = "Graphs begin after a warm-up, and it has not ended."

_CLOSE = 0.1
"""Phases whose shares of the steps differ by less are told as one figure."""


class Headline:
    """The sentences of a report's first line.

    Args:
        report: on the training.

    Attributes:
        text: the sentences.
    """

    def __init__(self, report: StepReport) -> None:
        self._report = report
        self._total = report.progress()
        self._fallback: Fallback | None = None
        self._other = ""
        self.text = f"{self._what_ran()} {self._what_is_in_the_way()}".strip()

    def tells(self, fallback: Fallback) -> bool:
        """Whether the sentences name this reason."""
        told = self._fallback
        return told is not None and (told.reason, told.where) == (fallback.reason, fallback.where)

    def says(self, text: str) -> bool:
        """Whether this note is a part of the sentences."""
        return text in (self._other if self._fallback is None else self._fallback.reason)

    def _what_ran(self) -> str:
        total = self._total
        if self._report.why_no_step or (not total.steps and self._report.fallbacks):
            return ""
        if not total.steps:
            return "No training step was counted."
        figure = _figure_of(total)
        if not any(map(total.phase, Phase)):
            return f"{figure}."
        emulated = " on the emulated engine" if self._report.engine == "emulated" else ""
        if not total.plan.graphs:
            return f"{figure}{emulated}, and the latest ones run without a graph."
        return f"{figure}, as plan {total.plan}{emulated}{self._speed()}."

    def _speed(self) -> str:
        report = self._report
        if (ratio := report.speedup) is None:
            return ""
        now, before = report.ms_with_graph, report.ms_without_graph
        if ratio < 1:
            return f"; a step takes {now:.2f} ms, and {before:.2f} ms without a graph"
        return f", {ratio:.1f} times as fast as before ({before:.2f} ms a step, now {now:.2f} ms)"

    def _where_time_goes(self) -> str:
        """Where graphs save little though all phases are in one: how much of a step they were."""
        report = self._report
        if (ratio := report.speedup) is None or ratio >= _LITTLE or (work := report.worked_seconds) is None:
            return ""
        told = f"forward, backward and update took the host {work * 1e3:.2f} ms of a step without graphs"
        if work < 0.5 * (report.ms_without_graph or 0.0) / 1e3:
            return f"Nothing more can be in graphs: {told}. Other Python and data loading took the rest."
        return f"Nothing more can be in graphs: {told}, and replaying a small model takes nearly as long."

    def _what_is_in_the_way(self) -> str:
        total = self._total
        if self._report.why_no_step:
            self._other = self._report.why_no_step
            return _sentence(self._other)
        missing = [phase for phase in Phase if phase not in total.plan.graphs]
        if not total.has_optimizer and Phase.OPTIMIZER in missing:
            missing.remove(Phase.OPTIMIZER)
        self._fallback = self._most_important(missing)
        more = "more" if any(map(total.phase, Phase)) else "graphs"
        if self._fallback is None and not missing:
            more = "a single graph for the forward"
            self._fallback = next(iter(self._report.cuts), None)
        if self._fallback is not None:
            return f"In the way of {more}: {_reason_with_place(self._fallback)}"
        if not missing:
            return self._where_time_goes() or "Nothing stands in the way of more."
        self._other = next(iter(self._report.notes), "")
        if self._other or not total.steps:
            return _sentence(self._other)
        if missing == [Phase.OPTIMIZER] and self._report.update_waits:
            return _sentence(self._report.update_waits)
        if not any(map(total.phase, Phase)):
            return _WARM_UP
        return _NO_REASON if len(total.recent) == RECENT else _SHORT

    def _most_important(self, missing: Sequence[Phase]) -> Fallback | None:
        """The reason that costs most: about a phase without a graph, else the one that was met most often.

        One that holds on the CPU alone is the last.
        """
        found = self._report.fallbacks
        fallbacks = [f for f in found if ONLY_ON_CPU not in f.reason] or found
        if not missing:
            return max(fallbacks, key=lambda f: f.count, default=None)
        alone = list(missing) == [Phase.OPTIMIZER]
        wanted = [f for f in fallbacks if f.reason.startswith("the optimizer") == alone]
        return next(iter(wanted or fallbacks), None)


_LITTLE = 1.1
"""A smaller speed-up is explained."""


def _figure_of(progress: Progress) -> str:
    """How many steps ran from graphs, in words: all phases together where their shares are about the same."""
    whole, made = progress.from_graphs, progress.steps
    counts = {phase: (progress.phase(phase), made) for phase in (Phase.FORWARD, Phase.BACKWARD)}
    if progress.has_optimizer:
        counts[Phase.OPTIMIZER] = progress.phase(Phase.OPTIMIZER), progress.with_optimizer
    steps = f"{made} training step{'s' if made != 1 else ''}"
    if not any(count for count, _ in counts.values()):
        return (
            f"None of the {steps} ran from graphs" if made != 1 else "The training step ran without a graph"
        )
    if whole and all(count / max(of, 1) - whole / made < _CLOSE for count, of in counts.values()):
        return f"{whole} of {steps} ({whole / made:.0%}) ran from graphs"
    groups: dict[tuple[int, int], list[Phase]] = {}
    for phase, figure in counts.items():
        groups.setdefault(figure, []).append(phase)
    (most, of), *others = sorted(groups, key=lambda figure: -figure[0])
    text = f"{_joined(groups[most, of])} ran from graphs in {most} of {of} training steps ({most / of:.0%})"
    for count, of in others:
        text += f", {_joined(groups[count, of])} in {f'{count} of {of}' if count else 'none'}"
    return text[0].upper() + text[1:]


def counts_of(progress: Progress) -> str:
    """How many steps ran from graphs, as a whole and by phase."""
    made, updates = progress.steps, progress.with_optimizer
    phases = [f"{phase.name.lower()} {progress.phase(phase)}" for phase in (Phase.FORWARD, Phase.BACKWARD)]
    if progress.has_optimizer:
        of = f" of {updates}" if updates != made else ""
        phases.append(f"optimizer {progress.phase(Phase.OPTIMIZER)}{of}")
    return f"all phases in {progress.from_graphs} of {made} steps ({', '.join(phases)})"


def _reason_with_place(fallback: Fallback) -> str:
    """A reason, its place and what to do about it, as sentences."""
    where = f" ({fallback.where})" if fallback.where else ""
    fix = f" {_sentence(fallback.fix)}" if fallback.fix else ""
    return f"{fallback.reason.rstrip('.')}{where}.{fix}"


def _sentence(text: str) -> str:
    """With a full stop, and a capital letter unless it begins with a name of code."""
    text = text.strip().rstrip(".")
    begins_with_word = text.partition(" ")[0].rstrip(",:").isalpha()
    return f"{text[:1].upper() if begins_with_word else text[:1]}{text[1:]}." if text else ""


def _joined(phases: Sequence[Phase]) -> str:
    names = [_NAMES[phase] for phase in phases]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
