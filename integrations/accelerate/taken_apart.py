"""A function whose calls are put off, where that would give something else than the function as it stands."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from pygraph_train.patches import standing_in
from pygraph_train.problems import NotLegal, Problem, user_location
from pygraph_train.torch_private.marks import gradients_are_set, marking, uses_behind_mark
from pygraph_train.tracing.obstacles import gradients_asked, gradients_read
from pygraph_train.tracing.reasons import line_of
from pygraph_train.tracing.reproducing import ReproducingTrace

__all__ = ["NO_BACKWARD", "SAME_CALLS", "AtOnce", "TakenApartTrace", "backward_is_here"]

SAME_CALLS = "Make the same calls in every step; only accelerator.sync_gradients may change them"
"""What to do where a function makes other calls than in its first steps."""

NO_BACKWARD = Problem("the step calls no backward here", fix=SAME_CALLS)


def backward_is_here() -> None:
    """Inside a traced function: the backward is called here, and put off."""


class AtOnce:
    """Has a function that runs as it is written make its calls, each at its place.

    Args:
        calls: owner and name of each method, what it is noted as, the owner's index, and what makes the call.
    """

    def __init__(self, calls: Iterable[tuple[Any, str, str, int, Callable[..., Any]]]) -> None:
        self._stand_ins = [
            (owner, name, self._noted(kind, index, call)) for owner, name, kind, index, call in calls
        ]
        self._until_end = ExitStack()
        self._looks = _Looks()
        self.began = False
        self.made: list[tuple[str, int]] = []

    @property
    def problem(self) -> Problem | None:
        """What the function did behind its backward that cannot be done where calls are put off."""
        return self._looks.problem

    def begin(self) -> None:
        """From now on, calls are made and not put off."""
        if not self.began:
            self.began = True
            self._until_end.enter_context(standing_in(self._stand_ins))

    def __enter__(self) -> None:
        """The function begins."""

    def __exit__(self, *exc: object) -> None:
        self._until_end.close()

    def _noted(self, kind: str, index: int, call: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **kwargs: Any) -> Any:
            self.made.append((kind, index))
            with self._looks.elsewhere():
                result = call(*args, **kwargs)
            if kind == "backward" and not self._looks.entered:
                self._looks.entered = True
                self._until_end.enter_context(self._looks)
            return result

        return noted


class _Looks(TorchFunctionMode):
    """Looks whether gradients or parameters are used."""

    def __init__(self) -> None:
        super().__init__()
        self.entered = False
        self.looking = True
        self.problem: Problem | None = None

    @contextmanager
    def elsewhere(self) -> Iterator[None]:
        """Context of a call that is put off otherwise."""
        before, self.looking = self.looking, False
        try:
            yield
        finally:
            self.looking = before

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.looking and self.problem is None and _has_parameter(args, kwargs):
            self.problem = Problem(_USED, user_location(), _OUTSIDE)
        return func(*args, **(kwargs or {}))


def _has_parameter(*arguments: Any) -> bool:
    from torch.utils._pytree import tree_leaves

    return any(isinstance(x, nn.Parameter) for x in tree_leaves(arguments))


_USED = (
    "the step uses parameters or gradients after backward, and a graph would change them before this line or "
    "after it"
)
_OUTSIDE = "Use them outside of the step"


class TakenApartTrace(ReproducingTrace):
    """A trace of a function whose backward and what follows are put off until its end.

    The function is refused where it has no backward, and where what comes behind the backward looks at what is put
    off: gradients, and parameters as they are after the update.
    """

    at_once: Callable[[], AtOnce | None] = staticmethod(lambda: None)
    """What makes the calls of a function that is refused, and runs as it is written after that."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._further = (*self._further, *marking(backward_is_here))

    def __call__(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See `Trace`."""
        try:
            return super().__call__(fn, args, kwargs)
        except NotLegal:
            if (at_once := self.at_once()) is not None:
                at_once.begin()
            raise

    def _backend(self, graph: torch.fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        problem = _uses_what_is_put_off(graph, self._fn)
        if problem is not None:
            raise NotLegal(problem)  # nothing was executed
        return super()._backend(graph, example_inputs)


def _uses_what_is_put_off(graph: torch.fx.GraphModule, fn: Any) -> Problem | None:
    uses = uses_behind_mark(graph)
    if uses is None:
        return NO_BACKWARD
    if uses:
        return Problem(_USED, line_of(uses[0]), _OUTSIDE)
    found = next(gradients_read(graph, fn, by_hand=True), None) or next(gradients_asked(fn), None)
    if found is None and gradients_are_set():
        return Problem("the step sets a gradient (p.grad = ...)", fix="Set it outside of the step")
    return found
