"""Python numbers that change with each step and that tensors depend on: each is in a tensor, filled before each run.

`weight = 0.99 ** self.step`, `loss * kl_weight`: the graph reads the tensor. `torch_private/live_numbers.py` says why
an operation with it gives the same bits as one with the number. What Python decides by such numbers is noted, and the
trace holds for numbers that lead to the same decisions.
"""

from __future__ import annotations

import functools
import operator
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx

from pygraph_train.problems import NotLegal, Problem
from pygraph_train.torch_private.live_numbers import MOST, changes
from pygraph_train.tracing.late_arithmetic import (
    DIVISIONS,
    FLOATS,
    INTEGERS,
    LIVE,
    Formatted,
    Late,
    is_moderate,
    late_result,
)
from pygraph_train.tracing.late_marks import once_read
from pygraph_train.tracing.late_nodes import is_late
from pygraph_train.tracing.reading import Read, reader

__all__ = ["OTHER_DECISION", "CallNumbers", "in_tensor"]

OTHER_DECISION = Problem(
    "a number that changes with each step leads to another decision than in the traced step"
)


@dataclass(frozen=True, eq=False)
class _Number:
    """A number: read from an expression, or what a function returns for others.

    Attributes:
        place: among the numbers of the trace, in the order in which they were made.
        expressions: what it is computed from.
        now: what it is in the trace, or an example where it is read of a tensor.
        late: what is known of a number that is read of a tensor, or computed of such; None for another one.
    """

    place: int
    fn: Callable[..., Any] | None
    args: tuple[Any, ...]
    expressions: tuple[str, ...]
    now: Any
    late: Late | None = None

    def of(self, values: Mapping[str, Any], known: Mapping[int, Any] | Sequence[Any]) -> Any:
        """What it is where expressions have these values, and earlier numbers are known by their places."""
        if self.fn is None:
            return values[self.expressions[0]]
        return self.fn(*[known[x.place] if isinstance(x, _Number) else x for x in self.args])


@functools.cache
def _reciprocals_are_rounded_once(device: torch.device) -> bool:
    """Whether float32 kernels that divide by a number take the reciprocal of the number before it is rounded.

    That depends on the version of torch.
    """
    # in float32 its reciprocal is -9.675944e-06, and that of the rounded number is -9.675943e-06
    number = -103349.09199185664
    return float(torch.ones((), dtype=torch.float32, device=device) / number) == float(
        torch.tensor(1 / number, dtype=torch.float32)
    )


@dataclass(frozen=True, eq=False)
class _Slot:
    """A tensor, and the number that it holds.

    Attributes:
        inverse: whether the tensor holds the reciprocal.
        divided_in: the type in which torch computes a reciprocal.
    """

    tensor: Tensor
    number: _Number
    inverse: bool
    divided_in: type[np.floating[Any]]

    def value(self, number: Any) -> float:
        """What it has to hold. Raises OverflowError for a number that a float cannot hold exactly."""
        return _held(number, self.tensor.dtype, self.divided_in if self.inverse else None)


def _held(number: Any, dtype: torch.dtype, divided_in: type[np.floating[Any]] | None) -> float:
    """What a tensor holds for a number, or for its reciprocal, which is computed in the type that is given.

    Raises:
        OverflowError: a float cannot hold the number exactly.
    """
    if type(number) is int and abs(number) > MOST:
        raise OverflowError(number)
    kind = np.float64 if dtype is torch.float64 else np.float32
    with np.errstate(all="ignore"):
        return float(kind(number if divided_in is None else divided_in(1) / divided_in(number)))


def _divided_in(dtype: torch.dtype, device: torch.device) -> type[np.floating[Any]]:
    """The type in which torch computes the reciprocal of a number that a tensor is divided by."""
    exact = dtype is torch.float64 or _reciprocals_are_rounded_once(device)
    return np.float64 if exact else np.float32


def in_tensor(number: float, dtype: torch.dtype, inverse: bool, device: torch.device) -> Tensor:
    """A number, or its reciprocal, in a tensor of the host as an operation on the device takes it."""
    return torch.tensor(_held(number, dtype, _divided_in(dtype, device) if inverse else None), dtype=dtype)


