"""Forward and backward in graphs of their own: the user's Python runs on every step, and nothing changes."""

from __future__ import annotations

import contextvars
import gc
import io
import random
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from replays import enough, text_of
from torch import Tensor, nn
from training import CONFIG, Diary, Net, adamw, batches, both, line_of, loss_of, sgd

from pygraph_train import GraphedStep, PyGraphConfig, StepReport
from pygraph_train.selection import timing
from pygraph_train.selection.arms import NOTHING, REGIONS, SEPARATE
from pygraph_train.selection.controller import Estimate
from pygraph_train.step import regions as regions_module
from pygraph_train.step.decisions import Decisions


def in_regions(report: StepReport, *, plan: str = "{F} {B} {O}", least: int = 20) -> StepReport:
    """Assert that a test which claims parity really replayed, and no phase that the plan leaves out."""
    assert report.plan == plan, str(report)
    wanted = {name for name in ("forward", "backward") if "{" + name[0].upper() + "}" in plan}
    assert wanted <= {r.phase for r in report.regions() if r.replays >= least}, str(report)
    assert {r.phase for r in report.regions() if r.replays} <= wanted, str(report)
    return report


def training(make_step: Any, *, steps: int = 60, accumulate: int = 1, make_optimizer: Any = adamw) -> Any:
    """A script over `make_step(model, diary)`."""

    def script(diary: Diary) -> None:
        model = Net()
        optimizer = make_optimizer(model)
        step = diary.step(make_step(model, diary), model=model, optimizer=optimizer, max_grad_norm=0.1)
        for index, batch in enumerate(batches(steps)):
            last = index % accumulate == accumulate - 1
            diary.write("loss", (step if last else step.accumulate)(batch))
            diary.write_state(model, optimizer)

    return script


