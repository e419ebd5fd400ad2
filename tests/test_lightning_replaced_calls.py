"""Functions of torch that Lightning calls in each step, and that somebody has replaced."""

from __future__ import annotations

import functools
from typing import Any

import pytest

pytest.importorskip("lightning")

import torch
from lightning_training import Module, parity
from torch import Tensor


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (Tensor, "backward"),
        (torch.nn.utils, "clip_grad_norm_"),
    ],
    ids=["backward", "clipping"],
)
@pytest.mark.quick
def test_a_replaced_function_is_called_in_each_step(
    owner: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = getattr(owner, name)

    class Replaces(Module):
        def on_train_epoch_start(self) -> None:
            if self.current_epoch == 0:
                self.calls = 0
            monkeypatch.setattr(owner, name, counted(self) if self.current_epoch == 2 else original)

        def on_train_epoch_end(self) -> None:
            self.log("calls", float(self.calls))

    def counted(module: Replaces) -> Any:
        @functools.wraps(original)
        def function(*args: Any, **kwargs: Any) -> Any:
            module.calls += 1
            return original(*args, **kwargs)

        return function

    fits = parity(Replaces, gradient_clip_val=0.1, replays=12)
    assert fits[1].module.calls >= 11
    assert f"{name} is function (" in str(fits[1].report.fallbacks)  # type: ignore[union-attr]
