"""Runs of `transformers.Trainer`. A step is an optimizer step; losses are the logged ones, means of ten steps."""

from __future__ import annotations

import tempfile
from functools import partial
from typing import Any

import torch
import transformers as hf
from torch import Tensor

from benchmarks.recipes.run import Run, padded, texts
from pygraph_train import PyGraphConfig, PyGraphTrainer, PyGraphTrainerCallback


def train(
    run: Run,
    model: Any,
    data: Any,
    collate: Any,
    batch: int,
    stock: Any = None,
    config: Any = hf.TrainingArguments,
    **options: Any,
) -> Any:
    """What each script ends with: `PyGraphTrainer`, or the Trainer `stock` with `PyGraphTrainerCallback()`."""
    callbacks = [PyGraphTrainerCallback(**run.options)] if run.ours and stock else []
    given = {"model": model, "data_collator": collate, "train_dataset": data}
    given |= {"pygraph": PyGraphConfig(**run.options)} if run.ours and not stock else {}
    made = stock or (PyGraphTrainer if run.ours else hf.Trainer)
    options |= {"per_device_train_batch_size": run.sized(batch, 2), "max_steps": run.steps, "bf16": True}
    options |= {"logging_steps": min(10, run.steps), "disable_tqdm": True, "report_to": "none"}
    options |= {"save_strategy": "no", "torch_compile": run.compiled, "use_cpu": not run.cuda}

    class Ticks(hf.TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            run.start()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            run.step()

    with tempfile.TemporaryDirectory() as folder:
        trainer = made(args=config(folder, **options), callbacks=[Ticks(), *callbacks], **given)
        trainer.train()
    run.losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    return callbacks[0] if callbacks else trainer


def llama(run: Run, width: int, layers: int) -> hf.LlamaForCausalLM:
    """A small Llama with random weights."""
    width, layers = run.sized((width, layers), (128, 2))
    sizes = {"hidden_size": width, "intermediate_size": width * 11 // 4, "num_hidden_layers": layers}
    sizes |= {"num_attention_heads": width // 64, "num_key_value_heads": width // 128}
    return hf.LlamaForCausalLM(hf.LlamaConfig(vocab_size=run.sized(32000, 500), use_cache=False, **sizes))


def packed(rows: list[Tensor]) -> dict[str, Tensor]:
    """A batch of texts of one length, which are their own labels."""
    return {"input_ids": torch.stack(rows), "labels": torch.stack(rows)}


def lora(dropout: float) -> Any:
    """The adapter of PEFT's documents."""
    from peft import LoraConfig

    return LoraConfig(r=16, lora_alpha=32, lora_dropout=dropout, task_type="CAUSAL_LM")


def llama_lora(run: Run, dropout: float = 0.05, **more: Any) -> Any:
    """LoRA fine-tuning of a small Llama, two micro-batches a step."""
    from peft import get_peft_model

    base = llama(run, 1024, 4)
    base.enable_input_require_grads()
    model = get_peft_model(base, lora(dropout))
    data = list(torch.randint(base.config.vocab_size, run.sized((2000, 512), (64, 16))))
    more |= {"gradient_accumulation_steps": 2, "learning_rate": 2e-4, "lr_scheduler_type": "cosine"}
    return train(run, model, data, packed, 4, warmup_steps=10, **more)


def llama_lora_checkpointing(run: Run, dropout: float = 0.0) -> Any:
    """The same with gradient checkpointing, and without dropout, as is PEFT's default."""
    reentrant = {"use_reentrant": False}
    return llama_lora(run, dropout, gradient_checkpointing=True, gradient_checkpointing_kwargs=reentrant)


def llama_lora_checkpointing_dropout(run: Run) -> Any:
    """The same with dropout in what is computed twice."""
    return llama_lora_checkpointing(run, 0.05)


def llama_full(run: Run) -> Any:
    """All weights of a Llama that keeps the device busy."""
    model = llama(run, 2048, 6)
    data = list(torch.randint(model.config.vocab_size, run.sized((2000, 1024), (64, 16))))
    return train(run, model, data, packed, 8, learning_rate=1e-4, warmup_steps=10)


def bert(run: Run, width: int) -> hf.BertConfig:
    """Six layers of this width."""
    width, layers = run.sized((width, 6), (64, 2))
    sizes = {"hidden_size": width, "num_hidden_layers": layers, "intermediate_size": 4 * width}
    return hf.BertConfig(vocab_size=run.sized(30000, 500), num_attention_heads=width // 32, **sizes)


def bert_padding(run: Run) -> Any:
    """Classification of texts with BERT; each batch is padded to its longest text."""
    model = hf.BertForSequenceClassification(bert(run, 768))
    count, longest = run.sized((8000, 128), (64, 20))

    def collate(rows: list[Tensor]) -> dict[str, Tensor]:
        return padded(rows) | {"labels": torch.tensor([len(row) % 2 for row in rows])}

    return train(run, model, texts(count, model.config.vocab_size, longest), collate, 16, hf.Trainer)


def words(vocabulary: int, count: int, longest: int) -> tuple[hf.PreTrainedTokenizerFast, list[str]]:
    """Random texts in words, and the tokenizer of these words."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    known = {"[PAD]": 0, "[UNK]": 1, "[EOS]": 2} | {f"w{n}": n for n in range(3, vocabulary)}
    made = Tokenizer(WordLevel(known, unk_token="[UNK]"))
    made.pre_tokenizer = Whitespace()
    fast = hf.PreTrainedTokenizerFast(tokenizer_object=made, pad_token="[PAD]", eos_token="[EOS]")
    return fast, [" ".join(f"w{n}" for n in text.tolist()) for text in texts(count, vocabulary, longest)]


def sentence_pairs(run: Run) -> Any:
    """sentence-transformers' contrastive loss, two forwards of one model, in a Trainer as is theirs."""
    from sentence_transformers import SentenceTransformer, losses, models

    config = bert(run, 384)
    with tempfile.TemporaryDirectory() as folder:
        hf.BertModel(config).save_pretrained(folder)
        tokenizer, lines = words(config.vocab_size, *run.sized((16000, 64), (128, 12)))
        tokenizer.save_pretrained(folder)
        parts = [models.Transformer(folder), models.Pooling(config.hidden_size)]
    model = SentenceTransformer(modules=parts, device=run.device)

    class PairTrainer(hf.Trainer):
        loss_of = losses.MultipleNegativesRankingLoss(model)

        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
            self.loss_of.model = model
            return self.loss_of([inputs["anchor"], inputs["positive"]], None)

    def tokenized(rows: list[tuple[str, str]]) -> dict[str, Any]:
        anchors, positives = zip(*rows, strict=True)
        return {"anchor": model.tokenize(list(anchors)), "positive": model.tokenize(list(positives))}

    pairs = list(zip(lines[::2], lines[1::2], strict=True))
    return train(run, model, pairs, tokenized, 32, PairTrainer, learning_rate=2e-5)


def dpo(run: Run) -> Any:
    """TRL's preference optimization: the policy is a LoRA adapter, and the reference the model without it."""
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    model = llama(run, 1024, 3)
    tokenizer, lines = words(model.config.vocab_size, *run.sized((12000, 128), (192, 12)))
    data = Dataset.from_dict({"prompt": lines[::3], "chosen": lines[1::3], "rejected": lines[2::3]})
    trainer = partial(DPOTrainer, processing_class=tokenizer, peft_config=lora(0.05))
    return train(run, model, data, None, 8, trainer, DPOConfig, learning_rate=1e-4)
