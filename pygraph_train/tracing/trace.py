"""Is a step a pure function of tensors? Found out by tracing it with Dynamo: replay runs no Python.

It has to be one graph that writes nothing to Python and reads no tensor of the host, and its guards hold for a call.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from pygraph_train.boundary import STEP, executing
from pygraph_train.problems import NotLegal, Problem
from pygraph_train.torch_private.dynamic_shapes import sizes_are_symbols
from pygraph_train.torch_private.dynamo import (
    dynamo_cache_entries,
    dynamo_refusal,
    forget_compiled,
    placeholder_source,
    raised_while_tracing,
    through_dynamo,
    tracing_notes,
    writes_to_inputs,
)
from pygraph_train.torch_private.guards import guard_failures
from pygraph_train.torch_private.modes import leaving_no_mode
from pygraph_train.torch_private.side_effects import SideEffect
from pygraph_train.torch_private.tracing import dynamo_step_config, forget_notes, weights_are_flat
from pygraph_train.tracing import obstacles
from pygraph_train.tracing.branches import Branches
from pygraph_train.tracing.decided_by_values import decided_by_values
from pygraph_train.tracing.drawn_tensors import is_drawn_on_device
from pygraph_train.tracing.host_constants import HostConstants, make_once
from pygraph_train.tracing.host_draws import HostDraws
from pygraph_train.tracing.host_tables import HostTables
from pygraph_train.tracing.kept_guards import KeptGuards
from pygraph_train.tracing.looking_ahead import LookingAhead
from pygraph_train.tracing.reading import Read, reader
from pygraph_train.tracing.reasons import (
    CHANGE_RARELY,
    DYNAMO_OFF,
    compiler_failed,
    forget_frames,
    is_of_tensor,
    line_of,
    problem_of_break,
    problem_of_guard,
    readable,
)
from pygraph_train.tracing.recompute import as_eager, checkpoint_that_adds
from pygraph_train.tracing.recurrent import draws_of_cudnn
from pygraph_train.tracing.required_gradients import GivenTensors
from pygraph_train.tracing.returned_objects import ReturnedObjects
from pygraph_train.tracing.signature import Dims, batch_expressions, flattened
from pygraph_train.tracing.stillness import Stillness
from pygraph_train.tracing.traced_code import fresh_code, held_weakly
from pygraph_train.tracing.watch import ModuleWatch
from pygraph_train.tracing.with_gaps import Gaps
from pygraph_train.tracing.writes import maybe_written, statistics_written

__all__ = ["Compiler", "Trace"]

Compiler = Callable[[torch.fx.GraphModule, list[Any], list[str]], Callable[..., Any]]
"""Compiles a graph of Dynamo's for these inputs, and appends what it could not do to the list."""


