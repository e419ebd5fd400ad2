"""Several threads of one process train at once, each with its own model."""

from __future__ import annotations

import copy
import gc
import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from replays import runs_of_graphs, text_of
from torch import Tensor, nn
from torch.nn import functional
from training import adamw, batches

from pygraph_train import GraphedStep, backend
from pygraph_train.backend import pygraph
from pygraph_train.graphs import one_capture
from pygraph_train.graphs.one_capture import OneCapture
from pygraph_train.step import turns
from pygraph_train.torch_private.traces_of_threads import TracedBy

STEPS, THREADS = 40, 4

pytestmark = pytest.mark.skipif(
    torch.version.cuda is not None and not torch.cuda.is_available() and torch.__version__ < "2.13",
    reason="torch 2.11 for CUDA ends the process where several threads compile and there is no GPU",
)

Losses = list[Tensor]


@pytest.fixture(autouse=True)
def frequent_switches() -> Iterator[None]:
    """Threads take turns often, so that their traces meet."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    yield
    sys.setswitchinterval(before)


class Training:
    """One model with its data, trained by a thread or without one."""

    def __init__(self, number: int) -> None:
        torch.manual_seed(number)
        # no random numbers: threads share the generator, and nobody knows in which order they draw
        norm = nn.BatchNorm1d(8) if number % 2 else nn.Identity()
        self.model = nn.Sequential(nn.Linear(6, 8), norm, nn.Tanh(), nn.Linear(8, 3 + number))
        self.data = batches(STEPS)
        self.steps: list[GraphedStep] = []

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return functional.cross_entropy(self.model(x), y)

    def plainly(self) -> Losses:
        optimizer = adamw(self.model)
        return [self._plain_step(self.loss, optimizer, batch) for batch in self.data]

    def _plain_step(self, loss_of: Callable[..., Tensor], optimizer: Any, batch: Any) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(batch)
        loss.backward()
        optimizer.step()
        return loss.detach().clone()

    def _graphed(self, function: Callable[..., Any], optimizer: Any, **options: Any) -> Losses:
        step = GraphedStep(function, model=self.model, optimizer=optimizer, engine="emulated", **options)
        self.steps.append(step)
        return [step(batch).clone() for batch in self.data]

    def whole_steps(self) -> Losses:
        return self._graphed(self.loss, adamw(self.model))

    def in_regions(self) -> Losses:
        """The step decides by a number on the host: no graph holds it as a whole."""

        def step(batch: Any) -> Tensor:
            loss = self.loss(batch)
            return loss * 1 if loss.item() > 100 else loss

        return self._graphed(step, adamw(self.model))

    def by_hand(self) -> Losses:
        optimizer = adamw(self.model)

        def step(batch: Any) -> Tensor:
            optimizer.zero_grad()
            loss = self.loss(batch)
            loss.backward()
            optimizer.step()
            return loss.detach()

        return self._graphed(step, optimizer, manual_optimization=True)

    def compiled(self) -> Losses:
        options = {"engine": "emulated", "compile": False}
        call = torch.compile(self.model, backend=pygraph, options=options)
        optimizer = adamw(self.model)
        return [
            self._plain_step(lambda b: functional.cross_entropy(call(b[0]), b[1]), optimizer, batch)
            for batch in self.data
        ]

    def state(self) -> dict[str, Tensor]:
        return copy.deepcopy(self.model.state_dict())


WAYS: dict[str, list[Callable[[Training], Losses]]] = {
    "whole steps": [Training.whole_steps] * THREADS,
    "regions": [Training.in_regions] * THREADS,
    "by hand": [Training.by_hand] * THREADS,
    "all kinds": [Training.whole_steps, Training.in_regions, Training.by_hand, Training.compiled],
}


@pytest.mark.parametrize("way", WAYS)
def test_threads_that_train_at_once_train_as_plain_pytorch(way: str) -> None:
    backend.reset()
    expected = []
    for number in range(THREADS):
        plain = Training(number)
        expected.append((plain.plainly(), plain.state()))
    Training(0).whole_steps()  # what torch imports late is there
    before = changeable()
    trainings = [Training(number) for number in range(THREADS)]
    found = at_once([lambda t=t, f=f: f(t) for t, f in zip(trainings, WAYS[way], strict=True)])
    for training, losses, (wanted, state) in zip(trainings, found, expected, strict=True):
        assert all(map(torch.equal, losses, wanted)), [text_of(s.report()) for s in training.steps]
        assert all(torch.equal(value, state[name]) for name, value in training.state().items())
        for step in training.steps:
            assert runs_of_graphs(step.report()) >= 20, text_of(step.report())
            step.close()
    if Training.compiled in WAYS[way]:
        assert sum(row.replays for row in backend.report().regions) >= 20
    now = changeable()
    assert not [name for name, value in before.items() if now[name] is not value and now[name] != value]


def at_once(works: list[Callable[[], Any]]) -> list[Any]:
    """What each work returns. They begin together, each in a thread of its own."""
    begin = threading.Barrier(len(works))
    found: list[Any] = [None] * len(works)

    def run(place: int) -> None:
        begin.wait()
        try:
            found[place] = works[place]()
        except BaseException as error:
            found[place] = error

    threads = [threading.Thread(target=run, args=(place,)) for place in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in found:
        if isinstance(result, BaseException):
            raise result
    return found


def changeable() -> dict[str, Any]:
    """Functions and settings of Dynamo and torch, as they are for all threads."""
    import torch._dynamo.config as dynamo
    import torch._functorch.config as functorch
    import torch._inductor.config as inductor

    found: dict[str, Any] = {"gc": gc.get_threshold(), "anomaly": torch.is_anomaly_enabled()}
    found["compiling"] = torch.compiler._is_compiling_flag
    for config in (dynamo, functorch, inductor):
        found |= {f"{config.__name__}.{name}": value for name, value in config.get_config_copy().items()}
    for module in [m for name, m in list(sys.modules.items()) if name.startswith(_LOOKED_AT)]:
        for name, value in list(vars(module).items()):
            if inspect.isclass(value) and value.__module__.startswith("torch"):
                own = {f"{module.__name__}.{name}.{key}": one for key, one in list(vars(value).items())}
                found |= {key: one for key, one in own.items() if _is_code(one)}
            elif _is_code(value):
                found[f"{module.__name__}.{name}"] = value
    found["default_generators"] = torch.cuda.default_generators
    return found


_LOOKED_AT = (
    "torch._dynamo",
    "torch._guards",
    "torch.fx.experimental",
    "torch.utils.checkpoint",
    "torch._tensor",
)
_LOOKED_AT += ("torch._inductor.scheduler", "torch._inductor.sizevars", "torch.nn.modules.rnn", "torch.cuda")


def _is_code(value: Any) -> bool:
    return inspect.isroutine(value) or isinstance(value, (property, staticmethod, classmethod, type))


def test_a_capture_waits_for_that_of_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    one, order = OneCapture(), list[str]()
    inside, leave = threading.Event(), threading.Event()

    def first() -> None:
        with one:
            inside.set()
            leave.wait(10)
            order.append("first")

    def second() -> None:
        inside.wait(10)
        assert one.anywhere and not one.here
        with monkeypatch.context() as patch:
            patch.setattr(one_capture, "_WAIT", 0.01)
            with pytest.raises(RuntimeError, match="one graph at a time"), one:
                pass
        leave.set()
        with one:
            order.append("second")
            assert one.here
            with pytest.raises(RuntimeError, match="one graph at a time"), one:
                pass

    at_once([first, second])
    assert order == ["first", "second"] and not one.anywhere


def test_steps_that_wait_for_each_other_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads meet inside their steps: none of them has its turn before the other one."""
    monkeypatch.setattr(turns._Mine, "patience", 0.3)
    meet = threading.Barrier(2, timeout=60)

    class Meeting(Training):
        @torch.compiler.disable
        def _met(self) -> None:
            meet.wait()

        def loss(self, batch: Any) -> Tensor:
            self._met()
            return super().loss(batch)

    plain = [Training(number) for number in range(2)]
    expected = [one.plainly() for one in plain]
    trainings = [Meeting(number) for number in range(2)]
    found = at_once([one.whole_steps for one in trainings])
    for losses, wanted in zip(found, expected, strict=True):
        assert all(map(torch.equal, losses, wanted))
    told = [text_of(step.report()) for training in trainings for step in training.steps]
    assert any("another thread of this process" in text for text in told), told


def test_a_thread_that_wants_nothing_is_traced_as_ever() -> None:
    """Also while another thread has something around its traces."""
    from torch._dynamo.convert_frame import CatchErrorsWrapper

    stock, traced = CatchErrorsWrapper.__call__, list[str]()
    began, done = threading.Event(), threading.Event()

    def here(trace: Any, *args: Any) -> Any:
        traced.append(threading.current_thread().name)
        return trace(*args)

    def wants() -> None:
        with TracedBy(here):
            began.set()
            done.wait(60)
            name = threading.current_thread().name
            torch.compile(lambda x: x * 3, backend="eager")(torch.ones(2))
            assert set(traced) == {name}

    def wants_nothing() -> None:
        began.wait(60)
        torch.compile(lambda x: x * 2, backend="eager")(torch.ones(2))
        assert not traced
        done.set()

    at_once([wants, wants_nothing])
    assert CatchErrorsWrapper.__call__ is stock
