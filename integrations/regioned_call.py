"""A module whose calls run as regions of the compile backend."""

from __future__ import annotations

import dataclasses
import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from pygraph_train.boundary import FORWARD, Boundary, done, executes
from pygraph_train.integrations.backend_for_calls import backend_for_calls, begins
from pygraph_train.integrations.first_calls import (
    FirstCalls,
    before_backward,
    every_tensor_of,
    in_words,
    watch_backward,
)
from pygraph_train.problems import NotLegal, Problem, PyGraphError
from pygraph_train.step.compile_wait import CompileWait, compiled_before
from pygraph_train.step.outside import what_watches
from pygraph_train.step.whole_loop import WholeLoop
from pygraph_train.torch_private.autocast import State, present
from pygraph_train.torch_private.autograd import is_transformed
from pygraph_train.torch_private.dynamo import (
    compiled_call,
    forget_compiled,
    set_compiled_call,
    uncompiled_call,
)
from pygraph_train.torch_private.hooks import global_module_hook_tables
from pygraph_train.torch_private.tracing import dynamo_region_config
from pygraph_train.tracing.dry_trace import DryTrace
from pygraph_train.tracing.reasons import compiler_failed
from pygraph_train.tracing.refusals import GLOBAL_HOOK

__all__ = ["RegionedCall"]

_LOOKS = 64
"""Calls of other shapes than those that were traced, after which it is enough."""


