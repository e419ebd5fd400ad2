"""A step that may not be replayed is not, trains as plain PyTorch does, and the report says what and where."""

from __future__ import annotations

import enum
import itertools
import random
from collections import Counter, deque
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module
from torch.utils.checkpoint import checkpoint
from training import Diary, Net, adamw, batches, both, loss_of, sgd

from pygraph_train import StepReport
from pygraph_train.report.step_report import Fallback

COUNT = 0


class Mode(enum.Enum):
    TWICE = 2.0
    THRICE = 3.0


class Stateful(Net):
    """A model with every kind of Python state that a step could write."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.epoch = 0
        self.values: list[Any] = []
        self.table: dict[str, int] = {"n": 0}
        self.seen: set[int] = set()
        self.queue: deque[int] = deque()
        self.counter: Counter[str] = Counter()
        self.endless = itertools.count()
        self.cycle = itertools.cycle([1.0, 2.0])
        self.generator = iter([float(i) for i in range(1000)])
        self.last: Any = None

    total = 0
    scale = 1.0
    mode = Mode.TWICE
    history: ClassVar[list[int]] = []
    scales: ClassVar[list[float]] = [1.0]
    pair = (1.0, 1.0)

    @classmethod
    def scale_of_the_class(cls) -> float:
        return cls.scale


def train(
    make: Callable[[Stateful], Callable[..., Any]],
    *,
    prepare: Callable[[Stateful, Any], Any] = lambda model, optimizer: None,
    between: Callable[[Stateful, int], Any] = lambda model, index: None,
    observe: Callable[[Stateful], Any] = lambda model: None,
    loss: Callable[[Any], Tensor] = lambda out: out,
    **config: Any,
) -> StepReport:
    """40 steps of `make(model)`, compared with plain training."""

    def script(diary: Diary) -> None:
        model = Stateful()
        optimizer = adamw(model)
        prepare(model, optimizer)
        step = diary.step(make(model), model=model, optimizer=optimizer)
        for index, batch in enumerate(batches(40)):
            between(model, index)
            diary.write("loss", loss(step(batch)))
            diary.write("observed", observe(model))
            diary.write_state(model, optimizer)

    return both(script, **config)


def refused(report: StepReport, name: str, where: str | None) -> Fallback:
    """The only reason for not replaying, which names the thing and the line."""
    assert report.steps_replayed == 0, str(report)
    (fallback,) = report.fallbacks
    assert name in fallback.reason, str(report)
    assert fallback.where == where, str(report)
    return fallback


# -- 1. one graph, no host synchronisation ---------------------------------------------------------------


def test_item_in_the_step():
    def make(model):
        def step_fn(batch):
            loss = loss_of(model)(batch)
            return loss * loss.item()

        return step_fn

    train(make, replays=69)


def test_print_in_the_step(capsys):
    def make(model):
        def step_fn(batch):
            loss = loss_of(model)(batch)
            print("loss is", loss)
            return loss

        return step_fn

    train(make, replays=70)


def test_numpy_in_the_step():
    def make(model):
        def step_fn(batch):
            loss = loss_of(model)(batch)
            model.values.append(float(np.mean(loss.detach().numpy())))
            return loss

        return step_fn

    train(make, observe=lambda m: list(m.values), replays=60)


def test_loop_on_a_tensor():
    def make(model):
        def step_fn(batch):
            loss = loss_of(model)(batch)
            for _ in range(int(3 * loss)):
                loss = loss * 0.9
            return loss

        return step_fn

    train(make, replays=67)


def test_numpy_batch():
    """Dynamo makes tensors of NumPy arrays; their memory changes without a trace."""

    def script(diary: Diary) -> None:
        model = Net()
        optimizer = adamw(model)

        def step_fn(x: Any) -> Tensor:
            return model(torch.from_numpy(x)).square().mean()

        step = diary.step(step_fn, model=model, optimizer=optimizer)
        for x, _ in batches(30):
            diary.write("loss", step(x.numpy()))
            diary.write_state(model, optimizer)

    both(script, replays=50)


# -- 2. guards ---------------------------------------------------------------------------------------------


def test_attribute_read_that_changes_on_every_step():
    def make(model):
        def step_fn(batch):
            return loss_of(model)(batch).clamp(max=0.5 + model.count / 40)  # as self.global_step

        return step_fn

    def between(model, index):
        model.count = index

    train(make, between=between, replays=50)


def test_attribute_read_that_changes_once_an_epoch():
    def make(model):
        def step_fn(batch):
            return loss_of(model)(batch) * (1 + model.epoch)

        return step_fn

    def between(model, index):
        model.epoch = index // 20

    train(make, between=between, replays=25)


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("config", [{}, {"forward": "off"}], ids=str)
@pytest.mark.parametrize(
    "read",
    [
        lambda model: type(model).scale,
        lambda model: model.__class__.scale,
        lambda model: model.scale_of_the_class(),
        lambda model: type(model).mode.value,
        lambda model: type(model).scales[0],
        lambda model: Stateful.pair[1],
    ],
    ids=["type", "__class__", "classmethod", "enum", "list", "tuple"],
)
def test_attribute_of_a_class_that_changes_once_an_epoch(read, config, monkeypatch):
    """torch 2.11 sets no guard for these (pytorch #176851)."""

    def make(model):
        return lambda batch: loss_of(model)(batch) * read(model)

    def between(model, index):
        factor = 1.0 + index // 20
        monkeypatch.setattr(Stateful, "scale", factor)
        monkeypatch.setattr(Stateful, "pair", (1.0, factor))
        Stateful.scales[0] = factor
        monkeypatch.setattr(Stateful, "mode", Mode.TWICE if index < 20 else Mode.THRICE)

    report = train(make, between=between, **config, replays=25)
    assert report.steps_replayed >= (25 if not config else 0), str(report)


def test_branch_on_the_batch_index():
    def script(diary: Diary) -> None:
        model = Net()
        optimizer = adamw(model)

        def step_fn(batch: Any, batch_idx: int) -> Tensor:
            loss = loss_of(model)(batch)
            if batch_idx % 3 == 0:
                loss = loss * 2
            return loss

        step = diary.step(step_fn, model=model, optimizer=optimizer)
        for index, batch in enumerate(batches(40)):
            diary.write("loss", step(batch, index))
            diary.write_state(model, optimizer)

    both(script, replays=28, plan="{F} {B} {O}")


@pytest.mark.slow
def test_global_number_read():
    def make(model):
        def step_fn(batch):
            return loss_of(model)(batch).clamp(max=1e6 + COUNT)  # no tensor can stand for such a number

        return step_fn

    def between(model, index):
        global COUNT
        COUNT = index

    report = train(
        make, between=between, replays=25
    )  # the update waits for graphs of the forward, which never come
    assert report.steps_replayed == 0 and "traces it anew in each step" in str(report), str(report)


@pytest.mark.slow
def test_list_read_that_grows_outside_of_the_step():
    def make(model):
        def step_fn(batch):
            return loss_of(model)(batch) * (1 + len(model.values))

        return step_fn

    report = train(make, between=lambda model, index: model.values.append(index), replays=30)
    assert report.steps_replayed >= 30, str(report)


def test_python_random_numbers():
    def make(model):
        def step_fn(batch):
            return loss_of(model)(batch) * random.random()

        return step_fn

    report = train(make, prepare=lambda *_: random.seed(3), replays=20)
    assert report.steps_replayed >= 20


def test_numpy_random_numbers():
    def make(model):
        def step_fn(batch):
            return loss_of(model)(batch) * float(np.random.rand())

        return step_fn

    report = train(make, prepare=lambda *_: np.random.seed(3), replays=20)
    assert report.steps_replayed >= 20


def test_own_generator():
    """Dynamo does not trace it; the random numbers are the same ones."""

    def make(model):
        generator = torch.Generator().manual_seed(5)

        def step_fn(batch):
            noise = torch.rand(batch[0].shape, generator=generator)
            return nn.functional.cross_entropy(model(batch[0] + noise), batch[1])

        return step_fn

    train(make, replays=70)


# -- 3. nothing is written back to Python ------------------------------------------------------------------


def _count(model, index):
    model.count += 1


def _append(model, index):
    model.values.append(1)


def _table(model, index):
    model.table["n"] += 1


def _set(model, index):
    model.seen.add(len(model.seen))


def _deque(model, index):
    model.queue.append(1)


def _counter(model, index):
    model.counter["n"] += 1


def _class_attribute(model, index):
    type(model).total += 1


def _class_list(model, index):
    type(model).history.append(1)


def _global(model, index):
    global COUNT
    COUNT += 1


def _endless(model, index):
    model.last = next(model.endless)


def _cycle(model, index):
    return next(model.cycle)


def _iterator(model, index):
    return next(model.generator)


def _buffer_attribute(model, index):
    model.last = index.sum()


WRITES = [_count, _append, _table, _deque, _class_list, _buffer_attribute]


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("write", WRITES)
def test_python_state_that_a_replay_writes(write):
    _writing(write, replays=30, plan="{F} {B} {O}")


@pytest.mark.slow_after(2)
@pytest.mark.parametrize(
    ("write", "name"),
    [
        (_set, "seen"),
        (_counter, "counter"),
        (_class_attribute, "total"),
        (_endless, ""),
        (_cycle, ""),
        (_iterator, ""),
        (_global, "COUNT"),
    ],
)
def test_python_state_written_by_the_step(write, name):
    _writing(write, replays=24)


def _writing(write, **config):
    def prepare(model, optimizer):
        global COUNT
        COUNT = 0
        Stateful.total = 0
        Stateful.history.clear()

    def make(model):
        def step_fn(batch):
            loss = loss_of(model)(batch)
            factor = write(model, batch[0])
            return loss * (1.0 if factor is None else factor)

        return step_fn

    def observe(model):
        return [
            *(model.count, list(model.values), dict(model.table), sorted(model.seen), len(model.queue)),
            *(dict(model.counter), model.total, list(model.history), COUNT, model.last),
        ]

    return train(make, prepare=prepare, observe=observe, **config)


def test_closure_variable_written_by_the_step():
    calls = []

    def make(model):
        n = 0

        def step_fn(batch):
            nonlocal n
            n += 1
            return loss_of(model)(batch)

        calls.append(lambda: n)
        return step_fn

    train(make, observe=lambda model: calls[-1](), replays=30, plan="{F} {B} {O}")


def test_python_write_that_starts_late():
    """A branch that is not taken during the warm-up: its guard fails, and it is traced then."""

    def make(model):
        def step_fn(batch):
            loss = loss_of(model)(batch)
            if model.epoch:
                model.values.append(1)
            return loss

        return step_fn

    def between(model, index):
        model.epoch = int(index >= 20)

    train(make, between=between, observe=lambda m: list(m.values), replays=28, plan="{F} {B} {O}")


def test_batch_changed_in_place():
    def make(model):
        def step_fn(batch):
            batch[0].mul_(2)
            return loss_of(model)(batch)

        return step_fn

    train(make, replays=70)


def test_state_kept_in_a_buffer_is_legal():
    def prepare(model, optimizer):
        model.register_buffer("steps", torch.zeros(()))

    def make(model):
        def step_fn(batch):
            model.steps.add_(1)
            return loss_of(model)(batch) * model.steps

        return step_fn

    assert train(make, prepare=prepare, replays=30).steps_replayed >= 30


def test_tensor_computed_outside_of_the_step():
    def between(model, index):
        model.last = model.second.weight.sum() * 2

    def make(model):
        def step_fn(batch):
            return loss_of(model)(batch) * model.last

        return step_fn

    train(make, between=between, replays=55)


# -- 4. hooks ----------------------------------------------------------------------------------------------


def _forward_hook(model, optimizer, calls):
    model.first.register_forward_hook(lambda *_: calls.append(1))


def _forward_pre_hook(model, optimizer, calls):
    model.first.register_forward_pre_hook(lambda *_: calls.append(1))


def _module_backward_hook(model, optimizer, calls):
    model.first.register_full_backward_hook(lambda *_: calls.append(1))


def _tensor_hook(model, optimizer, calls):
    model.first.weight.register_hook(lambda grad: calls.append(1) or grad * 2)


def _accumulate_hook(model, optimizer, calls):
    model.first.weight.register_post_accumulate_grad_hook(lambda p: calls.append(1))


def _global_forward_hook(model, optimizer, calls):
    module.register_module_forward_hook(lambda *_: calls.append(1))


@pytest.fixture(autouse=True)
def _no_global_hooks():
    yield
    module._global_forward_hooks.clear()


HOOKS = pytest.mark.parametrize(
    "register",
    [
        _forward_hook,
        _forward_pre_hook,
        _module_backward_hook,
        _tensor_hook,
        _accumulate_hook,
        _global_forward_hook,
    ],
)


@pytest.mark.slow
@HOOKS
def test_hooks_registered_in_mid_run(register):
    calls: list[int] = []

    def between(model, index):
        if index == 0:
            calls.clear()
            module._global_forward_hooks.clear()
        if index == 20:
            register(model, None, calls)

    report = train(loss_of, between=between, observe=lambda model: len(calls), replays=12)
    assert report.steps_replayed >= 10, str(report)


@pytest.mark.parametrize("cut", [lambda w: w[:4], lambda w: w.t()], ids=["rows", "transposed"])
def test_a_parameter_that_looks_different_at_the_same_address(cut):
    def script(diary: Diary) -> None:
        table, head = nn.Embedding(8, 8), nn.Linear(8, 3)
        model = nn.ModuleList([table, head])

        def step_fn(batch):
            return nn.functional.cross_entropy(head(table(batch[1])), batch[1]) + table.weight.pow(2).mean()

        step = diary.step(step_fn, model=model, optimizer=sgd(model, momentum=0))
        for index, batch in enumerate(batches(40)):
            if index == 20:
                table.weight.data = cut(table.weight.data)
            diary.write("loss", step(batch))
            diary.write("weights", [p.detach() for p in model.parameters()])

    both(script, replays=20, plan="{F} {B} {O}")


def test_a_gradient_of_the_step_before_that_the_step_reads():
    def make(model):
        def step_fn(batch):
            norm = model.first.weight.grad.norm() if model.first.weight.grad is not None else 0.0
            return loss_of(model)(batch) + norm

        return step_fn

    def script(diary: Diary) -> None:
        model = Stateful()
        optimizer = adamw(model)
        step = diary.step(make(model), model=model)
        for batch in batches(30):
            diary.write("loss", step(batch))
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            diary.write_state(model, optimizer)

    both(script, replays=26)


def test_a_lazy_module_gets_its_shape_and_is_replayed():
    def script(diary: Diary) -> None:
        model = nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.LazyLinear(3))
        optimizer = sgd(model)
        step = diary.step(loss_of(model), model=model, optimizer=optimizer)
        for batch in batches(30):
            diary.write("loss", step(batch))
            diary.write_state(model, optimizer)

    both(script, replays=20, plan="{F} {B} {O}")


