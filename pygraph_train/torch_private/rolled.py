"""`torch.roll` by a number that is on the device, which nobody waits for. (2.11, 2.13)"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["can_be_rolled", "rolled"]


def rolled(x: Tensor, shift: Tensor, dim: int) -> Tensor:
    """`x.roll(int(shift), dim)`, where `can_be_rolled(x)`. Forward and backward move elements, and add nothing."""
    made: Tensor = _Roll.apply(x, shift, dim)  # type: ignore[no-untyped-call]
    return made


def can_be_rolled(x: Tensor) -> bool:
    """Whether the result lies in memory as that of `torch.roll`, whatever the shift is.

    On the CPU torch joins two parts of the tensor, which may be channels-last.
    """
    lies_in_order = x.device.type == "cuda" or x.dim() not in (4, 5)
    plain = x.layout is torch.strided and not x.is_complex() and not x.is_quantized
    return plain and lies_in_order and x.dim() > 0 and x.numel() > 0


class _Roll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, shift: Tensor, dim: int) -> Tensor:
        ctx.save_for_backward(shift)
        ctx.dim = dim
        size = x.shape[dim]
        places = torch.arange(size, device=x.device) - shift.remainder(size)
        return x.index_select(dim, places.remainder(size))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        (shift,) = ctx.saved_tensors
        return rolled(grad, -shift, ctx.dim), None, None
