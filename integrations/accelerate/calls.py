"""The calls of an Accelerate loop that a graphed step puts off, and how it is found out that they may be.

See `accelerate_step`: while a step is traced, the calls that Accelerate knows only note that they were made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pygraph_train.integrations.patches import standing_in
from pygraph_train.problems import Problem
from pygraph_train.torch_private.autograd import leaves_of
from pygraph_train.torch_private.dispatch import TorchDispatchMode
from pygraph_train.torch_private.memory import storage_key
from pygraph_train.tracing.signature import map_leaves
from pygraph_train.tracing.trace import guard_constants

__all__ = [
    "CLIPS",
    "Event",
    "Observation",
    "Script",
    "after_backward",
    "before_backward",
    "clips",
    "in_words",
    "no_context",
    "standing_in",
    "stubs",
    "under_autocast",
]

CLIPS = ("clip_grad_norm_", "clip_grad_value_")


@dataclass(frozen=True)
class Event:
    """One call that was put off.

    Attributes:
        name: of the method.
        index: of the optimizer or scheduler among the Accelerator's.
        arguments: Python values, without the loss and the parameters; of a backward what autocast casts to around it.
    """

    name: str
    index: int = 0
    arguments: tuple[Any, ...] = ()

    def __str__(self) -> str:
        if self.name == "backward":
            return self.name + "".join(f" under autocast to {dtype}" for dtype in self.arguments)
        return self.name


Script = tuple[Event, ...]


def before_backward(script: Script) -> Script:
    return script[: [event.name for event in script].index("backward")]


def after_backward(script: Script) -> Script:
    return script[[event.name for event in script].index("backward") + 1 :]


def clips(script: Script) -> Script:
    return tuple(event for event in script if event.name in CLIPS)


def in_words(script: Script) -> str:
    return ", ".join(map(str, script)) or "nothing"


def autocast_around(device: torch.device) -> tuple[Any, ...]:
    """What autocast casts to on a device here, nothing where it is off."""
    return (torch.get_autocast_dtype(device.type),) if torch.is_autocast_enabled(device.type) else ()


def under_autocast(device: torch.device, dtypes: tuple[Any, ...]) -> AbstractContextManager[Any]:
    """The autocast in which `autocast_around` gave `dtypes`."""
    if autocast_around(device) == dtypes:
        return nullcontext()
    return torch.autocast(device.type, dtypes[0] if dtypes else None, enabled=bool(dtypes))


class Observation:
    """One real run of a step, and what it called in which order.

    Args:
        accelerator: whose calls are looked at.
        hoisted: its micro-batches are counted before the step.
    """

    def __init__(self, accelerator: Any, *, hoisted: bool) -> None:
        self.events: list[Event] = []
        self.accumulated = False
        self._accelerator = accelerator
        self._hoisted = hoisted
        self._problem: Problem | None = None
        self._norms: list[Tensor] = []
        self._mode: _AfterBackward | None = None

    @contextmanager
    def observing(self) -> Iterator[None]:
        """Note the calls made inside, and what is computed after backward."""
        accelerator = self._accelerator
        objects: list[tuple[Any, str, str, int]] = []
        objects += [(accelerator, name, name, 0) for name in ("backward", *CLIPS)]
        for index, optimizer in enumerate(accelerator._optimizers):
            objects += [(optimizer, name, name, index) for name in ("step", "zero_grad")]
        objects += [(s, "step", "scheduler.step", i) for i, s in enumerate(accelerator._schedulers)]
        calls = [
            (owner, name, self._noting(getattr(owner, name), kind, index))
            for owner, name, kind, index in objects
        ]
        calls.append((accelerator, "accumulate", self._accumulate(accelerator.accumulate)))
        with standing_in(calls):
            try:
                yield
            finally:
                if self._mode is not None:
                    self._mode.__exit__(None, None, None)

    def problem_with(self, result: Any) -> Problem | None:
        """Why the step cannot be taken apart, None when it can."""
        names = [event.name for event in self.events]
        steps = [event.index for event in self.events if event.name == "step"]
        backwards = names.count("backward")
        if backwards == 0:
            return Problem(
                "the step never calls accelerator.backward, so there is nothing to graph as a whole",
                fix="Call accelerator.backward(loss) inside the function given to graphed_step",
            )
        if backwards > 1:
            return Problem(f"the step calls accelerator.backward {backwards} times; a graph holds one")
        if len(steps) > 1:
            what = "optimizer.step twice" if len(steps) == 2 else f"optimizer.step {len(steps)} times"
            return Problem(
                f"the step calls {what}; a graph holds one", fix="Make a graphed step for each optimizer"
            )
        start = names.index("backward")
        if any(name not in ("zero_grad",) for name in names[:start]):
            return Problem(f"the step calls {names[0]} before backward")
        after = [name for name in names[start + 1 :] if name in CLIPS or name == "step"]
        if "step" in after[:-1] or (after and "step" not in after):
            return Problem("the step clips gradients where no optimizer.step follows")
        if "zero_grad" in names[start : names.index("step")] if steps else False:
            return Problem("the step empties gradients between backward and optimizer.step")
        problem = self._problem
        if problem is None and self._mode is not None:
            problem = self._mode.problem
        leaves: list[Any] = []
        try:
            map_leaves(leaves.append, result)
        except TypeError:
            return problem or Problem(f"the step returns a {type(result).__name__}")
        for leaf in leaves:
            if isinstance(leaf, (int, float)) and not isinstance(leaf, bool):
                problem = problem or Problem(
                    "the step returns a Python number, which may depend on calls that are put off",
                    fix="Return tensors, and read learning rates and the like outside of the step",
                )
            elif isinstance(leaf, Tensor) and self._is_guarded(leaf):
                problem = problem or Problem("the step returns gradients, parameters or a part of them")
        return problem

    def _is_guarded(self, leaf: Tensor) -> bool:
        if self._mode is None or any(leaf is norm for norm in self._norms):
            return False
        return self._mode.guards(leaf)

    def _noting(self, call: Callable[..., Any], kind: str, index: int) -> Callable[..., Any]:
        def noted(*args: Any, **kwargs: Any) -> Any:
            mode = self._mode
            if mode is not None:
                mode.looking = False
            try:
                if kind in CLIPS:
                    args = self._note_clip(kind, *args, **kwargs)
                    kwargs = {}
                else:
                    self._note(kind, index, args, kwargs)
                if kind == "backward":
                    self._note_leaves(*args)
                result = call(*args, **kwargs)
            finally:
                if mode is not None:
                    mode.looking = True
            if kind == "backward":
                self._look_from_now_on()
            elif isinstance(result, Tensor) and self._mode is not None:
                self._norms.append(result)
                self._mode.guard(result)
            return result

        return noted

    def _note(self, kind: str, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        constants: tuple[Any, ...] = ()
        if kind == "zero_grad":
            constants = (*args, *kwargs.values())
            if constants == (False,) and not any(e.name == "backward" for e in self.events):
                self._problem = Problem("zero_grad(set_to_none=False) before backward keeps gradients alive")
        elif kind == "backward":
            constants = autocast_around(self._accelerator.device)
            if kwargs or len(args) > 1:
                self._problem = Problem(f"the step calls {kind} with further arguments")
        elif kwargs or args:
            self._problem = Problem(f"the step calls {kind} with further arguments")
        self.events.append(Event(kind, index, constants))

    def _note_leaves(self, loss: Any, *_: Any) -> None:
        """Refuse a step that trains tensors that were not prepared: calls of their optimizer are not put off."""
        accelerator = self._accelerator
        known = {id(p) for model in accelerator._models for p in model.parameters()}
        known |= {id(p) for o in accelerator._optimizers for g in o.param_groups for p in g["params"]}
        leaves = leaves_of(loss) if isinstance(loss, Tensor) else []
        unknown = [leaf for leaf in leaves if id(leaf) not in known]
        if unknown:
            self._problem = self._problem or Problem(
                f"backward writes gradients of {len(unknown)} tensors that this Accelerator did not prepare",
                fix="Prepare what is trained: model, optimizer = accelerator.prepare(model, optimizer)",
            )

    def _note_clip(self, kind: str, parameters: Any, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        parameters = _listed(parameters)
        limits = (
            _norm_limits(*args, **kwargs) if kind == "clip_grad_norm_" else _value_limits(*args, **kwargs)
        )
        self.events.append(Event(kind, 0, limits))
        clipped = {id(p) for p in parameters if p.requires_grad}
        for optimizer in self._accelerator._optimizers:
            if clipped == {id(p) for g in optimizer.param_groups for p in g["params"] if p.requires_grad}:
                return (parameters, *limits)
        self._problem = Problem("the step clips other gradients than those of one optimizer's parameters")
        return (parameters, *limits)

    def _accumulate(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def accumulate(*models: nn.Module) -> AbstractContextManager[Any]:
            self.accumulated = True
            return nullcontext() if self._hoisted else call(*models)

        return accumulate

    def _look_from_now_on(self) -> None:
        if self._mode is None:
            self._mode = _AfterBackward()
            for owner in (*self._accelerator._models, *self._accelerator._optimizers):
                groups = getattr(owner, "param_groups", None)
                parameters = (
                    owner.parameters() if groups is None else [p for g in groups for p in g["params"]]
                )
                for p in parameters:
                    self._mode.guard(p)
                    if p.grad is not None:
                        self._mode.guard(p.grad)
            self._mode.__enter__()


class _AfterBackward(TorchDispatchMode):
    """Looks whether operations use gradients or parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.looking = True
        self.problem: Problem | None = None
        self._storages: set[int] = set()
        self._kept: list[Tensor] = []  # so that no other storage gets the same key

    def guard(self, tensor: Tensor) -> None:
        self._kept.append(tensor)
        self._storages.add(storage_key(tensor.untyped_storage()))

    def guards(self, tensor: Tensor) -> bool:
        return storage_key(tensor.untyped_storage()) in self._storages

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        looks = self.looking and self.problem is None
        if looks and any(map(self.guards, _tensors((args, *(kwargs or {}).values())))):
            self.problem = Problem(
                f"{func} uses gradients or parameters after backward, which a graph changes all at once",
                fix="Do it outside of the step",
            )
        return func(*args, **(kwargs or {}))


