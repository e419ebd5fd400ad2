"""A part of the optimizer's state lies in host memory while Inductor compiles, whose benchmarks need memory too."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from live_bytes import peak_bytes
from test_changing_shapes import let_inductor_compile
from torch import Tensor, nn
from training import Diary, Net, adamw, batches, both, loss_of

from pygraph_train import putting_back
from pygraph_train.problems import NotLegal, Problem
from pygraph_train.putting_back import waiting_on_host
from pygraph_train.regions import inductor
from pygraph_train.step.capturing import Capturing
from pygraph_train.step.program import Call, plain_call
from pygraph_train.step.updates import Updates
from pygraph_train.step.variants import Variant

MIB = 1 << 20


def held(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of the optimizer's state in memory, without numbers."""
    values = [
        v for state in optimizer.state.values() for v in state.values() if isinstance(v, Tensor) and v.dim()
    ]
    return sum(v.untyped_storage().nbytes() for v in values)


def test_memory_of_what_waits_is_free_for_others() -> None:
    def work(tensors: list[Tensor]) -> None:
        with waiting_on_host(tensors, most=1 << 30):
            torch.empty(6 * MIB, dtype=torch.uint8)

    # on a CPU the copies of 8 MiB lie beside what takes the place of the tensors
    assert peak_bytes(lambda: [torch.randn(1 << 20) for _ in range(2)], work) <= 8 * MIB


@pytest.mark.parametrize("layout", ["contiguous", "channels last"])
@pytest.mark.parametrize("fails", [False, True])
def test_what_waited_is_as_it_was(layout: str, fails: bool) -> None:
    x = torch.randn(4, 8, 128, 128)
    x = x.to(memory_format=torch.channels_last) if layout == "channels last" else x
    before, strides, version = x.clone(), x.stride(), x._version
    try:
        with waiting_on_host([x], most=1 << 30):
            assert x.untyped_storage().nbytes() == 0
            if fails:
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        assert fails
    assert torch.equal(x, before) and (x.stride(), x._version) == (strides, version)


def test_what_waited_is_back_where_what_failed_has_taken_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    class Taken:
        pass

    x = torch.randn(1 << 19)
    before, alive = x.clone(), list[weakref.ref[Taken]]()
    take = putting_back._take_memory

    def full(tensors: Any) -> None:
        if alive[0]() is not None:
            raise torch.OutOfMemoryError("planted")
        take(tensors)

    def fails() -> None:
        taken = Taken()
        alive.append(weakref.ref(taken))
        raise torch.OutOfMemoryError("planted, inside")

    monkeypatch.setattr(putting_back, "_take_memory", full)
    with pytest.raises(torch.OutOfMemoryError, match="inside"), waiting_on_host([x], most=1 << 30):
        fails()
    assert torch.equal(x, before)


def test_what_somebody_else_can_see_stays_where_it_is() -> None:
    base = torch.randn(2, 1 << 19)
    alone, small, viewed, part = torch.randn(1 << 19), torch.randn(8), torch.randn(1 << 19), base[0]
    view = viewed[1:]
    with waiting_on_host([alone, small, viewed, part], most=1 << 30):
        sizes = [t.untyped_storage().nbytes() for t in (alone, small, viewed, part)]
    assert sizes == [0, small.nbytes, viewed.nbytes, base.nbytes] and view.numel()


def test_no_more_waits_than_is_needed() -> None:
    tensors = [torch.randn(1 << 19) for _ in range(8)]
    with waiting_on_host(tensors, most=5 * MIB):
        assert [t.untyped_storage().nbytes() for t in tensors].count(0) == 3, "until 5 MiB are free"


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of state in memory during each forward and backward that is compiled. All may wait.

    Eager kernels stand in for Inductor's, so that the training can be compared bit for bit.
    """
    found: list[int] = []
    plain = Updates.aside

    def aside(self: Updates, call: Callable[..., Any], reads: Any) -> Callable[..., Any]:
        def noted(*args: Any) -> Any:
            found.append(held(self._training.program.optimizer))
            return call(*args)

        return plain(self, noted, reads)

    def call_of(self: Capturing, variant: Variant, **_: bool) -> Call:
        compiled: Any = variant.compiled
        # modes of the emulated engine would make Dynamo trace again
        return plain_call if compiled is None or compiled.traced else compiled

    let_inductor_compile(monkeypatch, asks=False)
    monkeypatch.setattr(Capturing, "_call_of", call_of)
    monkeypatch.setattr(Capturing, "_silent_call_of", call_of)
    monkeypatch.setattr(inductor, "compile_whole", lambda graph, inputs, left: graph)
    monkeypatch.setattr(Updates, "aside", aside)
    monkeypatch.setattr(putting_back, "_WORTH_A_COPY", 1)
    return found


def train(make: Callable[[], nn.Module] = Net, **enough: Any) -> Any:
    def script(diary: Diary) -> None:
        model = make()
        optimizer = adamw(model)
        vars(model)["optimizer"] = optimizer
        step = diary.step(loss_of(model), model=model, optimizer=optimizer)
        for batch in batches(14):
            diary.write("loss", step(batch))
        diary.write_state(model, optimizer)

    return both(script, compile=True, **enough)


def test_state_waits_while_the_step_is_compiled(compiled: list[int]) -> None:
    report = train(replays=6, plan="{F B O}")
    assert compiled == [0] and not report.fallbacks


def test_state_is_back_where_the_compiler_fails(compiled: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> Any:
        raise NotLegal(Problem("planted"))

    monkeypatch.setattr(inductor, "compile_whole", fails)
    report = train(replays=6, plan="{F B O}")
    assert compiled == [0] and "planted" in str(report)


class Reading(Net):
    """Its forward reads a part of the optimizer's state."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        for state in vars(self)["optimizer"].state.values():
            y = y + state["exp_avg"].sum() * 0.1
        return y


def test_state_that_the_forward_reads_stays(compiled: list[int]) -> None:
    train(Reading, replays=6)
    assert compiled and all(size > 0 for size in compiled)


def test_state_that_a_new_hook_reads_stays(compiled: list[int]) -> None:
    """Registered right before the step that Inductor compiles."""

    def script(diary: Diary) -> None:
        model = Net()
        optimizer = adamw(model)

        def smoothed(p: nn.Parameter, gradient: Tensor) -> Tensor:
            return gradient + 0.1 * optimizer.state[p]["exp_avg"]

        step = diary.step(loss_of(model), model=model, optimizer=optimizer)
        for number, batch in enumerate(batches(14)):
            if number == 2:
                for p in model.parameters():
                    p.register_hook(functools.partial(smoothed, p))
            diary.write("loss", step(batch))
        diary.write_state(model, optimizer)

    both(script, compile=True, replays=6)
    assert len(compiled) == 1 and compiled[0] > 0
