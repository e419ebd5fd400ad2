"""A region: one graph that Dynamo found, the roles of its inputs, and what was recorded of it."""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from pygraph_train.boundary import REPLAY, executes, quietly
from pygraph_train.config import PyGraphConfig
from pygraph_train.core.node import Delivery, replay
from pygraph_train.core.numbers import Numbers
from pygraph_train.core.passes import halves, prepared
from pygraph_train.core.recording import RecordedRegion, Unrecordable
from pygraph_train.graphs.engine import CaptureError, Engine
from pygraph_train.problems import Problem, first_line
from pygraph_train.putting_back import ScratchState
from pygraph_train.torch_private.phases import accumulation_hooks_of, hooks_of, inductor, present_backward
from pygraph_train.torch_private.stock_dynamo import untraced
from pygraph_train.verification import Audits, Fingerprint, PlainRuns

__all__ = ["PhaseRegion", "PhaseRegions"]

_MOST_PENDING = 4
"""Forwards of one region that wait for their backward at once and come from graphs."""

_FEWEST_NODES = 2
"""A graph with fewer operations costs more than it saves."""

_PATIENCE = 10
"""Calls after which a region whose gradients nobody has asked for is no part of training."""

_MOST_RECORDINGS = 3
"""So often a region is recorded anew because fixed inputs have moved, beyond one for each 50 replays."""


def _is_hooked(tensor: Tensor) -> bool:
    return bool(hooks_of(tensor) or accumulation_hooks_of(tensor))


