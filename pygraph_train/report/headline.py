"""The first line of a report: what ran from graphs, how much faster, and what stands in the way of more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pygraph_train.report.progress import Progress
from pygraph_train.selection.arms import WHOLE, Phase, Plan

if TYPE_CHECKING:
    from pygraph_train.report.step_report import Fallback, StepReport

__all__ = ["Headline", "counts_of"]

_NAMES = {Phase.FORWARD: "forward", Phase.BACKWARD: "backward", Phase.OPTIMIZER: "the optimizer"}

_WAITING = (
    "the shapes of batches change, and in the steps so far graphs could not have saved the time that tracing the step "
    "takes. It is traced after more steps, and with fuse='on' at once. Batches that are padded to one shape need no "
    "such time"
)

_KEPT = "kept: "
"""What the verdict on the best plan begins with."""

_CLOSE = 0.1
"""Phases whose shares of the steps differ by less are told as one figure."""


class Headline:
    """The sentences of a report's first line.

    Args:
        report: all of whose parts are looked at.

    Attributes:
        text: the sentences.
    """

    def __init__(self, report: StepReport) -> None:
        self._report = report
        parts = report.parts()
        self._parts = parts
        self._total = Progress.of(part.progress() for part in parts)
        self._fallbacks = [fallback for part in parts for fallback in part.fallbacks]
        self._notes = [note for part in parts for note in part.notes]
        self._fallback: Fallback | None = None
        self._other = ""
        self.text = f"{self._what_ran()} {self._what_is_in_the_way()}".strip()

    def tells(self, fallback: Fallback) -> bool:
        """Whether the sentences name this reason."""
        told = self._fallback
        return told is not None and (told.reason, told.where) == (fallback.reason, fallback.where)

    def beside(self, other: Headline | None) -> str:
        """The sentences, without the reason that another report's sentences name."""
        told = other is not None and self._fallback is not None and other.tells(self._fallback)
        return self._what_ran() if told else self.text

    def says(self, text: str) -> bool:
        """Whether this note, or this reason of a region, is a part of the sentences."""
        return text in (self._other if self._fallback is None else self._fallback.reason)

    def _what_ran(self) -> str:
        total = self._total
        if not total.made:
            return "" if self._report.why_no_step else "No training step was counted."
        figure = _figure_of(total)
        if not total.plan.graphs and not any(map(total.phase, Phase)):
            return f"{figure}."
        engines = {part.engine for part in self._parts}
        emulated = " on the emulated engine" if "emulated" in engines else ""
        if not total.plan.graphs:
            return f"{figure}{emulated}, and the latest ones run without a graph."
        return f"{figure}, as plan {total.plan}{emulated}{self._speed()}."

    def _speed(self) -> str:
        timed = [part for part in self._parts if part.steps]
        if len(timed) != 1 or (ratio := timed[0].speedup) is None:
            return ""
        now, before = timed[0].ms_with_graph, timed[0].ms_without_graph
        if ratio < 1:
            return f"; a step takes {now:.2f} ms, and {before:.2f} ms without a graph"
        return f", {ratio:.1f} times as fast as before ({before:.2f} ms a step, now {now:.2f} ms)"

    def _what_is_in_the_way(self) -> str:
        if self._report.why_no_step:
            self._other = self._report.why_no_step
            return _sentence(self._other)
        plan = self._total.plan
        missing = [phase for phase in Phase if not any(phase in graph for graph in plan.graphs)]
        if not self._total.has_optimizer and Phase.OPTIMIZER in missing:
            missing.remove(Phase.OPTIMIZER)
        if missing and (found := self._what_the_whole_loop_lost(plan)):
            self._other = found
            return _sentence(found)
        fallback = self._most_important(plan, missing)
        if fallback is not None:
            self._fallback = fallback
            whole = "one graph for the whole step" if not missing and plan != WHOLE else "more"
            return f"In the way of {whole}: {_reason_with_place(fallback)}"
        if not missing:
            return "Nothing stands in the way of more."
        if compared := self._what_was_compared(plan):
            return compared
        self._other = self._other_reason()
        if self._other or not self._total.made:
            return _sentence(self._other)
        controllers = [controller for part in self._parts for controller in part.controllers]
        for controller in controllers:
            if not controller.settled and controller.best.plan != plan:
                return f"Plans are being compared, and {controller.best} is the fastest so far."
        if controllers:
            return "Nothing stands in the way of more: this plan was found to be the fastest."
        recent = self._total.recent
        if all(any(phase in graph for plan in recent for graph in plan.graphs) for phase in missing):
            return f"Of the last {len(recent)} steps others run as plan {max(recent, key=_phases_in)}."
        return "Graphs begin after a warm-up, and it has not ended."

    def _what_the_whole_loop_lost(self, plan: Plan) -> str:
        """Why a loop that was compared as a whole runs with fewer graphs than it had."""
        for part in self._parts:
            if not (found := part.compared_as_a_whole):
                continue
            controller = part.controllers[-1]
            if controller.best != controller.history[0].before and controller.best.plan == plan:
                return found
        return ""

    def _what_was_compared(self, plan: Plan) -> str:
        """Why this plan runs, where a graph of forward and backward was measured: then nothing else is the reason."""
        for part in self._parts:
            for controller in part.controllers:
                if not any(arm.plan.forward_backward for arm in controller.times):
                    continue
                best, why = controller.best, controller.verdicts.get(controller.best, "")
                if not controller.settled:
                    which = "this one" if best.plan == plan else best
                    return f"Plans are being compared, and {which} is the fastest so far."
                if part.measured and why.startswith(_KEPT):
                    return f"Plan {best} was kept: {_sentence(why.removeprefix(_KEPT))}"
        return ""

    def _most_important(self, plan: Plan, missing: Sequence[Phase]) -> Fallback | None:
        """The reason that costs most: about a phase without a graph, else the one that was met most often."""
        if list(missing) == [Phase.OPTIMIZER]:
            wanted = [f for f in self._fallbacks if f.reason.startswith("the optimizer")]
        else:
            wanted = [f for f in self._fallbacks if not f.reason.startswith("the optimizer")]
        if missing or plan != WHOLE:
            return next(iter(wanted or self._fallbacks), None)
        return max(self._fallbacks, key=lambda f: f.count, default=None)

    def _other_reason(self) -> str:
        """Why phases run without a graph, where no step told a reason."""
        for part in self._parts:
            if part.why_nothing or part.waits:
                return part.why_nothing or part.waits
            regions = part.regions()
            plain = next(
                (r.reason for r in regions if r.decision == "plain" and r.reason and r.phase != "function"),
                "",
            )
            if plain and any(r.decision.startswith("graph") for r in regions):
                return f"parts of forward and backward have graphs, and others have none: {plain}"
            for region in regions:
                if region.reason and not region.replays:
                    return region.reason
            if part.shapes.waiting:
                return _WAITING
        return next(iter(self._notes), "")


def _phases_in(plan: Plan) -> int:
    return sum(map(len, plan.graphs))


def _figure_of(progress: Progress) -> str:
    """How many steps ran from graphs, in words: all phases together where their shares are about the same."""
    whole, made = progress.from_graphs, progress.made
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
    made, updates = progress.made, progress.with_optimizer
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
