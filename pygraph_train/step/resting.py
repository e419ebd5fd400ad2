"""Steps between two looks, of which nothing has a graph: the loop makes them, with its own call of the optimizer."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from pygraph_train.selection.arms import Arm
from pygraph_train.step.choice import Choice
from pygraph_train.step.launch_bound import LaunchBoundCheck
from pygraph_train.step.refusing import Refusing
from pygraph_train.step.signatures import Signatures
from pygraph_train.step.together import Together
from pygraph_train.step.training_run import TrainingRun
from pygraph_train.step.ungraphed import UngraphedSteps
from pygraph_train.step.updates import Updates
from pygraph_train.step.variants import Variant

__all__ = ["Resting"]

_LONGEST = 1024
"""Steps in a row in which nobody looks at the batch: another shape of it may have a graph."""


class Resting:
    """Lets go of what no kept plan uses, and says how many steps need nothing but to be counted.

    Args:
        training: of the runner.
        check: whether the device waits for the host; None where that is no question.
        updates, signatures, ungraphed, refusing: of the runner.
        together: of ranks that vote on each step; None for one process.
    """

    def __init__(
        self,
        training: TrainingRun,
        check: LaunchBoundCheck | None,
        updates: Updates,
        signatures: Signatures,
        ungraphed: UngraphedSteps,
        refusing: Refusing,
        together: Together | None,
    ) -> None:
        self._training = training
        self._check = check
        self._updates = updates
        self._signatures = signatures
        self._ungraphed = ungraphed
        self._refusing = refusing
        self._together = together

    def settled(self, arm: Arm) -> None:
        """Let go of what only other arms than this one, which is settled, have used.

        Shapes that follow the plan of others keep the graphs of that plan. The optimizer is given back where no arm has
        a graph of the update.
        """
        for variant in self._signatures.variants():
            if variant.lead is not None and variant.family is not None:
                _follow(variant, variant.family.settled())
        captures = [key for variant in self._signatures.variants() for key in variant.captures]
        self._training.addresses.keep(compiled for _, _, compiled in captures)
        self._updates.release_graphs(arm.plan, whole_steps=bool(captures) or arm.plan.forward_backward)
        if not captures and all(map(_leaves_update_alone, [arm, *self._settled_arms()])):
            self._updates.rest()

    def take(self) -> float:
        """So many further steps have no graph, and are not looked at: infinitely many where none can have one any more.

        Who makes these steps makes them as the plain loop does, and calls `StepRunner.count` for each. Ask between
        steps, and again when they were made: they count as made from here on.
        """
        if self._together is not None:
            return 0
        if self._ungraphed.over or self._refusing.stopped:
            return math.inf
        if (check := self._check) is not None and not check.open:
            steps = check.rest
            check.skip(steps)
            return steps
        if self._updates.phase is not None:
            return 0
        off = self._refusing.off is not None
        return _quiet_in([self._ungraphed.choice] if off else self._signatures.without_graphs())

    def _settled_arms(self) -> Iterator[Arm | None]:
        """What steps run with of which plans are compared; None where it is not known yet."""
        choices = [variant.choice for variant in self._signatures.variants()]
        for choice in filter(None, [*choices, self._ungraphed.choice]):
            yield choice.arm if choice.controller.settled else None


def _follow(variant: Variant, settled: Arm | None) -> None:
    """Release graphs of a shape that only other plans use than the one which was settled on for it."""
    if settled is not None and settled.plan.forward_backward:
        variant.follow()
        variant.keep_captures_of(variant.arm)
    elif settled is not None:
        variant.make_way()


def _quiet_in(choices: Sequence[Choice | None]) -> int:
    """So many further steps need nothing of these comparisons, which are all there are. They count as made."""
    known = [choice for choice in choices if choice is not None and not choice.arm.plan.graphs]
    if not known or len(known) < len(choices):
        return 0
    steps = min(_LONGEST, *(choice.quiet for choice in known))
    for choice in known:
        choice.quiet -= steps
    return steps


def _leaves_update_alone(arm: Arm | None) -> bool:
    """Whether no graph of an arm needs the optimizer prepared."""
    return arm is not None and not (arm.plan.forward_backward or arm.plan.optimizer_alone)
