"""What each rank of `tests/ranks.py` trains under `fully_shard`: the same loop with and without the library."""

from __future__ import annotations

import contextlib
import copy
import inspect
import os
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn import functional as F

from pygraph_train import GraphedStep, PyGraphConfig, PyGraphError
from pygraph_train.graphs.emulated import EmulatedEngine
from pygraph_train.parallel.shards import Shards
from pygraph_train.step.capture_maker import CaptureMaker
from pygraph_train.tracing.compiled_units import CompiledUnits
from pygraph_train.tracing.opened_trace import OpenedTrace
from tests import ranks_traps
from tests.ranks_training import SIZES, STEPS, batches, device_of
from tests.replays import text_of

__all__ = ["compiled_units", "fails_alone", "graphed_step", "local_state", "refused", "resumed"]

POLICIES = {
    "bf16": MixedPrecisionPolicy(param_dtype=torch.bfloat16),
    "bf16, reduced in fp32": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
}


class Block(nn.Module):
    """Sharded as one unit. Its sizes do not divide evenly by two."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(15)
        self.linear = nn.Linear(15, 15)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(torch.relu(self.linear(self.norm(x))))


class Net(nn.Module):
    """Two blocks between two layers of the root unit, with the running statistics of BatchNorm."""

    def __init__(self, norm: Callable[[int], nn.Module] = nn.BatchNorm1d) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.first = nn.Linear(8, 15)
        self.norm = norm(15)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.last = nn.Linear(15, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x))
        for block in self.blocks:
            x = block(x)
        return self.last(x)  # type: ignore[no-any-return]


def sharded(rank: int, *, reshard: bool | None = None, policy: str = "") -> nn.Module:
    """The model, with each block and the rest as units."""
    model = Net(nn.LayerNorm if policy else nn.BatchNorm1d).to(device_of(rank))
    mesh = init_device_mesh(device_of(rank).type, (torch.distributed.get_world_size(),))
    options: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": reshard}
    if policy:
        options["mp_policy"] = POLICIES[policy]
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def local_state(model: nn.Module) -> list[Tensor]:
    """Copies of what this rank holds."""
    return [getattr(t, "_local_tensor", t).detach().clone() for t in model.state_dict().values()]


def graphed_step(rank: int, **options: Any) -> dict[str, Any]:
    """Train with a plain loop and with `GraphedStep`, and compare every loss and the final state."""
    plain_losses, plain, _ = _train(rank, False, **options)
    losses, state, report = _train(rank, True, **options)
    assert len(losses) == len(plain_losses)
    return {
        "losses": all(map(torch.equal, plain_losses, losses)),
        "state": all(map(torch.equal, plain, state)),
        "replayed": report.steps_replayed,
        "report": text_of(report),
        "fallbacks": [f"{f.reason} {f.fix}" for f in report.fallbacks],
    }


def compiled_units(rank: int, *, fails: bool = False) -> dict[str, Any]:
    """Train with blocks that are compiled beneath the hooks, or cannot be on one rank, and compare with a plain loop.

    The compiler keeps eager kernels, so that the bits are the same.
    """
    compiled: list[str] = []

    def compiler(graph: torch.fx.GraphModule, inputs: list[Any], left: list[str]) -> Callable[..., Any]:
        compiled.append(str(graph.graph))
        if fails and rank == 1:
            raise RuntimeError("no compiler here")
        return graph.forward

    ends, left, found = [], [], []
    for whole in (True, False):
        model: Any = sharded(rank)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
        shards = Shards(model)
        trace = OpenedTrace(torch.device("cpu"), shards.opened)
        units = CompiledUnits(trace, shards.units(), compiler)
        torch.manual_seed(rank)

        def loss_of(x: Tensor, y: Tensor, model: nn.Module = model) -> Tensor:
            return F.cross_entropy(model(x), y)

        for i, batch in enumerate(batches(rank, STEPS, SIZES["same"])):
            optimizer.zero_grad()
            loss = loss_of(*batch) if whole or i == 0 else units(loss_of, batch, {})
            assert all("forward" not in vars(m) for m in model.modules())
            loss.backward()
            optimizer.step()
        assert trace.problem is None, trace.problem
        ends.append([loss.detach(), *local_state(model)])
        left, found = units.left, shards.units()
    return {
        "same": all(map(torch.equal, *ends)),
        "compiled": len(compiled),
        "units": len(found),
        "left": left,
    }


def _train(
    rank: int,
    graphed: bool,
    *,
    sizes: str = "same",
    accumulate: int = 1,
    local: bool = False,
    clip: float | None = None,
    autocast: bool = False,
    schedule: bool = False,
    reshard: bool | None = None,
    policy: str = "",
    evaluate: int = 0,
    freeze: int = 0,
    steps: int = STEPS,
    config: dict[str, Any] | None = None,
    trap: str = "",
) -> Any:
    """Train.

    Args:
        local: whether micro-batches that no update follows leave their gradients unreduced.
        evaluate, freeze: after so many steps each; 0 for never.
    """
    model: Any = sharded(rank, reshard=reshard, policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.7) if schedule else None
    torch.manual_seed(rank)
    device = device_of(rank)
    if trap == "models differ" and rank == 1:
        model.blocks[0].extra = nn.Parameter(torch.zeros(3))
    context = (lambda: torch.autocast(device.type, torch.bfloat16)) if autocast else contextlib.nullcontext
    losses: list[Tensor] = []

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        with context():
            return F.cross_entropy(model(x).float(), y)

    if trap in ranks_traps.LOSSES and rank == 1:
        loss_of = ranks_traps.LOSSES[trap](loss_of, model)
    options = {"engine": "auto" if device.type == "cuda" else "emulated", **(config or {})}
    step: Any = None
    with ranks_traps.trap(trap if graphed else "", rank, model) as before:
        if graphed:
            settings = PyGraphConfig(**options)
            step = GraphedStep(loss_of, model=model, optimizer=optimizer, max_grad_norm=clip, config=settings)
        for i, (x, y) in enumerate(batches(rank, steps, SIZES[sizes])):
            before(i)
            update = (i + 1) % accumulate == 0
            if local:
                model.set_requires_gradient_sync(update)
            if step is not None:
                losses.append(step(x, y) if update else step.accumulate(x, y))
            else:
                if i % accumulate == 0:
                    optimizer.zero_grad()
                loss = loss_of(x, y)
                loss.backward()
                losses.append(loss.detach())
                if update:
                    if clip is not None:
                        nn.utils.clip_grad_norm_(model.parameters(), clip)
                    optimizer.step()
            if update and scheduler is not None:
                scheduler.step()
            if evaluate and (i + 1) % evaluate == 0:
                model.eval()
                with torch.no_grad():
                    losses.append(model(x).sum())
                model.train()
            if freeze and i + 1 == freeze:
                model.blocks[0].requires_grad_(False)
    report = None if step is None else step.report()
    if step is not None:
        step.close()
    return losses, local_state(model), report


def _step_of(model: nn.Module, **options: Any) -> tuple[GraphedStep, torch.optim.Optimizer]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y)

    return GraphedStep(
        loss_of, model=model, optimizer=optimizer, **{"engine": "emulated", **options}
    ), optimizer


def resumed(rank: int) -> dict[str, Any]:
    """Go back to what was saved in mid-training, twice, and once keep parameters whole over a step."""
    ends, losses, replayed = [], [], 0
    for engine in ("off", "emulated"):
        model: Any = sharded(rank)
        step, optimizer = _step_of(model, engine=engine)
        torch.manual_seed(rank)
        saved: Any = None
        found: list[Tensor] = []
        for i, (x, y) in enumerate(batches(rank, 60, SIZES["same"])):
            if i == 12:
                weights, state = get_state_dict(model, optimizer)
                saved = copy.deepcopy(weights), copy.deepcopy(state)
            if i in (24, 40):
                weights, state = copy.deepcopy(saved)
                set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
            if i == 32:
                model.unshard()
            found.append(step(x, y))
        replayed = step.report().steps_replayed
        report = text_of(step.report())
        step.close()
        ends.append(local_state(model))
        losses.append(found)
    return {
        "losses": all(map(torch.equal, *losses)),
        "state": all(map(torch.equal, *ends)),
        "replayed": replayed,
        "report": report,
    }


def refused(rank: int, *, how: str) -> str:
    """The report of steps that no graph can hold."""
    model: nn.Module = Net(nn.LayerNorm)
    if how == "replicas":
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
        fully_shard(model, mesh=mesh)
    elif how == "offload":
        fully_shard(
            model, mesh=init_device_mesh("cpu", (2,)), offload_policy=CPUOffloadPolicy(pin_memory=False)
        )
    elif how == "tensor parallelism":
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("shard", "columns"))
        parallelize_module(model, mesh["columns"], {"first": ColwiseParallel(output_layouts=Replicate())})
        fully_shard(model, mesh=mesh["shard"])
    elif how == "FSDP1":
        model = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    else:
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        model.set_all_reduce_hook(lambda gradient: None)  # type: ignore[attr-defined]
    step, _ = _step_of(model)
    for x, y in batches(rank, 30, SIZES["same"]):
        step(x, y)
    report = text_of(step.report())
    step.close()
    return report


def fails_alone(rank: int) -> str:
    """What a rank says whose second run of a step, made for a comparison, raises."""
    model = sharded(rank)
    step, _ = _step_of(model)
    stock = EmulatedEngine.warm_up

    def warm_up(engine: Any, leaves: Any = ()) -> Any:
        if CaptureMaker.reference.__code__ in {frame.frame.f_code for frame in inspect.stack()}:
            model.last.register_forward_pre_hook(_boom)  # type: ignore[union-attr, operator]
        return stock(engine, leaves)

    with mock.patch.object(EmulatedEngine, "warm_up", warm_up if rank == 1 else stock):
        try:
            for x, y in batches(rank, 12, SIZES["same"]):
                step(x, y)
        except PyGraphError as error:
            if "a training step failed on this rank" in str(error) and "planted" in str(error):
                os._exit(3)  # as a process ends that raised
            return str(error)
    return "went on"


def _boom(*args: Any) -> Any:
    raise ValueError("planted")
