"""One real run of a step of an Accelerate loop: what it calls, and whether these calls may be put off."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from pygraph_train.integrations.accelerate.calls import (
    CLIPS,
    Event,
    autocast_around,
    listed,
    norm_limits,
    value_limits,
)
from pygraph_train.patches import standing_in
from pygraph_train.problems import Problem, user_location
from pygraph_train.torch_private.autograd import leaves_of
from pygraph_train.torch_private.dispatch import TorchDispatchMode
from pygraph_train.torch_private.memory import storage_key
from pygraph_train.torch_private.sharding import (
    gathered_parameters,
    local_tensor,
    sharded_groups,
    sharded_states,
)
from pygraph_train.tracing.signature import map_leaves

__all__ = ["Observation"]


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
        self._trains_others = False
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
        return self.problem_of_calls() or self.problem_of_result(result)

    @property
    def may_be_by_hand(self) -> bool:
        """Whether nothing has to be put off, but for schedulers at the end: a graph may hold the step as it is."""
        names = [event.name for event in self.events]
        schedules = names.count("scheduler.step")
        last = all(name == "scheduler.step" for name in names[len(names) - schedules :])
        updates = "backward" in names and "step" in names
        others = self._trains_others or (self._mode is not None and self._mode.others_step)
        return updates and last and not self.accumulated and not others

    def problem_of_calls(self) -> Problem | None:
        """Why the calls cannot be put off."""
        names = [event.name for event in self.events]
        steps = [event.index for event in self.events if event.name == "step"]
        backwards = names.count("backward")
        if backwards == 0:
            return Problem(
                "the step never calls accelerator.backward, so there is nothing to graph as a whole",
                fix="Call accelerator.backward(loss), by this name, inside the function given to graphed_step: calls "
                "of a method that was kept before (backward = accelerator.backward) are not seen",
            )
        if backwards > 1:
            return Problem(
                f"the step calls accelerator.backward {backwards} times, and a graph holds one backward",
                fix="Make a graphed step for each loss and its optimizer",
            )
        if len(steps) > 1:
            what = "optimizer.step twice" if len(steps) == 2 else f"optimizer.step {len(steps)} times"
            return Problem(
                f"the step calls {what}, and a graph holds one update",
                fix="Make a graphed step for each optimizer",
            )
        start = names.index("backward")
        if any(name not in ("zero_grad",) for name in names[:start]):
            return Problem(f"the step calls {names[0]} before backward")
        after = [name for name in names[start + 1 :] if name in CLIPS or name == "step"]
        if "step" in after[:-1] or (after and "step" not in after):
            return Problem("the step clips gradients, but no optimizer.step follows")
        if "zero_grad" in names[start : names.index("step")] if steps else False:
            return Problem("the step empties gradients between backward and optimizer.step")
        problem = self._problem
        if problem is None and self._mode is not None:
            problem = self._mode.problem
        return problem

    def problem_of_result(self, result: Any) -> Problem | None:
        """Why the step cannot return what it returns."""
        problem: Problem | None = None
        leaves: list[Any] = []
        try:
            map_leaves(leaves.append, result)
        except TypeError:
            return Problem(f"the step returns a {type(result).__name__}")
        for leaf in leaves:
            if isinstance(leaf, (int, float)) and not isinstance(leaf, bool):
                problem = problem or Problem(
                    "the step returns a Python number, and the number may depend on calls that the graph makes later",
                    fix="Return tensors, and read numbers such as the learning rate outside of the step",
                )
            elif isinstance(leaf, Tensor) and self._is_guarded(leaf):
                problem = problem or Problem(
                    "the step returns gradients, parameters or a part of them, and the graph changes these"
                )
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
                self._problem = Problem(
                    "zero_grad(set_to_none=False) is called before backward and keeps gradients alive"
                )
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
        for model in accelerator._models:  # hooks gather what they hold
            known |= {id(p) for p in gathered_parameters(sharded_groups(sharded_states(model)))}
        leaves = leaves_of(loss) if isinstance(loss, Tensor) else []
        unknown = [leaf for leaf in leaves if id(leaf) not in known]
        if unknown:
            self._trains_others = True
            self._problem = self._problem or Problem(
                f"backward writes gradients of {len(unknown)} tensors that this Accelerator did not prepare",
                fix="Prepare the trained model and its optimizer: model, optimizer = accelerator.prepare(model, "
                "optimizer)",
            )

    def _note_clip(self, kind: str, parameters: Any, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        parameters = listed(parameters)
        limits = norm_limits(*args, **kwargs) if kind == "clip_grad_norm_" else value_limits(*args, **kwargs)
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
        self.others_step = False
        self._storages: set[int] = set()
        self._kept: list[Tensor] = []  # so that no other storage gets the same key

    def guard(self, tensor: Tensor) -> None:
        tensor = local_tensor(tensor)
        self._kept.append(tensor)
        self._storages.add(storage_key(tensor.untyped_storage()))

    def guards(self, tensor: Tensor) -> bool:
        return storage_key(local_tensor(tensor).untyped_storage()) in self._storages

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        looks = self.looking and self.problem is None
        if looks and any(map(self.guards, _tensors((args, *(kwargs or {}).values())))):
            self.problem, self.others_step = _of_use(func)
        return func(*args, **(kwargs or {}))


def _of_use(func: Any) -> tuple[Problem, bool]:
    """Something uses gradients or parameters after backward: an optimizer of the user's (True), or other code."""
    for frame, _ in traceback.walk_stack(None):
        owner = frame.f_locals.get("self") if frame.f_code.co_name == "step" else None
        if isinstance(owner, torch.optim.Optimizer):
            problem = Problem(
                f"the step calls the optimizer {type(owner).__name__}, which this Accelerator did not prepare, so a "
                "graph cannot hold its update",
                user_location(),
                "Prepare the optimizer with its model: model, optimizer = accelerator.prepare(model, optimizer)",
            )
            return problem, True
    problem = Problem(
        f"{func} uses gradients or parameters after backward, and a graph would change them before this call",
        user_location(),
        "Use them outside of the step",
    )
    return problem, False


def _tensors(arguments: Iterable[Any]) -> Iterator[Tensor]:
    for argument in arguments:
        if isinstance(argument, Tensor):
            yield argument
        elif isinstance(argument, (list, tuple)):
            yield from _tensors(argument)
