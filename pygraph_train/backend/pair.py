"""A forward and its backward are measured and chosen together: the one's graph feeds the other's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pygraph_train.backend.choice import Cost, Way, choose

if TYPE_CHECKING:
    from pygraph_train.backend.region import Region

__all__ = ["Pair"]

WORTH_POINTING = 1 << 20  # bytes copied per step from which rewriting addresses may be cheaper


class Pair:
    """A forward and its backward, or an inference region alone.

    Args:
        indirection: "auto", "device", "host" or "copy": how moving inputs are served.
        measure: whether ways of running are compared.

    Attributes:
        prefer: what rewrites the addresses of moving inputs; None copies them.
        way: what a replay measures just now; None when all is decided.
        handed_over: names of what the transformed forward saves on the device instead of the CPU.
    """

    def __init__(self, indirection: str, measure: bool) -> None:
        self.forward: Region | None = None
        self.backward: Region | None = None
        self.prefer: Literal["device", "host"] | None = None
        if indirection == "device":
            self.prefer = "device"
        elif indirection == "host":
            self.prefer = "host"
        self.way: Way | None = "graph" if measure else None
        self.handed_over: tuple[str, ...] = ()
        self._try_indirection = indirection == "auto"

    def settle(self) -> None:
        """Decide, once everything that belongs together was measured."""
        regions = [
            r for r in (self.forward, self.backward) if r is not None and not r.plain_only and r.record.ran
        ]
        if self.way is None or not regions or any(r.choice.cost(self.way) is None for r in regions):
            return
        if self.way == "indirect":
            self._choose_indirection(regions)
        elif all(r.choice.cost("plain") is not None for r in regions):
            self._choose_graphs(regions)

    def _choose_graphs(self, regions: list[Region]) -> None:
        forward, backward = regions[0], regions[1] if len(regions) > 1 else None
        plain, graph = forward.choice["plain"], forward.choice["graph"]
        if backward is not None:
            keep, why = choose(backward.choice["plain"], backward.choice["graph"])
            plain += backward.choice["plain"]
            graph += backward.choice["graph" if keep else "plain"]
            if not keep:
                backward.give_up(why)
        keep, why = choose(plain, graph)
        if not keep:
            forward.give_up(why)  # without its graph the backward has none either
        kept = [r for r in regions if not r.plain_only]
        for region in kept:
            region.decide("graph", choose(region.choice["plain"], region.choice["graph"])[1])
        moved = sum(r.record.copied_bytes for r in kept)
        self.way = None
        if kept and self._try_indirection and moved >= WORTH_POINTING:
            self.way, self.prefer = "indirect", "device"
            for region in kept:
                region.capture_again()

    def _choose_indirection(self, regions: list[Region]) -> None:
        self.way = None
        copying = sum((r.choice["graph"] for r in regions), Cost(0.0, 0.0))
        pointing = sum((r.choice["indirect"] for r in regions), Cost(0.0, 0.0))
        told = f"{pointing.total * 1e6:.0f} µs with indirection, {copying.total * 1e6:.0f} µs with copies"
        if pointing.total < copying.total:
            for region in regions:
                region.decide("graph, indirect", told)
            return
        self.prefer = None
        for region in regions:
            region.decide("graph", told)
            region.capture_again()
