"""cuDNN's generator for the dropout between the layers of recurrent networks, one for each device.

It lies in memory of the device, which ATen keeps for good and hands to each operation of cuDNN's. Its kernels write
there. Where somebody sets the state of the device's generator, also to what it is, the next recurrent network begins
anew: it draws a seed from the device's generator, waits for it, and makes another memory. (2.11, 2.13)
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pygraph_train.patches import standing_in

__all__ = ["begin_dropout_anew", "dropout_memory", "generators_apart", "set_random_state"]

_STATE = 15
"""The place of the generator's memory among the arguments of `aten._cudnn_rnn`."""


class _Taking(TorchDispatchMode):
    """Takes the memory that a recurrent network is to draw from, and runs no network."""

    def __init__(self, empty: Tensor) -> None:
        super().__init__()
        self.taken: Tensor | None = None
        self._empty = empty

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._cudnn_rnn.default:
            self.taken = args[_STATE]
            # a network without cells has none of them
            return (args[0], args[0], self._empty, self._empty, self._empty)
        return func(*args, **(kwargs or {}))


@functools.cache
def _smallest_network(device: torch.device) -> tuple[Tensor, tuple[Any, ...]]:
    """A tensor without elements, and the arguments of a network."""
    one = torch.zeros(
        1, 1, 1, dtype=torch.float32, device=device
    )  # which cuDNN takes, and the default it may not
    weight = one[0].clone()
    #       input, state, weights, biases, layers, dropout, trains, both ways, batch first
    return one[:0], (one, one, [weight, weight], False, 1, 0.5, True, False, False)


def dropout_memory(device: torch.device, *, begins: bool = False) -> Tensor | None:
    """The memory that the next recurrent network draws from, which is the very tensor that ATen keeps. Draws nothing.

    Args:
        device: a CUDA device with an index.
        begins: let the generator begin anew here, where it is to; the device's generator stays where it is.
    Returns:
        The tensor, of bytes; None where the next network begins anew, or cuDNN runs none.
    """
    generator = torch.cuda.default_generators[device.index]
    before = generator.get_offset()
    empty, network = _smallest_network(device)
    with torch.no_grad(), torch._C._DisableAutocast(), _Taking(empty) as mode:
        torch.rnn_tanh(*network)
    if generator.get_offset() == before:
        return mode.taken
    if begins:
        generator.graphsafe_get_state().set_offset(before)
        return mode.taken
    generator.set_offset(before)  # and so the next network begins anew, as it was to
    return None


def begin_dropout_anew(device: torch.device) -> None:
    """Let the next recurrent network begin anew, as after `torch.cuda.set_rng_state`."""
    generator = torch.cuda.default_generators[device.index]
    generator.set_offset(generator.get_offset())


def set_random_state(device: torch.device, state: Tensor) -> None:
    """As `torch.cuda.set_rng_state`, and recurrent networks go on drawing what they would have drawn.

    A generator that shares the state of the device's own one is told, which knows of no recurrent network.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    torch.cuda.default_generators[index].graphsafe_get_state().set_state(state)


@contextmanager
def generators_apart() -> Iterator[None]:
    """Around Dynamo's work: it puts random states back with which no recurrent network is to begin anew."""
    apart = tuple(generator.graphsafe_get_state() for generator in torch.cuda.default_generators)
    with standing_in([(torch.cuda, "default_generators", apart)]):
        yield
