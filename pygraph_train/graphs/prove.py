"""Does a retargeted graph still read from where it was captured? Poison that memory and compare."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch

from pygraph_train.graphs.engine import IndirectGraph
from pygraph_train.graphs.memory import bits, copy_elsewhere, fingerprints, span

__all__ = ["poison", "prove"]


def prove(
    graph: IndirectGraph, inputs: Sequence[torch.Tensor], outputs: Callable[[], Iterable[torch.Tensor]]
) -> frozenset[int]:
    """Find the served inputs of which a stale pointer cannot be ruled out, by experiment.

    The graph is replayed on its inputs, then on copies of them while the inputs themselves hold NaN
    (or zeros, if they are no floating-point numbers: a huge index could fault). Both results have to
    agree bit for bit. Work that is not deterministic, or that changes memory other than its inputs
    and outputs, cannot be proven.

    Args:
        graph: must have been retargeted to `inputs`, or be where it was captured with them.
        inputs: all tensors that were given to `Engine.indirect`. Their values, and the random state,
            are afterwards as before; what else the graph writes is not.
        outputs: called after a replay; returns what it wrote to memory of its own.
    Returns:
        Inputs that are not proven. The caller serves them by copies.
    """
    before = [copy_elsewhere(tensor) for tensor in inputs]
    devices = {tensor.device for tensor in inputs if tensor.device.type == "cuda"}

    def result(of: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        with torch.random.fork_rng([device.index for device in devices]):
            graph.replay()
        # what it wrote into its inputs counts as well
        return fingerprints((*outputs(), *of))

    def holds(moved: Sequence[int]) -> bool:
        using = [copy_elsewhere(before[i]) if i in moved else inputs[i] for i in range(len(inputs))]
        with _restoring(inputs, before):
            for index in moved:
                poison(inputs[index])
            try:
                graph.retarget({index: using[index] for index in moved})
                found = result(using)
            finally:
                graph.retarget({index: inputs[index] for index in moved})
        return all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))

    with torch.no_grad():
        with _restoring(inputs, before):
            expected = result(inputs)
        # a poison equal to the value would prove nothing
        blind = frozenset(
            index
            for index in graph.served
            if not _floating(inputs[index]) and not bool(bits(inputs[index]).any())
        )
        candidates = sorted(graph.served - blind)
        if not candidates or holds(candidates):
            return blind
        wrong = frozenset(index for index in candidates if not holds([index]))
        return blind | (wrong or frozenset(candidates))


@contextmanager
def _restoring(inputs: Sequence[torch.Tensor], before: Sequence[torch.Tensor]) -> Iterator[None]:
    try:
        yield
    finally:
        for tensor, values in zip(inputs, before, strict=True):
            if tensor.numel():
                span(tensor.data).copy_(span(values))  # .data: behind autograd's back


def _floating(tensor: torch.Tensor) -> bool:
    return tensor.dtype.is_floating_point or tensor.dtype.is_complex


def poison(tensor: torch.Tensor) -> None:
    """Overwrite a tensor with what shows in any result that depends on it."""
    # all ones is NaN in every IEEE-like format
    bits(tensor).fill_(0xFF if _floating(tensor) else 0)
