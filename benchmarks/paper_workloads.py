"""Workloads of the kinds that the GraCE paper (arXiv 2503.19779) measures, small enough to compile quickly.

Random weights and random data, as in workloads.py, which has the first six.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.workloads import (
    WORKLOADS,
    Batch,
    Scale,
    Workload,
    classification_loss,
    input_batches,
    language_loss,
    make_batches,
    token_batches,
)

__all__ = ["ALL_WORKLOADS", "PAPER_WORKLOADS", "build"]


class Attention(nn.Module):
    """Multi-head attention that divides its scores by a NumPy scalar, as kaituoxu/Speech-Transformer does.

    Dynamo makes that scalar a tensor on the CPU, an input of the compiled graph that blocks naive capture.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.temperature = np.power(width // heads, 0.5)

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor | None = None) -> Tensor:
        """`x`: (batch, queries, width), `memory`: (batch, keys, width), `mask`: (queries, keys), True is hidden."""
        queries = self._split(self.query(x))
        keys, values = self._split(self.key(memory)), self._split(self.value(memory))
        scores = torch.bmm(queries, keys.transpose(1, 2)) / self.temperature
        if mask is not None:
            scores = scores.masked_fill(mask, float("-inf"))
        heads = torch.bmm(scores.softmax(-1), values)
        batch, length, width = x.shape
        merged = heads.view(batch, self.heads, length, -1).transpose(1, 2).reshape(batch, length, width)
        return self.norm(x + self.out(merged))

    def _split(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = x.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
        return parts.reshape(batch * self.heads, length, width // self.heads)


class SpeechLayer(nn.Module):
    """Self-attention, in a decoder also attention to the encoder's output, and a feed-forward part."""

    def __init__(self, width: int, heads: int, *, decoder: bool) -> None:
        super().__init__()
        self.self_attention = Attention(width, heads)
        self.cross_attention = Attention(width, heads) if decoder else None
        self.feed_forward = nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width))
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor, memory: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        x = self.self_attention(x, x, mask)
        if self.cross_attention is not None and memory is not None:
            x = self.cross_attention(x, memory)
        return self.norm(x + self.feed_forward(x))


class SpeechTransformer(nn.Module):
    """Frames of a spectrogram in, logits of characters out."""

    def __init__(self, features: int, width: int, heads: int, layers: int, characters: int) -> None:
        super().__init__()
        self.frames_in = nn.Sequential(nn.Linear(features, width), nn.LayerNorm(width))
        self.characters_in = nn.Embedding(characters, width)
        self.encoder = nn.ModuleList(SpeechLayer(width, heads, decoder=False) for _ in range(layers))
        self.decoder = nn.ModuleList(SpeechLayer(width, heads, decoder=True) for _ in range(layers))
        self.out = nn.Linear(width, characters)

    def forward(self, frames: Tensor, characters: Tensor) -> Tensor:
        """`frames`: (batch, time, features), `characters`: (batch, length) -> (batch, length, characters)."""
        memory = self.frames_in(frames)
        for layer in self.encoder:
            memory = layer(memory)
        length = characters.shape[1]
        later = torch.ones(length, length, dtype=torch.bool, device=characters.device).triu(1)
        x = self.characters_in(characters)
        for layer in self.decoder:
            x = layer(x, memory, later)
        return self.out(x)


def speech(scale: Scale = "full") -> Workload:
    """Speech transformer, 4 + 4 layers of width 512, 16 x (256 frames, 64 characters); a NumPy-scalar temperature."""
    if scale == "full":
        batch, time, length, features, width, heads, layers, characters = 16, 256, 64, 320, 512, 8, 4, 4233
    else:
        batch, time, length, features, width, heads, layers, characters = 2, 8, 4, 8, 16, 2, 1, 32

    def make() -> Batch:
        frames = torch.randn(batch, time, features)
        return {
            "frames": frames,
            **{k: torch.randint(0, characters, (batch, length)) for k in ("characters", "labels")},
        }

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        logits = module(batch["frames"], batch["characters"])
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())

    return Workload(SpeechTransformer(features, width, heads, layers, characters), make_batches(make), loss)


def _stack(widths: Sequence[int], activation: type[nn.Module]) -> list[nn.Module]:
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(widths):
        layers += [nn.Linear(before, after), activation()]
    return layers


class Dlrm(nn.Module):
    """Embeddings and dense features, their pairwise products, a small network on top."""

    DENSE = 13

    def __init__(self, tables: int, rows: int, width: int, hidden: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, width, mode="sum") for _ in range(tables))
        self.bottom = nn.Sequential(*_stack((self.DENSE, 2 * hidden, hidden, width), nn.ReLU))
        pairs = (tables + 1) * tables // 2
        self.top = nn.Sequential(*_stack((width + pairs, 2 * hidden, hidden), nn.ReLU), nn.Linear(hidden, 1))

    def forward(self, dense: Tensor, sparse: Tensor) -> Tensor:
        """`dense`: (batch, 13), `sparse`: (batch, tables), row numbers -> logits (batch,)."""
        x = self.bottom(dense)
        rows = [table(sparse[:, i : i + 1]) for i, table in enumerate(self.tables)]
        features = torch.stack([x, *rows], dim=1)
        products = torch.bmm(features, features.transpose(1, 2))
        # on the CPU, as the reference implementation does: using it on the GPU is a copy that blocks capture
        first, second = torch.tril_indices(features.shape[1], features.shape[1], -1)
        return self.top(torch.cat([x, products[:, first, second]], dim=1)).squeeze(1)


