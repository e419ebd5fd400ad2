"""What a trace has to know of a step before the step is made: what it draws and reads on the host."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from pygraph_train.graphs.memory import Storages
from pygraph_train.problems import NotLegal, Problem
from pygraph_train.random_state import HostRandomState
from pygraph_train.torch_private.dynamo import placeholder_source, placeholder_value
from pygraph_train.torch_private.host_draws import changes as drawing
from pygraph_train.torch_private.sharding import local_tensor
from pygraph_train.tracing.draw_recording import Recording
from pygraph_train.tracing.drawn_tensors import fill
from pygraph_train.tracing.host_draws import Ahead, HostDraws
from pygraph_train.tracing.read_ahead import ReadingAhead
from pygraph_train.tracing.reading import Read, reader

__all__ = ["LookingAhead"]

_WRITTEN = "a tensor whose value decides which way the step takes shares memory now with one that the step may write to"


class LookingAhead:
    """Of one trace: notes what decides about the step's way, and looks at that before later steps.

    Args:
        device: of the step.
        draws: whether random numbers of the host may decide.
        reads: whether values of given tensors may decide.

    Attributes:
        draws: what decides; None where nothing does.
        among: keys of the questions that may be asked of tensors; None for all.
        of_buffers: whether buffers are before the step what the step finds. To be set before the first call.
        leaves_out: whether the graph leaves out reads that the function makes.
    """

    def __init__(self, device: torch.device, *, draws: bool, reads: bool) -> None:
        self.draws: HostDraws | None = None
        self.among: frozenset[int] | None = None
        self.leaves_out = False
        self.of_buffers = True
        self._device = device
        self._may_draw, self._may_read = draws, reads
        self._left: set[str] = set()  # places of reads that are left to the step
        self._known_left = 0
        self._read: Read = lambda L, G: ((),)
        self._read_written: Read = lambda L, G: ((),)
        self._shared: frozenset[tuple[int, int]] = frozenset()  # of `_shares`, in the call that was traced
        self._globals: dict[str, Any] = {}
        self._tensors: list[Tensor] = []  # of the graph, for what is drawn
        self._keeps = False
        self._follows: LookingAhead | None = None
        self.forget()

    def forget(self) -> None:
        """A trace was given up. What was learned from it is kept."""
        self.draws, self.leaves_out = None, False
        self._is_known = not self._may_draw
        self._recording = self._new_recording()

    def _new_recording(self) -> Recording:
        if not self._may_read:
            return Recording(self._device)
        return ReadingAhead(self._device, self._left, lambda: self.among, lambda: self.of_buffers)

    def learned(self) -> bool:
        """Whether the trace that was given up has shown what the next one should not read ahead."""
        before, self._known_left = self._known_left, len(self._left)
        return self._known_left > before

    def changes(self) -> tuple[tuple[Any, str, Any], ...]:
        """How Dynamo traces differently."""
        if not self._may_draw:
            return ()
        return drawing(self._recording)

    def finish(self, graph: torch.fx.GraphModule) -> None:
        """At the end of the first trace.

        Raises:
            NotLegal: what decides cannot be found out ahead.
        """
        if not self._is_known:
            self.draws, self.leaves_out = self._recording.finish(graph), self._recording.has_read
            self._tensors = self._recording.tensors if self.draws is not None else []
            self._check_leader()
            self._is_known = True

    def _check_leader(self) -> None:
        if (other := self._follows) is None or not (self.takes or other.takes):
            return
        if self.draws is None or other.draws is None or not self.draws.same_as(other.draws):
            raise NotLegal(
                Problem("the compiled step draws other numbers on the host than the step without it")
            )

    @property
    def takes(self) -> bool:
        """Whether tensors of the graph hold what is drawn."""
        return bool(self._tensors)

    @property
    def is_due(self) -> bool:
        """Whether such tensors have to be filled before a run."""
        return bool(self._tensors) and not self._keeps

    def fill(self, ahead: Ahead) -> None:
        """Before a run: let tensors of the graph hold what the step draws. Hot path.

        Raises:
            NotLegal: the step takes another way.
        """
        if not self.is_due:
            return
        if not ahead.matches:
            assert self.draws is not None
            raise NotLegal(self.draws.another_way())
        fill(self._tensors, ahead.taken)

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """Around a capture: what tensors of the graph hold stays as it is."""
        self._keeps = True
        try:
            yield
        finally:
            self._keeps = False

    @property
    def reads(self) -> bool:
        """Whether values of given tensors are among what decides."""
        return self.draws is not None and bool(self.draws.inputs)

    def given(self, graph: torch.fx.GraphModule) -> list[object]:
        """After `finish`: the tensors that are read ahead, as they are in the traced call."""
        if not self.reads or self.draws is None:
            return []
        placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
        return [placeholder_value(n) for n in placeholders if placeholder_source(n) in self.draws.inputs]

    def ask_no_more_than(self, other: LookingAhead) -> None:
        """Before the first call: the way may depend on no values of given tensors but those of another trace's.

        What tensors of the graph get has to be what those of the other one get, too.
        """
        self._follows = other
        self.among = frozenset() if other.draws is None else other.draws.questions

    @property
    def end(self) -> HostRandomState | None:
        """Where the generators of the host are after the call that was traced; None where it draws nothing."""
        return self._recording.end if self.draws is not None and self.draws.generators else None

    def find_inputs(
        self, frame: dict[str, Any], namespace: dict[str, Any], written: Sequence[str] = ()
    ) -> None:
        """Find the tensors that are read ahead once, in the call that was traced.

        Args:
            written: expressions of tensors that the step may write to.

        Raises:
            Exception: Dynamo's name of one is nothing that Python understands.
        """
        if self.draws is not None and self.reads:
            self._globals = namespace
            self._read = reader(namespace, self.draws.inputs)
            self._read(frame, namespace)
            self._read_written = reader(namespace, written)
            self._shared = self._shares(frame)

    def _shares(self, frame: dict[str, Any]) -> frozenset[tuple[int, int]]:
        """Which tensors that are read ahead lie in memory of which tensors that the step may write to."""
        given = list(map(local_tensor, self._read(frame, self._globals)[0]))
        written = [Storages([local_tensor(t)]) for t in self._read_written(frame, self._globals)[0]]
        pairs = ((i, k) for i in range(len(given)) for k in range(len(written)))
        return frozenset((i, k) for i, k in pairs if written[k].hold(given[i]))

    def check_memory(self, frame: dict[str, Any]) -> None:
        """Before a call that is not the first one runs, or is captured.

        Raises:
            NotLegal: a tensor that is read ahead lies where the step may write, and did not when it was traced.
        """
        if self.reads and not self._shares(frame) <= self._shared:
            assert self.draws is not None
            raise NotLegal(Problem(_WRITTEN, self.draws.where, "Give the tensors memory of their own"))

    def look(self, frame: dict[str, Any], known: dict[int, Any] | None = None) -> Ahead:
        """Which way a call takes: see `HostDraws.look_ahead`. The guards hold for it."""
        assert self.draws is not None
        return self.draws.look_ahead(self._read(frame, self._globals)[0], known)

    def as_traced(self, frame: dict[str, Any], stale: Problem | None) -> HostRandomState | None:
        """Where the generators of the host are after a call that is not the first one. None where nothing decides.

        Args:
            stale: the guard that does not hold for it.

        Raises:
            NotLegal: the function takes another way this time.
        """
        if self.draws is None:
            return None
        if stale is not None and self.reads:
            raise NotLegal(stale)
        self.check_memory(frame)
        ahead = self.look(frame)
        if not ahead.matches:
            raise NotLegal(self.draws.another_way())
        self.fill(ahead)
        return ahead.end
