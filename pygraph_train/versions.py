"""The versions of torch that the library was tried with."""

from __future__ import annotations

import functools
import logging

import torch

TRIED = ("2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0")
"""The newest one last. pyproject.toml has the same bounds."""


def what_is_new() -> str:
    """What to say of a torch whose minor version is newer than all that were tried; nothing of another one."""
    here, newest = ([int(n) for n in v.split(".")[:2]] for v in (torch.__version__, TRIED[-1]))
    told = f"torch {torch.__version__} is newer than {TRIED[-1]}, the newest that was tried with this library"
    return told if here > newest else ""


@functools.cache
def tell_if_newer() -> None:
    """Log a line where this torch is newer than every one that the library was tried with, once in a process."""
    if newer := what_is_new():
        logging.getLogger("pygraph_train").warning("pygraph: %s", newer)
