"""cuDNN's generator for the dropout between the layers of recurrent networks, one for each device.

Where somebody sets the state of the device's generator, also to what it is, the next recurrent network begins anew: it
draws a seed from the device's generator, waits for it, and makes another memory. So what puts random states back here
sets the state that the generator shares. (2.11, 2.13)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from pygraph_train.patches import standing_in

__all__ = ["generators_apart", "set_random_state"]


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