class Trace:
    """One function under Dynamo, for one signature of its arguments, or for some that differ in sizes.

    Call it as `trace(fn, args, kwargs)`: it runs `fn` for real through Dynamo's graph. `problem` is set
    as soon as something is found that forbids replaying.

    Args:
        device: where the step's tensors live; tensors elsewhere would be baked into a graph.
        compiler: of the traced graph; None runs it with eager kernels.
        recorder: suffixes of the Python expressions of objects that the step may write to because the
            caller reproduces it on replay (Lightning's log records), or None.
        dynamic: which sizes of the arguments' leaves the trace is not bound to. Its guards say for which it holds.
    """

    runs_graph = True
    """Whether calls run what Dynamo has traced, and not the function itself."""
    reproduces = False
    """Whether the step writes to Python, and Dynamo's code makes the writes: see `ReproducingTrace`."""
    carried: Sequence[str] = ()
    """Expressions of tensors that the step reads and replaces."""
    loads = False  # whether a replay reads more than the batch: `carried`, or numbers that change
    may_draw = True
    """Whether random numbers of the host may decide which way the function takes."""
    may_read = False
    """Whether values that the host reads of given tensors may decide about it as well."""

    def __init__(
        self,
        device: torch.device,
        *,
        compiler: Compiler | None = None,
        recorder: str | tuple[str, ...] | None = None,
        dynamic: Dims | None = None,
    ) -> None:
        self.device, self.dynamic = device, dynamic or {}
        self._compiler, self._recorder = compiler, recorder
        self.problem: Problem | None = None
        self.inputs: list[str] = []
        """Expressions of the tensors that the step reads besides its batch (parameters, attributes)."""
        self.latest_tensors: tuple[Tensor, ...] = ()
        """These tensors, as `holds` saw them last."""
        self.rebound: list[str] = []
        """Expressions of those of `inputs` that the step gives other memory (`p.data = ...`)."""
        self.written: list[str] = []
        """Expressions of those of `inputs` that forward writes to, or may write to."""
        """Takes a part of what steps save, where they are compiled later. For one who sets it before the first call."""
        self.left: list[str] = []
        """What the compilation could not do."""
        self.made_once: tuple[str, ...] = ()
        """What the function makes on the host in each call, and was made when it was traced."""
        self.effects: list[SideEffect] = []
        """What the function writes to Python, and a replay reproduces."""
        self.branches = Branches(plain=compiler is None and self.runs_graph)
        self.draws_in_graph: tuple[str, ...] = ("torch",) if is_drawn_on_device(device) else ()
        """Generators whose numbers are drawn where the graph runs, and not before."""
        self.ahead = LookingAhead(device, draws=self.may_draw, reads=self.may_read and not self.dynamic)
        """What is known of a step before it is made."""
        self.host = HostTables(takes=self.may_read)
        """What the graph has of tensors of the host."""
        self._constants: list[Tensor] = []  # what is captured reads them, also after Dynamo forgot its graph
        self._arguments: list[str] = []
        self._read: Read = lambda L, G: ((), (), ())
        self._fn: Any = None
        self._is_of_batch = batch_expressions((), {})
        self._compiles = 0
        self._notes: list[tuple[Any, str]] = []  # of the compilation that is under way
        self._guards: Any = None
        self._given = GivenTensors(runs=self.runs_graph)
        self._kept = KeptGuards()
        self.objects, self.gaps = ReturnedObjects(), Gaps()
        self._further: tuple[tuple[Any, str, Any], ...] = ()  # changes of Dynamo while it traces
        self._watch: ModuleWatch | None = None
        self._still = Stillness({}, {})
        self._go_through_dynamo(self._function_to_trace())

    def _go_through_dynamo(self, code: types.FunctionType) -> None:
        """Let `_call` be this function, compiled."""
        self._code = code
        keep_guards = held_weakly(self._keep_guards)
        backend, options = held_weakly(self._backend), {"guard_filter_fn": keep_guards}
        self._call: Any = through_dynamo(code, backend, fullgraph=True, options=options)
        weakref.finalize(self, forget_compiled, code.__code__).atexit = False

    def __call__(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run `fn(*args, **kwargs)` through Dynamo.

        With eager kernels the function takes the branches that it takes without Dynamo. Where it cannot be traced then
        (transformers reads masks on the host), it takes those of compiled code.

        Raises:
            NotLegal: the function cannot be traced as one graph; nothing was executed.
        """
        while True:
            try:
                return self._through_dynamo(fn, args, kwargs)
            except NotLegal as refused:
                if not self._is_worth_another_look(refused.problem):
                    raise NotLegal(self.branches.in_the_way(refused.problem)) from refused.__cause__
                self._forget_look()

    def _is_worth_another_look(self, refused: Problem) -> bool:
        """After a trace that was given up, and ran nothing: whether the function is traced in another way now."""
        if self._compiles or not (self.ahead.learned() or self.branches.others(refused)):
            return False
        self._go_through_dynamo(self._function_to_trace())
        return True

    def _forget_look(self) -> None:
        """Nothing is known of the trace that was given up."""
        self._compiles, self.problem = 0, None
        self.ahead.forget()
        self.inputs, self.rebound, self.left, self._arguments = [], [], [], []
        self.made_once, self.written, self._kept = (), [], KeptGuards()
        self.host = HostTables(takes=self.may_read)

    def _function_to_trace(self) -> types.FunctionType:
        """Calls a step's function."""
        return fresh_code()

    def _through_dynamo(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        frame = {"fn": fn, "args": args, "kwargs": kwargs}
        self._fn, self._is_of_batch = fn, batch_expressions(args, kwargs)
        before, stale = self._compiles, None
        if self.traced and not self.holds(fn, args, kwargs):
            stale = self._why(frame)
            seen = self._still.settings_hold(frame)
            if stale is not None and not seen:
                raise NotLegal(stale)  # Dynamo does not look there
        drawn = self.ahead.as_traced(frame, stale) if before else None
        try:
            with dynamo_step_config(*self._changes()), sizes_are_symbols(self._symbols(args, kwargs)):
                result = self._call(fn, args, kwargs)
        except dynamo_refusal() as error:
            problem = problem_of_break(error)
            forget_frames(error)
            raise NotLegal(problem) from None
        except Exception as error:
            if not raised_while_tracing(error):
                raise  # of the step itself
            refused = getattr(error, "inner_exception", None)  # by our backend
            problem = refused.problem if isinstance(refused, NotLegal) else compiler_failed(error)
            forget_frames(error)
            raise NotLegal(problem) from None
        finally:
            forget_notes(self._notes)
        try:
            self._take_note(frame, before, stale, drawn)
        except Exception as error:  # the function has run: what its graph is good for is another question
            self.problem = self.problem or compiler_failed(error)
        return result

    def _take_note(self, frame: dict[str, Any], before: int, stale: Problem | None, drawn: Any) -> None:
        """Find out what was traced in a call that has been made."""
        drawn = drawn if before else self.ahead.end
        if drawn is not None:
            drawn.restore(but=self.draws_in_graph)
        self.problem = self.problem or self._given.problem
        entries = dynamo_cache_entries(self._code.__code__)
        if not entries:
            self.problem = self.problem or Problem("Dynamo did not trace the step", fix=DYNAMO_OFF)
        elif self._guards is None:
            try:
                self._take_guards(entries[0], frame)
            except Exception as error:  # an expression that only Dynamo's own code understands
                self.problem = self.problem or Problem(
                    f"the step reads a tensor that pygraph-train cannot find again: {error}"
                )
        elif self._compiles > max(before, 1) and self.problem is None:
            self.problem = stale or Problem("the step needs a new trace although its inputs look the same")

    def _symbols(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[Tensor, frozenset[int]]]:
        if self.traced or not self.dynamic:
            return []
        _, leaves = flattened((args, kwargs))
        return [(leaves[i], dims) for i, dims in self.dynamic.items()]

    def _changes(self) -> tuple[tuple[Any, str, Any], ...]:
        """How Dynamo traces this function in another way than others."""
        changes = [*(weights_are_flat() if self.runs_graph else ()), *self.branches.changes()]
        if not self.traced:
            changes += self.gaps.around((*self.objects.changes(), *self.ahead.changes()))
        return (*changes, *self._further)

    def _take_guards(self, entry: Any, frame: dict[str, Any]) -> None:
        """Let the guards of what was compiled for this call decide about later ones; raises where it cannot read."""
        self.ahead.find_inputs(frame, self._code.__globals__, self.written)
        self._read = reader(self._code.__globals__, self.inputs, self._kept.modules, self._kept.asked)
        self._watch = ModuleWatch(*self._read(frame, self._code.__globals__))
        self._still = Stillness(self._code.__globals__, self._kept.settings)
        self._guards = entry.guard_manager  # not the entry: torch._dynamo.reset() frees it

    @property
    def host_draws(self) -> HostDraws | None:
        """What is drawn and read on the host, and decides which way the function takes."""
        return self.ahead.draws

    @property
    def traced(self) -> bool:
        """True once a call was traced."""
        return self._guards is not None

    def holds(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """True when the trace is valid for this call. Runs nothing of `fn`. Hot path."""
        guards, frame = self._guards, {"fn": fn, "args": args, "kwargs": kwargs}
        # no cache entry: reset, or an object died that a guard knows by its id
        if guards.cache_entry is None or not guards.check(frame):
            return False
        assert self._watch is not None
        if (tensors := self._still.tensors(frame)) is not None:
            self.latest_tensors = tensors
            return self._watch.unchanged_in_still_modules(tensors)
        try:
            self.latest_tensors, modules, asked = self._read(frame, self._code.__globals__)
        except (AttributeError, IndexError, KeyError):  # a module is no longer where it was
            return False
        unchanged = self._watch.unchanged(self.latest_tensors, modules, asked)
        if not unchanged or not self._still.settings_hold(frame):
            return False
        self._still.note(frame, self.latest_tensors, chain(self.inputs, self._kept.modules, self._kept.asked))
        return True

    def why_not(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Problem:
        """The guard that does not hold for this call, with its source line."""
        problem = self._why({"fn": fn, "args": args, "kwargs": kwargs})
        return problem or Problem("a guard of the traced step failed")

    def failures(self, frame: dict[str, Any]) -> list[tuple[str, str | None]]:
        """Guards of Dynamo's that do not hold: see `guard_failures`."""
        return guard_failures(self._guards, frame) if self.traced else []

    def tensors(
        self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Tensor, ...]:
        """The tensors behind `inputs`, read now."""
        read = self._read({"fn": fn, "args": args, "kwargs": kwargs}, self._code.__globals__)
        return tuple(read[0])

    def argument_tensors(
        self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[tuple[str, Tensor]]:
        """The tensors of the arguments that the step reads, each with how the user would write it."""
        frame = {"fn": fn, "args": args, "kwargs": kwargs}
        read = reader(self._code.__globals__, self._arguments)
        names = [readable(expression, fn) for expression in self._arguments]
        return list(zip(names, read(frame, self._code.__globals__)[0], strict=True))

    def rebound_tensors(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Those of `tensors`, in the order of `inputs`, that the step gives other memory."""
        return [t for expression, t in zip(self.inputs, tensors, strict=True) if expression in self.rebound]

    # -- inside Dynamo ------------------------------------------------------------------------------

    def _backend(self, graph: torch.fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        self._compiles += 1
        self._notes += tracing_notes(graph)
        if (refused := checkpoint_that_adds(graph) or obstacles.plain_parts(graph)) is not None:
            raise NotLegal(refused)
        if not self.traced:
            self.ahead.finish(graph)
        self._given.look_at(graph)
        given = (graph, self.device, self.host, self._is_of_batch)
        constants = make_once(*given) if self.runs_graph else HostConstants()
        self.gaps.look_at(graph)
        self._constants += constants.values
        self.made_once = constants.told if self._compiles == 1 else self.made_once
        if self.problem is None:
            host = obstacles.on_host(graph, self.device, self._fn, constants.nodes)
            values = decided_by_values(graph, constants.nodes)
            draws = draws_of_cudnn(graph, self.device)
            self.problem = next(
                chain(self._written(), obstacles.copies_that_stay(), host, values, draws), None
            )
        if self._compiles == 1:
            self._read_inputs(graph)
            self.problem = self._look_for_writes(graph) or self._reads_gradients(graph) or self.problem
        if self._compiler is not None:
            return executing(self._compiler(graph, example_inputs, self.left), STEP)
        return executing(leaving_no_mode(graph, as_eager(graph).forward), STEP)

    def _written(self) -> Iterable[Problem]:
        """Writes to Python that a replay would not make."""
        return obstacles.written(self._fn, self._recorder)

    def _read_inputs(self, graph: torch.fx.GraphModule) -> None:
        for node in graph.graph.nodes:
            if node.op != "placeholder" or not isinstance(node.meta.get("example_value"), Tensor):
                continue
            expression = placeholder_source(node)
            if expression is not None and expression not in self.host.names:
                (self._arguments if self._is_of_batch(expression) else self.inputs).append(expression)

    def _look_for_writes(self, graph: torch.fx.GraphModule) -> Problem | None:
        """Note what happens to the tensors that the step is given; what happens to a batch is a problem."""
        for node, target, rebinds in writes_to_inputs(graph):
            expression = placeholder_source(target) or target.name
            if expression in self._arguments:
                return obstacles.batch_changed(readable(expression, self._fn), line_of(node))
            if rebinds and expression not in self.rebound:
                self.rebound.append(expression)
        found = (placeholder_source(node) for node in maybe_written(graph))
        self.written = [expression for expression in found if expression in self.inputs]
        statistics = statistics_written(graph)
        return obstacles.batch_in_state([x for x in statistics if placeholder_source(x) in self._arguments])

    def _reads_gradients(self, graph: torch.fx.GraphModule) -> Problem | None:
        return next(obstacles.gradients_read(graph, self._fn), None)

    def _keep_guards(self, guards: Sequence[Any]) -> list[bool]:
        """Leave to `ModuleWatch` and `Stillness` what they see more cheaply."""
        return self._kept.keep(guards, settings=self.runs_graph)

    def _why(self, frame: dict[str, Any]) -> Problem | None:
        """What is not as it was: the first guard that fails, and what the watch sees, which may be the real reason."""
        failures = (self.failures(frame) or self._still.changed_settings(frame))[:1]
        found = self._what_changed(frame, by_itself=not failures)
        for guard, where in failures:
            if not (found and is_of_tensor(guard)):  # the watch says it better
                found.insert(0, problem_of_guard(guard, where, frame["fn"]))
        reason, fix = ", and ".join(p.reason for p in found), ". ".join(p.fix for p in found)
        return Problem(reason, found[0].where, fix) if found else None

    def _what_changed(self, frame: dict[str, Any], *, by_itself: bool) -> list[Problem]:
        """The module or tensor that is not as it was, if any. There is one where no guard failed (`by_itself`)."""
        try:
            known: tuple[Any, Any, Any] = self._read(frame, self._code.__globals__)
        except (AttributeError, IndexError, KeyError) as error:
            text = f"the model has another structure than when it was traced: {type(error).__name__} {error}"
            return [Problem(text, fix=CHANGE_RARELY)]
        if (watch := self._watch) is None or (not by_itself and watch.unchanged(*known)):
            return []
        name, verb = watch.what_changed(*known, [*self.inputs, *self._kept.modules, *self._kept.asked])
        return [Problem(f"{readable(name, frame['fn'])} {verb}", fix=CHANGE_RARELY)]
