"""Forward and backward as regions of the compile backend: graphs of their own, with the user's Python around them.

The step's function runs in Python on every step, and what Dynamo can trace of it runs as regions, each with a
graph for its forward and one for its backward. Host reads break it into several; what changes on every step
(counters, metric objects) keeps the whole function from being traced once and for all, and then only the
modules that hold parameters are regions. Which of the two it is is found out with eager kernels, before
anything is spent on Inductor.

With `compile=False` regions hold eager kernels: see `exact_regions`.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, TypeVar

import torch
from torch import nn

from pygraph_train.config import PyGraphConfig
from pygraph_train.graphs.engine import Engine
from pygraph_train.problems import NotLegal, Problem, PyGraphError, first_line, user_line_in, user_location
from pygraph_train.regions.options import BackendOptions
from pygraph_train.regions.pair import Bounds
from pygraph_train.report.backend_report import RegionRecord, RegionRuns
from pygraph_train.report.step_report import StepReport
from pygraph_train.step.exact_regions import ExactSteps
from pygraph_train.step.program import Call, StepProgram, plain_call
from pygraph_train.step.region_kernels import (
    LATE_LEAVES,
    RegionKernels,
    is_leaf,
    refuse_open_autocast,
    refuse_watched_checkpoint,
)
from pygraph_train.step.region_levels import Backend, Level, Modules, WholeFunction
from pygraph_train.step.region_memory import RegionMemory
from pygraph_train.step.region_proof import FirstRun, ProvedPart, Told
from pygraph_train.step.region_watch import BackwardWatch
from pygraph_train.torch_private.autograd import (
    backwards_called_again,
    compiled_kernels_refuse,
)
from pygraph_train.torch_private.dispatch import FakeTensor
from pygraph_train.torch_private.dynamo import (
    dynamo_restart,
    tracing_notes,
)
from pygraph_train.torch_private.tracing import dynamo_region_config, forget_notes, why_no_traces
from pygraph_train.tracing.counters import baked_numbers
from pygraph_train.tracing.plain_parts import plain_parts
from pygraph_train.tracing.reasons import compiler_failed, forget_frames
from pygraph_train.tracing.recompute import CHANGED_AGAIN, as_eager, eager_copy, write_in_checkpoint
from pygraph_train.tracing.traced_code import held_weakly
from pygraph_train.tracing.uncounted import changed_inputs, counted_as_eager, uncounted_changes

__all__ = ["Regions", "why_no_regions"]

R = TypeVar("R")

_QUIET = 2
"""Steps in a row that nothing was traced in: then what was traced serves from now on."""

_MOST_PROBES = 6
"""Steps after which something that is still traced anew is given up."""

_MOST_COMPILED = 32
"""Graphs compiled before the step counts as changing all the time."""

_MOST_VARIANTS = 64
"""Of one function: Dynamo counts what all callers compiled, and those that are gone."""


_NOTHING = Level(lambda graph, inputs: graph.forward)

_ON_REQUEST = (
    "compile=False is set: graphs of forward and backward alone may need more memory than the step had, and they are "
    "made where forward='on' or backward='on' asks for them"
)
_NO_GRAPHS = "forward and backward get no graphs of their own"


def why_no_regions(config: PyGraphConfig, engine: str) -> str | None:
    """Why options leave forward and backward without graphs of their own, None where they do not."""
    if config.region_phases == "none":
        return "forward='off', backward='off' is set"
    asked = "on" in (config.forward, config.backward)
    return _ON_REQUEST if engine == "cuda" and config.compile is False and not asked else None


class Regions:
    """Runs steps whose forward and backward have graphs of their own.

    Args:
        program: the step.
        config: options.
        engine: where graphs are made. The backend makes an engine of the same kind for itself.
        report: filled while running.
        announce: shows the user what a long pause is for.

    Attributes:
        problem: why there are none, None while there may be.
        found: whether it is known what is compiled.
        records: what the backend says of the regions that were made.
        runs: tells which phases of a step ran from their graphs.
    """

    def __init__(
        self,
        program: StepProgram,
        config: PyGraphConfig,
        engine: Engine,
        report: StepReport,
        announce: Callable[[str], None],
        compiled: Callable[[float], None],
    ) -> None:
        reason = why_no_regions(config, engine.name)
        replication = program.replication
        if reason is None and program.by_hand:
            reason = "the step makes its backwards and updates itself: it is one graph, or has none"
        if reason is None and (replication.group is not None or replication.problem is not None):
            reason = f"{replication.name}: forward and backward share one graph, or they have no graph"
        self.problem = Problem(reason) if reason is not None else None
        self.found = False
        self._program = program
        self._engine = engine.name
        self._options = {
            "engine": engine.name,
            "phases": config.region_phases,
            "compile": config.compile is not False,
            "indirection": config.indirection,
            "max_signatures": config.max_signatures,
        }
        self._exact = ExactSteps(held_weakly(self._refuse_order)) if config.compile is False else None
        self._verify = config.verify
        self._announce = announce
        self._tell_compiled = compiled
        self._traced = self._compiled = 0
        self._notes: list[tuple[Any, str]] = []  # of compilations in the present step
        self._probes = self._quiet = 0
        self.records: list[RegionRecord] = []
        self.runs = RegionRuns(functools.partial(list, self.records))
        self._note = report.note
        self._report_comparison = report.compared
        report.began(engine.name, regions=functools.partial(list, self.records))
        self._leaves = False  # inputs were seen whose gradient is wanted, though they are no parameters
        self._kernels = RegionKernels(report.note, compile=config.compile is True)
        self._memory = RegionMemory(engine, self.records) if config.compile is False else None
        self._watch = BackwardWatch(held_weakly(self._refuse_backward), exact=self._exact is not None)
        self._before: dict[int, tuple[int, int]] = {}
        self._levels: Iterator[Callable[[Backend], Level]] = iter((WholeFunction, self._modules))
        self._kind = next(self._levels)
        self._level = self._kind(held_weakly(self._probe))

    def run(self, run: Callable[[Call], R], *, watched: bool = False) -> R:
        """Make one step without a graph around it: `run` is called once, as in `StepRunner.step`.

        Args:
            watched: whether `as_planned` will be asked for.
        """
        if (lack := why_no_traces()) is not None:
            self.problem = self.problem or lack
            return run(plain_call)
        before, captures = self._traced, self._captures()
        self._before = {id(r): _work(r) for r in self.records} if watched else {}
        level, exact = self._level, self._exact
        if exact is not None:
            exact.begin()
            level = level if exact.began and self.problem is None else _NOTHING
        try:
            # parts in Python are on the branches of plain training, and hand over what compiled parts take
            with dynamo_region_config(plain=True, recompile_limit=_MOST_VARIANTS) as failures:
                result = level.run(run if exact is None else lambda call: run(exact.looked_at(call)))
        except RuntimeError as error:
            if not self.found or not compiled_kernels_refuse(error):
                raise
            first, where = first_line(error), user_location(error.__traceback__)
            raise PyGraphError(
                f"this step uses gradients in a way that compiled kernels do not support, and the first steps did "
                f"not: {first}{f' ({where})' if where else ''}. Fix: set forward='off', backward='off'"
            ) from error
        finally:
            self._kernels.eager = False
            if exact is not None:
                exact.end()
            forget_notes(self._notes)
            self._watch.forget()
        if failures:
            self.problem = self.problem or compiler_failed(failures[0])
            for failure in failures:
                forget_frames(failure)
        self._quiet = 0 if self._traced > before else self._quiet + 1
        if level is _NOTHING:
            self._quiet = 0
            return result
        if (memory := self._memory) is not None:
            compared = exact is not None and exact.compared
            quiet = self._quiet > 0 and not compared and captures == self._captures()
            if (watched or not quiet) and (why := memory.why_not()) is not None:
                self.problem = self.problem or Problem(f"{_NO_GRAPHS}: {why}")
                memory.give_up(why)
        if not self.found:
            self._probes += 1
            self._judge()
        elif exact is not None and 0 < self._compiled == len(exact.left) and self._quiet:
            self.problem = self.problem or Problem(f"{_NO_GRAPHS}: {exact.nothing_left(self.records)}")
        return result

    def _captures(self) -> int:
        """How many captures of parts there were, if their memory is bounded."""
        return 0 if self._memory is None else sum(r.captures for r in self.records)

    def make_way(self, call: Call, *, for_long: bool) -> Call:
        """`call` of a step without regions, which may need the memory of their graphs.

        Args:
            for_long: no step with regions is to come.
        """
        if (memory := self._memory) is None or not self.records:
            return call

        def made_way(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            memory.make_way(for_long=for_long)  # now that gradients are gone
            return call(fn, args, kwargs)

        return made_way

    def _refuse_backward(self, why: str, where: str | None) -> None:
        self.problem = self.problem or Problem(f"{_NO_GRAPHS}: {why}", where)

    def _refuse_order(self, why: str) -> None:
        self.problem = self.problem or Problem(f"{_NO_GRAPHS}: {why}")

    def _has_compared(self, seconds: float) -> None:
        assert self._exact is not None
        self._exact.compared = self._verify != "always"  # whose steps all take that long
        self._report_comparison(seconds, audit=False)

    def as_planned(self) -> bool:
        """Whether the last step, a watched one, ran from graphs that were there, wherever a graph pays."""
        if not self.found or not self._quiet or (self._exact is not None and self._exact.compared):
            return False
        ran = [r for r in self.records if self._before.get(id(r)) != _work(r)]
        return bool(ran) and all(r.settled and r.captures == self._before[id(r)][0] for r in ran)

    def close(self) -> None:
        """Let go of everything compiled."""
        self.problem = self.problem or Problem("the runner was closed")
        self._level = Level(held_weakly(self._probe))

    def _judge(self) -> None:
        """After a probe: is what was traced the same on every step?"""
        if self._quiet >= _QUIET and self._level.called:
            self.found = True
            self._level = self._kind(held_weakly(self._compile))
            return
        if self._probes < _MOST_PROBES and self._quiet < _QUIET:
            return
        kind = next(self._levels, None)
        if kind is None:
            self.problem = Problem(
                f"{_NO_GRAPHS}: the modules that hold parameters are not called, "
                "or are traced again on every step",
                fix="Keep Python state that changes out of the forward of modules",
            )
            return
        self._kind, self._level = kind, kind(held_weakly(self._probe))
        self._probes = self._quiet = 0

    def _modules(self, backend: Backend) -> Level:
        return Modules(backend, self._program.model)

    # -- backends of torch.compile ------------------------------------------------------------------

    def _probe(self, graph: torch.fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        self._refuse(graph)
        self._traced += 1
        self._notes += tracing_notes(graph)
        self._level.called = True
        self._leaves |= any(map(is_leaf, example_inputs))
        baked = baked_numbers(graph)
        graph, seen = as_eager(graph), set[tuple[Any, ...]]()
        run_watched = held_weakly(self._run_watched)

        def run(*args: Any) -> Any:
            numbers, known = tuple([args[i] for i in baked]), len(seen)
            seen.add(numbers)  # others need another graph, as if it were traced anew
            return run_watched(graph.forward, args, anew=bool(baked) and len(seen) > known).outputs

        return run

    def _run_watched(
        self, forward: Callable[..., Any], inputs: Sequence[Any], *, anew: bool = False
    ) -> FirstRun:
        """Run a part with eager kernels, and look at it; with `compile=False`, which inputs it uses more than once."""
        self._traced += anew
        run = self._exact.run if self._exact is not None else lambda forward, inputs: (forward(*inputs), ())
        outputs, several = run(forward, inputs)
        return FirstRun(outputs, several, self._watch.look(inputs, outputs))

    def _refuse(self, graph: torch.fx.GraphModule) -> None:
        try:
            refuse_watched_checkpoint(graph)
            if (problem := plain_parts(graph)) is not None:
                raise NotLegal(Problem(f"{_NO_GRAPHS}: {problem.reason}", problem.where, problem.fix))
            if self._exact is not None and self._exact.shares_casts:
                refuse_open_autocast(graph)
        except NotLegal as refused:
            self.problem = self.problem or refused.problem
            raise

    def _compile(self, graph: torch.fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        self._refuse(graph)
        from pygraph_train.regions.inductor import compile_graph  # which imports much

        self._traced += 1
        self._notes += tracing_notes(graph)
        if not self.records and self._engine == "cuda" and self._exact is None:
            self._announce("compiling forward and backward with Inductor, which may take a minute")
        self._compiled += 1
        if self._compiled > _MOST_COMPILED:
            self.problem = Problem("forward and backward are compiled again and again")
        odd = {type(x).__name__ for x in example_inputs if isinstance(x, torch.Tensor) and not _is_plain(x)}
        if odd:  # its operations are its own, and kernels see only the memory
            self.problem = Problem(f"{_NO_GRAPHS}: they take a {odd.pop()}, which is no plain tensor")
        write = write_in_checkpoint(graph)
        if write is not None:
            where = user_line_in(write.meta.get("stack_trace"))
            self.problem = Problem(f"{_NO_GRAPHS}: {CHANGED_AGAIN}", where)
        if self.problem is not None:
            return as_eager(graph).forward
        if not self._leaves and any(map(is_leaf, example_inputs)):
            self._note(str(Problem(LATE_LEAVES, user_location())))
            return self._kernels.eager_from_here(as_eager(graph).forward)
        started, eager, places = time.perf_counter(), eager_copy(graph), uncounted_changes(graph)
        if self._exact is not None and eager is None:
            self._exact.left.append("they hold a checkpoint, or a function with a backward of its own")
            return as_eager(graph).forward
        written, mine = changed_inputs(graph), list[RegionRecord]()
        bounds = Bounds()
        if self._memory is not None:
            self._memory.begin()
            bounds.most = self._memory.most

        def made(record: RegionRecord, everywhere: list[RegionRecord] = self.records) -> None:
            mine.append(record)
            everywhere.append(record)

        retains = self._watch.retains or self._program.acts_before_backward() is not None
        try:
            with backwards_called_again() if retains else nullcontext():
                options = BackendOptions.of(self._options)
                compiled = compile_graph(graph, example_inputs, options, made, bounds)
                compiled = counted_as_eager(compiled, places)
        except dynamo_restart():  # not a failure: Dynamo traces once more
            raise
        except Exception as error:  # eager kernels do as well
            why = f"the compile backend could not compile forward and backward: {first_line(error)}"
            self.problem = Problem(why)
            return as_eager(graph).forward
        finally:
            if self._engine == "cuda":
                self._tell_compiled(time.perf_counter() - started)
        if eager is None:
            return compiled
        if self._exact is not None:
            watched, compared = held_weakly(self._run_watched), held_weakly(self._has_compared)
            assert self._memory is not None
            make_way, left = self._memory.make_way_beside, self._exact.left.append
            told = Told(watched, self._exact.ran_compiled, make_way, compared, left)
            compiled = ProvedPart(compiled, eager.forward, mine, written, self._verify, bounds, told)
        return self._kernels.either(compiled, eager.forward)


def _is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor) in (torch.Tensor, nn.Parameter) or isinstance(tensor, FakeTensor)


def _work(record: RegionRecord) -> tuple[int, int]:
    return record.captures, record.replays + record.plain_runs
