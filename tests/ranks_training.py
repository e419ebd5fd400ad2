"""What each rank of `tests/ranks.py` trains: the same loop with and without the library."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from pygraph_train import GraphedStep, PyGraphConfig
from tests.replays import text_of

__all__ = [
    "captured_again",
    "compiled",
    "driven",
    "graphed_step",
    "hooked",
    "joined",
    "scaled",
]

STEPS = 32


class Net(nn.Module):
    """Small, with dropout and the running statistics of BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.first = nn.Linear(8, 16)
        self.norm = nn.BatchNorm1d(16)
        self.drop = nn.Dropout(0.1)
        self.last = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.drop(torch.relu(self.norm(self.first(x)))))  # type: ignore[no-any-return]


def batches(rank: int, steps: int, sizes: Callable[[int, int], int]) -> Iterator[tuple[Tensor, Tensor]]:
    """Of this rank. `sizes(step, rank)` is how many rows one has."""
    for step in range(steps):
        draw = torch.Generator().manual_seed(1000 * step + rank)
        rows = sizes(step, rank)
        device = device_of(rank)
        x, y = torch.randn(rows, 8, generator=draw), torch.randint(0, 4, (rows,), generator=draw)
        yield x.to(device), y.to(device)


def device_of(rank: int) -> torch.device:
    """Where a rank trains: a GPU of its own under NCCL."""
    return torch.device("cuda", rank) if distributed.get_backend() == "nccl" else torch.device("cpu")


def state_of(model: nn.Module) -> list[Tensor]:
    """Of a sharded tensor, the part that this rank holds."""
    return [getattr(t, "_local_tensor", t).detach().clone() for t in model.state_dict().values()]


SIZES: dict[str, Callable[[int, int], int]] = {
    "same": lambda step, rank: 6,
    "ragged": lambda step, rank: 6 if step % 5 else 3,
    "one rank": lambda step, rank: 4 if rank == 1 and step % 7 == 3 else 6,
}


def graphed_step(
    rank: int,
    *,
    sizes: str = "same",
    accumulate: int = 1,
    clip: float | None = None,
    bf16: bool = False,
    optimizer: str = "sgd",
    schedule: bool | str = False,
    steps: int = STEPS,
    ddp: dict[str, Any] | None = None,
    config: dict[str, Any] | None = None,
    calls: int = 1,
    hook: str = "",
) -> dict[str, Any]:
    """Train with a plain loop and with `GraphedStep`, and compare every loss and the final state."""
    plain_losses, plain = _train(
        rank, None, sizes, accumulate, clip, bf16, optimizer, schedule, steps, ddp, config, calls, hook
    )
    losses, state, report = _train(
        rank, True, sizes, accumulate, clip, bf16, optimizer, schedule, steps, ddp, config, calls, hook
    )
    return {
        "losses": all(map(torch.equal, plain_losses, losses)) and len(losses) == len(plain_losses),
        "state": all(map(torch.equal, plain, state)),
        "replayed": report.steps_replayed,
        "report": text_of(report),
        "printed": str(report),
        "fallbacks": [f"{f.reason} {f.fix}" for f in report.fallbacks],
    }


