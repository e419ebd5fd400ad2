"""One compiled callable, a forward or a backward, that turns itself into a CUDA graph.

The life of a region: run as compiled until warm, capture, replay. Whatever a graph cannot serve (another
address, memory in use) runs as compiled, on the same inputs, once.

A backward's graph overwrites what the forward saved when it has read it. Where autograd's graph is kept for another
backward (`retain_graph=True`, `create_graph=True`), the run comes from a second graph, which leaves that alone.
"""

from __future__ import annotations

import gc
import logging
import math
import weakref
from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any, Literal

import torch

from pygraph_train.boundary import BACKWARD, FORWARD, Boundary, done, executes, here, rehearsal, theirs
from pygraph_train.graphs import CaptureError
from pygraph_train.regions.arena import Arena, Occupant
from pygraph_train.regions.blocks import Block, block_of
from pygraph_train.regions.measurements import Measurements
from pygraph_train.regions.options import BackendOptions
from pygraph_train.regions.pair import Pair
from pygraph_train.regions.recording import record
from pygraph_train.regions.region_capture import Handing, RegionCapture
from pygraph_train.report.backend_report import RegionRecord
from pygraph_train.selection.break_even import Sightings
from pygraph_train.torch_private.autograd import backward_keeps_graph
from pygraph_train.torch_private.benchmarks import benchmarks_leave_no_memory
from pygraph_train.torch_private.dispatch import has_no_memory
from pygraph_train.torch_private.guards import parameters_go_unguarded
from pygraph_train.torch_private.memory import storage_key, storages

__all__ = ["Region", "RegionSpec"]

logger = logging.getLogger(__name__)

MAX_VERSIONS = 4  # graphs of one region for the same shapes, for different things alive in the pool
SHAPES = 1024  # sets of shapes remembered
NUMBERS = 32  # values of the numbers that a region computes with, and no graph for any of them
BLOCKED = 32  # runs in a row that no version could make, before they make room for others
PATIENCE = 3  # runs without a graph that wait for gradients in the way to be emptied
NO_ROOM = "with its graph the step would need more memory than without graphs"
OTHERWISE = 8  # runs with other kernels after which a region that has no graph gets none
MISSES = 2  # runs with an input elsewhere before it counts as one that moves

RegionPhase = Literal["forward", "backward", "inference"]


@dataclass(frozen=True)
class RegionSpec:
    """What the compiler knows of a region.

    Args:
        name: for the report.
        phase: "forward" saves activations for a "backward"; "inference" does not.
        static: inputs expected at the same addresses: parameters, buffers, what the forward saved.
        mutated: inputs that the region writes to.
        mutations: so many outputs at the front are new values of inputs, for AOTAutograd to copy there.
        saved_from: outputs from this index on go to the backward only (len(outputs) for "inference").
        replaced: so many outputs at the end become the memory of inputs: each run returns others.
        numbers: inputs that are numbers, and no sizes of other inputs.
        where: `file:line` of the user's code, or None.
    """

    name: str
    phase: RegionPhase
    static: frozenset[int]
    mutated: frozenset[int]
    mutations: int
    saved_from: int
    where: str | None
    replaced: int = 0
    numbers: tuple[int, ...] = ()


class _Key:
    """What a region remembers of one set of shapes that came back."""

    __slots__ = ("blocked", "captures", "evicted", "misses", "paid", "runs", "shapes")

    def __init__(self, shapes: tuple[Any, ...], runs: int) -> None:
        self.shapes = shapes
        self.runs = runs  # since it may be captured anew
        self.paid = False  # its runs have paid for a graph
        self.evicted = 0  # so often its graphs went to make room for others
        self.misses = 0
        self.blocked = 0  # runs in a row that no graph could make
        self.captures: list[RegionCapture] = []


