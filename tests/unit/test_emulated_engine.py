"""Promises of the emulated engine, each against plain PyTorch, bit for bit."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from ranks import alone_in_a_group
from torch import distributed, nn
from torch.distributed import _functional_collectives as functional_collectives

from pygraph_train.graphs.emulated import EmulatedEngine, _one_capture
from pygraph_train.graphs.engine import CaptureError, Engine, Graph
from pygraph_train.problems import user_location

pytestmark = pytest.mark.quick


@pytest.fixture
def engine() -> Iterator[EmulatedEngine]:
    torch.manual_seed(0)
    yield EmulatedEngine()
    assert not _one_capture.here


def adamw(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=torch.tensor(1e-2, dtype=torch.float64), fused=True)


def sgd(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, fused=True)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


Step = Callable[[torch.Tensor], torch.Tensor]


def make_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def tensors_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    state = [v for s in optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
    return [*model.state_dict().values(), *state]


def same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return len(left) == len(right) and all(map(torch.equal, left, right))


def assert_replay_equals_eager(
    engine: EmulatedEngine,
    model: nn.Module,
    inputs: list[torch.Tensor],
    make_optimizer: Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer] = adamw,
    make_step: Callable[[nn.Module, torch.optim.Optimizer], Step] = make_step,
) -> None:
    """One warm-up step (optimizer state appears), then one replay per input."""
    plain = copy.deepcopy(model)
    optimizer, plain_optimizer = make_optimizer(model.parameters()), make_optimizer(plain.parameters())
    step, plain_step = make_step(model, optimizer), make_step(plain, plain_optimizer)
    seed = torch.get_rng_state()
    step(inputs[0])
    state = torch.get_rng_state()
    torch.set_rng_state(seed)
    plain_step(inputs[0])
    static = inputs[0].clone()
    before = [t.clone() for t in tensors_of(model, optimizer)]
    graph, loss = engine.capture(lambda: step(static))
    assert same(before, tensors_of(model, optimizer))
    assert torch.equal(state, torch.get_rng_state())
    for x in inputs:
        torch.set_rng_state(state)
        expected = plain_step(x)
        after_plain = torch.get_rng_state()
        torch.set_rng_state(state)
        static.copy_(x)
        graph.replay()
        state = torch.get_rng_state()
        assert torch.equal(loss, expected)
        assert torch.equal(state, after_plain)
        assert same(tensors_of(model, optimizer), tensors_of(plain, plain_optimizer))


def refused_at(engine: EmulatedEngine, fn: Callable[[], object]) -> tuple[str, str | None]:
    with pytest.raises(CaptureError) as caught:
        engine.capture(fn)
    return caught.value.reason, caught.value.where


def test_engine_and_graph_keep_the_contract(engine: EmulatedEngine) -> None:
    graph, _ = engine.capture(lambda: torch.ones(2) + 1)
    assert isinstance(engine, Engine) and isinstance(graph, Graph)
    assert engine.name == "emulated" and engine.device == torch.device("cpu")
    assert graph.nodes == 2


@pytest.mark.parametrize("make_optimizer", [adamw, sgd])
def test_whole_step_equals_eager(engine: EmulatedEngine, make_optimizer: Callable) -> None:
    inputs = [torch.randn(3, 4) for _ in range(4)]
    assert_replay_equals_eager(engine, mlp(), inputs, make_optimizer)


def test_dropout_sequence_equals_eager(engine: EmulatedEngine) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2), nn.Dropout(0.1))
    assert_replay_equals_eager(engine, model, [torch.randn(3, 4) for _ in range(4)])


def test_batch_norm_statistics_equal_eager(engine: EmulatedEngine) -> None:
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(12, 2))
    assert_replay_equals_eager(engine, model, [torch.randn(3, 2, 4, 4) for _ in range(3)])
    assert model[1].num_batches_tracked == 4


def test_embedding_equals_eager(engine: EmulatedEngine) -> None:
    model = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 2))
    assert_replay_equals_eager(engine, model, [torch.randint(7, (2, 3)) for _ in range(3)])


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).view(2, 5, 3, 2, 4).permute(2, 0, 3, 1, 4).unbind(0)
        return F.scaled_dot_product_attention(q, k, v, dropout_p=0.0, is_causal=True)


def test_attention_equals_eager(engine: EmulatedEngine) -> None:
    assert_replay_equals_eager(engine, Attention(), [torch.randn(2, 5, 8) for _ in range(3)])


def test_bf16_autocast_equals_eager(engine: EmulatedEngine) -> None:
    def make(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
        plain = make_step(model, optimizer)

        def step(x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return plain(x)

        return step

    assert_replay_equals_eager(engine, mlp(), [torch.randn(3, 4) for _ in range(3)], make_step=make)


def test_capture_and_replay_ignore_an_open_autocast_region_and_its_cache(engine: EmulatedEngine) -> None:
    linear, x = nn.Linear(4, 2), torch.randn(3, 4)
    with torch.autocast("cpu", torch.bfloat16):
        linear(x)  # leaves a bf16 copy of the weight in autocast's cache
        graph, y = engine.capture(lambda: linear(x))
        plain = engine.capture(lambda: torch._C._nn.linear(x, linear.weight))[1]
        assert not linear(x).isnan().any()  # no cast of the capture is left in it
    with torch.no_grad():
        linear.weight.mul_(2)
    with torch.autocast("cpu", torch.bfloat16):
        expected = linear(x)
    graph.replay()
    assert torch.equal(y, expected) and plain.dtype is torch.bfloat16

    graph, y = engine.capture(lambda: x @ x.T)
    with torch.autocast("cpu", torch.bfloat16):
        graph.replay()
    assert torch.equal(y, x @ x.T)


def test_gradient_clipping_equals_eager(engine: EmulatedEngine) -> None:
    def make(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
        def step(x: torch.Tensor) -> torch.Tensor:
            (100 * model(x).square().mean()).backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            return norm

        return step

    assert_replay_equals_eager(engine, mlp(), [torch.randn(3, 4) for _ in range(3)], sgd, make)


def test_grad_scaler_skips_the_step_with_infinite_gradients(engine: EmulatedEngine) -> None:
    def make(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)

        def step(x: torch.Tensor) -> torch.Tensor:
            scaler.scale(model(x).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            assert scaler._scale is not None
            return scaler._scale.clone()

        return step

    inputs = [torch.randn(3, 4) for _ in range(5)]
    inputs[2] = torch.full((3, 4), 1e30)
    assert_replay_equals_eager(engine, mlp(), inputs, adamw, make)


def test_gradients_that_were_none_get_fixed_addresses_and_are_filled(engine: EmulatedEngine) -> None:
    model, x = mlp(), torch.randn(3, 4)
    graph, _ = engine.capture(lambda: model(x).sum().backward())
    parameters = list(model.parameters())
    addresses = [p.grad.data_ptr() for p in parameters]
    graph.replay()
    graph.replay()
    expected = torch.autograd.grad(model(x).sum(), parameters)
    assert same([p.grad for p in parameters], list(expected))
    assert addresses == [p.grad.data_ptr() for p in parameters]


def test_gradients_accumulate_into_existing_ones(engine: EmulatedEngine) -> None:
    p, x = nn.Parameter(torch.ones(3)), torch.randn(3)
    p.grad = torch.zeros(3)
    graph, _ = engine.capture(lambda: (p * x).sum().backward())
    assert torch.equal(p.grad, torch.zeros(3))
    graph.replay()
    graph.replay()
    assert torch.equal(p.grad, x + x)


def test_views_and_in_place_chains_equal_eager(engine: EmulatedEngine) -> None:
    def work(x: torch.Tensor) -> list[torch.Tensor]:
        y = x.clone()
        y[1].add_(3).mul_(x[0])
        y.t_().unsqueeze_(0)
        head, tail = y.squeeze(0).split([1, 2])
        tail[:, 0] = head[0, 1]
        y[y > 2] = -1.0
        out = torch.empty(0)
        torch.add(head, 1, out=out)
        return [y, tail.expand(2, 2, 3)[1], out, torch.zeros(0), *torch._foreach_mul([head, tail], 2.0)]

    x = torch.randn(3, 3)
    graph, results = engine.capture(lambda: work(x))
    for _ in range(3):
        x.copy_(torch.randn(3, 3))
        graph.replay()
        assert same(results, work(x))


def test_in_place_change_of_an_input_happens_once_per_replay(engine: EmulatedEngine) -> None:
    x = torch.zeros(2)
    graph, _ = engine.capture(lambda: x.t().add_(1))
    assert torch.equal(x, torch.zeros(2))
    graph.replay()
    graph.replay()
    assert torch.equal(x, torch.full((2,), 2.0))


def test_replay_is_invisible_to_autograd(engine: EmulatedEngine) -> None:
    weight, x = nn.Parameter(torch.ones(2)), torch.ones(2)
    graph, y = engine.capture(lambda: (weight * x).sum())
    version = x._version, weight._version, y._version
    grad_fn = y.grad_fn
    graph.replay()
    assert (x._version, weight._version, y._version) == version and y.grad_fn is grad_fn


def test_capture_executes_nothing(engine: EmulatedEngine) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout())
    optimizer = sgd(model.parameters())
    generator = torch.Generator().manual_seed(3)
    step = make_step(model, optimizer)
    x = torch.randn(3, 4)
    step(x)

    def contents() -> list[torch.Tensor]:
        return [x, torch.get_rng_state(), generator.get_state(), *tensors_of(model, optimizer)]

    before = [t.clone() for t in contents()]
    engine.capture(lambda: step(x + torch.rand(4, generator=generator)))
    assert same(before, contents())


def test_outputs_have_fixed_addresses_and_no_values_before_the_first_replay(engine: EmulatedEngine) -> None:
    x = torch.randn(3)

    def work() -> tuple[torch.Tensor, ...]:
        return x * 2, torch.arange(3), (x * 2).bfloat16(), torch.ones((), dtype=torch.float64)

    graph, results = engine.capture(work)
    assert all(r.isnan().all() if r.is_floating_point() else (r > 2**40).all() for r in results)
    addresses = [r.data_ptr() for r in results]
    graph.replay()
    assert same(list(results), list(work()))
    assert addresses == [r.data_ptr() for r in results]


def test_python_numbers_are_baked_in(engine: EmulatedEngine) -> None:
    factor = {"value": 2.0}
    x = torch.ones(2)
    graph, y = engine.capture(lambda: x * factor["value"])
    factor["value"] = 5.0
    graph.replay()
    assert torch.equal(y, x * 2.0)


def test_tensor_constants_are_baked_in_and_made_anew_by_every_replay(engine: EmulatedEngine) -> None:
    x = torch.zeros(2)

    def work() -> tuple[torch.Tensor, torch.Tensor]:
        constant = torch.tensor([1.0, 2.0])
        return x.add_(constant), constant.mul_(3)

    graph, (_, constant) = engine.capture(work)
    assert torch.equal(constant, torch.tensor([1.0, 2.0]))
    graph.replay()
    graph.replay()
    assert torch.equal(x, torch.tensor([2.0, 4.0]))
    assert torch.equal(constant, torch.tensor([3.0, 6.0]))


def test_memory_of_numpy_arrays_is_an_input(engine: EmulatedEngine) -> None:
    numpy = pytest.importorskip("numpy")
    array = numpy.ones(2, dtype="float32")
    graph, y = engine.capture(lambda: torch.from_numpy(array) + 1)
    array[:] = 4
    graph.replay()
    assert torch.equal(y, torch.full((2,), 5.0))


X = torch.arange(3.0)
HOST_READS: dict[str, Callable[[], object]] = {
    "item": lambda: X[0].item(),
    "float": lambda: float(X[0]),
    "if": lambda: 1 if X[0] > 1 else 2,
    "equal": lambda: torch.equal(X, X),
    "allclose": lambda: torch.allclose(X, X),
    "is_nonzero": lambda: torch.is_nonzero(X[0]),
    "nonzero": lambda: X.nonzero(),
    "masked_select": lambda: X[X > 1],
    "masked_assignment": lambda: X.index_put_((X > 1,), torch.ones(1), accumulate=True),
    "unique": lambda: X.unique(),
    "repeat_interleave": lambda: X.repeat_interleave(torch.tensor([1, 2, 3])),
    "numpy": lambda: X.numpy(),
    "array": lambda: X.__array__(),
    "tolist": lambda: X.tolist(),
    "repr": lambda: repr(X),
    "format": lambda: f"{X[0]:.2f}",
    "parameter repr": lambda: str(nn.Parameter(X)),
}


@pytest.mark.parametrize("name", HOST_READS)
def test_host_reads_are_refused_with_their_location(engine: EmulatedEngine, name: str) -> None:
    fn = HOST_READS[name]
    _, where = refused_at(engine, fn)
    assert where == f"{__file__}:{fn.__code__.co_firstlineno}"
    assert torch.equal(X, torch.arange(3.0))


def test_host_read_in_a_backward_hook_is_refused(engine: EmulatedEngine) -> None:
    x = torch.ones(2, requires_grad=True)
    y = x * 2

    def hook(grad: torch.Tensor) -> None:
        grad[0].item()

    y.register_hook(hook)
    _, where = refused_at(engine, lambda: y.sum().backward())
    assert where == f"{__file__}:{hook.__code__.co_firstlineno + 1}"


def test_shapes_that_do_not_depend_on_values_are_not_refused(engine: EmulatedEngine) -> None:
    x, index = torch.arange(4.0), torch.tensor([2, 0])

    def work() -> tuple[torch.Tensor, torch.Tensor]:
        return x[index], x[index].repeat_interleave(index + 1, output_size=4)

    graph, results = engine.capture(work)
    graph.replay()
    assert same(list(results), list(work()))


def test_swallowed_or_wrapped_host_read_is_still_refused(engine: EmulatedEngine) -> None:
    def swallow() -> torch.Tensor:
        try:
            return X * X[0].item()
        except RuntimeError:
            return X

    def wrap() -> None:
        try:
            X[0].item()
        except Exception as error:
            raise ValueError("wrapped") from error

    assert "item" in refused_at(engine, swallow)[0]
    assert "item" in refused_at(engine, wrap)[0]


def test_setting_the_random_state_is_refused(engine: EmulatedEngine) -> None:
    state = torch.get_rng_state()
    assert "random state" in refused_at(engine, lambda: (torch.manual_seed(5), torch.rand(2)))[0]
    assert "random state" in refused_at(engine, lambda: torch.manual_seed(5))[0]
    assert torch.equal(state, torch.get_rng_state())


def test_what_the_tape_cannot_hold_is_refused(engine: EmulatedEngine) -> None:
    assert "layout" in refused_at(engine, lambda: torch.eye(2).to_sparse())[0]


def test_what_has_no_memory_is_recorded_as_nothing(engine: EmulatedEngine) -> None:
    graph, out = engine.capture(lambda: torch.empty(2, device="meta") + 1)
    assert out.is_meta and graph.nodes == 0
    graph.replay()


@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt(), MemoryError()])
def test_exception_passes_through_and_contents_are_restored(
    engine: EmulatedEngine, error: BaseException
) -> None:
    x = torch.zeros(3)
    state = torch.get_rng_state()

    def work() -> None:
        x.add_(torch.rand(3))
        raise error

    with pytest.raises(type(error)) as caught:
        engine.capture(work)
    assert caught.value is error
    assert torch.equal(x, torch.zeros(3))
    assert torch.equal(state, torch.get_rng_state())
    engine.capture(lambda: x + 1)


def test_capture_inside_a_capture_is_refused(engine: EmulatedEngine) -> None:
    def outer() -> None:
        assert _one_capture.here
        EmulatedEngine().capture(lambda: None)

    with pytest.raises(RuntimeError, match="one graph at a time"):
        engine.capture(outer)


def test_replay_inside_a_capture_becomes_part_of_it(engine: EmulatedEngine) -> None:
    x = torch.zeros(2)
    inner, y = engine.capture(lambda: x.add_(1) * 2)
    outer, z = engine.capture(lambda: (inner.replay(), y + 1)[1])
    outer.replay()
    assert torch.equal(x, torch.ones(2)) and torch.equal(z, torch.full((2,), 3.0))


def test_closed_graphs_and_engines_refuse_work(engine: EmulatedEngine) -> None:
    graph, _ = engine.capture(lambda: torch.ones(1))
    graph.close()
    graph.close()
    with pytest.raises(RuntimeError, match="graph is closed"):
        graph.replay()
    # it waits for its backward, where an exception of the user's has ended a training
    waiting, _ = engine.capture(lambda: torch.ones(1))
    engine.close()
    waiting.close()
    with pytest.raises(RuntimeError, match="engine is closed"):
        engine.capture(lambda: None)


def test_replay_does_not_depend_on_the_callers_grad_mode(engine: EmulatedEngine) -> None:
    lstm, x = nn.LSTM(4, 8), torch.randn(5, 2, 4)
    graph, _ = engine.capture(lambda: lstm(x)[0].sum().backward())
    with torch.no_grad():
        graph.replay()
    parameters = list(lstm.parameters())
    assert same([p.grad for p in parameters], list(torch.autograd.grad(lstm(x)[0].sum(), parameters)))

    with torch.inference_mode():
        expected = lstm(x)[0] + 1  # some processors have other kernels where gradients are wanted
        graph, y = engine.capture(lambda: lstm(x)[0].add_(1))
    graph.replay()
    assert torch.equal(y, expected)


def test_replay_runs_no_user_python(engine: EmulatedEngine) -> None:
    calls: list[str] = []

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            calls.append("forward")
            return x * 2

        @staticmethod
        def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
            calls.append("backward")
            return grad * 2

    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda grad: calls.append("hook"))
    graph, _ = engine.capture(lambda: Double.apply(x).sum().backward())
    assert calls == ["forward", "backward", "hook"]
    graph.replay()
    assert calls == ["forward", "backward", "hook"] and torch.equal(x.grad, torch.full((2,), 2.0))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_function_is_recorded(engine: EmulatedEngine, backend: str) -> None:
    torch._dynamo.reset()
    model, x = mlp(), torch.randn(3, 4)
    compiled = torch.compile(lambda: model(x).square().sum(), backend=backend)
    compiled().backward()
    model.zero_grad()
    graph, _ = engine.capture(lambda: compiled().backward())
    x.copy_(torch.randn(3, 4))
    graph.replay()
    parameters = list(model.parameters())
    expected = torch.autograd.grad(model(x).square().sum(), parameters)
    assert same([p.grad for p in parameters], list(expected))


def test_location_is_the_innermost_line_of_user_code() -> None:
    assert user_location() == f"{__file__}:{inspect.currentframe().f_lineno}"
    with pytest.raises(RuntimeError) as caught:
        functools.reduce(lambda a, b: torch.mm(a, b), [X, X])
    # the innermost frame of ours is the lambda's, on the line of the call
    assert user_location(caught.tb) == f"{__file__}:{caught.traceback[0].lineno + 1}"


def test_no_capture_talks_to_other_processes(engine: EmulatedEngine) -> None:
    values = torch.ones(3)
    with alone_in_a_group():
        in_place, _ = engine.capture(lambda: distributed.all_reduce(values))
        in_place.replay()
        in_place.close()
        total = lambda: functional_collectives.all_reduce(values, "sum", distributed.group.WORLD) * 2  # noqa: E731
        graph, made = engine.capture(total)
        graph.replay()
        assert made.tolist() == [2.0] * 3
        graph.close()
    assert values.tolist() == [1.0] * 3
