"""Which ways steps take whose way is decided by numbers of the host, and which of these get graphs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from pygraph_train.graphs.engine import Engine
from pygraph_train.problems import Problem
from pygraph_train.random_state import HostRandomState
from pygraph_train.step.lifecycle import Life, Stage
from pygraph_train.tracing.trace import Trace

if TYPE_CHECKING:
    from pygraph_train.step.variants import Variant

__all__ = ["Ways", "undrawn"]

_RETURNS = 2
"""Steps that go a way before it is traced."""

_UNPROVED = 2
"""Ways that were traced, and have not come again since: no further one is traced meanwhile."""

_LEFT = 2
"""Captures that are left for others."""

_FORGOTTEN = 400
"""Steps without a replay after which a way makes room for another one."""

_REMEMBERED = 512
"""Ways that are counted."""

_JUDGED = 100
"""Steps after which it is clear whether graphs serve many of them."""


class Ways:
    """Of one signature.

    Attributes:
        elsewhere: steps that went a way without a variant.
    """

    def __init__(self) -> None:
        self.elsewhere = 0
        self._met: Counter[tuple[Any, ...]] = Counter()
        self._closed: set[tuple[Any, ...]] = set()

    def took(self, way: tuple[Any, ...]) -> None:
        """A step goes a way that no variant is for.

        Args:
            way: the answers up to the first one that no variant has.
        """
        self.elsewhere += 1
        if len(self._met) >= _REMEMBERED:
            self._met = Counter({known: n for known, n in self._met.items() if n > 1})
        if len(self._met) < _REMEMBERED:
            self._met[_hashable(way)] += 1

    def close(self, way: tuple[Any, ...]) -> None:
        """No graph can hold the step on this way: it raises an exception there, for example."""
        if len(self._closed) < _REMEMBERED:
            self._closed.add(_hashable(way))

    def returns(self, way: tuple[Any, ...], variants: list[Variant], most: int, step: int) -> bool:
        """Whether a way has come often enough to be traced, and there is room for one more.

        Args:
            way: as in `took`.
            variants: of the signature. One that nobody needs any more makes room, and is taken out.
            most: captures that a run keeps. Some are left for batches of other shapes.
            step: the number of the present step.
        """
        traced = [v for v in variants if v.trace.host_draws is not None]
        unproved = [v for v in traced if v.life == Life(Stage.WATCHED, 1)]
        if (
            _hashable(way) in self._closed
            or self._met[_hashable(way)] < _RETURNS
            or len(unproved) >= _UNPROVED
        ):
            return False
        if len(traced) < max(most - _LEFT, 2):
            return True
        oldest = min(traced, key=lambda v: v.last_used)
        if step - oldest.last_used < _FORGOTTEN:
            return False
        oldest.forget_captures()
        variants.remove(oldest)
        return True

    def told(self, variants: Sequence[Variant]) -> str:
        """A sentence for the report."""
        return (
            f"{_told(variants)} decide which way a step takes ({_where(variants)}): ways that come again get graphs, "
            "and steps that take other ways run without one"
        )

    def too_many(self, variants: Sequence[Variant], *, compiled: bool) -> Problem | None:
        """The reason against graphs where most steps go other ways.

        Args:
            compiled: whether steps without graphs could have Inductor's kernels, and have none here.
        """
        served = sum(v.replays for v in variants)
        most = served // 3 if compiled else served * 3
        if self.elsewhere < _JUDGED or self.elsewhere <= most:
            return None
        return Problem(
            f"{_told(variants)} decide which way the step takes, and {self.elsewhere} steps went ways that have no "
            "graph",
            _where(variants),
            next(v.trace.host_draws.fix for v in variants if v.trace.host_draws is not None),
        )


@contextmanager
def undrawn(trace: Trace, captured: Trace, engine: Engine) -> Iterator[None]:
    """Around a capture: what the step draws on the host is drawn, and the generators stay where they are.

    Args:
        captured: whose graph is run. Its tensors hold what is drawn.
    """
    if trace.host_draws is None:
        yield
        return
    before = HostRandomState()
    try:
        with engine.host_draws(), captured.ahead.keeping():
            yield
    finally:
        before.restore()


def _where(variants: Sequence[Variant]) -> str | None:
    return next((v.trace.host_draws.where for v in variants if v.trace.host_draws is not None), None)


def _told(variants: Sequence[Variant]) -> str:
    return next(v.trace.host_draws.told for v in variants if v.trace.host_draws is not None)


def _hashable(value: Any) -> Any:
    return tuple(map(_hashable, value)) if isinstance(value, (list, tuple)) else value
