"""What is known of a call: which kind it is, and whether a capture of that kind may be replayed. Hot path."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from pygraph_train.step.lifecycle import Stage
from pygraph_train.step.program import StepProgram
from pygraph_train.step.rebinding import Anchors
from pygraph_train.step.updates import Updates
from pygraph_train.step.variants import Capture, Signature, Variant
from pygraph_train.step.where_tensors_lie import same_memory
from pygraph_train.torch_private.hooks import hook_registrations
from pygraph_train.tracing.gradient_hooks import hooked

__all__ = ["Lookup"]


class Lookup:
    """Looks at a call before its step is made. Changes nothing that training depends on.

    Args:
        program: the step.
        updates: of the runner.
        anchors: where tensors stay that steps give other memory.
    """

    def __init__(self, program: StepProgram, updates: Updates, anchors: Anchors) -> None:
        self._program = program
        self._updates = updates
        self._anchors = anchors

    def variant_of(
        self, signature: Signature, args: tuple[Any, ...], kwargs: dict[str, Any], leaves: Sequence[Any]
    ) -> Variant | None:
        """The kind of call that this one is: its trace's guards hold, and it draws and reads what leads the same way.

        Where there is none, `signature.other_way` says whether that is because it draws or reads something else.
        """
        if not signature.variants:
            return None
        program, signature.other_way = self._program, None
        elsewhere: list[Variant] = []
        untraced: Variant | None = None
        # what is read ahead, once for all variants
        known: dict[int, Any] | None = {} if len(signature.variants) > 1 else None
        with program.context():
            fn = program.function()
            for variant in signature.variants:
                trace = variant.trace
                if not trace.traced:
                    if variant.way is None:
                        return variant
                    untraced = variant
                    continue
                draws, drawn = trace.host_draws, None
                if draws is not None and draws.is_cheap:  # drawing is cheaper than the guards
                    variant.ahead = drawn = draws.look_ahead()
                    if not drawn.matches:
                        elsewhere.append(variant)
                        continue
                if not trace.holds(fn, args, kwargs) or (variant.anchored and not variant.is_for(leaves)):
                    continue
                if draws is None or drawn is not None or _are_refused(signature):
                    return variant
                variant.ahead = trace.ahead.look({"fn": fn, "args": args, "kwargs": kwargs}, known)
                if variant.ahead.matches:
                    return variant
                elsewhere.append(variant)
            for variant in sorted(elsewhere, key=lambda v: -len(_path(v))):  # the one that is left last
                if variant.trace.holds(fn, args, kwargs):
                    signature.other_way = _path(variant)
                    break
        if untraced is not None and signature.other_way in (None, untraced.way):
            signature.other_way = None
            return untraced
        return None

    def reads_written_memory(self, variant: Variant, capture: Capture, leaves: Sequence[Any]) -> bool:
        """Whether a tensor of the batch lies where forward may write: a replay would read a copy from before."""
        if capture.written is None or variant.inputs is None:
            return False
        return variant.inputs.lie_in(capture.written, leaves)

    def is_valid(self, variant: Variant, capture: Capture) -> bool:
        """Everything that the guards do not cover: addresses, optimizer state, hyperparameters."""
        if not capture.verified:
            return False
        if capture.audits.left <= 0 and capture.audits.due(time.perf_counter()):
            return False
        reads = variant.trace.latest_tensors
        if not same_memory(reads, capture) and not (
            capture.kept and self._anchors.bring_back(capture.kept) and same_memory(reads, capture)
        ):
            return False
        if capture.rebound and not self._anchors.hold(capture.rebound):
            return False
        registrations = hook_registrations()
        if registrations != capture.hook_registrations:
            if hooked(capture.gradients.parameters):
                return False
            capture.hook_registrations = registrations
        updates = self._updates
        return updates.state_is_that_of(capture) and updates.hyperparameters_are_those_of(capture)


def _are_refused(signature: Signature) -> bool:
    """Whether no kind of such calls has graphs: what they read is of no use then."""
    return all(variant.life.stage is Stage.REFUSED for variant in signature.variants)


def _path(variant: Variant) -> tuple[Any, ...]:
    """What was answered to the questions of a call that goes another way than this variant."""
    return () if variant.ahead is None else variant.ahead.path
