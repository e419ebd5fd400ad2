"""A region: one graph that Dynamo found, the roles of its inputs, and what was recorded of it."""

from __future__ import annotations

import copy
import functools
import gc
import itertools
import logging
import math
import operator
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.utils.hooks import RemovableHandle

from pygraph_train.boundary import FORWARD, Boundary, done, executes, put_back, quietly, surely
from pygraph_train.config import BackendOptions, PyGraphConfig
from pygraph_train.core.memory import Memory, first_memory, forget_memory, free_memory, idle_memory
from pygraph_train.core.node import Delivery, is_asked_for, lies_at, looks, replay
from pygraph_train.core.numbers import Numbers
from pygraph_train.core.passes import (
    COMMUNICATES,
    Collectives,
    HostPart,
    adds_in_any_order,
    beyond_eager_kernels,
    caught,
    communication,
    differentiates,
    end_of,
    halves,
    parts_in,
    prepared,
    runner,
    signature,
    written_inputs,
)
from pygraph_train.core.recording import (
    RecordedRegion,
    Slot,
    Unrecordable,
    UnrecordedCall,
    autocast_now,
    memory_of,
    needs_gradient,
    run_plainly,
)
from pygraph_train.graphs.compact import move_together
from pygraph_train.graphs.engine import Engine, problem_of
from pygraph_train.identity import identities, picker
from pygraph_train.parallel import votes as choices
from pygraph_train.parallel.replication import several_processes
from pygraph_train.parallel.sharding import NOT_WHOLE, Sharding
from pygraph_train.parallel.votes import APART, Apart, Votes, ranks_of
from pygraph_train.problems import Problem, PyGraphError, first_line, user_line_in
from pygraph_train.putting_back import Backup, ScratchState
from pygraph_train.report.step_report import CaptureRecord, StepReport
from pygraph_train.torch_private.memory import (
    copy_all,
    is_alone,
    local_tensor,
    local_tensors,
    received,
    tensor_version,
)
from pygraph_train.torch_private.phases import (
    accumulation_hooks_of,
    add_all,
    backward_keeps_graph,
    compiled_by,
    hooks_of,
    is_static,
    present_backward,
)
from pygraph_train.torch_private.stock_dynamo import left_untraced, untraced
from pygraph_train.torch_private.switches import kernel_switches, saved_tensors_hooks_active
from pygraph_train.verification import Audits, Fingerprint, PlainRuns

log = logging.getLogger("pygraph_train")

_MOST_PENDING = 4
"""Forwards of one region that wait for their backward at once and come from graphs."""

_FEWEST_NODES = 2
"""A graph with fewer operations costs more than it saves."""

_PATIENCE = 10
"""Calls after which a region whose gradients nobody has asked for is no part of training."""

_MOST_RECORDINGS = 3
"""So often a region is recorded anew because fixed inputs have moved, beyond one for each 50 replays."""

_MOST_MET = 1024
"""Sets of shapes without a recording that are counted."""

_FIRST = 3
"""The first recording takes at least so many times as long as later ones (3 to 10 on an H200)."""

_MOST_MODULES = 128
"""Modules with a region of their own for a graph that they share."""

_LARGE = 1 << 20
"""Bytes of a gradient that is moved alone: the kernel takes longer than its launch."""

_MOST_SIZES = 3
"""Of inputs, which the report names for one recording."""

_shape, _stride = operator.attrgetter("shape"), operator.methodcaller("stride")


