"""Bad input and failures: told clearly, and never at the cost of the training state."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from training import CONFIG, Diary, Net, adam, adamw, batches, both, differs, frozen, loss_of

from pygraph_train import GraphedStep, PyGraphConfig, PyGraphError
from pygraph_train.graphs import CaptureError
from pygraph_train.graphs.emulated import EmulatedEngine

ERRORS = pytest.mark.parametrize(
    "error", [RuntimeError("boom"), torch.OutOfMemoryError("no memory"), CaptureError("refused")]
)


def fail_in_capture(monkeypatch: pytest.MonkeyPatch, error: BaseException, times: int = 1) -> list[int]:
    """Let the next captures run their function in full and then raise."""
    capture, left = EmulatedEngine.capture, [times]

    def failing(self: EmulatedEngine, fn: Any, **options: Any) -> Any:
        def raising() -> None:
            fn()
            raise error

        if left[0]:
            left[0] -= 1
            return capture(self, raising, **options)
        return capture(self, fn, **options)

    monkeypatch.setattr(EmulatedEngine, "capture", failing)
    return left


def script(diary: Diary) -> None:
    model = Net()
    optimizer = adamw(model)
    step = diary.step(loss_of(model), model=model, optimizer=optimizer, max_grad_norm=0.1)
    for batch in batches(32):
        diary.write("loss", step(batch))
        diary.write_state(model, optimizer)


@ERRORS
def test_failure_in_a_capture_costs_no_step(error, monkeypatch):
    left = fail_in_capture(monkeypatch, error)
    expected = "out of memory" if isinstance(error, torch.OutOfMemoryError) else str(error)
    report = both(script, replays=20)
    assert left == [0] and report.steps_replayed == 0, str(report)
    (fallback,) = report.fallbacks
    assert expected in fallback.reason


@ERRORS
def test_failure_in_the_accumulating_capture(error, monkeypatch):
    """The graph of the second micro-batch fails: its gradients are counted once."""

    def accumulating(diary: Diary) -> None:
        model = Net()
        optimizer = adamw(model)
        step = diary.step(loss_of(model), model=model, optimizer=optimizer)
        for index, batch in enumerate(batches(40)):
            if diary.graphed and len(step.report().captures) == 1:
                fail_in_capture(monkeypatch, error)
            diary.write("loss", (step if index % 2 else step.accumulate)(batch))
            diary.write_state(model, optimizer)
        monkeypatch.undo()

    assert any(
        str(error) in f.reason or "memory" in f.reason for f in both(accumulating, replays=1).fallbacks
    )


def test_keyboard_interrupt_in_a_capture(monkeypatch):
    model = Net()
    optimizer = adamw(model)
    step = GraphedStep(loss_of(model), model=model, optimizer=optimizer, config=CONFIG)
    left = fail_in_capture(monkeypatch, KeyboardInterrupt())
    interrupted = 0
    for batch in batches(32):
        before = frozen([model.state_dict(), optimizer.state_dict(), torch.get_rng_state()])
        try:
            step(batch)
        except KeyboardInterrupt:
            interrupted += 1
            after = frozen([model.state_dict(), optimizer.state_dict(), torch.get_rng_state()])
            assert differs(before, after) is None
    assert (interrupted, left) == (1, [0])
    assert step.report().steps_replayed >= 20


def test_on_failure_raise(monkeypatch):
    fail_in_capture(monkeypatch, RuntimeError("boom"))
    model = Net()
    config = PyGraphConfig(engine="emulated", on_failure="raise")
    step = GraphedStep(loss_of(model), model=model, optimizer=adamw(model), config=config)
    with pytest.raises(PyGraphError, match="boom"):
        for batch in batches(30):
            step(batch)


@pytest.mark.parametrize("bad", [0, 1, 4, 12])
def test_an_exception_of_the_step_passes_through(bad):
    """Also when it is raised again and again; training can go on."""

    def raising(diary: Diary) -> None:
        model = Net()
        optimizer = adamw(model)

        def step_fn(batch: Any, fail: bool) -> Tensor:
            loss = loss_of(model)(batch)
            if fail:
                raise ValueError("bad batch")
            return loss

        step = diary.step(step_fn, model=model, optimizer=optimizer)
        for index, batch in enumerate(batches(50)):
            if index in (bad, bad + 1):
                with pytest.raises(ValueError, match="bad batch"):
                    step(batch, True)
            else:
                diary.write("loss", step(batch, False))
            diary.write_state(model, optimizer)

    both(raising, replays=25, plan="{F} {B} {O}")


class Boom(Exception):
    pass


FAILS = [False]


def boom(*arguments: Any) -> None:
    if FAILS[0]:
        raise Boom


WHERE = {
    "forward": lambda model, optimizer: None,
    "forward hook": lambda model, optimizer: model.second.register_forward_hook(boom),
    "backward hook": lambda model, optimizer: model.second.register_full_backward_hook(boom),
    "gradient hook": lambda model, optimizer: model.first.bias.register_hook(boom),
    "before the update": lambda model, optimizer: optimizer.register_step_pre_hook(boom),
    "after the update": lambda model, optimizer: optimizer.register_step_post_hook(boom),
}


_LATE = pytest.mark.xfail(
    strict=True, reason="a hook that raises ends a replayed backward before any gradient is put in place"
)


@pytest.mark.slow_after(4)
@pytest.mark.parametrize(
    "where", [pytest.param(w, marks=_LATE) if w == "gradient hook" else w for w in WHERE]
)
@pytest.mark.parametrize("make", [adamw, adam], ids=["adamw", "adam"])
@pytest.mark.parametrize("accumulate", [False, True], ids=["steps", "micro-batches"])
def test_an_exception_anywhere_in_a_step_leaves_what_plain_training_leaves(where, make, accumulate):
    """Gradients (and which are None), parameters and optimizer state, then and in the steps that follow."""

    def failing(diary: Diary) -> None:
        FAILS[0] = False
        model = Net()
        optimizer = make(model)
        loss = loss_of(model)

        def step_fn(batch: Any) -> Tensor:
            if where == "forward" and FAILS[0]:
                raise Boom
            return loss(batch)

        step = diary.step(step_fn, model=model, optimizer=optimizer)
        for index, batch in enumerate(batches(60)):
            FAILS[0] = index in (2, 20, 21, 40)
            handle = WHERE[where](model, optimizer) if FAILS[0] else None
            try:
                diary.write("loss", (step.accumulate if accumulate and index % 2 == 0 else step)(batch))
            except Boom:
                diary.write("failed", index)
            diary.write_state(model, optimizer)
            if handle is not None:
                handle.remove()

    report = both(failing, replays=30)
    assert report.steps_replayed + report.optimizer_steps_replayed >= 5, str(report)


@pytest.mark.parametrize(
    ("result", "described"),
    [
        (None, "None"),
        ("loss", "a str"),
        ({"losss": 1}, r"a dict with the keys \['losss'\]"),
        ({"loss": None}, "a dict"),
        (torch.ones(2, requires_grad=True), r"shape \(2,\)"),
    ],
)
@pytest.mark.parametrize("late", [0, 3, 12])
def test_step_fn_must_return_a_loss(result, described, late):
    model = Net()

    def step_fn(batch: Any, bad: bool) -> Any:
        return result if bad else loss_of(model)(batch)

    step = GraphedStep(step_fn, model=model, optimizer=adamw(model), config=CONFIG)
    with pytest.raises(TypeError, match=f"step_fn must return the loss.*{described}"):
        for index, batch in enumerate(batches(30)):
            step(batch, index == late)
    assert index == late
    assert step.report().steps_replayed >= late - 8


@pytest.mark.parametrize("late", [0, 3, 16])
@pytest.mark.parametrize("what", ["a loss without a gradient", "a frozen model"])
def test_a_loss_that_requires_no_gradient_raises_what_it_raises_in_a_plain_loop(late, what):
    def training(diary: Diary) -> None:
        model = Net()
        optimizer = adamw(model)

        def step_fn(batch: Any, bad: bool) -> Any:
            loss = loss_of(model)(batch)
            return loss.detach() if bad else loss

        step = diary.step(step_fn, model=model, optimizer=optimizer)
        for index, batch in enumerate(batches(30)):
            if what == "a frozen model":
                model.requires_grad_(index != late)
            try:
                diary.write("loss", step(batch, index == late and what != "a frozen model"))
            except Exception as error:
                diary.write("raised", (type(error).__name__, str(error)))
        diary.write_state(model, optimizer)

    both(training, replays=8)


def test_engine_cuda_without_a_gpu():
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    model = Net()
    with pytest.raises(ValueError, match="engine='cuda'"):
        GraphedStep(loss_of(model), model=model, config=PyGraphConfig(engine="cuda"))


@pytest.mark.parametrize(("engine", "reason"), [("auto", "no CUDA device"), ("off", "graphs are off")])
def test_engine_off(engine, reason):
    assert both(script, engine=engine, refused=reason).steps == 32


def test_disabled_by_the_environment(monkeypatch):
    monkeypatch.setenv("PYGRAPH_DISABLE", "1")
    assert both(script, refused="graphs are off").steps == 32


def test_optimizer_off():
    report = both(script, optimizer="off", replays=20, plan="{F} {B} O")
    assert not report.fallbacks


def test_close_gives_the_optimizer_back():
    model = Net()
    optimizer = adamw(model)
    hooks = len(optimizer._optimizer_state_dict_post_hooks)
    groups = frozen(optimizer.param_groups)[0]
    with GraphedStep(loss_of(model), model=model, optimizer=optimizer, config=CONFIG) as step:
        for batch in batches(20):
            step(batch)
    assert step.report().steps_replayed >= 10
    after = frozen(optimizer.param_groups)[0]
    assert differs({**groups, "params": 0}, {**after, "params": 0}) is None
    assert len(optimizer._optimizer_state_dict_post_hooks) == hooks
    count = step.report().steps_replayed
    step.close()
    for batch in batches(3):  # steps go on, without graphs
        before = model.first.weight.detach().clone()
        step(batch)
        assert not torch.equal(before, model.first.weight)
    assert step.report().steps_replayed == count


def test_closing_in_mid_run():
    def closing(diary: Diary) -> None:
        model = Net()
        optimizer = adamw(model)
        step = diary.step(loss_of(model), model=model, optimizer=optimizer)
        for index, batch in enumerate(batches(40)):
            if index == 25:
                step.close()
            diary.write("loss", step(batch))
            diary.write_state(model, optimizer)

    assert 15 <= both(closing, replays=15).steps_replayed <= 25


class Strange(Mapping):  # type: ignore[type-arg]
    """A mapping whose shallow copy shares its contents."""

    def __init__(self, **contents: Any) -> None:
        self.contents = contents

    def __getitem__(self, key: str) -> Any:
        return self.contents[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self.contents[key] = value

    def __iter__(self) -> Iterator[str]:
        return iter(self.contents)

    def __len__(self) -> int:
        return len(self.contents)


def test_importing_the_package_imports_no_framework():
    code = (
        "import sys, pygraph_train; from pygraph_train import GraphedStep, PyGraphConfig\n"
        "bad = {'lightning', 'pytorch_lightning', 'accelerate', 'transformers', 'torch._dynamo'} & set(sys.modules)\n"
        "assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
