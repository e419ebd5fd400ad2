"""What each of two processes trains: ordinary trainings, which `compare` runs without and with the library."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import itertools
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch._dynamo.utils import counters
from torch.distributed._composable.replicate import replicate
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.join import Join
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import OneCycleLR

from pygraph_train import backend
from pygraph_train.core.region import PhaseRegion
from pygraph_train.step.module_call import ModuleCall
from tests.faults import nothing_compares_equal, nothing_is_captured, steps_fail

from .compare import Run, compare
from .models import Net, adamw, batches, cross_entropy, loss_of, sgd
from .overwriting import replays_overwrite

__all__ = ["differs_without_reduction", "trained"]


def trained(
    rank: int, *, training: str, options: dict[str, Any] | None = None, **expected: Any
) -> dict[str, int]:
    """Compare the training of that name on this rank: see `compare`."""
    if "lightning" in training:  # importing it inside of a run would draw random numbers there
        importlib.import_module("tests.contract.lightning_module")
    if "fabric" in training:
        importlib.import_module("lightning.fabric")
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        replays_overwrite(patch)
        given = {"folder": Path(folder), **expected}
        return compare(lambda run: globals()[training](run, rank, **(options or {})), **given)


def replicated(run: Run, rank: int, **options: Any) -> tuple[Any, list[Any]]:
    """A model of both ranks, and the batches of this one."""
    model = DistributedDataParallel(Net(), **options)
    torch.manual_seed(rank)  # each draws its own dropout masks
    return model, batches(32, seed=rank)


def replicas(
    run: Run,
    rank: int,
    *,
    accumulate: int = 1,
    clip: float | None = None,
    bf16: bool = False,
    schedule: bool = False,
    loads: bool = False,
    compress: bool | str = False,
    **ddp: Any,
) -> None:
    """BatchNorm's buffers are broadcast, and the model is evaluated in between."""
    model, data = replicated(run, rank, **ddp)
    if compress:
        hook = halved if compress == "in Python" else default_hooks.fp16_compress_hook
        model.register_comm_hook(None, hook)
    optimizer = adamw(model) if schedule else sgd(model)

    def step_fn(batch: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            return loss_of(model)(batch)

    step = run.step(step_fn, model=model, optimizer=optimizer, max_grad_norm=clip)
    scheduler = OneCycleLR(optimizer, max_lr=0.1, total_steps=33) if schedule else None
    for number, batch in enumerate(data):
        if number == 8:
            saved = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
        if number == 20 and loads:
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
        step(batch) if (number + 1) % accumulate == 0 else step.accumulate(batch)
        if scheduler is not None:
            scheduler.step()
        if number % 10 == 9:
            with torch.no_grad():
                run.note("evaluation", model.eval()(batch[0]))
            model.train()


def halved(state: None, bucket: Any) -> Any:
    """A hook of the user's: the mean of both ranks, halved."""
    sent = distributed.all_reduce(bucket.buffer(), async_op=True)
    return sent.get_future().then(lambda done: done.value()[0] / 4)


halved.__annotations__.clear()  # torch refuses texts


def micro_batches(run: Run, rank: int, *, how: str, fails: str = "") -> None:
    """Gradients are not exchanged before the last of three micro-batches: `no_sync()` is around or inside of steps."""
    model, data = replicated(run, rank)
    optimizer = adamw(model)

    def backward(x: Tensor, y: Tensor) -> Tensor:
        loss = cross_entropy(model(x), y) / 3
        loss.backward()
        return loss

    def by_hand(x: Tensor, y: Tensor) -> Tensor:
        with model.no_sync() if how == "inside" and not update else nullcontext():
            loss = backward(x, y)
        if update:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    def all_in_one(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        with model.no_sync():
            backward(x, y)
            backward(x[2:], y[2:])
        loss = backward(x, y)
        optimizer.step()
        return loss.detach()

    given: dict[str, Any] = {"model": model, "optimizer": optimizer}
    with failing(run, rank, fails):
        if how == "accumulate":
            step = run.step(lambda x, y: cross_entropy(model(x), y) / 3, **given)
        else:
            fn = all_in_one if how == "all in one" else by_hand
            step = run.step(fn, **given, manual_optimization=True)
        for number, batch in enumerate(data):
            update = number % 3 == 2
            outside = how in ("accumulate", "around") and not update
            with model.no_sync() if outside else nullcontext():
                step.accumulate(*batch) if outside and how == "accumulate" else step(*batch)


def gradients_exchanged_by(run: Run, rank: int, *, what: str, by_hand: bool) -> None:
    """No wrapper does so. One rank has another shape at times, and records when the other one replays."""
    model = Net()
    if what == "replicate":
        replicate(model)
    for p in model.parameters() if what == "hooks" else ():
        p.register_post_accumulate_grad_hook(summed)
    torch.manual_seed(rank)
    optimizer = adamw(model)
    step_fn = step_of(model, optimizer, by_hand=by_hand)
    step = run.step(step_fn, model=model, optimizer=optimizer, manual_optimization=by_hand)
    for number, (x, y) in enumerate(batches(32, seed=rank)):
        rows = 4 if rank == 1 and number % 7 == 3 else 8
        step(x[:rows], y[:rows])


def summed(parameter: Tensor) -> None:
    """A hook: the sum over all ranks."""
    distributed.all_reduce(parameter.grad)


def a_model_that_communicates(run: Run, rank: int) -> None:
    """A mean of all ranks, in place; its gradient goes to the mean of this one. The ranks have other shapes."""

    class Talking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def forward(self, x: Tensor) -> Tensor:
            made = self.net(x)
            mean = made.mean()
            distributed.all_reduce(mean)
            return made * (1 + 0.01 * mean)

    model = DistributedDataParallel(Talking())
    torch.manual_seed(rank)
    step = run.step(loss_of(model), model=model, optimizer=adamw(model))
    for number, (x, y) in enumerate(batches(32, seed=rank)):
        rows = 4 if rank == 1 and number % 7 == 3 else 8
        step((x[:rows], y[:rows]))


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


def no_memory(patch: pytest.MonkeyPatch) -> None:
    nothing_is_captured(patch, torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 MiB."))


def graphs_are_off(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(os.environ, "PYGRAPH_DISABLE", "1")


def calls_fail(patch: pytest.MonkeyPatch) -> None:
    once_fails(patch, ModuleCall, "_make")


def choices_fail(patch: pytest.MonkeyPatch) -> None:
    once_fails(patch, PhaseRegion, "_slot_for")


def once_fails(patch: pytest.MonkeyPatch, owner: type, name: str) -> None:
    """A fault of the library in a call of this method, when there have been replays."""
    stock, calls = getattr(owner, name), itertools.count()

    def failing(*given: Any) -> Any:
        if next(calls) == 12:
            raise RuntimeError("a fault of the library")
        return stock(*given)

    patch.setattr(owner, name, failing)


def a_parameter_moves(patch: pytest.MonkeyPatch) -> None:
    """A rank records anew what the other one would replay."""
    stock, calls = PhaseRegion._identity, itertools.count()

    def identity(self: PhaseRegion, given: Any) -> Any:
        found = stock(self, given)
        return (found[0], [*found[1][:-1], 0]) if next(calls) == 12 else found

    patch.setattr(PhaseRegion, "_identity", identity)


FAILS = {
    "calls fail": calls_fail,
    "choices fail": choices_fail,
    "a parameter moves": a_parameter_moves,
    "no memory for captures": no_memory,
    "comparisons fail": nothing_compares_equal,
    "graphs are off": graphs_are_off,
    "steps fail": steps_fail,
}


@contextmanager
def failing(run: Run, rank: int, how: str) -> Iterator[None]:
    """What makes the library fail on one rank; "" for nothing."""
    with pytest.MonkeyPatch.context() as patch:
        if run.ours and rank == 1 and how:
            FAILS[how](patch)
        yield


def a_loop_that_fails_on_one_rank(run: Run, rank: int, *, how: str, accumulate: int = 1, shard: bool) -> None:
    with failing(run, rank, how):
        (shards if shard else replicas)(run, rank, accumulate=accumulate)


def a_counter_on_one_rank(run: Run, rank: int) -> None:
    model, data = replicated(run, rank)
    seen = {"calls": 0}

    def step_fn(batch: Any) -> Tensor:
        if rank == 1:
            seen["calls"] += 1
        return loss_of(model)(batch)

    step = run.step(step_fn, model=model, optimizer=adamw(model))
    for batch in data:
        step(batch)
        run.note("seen", seen)


def not_a_number_on_one_rank(run: Run, rank: int) -> None:
    """Both skip that update."""
    model, data = replicated(run, rank)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=5)
    run.watch(scaler)
    step = run.step(loss_of(model), model=model, optimizer=sgd(model), scaler=scaler)
    for number, (x, y) in enumerate(data):
        step((x * float("nan") if rank == 1 and number == 20 else x, y))
    assert all(p.isfinite().all() for p in model.parameters())


def fewer_batches_on_one_rank(run: Run, rank: int) -> None:
    model, data = replicated(run, rank)
    step = run.step(loss_of(model), model=model, optimizer=sgd(model))
    with Join([model]):
        for batch in data[: 12 + 3 * rank]:
            step(batch)


def reduced_in_the_plain_run_only(run: Run, rank: int) -> None:
    model, data = replicated(run, rank)
    trained = model.module if run.ours else model
    step = run.step(lambda x, y: cross_entropy(trained(x), y), model=trained, optimizer=sgd(model))
    for batch in data:
        step(*batch)


def differs_without_reduction(rank: int) -> None:
    """What these trainings compare shows where gradients of the ranks are not reduced."""
    with pytest.raises(AssertionError, match="became"):
        compare(lambda run: reduced_in_the_plain_run_only(run, rank), replays=0)


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


def mesh_of(sizes: tuple[int, ...]) -> Any:
    """So many ranks have the whole model together, which others have as well where there are two sizes."""
    names = ("replicas", "shards")
    return distributed.init_device_mesh("cpu", sizes, mesh_dim_names=names[-len(sizes) :])


def shards(
    run: Run,
    rank: int,
    *,
    accumulate: int = 1,
    clip: float | None = None,
    bf16: bool = False,
    schedule: bool = False,
    reshard: bool = True,
    mesh: tuple[int, ...] = (2,),
    stepped: str = "",
    trap: str = "",
) -> None:
    """FSDP2; sizes of the layers do not divide evenly by two.

    `stepped` says who makes updates, where it is not the step with one optimizer.
    """
    blocks = [nn.Sequential(nn.LayerNorm(7), nn.Linear(7, 7), nn.Dropout(0.1)) for _ in range(2)]
    model = nn.Sequential(nn.Linear(6, 7), *blocks, nn.Linear(7, 3))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if bf16 else MixedPrecisionPolicy()
    ranks = mesh_of(mesh)
    for module in (*blocks, model):
        fully_shard(module, mesh=ranks, mp_policy=policy, reshard_after_forward=reshard)
    torch.manual_seed(rank)
    seen, optimizer = {"calls": 0}, adamw(model)
    given: dict[str, Any] = {"optimizer": optimizer, "max_grad_norm": clip}
    if stepped == "by the caller":
        given = {}
        run.watch(optimizer)
    elif stepped == "with a scaler":
        given["scaler"] = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=5)
        run.watch(given["scaler"])
    elif stepped == "by several optimizers":
        given["optimizer"] = [adamw(blocks[0]), adamw(blocks[1])]

    def step_fn(x: Tensor, y: Tensor) -> Tensor:
        if trap == "a counter" and rank == 1:
            seen["calls"] += 1
        return cross_entropy(model(x).float(), y)

    step = run.step(step_fn, model=model, **given)
    scheduler = OneCycleLR(optimizer, max_lr=0.1, total_steps=33) if schedule else None
    for number, (x, y) in enumerate(batches(32, seed=rank)):
        rows = 4 if trap == "another shape" and rank == 1 and number % 7 == 3 else 8
        if stepped == "with a scaler" and rank == 1 and number == 20:
            x = x * float("nan")  # both skip that update
        raises = trap == "it raises" and number == 20
        with run.may_raise(IndexError):
            made = step if (number + 1) % accumulate == 0 else step.accumulate
            made(x[:rows], y[:rows] + 100 if raises else y[:rows])
        if stepped == "by the caller":
            optimizer.step()
            optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
    run.note("seen", seen)


class Block(nn.Module):
    """Of a transformer, for batches of sentences."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True, dropout=0.1)
        self.inner, self.outer = nn.Linear(width, 2 * width + 1), nn.Linear(2 * width + 1, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.first(x)
        x = x + self.attention(normed, normed, normed, need_weights=False)[0]
        return x + self.dropout(self.outer(functional.gelu(self.inner(self.second(x)))))


def transformer() -> nn.Sequential:
    """For the same batches as `Net`."""
    blocks = [Block(6) for _ in range(2)]
    return nn.Sequential(nn.Linear(6, 6), nn.Unflatten(1, (1, 6)), *blocks, nn.Flatten(), nn.Linear(6, 3))


def blocks_by_hand(
    run: Run,
    rank: int,
    *,
    accumulate: int = 1,
    bf16: bool = False,
    reduced: torch.dtype | None = None,
    reshard: bool = True,
    frozen: bool = False,
    wider: int = 0,
    mesh: tuple[int, ...] = (2,),
    steps: int = 32,
    trap: str = "",
    fails: str = "",
) -> None:
    """A transformer whose blocks are sharded with FSDP2; the step makes backward and update itself."""
    blocks = [Block(6), Block(6), Block(6 + wider)]
    joint = [nn.Linear(6, 6 + wider)] if wider else []
    model = nn.Sequential(nn.Linear(6, 6), *blocks[:2], *joint, blocks[2], nn.Linear(6 + wider, 3))
    if frozen:
        blocks[1].inner.requires_grad_(False)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if bf16 else None, reduce_dtype=reduced)
    ranks = mesh_of(mesh)
    for module in (*blocks, model):
        fully_shard(module, mesh=ranks, mp_policy=policy, reshard_after_forward=reshard)
    torch.manual_seed(rank)
    optimizer, graphs = adamw(model), counters["stats"]["unique_graphs"]

    def step_fn(x: Tensor, y: Tensor) -> Tensor:
        model.set_requires_gradient_sync(update)
        loss = cross_entropy(model(x[:, None].expand(-1, 4, -1)).mean(1).float(), y)
        loss.backward()
        if update:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    with failing(run, rank, fails):
        step = run.step(step_fn, model=model, optimizer=optimizer, manual_optimization=True)
        for number, (x, y) in enumerate(batches(steps, seed=rank)):
            rows = 4 if trap and rank == 1 and number % 7 == 3 else 8
            update = (number + 1) % accumulate == 0
            if trap and number == 20:
                model.load_state_dict(model.state_dict())
            step(x[:rows], y[:rows])
            if number % 10 == 9:
                with torch.no_grad():
                    run.note("evaluation", model.eval()(x))
                model.train()
    if run.ours and not (trap or fails):
        assert counters["stats"]["unique_graphs"] == graphs + 1, "the model has one graph"


@dataclasses.dataclass
class Made:
    """A result that pytree does not know."""

    x: Tensor


class Boxing(Block):
    def forward(self, x: Tensor) -> Any:
        return Made(super().forward(x))


class Pair(nn.Module):
    """Two blocks that are sharded, of which `kind` says what is special."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.calls = kind, 0
        self.first, self.second, self.last = Block(6), Block(6), nn.Linear(6, 3)
        if kind == "boxes its results":
            self.first = Boxing(6)

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        x = self.first(x)
        x = x.x if isinstance(x, Made) else x
        if self.kind == "breaks the graph":
            torch._dynamo.graph_break()
        if self.kind == "leaves a block out" and self.calls < 12:
            return self.last(x)
        made = self.second(x)
        if self.kind == "has two results":
            return self.last(made), self.last(x).square()
        if self.kind == "calls a block twice":
            made = self.first(made)
        return self.last(made)


def a_sharded_model_that(run: Run, rank: int, *, kind: str) -> None:
    """Is sharded as a whole but for the kind "is not sharded itself"; each step makes its own backward."""
    model = Pair(kind)
    units = [model.first, model.second] + [model] * (kind != "is not sharded itself")
    for module in units:
        fully_shard(module, mesh=mesh_of((2,)))
    model.first.set_requires_all_reduce(kind != "is reduced in part")
    optimizer = adamw(model, fused=False)  # kernels for many tensors take no mixture
    torch.manual_seed(rank)

    def step_fn(x: Tensor, y: Tensor) -> Tensor:
        made = model(x[:, None].expand(-1, 4, -1))
        if kind == "has its weights in the loss":
            made = made + model.last.weight.square().sum()
        if kind == "has two results":
            first = cross_entropy(made[0].mean(1), y)
            first.backward(retain_graph=True)
            (first + made[1].mean()).backward()
        else:
            first = cross_entropy(made.mean(1), y)
            if wrong:
                with pytest.raises(RuntimeError):
                    model(wrong.pop())
            if kind == "is frozen before some backwards" and number % 8 > 5:
                (model.second if number % 8 == 6 else model.last).requires_grad_(False)
            first.backward()
            model.requires_grad_(True)
        optimizer.step()
        optimizer.zero_grad()
        return first.detach()

    step = run.step(step_fn, model=model, optimizer=optimizer, manual_optimization=True)
    wrong: list[Tensor] = []
    for number, batch in enumerate(batches(32, seed=rank)):
        if number == 20 and kind == "divides by another number":
            model.set_gradient_divide_factor(8.0)
            model.set_force_sum_reduction_for_comms(True)  # gloo knows no other way to divide
        if number == 20 and kind == "raises before a backward":
            wrong.append(torch.ones(8, 4, 5))
        if number == 20 and kind == "is gathered ahead":
            model.unshard(async_op=True)
        step(*batch)
        if kind.startswith("is evaluated") or (kind == "is gathered ahead" and number > 19):
            with torch.no_grad():
                run.note("evaluation", model(batch[0][:, None].expand(-1, 4, -1)))
        if kind == "is evaluated and freed":
            model.reshard()
        run.note("whole", [type(p).__name__ for p in model.parameters()])
    if run.ours and kind == "is reduced in part":
        assert "reduced in part" in str(step.report().to_dict()["fallbacks"])
    if run.ours and kind == "is evaluated":
        assert "are gathered already" in str(step.report().to_dict()["fallbacks"])
        assert "Dynamo finds no graph" not in str(step.report())


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer, *, by_hand: bool) -> Callable[..., Tensor]:
    """A step that returns its loss, or that makes its backward and its update as well."""

    def step_fn(x: Tensor, y: Tensor) -> Tensor:
        loss = cross_entropy(model(x), y)
        if by_hand:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach() if by_hand else loss

    return step_fn


def a_model_in_fsdp1(run: Run, rank: int, *, by_hand: bool) -> None:
    model = FullyShardedDataParallel(transformer(), device_id=torch.device("cpu"), use_orig_params=True)
    optimizer = adamw(model)
    torch.manual_seed(rank)

    step_fn = step_of(model, optimizer, by_hand=by_hand)
    step = run.step(step_fn, model=model, optimizer=optimizer, manual_optimization=by_hand)
    for batch in batches(16, seed=rank):
        step(*batch)
    if run.ours:
        forwards = step.report().to_dict()["phases_from_graphs"]["F"]
        assert forwards == 0  # a backward finds parameters elsewhere


def blocks_of_a_compiled_model(run: Run, rank: int) -> None:
    """FSDP2 frees the parameters of a block between forward and backward."""
    model = transformer()
    for module in (*model[2:4], model):
        fully_shard(module, mesh=distributed.init_device_mesh("cpu", (2,)))
    optimizer = adamw(model)
    torch.manual_seed(rank)
    compiled = run.compile(model, compile=False)
    for x, y in run.each(batches(12, seed=rank)):
        optimizer.zero_grad()
        cross_entropy(compiled(x), y).backward()
        optimizer.step()
    if run.ours:
        rows = [row for row in backend.report().to_dict()["regions"] if "move between" in row["reason"]]
        assert rows and not any(row["replays"] for row in rows)


def halves(mesh: Any) -> nn.Sequential:
    """Each of two ranks computes a half of the layer in the middle."""
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6), nn.Linear(6, 4))
    whole = ColwiseParallel(output_layouts=Replicate())
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel(), "3": whole})
    return model


