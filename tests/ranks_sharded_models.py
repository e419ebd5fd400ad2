"""Models under `fully_shard` as people write them, trained by each rank of `tests/ranks.py` with and without graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.nn import functional as F

from pygraph_train import GraphedStep
from tests.ranks_sharded import local_state
from tests.ranks_training import device_of
from tests.replays import text_of

__all__ = ["CASES", "same"]

WIDTH, TOKENS = 12, 32
STEPS = 26


class Block(nn.Module):
    """A part of a transformer, without the attention."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))  # type: ignore[no-any-return]


class Language(nn.Module):
    """Predicts the next token."""

    def __init__(self, *, tied: bool = False, dropout: float = 0.1) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.tokens = nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


def _mesh(rank: int) -> Any:
    return init_device_mesh(device_of(rank).type, (distributed.get_world_size(),))


def _sharded(model: Any, rank: int, **options: Any) -> Any:
    for block in model.blocks:
        fully_shard(block, mesh=_mesh(rank), **options)
    return fully_shard(model.to(device_of(rank)), mesh=_mesh(rank), **options)


def _unused(rank: int) -> Any:
    model = Language()
    model.extra = nn.Linear(WIDTH, WIDTH)
    return _sharded(model, rank)


def _checkpointed(rank: int, **options: Any) -> Any:
    model = Language(dropout=0.0)
    for index, block in enumerate(model.blocks):
        block.drop = nn.Identity()  # nn.Dropout(0.0) draws numbers as well
        model.blocks[index] = checkpoint_wrapper(block, **options)
    return _sharded(model, rank)


def _grouped(rank: int) -> Any:
    model = Language().to(device_of(rank))
    for block in model.blocks:
        fully_shard(block, mesh=_mesh(rank))
    fully_shard([model.norm, model.head], mesh=_mesh(rank), reshard_after_forward=False)
    return fully_shard(model, mesh=_mesh(rank))


def _prefetched(rank: int) -> Any:
    model = _sharded(Language(), rank)
    model.blocks[0].set_modules_to_forward_prefetch([model.blocks[1]])
    return model


def _frozen(rank: int) -> Any:
    model = Language()
    model.blocks[1].requires_grad_(False)
    model.tokens.requires_grad_(False)
    return _sharded(model, rank)


def _hooked(rank: int) -> Any:
    model = _sharded(Language(), rank)
    model.blocks[1].register_forward_hook(lambda module, args, out: out * 1.01)
    model.blocks[1].register_forward_pre_hook(lambda module, args: (args[0] * 0.99,))
    return model


def _kept_whole(rank: int) -> Any:
    model = _sharded(Language(), rank, reshard_after_forward=False)
    model.set_reshard_after_backward(False)
    return model


def _by_columns(parameter: nn.Parameter) -> Shard:
    return Shard(1) if parameter.ndim == 2 and parameter.shape[1] % 2 == 0 else Shard(0)


CASES: dict[str, Callable[[int], Any]] = {
    "tied": lambda rank: _sharded(Language(tied=True), rank),
    "unused": _unused,
    "checkpointed": lambda rank: _checkpointed(rank, preserve_rng_state=False),
    "checkpointed, random states kept": _checkpointed,
    "grouped": _grouped,
    "prefetched": _prefetched,
    "frozen": _frozen,
    "hooked": _hooked,
    "two forwards": lambda rank: _sharded(Language(), rank),
    "a scaler": lambda rank: _sharded(Language(), rank),
    "results": lambda rank: _sharded(Language(), rank),
    "groups of parameters": lambda rank: _sharded(Language(), rank),
    "an event": lambda rank: _sharded(Language(), rank),
    "loaded": lambda rank: _sharded(Language(), rank),
    "frozen in turn": lambda rank: _sharded(Language(), rank),
    "by columns": lambda rank: _sharded(Language(), rank, shard_placement_fn=_by_columns),
    "in bf16": lambda rank: _sharded(Language().bfloat16(), rank),
    "with results in fp32": lambda rank: _sharded(
        Language(),
        rank,
        mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=False),
    ),
    "kept whole": _kept_whole,
}


def _loss_of(name: str, model: Any) -> Callable[..., Any]:
    def loss_of(tokens: Tensor, factor: Tensor) -> Any:
        logits = model(tokens)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())
        if name == "two forwards":
            return loss + F.mse_loss(logits, model(tokens.flip(0)))
        if name == "results":
            return {"loss": loss * factor, "logits": logits, "weight": model.head.weight.detach().sum()}
        return loss * factor

    return loss_of


def _optimizer_of(name: str, model: Any) -> torch.optim.Optimizer:
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups: list[Any] = [{"params": parameters}]
    if name == "groups of parameters":
        matrices = [p for p in parameters if p.ndim > 1]
        vectors = [p for p in parameters if p.ndim <= 1]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "lr": 0.02}]
    return torch.optim.AdamW(groups, lr=0.01, fused=True)


def _train(rank: int, name: str, *, graphed: bool) -> tuple[list[Tensor], list[Tensor], Any]:
    model = CASES[name](rank)
    device = device_of(rank)
    scaler = None
    if name == "a scaler":
        scaler = torch.amp.GradScaler(device.type, init_scale=64.0, growth_interval=5)
    optimizer = _optimizer_of(name, model)
    engine: Any = "auto" if device.type == "cuda" else "emulated"
    step = GraphedStep(
        _loss_of(name, model),
        model=model,
        optimizer=optimizer,
        scaler=scaler,
        max_grad_norm=0.7,
        engine=engine if graphed else "off",
        compile=False,
        forward="on",  # also where a GPU does not wait for the host
    )
    torch.manual_seed(rank + 11)
    found: list[Tensor] = []
    saved: dict[str, Tensor] = {}
    for number in range(STEPS):
        draw = torch.Generator().manual_seed(number * 7 + rank)
        tokens = torch.randint(0, TOKENS, (2, 6), generator=draw).to(device)
        lost = scaler is not None and number == 18 and rank == 1  # both ranks skip that update
        result = step(tokens, torch.tensor(float("nan") if lost else 1.0, device=device))
        found += [t.clone() for t in (result.values() if isinstance(result, dict) else [result])]
        if name == "frozen in turn" and number in (10, 16):
            model.blocks[0].requires_grad_(number == 16)
        if name == "an event" and device.type == "cuda":
            model.set_post_optim_event(torch.cuda.current_stream().record_event())
        if name == "loaded" and number == 5:
            saved = {key: value.clone() for key, value in model.state_dict().items()}
        if name == "loaded" and number == 14:
            model.load_state_dict(saved)
    report = step.report()
    step.close()
    return [*found, torch.get_rng_state()], local_state(model), report


def _equal(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.nan_to_num(), other.nan_to_num())


def same(rank: int, *, case: str) -> dict[str, Any]:
    """Train with graphs off and on, and compare all results, the final state and the random state."""
    plain_losses, plain, _ = _train(rank, case, graphed=False)
    losses, state, report = _train(rank, case, graphed=True)
    return {
        "losses": len(losses) == len(plain_losses) and all(map(_equal, plain_losses, losses)),
        "state": all(map(torch.equal, plain, state)) and not any(t.isnan().any() for t in plain),
        "replayed": report.steps_replayed,
        "report": text_of(report),
    }
