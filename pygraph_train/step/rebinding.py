"""Tensors that the step gives other memory: `teacher.data = 0.9 * teacher.data + 0.1 * student.data`.

In plain training such a tensor lies elsewhere after each step. A graph reads and writes fixed addresses, so its last
operation copies the new values into the memory that the tensor had when the step began, and the tensor stays there.
Nobody else may hold that memory: he would keep the old values in plain training, and see the new ones here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from pygraph_train.problems import NotLegal, Problem
from pygraph_train.torch_private.memory import copy_all, is_alone, storage_key, storage_use_count

__all__ = ["UNSEEN_MOVE", "Anchors", "Moves"]

UNSEEN_MOVE = Problem("the step gives a tensor other memory, and tracing does not see where")


class Moves:
    """Sees which tensors a run gives other memory, and can put them back.

    Args:
        tensors: of any device. Those without memory of their own (sparse ones, subclasses) are left out.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        plain = {id(t): t for t in tensors if type(t) in (Tensor, nn.Parameter)}
        self._before = [(t, t.detach()) for t in plain.values() if t.layout is torch.strided]

    @property
    def tensors(self) -> list[Tensor]:
        """All that are looked at."""
        return [t for t, _ in self._before]

    def found(self) -> list[tuple[Tensor, Tensor]]:
        """Those that lie elsewhere or look different now, each with an alias of what it was."""
        return [(t, before) for t, before in self._before if not _same_place(t, before)]

    def put_back(self) -> None:
        """Give every tensor its memory of before, and look no more."""
        for tensor, before in self.found():
            tensor.data = before
        self._before.clear()  # these aliases count among the holders of the memory


class Anchors:
    """The memory of tensors that captured steps rebind. Shared by all captures of a model."""

    def __init__(self) -> None:
        self._memory: dict[Tensor, Tensor] = {}
        self._holders: dict[Tensor, int] = {}

    def begin(self, tensors: Sequence[Tensor]) -> None:
        """Before a capture that rebinds these: each gets memory that is nobody else's.

        Where the emulation has closed a graph since, which held the memory, that is new memory: it cannot be told
        who holds the old one.
        """
        for tensor in tensors:
            if not self._adopt(tensor):
                tensor.data = tensor.data.clone(memory_format=torch.preserve_format)
                self._memory[tensor] = tensor.detach()
                self._holders[tensor] = _holders(tensor)

    def settle(self, moves: Moves, others: Iterable[Tensor]) -> None:
        """Inside a capture, after everything else: new values go where the old ones were.

        Args:
            moves: since the capture began.
            others: what else must not share the new memory: parameters, buffers, the batch, results.

        Raises:
            NotLegal: a tensor has moved that was not announced to `begin`, or its new memory is not its own.
        """
        found = moves.found()
        taken = [t for t in others if t.layout is torch.strided]
        for tensor, before in found:
            if tensor not in self._memory:
                raise NotLegal(UNSEEN_MOVE)
            if (tensor.shape, tensor.stride(), tensor.dtype) != (before.shape, before.stride(), before.dtype):
                raise NotLegal(
                    Problem("`.data = ...` gives a tensor another shape, other strides or another type")
                )
            memory = storage_key(tensor.untyped_storage())
            if any(t is not tensor and storage_key(t.untyped_storage()) == memory for t in taken):
                raise NotLegal(
                    Problem(
                        "`.data = ...` gives a tensor memory that another tensor uses as well",
                        fix="Assign a copy of the value (.clone())",
                    )
                )
        if found:
            with torch.no_grad():
                copy_all([before for _, before in found], [t.detach() for t, _ in found])

    def end(self, tensors: Sequence[Tensor]) -> None:
        """After a capture, successful or not: its graph may hold the memory from now on."""
        for tensor in tensors:
            self._holders[tensor] = _holders(self._memory[tensor])

    def hold(self, tensors: Sequence[Tensor]) -> bool:
        """Whether these are in their memory, and nobody else is. Hot path, where a step rebinds tensors."""
        return all(_same_place(t, self._memory[t]) and not self._lent(t, 0) for t in tensors)

    def adopt(self, tensors: Sequence[Tensor]) -> bool:
        """Put tensors that a plain step has moved where graphs find them; False where that is not possible."""
        return all(map(self._adopt, tensors))

    def _adopt(self, tensor: Tensor) -> bool:
        memory = self._memory.get(tensor)
        if memory is None:
            return False
        if _same_place(tensor, memory):
            return not self._lent(tensor, 0)
        same = (tensor.shape, tensor.stride(), tensor.dtype) == (memory.shape, memory.stride(), memory.dtype)
        if not same or self._lent(tensor, 1):
            return False
        with torch.no_grad():
            memory.copy_(tensor.detach())
        tensor.data = memory
        return True

    def may_keep(self, tensor: Tensor) -> bool:
        """Whether a tensor that the loop has given other memory can be brought home later: nobody else holds that."""
        if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout is not torch.strided:
            return False
        memory = self._memory.get(tensor)
        if memory is not None and _same_place(tensor, memory):
            return not self._lent(tensor, 0)
        return is_alone(tensor)

    def bring_back(self, tensors: Sequence[Tensor]) -> bool:
        """Put tensors that the loop has given other memory where graphs find them; False where that is not possible.

        The values are copied in the caller's stream.
        """
        away = [t for t in tensors if not _same_place(t, self._memory[t])]
        for tensor in away:
            memory = self._memory[tensor]
            same = (tensor.shape, tensor.stride(), tensor.dtype) == (
                memory.shape,
                memory.stride(),
                memory.dtype,
            )
            if not same or self._lent(tensor, 1) or not is_alone(tensor):
                return False
        if away:
            with torch.no_grad():
                copy_all([self._memory[t] for t in away], [t.detach() for t in away])
        for tensor in away:
            tensor.data = self._memory[tensor]
        return True

    def _lent(self, tensor: Tensor, away: int) -> bool:
        """Whether somebody else holds the memory of a tensor, which does so itself unless it is `away`."""
        return _holders(self._memory[tensor]) + away != self._holders[tensor]


def _holders(tensor: Tensor) -> int:
    return storage_use_count(storage_key(tensor.untyped_storage()))


def _same_place(one: Tensor, other: Tensor) -> bool:
    return (
        one.data_ptr() == other.data_ptr()
        and one.shape == other.shape
        and one.stride() == other.stride()
        and one.dtype == other.dtype
        and storage_key(one.untyped_storage()) == storage_key(other.untyped_storage())
    )
