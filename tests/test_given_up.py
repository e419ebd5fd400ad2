"""Training that can have no graph any more: steps are those of the plain loop, and cost what these cost."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from training import CONFIG, Diary, PlainStep, adamw, batches, both

from pygraph_train import GraphedStep, PyGraphError
from pygraph_train.torch_private.dynamo import compiled_call

NEVER = pytest.mark.passes_without_graphs("nothing is captured")

NO_GRAPH: dict[str, Any] = {"refused": "is written by the step"}


class Counting(nn.Module):
    """Its result depends on how often it was called, which no graph can hold."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(6, 3), nn.BatchNorm1d(3)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        result: Tensor = self.norm(self.layer(x)).clamp(max=0.5 + 0.01 * self.calls)
        return result


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Its kernels read the learning rate on the host."""
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


OPTIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": dict,
    "clipped": lambda: {"max_grad_norm": 0.1},
    "scaled": lambda: {"scaler": torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=5)},
}


@NEVER
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("accumulate", [1, 3])
def test_steps_go_on_as_in_the_plain_loop(options, accumulate):
    def script(diary: Diary) -> None:
        model = Counting()
        optimizer = sgd(model)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)

        def fn(batch: Any) -> dict[str, Any]:
            loss = loss_of(model, batch)
            return {"loss": loss, "double": loss * 2, "calls": model.calls}

        step = diary.step(fn, model=model, optimizer=optimizer, **OPTIONS[options]())
        for index, batch in enumerate(batches(60)):
            last = index % accumulate == accumulate - 1
            found = (step if last else step.accumulate)(batch)
            diary.write("calls", found["calls"])
            diary.write("loss", [found["loss"], found["double"]])
            diary.write_state(model, optimizer)
            if last:
                scheduler.step()
        if diary.graphed:
            assert step._rest == math.inf and step.report().steps == 60, str(step.report())
            assert not found["loss"].requires_grad

    report = both(script, **NO_GRAPH)
    assert len(report.fallbacks) == 2, str(report)  # each said once


@NEVER
def test_a_step_that_raises_is_no_part_of_an_accumulation():
    def script(diary: Diary) -> None:
        model = Counting()
        optimizer = sgd(model)
        step = diary.step(lambda b: loss_of(model, b), model=model, optimizer=optimizer)
        for index, batch in enumerate(batches(50)):
            if index == 40:
                with pytest.raises(IndexError):
                    step((batch[0], batch[1] + 7))
            diary.write("loss", step(batch))
            diary.write_state(model, optimizer)

    both(script, **NO_GRAPH)


@NEVER
def test_what_is_no_loss_is_told():
    model, value = Counting(), [0]

    def fn(batch: Any) -> Any:
        loss = loss_of(model, batch)
        return [loss, loss.detach(), loss.expand(1), None][value[0]]

    step = GraphedStep(fn, model=model, optimizer=sgd(model), config=CONFIG)
    for batch in batches(40):
        step(batch)
    assert step._rest == math.inf
    value[0] = 1
    with pytest.raises(RuntimeError, match="does not require grad"):  # as in a plain loop
        step(batch)
    for value[0] in (2, 3):
        with pytest.raises(TypeError, match="must return the loss"):
            step(batch)
    value[0] = 0
    step(batch)
    step.close()
    step(batch)


@NEVER
def test_raising_for_a_failure_says_so_once():
    model = Counting()
    step = GraphedStep(
        lambda b: loss_of(model, b), model=model, optimizer=sgd(model), config=CONFIG, on_failure="raise"
    )
    raised = 0
    for batch in batches(40):
        try:
            step(batch)
        except PyGraphError:
            raised += 1
    assert 1 <= raised <= 2 and step._rest == math.inf


def test_a_graph_of_the_optimizer_goes_on():
    """Forward and backward can have none, the update can."""

    def script(diary: Diary) -> None:
        model = Counting()
        optimizer = adamw(model)
        step = diary.step(lambda b: loss_of(model, b), model=model, optimizer=optimizer)
        for batch in batches(60):
            diary.write("loss", step(batch))
            diary.write_state(model, optimizer)
        assert not diary.graphed or step._rest < math.inf

    report = both(script, replays=20)
    assert report.optimizer_steps_replayed >= 20, str(report)


def calls_of(step: Callable[[], Any]) -> Counter[str]:
    """How often a step calls functions of Python, by name: a measure of time that no other process disturbs."""
    counts: Counter[str] = Counter()

    def note(frame: Any, event: str, arg: Any) -> None:
        if event == "call":
            counts[frame.f_code.co_qualname if sys.version_info >= (3, 11) else frame.f_code.co_name] += 1

    step()
    sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(None)
    return counts


@NEVER
def test_a_step_needs_few_calls_more_than_the_plain_loop():
    counts = []
    for made in (PlainStep, GraphedStep):
        model = Counting()
        optimizer, batch = sgd(model), batches(1)[0]
        options = {"config": CONFIG} if made is GraphedStep else {}
        step = made(lambda b, model=model: loss_of(model, b), model=model, optimizer=optimizer, **options)
        for _ in range(60):
            step(batch)
        counts.append(calls_of(lambda step=step, batch=batch: step(batch)))
    plain, ours = counts
    more = ours - plain
    assert sum(ours.values()) - sum(plain.values()) <= 6, more


def test_an_accelerate_loop_gets_its_module_back():
    pytest.importorskip("accelerate")
    from accelerate_training import Numbers, fresh_state
    from torch.utils.data import DataLoader

    import pygraph_train.backend as backend
    from pygraph_train import Accelerator, PyGraph

    def train(ours: bool, whole: bool) -> tuple[list[Any], Counter[str], Any]:
        torch.manual_seed(0)
        torch.compiler.reset()
        backend.reset()
        plugin = PyGraph(engine="emulated", warmup_steps=2)
        accelerator: Any = Accelerator(cpu=True, plugins=[plugin] if ours else [])
        raw = Counting()
        model, optimizer, loader = accelerator.prepare(raw, sgd(raw), DataLoader(Numbers(640), batch_size=8))

        def step(batch: dict[str, Tensor]) -> Tensor:
            loss = loss_of(model, (batch["x"], batch["y"]))
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            return loss

        made = accelerator.graphed_step(step) if ours and whole else step
        found: list[Any] = []
        for batch in loader:
            found.append(made(batch).detach().clone())
        found += [p.detach().clone() for p in raw.parameters()]
        if ours:
            loop_steps = plugin.report().steps
            assert compiled_call(raw) is None
            assert loop_steps + (made.report().steps if whole else 0) >= 80, str(plugin.report())
            assert any("get no graphs" in f.reason for f in plugin.report().fallbacks), str(plugin.report())
        counts = calls_of(lambda: made(batch))
        if ours:
            assert plugin.report().steps >= loop_steps + 2
            accelerator.end_training()
        return found, counts, plugin

    with fresh_state():
        expected, plain, _ = train(ours=False, whole=False)
    for whole in (False, True):
        with fresh_state():
            found, ours, _ = train(ours=True, whole=whole)
        assert all(map(torch.equal, expected, found))
        assert sum(ours.values()) - sum(plain.values()) <= 12, ours - plain


def test_a_loop_that_was_given_up_takes_over_what_comes_later():
    pytest.importorskip("accelerate")
    from accelerate_training import Numbers, fresh_state
    from torch.utils.data import DataLoader

    from pygraph_train import Accelerator, PyGraph

    with fresh_state():
        torch.compiler.reset()
        plugin = PyGraph(engine="emulated", warmup_steps=2)
        accelerator: Any = Accelerator(cpu=True, plugins=[plugin])
        raw = Counting()
        model, optimizer, loader = accelerator.prepare(raw, sgd(raw), DataLoader(Numbers(640), batch_size=8))
        for batch in loader:
            accelerator.backward(loss_of(model, (batch["x"], batch["y"])))
            optimizer.step()
            optimizer.zero_grad()
        before = plugin.report().steps
        assert compiled_call(raw) is None and before == 80
        late = nn.Linear(6, 3)
        model, other = accelerator.prepare(late, adamw(late))
        for batch in loader:
            accelerator.backward(loss_of(model, (batch["x"], batch["y"])))
            other.step()
            other.zero_grad()
        report = plugin.report()
        assert report.optimizer_steps_replayed >= 40 and report.steps == before + 80, str(report)
        assert sum(r.replays for r in report.regions()) >= 40, str(report)


@NEVER
def test_a_trainer_of_lightning_gets_its_loop_back():
    pytest.importorskip("lightning.pytorch")
    import lightning.pytorch as pl
    from lightning_training import Module, parity

    seen: list[dict[str, Any]] = []

    class Counts(Module):
        def __init__(self) -> None:
            super().__init__("sgd", "step", fused=False)
            self.net = Counting()

    class Look(pl.Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            loop = trainer.fit_loop.epoch_loop.automatic_optimization
            patched = {
                "run": getattr(vars(loop).get("run"), "__name__", None),
                "step": "optimizer_step" in vars(trainer.precision_plugin),
                "metrics": "metrics" in vars(trainer.fit_loop.epoch_loop._results),
                "passed over": [c.on_after_backward for c in trainer.callbacks].count(None),
            }
            seen.append(patched)

    _, graphed = parity(
        Counts,
        lambda: [Look()],
        refused="is written by the step",
        max_epochs=4,
        validate=True,
    )
    assert graphed.report.steps == 44, str(graphed.report)
    plain, ours = seen[3], seen[7]
    assert plain == {"run": None, "step": False, "metrics": False, "passed over": 0}
    assert ours == {"run": "counted", "step": False, "metrics": False, "passed over": 1}, ours