def tensor_parallel(
    run: Run,
    rank: int,
    *,
    by_hand: bool = False,
    clip: float | None = None,
    beside: bool = False,
    shard: bool = False,
) -> None:
    """Both ranks get the same batches. `beside` puts layers that each has as a whole around those that are split."""
    names = ("data", "tensor")  # with shards each rank has the whole of its half of the parameters
    mesh = distributed.init_device_mesh("cpu", (2, 1) if shard else (1, 2), mesh_dim_names=names)
    middle = halves(mesh["tensor"])
    if shard:
        fully_shard(middle, mesh=mesh["data"])
    around = [nn.Sequential(nn.Linear(n, n), nn.Tanh(), nn.Linear(n, n), nn.Dropout(0.1)) for n in (6, 4)]
    model = nn.Sequential(around[0], middle, around[1]) if beside else middle
    optimizer = adamw(model, fused=not beside)  # fused kernels of torch take no mixture

    given: dict[str, Any] = {"manual_optimization": True} if by_hand else {"max_grad_norm": clip}
    step_fn = step_of(model, optimizer, by_hand=by_hand)
    step = run.step(step_fn, model=model, optimizer=optimizer, **given)
    for batch in batches(24):
        step(*batch)


class Attention(nn.Module):
    """And an MLP, of which each rank has a part of the heads and of the width.

    Args:
        kind: with "gates" that read what attention reads as well, with "gates around", or whose heads "exchange".
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.first, self.second = kind, nn.LayerNorm(8), nn.LayerNorm(8)
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8) for _ in range(4))
        self.up, self.down, self.dropout = nn.Linear(8, 16), nn.Linear(16, 8), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.first(x)
        q, k, v = (m(normed).unflatten(-1, (-1, 2)).transpose(1, 2) for m in (self.q, self.k, self.v))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        if self.kind == "gates around":
            mixed = mixed * normed.mean() * normed.sigmoid().sum()
        x = x + self.dropout(self.o(mixed))
        if self.kind.startswith("gates"):
            x = x * normed.sigmoid() * normed.square()
        inner = functional.gelu(self.up(self.second(x)))
        if self.kind == "exchange":
            split = DTensor.from_local(inner, self.mesh, [Shard(-1)])
            inner = (split - split.mean(-1, keepdim=True)).redistribute(placements=[Shard(-1)]).to_local()
        return x + self.down(inner)


class Heads(nn.Module):
    """Of which a backward asks for one."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(8, 6), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.one(x).tanh(), self.other(x).tanh()


