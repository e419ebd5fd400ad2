"""What comparisons, snapshots and moves need beside what the step needs: little, and nothing as large as the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from live_bytes import peak_bytes
from replays import text_of
from torch import Tensor, nn
from training import Diary, Net, adamw, batches, both, loss_of

from pygraph_train import putting_back
from pygraph_train.graphs.emulated import EmulatedEngine
from pygraph_train.graphs.engine import MemoryUse
from pygraph_train.graphs.memory import fingerprints
from pygraph_train.optimizers.preparation import OptimizerPreparation
from pygraph_train.putting_back import ScratchState, copy_in_parts
from pygraph_train.step import capture_maker, capturing
from pygraph_train.step.capture_maker import CaptureMaker
from pygraph_train.step.region_memory import SMALL
from pygraph_train.verification import Audits, Fingerprint

MIB = 1 << 20


def as_they_are(gradient: Tensor) -> Tensor:
    return gradient


@pytest.mark.parametrize("layout", [as_they_are, Tensor.t], ids=["contiguous", "transposed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_summed_up_without_copies_of_them(
    dtype: torch.dtype, layout: Callable[[Tensor], Tensor]
) -> None:
    gradients = [layout(torch.ones(4096, 2048, dtype=dtype)) for _ in range(2)]
    size = sum(g.nbytes for g in gradients)
    needed = peak_bytes(lambda: gradients, lambda found: Fingerprint.of(torch.ones(()), found))
    assert needed < 18 * MIB < size, f"{needed / MIB:.1f} MiB beside gradients of {size / MIB:.1f}"


@pytest.mark.parametrize("index", [0, 1 << 21, (1 << 23) - 1])
def test_each_part_of_a_large_gradient_is_compared(index: int) -> None:
    gradient = torch.randn(4096, 2048).clamp_(0.5, 1.0)
    before = Fingerprint.of(torch.ones(()), [gradient])
    elsewhere = gradient.t().contiguous().t()
    assert before.same_bits(Fingerprint.of(torch.ones(()), [elsewhere])), "strides mean nothing"
    gradient.view(-1)[index] += 2.0**-23
    assert not before.same_bits(Fingerprint.of(torch.ones(()), [gradient]))


def test_results_of_replays_are_compared_without_copies_of_them() -> None:
    """What a forward saves for the backward is such a result: as much as all activations."""
    needed = peak_bytes(
        lambda: [torch.randn(512, 1024) for _ in range(32)], lambda tensors: fingerprints(tensors)
    )
    assert needed < 14 * MIB, f"{needed / MIB:.1f} MiB beside 64 that are compared"


def wide() -> nn.Module:
    """A model with more optimizer state than is left where it lies."""
    return nn.Sequential(nn.Linear(6, 700), nn.Tanh(), nn.Linear(700, 700), nn.Tanh(), nn.Linear(700, 3))


def prepared(count: int, size: int) -> OptimizerPreparation:
    """An optimizer that has made a step: parameters of `size` times `size` elements."""
    params = [nn.Parameter(torch.randn(size, size)) for _ in range(count)]
    for p in params:
        p.grad = torch.randn_like(p)
    optimizer = torch.optim.AdamW(params, fused=True)
    made = OptimizerPreparation(optimizer, emulated=True)
    with made.prepared():
        optimizer.step()
    return made


def test_the_state_of_an_optimizer_moves_a_few_tensors_at_a_time() -> None:
    needed = peak_bytes(lambda: prepared(16, 1024), lambda made: made.settle(EmulatedEngine()))
    assert needed <= 16 * MIB, f"{needed / MIB:.1f} MiB beside a state of 128"


def test_state_that_has_moved_is_the_same_and_rests() -> None:
    made = prepared(4, 700)
    tensors = made.state_tensors()
    values, places = [t.clone() for t in tensors], [t.data_ptr() for t in tensors]
    made.settle(EmulatedEngine())
    assert all(a is b for a, b in zip(made.state_tensors(), tensors, strict=True))
    assert all(map(torch.equal, tensors, values))
    settled = [t.data_ptr() for t in tensors]
    assert settled != places and made.generation == 1
    made.settle(EmulatedEngine())
    assert [t.data_ptr() for t in tensors] == settled and made.generation == 1


def test_state_that_does_not_fit_twice_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    made = prepared(2, 700)
    places = [t.data_ptr() for t in made.state_tensors()]

    def full(self: EmulatedEngine) -> None:
        raise torch.OutOfMemoryError("no memory left")

    monkeypatch.setattr(EmulatedEngine, "lasting_memory", full)
    made.settle(EmulatedEngine())
    assert [t.data_ptr() for t in made.state_tensors()] == places and made.generation == 0


def test_training_whose_state_moves_is_plain_training() -> None:
    def script(diary: Diary) -> None:
        model = wide()
        optimizer = adamw(model)
        step = diary.step(loss_of(model), model=model, optimizer=optimizer)
        for number, batch in enumerate(batches(16)):
            if number == 9:
                optimizer.load_state_dict(optimizer.state_dict())  # new state, which is to be moved again
            diary.write("loss", step(batch))
        diary.write_state(model, optimizer)

    both(script, replays=6, plan="{F B O}")


@pytest.mark.parametrize("how", ["flat", "view", "array"])
@pytest.mark.parametrize("since", [1, 2, 7])
def test_state_stays_where_somebody_holds_its_memory_too(how: str, since: int) -> None:
    """A flat momentum, a view of one and an array of NumPy's are still the state's own memory after the warm-up."""

    def script(diary: Diary) -> None:
        model = wide()
        optimizer = adamw(model)
        held: list[Any] = []
        step = diary.step(loss_of(model), model=model, optimizer=optimizer)
        for number, batch in enumerate(batches(20)):
            states = [optimizer.state[p] for p in model.parameters()]
            if number == since and how == "flat":
                held.append(torch.cat([state["exp_avg"].flatten() for state in states]))
                parts = held[0].split([state["exp_avg"].numel() for state in states])
                for state, part in zip(states, parts, strict=True):
                    state["exp_avg"] = part.view(state["exp_avg"].shape)
            elif number == since:
                momentum = states[2]["exp_avg"]
                held.append(momentum[:5] if how == "view" else momentum.numpy())
            if number in (12, 17):
                held[0] *= 0.5
            diary.write("loss", step(batch))
            diary.write("held", [torch.as_tensor(x) for x in held])
            diary.write_state(model, optimizer)

    both(script, replays=8, plan="{F B O}")


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> list[set[int]]:
    """The addresses of what was copied on the device, each time."""
    found: list[set[int]] = []

    class Spy(ScratchState):
        def __init__(self, device: torch.device, tensors: Sequence[Tensor]) -> None:
            found.append({t.data_ptr() for t in tensors})
            super().__init__(device, tensors)

    for module in (capture_maker, capturing):
        monkeypatch.setattr(module, "ScratchState", Spy)
    return found


@pytest.mark.parametrize("writes", [False, True], ids=["read", "written"])
def test_frozen_parameters_are_copied_only_where_the_step_writes_them(
    kept: list[set[int]], writes: bool
) -> None:
    frozen: list[int] = []

    def script(diary: Diary) -> None:
        model = Net()
        model.first.requires_grad_(False)
        frozen[:] = [model.first.weight.data_ptr()]
        optimizer = adamw(model)

        def step_fn(batch: tuple[Tensor, Tensor]) -> Tensor:
            if writes:
                with torch.no_grad():
                    model.first.weight.mul_(0.99)
            return nn.functional.cross_entropy(model(batch[0]), batch[1])

        step = diary.step(step_fn, model=model, optimizer=optimizer)
        for batch in batches(16):
            diary.write("loss", step(batch))
        diary.write_state(model, optimizer)

    both(script, replays=8, plan="{F B O}")
    assert kept and all((frozen[0] in places) is writes for places in kept)


def test_an_audit_without_memory_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    reference, made = CaptureMaker.reference, []

    def full_later(self: CaptureMaker, *args: Any, **kwargs: Any) -> Fingerprint:
        made.append(1)
        if len(made) > 1:
            raise torch.OutOfMemoryError("planted")
        return reference(self, *args, **kwargs)

    monkeypatch.setattr(CaptureMaker, "reference", full_later)

    def script(diary: Diary) -> None:
        model = Net()
        optimizer = adamw(model)
        step = diary.step(loss_of(model), model=model, optimizer=optimizer)
        for batch in batches(16):
            diary.write("loss", step(batch))
        diary.write_state(model, optimizer)

    report = both(script, replays=8, plan="{F B O}", verify="always")
    assert len(made) > 4 and "beside the graph the step needs more memory" in text_of(report)
    assert not report.fallbacks


@pytest.mark.parametrize("fits", [True, False])
def test_an_audit_needs_no_more_memory_than_the_training_so_far(
    fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside its graph a step without one needs its memory a second time."""
    peak, bounds, reference = 1 << 30, list[int | None](), CaptureMaker.reference
    inside = False

    @contextmanager
    def bounded(self: EmulatedEngine, most: int | None) -> Iterator[None]:
        nonlocal inside
        bounds.append(most)
        inside = most is not None
        yield
        inside = False

    def needs_memory(self: CaptureMaker, *args: Any, **kwargs: Any) -> Fingerprint:
        if inside and not fits:
            raise torch.OutOfMemoryError("planted")
        return reference(self, *args, **kwargs)

    monkeypatch.setattr(Audits, "FIRST", 2)
    monkeypatch.setattr(Audits, "SHARE", 1e9)
    monkeypatch.setattr(EmulatedEngine, "memory", lambda self: MemoryUse(peak, peak, 0, 1))
    monkeypatch.setattr(EmulatedEngine, "bounded", bounded)
    monkeypatch.setattr(CaptureMaker, "reference", needs_memory)

    def script(diary: Diary) -> None:
        model = Net()
        optimizer = adamw(model)
        step = diary.step(loss_of(model), model=model, optimizer=optimizer)
        for batch in batches(30):
            diary.write("loss", step(batch))
        diary.write_state(model, optimizer)

    report = both(script, replays=20, plan="{F B O}")
    asked = [most for most in bounds if most is not None]
    assert len(asked) >= 3 and set(asked) == {peak + SMALL}
    assert ("was not compared" in text_of(report)) is not fits


