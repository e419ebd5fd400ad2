"""A call that runs as it is, before a compiled call of the same module and the backward of both."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from training import batches

pytest.importorskip("accelerate")

from accelerate_training import Script, both, fresh  # noqa: F401


class Encoder(nn.Module):
    """Batch norm in a method of its own."""

    def __init__(self, outputs: int = 3) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.last = nn.Linear(8, outputs)

    def encode(self, x: Tensor) -> Tensor:
        return torch.relu(self.norm(self.first(x)))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.encode(x))  # type: ignore[no-any-return]


class OwnNorm(Encoder):
    """Divides by a spread that it follows through `.data`."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("spread", torch.ones(8))

    def encode(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        self.spread.data.mul_(0.9).add_(0.1 * hidden.detach().std(0))
        return torch.relu(hidden / self.spread)


@pytest.mark.quick
@pytest.mark.parametrize("kind", [Encoder, OwnNorm])
def test_a_method_is_called_before_the_module(kind: type[Encoder]) -> None:
    """The method is not compiled, and the module is. Both change what the backward of the method has saved."""

    def script(s: Script) -> None:
        model: Any = kind()
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        model, optimizer = s.accelerator.prepare(model, optimizer)
        for x, y in batches(35):
            hidden = model.encode(x + 0.1)
            loss = nn.functional.cross_entropy(model(x), y) + hidden.square().mean()
            s.accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            s.write("loss", loss)
        s.write_state(model, optimizer)

    assert both(script, replays=60).present_plan() == "{F} {B} {O}"


def test_a_generator_that_is_judged_beside_real_data_in_every_third_step() -> None:
    """A relativistic GAN: inputs of the judge require a gradient for the first time when it is compiled already."""

    def script(s: Script) -> None:
        backward = s.accelerator.backward
        makes, judges = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 6)), Encoder(1)
        optimizers = [torch.optim.Adam(m.parameters(), lr=1e-3, fused=True) for m in (makes, judges)]
        make, judge, of_make, of_judge = s.accelerator.prepare(makes, judges, *optimizers)
        for index, (real, _) in enumerate(batches(45)):
            of_judge.zero_grad()
            loss = nn.functional.softplus(judge(make(torch.randn(8, 4)).detach()) - judge(real)).mean()
            backward(loss)
            of_judge.step()
            s.write("loss of the judge", loss)
            if index % 3 == 2:
                of_make.zero_grad()
                loss = nn.functional.softplus(-judge(make(torch.randn(8, 4))) + judge(real)).mean()
                backward(loss)
                of_make.step()
                s.write("loss of the maker", loss)
        s.write_state(make, of_make)
        s.write_state(judge, of_judge)

    both(script, replays=150)


def test_a_method_is_called_before_the_module_in_a_step_whose_python_runs() -> None:
    pl = pytest.importorskip("lightning.pytorch")
    from lightning_training import Module, parity

    class Counts(Module):
        """What it counts keeps all but the modules from being traced."""

        def __init__(self) -> None:
            super().__init__()
            self.net = Encoder()
            self.count = 0

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.count += 1
            hidden = self.net.encode(batch[0] + 0.1)
            loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
            return loss ** (1 / self.count) + hidden.square().mean()

    assert issubclass(Counts, pl.LightningModule)
    parity(Counts, replays=50, plan="{F} {B} {O}")
