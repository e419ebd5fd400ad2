"""Engines of one device share a stream; memory goes back when its last graph is gone."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

from pygraph_train import GraphedStep, backend
from pygraph_train.graphs.cuda import CudaEngine
from pygraph_train.graphs.devices import give_back_unused
from pygraph_train.regions import inductor
from pygraph_train.torch_private.cuda import clear_cublas_workspaces

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

MIB = 1 << 20
WIDTH, ROWS = 1024, 4096


def reserved() -> int:
    gc.collect()
    torch.cuda.synchronize()
    clear_cublas_workspaces()  # of each stream, 32 MiB on Hopper
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


def wide() -> nn.Module:
    """Activations of 16 MiB for each layer."""
    return nn.Sequential(*[m for _ in range(4) for m in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]).cuda()


def test_engines_of_one_device_capture_on_one_stream() -> None:
    one, other = CudaEngine(torch.device("cuda")), CudaEngine(torch.device("cuda", 0))
    assert one._stream is other._stream and one._pool is not other._pool
    one.close()
    graph, out = other.capture(lambda: torch.ones(4, device="cuda") + 1)
    graph.replay()
    assert out.tolist() == [2.0] * 4
    graph.close()
    other.close()
    with pytest.raises(RuntimeError, match="closed"):
        other.capture(lambda: None)


def test_two_graphed_steps_keep_each_others_gradients() -> None:
    torch.manual_seed(0)
    models = [wide(), wide()]
    optimizers = [torch.optim.SGD(m.parameters(), lr=1e-3) for m in models]
    steps = [
        GraphedStep(lambda x, m=m: m(x).square().mean(), model=m, optimizer=o, fuse="on", compile=False)
        for m, o in zip(models, optimizers, strict=True)
    ]
    x = torch.randn(64, WIDTH, device="cuda")
    for _ in range(12):
        steps[0].accumulate(x)
        before = [p.grad.clone() for p in models[0].parameters() if p.grad is not None]
        steps[1](x)
        after = [p.grad for p in models[0].parameters() if p.grad is not None]
        assert before and all(map(torch.equal, before, after))
        steps[0](x)
    assert all(step.report().steps_replayed > 0 for step in steps), [str(s.report()) for s in steps]
    for step in steps:
        step.close()


def test_memory_of_a_training_that_is_over_is_given_back() -> None:
    def train() -> None:
        model = wide()
        step = GraphedStep(
            lambda x: model(x).square().mean(),
            model=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=1e-3),
            fuse="on",
            compile=False,
        )
        for _ in range(10):
            step(torch.randn(ROWS, WIDTH, device="cuda"))
        assert step.report().steps_replayed > 0, str(step.report())
        step.close()

    train()
    before = reserved()
    for _ in range(3):
        train()
    assert reserved() <= before + 4 * MIB


def test_memory_of_regions_that_are_gone_is_given_back() -> None:
    def train() -> None:
        torch.compiler.reset()
        backend.reset()
        model = wide()
        call = torch.compile(model, backend="pygraph", options={"warmup_runs": 1, "selection": False})
        for _ in range(6):
            call(torch.randn(ROWS, WIDTH, device="cuda")).square().mean().backward()
            model.zero_grad()
        assert sum(row.replays for row in backend.report().regions) > 0, backend.report()
        torch.compiler.reset()

    give_back_unused()
    before = reserved()
    train()
    gc.collect()
    give_back_unused()
    assert reserved() <= before + 16 * MIB
    assert all(not arena._occupants for arena in inductor._arenas.values())
