"""Optimizer preparation on the CPU: same numbers, same checkpoints, same param_groups as plain PyTorch."""

from __future__ import annotations

import copy
import functools
import gc
import math
import time
import timeit
import types
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import (
    ASGD,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    NAdam,
    Optimizer,
    RMSprop,
    Rprop,
)
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler, OneCycleLR, StepLR
from torch.optim.optimizer import register_optimizer_step_post_hook

from pygraph_train.graphs.emulated import EmulatedEngine
from pygraph_train.optimizers import preparation as module
from pygraph_train.optimizers.kernels import (
    GroupPlan,
    advice_on_numbers,
    fused_adagrad_on_cuda,
    host_state_keys,
    plan_group,
    supported_class,
)
from pygraph_train.optimizers.preparation import OptimizerPreparation
from pygraph_train.torch_private.optim import optimizer_step_override

pytestmark = pytest.mark.quick

FUSED_CPU: dict[str, Callable[..., Optimizer]] = {
    "adam": functools.partial(Adam, lr=1e-2, fused=True),
    "adam-amsgrad": functools.partial(Adam, lr=1e-2, amsgrad=True, weight_decay=0.1, fused=True),
    "adamw": functools.partial(AdamW, lr=1e-2, weight_decay=0.1, fused=True),
    "sgd": functools.partial(SGD, lr=1e-1, fused=True),
    "sgd-momentum": functools.partial(SGD, lr=1e-1, momentum=0.9, weight_decay=1e-2, fused=True),
    "sgd-nesterov": functools.partial(SGD, lr=1e-1, momentum=0.9, nesterov=True, fused=True),
    "adagrad": functools.partial(Adagrad, lr=1e-1, lr_decay=1e-2, fused=True),
}
SCHEDULES: dict[str, Callable[[Optimizer], LRScheduler]] = {
    "step": lambda o: StepLR(o, 7, 0.3),
    "cosine": lambda o: CosineAnnealingLR(o, 30),
    "onecycle": lambda o: OneCycleLR(o, 0.3, total_steps=31, cycle_momentum=False),
}


def parameters() -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(n, 3, generator=generator)) for n in (5, 2, 1)]


def set_grads(params: list[torch.nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(step + 1)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator)


def two_groups(make: Callable[..., Optimizer]) -> tuple[list[torch.nn.Parameter], Optimizer]:
    params = parameters()
    return params, make([{"params": params[:2]}, {"params": params[2:], "lr": 0.03}])


def assert_same(a: Any, b: Any) -> None:
    """Equal values of equal types, all the way down, and tensors equal bit for bit."""
    assert type(a) is type(b)
    if isinstance(a, Tensor):
        assert a.device == b.device
        assert a.dtype == b.dtype
        assert torch.equal(a, b)
    elif isinstance(a, dict):
        assert list(a) == list(b)
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
    else:
        assert a == b


def run(optimizer: Optimizer, params: list[torch.nn.Parameter], steps: range, prep: Any = None) -> None:
    for step in steps:
        set_grads(params, step)
        if prep is None:
            optimizer.step()
        else:
            with prep.prepared():
                optimizer.step()


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", FUSED_CPU)
def test_prepared_training_is_bit_identical_and_invisible(name: str, schedule: str) -> None:
    plain_params, plain = two_groups(FUSED_CPU[name])
    params, optimizer = two_groups(FUSED_CPU[name])
    plain_schedule, ours_schedule = SCHEDULES[schedule](plain), SCHEDULES[schedule](optimizer)
    prep = OptimizerPreparation(optimizer, emulated=True)
    assert prep.reason is None
    assert prep.step_supports_scaler == (name != "adagrad" or fused_adagrad_on_cuda())
    for step in range(30):
        run(plain, plain_params, range(step, step + 1))
        set_grads(params, step)
        with prep.prepared():
            assert all(isinstance(group["lr"], Tensor) for group in optimizer.param_groups)
            optimizer.step()
            assert_same(optimizer.state_dict(), plain.state_dict())  # also in the middle of a step
        prep.settle(EmulatedEngine())
        plain_schedule.step()
        ours_schedule.step()
        assert_same(params, plain_params)
        assert_same(optimizer.param_groups, plain.param_groups)
        assert_same(optimizer.state_dict(), plain.state_dict())


@pytest.mark.parametrize("name", ["adamw", "sgd-momentum", "adagrad"])
def test_plain_checkpoint_loads_and_ours_loads_in_plain(name: str) -> None:
    plain_params, plain = two_groups(FUSED_CPU[name])
    run(plain, plain_params, range(5))
    params, optimizer = two_groups(FUSED_CPU[name])
    prep = OptimizerPreparation(optimizer, emulated=True)
    run(optimizer, params, range(2), prep)
    before = prep.generation
    for p, q in zip(params, plain_params, strict=True):
        p.data.copy_(q.data)
    optimizer.load_state_dict(copy.deepcopy(plain.state_dict()))
    assert prep.generation > before
    assert_same(optimizer.state_dict(), plain.state_dict())
    run(plain, plain_params, range(5, 10))
    run(optimizer, params, range(5, 10), prep)
    assert_same(params, plain_params)
    back_params, back = two_groups(FUSED_CPU[name])
    for p, q in zip(back_params, params, strict=True):
        p.data.copy_(q.data)
    back.load_state_dict(optimizer.state_dict())
    run(back, back_params, range(10, 15))
    run(plain, plain_params, range(10, 15))
    assert_same(back_params, plain_params)


def test_checkpoint_loaded_inside_prepared_keeps_its_plain_values() -> None:
    params, optimizer = two_groups(FUSED_CPU["adamw"])
    prep = OptimizerPreparation(optimizer, emulated=True)
    run(optimizer, params, range(1), prep)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0]["lr"] = 0.5
    with prep.prepared():
        optimizer.load_state_dict(saved)
        assert_same(optimizer.state_dict(), saved)
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert type(optimizer.param_groups[0]["lr"]) is float


