"""What is switched between steps, outside of the step's own code: a replay never goes on as if it were not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from training import Diary, Net, batches, both, loss_of, sgd

from pygraph_train.torch_private.switches import SWITCHES, switches


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 24)
        self.outer = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.inner(x[:, None].repeat(1, 5, 1)).view(-1, 5, 3, 1, 8).permute(2, 0, 3, 1, 4)
        return self.outer(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).sum((1, 2)))


def train(context: Any, make: Any = Net, *, steps: int = 40, write: Any = lambda: None, **config: Any) -> Any:
    """Every step runs in `context(index)`."""

    def script(diary: Diary) -> None:
        model = make()
        optimizer = sgd(model)
        step = diary.step(loss_of(model), model=model, optimizer=optimizer)
        for index, batch in enumerate(batches(steps)):
            with context(index):
                loss = step(batch)
            diary.write("loss", loss)
            diary.write("seen", write())
            diary.write_state(model, optimizer)

    return both(script, **config)


def test_another_attention_kernel_in_mid_run() -> None:
    def context(index: int) -> AbstractContextManager[None]:
        return sdpa_kernel(SDPBackend.MATH if 15 <= index < 30 else SDPBackend.FLASH_ATTENTION)

    report = train(context, Attention, replays=20, plan="{F B O}")
    assert len(report.captures) == 2, "each kernel has its own capture, and the first one serves again"


def test_another_attention_kernel_where_forward_and_backward_have_their_own_graphs() -> None:
    def context(index: int) -> AbstractContextManager[None]:
        return sdpa_kernel(SDPBackend.MATH if 20 <= index < 35 else SDPBackend.FLASH_ATTENTION)

    report = train(context, Attention, steps=50, fuse="off", optimizer="off", replays=65)
    ours = [r for r in report.regions() if r.name.startswith("forward")]
    assert len(ours) == 2 and all(r.replays >= 8 for r in ours), str(report)


@contextmanager
def _switched(module: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


@pytest.mark.parametrize(
    ("module", "name", "value"),
    [
        (torch.backends.cudnn, "deterministic", True),
        (torch.backends.cudnn, "benchmark", True),
        (torch.backends.cuda.matmul, "allow_tf32", True),
        (torch.backends.mkldnn, "enabled", False),
    ],
)
def test_a_switch_that_chooses_kernels_has_its_own_capture(module: Any, name: str, value: Any) -> None:
    report = train(lambda index: _switched(module, name, value) if index >= 20 else nullcontext(), replays=25)
    assert len(report.captures) == 2, str(report)
    assert switches() == switches() and len(switches()) == len(SWITCHES)


class _Counting(TorchDispatchMode):
    calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        _Counting.calls += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("when", [range(40), range(20, 21), range(0, 40, 3)], ids=["all", "once", "often"])
def test_a_dispatch_mode_sees_every_operation(when: range) -> None:
    seen: list[int] = []

    def context(index: int) -> AbstractContextManager[Any]:
        if index == 0:
            _Counting.calls = 0
        return _Counting() if index in when else nullcontext()

    least: Any = {"replays": 20} if len(when) < 40 else {"refused": "a TorchDispatchMode is active"}
    report = train(context, write=lambda: seen.append(_Counting.calls), **least)
    half = len(seen) // 2
    assert [bool(b - a) for a, b in zip([0, *seen[half:]], seen[half:], strict=False)] == [
        i in when for i in range(40)
    ]
    assert any("TorchDispatchMode" in fallback.reason for fallback in report.fallbacks)


def test_saved_tensors_hooks_get_what_is_saved() -> None:
    packed = [0]

    def pack(tensor: Tensor) -> Tensor:
        packed[0] += 1
        return tensor.bfloat16() if tensor.dtype is torch.float32 else tensor

    def unpack(tensor: Tensor) -> Tensor:
        return tensor.float() if tensor.dtype is torch.bfloat16 else tensor

    def context(index: int) -> AbstractContextManager[None]:
        if index == 0:
            packed[0] = 0
        return torch.autograd.graph.saved_tensors_hooks(pack, unpack) if 15 <= index < 25 else nullcontext()

    report = train(context, write=lambda: packed[0], replays=15, plan="{F B O}")
    assert any("saved_tensors_hooks" in fallback.reason for fallback in report.fallbacks)


class _Packs:
    """A forward under hooks that lose bits of what eager kernels save, and that count it."""

    def __init__(self) -> None:
        self.packed: list[tuple[int, ...]] = []

    def pack(self, tensor: Tensor) -> Tensor:
        self.packed.append(tuple(tensor.shape))
        return tensor.bfloat16() if tensor.dtype is torch.float32 else tensor

    def unpack(self, tensor: Tensor) -> Tensor:
        return tensor.float() if tensor.dtype is torch.bfloat16 else tensor

    def __call__(self, model: nn.Module, x: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack):
            return model(x)  # type: ignore[no-any-return]


class _Scaled(nn.Module):
    """What `torch.compile` saves of a number that changes is a tensor, and eager kernels save none."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.factor = nn.Linear(6, 8), nn.Linear(8, 3), 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)) * self.factor)  # type: ignore[no-any-return]


