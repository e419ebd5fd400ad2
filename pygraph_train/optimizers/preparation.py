"""Makes the `step()` of a `torch.optim` optimizer capturable, without the user seeing a difference.

A captured step bakes in every Python number, and no captured step may read the device from the host.
torch has kernels for that: `capturable=True` (step counts on the device) and the fused kernels (learning
rate and GradScaler's results read from device tensors). `OptimizerPreparation` turns them on for the
duration of `prepared()`, with the learning rate of each group in a device tensor, and puts everything
back. Schedulers, loggers and checkpoints only ever meet what a plain run would show them.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Optimizer, Rprop

from pygraph_train.boundary import UPDATE, surely, theirs
from pygraph_train.graphs.compact import move_together
from pygraph_train.graphs.engine import Engine
from pygraph_train.identity import identities
from pygraph_train.optimizers.kernels import (
    FUSED,
    FUSED_NUMBERS,
    NEEDS_FOREACH,
    GroupPlan,
    advice_on_numbers,
    fused_adagrad_on_cuda,
    host_state_keys,
    plan_group,
    supported_class,
    unsupported,
)
from pygraph_train.optimizers.numbers import LiveNumbers
from pygraph_train.optimizers.rates import LearningRate
from pygraph_train.optimizers.state import StateWatch
from pygraph_train.problems import Problem
from pygraph_train.torch_private.memory import addresses_of, is_alone, local_tensor, local_tensors
from pygraph_train.torch_private.optim import (
    attributes_of_fused_steps,
    count_optimizer_step,
    let_scaler_in,
    optimizer_step_hook_tables,
    optimizer_step_override,
)

_FLAGS = ("capturable", "fused", "foreach")
_MISSING: Any = object()


class _Groups(NamedTuple):
    """Parameter groups that have no `reason`.

    Attributes:
        baked: their hyperparameters, flags included.
        device: index of the device of all parameters, -1 for the CPU.
        changes: for each group, the flags that `prepared()` sets.
        fused: whether all of them have fused kernels then.
    """

    baked: tuple[Any, ...]
    device: int
    changes: list[dict[str, Any]]
    fused: bool


class OptimizerPreparation:
    """Prepares one optimizer for steps in CUDA graphs.

    Args:
        optimizer: used as it is; nothing about it changes outside of `prepared()`, except that state
            which capturable kernels need on the device moves there (`state_dict()` shows it on the CPU).
        emulated: the graphs are CPU tapes and everything lives on the CPU.

    Attributes:
        generation: grows when captures made before are for other state than that of the last `remember`.
        state: notices state that is missing.
    """

    generation = 0

    def __init__(self, optimizer: Optimizer, *, emulated: bool) -> None:
        self.state = StateWatch(optimizer)
        self._optimizer = optimizer
        self._emulated = emulated
        self._closed = self._numbers_stay = False
        self._sparse = False
        self._saved: list[tuple[dict[str, Any], str, Any]] = []
        self._groups: _Groups | None = None  # as the last `prepared()` found them
        self._moved: tuple[_Groups | None, bytes, list[Tensor]] | None = None
        self._remembered: list[Any] | None = None
        self._remembered_identities = b""
        self._present_addresses: Callable[[], list[int]] = list
        self._remembered_addresses: list[int] = []
        self._at_home: set[tuple[int, str]] = set()
        self._compacted: set[int] = set()
        self._param_sets: dict[bytes, tuple[int, tuple[Tensor, ...]]] = {}
        self._rates: list[LearningRate] = []
        self._handles: list[Any] = []
        self._class = supported_class(optimizer)
        if self._class is None:
            return  # not ours to touch: wrappers of other libraries may lack even the hook tables
        # Hyperparameters the class reads; schedulers keep their own keys (initial_lr, max_lr) beside them.
        self._keys = tuple(k for k in optimizer.defaults if k != "lr")
        self._step_hooks = optimizer_step_hook_tables(optimizer)
        # Prepended, so that hooks of others see what a plain run would show them.
        self._handles = [
            optimizer.register_state_dict_post_hook(self._plain_state_dict, prepend=True),
            optimizer.register_load_state_dict_post_hook(self._loaded, prepend=True),
        ]
        if self._class in FUSED:
            self._handles.append(
                optimizer.register_step_pre_hook(functools.partial(surely, self._before_step, UPDATE))
            )
        self._note_homes()
        self._make_rates()

    # Whether

    @property
    def reason(self) -> str | None:
        """Why the step cannot be captured, None when it can. Looks anew on each access (not a hot path)."""
        cls, optimizer = self._class, self._optimizer
        if cls is None:
            return unsupported(optimizer)
        if self._closed:
            return "the preparation was closed"
        name = type(optimizer).__name__
        override = optimizer_step_override(optimizer)
        if override is not None:
            return f"{name}.step was replaced by {_describe(override)}, which a replay would not run"
        for hook in chain.from_iterable(table.values() for table in self._step_hooks):
            of_ours = getattr(hook, "func", None) is surely
            if not of_ours and not hasattr(hook, "__pygraph_counts__"):  # `bench` counts replays as well
                return f"the optimizer step hook {_describe(hook)} would not run in a replay"
        params = [p for group in optimizer.param_groups for p in group["params"]]
        devices = {p.device for p in params}
        if not devices:
            return f"{name} has no parameters"
        if len(devices) > 1:
            return f"{name}'s parameters are on several devices: {', '.join(sorted(map(str, devices)))}"
        device = devices.pop()
        if (device.type == "cpu") != self._emulated:
            engine = "emulated engine works on the CPU" if self._emulated else "CUDA engine works on the GPU"
            return f"{name}'s parameters are on {device}, and the {engine}"
        if self._sparse or any((g := p.grad) is not None and g.is_sparse for p in params):
            return f"{name} gets sparse gradients, whose sizes are known only on the host"
        reasons = (
            self._group_reason(cls, i, group, device) for i, group in enumerate(optimizer.param_groups)
        )
        return next((why for why in reasons if why is not None), None)

    @property
    def problem(self) -> Problem | None:
        """`reason` as a row of the report."""
        reason = self.reason
        return None if reason is None else outside_of_graphs(reason)

    def _group_reason(self, cls: type, index: int, group: dict[str, Any], device: torch.device) -> str | None:
        name, where = type(self._optimizer).__name__, f"parameter group {index}"
        if group.get("differentiable"):
            return f"{where} of {name} was made with differentiable=True"
        flags = self._user_flags(group)
        plan = plan_group(cls, flags, device.type)
        if plan.reason is not None:
            return plan.reason
        if "fused" in plan.changes and not all(p.is_floating_point() for p in group["params"]):
            return f"{where} of {name} has complex parameters, which its fused kernels do not take"
        if "fused" in plan.changes and any(local_tensor(p) is not p for p in group["params"]):
            return f"{where} of {name} has sharded parameters, which its fused kernels do not take"
        if cls in NEEDS_FOREACH and not flags.get("foreach"):
            # torch picks foreach by itself only for plain tensors (not for DTensor, for instance).
            odd = {type(p) for p in group["params"]} - {Tensor, torch.nn.Parameter}
            if odd:
                return f"{name} reads the learning rate on the host for {odd.pop().__name__} parameters"
        for key in self._keys:
            value = group.get(key)
            for item in value if isinstance(value, (tuple, list)) else (value,):
                if isinstance(item, Tensor):
                    return f"{where} of {name} has the tensor hyperparameter {key}; make it a Python number"
        lr = self._user_value(group, "lr")
        if not isinstance(lr, Tensor):
            if device.type == "cuda" and any(p.dtype == torch.float64 for p in group["params"]):
                return f"{where} of {name} has float64 parameters, and a graph reads the learning rate in float32"
        else:
            if lr.device != device:
                return f"{where} of {name} has its learning rate tensor on {lr.device}, not on {device}"
            if device.type == "cuda" and lr.dtype != torch.float32 and "fused" in plan.changes:
                return f"{where} of {name} has a {lr.dtype} learning rate; the fused kernels read float32"
        return None

    @property
    def step_supports_scaler(self) -> bool:
        """Under `prepared()` the kernels take `grad_scale` and `found_inf`: GradScaler reads nothing back."""
        if self._class not in FUSED or self.reason is not None or not self._all_fused():
            return False
        # the first dampened momentum is left to plain kernels, which do not ask whether gradients overflowed
        return not any(
            group.get("momentum") and group["dampening"] != 0 and "fused" in self._plan(group).changes
            for group in self._optimizer.param_groups
        )

    def _all_fused(self) -> bool:
        if self._class is Adagrad and not fused_adagrad_on_cuda():
            return False
        return all(
            self._user_flags(group).get("fused") or "fused" in self._plan(group).changes
            for group in self._optimizer.param_groups
        )

    # Swap in, swap out

    @contextmanager
    def prepared(self) -> Iterator[None]:
        """Inside, `optimizer.step()` runs its capturable kernels; the user's values return on exit.

        Enter it before a capture, not inside one: learning rates that changed are copied on entry.
        Does nothing when there is a `reason`. No code of the user runs inside of it.
        """
        groups = self._without_reason()
        if groups is None:
            yield
            return
        try:
            self._swap_in(groups)
            yield
        finally:
            self._swap_out()

    def _without_reason(self) -> _Groups | None:
        """The groups, None where there is a `reason`. What was found holds while the groups are as they were then."""
        if self._class is None or self._closed:
            return None
        baked, known = self.hyperparameters(), self._groups
        params = chain.from_iterable(group["params"] for group in self._optimizer.param_groups)
        same = known is not None and not _has_tensors(baked) and baked == known.baked
        if known is None or not same or self._sparse or {known.device} != set(map(Tensor.get_device, params)):
            self._groups = None if self.reason is not None else self._look(baked)
        # sparse gradients are left to `_before_step`, and to kernels that refuse them in plain training as well
        return self._groups

    def _look(self, baked: tuple[Any, ...]) -> _Groups:
        changes = [dict(self._plan(group).changes) for group in self._optimizer.param_groups]
        device = next(p.get_device() for group in self._optimizer.param_groups for p in group["params"])
        return _Groups(baked, device, changes, self._class in FUSED and self._all_fused())

    def _swap_in(self, groups: _Groups) -> None:
        self._fill_rates()
        self._move_host_state()
        table, names = attributes_of_fused_steps(self._optimizer)
        self._saved += [(table, name, table.get(name, _MISSING)) for name in names]
        for group, rate, flags in zip(self._optimizer.param_groups, self._rates, groups.changes, strict=True):
            changes = dict(flags)
            # Rprop reads lr only where it creates its state, and there as a Python number.
            if self._class is not Rprop and not isinstance(group["lr"], Tensor):
                changes["lr"] = rate.tensor
            for key, value in changes.items():
                self._saved.append((group, key, group.get(key, _MISSING)))
                group[key] = value
        if groups.fused:
            let_scaler_in(self._optimizer)

    def _swap_out(self) -> None:
        saved, self._saved = self._saved, []
        for group, key, value in reversed(saved):
            if value is _MISSING:
                group.pop(key, None)
            else:
                group[key] = value

    def sync(self) -> None:
        """Do in Python what a replayed `step()` has to have done: learning rates that changed are copied into their
        device tensors, and schedulers know of the call. Hot path: no host synchronisation."""
        if self._class is None:
            return
        self._fill_rates()
        count_optimizer_step(self._optimizer)

    def _fill_rates(self) -> None:
        groups = self._optimizer.param_groups
        if len(groups) != len(self._rates):
            self._make_rates()
        for group, rate in zip(groups, self._rates, strict=True):
            if (lr := group["lr"]) is not rate.seen:
                rate.set(lr)

    def _before_step(self) -> None:
        """Step pre hook: forced fused kernels must not refuse what the kernels of a plain run take."""
        forced = [group for group, key, _ in self._saved if key == "fused"]
        for group in forced:
            params = [p for p in group["params"] if p.grad is not None]
            sparse = any(p.grad.is_sparse for p in params)
            late = [] if self._class is not SGD or group["momentum"] == 0 else self._without_momentum(params)
            odd = not sparse and any(self._in_another_order(p) for p in params)
            if not (sparse or odd or late):
                continue
            if params[0].is_cuda and torch.cuda.is_current_stream_capturing():
                what = "got sparse gradients" if sparse else "has no momentum yet for some parameters"
                what = "has gradients or state in another order in memory than parameters" if odd else what
                raise theirs(
                    RuntimeError(f"{type(self._optimizer).__name__} {what}: run this step before a capture")
                )
            self._sparse |= sparse
            if sparse or odd or group["dampening"] != 0:  # the first momentum is the gradient, not dampened
                self._swap_out()
                return
            for p in late:  # momentum * 0 + gradient: what a plain first step makes of it
                self._optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p)

    def _in_another_order(self, parameter: Tensor) -> bool:
        """Whether its gradient or state lies in another order in memory than it does (`p.data = p.data.t()`)."""
        beside = [parameter.grad, *self._optimizer.state.get(parameter, {}).values()]
        alike = [t for t in beside if isinstance(t, Tensor) and t.shape == parameter.shape]
        return any(_order(t) != _order(parameter) for t in alike)

    def _without_momentum(self, params: list[Tensor]) -> list[Tensor]:
        """Those whose momentum fused SGD does not begin as plain kernels do.

        It begins with all parameters of a group or with none, and others may be unfrozen in mid-run. Where a GradScaler
        lets it skip the first step, it leaves momentum that was never written.
        """
        state = self._optimizer.state
        late = [p for p in params if state.get(p, {}).get("momentum_buffer") is None]
        may_skip = getattr(self._optimizer, "found_inf", None) is not None
        return late if may_skip or len(late) < len(params) else []

    # State

    def settle(self, engine: Engine) -> None:
        """Move host state to the device and make the state compact, once its tensors exist.

        Call it after a prepared step, before a capture. On CUDA the state that warm-up created lies between
        activations freed since, and pins their segments.
        """
        if self._class is None or self._closed:
            return
        self._move_host_state()
        state = [
            t for t in local_tensors(self.state_tensors()) if type(t) is Tensor and t.device == engine.device
        ]
        # A view of the state that somebody holds has to stay a view of it.
        loose = [t for t in state if t.data_ptr() not in self._compacted and is_alone(t)]
        if sum(t.nbytes for t in loose) <= 1 << 20:
            return
        move_together(loose, engine)
        self._compacted = {t.data_ptr() for t in state}

    def hyperparameters(self) -> tuple[Any, ...]:
        """What a capture bakes in: per group its parameters and all values but a Python lr; step hooks."""
        baked: list[Any] = [
            tuple(chain.from_iterable(self._step_hooks)) if any(self._step_hooks) else (),
            optimizer_step_override(self._optimizer),
        ]
        for group in self._optimizer.param_groups:
            baked.append(self._parameter_set(group["params"]))
            lr = group["lr"]
            baked.append((lr.data_ptr(), lr.dtype) if isinstance(lr, Tensor) else None)
            baked += map(group.get, self._keys)
        if list in map(type, baked):  # its owner may change it in place
            baked = [tuple(value) if type(value) is list else value for value in baked]
        return tuple(baked)

    def live_numbers(self) -> LiveNumbers:
        """For a capture: the hyperparameters that its replays can read anew."""
        if self._class not in FUSED or self._closed or self._numbers_stay:
            return LiveNumbers(self._optimizer)
        entries = [
            (4 + g * (2 + len(self._keys)) + k, g, key)
            for g, group in enumerate(self._optimizer.param_groups)
            if self._user_flags(group).get("fused") or "fused" in self._plan(group).changes
            for k, key in enumerate(self._keys)
            if key in FUSED_NUMBERS[self._class]
        ]
        return LiveNumbers(self._optimizer, entries)

    def numbers_stay(self) -> None:
        """Later captures leave no hyperparameters open: they could not be found in a capture."""
        self._numbers_stay = True

    def _parameter_set(self, params: list[Tensor]) -> int:
        """A small number that stands for these very parameters."""
        held = tuple(params)
        known = self._param_sets.get(identities(held))
        if known is None:  # kept, so that no other tensor gets the same identity
            known = self._param_sets[identities(held)] = len(self._param_sets), held
        return known[0]

    def state_tensors(self) -> list[Tensor]:
        """All state tensors, in the order of groups, parameters and state entries."""
        state = self._optimizer.state
        return [
            value
            for group in self._optimizer.param_groups
            for p in group["params"]
            if p in state
            for value in state[p].values()
            if isinstance(value, Tensor)
        ]

    def counted(self) -> list[Tensor]:
        """Parameters of whose changes autograd knows in plain training. Fused kernels tell it nothing."""
        groups = [g for g in self._optimizer.param_groups if not self._user_flags(g).get("fused")]
        return [p for group in groups for p in group["params"] if p.grad is not None]

    def remember(self) -> None:
        """Note the state's tensors, whose addresses a capture bakes in. Captures of before are for those of then."""
        if self._remembered is not None and not self.state_unchanged():
            self.generation += 1
        self._remembered = self._state_values()
        self._remembered_identities = identities(tuple(self._remembered))
        self._present_addresses = addresses_of([v for v in self._remembered if isinstance(v, Tensor)])
        self._remembered_addresses = self._present_addresses()

    def state_unchanged(self) -> bool:
        """Whether the state holds exactly the objects of the last `remember()`, where they were then. Hot path."""
        if self._remembered is None or identities(tuple(self._state_values())) != self._remembered_identities:
            return False
        # of the same tensors: `t.data = ...` moves them
        return self._present_addresses() == self._remembered_addresses

    def _forget_state(self) -> None:
        self._remembered, self._present_addresses, self._moved = None, list, None

    def _state_values(self) -> list[Any]:
        """All that the state of all parameters refers to, in order: the values of its dicts, by one call in C."""
        return gc.get_referents(*self._optimizer.state.values())

    def what_changed(self) -> Problem:
        """What to say where captures become invalid again and again, for other reasons than moved parameters."""
        return outside_of_graphs(
            "its set of parameters, a hyperparameter other than the learning rate, or the memory of a learning rate or "
            "of the optimizer's state, changes again and again",
            fix=advice_on_numbers(self._optimizer),
        )

    def close(self) -> None:
        """Undo everything: hooks gone, flags restored, state where plain torch would keep it."""
        if self._closed:
            return
        self._closed = True
        self._swap_out()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._forget_state()
        if self._class is not None:
            for p, key, tensor in self._host_copies():
                self._optimizer.state[p][key] = tensor

    # Where state lives

    def _host_entries(self) -> Iterator[tuple[Tensor, str, dict[str, Any]]]:
        """The state entries that plain torch creates on the CPU: parameter, key, its state."""
        cls = self._class
        assert cls is not None
        state = self._optimizer.state
        for group in self._optimizer.param_groups:
            keys = host_state_keys(cls, self._user_flags(group))
            for p in group["params"] if keys else ():
                if p in state:  # not state[p]: that would create it
                    yield from ((p, key, state[p]) for key in keys if isinstance(state[p].get(key), Tensor))

    def _note_homes(self) -> None:
        """Note the host entries that torch's loading or the user put on the device: they stay there."""
        self._at_home = {(id(p), key) for p, key, state in self._host_entries() if not state[key].is_cpu}

    def _move_host_state(self) -> None:
        """Move state to the device, where kernels of `prepared()` want it.

        While the groups are the same, nothing is looked for among the very tensors that the last call has left.
        """
        if self._emulated:
            return
        if self._moved is not None:
            groups, left, _ = self._moved
            if groups is self._groups and identities(tuple(self._state_values())) == left:
                return
        for p, key, state in self._host_entries():
            if state[key].is_cpu and not p.is_cpu:
                # Fused kernels read the step count as float32; the capturable ones take any float.
                dtype = torch.float32 if self._class is Adagrad else state[key].dtype
                # A new tensor, not `.data`: a state_dict taken earlier still holds the old one.
                state[key] = state[key].to(device=p.device, dtype=dtype)
        # these tensors are kept, so that no other one gets the same identity
        kept = [state[key] for _, key, state in self._host_entries()]
        self._moved = self._groups, identities(tuple(self._state_values())), kept

    def _host_copies(self) -> list[tuple[Tensor, str, Tensor]]:
        """CPU copies of the entries that only we keep on the device. One synchronisation."""
        away = [
            (p, key, state[key])
            for p, key, state in self._host_entries()
            if not state[key].is_cpu and (id(p), key) not in self._at_home
        ]
        if not away:
            return []
        values = torch.stack([t.detach().to(torch.float64) for _, _, t in away]).cpu()
        wide = torch.get_default_dtype() == torch.float64  # what torch creates step counts with
        return [
            # Copies, not views: views would share one storage in the checkpoint.
            (p, key, value.to(torch.float64 if wide else t.dtype, copy=True))
            for (p, key, t), value in zip(away, values, strict=True)
        ]

    def _plain_state_dict(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        """state_dict post hook: what a plain run would have returned. Live state is not touched."""
        surely(functools.partial(self._make_plain, optimizer, state_dict), "optimizer.state_dict()")

    def _make_plain(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        packed = {id(g): pg for g, pg in zip(optimizer.param_groups, state_dict["param_groups"], strict=True)}
        for group in optimizer.param_groups:
            for key in (*_FLAGS, "lr"):
                value = self._user_value(group, key)
                if value is _MISSING:
                    packed[id(group)].pop(key, None)
                else:
                    packed[id(group)][key] = value
        index = {
            id(p): i
            for group in optimizer.param_groups
            for p, i in zip(group["params"], packed[id(group)]["params"], strict=True)
        }
        states = state_dict["state"]
        for p, key, tensor in self._host_copies():
            states[index[id(p)]] = {**states[index[id(p)]], key: tensor}  # the packed dict is the live one

    def _loaded(self, optimizer: Optimizer) -> None:
        """load_state_dict post hook: state and groups are new objects."""
        self.generation += 1
        self._forget_state()
        self._compacted.clear()
        self._swap_out()
        self._note_homes()

    # Small things

    def _user_value(self, group: dict[str, Any], key: str) -> Any:
        for saved, name, value in self._saved:
            if saved is group and name == key:
                return value
        return group.get(key, _MISSING)

    def _user_flags(self, group: dict[str, Any]) -> dict[str, Any]:
        flags = ((key, self._user_value(group, key)) for key in _FLAGS)
        return {key: value for key, value in flags if value is not _MISSING}

    def _plan(self, group: dict[str, Any]) -> GroupPlan:
        assert self._class is not None
        float32 = all(p.dtype == torch.float32 and local_tensor(p) is p for p in group["params"])
        return plan_group(self._class, self._user_flags(group), self._device().type, float32=float32)

    def _device(self) -> torch.device:
        params = (p for group in self._optimizer.param_groups for p in group["params"])
        return next((p.device for p in params), torch.device("cpu"))

    def _make_rates(self) -> None:
        # Tensors are kept: their addresses are baked into captures of the groups there were.
        missing = len(self._optimizer.param_groups) - len(self._rates)
        self._rates += [LearningRate(self._device()) for _ in range(missing)]
        del self._rates[len(self._optimizer.param_groups) :]


def outside_of_graphs(reason: str, fix: str = "") -> Problem:
    """What the report says of an update that has no graph."""
    return Problem(f"the optimizer runs outside of graphs: {reason}", fix=fix)


def _has_tensors(baked: tuple[Any, ...]) -> bool:
    """Whether a hyperparameter, or a part of one, is a tensor. Comparing it with a number would compare values."""
    return Tensor in map(type, baked) or any(type(v) is tuple and Tensor in map(type, v) for v in baked)


def _describe(fn: Callable[..., Any]) -> str:
    """`name (file:line)` of a function, a method, a partial or a callable object."""
    inner: Any = fn
    while isinstance(inner, functools.partial):
        inner = inner.func
    inner = getattr(inner, "__func__", inner)
    name = getattr(inner, "__qualname__", type(inner).__qualname__)
    code = getattr(inner, "__code__", None) or getattr(vars(type(inner)).get("__call__"), "__code__", None)
    return f"{name} ({code.co_filename}:{code.co_firstlineno})" if code else name


def _order(tensor: Tensor) -> list[int]:
    """Strides, of dimensions with more than one element alone."""
    return [step for size, step in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]
