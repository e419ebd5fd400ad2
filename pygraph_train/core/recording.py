"""One recorded forward of a region with its saved activations, and its backward."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor

from pygraph_train.boundary import FORWARD, REPLAY, executes, surely
from pygraph_train.core.memory import Memory, free_memory
from pygraph_train.graphs.engine import Graph
from pygraph_train.graphs.memory import overlaps_itself, span
from pygraph_train.identity import picker
from pygraph_train.parallel.votes import Apart
from pygraph_train.random_state import OF_DEVICES, HostRandomState
from pygraph_train.torch_private.memory import (
    addresses_of,
    as_part_of,
    borrower,
    copy_all,
    local_tensor,
    local_tensors,
    received,
    storage_key,
)
from pygraph_train.torch_private.phases import negate_all, zero_all
from pygraph_train.verification import Audits

if TYPE_CHECKING:
    from pygraph_train.core.node import Way
    from pygraph_train.core.region import PhaseRegion

Slot: TypeAlias = "RecordedRegion | UnrecordedCall"
"""What `node.replay` takes."""

_DRAWN = ("torch", OF_DEVICES)

gradient_of: Callable[[Tensor], Tensor | None] = operator.attrgetter("grad")
needs_gradient: Callable[[Tensor], bool] = operator.attrgetter("requires_grad")
NONE = {None}

Picker = Callable[[Sequence[Any]], tuple[Any, ...]]
Routes = tuple[list[int], list[int], Picker, Picker]


class _Activations:
    """What a forward saves for its backward. Each replay writes it anew, which no version has to tell.

    Attributes:
        given_up: whether a backward lets go of each tensor as it reads it, so that its own results may lie there, as
            they may in plain training.
        lie: where they are, see `memory_of`.
    """

    def __init__(self, kept: Collection[int] = ()) -> None:
        self.given_up, self._kept = False, kept
        self.lie: set[int] = set()
        self._held: list[Tensor | Callable[[], Tensor]] = []

    def pack(self, saved: Tensor) -> int:
        """Keep a tensor, and return its number."""
        self._held.append(received(saved).data)
        with suppress(RuntimeError):  # those of torch.func have no memory
            self.lie.add(memory_of(saved))
        return len(self._held) - 1

    def unpack(self, number: int) -> Tensor:
        """The tensor of this number."""
        held = self._held[number]
        if isinstance(held, Tensor):
            part = local_tensor(held)
            owns = not self._kept or storage_key(part.untyped_storage()) not in self._kept
            if owns and self.given_up and type(part) is Tensor and not (part.is_conj() or part.is_neg()):
                lend = borrower(part)
                lent = None if part is held else as_part_of(held, lend())
                self._held[number] = lend if lent is None else lambda: lent
            return held
        if self.given_up:
            raise _ReadTwiceError
        return held()


class _ReadTwiceError(Exception):
    """A backward reads an activation that it has let go of."""


class Unrecordable(Exception):
    """A region cannot be recorded. The message is the reason."""


class _Backward(NamedTuple):
    """A recorded backward of some outputs.

    Attributes:
        seeds: the gradient of each of these outputs, which `graph` reads.
        gradients: of `leads`, None where there is none. Each replay overwrites them, or adds to them.
        placed: those at places that all recordings share.
        homes: the same memory. A loop that sets `p.grad.data` gives a gradient other memory.
        addresses: of `homes`.
        lying: tells where the gradients are.
        fits: the list `addresses` of the captured update that takes these gradients, and their layout; empty before.
    """

    graph: Graph
    seeds: dict[int, Tensor]
    gradients: list[Tensor | None]
    placed: list[Tensor]
    homes: list[Tensor]
    addresses: list[int]
    lying: Callable[[], list[int]]
    fits: list[Any]

    def go_home(self, *, values: bool = False) -> None:
        """Have gradients lie where they did, with their present values or those that lie there."""
        present = local_tensors([g for g in self.gradients if g is not None])
        for gradient, home in zip(present, self.homes, strict=True):
            if values and gradient.data_ptr() != home.data_ptr():
                home.copy_(gradient)
            gradient.data = home


class RegionCall:
    """A forward of a region whose backward may come, on inputs of its own: `node.replay` calls it.

    Args:
        region: whose graph it is.
        given: the inputs.
        memory: in which none is pending.

    Attributes:
        leads: positions of inputs that get gradients.
        differ: positions of outputs that require gradients.
        inner: those of `differ` from which another one is computed.
        saved: positions of parameters that the forward saves for its backward.
        region: whose graph it is.
        generation: grows with each forward.
        ways: by the inputs whose gradients are delivered, what autograd gets in the place of them.
        recorded: whether forward and backward come from graphs.
        stay: positions in `leads` of parameters whose gradients autograd gets as they lie.
        adds: whether a backward adds gradients of parameters to what lies at their places.
        order: positions in `leads` as autograd has put their gradients in place.
        gives_up: whether the recorded backward lets go of what the forward has saved, and overwrites it.
    """

    recorded = True
    adds = gives_up = False
    order: Sequence[int] = ()
    _asked, _agreed = 0, True  # the generation whose backward was voted on last, and how
    stay: frozenset[int] = frozenset()
    saved: Collection[int] = ()
    differ: list[int]
    inner: list[int]

    def __init__(self, region: PhaseRegion, given: Sequence[Any], memory: Memory) -> None:
        self.region, self.generation = region, 0
        self._autocast = autocast_now(region.device)
        self._engine, self._memory = region.owner.engine, memory
        tensors = [i for i, t in enumerate(given) if isinstance(t, Tensor)]
        self._moving = [i for i in tensors if i not in region.fixed]
        self.leads = [] if region.inference else [i for i in tensors if given[i].requires_grad]
        self._keys = _keys_of(region, given, self.leads)
        self._static: list[Any] = []
        self._outputs: Sequence[Any] = []
        self._routes: dict[frozenset[int], Routes] = {}
        self.ways: dict[frozenset[int], Way] = {}

    def routes(self, of: frozenset[int]) -> Routes:
        """Which of `leads` are delivered, and returned to autograd; what picks inputs of the former, and of these the
        saved ones. Hot path.
        """
        known = self._routes.get(of)
        if known is None:
            delivered = [k for k, i in enumerate(self.leads) if i in of]
            returned = [k for k, i in enumerate(self.leads) if i not in of]
            positions = [self.leads[k] for k in delivered]
            saved = picker([i for i in positions if i in self.saved])
            known = self._routes[of] = delivered, returned, picker(positions), saved
        return known

    def agreed(self, backward: Any) -> Any:
        """The same backward where all processes replay it; None where one of them does not. Hot path."""
        if self._asked != self.generation:
            self._asked, self._agreed = self.generation, False
            with suppress(Apart):
                self._agreed = self.region.agree(backward is not None)
        return backward if self._agreed else None

    def fresh(self, backward: Any, parameters: Sequence[Tensor]) -> list[Tensor]:
        """The places of gradients at which those of these parameters do not lie, for a backward that adds. Hot path."""
        lie = set(map(id, map(gradient_of, parameters)))
        return [place for place in backward.placed if id(place) not in lie]

    def _another_backward(self, seeds: dict[int, Tensor]) -> list[Tensor | None]:
        """A backward of other outputs than the recorded ones, by autograd on what the forward has saved."""
        outputs = [self._outputs[i] for i in seeds]
        leads = [self._static[i] for i in self.leads]
        if (sharding := self.region.owner.sharding) is not None:
            sharding.unwatch()
            with self.region.owner.placing([None] * len(leads), leads) as found:
                self.region.differentiate(outputs, [*seeds.values()], leads)
            return found
        return list(
            torch.autograd.grad(outputs, leads, list(seeds.values()), retain_graph=True, allow_unused=True)
        )

    def differentiable(
        self, parameters: Sequence[Tensor], seeds: dict[int, Tensor]
    ) -> Sequence[Tensor | None] | None:
        """Gradients of `leads` that can be differentiated: the forward is made once more, from now on without a graph.

        Args:
            parameters: those that lead to gradients.
            seeds: see `replay_backward`.
        Returns:
            None where another forward would not be the same one: it writes something, or draws random numbers.
        """
        if self.region.written:
            return None
        given = [t.clone() if i in self._moving else t for i, t in enumerate(self._static)]
        for i, p in zip(self.leads, parameters, strict=True):
            given[i] = p
        before = HostRandomState(_DRAWN)
        with torch.autocast(self.region.device, self._autocast, enabled=self._autocast is not None):
            outputs = self.region.run(*given)
        if before.moved(HostRandomState(_DRAWN)):
            before.restore()
            return None
        self.region.differentiated_twice()
        asked = [outputs[i] for i in seeds]
        return torch.autograd.grad(
            asked, parameters, list(seeds.values()), create_graph=True, allow_unused=True
        )


class UnrecordedCall(RegionCall):
    """One forward without a graph, and its backward, in the memory of those that have graphs.

    Elsewhere rare shapes would need as much memory again, and their gradients would lie beside those of graphs.

    Attributes:
        gradients: where those of `leads` will lie, None where nobody has a place for them.
        placed: those that have one.
    """

    recorded = False

    def __init__(self, region: PhaseRegion, given: Sequence[Any], memory: Memory) -> None:
        super().__init__(region, given, memory)
        self.gradients = [region.owner.gradients.get(key or 0) for key in self._keys]
        self.placed = [place for place in self.gradients if place is not None]
        self.adds = region.adds

    def replay_forward(self, given: Sequence[Any], token: Any) -> list[Any]:
        """See `RecordedRegion.replay_forward`. Results are copies, as they are of a replay."""
        self._static = [_as_leaf(value, i in self.region.fixed) for i, value in enumerate(given)]
        known = {id(static): value for static, value in zip(self._static, given, strict=True)}
        places = {memory_of(self._static[i]) for i, value in enumerate(given) if isinstance(value, Tensor)}
        self._memory.hold(token)
        executes(FORWARD)
        with self._memory.used(self._engine), torch.enable_grad():
            self._outputs = self.region.run(*self._static)
        self.differ = [i for i, o in enumerate(self._outputs) if isinstance(o, Tensor) and o.requires_grad]
        self.inner = self.region.inner_of(self.differ)
        made: list[Any] = []
        for output in self._outputs:
            if not isinstance(output, Tensor) or id(output) in known:
                made.append(known.get(id(output), output))
            else:
                made.append(output.detach() if memory_of(output) in places else _clone(output))
        return made

    def backward_of(self, seeds: dict[int, Tensor], *, keeps: bool = False) -> UnrecordedCall | None:
        """See `RecordedRegion.backward_of`."""
        region = self.region
        usual = frozenset(seeds) in region.asked and autocast_now(region.device) == region.autocast
        return self if usual and not keeps else None

    def replay_backward(
        self, backward: object, seeds: dict[int, Tensor], fresh: Sequence[Tensor] = ()
    ) -> list[Tensor | None]:
        """See `RecordedRegion.replay_backward`."""
        if backward is None:
            return self._another_backward(seeds)
        owner, leads = self.region.owner, [self._static[i] for i in self.leads]
        outputs = [self._outputs[i] for i in seeds]
        if fresh:
            _empty(fresh)
        with (
            self._memory.used(self._engine),
            self.region.as_in_backwards(),
            owner.placing(self._keys, leads, adds=self.adds) as found,
        ):
            torch.autograd.backward(outputs, list(seeds.values()), inputs=leads)
        self._outputs, self._static = [], []  # with what they need of the memory
        for k, (key, place) in enumerate(zip(self._keys, self.gradients, strict=True)):
            lies = found[k] if owner.delivers and key is not None else None
            if lies is not None and lies is not place:
                found[k] = lies.clone()
        return found


class RecordedRegion(RegionCall):
    """A forward and a backward at fixed addresses.

    The forward is recorded with autograd on, and the backward is the one of that autograd graph: the kernels and their
    order are those of plain training.

    Args:
        region: whose graph it is.
        given: the inputs of the call in which it is recorded.
        overlaps: whether gradients stay where the recorded backward computes them, see `PhaseRegions.overlaps`.

    Attributes:
        number: how many recordings of the region came before.
        audits: when it is compared once more; set by who has recorded it.
        overwrites: positions of parameters whose gradients lie where its forward computes.
    """

    audits: Audits

    def __init__(self, region: PhaseRegion, given: Sequence[Any], *, overlaps: bool = False) -> None:
        self.number = region.recordings
        super().__init__(region, given, free_memory(region.owner.engine))
        with self._memory.used(self._engine):
            self._static = [self._static_of(t, i) for i, t in enumerate(given)]
        self._overlap = [i for i in self._moving if overlaps_itself(local_tensor(self._static[i]))]
        self._targets = self._filled()
        self._written_back = [i for i in self._moving if i in region.written]
        self.gives_up = len(region.asked) == 1 and not region.keeps
        self.adds = region.adds and self.gives_up
        self._hands_on = overlaps and not region.owner.delivers
        self._reduces = () if (sharding := region.owner.sharding) is None else sharding.reduces
        self._places = region.owner.kept_at(region.keeps_like)
        self._kept: list[Tensor | None] = []  # what a backward keeps for a later one
        self._backed = 0  # the generation whose backward was replayed last
        self._graphs: list[Graph] = []
        self._alike: list[Tensor] = []  # results, where all are tensors with memory of their own
        self._backwards: dict[frozenset[int], _Backward] = {}
        try:
            self._record(given)
            region.agree(True)
            self._share_inputs()
        except BaseException:
            self.close()
            raise
        keyed = zip(self.leads, self._keys, strict=True) if overlaps else ()
        self.overwrites = [i for i, key in keyed if key is not None]
        self._overwritten = picker(self.overwrites)

    def _share_inputs(self) -> None:
        """Let other recordings use the memory of inputs: each call writes them before it reads them."""
        if self._engine.name == "cuda":
            for i in self._moving:
                if not self._static[i].requires_grad:
                    _let_go(local_tensor(self._static[i]))
            self._targets = self._filled()

    def _filled(self) -> list[Tensor]:
        """What `_load` writes.

        It has no version: autograd must not take a new batch for a change of what it has saved.
        """
        return [self._whole(i, local_tensor(self._static[i]).data) for i in self._moving]

    def _static_of(self, value: Any, position: int) -> Any:
        if not isinstance(value, Tensor) or self.region.itself(value):
            return value
        if position in self.region.fixed:
            static = value.detach()
        else:
            part = local_tensor(value.detach())
            place = torch.empty_like(span(part))
            lies = place.as_strided(part.shape, part.stride(), 0)
            if not value.requires_grad:  # autocast keeps casts of leaves that are no views
                lies = lies.data
            static = as_part_of(value.detach(), lies)
        return static.requires_grad_(value.requires_grad)

    def _record(self, given: Sequence[Any]) -> None:
        """Record forward and backward.

        Gradients of parameters are copied to memory of their own: they outlive the next forward where a loop adds them
        up, and other recordings put their gradients in the same places.
        """
        self._load(given)
        sharding = self.region.owner.sharding
        kept = [] if sharding is None else sharding.kept
        try:
            self._record_both(kept)
        except _ReadTwiceError:
            self.gives_up = self.adds = False
            self._close_graphs()
            self._record_both(kept)
        if self._misplaced():
            self._close_graphs()
            self._record_both(kept)
            if self._misplaced():
                raise Unrecordable("its replay computes something else: gradients have other strides")

    def _misplaced(self) -> bool:
        move = self.region.owner.move_places
        return sum(move(self._keys, backward.gradients) for backward in self._backwards.values()) > 0

    def _record_both(self, kept: Sequence[Tensor | None]) -> None:
        asked = self.region.asked if self.region.owner.config.backward != "off" else ()
        if self._places and (sharding := self.region.owner.sharding) is not None:
            sharding.kept = kept
            sharding.keep_at(self._places)
        with self._memory.recording(self._engine):
            self._record_forward()
            for outputs in asked:
                if outputs.issubset(self.differ):
                    self._backwards[outputs] = self._record_backward(outputs)

    def _record_forward(self) -> None:
        engine = self._engine
        graph, outputs = engine.capture(self._run_forward)
        self._graphs.append(graph)
        self._forward, self._outputs = graph, outputs
        if engine.name == "emulated":  # its capture of the backward computes with what the forward has saved
            self.region.agree(True)
            graph.replay()
        self.differ = [i for i, o in enumerate(outputs) if isinstance(o, Tensor) and o.requires_grad]
        self.inner = self.region.inner_of(self.differ)
        self.saved = {i for i in self.leads if memory_of(self._static[i]) in self._activations.lie}
        self._hand_out = [self._how(o) for o in outputs]
        for output, how in zip(map(local_tensor, outputs), self._hand_out, strict=True):
            if how is None:
                _let_go(output)
        alike = {None}.issuperset(self._hand_out) and {Tensor}.issuperset(map(type, outputs))
        self._alike = [output.detach() for output in outputs] if alike else []

    def _record_backward(self, asked: frozenset[int]) -> _Backward:
        seeds = {
            i: _sample_seed(self.region, i, self._outputs[i].detach()) for i in self.differ if i in asked
        }
        graph, gradients = self._engine.capture(functools.partial(self._run_backward, seeds))
        self._graphs.append(graph)
        unreached = [g is None and key is None for g, key in zip(gradients, self._keys, strict=True)]
        if self.region.owner.divided and any(unreached):
            raise Unrecordable("one of its inputs gets no gradient")
        of_parameters = {k: g for k, g in enumerate(gradients) if g is not None and self._keys[k] is not None}
        if self._hands_on:
            others = (t for t in (*self._static, *self._outputs, *seeds.values()) if isinstance(t, Tensor))
            places = list(map(memory_of, (*of_parameters.values(), *others)))
            self.stay = frozenset(k for k, g in of_parameters.items() if places.count(memory_of(g)) == 1)
            self.region.owner.gradients |= {cast(int, self._keys[k]): of_parameters[k] for k in self.stay}
        kept = self.stay if self._hands_on else of_parameters if self.region.owner.delivers else ()
        for k, gradient in enumerate(gradients):
            if gradient is not None and k not in kept:
                _let_go(local_tensor(gradient))
        lying = addresses_of([g for g in gradients if g is not None])
        homes = [local_tensor(g).detach() for g in gradients if g is not None]
        return _Backward(graph, seeds, gradients, [*of_parameters.values()], homes, lying(), lying, [])

    def _how(self, output: Any) -> int | None:
        """The position of the input that an output is, None for one with memory of its own."""
        if not isinstance(output, Tensor):
            return None
        output, whole = local_tensor(output), output
        where = output.untyped_storage().data_ptr()
        for i, static in enumerate(map(local_tensor, self._static)):
            if whole is self._static[i]:
                return i
            if isinstance(static, Tensor) and static.untyped_storage().data_ptr() == where and where:
                same = (static.shape, static.stride()) == (output.shape, output.stride())
                if not same or static.data_ptr() != output.data_ptr() or whole.requires_grad:
                    raise Unrecordable("it returns a view of one of its inputs")
                return i
        return None

    def _run_forward(self) -> Sequence[Any]:
        sharding = self.region.owner.sharding
        self._activations = saved = _Activations(() if sharding is None else sharding.storages())
        hooks = torch.autograd.graph.saved_tensors_hooks(saved.pack, saved.unpack)
        graded = torch.set_grad_enabled(not self.region.inference)
        with graded, hooks, self.region.communicating():
            made: Sequence[Any] = self.region.run(*self._static)
        return made

    def _run_backward(self, seeds: dict[int, Tensor]) -> list[Tensor | None]:
        leads = [self._static[i] for i in self.leads]
        outputs = [self._outputs[i] for i in seeds]
        self._activations.given_up, self.order = self.gives_up, (order := [])
        told = [
            t.register_post_accumulate_grad_hook(lambda _, k=k: order.append(k)) for k, t in enumerate(leads)
        ]
        try:
            placing = self.region.owner.placing(self._keys, leads, adds=self.adds)
            with self.region.as_in_backwards(), placing as found, self.region.communicating():
                self.region.differentiate(outputs, [*seeds.values()], leads)
                if self._places and (sharding := self.region.owner.sharding) is not None:
                    self._kept = sharding.keep_at(self._places)
            return [received(g) for g in found]
        finally:
            self._activations.given_up = False
            for hook in told:
                hook.remove()

    def _load(self, given: Sequence[Any]) -> None:
        if not self._moving:
            return
        parts = list(map(given.__getitem__, self._moving))
        parts = list(map(Tensor.detach, local_tensors(parts) if self.region.owner.divided else parts))
        if self._overlap:
            parts = list(map(self._whole, self._moving, parts))
        copy_all(self._targets, parts)

    def _whole(self, position: int, tensor: Tensor) -> Tensor:
        return span(tensor) if position in self._overlap else tensor

    # -- replays --------------------------------------------------------------------------------------

    def replay_forward(self, given: Sequence[Any], token: Any) -> list[Any]:
        """Run the forward. Hot path.

        Args:
            given: as recorded, moving inputs with other values.
            token: lives as long as a backward may come.
        """
        self.generation += 1
        self._memory.hold(token)
        if self.overwrites and not NONE.issuperset(map(gradient_of, parameters := self._overwritten(given))):
            self.region.owner.make_way(parameters)
        self._load(given)
        executes(REPLAY)
        self._forward.replay()
        for i in self._written_back:
            local_tensor(given[i]).detach().copy_(local_tensor(self._static[i]).detach())
        return surely(functools.partial(self._handed_out, given), FORWARD)

    def _handed_out(self, given: Sequence[Any]) -> list[Any]:
        """The results of a replay. Hot path."""
        if self._alike:
            return list(map(Tensor.clone, self._alike))
        return [
            (_clone(o) if isinstance(o, Tensor) else o) if how is None else given[how]
            for o, how in zip(self._outputs, self._hand_out, strict=True)
        ]

    def backward_of(self, seeds: dict[int, Tensor], *, keeps: bool = False) -> _Backward | None:
        """The recorded backward of these outputs as it is called now, None where there is none. Hot path.

        Args:
            seeds: see `replay_backward`.
            keeps: whether another backward may come, which reads the same activations.
        """
        if keeps and self.gives_up:
            self.region.keep_activations()
            return None
        for i, gradient in seeds.items() if self.region.owner.divided else ():
            if getattr(gradient, "placements", None) != self.region.placements.get(i):
                return None
        if autocast_now(self.region.device) != self.region.autocast:
            return None
        sharding = self.region.owner.sharding
        if sharding is not None and not (sharding.idle and sharding.reduces == self._reduces):
            return None
        return self._backwards.get(frozenset(seeds))

    def replay_backward(
        self, backward: _Backward | None, seeds: dict[int, Tensor], fresh: Sequence[Tensor] = ()
    ) -> list[Tensor | None]:
        """Run a backward. Hot path.

        Args:
            backward: see `backward_of`.
            seeds: the gradient of each output that has one.
            fresh: what is emptied before, where it adds.
        Returns:
            The gradients of `leads`, which the next replay overwrites.
        """
        if backward is None:
            return self._another_backward(seeds)
        if self._backed != self.generation or not self.gives_up:  # a failed backward may have done it
            pairs = list(backward.seeds.values()), list(map(seeds.__getitem__, backward.seeds))
            copy_all(*(map(local_tensors, pairs) if self.region.owner.divided else pairs))
            if self.adds and backward.lying() != backward.addresses:
                backward.go_home(values=True)
            if fresh:
                _empty(fresh)
            if (sharding := self.region.owner.sharding) is not None:
                sharding.unwatch()
            if sharding is None or not self._places:
                backward.graph.replay()
            else:
                sharding.keep_at(self._places)
                backward.graph.replay()
                sharding.kept = self._kept
            self._backed = self.generation
        if backward.lying() != backward.addresses:
            backward.go_home()
        return backward.gradients

    @property
    def free(self) -> bool:
        """Whether no backward can come any more of what was recorded in the same memory."""
        return self._memory.free

    def close(self) -> None:
        """Release its graphs."""
        self._close_graphs()
        self._static = []
        self.ways.clear()

    def _close_graphs(self) -> None:
        for graph in self._graphs:
            graph.close()
        self._graphs.clear()
        self._backwards.clear()
        self._outputs = self._alike = []

    # -- comparison -----------------------------------------------------------------------------------

    @property
    def backwards(self) -> list[frozenset[int]]:
        """The outputs of each recorded backward."""
        return list(self._backwards)

    def replayed(self, given: Sequence[Any], asked: frozenset[int]) -> tuple[list[Any], list[Tensor | None]]:
        """As `run_plainly`, from the graphs. What the region has written of the caller's stays as it was."""
        self.generation += 1
        self._load(given)
        self._forward.replay()
        outputs = [_clone(o) if isinstance(o, Tensor) else o for o in self._outputs]
        written = [self._static[i].detach().clone() for i in self._written_back]
        gradients: list[Tensor | None] = []
        if asked:
            with self.region.as_in_backwards():
                seeds = {i: _sample_seed(self.region, i, outputs[i]) for i in sorted(asked)}
                backward = self.backward_of(seeds)
                fresh = backward.placed if self.adds and backward is not None else ()
                gradients = self.replay_backward(backward, seeds, fresh)
                if (sharding := self.region.owner.sharding) is not None:
                    gradients = [*gradients, *sharding.kept]
        return [*outputs, *written], gradients


