"""Python numbers in captured kernels: where they stand, and how later replays get others.

torch launches its fused optimizers as multi-tensor kernels that take each hyperparameter as a parameter of its own, by
value, as the double that Python gave. What they derive from it (1 - beta, beta to the power of the step) they compute
on the device. (ATen/native/cuda/fused_adam_utils.cuh, fused_adagrad_utils.cuh and FusedSgdKernel.cu of torch 2.11 and
2.13: the functors take `const double`; the kernel's name spells out `dddd` for them, as in the recorded node of
tests/fixtures/graph_nodes/adamw.json.) A number that a kernel gets as a float is found as well.

So a number that occurs nowhere else is found by comparing it with each parameter as a whole, and nothing else in a
kernel can depend on it. Pure functions on plain data, but for `NumberRewriter`.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from pygraph_train.graphs.engine import NumbersNotFound
from pygraph_train.graphs.nodes import KernelParameters, Node, node_handles

_FORMATS = {8: "<d", 4: "<f"}


class KernelNumber(NamedTuple):
    """A parameter of a kernel that is one of the numbers, as a double or a float."""

    node: int
    offset: int
    size: int
    number: int


def check_sets(found: Iterable[tuple[str, Sequence[int]]], sets: Sequence[Sequence[Any]]) -> None:
    """Every operation holds all numbers of one set, each of them once, and every set is in one.

    Args:
        found: name of each operation that is to hold some, and which ones: positions in the row of all numbers.
        sets: numbers that belong together. An empty one is in an operation that holds none.
    Raises:
        NumbersNotFound: it is not so.
    """
    ends = list(itertools.accumulate(map(len, sets)))
    expected = {tuple(range(end - len(numbers), end)) for end, numbers in zip(ends, sets, strict=True)}
    missing = {numbers for numbers in expected if numbers}
    for name, numbers in found:
        held = tuple(sorted(numbers))
        if held not in expected:
            raise NumbersNotFound(
                f"{len(held)} numbers were found in {name}, which are not those of one parameter group"
            )
        missing.discard(held)
    if missing:
        raise NumbersNotFound("no captured operation holds the numbers of a parameter group")


def find_numbers(nodes: Sequence[Node], values: Sequence[float]) -> tuple[KernelNumber, ...]:
    """The parameters of kernels that are one of these numbers, in the order of nodes and parameters."""
    patterns = {
        struct.pack(form, value): index for form in _FORMATS.values() for index, value in enumerate(values)
    }
    return tuple(
        KernelNumber(index, offset, len(data), patterns[data])
        for index, node in enumerate(nodes)
        for offset, data in node.blocks
        if data in patterns
    )


class _Kernel(NamedTuple):
    """One node: where its numbers go."""

    node: int
    numbers: tuple[int, ...]
    places: tuple[tuple[Any, int], ...]
    """Format and position in the memory of the parameters, for each of the numbers."""
    parameters: KernelParameters


class NumberRewriter:
    """Gives the kernels of an instantiated graph other numbers. See `graphs.engine.NumberWriter`.

    Nothing waits for the device: an update acts on launches that come after it, and on none before.

    Args:
        graph: a captured graph such as `graphs.cuda_graph.CudaGraph`.
        sets, kernels: see `graphs.engine.Graph.numbers`.
    Raises:
        NumbersNotFound: a number was not found, or CUDA lets nobody read or update the nodes.
    """

    def __init__(self, graph: Any, sets: Sequence[Sequence[float]], kernels: Sequence[str]) -> None:
        try:
            pairs = zip(node_handles(graph.raw), graph.read(), strict=True)
            named = [(handle, node) for handle, node in pairs if any(part in node.name for part in kernels)]
            nodes = [node for _, node in named]
            found = find_numbers(nodes, [value for numbers in sets for value in numbers])
            check_sets(
                [(node.name, [f.number for f in found if f.node == i]) for i, node in enumerate(nodes)], sets
            )
            concerned = sorted({f.node for f in found})
            parameters = {node: graph.parameters(named[node][0]) for node in concerned}
        except (RuntimeError, ValueError) as error:
            raise NumbersNotFound(str(error)) from error
        self._written: dict[int, tuple[float, ...]] = {}
        self._kernels = []
        for node, kernel in parameters.items():
            own = [f for f in found if f.node == node]
            places = tuple((struct.Struct(_FORMATS[f.size]), f.offset) for f in own)
            self._kernels.append(_Kernel(node, tuple(f.number for f in own), places, kernel))

    def write(self, values: Sequence[float]) -> None:
        for kernel in self._kernels:
            numbers = tuple(values[number] for number in kernel.numbers)
            if self._written.get(kernel.node) == numbers:
                continue
            for (form, position), value in zip(kernel.places, numbers, strict=True):
                form.pack_into(kernel.parameters.memory.data, position, value)
            kernel.parameters.update()
            self._written[kernel.node] = numbers
