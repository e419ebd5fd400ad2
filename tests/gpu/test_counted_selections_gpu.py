"""On a GPU a selection waits for the device to count: with counts that are read ahead, graphs hold it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_counted_selections import FEW, SELECTIONS, Selecting
from torch import Tensor, nn

from pygraph_train import GraphedStep, PyGraphConfig, StepReport

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

STEPS, NODES, EDGES, FEATURES = 40, 200, 1500, 16


def remove_self_loops(edges: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """As torch_geometric does it."""
    mask = edges[0] != edges[1]
    return edges[:, mask], weights[mask]


class Convolutions(nn.Module):
    """Layers that sum messages along edges. Gathers and sums have one order, so that their bits can be compared."""

    def __init__(self) -> None:
        super().__init__()
        self.weigh = nn.Linear(2 * FEATURES, 1)
        self.layers = nn.ModuleList([nn.Linear(FEATURES, 32), nn.Linear(32, 4)])

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        weights = self.weigh(torch.cat([x[edges[0]], x[edges[1]]], 1)).sigmoid().flatten()
        for layer in self.layers:
            (sources, targets), strengths = remove_self_loops(edges, weights)
            messages = layer(x)[sources] * strengths[:, None]
            x = layer(x).index_put((targets,), messages, accumulate=True).relu()
        return x


def graphs(loops: Callable[[int], int]) -> Iterator[tuple[Tensor, ...]]:
    generator = torch.Generator().manual_seed(1)
    for number in range(STEPS):
        sources = torch.randint(0, NODES, (EDGES,), generator=generator)
        targets = (sources + torch.randint(1, NODES, (EDGES,), generator=generator)) % NODES
        at = torch.randperm(EDGES, generator=generator)[: loops(number)]
        targets[at] = sources[at]
        x = torch.randn(NODES, FEATURES, generator=generator)
        y = torch.randint(0, 4, (NODES,), generator=generator)
        yield x.cuda(), torch.stack([sources, targets]).cuda(), y.cuda()


def both(
    make: Callable[[], nn.Module],
    loss: Callable[..., Tensor],
    batches: list[tuple[Tensor, ...]],
    *,
    whole: int,
    close: float | None = None,
    **config: Any,
) -> StepReport:
    """Train plainly and graphed. Losses, gradients and parameters have the same bits, or are `close`.

    Args:
        whole: how many steps have to run from one graph at least.
    """
    kept: list[list[Tensor]] = []
    for graphed in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = make().cuda().train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=2.0**-9, fused=True, capturable=True)

        def step_fn(*batch: Tensor, net: nn.Module = model) -> Tensor:
            return loss(net, *batch)

        options = PyGraphConfig(**{"compile": False, **config})
        step = GraphedStep(step_fn, model=model, optimizer=optimizer, config=options) if graphed else None
        kept.append([])
        for batch in batches:
            if step is not None:
                found = step(*batch)
            else:
                optimizer.zero_grad()
                found = step_fn(*batch)
                found.backward()
                optimizer.step()
            kept[-1] += [found.detach().clone(), *(p.detach().clone() for p in model.parameters())]
            kept[-1] += [p.grad.clone() for p in model.parameters() if p.grad is not None]
            kept[-1] += [torch.get_rng_state(), torch.cuda.get_rng_state()]
        if step is not None:
            report = copy.copy(step.report())
            step.close()
    for index, (expected, got) in enumerate(zip(*kept, strict=True)):
        if close is None:
            assert torch.equal(expected, got), f"entry {index}: {expected} became {got}\n{report}"
        else:
            same = torch.allclose(expected.float(), got.float(), rtol=close, atol=close)
            assert same, f"entry {index}: {expected} became {got}\n{report}"
    assert report.steps_replayed >= whole, str(report)
    return report


def classify(net: nn.Module, x: Tensor, edges: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(net(x, edges), y)


@pytest.mark.parametrize("verify", ["sample", "always"])
def test_self_loops_that_lie_elsewhere_in_each_step(verify: str) -> None:
    report = both(Convolutions, classify, list(graphs(lambda number: 37)), whole=28, verify=verify)
    assert not report.fallbacks, report


def test_numbers_of_loops_that_alternate() -> None:
    both(Convolutions, classify, list(graphs(lambda number: 21 + 9 * (number % 2))), whole=20)


def test_a_graph_without_loops() -> None:
    both(Convolutions, classify, list(graphs(lambda number: 0)), whole=28)


def test_with_the_kernels_of_inductor() -> None:
    both(Convolutions, classify, list(graphs(lambda number: 37)), whole=20, close=2e-2, compile=True)


@pytest.mark.parametrize("name", ["GCNConv", "GATConv", "GATv2Conv"])
def test_convolutions_of_torch_geometric(name: str) -> None:
    """Their sums have no order of their own."""
    kind = getattr(pytest.importorskip("torch_geometric.nn"), name)

    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = kind(FEATURES, 32), kind(32, 4)

        def forward(self, x: Tensor, edges: Tensor) -> Tensor:
            return self.second(self.first(x, edges).relu(), edges)  # type: ignore[no-any-return]

    both(Layers, classify, list(graphs(lambda number: 37)), whole=25, close=2e-2)


def rows(count: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Five of eight rows are chosen, and half of the elements are positive."""
    generator = torch.Generator().manual_seed(2)
    for _ in range(count):
        signs = [(torch.randperm(8, generator=generator) < 4) * 2.0 - 1 for _ in range(6)]
        x = torch.rand(8, 6, generator=generator) * torch.stack(signs, 1)
        yield x.cuda(), (torch.randperm(8, generator=generator) < 5).cuda()


@pytest.mark.parametrize("kind", sorted(SELECTIONS.keys() - FEW))
def test_a_selection(kind: str) -> None:
    loss: Selecting = SELECTIONS[kind]
    both(
        lambda: nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)),
        lambda net, x, chosen: loss(net(x), x, chosen),
        list(rows(24)),
        whole=10,
    )


@pytest.mark.parametrize("dtype", [torch.bool, torch.long])
@pytest.mark.parametrize("shape", [(7,), (3000,), (40, 50), (3, 4, 5), (0,), (7_000_001,), (3000, 2001)])
def test_places_of_a_known_number_are_those_that_torch_finds(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    mask = (torch.rand(shape, generator=torch.Generator().manual_seed(3)) < 0.3).to("cuda", dtype)
    expected = mask.nonzero()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = torch.nonzero_static(mask, size=len(expected))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(found, expected)
    assert not len(expected) or found.stride() == expected.stride()
