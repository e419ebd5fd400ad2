"""Which modules of a step become islands: those in which a trace has ended because values decide there.

What such a module returns is seen in a step that runs as it is written. See `torch_private.islands`.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from pygraph_train.problems import NotLegal, Problem
from pygraph_train.random_state import HostRandomState
from pygraph_train.torch_private.autograd import edges_in_order
from pygraph_train.torch_private.dynamo import compiled_call, set_compiled_call, uncompiled_call
from pygraph_train.torch_private.hooks import (
    gradient_hooks,
    hook_registrations,
    module_hook_tables,
    saved_tensors_hooks_active,
)
from pygraph_train.torch_private.island_calls import CallsOfModules, Kind, kind_of_call
from pygraph_train.torch_private.island_gaps import island_of_node
from pygraph_train.torch_private.islands import Island, Look, flat_results
from pygraph_train.torch_private.memory import storages, tensor_version
from pygraph_train.torch_private.module_state import ModuleState, ObjectsAround, reachable_from
from pygraph_train.torch_private.side_effects import SideEffect
from pygraph_train.tracing.python_effects import Effects
from pygraph_train.tracing.writes import written_arguments

__all__ = ["Islands", "check_order", "give_second_names"]

_OF_VALUES = (
    "the shape of a tensor depends on the values",
    "the value of a tensor is read on the host",
    "the step packs sequences",
    "RuntimeError when making fake tensor call",
)
"""In reasons of breaks that the module's own Python does not have."""

_MOST_OBJECTS = 5000
_MOST_UNLIKE, _CALLS_PER_UNLIKE = 3, 50