def tensor_parallel_blocks(
    run: Run,
    rank: int,
    *,
    sequence: bool = False,
    shard: bool = False,
    fails: str = "",
    accumulate: int = 1,
    bf16: bool = False,
    kind: str = "",
    trap: str = "",
) -> None:
    """A transformer, whose step makes its backward and its update itself. `sequence` splits what lies between too."""
    names = ("data", "tensor")
    mesh = distributed.init_device_mesh("cpu", (2, 1) if shard else (1, 2), mesh_dim_names=names)
    blocks = [Attention(kind) for _ in range(2)]
    enters = ColwiseParallel(input_layouts=Shard(1)) if sequence else ColwiseParallel()
    leaves = RowwiseParallel(output_layouts=Shard(1)) if sequence else RowwiseParallel()
    plan = {"q": enters, "k": enters, "v": enters, "o": leaves, "up": enters, "down": leaves}
    if sequence:
        plan |= {"first": SequenceParallel(), "second": SequenceParallel()}
    for block in blocks:
        parallelize_module(block, mesh["tensor"], plan)
        block.mesh = mesh["tensor"]
    model = nn.Sequential(nn.Linear(6, 8), *blocks, Heads() if kind == "heads" else nn.Linear(8, 3))
    if kind == "heads":
        parallelize_module(model[-1], mesh["tensor"], {"one": enters, "other": enters})
    if shard:
        for module in (*blocks, model):
            fully_shard(module, mesh=mesh["data"])
    optimizer = adamw(model, fused=False)
    of: Any = blocks[0].q.weight.device_mesh

    def step_fn(x: Tensor, y: Tensor) -> Tensor:
        x = x[:, None] * torch.arange(1, 5)[:, None]
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            made = model(x.chunk(2, 1)[rank] if sequence else x)
        if kind == "heads":
            made = made[number % 3 == 2]
        loss = cross_entropy(made.mean(1).float(), y)
        loss.backward()
        if update:
            alike = [
                p for p in model.parameters() if getattr(p, "device_mesh", None) == of and p.grad is not None
            ]
            nn.utils.clip_grad_norm_(alike, 0.5)
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    with failing(run, rank, fails):
        step = run.step(step_fn, model=model, optimizer=optimizer, manual_optimization=True)
        for number, (x, y) in enumerate(batches(32)):
            rows = 4 if trap and number % 7 == 3 else 8
            update = (number + 1) % accumulate == 0
            step(x[:rows], y[:rows])
            for name, p in model.named_parameters():
                if p.grad is not None:
                    run.note(
                        f"{name} {number} {getattr(p.grad, 'placements', None)}",
                        getattr(p.grad, "_local_tensor", p.grad),
                    )
            if number % 10 == 9:
                with torch.no_grad():
                    run.note("evaluation", model.eval()(x[:, None].expand(-1, 2, -1)))
                model.train()