@pytest.mark.parametrize("left", [127 << 20, 128 << 20])
def test_what_eager_steps_left_goes_before_compiled_kernels_run(
    left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it is much: segments that are asked for again fit other blocks less well."""
    torch.compiler.reset()
    trims: list[int] = []
    monkeypatch.setattr(EmulatedEngine, "memory", lambda self: MemoryUse(left, left, left, 1 << 40))
    monkeypatch.setattr(EmulatedEngine, "trim", lambda self: trims.append(1))
    net, x = nn.Linear(8, 4), torch.randn(2, 8)
    compiled = torch.compile(net, backend="pygraph", options={"engine": "emulated"})
    for _ in range(2):
        compiled(x).sum().backward()
    assert len(trims) == (left >= 128 << 20)  # when the kernels were there, and not in each step


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
@pytest.mark.parametrize("shape", [(5, 7), (64,), ()])
def test_a_copy_in_parts_is_a_copy(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    source = torch.randn(shape).mul(9).to(dtype)
    target = torch.empty_like(source)
    copy_in_parts([target], [source], torch.empty(64, dtype=torch.uint8))
    assert torch.equal(target, source)


def test_small_tensors_of_several_kinds_are_copied_together(monkeypatch: pytest.MonkeyPatch) -> None:
    dtypes = (torch.bool, torch.float64, torch.uint8, torch.complex64, torch.bfloat16, torch.float32)
    sources = [torch.randn(n).mul(9).to(dtype) for n in (1, 0, 3, 40, 7) for dtype in dtypes]
    targets = [torch.empty_like(source) for source in sources]
    waits: list[int] = []
    arrive = putting_back._arrive
    monkeypatch.setattr(putting_back, "_arrive", lambda *args: [waits.append(1), arrive(*args)])
    copy_in_parts(targets, sources, torch.empty(256, dtype=torch.uint8))
    assert all(map(torch.equal, targets, sources))
    held = sum(-(-source.nbytes // 16) * 16 for source in sources)
    assert held / 256 <= len(waits) < len(sources) / 2