def test_saved_tensors_hooks_inside_of_the_step_get_what_eager_kernels_save() -> None:
    def script(diary: Diary) -> None:
        model, packs = _Scaled(), _Packs()
        optimizer = sgd(model)

        def step_fn(batch: tuple[Tensor, Tensor]) -> Tensor:
            return nn.functional.cross_entropy(packs(model, batch[0]), batch[1])

        step = diary.step(step_fn, model=model, optimizer=optimizer)
        for index, batch in enumerate(batches(40)):
            model.factor = 1.0 + 0.01 * index
            diary.write("loss", step(batch))
            diary.write("packed", packs.packed)
            diary.write_state(model, optimizer)

    report = both(script, replays=20)
    rows = [note for note in report.notes if "saved_tensors_hooks" in note]
    assert len(rows) == 1 and "test_switches.py" in rows[0], str(report)


class _Doubling(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is torch.relu else result


def test_a_function_mode_takes_part_in_every_step() -> None:
    report = train(
        lambda index: _Doubling() if 15 <= index < 25 else nullcontext(), replays=20, plan="{F B O}"
    )
    assert any("TorchFunctionMode" in fallback.reason for fallback in report.fallbacks)


def test_a_default_device_keeps_no_step_out() -> None:
    report = train(
        lambda index: torch.device("cpu") if index >= 20 else nullcontext(), replays=15, plan="{F B O}"
    )
    assert not report.fallbacks, str(report)


def test_the_default_dtype_of_the_capture_holds_in_replays() -> None:
    def script(diary: Diary) -> None:
        model = nn.Linear(6, 3, dtype=torch.float64)

        def step_fn(batch: Any) -> Tensor:
            return nn.functional.cross_entropy(model(batch[0].double()), batch[1]) + torch.zeros(2).sum()

        optimizer = sgd(model)
        step = diary.step(step_fn, model=model, optimizer=optimizer)
        for index, batch in enumerate(batches(40)):
            torch.set_default_dtype(torch.float64 if index < 30 else torch.float32)
            try:
                loss = step(batch)
            finally:
                torch.set_default_dtype(torch.float32)
            diary.write("loss", loss)

    both(script, replays=20, plan="{F B O}")


class Options:
    """Resolves attributes in Python of its own, as transformers' configurations do."""

    also_known_as: ClassVar[dict[str, str]] = {}

    def __getattribute__(self, name: str) -> Any:
        names = super().__getattribute__("also_known_as")
        return super().__getattribute__(names.get(name, name))


def _give(options: Options) -> None:
    options.__dict__["wide"] = True


def _take(options: Options) -> None:
    options.__dict__.pop("wide", None)


def _give_class(options: Options) -> None:
    type(options).wide = True  # type: ignore[attr-defined]


def _take_class(options: Options) -> None:
    if "wide" in vars(type(options)):
        del type(options).wide  # type: ignore[attr-defined]


def _rename(options: Options) -> None:
    type(options).also_known_as["wide"] = "depth"


def _name_back(options: Options) -> None:
    type(options).also_known_as.pop("wide", None)


@pytest.mark.parametrize(
    ("give", "take"),
    [(_give, _take), (_give_class, _take_class), (_rename, _name_back)],
    ids=["object", "class", "alias"],
)
def test_object_with_attributes_of_its_own_making_gains_one_in_mid_run(
    give: Callable[[Options], None], take: Callable[[Options], None]
) -> None:
    def script(diary: Diary) -> None:
        class Own(Options):
            also_known_as: ClassVar[dict[str, str]] = {}

        options = Own()
        options.depth = 2  # type: ignore[attr-defined]
        model = Net()
        optimizer = sgd(model)

        def loss(batch: Any) -> Tensor:
            factor = 3.0 if hasattr(options, "wide") else 1.0
            return loss_of(model)(batch) * factor * options.depth  # type: ignore[attr-defined]

        step = diary.step(loss, model=model, optimizer=optimizer)
        for index, batch in enumerate(batches(60)):
            if index in (15, 45):
                give(options)
            elif index == 30:
                take(options)
            diary.write("loss", step(batch))
            diary.write_state(model, optimizer)

    both(script, replays=30)
