"""Encoders and decoders of text from the transformers library."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.zoo_models.entry import Entry, NotInstalled, Parts, Size, ids, package

Options = dict[str, Any]


def library_model(name: str, /, **options: Any) -> nn.Module:
    """A model of transformers with random weights, in train mode.

    Raises:
        NotInstalled: transformers, or a version of it with this model, is not installed.
    """
    kind = getattr(package("transformers"), name, None)
    if kind is None:
        raise NotInstalled(f"this version of transformers has no {name}")
    return kind(kind.config_class(**options)).train()


def loss_of_result(model: nn.Module, batch: Any) -> Tensor:
    """The loss that models of transformers compute themselves."""
    return model(**batch).loss


def sizes(
    width: str = "hidden_size",
    depth: str = "num_hidden_layers",
    heads: str = "num_attention_heads",
    inner: str = "intermediate_size",
    length: str = "max_position_embeddings",
) -> Callable[[Size], Options]:
    """The options of a configuration that calls its sizes by these names; "" for one that it lacks."""

    def options(size: Size) -> Options:
        values = (size.width, size.depth, size.heads, 2 * size.width, 2 * size.length)
        named = zip((width, depth, heads, inner, length), values, strict=True)
        return {"vocab_size": size.vocabulary, **{name: value for name, value in named if name}}

    return options


def _grouped(size: Size) -> Options:
    """Decoders whose queries share keys and values."""
    return {**_usual(size), "num_key_value_heads": size.heads // 2, "pad_token_id": 0, "bos_token_id": 1}


def _half(size: Size) -> int:
    return size.width // 2


def _head(size: Size) -> int:
    return size.width // size.heads


def _width(size: Size) -> int:
    return size.width


_usual, _bloom, _old = (
    sizes(),
    sizes(inner="", length=""),
    sizes("n_embd", "n_layer", "n_head", "", "n_positions"),
)
_ENDS = {"bos_token_id": 1, "eos_token_id": 2}
_RELATIVE = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}


def _entry(
    name: str, model: str, options: Callable[[Size], Options], *, compiled: bool = False, **more: Any
) -> Entry:
    """A language model: its labels are tokens in a tensor of their own. `more` options may follow from the size."""

    def build(size: Size) -> Parts:
        def make_batch() -> Options:
            return {"input_ids": ids(size), "labels": ids(size)}

        others = {key: value(size) if callable(value) else value for key, value in more.items()}
        return Parts(library_model(model, **{**options(size), **others}), make_batch, loss_of_result)

    return Entry(name, "transformers: text", build, compiled)


def _classifier(size: Size) -> Parts:
    def make_batch() -> Options:
        mask = torch.ones(size.batch, size.length, dtype=torch.long)
        mask[0, size.length // 2 :] = 0
        labels = torch.randint(0, 2, (size.batch,))
        return {"input_ids": ids(size), "attention_mask": mask, "labels": labels}

    return Parts(library_model("BertForSequenceClassification", **_usual(size)), make_batch, loss_of_result)


ENTRIES: list[Entry] = [
    _entry("BERT", "BertForMaskedLM", _usual, compiled=True),
    Entry("BERT, classifier with a mask", "transformers: text", _classifier),
    _entry("RoBERTa", "RobertaForMaskedLM", _usual),
    _entry("ALBERT", "AlbertForMaskedLM", _usual, compiled=True, embedding_size=_half),
    _entry("ELECTRA", "ElectraForMaskedLM", _usual, embedding_size=_half),
    _entry("DeBERTa", "DebertaForMaskedLM", _usual, **_RELATIVE),
    _entry("DeBERTa-v2", "DebertaV2ForMaskedLM", _usual, compiled=True, position_buckets=16, **_RELATIVE),
    _entry(
        "DistilBERT",
        "DistilBertForMaskedLM",
        sizes("dim", "n_layers", "n_heads", "hidden_dim"),
        compiled=True,
    ),
    _entry("SqueezeBERT", "SqueezeBertForMaskedLM", _usual, embedding_size=_width),
    _entry("RoFormer", "RoFormerForMaskedLM", _usual),
    _entry("FNet", "FNetForMaskedLM", sizes(heads="")),
    _entry("Longformer", "LongformerForMaskedLM", _usual, attention_window=lambda size: size.length // 4),
    _entry("BigBird", "BigBirdForMaskedLM", _usual, attention_type="original_full"),
    _entry(
        "Funnel",
        "FunnelForMaskedLM",
        sizes("d_model", "", "n_head", "d_inner", ""),
        block_sizes=lambda size: [1] * size.depth,
        d_head=_head,
    ),
    _entry("MPNet", "MPNetForMaskedLM", _usual),
    _entry("ConvBERT", "ConvBertForMaskedLM", _usual, embedding_size=_half),
    _entry("Nystromformer", "NystromformerForMaskedLM", _usual),
    _entry(
        "ESM", "EsmForMaskedLM", _usual, position_embedding_type="rotary", pad_token_id=0, mask_token_id=4
    ),
    _entry(
        "ModernBERT",
        "ModernBertForMaskedLM",
        _usual,
        pad_token_id=0,
        local_attention=lambda size: size.length // 2,
    ),
    _entry("XLNet", "XLNetLMHeadModel", sizes("d_model", "n_layer", "n_head", "d_inner", ""), compiled=True),
    _entry("XLM", "XLMWithLMHeadModel", sizes("emb_dim", "n_layers", "n_heads", "")),
    _entry("CTRL", "CTRLLMHeadModel", sizes("n_embd", "n_layer", "n_head", "dff", "n_positions")),
    _entry("GPT-2", "GPT2LMHeadModel", _old, compiled=True, **_ENDS),
    _entry("GPT-BigCode", "GPTBigCodeForCausalLM", _old, **_ENDS),
    _entry(
        "GPT-Neo",
        "GPTNeoForCausalLM",
        sizes(depth="num_layers", heads="num_heads", inner=""),
        attention_types=lambda size: [[["global", "local"], size.depth // 2]],
        window_size=lambda size: size.length // 2,
        **_ENDS,
    ),
    _entry("GPT-NeoX", "GPTNeoXForCausalLM", _usual),
    _entry("GPT-J", "GPTJForCausalLM", _old, rotary_dim=lambda size: _head(size) // 2, **_ENDS),
    _entry("OPT", "OPTForCausalLM", sizes(inner="ffn_dim"), compiled=True, word_embed_proj_dim=_width),
    _entry("BLOOM", "BloomForCausalLM", _bloom, compiled=True, **_ENDS),
    _entry("MPT", "MptForCausalLM", sizes("d_model", "n_layers", "n_heads", "", "max_seq_len")),
    _entry("Falcon", "FalconForCausalLM", _bloom, new_decoder_architecture=False, **_ENDS),
    _entry("LLaMA", "LlamaForCausalLM", _grouped, compiled=True),
    _entry("Mistral", "MistralForCausalLM", _grouped),
    _entry(
        "Mixtral", "MixtralForCausalLM", _grouped, compiled=True, num_local_experts=4, num_experts_per_tok=2
    ),
    _entry("Qwen2", "Qwen2ForCausalLM", _grouped),
    _entry("Qwen3", "Qwen3ForCausalLM", _grouped, head_dim=_head),
    _entry("Gemma", "GemmaForCausalLM", _grouped, compiled=True, head_dim=_head),
    _entry("Gemma 2", "Gemma2ForCausalLM", _grouped, head_dim=_head),
    _entry("Phi", "PhiForCausalLM", _grouped),
    _entry("Phi-3", "Phi3ForCausalLM", _grouped),
    _entry("StableLM", "StableLmForCausalLM", _grouped),
    _entry("OLMo 2", "Olmo2ForCausalLM", _grouped),
    _entry("Granite", "GraniteForCausalLM", _grouped),
    _entry("Mamba", "MambaForCausalLM", sizes(heads="", inner="", length=""), state_size=8),
    _entry(
        "Mamba 2",
        "Mamba2ForCausalLM",
        sizes(heads="", inner="", length=""),
        state_size=8,
        head_dim=_head,
        num_heads=lambda size: 2 * size.heads,
        n_groups=1,
        chunk_size=lambda size: size.length // 2,
    ),
    _entry(
        "RWKV",
        "RwkvForCausalLM",
        sizes(heads="", inner="", length=""),
        context_length=lambda size: size.length,
    ),
    _entry(
        "RecurrentGemma",
        "RecurrentGemmaForCausalLM",
        _grouped,
        lru_width=_width,
        attention_window_size=lambda size: size.length,
        use_cache=False,
    ),
]