def test_values_return_after_an_exception() -> None:
    _, optimizer = two_groups(FUSED_CPU["adamw"])
    expected = copy.deepcopy([{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups])
    prep = OptimizerPreparation(optimizer, emulated=True)
    with pytest.raises(KeyboardInterrupt), prep.prepared():
        raise KeyboardInterrupt
    assert_same([{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups], expected)


def test_sync_fills_the_same_tensor_and_only_when_the_rate_changed() -> None:
    _, optimizer = two_groups(FUSED_CPU["adamw"])
    prep = OptimizerPreparation(optimizer, emulated=True)
    with prep.prepared():
        tensor = optimizer.param_groups[0]["lr"]
    optimizer.param_groups[0]["lr"] = 0.125
    prep.sync()
    version = tensor._version
    assert tensor.item() == 0.125
    prep.sync()
    optimizer.param_groups[0]["lr"] = float("0.125")  # another object of the same value
    prep.sync()
    assert tensor._version == version


def test_learning_rate_tensor_of_the_user_is_left_alone() -> None:
    _, optimizer = two_groups(functools.partial(Adam, fused=True))
    lr = optimizer.param_groups[0]["lr"] = torch.tensor(0.01)
    prep = OptimizerPreparation(optimizer, emulated=True)
    assert prep.reason is None
    first = prep.hyperparameters()
    with prep.prepared():
        assert optimizer.param_groups[0]["lr"] is lr
    optimizer.param_groups[0]["lr"] = torch.tensor(0.01)
    assert prep.hyperparameters() != first  # another address


# Reasons


def reason(make: Callable[[list[torch.nn.Parameter]], Any]) -> str:
    prep = OptimizerPreparation(make(parameters()), emulated=True)
    assert prep.reason is not None
    before = [dict(g) for g in prep._optimizer.param_groups]
    with prep.prepared():  # changes nothing
        assert [dict(g) for g in prep._optimizer.param_groups] == before
    assert not prep.step_supports_scaler
    return prep.reason


class OverriddenStep(Adam):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class Renamed(Adam):
    pass


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda p: Adam(p), "step count on the host; pass fused=True"),
        (lambda p: AdamW(p, foreach=True), "step count on the host; pass fused=True"),
        (lambda p: SGD(p), "learning rate on the host; pass fused=True"),
        (lambda p: Adagrad(p), "pass fused=True"),
        (lambda p: RMSprop(p), "no fused CPU kernels"),
        (lambda p: NAdam(p), "no fused CPU kernels"),
        (lambda p: torch.optim.LBFGS(p), "LBFGS decides on the host"),
        (lambda p: torch.optim.SparseAdam(p), "SparseAdam works on sparse gradients"),
        (lambda p: torch.optim.Adafactor(p), "Adafactor reads"),
        (lambda p: torch.optim.Muon(p), "Muon reads its learning rate"),
        (lambda p: OverriddenStep(p, fused=True), "OverriddenStep is not one of torch.optim's"),
        (lambda p: SGD(p, differentiable=True), "group 0 of SGD was made with differentiable=True"),
        (
            lambda p: Adam(p, betas=(torch.tensor(0.9), torch.tensor(0.99)), fused=True),
            "tensor hyperparameter betas",
        ),
        (
            lambda p: SGD([*p, torch.nn.Parameter(torch.ones(2, device="meta"))], fused=True),
            "several devices: cpu, meta",
        ),
    ],
)
def test_unsupported_optimizers_name_their_reason(make: Any, words: str) -> None:
    assert words in reason(make)


