"""A loop that the user wrote runs as it is until calling Inductor is worth its time.

Inductor takes seconds, and a short training ends sooner without it. Nobody knows how many steps a loop will make: as
many as it has made. So modules that could be compiled run as they are until compiled steps would have saved what
compiling is expected to take. Where the number of steps that are left is known, it is decided by it at once.

Graphs of eager kernels cost a trace, which takes a fraction of that. So they come first, when the steps so far could
have saved the trace, and if the device waits for the host: without that, such graphs have nothing to gain.
"""

from __future__ import annotations

import math
import statistics
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Literal, Protocol

from torch import nn

from pygraph_train.config import PyGraphConfig
from pygraph_train.selection.compile_time import (
    compile_seconds,
    saved_by_compiling,
    steps_until_compiling_pays,
    tracing_seconds,
)

__all__ = ["CompileWait", "Then", "WaitingModule", "compiled_before", "declared_price"]

Then = Literal["as you wrote them", "from graphs of eager kernels", "with Inductor's kernels"]
"""How modules run that waited."""

compiled_before: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Modules that were compiled in this process. Inductor finds them in its caches when another loop takes them over."""

_declared: float | None = None
_declared_tracing: float | None = None

_LEAST = 3
"""Times of steps before any of them is believed."""

_OTHERS = 64
"""Calls of other modules, after which the one whose calls stand for steps is not called any more."""

_REMEMBERED = 255
"""Times of steps that are kept, the latest ones."""

_LAUNCH_BOUND = 0.5
"""A device that ends a step when the host has long begun the next one does not wait for it: see `LaunchBoundCheck`."""


@contextmanager
def declared_price(seconds: float | None, tracing: float | None = None) -> Iterator[None]:
    """Context: in loops that begin inside, compiling is taken to cost so many seconds, on every engine.

    With 0 nothing waits: for tests and measurements of compiled steps. None is what holds without a declaration.

    Args:
        seconds: of compiling.
        tracing: the same for a trace. None: where `seconds` is declared, modules that wait get no graphs.
    """
    global _declared, _declared_tracing
    before = _declared, _declared_tracing
    _declared, _declared_tracing = seconds, tracing
    try:
        yield
    finally:
        _declared, _declared_tracing = before


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
        fits: a method that tells whether memory has room for graphs of eager kernels.
        changed: a method that is called when modules run in another way from now on, and when the wait is over.

    Attributes:
        open: whether it is not decided yet.
        under_way: whether some module waits.
        replays: whether modules that wait, or that are not compiled after all, run from graphs of eager kernels.
    """

    def __init__(
        self,
        modules: Iterable[WaitingModule],
        steps_left: Callable[[], float | None],
        synchronize: Callable[[], None],
        fits: Callable[[], bool],
        changed: Callable[[Then], None],
    ) -> None:
        self._modules = modules
        self._steps_left = steps_left
        self._synchronize = synchronize
        self._fits = weakref.WeakMethod(fits)  # the report keeps this object, and not the loop
        self._changed = weakref.WeakMethod(changed)
        self._declared = _declared
        self._declared_tracing = _declared_tracing
        self._why = ""
        self.replays = False
        self._next_look = 0.0
        self._next: float
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
        self._looks = False
        self._next_look = math.inf if math.isinf(self._next_look) else 0.0
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
        """Whether a call that could be compiled is not.

        Where steps are counted, a module that runs as it is asks only once.
        """
        if self.open:
            self.under_way = True
            if self._steps and self._counts_calls is None:
                module.paused = not self.replays
            else:
                self._called(module)
        elif self._declined and not self.replays:
            module.remove()
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
            if self._looks:
                now = self._end_look(now, now - self._last)
            self._times.append(now - self._last)
        self._last = now
        self._steps += 1
        if self.under_way and self._steps >= self._next and len(self._times) >= _LEAST:
            self._decide()

    # -- the decision -------------------------------------------------------------------------------

    def _decide(self) -> None:
        left = self._steps_left()
        if self._saved(left) > self._price:
            return self._end("with Inductor's kernels")
        self._declined |= left is not None
        asks = not self.replays and self._steps >= self._next_look and self._saved(left) > self._tracing
        if asks and (fits := self._fits()) is not None and fits():
            self._begin_look()
        elif self._declined:
            self._end("from graphs of eager kernels" if self.replays else "as you wrote them")
        else:
            until: float = steps_until_compiling_pays(self._seconds, self._price)
            if not self.replays and self._tracing < self._price:
                pays = steps_until_compiling_pays(self._seconds, self._tracing)
                until = min(until, max(pays, 2 * self._steps if asks else self._next_look))
            self._next = max(self._steps + 1, min(until, 2 * self._steps))

    def _end(self, then: Then) -> None:
        self._why = "" if then == "with Inductor's kernels" else self.sentence()
        self.open = self.under_way = False
        self._tell(then)

    def _tell(self, then: Then) -> None:
        if (changed := self._changed()) is not None:
            changed(then)

    def stop_replaying(self) -> None:
        """Graphs of eager kernels are of no use: modules run as they are, unless they are compiled."""
        self.replays, self._next_look = False, math.inf
        self._tell("as you wrote them")

    def _begin_look(self) -> None:
        """Look at the next step: does the device wait for the host?"""
        self._synchronize()
        self._looks, self._last = True, time.perf_counter()

    def _end_look(self, now: float, host: float) -> float:
        """Args:
            now: when the host has ended the step.
            host: seconds that it took.

        Returns:
            When the device has ended it.
        """
        assert self._last is not None
        self._synchronize()
        ended = time.perf_counter()
        self._looks, self._next_look = False, 2 * self._steps
        self.replays = host > _LAUNCH_BOUND * (ended - self._last)
        if self.replays and not self._declined:
            self._tell("from graphs of eager kernels")
        return ended

    @property
    def _price(self) -> float:
        if self._declared is not None:
            return self._declared
        return compile_seconds(sum(module.operations for module in self._modules if module.waits))

    @property
    def _tracing(self) -> float:
        """What graphs of eager kernels cost."""
        if self._declared is not None:
            return math.inf if self._declared_tracing is None else self._declared_tracing
        return tracing_seconds(sum(module.operations for module in self._modules if module.waits))

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
        how: Then = "from graphs of eager kernels" if self.replays else "as you wrote them"
        begun = f"forward and backward {'ran' if over else 'run'} {how}"
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
