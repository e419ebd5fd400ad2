"""The arguments of recorded operations: their tensors, their aliases and their numbers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch

from pygraph_train.graphs.rewriting import check_sets


def aliases(tree: Any) -> Any:
    """The same tree with other tensor objects on the same memory, and lists, which can be written, as its sequences.

    `.data`, because it shares neither the autograd graph (which would be kept alive, and whose leaf
    gradients are only adopted, not copied, while nobody else holds them) nor the version counter
    (replays write memory behind autograd's back, as CUDA graphs do).
    """
    if isinstance(tree, (list, tuple)):
        return [aliases(item) for item in tree]
    if isinstance(tree, dict):
        return {key: aliases(value) for key, value in tree.items()}
    return tree.data if isinstance(tree, torch.Tensor) else tree


def poison(storage: torch.UntypedStorage, dtype: torch.dtype) -> None:
    """NaN in floating-point memory, a huge number in integer memory, nothing in booleans."""
    if dtype is torch.bool or not storage.nbytes():
        return
    # All ones is NaN in every IEEE-like format; 0x7f7f... is large in every integer one, never an index.
    byte = 0xFF if dtype.is_floating_point or dtype.is_complex else 0x7F
    torch.empty(0, dtype=torch.uint8).set_(storage).fill_(byte)


class _Operation(Protocol):
    func: Any
    args: Any
    kwargs: dict[str, Any]


class RecordedNumbers:
    """See `engine.NumberWriter`: numbers among the arguments of recorded operations.

    Args:
        operations: with `aliases` as their arguments.
        sets, kernels: see `engine.Graph.numbers`.
    Raises:
        NumbersNotFound: a number was not found.
    """

    def __init__(
        self, operations: Sequence[_Operation], sets: Sequence[Sequence[float]], kernels: Sequence[str]
    ) -> None:
        index = {value: position for position, value in enumerate(itertools.chain.from_iterable(sets))}
        self._slots: list[tuple[Any, Any, int]] = []
        held = []
        for operation in operations:
            name = str(operation.func)
            if any(part in name for part in kernels):
                own = [*_slots_in(operation.args, index), *_slots_in(operation.kwargs, index)]
                held.append((name, [number for _, _, number in own]))
                self._slots += own
        check_sets(held, sets)

    def write(self, values: Sequence[float]) -> None:
        for container, key, number in self._slots:
            container[key] = values[number]


def _slots_in(tree: Any, index: Mapping[float, int]) -> Iterator[tuple[Any, Any, int]]:
    entries = enumerate(tree) if isinstance(tree, list) else tree.items() if isinstance(tree, dict) else ()
    for key, item in entries:
        if type(item) is float and item in index:
            yield tree, key, index[item]
        else:
            yield from _slots_in(item, index)