def test_differentiable_is_refused() -> None:
    _, optimizer = two_groups(FUSED_CPU["sgd"])
    optimizer.param_groups[1]["differentiable"] = True
    prep = OptimizerPreparation(optimizer, emulated=True)
    assert prep.reason == "parameter group 1 of SGD was made with differentiable=True"


def test_subclass_that_inherits_its_step_is_supported() -> None:
    assert supported_class(Renamed(parameters(), fused=True)) is Adam
    assert OptimizerPreparation(Renamed(parameters(), fused=True), emulated=True).reason is None


def test_engine_and_parameters_must_be_on_the_same_device() -> None:
    prep = OptimizerPreparation(Adam(parameters(), fused=True), emulated=False)
    assert prep.reason == "Adam's parameters are on cpu, and the CUDA engine works on the GPU"


def test_sparse_gradients_are_refused() -> None:
    params, optimizer = two_groups(FUSED_CPU["sgd"])
    prep = OptimizerPreparation(optimizer, emulated=True)
    params[0].grad = torch.ones(5, 3).to_sparse()
    assert prep.reason is not None
    assert "sparse gradients" in prep.reason


@pytest.mark.parametrize("change", ["tensor", "pair", "fused", "hook", "step"])
def test_what_prepared_has_found_does_not_outlive_a_change(change: str) -> None:
    _, optimizer = two_groups(FUSED_CPU["adamw"])
    prep = OptimizerPreparation(optimizer, emulated=True)
    for _ in range(2):
        with prep.prepared():
            assert torch.is_tensor(optimizer.param_groups[0]["lr"])
    if change == "tensor":
        optimizer.param_groups[1]["weight_decay"] = torch.tensor(optimizer.param_groups[1]["weight_decay"])
    elif change == "pair":
        optimizer.param_groups[1]["betas"] = tuple(map(torch.tensor, optimizer.param_groups[1]["betas"]))
    elif change == "fused":
        optimizer.param_groups[1]["fused"] = False
    elif change == "hook":
        optimizer.register_step_pre_hook(lambda *_: None)
    else:
        optimizer.step = lambda: None  # type: ignore[method-assign, assignment]
    assert prep.reason is not None
    with prep.prepared():
        assert not torch.is_tensor(optimizer.param_groups[0]["lr"])


def test_step_hooks_of_others_are_named_with_their_line() -> None:
    def my_hook(*args: Any) -> None: ...

    _, optimizer = two_groups(FUSED_CPU["adamw"])
    prep = OptimizerPreparation(optimizer, emulated=True)
    clean = prep.hyperparameters()
    where = f"my_hook ({__file__}:{my_hook.__code__.co_firstlineno})"
    for register in (
        optimizer.register_step_pre_hook,
        optimizer.register_step_post_hook,
        register_optimizer_step_post_hook,
    ):
        handle = register(my_hook)
        assert prep.reason is not None
        assert where in prep.reason
        assert prep.hyperparameters() != clean  # a hook added in mid-run is noticed on the hot path
        handle.remove()
        assert prep.reason is None
        assert prep.hyperparameters() == clean
    handle = optimizer.register_step_pre_hook(functools.partial(my_hook))
    assert prep.reason is not None
    assert where in prep.reason


