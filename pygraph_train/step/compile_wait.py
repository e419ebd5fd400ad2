"""A loop that the user wrote runs as it is until calling Inductor is worth its time.

Inductor takes seconds, and a short training ends sooner without it. Nobody knows how many steps a loop will make: as
many as it has made. So modules that could be compiled run as they are until compiled steps would have saved what
compiling is expected to take. Where the number of steps that are left is known, it is decided by it at once.
"""

from __future__ import annotations

import statistics
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol

from torch import nn

from pygraph_train.config import PyGraphConfig
from pygraph_train.selection.compile_time import (
    compile_seconds,
    saved_by_compiling,
    steps_until_compiling_pays,
)

__all__ = ["CompileWait", "WaitingModule", "compiled_before", "declared_price"]

compiled_before: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Modules that were compiled in this process. Inductor finds them in its caches when another loop takes them over."""

_declared: float | None = None

_LEAST = 3
"""Times of steps before any of them is believed."""

_OTHERS = 64
"""Calls of other modules, after which the one whose calls stand for steps is not called any more."""

_REMEMBERED = 255
"""Times of steps that are kept, the latest ones."""


@contextmanager
def declared_price(seconds: float | None) -> Iterator[None]:
    """Context: in loops that begin inside, compiling is taken to cost so many seconds, on every engine.

    With 0 nothing waits: for tests and measurements of compiled steps. None is what holds without a declaration.
    """
    global _declared
    before, _declared = _declared, seconds
    try:
        yield
    finally:
        _declared = before


class WaitingModule(Protocol):
    """A module that runs as it is, and could be compiled."""

    paused: bool
    """Whether its calls do not ask any more."""

    @property
    def waits(self) -> bool:
        """Whether calls of it could be compiled now, and are not."""

    @property
    def operations(self) -> int:
        """About how many operations these calls are, with their backwards."""

    def remove(self) -> None:
        """Give the module back as it was."""


class CompileWait:
    """Decides when the modules of a loop are compiled, or that they never are.

    The time of a step runs from its end to the end of the next one. What is done between some steps, as evaluation or
    a checkpoint, makes these longer, but not the median.

    Args:
        modules: of the loop, at any time.
        steps_left: how many steps the loop will still make, None when unknown.
        synchronize: waits for the device.
        ended: a method that is called when the wait is over, with whether modules are compiled.

    Attributes:
        open: whether it is not decided yet.
        under_way: whether some module waits.
    """

    def __init__(
        self,
        modules: Iterable[WaitingModule],
        steps_left: Callable[[], float | None],
        synchronize: Callable[[], None],
        ended: Callable[[bool], None],
    ) -> None:
        self._modules = modules
        self._steps_left = steps_left
        self._synchronize = synchronize
        self._ended = weakref.WeakMethod(ended)  # the report keeps this object, and not the loop
        self._declared = _declared
        self._why = ""
        self.begin_anew()

    @staticmethod
    def wanted(config: PyGraphConfig, engine: str) -> bool:
        """Whether modules wait at all: not where compiled code, or graphs of it, were asked for, or it is cheap."""
        costs = engine == "cuda" if _declared is None else _declared > 0
        return costs and config.compile == "auto" and "on" not in (config.forward, config.backward)

    def begin_anew(self) -> None:
        """More modules were taken over: nothing is known of steps with them."""
        self.open, self.under_way = True, any(module.waits for module in self._modules)
        self._declined = False
        self._steps = self._next = self._others = 0
        self._last: float | None = None
        self._times: deque[float] = deque(maxlen=_REMEMBERED)
        self._counts_calls: weakref.ref[WaitingModule] | None = None

    def close(self) -> None:
        """The loop has ended."""
        self._why = self.sentence(over=True)
        self.open = False
        self._modules, self._steps_left, self._synchronize = (), lambda: None, lambda: None

    # -- what the loop says -------------------------------------------------------------------------

    def holds(self, module: WaitingModule) -> bool:
        """Whether a call that could be compiled runs as it is. Where steps are counted, the module asks only once."""
        if self._declined:
            module.remove()
        elif self.open:
            self.under_way = True
            if self._steps and self._counts_calls is None:
                module.paused = True
            else:
                self._called(module)
        return self.open or self._declined

    def step_ended(self) -> None:
        """A step has ended."""
        if self._counts_calls is not None:  # steps are better
            self._counts_calls, self._last, self._steps = None, None, 0
            self._times.clear()
        self._count()

    def _called(self, module: WaitingModule) -> None:
        """A call while no step was counted. Without a prepared optimizer none ever is: calls of one module stand in."""
        counted = None if self._counts_calls is None else self._counts_calls()
        if counted is not module:
            self._others += 1
            if counted is not None and self._others <= _OTHERS:
                return
            self._counts_calls = weakref.ref(module)
        self._others = 0
        self._count()

    def _count(self) -> None:
        if len(self._times) < _LEAST and self._steps_left() is not None:
            self._synchronize()  # the host may be ahead of the device in the first steps
        now = time.perf_counter()
        if self._last is not None:
            self._times.append(now - self._last)
        self._last = now
        self._steps += 1
        if self.under_way and self._steps >= self._next and len(self._times) >= _LEAST:
            self._decide()

    # -- the decision -------------------------------------------------------------------------------

    def _decide(self) -> None:
        price, left = self._price, self._steps_left()
        pays = self._saved(left) > price
        if pays or left is not None:
            self._why = "" if pays else self.sentence()
            self.open, self.under_way, self._declined = False, False, not pays
            if (ended := self._ended()) is not None:
                ended(pays)
            return
        until = steps_until_compiling_pays(self._seconds, price)
        self._next = max(self._steps + 1, min(until, 2 * self._steps))

    @property
    def _price(self) -> float:
        if self._declared is not None:
            return self._declared
        return compile_seconds(sum(module.operations for module in self._modules if module.waits))

    @property
    def _seconds(self) -> float:
        """Of a step."""
        return max(statistics.median(self._times), 1e-9)

    def _saved(self, left: float | None) -> float:
        return saved_by_compiling(self._seconds, steps=self._steps, left=left)

    # -- in words -----------------------------------------------------------------------------------

    def sentence(self, *, over: bool = False) -> str:
        """What waits, for how long, and what to do about it; "" where nothing waits.

        Args:
            over: whether the loop has ended.
        """
        if not self.under_way or not self.open:
            return self._why
        price, left = self._price, None
        begun = "forward and backward run as you wrote them"
        if over:
            begun = begun.replace("run", "ran")
        begun += f": compiling them is expected to take about {_in_words(price)}"
        if len(self._times) < _LEAST:
            return f"{begun}, and it is not known yet whether that pays. {_AT_ONCE}"
        left = self._steps_left()
        saved = _in_words(self._saved(left))
        if left is not None:
            return f"{begun}, and the {left:.0f} steps that were left could have saved {saved}. {_AT_ONCE}"
        text = f"{begun}, and in the {self._steps} steps so far compiled code could have saved {saved}"
        if over:
            return f"{text}. {_AT_ONCE}"
        more = max(1, steps_until_compiling_pays(self._seconds, price) - self._steps)
        return f"{text}. Inductor compiles them after about {more} more steps. {_AT_ONCE}"


_AT_ONCE = "Set compile=True to compile at once"


def _in_words(seconds: float) -> str:
    if seconds < 0.01:
        return "less than 0.01 s"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.2g} s"