def dlrm(scale: Scale = "full") -> Workload:
    """DLRM, 26 tables of 100,000 x 64, batch 2048; an index tensor made on the CPU in forward."""
    tables, rows, width, hidden, batch = (26, 100_000, 64, 256, 2048) if scale == "full" else (3, 10, 4, 8, 4)

    def make() -> Batch:
        return {
            "dense": torch.randn(batch, Dlrm.DENSE),
            "sparse": torch.randint(0, rows, (batch, tables)),
            "clicked": torch.rand(batch).round(),
        }

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        return F.binary_cross_entropy_with_logits(module(batch["dense"], batch["sparse"]), batch["clicked"])

    return Workload(Dlrm(tables, rows, width, hidden), make_batches(make), loss)


def t5(scale: Scale = "full") -> Workload:
    """T5 of width 512 with 4 + 4 layers, 8 x 128 tokens."""
    from transformers import T5Config, T5ForConditionalGeneration

    if scale == "full":
        config = T5Config(d_model=512, d_ff=2048, num_layers=4, num_heads=8)
        batches = token_batches(8, 128, 1000)
    else:
        config = T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2)
        batches = token_batches(2, 8, 64)
    config.decoder_start_token_id = 0  # which the published checkpoints set
    return Workload(T5ForConditionalGeneration(config).train(), batches, language_loss)


def mobilebert(scale: Scale = "full") -> Workload:
    """MobileBERT masked language model with 6 of its 24 layers, 8 x 128 tokens: many small kernels."""
    from transformers import MobileBertConfig, MobileBertForMaskedLM

    if scale == "full":
        config = MobileBertConfig(num_hidden_layers=6)
        return Workload(MobileBertForMaskedLM(config).train(), token_batches(8, 128, 1000), language_loss)
    config = MobileBertConfig(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=16,
        embedding_size=16,
        intra_bottleneck_size=16,
    )
    return Workload(MobileBertForMaskedLM(config).train(), token_batches(2, 8, 64), language_loss)