class Accuracy(nn.Module):
    """Like a torchmetrics metric: Python state beside its tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.updates = 0
        self.seen: list[int] = []
        self.register_buffer("right", torch.zeros(()))

    def forward(self, out: Tensor, target: Tensor) -> Tensor:
        self.updates += 1
        self.seen.append(len(target))
        self.right += (out.argmax(1) == target).sum()
        return self.right / sum(self.seen)


def with_metric(model: Net, diary: Diary) -> Any:
    metric = Accuracy()

    def step_fn(batch: Any) -> Any:
        out = model(batch[0])
        accuracy = metric(out.detach(), batch[1])
        diary.write("metric", (metric.updates, len(metric.seen)))
        return {"loss": nn.functional.cross_entropy(out, batch[1]), "accuracy": accuracy}

    return step_fn


def with_host_read(model: Net, diary: Diary) -> Any:
    def step_fn(batch: Any) -> Tensor:
        hidden = torch.relu(model.norm(model.first(batch[0])))
        scale = 1.0 if hidden.mean().item() > 1e9 else 2.0
        print(scale, file=io.StringIO())
        return nn.functional.cross_entropy(model.second(model.dropout(hidden)) * scale, batch[1])

    return step_fn


def with_print(model: Net, diary: Diary) -> Any:
    def step_fn(batch: Any) -> Tensor:
        loss = loss_of(model)(batch)
        print(float(loss), file=io.StringIO())
        diary.write("read", float(loss))
        return loss

    return step_fn


MAKERS = pytest.mark.parametrize("make_step", [with_metric, with_host_read, with_print])


@pytest.mark.notices("inputs of regions are not copied")
@MAKERS
@pytest.mark.parametrize("make_optimizer", [adamw, sgd])
def test_python_in_the_step_runs_and_the_rest_is_in_graphs(make_step, make_optimizer):
    report = in_regions(both(training(make_step, make_optimizer=make_optimizer), replays=20))
    assert report.optimizer_steps_replayed >= 20
    assert report.steps_replayed == 0


@pytest.mark.slow
@MAKERS
@pytest.mark.parametrize("accumulate", [2, 3])
def test_accumulation_in_regions(make_step, accumulate):
    in_regions(both(training(make_step, steps=60 * accumulate, accumulate=accumulate), replays=205))


@pytest.mark.slow
@MAKERS
def test_the_optimizer_outside(make_step):
    report = in_regions(both(training(make_step), optimizer="off", replays=70), plan="{F} {B} O")
    assert report.optimizer_steps_replayed == 0


def test_phases_that_may_not_share_a_graph():
    report = in_regions(both(training(lambda model, diary: loss_of(model)), fuse="off", replays=20))
    assert report.optimizer_steps_replayed >= 20
    assert "fuse='off'" in report.fallbacks[0].reason


class Counting(Net):
    """Counts its calls; `used` says whether a tensor is computed from the count, `breaks` whether it is read."""

    def __init__(self, used: str, breaks: bool) -> None:
        super().__init__()
        self.calls, self.pairs, self.used, self.breaks = 0, 0, used, breaks

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.pairs = self.calls // 2
        if self.breaks:
            print(x.sum().item(), file=io.StringIO())
        if self.used == "as a factor":
            x = x * self.calls
        elif self.used == "as a size":
            x = x - x[: self.calls].sum(0)
        return super().forward(x)


@pytest.mark.parametrize("breaks", [False, True])
@pytest.mark.parametrize("used", ["nowhere", "as a factor", "as a size"])
def test_a_counter_in_the_forward_of_a_module(used, breaks):
    """Graphs are for any count where no tensor depends on it."""

    def script(diary: Diary) -> None:
        model = Counting(used, breaks)
        optimizer = adamw(model)
        step = diary.step(loss_of(model), model=model, optimizer=optimizer)
        for batch in batches(48, size=64):
            diary.write("loss", step(batch))
            diary.write("counts", (model.calls, model.pairs))
            diary.write_state(model, optimizer)

    report = both(script, fuse="off", replays=10)  # the optimizer has a graph in any case
    ran = [r for r in report.regions() if r.ran]
    if used == "nowhere":
        assert {r.phase for r in ran} >= {"forward", "backward"}
        assert all(r.replays >= 20 for r in ran), str(report)
    else:  # the model is left as it is, as if it were traced anew on every step
        assert breaks or not any(r.replays for r in ran), str(report)


ONE_PHASE = pytest.mark.parametrize(
    ("switches", "plan"),
    [
        ({"backward": "off"}, "{F} B {O}"),
        ({"forward": "off"}, "F {B} {O}"),
        ({"backward": "off", "optimizer": "off"}, "{F} B O"),
        ({"forward": "off", "optimizer": "off"}, "F {B} O"),
        ({"forward": "on", "backward": "off"}, "{F} B {O}"),
    ],
    ids=str,
)


@pytest.mark.slow
@ONE_PHASE
@pytest.mark.parametrize("make_step", [with_metric, with_host_read, lambda model, diary: loss_of(model)])
def test_a_phase_that_is_off_has_no_graph(make_step, switches, plan):
    report = in_regions(both(training(make_step), **switches, replays=20), plan=plan)
    asked = next(f"{name}='off'" for name in ("forward", "backward") if switches.get(name) == "off")
    assert any(asked in f.reason for f in report.fallbacks)
    assert (report.optimizer_steps_replayed >= 20) == plan.endswith("{O}"), str(report)


@pytest.mark.slow
@ONE_PHASE
@pytest.mark.parametrize("accumulate", [2, 3])
def test_accumulation_with_one_phase_off(accumulate, switches, plan):
    script = training(with_print, steps=60 * accumulate, accumulate=accumulate)
    in_regions(both(script, **switches, replays=90), plan=plan)


def test_forward_and_backward_off():
    report = both(training(with_metric), forward="off", backward="off", replays=40)
    assert report.plan == "F B {O}" and not report.regions(), str(report)
    assert any("forward='off', backward='off'" in f.reason for f in report.fallbacks)


def test_gradient_hooks_run_on_every_step():
    def script(diary: Diary) -> None:
        model = Net()
        optimizer = adamw(model)
        norms: list[Tensor] = []
        model.second.weight.register_hook(lambda g: norms.append(g.norm().clone()))
        step = diary.step(loss_of(model), model=model, optimizer=optimizer)
        for batch in batches(60):
            step(batch)
            diary.write("norms", norms)
            diary.write_state(model, optimizer)

    in_regions(both(script, replays=125))


def test_a_step_that_differentiates_its_gradients_stays_as_it_is():
    """Compiled backwards cannot be differentiated."""

    def script(diary: Diary) -> None:
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        optimizer = adamw(model)

        def step_fn(batch: Any) -> Tensor:
            torch._dynamo.graph_break()  # else the whole step is one graph
            x = batch[0].clone().requires_grad_(True)
            out = model(x)
            (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
            return nn.functional.cross_entropy(out, batch[1]) + slope.square().mean()

        step = diary.step(step_fn, model=model, optimizer=optimizer)
        for batch in batches(30):
            diary.write("loss", step(batch))
            diary.write_state(model, optimizer)

    report = both(script, replays=16)
    (note,) = [note for note in report.notes if "create_graph=True" in note]
    assert report.plan == "F B {O}" and __file__ in note, str(report)


@pytest.mark.slow
def test_other_shapes_and_frozen_layers():
    def script(diary: Diary) -> None:
        model = Net()
        optimizer = adamw(model)
        step = diary.step(with_print(model, diary), model=model, optimizer=optimizer)
        for index, (x, y) in enumerate(batches(120)):
            if index in (60, 80):
                model.first.requires_grad_(index == 80)
            size = 5 if index % 10 == 9 else 8
            step((x[:size], y[:size]))
            diary.write_state(model, optimizer)

    in_regions(both(script, replays=230))


def test_gradients_asked_for_in_the_step_do_not_have_dynamo_trace_the_library(monkeypatch):
    """FGSM: `autograd.grad` in Python between two regions."""
    traced: list[str] = []
    compile_frame = torch._dynamo.convert_frame.compile_frame  # type: ignore[attr-defined]

    def noted(code: Any, *args: Any, **kwargs: Any) -> Any:
        traced.append(code.co_filename)
        return compile_frame(code, *args, **kwargs)

    monkeypatch.setattr(torch._dynamo.convert_frame, "compile_frame", noted)

    def script(diary: Diary) -> None:
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        optimizer = sgd(model)

        def step_fn(batch: Any) -> Tensor:
            torch._dynamo.graph_break()  # else the whole step is one graph
            x, y = batch
            noise = torch.zeros_like(x, requires_grad=True)
            (slope,) = torch.autograd.grad(nn.functional.cross_entropy(model(x + noise), y), noise)
            return nn.functional.cross_entropy(model(x + 0.1 * slope.sign()), y)

        step = diary.step(step_fn, model=model, optimizer=optimizer)
        for batch in batches(40):
            diary.write("loss", step(batch))
            diary.write_state(model, optimizer)

    in_regions(both(script, replays=125))
    library = Path(regions_module.__file__).parents[1]
    # the frames that steps are traced from
    outermost = {str(library / "step" / "region_levels.py"), str(library / "tracing" / "traced_code.py")}
    assert __file__ in traced
    assert not {name for name in traced if name.startswith(str(library))} - outermost


@pytest.mark.parametrize("autocast", [False, True])
def test_dropout_in_half_precision_rounds_as_without_a_graph(autocast: bool) -> None:
    def script(diary: Diary) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 3), nn.Dropout(0.1))
        if not autocast:
            model.bfloat16()
        optimizer = adamw(model)

        def step_fn(batch: Any) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                out = model(batch[0] if autocast else batch[0].bfloat16())
            print(out.mean().item(), file=io.StringIO())
            return nn.functional.cross_entropy(out.float(), batch[1])

        step = diary.step(step_fn, model=model, optimizer=optimizer)
        for batch in batches(40):
            diary.write("loss", step(batch))
            diary.write_state(model, optimizer)

    in_regions(both(script, replays=120))


class SeveralUses(nn.Module):
    """Its weights are used more than once."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.up, self.down, self.last = (
            nn.Linear(6, 8),
            nn.Linear(8, 8),
            nn.Linear(8, 8),
            nn.Linear(8, 3),
        )
        self.down.weight = self.up.weight

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = torch.tanh(self.first(x))
        return self.last(self.down(torch.tanh(self.up(h))))  # type: ignore[no-any-return]


