"""What each rank of `tests/ranks.py` trains with Accelerate: the same loop with and without the library."""

from __future__ import annotations

import io
import os
import runpy
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from accelerate import Accelerator as Stock
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from tests.ranks_sharded import Net as ShardedNet
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional as F

from pygraph_train import Accelerator, PyGraph
from tests.ranks_training import SIZES, STEPS, Net, batches, device_of, state_of
from tests.replays import text_of

__all__ = ["runs_example", "same"]


def same(rank: int, *, stock: bool = False, **options: Any) -> dict[str, Any]:
    """Train a plain loop with the stock Accelerator, and with ours; compare every loss and the final state."""
    plain_losses, plain, _ = _train(rank, graphed=False, stock=stock, **options)
    losses, state, report = _train(rank, graphed=True, stock=stock, **options)
    return {
        "losses": all(map(torch.equal, plain_losses, losses)) and len(plain_losses) == len(losses),
        "state": all(map(torch.equal, plain, state)),
        "replayed": report.optimizer_steps_replayed if stock else report.steps_replayed,
        "report": text_of(report),
        "fallbacks": [f"{f.reason} {f.fix}" for f in report.fallbacks],
    }


def runs_example(rank: int) -> str:
    """What `examples/accelerate_fsdp2.py` prints on a CPU."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    example = Path(__file__).parents[1] / "examples" / "accelerate_fsdp2.py"
    arguments = [str(example), "--engine", "emulated", "--small", "--steps", "40"]
    output = io.StringIO()
    with (
        sharded_on_cpus(),
        mock.patch.object(sys, "argv", arguments),
        mock.patch.object(sys, "path", [str(example.parent), *sys.path]),
        mock.patch.dict(os.environ, ACCELERATE_USE_CPU="true"),
        mock.patch.object(Accelerator, "end_training"),  # the processes go on
        redirect_stdout(output),
    ):
        runpy.run_path(str(example), run_name="__main__")
    return output.getvalue()


@contextmanager
def sharded_on_cpus() -> Iterator[None]:
    """Accelerate has FSDP2 on devices only."""
    stock = AcceleratorState.__init__

    def init(self: Any, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
        stock(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is None:
            return  # it exists already
        self.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP
        self.fsdp_plugin = fsdp_plugin
        if self._mixed_precision != "no":
            fsdp_plugin.set_mixed_precision(self._mixed_precision)

    with mock.patch.object(AcceleratorState, "__init__", init):
        yield


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
    shards: bool = False,
    attached: bool = False,
    folder: str = "",
    config: dict[str, Any] | None = None,
) -> tuple[list[Tensor], list[Tensor], Any]:
    AcceleratorState._reset_state()
    PartialState._reset_state()
    GradientState._reset_state()
    for name in [name for name in os.environ if name.startswith(("FSDP_", "ACCELERATE_USE_FSDP"))]:
        del os.environ[name]  # an accelerator with shards leaves them behind
    torch.manual_seed(0)
    options: dict[str, Any] = {
        "cpu": device_of(rank).type == "cpu",
        "mixed_precision": precision,
        "gradient_accumulation_steps": accumulate,
    }
    if shards:
        options["fsdp_plugin"] = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Block"]
        )
    plugin = PyGraph(engine="auto" if device_of(rank).type == "cuda" else "emulated", **(config or {}))
    with sharded_on_cpus() if shards and options["cpu"] else nullcontext():
        ours = graphed and not attached
        accelerator = Accelerator(plugins=[plugin], **options) if ours else Stock(**options)
    net = ShardedNet(nn.LayerNorm) if shards else Net()
    model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=0.01, fused=True))
    if graphed and attached:
        plugin.attach(accelerator)
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
    losses = []
    for i, (x, y) in enumerate(batches(rank, steps, SIZES[sizes])):
        if folder and i == 12:
            accelerator.save_state(f"{folder}/{graphed}")
        if folder and i in (20, 26):
            accelerator.load_state(f"{folder}/{graphed}")
        losses.append(run(x, y).detach().clone())
    assert isinstance(model, FSDPModule) == shards
    state = state_of(model)
    report = plugin.report() if graphed else None
    assert report is None or stock or f"of {steps} training steps" in str(report), report
    if graphed:
        plugin.release()
    accelerator.free_memory()
    return losses, state, report