def _train(
    rank: int,
    graphed: bool | None,
    sizes: str,
    accumulate: int,
    clip: float | None,
    bf16: bool,
    kind: str,
    schedule: bool | str,
    steps: int,
    ddp: dict[str, Any] | None,
    config: dict[str, Any] | None,
    calls: int,
    hook: str,
) -> Any:
    model = DistributedDataParallel(Net().to(device_of(rank)), **(ddp or {}))
    if hook:
        model.register_comm_hook(None, getattr(default_hooks, hook))
    if kind == "sgd":
        optimizer: torch.optim.Optimizer = torch.optim.SGD(
            model.parameters(), lr=0.1, momentum=0.9, fused=True
        )
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    scheduler: Any = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.7) if schedule else None
    if schedule == "one cycle":
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=steps + 1)
    torch.manual_seed(rank)
    losses = []
    autocast = (
        (lambda: torch.autocast(device_of(rank).type, torch.bfloat16)) if bf16 else contextlib.nullcontext
    )

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        with autocast():
            out = model.module(x) if calls == 0 else model(x)
            return F.cross_entropy((out + model(-x) if calls == 2 else out).float(), y)

    if graphed is None:
        for i, (x, y) in enumerate(batches(rank, steps, SIZES[sizes])):
            update = (i + 1) % accumulate == 0
            if i % accumulate == 0:
                optimizer.zero_grad()
            with contextlib.nullcontext() if update else model.no_sync():
                loss = loss_of(x, y)
                loss.backward()
            losses.append(loss.detach())
            if update:
                if clip is not None:
                    nn.utils.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
                if scheduler is not None:
                    scheduler.step()
        return losses, state_of(model)
    options = {"engine": "auto" if device_of(rank).type == "cuda" else "emulated", **(config or {})}
    settings = PyGraphConfig(**options)
    step = GraphedStep(loss_of, model=model, optimizer=optimizer, max_grad_norm=clip, config=settings)
    for i, (x, y) in enumerate(batches(rank, steps, SIZES[sizes])):
        update = (i + 1) % accumulate == 0
        losses.append(step(x, y) if update else step.accumulate(x, y))
        if update and scheduler is not None:
            scheduler.step()
    report = step.report()
    step.close()
    return losses, state_of(model), report


def compiled(rank: int, *, shards: bool = False, steps: int = 60) -> dict[str, Any]:
    """Train with Inductor's kernels in the graph and with a plain loop: how far are the losses from each other?"""
    device = device_of(rank)
    ends: list[list[Tensor]] = []
    report = None
    for graphed in (False, True):
        torch.manual_seed(7)
        blocks = [nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.LayerNorm(256)) for _ in range(6)]
        model: Any = nn.Sequential(nn.Linear(8, 256), *blocks, nn.Linear(256, 4)).to(device)
        if shards:
            mesh = init_device_mesh(device.type, (distributed.get_world_size(),))
            for block in model[1:-1]:
                fully_shard(block, mesh=mesh)
            fully_shard(model, mesh=mesh)
        else:
            model = DistributedDataParallel(model, bucket_cap_mb=0.3)  # a bucket for each block
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

        def loss_of(x: Tensor, y: Tensor, model: nn.Module = model) -> Tensor:
            return F.cross_entropy(model(x), y)

        config = PyGraphConfig(compile=True, engine="auto" if graphed else "off")
        step = GraphedStep(loss_of, model=model, optimizer=optimizer, config=config)
        ends.append([step(x, y) for x, y in batches(rank, steps, SIZES["same"])])
        report = step.report()
        step.close()
    assert report is not None
    distances = [abs(float(a) - float(b)) / float(a) for a, b in zip(*ends, strict=True)]
    return {
        "replayed": report.steps_replayed,
        "compiled": [c.compiled for c in report.captures],
        "distance": max(distances),
        "report": text_of(report),
    }