class _Stub:
    """Stands in for one method while the step is traced: notes the call and does nothing.

    It notes the method's name, the owner's index, Python values, a tensor that is passed or returned (the loss,
    the norm), and the parameters that are to be clipped.
    """

    def __init__(self, put_off: list[tuple[Any, ...]], name: str, index: int) -> None:
        self.put_off = put_off
        self.name = name
        self.index = index


class _BackwardStub(_Stub):
    def __init__(self, put_off: list[tuple[Any, ...]], name: str, device: torch.device) -> None:
        super().__init__(put_off, name, 0)
        self.device = device

    def __call__(self, loss: Tensor) -> None:
        self.put_off.append((self.name, self.index, autocast_around(self.device), loss, []))


class _ClipNormStub(_Stub):
    def __init__(self, put_off: list[tuple[Any, ...]], name: str, device: torch.device) -> None:
        super().__init__(put_off, name, 0)
        self.device = device

    def __call__(self, parameters: Any, *limits: Any, **named: Any) -> Tensor:
        arguments = _norm_limits(*limits, **named)
        guard_constants(arguments)
        norm = torch.zeros((), device=self.device)  # filled when gradients are clipped
        self.put_off.append((self.name, self.index, arguments, norm, _listed(parameters)))
        return norm


class _ClipValueStub(_Stub):
    def __call__(self, parameters: Any, *limits: Any, **named: Any) -> None:
        arguments = _value_limits(*limits, **named)
        guard_constants(arguments)
        self.put_off.append((self.name, self.index, arguments, None, _listed(parameters)))


