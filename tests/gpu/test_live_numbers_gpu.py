"""Betas, momentum and weight decay that change on every step, on a GPU: one capture, and the bits of plain training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from test_same_as_plain_gpu import STEPS, Make, batches, both, mlp
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import OneCycleLR

from pygraph_train import GraphedStep, PyGraphConfig, StepReport
from pygraph_train.graphs.cuda import CudaEngine, CudaGraph
from pygraph_train.graphs.engine import NumbersNotFound
from pygraph_train.optimizers.kernels import FUSED_KERNELS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


class Cycle(OneCycleLR):
    """With its defaults, but for learning rates that are exact in float32, as graphs hold them."""

    def get_lr(self) -> list[float]:  # type: ignore[override]
        return [float(np.float32(lr)) for lr in super().get_lr()]


MADE: dict[str, Callable[[Any], Optimizer]] = {
    "adamw": lambda ps: AdamW(ps, lr=1e-3, fused=True),
    "adam": lambda ps: Adam(ps, lr=1e-3, weight_decay=0.1, fused=True),
    "amsgrad": lambda ps: AdamW(ps, lr=1e-3, amsgrad=True, fused=True),
    "sgd": lambda ps: SGD(ps, lr=1e-3, momentum=0.9, fused=True),
    "nesterov": lambda ps: SGD(ps, lr=1e-3, momentum=0.9, nesterov=True, weight_decay=0.01, fused=True),
    "dampened": lambda ps: SGD(ps, lr=1e-3, momentum=0.9, dampening=0.1, weight_decay=0.01, fused=True),
}


def left(model: nn.Module, optimizer: Optimizer) -> list[Any]:
    """Copies of what a step leaves."""
    state = [t for held in optimizer.state.values() for t in held.values() if isinstance(t, Tensor)]
    return [t.detach().clone() for t in (*model.parameters(), *state)]


def follows(script: Callable[[Make], list[Any]], *, captures: int = 1, replays: int = 80) -> StepReport:
    report = both(script, replays=replays, plan="{F B O}", forward="on")
    assert len(report.captures) == captures, str(report)
    assert not [f for f in report.fallbacks if "hyperparameter" in f.reason], str(report)
    return report


@pytest.mark.parametrize("name", MADE)
def test_one_cycle_with_its_defaults_is_one_capture(name: str) -> None:
    def script(make: Make) -> list[Any]:
        model = mlp()
        optimizer = MADE[name](model.parameters())
        schedule = Cycle(optimizer, max_lr=0.01, total_steps=STEPS + 1)
        step, seen = make(lambda x, y: F.cross_entropy(model(x), y), model, optimizer), []
        for batch in batches():
            seen += [step(*batch), *left(model, optimizer)]
            schedule.step()
        return seen

    follows(script)


@pytest.mark.parametrize("name", MADE)
def test_every_number_of_two_groups_changes_on_every_step(name: str) -> None:
    """One of the groups has so many parameters that it takes several launches."""

    def script(make: Make) -> list[Any]:
        model = nn.Sequential(mlp(32), *(nn.LayerNorm(32) for _ in range(250)), nn.Linear(32, 8)).cuda()
        optimizer = MADE[name]([{"params": model[0].parameters()}, {"params": model[1:].parameters()}])
        step, seen = make(lambda x, y: F.cross_entropy(model(x), y), model, optimizer), []
        for index, batch in enumerate(batches()):
            for number, group in enumerate(optimizer.param_groups):
                for key in ("weight_decay", "momentum", "dampening", "eps"):
                    if key in group:
                        group[key] *= 1 - 0.001 * (number + 1)
                if "betas" in group:
                    group["betas"] = (0.8 + 0.001 * index, 0.99 - 0.001 * index * (number + 1))
            seen += [step(*batch), *(left(model, optimizer) if index % 10 == 0 else [])]
        return [*seen, *left(model, optimizer)]

    follows(script)


def test_a_weight_decay_that_leaves_zero_is_captured_anew() -> None:
    def script(make: Make) -> list[Any]:
        model = mlp()
        decayed = [p for p in model.parameters() if p.dim() > 1]
        others = [p for p in model.parameters() if p.dim() == 1]
        optimizer = AdamW([{"params": decayed}, {"params": others, "weight_decay": 0.0}], lr=1e-3, fused=True)
        step, seen = make(lambda x, y: F.cross_entropy(model(x), y), model, optimizer), []
        for index, batch in enumerate(batches()):
            optimizer.param_groups[0]["weight_decay"] = 0.1 + 0.001 * index
            optimizer.param_groups[1]["weight_decay"] = 0.0 if index < 50 else 0.001 * index
            seen += [step(*batch), *left(model, optimizer)]
        return seen

    follows(script, captures=2, replays=70)


def test_the_optimizer_alone_follows_as_well() -> None:
    def script(make: Make) -> list[Any]:
        model = mlp()
        optimizer = AdamW(model.parameters(), lr=1e-3, fused=True)
        schedule = Cycle(optimizer, max_lr=0.01, total_steps=STEPS + 1)

        def fn(x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(model(x), y)

        step, seen = make(fn, model, optimizer), []
        for batch in batches():
            seen += [step(*batch), *left(model, optimizer)]
            schedule.step()
        return seen

    report = both(script, replays=80, forward="off", backward="off", optimizer="on")
    assert report.optimizer_steps_replayed >= 80, str(report)
    assert len(report.captures) <= 2, str(report)  # of gradients where they lie, then of copies


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_with_a_scaler_that_skips_steps(name: str) -> None:
    def run(graphed: bool) -> tuple[list[Any], StepReport | None]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = mlp()
        optimizer = MADE[name](model.parameters())
        schedule = Cycle(optimizer, max_lr=0.01, total_steps=STEPS + 1)
        scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10, growth_interval=7)

        def fn(x: Tensor, y: Tensor, factor: Tensor) -> Tensor:
            return F.cross_entropy(model(x), y) * factor

        step: Any = GraphedStep(
            fn,
            model=model,
            optimizer=optimizer,
            scaler=scaler,
            config=PyGraphConfig(compile=False, forward="on", engine="auto" if graphed else "off"),
        )
        seen: list[Any] = []
        for index, (x, y) in enumerate(batches()):
            seen.append(step(x, y, torch.tensor(float("inf") if index % 9 == 8 else 1.0, device="cuda")))
            seen += [scaler.get_scale(), *left(model, optimizer)]
            schedule.step()
        return seen, step.report()

    (expected, _), (found, report) = run(False), run(True)
    assert report is not None and report.steps_replayed >= 80 and report.plan == "{F B O}", str(report)
    assert len(report.captures) == 1, str(report)
    for index, (one, other) in enumerate(zip(expected, found, strict=True)):
        same = torch.equal(one, other) if isinstance(one, Tensor) else one == other
        assert same or (isinstance(one, Tensor) and not one.isfinite().all()), f"entry {index}\n{report}"


@pytest.mark.parametrize("precision", ["32", "16-mixed", "bf16-mixed"])
def test_one_cycle_in_lightning(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("lightning.pytorch")
    import test_lightning_gpu

    from pygraph_train import PyGraphCallback

    class Cycled(test_lightning_gpu.Module):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            schedule = Cycle(optimizer, max_lr=0.01, total_steps=200)
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    monkeypatch.setattr(test_lightning_gpu, "Module", Cycled)
    module, watch, _ = test_lightning_gpu.fit([], precision=precision)
    callback = PyGraphCallback(compile=False, forward="on")
    module2, watch2, _ = test_lightning_gpu.fit([callback], precision=precision)
    report = callback.report()
    assert report.steps_replayed > 60 and str(report.plan) == "{F B O}", str(report)
    assert len(report.captures) == 1, str(report)
    assert [float(x) for x in watch.losses] == [float(x) for x in watch2.losses]
    for p, q in zip(module.state_dict().values(), module2.state_dict().values(), strict=True):
        assert torch.equal(p, q)


def test_numbers_that_are_not_found_leave_those_of_the_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    def not_found(self: CudaGraph, sets: Any, kernels: Any) -> Any:
        raise NumbersNotFound("not found")

    monkeypatch.setattr(CudaGraph, "numbers", not_found)

    def script(make: Make) -> list[Any]:
        model = mlp()
        optimizer = AdamW(model.parameters(), lr=2.0**-9, fused=True)
        step, seen = make(lambda x, y: F.cross_entropy(model(x), y), model, optimizer), []
        for index, batch in enumerate(batches()):
            optimizer.param_groups[0]["weight_decay"] = 0.1 if index < 50 else 0.2
            seen += [step(*batch), *left(model, optimizer)]
        return seen

    follows(script, captures=2, replays=70)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", MADE)
def test_kernels_of_each_type_take_numbers_as_they_are(name: str, dtype: torch.dtype) -> None:
    """The numbers of a capture, written back, give what the capture gives; others give what they give without one."""
    engine = CudaEngine(torch.device("cuda"))
    params = [torch.nn.Parameter(torch.randn(n, 7, device="cuda", dtype=dtype)) for n in (5, 300, 1)]
    for p in params:
        p.grad = torch.randn_like(p)
    optimizer = MADE[name](params)
    group = optimizer.param_groups[0]
    group["lr"] = torch.tensor(1e-2, device="cuda")  # as in graphs
    if "capturable" in group:
        group["capturable"] = True
    optimizer.step()
    keys = [k for k in ("momentum", "dampening", "weight_decay", "eps") if group.get(k)]
    tensors = [*params, *(t for s in optimizer.state.values() for t in s.values() if isinstance(t, Tensor))]
    before = [t.detach().clone() for t in tensors]

    def put_back() -> None:
        with torch.no_grad():
            for t, value in zip(tensors, before, strict=True):
                t.copy_(value)

    def set_numbers(values: list[float]) -> None:
        group.update(zip(keys, values[: len(keys)], strict=True))
        if "betas" in group:
            group["betas"] = tuple(values[len(keys) :])

    betas = [0.7183, 0.9371] if "betas" in group else []
    marks = [*(0.31 + 0.01 * i for i in range(len(keys))), *(0.61, 0.67)[: len(betas)]]
    others = [*(0.0123 * (i + 1) for i in range(len(keys))), *betas]
    set_numbers(others)
    optimizer.step()
    expected = [t.detach().clone() for t in tensors]
    put_back()
    set_numbers(marks)
    torch.cuda.synchronize()
    graph, _ = engine.capture(optimizer.step)
    graph.numbers([marks], FUSED_KERNELS).write(others)
    graph.replay()
    torch.cuda.synchronize()
    for found, value in zip(tensors, expected, strict=True):
        assert torch.equal(found.detach(), value)
    graph.close()
    engine.close()