def _twice(model: SeveralUses, x: Tensor) -> Tensor:
    return model(x) + model(x * 0.5)  # type: ignore[no-any-return]


def _without_gradients_in_between(model: SeveralUses, x: Tensor) -> Tensor:
    out = model(x)
    with torch.no_grad():
        target = model(x * 2)
    return out - 0.1 * target  # type: ignore[no-any-return]


def _changed_in_between(model: SeveralUses, x: Tensor) -> Tensor:
    out = model.first(x)
    with torch.no_grad():
        model.first.weight.mul_(0.5)  # the cache has the old one
    return model.last(model.first(x) + out)  # type: ignore[no-any-return]


def _cast_by_hand(model: SeveralUses, x: Tensor) -> Tensor:
    half = torch.bfloat16
    h = torch.tanh(nn.functional.linear(x.to(half), model.first.weight.to(half)))
    h = h + nn.functional.linear(x.to(half), model.first.weight.to(half))
    return model.last(h + model.first(x) - model.first(x * 3))  # type: ignore[no-any-return]


def _in_two_blocks(model: SeveralUses, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        h = model.first(x)
    with torch.autocast("cpu", torch.bfloat16):
        h = h + model.first(x * 2)
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        return model.last(h + model.first(x) - model.first(x * 3))  # type: ignore[no-any-return]


def _checkpointed(model: SeveralUses, x: Tensor) -> Tensor:
    out = model(x)
    return model(x * 0.5) + torch.utils.checkpoint.checkpoint(lambda: out * 2, use_reentrant=False)  # type: ignore[no-any-return]


@pytest.mark.slow_after(4)
@pytest.mark.parametrize("around", [False, True], ids=["inside", "around"])
@pytest.mark.parametrize(
    "forward",
    [
        SeveralUses.__call__,
        _twice,
        _without_gradients_in_between,
        _changed_in_between,
        _cast_by_hand,
        _in_two_blocks,
        _checkpointed,
    ],
)
def test_a_weight_used_several_times_under_autocast_is_cast_as_often_as_without_a_graph(
    forward: Any, around: bool
) -> None:
    def script(diary: Diary) -> None:
        model = SeveralUses()
        optimizer = adamw(model)
        inside = forward is not _in_two_blocks and not around

        def step_fn(batch: Any) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16) if inside else nullcontext():
                out = forward(model, batch[0])
            print(out.mean().item(), file=io.StringIO())
            return nn.functional.cross_entropy(out.float(), batch[1])

        step = diary.step(step_fn, model=model, optimizer=optimizer)
        for batch in batches(40):
            with torch.autocast("cpu", torch.bfloat16, enabled=around):
                diary.write("loss", step(batch))
            diary.write_state(model, optimizer)

    in_regions(both(script, replays=40))


