"""One look at a step through Dynamo, which goes on behind each obstacle and executes nothing of the step."""

from __future__ import annotations

import types
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pygraph_train.problems import NotLegal, Problem
from pygraph_train.torch_private.dynamo import (
    dynamo_refusal,
    forget_compiled,
    placeholder_source,
    tracing_notes,
    writes_to_inputs,
)
from pygraph_train.torch_private.host_draws import changes as drawing
from pygraph_train.torch_private.past_obstacles import Condition, PastObstacles
from pygraph_train.torch_private.tracing import dynamo_step_config, forget_notes
from pygraph_train.tracing.draw_recording import Recording
from pygraph_train.tracing.host_constants import make_once
from pygraph_train.tracing.host_tables import HostTables
from pygraph_train.tracing.late_nodes import nothing_depends_on_numbers
from pygraph_train.tracing.live_numbers import CallNumbers
from pygraph_train.tracing.obstacles import batch_changed, gradients_asked, gradients_read, on_host, written
from pygraph_train.tracing.opened import open_way_to
from pygraph_train.tracing.read_ahead import ReadingAhead
from pygraph_train.tracing.reasons import (
    compiler_failed,
    first_use,
    forget_frames,
    line_of,
    problem_of_break,
    read_on_host,
    readable,
    shape_of_values,
    text_of_tensor,
)
from pygraph_train.tracing.refusals import tensor_inside
from pygraph_train.tracing.signature import batch_expressions
from pygraph_train.tracing.traced_code import held_weakly
from pygraph_train.tracing.with_gaps import Gaps

__all__ = ["Findings", "look"]

_ALWAYS_TOLD = ("it calls print()", "print() reads")
"""What is told also of a value that is not known: it was read in another line, and is printed here."""

_SAYS_MORE = ("reads the value of a tensor", "puts a tensor into a text")

_MOST_LOOKS = 16


class _Looked(Exception):
    """In the place of everything that would be executed."""


class _NotTraced(Exception):
    """Dynamo has left the function to Python."""


@dataclass
class Findings:
    """What a look has found.

    Attributes:
        obstacles: each once.
        decided: `file:line` of conditions that only a run decides.
        is_complete: whether both ways of each of them were looked at.
        ended: `file:line` behind which nothing was looked at.
        returned: what the function returns: see `PastObstacles`.
    """

    obstacles: list[Problem] = field(default_factory=list)
    decided: list[str] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    is_complete: bool = True
    returned: Any = None

    def add(self, one: _OneLook) -> None:
        """Take over what one of the ways through the step has shown."""
        for problem in one.without_repetitions():
            if not any(_is_same(problem, known) for known in self.obstacles):
                self.obstacles.append(problem)
        self.returned = self.returned or one.past.returned
        self.decided = list(dict.fromkeys([*self.decided, *one.past.decided]))
        if one.past.ended is not None and one.past.ended not in self.ended:
            self.ended.append(one.past.ended)


def look(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    device: torch.device,
    recorder: str | tuple[str, ...] | None,
    leaves: list[Any],
    context: Callable[[], AbstractContextManager[Any]],
    *,
    by_hand: bool = False,
) -> Findings:
    """Trace `fn(*args, **kwargs)`.

    Args:
        fn, args, kwargs: the call.
        device: where its tensors live.
        recorder: see `Trace`.
        leaves: of the arguments.
        context: makes the context of one trace.
        by_hand: whether the function makes its backwards and updates itself.
    """
    seen = Findings()
    left: set[str] = set()  # places of reads that no graph can do without
    avoided: dict[Condition, bool] = {}  # ways on which the step raises an exception
    known: set[tuple[Condition, bool]] = set()
    waiting: list[dict[Condition, bool]] = [{}]
    for _ in range(_MOST_LOOKS):
        if not waiting:
            break
        leaves_out, before = avoided | waiting.pop(0), -1
        while len(left) > before:  # a value that is read ahead turned out to be more than a decision
            before = len(left)
            recording = Recording(device) if by_hand else ReadingAhead(device, left)
            one = _OneLook(fn, args, kwargs, recording, device, recorder, leaves, leaves_out, by_hand=by_hand)
            with context():
                one.trace()
        seen.add(one)
        ways = one.past.ways
        known.update(ways)
        if one.raised and (not ways or ways[-1][0] in avoided):
            seen.ended.append(one.raised)
        elif one.raised:
            avoided[ways[-1][0]] = not ways[-1][1]
        for index, (condition, left_out) in enumerate(ways):
            if (condition, not left_out) not in known:
                known.add((condition, not left_out))
                waiting.append({**dict(ways[:index]), condition: not left_out})
    seen.is_complete = not waiting
    return seen


def _is_same(one: Problem, other: Problem) -> bool:
    return (one.reason, one.where) == (other.reason, other.where)


