"""Which tensors of a captured function count as the host's: on the CPU they look like those of the device."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from pygraph_train.torch_private.dispatch import operator_draws
from pygraph_train.torch_private.memory import storage_key

__all__ = ["HostTensors"]


class HostTensors:
    """Tensors that follow from random numbers and constants alone. With CUDA they could be on the CPU.

    Args:
        readable: whether the captured function may read them. Who captures has to know what it does with them.
    """

    def __init__(self, *, readable: bool) -> None:
        self._readable = readable
        self._made: set[int] = set()
        self._drawn: set[int] = set()

    def constant(self, tensor: torch.Tensor) -> None:
        """A tensor was made of Python's numbers."""
        self._made.add(storage_key(tensor.untyped_storage()))

    def saw(
        self, func: Any, args: Any, kwargs: Any, inputs: list[torch.Tensor], outputs: Iterable[torch.Tensor]
    ) -> None:
        """An operation was made."""
        if not self._readable:
            return
        given = {storage_key(t.untyped_storage()) for t in inputs}
        made = {storage_key(t.untyped_storage()) for t in outputs}
        if not given <= self._made:
            self._made -= made
            self._drawn -= made
            return
        self._made |= made
        if given & self._drawn or operator_draws(func, args, kwargs):
            self._drawn |= made

    def may_be_read(self, tensor: torch.Tensor) -> bool:
        """Whether the host may read it: it follows from random numbers and constants, and was asked for."""
        return self._readable and storage_key(tensor.untyped_storage()) in self._drawn