class Sloped(SeveralUses):
    """It reads a number that changes."""

    slope = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.slope


def used_several_times(model_of: Callable[[], nn.Module], change: Callable[[Any, int, Any], Any]) -> None:
    """Train with autocast inside of the step, and `change(model, index, batch)` giving each batch."""

    def script(diary: Diary) -> None:
        model = model_of()
        optimizer = adamw(model)

        def step_fn(batch: Any) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                out = model(batch[0])
            print(out.mean().item(), file=io.StringIO())
            return nn.functional.cross_entropy(out.float(), batch[1])

        step = diary.step(step_fn, model=model, optimizer=optimizer)
        for index, batch in enumerate(batches(60)):
            diary.write("loss", step(change(model, index, batch)))
            diary.write_state(model, optimizer)

    in_regions(both(script, replays=40))


@pytest.mark.slow
def test_a_weight_used_several_times_under_autocast_beside_a_number_that_changes() -> None:
    def change(model: Any, index: int, batch: Any) -> Any:
        model.slope = 1.0 + 0.01 * index  # Dynamo makes a tensor of it, and reads that
        return batch

    used_several_times(Sloped, change)


@pytest.mark.slow
def test_a_weight_used_several_times_under_autocast_with_any_number_of_rows() -> None:
    def change(model: Any, index: int, batch: Any) -> Any:
        rows = 8 - index % 2 * 3  # Dynamo makes a symbol of it, and an input of that
        return batch[0][:rows], batch[1][:rows]

    used_several_times(SeveralUses, change)