def test_hook_on_an_intermediate_tensor():
    calls: list[int] = []

    def make(model):
        calls.clear()

        def step_fn(batch):
            hidden = model.first(batch[0])
            hidden.register_hook(lambda grad: calls.append(1))
            return nn.functional.cross_entropy(model.second(hidden), batch[1])

        return step_fn

    train(make, observe=lambda model: len(calls), replays=55)


def test_optimizer_step_hook_takes_the_optimizer_out_of_the_graph():
    calls: list[int] = []

    def prepare(model, optimizer):
        calls.clear()
        optimizer.register_step_post_hook(lambda *_: calls.append(1))

    report = train(loss_of, prepare=prepare, observe=lambda model: len(calls), replays=30)
    assert report.steps_replayed >= 30
    assert report.running_plan == "{F} {B} O"
    assert "hook" in report.fallbacks[0].reason


def test_optimizer_step_hook_registered_in_mid_run():
    calls: list[int] = []
    optimizers: list[Any] = []

    def between(model, index):
        if index == 0:
            calls.clear()
        if index == 20:
            optimizers[-1].register_step_pre_hook(lambda *_: calls.append(1))

    report = train(
        loss_of,
        prepare=lambda model, optimizer: optimizers.append(optimizer),
        between=between,
        observe=lambda model: len(calls),
        replays=14,
    )
    assert report.steps_replayed >= 14, str(report)