class Region:
    """A callable in AOTAutograd's boxed convention.

    Args:
        compiled: the compiled callable; it empties the list that it is given.
        spec: what the compiler knows.
        arena: owns the memory of the graphs.
        options: see BackendOptions.
        pair: the forward or backward that belongs to it.
        row: its row of the report.
    """

    def __init__(
        self,
        compiled: Callable[[list[Any]], Any],
        spec: RegionSpec,
        arena: Arena,
        options: BackendOptions,
        pair: Pair,
        row: RegionRecord,
    ) -> None:
        self._boxed_call = True  # how AOTAutograd calls it; on the instance, where wrappers copy it from
        self.spec = spec
        self.record = row
        self.measurements = Measurements(pair.way is not None, arena.engine.synchronize)
        self._compiled = compiled
        self._what = BACKWARD if spec.phase == "backward" else FORWARD
        self._boundary = Boundary(rest=lambda: self.give_up("pygraph-train has failed in it too often"))
        self._timed = not options.compile  # Inductor times its kernels in their first run
        self._watched = parameters_go_unguarded()
        self._arena = arena
        self._options = options
        self._pair = pair
        self._keys: OrderedDict[tuple[Any, ...], _Key] = OrderedDict()
        self._sightings = Sightings(SHAPES)  # of shapes that did not come back often enough
        self._most: float = options.max_signatures or math.inf
        weakref.finalize(self, arena.abandoned.append, self._keys).atexit = False
        self._constants: tuple[int, ...] | None = None
        self._moving: set[int] = set()
        self._followed: dict[int, int] = {}  # how often an input was found elsewhere with its producer
        self.witness: Callable[[list[Any], Callable[[list[Any]], Any]], Any] | None = (
            None  # sees the next runs
        )
        self.last: RegionCapture | None = None  # what the last run replayed, if it did
        self._in_place = True  # gradients and large outputs are handed out where the graph writes them
        self.standing: tuple[torch.Tensor, ...] = ()  # inputs that are where they are for good
        self._otherwise = 0  # runs with other kernels
        self._retained = 0  # backwards without a graph that read what a later one will read again
        self._reopened = 0  # so often the forward's graph was closed for the sake of these
        self._waited = 0  # for gradients to be emptied, or for one of these
        self._lasting = False  # its memory comes from another pool than a forward's
        self._returned: list[int] | None = None  # outputs in memory of what the forward saved, once known
        self.plain_only = False
        self._given_up = False  # and nothing of what it returns has to be copied
        self.alone = spec.phase == "backward" and options.phases == "backward"  # no forward's graph feeds it
        if spec.phase == "backward":
            pair.backward = self
        else:
            pair.forward = self
        if options.phases not in ("both", "backward" if spec.phase == "backward" else "forward"):
            self.give_up(f"phases={options.phases!r} is set")
        elif spec.phase == "backward" and not self.alone and pair.forward and pair.forward.plain_only:
            self.give_up("its forward runs without a graph")

    def __call__(self, inputs: list[Any]) -> Any:
        """Run the region once.

        Args:
            inputs: tensors and numbers in the order of the compiled graph; the list is emptied.
        Returns:
            The outputs, in the order of the compiled graph.
        """
        if self.witness is not None:
            return self.witness(inputs, self._guarded)
        if self._given_up and not self._arena.abandoned:  # as directly as the compiler calls it
            self.record.plain_runs += 1
            if (progress := here.progress) is not None:  # `executes`, which is called
                progress.began = self._what
            return self._compiled(inputs)
        return self._guarded(inputs)

    def _guarded(self, inputs: list[Any]) -> Any:
        # the list is whole until the run begins: a copy of it would look as if somebody held the inputs
        return self._boundary.make(self._call, self._run_compiled, inputs)

    def _begins(self) -> None:
        executes(self._what)

    def _call(self, inputs: list[Any]) -> Any:
        asleep = self.plain_only or self._pair.bounds.asleep
        if asleep or self._arena.engine.capturing() or not self._may_have_graph(inputs):
            self.record.plain_runs += 1
            self.last = None
            if self._arena.abandoned and not self._arena.engine.capturing():
                with self._arena.lock:
                    self._arena.sweep()
            outputs = self._run_compiled(inputs)
            self._given_up = self.plain_only and self._copies_nothing()
            return outputs
        with self._arena.lock:
            self._arena.follow_stream()
            if self._arena.abandoned:
                self._arena.sweep()
            return self._run(inputs)

    def _run(self, inputs: list[Any]) -> Any:
        key = self._key(inputs)
        if self.plain_only:
            return self._plain(inputs)
        # what the forward saved is needed again: that needs a graph which leaves it alone
        spares = self.spec.phase == "backward" and not self.alone and backward_keeps_graph()
        blocked: list[Occupant] = []
        for capture in key.captures:
            if capture.spares is spares and capture.fits(inputs):
                blocked = self._arena.in_the_way(capture.occupants, capture.consumes)
                if not blocked:
                    key.blocked = 0
                    return self._replay(capture, inputs, key)
        failure = None
        self._retained += spares
        if self._may_capture(key, inputs, blocked, spares) and self._pair.bounds.allow():
            with rehearsal():  # where it fails, nothing has happened
                new = self._capture(key, inputs, spares)
            if isinstance(new, RegionCapture):
                return self._replay(new, inputs, key)
            failure = new
        outputs = self._plain(inputs, key)  # a batch that fails without a graph as well speaks against none
        if failure is not None:
            self._failed(f"{type(failure).__name__} during capture: {failure}", failure)
        return outputs

    def _may_have_graph(self, inputs: list[Any]) -> bool:
        """Whether these shapes have a graph, or come back often enough to be looked at. Hot path of all others."""
        if self._constants is None:
            self._constants = tuple(i for i, x in enumerate(inputs) if not isinstance(x, torch.Tensor))
            if self.spec.phase != "backward" or self.alone:  # else what the forward's graph saves decides
                self._refuse_foreign(inputs)
            if self.plain_only:
                return False
        shapes = tuple([inputs[i] for i in self._constants])
        if shapes in self._keys:
            return True
        self.measurements.changing |= bool(self._keys) or len(self._sightings) > 1
        measuring = self._pair.way == "graph" and self.measurements.looking
        if self.spec.phase == "backward" and not self.alone:
            fed = self.fed
            if not measuring:
                return fed and self._remember(shapes, 0)
        else:
            fed = False
        runs = self._sightings.see(shapes)
        if runs == 1 and self.spec.numbers and len(self._sightings) + len(self._keys) == NUMBERS + 1:
            self._refuse_counter(self._constants)
            if self.plain_only:
                return False
        if fed or (runs > 1 if measuring else self._pair.worth.pays(runs, 0)):
            return self._remember(shapes, runs - 1)
        return False

    def _remember(self, shapes: tuple[Any, ...], runs: int) -> bool:
        with self._arena.lock:
            self._keys.setdefault(shapes, _Key(shapes, runs))
            self._sightings.forget(shapes)
            while len(self._keys) > SHAPES:  # those that never came back must not pile up
                self._drop(self._keys.popitem(last=False)[1])
        return True

    def _key(self, inputs: list[Any]) -> _Key:
        assert self._constants is not None
        shapes = tuple([inputs[i] for i in self._constants])
        if shapes not in self._keys:  # another thread has made room
            self._remember(shapes, 0)
        key = self._keys[shapes]
        if len(self._keys) > 1:
            self._keys.move_to_end(shapes)
        key.runs += 1
        return key

    def _refuse_foreign(self, inputs: list[Any]) -> None:
        device = self.device
        for i, x in enumerate(inputs):
            if isinstance(x, torch.Tensor):
                if x.device != device:
                    self.give_up(f"input {i} is on {x.device}, its kernels run on {device}")
                elif x.is_conj() or x.is_neg():
                    self.give_up(f"input {i} is conjugated or negated lazily")
                elif has_no_memory(x):
                    self.give_up(f"input {i} is zeros without memory")
                elif x.layout != torch.strided:
                    self.give_up(f"input {i} is not a strided tensor")
            elif x is not None and not isinstance(x, (int, float, bool)):
                self.give_up(f"input {i} is a {type(x).__name__}")

    def _refuse_counter(self, constants: tuple[int, ...]) -> None:
        """A number that is another one in every run would need a graph for each."""
        places = [constants.index(i) for i in self.spec.numbers]
        seen: list[Any] = [*self._keys, *self._sightings.values()]
        found = {tuple([values[place] for place in places]) for values in seen}
        if len(found) == len(seen) and not any(k.captures or k.evicted for k in self._keys.values()):
            self.give_up("it computes with a number that is another one in every run, and a graph has one")

    def _make_room(self, most: float) -> None:
        """Close the graphs of the shapes that were not used for longest, until so many sets of shapes have some."""
        used = [key for key in self._keys.values() if key.captures]
        for key in used[: int(max(0, len(used) - most))]:
            self._evict(key)

    def _evict(self, key: _Key) -> None:
        self._drop(key)
        key.evicted, key.runs, key.blocked, key.paid = key.evicted + 1, 0, 0, False

    def _drop(self, key: _Key) -> None:
        self._close(key, key.captures)

    def forget(self, consumed: Occupant) -> None:
        """Close the graphs that read these outputs of a graph that is gone."""
        for key in self._keys.values():
            self._close(key, [capture for capture in key.captures if capture.source is consumed])

    def _close(self, key: _Key, gone: list[RegionCapture]) -> None:
        key.captures = [capture for capture in key.captures if capture not in gone]
        backward = self._pair.backward
        for capture in gone:
            if self.last is capture:
                self.last = None
            self._arena.remove(capture.occupants)
            if backward is not None and backward is not self:
                backward.forget(capture.occupant)
            capture.close()

    def _plain(self, inputs: list[Any], key: _Key | None = None) -> Any:
        self.record.plain_runs += 1
        self.last = None
        in_question = self._pair.way == "graph" and key is not None and not key.captures
        if key is None or not in_question or not self.measurements.wants(key.shapes, key.runs):
            return self._run_compiled(inputs)
        return self.measurements.time_plain(key.shapes, lambda: self._run_compiled(inputs))

    def run_others(self, kernels: Callable[[list[Any]], Any], inputs: list[Any]) -> Any:
        """Run other kernels once, without a graph."""
        self.record.plain_runs += 1
        self.last = None
        self._otherwise += 1
        if self._otherwise > OTHERWISE and not self.record.captures and not self.plain_only:
            self.give_up("other gradients of its results are there than in the run that it was compiled for")
        saved = set(storages([inputs[i] for i in self.spec.static]))
        outputs = list(kernels(inputs))
        forward = self._pair.forward
        if forward is None or not forward.record.captures:
            return outputs
        return [x.clone() if saved.intersection(storages([x])) else x for x in outputs]

    def _copies_nothing(self) -> bool:
        """Whether `_run_compiled` is nothing but the compiled callable, now and later on."""
        forward = self._pair.forward
        if self.spec.phase != "backward" or forward is None or self._returned == []:
            return True
        return forward.plain_only and not forward.record.captures

    def _run_compiled(self, inputs: list[Any]) -> Any:
        """As compiled. What a backward hands on of that which a forward's graph saved is copied.

        That memory counts as dead after the backward, and a graph will overwrite it.
        """
        if not self._timed:
            self._timed = True
            with benchmarks_leave_no_memory():
                return self._run_compiled(inputs)
        forward = self._pair.forward
        self._begins()
        if self.spec.phase != "backward" or forward is None or not forward.record.captures:
            return self._compiled(inputs)
        if self._returned is not None:
            outputs = list(self._compiled(inputs))
        else:  # the same ones in every run of the same kernels
            saved = set(storages([inputs[i] for i in self.spec.static]))
            outputs = list(self._compiled(inputs))
            self._returned = [i for i, x in enumerate(outputs) if saved.intersection(storages([x]))]
        for i in self._returned:
            outputs[i] = outputs[i].clone()
        return outputs

    def _replay(self, capture: RegionCapture, inputs: list[Any], key: _Key) -> list[Any]:
        row = self.record
        row.replays += 1
        self.last = capture
        way = self._pair.way
        if way is not None and self.measurements.open(way, key.shapes):
            outputs = self.measurements.time(way, lambda: capture.replay(inputs, self._begins), key.shapes)
        else:
            way, outputs = None, capture.replay(inputs, self._begins)
        done(outputs)
        self._arena.ran(capture.occupants, capture.consumes)
        row.patched_pointers = capture.patched
        if way is not None:
            self._pair.settle()
        return outputs

    # ------------------------------------------------------------------ capture

    def _may_capture(self, key: _Key, inputs: list[Any], blocked: list[Occupant], spares: bool) -> bool:
        if self._outputs_in_the_way(blocked) or self._gradients_in_the_way(blocked):
            return False
        fed = self.spec.phase == "backward" and not self.alone
        near = self._of_same_source(key, inputs, spares) if fed else key.captures
        if blocked and len(near) >= MAX_VERSIONS:
            self._free_the_way(blocked)
            key.blocked += 1
            if key.blocked > BLOCKED:  # what its versions were made for does not come back
                self._evict(key)
            return False
        if near and not blocked and not self._moved(key, near, inputs):
            return False
        if not self._pair.worth.within(self.record.captures, self.record.replays + self.record.plain_runs):
            return False  # something closes its graphs again and again
        if fed:
            if self._pair.way is not None and not self.measurements.has(key.shapes):
                return False
            self._refuse_foreign(inputs)
            if self.plain_only:
                return False
            often = self._retained > 0 and self._pair.worth.pays(self._retained, 0)
            if spares:
                return often and self._source_is_owned(inputs, spares)
            if often and self._waited < BLOCKED and not self._of_same_source(key, inputs, spares=True):
                self._waited += 1  # once there is a graph that frees what it reads, no other one can be made
                return False
            return self._source_is_owned(inputs, spares)
        return bool(blocked) or key.paid or self._pays(key)

    def _pays(self, key: _Key) -> bool:
        """Whether shapes without a graph came back often enough for one."""
        worth, measurements = self._pair.worth, self.measurements
        if self._pair.way is None:
            # shapes that take turns, more of them than are kept: longer and longer without a graph
            return worth.pays(key.runs, key.evicted)
        if self._pair.way != "graph" or not measurements.looking:
            self._pair.start_over(key.runs)  # what a graph gains is measured on other shapes just now
            return False
        if key.runs <= self.warm_runs() or not measurements.has(key.shapes):
            return False
        plain = measurements.typical()
        if plain is None or measurements.adopted or not measurements.changing:
            return True
        return key.runs * plain >= self._arena.price  # at best the graph saves all of that

    def _of_same_source(self, key: _Key, inputs: list[Any], spares: bool) -> list[RegionCapture]:
        """Backwards of the forward's graph that saved these inputs; those that leave them alone, or the others."""
        source = self._source(inputs)
        mine = [c for c in key.captures if source is not None and c.source is source.occupant]
        return [capture for capture in mine if capture.spares is spares]

    def _outputs_in_the_way(self, blocked: list[Occupant]) -> bool:
        """Nothing but outputs that users keep is in the way: from now on these are copied."""
        owners = [o.owner for o in blocked if o.visible]
        if len(owners) < len(blocked) or not any(isinstance(o, Region) and o._in_place for o in owners):
            return False
        gc.collect()  # a compilation leaves what it was called with in reference cycles
        for occupant in blocked:
            if isinstance(occupant.owner, Region) and occupant.alive():
                occupant.owner._in_place = False
                occupant.owner.capture_again()
        return True

    def _gradients_in_the_way(self, blocked: list[Occupant]) -> bool:
        """Nothing but gradients of the step before is in the way of a forward: from now on they lie elsewhere."""
        owners = {o.owner for o in blocked if o.alive()}
        regions = [o for o in owners if isinstance(o, Region) and o.spec.phase == "backward"]
        if self.spec.phase != "forward" or not regions or len(regions) < len(owners):
            return False
        here = [region for region in regions if not region._lasting]
        for region in here:
            region._lasting = True
            region.capture_again()
        self._waited += 1  # those of closed graphs are in the way for a while, until somebody empties them
        return bool(here) or self._waited <= PATIENCE

    def _source_is_owned(self, inputs: list[Any], spares: bool) -> bool:
        """Whether a forward's graph saved these inputs, in memory that the pool will not hand out."""
        source = self._source(inputs)
        if source is None:
            return False
        if not source.occupant.owned and not self._lasting:
            assert self._pair.forward is not None
            self._reopened += spares
            if spares and self._reopened > MAX_VERSIONS:
                return False
            self._waited = 0
            self._pair.forward.capture_shapes_again(source)  # with their next run, and then this one
        return source.occupant.owned or self._lasting

    def warm_runs(self) -> int:
        """Runs of the first shapes before they are captured."""
        return max(self._options.warmup_runs, self.measurements.warm_runs)

    def _moved(self, key: _Key, near: list[RegionCapture], inputs: list[Any]) -> bool:
        """An input of a captured region is elsewhere; if that goes on, it is one that moves."""
        last = near[-1]
        moved = last.moved(inputs)
        if last.laid_out_anew(inputs):
            self.give_up("a parameter has other strides than when the function was compiled")
            return False
        if not all(self._follows(last.producers.get(i), i, inputs[i]) for i in moved):
            key.misses += 1
            if key.misses <= MISSES:
                return False
            self._moving |= moved
        key.misses = 0
        self._close(key, [capture for capture in key.captures if capture.spares is last.spares])
        return True

    def _follows(self, before: Callable[[], Occupant | None] | None, i: int, tensor: torch.Tensor) -> bool:
        """Whether an input is elsewhere because the graph that hands it out was captured again, or for good."""
        if any(tensor is t for t in self.standing):
            return True
        arena = self._arena
        if before is None or arena.produces(before()) or arena.producer(tensor) is None:
            return False
        self._followed[i] = self._followed.get(i, 0) + 1
        return self._followed[i] <= MAX_VERSIONS

    def _free_the_way(self, blocked: list[Occupant]) -> None:
        for occupant in blocked:
            owner = occupant.owner
            if isinstance(owner, Region) and owner.spec.phase == "backward" and owner._in_place:
                owner._in_place = False
                owner.capture_again()
                if self._pair.forward is not None:
                    self._pair.forward.capture_again()

    def _source(self, inputs: list[Any]) -> RegionCapture | None:
        """The forward's graph that saved these inputs."""
        forward = self._pair.forward
        if forward is None or forward.last is None:
            return None
        keys = {storage_key(t.untyped_storage()) for t in inputs if isinstance(t, torch.Tensor)}
        for capture in forward._captures():
            tensors = capture.occupant.tensors
            if capture.occupant.in_use_by(keys) or (not tensors and capture is forward.last):
                return capture
        return None

    def _capture(self, key: _Key, inputs: list[Any], spares: bool) -> RegionCapture | Exception | None:
        """A new graph; an exception if it may be the user's, which the run without a graph shows."""
        arena = self._arena
        source = self._source(inputs) if self.spec.phase == "backward" else None
        read = source.occupant if source is not None else None
        consumed = None if spares else read
        moving, settled = self._sort_inputs(inputs, source, consumed)
        prefer = self._pair.prefer_for(sum(inputs[i].nbytes for i in moving))
        further = any(other.captures for other in self._keys.values() if other is not key)
        begun = self.measurements.clock()
        if not further:
            arena.engine.tidy(in_a_row=True)  # regions of one step are captured together
        started = self.measurements.clock()
        if further and not arena.room.is_there(self._pair.bounds.most):
            arena.engine.tidy()
        # a backward gets its graph wherever its forward has one
        if further and read is None and arena.room.is_used_up():
            self._make_room(sum(1 for other in self._keys.values() if other.captures) - 1)
        try:
            with arena.allocating(self._lasting), arena.room.growing(further), ExitStack() as stack:
                stack.enter_context(arena.engine.bounded(self._pair.bounds.most))
                owned = read is not None and read.owned
                keeps = arena.before_capture(consumed, self._lasting)
                if read is not None:  # the graph may hold what it reads
                    freed = read.blocks if owned and not read.owned else frozenset()
                    stack.callback(_held(inputs, freed).clear)
                    stack.enter_context(read.recounting())
                work = record(
                    arena.engine,
                    self._run_compiled,
                    inputs,
                    moving,
                    settled,
                    consumed,
                    self.spec.mutated,
                    prefer,
                )
        except CaptureError as error:
            self._failed(error.reason, error)
        except torch.OutOfMemoryError as error:
            arena.engine.trim()
            if further:
                self._most = max(1, sum(1 for other in self._keys.values() if other.captures))
                self._evict(key)
            else:
                bounded = self._pair.bounds.most is not None
                self._failed(NO_ROOM if bounded else "the device has no memory left for the capture", error)
        except Exception as error:  # the run without a graph shows whether it is the user's
            if self._options.on_failure == "raise":
                theirs(error)
                raise
            return error
        else:
            capture = RegionCapture(
                work,
                settled,
                self.spec.mutated,
                self._handing(len(work.result)),
                keeps=keeps,
                pool=arena.pool(self._lasting),
                source=read,
                spares=spares,
                watched=self._watched,
            )
            for occupant in capture.occupants:
                occupant.owner = self
            if self._pair.way is None:
                capture.point(prefer is not None, for_good=True)
            arena.add(capture.occupants)
            key.captures.append(capture)
            key.paid = True
            now = self.measurements.clock()
            seconds, capture.seconds = now - started, now - begun
            self.measurements.adopt(key.shapes)
            self._pair.worth.captured(self.spec.phase, seconds)
            arena.paid(seconds)
            self._make_room(self._most)
            self._note(capture, work.unserved)
            return capture
        return None

    def _sort_inputs(
        self, inputs: list[Any], source: RegionCapture | None, consumed: Occupant | None
    ) -> tuple[list[int], dict[int, Occupant]]:
        """Tensors that will be elsewhere in the next run, and those that are outputs of another graph."""
        followed = set(source.served_at) if source is not None else set()  # saved by the forward as it came
        moving: list[int] = []
        settled: dict[int, Occupant] = {}
        for i, x in enumerate(inputs):
            if not isinstance(x, torch.Tensor):
                continue
            if i in self._moving or x.data_ptr() in followed:
                moving.append(i)
                continue
            if any(x is t for t in self.standing):
                continue
            producer = self._arena.producer(x) if x.numel() else None
            if producer is not None and producer is not consumed:
                settled[i] = producer
            elif i not in self.spec.static:
                moving.append(i)
        return moving, settled

    def _handing(self, outputs: int) -> Handing:
        nothing: frozenset[int] = frozenset()
        if self.spec.phase == "backward":
            return Handing(frozenset(range(outputs)) if self._in_place else nothing, nothing)
        saved = frozenset(range(self.spec.saved_from, outputs - self.spec.replaced))
        seen = frozenset(range(self.spec.mutations, self.spec.saved_from))
        # the new values of mutated inputs are read at once by the one who mutates them
        mutations = frozenset(range(self.spec.mutations))
        return Handing(saved | mutations, saved, seen if self._in_place else nothing, mutations)

    def _note(self, capture: RegionCapture, unserved: dict[int, str]) -> None:
        row = self.record
        row.captures += 1
        row.nodes = capture.graph.nodes
        row.copied_bytes = capture.copied_bytes
        row.unserved = [f"input {i} is copied: {why}" for i, why in unserved.items()]
        if self._pair.way is not None:
            row.decision = "measuring"
        elif not row.settled:
            row.decision = "graph, indirect" if capture.serves and capture.pointing else "graph"

    # ------------------------------------------------------------------ decisions

    def decide(self, decision: str, reason: str) -> None:
        """Note what was chosen."""
        self.record.decision, self.record.reason = decision, reason
        self.record.costs = self.measurements.to_dict()

    def give_up(self, reason: str) -> None:
        """Run without a graph from now on, and a backward with its forward."""
        self.plain_only = True
        self.decide("plain", reason)
        self.capture_again()
        backward = self._pair.backward
        fed = backward is not None and not backward.alone and not backward.plain_only
        if self.spec.phase == "forward" and backward is not None and fed:
            backward.give_up("its forward runs without a graph")
        logger.info("pygraph: %s runs without a CUDA graph: %s", self.spec.name, reason)

    @property
    def device(self) -> torch.device:
        """Where it works."""
        return self._arena.engine.device

    @property
    def capturing(self) -> bool:
        """Whether somebody else captures what runs now."""
        return self._arena.engine.capturing()

    def lasting_memory(self) -> AbstractContextManager[None]:
        """Context for allocating tensors that stay."""
        return self._arena.engine.lasting_memory()

    @property
    def fed(self) -> bool:
        """Whether the last run of its forward came from a graph."""
        forward = self._pair.forward
        return forward is not None and forward.last is not None

    @property
    def serves(self) -> bool:
        """Whether a graph of this region can read moving inputs where they are."""
        return any(capture.serves for capture in self._captures())

    @property
    def seconds_to_capture(self) -> list[float]:
        """What capturing took, for each of its open graphs."""
        return [capture.seconds for capture in self._captures()]

    @property
    def feeds(self) -> bool:
        """Whether a graph of another pair reads, where it lies, what one of this region's hands out."""
        mine = {o for capture in self._captures() for o in capture.occupants}
        others = self._arena.owners() - {self._pair.forward, self._pair.backward}
        regions = [other for other in others if isinstance(other, Region)]
        return any(at() in mine for r in regions for c in r._captures() for at in c.producers.values())

    def _captures(self) -> list[RegionCapture]:
        return [capture for key in self._keys.values() for capture in key.captures]

    def point(self, pointing: bool, for_good: bool) -> None:
        """See `RegionCapture.point`, for all graphs."""
        for capture in self._captures():
            capture.point(pointing, for_good)
            self.record.copied_bytes = capture.copied_bytes

    def capture_again(self) -> None:
        """Close every graph; the next runs capture anew."""
        for key in self._keys.values():
            self._drop(key)

    def capture_shapes_again(self, capture: RegionCapture) -> None:
        """Close the graphs of the shapes that this one is for. Those of others may be what graphs of theirs read."""
        for key in self._keys.values():
            if capture in key.captures:
                self._drop(key)

    def measure_again(self) -> None:
        """Close every graph; what they gain is measured on shapes that come now."""
        self.capture_again()
        self.measurements.forget()
        for key in self._keys.values():
            key.paid = False

    def _failed(self, reason: str, error: BaseException) -> None:
        if self._options.on_failure == "raise":
            raise theirs(error) if isinstance(error, Exception) else error
        self.give_up(f"{reason} ({self.spec.where})" if self.spec.where else reason)


def _held(inputs: list[Any], freed: frozenset[Block]) -> list[torch.Tensor]:
    """Inputs that nobody lets go of during a capture."""
    return [x for x in inputs if isinstance(x, torch.Tensor) and block_of(x) not in freed]
