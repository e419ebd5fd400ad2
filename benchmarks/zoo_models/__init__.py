"""Architectures with random weights, made on the spot, in files by family."""

from __future__ import annotations

from importlib import import_module

from benchmarks.zoo_models.entry import FULL, TINY, Entry, NotInstalled

__all__ = ["ENTRIES", "FULL", "TINY", "Entry", "NotInstalled"]

_TRANSFORMERS = ("transformers_text", "transformers_sequences", "transformers_vision")
_OTHERS = ("vision", "graphs", "recurrent", "physics", "reinforcement", "generative", "other")

ENTRIES: dict[str, Entry] = {
    entry.name: entry
    for file in (*_TRANSFORMERS, *_OTHERS)
    for entry in import_module(f"benchmarks.zoo_models.{file}").ENTRIES
}
