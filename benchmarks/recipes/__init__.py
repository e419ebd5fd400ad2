"""Whole runs as people write them, without the library, with the framework's compile switch, and with the library.

`python -m benchmarks.recipes`; benchmarks/README.md says what is measured. A recipe is a function of a `Run`. It sets
up data and model, tells the clock when its loop begins and when a step has ended, and returns the library's report.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from benchmarks.recipes.run import WAYS, Clock, Run

__all__ = ["MODULES", "RECIPES", "WAYS", "Clock", "Run", "recipe"]

MODULES: dict[str, tuple[str, ...]] = {
    "with_transformers": (
        "llama_lora",
        "llama_lora_checkpointing",
        "llama_lora_checkpointing_dropout",
        "llama_full",
        "bert_padding",
    ),
    "with_lightning": ("nanogpt", "tabular", "resnet_metrics"),
    "with_accelerate": ("diffusion",),
    "plain": ("ppo",),
}
"""The recipes of each module. A run imports its own framework alone."""

RECIPES = tuple(name for names in MODULES.values() for name in names)


def recipe(name: str) -> Callable[[Run], Any]:
    """The function of that name."""
    (module,) = (module for module, names in MODULES.items() if name in names)
    found: Callable[[Run], Any] = getattr(import_module(f"benchmarks.recipes.{module}"), name)
    return found
