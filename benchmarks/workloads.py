"""The models and batches of the benchmarks: random weights, random data, nothing downloaded."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Literal, NamedTuple

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when transformers is imported

import torch
import torch.nn.functional as F
from torch import nn

Batch = dict[str, torch.Tensor]
Scale = Literal["full", "tiny"]
BATCHES = 4


class Workload(NamedTuple):
    """A module in train mode on the CPU, its batches on the CPU, and `loss(module, batch)` -> scalar."""

    module: nn.Module
    batches: list[Batch]
    loss: Callable[[nn.Module, Batch], torch.Tensor]


class WorkloadUnavailable(RuntimeError):
    """A workload needs a package that is not installed; the message is one line for the user."""


class Training(NamedTuple):
    """A workload that is trained on a device: its batches lie there, and `loss(batch)` runs under bf16 autocast."""

    module: nn.Module
    optimizer: torch.optim.Optimizer
    batches: list[Batch]
    loss: Callable[[Batch], torch.Tensor]


def make_batches(make: Callable[[], Batch]) -> list[Batch]:
    """`BATCHES` different batches, in pinned memory where there is a CUDA device to copy them to."""
    batches = [make() for _ in range(BATCHES)]
    if torch.cuda.is_available():
        batches = [{k: v.pin_memory() for k, v in batch.items()} for batch in batches]
    return batches


def token_batches(batch: int, length: int, vocabulary: int) -> list[Batch]:
    def make() -> Batch:
        return {name: torch.randint(0, vocabulary, (batch, length)) for name in ("input_ids", "labels")}

    return make_batches(make)


def input_batches(shape: tuple[int, ...], classes: int) -> list[Batch]:
    return make_batches(lambda: {"x": torch.randn(shape), "y": torch.randint(0, classes, shape[:1])})


def language_loss(module: nn.Module, batch: Batch) -> torch.Tensor:
    return module(**batch).loss


def classification_loss(module: nn.Module, batch: Batch) -> torch.Tensor:
    return F.cross_entropy(module(batch["x"]), batch["y"])


def mlp(scale: Scale = "full") -> Workload:
    """16 x (Linear, ReLU) of width 512 and a 10-class head, batch 64: all launch overhead."""
    depth, width, batch = (16, 512, 64) if scale == "full" else (2, 16, 4)
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(width, width), nn.ReLU()]
    return Workload(
        nn.Sequential(*layers, nn.Linear(width, 10)), input_batches((batch, width), 10), classification_loss
    )


def bert(scale: Scale = "full") -> Workload:
    """BERT-base masked language model, 8 x 128 tokens."""
    from transformers import BertConfig, BertForMaskedLM

    if scale == "full":
        return Workload(BertForMaskedLM(BertConfig()).train(), token_batches(8, 128, 1000), language_loss)
    config = BertConfig(
        vocab_size=64,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=16,
    )
    return Workload(BertForMaskedLM(config).train(), token_batches(2, 8, 64), language_loss)


def gpt2(scale: Scale = "full") -> Workload:
    """GPT-2 small language model, 4 x 256 tokens."""
    from transformers import GPT2Config, GPT2LMHeadModel

    if scale == "full":
        return Workload(GPT2LMHeadModel(GPT2Config()).train(), token_batches(4, 256, 1000), language_loss)
    # the default special tokens lie outside this vocabulary
    config = GPT2Config(
        vocab_size=64, n_positions=16, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    return Workload(GPT2LMHeadModel(config).train(), token_batches(2, 8, 64), language_loss)


def llama(scale: Scale = "full") -> Workload:
    """A language model as Llama is, of the size of GPT-2 small, 4 x 256 tokens."""
    from transformers import LlamaConfig, LlamaForCausalLM

    width, layers, heads, vocabulary = (768, 12, 12, 8192) if scale == "full" else (16, 2, 2, 64)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=width * 8 // 3,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    size = (4, 256, 1000) if scale == "full" else (2, 8, 64)
    return Workload(LlamaForCausalLM(config).train(), token_batches(*size), language_loss)


def xlnet(scale: Scale = "full") -> Workload:
    """XLNet-base language model, 8 x 128 tokens: forward makes a CPU tensor, which blocks naive capture."""
    from transformers import XLNetConfig, XLNetLMHeadModel

    if scale == "full":
        config = XLNetConfig(d_model=768, n_layer=12, n_head=12, d_inner=3072)
        return Workload(XLNetLMHeadModel(config).train(), token_batches(8, 128, 1000), language_loss)
    config = XLNetConfig(vocab_size=64, d_model=16, n_layer=2, n_head=2, d_inner=32)
    return Workload(XLNetLMHeadModel(config).train(), token_batches(2, 8, 64), language_loss)


def vit_small(scale: Scale = "full") -> Workload:
    """ViT-S/16 at 224 x 224, batch 16: a 9.6 MB input to copy each step."""
    if scale == "full":
        return _timm("vit_small_patch16_224", batch=16, resolution=224)
    return _timm(
        "vit_small_patch16_224", batch=2, resolution=32, img_size=32, embed_dim=32, depth=2, num_heads=2
    )


def mobilenetv3(scale: Scale = "full") -> Workload:
    """MobileNetV3-Large at 224 x 224, batch 32: many small convolutions and BatchNorm buffers."""
    batch, resolution = (32, 224) if scale == "full" else (2, 32)
    return _timm("mobilenetv3_large_100", batch=batch, resolution=resolution)


def _timm(name: str, *, batch: int, resolution: int, **options: int) -> Workload:
    try:
        import timm
    except ImportError as error:
        raise WorkloadUnavailable(f"{name} needs timm, which cannot be imported: pip install timm") from error
    module = timm.create_model(name, num_classes=1000, **options).train()
    return Workload(module, input_batches((batch, 3, resolution, resolution), 1000), classification_loss)


WORKLOADS: dict[str, Callable[[Scale], Workload]] = {
    f.__name__: f for f in (mlp, bert, gpt2, llama, xlnet, vit_small, mobilenetv3)
}


def build(name: str, scale: Scale = "full", seed: int = 0) -> Workload:
    """The workload `name` with weights and data drawn from `seed`.

    Raises:
        WorkloadUnavailable: it needs a package that is not installed.
    """
    torch.manual_seed(seed)
    return WORKLOADS[name](scale)


def build_training(name: str, scale: Scale, device: torch.device) -> Training:
    """A workload with fused AdamW. Copies of its batches are the data loader's cost, and are made before."""
    workload = build(name, scale)
    module = workload.module.to(device)
    batches = [{k: v.to(device) for k, v in batch.items()} for batch in workload.batches]

    def loss_of(batch: Batch) -> torch.Tensor:
        with torch.autocast(device.type, dtype=torch.bfloat16):
            return workload.loss(module, batch)

    return Training(module, torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True), batches, loss_of)
