"""A step whose function makes backwards and updates itself, as the pieces that graphs of whole steps are made of."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from pygraph_train.gradients.old import OldGradients
from pygraph_train.optimizers.scaling import Scaling
from pygraph_train.optimizers.several import OptimizerSet, SeveralPreparations
from pygraph_train.parallel.replication import Alone, Replication
from pygraph_train.patches import standing_in
from pygraph_train.problems import NotLegal, Problem
from pygraph_train.step.plan import PositionInAccumulation
from pygraph_train.torch_private.cuda import told_whether_capturing
from pygraph_train.tracing.obstacles import gradients_asked, gradients_read
from pygraph_train.tracing.opened_trace import OpenedTrace
from pygraph_train.tracing.reasons import of_step_by_hand
from pygraph_train.tracing.signature import Dims
from pygraph_train.tracing.trace import Trace

__all__ = ["ProgramByHand", "called_parts"]


class ProgramByHand:
    """What every `StepProgram` shares whose function makes the whole step.

    Dynamo looks at the function while stand-ins take the place of its backwards, of its optimizers, and of what
    clips. If the function is one graph then, and writes nothing to Python, each replay does what the function would
    do. The function itself is captured as the user wrote it.

    Args:
        model: holds all modules of the step.
        optimizers: all that the function steps.
        device: where the step's tensors live.
        units: finds the modules that the function may call.
    """

    recorder: str | tuple[str, ...] | None
    empties_first: bool = False
    clips: bool = False
    empties_gradients: bool = False
    by_hand: bool = True

    def __init__(
        self,
        model: nn.Module,
        optimizers: OptimizerSet,
        device: torch.device,
        units: Callable[[nn.Module], Iterable[nn.Module]],
    ) -> None:
        self.model = model
        self.optimizer: Any = optimizers
        held = chain.from_iterable(group["params"] for group in optimizers.param_groups)
        self.parameters: list[Tensor] = list({id(p): p for p in chain(held, model.parameters())}.values())
        self.device = device
        self.scaling = Scaling(None, None)
        self._alone = _ByHand(model, units)
        self.replication: Replication = self._alone
        self._preparation: SeveralPreparations | None = None
        self._trains = False  # the present run of the function is the training's, and no capture
        self._old: OldGradients | None = None
        self._dropped: WeakKeyDictionary[Trace, set[Tensor]] = WeakKeyDictionary()
        self._present = PositionInAccumulation()

    # -- what a kind of program has of its own --------------------------------------------------------

    def seen_by_dynamo(self) -> AbstractContextManager[None]:
        """What Dynamo, and the guards of its trace, meet in the place of backwards and optimizers."""
        raise NotImplementedError

    def readers(self, old: OldGradients) -> Iterable[tuple[Any, str, Any]]:
        """What tells `old` how the function uses gradients, as `standing_in` takes it."""
        raise NotImplementedError

    # -- for each kind --------------------------------------------------------------------------------

    def position(self) -> PositionInAccumulation:
        """A step is captured once for each set of gradients that it has begun with. Hot path."""
        present = _Present(map(_has_gradient, self.parameters))
        if self._present.constants != (present,):
            self._present = PositionInAccumulation(constants=(present,))
        return self._present

    def new_trace(self, dynamic: Dims | None = None) -> OpenedTrace:
        """A trace of the function with stand-ins for everything that Dynamo cannot follow."""
        return _WatchedTrace(self)

    @contextmanager
    def training(self) -> Iterator[None]:
        """Around a run of the function that is the training's, and no capture."""
        trained = [p.requires_grad for p in self.model.parameters()]
        self._trains = True
        try:
            yield
        finally:
            self._trains = False
        if trained != [p.requires_grad for p in self.model.parameters()]:
            self._alone.changed = Problem(
                "the step ends with other parameters that require gradients than it began with",
                fix="Switch the same parameters back at the end of the step (untoggle_optimizer in Lightning)",
            )

    @contextmanager
    def attempting(self) -> Iterator[None]:
        """Around a run of the function that is not the training's: where it ends early, flags are as they were."""
        trained = [(p, p.requires_grad) for p in self.model.parameters()]
        modes = [(module, module.training) for module in self.model.modules()]
        try:
            yield
        except BaseException:
            for p, flag in trained:
                p.requires_grad_(flag)
            for module, flag in modes:
                module.training = flag
            raise

    @contextmanager
    def observing(self, trace: Trace) -> Iterator[None]:
        """Around a run of a traced function: which gradients of earlier steps does it drop unread?"""
        if not self._trains:
            yield
            return
        old = self._old = OldGradients(self.parameters)
        try:
            with standing_in(self.readers(old)):
                yield
        finally:
            self._old = None
        known = self._dropped.setdefault(trace, set())
        known -= old.used
        known |= old.dropped()

    def emptied(self, trace: Trace, owned: list[Tensor]) -> list[Tensor]:
        return list(self._dropped.get(trace, ()))

    @contextmanager
    def updating(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Around the step of one optimizer: it uses the kernels that graphs hold."""
        if self._old is not None:
            self._old.read_of(optimizer)
        preparation = self._preparation
        kernels = nullcontext() if preparation is None else preparation.resumed(optimizer)
        with kernels, told_whether_capturing():
            yield

    def as_outside(self) -> AbstractContextManager[None]:
        """Learning rates that the function reads are the user's numbers, not tensors of ours."""
        return nullcontext() if self._preparation is None else self._preparation.suspended()

    def backward(self, loss: Tensor) -> None:
        """`forward` has made it."""

    def transform_gradients(self, *, in_kernels: bool = True) -> None:
        """`forward` has clipped."""

    def update(self) -> None:
        """`forward` has made it."""

    # -- what it means for graphs -------------------------------------------------------------------

    def exchanges(self) -> bool:
        return False

    def why_update_stays_outside(self, preparation: Any) -> str | None:
        self._preparation = preparation
        return None

    def acts_before_backward(self) -> Problem | None:
        return None

    def acts_before_update(self) -> str | None:
        return None

    def extra_state(self) -> Iterable[Tensor]:
        yield from self.model.parameters()
        if self._preparation is not None:
            yield from self._preparation.state_tensors()

    def left_behind(self) -> list[Tensor]:
        buffers = [b for b in self.model.buffers() if b.device.type == self.device.type]
        return [*self.model.parameters(), *buffers]


class _WatchedTrace(OpenedTrace):
    """A trace of a step, whose runs in Python are watched.

    Args:
        program: of the step.
    """

    def __init__(self, program: ProgramByHand) -> None:
        super().__init__(
            program.device,
            lambda: nullcontext(frozenset()),
            recorder=program.recorder,
            asked_in=program.seen_by_dynamo,
        )
        self._program = weakref.proxy(program)  # which knows this trace

    def look(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """See `OpenedTrace.look`."""
        try:
            super().look(fn, args, kwargs)
        except NotLegal as error:
            raise NotLegal(of_step_by_hand(error.problem)) from None

    def _reads_gradients(self, graph: torch.fx.GraphModule) -> Problem | None:
        read = gradients_read(graph, self._fn, by_hand=True)
        return next(chain(read, gradients_asked(self._fn)), None)

    def run(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run `fn(*args, **kwargs)` in Python, as it runs in a capture."""
        with self._program.observing(self):
            return super().run(fn, args, kwargs)


class _ByHand(Alone):
    """One process, whose step is looked at in Python."""

    def __init__(self, model: nn.Module, units: Callable[[nn.Module], Iterable[nn.Module]]) -> None:
        self._model = model
        self._units = units
        self.changed: Problem | None = None

    def not_called_once(self) -> Problem | None:
        """What a step has left in Python that a replay would not."""
        return self.changed

    def units(self) -> list[nn.Module]:
        """The modules that the function calls are compiled one by one."""
        return list(self._units(self._model))


def called_parts(module: nn.Module, base: type[nn.Module] = nn.Module) -> Iterator[nn.Module]:
    """What a step may call: the module, where it has a forward, and its parts. Nested calls are one region.

    Args:
        module: holds all modules of the step.
        base: a class that has no forward of its own to call.
    """
    if type(module).forward is not base.forward:
        yield module
    yield from _parts(module)


def _parts(module: nn.Module) -> Iterator[nn.Module]:
    """The modules directly inside of one that hold parameters, and those inside of lists and dicts of modules."""
    for child in module.children():
        if type(child).forward is nn.Module.forward:  # nobody calls a list or a dict
            yield from _parts(child)
        elif any(True for _ in child.parameters()):
            yield child


class _Present(bytes):
    """A 1 for each parameter that has a gradient, and a 0 for each other one."""

    def __repr__(self) -> str:
        return f"{sum(self)} of {len(self)} parameters have gradients when the step begins"


def _has_gradient(parameter: Tensor) -> bool:
    return parameter.grad is not None
