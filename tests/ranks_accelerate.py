"""What each rank of `tests/ranks.py` trains with Accelerate: the same loop with and without the library."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.ranks_training import SIZES, STEPS, Net, batches, device_of, state_of

__all__ = ["same"]


def same(rank: int, *, stock: bool = False, **options: Any) -> dict[str, Any]:
    """Train a plain loop with the stock Accelerator, and with ours; compare every loss and the final state."""
    plain_losses, plain, _ = _train(rank, graphed=False, stock=stock, **options)
    losses, state, report = _train(rank, graphed=True, stock=stock, **options)
    return {
        "losses": all(map(torch.equal, plain_losses, losses)) and len(plain_losses) == len(losses),
        "state": all(map(torch.equal, plain, state)),
        "replayed": report.optimizer_steps_replayed if stock else report.whole_steps["step"].steps_replayed,
        "report": str(report),
        "fallbacks": [f"{f.reason} {f.fix}" for f in report.fallbacks],
    }


def _train(
    rank: int,
    *,
    graphed: bool,
    accumulate: int = 1,
    clip: float | None = None,
    precision: str = "no",
    steps: int = STEPS,
    sizes: str = "same",
    stock: bool = False,
    config: dict[str, Any] | None = None,
) -> tuple[list[Tensor], list[Tensor], Any]:
    from accelerate import Accelerator as Stock
    from accelerate.state import AcceleratorState, GradientState

    from pygraph_train import Accelerator, PyGraph

    AcceleratorState._reset_state()
    GradientState._reset_state()
    torch.manual_seed(0)
    options: dict[str, Any] = {
        "cpu": device_of(rank).type == "cpu",
        "mixed_precision": precision,
        "gradient_accumulation_steps": accumulate,
    }
    plugin = PyGraph(engine="auto" if device_of(rank).type == "cuda" else "emulated", **(config or {}))
    accelerator = Accelerator(plugins=[plugin], **options) if graphed else Stock(**options)
    net = Net()
    model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=0.01, fused=True))
    torch.manual_seed(rank)

    def step(x: Tensor, y: Tensor) -> Tensor:
        with accelerator.accumulate(model):
            loss = F.cross_entropy(model(x).float(), y)
            accelerator.backward(loss)
            if clip is not None and accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
        return loss

    run = accelerator.graphed_step(step) if graphed and not stock else step
    losses = [run(x, y).detach().clone() for x, y in batches(rank, steps, SIZES[sizes])]
    state = state_of(model)
    report = plugin.report() if graphed else None
    if graphed:
        plugin.release()
    accelerator.free_memory()
    return losses, state, report
