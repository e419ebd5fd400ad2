"""Steps that were found to be slower than they have to be, at the size at which they were found."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn

from benchmarks.zoo_models import ENTRIES, Entry, Parts, Size
from benchmarks.zoo_models.entry import FULL, ids
from benchmarks.zoo_models.recurrent import Recurrent, token_loss
from benchmarks.zoo_models.transformers_text import library_model, loss_of_result
from benchmarks.zoo_models.vision import classification_loss, labelled_images, timm_model

__all__ = ["CASES"]

_CASES: list[Entry] = []


def _again(name: str, entry: str, **larger: int) -> None:
    """An entry of the zoo, larger."""

    def build(size: Size) -> Parts:
        return ENTRIES[entry].build(dataclasses.replace(size, **larger) if size == FULL else size)

    _CASES.append(Entry(name, "cases", build))


def _llama(size: Size) -> Parts:
    full = size == FULL
    width, depth, length = (512, 12, 256) if full else (size.width, 2, size.length)
    model = library_model(
        "LlamaForCausalLM",
        vocab_size=8000 if full else size.vocabulary,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=depth,
        num_attention_heads=8 if full else 2,
        num_key_value_heads=4 if full else 1,
    )

    def make_batch() -> dict[str, Any]:
        tokens = ids(size, length=length)
        return {"input_ids": tokens, "labels": tokens}  # one tensor twice

    return Parts(model, make_batch, loss_of_result)


def _lstm(size: Size) -> Parts:
    def make_batch() -> dict[str, Any]:
        return {"x": ids(size), "y": ids(size)}

    return Parts(Recurrent(nn.LSTM, size).train(), make_batch, token_loss)


def _efficientnet(size: Size) -> Parts:
    side = 224 if size == FULL else 32
    return Parts(timm_model("efficientnet_b0"), lambda: labelled_images(size, side), classification_loss)


def _swin(size: Size) -> Parts:
    if size != FULL:
        return ENTRIES["Swin"].build(size)
    model = library_model("SwinForImageClassification", num_labels=10)  # its defaults are those of Swin-T

    def make_batch() -> dict[str, Any]:
        images = torch.randn(size.batch, 3, 224, 224)
        return {"pixel_values": images, "labels": torch.randint(0, 10, (size.batch,))}

    return Parts(model, make_batch, loss_of_result)


_CASES.append(Entry("case: Llama-like, one tensor twice", "cases", _llama))
_again("case: ALBERT", "ALBERT", width=768, heads=12, depth=12, length=128)
_again("case: DeBERTa-v2", "DeBERTa-v2", width=512, heads=8, depth=8, length=128)
_again("case: Whisper", "Whisper", width=384, heads=6, length=128)
_CASES.append(Entry("case: Swin-T", "cases", _swin))
_CASES.append(Entry("case: LSTM", "cases", _lstm))
_again("case: GCN", "GCN", depth=8)
_again("case: U-Net", "diffusion U-Net")
_again("case: PPO", "PPO")
_again("case: PINN", "PINN, heat equation")
_again("case: mixture of experts", "mixture of experts, torch.where routing", width=512)
_CASES.append(Entry("case: EfficientNet-B0", "cases", _efficientnet))

CASES: dict[str, Entry] = {entry.name: entry for entry in _CASES}