def _as_leaf(value: Any, fixed: bool, *, copied: bool = False) -> Any:
    """What stands for an input, and leads to its gradient alone."""
    if not isinstance(value, Tensor):
        return value
    leaf = value.detach().clone() if copied else value.detach()
    if not fixed:
        leaf = leaf.view_as(leaf)  # autocast keeps casts of leaves that are no views, as parameters are
    return leaf.requires_grad_(value.requires_grad)


def memory_of(tensor: Tensor) -> int:
    """What is the same for tensors that share memory."""
    tensor = local_tensor(tensor)
    if tensor.layout is not torch.strided or type(tensor) not in (Tensor, torch.nn.Parameter):
        return id(tensor)  # wrapper classes have no memory of their own
    return tensor.untyped_storage().data_ptr()


def run_plainly(
    region: PhaseRegion, given: Sequence[Any], asked: frozenset[int], memory: Memory
) -> tuple[list[Any], list[Tensor | None]] | None:
    """What a region and a backward of some of its outputs give without a graph: outputs and gradients.

    Args:
        given: what is written of them stays as it is, but for fixed ones.
        asked: the outputs. Where one of them has no gradient, the result is None.
        memory: where it computes. Forward and backward have workspaces of cuBLAS one after the other, as recordings do.
    """
    moving = {i for i in region.written if i not in region.fixed}
    engine = region.owner.engine
    with memory.used(engine):
        inputs = [
            t if region.itself(t) else _as_leaf(t, i in region.fixed, copied=i in moving)
            for i, t in enumerate(given)
        ]
        with torch.set_grad_enabled(not region.inference):
            outputs = region.run(*inputs)
    leads = {
        i: t
        for i, t in enumerate(inputs)
        if isinstance(t, Tensor) and t.requires_grad and not region.inference
    }
    gradients: list[Tensor | None] = []
    if asked:
        if not all(isinstance(outputs[i], Tensor) and outputs[i].requires_grad for i in asked):
            return None
        keys = _keys_of(region, given, leads)
        places = [region.owner.gradients.get(key or 0) for key in keys if region.adds]
        if lie := [place for place in places if place is not None]:
            _empty(lie)
        placing = region.owner.placing(keys, list(leads.values()), adds=region.adds)
        with memory.used(engine), region.as_in_backwards(), placing as gradients:
            seeds = [_sample_seed(region, i, outputs[i].detach()) for i in sorted(asked)]
            outs = [outputs[i] for i in sorted(asked)]
            region.differentiate(outs, seeds, list(leads.values()), keeps=False)
    written = [inputs[i].detach() for i in sorted(moving)]
    return [*(o.detach() if isinstance(o, Tensor) else o for o in outputs), *written], gradients


