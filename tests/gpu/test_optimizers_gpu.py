"""Captured optimizer steps equal eager ones, for every optimizer that the preparation makes capturable."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
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

from pygraph_train.graphs.cuda import CudaEngine
from pygraph_train.optimizers.preparation import OptimizerPreparation

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CASES: list[tuple[type[Optimizer], dict[str, Any]]] = [
    (Adam, {}),
    (Adam, {"fused": True, "amsgrad": True}),
    (Adam, {"foreach": False}),
    (AdamW, {"weight_decay": 0.1}),
    (AdamW, {"fused": True}),
    (AdamW, {"foreach": True}),
    (NAdam, {}),
    (Adamax, {}),
    (ASGD, {}),
    (Adadelta, {}),
    (RMSprop, {}),
    (RMSprop, {"momentum": 0.9, "centered": True}),
    (Rprop, {}),
    (Adagrad, {"lr_decay": 0.01}),
    (SGD, {}),
    (SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    (SGD, {"momentum": 0.9, "foreach": True}),
]
IDS = [f"{cls.__name__}-{'-'.join(options) or 'default'}" for cls, options in CASES]


@pytest.fixture
def engine() -> Iterator[CudaEngine]:
    made = CudaEngine(torch.device("cuda"))
    yield made
    made.close()


def make(cls: type[Optimizer], options: dict[str, Any]) -> tuple[list[torch.nn.Parameter], Any]:
    generator = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(n, 7, generator=generator).cuda()) for n in (5, 64, 1)]
    for p in params:
        p.grad = torch.zeros_like(p)
    return params, cls([{"params": params[:2]}, {"params": params[2:], "lr": 0.02}], lr=0.01, **options)


def fill_grads(params: list[torch.nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(step + 1)
    for p in params:
        assert p.grad is not None
        p.grad.copy_(torch.randn(p.shape, generator=generator))


def set_lr(optimizer: Optimizer, step: int) -> None:
    for index, group in enumerate(optimizer.param_groups):
        group["lr"] = 0.01 / (1 + step) + 0.001 * index


@pytest.mark.parametrize(("cls", "options"), CASES, ids=IDS)
def test_replayed_steps_equal_eager_steps_while_the_learning_rate_changes(
    cls: type[Optimizer], options: dict[str, Any], engine: CudaEngine
) -> None:
    params, optimizer = make(cls, options)
    eager_params, eager = make(cls, options)
    prep, eager_prep = (OptimizerPreparation(o, emulated=False) for o in (optimizer, eager))
    if prep.reason is not None and cls is Adagrad:
        pytest.skip(prep.reason)
    assert prep.reason is None
    graph = torch.cuda.CUDAGraph()
    for step in range(12):
        for ps, o in ((params, optimizer), (eager_params, eager)):
            fill_grads(ps, step)
            set_lr(o, step)
        with eager_prep.prepared():
            eager.step()
        if step < 2:
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream), prep.prepared():
                optimizer.step()
            torch.cuda.current_stream().wait_stream(stream)
            prep.settle(engine)
        else:
            if step == 2:
                prep.remember()
                with prep.prepared(), torch.cuda.graph(graph):
                    optimizer.step()
                assert prep.state_unchanged()
            prep.sync()
            graph.replay()
        for p, q in zip(params, eager_params, strict=True):
            assert torch.equal(p, q), f"step {step}"
    for s, t in zip(prep.state_tensors(), eager_prep.state_tensors(), strict=True):
        assert torch.equal(s, t)
    assert all(type(group["lr"]) is float for group in optimizer.param_groups)


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize(("cls", "options"), CASES, ids=IDS)
def test_a_graph_finds_gradients_wherever_they_lie(
    cls: type[Optimizer], options: dict[str, Any], clip: bool, engine: CudaEngine
) -> None:
    """Gradients of many sizes, elsewhere in each step; the graph holds no address of theirs."""
    sizes = [(n, 1 + 3 * n) for n in (1, 5, 64, 700)] * 15 + [(3,), ()]
    _follows(cls, options, sizes, clip=clip, engine=engine)


@pytest.mark.parametrize("count", range(32, 64, 3))
def test_what_launches_have_left_on_the_stack_is_no_pointer(count: int, engine: CudaEngine) -> None:
    """torch's multi-tensor kernels take bytes that nobody has set, with pointers of earlier launches among them."""
    sizes = [
        (64, 64, 3, 3),
        (64,),
        (64,),
        (64,),
        (128, 64, 3, 3),
        (128,),
        (128,),
        (128,),
        (256, 128, 3, 3),
    ] * 8
    _follows(AdamW, {"foreach": True}, sizes[:count], clip=True, engine=engine)


