"""A trace of a step that writes to Python: Dynamo's code makes the writes, also in the steps that are replayed.

Dynamo knows what a step writes to Python, and generates code that makes these writes after its graph has run. In a
replayed step this code runs with the results of the replay in the place of its graph. Runs that make no step (a
capture, a comparison) take the writes back.
"""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from pygraph_train.boundary import STEP, executes, put_back
from pygraph_train.problems import NotLegal, Problem
from pygraph_train.random_state import HostRandomState
from pygraph_train.torch_private.deferring import appends_in_frame, deferring
from pygraph_train.torch_private.dynamic_shapes import symbolic
from pygraph_train.torch_private.dynamo import (
    dynamo_cache_entries,
    forgetting_values,
    placeholder_source,
    tracing_notes,
    writes_to_inputs,
)
from pygraph_train.torch_private.side_effects import hooks_in_frame
from pygraph_train.tracing.counters import counters, without_counters
from pygraph_train.tracing.host_draws import Ahead
from pygraph_train.tracing.late_numbers import late_numbers, replaced_later, without_late_numbers
from pygraph_train.tracing.live_numbers import OTHER_DECISION, CallNumbers
from pygraph_train.tracing.number_guards import changed_numbers
from pygraph_train.tracing.obstacles import problem_of_write, side_effects
from pygraph_train.tracing.reading import Read, reader
from pygraph_train.tracing.reasons import compiler_failed, first_use, line_of, readable
from pygraph_train.tracing.seat import LEFT, FailedRuns, Seat, unless_left
from pygraph_train.tracing.signature import Dims
from pygraph_train.tracing.trace import Compiler, Trace
from pygraph_train.tracing.traced_code import appended, held_weakly, known_later, returning_appended, settled
from pygraph_train.tracing.undo import Undo, exchange

__all__ = ["ReproducingTrace"]


