"""What models are and do: LoRA, checkpointing, several forwards, dropout, BatchNorm, hooks, second derivatives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import normalize, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from .compare import Run, same_as_plain
from .models import DEVICE, Net, adamw, batches, cross_entropy, loss_of


def trains(run: Run, model: nn.Module, step_fn: Any = None, count: int = 24, optimizer: Any = adamw) -> None:
    """A loop over batches."""
    step = run.step(
        step_fn or (lambda x, y: cross_entropy(model(x), y)), model=model, optimizer=optimizer(model)
    )
    for batch in batches(count):
        step(*batch)


class Lora(nn.Module):
    """A frozen linear layer and a trained update of low rank."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        self.dropout = nn.Dropout(0.1)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(self.dropout(x))) * 2.0


class Checkpointed(nn.Module):
    """Saves no activations of its inner module."""

    def __init__(self, inner: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.reentrant = inner, reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


@same_as_plain(replays=12)
def test_lora_trains_its_own_weights_only(run: Run) -> None:
    model = Net().requires_grad_(False)
    model.first, model.second = Lora(model.first), Lora(model.second)
    trains(
        run,
        model,
        optimizer=lambda m: torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], fused=True),
    )


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.quick
@same_as_plain(refused="a checkpoint may draw random numbers")
def test_gradient_checkpointing(run: Run, dropout: float) -> None:
    inner = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Dropout(dropout), nn.Linear(8, 8))
    trains(run, nn.Sequential(nn.Linear(6, 8), Checkpointed(inner, False), nn.Linear(8, 3)))


@same_as_plain(refused="gradients are computed inside of a backward of Python")
def test_reentrant_checkpointing(run: Run) -> None:
    inner = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
    trains(run, nn.Sequential(nn.Linear(6, 8), Checkpointed(inner, True), nn.Linear(8, 3)))


@pytest.mark.notices("pending forwards share a recording")
@same_as_plain(replays=12)
def test_two_forwards_before_a_backward(run: Run) -> None:
    """Contrastive: the same model over two views of a batch, with other dropout masks and BatchNorm twice."""
    model = Net()

    def step_fn(x: Tensor, y: Tensor) -> Tensor:
        one, other = normalize(model(x), dim=1), normalize(model(x + 0.1), dim=1)
        return cross_entropy(one @ other.T, torch.arange(len(x)))

    trains(run, model, step_fn)


@same_as_plain(replays=12)
def test_dropout_and_noise_draw_the_same_numbers(run: Run) -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.AlphaDropout(0.2), nn.Linear(8, 3))

    def step_fn(x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(model(x + 0.1 * torch.randn_like(x)), y) + torch.rand(()) * 0

    trains(run, model, step_fn)


@same_as_plain(replays=12)
def test_running_statistics_follow_every_forward(run: Run) -> None:
    model = nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), nn.BatchNorm1d(8, momentum=0.3), nn.Linear(8, 3)
    )
    step = run.step(loss_of(model), model=model, optimizer=adamw(model))
    for number, batch in enumerate(batches(30)):
        step(batch)
        if number % 5 == 4:
            run.note("evaluation", model.eval()(batch[0]))
            model.train()


@same_as_plain(replays=12)
def test_attention_with_a_causal_mask(run: Run) -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix, self.out, self.norm = nn.Linear(6, 24), nn.Linear(8, 3), nn.LayerNorm(8)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.mix(x)[None].split(8, dim=-1)
            return self.out(self.norm(scaled_dot_product_attention(q, k, v, is_causal=True)[0]))

    trains(run, Attention())


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
@pytest.mark.quick
@same_as_plain(replays=10)
def test_recurrent_layers(run: Run, kind: Any) -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.head = kind(2, 4, batch_first=True), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.layer(x.view(-1, 3, 2))[0][:, -1])

    trains(run, Recurrent())


@same_as_plain(refused="hooks of Python have to be called")
def test_hooks_of_modules_parameters_and_tensors_are_called(run: Run) -> None:
    model, called = Net(), []
    model.first.register_forward_hook(lambda module, args, out: called.append(["forward", out.shape[0]]))
    model.norm.register_full_backward_hook(
        lambda module, gin, gout: called.append(["module", gout[0].norm().item()])
    )
    model.second.weight.register_hook(lambda gradient: gradient * 0.5)
    model.second.bias.register_post_accumulate_grad_hook(
        lambda p: called.append(["bias", p.grad.sum().item()])
    )

    def step_fn(x: Tensor, y: Tensor) -> Tensor:
        out = model(x)
        out.register_hook(lambda gradient: called.append(["tensor", gradient.norm().item()]))
        return cross_entropy(out, y)

    trains(run, model, step_fn)
    run.note("called", called)


@same_as_plain(replays=12)
def test_mixed_precision_in_the_step(run: Run) -> None:
    model = Net()

    def step_fn(x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast(DEVICE, torch.bfloat16):
            out = model(x)
        return cross_entropy(out.float(), y)

    trains(run, model, step_fn)