def _follows(
    cls: type[Optimizer],
    options: dict[str, Any],
    sizes: Sequence[tuple[int, ...]],
    *,
    clip: bool,
    engine: CudaEngine,
) -> None:
    def make() -> tuple[list[torch.nn.Parameter], Any, OptimizerPreparation]:
        generator = torch.Generator().manual_seed(0)
        params = [torch.nn.Parameter(torch.randn(size, generator=generator).cuda()) for size in sizes]
        optimizer = cls(params, lr=0.01, **options)
        return params, optimizer, OptimizerPreparation(optimizer, emulated=False)

    def step(params: list[torch.nn.Parameter], optimizer: Any) -> None:
        if clip:
            torch.nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()

    def new_gradients(params: list[torch.nn.Parameter], number: int, kept: list[Any]) -> None:
        generator = torch.Generator().manual_seed(number)
        kept.append(torch.empty(1 << (9 + number), device="cuda"))
        for p in params:
            kept.append(p.grad)
            p.grad = torch.randn(p.shape, generator=generator).cuda()

    (params, optimizer, prep), (eager_params, eager, eager_prep) = make(), make()
    if prep.reason is not None and cls is Adagrad:
        pytest.skip(prep.reason)
    kept: list[Any] = []
    graph, inputs = None, None
    seen = set()
    for number in range(8):
        for own in (params, eager_params):
            new_gradients(own, number, kept)
        with eager_prep.prepared():
            step(eager_params, eager)
        gradients = [p.grad for p in params]
        if number < 2:
            with prep.prepared():
                step(params, optimizer)
            prep.settle(engine)
            continue
        if graph is None:
            inputs = engine.movable(gradients)  # type: ignore[arg-type]
            for p, s in zip(params, inputs.stand_ins, strict=True):
                p.grad = s
            prep.remember()
            with prep.prepared():
                graph, _ = engine.capture(lambda: step(params, optimizer))
            inputs.follow(graph)
            for p, g in zip(params, gradients, strict=True):
                p.grad = g
        addresses = [g.data_ptr() for g in gradients]  # type: ignore[union-attr]
        seen.add(tuple(addresses))
        assert inputs is not None and inputs.fit(addresses)
        inputs.take(gradients, addresses)  # type: ignore[arg-type]
        prep.sync()
        graph.replay()
        for p, q in zip(params, eager_params, strict=True):
            assert torch.equal(p, q), f"step {number}"
            assert torch.equal(p.grad, q.grad), f"step {number}"  # type: ignore[arg-type]
    assert len(seen) == 6
    assert graph is not None and inputs is not None
    graph.close()
    inputs.close()
    torch.cuda.synchronize()


@pytest.mark.parametrize(("cls", "options"), CASES, ids=IDS)
def test_checkpoint_of_prepared_training_is_that_of_plain_training(
    cls: type[Optimizer], options: dict[str, Any], engine: CudaEngine
) -> None:
    params, optimizer = make(cls, options)
    plain_params, plain = make(cls, options)
    prep = OptimizerPreparation(optimizer, emulated=False)

    def train(steps: range) -> None:
        for step in steps:
            for ps, o in ((params, optimizer), (plain_params, plain)):
                fill_grads(ps, step)
                set_lr(o, step)
            plain.step()
            with prep.prepared():
                optimizer.step()
            prep.settle(engine)

    def compare() -> None:
        ours, theirs = optimizer.state_dict(), plain.state_dict()
        assert ours["param_groups"] == theirs["param_groups"]
        assert ours["state"].keys() == theirs["state"].keys()
        for index, state in theirs["state"].items():
            assert list(ours["state"][index]) == list(state)
            for key, value in state.items():
                mine = ours["state"][index][key]
                assert (mine.device, mine.dtype) == (value.device, value.dtype), key
                if cls is not Rprop:  # a sign may flip where a gradient nearly cancels
                    torch.testing.assert_close(mine, value, rtol=1e-4, atol=1e-5)

    train(range(4))
    compare()
    saved = copy.deepcopy(plain.state_dict())
    optimizer.load_state_dict(saved)
    plain.load_state_dict(copy.deepcopy(saved))  # torch keeps the checkpoint's own step tensors
    with torch.no_grad():
        for p, q in zip(params, plain_params, strict=True):
            p.copy_(q)
    compare()
    train(range(4, 6))
    compare()
    prep.close()
    for mine, value in zip(_tensors(optimizer), _tensors(plain), strict=True):
        assert mine.device == value.device


