"""`masked_scatter` with a backward that waits for nothing. (2.11, 2.13)

Models that put features of images among tokens use it. Its forward reads nothing on the host, and its backward picks
the gradients of the source with the mask, which counts there. Here somebody has counted before.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["counted_scatter"]


def counted_scatter(x: Tensor, mask: Tensor, source: Tensor, count: int) -> Tensor:
    """`x.masked_scatter(mask, source)`, where the mask selects as many elements of `x`. It changes nothing."""
    made: Tensor = _Scatter.apply(x, mask, source, count)  # type: ignore[no-untyped-call]
    return made


class _Scatter(torch.autograd.Function):
    """The operations of torch's own backward, with places in the stead of the mask."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mask: Tensor, source: Tensor, count: int) -> Tensor:
        ctx.save_for_backward(mask)
        ctx.count, ctx.shape = count, source.shape
        return x.masked_scatter(mask, source)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, Tensor | None, None]:  # type: ignore[override]
        (mask,) = ctx.saved_tensors
        of_x = grad.masked_fill(mask, 0) if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[2]:
            return of_x, None, None, None
        places = torch.nonzero_static(mask.expand_as(grad), size=ctx.count)
        chosen = grad[places.unbind(1)]
        missing = ctx.shape.numel() - ctx.count
        if missing > 0:
            chosen = torch.cat([chosen, chosen.new_zeros(missing)])
        return of_x, None, chosen.view(ctx.shape), None
