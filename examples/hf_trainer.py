"""Train a small BERT on the source of Python's standard library with the transformers Trainer and PyGraph.

    pip install accelerate transformers
    python examples/hf_trainer.py                            # tiny model on a CPU, small on a GPU
    python examples/hf_trainer.py --callback                 # a stock Trainer with PyGraphTrainerCallback
    python examples/hf_trainer.py --engine off               # the same training without PyGraph

Forward, backward and optimizer each run from a graph. `PyGraphTrainer` has the loss in the graph of the forward, and
the callback the model. Both print their report at the end. Nothing is downloaded: weights are random, and the tokenizer
is built from the text.
"""

from __future__ import annotations

import argparse
import sysconfig
import tempfile
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordPiece
from tokenizers.pre_tokenizers import BertPreTokenizer
from tokenizers.trainers import WordPieceTrainer
from transformers import (
    BertConfig,
    BertForMaskedLM,
    DataCollatorForLanguageModeling,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
)

from pygraph_train import PyGraphConfig, PyGraphTrainer, PyGraphTrainerCallback

SPECIAL = {"unk_token": "[UNK]", "pad_token": "[PAD]", "mask_token": "[MASK]"}


def standard_library(modules: int) -> list[str]:
    """The first modules of the standard library."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:modules]
    return [file.read_text(encoding="utf-8", errors="ignore") for file in files]


def tokenizer_of(texts: list[str], size: int) -> PreTrainedTokenizerFast:
    """A WordPiece tokenizer trained on the spot."""
    tokenizer = Tokenizer(WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = BertPreTokenizer()
    trainer = WordPieceTrainer(vocab_size=size, special_tokens=list(SPECIAL.values()), show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    # all excerpts are of one length: there is nothing to mask
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_input_names=["input_ids"], **SPECIAL)


def main() -> None:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description="A BERT with the transformers Trainer and PyGraph")
    parser.add_argument("--engine", choices=("auto", "cuda", "emulated", "off"), default="auto")
    parser.add_argument("--steps", type=int, default=2000 if cuda else 60)
    parser.add_argument("--callback", action="store_true", help="a stock Trainer with PyGraph's callback")
    args = parser.parse_args()
    engine = args.engine
    if engine == "auto":
        engine = "cuda" if cuda else "emulated"
    on_cpu = engine == "emulated" or not cuda
    length, width, layers, batch = (32, 64, 2, 8) if on_cpu else (128, 512, 6, 16)

    torch.manual_seed(0)
    texts = standard_library(20 if on_cpu else 200)
    tokenizer = tokenizer_of(texts, size=2000)
    tokens = [number for text in texts for number in tokenizer(text, verbose=False)["input_ids"]]
    count = min(args.steps * batch, len(tokens) // length)
    data = [{"input_ids": tokens[i * length : (i + 1) * length]} for i in range(count)]
    model = BertForMaskedLM(
        BertConfig(
            vocab_size=len(tokenizer),
            hidden_size=width,
            num_hidden_layers=layers,
            num_attention_heads=4,
            intermediate_size=4 * width,
            max_position_embeddings=length,
        )
    )
    # by default forward and backward stay as they are where the training is too short for Inductor
    compiles = True if args.callback and not on_cpu else "auto"
    config = PyGraphConfig(engine=engine, compile=compiles)
    callback = PyGraphTrainerCallback(config)
    with tempfile.TemporaryDirectory() as folder:
        options = {
            "model": model,
            "args": TrainingArguments(
                folder,
                max_steps=args.steps,
                per_device_train_batch_size=batch,
                learning_rate=1e-3,
                optim="adamw_torch_fused",
                bf16=not on_cpu,
                use_cpu=on_cpu,
                logging_steps=max(1, args.steps // 5),
                logging_nan_inf_filter=False,  # it waits for the GPU on every step
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
            ),
            "train_dataset": data,
            "data_collator": DataCollatorForLanguageModeling(tokenizer),
        }
        if args.callback:
            trainer = Trainer(**options, callbacks=[callback])
        else:
            trainer = PyGraphTrainer(**options, pygraph=config)
        trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    print(f"last loss: {losses[-1]:.3f}")


if __name__ == "__main__":
    main()
