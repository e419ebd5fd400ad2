"""Runs of `transformers.Trainer`. A step is an optimizer step."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from benchmarks.recipes.run import Clock, Run
from pygraph_train import PyGraphConfig, PyGraphTrainer, PyGraphTrainerCallback

Collate = Callable[[Sequence[Any]], dict[str, torch.Tensor]]


class Ticks(TrainerCallback):
    """Tells the clock."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.clock.start()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.clock.step()


def train(run: Run, make: Any, data: Any, collate: Collate, callbacks: Any = (), **arguments: Any) -> Any:
    """What each script ends with. `make` makes the Trainer; the losses are the logged ones, means of ten steps."""
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder,
            max_steps=run.steps,
            logging_steps=min(10, run.steps),
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=not run.cuda,
            torch_compile=run.compiled,
            **arguments,
        )
        made = [Ticks(run.clock), *callbacks]
        trainer = make(args=args, train_dataset=data, data_collator=collate, callbacks=made)
        trainer.train()
    run.clock.losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    return trainer


def with_callback(
    run: Run, model: Any, data: Any, collate: Collate, trainer: Any = Trainer, **arguments: Any
) -> Any:
    """A stock Trainer, or a subclass of it, and for the library `PyGraphTrainerCallback()` among its callbacks."""

    def make(**more: Any) -> Any:
        return trainer(model, **more)

    if not run.ours:
        return train(run, make, data, collate, **arguments) and None
    callback = PyGraphTrainerCallback(**run.options)
    train(run, make, data, collate, [callback], **arguments)
    return callback.report()


def with_trainer(run: Run, model: Any, data: Any, collate: Collate, **arguments: Any) -> Any:
    """A stock Trainer, and for the library `PyGraphTrainer` in its place."""

    def make(**more: Any) -> Any:
        if not run.ours:
            return Trainer(model, **more)
        return PyGraphTrainer(model, pygraph=PyGraphConfig(**run.options), **more)

    trainer = train(run, make, data, collate, **arguments)
    return trainer.report() if run.ours else None


def llama(run: Run, width: int = 1024, layers: int = 4) -> LlamaForCausalLM:
    """A small Llama with random weights."""
    width, layers = run.sized((width, layers), (64, 2))
    config = LlamaConfig(
        vocab_size=run.sized(32000, 500),
        hidden_size=width,
        intermediate_size=width * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=max(4, width // 64),
        num_key_value_heads=max(2, width // 128),
        max_position_embeddings=1024,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def packed_texts(run: Run, length: int, count: int) -> list[dict[str, torch.Tensor]]:
    """Token sequences of one length, which are their own labels."""
    length = run.sized(length, 16)
    tokens = torch.randint(run.sized(32000, 500), (run.sized(count, 64), length))
    return [{"input_ids": row, "labels": row} for row in tokens]


def stacked(rows: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """A batch of rows of one length."""
    return {key: torch.stack([row[key] for row in rows]) for key in rows[0]}


def llama_lora(run: Run, dropout: float = 0.05, **more: Any) -> Any:
    """LoRA fine-tuning of a small Llama, two micro-batches a step."""
    from peft import LoraConfig, get_peft_model

    base = llama(run)
    base.enable_input_require_grads()
    lora = LoraConfig(r=16, lora_alpha=32, lora_dropout=dropout, task_type="CAUSAL_LM")
    return with_trainer(
        run,
        get_peft_model(base, lora),
        packed_texts(run, 512, 2000),
        stacked,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=2e-4,
        lr_scheduler_type="cosine",
        warmup_steps=10,
        bf16=True,
        **more,
    )


def llama_lora_checkpointing(run: Run, dropout: float = 0.0) -> Any:
    """The same with gradient checkpointing, and without dropout, as is PEFT's default."""
    options = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
    return llama_lora(run, dropout, **options)


def llama_lora_checkpointing_dropout(run: Run) -> Any:
    """The same with dropout in what is computed twice."""
    return llama_lora_checkpointing(run, 0.05)


def llama_full(run: Run) -> Any:
    """All weights of a Llama that keeps the device busy."""
    return with_trainer(
        run,
        llama(run, 2048, 6),
        packed_texts(run, 1024, 2000),
        stacked,
        per_device_train_batch_size=8,
        learning_rate=1e-4,
        lr_scheduler_type="cosine",
        warmup_steps=10,
        bf16=True,
    )


def bert_padding(run: Run) -> Any:
    """Classification of texts with BERT; each batch is padded to its longest text."""
    width, layers, longest, count = run.sized((768, 6, 128, 8000), (64, 2, 20, 128))
    config = BertConfig(
        vocab_size=run.sized(30522, 500),
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=width // 32,
        intermediate_size=4 * width,
    )
    data = [
        {"input_ids": torch.randint(5, config.vocab_size, (int(length),)), "label": int(length) % 2}
        for length in torch.randint(longest // 4, longest + 1, (count,))
    ]

    def padded(rows: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
        tokens = pad_sequence([row["input_ids"] for row in rows], batch_first=True)
        labels = torch.tensor([row["label"] for row in rows])
        return {"input_ids": tokens, "attention_mask": (tokens != 0).long(), "labels": labels}

    return with_callback(
        run,
        BertForSequenceClassification(config),
        data,
        padded,
        per_device_train_batch_size=16,
        learning_rate=5e-5,
        bf16=True,
    )
