"""Networks for images, and for images with text, from the transformers library."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.zoo_models.entry import Entry, Parts, Size, entry, ids
from benchmarks.zoo_models.transformers_text import library_model, loss_of_result, sizes

Options = dict[str, Any]

ENTRIES: list[Entry] = []


def _images(size: Size) -> Tensor:
    return torch.randn(size.batch, 3, size.image, size.image)


def _vit(size: Size) -> Options:
    return {
        "hidden_size": size.width,
        "num_hidden_layers": size.depth,
        "num_attention_heads": size.heads,
        "intermediate_size": 2 * size.width,
        "image_size": size.image,
        "patch_size": 8,
    }


def _swin(size: Size) -> Options:
    return {
        "image_size": size.image,
        "patch_size": 2,
        "embed_dim": size.width // 4,
        "depths": [2, 2],
        "num_heads": [2, 4],
        "window_size": 4,
    }


def _stages(size: Size) -> Options:
    """Four stages, each of twice the width of the one before."""
    return {"hidden_sizes": [size.width // 4 * factor for factor in (1, 2, 2, 4)], "depths": [1, 1, 2, 1]}


def _segformer(size: Size) -> Options:
    return {
        **_stages(size),
        "depths": [1, 1, 1, 1],
        "num_attention_heads": [1, 2, 2, 4],
        "decoder_hidden_size": size.width,
    }


def _classifier(
    name: str, model: str, options: Callable[[Size], Options], *, compiled: bool = False, **more: Any
) -> None:
    @entry(ENTRIES, "transformers: vision", name, compiled=compiled)
    def build(size: Size) -> Parts:
        def make_batch() -> Options:
            return {"pixel_values": _images(size), "labels": torch.randint(0, 10, (size.batch,))}

        net = library_model(model, num_labels=10, **{**options(size), **more})
        return Parts(net, make_batch, loss_of_result)


_classifier("ViT", "ViTForImageClassification", _vit, compiled=True)
_classifier("DeiT", "DeiTForImageClassification", _vit)
_classifier("BEiT", "BeitForImageClassification", _vit, use_relative_position_bias=True)
_classifier("data2vec vision", "Data2VecVisionForImageClassification", _vit)
_classifier("DINOv2", "Dinov2ForImageClassification", _vit, compiled=True)
_classifier("ViT-MSN", "ViTMSNForImageClassification", _vit)
_classifier("Swin", "SwinForImageClassification", _swin, compiled=True)
_classifier("Swin v2", "Swinv2ForImageClassification", _swin)
_classifier("ConvNeXt", "ConvNextForImageClassification", _stages, compiled=True)
_classifier("ConvNeXt v2", "ConvNextV2ForImageClassification", _stages)
_classifier(
    "PoolFormer", "PoolFormerForImageClassification", lambda size: {**_stages(size), "image_size": size.image}
)
_classifier("MobileNet v2", "MobileNetV2ForImageClassification", lambda size: {"image_size": size.image})


@entry(ENTRIES, "transformers: vision", "SegFormer", compiled=True)
def _segmentation(size: Size) -> Parts:
    model = library_model("SegformerForSemanticSegmentation", num_labels=5, **_segformer(size))

    def make_batch() -> Options:
        labels = torch.randint(0, 5, (size.batch, size.image, size.image))
        return {"pixel_values": _images(size), "labels": labels}

    return Parts(model, make_batch, loss_of_result)


@entry(ENTRIES, "transformers: vision", "masked autoencoder")
def _masked_autoencoder(size: Size) -> Parts:
    decoder = {"decoder_hidden_size": size.width, "decoder_num_hidden_layers": 2}
    decoder |= {"decoder_num_attention_heads": size.heads, "decoder_intermediate_size": size.width}
    model = library_model("ViTMAEForPreTraining", **_vit(size), **decoder)
    return Parts(model, lambda: {"pixel_values": _images(size)}, loss_of_result)


def _text(size: Size) -> Options:
    return sizes(length="")(size) | {"max_position_embeddings": size.length}


def _two_towers(size: Size) -> Options:
    return {"text_config": {**_text(size), "eos_token_id": 2}, "vision_config": _vit(size)}


def _pairs(size: Size) -> Options:
    return {
        "input_ids": ids(size, length=size.length // 2),
        "pixel_values": _images(size),
        "return_loss": True,
    }


@entry(ENTRIES, "transformers: images and text", "CLIP", compiled=True)
def _clip(size: Size) -> Parts:
    model = library_model("CLIPModel", projection_dim=size.width, **_two_towers(size))
    return Parts(model, lambda: _pairs(size), loss_of_result)


@entry(ENTRIES, "transformers: images and text", "SigLIP")
def _siglip(size: Size) -> Parts:
    return Parts(library_model("SiglipModel", **_two_towers(size)), lambda: _pairs(size), loss_of_result)


@entry(ENTRIES, "transformers: images and text", "BLIP")
def _blip(size: Size) -> Parts:
    options = _two_towers(size)
    options["text_config"] |= {
        "encoder_hidden_size": size.width,
        "bos_token_id": 1,
        "sep_token_id": 3,
        "pad_token_id": 0,
    }
    model = library_model("BlipForConditionalGeneration", **options)

    def make_batch() -> Options:
        tokens = ids(size, length=size.length // 2)
        return {"input_ids": tokens, "labels": tokens.clone(), "pixel_values": _images(size)}

    return Parts(model, make_batch, loss_of_result)


@entry(ENTRIES, "transformers: images and text", "LayoutLM", compiled=True)
def _layout(size: Size) -> Parts:
    model = library_model("LayoutLMForTokenClassification", num_labels=5, **_text(size))

    def make_batch() -> Options:
        corner = torch.randint(0, 500, (size.batch, size.length, 2))
        boxes = torch.cat([corner, corner + torch.randint(1, 400, corner.shape)], -1)
        labels = torch.randint(0, 5, (size.batch, size.length))
        return {"input_ids": ids(size), "bbox": boxes, "labels": labels}

    return Parts(model, make_batch, loss_of_result)


@entry(ENTRIES, "transformers: images and text", "Perceiver")
def _perceiver(size: Size) -> Parts:
    model = library_model(
        "PerceiverForMaskedLM",
        vocab_size=size.vocabulary,
        d_model=size.width,
        d_latents=size.width,
        num_latents=16,
        num_self_attends_per_block=size.depth,
        num_self_attention_heads=size.heads,
        num_cross_attention_heads=size.heads,
        qk_channels=size.width,
        v_channels=size.width,
        max_position_embeddings=size.length,
    )

    def make_batch() -> Options:
        return {
            "inputs": ids(size),
            "attention_mask": torch.ones(size.batch, size.length),
            "labels": ids(size),
        }

    return Parts(model, make_batch, loss_of_result)
