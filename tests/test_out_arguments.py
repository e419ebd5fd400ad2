"""Operations that write to `out=`: what they return is the tensor that they were given."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from training import Diary, adamw, batches, both


def critic() -> nn.Sequential:
    return nn.Sequential(
        parametrizations.spectral_norm(nn.Linear(6, 8)),
        nn.LeakyReLU(0.2),
        parametrizations.spectral_norm(nn.Linear(8, 1), n_power_iterations=2),
    )


@pytest.mark.parametrize("forwards", [1, 2, 3])
def test_spectral_norm_is_one_graph(forwards: int) -> None:
    def script(diary: Diary) -> None:
        model = critic()
        optimizer = adamw(model)

        def step_fn(batch: tuple[Tensor, Tensor]) -> Tensor:
            return sum(nn.functional.softplus(model(batch[0] * (n - 1))).mean() for n in range(forwards))

        step = diary.step(step_fn, model=model, optimizer=optimizer)
        kept = dict(model.named_buffers())
        for batch in batches(20):
            diary.write("loss", step(batch))
            diary.write_state(model, optimizer)
        diary.write("same", [kept[name] is tensor for name, tensor in model.named_buffers()])

    both(script, replays=14, plan="{F B O}", compile=False)


class Written(nn.Module):
    def __init__(self, keep: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.register_buffer("mean", torch.zeros(6))
        self.keep = keep

    def forward(self, x: Tensor) -> Tensor:
        self.keep(self, torch.add(self.mean * 0.5, x.mean(0), out=self.mean))
        return self.layer(x - self.mean)


def same(module: Any, tensor: Tensor) -> None:
    module.mean = tensor


def other_name(module: Any, tensor: Tensor) -> None:
    module.other = tensor


def other_tensor(module: Any, tensor: Tensor) -> None:
    module.mean = tensor + 1


def nothing(module: Any, tensor: Tensor) -> None:
    tensor.mul_(0.5)


def same_and_more(module: Any, tensor: Tensor) -> None:
    module.mean = tensor
    module.calls = getattr(module, "calls", 0) + 1
    module.last = tensor.sum()


@pytest.mark.parametrize("keep", [same, nothing, same_and_more])
def test_what_is_written_and_kept_is_one_graph(keep: Any) -> None:
    trains(keep, replays=14, plan="{F B O}")


@pytest.mark.parametrize("keep", [other_name, other_tensor])
def test_what_is_written_and_kept_elsewhere_is_as_in_plain_training(keep: Any) -> None:
    trains(keep, replays=1)


def trains(keep: Any, **expected: Any) -> None:
    def script(diary: Diary) -> None:
        model = Written(keep)
        optimizer = adamw(model)
        step = diary.step(
            lambda batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
            model=model,
            optimizer=optimizer,
        )
        before = model.mean
        for batch in batches(20):
            diary.write("loss", step(batch))
            diary.write_state(model, optimizer)
            diary.write("same", [model.mean is before, getattr(model, "other", None) is before])
            diary.write("python", [getattr(model, name, None) for name in ("calls", "last")])

    both(script, compile=False, **expected)
