"""Every signature that was met, and the families that they belong to."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator

from pygraph_train.step.choice import Choice
from pygraph_train.step.families import Families, Family, volume_of
from pygraph_train.step.lifecycle import Life, Stage, StageLengths
from pygraph_train.step.variants import Signature, Variant
from pygraph_train.tracing.signature import Key

__all__ = ["Signatures"]

_MOST_SIGNATURES = 1024
"""Shapes remembered; the oldest are forgotten."""


class Signatures:
    """Every signature that was met, up to a number of them.

    Args:
        lengths: of the lives of calls.
        families: of signatures that differ in sizes alone; None where each one is on its own.
        met: called for each new one.
    """

    def __init__(
        self, lengths: StageLengths, families: Families | None, met: Callable[[], None] = lambda: None
    ) -> None:
        self.lengths = lengths
        self.families = families
        self._met = met
        self._first: Signature | None = None
        self._seen: dict[Key, Family] = {}
        self._by_key: OrderedDict[Key, Signature] = OrderedDict()
        self.get = self._by_key.get

    def sees(self, key: Key) -> None:
        """A step with this key is made before anything is to be known of it. Its shape counts as met."""
        if self.families is not None and key not in self._seen:
            self._seen[key] = self.families.meet(key)

    def meet(self, key: Key) -> Signature:
        """The signature with this key, a new one if need be."""
        signature = self._by_key.get(key)
        if signature is None:
            family = self._seen.pop(key, None)
            if family is None and self.families is not None:
                family = self.families.meet(key)
            self._met()
            changes = family is not None and family.shapes > 1
            stage = Stage.MET if self._first is not None or changes else Stage.FIRST_LOOK
            volume = 0 if family is None else volume_of(key)
            signature = self._by_key[key] = Signature(key, Life(stage), family, volume=volume)
            if not changes:
                self.traces(signature)
            if len(self._by_key) > _MOST_SIGNATURES:  # shapes that never come back leave no trace
                self._forget_oldest()
        self._by_key.move_to_end(key)
        return signature

    def _forget_oldest(self) -> None:
        """Of those that were met long ago, one without graphs if there is any: replays do not come by here."""
        for _ in range(_MOST_SIGNATURES):
            key, oldest = next(iter(self._by_key.items()))
            graphed = oldest.variants and any(v.captures for v in oldest.variants)
            if oldest is not self._first and not graphed:
                break
            self._by_key.move_to_end(key)
        else:
            key, oldest = next(item for item in self._by_key.items() if item[1] is not self._first)
        del self._by_key[key]
        for variant in oldest.variants:
            variant.forget_captures()

    def drop(self, variant: Variant, *, doubled: bool = True) -> None:
        """Forget a kind of call, its graphs included.

        Args:
            doubled: its shape has to earn them anew, for the doubled price. Otherwise its steps so far go on counting:
                its next graph has other kernels.
        """
        variant.forget_captures()
        signature = self._by_key.get(variant.key)
        if signature is not None:
            signature.variants = [other for other in signature.variants if other is not variant]
            signature.returns.steps += variant.replays
            if doubled:
                signature.returns.dropped()

    def moves(self, variant: Variant, signature: Signature) -> None:
        """A kind of call without graphs is one of this signature from now on."""
        before = self._by_key.get(variant.key)
        if before is None or before is signature or not any(v is variant for v in before.variants):
            return
        before.variants = [other for other in before.variants if other is not variant]
        variant.key, variant.inputs = signature.key, None
        signature.variants.insert(0, variant)

    def forget_kernels(self) -> None:
        """There is other code: which kernels a shape runs with has to be found out again."""
        for signature in self._by_key.values():
            signature.ran = None

    def forget(self, signature: Signature) -> None:
        """No call has this key any more, and nothing was captured for it."""
        self._by_key.pop(signature.key, None)
        if self._first is signature:
            self._first = None

    def begin_anew(self, key: Key) -> None:
        """Believe nothing that is known of calls with this key."""
        signature = self._by_key.get(key)
        if signature is None:
            return
        for variant in signature.variants:
            variant.forget_captures()
            if variant.family is not None:
                variant.family.drop(variant)
        self.forget(signature)

    def traces(self, signature: Signature) -> None:
        """A call with this key is traced. The first one stands for the others."""
        self._first = self._first or signature

    def is_first(self, signature: Signature) -> bool:
        """Whether it is the first one that is traced in the run, which stands for the others."""
        return signature is self._first

    def variants(self) -> Iterator[Variant]:
        """Every kind of call."""
        return (variant for signature in self._by_key.values() for variant in signature.variants)

    def without_graphs(self) -> list[Choice | None]:
        """For each signature the comparison that has settled on no graphs, None where there is no such one."""
        return [signature.no_graphs for signature in self._by_key.values()]

    def close(self) -> None:
        """Release all captures, and forget everything."""
        for variant in self.variants():
            variant.forget_captures()
        self._by_key.clear()
