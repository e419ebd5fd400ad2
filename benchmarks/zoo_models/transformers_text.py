"""Encoders and decoders of text from the transformers library."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.zoo_models.entry import Entry, NotInstalled, Parts, Size, ids, package

__all__ = ["ENTRIES", "library_model", "loss_of_result"]

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


def _usual(size: Size) -> Options:
    """The names that most configurations have for their sizes."""
    return {
        "vocab_size": size.vocabulary,
        "hidden_size": size.width,
        "num_hidden_layers": size.depth,
        "num_attention_heads": size.heads,
        "intermediate_size": 2 * size.width,
        "max_position_embeddings": 2 * size.length,
    }


def _grouped(size: Size) -> Options:
    """Decoders whose queries share keys and values."""
    return {**_usual(size), "num_key_value_heads": size.heads // 2, "pad_token_id": 0, "bos_token_id": 1}


def _old(size: Size) -> Options:
    """GPT-2 and its kin."""
    return {
        "vocab_size": size.vocabulary,
        "n_positions": 2 * size.length,
        "n_embd": size.width,
        "n_layer": size.depth,
        "n_head": size.heads,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def _entry(
    name: str, model: str, options: Callable[[Size], Options], *, compiled: bool = False, **more: Any
) -> Entry:
    """A language model: its labels are its tokens, in a tensor of their own."""

    def build(size: Size) -> Parts:
        def make_batch() -> Options:
            return {"input_ids": ids(size), "labels": ids(size)}

        return Parts(library_model(model, **{**options(size), **more}), make_batch, loss_of_result)

    return Entry(name, "transformers: text", build, compiled)


def _classifier(name: str, model: str, options: Callable[[Size], Options], **more: Any) -> Entry:
    def build(size: Size) -> Parts:
        def make_batch() -> Options:
            mask = torch.ones(size.batch, size.length, dtype=torch.long)
            mask[0, size.length // 2 :] = 0
            labels = torch.randint(0, 2, (size.batch,))
            return {"input_ids": ids(size), "attention_mask": mask, "labels": labels}

        return Parts(library_model(model, **{**options(size), **more}), make_batch, loss_of_result)

    return Entry(name, "transformers: text", build)


def _without(options: Callable[[Size], Options], *names: str, **renamed: str) -> Callable[[Size], Options]:
    """The same sizes under other names: `new="old"`."""

    def changed(size: Size) -> Options:
        found = options(size)
        found |= {new: found[old] for new, old in renamed.items()}
        return {k: v for k, v in found.items() if k not in (*names, *renamed.values())}

    return changed


def _albert(size: Size) -> Options:
    return {**_usual(size), "embedding_size": size.width // 2}


def _distilbert(size: Size) -> Options:
    names = {"dim": "hidden_size", "n_layers": "num_hidden_layers", "n_heads": "num_attention_heads"}
    return _without(_usual, **names, hidden_dim="intermediate_size")(size)


def _mobilebert(size: Size) -> Options:
    half = size.width // 2
    return {**_usual(size), "embedding_size": half, "intra_bottleneck_size": half, "true_hidden_size": half}


def _squeezebert(size: Size) -> Options:
    return {**_usual(size), "embedding_size": size.width}


def _fnet(size: Size) -> Options:
    return _without(_usual, "num_attention_heads")(size)


def _longformer(size: Size) -> Options:
    return {**_usual(size), "attention_window": size.length // 4}


def _big_bird(size: Size) -> Options:
    return {**_usual(size), "attention_type": "original_full"}


def _funnel(size: Size) -> Options:
    return {
        "vocab_size": size.vocabulary,
        "block_sizes": [1] * size.depth,
        "d_model": size.width,
        "n_head": size.heads,
        "d_head": size.width // size.heads,
        "d_inner": 2 * size.width,
    }


def _xlnet(size: Size) -> Options:
    return {
        "vocab_size": size.vocabulary,
        "d_model": size.width,
        "n_layer": size.depth,
        "n_head": size.heads,
        "d_inner": 2 * size.width,
    }


def _xlm(size: Size) -> Options:
    return {
        "vocab_size": size.vocabulary,
        "emb_dim": size.width,
        "n_layers": size.depth,
        "n_heads": size.heads,
        "max_position_embeddings": 2 * size.length,
    }


def _gpt_neo(size: Size) -> Options:
    return {
        "vocab_size": size.vocabulary,
        "hidden_size": size.width,
        "num_layers": size.depth,
        "num_heads": size.heads,
        "attention_types": [[["global", "local"], size.depth // 2]],
        "max_position_embeddings": 2 * size.length,
        "window_size": size.length // 2,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def _gptj(size: Size) -> Options:
    return {**_old(size), "rotary_dim": size.width // size.heads // 2}


def _codegen(size: Size) -> Options:
    return {**_gptj(size), "n_head": 4}  # it works on four groups of heads


def _opt(size: Size) -> Options:
    return _without(_usual, ffn_dim="intermediate_size")(size) | {"word_embed_proj_dim": size.width}


def _bloom(size: Size) -> Options:
    found = _without(_usual, "intermediate_size", "max_position_embeddings")(size)
    return found | {"bos_token_id": 1, "eos_token_id": 2}


def _mpt(size: Size) -> Options:
    return {
        "vocab_size": size.vocabulary,
        "d_model": size.width,
        "n_layers": size.depth,
        "n_heads": size.heads,
        "max_seq_len": 2 * size.length,
    }


def _falcon(size: Size) -> Options:
    return {**_bloom(size), "new_decoder_architecture": False}


def _gemma(size: Size) -> Options:
    return {**_grouped(size), "head_dim": size.width // size.heads}


def _mixture(size: Size) -> Options:
    return {**_grouped(size), "num_local_experts": 4, "num_experts_per_tok": 2}


def _qwen_mixture(size: Size) -> Options:
    return {
        **_grouped(size),
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": size.width,
        "shared_expert_intermediate_size": size.width,
    }


def _mamba(size: Size) -> Options:
    return {
        "vocab_size": size.vocabulary,
        "hidden_size": size.width,
        "num_hidden_layers": size.depth,
        "state_size": 8,
    }


def _mamba2(size: Size) -> Options:
    return {
        **_mamba(size),
        "head_dim": size.width // size.heads,
        "num_heads": 2 * size.heads,
        "n_groups": 1,
        "chunk_size": size.length // 2,
    }


def _rwkv(size: Size) -> Options:
    return {
        "vocab_size": size.vocabulary,
        "hidden_size": size.width,
        "num_hidden_layers": size.depth,
        "context_length": size.length,
    }


def _recurrent_gemma(size: Size) -> Options:
    return {
        **_grouped(size),
        "lru_width": size.width,
        "attention_window_size": size.length,
        "use_cache": False,
    }


def _modernbert(size: Size) -> Options:
    return {**_usual(size), "pad_token_id": 0, "local_attention": size.length // 2}


def _ctrl(size: Size) -> Options:
    return {**_without(_old, "bos_token_id", "eos_token_id")(size), "dff": 2 * size.width}


ENTRIES: list[Entry] = [
    _entry("BERT", "BertForMaskedLM", _usual, compiled=True),
    _classifier("BERT, classifier with a mask", "BertForSequenceClassification", _usual),
    _entry("RoBERTa", "RobertaForMaskedLM", _usual),
    _entry("ALBERT", "AlbertForMaskedLM", _albert, compiled=True),
    _entry("ELECTRA", "ElectraForMaskedLM", _albert),
    _entry("DeBERTa", "DebertaForMaskedLM", _usual, relative_attention=True, pos_att_type=["c2p", "p2c"]),
    _entry(
        "DeBERTa-v2",
        "DebertaV2ForMaskedLM",
        _usual,
        compiled=True,
        relative_attention=True,
        pos_att_type=["c2p", "p2c"],
        position_buckets=16,
    ),
    _entry("DistilBERT", "DistilBertForMaskedLM", _distilbert, compiled=True),
    _entry("MobileBERT", "MobileBertForMaskedLM", _mobilebert),
    _entry("SqueezeBERT", "SqueezeBertForMaskedLM", _squeezebert),
    _entry("RoFormer", "RoFormerForMaskedLM", _usual),
    _entry("FNet", "FNetForMaskedLM", _fnet),
    _entry("Longformer", "LongformerForMaskedLM", _longformer),
    _entry("BigBird", "BigBirdForMaskedLM", _big_bird),
    _entry("Funnel", "FunnelForMaskedLM", _funnel),
    _entry("MPNet", "MPNetForMaskedLM", _usual),
    _entry("ConvBERT", "ConvBertForMaskedLM", _albert),
    _entry("Nystromformer", "NystromformerForMaskedLM", _usual),
    _entry(
        "ESM", "EsmForMaskedLM", _usual, position_embedding_type="rotary", pad_token_id=0, mask_token_id=4
    ),
    _entry("ModernBERT", "ModernBertForMaskedLM", _modernbert),
    _entry("XLNet", "XLNetLMHeadModel", _xlnet, compiled=True),
    _entry("XLM", "XLMWithLMHeadModel", _xlm),
    _entry("CTRL", "CTRLLMHeadModel", _ctrl),
    _entry("GPT-2", "GPT2LMHeadModel", _old, compiled=True),
    _entry("GPT-BigCode", "GPTBigCodeForCausalLM", _old),
    _entry("GPT-Neo", "GPTNeoForCausalLM", _gpt_neo),
    _entry("GPT-NeoX", "GPTNeoXForCausalLM", _usual),
    _entry("GPT-J", "GPTJForCausalLM", _gptj),
    _entry("CodeGen", "CodeGenForCausalLM", _codegen),
    _entry("OPT", "OPTForCausalLM", _opt, compiled=True),
    _entry("BLOOM", "BloomForCausalLM", _bloom, compiled=True),
    _entry("MPT", "MptForCausalLM", _mpt),
    _entry("Falcon", "FalconForCausalLM", _falcon),
    _entry("LLaMA", "LlamaForCausalLM", _grouped, compiled=True),
    _entry("Mistral", "MistralForCausalLM", _grouped),
    _entry("Mixtral", "MixtralForCausalLM", _mixture, compiled=True),
    _entry("Qwen2", "Qwen2ForCausalLM", _grouped),
    _entry("Qwen2-MoE", "Qwen2MoeForCausalLM", _qwen_mixture),
    _entry("Qwen3", "Qwen3ForCausalLM", _gemma),
    _entry("Gemma", "GemmaForCausalLM", _gemma, compiled=True),
    _entry("Gemma 2", "Gemma2ForCausalLM", _gemma),
    _entry("Phi", "PhiForCausalLM", _grouped),
    _entry("Phi-3", "Phi3ForCausalLM", _grouped),
    _entry("StableLM", "StableLmForCausalLM", _grouped),
    _entry("OLMo 2", "Olmo2ForCausalLM", _grouped),
    _entry("Granite", "GraniteForCausalLM", _grouped),
    _entry("Mamba", "MambaForCausalLM", _mamba),
    _entry("Mamba 2", "Mamba2ForCausalLM", _mamba2),
    _entry("RWKV", "RwkvForCausalLM", _rwkv),
    _entry("RecurrentGemma", "RecurrentGemmaForCausalLM", _recurrent_gemma),
]