def _keys_of(region: PhaseRegion, given: Sequence[Any], leads: Iterable[int]) -> list[int | None]:
    """The ids of parameters, by which their gradients are placed: of one that is given twice, only the first one."""
    keys: list[int | None] = []
    for i in leads:
        key = id(given[i]) if i in region.fixed else None
        keys.append(None if key in keys else key)
    return keys


def autocast_now(device: str) -> torch.dtype | None:
    """What operations of this kind of device compute in under the present autocast, None without one."""
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def _let_go(tensor: Any) -> None:
    """After a capture: let other recordings, and what follows in this one, use its memory.

    That is right where the values of each replay are copied at once.
    """
    if type(tensor) is Tensor and tensor.numel() and not (tensor.is_conj() or tensor.is_neg()):
        tensor.data = borrower(tensor)()


def _empty(places: Sequence[Tensor]) -> None:
    """Fill with -0.0: what is added to it keeps all its bits."""
    zero_all(parts := local_tensors(places))
    negate_all(parts)


def _clone(tensor: Tensor) -> Tensor:
    part = local_tensor(tensor)
    copy = part.detach().clone()
    return copy if part is tensor else as_part_of(tensor, copy)


def _sample_seed(region: PhaseRegion, position: int, output: Tensor) -> Tensor:
    """The gradient of an output for a comparison: small numbers that differ, in memory as plain training has it."""
    part = local_tensor(output)
    order = region.orders.get(position, range(part.dim())) if part is output else range(part.dim())
    numbers = (torch.arange(part.numel(), device=part.device) % 5 + 1).to(part.dtype)
    lies = numbers.view([part.shape[d] for d in order]).permute([order.index(d) for d in range(part.dim())])
    return as_part_of(output, lies, region.placements.get(position))