class Islands(CallsOfModules):
    """Of the traces of one kind of call, one after the other.

    Args:
        off: whether there are none.

    Attributes:
        present: those in the graph of the last trace.
        learned: whether a step has shown an island since this was set to False.
    """

    def __init__(self, *, off: bool = False) -> None:
        super().__init__()
        self.off, self.learned = off, False
        self.present: list[Island] = []
        self._made: list[Island] = []
        self._effect: Problem | None = None
        self._registrations = -1
        self._seen: weakref.WeakKeyDictionary[nn.Module, _Seen] = weakref.WeakKeyDictionary()

    # -- for Dynamo ---------------------------------------------------------------------------------

    def changes(self) -> tuple[tuple[Any, str, Any], ...]:
        """See `CallsOfModules`."""
        self._made = []
        return () if self.off else super().changes()

    def wants(self, module: nn.Module) -> bool:
        """See `CallsOfModules`."""
        seen = self._seen.get(module)
        if seen is not None and _hooks_in(module):
            self.unfit = f"Between parts of a graph {type(module).__name__} cannot run: hooks act in it"
            return False
        return seen is not None and seen.unfit is None

    def results_of(self, module: nn.Module, kind: Kind) -> list[Look | None] | None:
        """See `CallsOfModules`."""
        return self._seen[module].results.get(kind)

    def single(self, module: nn.Module) -> bool:
        """See `CallsOfModules`."""
        return self._seen[module].single

    def made(self, one: Island) -> None:
        """See `CallsOfModules`."""
        self._made.append(one)

    def take(self, graph: fx.Graph) -> None:
        """The graph of a trace is made."""
        self.present = [one for one in map(island_of_node, graph.nodes) if one is not None]

    def show(self, run: Callable[[], Any]) -> None:
        """Let a run that does not count show what the gradients of islands are like, where nobody has seen it yet."""
        if all(one.gradients is not None for one in self.present):
            return
        for one in self.present:
            one.shows = True
        try:
            run()
        finally:
            for one in self.present:
                one.shows = False

    def let_go(self) -> None:
        """A replay was given up between a forward and its backward: nobody needs what the forward has kept."""
        for one in self.present:
            one.made = None

    def knows(self, other: Islands) -> None:
        """What calls of another kind have shown of modules."""
        self._seen = other._seen

    # -- after a trace that has ended in a module ---------------------------------------------------

    def may_learn(self, refused: Problem) -> bool:
        """Whether the module in which a trace has ended may be an island, and no step has shown it yet."""
        return any(text in refused.reason for text in _OF_VALUES) and self._may_be(self.broken)

    def may_be_inside(self) -> bool:
        """The same of the module that Dynamo is following, if it ended there."""
        return self._may_be(self.inside)

    def _may_be(self, place: tuple[nn.Module, nn.Module] | None) -> bool:
        if self.off or place is None:
            return False
        module, outer = place
        if module in self._seen or compiled_call(module) is not None:
            return False
        inside = {m for each in _alike(module, outer) for m in each.modules()}
        return 2 * len(inside) <= len(
            list(outer.modules())
        )  # else parts between breaks may have graphs of their own

    def see(
        self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], refused: Problem
    ) -> Any:
        """Run a step's function as it is written, and see what that module, and others of its class, return."""
        if not self.may_learn(refused):
            return fn(*args, **kwargs)
        assert self.broken is not None
        (module, outer), self.broken = self.broken, None
        watched = [m for m in _alike(module, outer) if compiled_call(m) is None and m not in self._seen]
        for each in watched:
            self._seen[each] = seen = _Seen(each)
            set_compiled_call(each, seen.watching(each))
        try:
            return fn(*args, **kwargs)
        finally:
            for each in watched:
                set_compiled_call(each, None)
                if self._seen[each].unfit is None and not self._seen[each].results:
                    del self._seen[each]  # it was not called, or has raised an exception
            self.learned = self.wants(module)
            if module in self._seen and (why := self._seen[module].unfit) is not None:
                self.unfit = f"Between parts of a graph {type(module).__name__} cannot run: {why}"
                self._effect = self._seen[module].effects.problem

    def with_reason(self, refused: Problem) -> Problem:
        """The same problem, and why a module that might do without does not."""
        if self.unfit is None or self.unfit in refused.reason:
            return refused
        reason, effect = f"{refused.reason}. {self.unfit}", self._effect
        if effect is None:
            return replace(refused, reason=reason)
        return Problem(reason, effect.where, effect.fix)

    # -- what speaks against graphs -----------------------------------------------------------------

    def check_writes(
        self, effects: Iterable[SideEffect], frame: dict[str, Any], names: dict[str, Any], rebinds: bool
    ) -> None:
        """Dynamo writes to Python behind its graph: an island would read what was there before.

        Args:
            effects: what it writes.
            frame, names: the locals and globals of the traced frame.
            rebinds: whether its graph gives tensors other memory: a run that an island ends cannot be taken back.

        Raises:
            NotLegal: an island may read what is written. Nothing was executed.
        """
        if not self.present:
            return
        name = self.present[0].name
        if rebinds:
            raise NotLegal(Problem(f"the step gives a tensor other memory, and {name} runs on the host"))
        modules = [one.present() for one in self.present] if effects else []
        held = set().union(*(reachable_from(m, _MOST_OBJECTS) for m in modules))
        for effect in effects:
            try:
                owner = eval(effect.source, {**names, "L": frame, "G": names})
            except Exception:  # an expression that only Dynamo's own code understands
                owner = None
            if owner is None or id(owner) in held:
                raise NotLegal(
                    Problem(f"the step writes to an object that {name}, which runs on the host, may read")
                )

    def hooked(self) -> Problem | None:
        """Whether an island has got hooks since it was traced: a run that does not count would run them as well."""
        if (registrations := hook_registrations()) == self._registrations:
            return None
        for one in self.present:
            if _hooks_in(one.present()):
                return Problem(f"{one.name}, which runs on the host, has got hooks")
        self._registrations = registrations
        return None

    def unlike_too_often(self) -> Problem | None:
        """Whether replays are given up again and again, because islands compute something of another kind."""
        for one in self.present:
            if one.unlike > _MOST_UNLIKE + one.calls // _CALLS_PER_UNLIKE:
                return Problem(
                    f"what {one.name} returns, or which of its parameters get gradients, changes from step to step"
                )
        return None


def _alike(module: nn.Module, outer: nn.Module) -> list[nn.Module]:
    """A module and others of its class."""
    own = not type(module).__module__.startswith("torch.nn.")
    return [m for m in outer.modules() if m is module or (own and type(m) is type(module))]


