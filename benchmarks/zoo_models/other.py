"""Contrastive and metric learning, recommendation, mixtures of experts, and what has no other place."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.zoo_models.entry import Entry, Parts, Size, entry, ids
from benchmarks.zoo_models.physics import layers

Batch = dict[str, Tensor]

ENTRIES: list[Entry] = []


def _views(size: Size) -> Batch:
    return {name: torch.randn(8 * size.batch, 128) for name in ("a", "b")}


@entry(ENTRIES, "contrastive and metric", "SimCLR", compiled=True)
def _simclr(size: Size) -> Parts:
    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        found = F.normalize(model(torch.cat([batch["a"], batch["b"]])), dim=-1)
        count = len(found)
        scores = (found @ found.T / 0.1).masked_fill(
            torch.eye(count, dtype=torch.bool, device=found.device), -1e9
        )
        labels = torch.arange(count, device=found.device).roll(count // 2)
        return F.cross_entropy(scores, labels)

    return Parts(layers(128, size, 64).train(), lambda: _views(size), loss_of)


@entry(ENTRIES, "contrastive and metric", "MoCo with a queue")
def _moco(size: Size) -> Parts:
    model = nn.ModuleDict({name: layers(128, size, 64) for name in ("query", "key")}).train()
    model.key.requires_grad_(False)
    model.register_buffer("queue", F.normalize(torch.randn(512, 64), dim=-1))

    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        query = F.normalize(model.query(batch["a"]), dim=-1)
        with torch.no_grad():
            key = F.normalize(model.key(batch["b"]), dim=-1)
        scores = torch.cat([(query * key).sum(-1, keepdim=True), query @ model.queue.clone().T], 1)
        with torch.no_grad():
            model.queue.copy_(torch.cat([key, model.queue[: -len(key)]]))
        return F.cross_entropy(
            scores / 0.07, torch.zeros(len(scores), dtype=torch.long, device=scores.device)
        )

    return Parts(model, lambda: _views(size), loss_of)


def _classes(size: Size) -> Batch:
    return {"x": torch.randn(8 * size.batch, 128), "y": torch.arange(8 * size.batch) % 4}


@entry(ENTRIES, "contrastive and metric", "hardest triplets of a batch", compiled=True)
def _triplets(size: Size) -> Parts:
    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        found = F.normalize(model(batch["x"]), dim=-1)
        distances = torch.cdist(found, found)
        same = batch["y"][:, None] == batch["y"]
        positive = distances.masked_fill(~same, -1.0).max(1).values
        negative = distances.masked_fill(same, 10.0).min(1).values
        return F.relu(positive - negative + 0.2).mean()

    return Parts(layers(128, size, 64).train(), lambda: _classes(size), loss_of)


@entry(ENTRIES, "contrastive and metric", "triplets picked with nonzero")
def _picked(size: Size) -> Parts:
    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        found = F.normalize(model(batch["x"]), dim=-1)
        same = batch["y"][:, None] == batch["y"]
        a, p = torch.nonzero(same.triu(1), as_tuple=True)
        distances = torch.cdist(found, found)
        return F.relu(distances[a, p] - distances.mean() + 0.2).mean()

    return Parts(layers(128, size, 64).train(), lambda: _classes(size), loss_of)


def _experts(size: Size) -> nn.ModuleDict:
    gate = nn.Linear(size.width, 4)
    experts = nn.ModuleList(layers(size.width, size, size.width) for _ in range(4))
    return nn.ModuleDict({"gate": gate, "experts": experts, "head": nn.Linear(size.width, 1)}).train()


def _rows(size: Size) -> Batch:
    return {"x": torch.randn(16 * size.batch, size.width), "y": torch.randn(16 * size.batch)}


@entry(ENTRIES, "experts and recommendation", "mixture of experts, torch.where routing", compiled=True)
def _routed(size: Size) -> Parts:
    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        x = batch["x"]
        weights, chosen = model.gate(x).softmax(-1).topk(2, -1)
        found = torch.zeros_like(x)
        for number, expert in enumerate(model.experts):
            row, place = torch.where(chosen == number)
            found = found.index_add(0, row, expert(x[row]) * weights[row, place, None])
        return F.mse_loss(model.head(found).squeeze(-1), batch["y"])

    return Parts(_experts(size), lambda: _rows(size), loss_of)


@entry(ENTRIES, "experts and recommendation", "mixture of experts, dense", compiled=True)
def _dense(size: Size) -> Parts:
    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        weights = model.gate(batch["x"]).softmax(-1)
        found = torch.stack([expert(batch["x"]) for expert in model.experts], 1)
        return F.mse_loss(model.head((weights[..., None] * found).sum(1)).squeeze(-1), batch["y"])

    return Parts(_experts(size), lambda: _rows(size), loss_of)


@entry(ENTRIES, "experts and recommendation", "DLRM", compiled=True)
def _dlrm(size: Size) -> Parts:
    class Recommender(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tables = nn.ModuleList(nn.EmbeddingBag(1000, 32, mode="sum") for _ in range(6))
            self.bottom, self.top = layers(13, size, 32), layers(32 + 21, size, 1)

        def forward(self, dense: Tensor, sparse: Tensor) -> Tensor:
            found = self.bottom(dense)
            rows = torch.stack([found, *(t(s) for t, s in zip(self.tables, sparse, strict=True))], 1)
            pairs = rows @ rows.transpose(1, 2)
            i, j = torch.tril_indices(7, 7, offset=-1)
            return self.top(torch.cat([found, pairs[:, i, j]], 1))

    def make_batch() -> Batch:
        count = 32 * size.batch
        sparse = torch.randint(0, 1000, (6, count, 3))
        return {"dense": torch.randn(count, 13), "sparse": sparse, "y": torch.randint(0, 2, (count,)).float()}

    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        found = model(batch["dense"], batch["sparse"]).squeeze(-1)
        return F.binary_cross_entropy_with_logits(found, batch["y"])

    return Parts(Recommender().train(), make_batch, loss_of)


@entry(ENTRIES, "other", "masked tokens picked by a boolean mask")
def _picked_tokens(size: Size) -> Parts:
    model = nn.Sequential(
        nn.Embedding(size.vocabulary, size.width),
        nn.TransformerEncoderLayer(size.width, size.heads, 2 * size.width, batch_first=True),
        nn.Linear(size.width, size.vocabulary),
    ).train()

    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch["x"])[batch["mask"]], batch["x"][batch["mask"]])

    def make_batch() -> Batch:
        return {"x": ids(size), "mask": torch.rand(size.batch, size.length) < 0.3}

    return Parts(model, make_batch, loss_of)


@entry(ENTRIES, "other", "checkpointed layers")
def _checkpointed(size: Size) -> Parts:
    from torch.utils.checkpoint import checkpoint

    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        found = batch["x"]
        for layer in model.children():
            found = checkpoint(layer, found, use_reentrant=False)
        return F.mse_loss(found, batch["y"])

    def block() -> nn.Module:
        return nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 64))

    model = nn.Sequential(*(block() for _ in range(size.depth))).train()
    return Parts(model, lambda: {name: torch.randn(8 * size.batch, 64) for name in ("x", "y")}, loss_of)


@entry(ENTRIES, "other", "NeRF")
def _radiance(size: Size) -> Parts:
    points = 32

    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        origin, direction = batch["origin"], batch["direction"]
        depth = torch.linspace(0.1, 2, points, device=origin.device) + torch.rand(
            len(origin), points, device=origin.device
        ) * (1.9 / points)
        places = origin[:, None] + depth[..., None] * direction[:, None]
        waves = places[..., None] * 2 ** torch.arange(4, device=origin.device)
        found = model(torch.cat([waves.sin(), waves.cos()], -1).flatten(2))
        stopped = 1 - torch.exp(-F.softplus(found[..., 3]) * (1.9 / points))
        passed = torch.cumprod(1 - stopped + 1e-6, -1)
        colour = ((stopped * passed)[..., None] * found[..., :3].sigmoid()).sum(1)
        return F.mse_loss(colour, batch["colour"])

    def make_batch() -> Batch:
        return {name: torch.rand(8 * size.batch, 3) for name in ("origin", "direction", "colour")}

    return Parts(layers(24, size, 4).train(), make_batch, loss_of)
