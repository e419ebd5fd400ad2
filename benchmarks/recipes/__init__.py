"""Whole runs as people write them, without the library, with the framework's compile switch, and with the library.

`python -m benchmarks.recipes`; benchmarks/README.md says what is measured. A recipe is a function of a `Run`. It makes
data and model, trains, and tells the clock of each step. It returns what has the library's `report()`.
"""

from __future__ import annotations

_MODULES: dict[str, str] = {
    "with_transformers": "llama_lora llama_lora_checkpointing llama_lora_checkpointing_dropout llama_full "
    "bert_padding sentence_pairs dpo",
    "with_lightning": "nanogpt tabular resnet_metrics lstm_forecast graph_network dcgan",
    "with_accelerate": "diffusion convnext_mixup detection",
    "with_fabric": "distillation",
    "plain": "ppo vit_backend speech_ctc",
}

RECIPES = {name: module for module, names in _MODULES.items() for name in names.split()}
"""The module of each recipe. A run imports its own framework alone."""