class _CallStub(_Stub):
    def __call__(self, *args: Any, **kwargs: Any) -> None:
        arguments = (*args, *kwargs.values())
        guard_constants(arguments)
        self.put_off.append((self.name, self.index, arguments, None, []))


def _listed(parameters: Any) -> list[Tensor]:
    """What is clipped. Inside a trace this reads the model's tables, which are guarded from then on."""
    return [parameters] if isinstance(parameters, Tensor) else list(parameters)


def _norm_limits(max_norm: Any, norm_type: Any = 2) -> tuple[Any, ...]:
    return (max_norm, norm_type)


def _value_limits(clip_value: Any) -> tuple[Any, ...]:
    return (clip_value,)


def _tensors(arguments: Iterable[Any]) -> Iterator[Tensor]:
    for argument in arguments:
        if isinstance(argument, Tensor):
            yield argument
        elif isinstance(argument, (list, tuple)):
            yield from _tensors(argument)


def no_context(*models: nn.Module) -> AbstractContextManager[None]:
    return nullcontext()


def stubs(accelerator: Any, put_off: list[tuple[Any, ...]]) -> list[tuple[Any, str, Any]]:
    found: list[tuple[Any, str, Any]] = [
        (accelerator, "backward", _BackwardStub(put_off, "backward", accelerator.device)),
        (accelerator, "clip_grad_norm_", _ClipNormStub(put_off, "clip_grad_norm_", accelerator.device)),
        (accelerator, "clip_grad_value_", _ClipValueStub(put_off, "clip_grad_value_", 0)),
        (accelerator, "accumulate", no_context),
    ]
    for index, optimizer in enumerate(accelerator._optimizers):
        found += [(optimizer, name, _CallStub(put_off, name, index)) for name in ("step", "zero_grad")]
    for index, scheduler in enumerate(accelerator._schedulers):
        found.append((scheduler, "step", _CallStub(put_off, "scheduler.step", index)))
    return found
