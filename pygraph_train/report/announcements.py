"""What a user is told at once, beside the report."""

from __future__ import annotations

import functools
import logging

from pygraph_train.random_state import random_numbers_kept

__all__ = ["DISABLED", "NO_DEVICE", "show", "tell_once"]

DISABLED = "PYGRAPH_DISABLE is set: training runs as it is"
NO_DEVICE = "no CUDA device: training runs as it is (engine='emulated' shows the mechanism)"


@functools.cache
def tell_once(text: str) -> None:
    """Warn on the library's logger, once in a process."""
    logging.getLogger("pygraph_train").warning("pygraph: %s", text)


def show(report: object) -> None:
    """Print a report. The random numbers of the user stay as they are."""
    with random_numbers_kept():
        import rich  # it draws some when it is imported

        rich.print(report)