class PhaseRegions:
    """The backend that `torch.compile` gets: makes a `PhaseRegion` of each graph.

    Args:
        engine: where graphs are made.
        config: options.
        tensors: the parameters and buffers that are trained, as they are now.
        tell: called with each reason against a graph.

    Attributes:
        replays, plain: in the present step, forwards from graphs, and forwards that could be and are not.
        hooked: whether autograd accumulates gradients in the present step, because parameters have hooks.
        recorded, seconds: recordings since they were reported last, and the time they took.
    """

    def __init__(
        self,
        engine: Engine,
        config: PyGraphConfig,
        tensors: Callable[[], Iterable[Tensor]],
        tell: Callable[[Problem], object],
    ) -> None:
        self.engine, self.config = engine, config
        self.tensors, self.tell = tensors, tell
        self.delivery = Delivery()
        self.replays = self.plain = self.recorded = 0
        self.seconds = 0.0
        self.hooked = False
        self.regions: list[PhaseRegion] = []
        self._gradients: dict[int, Tensor] = {}
        self.closed = False

    def __call__(self, gm: GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        parts = halves(gm)
        region = PhaseRegion(self, gm if parts is None else parts[0], examples)
        self.regions.append(region)
        if parts is None:
            return region
        rest = parts[1].forward

        def both(*given: Any) -> Any:
            return rest(*given, *region(*given))

        return both

    def placed(self, parameter: int | None, gradient: Tensor | None) -> Tensor | None:
        """Within a capture: a gradient at the place that gradients of this parameter have in all recordings.

        Args:
            parameter: its id, None for another tensor.
            gradient: as it was computed.
        """
        if parameter is None or gradient is None:
            return gradient
        known = self._gradients.get(parameter)
        if known is None or (known.shape, known.stride(), known.dtype) != (
            gradient.shape,
            gradient.stride(),
            gradient.dtype,
        ):
            self._gradients[parameter] = gradient
            return gradient
        return known.copy_(gradient)

    def close(self) -> None:
        """Release all graphs. Regions run as they are from now on."""
        self.closed = True
        for region in self.regions:
            region.close()


class PhaseRegion:
    """One graph of Dynamo's, from a recording where that is proved to be the same.

    Args:
        owner: the backend.
        gm: the graph.
        examples: what it is traced with.

    Attributes:
        run: the graph as it is.
        fixed: positions of inputs that stay: parameters and buffers.
        written: positions of inputs that the graph writes.
        asked: sets of positions of outputs whose gradients one backward has asked for.
        slots: by what changes from call to call.
    """

    def __init__(self, owner: PhaseRegions, gm: GraphModule, examples: Sequence[Any]) -> None:
        self.owner = owner
        gm, reason = prepared(gm)
        self._plainly = self.run = gm.forward
        self._numbered: Numbers | None = None
        if reason is None and (numbers := Numbers(gm)).any:
            self._numbered, self.run = numbers, numbers.body.forward
        if reason is None and owner.config.compile is True and owner.engine.name == "cuda":
            self._numbered = None
            self.run = self._plainly = inductor(gm, examples)
        self.fixed: set[int] = set()
        self.written: set[int] = set()
        self.asked: set[frozenset[int]] = set()
        self._asking: dict[int, set[int]] = {}  # by backward, as hooks see it
        self.slots: dict[Any, list[RecordedRegion]] = {}
        self._reason: str | None = None
        self._counts = True  # whether a step in which it runs as it is has no graph of the forward
        self._calls = self._replays = self._recordings = 0
        self._learned = False
        self._numbers: tuple[int, ...] = ()
        self._moved: set[int] = set()  # fixed inputs that were found elsewhere once
        self._demoted: set[int] = set()  # and again: they are not fixed
        if reason is not None:
            self._stays_plain(reason)
        elif sum(n.op.startswith("call") for n in gm.graph.nodes) < _FEWEST_NODES:
            self._reason, self._counts = "it has too few operations", False

    def _stays_plain(self, reason: str) -> None:
        self._reason = reason
        self.close()
        self.owner.tell(Problem(f"a part of the step runs without a graph: {reason}"))

    def close(self) -> None:
        """Release its graphs."""
        for slots in self.slots.values():
            for slot in slots:
                quietly(slot.close)
        self.slots.clear()

    def __call__(self, *given: Any) -> Any:
        """Run the graph. Hot path."""
        self._calls += 1
        if self._reason is not None or self.owner.closed or not torch.is_grad_enabled():
            self.owner.plain += self._counts
            return self._plainly(*given)
        if self._calls < self.owner.config.warmup_steps or not (self._asking or self._calls > _PATIENCE):
            return self._watched(given)
        numbers: Sequence[Any] = ()
        try:
            inputs: Sequence[Any] = given
            if self._numbered is not None:
                inputs, numbers = self._numbered.inputs(given)
            slot = self._slot_for(inputs)
        except _NoPart:
            self._reason, self._counts, slot = "it is no part of training", False, None
        except Unrecordable as error:
            self._stays_plain(first_line(error))
            slot = None
        except Exception as error:  # a fault of ours, or an operation that no graph can hold
            self._stays_plain(_told(error))
            slot = None
        if slot is None:
            self.owner.plain += self._counts
            return self._plainly(*given)
        self._replays += 1
        self.owner.replays += 1
        executes(REPLAY)
        made = replay(slot, inputs, self.owner.delivery, self._delivered_now())
        return made if self._numbered is None else self._numbered.outputs(made, numbers)

    def _delivered_now(self) -> Collection[int]:
        """The inputs whose gradients are delivered. Those of parameters with hooks go through autograd. Hot path."""
        if not (any(map(hooks_of, self._held)) or any(map(accumulation_hooks_of, self._held))):
            return self._delivered
        self.owner.hooked = True
        hooked = {i for i, t in zip(self._positions, self._held, strict=True) if _is_hooked(t)}
        return self._delivered - hooked

    # -- the first calls ------------------------------------------------------------------------------

    def _watched(self, given: Sequence[Any]) -> Any:
        """Run it as it is, and see what it writes and which results lead to gradients."""
        self.owner.plain += 1
        if self._numbered is not None:
            given, numbers = self._numbered.inputs(given)
        # versions tell of most writes, but not of running statistics
        watched = [i for i, t in enumerate(given) if isinstance(t, Tensor)]
        versions = [given[i]._version for i in watched]
        copies = {i: given[i].detach().clone() for i in watched if not isinstance(given[i], nn.Parameter)}
        made = self.run(*given)
        self.written |= {i for i, v in zip(watched, versions, strict=True) if given[i]._version != v}
        self.written |= {i for i, c in copies.items() if not _same(given[i].detach(), c)}
        seen = [
            self._seen(i, t) if isinstance(t, Tensor) and t.requires_grad else t for i, t in enumerate(made)
        ]
        return seen if self._numbered is None else self._numbered.outputs(seen, numbers)

    def _seen(self, position: int, output: Tensor) -> Tensor:
        """An output that tells when a backward asks for its gradient; a view, which knows of uses outside alone."""
        view = output.view_as(output)
        view.register_hook(self._hook(position))
        return view

    def _hook(self, position: int) -> Callable[[Tensor], None]:
        @untraced
        def asked(gradient: Tensor) -> None:
            self._asking.setdefault(present_backward(), set()).add(position)
            if torch.is_grad_enabled():
                self._reason = "its backward is differentiated itself"

        return asked

    # -- which recording serves a call ------------------------------------------------------------------

    def _slot_for(self, given: Sequence[Any]) -> RecordedRegion | None:
        if not self._learned:
            self._learn(given)
        elif not (
            all(map(operator.is_, map(given.__getitem__, self._positions), self._held))
            and list(map(Tensor.data_ptr, self._held)) == self._addresses
        ):
            self._recordings += 1
            if self._recordings > _MOST_RECORDINGS + self._replays // 50:
                raise Unrecordable("its parameters or buffers are at new addresses again and again")
            for i, held, address in zip(self._positions, self._held, self._addresses, strict=True):
                if given[i] is not held or given[i].data_ptr() != address:
                    if i in self._moved and not given[i].requires_grad:
                        self._demoted.add(i)
                    self._moved.add(i)
            self.close()
            self._learn(given)
        key = self._key(given) if self._keyed else None
        slots = self.slots.get(key)
        if slots is None:
            if len(self.slots) >= (self.owner.config.max_signatures or 64):
                return None
            slots = self.slots[key] = []
        for slot in slots:
            if slot.free:
                return self._audited(slot, given)
        if len(slots) == _MOST_PENDING:
            return None
        slot = self._record(given)
        slots.append(slot)
        return slot

    def _learn(self, given: Sequence[Any]) -> None:
        """The roles of the inputs."""
        trained = set(map(id, self.owner.tensors()))
        tensors = [(i, t) for i, t in enumerate(given) if isinstance(t, Tensor)]
        for _, t in tensors:
            if t.layout is not torch.strided or type(t) not in (Tensor, nn.Parameter):
                raise Unrecordable(f"one of its inputs is a {type(t).__name__} of layout {t.layout}")
        self.asked = set(map(frozenset, self._asking.values()))
        if not self.asked or not any(t.requires_grad for _, t in tensors):
            raise _NoPart
        self.fixed = {
            i
            for i, t in tensors
            if (isinstance(t, nn.Parameter) or id(t) in trained) and i not in self._demoted
        }
        self._positions = sorted(self.fixed)
        self._held = [given[i] for i in self._positions]
        self._addresses = list(map(Tensor.data_ptr, self._held))
        self._numbers = tuple(i for i, t in enumerate(given) if not isinstance(t, Tensor))
        self._moving = [i for i, _ in tensors if i not in self.fixed]
        self._keyed = self._numbered is not None or bool(self._numbers)
        self._delivered = frozenset(i for i in self.fixed if given[i].requires_grad and given[i].is_leaf)
        self._learned = True

    def _key(self, given: Sequence[Any]) -> Any:
        return (
            *map(given.__getitem__, self._numbers),
            *((given[i].shape, given[i].stride()) for i in self._moving),
        )

    # -- recording and comparing ------------------------------------------------------------------------

    def _record(self, given: Sequence[Any]) -> RecordedRegion:
        owner, started = self.owner, time.perf_counter()
        with self._undone(given):
            slot = RecordedRegion(self, given)
        seconds = time.perf_counter() - started
        slot.audits = Audits(owner.config.verify, time.perf_counter())
        if owner.config.verify != "off":
            self._compare(slot, given)
        owner.recorded += 1
        owner.seconds += seconds
        return slot

    @contextmanager
    def _undone(self, given: Sequence[Any]) -> Iterator[None]:
        """Around what must leave no trace: random states, and what the region writes of its fixed inputs."""
        before = ScratchState(self.owner.engine.device, self._changed(given))
        try:
            yield
        finally:
            before.restore()

    def _changed(self, given: Sequence[Any]) -> list[Tensor]:
        """The fixed inputs that the region writes."""
        return [given[i] for i in sorted(self.written & self.fixed)]

    def _audited(self, slot: RecordedRegion, given: Sequence[Any]) -> RecordedRegion:
        audits = slot.audits
        if audits.left > 0:
            audits.left -= 1
        elif audits.due(time.perf_counter()):
            started = time.perf_counter()
            self._compare(slot, given)
            audits.took(time.perf_counter() - started, first=False)
        return slot

    def _compare(self, slot: RecordedRegion, given: Sequence[Any]) -> None:
        """A replay has to give what the region gives without a graph. Nothing is left of either.

        Raises:
            Unrecordable: it does not.
        """
        for seeds in slot.sample_seeds() or [{}]:
            self._compare_with(slot, given, seeds)

    def _compare_with(self, slot: RecordedRegion, given: Sequence[Any], seeds: dict[int, Tensor]) -> None:
        changed = self._changed(given)

        def fingerprint(run: Callable[..., tuple[list[Any], list[Tensor | None]]]) -> Fingerprint:
            with self._undone(given):
                outputs, gradients = run(given, seeds)
                tensors = [*(o for o in outputs if isinstance(o, Tensor)), *gradients, *changed]
                device = next(t.device for t in tensors if t is not None)
                return Fingerprint.of(torch.zeros((), device=device), tensors)

        runs = PlainRuns(fingerprint(slot.plain), "result")
        found = fingerprint(slot.replayed)
        if runs.same(found):
            return
        while not runs.enough(found):
            runs.add(fingerprint(slot.plain))
        if (difference := runs.refuse(found)) is not None:
            slot.close()
            raise Unrecordable(f"its replay computes something else: {difference}")


class _NoPart(Exception):
    """No gradient depends on a region."""


def _same(one: Tensor, other: Tensor) -> bool:
    return bool(
        torch.equal(one.nan_to_num(), other.nan_to_num())
        if one.is_floating_point()
        else torch.equal(one, other)
    )


def _told(error: Exception) -> str:
    if isinstance(error, CaptureError):
        return f"{error.reason} ({error.where})" if error.where else error.reason
    return f"it cannot be recorded ({type(error).__name__}: {first_line(error)})"