class _Seen:
    """What calls of one module have shown.

    Attributes:
        results: by kind of call, what the results are like.
        single: whether it returns a tensor, and not a tuple.
        unfit: why it can be no island.
        effects: of its Python.
    """

    def __init__(self, module: nn.Module) -> None:
        self.effects = Effects(module)
        self.results: dict[Kind, list[Look | None]] = {}
        self.single = False
        self.unfit: str | None = None

    def watching(self, module: nn.Module) -> Callable[..., Any]:
        """What stands in for the calls of the module."""
        weak, call = weakref.ref(module), uncompiled_call(module)

        def watched(*args: Any, **kwargs: Any) -> Any:
            present = weak()
            assert present is not None
            known, state = kind_of_call(args, kwargs), ModuleState(present)
            random, objects = HostRandomState(), self.effects.objects(present)
            versions = [tensor_version(x) for x in known[1]] if known is not None else []
            result = call(*args, **kwargs)
            self._take(present, state, objects, known, versions, result)
            drawn = random.moved(HostRandomState())
            if (
                known is not None
                and known[1]
                and drawn - ({"torch"} if known[1][0].device.type == "cpu" else set())
            ):
                self.unfit = self.unfit or "it draws random numbers on the host"
            return result

        return watched

    def _take(
        self,
        module: nn.Module,
        state: ModuleState,
        objects: ObjectsAround,
        known: tuple[Kind, list[Tensor]] | None,
        versions: list[int],
        result: Any,
    ) -> None:
        flat, changed = flat_results(result), state.changed()
        if known is None or not known[1]:
            self.unfit = "it takes other arguments than tensors and plain values"
        elif flat is None:
            self.unfit = "it returns something else than tensors"
        elif changed is not None:
            self.unfit = f"it changes its attribute {changed}"
        elif self.effects.problem is not None:
            self.unfit = self.effects.problem.reason
        elif versions != [tensor_version(x) for x in known[1]]:
            self.unfit = "it changes an argument in place"
        elif _hooks_in(module) or saved_tensors_hooks_active():
            self.unfit = "hooks act in it"
        elif any(gradient_hooks(x) for x in known[1]):
            self.unfit = "gradient hooks act on its arguments"
        elif torch.is_inference_mode_enabled():
            self.unfit = "it runs in inference mode"
        elif any(_draws_in_cudnn(m, known[1][0]) for m in module.modules()):
            self.unfit = "cuDNN draws random numbers in it"
        elif (kind := objects.changed()) is not None:
            self.unfit = (
                f"it changes an object ({kind}), which would happen more often than in plain training"
            )
        else:
            tensors = [x for x in flat if x is not None]
            memory = storages([*known[1], *module.parameters(), *module.buffers()])
            looks = [None if x is None else Look.at(x) for x in flat]
            if not set(memory).isdisjoint(storages(tensors)) or len(set(storages(tensors))) < len(tensors):
                self.unfit = "a result shares memory with an argument, a parameter or another result"
            elif self.results.setdefault(known[0], looks) != looks:
                self.unfit = "the shapes of its results depend on values"
            self.single = isinstance(result, Tensor)


def _hooks_in(module: nn.Module) -> bool:
    return any(any(module_hook_tables(m)) for m in module.modules())


def _draws_in_cudnn(module: nn.Module, x: Tensor) -> bool:
    return isinstance(module, nn.RNNBase) and module.dropout > 0 and x.device.type == "cuda"


def give_second_names(graph: fx.GraphModule) -> None:
    """Let what comes behind an island take the second names of its arguments: see `torch_private.islands`."""
    nodes = list(graph.graph.nodes)
    order: dict[fx.Node, int] = {node: i for i, node in enumerate(nodes)}
    changed = False
    for node in nodes:
        one = island_of_node(node)
        if one is None:
            continue
        given = [x for x, requires in zip(node.args[1:], one.requires, strict=False) if requires]
        for place, x in enumerate(given, len(one.tensors)):
            later = [user for user in x.users if order[user] > order[node] and user.op != "output"]
            if not later or any(x in written_arguments(user) for user in later):
                continue
            with graph.graph.inserting_after(node):
                name = graph.graph.call_function(operator.getitem, (node, place))
            name.meta.update(x.meta)
            order[name] = order[node]
            for user in later:
                user.replace_input_with(x, name)
            changed = True
    if changed:
        graph.recompile()


def check_order(loss: Tensor) -> None:
    """Whether gradients are added in the order of plain training. To be asked before a backward that is captured.

    Gradients of an argument that come from behind the island arrive through its second name. Its parameters are used
    nowhere else: autocast would share a cast of them.

    Raises:
        NotLegal: they are not.
    """
    arrived: dict[tuple[Any, int], Island | None] = {}
    for node, target, place in edges_in_order([loss]):
        one, edge = island_of_node(node), (target, place)
        before = edge in arrived
        shared = before and hasattr(target, "variable") and (one or arrived[edge]) is not None
        if shared or (before and one is not None):
            name = (one or arrived[edge]).name  # type: ignore[union-attr]
            raise NotLegal(
                Problem(
                    f"gradients of a tensor would be added in another order: {name}, which runs on the host, uses it, "
                    "and the step uses it elsewhere as well"
                )
            )
        arrived[edge] = one