class ReproducingTrace(Trace):
    """A `Trace` whose function may write to Python where Dynamo's code can make the writes.

    Lists that the function only appends to are not guarded, and integers that reach nothing but writes are inputs.
    Values of given tensors may decide about its way: they are read ahead, and the graph of `silently` reads none.

    Args: see `Trace`.

    Attributes:
        reproduces: whether there are writes that Dynamo's code has to make in each step.
        carried: expressions of tensors that the step reads and replaces, so that they lie elsewhere in the next step.
        runs: how many steps were made.
        known_to_hold: whether `holds` was asked a moment ago for the call that comes.
    """

    may_read, known_to_hold = True, False

    def __init__(
        self,
        device: torch.device,
        *,
        compiler: Compiler | None = None,
        recorder: str | tuple[str, ...] | None = None,
        dynamic: Dims | None = None,
    ) -> None:
        super().__init__(device, compiler=compiler, recorder=recorder, dynamic=dynamic)
        self.runs = 0
        self._numbers: set[str] = set()  # expressions of integers that are inputs of the graph
        self._decisive: set[str] = set()  # of such that tensors depend on
        self.live = CallNumbers(device)
        self._lists: dict[int, Any] = {}
        self._defers, self._deferred, self._again = True, False, False
        self._frame: dict[str, Any] = {}
        self._seat: Seat | None = None
        self._places: list[int] = []  # of `carried` among the inputs of the graph
        self._argument_places: list[int] = []
        self._first: list[Any] | None = None  # arguments of the first call, which it may have changed
        self._read_carried: Read = lambda L, G: ((),)
        self._resume: Callable[..., Any] | None = None
        self._further = (
            *symbolic(self._numbers.__contains__),
            *deferring(held_weakly(self._is_deferred), appended, settled, known_later),
        )

    def __call__(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See `Trace`. Dynamo traces again where it has seen what it need not look at."""
        self._frame, self._first = {"fn": fn, "args": args, "kwargs": kwargs}, None
        self.fill(fn, args, kwargs)
        random = HostRandomState() if self._compiler is None else None
        try:
            result, items = super().__call__(fn, args, kwargs)
        except Exception:
            if random is None or self._seat is None or not self._seat.took_back():
                raise
            random.restore()
            executes(STEP)
            return fn(*args, **kwargs)
        finally:
            self._frame = {}
        if result is LEFT:
            if random is not None:
                random.restore()
            executes(STEP)
            result = fn(*args, **kwargs)
        for owner, item in items:
            owner.append(item)
        self.runs += 1
        try:
            if self.reproduces and self.problem is None:
                self.problem = self._moved(fn, args, kwargs)
        except Exception as error:  # the step is made
            self.problem = compiler_failed(error)
        return result

    @property
    def captured_as_traced(self) -> bool:
        """Whether captures run what was traced, in the place of the function that also writes, reads or waits."""
        late = self._seat is not None and self._seat.late is not None
        return self.reproduces or self.ahead.leaves_out or self.gaps.left or late

    def silently(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        carried: Sequence[Tensor] = (),
        *,
        keep: bool = False,
        reads: bool = False,
    ) -> Any:
        """Run `fn(*args, **kwargs)` through Dynamo's graph, and take back what it writes to Python.

        Args:
            carried: in the place of the tensors of that name; as many, or none.
            keep: whether `take_outputs` will ask for what the graph has returned.
            reads: whether the host reads numbers at once, as it is the step's result that is returned.
        """
        assert self._seat is not None and self._resume is not None
        seat = self._seat
        self.fill(fn, args, kwargs)
        undo = Undo(self.effects, {"fn": fn, "args": args, "kwargs": kwargs}, self._code.__globals__)
        seat.places, seat.keeps = dict(zip(self._places, carried, strict=False)), keep
        undoes, seat.undoes, seat.marks = seat.undoes, None, not reads
        try:
            result, _ = self._resume(fn, args, kwargs)
        finally:
            seat.places, seat.keeps, seat.undoes, seat.marks = {}, False, undoes, False
            put_back(undo.restore)
        return result

    def exchange(self, frame: dict[str, Any], change: Callable[[Any], Any]) -> bool:
        """Let `change` return what objects hold until the step, which does not read it, replaces it: see `exchange`."""
        return exchange(self.effects, frame, self._code.__globals__, [*self.inputs, *self.carried], change)

    def take_outputs(self) -> list[Any]:
        """What the graph has returned in the last run that kept it: tensors."""
        assert self._seat is not None and self._seat.outputs is not None
        outputs, self._seat.outputs = self._seat.outputs, None
        return list(outputs)

    def write(
        self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Sequence[Any]
    ) -> None:
        """Make the writes of a step whose graph has returned `outputs`; `holds` was true for this call."""
        assert self._seat is not None and self._resume is not None
        self._seat.instead = outputs
        try:
            _, items = self._resume(fn, args, kwargs)
        finally:
            self._seat.instead = None
        for owner, item in items:
            owner.append(item)

    def holds(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """See `Trace`. Hot path."""
        if self.known_to_hold:
            return True
        if not super().holds(fn, args, kwargs):
            return False
        frame = {"fn": fn, "args": args, "kwargs": kwargs}
        return not self.live.used or self.live.look(frame, self._code.__globals__)

    def _why(self, frame: dict[str, Any]) -> Problem | None:
        if self.live.used and super().holds(frame["fn"], frame["args"], frame["kwargs"]):
            return OTHER_DECISION
        return super()._why(frame)

    def fill(self, fn: Callable[..., Any], args: Any, kwargs: Any, ahead: Ahead | None = None) -> None:
        """Before a run of the graph: let tensors have the numbers of the call, and those that it draws (`ahead`).

        Raises:
            NotLegal: the numbers lead to other decisions. Nothing was executed.
        """
        frame = {"fn": fn, "args": args, "kwargs": kwargs}
        if self.live.used and self.traced:
            if not self.live.look(frame, self._code.__globals__):
                raise NotLegal(OTHER_DECISION)
            self.live.fill()
        self.host.fill(frame, self._code.__globals__)
        if self.ahead.is_due and self.traced:
            self.ahead.fill(ahead or self.ahead.look(frame))

    def _is_filled(self) -> bool:
        return self.live.used or self.host.used or self.ahead.takes

    def carried_tensors(self, fn: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Tensor, ...]:
        """The tensors behind `carried`, read now."""
        return tuple(
            self._read_carried({"fn": fn, "args": args, "kwargs": kwargs}, self._code.__globals__)[0]
        )

    def argument_tensors(
        self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[tuple[str, Tensor]]:
        """See `Trace`. Of the call that was traced, once: the step may have taken them out of its arguments."""
        if (first := self._first) is None:
            return super().argument_tensors(fn, args, kwargs)
        self._first = None
        return list(zip((readable(name, fn) for name in self._arguments), first, strict=True))

    def take_as_inputs(self, numbers: Iterable[str], live: Iterable[str]) -> None:
        """Before the first call: let integers be inputs of the graph, by their expressions. No tensor may depend on
        them, so guards stand for what they decide. On the numbers `live` tensors may depend."""
        self._numbers.update(numbers)
        self._take_as_live(set(live))

    def numbers(
        self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[set[str], set[str]]:
        """Expressions of integers that change, as far as this call shows, and of numbers that tensors depend on."""
        frame = {"fn": fn, "args": args, "kwargs": kwargs}
        failures = [*self.failures(frame), *self._still.changed_settings(frame)]
        whole, others = changed_numbers(failures)
        return self._numbers | whole, self._decisive | others

    # -- inside Dynamo ------------------------------------------------------------------------------

    def _is_deferred(self, value: Any) -> bool:
        found = self._defers and (id(value) in self._lists or type(value) is deque)
        self._deferred |= found
        return found

    def _changes(self) -> tuple[tuple[Any, str, Any], ...]:
        return (*super()._changes(), *(() if self.traced else self.live.changes()))

    def _go_through_dynamo(self, code: types.FunctionType) -> None:
        super()._go_through_dynamo(code)
        self._call = unless_left(self._call)

    def _function_to_trace(self) -> types.FunctionType:
        return returning_appended()

    def _is_worth_another_look(self, refused: Problem) -> bool:
        """See `Trace`. Something may have been learned from the trace that was given up."""
        if self._again:
            self._again = False
            return True
        if self.traced:
            return False
        if self.ahead.learned():
            return True
        if self._deferred and not self.live.met_counter:  # more was done to a list than to append to it
            self._defers = self._deferred = False
            return True
        if self.live.drop_refused():
            return True
        if self._numbers:  # Dynamo does not compute with them what the step does
            self._take_as_live(set(self._numbers))
            return True
        return super()._is_worth_another_look(refused)

    def _take_as_live(self, numbers: set[str]) -> None:
        """Let numbers be those of `live` in the next trace."""
        self._decisive |= numbers
        self.live.take(numbers)
        self._numbers -= numbers

    def _look_again(self, graph: torch.fx.GraphModule) -> None:
        self._again = True
        self._notes += tracing_notes(graph)
        with forgetting_values([graph]):
            raise NotLegal(Problem("the step is traced again"))

    def _backend(self, graph: torch.fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        effects = side_effects(self._recorder)
        later = replaced_later(graph, effects) - self._decisive
        self._take_as_live(later)
        known = len(self._numbers), len(self._lists)
        self._numbers.update(n for effect in effects for n in effect.numbers if n not in self._decisive)
        if self._defers:
            self._lists.update((id(e.appended), e.appended) for e in effects if e.appended is not None)
        if later or known != (len(self._numbers), len(self._lists)):
            self._look_again(graph)
        if not self.traced:
            self.ahead.finish(graph)  # of the graph that Dynamo has made
            if self.live.drop(self.ahead.given(graph)):
                self._look_again(graph)
        made: list[torch.fx.GraphModule] = []  # copies
        if (late := late_numbers(graph)) is not None:
            made.append(graph := without_late_numbers(graph, late))
        found = counters(graph)
        numbers = [i for i, value in enumerate(example_inputs) if not isinstance(value, Tensor)]
        decisive = set(numbers).difference(() if found is None else found.inputs)
        names = [placeholder_source(n) or "" for n in graph.graph.nodes if n.op == "placeholder"]
        if self._numbers.intersection(names[i] for i in decisive):
            self._decisive.update(names[i] for i in decisive)
            self._take_as_live(self._numbers & self._decisive)
            self._look_again(graph)
        if found is not None:
            made.append(graph := without_counters(graph, found))
            example_inputs = [v for i, v in enumerate(example_inputs) if i not in found.inputs]
        self.effects = effects
        self.live.check()
        if appends_in_frame() or not all(effect.simple for effect in effects):
            self.objects.may_open = False  # the object may be what it writes, too
        seat = Seat(found, late)
        with forgetting_values(made):
            seat.graph = super()._backend(graph, example_inputs)
        if self._compiles == 1:
            writes = bool(effects) or appends_in_frame()
            self.reproduces = (writes or self._is_filled()) and self.problem is None
            self._lists.clear()
            all_at_once = writes or self.host_draws is not None or self.gaps.left
            if self._compiler is None and all_at_once and not self.rebound:
                seat.undoes = FailedRuns(graph, self.device)
            seat.begins, seat.leaves = held_weakly(self._begins), self.branches.leave_step
            self._seat = seat
        return seat

    def _written(self) -> Iterable[Problem]:
        """Writes that Dynamo's code does not make as the user's, and those that no trace holds for again."""
        hooks = bool(self.effects) and hooks_in_frame()
        for effect in self.effects:
            changes = effect.appended is not None or bool(self._decisive.intersection(effect.numbers))
            if hooks or changes or not effect.reproducible:
                yield problem_of_write(effect, self._fn)

    def _read_inputs(self, graph: torch.fx.GraphModule) -> None:
        super()._read_inputs(graph)
        replaced = {place for effect in self.effects for place in effect.places}
        self.carried = [expression for expression in self.inputs if expression in replaced]
        self.inputs = [expression for expression in self.inputs if expression not in replaced]
        nodes = [node for node in graph.graph.nodes if node.op == "placeholder"]
        places = {placeholder_source(node): i for i, node in enumerate(nodes)}
        self._places = [places[expression] for expression in self.carried]
        self._argument_places = [places[expression] for expression in self._arguments]
        self._read_carried = reader(self._code.__globals__, self.carried)

    def _look_for_writes(self, graph: torch.fx.GraphModule) -> Problem | None:
        nodes = {placeholder_source(n): n for n in graph.graph.nodes if n.op == "placeholder"}
        for expression in self.carried:
            if nodes[expression].meta["example_value"].requires_grad:
                return Problem(
                    f"{readable(expression, self._fn)} is replaced by the step and requires a gradient",
                    first_use(nodes[expression]),
                    "Detach the tensor before you store it",
                )
        for node, target, _ in writes_to_inputs(graph):
            if placeholder_source(target) in self.carried:
                name = readable(placeholder_source(target) or target.name, self._fn)
                text = f"{name} is changed in place by the step, and then replaced"
                return Problem(text, line_of(node), "Change the tensor in place or replace it, and not both")
        return super()._look_for_writes(graph)

    # -- while a step is made -----------------------------------------------------------------------

    def _begins(self, inputs: Sequence[Any]) -> None:
        """The graph is about to run for the first time: afterwards things may look different."""
        entries = dynamo_cache_entries(self._code.__code__)
        if not entries or self._guards is not None:
            return
        try:
            self._take_guards(entries[0], self._frame)
            self.latest_tensors = self._read(self._frame, self._code.__globals__)[0]
        except Exception:  # an expression that only Dynamo's own code understands: `Trace` says so
            self._guards = None
            return
        if self.reproduces:
            self.loads = bool(self.carried) or self._is_filled()
            self._first = [inputs[place] for place in self._argument_places]
        if self.captured_as_traced:
            self._resume = types.FunctionType(entries[0].code, self._code.__globals__)

    def _moved(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Problem | None:
        """Another tensor than before is where the step has read one, and `carried` does not have it."""
        try:
            now = self.tensors(fn, args, kwargs)
        except (AttributeError, IndexError, KeyError) as error:
            return Problem(f"the step takes away a tensor that it reads: {type(error).__name__} {error}")
        for expression, tensor, before in zip(self.inputs, now, self.latest_tensors, strict=True):
            if tensor is not before:
                return Problem(f"{readable(expression, fn)} is replaced by the step")
        return None
