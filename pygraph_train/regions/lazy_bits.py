"""Tensors that are conjugated or negated lazily: a bit says so, and their memory has the numbers of before.

Operators of PyTorch heed the bit. Kernels that were compiled for tensors without it read the memory, and compute
something else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["is_lazy", "without_lazy_bits"]


def is_lazy(x: Any) -> bool:
    """Whether something is such a tensor."""
    return isinstance(x, torch.Tensor) and (x.is_conj() or x.is_neg())


def without_lazy_bits(gradients: Sequence[Any]) -> tuple[Any, ...]:
    """The same numbers in memory."""
    return tuple([x.resolve_conj().resolve_neg() if is_lazy(x) else x for x in gradients])