def test_optimizer_step_replaced_in_mid_run():
    """By a library that patches the instance: from then on the optimizer runs outside of the graph."""
    optimizers: list[torch.optim.Optimizer] = []
    calls: list[int] = []

    def between(model, index):
        if index == 20:
            optimizer = optimizers[-1]
            step = optimizer.step

            def counted(*args, **kwargs):
                calls.append(index)
                return step(*args, **kwargs)

            optimizer.step = counted

    report = train(
        loss_of,
        prepare=lambda model, optimizer: (optimizers.append(optimizer), calls.clear()),
        between=between,
        observe=lambda model: len(calls),
        replays=14,
    )
    assert report.steps_replayed >= 14, str(report)
    assert any("counted" in f.reason for f in report.fallbacks), str(report)


def test_optimizer_step_replaced_on_the_class_in_mid_run(monkeypatch):
    """By a library that patches all optimizers of a kind: from then on the optimizer runs outside of the graph."""
    original, calls = torch.optim.AdamW.step, []

    def counted(self, *args, **kwargs):
        calls.append(self)
        return original(self, *args, **kwargs)

    def prepare(model, optimizer):
        calls.clear()
        monkeypatch.setattr(torch.optim.AdamW, "step", original)

    def between(model, index):
        if index == 20:
            monkeypatch.setattr(torch.optim.AdamW, "step", counted)

    report = train(loss_of, prepare=prepare, between=between, observe=lambda model: len(calls), replays=14)
    assert report.steps_replayed >= 14, str(report)
    assert any("counted" in f.reason for f in report.fallbacks), str(report)


