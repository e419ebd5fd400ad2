"""Libraries on top of the frameworks, as their users call them: each trains as without the library, and from graphs."""

from __future__ import annotations

import contextlib
import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from .compare import Run, same_as_plain
from .frameworks import fit, forget_accelerators, sentences, train, trainer
from .models import DEVICE, adamw

NEEDS_THE_CPU = pytest.mark.skipif(
    DEVICE == "cuda",
    reason="its loader fails where the default device is no CPU, as the contract sets it on CUDA",
)

pytest.importorskip("transformers")


@pytest.fixture(scope="module", autouse=True)
def _imported() -> None:
    """Before a training is compared: some draw random numbers while they are imported."""
    for name in ("peft", "trl", "sentence_transformers", "torch_geometric.loader", "torch_geometric.nn"):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


WAYS = pytest.mark.parametrize("way", ["callback", "trainer"])


def llama(**more: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, pad_token_id=0, **more))


def tokenizer(folder: Path) -> Any:
    """Of the words `w2` to `w63`."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    words = {"[PAD]": 0, "[UNK]": 1} | {f"w{n}": n for n in range(2, 64)}
    made = Tokenizer(WordLevel(words, unk_token="[UNK]"))
    made.pre_tokenizer = Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=made, pad_token="[PAD]", eos_token="[UNK]")
    fast.save_pretrained(folder)
    return fast


def texts(count: int, seed: int = 1) -> list[str]:
    """Of three to ten words."""
    generator = torch.Generator("cpu").manual_seed(seed)

    def drawn(least: int, most: int, size: int) -> list[int]:
        return torch.randint(least, most, (size,), generator=generator, device="cpu").tolist()

    return [" ".join(f"w{n}" for n in drawn(2, 64, length)) for length in drawn(3, 11, count)]


@WAYS
@pytest.mark.parametrize("checkpoints", [False, True])
@same_as_plain(replays=8)
def test_peft(run: Run, *, way: str, checkpoints: bool) -> None:
    """LoRA, with and without gradient checkpointing."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    adapters = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(llama(), adapters)
    if checkpoints:
        model.enable_input_require_grads()
    options = {"gradient_checkpointing_kwargs": {"use_reentrant": False}} if checkpoints else {}
    trainer(run, way, model=model, gradient_checkpointing=checkpoints, **options)


@NEEDS_THE_CPU
@pytest.mark.parametrize("adapted", [False, True])
@same_as_plain(replays=8)
def test_supervised_fine_tuning_of_trl(run: Run, *, adapted: bool) -> None:
    trl = pytest.importorskip("trl")
    data = [{"input_ids": row["input_ids"].tolist()} for row in sentences()]
    # its loss computes the gradient of the last layer outside of regions: it moves on a CPU, and is copied in the end
    trained(run, trl.SFTTrainer, trl.SFTConfig, data, adapted=adapted, epochs=3)


@NEEDS_THE_CPU
@same_as_plain(replays=8)
def test_preferences_of_trl(run: Run) -> None:
    """DPO: two forwards of the policy, and of a reference."""
    trl = pytest.importorskip("trl")
    prompts, good, bad = texts(160, 1), texts(160, 2), texts(160, 3)
    data = [{"prompt": p, "chosen": g, "rejected": b} for p, g, b in zip(prompts, good, bad, strict=True)]
    trained(run, trl.DPOTrainer, trl.DPOConfig, data, adapted=False, more={"ref_model": llama()})


def trained(
    run: Run,
    cls: Any,
    config: Any,
    data: Any,
    *,
    adapted: bool,
    more: dict[str, Any] | None = None,
    epochs: int = 1,
) -> None:
    """By a Trainer of TRL's with our callback."""
    import datasets

    from pygraph_train import PyGraphTrainerCallback

    forget_accelerators()
    model, more = llama(), dict(more or {})
    if adapted:
        peft = pytest.importorskip("peft")
        more["peft_config"] = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    callbacks = [PyGraphTrainerCallback(run.config)] if run.ours else []
    arguments = config(
        str(run.folder),
        per_device_train_batch_size=4,
        num_train_epochs=epochs,
        logging_steps=1,
        learning_rate=1e-3,
        report_to=[],
        use_cpu=DEVICE == "cpu",
        disable_tqdm=True,
        save_strategy="no",
        optim="adamw_torch_fused",
        bf16=False,
        gradient_checkpointing=False,
        max_length=32,
    )
    made = cls(
        model=model,
        args=arguments,
        train_dataset=datasets.Dataset.from_list(data),
        processing_class=tokenizer(run.folder),
        callbacks=callbacks,
        **more,
    )
    if run.ours:
        run.reports(callbacks[0].report)
    train(run, made)


