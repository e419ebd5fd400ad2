"""Architectures with random weights, made on the spot, in files by family."""

from __future__ import annotations

from benchmarks.zoo_models import (
    generative,
    graphs,
    other,
    physics,
    recurrent,
    reinforcement,
    transformers_sequences,
    transformers_text,
    transformers_vision,
    vision,
)
from benchmarks.zoo_models.entry import FULL, TINY, Entry, NotInstalled, Parts, Size

__all__ = ["ENTRIES", "FULL", "TINY", "Entry", "NotInstalled", "Parts", "Size"]

_FILES = (
    transformers_text,
    transformers_sequences,
    transformers_vision,
    vision,
    graphs,
    recurrent,
    physics,
    reinforcement,
    generative,
    other,
)

ENTRIES: dict[str, Entry] = {entry.name: entry for file in _FILES for entry in file.ENTRIES}