def a_lightning_trainer(
    run: Run, rank: int, *, shard: bool = False, tensor: bool = False, **options: Any
) -> None:
    """Logged values are reduced over the ranks."""
    from lightning.pytorch.strategies import ModelParallelStrategy

    from .frameworks import fit, loader, memory_logger
    from .lightning_module import Module

    class Logging(Module):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            self.log("of all ranks", loss, sync_dist=True, on_step=False, on_epoch=True)
            return loss

        def configure_model(self) -> None:
            if tensor:
                self.net = halves(self.device_mesh["tensor_parallel"])
            if shard:
                self.net = transformer()
                for module in (*self.net[2:4], self.net):
                    fully_shard(module, mesh=self.device_mesh["data_parallel"])

    sizes = {"data_parallel_size": 1 if tensor else 2, "tensor_parallel_size": 2 if tensor else 1}
    strategy = ModelParallelStrategy(**sizes) if shard or tensor else "ddp"
    machine = {"strategy": strategy, "devices": 2, "use_distributed_sampler": False}
    data = {"train": loader(batches(16, seed=rank)), "validation": loader(batches(2, seed=rank))}
    fit(run, Logging(), max_epochs=2, logger=memory_logger()(), **data, **machine, **options)


def a_lightning_trainer_by_hand(run: Run, rank: int, *, shard: bool = False) -> None:
    """The module itself can be called, too."""
    from lightning.pytorch.strategies import ModelParallelStrategy

    from .frameworks import fit, loader
    from .lightning_module import Module

    class ByHand(Module):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            if shard:
                self.net: Any = transformer()

        def configure_model(self) -> None:
            for module in (*self.net[2:4], self.net) if shard else ():
                fully_shard(module, mesh=self.device_mesh["data_parallel"])

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            loss = cross_entropy(self(batch[0]) if batch_idx % 5 == 4 else self.net(batch[0]), batch[1])
            self.manual_backward(loss)
            optimizer.step()
            return loss.detach()

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)

    strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1) if shard else "ddp"
    machine = {"strategy": strategy, "devices": 2, "use_distributed_sampler": False}
    fit(run, ByHand(), loader(batches(32, seed=rank)), **machine)


