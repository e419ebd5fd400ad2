"""Calls of a module in a loop that the user wrote: its graphs are replayed, forward and backward each in its time."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import torch
from torch import nn

from pygraph_train.boundary import FORWARD, done, executes, quietly
from pygraph_train.core.region import PhaseRegions
from pygraph_train.parallel.sharding import GATHERED, NOT_WHOLE, Sharding
from pygraph_train.parallel.votes import APART
from pygraph_train.patches import held_weakly
from pygraph_train.problems import Problem
from pygraph_train.step.traced_call import TracedCall
from pygraph_train.torch_private.phases import is_transformed
from pygraph_train.torch_private.stock_dynamo import CompiledModule, call_impl, call_of, set_call_of

_ALONE = nullcontext()

_STEADY = 8
"""Steps in a row that call a module without gradients, after which such a call is a part of the step: a teacher's, or
that of a reference. An evaluation lies between two steps.
"""

_OFTEN = 2
"""Times as many calls as with gradients: more of them generate a text, word by word."""


class ModuleCall(TracedCall):
    """Calls a module through `torch.compile` where that is a part of each training step, and as it is otherwise.

    The module stays the object that the user made, and holds this object: both go when nobody else needs the module.

    Args:
        module: called like this from now on, until `remove`.
        regions: its graphs.
        even: see `Sizes`.
        gathers: whether its parameters are gathered within the call.

    Attributes:
        calls: how often it was called through `torch.compile` in the present step.
        held: so many further calls with gradients run it as it is.
        graded, without: how often it was called with gradients in the present step, and without.
        steady: how many steps in a row have called it without, and not too often.
    """

    def __init__(
        self,
        module: nn.Module,
        regions: PhaseRegions,
        even: Callable[[], bool],
        *,
        gathers: bool = False,
    ) -> None:
        super().__init__(module, regions, even)
        self._gathers = gathers
        self._sharding: Sharding | None = None
        self._in_first_step = True
        self._compiled = CompiledModule(regions)
        self._called = False
        self.calls = self.held = 0
        self.graded = self.without = self.steady = 0
        self._hooks: list[int] = []  # how many there were in each call that ran as it is
        set_call_of(module, self)
        weakref.finalize(self, held_weakly(regions.let_go)).atexit = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module. Hot path."""
        if torch.is_grad_enabled():
            self.graded += 1
        else:
            self.without += 1
            if self.steady < _STEADY or self.held or self._gathers or torch.is_inference_mode_enabled():
                return call_impl(self._model, *args, **kwargs)
        if self.paused or torch.compiler.is_compiling():
            return call_impl(self._model, *args, **kwargs)
        if self.held:
            self.held -= 1
            quietly(lambda: self.sizes.look(args, kwargs), self._count_hooks)
            began = time.perf_counter()
            made = call_impl(self._model, *args, **kwargs)
            self.spent.append(time.perf_counter() - began)
            return made
        return self.regions.boundary.make(self._make, self._after_a_fault, args, kwargs)

    def _count_hooks(self) -> None:
        """Of the module and its parts."""
        members = (member for part in self._model.modules() for member in vars(part).items())
        held = (held for name, held in members if name.endswith("_hooks") and isinstance(held, dict))
        self._hooks.append(sum(map(len, held)))

    def _make(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self._called:
            self._called = True
            quietly(lambda: self.sizes.look(args, kwargs))
            return self.first(lambda: done(self._plainly(args, kwargs)))
        regions = self.regions
        # the second step shows how often it is called before a backward
        if self._in_first_step:
            return done(self._plainly(args, kwargs))
        around = self._gathering() if self._gathers else _ALONE
        if around is None or regions.refused or regions.closed or is_transformed() or not self.may_replay():
            if regions.sharding is not None:
                regions.sharding.runs_plainly(anew=True)
            return done(self._plainly(args, kwargs))
        self.calls += 1
        regions.end, compiled = None, self._compiled
        compiled.patience, compiled.around = self.patience, self.sizes.dynamic
        with around:
            return done(compiled(self._model, args, kwargs))

    def _gathering(self) -> AbstractContextManager[None] | None:
        """Around a call whose parameters are gathered within it, None where it has no graph."""
        regions = self.regions
        if self._sharding is None:
            with suppress(ValueError):
                self._sharding = Sharding(self._model, held_weakly(regions.runs_plainly))
                regions.sharding = weakref.proxy(self._sharding)
        sharding = self._sharding
        if sharding is None or regions.refused or not sharding.usual:
            regions.tell(NOT_WHOLE)
            self.remove()
            return None
        if sharding.idle:
            return sharding.standing_in()
        regions.tell(GATHERED)
        return None

    def _plainly(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.regions.plain += 1
        executes(FORWARD)
        return call_impl(self._model, *args, **kwargs)

    def _after_a_fault(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """As `_plainly`: other processes do not wait for a vote of this one."""
        if self.regions.votes is not None:
            self.regions.votes.leave(APART)
        return self._plainly(args, kwargs)

    def step_ended(self, graded: int) -> None:
        """A step has ended, in which some module was called so often with gradients. Hot path."""
        self.steady = self.steady + 1 if 0 < self.without <= _OFTEN * graded else 0
        self.calls = self.graded = self.without = 0
        self._in_first_step &= not self._called

    def begin(self) -> None:
        """The calls that ran as they are were enough: later ones may have graphs, unless Dynamo would trace each."""
        self.held, self.paused = 0, False
        hooks, self._hooks = self._hooks, []
        if len(set(hooks)) > 3 and hooks == sorted(hooks):  # Dynamo looks at how many there are
            why = f"each step finds more hooks in {self.name} than the one before: Dynamo would trace it anew"
            self.regions.tell(Problem(why, fix="Register hooks once, or remove them after the step"))
            self.remove()

    @property
    def name(self) -> str:
        """Of the module's class."""
        return type(self._model).__name__

    def remove(self) -> None:
        """Release all graphs, and give the module back as it was."""
        super().remove()
        if call_of(self._model) is self:
            set_call_of(self._model, None)
