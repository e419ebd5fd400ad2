"""Contrastive and metric learning, recommendation, mixtures of experts, and what has no other place."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.zoo_models.entry import Entry, Parts, Size, entry, ids
from benchmarks.zoo_models.physics import layers

__all__ = ["ENTRIES"]

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


@entry(ENTRIES, "contrastive and metric", "BYOL with a moving average in the step")
def _byol(size: Size) -> Parts:
    class Learner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.online, self.target = layers(128, size, 64), layers(128, size, 64)
            self.predictor = nn.Linear(64, 64)
            self.target.load_state_dict(self.online.state_dict())
            self.target.requires_grad_(False)

    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        with torch.no_grad():
            for slow, fast in zip(model.target.parameters(), model.online.parameters(), strict=True):
                slow.mul_(0.99).add_(fast, alpha=0.01)
            target = model.target(batch["b"])
        return 2 - 2 * F.cosine_similarity(model.predictor(model.online(batch["a"])), target).mean()

    return Parts(Learner().train(), lambda: _views(size), loss_of)


@entry(ENTRIES, "contrastive and metric", "MoCo with a queue")
def _moco(size: Size) -> Parts:
    class Learner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query, self.key = layers(128, size, 64), layers(128, size, 64)
            self.key.requires_grad_(False)
            self.register_buffer("queue", F.normalize(torch.randn(512, 64), dim=-1))

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

    return Parts(Learner().train(), lambda: _views(size), loss_of)


@entry(ENTRIES, "contrastive and metric", "Barlow twins")
def _barlow(size: Size) -> Parts:
    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        a, b = (F.batch_norm(model(batch[name]), None, None, training=True) for name in ("a", "b"))
        found = a.T @ b / len(a)
        diagonal = torch.diagonal(found)
        return (diagonal - 1).square().sum() + 0.01 * (found.square().sum() - diagonal.square().sum())

    return Parts(layers(128, size, 64).train(), lambda: _views(size), loss_of)


@entry(ENTRIES, "contrastive and metric", "hardest triplets of a batch", compiled=True)
def _triplets(size: Size) -> Parts:
    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        found = F.normalize(model(batch["x"]), dim=-1)
        distances = torch.cdist(found, found)
        same = batch["y"][:, None] == batch["y"]
        positive = distances.masked_fill(~same, -1.0).max(1).values
        negative = distances.masked_fill(same, 10.0).min(1).values
        return F.relu(positive - negative + 0.2).mean()

    def make_batch() -> Batch:
        return {"x": torch.randn(8 * size.batch, 128), "y": torch.arange(8 * size.batch) % 4}

    return Parts(layers(128, size, 64).train(), make_batch, loss_of)


@entry(ENTRIES, "contrastive and metric", "triplets picked with nonzero")
def _picked(size: Size) -> Parts:
    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        found = F.normalize(model(batch["x"]), dim=-1)
        same = batch["y"][:, None] == batch["y"]
        a, p = torch.nonzero(same.triu(1), as_tuple=True)
        distances = torch.cdist(found, found)
        return F.relu(distances[a, p] - distances.mean() + 0.2).mean()

    def make_batch() -> Batch:
        return {"x": torch.randn(8 * size.batch, 128), "y": torch.arange(8 * size.batch) % 4}

    return Parts(layers(128, size, 64).train(), make_batch, loss_of)


@entry(ENTRIES, "contrastive and metric", "ArcFace")
def _arcface(size: Size) -> Parts:
    class Faces(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.centres = layers(128, size, 64), nn.Parameter(torch.randn(100, 64))

    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        cosine = F.linear(F.normalize(model.body(batch["x"])), F.normalize(model.centres))
        wanted = F.one_hot(batch["y"], 100).bool()
        angle = cosine.clamp(-1 + 1e-6, 1 - 1e-6).acos()
        return F.cross_entropy(30 * torch.where(wanted, (angle + 0.5).cos(), cosine), batch["y"])

    def make_batch() -> Batch:
        return {"x": torch.randn(8 * size.batch, 128), "y": torch.randint(0, 100, (8 * size.batch,))}

    return Parts(Faces().train(), make_batch, loss_of)


class _Experts(nn.Module):
    def __init__(self, size: Size, count: int = 4) -> None:
        super().__init__()
        self.gate = nn.Linear(size.width, count)
        self.experts = nn.ModuleList(layers(size.width, size, size.width) for _ in range(count))
        self.head = nn.Linear(size.width, 1)


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

    return Parts(_Experts(size).train(), lambda: _rows(size), loss_of)


@entry(ENTRIES, "experts and recommendation", "mixture of experts, dense", compiled=True)
def _dense(size: Size) -> Parts:
    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        weights = model.gate(batch["x"]).softmax(-1)
        found = torch.stack([expert(batch["x"]) for expert in model.experts], 1)
        return F.mse_loss(model.head((weights[..., None] * found).sum(1)).squeeze(-1), batch["y"])

    return Parts(_Experts(size).train(), lambda: _rows(size), loss_of)


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
            result: Tensor = self.top(torch.cat([found, pairs[:, i, j]], 1))
            return result

    def make_batch() -> Batch:
        count = 32 * size.batch
        sparse = torch.randint(0, 1000, (6, count, 3))
        return {"dense": torch.randn(count, 13), "sparse": sparse, "y": torch.randint(0, 2, (count,)).float()}

    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        found = model(batch["dense"], batch["sparse"]).squeeze(-1)
        return F.binary_cross_entropy_with_logits(found, batch["y"])

    return Parts(Recommender().train(), make_batch, loss_of)


@entry(ENTRIES, "experts and recommendation", "DeepFM")
def _deepfm(size: Size) -> Parts:
    class Machine(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.linear = nn.Embedding(1000, 16), nn.Embedding(1000, 1)
            self.deep = layers(160, size, 1)

        def forward(self, x: Tensor) -> Tensor:
            found = self.table(x)
            pairs = 0.5 * (found.sum(1).square() - found.square().sum(1)).sum(-1, keepdim=True)
            result: Tensor = pairs + self.linear(x).sum(1) + self.deep(found.flatten(1))
            return result

    def make_batch() -> Batch:
        count = 32 * size.batch
        return {"x": torch.randint(0, 1000, (count, 10)), "y": torch.randint(0, 2, (count,)).float()}

    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        return F.binary_cross_entropy_with_logits(model(batch["x"]).squeeze(-1), batch["y"])

    return Parts(Machine().train(), make_batch, loss_of)


@entry(ENTRIES, "other", "GPT in plain PyTorch with rotary embeddings", compiled=True)
def _gpt(size: Size) -> Parts:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norms = nn.ModuleList(nn.RMSNorm(size.width) for _ in range(2))
            self.qkv, self.out = nn.Linear(size.width, 3 * size.width), nn.Linear(size.width, size.width)
            self.inner = nn.Sequential(
                nn.Linear(size.width, 4 * size.width), nn.GELU(), nn.Linear(4 * size.width, size.width)
            )

        def forward(self, x: Tensor, turn: Tensor) -> Tensor:
            shape = (*x.shape[:2], 3, size.heads, size.width // size.heads)
            q, k, v = self.qkv(self.norms[0](x)).view(shape).permute(2, 0, 3, 1, 4)
            q, k = (_turned(t, turn) for t in (q, k))
            found = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(found.transpose(1, 2).flatten(2))
            result: Tensor = x + self.inner(self.norms[1](x))
            return result

    class Language(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(size.vocabulary, size.width)
            self.layers = nn.ModuleList(Layer() for _ in range(size.depth))
            self.head = nn.Linear(size.width, size.vocabulary, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            half = size.width // size.heads // 2
            rates = 10000 ** (-torch.arange(half, device=x.device) / half)
            turn = torch.arange(x.shape[1], device=x.device)[:, None] * rates
            found = self.embedding(x)
            for layer in self.layers:
                found = layer(found, turn)
            result: Tensor = self.head(found)
            return result

    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch["x"][:, :-1]).flatten(0, 1), batch["x"][:, 1:].flatten())

    return Parts(Language().train(), lambda: {"x": ids(size)}, loss_of)


def _turned(x: Tensor, angle: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)


@entry(ENTRIES, "other", "deep set with a mask")
def _deep_set(size: Size) -> Parts:
    class Sets(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.each, self.all = layers(8, size, size.width), layers(size.width, size, 4)

    def make_batch() -> Batch:
        lengths = torch.randint(1, size.length, (size.batch,))
        return {
            "x": torch.randn(size.batch, size.length, 8),
            "mask": torch.arange(size.length) < lengths[:, None],
            "y": torch.randint(0, 4, (size.batch,)),
        }

    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        found = (model.each(batch["x"]) * batch["mask"][..., None]).sum(1)
        return F.cross_entropy(model.all(found), batch["y"])

    return Parts(Sets().train(), make_batch, loss_of)


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


@entry(ENTRIES, "other", "distillation from a frozen teacher")
def _distillation(size: Size) -> Parts:
    model = nn.ModuleDict({"student": layers(64, size, 10), "teacher": layers(64, size, 10)}).train()
    model["teacher"].requires_grad_(False).eval()

    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        student, teacher = model.children()
        found = student(batch["x"])
        with torch.no_grad():
            wanted = teacher(batch["x"])
        soft = F.kl_div((found / 2).log_softmax(-1), (wanted / 2).softmax(-1), reduction="batchmean")
        return F.cross_entropy(found, batch["y"]) + 4 * soft

    def make_batch() -> Batch:
        return {"x": torch.randn(8 * size.batch, 64), "y": torch.randint(0, 10, (8 * size.batch,))}

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