def an_accelerator(
    run: Run,
    rank: int,
    *,
    whole: bool = False,
    attach: bool = False,
    shard: bool = False,
    tensor: bool = False,
) -> None:
    from accelerate.utils import FullyShardedDataParallelPlugin, ParallelismConfig

    from tests.ranks_accelerate import sharded_on_cpus, split_on_cpus

    from .frameworks import accelerator, attach_to, graphed_step, loader

    model: Any = Net()
    if shard:
        model = transformer()
        wraps = {"transformer_cls_names_to_wrap": ["Block"], "auto_wrap_policy": "transformer_based_wrap"}
        with sharded_on_cpus():
            plugin = FullyShardedDataParallelPlugin(fsdp_version=2, **wraps)
            accelerate = accelerator(run, attach=attach, fsdp_plugin=plugin)
    elif tensor:
        with split_on_cpus():
            accelerate = accelerator(run, attach=attach, parallelism_config=ParallelismConfig(tp_size=2))
        model = halves(accelerate.torch_device_mesh["tp"])
        model.tp_size = 2  # as transformers has it
    else:
        accelerate = accelerator(run, attach=attach)
    model, optimizer = accelerate.prepare(model, adamw(model))
    if attach:
        attach_to(run, accelerate)
    run.watch(model, optimizer)
    torch.manual_seed(0 if tensor else rank)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        accelerate.backward(loss)
        accelerate.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        return loss

    made = graphed_step(run, accelerate, step) if whole else run.noted(step)
    for batch in loader(batches(32, seed=0 if tensor else rank)):
        made(*batch)


