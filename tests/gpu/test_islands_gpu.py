"""Modules in which values decide about shapes, between the parts of a graph on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_same_as_plain_gpu import STEPS, Make, both
from torch import Tensor, nn
from torch.nn import functional as F

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

WIDTH, EXPERTS, ROWS = 32, 4, 24


class Experts(nn.Module):
    """Each row goes to one expert: the order in which `index_add_` adds changes nothing then."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) * 0.1)

    def forward(self, x: Tensor, chosen: Tensor, scale: Tensor) -> Tensor:
        found = torch.zeros_like(x)
        for number in F.one_hot(chosen, EXPERTS).sum(0).nonzero():
            (row,) = torch.where(chosen == number[0])
            made = F.dropout(F.linear(x[row], self.weight[number[0]]), 0.1, self.training)
            found.index_add_(0, row, made * scale[row, None])
        return found


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.gate, self.experts = nn.Linear(WIDTH, EXPERTS), Experts()
        self.shared, self.drop = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.inside(x))
        scale, chosen = self.gate(h).softmax(-1).max(-1)
        found = self.experts(h, chosen, scale)
        return self.head(self.drop(found) + self.shared(h))  # type: ignore[no-any-return]


@pytest.mark.parametrize("autocast", [False, True])
def test_experts_between_parts_of_a_whole_step(autocast: bool) -> None:
    def script(make: Make) -> list[Any]:
        model = Model().cuda()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)

        def loss_of(x: Tensor, y: Tensor) -> Tensor:
            with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
                return F.cross_entropy(model(x), y)

        step = make(loss_of, model, optimizer)
        generator = torch.Generator().manual_seed(2)
        found = []
        for _ in range(STEPS):
            x = torch.randn(ROWS, WIDTH, generator=generator)
            y = torch.randint(0, 3, (ROWS,), generator=generator)
            found.append(step(x.cuda(), y.cuda()))
        return [*found, *(p.detach() for p in model.parameters())]

    assert not both(script, replays=STEPS - 20, plan="{F B O}", fuse="on").fallbacks


def test_packed_sequences_between_parts_of_a_whole_step() -> None:
    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.LSTM(WIDTH, WIDTH, batch_first=True)

        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            packed = nn.utils.rnn.pack_padded_sequence(
                x, lengths.cpu(), batch_first=True, enforce_sorted=False
            )
            found, _ = self.rnn(packed)
            result: Tensor = nn.utils.rnn.pad_packed_sequence(
                found, batch_first=True, total_length=x.shape[1]
            )[0]
            return result

    class Sequences(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside, self.encoder = nn.Linear(WIDTH, WIDTH), Encoder()
            self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3)

        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            found = self.encoder(self.inside(x), lengths)
            return self.head(self.norm(found).mean(1))  # type: ignore[no-any-return]

    def script(make: Make) -> list[Any]:
        model = Sequences().cuda()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)
        step = make(lambda x, n, y: F.cross_entropy(model(x, n), y), model, optimizer)
        generator = torch.Generator().manual_seed(2)
        found = []
        for _ in range(STEPS):
            x = torch.randn(6, 9, WIDTH, generator=generator)
            lengths = torch.randint(1, 10, (6,), generator=generator)
            y = torch.randint(0, 3, (6,), generator=generator)
            found.append(step(x.cuda(), lengths.cuda(), y.cuda()))
        return [*found, *(p.detach() for p in model.parameters())]

    assert not both(script, replays=STEPS - 20, plan="{F B O}", fuse="on").fallbacks