def _conv(before: int, after: int, size: int) -> list[nn.Module]:
    convolution = nn.Conv2d(before, after, size, padding=size // 2, bias=False)
    return [nn.BatchNorm2d(before), nn.ReLU(inplace=True), convolution]


class DenseLayer(nn.Module):
    """Its output is its input with `growth` channels more."""

    def __init__(self, channels: int, growth: int) -> None:
        super().__init__()
        self.body = nn.Sequential(*_conv(channels, 4 * growth, 1), *_conv(4 * growth, growth, 3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.body(x)], dim=1)


def _densenet(growth: int, blocks: Sequence[int], classes: int) -> nn.Module:
    """DenseNet-BC (Huang et al., arXiv 1608.06993) with `blocks` layers in its dense blocks."""
    channels = 2 * growth
    layers: list[nn.Module] = [
        nn.Conv2d(3, channels, 7, stride=2, padding=3, bias=False),
        nn.BatchNorm2d(channels),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, stride=2, padding=1),
    ]
    for i, depth in enumerate(blocks):
        if i:
            layers += [*_conv(channels, channels // 2, 1), nn.AvgPool2d(2)]
            channels //= 2
        for _ in range(depth):
            layers.append(DenseLayer(channels, growth))
            channels += growth
    head = [nn.BatchNorm2d(channels), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, *head, nn.Linear(channels, classes))


def densenet(scale: Scale = "full") -> Workload:
    """DenseNet-BC with 16 dense layers at 224 x 224, batch 32: concatenations and small convolutions."""
    growth, blocks, batch, size = (32, (3, 4, 6, 3), 32, 224) if scale == "full" else (4, (1, 1), 2, 32)
    return Workload(
        _densenet(growth, blocks, 1000), input_batches((batch, 3, size, size), 1000), classification_loss
    )


def autoencoder(scale: Scale = "full") -> Workload:
    """Autoencoder of a recommender (Kuchaiev, Ginsburg, arXiv 1708.01715): 65,536 items, batch 256.

    A 67 MB input that is somewhere else each step.
    """
    items, hidden, code, batch = (65_536, 512, 1024, 256) if scale == "full" else (64, 16, 32, 4)
    encoder = _stack((items, hidden, hidden, code), nn.SELU)
    decoder = _stack((code, hidden, hidden, items), nn.SELU)
    module = nn.Sequential(*encoder, nn.Dropout(0.8), *decoder)

    def make() -> Batch:
        rated = torch.rand(batch, items) < 0.1
        return {"ratings": torch.randint(1, 6, (batch, items)) * rated.float()}

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        ratings = batch["ratings"]
        rated = ratings != 0
        return ((module(ratings) - ratings) * rated).square().sum() / rated.sum()

    return Workload(module, make_batches(make), loss)


# EOS-80 (Fofonoff, Millard, UNESCO technical papers in marine science 44, 1983): coefficients of T^0, T^1, ...
WATER = (999.842594, 6.793952e-2, -9.095290e-3, 1.001685e-4, -1.120083e-6, 6.536332e-9)
DENSITY_S = (8.24493e-1, -4.0899e-3, 7.6438e-5, -8.2467e-7, 5.3875e-9)
DENSITY_S15 = (-5.72466e-3, 1.0227e-4, -1.6546e-6)
DENSITY_S2 = (4.8314e-4,)
BULK = (19652.21, 148.4206, -2.327105, 1.360477e-2, -5.155288e-5)
BULK_S = (54.6746, -0.603459, 1.09987e-2, -6.1670e-5)
BULK_S15 = (7.944e-2, 1.6483e-2, -5.3009e-4)
BULK_P = (3.239908, 1.43713e-3, 1.16092e-4, -5.77905e-7)
BULK_PS = (2.2838e-3, -1.0981e-5, -1.6078e-6)
BULK_PS15 = (1.91075e-4,)
BULK_P2 = (8.50935e-5, -6.12293e-6, 5.2787e-8)
BULK_P2S = (-9.9348e-7, 2.0816e-8, 9.1697e-10)


def _polynomial(coefficients: Sequence[float], x: Tensor) -> Tensor:
    value = torch.full_like(x, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        value = value * x + coefficient
    return value


def density(salinity: Tensor, temperature: Tensor, pressure: Tensor) -> Tensor:
    """Density of sea water in kg/m³ from practical salinity, °C and bar (EOS-80), element by element."""

    def at(coefficients: Sequence[float]) -> Tensor:
        return _polynomial(coefficients, temperature)

    s, s15, p = salinity, salinity * salinity.sqrt(), pressure
    surface = at(WATER) + at(DENSITY_S) * s + at(DENSITY_S15) * s15 + at(DENSITY_S2) * s * s
    bulk = at(BULK) + at(BULK_S) * s + at(BULK_S15) * s15
    bulk = bulk + (at(BULK_P) + at(BULK_PS) * s + at(BULK_PS15) * s15) * p
    bulk = bulk + (at(BULK_P2) + at(BULK_P2S) * s) * p * p
    return surface / (1 - p / bulk)


class Ocean(nn.Module):
    """A few steps of an ocean column without parameters: density, hydrostatic pressure, mixing by differences."""

    GRAVITY_BAR = 9.81e-5  # m/s² and bar/Pa

    def __init__(self, steps: int, layer_m: float) -> None:
        super().__init__()
        self.steps, self.layer_m = steps, layer_m

    def forward(self, salinity: Tensor, temperature: Tensor, pressure: Tensor) -> Tensor:
        """Three (x, y, depth) fields in float64 -> density in float32."""
        s, t, p = (x.to(torch.float32) for x in (salinity, temperature, pressure))
        for _ in range(self.steps):
            column = density(s, t, p).cumsum(-1) * (self.GRAVITY_BAR * self.layer_m)
            p = 0.5 * (p + column)
            s, t = (_mixed(_mixed(x, 0), 1) for x in (s, t))
        return density(s, t, p)


def _mixed(field: Tensor, axis: int) -> Tensor:
    """One step of diffusion on a periodic axis."""
    return field + 0.1 * (field.roll(1, axis) - 2 * field + field.roll(-1, axis))


def eos(scale: Scale = "full") -> Workload:
    """Equation of state of sea water on 128 x 128 x 64 cells, 8 steps: short kernels, gradients of the inputs only."""
    shape, steps = ((128, 128, 64), 8) if scale == "full" else ((4, 4, 3), 2)

    def make() -> Batch:
        depth = torch.linspace(0, 400, shape[-1], dtype=torch.float64).expand(shape)
        uniform = (torch.rand(shape, dtype=torch.float64) for _ in range(2))
        return {
            "salinity": 30 + 10 * next(uniform),
            "temperature": 25 * next(uniform),
            "pressure": depth.contiguous(),
        }

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        return (module(**batch) / 1000 - 1).square().mean()

    return Workload(Ocean(steps, 4000 / shape[-1]), make_batches(make), loss)


PAPER_WORKLOADS: dict[str, Callable[[Scale], Workload]] = {
    f.__name__: f for f in (speech, dlrm, t5, mobilebert, densenet, autoencoder, eos)
}
ALL_WORKLOADS = {**WORKLOADS, **PAPER_WORKLOADS}


def build(name: str, scale: Scale = "full", seed: int = 0) -> Workload:
    """The workload `name` of either file with weights and data drawn from `seed`.

    Raises:
        WorkloadUnavailable: it needs a package that is not installed.
    """
    torch.manual_seed(seed)
    return ALL_WORKLOADS[name](scale)
