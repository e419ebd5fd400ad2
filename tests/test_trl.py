"""TRL's SFT trainer with our callback, and as a PyGraphTrainer: the same logs and parameters, bit for bit."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

trl = pytest.importorskip("trl", reason="TRL is not installed: pip install trl")
pytest.importorskip("datasets")

import datasets  # noqa: E402
from accelerate_training import fresh_state  # noqa: E402
from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: E402
from training import differs, frozen  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast  # noqa: E402

from pygraph_train import PyGraphConfig, PyGraphTrainerCallback  # noqa: E402
from pygraph_train.integrations.transformers.trainer import PyGraphTrainerMixin  # noqa: E402

CONFIG = PyGraphConfig(engine="emulated", warmup_steps=2)


class Graphed(PyGraphTrainerMixin, trl.SFTTrainer):
    """TRL's trainer with graphs."""


def tokenizer() -> PreTrainedTokenizerFast:
    words = {f"w{i}": i for i in range(60)} | {"<pad>": 60, "<eos>": 61, "<unk>": 62}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def train(cls: type, folder: Path, **options: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    rows = torch.randint(0, 60, (160, 8), generator=torch.Generator().manual_seed(1)).tolist()
    with fresh_state():
        args = trl.SFTConfig(
            str(folder),
            per_device_train_batch_size=4,
            num_train_epochs=1,
            logging_steps=1,
            report_to=[],
            use_cpu=True,
            bf16=False,
            disable_tqdm=True,
            save_strategy="no",
            optim="adamw_torch_fused",
            gradient_checkpointing=False,
            dataset_kwargs={"skip_prepare_dataset": True},
        )
        trainer = cls(
            model=LlamaForCausalLM(config),
            args=args,
            train_dataset=datasets.Dataset.from_list([{"input_ids": row, "labels": row} for row in rows]),
            processing_class=tokenizer(),
            **options,
        )
        trainer.train()
    timed = ("runtime", "per_second")
    logs = [{k: v for k, v in row.items() if not k.endswith(timed)} for row in trainer.state.log_history]
    return frozen([logs, dict(trainer.model.named_parameters())]), trainer


@pytest.mark.slow
def test_the_sft_trainer_trains_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = itertools.count()
    # datasets names its caches by what it can pickle of its functions
    monkeypatch.setattr(datasets.fingerprint.Hasher, "hash", lambda *_: f"{next(numbers):016x}")
    expected, _ = train(trl.SFTTrainer, tmp_path)
    callback = PyGraphTrainerCallback(CONFIG)
    found, _ = train(trl.SFTTrainer, tmp_path, callbacks=[callback])
    assert differs(expected, found) is None
    assert callback.report().optimizer_steps_replayed >= 15, str(callback.report())
    found, trainer = train(Graphed, tmp_path, pygraph=CONFIG)
    assert differs(expected, found) is None
    assert trainer.report().optimizer_steps_replayed >= 15, str(trainer.report())