class CallNumbers:
    """Those of one trace.

    Args:
        device: where the tensors are.

    Attributes:
        names: expressions of numbers that are to be read anew before each run.
        refused: those of which something is done that no graph can hold.
        met_counter: whether Python computes with such a number and an integer that is an input of the graph.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.names: set[str] = set()
        self.refused: set[str] = set()
        self.met_counter = False
        self._trace: Any = None
        self._other: CallNumbers | None = None
        self._start()

    def _start(self) -> None:
        self.met_counter = False
        self._values: dict[str, Any] = {}
        self._numbers: list[_Number] = []
        self._slots: list[_Slot] = []
        self._answers: list[tuple[_Number, bool]] = []
        self._types: dict[int, type] = {}  # of numbers, by their places: something was done because of these
        self._typed: set[str] = set()  # expressions of numbers whose type matters
        self._of_tensors: dict[str, tuple[fx.Node, _Number]] = {}
        self._latest: dict[str, Any] = {}  # what expressions were in the latest call
        self._read: Read | None = None
        self._due: bytes | None = None
        self._filled = b""

    # -- before and after a trace -----------------------------------------------------------------------

    def take(self, names: Iterable[str]) -> None:
        """Read the numbers of these expressions anew before each run."""
        self.names.update(set(names) - self.refused)

    def drop_refused(self) -> bool:
        """Of the trace that has ended: let refused numbers be constants. Whether there are any."""
        refused = self.names & self.refused
        self.names -= refused
        return bool(refused)

    def drop(self, read: Sequence[object]) -> bool:
        """Of the trace that has ended: let numbers be constants whose tensors are read before they are filled. Whether
        there are any."""
        for slot in self._slots:
            if any(slot.tensor is tensor for tensor in read):
                self.refuse(slot.number)
        return self.drop_refused()

    @property
    def used(self) -> bool:
        """Whether the trace depends on such numbers."""
        return bool(self._values)

    def follow(self, other: CallNumbers) -> None:
        """Let this trace, of the same function, depend on the same numbers: the other one says for which it holds."""
        self._other = other
        self.take(other.names)

    def check(self) -> None:
        """At the end of a trace. Raises NotLegal where it depends on other numbers than the one that it follows."""
        self._trace = None
        self._of_tensors.clear()
        other = self._other
        if other is None or not other.used:
            return
        answers = [[answer for _, answer in numbers._answers] for numbers in (self, other)]
        if set(self._values) != set(other._values) or answers[0] != answers[1]:
            raise NotLegal(Problem("numbers that change with each step are constants of the compiled step"))

    def changes(self) -> tuple[tuple[Any, str, Any], ...]:
        """Changes of Dynamo while it traces."""
        return changes(self)

    def look(self, frame: dict[str, Any], namespace: dict[str, Any]) -> bool:
        """Read the numbers of a call. Whether the trace holds for them. Hot path."""
        if self._read is None:
            self._read = reader(namespace, self._values)
        try:
            values = dict(zip(self._values, self._read(frame, namespace)[0], strict=True))
            for expression, value in values.items():
                kind = type(value)
                if (kind is not int and kind is not float) or (
                    expression in self._typed and kind is not type(self._values[expression])
                ):
                    return False
            known: list[Any] = []
            # also those that nothing depends on: an error of theirs is the step's
            for number in self._numbers:
                known.append(None if number.late is not None else number.of(values, known))
            if any(known[number.place] is not answer for number, answer in self._answers):
                return False
            if any(type(known[place]) is not kind for place, kind in self._types.items()):
                return False
            due = array("d", [slot.value(known[slot.number.place]) for slot in self._slots])
            self._due = due.tobytes()
            self._latest.update(values)
        except Exception:  # also one of the step's own, which then raises it
            return False
        return True

    def fill(self) -> None:
        """Let the tensors hold what `look` has read last. In the order of the device's work, without a wait for it."""
        due = self._due
        if due is None or due == self._filled:
            return
        with torch.inference_mode(False), torch.no_grad():
            for slot, value in zip(self._slots, array("d", due), strict=True):
                slot.tensor.fill_(value)
        self._filled = due

    # -- inside Dynamo ----------------------------------------------------------------------------------

    def begin(self, trace: Any) -> None:
        """See `LiveRecorder`."""
        if self._trace is not trace:
            self._trace = trace
            self._start()

    def wanted(self, expression: str) -> bool:
        """See `LiveRecorder`."""
        return expression in self.names

    def read(self, expression: str, value: float) -> _Number:
        """See `LiveRecorder`."""
        for known in self._numbers:
            if known.fn is None and known.expressions == (expression,):
                return known
        self._values[expression] = value
        return self._made(None, (), (expression,), value)

    def _made(
        self,
        fn: Callable[..., Any] | None,
        args: tuple[Any, ...],
        names: tuple[str, ...],
        now: Any,
        late: Late | None = None,
    ) -> _Number:
        self._numbers.append(_Number(len(self._numbers), fn, args, names, now, late))
        return self._numbers[-1]

    def compute(self, fn: Callable[..., Any], args: Sequence[Any]) -> _Number | None:
        """See `LiveRecorder`."""
        names = dict.fromkeys(e for x in args if isinstance(x, _Number) for e in x.expressions)
        late = None
        if any(isinstance(x, _Number) and x.late is not None for x in args):
            divisor = args[1] if fn in DIVISIONS else None
            late = late_result(
                fn, [self._known_of(x, divisor) if isinstance(x, _Number) else x for x in args]
            )
            if late is None or not self._raises_nothing(fn, args):
                return None
        else:
            self._typed.update(names)
        now = fn(*[x.now if isinstance(x, _Number) else x for x in args])
        return self._made(fn, tuple(args), tuple(names), now, late)

    def _known_of(self, number: _Number, divisor: Any) -> Late:
        if number.late is not None:
            return number.late
        is_read = number.fn is None and number.expressions[0] not in self._typed
        kinds = LIVE.kinds if is_read else frozenset({type(number.now)})
        return Late(kinds, LIVE.most, number is divisor and number.now != 0)

    def _raises_nothing(self, fn: Callable[..., Any], args: Sequence[Any]) -> bool:
        """Whether an operation raises nothing because of the numbers of it that are known before the step. They are
        asked in each call."""
        for place, x in enumerate(args):
            if not isinstance(x, _Number) or x.late is not None:
                continue
            asked = self._made(is_moderate, (x,), x.expressions, is_moderate(x.now))
            if not self.ask(asked):
                return False
            if place == 1 and fn in DIVISIONS:
                self.ask(self._made(operator.ne, (x, 0), x.expressions, x.now != 0))
        return True

    def is_read(self, node: fx.Node) -> bool:
        """See `LiveRecorder`."""
        return is_late(node)

    def of_tensor(self, node: fx.Node, *, is_float: bool) -> tuple[str, _Number]:
        """See `LiveRecorder`."""
        for name, (known, number) in self._of_tensors.items():
            if known is node:
                return name, number
        name = f"read of a tensor: {len(self._of_tensors)}"
        late, now = (FLOATS, 1.0) if is_float else (INTEGERS, 1)
        self._of_tensors[name] = (node, self._made(None, (), (name,), now, late))
        return name, self._of_tensors[name][1]

    def is_late(self, number: _Number) -> bool:
        """See `LiveRecorder`."""
        return number.late is not None

    def types_of(self, number: _Number) -> Iterable[type]:
        """See `LiveRecorder`."""
        return () if number.late is None else number.late.kinds

    def text(self, text: str) -> Callable[..., str]:
        """See `LiveRecorder`."""
        return Formatted(text)

    def value(self, number: _Number) -> Any:
        """See `LiveRecorder`."""
        return number.now

    def type_of(self, number: _Number) -> type | None:
        """See `LiveRecorder`."""
        kind = type(number.now)
        if number.late is not None:
            return kind if len(number.late.kinds) == 1 else None
        self._typed.update(number.expressions)
        if number.fn is not None:
            self._types[number.place] = kind
        return kind

    def expressions(self, number: _Number) -> Sequence[str]:
        """See `LiveRecorder`."""
        return number.expressions

    def function(self, number: _Number) -> Callable[..., Any]:
        """See `LiveRecorder`."""
        needed = {number.place: number}
        for place in range(number.place, -1, -1):
            if place in needed:
                needed.update((x.place, x) for x in needed[place].args if isinstance(x, _Number))
        ordered = [needed[place] for place in sorted(needed)]

        def computed(*values: Any) -> Any:
            read = dict(zip(number.expressions, values, strict=True))
            known: dict[int, Any] = {}
            for part in ordered:
                known[part.place] = part.of(read, known)
            return known[number.place]

        if number.late is None:
            return computed
        return once_read(computed, number.expressions, self._latest, type(number.now))

    def ask(self, number: _Number) -> bool:
        """See `LiveRecorder`."""
        answer: bool = number.now
        assert number.late is None
        self._answers.append((number, answer))
        return answer

    def tensor(self, number: _Number, dtype: torch.dtype, *, inverse: bool) -> Tensor:
        """See `LiveRecorder`."""
        self._typed.update(number.expressions)
        for slot in self._slots:
            if slot.number is number and slot.tensor.dtype is dtype and slot.inverse is inverse:
                return slot.tensor
        with torch.inference_mode(False), torch.no_grad():
            kind = _divided_in(dtype, self.device) if inverse else np.float64
            made = _Slot(torch.zeros((), dtype=dtype, device=self.device), number, inverse, kind)
            made.tensor.fill_(made.value(number.now))
        self._slots.append(made)
        return made.tensor

    def refuse(self, number: _Number) -> None:
        """See `LiveRecorder`."""
        if number.late is None:
            self.refused.update(number.expressions)