def _tensors(optimizer: Optimizer) -> list[Tensor]:
    return [t for state in optimizer.state.values() for t in state.values() if isinstance(t, Tensor)]


def stepped(count: int) -> tuple[list[torch.nn.Parameter], OptimizerPreparation]:
    """Parameters of 2 MiB with gradients, and their optimizer after a step."""
    params = [torch.nn.Parameter(torch.randn(512, 1024, device="cuda")) for _ in range(count)]
    for p in params:
        p.grad = torch.randn_like(p)
    optimizer = AdamW(params)
    prep = OptimizerPreparation(optimizer, emulated=False)
    with prep.prepared():
        optimizer.step()
    return params, prep


def test_settle_keeps_identity_and_values_and_then_rests(engine: CudaEngine) -> None:
    _, prep = stepped(4)
    tensors = prep.state_tensors()
    values = [t.clone() for t in tensors]
    prep.settle(engine)
    assert all(a is b for a, b in zip(prep.state_tensors(), tensors, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(tensors, values, strict=True))
    generation, addresses = prep.generation, [t.data_ptr() for t in tensors]
    prep.settle(engine)
    assert prep.generation == generation
    assert [t.data_ptr() for t in tensors] == addresses


def test_settle_fills_what_other_tensors_leave_of_their_segments(engine: CudaEngine) -> None:
    """DDP makes its buckets in memory that activations had, and keeps large segments by them."""
    params, prep = stepped(64)
    for p in params:
        p.grad = None
    torch.cuda.empty_cache()
    state = [t for t in prep.state_tensors() if t.nbytes > 1024]
    size = sum(t.nbytes for t in state)
    activation = torch.empty(2 * size, dtype=torch.uint8, device="cuda")
    del activation
    bucket = torch.empty(size // 2, dtype=torch.uint8, device="cuda")
    values = [t.clone().cpu() for t in state]
    torch.cuda.empty_cache()
    reserved = torch.cuda.memory_reserved()
    prep.settle(engine)
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() < reserved - size / 2
    assert all(torch.equal(t.cpu(), v) for t, v in zip(state, values, strict=True))
    del bucket


def test_scaler_step_of_default_sgd_reads_nothing_back() -> None:
    params, optimizer = make(SGD, {"momentum": 0.9})
    prep = OptimizerPreparation(optimizer, emulated=False)
    assert prep.step_supports_scaler
    scaler = torch.amp.GradScaler("cuda")
    before = [p.detach().clone() for p in params]
    scaler.scale(torch.zeros((), device="cuda"))
    for p in params:
        assert p.grad is not None
        p.grad.fill_(float("inf"))
    with prep.prepared():
        torch.cuda.set_sync_debug_mode("error")
        try:
            scaler.step(optimizer)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    scaler.update()
    assert all(torch.equal(p, q) for p, q in zip(params, before, strict=True))


def test_settle_has_little_of_the_state_in_memory_twice(engine: CudaEngine) -> None:
    _, prep = stepped(64)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    prep.settle(engine)
    size = sum(t.nbytes for t in prep.state_tensors())
    assert torch.cuda.max_memory_allocated() - allocated < size / 8
    assert torch.cuda.max_memory_reserved() - reserved < size / 4


@pytest.mark.parametrize("change", ["state", "device"])
def test_prepared_notices_what_was_changed_since_it_was_entered_last(change: str) -> None:
    params, optimizer = make(AdamW, {})
    prep = OptimizerPreparation(optimizer, emulated=False)
    for step in range(3):
        fill_grads(params, step)
        with prep.prepared():
            optimizer.step()
    if change == "state":
        optimizer.state[params[-1]]["step"] = torch.tensor(3.0)  # as a user's own loading does
    else:
        params[-1].data = params[-1].data.cpu()
    with prep.prepared():
        prepared = torch.is_tensor(optimizer.param_groups[0]["lr"])
        assert prepared == (change == "state")
        if prepared:
            optimizer.step()
    assert all(t.is_cuda for t in _tensors(optimizer))
    assert [float(optimizer.state[p]["step"]) for p in params] == [4.0 if change == "state" else 3.0] * 3
