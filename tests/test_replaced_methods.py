"""Methods of classes, and variables of the environment, that change between steps. Dynamo has no guards of them all."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from training import Diary, Net, adamw, batches, both

from pygraph_train.tracing import methods
from pygraph_train.tracing.trace import Trace


class _Scaling:
    """With the parts of a class that a step may call."""

    def method(self, x: Tensor) -> Tensor:
        return x * 2

    @classmethod
    def of_class(cls, x: Tensor) -> Tensor:
        return x + 2

    @staticmethod
    def static(x: Tensor) -> Tensor:
        return x + 3

    @property
    def number(self) -> float:
        return 2.0

    def __call__(self, x: Tensor) -> Tensor:
        return x * 4


class _Below(_Scaling):
    pass


_REPLACED: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "method": lambda patch: patch.setattr(_Scaling, "method", lambda self, x: x * 7),
    "of_class": lambda patch: patch.setattr(_Scaling, "of_class", classmethod(lambda cls, x: x + 7)),
    "static": lambda patch: patch.setattr(_Scaling, "static", staticmethod(lambda x: x + 7)),
    "number": lambda patch: patch.setattr(_Scaling, "number", property(lambda self: 7.0)),
    "call": lambda patch: patch.setattr(_Scaling, "__call__", lambda self, x: x * 7),
    "hidden": lambda patch: patch.setattr(_Below, "method", lambda self, x: x * 7, raising=False),
    "of_module": lambda patch: patch.setattr(_Helped, "helper", lambda self, x: x * 7),
    "of_torch": lambda patch: patch.setattr(nn.Linear, "forward", lambda self, x: x @ self.weight.t() * 7),
}


class _Helped(Net):
    def helper(self, x: Tensor) -> Tensor:
        return x * 2

    def forward(self, x: Tensor) -> Tensor:
        return self.helper(super().forward(x))


@pytest.fixture(params=[True, False], ids=["versions", "no-versions"])
def _python(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """This Python, and one that does not number the changes of a dict."""
    if not request.param:
        monkeypatch.setattr(methods, "versions_are_known", lambda: False)


@pytest.mark.slow_after(8)
@pytest.mark.usefixtures("_python")
@pytest.mark.notices("methods of classes are never looked at")
@pytest.mark.parametrize("replaced", _REPLACED)
def test_a_method_that_is_replaced_between_steps_is_noticed(
    replaced: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def script(diary: Diary) -> None:
        model, scaling = _Helped(), _Below()
        optimizer = adamw(model)

        def loss(x: Tensor, y: Tensor) -> Tensor:
            x = scaling.static(scaling.of_class(scaling.method(model(x)))) * scaling.number
            return nn.functional.cross_entropy(scaling(x), y)

        step = diary.step(loss, model=model, optimizer=optimizer)
        with monkeypatch.context() as patch:
            for k, batch in enumerate(batches(24)):
                if k == 12:
                    _REPLACED[replaced](patch)
                diary.write("loss", step(*batch))
        diary.write_state(model, optimizer)

    both(script, replays=12)


@pytest.mark.usefixtures("_python")
def test_a_class_that_counts_is_no_other_class() -> None:
    def script(diary: Diary) -> None:
        model, scaling = _Helped(), _Below()
        optimizer = adamw(model)
        step = diary.step(
            lambda x, y: nn.functional.cross_entropy(scaling.method(model(x)), y),
            model=model,
            optimizer=optimizer,
        )
        for k, batch in enumerate(batches(24)):
            _Scaling.seen = _Helped.seen = k  # type: ignore[attr-defined]
            diary.write("loss", step(*batch))
        diary.write_state(model, optimizer)

    both(script, replays=18)


def test_a_replaced_method_is_named() -> None:
    scaling = _Below()
    trace, x = Trace(torch.device("cpu")), batches(1)[0][0]

    def step_fn(x: Tensor) -> Tensor:
        return scaling.method(x)

    trace(step_fn, (x,), {})
    with pytest.MonkeyPatch.context() as patch:
        _REPLACED["method"](patch)
        assert not trace.holds(step_fn, (x,), {})
        why = trace.why_not(step_fn, (x,), {})
        assert why.reason == "_Scaling.method was replaced since the step was traced" and why.fix
    assert trace.holds(step_fn, (x,), {})


def test_the_environment_is_looked_at_where_no_class_is(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "A_NUMBER_OF_THE_TESTS"
    monkeypatch.setenv(name, "2")
    trace, x = Trace(torch.device("cpu")), torch.ones(3)

    def step_fn(x: Tensor) -> Tensor:
        return x * float(os.getenv(name, "1"))

    trace(step_fn, (x,), {})
    assert trace.holds(step_fn, (x,), {})
    monkeypatch.setenv(name, "5")
    assert not trace.holds(step_fn, (x,), {})
    assert name in trace.why_not(step_fn, (x,), {}).reason


@pytest.mark.notices("the environment is never looked at")
@pytest.mark.parametrize("way", ["item", "get", "getenv", "absent"])
def test_a_variable_of_the_environment_that_the_step_reads(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "A_NUMBER_OF_THE_TESTS"
    reads = {
        "item": lambda: os.environ[name],
        "get": lambda: os.environ.get(name, "2"),
        "getenv": lambda: os.getenv(name),
        "absent": lambda: os.environ.get(name, "2"),
    }[way]

    def script(diary: Diary) -> None:
        model = Net()
        optimizer = adamw(model)
        with monkeypatch.context() as patch:
            if way != "absent":
                patch.setenv(name, "2")
            step = diary.step(
                lambda x, y: nn.functional.cross_entropy(model(x), y) * float(reads() or 1),
                model=model,
                optimizer=optimizer,
            )
            for k, batch in enumerate(batches(24)):
                if k == 12:
                    patch.setenv(name, "5")
                patch.setenv(name + "_THAT_NOBODY_READS", str(k // 12))
                diary.write("loss", step(*batch))
        diary.write_state(model, optimizer)

    both(script, replays=8)
