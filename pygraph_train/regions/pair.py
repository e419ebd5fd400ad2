"""A forward and its backward are measured and chosen together: the one's graph feeds the other's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

from pygraph_train.graphs.memory import extent
from pygraph_train.regions.absent import Absent
from pygraph_train.regions.measurements import Cost, Way, choose
from pygraph_train.selection.break_even import BreakEven

if TYPE_CHECKING:
    from pygraph_train.regions.region import Region

__all__ = ["Bounds", "Pair", "Tangent"]

WORTH_POINTING = 1 << 20  # bytes copied per step from which rewriting addresses may be cheaper
EVEN = 1.003  # what differs by less takes the same time
EVEN_DEVICE = 1.01  # and by this on the device alone, of which less is known
HIDDEN_TIME = 0.25  # of what a graph saves the host: where the device takes longer, a loop hides the rest
HIDDEN = 0.5  # of the device's time: a host that is done by then waits, whatever else the step has it do


def _is_better(pointing: Cost, copying: Cost) -> bool:
    """Whether indirection is the better way. Where both take the same time, the copies' memory decides.

    Each run was measured with nothing else on the device: all of the host's time counts, where a loop hides what
    the device takes longer than.
    """
    if pointing.total < copying.total * EVEN:
        return True
    return pointing.host < pointing.device * HIDDEN and pointing.device < copying.device * EVEN_DEVICE


class Tangent(NamedTuple):
    """A gradient of an output as the backward was compiled for it: contiguous or not.

    Where sizes change, `layout` is the order of its dimensions, and `size` and `stride` are empty.
    """

    name: str
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: Any
    layout: torch.memory_format | None = None

    def of_size(self, size: tuple[int, ...]) -> Tangent:
        """The same for one size."""
        if self.layout is None:
            return self
        like = torch.empty(size, dtype=self.dtype, device="meta", memory_format=self.layout)
        return Tangent(self.name, size, like.stride(), self.dtype)

    @property
    def nbytes(self) -> int:
        """From its first to its last element."""
        return extent(self.size, self.stride) * int(self.dtype.itemsize)


@dataclass
class Bounds:
    """What keeps the regions of one function, or of one loop, from being captured.

    Attributes:
        most: bytes that may be reserved when a capture has ended; None for as many as there are.
        open: whether there may be captures now.
        wanted: whether there would have been one.
        asleep: whether the regions run without their graphs for now.
    """

    most: int | None = None
    open: bool = True
    wanted: bool = False
    asleep: bool = False

    def allow(self) -> bool:
        """Whether a capture may be made now. If not, it is noted that it would have been."""
        self.wanted |= not self.open
        return self.open


class Pair:
    """A forward and its backward, or an inference region alone.

    Args:
        indirection: "auto", "device", "host" or "copy": how moving inputs are served.
        measure: whether ways of running are compared.
        bounds: of captures.

    Attributes:
        worth: tells which further shapes get graphs.
        way: what a replay measures just now; None when all is decided.
        lasting: names of what the forward saves that lies in memory of its own static inputs.
        handed_over: names of what the transformed forward saves on the device instead of the CPU.
        outputs: names of the forward's outputs.
        arriving: names of the backward's inputs: what the forward saved, and `tangents`.
        gradients: number of outputs of the backward.
        dynamic: results whose sizes change, and their dimensions that do.
        kept: inputs of the forward that it saves, or views of them.
        shared: of what the forward saves, by position, that which lies in memory of the caller's outputs.
        donates: whether the backward writes over what the forward saved (AOTAutograd's donated buffers).
        absent: which gradients are not there when others are not.
        direct: whether nothing comes between the caller and the regions (see `direct`), as far as known.
    """

    def __init__(
        self,
        indirection: Literal["auto", "device", "host", "copy"],
        measure: bool,
        bounds: Bounds | None = None,
    ) -> None:
        self.bounds = bounds or Bounds()
        self.forward: Region | None = None
        self.backward: Region | None = None
        self.lasting: frozenset[str] = frozenset()
        self.handed_over: tuple[str, ...] = ()
        self.outputs: tuple[str, ...] = ()
        self.arriving: tuple[str, ...] = ()
        self.tangents: tuple[Tangent, ...] = ()
        self.gradients = 0
        self.dynamic: tuple[tuple[int, set[int]], ...] = ()
        self.kept: frozenset[int] = frozenset()
        self.shared: tuple[int, ...] = ()
        self.donates = False
        self.absent = Absent()
        self.direct = False
        self.way: Way | None = "graph" if measure else None
        self.worth = BreakEven(None if measure else 1)
        self._restarts = 0
        self._asked = self._indirection = indirection
        if indirection == "auto" and not measure:
            self._asked = self._indirection = "copy"

    def run_others(self, kernels: Callable[[list[Any]], Any], inputs: list[Any]) -> Any:
        """Run these kernels in the place of the backward: some gradients are not there that mostly are."""
        return kernels(inputs) if self.backward is None else self.backward.run_others(kernels, inputs)

    def prefer_for(self, nbytes: int) -> Literal["device", "host"] | None:
        """What should rewrite the addresses of inputs of that size; None copies them."""
        if self._indirection == "copy":
            return None
        if self._asked == "auto" or self._indirection == "auto":
            return "device" if nbytes >= WORTH_POINTING else None
        return self._indirection

    def start_over(self, runs: int) -> bool:
        """Measure other shapes, which came so often, where those that are measured do not come back.

        Returns:
            Whether it does: each time after twice as many runs.
        """
        regions = [r for r in (self.forward, self.backward) if r is not None]
        least = max((r.warm_runs() for r in regions), default=1)
        if runs <= 4 * least * 2**self._restarts:
            return False
        self._restarts += 1
        self.way, self._indirection = "graph", self._asked
        self.worth.forget()
        for region in regions:
            region.measure_again()
        return True

    def settle(self) -> None:
        """Decide, once everything that belongs together was measured."""
        regions = [
            r for r in (self.forward, self.backward) if r is not None and not r.plain_only and r.record.ran
        ]
        if self.way is None or not regions or any(r.measurements.cost(self.way) is None for r in regions):
            return
        if self.way == "indirect":
            self._choose_indirection(regions)
        elif all(r.measurements.cost("plain") is not None for r in regions):
            self._choose_graphs(regions)

    def _choose_graphs(self, regions: list[Region]) -> None:
        forward, backward = regions[0], regions[1] if len(regions) > 1 else None
        plain, graph = forward.measurements["plain"], forward.measurements["graph"]
        if backward is not None:
            keep, why = choose(backward.measurements["plain"], backward.measurements["graph"], backward.feeds)
            plain += backward.measurements["plain"]
            graph += backward.measurements["graph" if keep else "plain"]
            if not keep:
                backward.give_up(why)
                self.worth.dropped("backward")
        feeds = forward.feeds or (backward is not None and backward.feeds)
        keep, why = choose(plain, graph, feeds)
        self.worth.saves(max(plain.total - graph.total, (plain.host - graph.host) * HIDDEN_TIME))
        if not keep:
            forward.give_up(why)  # without its graph the backward has none either
        kept = [r for r in regions if not r.plain_only]
        serving = [r for r in kept if r.serves]
        self.way = "indirect" if serving and self._indirection == "auto" else None
        for region in kept:
            why = choose(region.measurements["plain"], region.measurements["graph"], feeds)[1]
            region.decide("measuring" if self.way else "graph", why)
        if self.way is None:
            self._point(kept, self._indirection != "copy", "")
            return
        for region in serving:
            region.point(True, for_good=False)

    def _choose_indirection(self, regions: list[Region]) -> None:
        self.way = None
        copying = sum((r.measurements["graph"] for r in regions), Cost(0.0, 0.0))
        pointing = sum((r.measurements["indirect"] for r in regions), Cost(0.0, 0.0))
        text = f"{pointing.total * 1e6:.0f} µs with indirection, {copying.total * 1e6:.0f} µs with copies"
        better = _is_better(pointing, copying)
        self._indirection = "device" if better else "copy"
        twice = not better and len(regions) > 1 and all(r.serves for r in regions)
        self._point(regions, better, text)
        if twice:  # captured with copies, a forward saves its copy of an input, and the backward needs none
            for region in regions:
                region.capture_again()
                region.record.decision = "measuring"  # until it has its graph

    def _point(self, regions: list[Region], pointing: bool, text: str) -> None:
        for region in regions:
            serves = region.serves
            region.point(pointing, for_good=True)
            if text or serves:
                reason = "; ".join(filter(None, (region.record.reason, text)))
                region.decide("graph, indirect" if pointing and serves else "graph", reason)