def captured_again(rank: int, *, captures: int) -> list[int]:
    """MiB that are reserved after each of so many captures of a step, each of which is closed."""
    reserved = []
    model = DistributedDataParallel(Net().to(device_of(rank)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    config = PyGraphConfig(compile=False, forward="on")
    for x, y in batches(rank, 1, SIZES["same"]):  # before the reducer settles: it is made anew for graphs
        for _ in range(captures):
            step = GraphedStep(
                lambda x, y: F.cross_entropy(model(x), y), model=model, optimizer=optimizer, config=config
            )
            for _ in range(16):
                step(x, y)
            report = step.report()
            assert report.steps_replayed > 4, report
            step.close()
            reserved.append(torch.cuda.memory_reserved() >> 20)
    return reserved


def _python_hook(state, bucket):  # type: ignore[no-untyped-def]  # torch looks at the annotations
    return default_hooks.allreduce_hook(state, bucket)


def hooked(rank: int) -> str:
    """The report of steps whose all-reduces a communication hook of the user's replaces."""
    model = DistributedDataParallel(Net())
    model.register_comm_hook(None, _python_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    config = PyGraphConfig(engine="emulated")
    step = GraphedStep(
        lambda x, y: F.cross_entropy(model(x), y), model=model, optimizer=optimizer, config=config
    )
    for x, y in batches(rank, 12, SIZES["same"]):
        step(x, y)
    report = text_of(step.report())
    step.close()
    return report


def scaled(rank: int) -> dict[str, Any]:
    """Training with a GradScaler in which one rank once has a batch with NaN: both skip that update."""
    ends, scales, report = [], [], None
    for graphed in (False, True):
        model = DistributedDataParallel(Net())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=5)
        config = PyGraphConfig(engine="emulated" if graphed else "off")
        step = GraphedStep(
            lambda x, y, model=model: F.cross_entropy(model(x), y),
            model=model,
            optimizer=optimizer,
            scaler=scaler,
            config=config,
        )
        torch.manual_seed(rank)
        for number, (x, y) in enumerate(batches(rank, STEPS, SIZES["same"])):
            step(x * float("nan") if number == 20 and rank == 1 else x, y)
        report = step.report()
        step.close()
        ends.append([p.detach().clone() for p in model.parameters()])
        scales.append(scaler.get_scale())
    assert report is not None
    same = all(map(torch.equal, *ends)) and not any(p.isnan().any() for p in ends[0])
    return {
        "losses": scales[0] == scales[1],
        "state": same,
        "replayed": report.steps_replayed,
        "report": text_of(report),
    }


def driven(rank: int) -> dict[str, Any]:
    """A loop that empties gradients and updates itself, with `no_sync()`, evaluation and a step that raises."""
    ends, losses, report = [], [], None
    for graphed in (False, True):
        model = DistributedDataParallel(Net())
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
        config = PyGraphConfig(engine="emulated" if graphed else "off")

        def loss_of(x: Tensor, y: Tensor, model: Any = model) -> Tensor:
            return F.cross_entropy(model(x), y)

        step = GraphedStep(loss_of, model=model, optimizer=None, config=config)
        torch.manual_seed(rank)
        found: list[Tensor] = []
        for number, (x, y) in enumerate(batches(rank, 60, SIZES["same"])):
            if number % 2:
                found.append(step(x, y))
                optimizer.step()
                optimizer.zero_grad()
            elif number % 4:
                with model.no_sync():
                    found.append(step(x, y))
            else:
                found.append(step.accumulate(x, y))
            if number % 10 == 9:
                model.eval()
                with torch.no_grad():
                    found.append(model(x).sum())
                model.train()
            if number == 31:
                with contextlib.suppress(ValueError, IndexError, RuntimeError):
                    step(x, y + 100)  # no such class: raises on both ranks, before gradients are exchanged
                optimizer.zero_grad()
        report = step.report()
        step.close()
        ends.append(state_of(model))
        losses.append(found)
    assert report is not None
    return {
        "losses": all(map(torch.equal, *losses)),
        "state": all(map(torch.equal, *ends)),
        "replayed": report.steps_replayed,
        "report": text_of(report),
    }


def joined(rank: int) -> dict[str, Any]:
    """Ranks with different numbers of batches, inside of `Join`: the last ones are trained by one rank alone."""
    ends, report = [], ""
    for graphed in (False, True):
        model = DistributedDataParallel(Net())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
        step = GraphedStep(
            lambda x, y, model=model: F.cross_entropy(model(x), y),
            model=model,
            optimizer=optimizer,
            config=PyGraphConfig(engine="emulated" if graphed else "off"),
        )
        torch.manual_seed(rank)
        with Join([model]):
            for x, y in batches(rank, 12 + 3 * rank, SIZES["same"]):
                step(x, y)
        report = text_of(step.report())
        step.close()
        ends.append(state_of(model))
    return {"state": all(map(torch.equal, *ends)), "report": report}
