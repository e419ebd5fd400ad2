"""Random numbers: where the generators of the host and of devices are, and code that leaves them where they were."""

from __future__ import annotations

import random
from collections.abc import Collection
from typing import Any

import torch

GENERATORS = ("torch", "python", "numpy")
"""torch's default generator for the CPU, Python's `random`, NumPy's `numpy.random`."""

OF_DEVICES = "cuda"
"""torch's default generators for CUDA devices."""


class HostRandomState:
    """Where generators of the host are now, and those of devices where these are asked for.

    Args:
        generators: which of `GENERATORS` and `OF_DEVICES`.
    """

    __slots__ = ("_states",)

    def __init__(self, generators: Collection[str] = GENERATORS) -> None:
        self._states: dict[str, Any] = {name: _state_of(name) for name in generators}

    def restore(self) -> None:
        """Put the generators back to where they were."""
        for name, state in self._states.items():
            _put_back(name, state)

    def moved(self, later: HostRandomState) -> frozenset[str]:
        """Generators that are elsewhere in a later state of the same ones."""
        return frozenset(name for name in self._states if not _equal(self._states[name], later._states[name]))


def _equal(one: Any, other: Any) -> bool:
    """Whether two states of a generator, or parts of them, are the same: tuples, tensors, or dicts with arrays."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    same = one == other
    return bool(same.all()) if hasattr(same, "all") else bool(same)


def _state_of(generator: str) -> Any:
    if generator == "python":
        return random.getstate()
    if generator == "numpy":
        import numpy as np

        return np.random.get_state(legacy=False)  # a dict, also of a bit generator that the user has set
    if generator == OF_DEVICES:
        return tuple(tuple(one.get_state().tolist()) for one in _of_devices())
    return torch.get_rng_state()


def _of_devices() -> tuple[Any, ...]:
    return torch.cuda.default_generators if torch.cuda.is_initialized() else ()


def _put_back(generator: str, state: Any) -> None:
    if generator == "python":
        random.setstate(state)
    elif generator == "numpy":
        import numpy as np

        np.random.set_state(state)
    elif generator == OF_DEVICES:
        for one, its in zip(_of_devices(), state, strict=False):  # further ones have only begun to exist
            one.set_state(torch.tensor(its, dtype=torch.uint8, device="cpu"))
    else:
        torch.set_rng_state(state)