def test_replaced_step_is_named_but_the_schedulers_counter_is_fine() -> None:
    _, optimizer = two_groups(FUSED_CPU["adamw"])
    StepLR(optimizer, 1)
    prep = OptimizerPreparation(optimizer, emulated=True)
    assert prep.reason is None

    def my_step(closure: Any = None) -> None: ...

    optimizer.step = my_step  # type: ignore[method-assign,assignment]
    assert prep.reason is not None
    assert "my_step (" in prep.reason


@pytest.mark.parametrize("scheduled", [False, True])
@pytest.mark.parametrize("decorated", [False, True])
def test_a_step_that_was_replaced_on_the_class_is_named(
    monkeypatch: pytest.MonkeyPatch, scheduled: bool, decorated: bool
) -> None:
    original = torch.optim.AdamW.step

    def counted(self: Any, closure: Any = None) -> Any:
        return original(self, closure)

    _, first = two_groups(FUSED_CPU["adamw"])
    monkeypatch.setattr(torch.optim.AdamW, "step", torch.no_grad()(counted) if decorated else counted)
    _, second = two_groups(FUSED_CPU["adamw"])  # torch wraps the step of the class here
    if scheduled:
        StepLR(second, 1)
    for optimizer in (first, second):
        prep = OptimizerPreparation(optimizer, emulated=True)
        assert prep.reason is not None
        assert "counted (" in prep.reason


def test_a_step_replaced_after_a_scheduler_was_made_is_not_called_by_anybody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, optimizer = two_groups(FUSED_CPU["adamw"])
    StepLR(optimizer, 1)
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda self, closure=None: None)
    assert OptimizerPreparation(optimizer, emulated=True).reason is None


def test_a_step_put_over_that_of_an_own_class_before_a_scheduler_was_made_is_named() -> None:
    class Own(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            """Do nothing."""

    optimizer = Own([Tensor([1.0])], lr=0.1)
    StepLR(optimizer, 1)
    assert optimizer_step_override(optimizer) is None

    def counted(self: Any, closure: Any = None) -> Any:
        return Own.step(self, closure)

    optimizer = Own([Tensor([1.0])], lr=0.1)
    optimizer.step = types.MethodType(counted, optimizer)  # type: ignore[method-assign]
    StepLR(optimizer, 1)
    assert optimizer_step_override(optimizer) is counted


# Signatures and state


def test_hyperparameters_follow_what_a_capture_bakes_in() -> None:
    _, optimizer = two_groups(FUSED_CPU["adamw"])
    prep = OptimizerPreparation(optimizer, emulated=True)
    first = prep.hyperparameters()
    hash(first)
    optimizer.param_groups[0]["lr"] = 0.7
    optimizer.param_groups[0]["initial_lr"] = 0.7
    assert prep.hyperparameters() == first
    optimizer.param_groups[0]["weight_decay"] = 0.2
    second = prep.hyperparameters()
    optimizer.param_groups[0]["betas"] = [0.5, 0.6]  # as a checkpoint from JSON has it
    third = prep.hyperparameters()
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})
    fourth = prep.hyperparameters()
    optimizer.param_groups[2]["params"].append(torch.nn.Parameter(torch.ones(2)))
    assert len({first, second, third, fourth, prep.hyperparameters()}) == 5


def test_added_parameter_group_trains() -> None:
    params, optimizer = two_groups(FUSED_CPU["adamw"])
    prep = OptimizerPreparation(optimizer, emulated=True)
    run(optimizer, params, range(1), prep)
    extra = torch.nn.Parameter(torch.ones(2))
    optimizer.add_param_group({"params": [extra], "lr": 0.5})
    prep.sync()
    run(optimizer, [*params, extra], range(1, 2), prep)
    assert not torch.equal(extra, torch.ones(2))
    assert optimizer.param_groups[2]["lr"] == 0.5


def replace_moment(o: Optimizer) -> None:
    state = next(iter(o.state.values()))
    state["exp_avg"] = state["exp_avg"].clone()


def move_moment(o: Optimizer) -> None:
    state = next(iter(o.state.values()))
    state["exp_avg"].data = state["exp_avg"].data.clone()


