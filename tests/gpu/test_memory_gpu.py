"""How much memory recordings take."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor, nn

from pygraph_train import GraphedStep

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(autouse=True)
def as_in_a_new_process() -> None:
    """Copies for comparisons lie where memory was free before, so that the peak of earlier tests is part of it."""
    torch.compiler.reset()
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def test_results_of_many_shapes_share_memory() -> None:
    """A language model returns its logits in each step, and each length of a batch has a recording."""
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 1 << 16)).cuda()

    def step_fn(x: Tensor) -> dict[str, Tensor]:
        logits = model(x)
        return {"loss": logits.logsumexp(1).mean(), "logits": logits}

    optimizer = torch.optim.SGD(model.parameters(), 1e-3, fused=True)
    step = GraphedStep(step_fn, model=model, optimizer=optimizer, forward="on", warmup_steps=2)
    lengths, reserved = [64, *range(72, 136, 4)], []
    for length in lengths:
        for _ in range(4):
            step(torch.randn(length, 32, device="cuda"))
        reserved.append(torch.cuda.memory_reserved())
    assert step.report().to_dict()["phases_from_graphs"]["F"] >= 3 * len(lengths)
    all_logits = sum(lengths) * 4 << 16  # bytes
    assert reserved[-1] - reserved[1] < all_logits / 2


def test_rare_shapes_compute_in_the_memory_of_graphs() -> None:
    """A batch with fewer rows needs no memory beside that of the graphs for others, nor do its gradients."""
    model = nn.Sequential(*[nn.Sequential(nn.Linear(1024, 1024), nn.Tanh()) for _ in range(16)]).cuda()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3, fused=True)
    step = GraphedStep(
        lambda x: model(x).square().mean(), model=model, optimizer=optimizer, forward="on", max_signatures=1
    )
    reserved = []
    for rows in (8192, 8000, 7000, 6000):  # the first one has graphs
        for _ in range(5):
            step(torch.randn(rows, 1024, device="cuda"))
        reserved.append(torch.cuda.memory_reserved())
    phases = step.report().to_dict()["phases_from_graphs"]
    assert phases["F"] >= 2 and phases["O"] >= 12, step.report()
    activations = 16 * 6000 * 1024 * 4  # bytes
    assert reserved[-1] - reserved[0] < activations / 4, reserved


def test_gradients_lie_where_activations_lay() -> None:
    """As in plain training: what a step needs is no more than there."""
    peaks = []
    for graphs in (False, True):
        torch.compiler.reset()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_reserved()
        model = nn.Sequential(*[nn.Sequential(nn.Linear(2048, 2048), nn.Tanh()) for _ in range(16)]).cuda()
        optimizer = torch.optim.SGD(model.parameters(), 1e-3, fused=True)
        x, replayed = torch.randn(2048, 2048, device="cuda"), 0
        with GraphedStep(
            lambda x, model=model: model(x).square().mean(),
            model=model,
            optimizer=optimizer,
            forward="on" if graphs else "off",
        ) as step:
            for _ in range(8):
                step(x)
            replayed = step.report().to_dict()["phases_from_graphs"]["B"]
        peaks.append(torch.cuda.max_memory_reserved() - before)
        assert (replayed >= 4) is graphs
        del model, optimizer, x, step
    gradients = 16 * 2048 * 2048 * 4  # bytes
    assert peaks[1] - peaks[0] < gradients / 4, peaks


def test_inputs_of_many_shapes_share_memory() -> None:
    """Each length of a batch has a recording, which reads its batch from fixed memory."""
    model = nn.Linear(1 << 17, 8).cuda()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3, fused=True)
    step = GraphedStep(
        lambda x: model(x).square().mean(), model=model, optimizer=optimizer, forward="on", warmup_steps=2
    )
    lengths, reserved = [64, *range(72, 136, 4)], []
    for length in lengths:
        for _ in range(4):
            step(torch.randn(length, 1 << 17, device="cuda"))
        reserved.append(torch.cuda.memory_reserved())
    assert step.report().to_dict()["phases_from_graphs"]["F"] >= 3 * len(lengths), step.report()
    all_batches = sum(lengths) * 4 << 17  # bytes
    assert reserved[-1] - reserved[1] < all_batches / 2, reserved
