"""Looks at a step: calls it a few times as a training does, and puts back what that has changed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from pygraph_train.boundary import Boundary
from pygraph_train.config import PyGraphConfig
from pygraph_train.core.region import PhaseRegion, PhaseRegions
from pygraph_train.diagnosis.explanation import Explanation
from pygraph_train.diagnosis.subject import Subject
from pygraph_train.graphs.devices import make_engine
from pygraph_train.graphs.engine import Engine
from pygraph_train.optimizers.program import why_update_is_plain
from pygraph_train.optimizers.several import preparation_of
from pygraph_train.patches import standing_in
from pygraph_train.plans import graphs_apart
from pygraph_train.problems import ONLY_ON_CPU, Problem, defined_at, first_line, user_location
from pygraph_train.report.announcements import switched_off
from pygraph_train.step.loop import NO_GRAPH
from pygraph_train.step.loss_program import BACKWARD_MADE, SECOND_BACKWARD
from pygraph_train.step.outside import around_the_step, uninitialized
from pygraph_train.step.phase_runner import why_no_phases
from pygraph_train.step.program import plain_call
from pygraph_train.step.traced_call import tensors_of
from pygraph_train.torch_private.stock_dynamo import CompiledFunction, looking, traced_again

_CONFIG = PyGraphConfig(warmup_steps=2)

_MOST_CALLS = 6
"""In which a step has to settle: a number that changes is one in the second trace, and no constant."""

_RUNS = 5
"""Timed runs with graphs, and without; one more goes before them."""

_NO_GAIN = "What graphs would gain was not measured: there is no CUDA device."
_ON_CPU = (
    "The model is on the CPU. What only a GPU refuses (a tensor that stays on the CPU) is seen when explain runs with "
    "the model on the GPU."
)
_LATER = "Shapes that change from step to step are seen while training, and the report names them then."
_NO_TRACE = Problem(
    "Dynamo did not trace the step",
    fix="Unset TORCHDYNAMO_DISABLE, and remove torch.compiler.disable decorators from the step",
)
_ANEW = "Keep what changes in a tensor, or where the step does not read it"


def explained(subject: Subject) -> Explanation:
    """How the phases of a step will run, and what stands in the way."""
    program, device = subject.program, subject.program.device
    try:
        engine = make_engine("emulated" if device.type == "cpu" else "cuda", device)
    except ValueError as error:
        return Explanation(subject.name, (Problem(first_line(error)),), tuple(subject.notes), "")
    assert engine is not None
    off = switched_off()
    lazy = uninitialized(program.model)
    found = [
        Problem(off) if off else None,
        why_no_phases(program),
        lazy and replace(lazy, fix="Call the model once, and explain the step then"),
        *around_the_step(),
    ]
    look = _Look(subject, engine)
    try:
        if not any(found):
            with looking(), subject.put_back():
                look.look()
        return look.explanation([problem for problem in found if problem is not None])
    finally:
        look.regions.close()
        engine.close()
        vars(look).clear()  # Dynamo may keep what it has compiled


@dataclass
class _Part:
    """A graph of Dynamo's.

    Attributes:
        region: made of it.
        gives_gradients: whether a result of its last call leads to gradients.
        replayed: whether its last call was a replay.
    """

    region: PhaseRegion
    gives_gradients: bool = False
    replayed: bool = False

    @property
    def trains(self) -> bool:
        """Whether a backward goes through it. Of what is not watched, or not to the end, nobody knows better."""
        seen = self.region.reason is None and self.region.calls > 1
        return self.region.trains or (self.gives_gradients and not seen)

    @property
    def lacks_graph(self) -> bool:
        return self.trains and self.region.counts and not self.replayed


class _Look:
    def __init__(self, subject: Subject, engine: Engine) -> None:
        self._subject, self._engine = subject, engine
        self.regions = PhaseRegions(
            engine, _CONFIG, lambda: tensors_of(self._subject.program.model), lambda problem: None, Boundary()
        )
        self._compiled = CompiledFunction(subject.program.step_fn, self._backend)
        self._parts: list[tuple[_Part, Callable[..., Any]]] = []
        self._called: list[_Part] = []  # in the last call, in order
        self._made = 0  # graphs, in the last call
        self._runs = 0
        self._returned = self._failed = self._settled = self._updates = False
        self._problems: list[Problem] = []
        self._gain = ""

    def _backend(self, gm: GraphModule, examples: Any) -> Callable[..., Any]:
        run_graph = self.regions(gm, examples)
        self._parts.append((_Part(self.regions.regions[-1]), run_graph))
        self._made += 1
        number = len(self._parts) - 1

        def run(*given: Any) -> Any:
            part, run_graph = self._parts[number]
            before = self.regions.replays
            made = run_graph(*given)
            part.replayed = self.regions.replays > before
            part.gives_gradients = any(isinstance(t, Tensor) and t.requires_grad for t in made)
            self._called.append(part)
            return made

        return run

    # -- calls of the step --------------------------------------------------------------------------------

    def look(self) -> None:
        """Call the step until all of its graphs are replayed, or it is clear that they are not."""
        try:
            while not self._settled and self._runs < _MOST_CALLS:
                self._called.clear()
                self._made = 0
                self._run(self._through_dynamo)
                if self._runs == 1:
                    self._look_at_update()
                self._settled = any(p.replayed for p in self._called)
                self._settled &= not any(p.lacks_graph for p in self._called)
                if any(p.lacks_graph and p.region.reason for p in self._called) and not self._made:
                    break
            if self._settled:
                self._gain = _gain_of(
                    lambda: self._run(plain_call),
                    lambda: self._run(self._through_dynamo),
                    self._engine.device,
                )
        except Exception as error:
            self._failed, self._settled = True, False
            self._problems.append(self._raised(error))

    def _run(self, call: Callable[..., Any]) -> None:
        subject, program = self._subject, self._subject.program
        subject.drop_gradients()
        self._runs += 1
        self._returned = False
        with subject.context(), standing_in(subject.left_out):
            if program.by_hand:
                call(program.step_fn, subject.args, subject.kwargs)
            else:
                loss, _ = program.forward(call, subject.args, subject.kwargs)
                loss.backward()

    def _through_dynamo(self, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        result = self._compiled(*args, **kwargs)
        self._returned = True
        return result

    def _raised(self, error: Exception) -> Problem:
        if isinstance(error, TypeError) and self._returned:
            return Problem(first_line(error), defined_at(self._subject.program.step_fn))
        if SECOND_BACKWARD in str(error):
            return replace(BACKWARD_MADE, where=defined_at(self._subject.program.step_fn))
        what = f"the step raises {type(error).__name__}: {first_line(error)}"
        return Problem(what, user_location(error.__traceback__), "Explain a step that runs")

    def _look_at_update(self) -> None:
        """With gradients there, because some optimizers refuse sparse ones."""
        program = self._subject.program
        if program.optimizer is None:
            return
        preparation = preparation_of(program.optimizer, self._engine)
        try:
            problem = why_update_is_plain(program, preparation)
        finally:
            preparation.close()
        if problem is not None and ONLY_ON_CPU in problem.reason:
            self._subject.notes.append(f"On the CPU {problem.reason}.")
            problem = None
        self._updates = problem is None
        if problem is not None:
            self._problems.append(problem)

    # -- what was seen ------------------------------------------------------------------------------------

    def explanation(self, found: list[Problem]) -> Explanation:
        looked = self._runs > 0
        parts = [k for k, part in enumerate(self._called) if part.trains]
        problems = [*found, *self._of_graphs(), *self._problems]
        program, breaks = self._subject.program, list[Problem]()
        beside: list[Problem] = []
        for k, part in enumerate(self._called):
            if (end := part.region.end) is not None:
                cuts = parts and parts[0] <= k < parts[-1]
                if program.by_hand:  # its own lines run in Python, and the modules that it calls have graphs
                    cuts = cuts and not _is_line_of(program.step_fn, end.where)
                if cuts or not self._failed:  # where the step has failed, nobody knows what comes behind
                    (breaks if cuts else beside).append(end)
        graphed = self._settled
        plan = graphs_apart(graphed, graphed, looked and self._updates)
        return Explanation(
            self._subject.name,
            tuple(dict.fromkeys([*problems, *breaks])),
            tuple(self._notes(looked, beside)),
            self._gain,
            plan="" if self._failed or program.replication.gathers else str(plan),
            graphs_of_forward=sum(part.replayed for part in self._called) if graphed else 0,
        )

    def _of_graphs(self) -> Iterator[Problem]:
        """Reasons against graphs of the forward."""
        if self._settled or self._failed or self._runs == 0:
            return
        refused = [p for p in self._called if p.trains and p.region.reason is not None]
        reasons = [p for p in refused if p.region.counts]
        again = traced_again() if self._made and not reasons else None
        if again is not None:
            yield Problem(
                f"Dynamo traces the step anew in each call: {again[0]} does not hold", again[1], _ANEW
            )
            return
        for part in reasons or refused:
            yield Problem(f"a part of the step runs without a graph: {part.region.reason}", part.region.where)
        if not reasons:
            yield NO_GRAPH if self._called else _NO_TRACE

    def _notes(self, looked: bool, beside: list[Problem]) -> Iterator[str]:
        yield from self._subject.notes
        if not looked:
            yield "The step itself was not looked at, so nothing is said against it."
            return
        if where := list(dict.fromkeys(str(end.where) for end in beside)):
            yield f"Python runs {', '.join(where)} before or behind the graphs, and cuts none of them there."
        if self._subject.program.optimizer is None:
            yield "No optimizer was given, so its step was not looked at. Pass optimizer=."
        if self._engine.name == "emulated":
            yield _ON_CPU
        yield _LATER
        times = "once" if self._runs == 1 else f"{self._runs} times"
        yield (
            f"The function of the step ran {times}. Tensors of model and batch, gradients and random "
            "states were put back; what it has changed of other Python objects stays."
        )


def _gain_of(plain: Callable[[], object], graphed: Callable[[], object], device: torch.device) -> str:
    """A sentence about the time of forward and backward.

    Args:
        plain, graphed: run them without graphs, and from the graphs that there are already.
        device: of the model.
    """
    if device.type != "cuda":
        return _NO_GAIN
    before, after = _seconds(plain), _seconds(graphed)
    return (
        f"Forward and backward took {before * 1e3:.2f} ms without graphs and {after * 1e3:.2f} ms with them, on the "
        f"average of {_RUNS} runs. What a graph of the update saves was not measured."
    )


def _seconds(run: Callable[[], object]) -> float:
    run()
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(_RUNS):
        run()
    torch.cuda.synchronize()
    return (time.perf_counter() - started) / _RUNS


def _is_line_of(fn: Any, where: str | None) -> bool:
    code = getattr(fn, "__code__", None)
    return code is not None and where in {f"{code.co_filename}:{line}" for *_, line in code.co_lines()}