class RegionedCall:
    """Calls a module through the compile backend while gradients are wanted, and as it is otherwise.

    The module stays the object that the user made: same type, same parameter names, same attributes.
    Evaluation and generation run without compiled code, on whatever shapes they bring.

    Args:
        module: called like this from now on, until `remove`.
        options: of the backend.
        first: makes what watches the first calls, which run as they are: once for calls whose inputs require a
            gradient (a penalty on it often comes in few steps only), and once for the others; for each autocast.
        tell: called with the reason why calls run as they are later on.
        whole: compares the loop as a whole; gets the regions.
        keeps_code: see `TakenModule`.
        boundary: of the loop.
        wait: says when the module may be compiled. None: after its first calls.
        **compile_options: further arguments of `torch.compile`.

    The module holds this object, and while it stands aside, this object exists for as long as the module: both go when
    nobody else needs the module.

    Attributes:
        module: as given; there is none while it stands aside.
        keeps_code: as given.
        paused: whether calls run the module as it is for now.
        removed: whether the module was given back.
        leaving: whether the next call makes way for steps without graphs, and ends that calls run as regions.
        changing: whether `explain` has found that the module depends on Python state that changes with each call.
    """

    def __init__(
        self,
        module: nn.Module,
        options: dict[str, Any],
        first: Callable[[str], FirstCalls],
        tell: Callable[[Problem], None],
        whole: WholeLoop,
        *,
        keeps_code: bool,
        wait: CompileWait | None = None,
        boundary: Boundary,
        **compile_options: Any,
    ) -> None:
        self.module = module
        self._boundary = boundary
        self._wait = wait
        self.keeps_code = keeps_code
        self.leaving = False
        self._tell = tell
        self._whole = whole
        self._hooks_on_all = global_module_hook_tables()
        self._watch = first
        self._first: dict[tuple[bool, State], FirstCalls | None] = {}
        self._autocast: dict[tuple[bool, State], State | None] = {}  # around the backwards of these calls
        self.paused = False
        self.removed = False
        self._aside: weakref.finalize[Any, Any] | None = None  # holds this object until the module is gone
        self.changing = False
        # a code object of its own: Dynamo counts compiled variants per code object
        code = _call.__code__.replace(co_name="regions_of_module")
        function = types.FunctionType(code, _call.__globals__)
        weakref.finalize(self, forget_compiled, code).atexit = False
        self._holders: set[type] = set()  # of tensors in results whose gradients nobody has asked for
        regions = backend_for_calls(type(module).__name__, tell, self._late, self._holders, whole)
        self._compiled: Any = torch.compile(function, backend=regions, options=options, **compile_options)
        set_compiled_call(module, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.paused or not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return _call(self.module, args, kwargs)
        return self._boundary.make(self._make, self._as_it_is, args, kwargs)

    def _as_it_is(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return _plain(self.module, args, kwargs)

    def _make(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if is_transformed():
            return _plain(self.module, args, kwargs)
        if self.leaving:
            return self._leave(args, kwargs)
        kind = any(map(_requires_grad, args)) or any(map(_requires_grad, kwargs.values())), present()
        first = self._first_of(kind)
        if first is not None:
            if not first.over:
                result = first.run(lambda: done(_plain(self.module, args, kwargs)))
                first.look_at(result, None if self._wait is None else (args, kwargs))
                return result
            if self._wait is not None and self._wait.holds(self):
                return _plain(self.module, args, kwargs)
            self._wait = None  # whatever else has to wait
            compiled_before.add(self.module)
            self._first[kind], self._autocast[kind] = None, first.backward
            self._holders |= first.holders
        watcher = GLOBAL_HOOK if any(self._hooks_on_all) else what_watches()
        if watcher is not None:  # a compiled forward has other operations, and saves other tensors
            self._tell(_without_graphs(self.module, watcher))
            return _plain(self.module, args, kwargs)
        known = self._autocast[kind]
        around = kind[1] if known is None else known
        with dynamo_region_config(around) as failures:
            result = done(self._compiled(self.module, args, kwargs))
        watch_backward(result, around, type(self.module).__name__, self._late)
        if failures:
            reason = getattr(failures[0], "inner_exception", None)
            if isinstance(reason, PyGraphError):  # it was asked for
                raise reason
            why = reason.problem if isinstance(reason, NotLegal) else compiler_failed(failures[0])
            self._tell(_without_graphs(self.module, why))
        return result

    @property
    def called(self) -> bool:
        """Whether the module was called while gradients were wanted."""
        return bool(self._first)

    @property
    def waits(self) -> bool:
        """See `WaitingModule`."""
        return self._wait is not None and not self.removed and any(self._uncompiled())

    @property
    def operations(self) -> int:
        """See `WaitingModule`."""
        return sum(first.operations for first in self._uncompiled())

    def _uncompiled(self) -> list[FirstCalls]:
        """Calls whose watch is over."""
        return [first for first in self._first.values() if first is not None and first.over]

    def _first_of(self, kind: tuple[bool, State]) -> FirstCalls | None:
        """What watches the first calls of a kind, None where they are over."""
        if kind not in self._first:
            differentiated, around = kind
            name = type(self.module).__name__
            name += ", where its inputs require a gradient," if differentiated else ""
            name += f", under {in_words(around)}," if around else ""
            self._first[kind] = self._watch(name)
        return self._first[kind]

    def _late(self, problem: Problem) -> None:
        """What compiled code cannot do comes in mid-run: whoever goes on after that gets the module as it is."""
        self.remove()
        self._tell(problem)

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Inside, calls run the module as it is."""
        before, self.paused = self.paused, True
        try:
            yield
        finally:
            self.paused = before

    def explain(self, device: torch.device, tell: Callable[[Problem], None]) -> None:
        """Find out from the next calls why nothing of the module becomes a graph."""
        compiled = self._compiled
        trace = DryTrace(device)
        calls, traced_shapes = 0, list[torch.Size]()

        def looked(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            nonlocal calls, traced_shapes
            call = uncompiled_call(module)
            shapes = [x.shape for x in every_tensor_of((args, kwargs))]
            if not trace.traced and trace.refused is None:
                traced_shapes = shapes
                trace.look(call, *args, **kwargs)
                done = trace.refused is not None
            else:  # traced anew on every call, or nobody knows; other shapes have graphs of their own
                calls += 1
                done = shapes == traced_shapes or calls > _LOOKS
            if done:
                self._compiled = compiled
                alike = shapes == traced_shapes
                changed = trace.traced and alike and not trace.still_holds(call, *args, **kwargs)
                self.changing = changed
                why = trace.what_changed(call, *args, **kwargs) if changed else trace.refused
                tell(_without_graphs(module, why if alike else _OTHER_SHAPES))
            return compiled(module, args, kwargs)

        self._compiled = looked

    def stand_aside(self) -> None:
        """See `TakenModule`."""
        self.leaving = self._aside is None and compiled_call(self.module) is self

    def _leave(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make the first call of those that run without graphs."""
        module, whole, self.leaving = self.module, self._whole, False
        whole.make_way()
        if self.keeps_code:
            result = self(*args, **kwargs)
        else:
            set_compiled_call(module, None)
            self._aside = weakref.finalize(module, _nothing, self)
            self._aside.atexit = False
            del self.module
            result = done(_plain(module, args, kwargs))
        before_backward(result, whole.make_way_again)  # many a loop empties gradients just before it
        return result

    def come_back(self) -> None:
        """See `TakenModule`."""
        self.leaving = False
        if (module := self._module_again()) is not None and compiled_call(module) is None:
            set_compiled_call(module, self)

    def remove(self) -> None:
        """Give the module back as it was."""
        self.removed, self.leaving = True, False
        if self._module_again() is None and compiled_call(self.module) is self:
            set_compiled_call(self.module, None)

    def _module_again(self) -> nn.Module | None:
        """End that the module stands aside. Returns it, None where it does not stand aside."""
        aside, self._aside = self._aside, None
        if aside is None or (held := aside.detach()) is None:
            return None
        self.module = held[0]
        return self.module


def _without_graphs(module: nn.Module, why: Problem | None) -> Problem:
    """The row for a module that never came from a graph."""
    start = begins(type(module).__name__)
    recurrent = [type(part).__name__ for part in module.modules() if isinstance(part, nn.RNNBase)]
    if why is None and recurrent:
        return Problem(
            f"{start}: Dynamo makes no graph of recurrent networks ({recurrent[0]})",
            fix="Use a graphed step, which holds them",
        )
    if why is None:
        return Problem(f"{start}: Dynamo makes no graph of it, and gives no reason")
    reason = why.reason.replace("the step is not one graph", "Dynamo cannot trace it as one graph")
    reason = reason.replace("the step depends on", "it depends on")
    return Problem(f"{start}: {reason}", why.where, why.fix)


_OTHER_SHAPES = Problem(
    f"its inputs had other shapes in {_LOOKS} calls, and a graph is for shapes that come back",
    fix="Pad batches to a few sizes",
)


def _requires_grad(value: object) -> bool:
    """Whether an argument is, or holds, a tensor that requires a gradient."""
    if isinstance(value, torch.Tensor):
        return value.requires_grad
    if isinstance(value, (list, tuple)):
        return any(map(_requires_grad, value))
    if isinstance(value, Mapping):
        return any(map(_requires_grad, value.values()))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return any(_requires_grad(getattr(value, field.name, None)) for field in dataclasses.fields(value))
    return False


def _call(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return uncompiled_call(module)(*args, **kwargs)


def _plain(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call the module as it is. Dynamo traces `_call`, and so never this."""
    executes(FORWARD)
    return _call(module, args, kwargs)


def _nothing(call: RegionedCall) -> None:
    """The module that stood aside is gone, and nobody holds its call any longer."""
