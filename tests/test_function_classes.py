"""A `torch.autograd.Function` whose methods read attributes of its class."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from training import Diary, Net, adamw, batches, both


class _Scaled(torch.autograd.Function):
    """Scales by a number of the class in forward, and by another one in backward."""

    factor: Any = 2.0
    kind = "plain"
    limit = None

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.factor = _Scaled.factor
        return x * _Scaled.factor if _Scaled.kind == "plain" and _Scaled.limit is None else x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradients[0] * ctx.factor + x * 0.01 * _Scaled.factor


@pytest.mark.notices("guards always hold")
@pytest.mark.parametrize("changed", [None, ("factor", 3.0), ("factor", 3), ("kind", "other"), ("limit", 1)])
def test_constants_of_the_class_are_guarded(changed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def script(diary: Diary) -> None:
        model = Net()
        optimizer = adamw(model)

        def loss(x: Tensor, y: Tensor) -> Tensor:
            scaled: Tensor = _Scaled.apply(model(x))  # type: ignore[no-untyped-call]
            return nn.functional.cross_entropy(scaled, y)

        step = diary.step(loss, model=model, optimizer=optimizer)
        with monkeypatch.context() as patch:
            for k, batch in enumerate(batches(24)):
                if k == 12 and changed is not None:
                    patch.setattr(_Scaled, *changed)
                diary.write("loss", step(*batch))
        diary.write_state(model, optimizer)

    both(script, replays=18 if changed is None else 12, plan="{F B O}")