class _OneLook:
    """One of the ways through the step."""

    def __init__(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        recording: Recording,
        device: torch.device,
        recorder: str | tuple[str, ...] | None,
        leaves: list[Any],
        leaves_out: dict[Condition, bool],
        *,
        by_hand: bool,
    ) -> None:
        self._by_hand = by_hand
        self.raised = ""
        self.found: list[Problem] = []
        self.past = PastObstacles(
            self._met,
            reads=self._reads,
            shapes=lambda where: self._note(shape_of_values(where)),
            texts=lambda where: self._note(text_of_tensor(where)),
            leaves_out=leaves_out,
        )
        self._fn, self._args, self._kwargs = fn, args, kwargs
        self._is_of_batch = batch_expressions(args, kwargs)
        self._recording = recording
        self._device, self._recorder = device, recorder
        self._given, self._leaves = leaves, {id(leaf) for leaf in leaves}
        self._notes: list[tuple[Any, str]] = []
        self._only_read: list[Problem] = []  # of `found`: reads of numbers
        self._stands_in = False  # whether somebody who depends on such a number may be unknown
        self._gaps = Gaps()
        self._gaps.allowed = not by_hand
        self._reached = False

    def trace(self) -> None:
        code = types.FunctionType(_stepping.__code__.replace(co_name="traced_step"), globals())
        call = torch.compile(code, backend=held_weakly(self._backend), fullgraph=True, dynamic=False)
        probe = torch.zeros((), device=self._device)
        try:
            with dynamo_step_config(*self._gaps.around((*self._values(), *self.past.changes()))):
                call(self._fn, self._args, self._kwargs, probe)
        except _NotTraced:
            self._note(
                Problem(
                    "Dynamo did not trace the step",
                    fix="Unset TORCHDYNAMO_DISABLE, and remove torch.compiler.disable decorators from the step",
                )
            )
        except Exception as error:
            if not self._reached:
                self._ended(_problem_of(error), raises="Observed exception" in str(error))
            forget_frames(error)
        finally:
            forget_notes(self._notes)
            forget_compiled(code.__code__)

    def _values(self) -> tuple[Any, ...]:
        """How Dynamo traces values of the host differently: as in training, see `LookingAhead.changes`."""
        recording = self._recording
        late = () if self._by_hand else CallNumbers(self._device).changes()
        return (*drawing(recording), *late)

    def _ended(self, problem: Problem, *, raises: bool) -> None:
        """The way has an end before that of the step: the step raises an exception itself, or cannot be followed."""
        where = problem.where or "the start of the step"
        if raises and self.past.decided:
            self.raised = where
        else:
            self._note(problem)
            self.past.ended = self.past.ended or where

    def without_repetitions(self) -> list[Problem]:
        """`print(loss.item())` is one obstacle."""
        printed = {p.where for p in self.found if any(words in p.reason for words in _SAYS_MORE)}
        return [p for p in self.found if not (p.where in printed and p.reason == read_on_host(None).reason)]

    def _note(self, problem: Problem) -> None:
        if not any(_is_same(problem, known) for known in self.found):
            self.found.append(problem)

    def _reads(self, where: str) -> None:
        known = len(self.found)
        self._note(read_on_host(where))
        self._only_read += self.found[known:]

    def _met(self, error: BaseException, where: str, follows: bool) -> None:
        if self._reached:
            return  # our own end
        self._stands_in = True
        problem = _problem_of(error)
        if not follows or any(words in problem.reason for words in _ALWAYS_TOLD):
            self._note(Problem(problem.reason, problem.where or where, problem.fix))
        forget_frames(error)

    def _backend(self, graph: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        self._notes += tracing_notes(graph)
        try:
            self._recording.finish(graph)  # what decides about the step's way is no obstacle
        except NotLegal as refused:
            self._note(refused.problem)
        if not self._by_hand and not self._stands_in and nothing_depends_on_numbers(graph):
            self.found = [problem for problem in self.found if problem not in self._only_read]
        for problem in (
            *written(self._fn, self._recorder),
            *self._host_tensors(graph),
            *gradients_read(graph, self._fn, by_hand=self._by_hand),
            *(gradients_asked(self._fn) if self._by_hand else ()),
            *self._arguments(graph),
        ):
            self._note(problem)
        self._reached = True
        raise _Looked

    def _host_tensors(self, graph: torch.fx.GraphModule) -> list[Problem]:
        """Reads of values are known already, with those that the graph has lost since."""
        given = HostTables(takes=not self._by_hand)
        constants = make_once(graph, self._device, given, self._is_of_batch).nodes
        found = on_host(graph, self._device, self._fn, constants)
        return [p for p in found if p.reason != read_on_host(None).reason]

    def _arguments(self, graph: torch.fx.GraphModule) -> list[Problem]:
        """What is done to tensors of the batch, and which tensors of other origin the step uses."""
        found = []
        frame = {"fn": self._fn, "args": self._args, "kwargs": self._kwargs}
        for node, target, _ in writes_to_inputs(graph):
            expression = placeholder_source(target) or target.name
            if self._is_of_batch(expression):
                found.append(batch_changed(readable(expression, self._fn), line_of(node)))
        for node in graph.graph.nodes:
            value, source = node.meta.get("example_value"), placeholder_source(node)
            if node.op != "placeholder" or source is None or not isinstance(value, Tensor):
                continue
            name = readable(source, self._fn)
            if not self._is_of_batch(source):
                if value.requires_grad and not value.is_leaf:
                    found.append(
                        Problem(
                            f"{name} was computed outside of the step and requires a gradient",
                            first_use(node),
                            "Compute the tensor inside the step, or detach it",
                        )
                    )
            elif id(tensor := _read(source, frame)) not in self._leaves and not (
                isinstance(tensor, Tensor) and open_way_to([tensor], self._given)
            ):
                found.append(tensor_inside(name, first_use(node)))
        return found


def _read(expression: str, frame: dict[str, Any]) -> Any:
    try:
        return eval(expression, {"L": frame})
    except Exception:  # an expression that only Dynamo's own code understands
        return None


def _problem_of(error: BaseException) -> Problem:
    return problem_of_break(error) if isinstance(error, dynamo_refusal()) else compiler_failed(error)


def _stepping(fn: Any, args: Any, kwargs: Any, probe: Any) -> Any:
    if not torch.compiler.is_dynamo_compiling():
        raise _NotTraced
    result = fn(*args, **kwargs)
    # without any operation Dynamo would execute the frame and ask no backend
    return result, probe + 1
