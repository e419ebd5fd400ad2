"""Networks for graphs: torch_geometric's layers, and message passing in plain PyTorch."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.zoo_models.entry import Entry, Parts, Size, entry, package

Batch = dict[str, Tensor]

ENTRIES: list[Entry] = []

FEATURES, CLASSES = 16, 4


def _graph(size: Size) -> Batch:
    """One graph of `8 * length` nodes, each with five edges and a class."""
    nodes = 8 * size.length
    return {
        "x": torch.randn(nodes, FEATURES),
        "edge_index": torch.randint(0, nodes, (2, 5 * nodes)),
        "y": torch.randint(0, CLASSES, (nodes,)),
    }


class _Layers(nn.Module):
    """Layers with a ReLU between them; each one takes the nodes and the edges."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = F.relu(layer(x, edge_index))
        return self.layers[-1](x, edge_index)


def _node_loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["x"], batch["edge_index"]), batch["y"])


def _widths(size: Size) -> list[tuple[int, int]]:
    inner = [size.width] * size.depth
    return list(zip([FEATURES, *inner], [*inner, CLASSES], strict=True))


def _geometric(name: str, layer: str, *, compiled: bool = False, **options: Any) -> None:
    @entry(ENTRIES, "graphs", name, compiled=compiled)
    def build(size: Size) -> Parts:
        kind = getattr(package("torch_geometric.nn"), layer)
        layers = [kind(a, b, **options) for a, b in _widths(size)]
        return Parts(_Layers(layers).train(), lambda: _graph(size), _node_loss)


_geometric("GCN", "GCNConv", compiled=True)
_geometric("GCN without self loops", "GCNConv", add_self_loops=False, normalize=False)
_geometric("GAT", "GATConv")
_geometric("GATv2", "GATv2Conv")
_geometric("GraphSAGE", "SAGEConv", compiled=True)
_geometric("graph transformer", "TransformerConv")
_geometric("ChebNet", "ChebConv", K=2)
_geometric("GraphConv", "GraphConv")


@entry(ENTRIES, "graphs", "GIN")
def _isomorphism(size: Size) -> Parts:
    kind = package("torch_geometric.nn").GINConv
    layers = [kind(nn.Sequential(nn.Linear(a, b), nn.ReLU(), nn.Linear(b, b))) for a, b in _widths(size)]
    return Parts(_Layers(layers).train(), lambda: _graph(size), _node_loss)


@entry(ENTRIES, "graphs", "GIN, pooled graphs of a batch")
def _pooled(size: Size) -> Parts:
    geometric = package("torch_geometric.nn")
    graphs = size.batch

    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            widths = _widths(size)[:-1]
            self.layers = nn.ModuleList(
                geometric.GINConv(nn.Sequential(nn.Linear(a, b), nn.BatchNorm1d(b), nn.ReLU()))
                for a, b in widths
            )
            self.head = nn.Linear(size.width, CLASSES)

        def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x, edge_index)
            return self.head(geometric.global_add_pool(x, batch, size=graphs))

    def make_batch() -> Batch:
        batch = _graph(size)
        nodes = len(batch["x"])
        batch["batch"] = torch.arange(nodes) * graphs // nodes
        batch["y"] = torch.randint(0, CLASSES, (graphs,))
        return batch

    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch["x"], batch["edge_index"], batch["batch"]), batch["y"])

    return Parts(Pooled().train(), make_batch, loss_of)


@entry(ENTRIES, "graphs", "message passing in plain PyTorch", compiled=True)
def _messages(size: Size) -> Parts:
    class Layer(nn.Module):
        def __init__(self, before: int, after: int) -> None:
            super().__init__()
            self.own, self.others = nn.Linear(before, after), nn.Linear(2 * before, after)

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            source, target = edge_index
            messages = self.others(torch.cat([x[source], x[target]], 1))
            found = torch.zeros(len(x), messages.shape[1], device=x.device, dtype=messages.dtype)
            return self.own(x) + found.index_add(0, target, messages)

    layers: list[nn.Module] = [Layer(a, b) for a, b in _widths(size)]
    return Parts(_Layers(layers).train(), lambda: _graph(size), _node_loss)


@entry(ENTRIES, "graphs", "link prediction with negative edges")
def _links(size: Size) -> Parts:
    kind = package("torch_geometric.nn").SAGEConv
    sampled = package("torch_geometric.utils").negative_sampling
    model = _Layers([kind(a, b) for a, b in _widths(size)]).train()

    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        found, edges = model(batch["x"], batch["edge_index"]), batch["edge_index"]
        others = sampled(edges, num_nodes=len(found))
        both = torch.cat([edges, others], 1)
        scores = (found[both[0]] * found[both[1]]).sum(-1)
        labels = torch.zeros_like(scores)
        labels[: edges.shape[1]] = 1.0
        return F.binary_cross_entropy_with_logits(scores, labels)

    return Parts(model, lambda: _graph(size), loss_of)