class PhaseRegions:
    """The backend that `torch.compile` gets: makes a `PhaseRegion` of each graph.

    Args:
        engine: where graphs are made.
        config: options.
        tensors: the parameters and buffers that are trained, as they are now.
        tell: called with each reason against a graph.
        boundary: around each call of a region.
        delivers: whether gradients of parameters are put in place at the end of a backward. Otherwise autograd
            accumulates them, which somebody listens to.
        leads: whether autograd leads to parameters whose gradients are delivered, as a loop needs that differentiates
            by itself, or code behind a graph break.
        inference: whether calls that nothing is differentiated through have graphs.

    Attributes:
        replays, plain: in the present step, forwards from graphs, and forwards that could be and are not.
        eager: in the present step, backwards without a graph of forwards from graphs.
        parts: in the present step, calls of regions.
        owns: whether gradients may stay where a recorded backward computes them, until the next forward.
        several: whether other processes train too.
        divided, refused: whether graphs have DTensors, and whether one of these may not be recorded.
        sharding: how a model runs whose parameters are gathered within its graph, None for another one. A proxy: Dynamo
            keeps this object, and the other one lives with the model.
        end: the graph break behind the graph that was replayed last, in the present call of what was compiled.
        cuts: graph breaks in front of graphs that were recorded, and behind others of the same call.
        recorded, seconds: recordings since they were reported last, and the time they took.
        sizes: those of the inputs of the first of them, as in "8x128, 8".
        gradients: by parameter, where recordings put its gradient.
        overlaps: the memory in which these lie, where the graphs of one forward use it again; None where none does.
        settle: called before the first recording: what lies between activations that are gone moves out of there.
        votes: of the processes that compute with other parts of the same DTensors.
        pays: whether a recording pays: called with the share of all calls that it will serve, and its seconds.
    """

    owns = True

    def __init__(
        self,
        engine: Engine,
        config: PyGraphConfig | BackendOptions,
        tensors: Callable[[], Iterable[Tensor]],
        tell: Callable[[Problem], object],
        boundary: Boundary,
        *,
        delivers: bool = True,
        leads: bool = False,
        inference: bool = False,
    ) -> None:
        self.engine, self.config, self.boundary = engine, config, boundary
        self.tensors, self.tell = tensors, tell
        self.delivers, self.leads, self.inference = delivers, leads, inference
        self.delivery = Delivery()
        self.replays = self.plain = self.eager = self.parts = self.recorded = 0
        self.seconds, self.sizes = 0.0, ""
        self.several = several_processes()
        self.end: Problem | None = None
        self.cuts: list[Problem] = []
        self.regions: list[PhaseRegion] = []
        self.gradients: dict[int, Tensor] = {}
        self.waiting: dict[int, Tensor] = {}
        self.sharding: Sharding | None = None
        self.overlaps: Memory | None = None
        self.votes: Votes | None = None
        self.settle: Callable[[], object] = lambda: None
        self.pays: Callable[[float, float], bool] = lambda share, seconds: True
        self.closed = self.divided = self.refused = False

    def __call__(self, gm: GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        self.let_go()  # autograd keeps the shape of a parameter while somebody leads to it
        if self.sharding is not None:
            if self.compiles or not self.sharding.complete(gm):
                self.refused = self.awaited  # else it is another call, such as one that raises in its middle
                raise Unrecordable(NOT_WHOLE.reason)
            self.divided, examples = True, self.sharding.sharded(examples)
        end, talks = end_of(gm), communication(gm)
        if parts_in(gm):
            self.refused |= self.delivers or self.compiles
            self.divided, talks = True, talks or ("" if self.refused else None)
        lost = "" if None in next(iter(reversed(gm.graph.nodes))).args[0] else None
        name, beyond = beyond_eager_kernels(gm) if not self.compiles else ("", None)
        eager = f"{_PART}: eager kernels cannot compute {name}"
        talking = f"{_PART}: {COMMUNICATES}"
        for reason, where in ((_CAUGHT, caught(gm)), (talking, talks), (_LOST, lost), (eager, beyond)):
            if where is not None:
                self.tell(Problem(reason, where or None))
                raise Unrecordable(reason)  # Dynamo leaves the function to Python
        self.leads |= end is not None
        if self.engine.device.type != "cpu" and (host := HostPart(gm)).any:
            return host.around(self._region(host.rest, host.examples(examples), end))
        return self._region(gm, examples, end)

    def _region(self, gm: GraphModule, examples: Sequence[Any], end: Problem | None) -> Callable[..., Any]:
        """What runs a graph, as far as a recording can hold it from one."""
        parts = halves(gm)
        made = SharedGraph(self, gm if parts is None else parts[0], examples)
        made.shared.end = end
        self.regions.append(made.shared)
        call = made.guarded()
        if self.sharding is not None:
            whole, call = call, lambda *given: whole(*cast(Sharding, self.sharding).sharded(given))
        if parts is None:
            return call
        rest = runner(prepared(parts[1], self.engine.device.type, eager=True)[0])
        return lambda *given: rest(*given, *call(*given))

    @property
    def compiles(self) -> bool:
        """Whether graphs have Inductor's kernels."""
        return self.config.compile is True and self.engine.name == "cuda"

    def kernels(self, gm: GraphModule, examples: Sequence[Any]) -> Callable[..., Any] | None:
        """The graph with compiled kernels, where these were asked for."""
        return compiled_by("inductor", gm, examples) if self.compiles else None

    def report_to(self, report: StepReport, step: int) -> None:
        """Tell what was recorded since it was told last, and in this step the latest. Hot path."""
        if not self.recorded:
            return
        made = CaptureRecord("{F} {B}", self.seconds, -1, self.compiles, step, self.shapes, self.sizes)
        report.captured(made)
        for problem in self.cuts:
            report.cut(problem)
        self.recorded, self.seconds, self.cuts = 0, 0.0, []

    @contextmanager
    def placing(
        self, parameters: Sequence[int | None], leads: Sequence[Tensor], *, adds: bool = False
    ) -> Iterator[list[Tensor | None]]:
        """Around a backward: its gradients, at the places that those of each parameter have in all recordings.

        Large ones go there as soon as they are computed, so that memory has few of them twice. Where autograd
        accumulates them in the loop's parameters, it gets copies of them anyway.

        Args:
            parameters: their ids, None for another tensor.
            leads: what stands for each of them. Its `.grad` is the same before and afterwards.
            adds: whether they are added to what lies there.
        """
        put = Tensor.add_ if adds else Tensor.copy_
        found: list[Tensor | None] = [None] * len(leads)
        before = [lead.grad for lead in leads] if self.sharding is not None else [None] * len(leads)
        for lead in leads if self.sharding is not None else ():
            lead.grad = None
        hooks = []

        def place_of(k: int, gradient: Tensor | None) -> Tensor | None:
            known = self.gradients.get(parameters[k] or 0) if self.delivers else None
            fits = known is not None and gradient is not None and looks(known) == looks(gradient)
            return known if fits else None

        def move(k: int, lead: Tensor) -> None:
            if (place := place_of(k, lead.grad)) is not None:
                found[k], lead.grad = put(place, lead.grad), None  # type: ignore[arg-type]

        for k, lead in enumerate(leads if self.delivers else ()):
            if lead.nbytes >= _LARGE:
                hooks.append(lead.register_post_accumulate_grad_hook(functools.partial(move, k)))
        try:
            yield found
            small: list[tuple[Tensor, Tensor]] = []
            for k, lead in enumerate(leads):
                if (gradient := lead.grad) is not None:
                    place = place_of(k, gradient)
                    small += [] if place is None else [(place, gradient)]
                    found[k] = gradient if place is None else place
            if small:
                put_all = add_all if adds else copy_all
                put_all(*map(local_tensors, zip(*small, strict=True)))
        finally:
            for hook in hooks:
                hook.remove()
            for lead, gradient in zip(leads, before, strict=True):
                lead.grad = gradient

    def make_places(self, parameters: Sequence[Tensor]) -> None:
        """Memory for the gradients of parameters that have none yet. It belongs to no recording."""
        new = [p for p in parameters if id(p) not in self.gradients] if self.delivers else []
        if not new:
            return
        lie = [(p, p.grad) for p in new if p.is_leaf and type(p.grad) is Tensor and is_alone(p.grad)]
        move_together([g for _, g in lie], self.engine)  # out of the memory of the steps without a graph
        self.gradients |= {id(p): g for p, g in lie if looks(g) == looks(p) and not g.requires_grad}
        with self.engine.lasting_memory():
            others = [p for p in new if id(p) not in self.gradients]
            self.gradients |= {id(p): torch.empty_like(p, requires_grad=False) for p in others}

    def kept_at(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Memory for gradients that one backward of a sharded model keeps for a later one, as these are.

        Empty where it keeps none.
        """
        if all(gradient is None for gradient in gradients):
            return []
        for i, gradient in enumerate(gradients):
            if gradient is not None and (i not in self.waiting or looks(self.waiting[i]) != looks(gradient)):
                with self.engine.lasting_memory():
                    self.waiting[i] = torch.empty_like(gradient)
        return [self.waiting.get(i) for i in range(len(gradients))]

    def move_places(self, parameters: Sequence[int | None], gradients: Sequence[Tensor | None]) -> bool:
        """After a capture: make other places for gradients that `placing` has left where they were.

        Those that have no place yet stay there, see `overlaps`.

        Returns:
            Whether there were any, so that all has to be recorded once more.
        """
        moved = False
        for parameter, gradient in zip(parameters, gradients, strict=True) if self.delivers else ():
            if parameter is None or gradient is None:
                continue
            if gradient.storage_offset() == 0 or self.sharding is not None:
                self.gradients.setdefault(parameter, gradient)
            if self.gradients.get(parameter) is not gradient:
                with self.engine.lasting_memory():
                    self.gradients[parameter] = torch.empty_like(gradient)
                moved = True
        return moved

    def runs_plainly(self) -> None:
        """Tell other processes that the present call of the model has no graph."""
        if self.votes is not None:
            with suppress(Apart):
                self.votes.ask(0, choices.PLAIN)

    def part(self) -> None:
        """Give gradients memory of their own from now on: no recording overwrites them before its backward.

        Recordings are made anew. Those whose backward is still to come live on.
        """
        self.overlaps = None
        self.gradients.clear()
        for region in self.regions:
            region.slots.clear()

    @property
    def awaited(self) -> bool:
        """Whether a first recording may still come."""
        return not (self.closed or self.hopeless or any(region.recordings for region in self.regions))

    @property
    def hopeless(self) -> bool:
        """Whether there are graphs of Dynamo's, and none of them may be recorded."""
        return bool(self.regions) and all(region.reason is not None for region in self.regions)

    def make_way(self, given: Sequence[Any]) -> None:
        """Before a recording or a comparison computes gradients where those lie that wait for further micro-batches."""
        held = [t for t in given if id(t) in self.gradients]
        self.delivery.make_way(held, [self.gradients[id(t)] for t in held])

    @property
    def shapes(self) -> int:
        """For how many sets of shapes one region has recordings: the most of all."""
        return max((region.shapes for region in self.regions), default=1)

    def let_go(self) -> None:
        """Hold no parameter any more. Backwards that are still to come go on."""
        for region in self.regions:
            for slots in region.slots.values():
                for slot in slots:
                    slot.ways.clear()

    def close(self) -> None:
        """Release all graphs but those whose backward is still to come. Regions run as they are from now on."""
        self.closed = True
        if self.votes is not None:
            self.votes.leave(APART)
        for region in self.regions:
            region.close()
        forget_memory(self.engine)


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
        placements: by the position of an output, those of its gradient, where that is a DTensor.
        orders: by the position of an output, how its gradient lies in memory, see `Tensor.dim_order`.
        keeps: whether a backward was called with retain_graph=True.
        device: the kind of device.
        autocast: what backwards ran under in the first calls, see `autocast_now`.
        slots: by what changes from call to call.
        reason: why it runs as it is, None where it may have a graph.
        accumulates: whether parameters had gradients when backwards of the first calls came, or a call came first.
        counts: whether a step in which it runs as it is has no graph of the forward.
        inference: whether nothing is differentiated through it.
        end: the graph break at its end, None where its function ends there.
        where: `file:line` of the first user code in it.
        calls, replays, backwards, recordings: how often it was called, came from a graph, had a backward from a graph,
            and was recorded.
        last: which call of a region in its step the latest one was, from 1 on.
    """

    def __init__(self, owner: PhaseRegions, gm: GraphModule, examples: Sequence[Any]) -> None:
        self.owner = owner
        compiled = owner.kernels(gm, examples)
        gm, why = prepared(gm, owner.engine.device.type, eager=compiled is None)
        self._plainly = self.run = compiled or runner(gm)
        parts = [*parts_in(gm), *(t for t in examples if owner.sharding and isinstance(t, nn.Parameter))]
        self.votes, self._graph = owner.votes if parts else None, 0 if owner.sharding else signature(gm)
        if len(ranks := ranks_of(parts)) > 1 and not (self.votes and ranks <= set(self.votes.ranks)):
            why = COMMUNICATES
        self.end: Problem | None = None
        lines = (user_line_in(node.meta.get("stack_trace")) for node in gm.graph.nodes)
        self.where = next(filter(None, lines), None)
        self._numbered: Numbers | None = None
        if why is None and compiled is None and (numbers := Numbers(gm)).any:
            self._numbered, self.run = numbers, runner(numbers.body)
        if owner.sharding is not None:
            whole, plainly = self.run, self._plainly
            self.run = lambda *given: whole(*cast(Sharding, owner.sharding).gathered(given))
            self._plainly = lambda *given: plainly(*cast(Sharding, owner.sharding).gathered(given))
        elif owner.divided:
            run = self.run
            self.run = lambda *given: list(map(received, run(*given)))
        self.device = owner.engine.device.type
        self._unordered = self.device != "cpu" and adds_in_any_order(gm)
        self._differentiates = differentiates(gm)
        body = gm if self._numbered is None else self._numbered.body
        names = written_inputs(gm)
        self._writes = {i for i, n in enumerate(body.graph.find_nodes(op="placeholder")) if n.name in names}
        self._inner = _inner(body)
        self.reason: str | None = None
        self._begin()
        if why is not None:
            self._stays_plain(Problem(why))
        elif sum(n.op.startswith("call") for n in gm.graph.nodes) < _FEWEST_NODES:
            self.reason, self.counts = "it has too few operations", False
        self._first = self.reason, self.counts

    def _begin(self) -> None:
        """It was never called."""
        self.fixed: set[int] = set()
        self.written = set(self._writes)
        self.asked: set[frozenset[int]] = set()
        self._asking: dict[int, set[int]] = {}  # by backward, as hooks see it
        self.placements: dict[int, Any] = {}
        self.orders: dict[int, Sequence[int]] = {}
        self.keeps = self.accumulates = False
        self.slots: dict[Any, list[RecordedRegion]] = {}
        self.autocast: torch.dtype | None = None
        self._handed: list[weakref.ref[Tensor]] = []
        self.keeps_like: list[Tensor | None] = []
        self.sent = 0  # collectives of comparisons since the last vote
        self.reason = None
        self.counts = True
        self.inference = False
        self._hookless = -1
        self._led = 0  # calls so far that lead to gradients, while it is watched
        self.calls = self.replays = self.backwards = self.recordings = self.last = 0
        self._moves = 0
        self._met: dict[Any, int] = {}  # how often further shapes came that have no recording
        self._took = math.inf  # seconds of a recording
        self._learned, self._usual = False, True
        self._numbers: tuple[int, ...] = ()
        self._moved: set[int] = set()  # fixed inputs that were found elsewhere once
        self._demoted: set[int] = set()  # and again: they are not fixed

    def another(self) -> PhaseRegion:
        """The same graph for other parameters. This one was never called."""
        region = copy.copy(self)  # with its `end`
        region._begin()
        region.reason, region.counts = self._first  # later reasons are of the module that has this one
        return region

    @property
    def adds(self) -> bool:
        """Whether its recorded backward adds gradients to what lies at their places, as in an accumulation."""
        once = len(self.asked) == 1 and not self.keeps and self.owner.config.backward != "off"
        return self.accumulates and self.owner.delivers and once

    @property
    def pending(self) -> bool:
        """Whether a forward waits for its backward, of a region that each backward goes through once."""
        waits = not self.recordings and self._led > len(self._asking)
        return waits or not all(slot.free for slots in self.slots.values() for slot in slots)

    @property
    def trains(self) -> bool:
        """Whether a backward has asked for a gradient of it."""
        return bool(self._asking)

    @property
    def shapes(self) -> int:
        """For how many sets of shapes it has recordings."""
        return len({tuple(part for part in key if isinstance(part, tuple)) for *_, key in self.slots})

    def _stays_plain(self, why: Problem) -> None:
        self.reason, self.where = why.reason, why.where or self.where
        if self.votes is not None and self.calls:  # else it is so in all processes
            self.votes.leave(APART)
        self.counts &= not self.inference or torch.is_grad_enabled()  # a teacher's is no forward of the step
        self.close()
        self.owner.tell(Problem(f"a part of the step runs without a graph: {why.reason}", why.where, why.fix))

    def inner_of(self, leading: Iterable[int]) -> list[int]:
        """Those of some results that lead to gradients from which another one of them is computed."""
        return [i for i in leading if not self._inner.get(i, set()).isdisjoint(leading)]

    def differentiated_twice(self) -> None:
        """Somebody differentiates a backward of it. Graphs whose own backward is still to come live on."""
        self._stops("its backward is differentiated itself (create_graph=True)")

    def inner_is_asked_for(self) -> None:
        """Somebody asks for the gradient of a result from which another one is computed."""
        self._stops(_INNER_GRADIENT)

    def _stops(self, why: str) -> None:
        self.slots.clear()
        self._stays_plain(Problem(why))

    def backward_made(self, replayed: bool, *, expected: bool) -> None:
        """A forward from a graph had its backward; `expected`: that it has no graph is not told. Hot path."""
        self.backwards += replayed
        if not replayed:
            self.owner.eager += 1
            if self.owner.config.backward != "off" and not expected:
                self.owner.tell(_OTHER_BACKWARD)

    def keep_activations(self) -> None:
        """A backward is called with retain_graph=True for the first time: record anew what cannot serve it."""
        self.keeps = True
        self.slots.clear()  # those with pending backwards live on

    def close(self) -> None:
        """Release its graphs, but for those whose backward may come: they are gone when it has come."""
        for slots in self.slots.values():
            quietly(*[slot.close for slot in slots if slot.free])
        self.slots.clear()

    def __call__(self, *given: Any) -> Any:
        """Run the graph. Hot path."""
        self.calls += 1
        owner = self.owner
        owner.parts += 1
        self.last = owner.parts
        if not (owner.inference or torch.is_grad_enabled()):  # no backward goes through it
            return self._plainly(*given)
        if self.reason is not None or owner.closed:
            return self.run_plainly(*given)
        if self.calls < owner.config.warmup_steps + bool(self._inner) or not (
            self._asking or self.inference or self.calls > _PATIENCE
        ):
            if owner.sharding is not None and any(region.pending for region in owner.regions):
                self._stays_plain(Problem(_SEVERAL_FORWARDS))
                return self.run_plainly(*given)
            return self._watched(given)
        if saved_tensors_hooks_active(checkpoints=False):
            owner.tell(_SAVED_TENSORS_HOOKS)
            return self.run_plainly(*given)
        numbers: Sequence[Any] = ()
        try:
            inputs: Sequence[Any] = given
            if self._numbered is not None:
                inputs, numbers = self._numbered.inputs(given)
            slot = self._slot(inputs)
        except _NoPart:
            if self._asking:  # its parameters are frozen in this call
                executes(FORWARD)
                return self._plainly(*given)
            self.reason, self.counts, slot = "it is no part of training", False, None
        except PyGraphError:  # what was tried could not be put back
            raise
        except (Apart, Unrecordable) as error:
            self._fails()
            self._stays_plain(Problem(first_line(error)))
            slot = None
        except Exception as error:  # a fault of ours, or an operation that no graph can hold
            if self._fails():  # as it does in all processes
                self._stays_plain(problem_of(error))
                return self.run_plainly(*given)
            made = self.run_plainly(*given)  # where it raises as well, the batch is at fault
            self._stays_plain(problem_of(error))
            return made
        if slot is None or (delivered := self._delivered_now(inputs)) is None:
            return self.run_plainly(*given)
        if slot.recorded:
            if (sharding := owner.sharding) is not None:
                sharding.replayed = True
            self.replays += 1
            owner.replays += 1
            owner.end = self.end
        else:
            owner.plain += self.counts
        made = replay(slot, inputs, owner.delivery, delivered, leads=owner.leads)
        if (numbered := self._numbered) is None:
            return made
        return surely(lambda: numbered.outputs(made, numbers), FORWARD)

    def run_plainly(self, *given: Any) -> Any:
        """Run the graph as it is. Hot path."""
        self.owner.plain += self.counts
        executes(FORWARD)
        return self._plainly(*given)

    def _delivered_now(self, given: Sequence[Any]) -> frozenset[int] | None:
        """The inputs whose gradients are delivered, none with hooks. None where these forbid a replay. Hot path."""
        if self._differentiates and any(hooks_of(t) for t in given if isinstance(t, Tensor)):
            self.owner.tell(_DIFFERENTIATES)
            return None
        if self._hookless == RemovableHandle.next_id or not (self._delivered or self.owner.several):
            return self._delivered  # no hook was registered since none was there
        held, hooks = self._fixed_of(given), RemovableHandle.next_id
        if not (any(map(hooks_of, held)) or any(map(accumulation_hooks_of, held))):
            self._hookless = hooks
            return self._delivered
        if self.owner.several:
            self.owner.tell(_HOOKED)
            return None
        return frozenset(
            i for i in self._delivered if not (hooks_of(given[i]) or accumulation_hooks_of(given[i]))
        )

    def ask(self, choice: int) -> set[int]:
        """What all processes choose that compute with parts of the same tensors; see `Votes`. Hot path."""
        if self.votes is None:
            return {choice}
        sent, self.sent = self.sent, 0
        if self.owner.sharding is not None:
            self.owner.sharding.told = True
        try:
            found = self.votes.ask(self._graph + sent, choice)
        except Apart as apart:
            raise PyGraphError(_TORN) if sent else apart  # noqa: B904
        if choices.FAILED in found:
            raise Apart(APART)
        return found

    def agree(self, yes: bool) -> bool:
        """Whether it is so in all processes."""
        return self.ask(choices.YES if yes else choices.NO) == {choices.YES}

    def _fails(self) -> bool:
        """Tell other processes that this one makes no graph; whether there are any."""
        with suppress(Apart):
            self.ask(choices.FAILED)
        return self.votes is not None

    # -- the first calls ------------------------------------------------------------------------------

    def _watched(self, given: Sequence[Any]) -> Any:
        """Run it as it is, and see what it writes and which results lead to gradients."""
        self.owner.plain += 1
        if self._numbered is not None:
            given, numbers = self._numbered.inputs(given)
        # versions tell of most writes, but not of running statistics
        watched = [i for i, t in enumerate(given) if isinstance(t, Tensor)]
        versions = [_version(given[i]) for i in watched]
        values = {i: local_tensor(given[i]) for i in watched if not isinstance(given[i], nn.Parameter)}
        copies = {i: t.detach().clone() for i, t in values.items()}
        executes(FORWARD)
        made = self.run(*given)
        numbered = self._numbered
        done(made if numbered is None else surely(lambda: numbered.outputs(made, numbers), FORWARD))
        results = [t for t in made if isinstance(t, Tensor)]
        leads = any(t.requires_grad for t in results)
        self._led += leads
        self.inference = self.owner.inference and bool(results) and not leads
        self.written |= {i for i, v in zip(watched, versions, strict=True) if _version(given[i]) != v}
        self.written |= {i for i, c in copies.items() if not _same(values[i].detach(), c)}
        places = [memory_of(t) for t in (*given, *made) if isinstance(t, Tensor)]
        leading = [i for i, t in enumerate(made) if isinstance(t, Tensor) and t.requires_grad]
        kept = self.inner_of(leading) if self.calls == 1 else ()
        self._handed = [weakref.ref(made[i]) for i in kept]
        trained = [t for t in given if isinstance(t, nn.Parameter) and t.requires_grad]
        self._usual &= self.last == 1 and all(t.grad is None for t in trained)
        held = [(t, memory_of(t)) for t in trained]
        seen = [
            self._seen(i, t, held, shared=places.count(memory_of(t)) > 1)
            if isinstance(t, Tensor) and t.requires_grad and i not in kept
            else t
            for i, t in enumerate(made)
        ]
        return seen if self._numbered is None else self._numbered.outputs(seen, numbers)

    def _seen(
        self, position: int, output: Tensor, held: Sequence[tuple[Tensor, int]], *, shared: bool
    ) -> Tensor:
        """An output that tells when a backward asks for its gradient: another tensor, which the graph does not use.

        It is a copy, because what changes a view in place takes its hooks away; and a view where memory is shared.
        On torch 2.13 a copy of a DTensor adds up the parts of all processes.
        """
        shared |= local_tensor(output) is not output
        other = output.view_as(output) if shared else output.clone()
        other.register_hook(self._hook(position, held, local_tensor(output).shape))
        return other

    def _hook(
        self, position: int, held: Sequence[tuple[Tensor, int]], shape: torch.Size
    ) -> Callable[[Tensor | None], None]:
        @untraced
        def asked(gradient: Tensor | None) -> None:
            if gradient is not None:  # else no gradient of it is asked for
                quietly(lambda: see(gradient))

        def see(gradient: Tensor) -> None:
            placed = getattr(gradient, "placements", None)
            known = self.placements.setdefault(position, placed)
            if known != placed or local_tensor(gradient).shape != shape:
                self._stays_plain(Problem("processes hold other parts of gradients than of results"))
            if self._asking and autocast_now(self.device) != self.autocast:
                self._stays_plain(Problem("its backwards are called under several autocasts"))
            self.autocast = autocast_now(self.device)
            self._asking.setdefault(present_backward(), set()).add(position)
            self.keeps |= backward_keeps_graph()
            self.accumulates |= any(t.grad is not None for t, _ in held)
            if any(memory_of(t) != place for t, place in held):
                self._stays_plain(Problem("its parameters move between forward and backward"))
            if any(is_asked_for(t) for ref in self._handed if (t := ref()) is not None and t.requires_grad):
                self._stays_plain(Problem(_INNER_GRADIENT))
            if torch.is_grad_enabled():
                self.differentiated_twice()
            self.orders[position] = local_tensor(gradient).dim_order()

        return asked

    def itself(self, value: Any) -> bool:
        """Whether nothing stands for an input: FSDP puts the gradient of a parameter there."""
        return self.owner.sharding is not None and id(value) in self.owner.sharding.own

    def differentiate(
        self,
        outputs: Sequence[Tensor],
        seeds: Sequence[Tensor],
        leads: Sequence[Tensor],
        *,
        keeps: bool = True,
    ) -> None:
        """Add the gradients of `leads` to their `.grad`; `keeps`: another backward may come."""
        inputs = leads if self.owner.sharding is None else self.owner.sharding.gathered(leads)
        inputs = list(filter(needs_gradient, inputs))  # FSDP's may be frozen since the forward
        torch.autograd.backward(outputs, seeds, retain_graph=keeps, inputs=inputs or None)

    def communicating(self) -> AbstractContextManager[None]:
        """Inside of each capture."""
        sharding = self.owner.sharding
        return nullcontext() if sharding is None else sharding.communicating()

    def as_in_backwards(self) -> AbstractContextManager[Any]:
        """Of a backward that is made while the forward's autocast is active."""
        dtype = self.autocast
        return torch.autocast(self.device, dtype=dtype, enabled=dtype is not None)

    # -- which recording serves a call ------------------------------------------------------------------

    def _slot(self, given: Sequence[Any]) -> Slot | None:
        """As `_slot_for`. Hot path."""
        if (sharding := self.owner.sharding) is None:
            return self._slot_for(given)
        kept = sharding.kept
        try:
            if any(region.pending for region in self.owner.regions):
                raise Unrecordable(_SEVERAL_FORWARDS)  # FSDP reduces gradients of both at once
            return self._slot_for(given)
        except BaseException:
            quietly(sharding.reset)
            sharding.kept = kept
            raise

    def _slot_for(self, given: Sequence[Any]) -> Slot | None:
        if (overlapped := self.owner.overlaps) is not None and not overlapped.free:
            self.owner.part()  # two forwards wait for their backward at once
        if not self._learned:
            self._learn(given)
        elif (now := self._identity(given)) != self._known:
            if not self._may_move():
                raise Unrecordable("its parameters or buffers are at new addresses again and again")
            (were, lay), (are, lie) = self._known, now
            for k, i in enumerate(self._positions):
                if lay[k] != lie[k] or were[8 * k : 8 * k + 8] != are[8 * k : 8 * k + 8]:
                    if i in self._moved and not given[i].requires_grad:
                        self._demoted.add(i)
                    self._moved.add(i)
            self.slots.clear()  # those with pending backwards live on
            self._learn(given)
            left_untraced()  # Dynamo does not trace a forward anew for other parameters
        if self.votes is not None and self._delivered_now(given) is None:
            return self._unrecorded(given)
        # torch 2.11 does not guard which parameters need gradients
        wanted = bytes(map(needs_gradient, self._fixed_of(given)))
        if not self.inference and 1 not in wanted and not any(given[i].requires_grad for i in self._moving):
            raise _NoPart
        key: tuple[Any, ...] = wanted, kernel_switches(), self._key(given) if self._keyed else ()
        if self.owner.sharding is not None:
            key = self.owner.sharding.reduces, *key
        slots = self.slots.get(key)
        if slots is None:
            if len(self.slots) >= (self.owner.config.max_signatures or 64):
                self.owner.tell(_TOO_MANY)
                return self._unrecorded(given)
            if self.slots and not self._pays(key):
                self.owner.tell(RARE)
                return self._unrecorded(given)
            slots = self.slots[key] = []
        known, compared = None, False
        for slot in slots:
            if slot.free:
                known, audits = slot, slot.audits
                audits.left -= 1
                compared = audits.left < 0 and audits.due(time.perf_counter())
                break
        else:
            if len(slots) == _MOST_PENDING:
                self.owner.tell(_MANY_PENDING)
                self.ask(choices.PLAIN)
                return None
        if self.votes is not None:
            choice = self._voted(known, compared)
            if choice == choices.PLAIN:
                self.owner.tell(APART)
                return None
            known, compared = None if choice == choices.RECORD else known, choice > choices.REPLAY
        if known is not None:
            if compared:
                self._audit(known, given)
            return known
        slots[:] = [slot for slot in slots if not slot.free]
        slot = self._record(given)
        slots.append(slot)
        return slot

    def _voted(self, known: RecordedRegion | None, compared: bool) -> int:
        """What all processes do: run plainly, record, or replay, and one more where they compare the replay."""
        found = self.ask(choices.RECORD if known is None else choices.REPLAY + 2 * known.number + compared)
        if (least := min(found)) <= choices.RECORD:  # one that runs plainly, or records, has its way
            return least
        if len({choice >> 1 for choice in found}) > 1 and self.owner.sharding is None:
            return choices.PLAIN  # each has batches of its own where only parameters are divided
        return choices.REPLAY + any(choice & 1 for choice in found)

    def _may_move(self) -> bool:
        """Count a recording that takes the place of another one: whether replays so far have paid for it."""
        self._moves += 1
        return self._moves <= _MOST_RECORDINGS + self.replays // 50

    def _unrecorded(self, given: Sequence[Any]) -> UnrecordedCall | None:
        """What makes a call without a graph in the memory of graphs, None where that is in use or would not do."""
        owner = self.owner
        if owner.divided:
            self.ask(choices.PLAIN)
            return None
        memory = idle_memory(owner.engine)
        if memory is None or self.inference or owner.config.backward == "off":
            return None
        return UnrecordedCall(self, given, memory)

    def _pays(self, key: Any) -> bool:
        """Whether a recording for further shapes saves more than it takes, if they come as often as so far."""
        if key in self._met or len(self._met) < _MOST_MET:
            self._met[key] = self._met.get(key, 0) + 1
        return self.owner.pays(self._met.get(key, 1) / self.calls, self._took)

    def _identity(self, given: Sequence[Any]) -> tuple[bytes, list[int]]:
        """Of the fixed inputs: objects and addresses. Hot path. It keeps no tensor alive."""
        held = self._fixed_of(given)
        parts = held if self._whole else local_tensors(held)
        return identities(held), list(map(Tensor.data_ptr, parts))

    def _learn(self, given: Sequence[Any]) -> None:
        """The roles of the inputs."""
        trained = set(map(id, self.owner.tensors()))
        tensors = [(i, t) for i, t in enumerate(given) if isinstance(t, Tensor)]
        for _, t in tensors:
            if t.layout is not torch.strided or type(local_tensor(t)) not in (Tensor, nn.Parameter):
                raise Unrecordable(f"one of its inputs is a {type(t).__name__} of layout {t.layout}")
            if t.device.type != self.device:
                raise Unrecordable(f"one of its inputs is on the {t.device.type}")
        self.asked = set(map(frozenset, self._asking.values()))
        if not self.inference and not (self.asked and any(t.requires_grad for _, t in tensors)):
            raise _NoPart
        self.fixed = {
            i
            for i, t in tensors
            if (isinstance(t, nn.Parameter) or is_static(t) or id(t) in trained) and i not in self._demoted
        }
        self._positions = sorted(self.fixed)
        self._fixed_of = picker(self._positions)
        self._whole = all(local_tensor(given[i]) is given[i] for i in self._positions)
        self._known = self._identity(given)
        self._numbers = tuple(i for i, t in enumerate(given) if not isinstance(t, Tensor))
        self._moving = [i for i, _ in tensors if i not in self.fixed]
        if any(given[i].requires_grad for i in self._moving if i in self.written):
            raise Unrecordable("it writes in place what it is given, and gradients go through that")
        self._keyed = self._numbered is not None or bool(self._numbers) or self.owner.divided
        firsts = {id(given[i]): i for i in reversed(self._positions)}  # a parameter may be given twice
        self._delivered = frozenset(i for i in firsts.values() if self.owner.delivers and given[i].is_leaf)
        self._learned, self._hookless = True, -1

    def _key(self, given: Sequence[Any]) -> Any:
        moving = list(map(given.__getitem__, self._moving))
        tensors = [*moving, *local_tensors(moving)] if self.owner.divided else moving
        return *map(given.__getitem__, self._numbers), *map(_shape, tensors), *map(_stride, tensors)

    # -- recording and comparing ------------------------------------------------------------------------

    def _record(self, given: Sequence[Any]) -> RecordedRegion:
        owner, started = self.owner, time.perf_counter()
        if owner.awaited:
            quietly(owner.settle)
        if not self.recordings:
            self.accumulates |= len(self._asking) < self._led
        memory = first_memory(owner.engine) if self._may_overlap(given) else None
        if memory is None and not self.inference:
            owner.make_places([given[i] for i in self._positions if given[i].requires_grad])
        owner.overlaps = memory or owner.overlaps
        try:
            with self._gradients_aside(given):
                return self._recorded(given, started, overlaps=memory is not None)
        except BaseException:
            if memory is not None:
                owner.part()
            raise

    def _recorded(self, given: Sequence[Any], started: float, *, overlaps: bool) -> RecordedRegion:
        owner = self.owner
        verifies = owner.config.verify != "off" or owner.sharding is not None
        compared = self.asked if owner.config.backward != "off" and self.asked else {frozenset[int]()}
        owner.engine.trim()  # what steps without a graph have left does not come on top of this one's memory
        # before there is a graph, whose memory would come on top
        known = {asked: self._of_a_plain_run(given, asked) for asked in compared if verifies}
        self.agree(True)
        with torch.inference_mode(False), self._undone(given):
            gc.collect(1)  # what the run without a graph has left
            slot = RecordedRegion(self, given, overlaps=overlaps)
        self.recordings += 1
        seconds = time.perf_counter() - started
        slot.audits = Audits(owner.config.verify, time.perf_counter())
        if verifies:
            self._compare(slot, given, known)
            slot.audits.took(time.perf_counter() - started, first=True)  # what a later one may take
        owner.cuts += [owner.end] if owner.end is not None else []
        if not owner.recorded:
            sizes = ["x".join(map(str, given[i].shape)) for i in self._moving if given[i].dim()]
            owner.sizes = ", ".join([*dict.fromkeys(sizes)][:_MOST_SIZES])
        took = (time.perf_counter() - started) / (_FIRST if self.recordings == 1 else 1)
        self._took = min(self._took, took)
        owner.recorded += 1
        owner.seconds += seconds
        phases = "{F}" if self.inference else "{F} {B}"
        log.info("pygraph: captured %s in %.2f s", phases, seconds)
        return slot

    def _may_overlap(self, given: Sequence[Any]) -> bool:
        """Whether gradients may lie where activations lay that the backward has read, as they do in plain training.

        So the next forward overwrites them. They are gone by then where the loop has emptied them so far, and no other
        backward puts gradients there while a forward waits for its own, where a step has made one forward so far.
        """
        owner = self.owner
        divided = owner.divided and owner.sharding is None
        alone = owner.owns and len(owner.regions) == 1 and not (owner.gradients or divided)
        once = len(self.asked) == 1 and not (self.keeps or self.inference) and owner.config.backward != "off"
        return (
            alone
            and once
            and self._usual
            and not self.accumulates
            and all(t.grad is None for t in given if isinstance(t, nn.Parameter))
        )

    @contextmanager
    def _undone(self, given: Sequence[Any]) -> Iterator[None]:
        """Around what must leave no trace: random states, what the region writes, and gradients that it reads."""
        places = set(map(Tensor.data_ptr, local_tensors([*self.owner.gradients.values()])))
        read = [given[i] for i in self._moving if given[i].numel() and given[i].data_ptr() in places]
        before = ScratchState(self.owner.engine.device, [*self._changed(given), *read])
        kept = [] if (sharding := self.owner.sharding) is None else sharding.kept
        values = Backup(self.owner.engine.device, [t for t in kept if t is not None])
        try:
            yield
        finally:
            put_back(before.restore)
            if sharding is not None:
                put_back(values.restore)
                sharding.kept = kept

    @contextmanager
    def _gradients_aside(self, given: Sequence[Any]) -> Iterator[None]:
        """Around what computes gradients where others lie: the host has memory for a copy of these."""
        places = self.owner.gradients
        held = [(t.grad, places.get(id(t))) for t in self._fixed_of(given)]
        lie = [place for g, place in held if place is not None and lies_at(g, place)]
        before = Backup(self.owner.engine.device, lie) if lie else None
        try:
            yield
        finally:
            if before is not None:
                put_back(before.restore)

    def _changed(self, given: Sequence[Any]) -> list[Tensor]:
        """The fixed inputs that the region writes."""
        return [given[i] for i in sorted(self.written & self.fixed)]

    def _audit(self, slot: RecordedRegion, given: Sequence[Any]) -> None:
        started = time.perf_counter()
        with self._gradients_aside(given):
            self._compare(slot, given, {})
        slot.audits.took(time.perf_counter() - started, first=False)

    def _compare(
        self,
        slot: RecordedRegion,
        given: Sequence[Any],
        known: Mapping[frozenset[int], Fingerprint | None],
    ) -> None:
        """A replay has to give what the region gives without a graph. Nothing is left of either.

        Args:
            known: what the region gives, where that is known.
        Raises:
            Unrecordable: it does not.
        """
        for asked in slot.backwards or [frozenset()]:
            plain = known[asked] if asked in known else self._of_a_plain_run(given, asked)
            if self.agree(plain is None or plain.same_bits(self._of_a_replay(slot, given, asked))):
                continue
            # what a kernel that adds in no fixed order gives now and then is no other computation
            first = cast(Fingerprint, self._of_a_plain_run(given, asked, distances=True))
            runs = PlainRuns(first, "result", unordered=self._unordered)
            found = (self._difference(runs, slot, given, asked) for _ in itertools.count())
            if (difference := runs.again(found, self.agree)) is not None:
                slot.close()
                raise Unrecordable(f"its replay computes something else: {difference}")

    def _difference(
        self, runs: PlainRuns, slot: RecordedRegion, given: Sequence[Any], asked: frozenset[int]
    ) -> str | None:
        """What one replay and plain runs differ by, None where it is like one of them."""
        found = self._of_a_replay(slot, given, asked, distances=True)
        if self.agree(runs.same(found)):
            return None
        while not self.agree(runs.enough(found)):
            runs.add(self._of_a_plain_run(given, asked, distances=True) or runs.first)
        why = runs.refuse(found)
        return None if self.agree(why is None) else why or "that of another process differs"

    def _of_a_plain_run(
        self, given: Sequence[Any], asked: frozenset[int], *, distances: bool = False
    ) -> Fingerprint | None:
        """What the region gives without a graph; None where such a backward is not possible."""
        owner = self.owner
        kept = [] if owner.sharding is None else owner.sharding.kept
        with self._undone(given):
            with nullcontext() if self.votes is None else Collectives(self):
                made = run_plainly(self, given, asked, free_memory(owner.engine))
            if owner.sharding is not None and made is not None:
                after = owner.sharding.kept
                self.keeps_like = [b if a is None else a for a, b in zip(after, kept, strict=True)]
                made[1].extend(after)
            torch.clear_autocast_cache()  # an autocast around the region would keep casts of this run's weights
            return None if made is None else self._fingerprint_of(given, *made, distances)

    def _of_a_replay(
        self, slot: RecordedRegion, given: Sequence[Any], asked: frozenset[int], *, distances: bool = False
    ) -> Fingerprint:
        with self._undone(given):
            return self._fingerprint_of(given, *slot.replayed(given, asked), distances)

    def _fingerprint_of(
        self,
        given: Sequence[Any],
        outputs: Sequence[Any],
        gradients: Sequence[Tensor | None],
        distances: bool,
    ) -> Fingerprint:
        tensors = [*(o for o in outputs if isinstance(o, Tensor)), *gradients, *self._changed(given)]
        return Fingerprint.of(tensors, distances=distances)


class SharedGraph:
    """A graph of Dynamo's. Modules of one class, as the layers of a model are, share it; each has a region of its own.

    Attributes:
        shared: the region that was made with the graph.
        first: position of the parameter that tells modules apart, None without one.
        regions: by the id of that parameter.
    """

    kind: type[PhaseRegion] = PhaseRegion

    def __init__(self, owner: PhaseRegions, gm: GraphModule, examples: Sequence[Any]) -> None:
        self.shared = self.kind(owner, gm, examples)
        self.first = next((i for i, t in enumerate(examples) if isinstance(t, nn.Parameter)), None)
        self.regions: dict[int | None, PhaseRegion] = {}

    def __call__(self, *given: Any) -> Any:
        """Run it. Hot path."""
        key = None if self.first is None else id(given[self.first])
        region = self.regions.get(key)
        return (self.region_of(key, given) if region is None else region)(*given)

    def guarded(self) -> Callable[..., Any]:
        """What Dynamo gets: nothing of ours is called outside of the boundary."""
        return functools.partial(self.shared.owner.boundary.make, self, self.shared.run_plainly)

    def region_of(self, key: int | None, given: Sequence[Any]) -> PhaseRegion:
        """That of a module that has none yet: the first one, or one that has taken its place, has the shared one."""
        regions, owner = self.regions, self.shared.owner
        if len(regions) == 1 and self.shared.last > owner.parts:
            regions.clear()  # the other one was called in an earlier step
        if not regions or len(regions) == _MOST_MODULES:
            return regions.setdefault(key, self.shared)
        region = regions[key] = self.shared.another()
        owner.regions.append(region)
        return region


_PART = "a part of the step runs without a graph"
_CAUGHT = f"{_PART}: the step catches exceptions of its operations"
_LOST = f"{_PART}: Dynamo loses a number that the step writes"  # under a default device
_SAVED_TENSORS_HOOKS = Problem(
    "a part of the step runs without a graph: saved_tensors_hooks are active around it, and see nothing of a replay"
)
_DIFFERENTIATES = Problem(
    "a part of the step runs without a graph: it calls torch.autograd.grad, and hooks of its inputs see nothing of a "
    "replay",
    fix="Remove the hooks, or nothing",
)
_HOOKED = Problem(
    "a part of the step runs without a graph: its parameters have hooks, which may talk to other processes, and a "
    "replay calls them at another time",
    fix="Remove the hooks, or nothing",
)
_TOO_MANY = Problem(
    "a part of the step has as many recordings for sets of shapes and numbers as are kept, and further ones run "
    "without a graph",
    fix="Pad batches to fewer sizes, keep numbers that change in tensors, or choose a larger max_signatures",
)
_MANY_PENDING = Problem(
    f"a part of the step is called more than {_MOST_PENDING} times before its backward, and further calls run without "
    "a graph",
    fix="Call it with all inputs in one batch, or call backward after each call",
)
_OTHER_BACKWARD = Problem(
    "a backward runs without a graph: those before were called under another autocast or of other results, or since "
    "the forward FSDP has gathered parameters, reduces gradients in another way, or found some frozen",
    fix="Call backward of the loss, outside of autocast",
)
RARE = Problem(
    "a step differs from those that have graphs, by the shapes of its batch or by a branch, and such steps are rare",
    fix='They run without graphs, because it takes longer to make some. forward="on" makes them all',
)
_SEVERAL_FORWARDS = "a model of FSDP is called again while an earlier result waits for its backward"
_TORN = "a comparison with collectives failed in one process alone. Go on from a checkpoint, without graphs"
_INNER_GRADIENT = "gradients are asked for of a result from which another result is computed"


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor_version(tensor)


class _NoPart(Exception):
    """No gradient depends on a region."""


def _inner(gm: GraphModule) -> dict[int, set[int]]:
    """Positions of results from which others are computed, and which those are."""
    output, *others = reversed(gm.graph.nodes)
    results = [(i, r) for i, r in enumerate(output.args[0]) if isinstance(r, Node)]
    later: dict[Node, set[int]] = {output: set()}
    for node in others:
        later[node] = set().union(*(later[user] for user in node.users))
        later[node] |= {i for i, r in results if r in node.users}
    return {i: later[r] for i, r in results if later[r]}


def _same(one: Tensor, other: Tensor) -> bool:
    return bool(
        torch.equal(one.nan_to_num(), other.nan_to_num())
        if one.is_floating_point()
        else torch.equal(one, other)
    )