# -- 5. verification -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [4, 20])
def test_a_loss_that_is_not_a_number_is_compared_as_well(bad):
    """Its bits are what they are without the graph, in the first replay and in later ones."""

    def script(diary: Diary) -> None:
        model = Net()
        optimizer = adamw(model, lr=0.0)
        step = diary.step(loss_of(model), model=model, optimizer=optimizer)
        for index, (x, y) in enumerate(batches(30)):
            loss = step((x * float("nan") if index == bad else x, y))
            diary.write("number", bool(loss == loss))

    report = both(script, verify="always", replays=25, plan="{F} {B} {O}")
    assert not report.fallbacks, str(report)


def test_verify_always_replays_and_checks_every_step():
    report = train(loss_of, verify="always", replays=30)
    assert report.steps_replayed >= 30 and not report.fallbacks


def test_verify_off():
    assert train(loss_of, verify="off", replays=30).steps_replayed >= 30


# -- inputs that cannot be served ------------------------------------------------------------------------------


class Tagged(torch.Tensor):
    pass


class Opaque:
    def __init__(self, x: Tensor) -> None:
        self.x = x


@pytest.mark.slow_after(3)
@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda x: x.to_sparse(), "sparse"),
        (lambda x: x.clone().requires_grad_() * 1, "gradient"),
        (lambda x: x.as_subclass(Tagged), "Tagged"),
    ],
    ids=["sparse", "requires_grad", "subclass"],
)
def test_batches_that_cannot_be_static(change, name):
    def script(diary: Diary) -> None:
        model = Net()
        optimizer = adamw(model)

        def step_fn(x: Any, y: Tensor) -> Tensor:
            x = x.to_dense() if x.is_sparse else x
            return nn.functional.cross_entropy(model(x), y)

        step = diary.step(step_fn, model=model, optimizer=optimizer)
        for x, y in batches(30):
            diary.write("loss", step(change(x), y).as_subclass(Tensor))
            diary.write_state(model, optimizer)

    both(script, replays=13)


