"""Encoder-decoders, speech and time series from the transformers library."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.zoo_models.entry import Entry, Parts, Size, entry, ids
from benchmarks.zoo_models.transformers_text import library_model, loss_of_result, sizes

Options = dict[str, Any]

ENTRIES: list[Entry] = []


def _t5(size: Size) -> Options:
    own = {"d_kv": size.width // size.heads, "decoder_start_token_id": 0}
    return sizes("d_model", "num_layers", "num_heads", "d_ff", "")(size) | own


def _both(before: str = "", **options: int) -> Options:
    """These options of the encoder, and of the decoder."""
    parts = [f"{before}{part}" for part in ("encoder", "decoder")]
    return {f"{part}_{name}": value for name, value in options.items() for part in parts}


def _bart(size: Size) -> Options:
    layers = _both(layers=size.depth, attention_heads=size.heads, ffn_dim=2 * size.width)
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2}
    sizes = {"d_model": size.width, "max_position_embeddings": 2 * size.length}
    return {"vocab_size": size.vocabulary, **layers, **tokens, **sizes}


def _led(size: Size) -> Options:
    found = _bart(size)
    lengths = _both("max_", position_embeddings=found.pop("max_position_embeddings"))
    return {**found, **lengths, "attention_window": size.length // 4}


def _translation(
    name: str, model: str, options: Callable[[Size], Options], *, compiled: bool = False, **more: Any
) -> None:
    @entry(ENTRIES, "transformers: sequences", name, compiled=compiled)
    def build(size: Size) -> Parts:
        def make_batch() -> Options:
            return {"input_ids": ids(size), "labels": ids(size, length=size.length // 2)}

        return Parts(library_model(model, **options(size), **more), make_batch, loss_of_result)


_translation("T5", "T5ForConditionalGeneration", _t5, compiled=True)
_translation("mT5", "MT5ForConditionalGeneration", _t5)
_translation("UMT5", "UMT5ForConditionalGeneration", _t5)
_translation("LongT5", "LongT5ForConditionalGeneration", _t5, local_radius=7)
_translation("BART", "BartForConditionalGeneration", _bart, compiled=True)
_translation("BART, LayerDrop", "BartForConditionalGeneration", _bart, encoder_layerdrop=0.2)
_translation("mBART", "MBartForConditionalGeneration", _bart)
_translation("Pegasus", "PegasusForConditionalGeneration", _bart)
_translation("Marian", "MarianMTModel", _bart)
_translation("M2M100", "M2M100ForConditionalGeneration", _bart)
_translation("PLBart", "PLBartForConditionalGeneration", _bart)
_translation("Blenderbot", "BlenderbotForConditionalGeneration", _bart)
_translation("LED", "LEDForConditionalGeneration", _led)


@entry(ENTRIES, "transformers: speech", "Whisper", compiled=True)
def _whisper(size: Size) -> Parts:
    options = _bart(size)
    options.pop("max_position_embeddings")
    model = library_model(
        "WhisperForConditionalGeneration",
        **options,
        num_mel_bins=16,
        max_source_positions=size.length,
        max_target_positions=size.length,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )

    def make_batch() -> Options:
        sound = torch.randn(size.batch, 16, 2 * size.length)
        return {"input_features": sound, "labels": ids(size, length=size.length // 2)}

    return Parts(model, make_batch, loss_of_result)


def _wave(name: str, model: str, *, compiled: bool = False, **more: Any) -> None:
    """A network that reads samples of sound, with the loss of Connectionist Temporal Classification."""

    @entry(ENTRIES, "transformers: speech", name, compiled=compiled)
    def build(size: Size) -> Parts:
        options = {
            **sizes(length="")(size),
            "vocab_size": 32,
            "conv_dim": (size.width // 2,) * 4,
            "conv_kernel": (10, 3, 3, 2),
            "conv_stride": (5, 2, 2, 2),
            "num_conv_pos_embeddings": 16,
            "num_conv_pos_embedding_groups": 4,
            "pad_token_id": 0,
            "ctc_zero_infinity": True,
            "mask_time_prob": 0.0,
        }
        net = library_model(model, **{**options, **more})

        def make_batch() -> Options:
            return {
                "input_values": torch.randn(size.batch, size.audio),
                "labels": torch.randint(1, 32, (size.batch, 6)),
            }

        return Parts(net, make_batch, loss_of_result)


_wave("wav2vec2", "Wav2Vec2ForCTC", layerdrop=0.0)
_wave("wav2vec2, LayerDrop and masks in time", "Wav2Vec2ForCTC", layerdrop=0.1, mask_time_prob=0.3)
_wave("HuBERT", "HubertForCTC", layerdrop=0.0)
_wave("WavLM", "WavLMForCTC", layerdrop=0.0)
_wave("UniSpeech", "UniSpeechForCTC", layerdrop=0.0, num_ctc_classes=32)
_wave("SEW", "SEWForCTC", layerdrop=0.0, squeeze_factor=2)
_wave(
    "data2vec audio", "Data2VecAudioForCTC", layerdrop=0.0, num_conv_pos_embeddings=2, conv_pos_kernel_size=3
)


def _forecast(name: str, model: str, *, compiled: bool = False, **more: Any) -> None:
    @entry(ENTRIES, "transformers: time series", name, compiled=compiled)
    def build(size: Size) -> Parts:
        past, future = size.length, size.length // 4
        net = library_model(
            model,
            prediction_length=future,
            context_length=past,
            lags_sequence=[1, 2, 3],
            num_time_features=2,
            num_static_categorical_features=0,
            num_static_real_features=0,
            d_model=size.width,
            **_both(layers=size.depth, attention_heads=size.heads, ffn_dim=size.width),
            **more,
        )

        def make_batch() -> Options:
            before = past + 3
            return {
                "past_values": torch.rand(size.batch, before),
                "past_time_features": torch.rand(size.batch, before, 2),
                "past_observed_mask": torch.ones(size.batch, before),
                "future_values": torch.rand(size.batch, future),
                "future_time_features": torch.rand(size.batch, future, 2),
            }

        return Parts(net, make_batch, loss_of_result)


_forecast("time series transformer", "TimeSeriesTransformerForPrediction", compiled=True)
_forecast("Informer", "InformerForPrediction")
_forecast("Autoformer", "AutoformerForPrediction", moving_average=5, label_length=4)


@entry(ENTRIES, "transformers: time series", "PatchTST", compiled=True)
def _patches(size: Size) -> Parts:
    model = library_model(
        "PatchTSTForPrediction",
        num_input_channels=3,
        context_length=size.length,
        prediction_length=8,
        patch_length=8,
        patch_stride=8,
        num_hidden_layers=size.depth,
        d_model=size.width,
        num_attention_heads=size.heads,
        ffn_dim=size.width,
    )

    def make_batch() -> Options:
        past, future = torch.randn(size.batch, size.length, 3), torch.randn(size.batch, 8, 3)
        return {"past_values": past, "future_values": future}

    return Parts(model, make_batch, loss_of_result)
