"""Python's random numbers, kept where a library draws some for itself."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["random_numbers_kept"]


@contextmanager
def random_numbers_kept() -> Iterator[None]:
    """Context for rich, which draws from Python's `random`: reports must not change what a loop draws."""
    state = random.getstate()
    try:
        yield
    finally:
        random.setstate(state)