@pytest.mark.parametrize(
    "change",
    [
        replace_moment,
        move_moment,
        lambda o: o.state.clear(),
        lambda o: o.load_state_dict(o.state_dict()),
        lambda o: next(iter(o.state.values())).pop("exp_avg"),
        lambda o: o.state[torch.zeros(1)].update(extra=torch.zeros(1)),
    ],
)
def test_changed_state_is_noticed(change: Callable[[Optimizer], Any]) -> None:
    params, optimizer = two_groups(FUSED_CPU["adamw"])
    prep = OptimizerPreparation(optimizer, emulated=True)
    assert not prep.state_unchanged()
    run(optimizer, params, range(1), prep)
    prep.settle(EmulatedEngine())
    prep.remember()
    run(optimizer, params, range(1, 2), prep)
    assert prep.state_unchanged()
    assert len(prep.state_tensors()) == 9
    assert [id(t) for t in prep.state_tensors()] == [
        id(t) for s in optimizer.state.values() for t in s.values()
    ]
    change(optimizer)
    assert not prep.state_unchanged()


def test_loading_frees_the_old_state() -> None:
    params, optimizer = two_groups(FUSED_CPU["adamw"])
    prep = OptimizerPreparation(optimizer, emulated=True)
    run(optimizer, params, range(1), prep)
    prep.remember()
    old = weakref.ref(optimizer.state[params[0]]["exp_avg"])
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    gc.collect()
    assert old() is None


def test_close_leaves_a_plain_optimizer() -> None:
    plain_params, plain = two_groups(FUSED_CPU["adamw"])
    params, optimizer = two_groups(FUSED_CPU["adamw"])
    before = set(vars(optimizer))
    prep = OptimizerPreparation(optimizer, emulated=True)
    run(plain, plain_params, range(3))
    run(optimizer, params, range(3), prep)
    prep.close()
    prep.close()
    assert prep.reason is not None
    assert set(vars(optimizer)) == before
    assert not optimizer._optimizer_state_dict_post_hooks
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_load_state_dict_post_hooks
    run(plain, plain_params, range(3, 6))
    run(optimizer, params, range(3, 6), prep)
    assert_same(params, plain_params)
    assert_same(optimizer.state_dict(), plain.state_dict())


def test_hot_path_is_cheap() -> None:
    params = [torch.nn.Parameter(torch.ones(2)) for _ in range(200)]
    optimizer = Adam(params, fused=True)
    prep = OptimizerPreparation(optimizer, emulated=True)
    run(optimizer, params, range(1), prep)
    prep.remember()

    def microseconds(fn: Callable[[], Any]) -> float:
        return min(timeit.repeat(fn, timer=time.process_time, number=100, repeat=5)) * 1e4

    # Some ten times what they take: a promise about the order of magnitude, not a benchmark.
    assert microseconds(prep.state_unchanged) < 200
    assert microseconds(prep.hyperparameters) < 100
    assert microseconds(prep.sync) < 20


# What a GPU would get, without a GPU


@pytest.mark.parametrize("cls", [Adam, AdamW, NAdam, Adamax, ASGD, Adadelta, RMSprop, Rprop])
def test_capturable_classes_become_capturable_on_cuda(cls: type) -> None:
    assert plan_group(cls, {"capturable": False, "foreach": None, "fused": None}, "cuda") == GroupPlan(
        {"capturable": True}
    )
    assert plan_group(cls, {"capturable": True, "foreach": True}, "cuda") == GroupPlan({})


@pytest.mark.parametrize("cls", [Adam, AdamW])
def test_adam_of_float32_becomes_fused_where_torch_may_choose(cls: type) -> None:
    free = {"capturable": False, "foreach": None, "fused": None}
    both = {"capturable": True, "fused": True}  # torch refuses to capture Adam that is not capturable
    assert plan_group(cls, free, "cuda", float32=True) == GroupPlan(both)
    assert plan_group(cls, free | {"capturable": True}, "cuda", float32=True) == GroupPlan({"fused": True})
    for flag in ({"foreach": True}, {"foreach": False}, {"fused": False}):
        assert plan_group(cls, free | flag, "cuda", float32=True) == GroupPlan({"capturable": True})
    assert plan_group(NAdam, free, "cuda", float32=True) == GroupPlan({"capturable": True})


