"""Models of the transformers library are replayed: what they do in Python on every forward leaves no trace."""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import nn
from training import Net, adamw, batches, both, loss_of

from pygraph_train import GraphedStep, PyGraphConfig

transformers = pytest.importorskip("transformers")


@pytest.mark.parametrize(
    ("model", "config"),
    [
        (
            "BertForMaskedLM",
            {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64},
        ),
        ("GPT2LMHeadModel", {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 32}),
        ("XLNetLMHeadModel", {"d_model": 32, "n_layer": 2, "n_head": 2, "d_inner": 64}),
    ],
)
def test_language_models_are_replayed(model: str, config: dict[str, Any]) -> None:
    kind = getattr(transformers, model)
    torch.manual_seed(0)
    net = kind(kind.config_class(vocab_size=50, **config)).train()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, fused=True)
    step = GraphedStep(
        lambda batch: net(**batch).loss,
        model=net,
        optimizer=optimizer,
        config=PyGraphConfig(engine="emulated"),
    )
    ids = torch.randint(0, 50, (12, 2, 8), generator=torch.Generator().manual_seed(1))
    losses = [float(step({"input_ids": x, "labels": x})) for x in ids]
    assert step.report().steps_replayed >= 6, str(step.report())
    assert all(loss == loss for loss in losses)
    assert min(losses[-3:]) < losses[0]


_SMALL = {
    "vocab_size": 50,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "pad_token_id": 0,
}
_LAYERDROP: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "WhisperForConditionalGeneration": (
        {
            **_SMALL,
            "num_mel_bins": 8,
            "max_source_positions": 16,
            "max_target_positions": 16,
            "decoder_start_token_id": 1,
            "dropout": 0.1,
        },
        {"input_features": (8, 32), "labels": 6},
    ),
    "OPTForCausalLM": (
        {
            "vocab_size": 50,
            "hidden_size": 16,
            "num_hidden_layers": 2,
            "ffn_dim": 32,
            "num_attention_heads": 2,
            "max_position_embeddings": 32,
            "word_embed_proj_dim": 16,
        },
        {"input_ids": 8, "labels": 8},
    ),
}


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("layerdrop", [0.3, 0.0])
@pytest.mark.parametrize("model", _LAYERDROP)
def test_layers_that_are_left_out_at_random(model: str, layerdrop: float) -> None:
    options, batch = _LAYERDROP[model]

    def script(diary: Any) -> None:
        kind = getattr(transformers, model)
        own = {"layerdrop": layerdrop, "encoder_layerdrop": layerdrop, "decoder_layerdrop": layerdrop}
        net = kind(kind.config_class(**options, **own)).train()
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, fused=True)
        step = diary.step(lambda given: net(**given).loss, model=net, optimizer=optimizer)
        numbers = torch.Generator().manual_seed(1)
        for _ in range(50):
            given = {
                name: torch.randn(2, *size, generator=numbers)
                if isinstance(size, tuple)
                else torch.randint(3, 50, (2, size), generator=numbers)
                if size
                else torch.randint(0, 2, (2,), generator=numbers)
                for name, size in batch.items()
            }
            diary.write("loss", step(given))
            diary.write_state(net, optimizer)

    assert both(script, replays=20).steps_replayed >= 20