@pytest.mark.slow
def test_weights_that_become_one_in_mid_run() -> None:
    def script(diary: Diary) -> None:
        model = SeveralUses()
        model.down.weight = nn.Parameter(model.up.weight.detach().clone())
        optimizer = sgd(model)

        def step_fn(batch: Any) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                out = model(batch[0])
            print(out.mean().item(), file=io.StringIO())
            return nn.functional.cross_entropy(out.float(), batch[1])

        step = diary.step(step_fn, model=model, optimizer=optimizer)
        for index, batch in enumerate(batches(60)):
            if index == 30:
                model.down.weight = model.up.weight
            diary.write("loss", step(batch))
            diary.write_state(model, optimizer)

    in_regions(both(script, replays=40))


class Island(nn.Module):
    """A layer in single precision under autocast."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        with torch.autocast("cpu", enabled=False):
            return self.last(h.float())  # type: ignore[no-any-return]


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("around", [range(0), range(30, 50), range(100)], ids=["never", "a while", "always"])
def test_a_backward_has_the_autocast_that_surrounds_it(inside: bool, around: range) -> None:
    def script(diary: Diary) -> None:
        model = Island()
        optimizer = sgd(model)

        def step_fn(batch: Any) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16, enabled=inside):
                out = model(batch[0])
                print(out.mean().item(), file=io.StringIO())  # the model is traced inside of the block
                return nn.functional.cross_entropy(out.float(), batch[1])

        step = diary.step(step_fn, model=model, optimizer=optimizer)
        for index, batch in enumerate(batches(70)):
            with torch.autocast("cpu", torch.bfloat16, enabled=index in around):
                diary.write("loss", step(batch))
            diary.write_state(model, optimizer)

    in_regions(both(script, replays=30), least=15)


class AnyRows(nn.Module):
    """A parameter that works with any number of rows. Another one may be changed beside autograd."""

    def __init__(self, clamps: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.words = nn.Linear(6, 3), nn.Parameter(torch.randn(20, 6))
        self.clamps = clamps

    def forward(self, x: Tensor) -> Tensor:
        if self.clamps:
            self.layer.weight.data.clamp_(-0.2, 0.2)
        return self.layer(x * self.words.mean())  # type: ignore[no-any-return]


@pytest.mark.parametrize("clamps", [False, True])
@pytest.mark.parametrize("cut", [2, 3, 6, 30])
def test_a_parameter_gets_another_shape(cut: int, clamps: bool) -> None:
    """Whoever held the autograd graph of a step would hold the shape that autograd expects of a gradient."""

    def script(diary: Diary) -> None:
        model = AnyRows(clamps)
        optimizer = sgd(model, momentum=0)

        def step_fn(batch: Any) -> Tensor:
            out = model(batch[0])
            print(out.mean().item(), file=io.StringIO())
            return nn.functional.cross_entropy(out, batch[1])

        step = diary.step(step_fn, model=model, optimizer=optimizer)
        for index, batch in enumerate(batches(60)):
            if index == cut:
                model.words.data = model.words.data[:10]
                model.words.grad = None
            diary.write("loss", step(batch))
            diary.write_state(model, optimizer)

    in_regions(both(script, replays=40), plan="{F} {B} {O}")


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(6, 8)
        self.heads = nn.ModuleList(nn.Linear(8, 3) for _ in range(2))

    def forward(self, x: Tensor) -> list[Tensor]:
        hidden = self.body(x).relu()
        return [head(hidden) for head in self.heads]


def test_heads_that_take_turns_keep_no_gradient_while_it_is_not_theirs():
    def script(diary: Diary) -> None:
        model, seen, turn = Heads(), [], [0]
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1, fused=True)

        def step_fn(batch: Any) -> Tensor:
            outs = model(batch[0])
            seen.append(outs[0].mean().item())
            print(seen[-1], file=io.StringIO())
            return nn.functional.cross_entropy(outs[turn[0]], batch[1])

        step = diary.step(step_fn, model=model, optimizer=optimizer)
        for index, batch in enumerate(batches(80)):
            turn[0] = index // 20 % 2
            diary.write("loss", step(batch))
            diary.write_state(model, optimizer)

    report = both(script, replays=150)
    replays = {r.phase: r.replays for r in report.regions()}
    assert replays["forward"] >= 20 and replays["backward"] >= 20, str(report)


def test_a_model_that_changes_on_every_step_stays_as_it_is():
    class Counting(Net):
        count = 0

        def forward(self, x: Tensor) -> Tensor:
            self.count += 1
            return super().forward(x).clamp(max=1 + self.count / 1000)

    def script(diary: Diary) -> None:
        model = Counting()
        optimizer = adamw(model)
        step = diary.step(loss_of(model), model=model, optimizer=optimizer)
        for batch in batches(100):
            step(batch)
            diary.write_state(model, optimizer)

    report = both(script, replays=30)
    assert report.steps_replayed == 0
    assert report.plan in ("F B {O}", "{F} {B} {O}"), str(report)
    assert not any(region.replays for region in report.regions())
    assert all(region.settled for region in report.regions()), str(report)


@pytest.mark.slow
@pytest.mark.parametrize("best", [SEPARATE, REGIONS], ids=str)
def test_a_step_that_could_be_fused_may_be_faster_in_regions(best, monkeypatch):
    monkeypatch.setattr(timing, "declared_seconds", lambda arm: 0.5 if arm.plan == best else 1.0)
    monkeypatch.setattr(Decisions, "_estimate", lambda *args: Estimate())
    report = both(training(lambda model, diary: loss_of(model), steps=260), replays=340)
    in_regions(report, plan=str(best))


@pytest.mark.slow
def test_no_graphs_may_win_over_regions(monkeypatch):
    monkeypatch.setattr(timing, "declared_seconds", lambda arm: 0.5 if arm.plan == NOTHING else 1.0)
    monkeypatch.setattr(Decisions, "_estimate", lambda *args: Estimate())
    assert both(training(with_metric, steps=160), replays=50).plan == "F B O"


@pytest.mark.slow
def test_a_compiler_that_fails_costs_no_step(monkeypatch):
    def failing(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("no compiler")

    monkeypatch.setattr("pygraph_train.regions.inductor.compile_graph", failing)
    report = both(training(with_metric), replays=30)
    assert report.plan == "F B {O}"
    assert any("no compiler" in f.reason for f in report.fallbacks), str(report)


def test_the_report_lists_the_regions():
    report = in_regions(both(training(with_metric), replays=105))
    assert "forward" in text_of(report) and "replays" in text_of(report)
    assert {r["phase"] for r in report.to_dict()["regions"]} >= {"forward", "backward"}


def test_steps_leave_nothing_behind():
    model = Net()
    optimizer = adamw(model)

    def step_fn(batch: Any) -> Tensor:
        print(end="")
        return loss_of(model)(batch)

    step = GraphedStep(
        step_fn, model=model, optimizer=optimizer, config=PyGraphConfig(engine="emulated", warmup_steps=2)
    )
    left = []
    (batch,) = batches(1)
    for number in range(90):
        step(batch)
        if number % 30 == 29:
            gc.collect()
            kinds = Counter(type(o).__name__ for o in gc.get_objects())
            left.append((len(contextvars.copy_context()), kinds["Tensor"] + kinds["Parameter"]))
    assert step.report().plan == "{F} {B} {O}"
    assert left[1] == left[2], left


@pytest.mark.parametrize("what", ["random", "item"])
def test_dynamo_gives_no_advice_to_a_loop_that_never_asked_for_it(what, caplog):
    model = Net()
    optimizer = adamw(model)

    def step_fn(batch):
        loss = loss_of(model)(batch)
        if what == "random":
            return loss.clamp(max=100 + random.random())
        return loss * int(loss.item() > 0)

    step = GraphedStep(step_fn, model=model, optimizer=optimizer, config=CONFIG)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for batch in batches(30):
            step(batch)
    enough([step.report()], replays=30)
    assert not [str(w.message) for w in caught if "Dynamo" in str(w.message)]
    assert not [r for r in caplog.records if "Graph break" in str(r.msg) and r.levelname == "WARNING"]
    if what == "random":
        (told,) = [f for f in step.report().fallbacks if "random numbers in Python" in f.reason]
        assert told.where == line_of(step_fn, "loss.clamp(") and "torch" in told.fix