def a_fabric(run: Run, rank: int, *, how: str, accumulate: int = 1, fails: str = "", **options: Any) -> None:
    """A stock loop around the model or a method of it, or a whole step."""
    from lightning.fabric.strategies import DDPStrategy

    from .frameworks import fabric

    class Learner(Net):
        def loss(self, x: Tensor, y: Tensor) -> Tensor:
            return cross_entropy(self(x), y)

    with failing(run, rank, fails):
        made = fabric(run, strategy=DDPStrategy(), devices=2, **options)
        model, optimizer = made.setup(net := Learner(), adamw(net))
        model.mark_forward_method("loss")
        run.watch(model, optimizer)
        torch.manual_seed(rank)

        def loss_fn(x: Tensor, y: Tensor) -> Tensor:
            return model.loss(x, y) if how == "method" else cross_entropy(model(x), y)

        clip = {"max_norm": 0.5, "error_if_nonfinite": False}

        def step(x: Tensor, y: Tensor) -> Tensor:
            if number % accumulate == 0:
                optimizer.zero_grad()
            made.backward(loss := loss_fn(x, y))
            if update:
                made.clip_gradients(model, optimizer, **clip)
                optimizer.step()
            return loss

        if how == "whole" and run.ours:
            step = made.pygraph.graphed_step(loss_fn, model=model, optimizer=optimizer, **clip)
        for number, batch in enumerate(batches(40, seed=rank)):
            update = (number + 1) % accumulate == 0
            with made.no_backward_sync(model, enabled=not update):
                run.note("loss", step(*batch))
            run.snapshot(f"after {number}")


