"""What each of two processes trains: ordinary trainings, which `compare` runs without and with the library."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.faults import nothing_is_captured

from .compare import Run, compare
from .models import Net, adamw, batches, cross_entropy, loss_of, sgd

__all__ = ["trained"]


def trained(
    rank: int, *, training: str, options: dict[str, Any] | None = None, **expected: Any
) -> dict[str, int]:
    """Compare the training of that name on this rank: see `compare`."""
    if "lightning" in training:  # importing it inside of a run would draw random numbers there
        importlib.import_module("tests.contract.lightning_module")
    return compare(lambda run: globals()[training](run, rank, **(options or {})), **expected)


def replicated(run: Run, rank: int, **options: Any) -> tuple[Any, list[Any]]:
    """A model of both ranks, and the batches of this one."""
    model = DistributedDataParallel(Net(), **options)
    torch.manual_seed(rank)  # each draws its own dropout masks
    return model, batches(32, seed=rank)


def replicas(run: Run, rank: int, *, accumulate: int = 1, clip: float | None = None, **ddp: Any) -> None:
    model, data = replicated(run, rank, **ddp)
    step = run.step(loss_of(model), model=model, optimizer=sgd(model), max_grad_norm=clip)
    for number, batch in enumerate(data):
        step(batch) if (number + 1) % accumulate == 0 else step.accumulate(batch)
        if number % 10 == 9:
            with torch.no_grad():
                run.note("evaluation", model.eval()(batch[0]))
            model.train()


def another_shape_on_one_rank(run: Run, rank: int) -> None:
    model, data = replicated(run, rank)
    step = run.step(loss_of(model), model=model, optimizer=adamw(model))
    for number, (x, y) in enumerate(data):
        rows = 4 if rank == 1 and number % 7 == 3 else 8
        step((x[:rows], y[:rows]))


def a_host_read_on_one_rank(run: Run, rank: int) -> None:
    model, data = replicated(run, rank)

    def step_fn(batch: Any) -> Tensor:
        loss = loss_of(model)(batch)
        for _ in range(int(loss.item() / 100) if rank == 1 else 0):
            loss = loss * 0.9
        return loss

    step = run.step(step_fn, model=model, optimizer=adamw(model))
    for batch in data:
        step(batch)


def another_branch_on_one_rank(run: Run, rank: int) -> None:
    model, data = replicated(run, rank)
    model.module.doubled = False
    step = run.step(
        lambda x, y: cross_entropy(model(x), y) * (2 if model.module.doubled else 1),
        model=model,
        optimizer=adamw(model),
    )
    for number, batch in enumerate(data):
        model.module.doubled = rank == 1 and number in (14, 15, 20)
        step(*batch)


def no_memory_on_one_rank(run: Run, rank: int) -> None:
    model, data = replicated(run, rank)
    with pytest.MonkeyPatch.context() as patch:
        if run.ours and rank == 1:
            nothing_is_captured(patch, torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 MiB."))
        step = run.step(loss_of(model), model=model, optimizer=adamw(model))
        for batch in data:
            step(batch)


def a_parameter_moves_on_one_rank(run: Run, rank: int) -> None:
    model, data = replicated(run, rank)
    step = run.step(loss_of(model), model=model, optimizer=adamw(model))
    for number, batch in enumerate(data):
        if rank == 1 and number == 18:
            model.module.first.weight.data = model.module.first.weight.data.clone()
        step(batch)


def a_step_that_raises_on_both_ranks(run: Run, rank: int) -> None:
    model, data = replicated(run, rank)
    step = run.step(loss_of(model), model=model, optimizer=adamw(model))
    for number, (x, y) in enumerate(data):
        with run.may_raise(IndexError):
            step((x, y + 100 if number == 20 else y))


def shards(
    run: Run, rank: int, *, accumulate: int = 1, clip: float | None = None, bf16: bool = False
) -> None:
    """FSDP2; sizes of the layers do not divide evenly by two."""
    blocks = [nn.Sequential(nn.LayerNorm(7), nn.Linear(7, 7), nn.Dropout(0.1)) for _ in range(2)]
    model = nn.Sequential(nn.Linear(6, 7), *blocks, nn.Linear(7, 3))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if bf16 else MixedPrecisionPolicy()
    mesh = distributed.init_device_mesh("cpu", (2,))
    for module in (*blocks, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    torch.manual_seed(rank)
    step = run.step(
        lambda x, y: cross_entropy(model(x).float(), y),
        model=model,
        optimizer=adamw(model),
        max_grad_norm=clip,
    )
    for number, batch in enumerate(batches(32, seed=rank)):
        step(*batch) if (number + 1) % accumulate == 0 else step.accumulate(*batch)


def a_lightning_trainer(run: Run, rank: int, **options: Any) -> None:
    from .frameworks import fit, loader
    from .lightning_module import Module

    data = loader(batches(16, seed=rank))
    fit(
        run, Module(), data, strategy="ddp", devices=2, max_epochs=2, use_distributed_sampler=False, **options
    )


def an_accelerator(run: Run, rank: int, *, whole: bool) -> None:
    from .frameworks import accelerator, graphed_step, loader

    accelerate = accelerator(run)
    model = Net()
    model, optimizer = accelerate.prepare(model, adamw(model))
    run.watch(model, optimizer)
    torch.manual_seed(rank)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        accelerate.backward(loss)
        accelerate.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        return loss

    made = graphed_step(run, accelerate, step) if whole else run.noted(step)
    for batch in loader(batches(32, seed=rank)):
        made(*batch)