def test_explicit_choice_of_kernels_is_kept_on_cuda() -> None:
    for flags in ({"fused": True}, {"foreach": True}, {"foreach": False}):
        assert plan_group(Adam, {"capturable": False, **flags}, "cuda").changes == {"capturable": True}
    assert plan_group(SGD, {"fused": True, "foreach": None}, "cuda") == GroupPlan({})


@pytest.mark.parametrize("cls", [Adadelta, RMSprop])
def test_kernels_that_read_the_learning_rate_on_the_host_are_refused(cls: type) -> None:
    why = plan_group(cls, {"foreach": False}, "cuda").reason
    assert why is not None
    assert "foreach=False" in why


def test_sgd_and_adagrad_become_fused_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    fused = GroupPlan({"fused": True, "foreach": False})
    assert plan_group(SGD, {"fused": None, "foreach": True}, "cuda") == fused
    monkeypatch.setattr("pygraph_train.optimizers.kernels.fused_adagrad_on_cuda", lambda: True)
    assert plan_group(Adagrad, {"fused": None, "foreach": None}, "cuda") == fused
    monkeypatch.setattr("pygraph_train.optimizers.kernels.fused_adagrad_on_cuda", lambda: False)
    why = plan_group(Adagrad, {"fused": None, "foreach": None}, "cuda").reason
    assert why is not None
    assert "this torch version" in why


def test_other_devices_are_refused() -> None:
    assert "no CUDA graphs" in str(plan_group(Adam, {}, "xpu").reason)


@pytest.mark.parametrize("cls", [Adam, AdamW, NAdam, Adamax, ASGD, Adadelta, RMSprop, Rprop, SGD, Adagrad])
def test_host_state_is_what_torch_creates_on_the_host(cls: Any) -> None:
    if cls in (SGD, ASGD):
        assert host_state_keys(cls, {}) == ()
        return
    param = torch.nn.Parameter(torch.ones(2))
    optimizer = cls([param])
    param.grad = torch.ones(2)
    optimizer.step()
    small = {k for k, t in optimizer.state[param].items() if t.dim() == 0}
    assert set(host_state_keys(cls, {"capturable": False, "fused": None})) == small
    assert host_state_keys(cls, {"capturable": True}) == ()
    assert host_state_keys(cls, {"fused": True}) == ()


@pytest.fixture
def forced_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    """What SGD gets on a GPU, here on the CPU, whose fused kernels have the same rules."""
    monkeypatch.setattr(module, "plan_group", lambda *_, **__: GroupPlan({"fused": True, "foreach": False}))


@pytest.mark.usefixtures("forced_fused")
@pytest.mark.parametrize("make", [functools.partial(SGD, lr=0.1, momentum=0.9), AdamW])
def test_forced_flags_stay_out_of_checkpoints_and_of_the_scaler(make: Any) -> None:
    plain_params, plain = two_groups(make)
    params, optimizer = two_groups(make)
    prep = OptimizerPreparation(optimizer, emulated=True)
    for step in range(3):
        run(plain, plain_params, range(step, step + 1))
        set_grads(params, step)
        assert not hasattr(optimizer, "_step_supports_amp_scaling")
        with prep.prepared():
            assert optimizer.param_groups[0]["fused"] is True
            assert optimizer._step_supports_amp_scaling
            optimizer.step()
            assert_same(optimizer.state_dict()["param_groups"], plain.state_dict()["param_groups"])
    assert set(vars(optimizer)) == set(vars(plain))
    assert_same(optimizer.state_dict()["param_groups"], plain.state_dict()["param_groups"])
    torch.testing.assert_close(params, plain_params)


@pytest.mark.usefixtures("forced_fused")
@pytest.mark.parametrize("dampening", [0.0, 0.5])
def test_parameters_unfrozen_in_mid_run_get_their_momentum(dampening: float) -> None:
    make = functools.partial(SGD, lr=0.1, momentum=0.9, weight_decay=0.1, dampening=dampening)
    plain_params, plain = two_groups(make)
    params, optimizer = two_groups(make)
    prep = OptimizerPreparation(optimizer, emulated=True)
    run(plain, plain_params[1:], range(2))
    run(optimizer, params[1:], range(2), prep)
    run(plain, plain_params, range(2, 5))
    run(optimizer, params, range(2, 5), prep)
    torch.testing.assert_close(params, plain_params)
    torch.testing.assert_close(optimizer.state_dict()["state"], plain.state_dict()["state"])