def a_fabric_with_parts_of_a_model(run: Run, rank: int, *, shard: bool = False) -> None:
    """Tensor parallelism, or FSDP2, by Fabric's strategy for both."""
    from lightning.fabric.strategies import ModelParallelStrategy

    from .frameworks import fabric

    def divide(module: Any, mesh: Any) -> Any:
        for part in (*module[2:4], module) if shard else ():
            fully_shard(part, mesh=mesh["data_parallel"])
        return module if shard else halves(mesh["tensor_parallel"])

    sizes = {"data_parallel_size": 2 if shard else 1, "tensor_parallel_size": 1 if shard else 2}
    made = fabric(run, strategy=ModelParallelStrategy(divide, **sizes), devices=2)
    model = made.setup_module(transformer() if shard else nn.Identity())
    optimizer = made.setup_optimizers(adamw(model))
    run.watch(model, optimizer)
    seed = rank if shard else 0
    torch.manual_seed(seed)
    for x, y in batches(40, seed=seed):
        optimizer.zero_grad()
        made.backward(loss := cross_entropy(model(x), y))
        optimizer.step()
        run.note("loss", loss)
        run.snapshot()


def a_fabric_whose_gradients_are_read_late(run: Run, rank: int) -> None:
    """Gradients are read behind the next forward, emptied behind it, and asked for without `backward`."""
    from lightning.fabric.strategies import DDPStrategy

    from .frameworks import fabric

    made = fabric(run, strategy=DDPStrategy(), devices=2)
    model, optimizer = made.setup(net := Net(), adamw(net))
    run.watch(model, optimizer)
    torch.manual_seed(rank)
    kept: list[Tensor] = []
    for number, (x, y) in enumerate(batches(40, seed=rank)):
        if number % 10 < 6:
            optimizer.zero_grad()
        if number % 7 == 6:
            kept = list(torch.autograd.grad(cross_entropy(net(x), y), list(net.parameters())))
        loss = cross_entropy(model(x), y)
        if number % 10 >= 6:
            run.note("gradients of the step before", [p.grad for p in net.parameters()])
            optimizer.zero_grad()
        run.note("kept", kept)
        if number > 30:  # two forwards wait for their backward
            run.note("another loss", cross_entropy(net(x), y))
        made.backward(loss)
        run.note("gradients", [p.grad for p in net.parameters()])
        optimizer.step()
        run.snapshot(f"after {number}")


def a_trainer_of_transformers(run: Run, rank: int, *, way: str, **options: Any) -> None:
    from .frameworks import sentences, trainer

    trainer(run, way, data=sentences(320), ddp_find_unused_parameters=False, **options)
