"""Tensors that are conjugated or negated lazily: a bit says so, and compiled kernels read the memory only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("accelerate")

import accelerate_training
import torch
from accelerate_training import fresh  # noqa: F401
from torch import Tensor, nn
from training import Diary, adamw, batches, both, differs

from pygraph_train import PyGraph, backend

FACTOR = torch.complex(torch.tensor([0.5, -1.0, 2.0]), torch.tensor([1.0, 0.3, -0.7]))


class Waves(nn.Module):
    """Returns complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        return torch.view_as_complex(self.second(torch.tanh(self.first(x))).view(-1, 3, 2) * 2.0)


def loss_of(waves: Tensor, conjugated: bool) -> Tensor:
    waves = waves.conj() if conjugated else waves
    return (waves * FACTOR).real.square().mean() + (waves.imag * torch.arange(3)).mean()


@pytest.mark.parametrize(
    "conjugated",
    [lambda step: True, lambda step: step > 30, lambda step: step % 3 == 0],
    ids=["always", "late", "in turns"],
)
@pytest.mark.parametrize("compile", ["auto", True])
def test_gradients_of_a_loop_that_are_conjugated_lazily(
    conjugated: Callable[[int], bool], compile: Any
) -> None:
    def script(made: accelerate_training.Script) -> None:
        model = Waves()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        model, optimizer = made.accelerator.prepare(model, optimizer)
        for step, (x, _) in enumerate(batches(60)):
            loss = loss_of(model(x), conjugated(step))
            made.accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            made.write("loss", loss)
        made.write_state(model, optimizer)

    plugin = PyGraph(engine="emulated", warmup_steps=2, compile=compile)
    plain, ours = accelerate_training.run(script, None), accelerate_training.run(script, plugin)
    assert differs([list(entry) for entry in plain.entries], [list(entry) for entry in ours.entries]) is None
    assert min(row.replays for row in plugin.report().regions()) > 50, str(plugin.report())


def test_gradients_between_regions_of_a_step() -> None:
    def script(diary: Diary) -> None:
        model = Waves()
        optimizer = adamw(model)

        def step_fn(x: Tensor, y: Tensor) -> Tensor:
            waves = model(x)
            torch._dynamo.graph_break()
            return loss_of(waves, conjugated=True)

        step = diary.step(step_fn, model=model, optimizer=optimizer)
        for batch in batches(40):
            diary.write("loss", step(*batch))
        diary.write_state(model, optimizer)

    both(script, replays=60)


class Sums(nn.Module):
    """Two numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 1), nn.Linear(6, 1)

    def forward(self, x: Tensor, sign: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(self.first(x)).sum() * sign, torch.tanh(self.second(x)).sum()


class Conjugated(Waves):
    """Returns numbers that are conjugated lazily: their gradients are so in the backward of `view_as_complex`."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).t().conj().t()


class Resolved(Waves):
    """Reads the memory of what was conjugated, through a view."""

    def forward(self, x: Tensor) -> Tensor:
        waves = super().forward(x).conj()[:, 1:].resolve_conj()
        return torch.view_as_real(waves).sum(1)


class Broken(Waves):
    """The same in two regions."""

    def forward(self, x: Tensor) -> Tensor:
        waves = super().forward(x).conj()
        torch._dynamo.graph_break()
        return waves * FACTOR


MODELS = pytest.mark.parametrize("made", [Conjugated, Resolved, Broken])


def loss_of_any(result: Tensor) -> Tensor:
    return loss_of(result, conjugated=False) if result.is_complex() else result.square().mean()


@MODELS
def test_what_a_module_conjugates_itself_in_a_loop(made: type[Waves]) -> None:
    def script(script: accelerate_training.Script) -> None:
        model = made()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        model, optimizer = script.accelerator.prepare(model, optimizer)
        for x, _ in batches(40):
            loss = loss_of_any(model(x))
            script.accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            script.write("loss", loss)
        script.write_state(model, optimizer)

    # results that are conjugated lazily are handed out by no graph: only updates have one then
    accelerate_training.both(script, replays=60 if made is Resolved else 20)


@MODELS
@pytest.mark.parametrize("compile", ["auto", True])
def test_what_a_module_conjugates_itself_in_a_step(made: type[Waves], compile: Any) -> None:
    def script(diary: Diary) -> None:
        model = made()
        optimizer = adamw(model)
        step = diary.step(lambda x: loss_of_any(model(x)), model=model, optimizer=optimizer)
        for x, _ in batches(40):
            diary.write("loss", step(x))
        diary.write_state(model, optimizer)

    both(script, replays=30, compile=compile)


@MODELS
def test_what_a_module_conjugates_itself_with_kernels_of_inductor(made: type[Waves]) -> None:
    model = made()
    compiled = torch.compile(model, backend="pygraph")
    for x, _ in batches(6):
        found = []
        for call in (model, compiled):
            model.zero_grad()
            loss = loss_of_any(call(x))
            loss.backward()
            found.append([loss.detach(), *(p.grad.clone() for p in model.parameters())])  # type: ignore[union-attr]
        torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


PLAIN = torch.tensor(-2.0)
NEGATED = torch.complex(torch.tensor(1.0), torch.tensor(2.0)).conj().imag


def gradients(model: nn.Module, call: Callable[..., Any], sign: Tensor) -> list[Any]:
    """The gradient of the second result is a view of one that is conjugated lazily."""
    generator = torch.Generator().manual_seed(0)
    model.zero_grad()
    one, other = call(torch.randn(8, 6, generator=generator), sign)
    seen = list[bool]()
    other.register_hook(lambda gradient: seen.append(gradient.is_neg()))
    number = torch.complex(one, other).conj()
    ((number * (1 + 2j)).real.square() + number.imag * 3).backward()
    assert seen == [True]
    return [one.detach(), other.detach(), *(p.grad.clone() for p in model.parameters())]  # type: ignore[union-attr]


@pytest.mark.parametrize("engine", ["auto", "emulated"])
@pytest.mark.parametrize("signs", [[PLAIN, NEGATED], [NEGATED, PLAIN]], ids=["late", "first"])
def test_what_is_negated_lazily_is_so_for_compiled_kernels(engine: str, signs: list[Tensor]) -> None:
    """With Inductor's kernels, where there is no GPU and no emulation. They round otherwise."""
    model = Sums()
    options = {"engine": engine, "warmup_runs": 2}
    compiled = torch.compile(model, backend="pygraph", options=options)
    for sign in signs:
        for _ in range(8):
            expected = gradients(model, model, sign)
            found = gradients(model, compiled, sign)
            torch.testing.assert_close(expected, found, rtol=1e-4, atol=1e-5)
    rows = backend.report().regions
    if engine == "emulated":
        assert max(row.replays for row in rows) >= 6, rows
    assert any("negated lazily" in row.reason for row in rows), rows


@pytest.mark.parametrize("compile", ["auto", True])
def test_batches_of_a_step_that_are_negated_lazily(compile: Any) -> None:
    def script(diary: Diary) -> None:
        model = Sums()
        optimizer = adamw(model)

        def step_fn(x: Tensor, sign: Tensor) -> Tensor:
            one, other = model(x, sign)
            return one + other * sign

        step = diary.step(step_fn, model=model, optimizer=optimizer)
        for index, (x, _) in enumerate(batches(80)):
            sign = (
                torch.complex(PLAIN, torch.tensor(float(index))).conj().imag if index % 4 else PLAIN + index
            )
            diary.write("loss", step(x, sign))
        diary.write_state(model, optimizer)

    both(script, replays=15, compile=compile)