@pytest.mark.usefixtures("forced_fused")
@pytest.mark.parametrize("skipped", [1, 3])
def test_momentum_of_first_steps_that_the_scaler_skips(skipped: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fused kernels leave the memory of the first momentum as it is when they skip the step."""
    empty_like = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: empty_like(*a, **k).fill_(1e30))
    make = functools.partial(SGD, lr=0.1, momentum=0.9, weight_decay=0.1)
    plain_params, plain = two_groups(make)
    params, optimizer = two_groups(make)
    prep = OptimizerPreparation(optimizer, emulated=True)
    for step in range(6):
        for each, its_params, context in (
            (plain, plain_params, nullcontext()),
            (optimizer, params, prep.prepared()),
        ):
            scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
            set_grads(its_params, step)
            if step < skipped:
                its_params[0].grad.fill_(math.inf)
            with context:
                scaler.scale(torch.zeros(()))  # makes the scale
                scaler.step(each)
    torch.testing.assert_close(params, plain_params)


@pytest.mark.usefixtures("forced_fused")
def test_a_dampened_momentum_is_left_to_the_scaler_on_the_host() -> None:
    _, optimizer = two_groups(functools.partial(SGD, lr=0.1, momentum=0.9, dampening=0.5))
    assert not OptimizerPreparation(optimizer, emulated=True).step_supports_scaler
    _, optimizer = two_groups(functools.partial(SGD, lr=0.1, momentum=0.9))
    assert OptimizerPreparation(optimizer, emulated=True).step_supports_scaler


@pytest.mark.usefixtures("forced_fused")
@pytest.mark.parametrize("transposed", [False, True])
def test_gradients_in_another_order_in_memory_get_plain_kernels(
    transposed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fused ones refuse them. The stride of a dimension of one element says nothing (depthwise convolutions)."""
    kernels: list[bool] = []
    fused = torch._fused_sgd_
    monkeypatch.setattr(torch, "_fused_sgd_", lambda *a, **k: (kernels.append(True), fused(*a, **k))[1])
    weights = [torch.nn.Parameter(torch.arange(36.0).view(4, 1, 3, 3)) for _ in range(2)]
    for weight, context in zip(weights, (False, True), strict=True):
        optimizer = SGD([weight], lr=0.1, momentum=0.9)
        prep = OptimizerPreparation(optimizer, emulated=True)
        for step in range(4):
            if transposed and step == 2:
                weight.data = weight.data.transpose(2, 3)
            weight.grad = torch.full((4, 3, 3, 1), step + 1.0).permute(0, 3, 1, 2)
            with prep.prepared() if context else nullcontext():
                optimizer.step()
    torch.testing.assert_close(*weights)
    assert len(kernels) == (2 if transposed else 4)


@pytest.mark.usefixtures("forced_fused")
def test_sparse_gradients_found_inside_prepared_run_the_plain_kernels() -> None:
    params, optimizer = two_groups(functools.partial(SGD, lr=0.5))
    prep = OptimizerPreparation(optimizer, emulated=True)
    start = params[0].detach().clone()
    with prep.prepared():
        params[0].grad = torch.ones(5, 3).to_sparse()
        optimizer.step()
    torch.testing.assert_close(params[0].detach(), start - 0.5)
    params[0].grad = None
    assert prep.reason is not None
    assert "sparse" in prep.reason


def test_advice_on_changing_numbers_names_fused_kernels_where_they_help() -> None:
    weight = [torch.nn.Parameter(torch.zeros(2))]
    assert "AdamW(..., fused=True)" in advice_on_numbers(AdamW(weight))
    for optimizer in (AdamW(weight, fused=True), SGD(weight), torch.optim.RAdam(weight)):
        assert "fused" not in advice_on_numbers(optimizer)
        assert "OneCycleLR(cycle_momentum=False)" in advice_on_numbers(optimizer)