_TOKENS: dict[str, Any] = {"vocab_size": 50, "pad_token_id": 0}
_ENCODER = {
    **_TOKENS,
    **{"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32},
}
_READING: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {**_ENCODER, "num_key_value_heads": 2},
    "BertForMaskedLM": _ENCODER,
    "M2M100ForConditionalGeneration": {
        **_SMALL,
        **{"encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "decoder_start_token_id": 1},
        **{"encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0},
    },
    "XLMWithLMHeadModel": {**_TOKENS, "emb_dim": 16, "n_layers": 1, "n_heads": 2},
}


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("model", _READING)
def test_masks_that_are_read_on_the_host(model: str) -> None:
    """Without padding they take another branch, in graphs too."""
    if model.startswith("M2M100") and torch.__version__ < "2.13":  # compares versions, not text
        pytest.skip("Dynamo of this torch cannot trace how the model makes its configuration")

    def script(diary: Any) -> None:
        kind = getattr(transformers, model)
        net = kind(kind.config_class(**_READING[model])).train()
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, fused=True)
        step = diary.step(lambda given: net(**given).loss, model=net, optimizer=optimizer)
        numbers = torch.Generator().manual_seed(1)
        for number in range(40):
            ids = torch.randint(3, 50, (2, 8), generator=numbers)
            mask = torch.ones_like(ids)
            mask[0, 6:] = number % 2
            diary.write("loss", step({"input_ids": ids, "attention_mask": mask, "labels": ids}))
            diary.write_state(net, optimizer)

    report = both(script, replays=20, plan="{F B O}")
    assert "asks whether it is compiled" not in str(report.verbose()), str(report)


_EXPERTS: dict[str, dict[str, Any]] = {
    "MixtralForCausalLM": {"num_local_experts": 4},
    "Qwen2MoeForCausalLM": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
    },
}


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("model", _EXPERTS)
def test_experts_that_compute_in_another_way_in_compiled_code(model: str) -> None:
    """Dynamo may not trace what they compute otherwise: the steps before a replay compute it all the same."""

    def script(diary: Any) -> None:
        kind = getattr(transformers, model)
        options = {**_ENCODER, **_EXPERTS[model], "num_key_value_heads": 1}
        net = kind(kind.config_class(**options)).train()
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, fused=True)
        step = diary.step(lambda given: net(**given).loss, model=net, optimizer=optimizer)
        numbers = torch.Generator().manual_seed(1)
        for _ in range(25):
            ids = torch.randint(3, 50, (2, 8), generator=numbers)
            diary.write("loss", step({"input_ids": ids, "labels": ids}))
            diary.write_state(net, optimizer)

    both(script, replays=20, plan="{F B O}")


class _Variable:
    """Set at the start of a forward and reset at its end, like transformers' output collector."""

    def __init__(self) -> None:
        self.value: Any = None


def test_attribute_that_is_put_back_may_be_written() -> None:
    def script(diary: Any) -> None:
        model = Net()
        variable = _Variable()

        def step_fn(batch: Any) -> torch.Tensor:
            variable.value = {"collected": []}
            loss = loss_of(model)(batch)
            variable.value = None
            return loss

        optimizer = adamw(model)
        step = diary.step(step_fn, model=model, optimizer=optimizer)
        for batch in batches(30):
            diary.write("loss", step(batch))
            diary.write_state(model, optimizer)

    assert both(script, replays=21).steps_replayed > 20


def test_lazy_set_up_in_the_first_call_is_no_side_effect() -> None:
    def script(diary: Any) -> None:
        model = Net()
        ready: list[bool] = []

        def step_fn(batch: Any) -> torch.Tensor:
            if not ready:
                ready.append(True)
            return loss_of(model)(batch)

        optimizer = adamw(model)
        step = diary.step(step_fn, model=model, optimizer=optimizer)
        for batch in batches(30):
            diary.write("loss", step(batch))
            diary.write_state(model, optimizer)
        diary.write("ready", len(ready))

    assert both(script, replays=21).steps_replayed > 20


def test_message_logged_once_does_not_break_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    @lru_cache(None)
    def warning_once(self: logging.Logger, text: str) -> None:
        self.warning(text)

    monkeypatch.setattr(logging.Logger, "warning_once", warning_once, raising=False)
    logger = logging.getLogger("once")
    model = nn.Linear(4, 2)

    def step_fn(x: torch.Tensor) -> torch.Tensor:
        logger.warning_once("deprecated")  # type: ignore[attr-defined]
        return model(x).square().mean()

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    step = GraphedStep(step_fn, model=model, optimizer=optimizer, config=PyGraphConfig(engine="emulated"))
    for _ in range(12):
        step(torch.randn(3, 4))
    assert step.report().steps_replayed >= 6, str(step.report())
