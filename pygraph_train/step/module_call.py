"""Calls of a module in a loop that the user wrote: its graphs are replayed, forward and backward each in its time."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from pygraph_train.boundary import FORWARD, Boundary, done, executes, quietly
from pygraph_train.config import PyGraphConfig
from pygraph_train.core.memory import Lent
from pygraph_train.core.region import PhaseRegions
from pygraph_train.graphs.engine import Engine
from pygraph_train.parallel.votes import APART
from pygraph_train.problems import Problem
from pygraph_train.step.outside import around_the_step, uninitialized
from pygraph_train.step.sizes import Sizes
from pygraph_train.torch_private.phases import is_transformed
from pygraph_train.torch_private.stock_dynamo import (
    CompiledModule,
    call_impl,
    call_of,
    compiled_by_user,
    set_call_of,
    traces_of_others,
)

_STEADY = 8
"""Steps in a row that call a module without gradients, after which such a call is a part of the step: a teacher's, or
that of a reference. An evaluation lies between two steps.
"""

_OFTEN = 2
"""Times as many calls as with gradients: more of them generate a text, word by word."""

HOPELESS = 3
"""Steps in a row in which no part may have a graph, after which forward and backward run as they are written: the
graphs that Dynamo makes are slower.
"""

COMPILED_PART = Problem(
    "a part of the model is compiled by torch.compile, and graphs would hold other kernels than it has",
    fix="Pass the model without torch.compile, and compile=True to pygraph-train: graphs hold Inductor's kernels then",
)


def compiled_part(module: nn.Module) -> Problem | None:
    """Why a module that the user compiled, or a part of it, has no graphs."""
    if any(compiled_by_user(m) and not isinstance(call_of(m), ModuleCall) for m in module.modules()):
        return COMPILED_PART
    return None


class ModuleCall:
    """Calls a module through `torch.compile` where that is a part of each training step, and as it is otherwise.

    The module stays the object that the user made, and holds this object: both go when nobody else needs the module.

    Args:
        module: called like this from now on, until `remove`.
        engine: where graphs are made.
        config: options.
        boundary: of the loop.
        tell: called with each reason against a graph.
        delivers: see `PhaseRegions`.
        lent: see `PhaseRegions`. Its hooks, which gather the parameters, stay outside of graphs.
        even: see `Sizes`.
        **compile_options: further arguments of `torch.compile`.

    Attributes:
        regions: the graphs.
        within: whether hooks stay outside of them, which gather parameters.
        paused: whether calls run the module as it is for now.
        calls: how often it was called through `torch.compile`; the loop sets it back.
        held: so many further calls with gradients run it as it is.
        graded, without: how often it was called with gradients in the present step, and without.
        steady: how many steps in a row have called it without, and not too often.
        spent: seconds of the host in each of them; the loop empties it.
        hopeless: steps in a row in which no part of it may have a graph.
    """

    def __init__(
        self,
        module: nn.Module,
        engine: Engine,
        config: PyGraphConfig,
        boundary: Boundary,
        tell: Callable[[Problem], object],
        *,
        delivers: bool = True,
        lent: Lent | None = None,
        even: Callable[[], bool] = lambda: False,
        **compile_options: Any,
    ) -> None:
        self._module, self.within = module, lent is not None
        self._call = type(module).forward if self.within else call_impl
        self._boundary, self._tell = boundary, tell
        known = weakref.ref(module)  # graphs are held by Dynamo, and must not hold the module
        given = engine, config, lambda: tensors_of(known()), tell, boundary
        self.regions = PhaseRegions(*given, delivers=delivers, lent=lent, leads=True, inference=True)
        self._compiled = CompiledModule(self.regions, within=self.within, **compile_options)
        self._sizes = Sizes(fixed=self.regions.compiles, even=even)
        self._compiled.around = self._sizes.dynamic
        self._called = self._initialized = self.paused = False
        self.calls = self.held = self.hopeless = 0
        self.graded = self.without = self.steady = 0
        self.spent: list[float] = []
        self._hooks: list[int] = []  # how many there were in each call that ran as it is
        set_call_of(module, self, within=self.within)
        weakref.finalize(self, self.regions.let_go).atexit = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module. Hot path."""
        if torch.is_grad_enabled():
            self.graded += 1
        else:
            self.without += 1
            if self.steady < _STEADY or self.held or self.within or torch.is_inference_mode_enabled():
                return self._call(self._module, *args, **kwargs)
        if self.paused or torch.compiler.is_compiling():
            return self._call(self._module, *args, **kwargs)
        if self.held:
            self.held -= 1
            quietly(lambda: self._sizes.look(args, kwargs), self._count_hooks)
            began = time.perf_counter()
            made = self._call(self._module, *args, **kwargs)
            self.spent.append(time.perf_counter() - began)
            return made
        return self._boundary.make(self._make, self._after_a_fault, args, kwargs)

    def _count_hooks(self) -> None:
        """Of the module and its parts."""
        members = (member for part in self._module.modules() for member in vars(part).items())
        held = (held for name, held in members if name.endswith("_hooks") and isinstance(held, dict))
        self._hooks.append(sum(map(len, held)))

    def _first(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The first call, in which caches of the user's code fill, and parts that the user compiled are traced."""
        before, self._called = traces_of_others(), True
        quietly(lambda: self._sizes.look(args, kwargs))
        made = done(self._plainly(args, kwargs))
        if traces_of_others() != before:
            self._tell(COMPILED_PART)
            self.remove()
        return made

    def _make(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self._called:
            return self._first(args, kwargs)
        if self.regions.refused or not self._may_replay():
            return done(self._plainly(args, kwargs))
        self.calls += 1
        self.regions.end = None
        return done(self._compiled(self._module, args, kwargs))

    def _may_replay(self) -> bool:
        if not self._initialized:
            self._initialized = uninitialized(self._module) is None
        if not self._initialized or is_transformed():
            return False
        problem = next(around_the_step(), None)
        if problem is not None:
            self._tell(problem)
        return problem is None

    def _plainly(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.regions.plain += 1
        executes(FORWARD)
        return self._call(self._module, *args, **kwargs)

    def _after_a_fault(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """As `_plainly`: other processes do not wait for a vote of this one."""
        if self.regions.votes is not None:
            self.regions.votes.leave(APART)
        return self._plainly(args, kwargs)

    def step_ended(self, graded: int) -> None:
        """A step has ended, in which some module was called so often with gradients. Hot path."""
        self.steady = self.steady + 1 if 0 < self.without <= _OFTEN * graded else 0
        self.graded = self.without = 0

    def begin(self) -> None:
        """The calls that ran as they are were enough: later ones may have graphs, unless Dynamo would trace each."""
        self.held, self.paused = 0, False
        hooks, self._hooks = self._hooks, []
        if len(set(hooks)) > 3 and hooks == sorted(hooks):  # Dynamo looks at how many there are
            why = f"each step finds more hooks in {self.name} than the one before: Dynamo would trace it anew"
            self._tell(Problem(why, fix="Register hooks once, or remove them after the step"))
            self.remove()

    def settle(self, patience: float) -> None:
        """See `CompiledFunction.patience`. Hot path."""
        self._compiled.patience = patience

    @property
    def name(self) -> str:
        """Of the module's class."""
        return type(self._module).__name__

    def remove(self) -> None:
        """Release all graphs, and give the module back as it was."""
        quietly(self.regions.close)
        if call_of(self._module, within=self.within) is self:
            set_call_of(self._module, None, within=self.within)


def tensors_of(module: nn.Module | None) -> list[Tensor]:
    """The parameters and buffers of a module, none of one that is gone."""
    return [] if module is None else [*module.parameters(), *module.buffers()]