@NEEDS_THE_CPU
@same_as_plain(replays=8)
def test_sentence_transformers(run: Run) -> None:
    """Its Trainer, with a contrastive loss: two forwards of one model."""
    package = pytest.importorskip("sentence_transformers")
    import datasets
    import transformers
    from sentence_transformers import losses
    from sentence_transformers import models as modules

    from pygraph_train import PyGraphTrainerCallback

    forget_accelerators()
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=64,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    words = tokenizer(run.folder)
    transformers.BertModel(config).save_pretrained(run.folder)
    words.save_pretrained(run.folder)
    parts = [modules.Transformer(str(run.folder)), modules.Pooling(16)]
    model = package.SentenceTransformer(modules=parts, device=DEVICE)
    callbacks = [PyGraphTrainerCallback(run.config)] if run.ours else []
    arguments = package.SentenceTransformerTrainingArguments(
        str(run.folder / "out"),
        per_device_train_batch_size=8,
        num_train_epochs=2,
        logging_steps=1,
        report_to=[],
        use_cpu=DEVICE == "cpu",
        disable_tqdm=True,
        save_strategy="no",
        optim="adamw_torch_fused",
    )
    made = package.SentenceTransformerTrainer(
        model=model,
        args=arguments,
        train_dataset=datasets.Dataset.from_dict({"anchor": texts(128, 1), "positive": texts(128, 2)}),
        loss=losses.MultipleNegativesRankingLoss(model),
        callbacks=callbacks,
    )
    if run.ours:
        run.reports(callbacks[0].report)
    train(run, made)


@pytest.mark.parametrize("alike", [False, True])
@same_as_plain(replays=8, last_bits=DEVICE == "cuda")  # there messages are added up in any order
def test_batches_of_graphs(run: Run, *, alike: bool) -> None:
    """PyTorch Geometric in Lightning: `Data` objects of so many nodes, alike in each graph or not."""
    geometric = pytest.importorskip("torch_geometric")
    pl = pytest.importorskip("lightning.pytorch")
    from torch_geometric.loader import DataLoader
    from torch_geometric.nn import GCNConv, global_mean_pool

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.head = GCNConv(6, 8), GCNConv(8, 8), nn.Linear(8, 3)

        def forward(self, data: Any) -> Tensor:
            h = torch.relu(self.first(data.x, data.edge_index))
            h = torch.relu(self.second(h, data.edge_index))
            return self.head(global_mean_pool(h, data.batch, data.num_graphs))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = nn.functional.cross_entropy(self(batch), batch.y)
            self.log("loss", loss, batch_size=batch.num_graphs)
            return loss

        def configure_optimizers(self) -> Any:
            return adamw(self)

    generator = torch.Generator("cpu").manual_seed(1)

    def graph(number: int) -> Any:
        nodes = 5 if alike else 4 + number % 2
        edges = torch.randint(0, nodes, (2, 8), generator=generator, device="cpu")
        x = torch.randn(nodes, 6, generator=generator, device="cpu")
        return geometric.data.Data(x=x, edge_index=edges, y=torch.tensor([number % 3], device="cpu"))

    torch.manual_seed(0)
    fit(run, Module(), DataLoader([graph(n) for n in range(96)], batch_size=4))


@pytest.mark.parametrize("idiom", ["logged object", "updated and computed", "called"])
@same_as_plain(replays=8)
def test_torchmetrics(run: Run, *, idiom: str) -> None:
    metrics = pytest.importorskip("torchmetrics")
    pytest.importorskip("lightning.pytorch")
    from .frameworks import loader
    from .lightning_module import Module
    from .models import batches, cross_entropy

    class Measured(Module):
        def __init__(self) -> None:
            super().__init__()
            self.accuracy = metrics.classification.MulticlassAccuracy(num_classes=3)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            out = self.net(batch[0])
            if idiom == "logged object":
                self.accuracy(out, batch[1])
                self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
            elif idiom == "called":
                self.log("accuracy", self.accuracy(out, batch[1]), on_epoch=True)
            else:
                self.accuracy.update(out, batch[1])
            return cross_entropy(out, batch[1])

        def on_train_epoch_end(self) -> None:
            if idiom == "updated and computed":
                self.log("accuracy", self.accuracy.compute())
                self.accuracy.reset()

    fit(run, Measured(), loader(batches(24)), max_epochs=2)