def test_inference_tensors_in_a_batch():
    def script(diary: Diary) -> None:
        model = nn.Linear(4, 4)
        optimizer = adamw(model)
        step = diary.step(lambda x: (model.weight + x).square().mean(), model=model, optimizer=optimizer)
        for _ in range(30):
            with torch.inference_mode():
                x = torch.randn(4, 4)
            diary.write("loss", step(x))
            diary.write_state(model, optimizer)

    assert both(script, replays=20).steps_replayed >= 20


def test_output_object_of_an_unknown_class():
    def make(model):
        thing = Opaque(torch.ones(1))

        def step_fn(batch):
            result = {"loss": loss_of(model)(batch), "thing": thing}
            return result

        return step_fn

    train(make, loss=lambda out: out["loss"], replays=60)


def test_anomaly_detection_in_mid_run():
    def between(model, index):
        torch.autograd.set_detect_anomaly(index >= 20)

    try:
        report = train(loss_of, between=between, replays=12)
    finally:
        torch.autograd.set_detect_anomaly(False)
    assert 10 <= report.steps_replayed < 20
    assert "anomaly" in report.fallbacks[0].reason


def test_dynamo_reset_in_mid_run():
    def between(model, index):
        if index == 20:
            torch._dynamo.reset()

    report = train(loss_of, between=between, replays=25)
    assert report.steps_replayed >= 25, str(report)


def test_dynamo_switched_off():
    torch.compiler.set_stance("force_eager")
    try:
        train(loss_of, replays=20)
    finally:
        torch.compiler.set_stance("default")


def test_a_compiler_that_crashes_while_it_traces(monkeypatch):
    """Whatever it raises, the step is run without it, and runs once."""

    def crash(*_: Any, **__: Any) -> None:
        raise AssertionError("an invariant of Dynamo")

    monkeypatch.setattr(torch._dynamo.convert_frame, "CheckFunctionManager", crash)
    train(loss_of, replays=20)


class Checkpointed(nn.Module):
    """Recomputes its activations, and with dropout draws the same numbers once more."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.first, self.last, self.p = nn.Linear(6, 8), nn.Linear(8, 3), p

    def forward(self, x: Tensor) -> Tensor:
        def hidden(x: Tensor) -> Tensor:
            return nn.functional.dropout(self.first(x).tanh(), self.p, self.p > 0)

        return self.last(checkpoint(hidden, x, use_reentrant=False))
