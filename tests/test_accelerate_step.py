"""`accelerator.graphed_step`: a whole step of an Accelerate loop as one graph, or as it is with the reason."""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from replays import text_of
from torch import nn
from torch.utils.data import DataLoader

accelerate = pytest.importorskip("accelerate")

from accelerate_training import Island, Numbers, Script, both, fresh, loss_of, run, setup  # noqa: E402, F401
from training import Net  # noqa: E402

from pygraph_train import Accelerator, PyGraph, PyGraphError  # noqa: E402
from pygraph_train.selection import timing  # noqa: E402
from pygraph_train.selection.controller import Estimate  # noqa: E402
from pygraph_train.step.decisions import Decisions  # noqa: E402


def train(script: Script, *, clip: str | None = None, zero_first: bool = False, **options: Any) -> None:
    """The loop of Accelerate's documentation, its body a function."""
    accelerator = script.accelerator
    model, optimizer, loader, schedule = setup(script, **options)

    @script.graphed
    def step(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        with accelerator.accumulate(model):
            if zero_first:
                optimizer.zero_grad()
            loss = loss_of(model, batch)
            accelerator.backward(loss)
            result = {"loss": loss, "double": loss.detach() * 2}
            if accelerator.sync_gradients and clip == "norm":
                result["norm"] = accelerator.clip_grad_norm_(model.parameters(), 0.5)
            if accelerator.sync_gradients and clip == "value":
                accelerator.clip_grad_value_(model.parameters(), 0.01)
            optimizer.step()
            schedule.step()
            if not zero_first:
                optimizer.zero_grad()
        return result

    for batch in loader:
        script.write("result", step(batch))
        script.write("rate", schedule.get_last_lr())
    script.write_state(model, optimizer)


@pytest.mark.parametrize("owner", ["prepared", "inner"])
@pytest.mark.parametrize("whole", [True, False])
def test_a_scheduler_made_in_mid_run_warns_of_nothing(owner, whole):
    def script(script: Script) -> None:
        model, optimizer, loader, _ = setup(script)
        step = plain_step(script, model, optimizer)
        if not whole:
            step = step.__wrapped__ if hasattr(step, "__wrapped__") else step
        scheduler = None
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for index, batch in enumerate(loader):
                if index == 20:
                    of = optimizer if owner == "prepared" else optimizer.optimizer
                    scheduler = torch.optim.lr_scheduler.ExponentialLR(of, 0.9)
                script.write("loss", step(batch))
                if scheduler is not None:
                    scheduler.step()
        script.write(
            "warnings", [str(w.message) for w in caught if "`lr_scheduler.step()`" in str(w.message)]
        )
        script.write("called", [vars(o).get("_opt_called") for o in (optimizer, optimizer.optimizer)])

    report = both(script, compiled_reference=not whole, replays=20)
    replays = [r.steps_replayed for r in report.whole_steps.values()] if whole else []
    assert max([report.optimizer_steps_replayed, *replays]) >= 15, str(report)


def plain_step(script: Script, model: nn.Module, optimizer: Any) -> Callable[..., torch.Tensor]:
    """Forward, backward, update, and nothing else."""
    accelerator = script.accelerator

    @script.graphed
    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss = loss_of(model, batch)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def whole(report: Any, least: int = 20, plan: str = "{F B O}") -> Any:
    """The report of the one graphed step, which has to have replayed."""
    ((_, step),) = report.whole_steps.items()
    assert step.steps_replayed >= least, str(report)
    assert step.plan == plan, str(report)
    return step


@pytest.mark.notices(
    "the last tensor of a batch is not copied",
    "gradients pile up in graphs",
    "learning rates are not copied to the device",
)
@pytest.mark.parametrize("zero_first", [False, True])
@pytest.mark.parametrize("clip", [None, "norm", "value"])
def test_whole_step(clip: str | None, zero_first: bool) -> None:
    def script(script: Script) -> None:
        train(script, clip=clip, zero_first=zero_first)

    whole(both(script, replays=20))


@pytest.mark.parametrize("clip", [None, "norm"])
def test_accumulation_with_a_ragged_last_group(clip: str | None) -> None:
    # 30 micro-batches in groups of 4: Accelerate steps after the last one, too
    whole(both(lambda script: train(script, clip=clip), gradient_accumulation_steps=4, replays=10), least=12)


def test_bf16_with_outputs_converted_to_fp32() -> None:
    whole(both(train, mixed_precision="bf16", replays=20))


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("clip", [False, True])
def test_a_scaler_skips_steps_with_overflow(clip: bool, fused: bool) -> None:
    def script(script: Script) -> None:
        accelerator = script.accelerator
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**126, growth_interval=4)
        model, optimizer, loader, _ = setup(script, fused=fused)

        @script.graphed
        def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
            loss = loss_of(model, batch) * 64  # overflows whenever the scale has grown
            accelerator.backward(loss)
            if clip:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            return loss

        scales = []
        for batch in loader:
            script.write("loss", step(batch))
            script.write("scaler", accelerator.scaler.state_dict())
            scales.append(accelerator.scaler.get_scale())
        script.write_state(model, optimizer)
        assert sum(now < before for before, now in pairwise(scales)) > 5, "few steps were skipped"

    whole(both(script, replays=20), plan="{F B O}" if fused else "{F B} O")


def backward_under_autocast(script: Script, inside: Callable[[int], bool]) -> None:
    accelerator, flag = script.accelerator, [False]
    model: Any = Island()
    made: Any = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    model, optimizer, loader = accelerator.prepare(model, made, DataLoader(Numbers(), batch_size=8))

    @script.graphed
    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model, batch)
        with torch.autocast("cpu", torch.bfloat16, enabled=flag[0]):
            accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    for k, batch in enumerate(loader):
        flag[0] = inside(k)
        script.write("loss", step(batch))
        script.write_state(model, optimizer)


@pytest.mark.parametrize("inside", [False, True])
def test_a_backward_has_the_autocast_of_the_block_that_it_is_called_in(inside: bool) -> None:
    whole(both(lambda script: backward_under_autocast(script, lambda k: inside), replays=20))


@pytest.mark.parametrize("begins", [False, True])
def test_a_backward_that_is_called_under_another_autocast_later_is_noticed(begins: bool) -> None:
    def script(script: Script) -> None:
        backward_under_autocast(script, lambda k: begins if k < 11 else not begins)

    ((_, step),) = both(script, replays=10).whole_steps.items()
    assert step.steps_replayed > 3, str(step)
    (row,) = step.fallbacks
    assert "backward under autocast to torch.bfloat16" in row.reason, row


@pytest.mark.parametrize("best", ["{F B} {O}", "F B {O}"])
def test_gradients_that_clipping_unscales_are_unscaled_once_whichever_plan_is_tried(
    best: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What clipping finds out of overflows is in new tensors, where a graph of the update alone would not look."""
    monkeypatch.setattr(timing, "declared_seconds", lambda arm: 0.01 if str(arm.plan) == best else 1.0)
    monkeypatch.setattr(Decisions, "_estimate", lambda *args: Estimate())  # all plans are tried

    def script(script: Script) -> None:
        accelerator = script.accelerator
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**126, growth_interval=4)
        model, optimizer, loader, _ = setup(script, count=8 * 120)
        accelerator.native_amp = True  # clipping unscales with these
        accelerator.state._mixed_precision = "fp16"

        @script.graphed
        def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
            loss = loss_of(model, batch) * 64
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            return loss

        for batch in loader:
            script.write("loss", step(batch))
            script.write("scaler", accelerator.scaler.state_dict())
        script.write_state(model, optimizer)

    step = whole(both(script, replays=60), least=60)
    assert any("the optimizer gets no graph of its own" in f.reason for f in step.fallbacks), str(step)


def test_accumulate_around_the_step() -> None:
    def script(script: Script) -> None:
        accelerator = script.accelerator
        model, optimizer, loader, _ = setup(script)
        step = plain_step(script, model, optimizer)
        for batch in loader:
            with accelerator.accumulate(model):
                script.write("loss", step(batch))
        script.write_state(model, optimizer)

    whole(both(script, gradient_accumulation_steps=2, replays=19), least=15)


def test_model_and_optimizer_used_outside_of_the_step_in_between() -> None:
    def script(script: Script) -> None:
        accelerator = script.accelerator
        model, optimizer, loader, _ = setup(script)
        step = plain_step(script, model, optimizer)
        for index, batch in enumerate(loader):
            script.write("loss", step(batch))
            if index % 3 == 0:
                with torch.no_grad():
                    script.write("guess", model(batch["x"]))
            if index % 5 == 0:  # a step by hand
                accelerator.backward(model(batch["x"]).square().mean())
                optimizer.step()
                optimizer.zero_grad()
            if index % 7 == 0:  # gradients left behind are added to
                accelerator.backward(model(batch["x"]).square().mean())
        script.write_state(model, optimizer)

    whole(both(script, replays=30), least=15)


def test_two_graphed_steps_for_two_optimizers() -> None:
    def script(script: Script) -> None:
        accelerator = script.accelerator
        first, second = nn.Linear(6, 6), nn.Linear(6, 1)
        one = torch.optim.AdamW(first.parameters(), lr=1e-2, fused=True)
        two = torch.optim.AdamW(second.parameters(), lr=1e-2, fused=True)
        first, second, one, two = accelerator.prepare(first, second, one, two)

        @script.graphed
        def judge(x: torch.Tensor) -> torch.Tensor:
            two.zero_grad()
            loss = nn.functional.softplus(second(first(x).detach())).mean()
            accelerator.backward(loss)
            two.step()
            return loss

        @script.graphed
        def make(x: torch.Tensor) -> torch.Tensor:
            one.zero_grad()
            loss = nn.functional.softplus(-second(first(x))).mean()
            accelerator.backward(loss)
            one.step()
            return loss

        for x in torch.randn(30, 8, 6):
            script.write("losses", [judge(x), make(x)])
        script.write_state(first, one)
        script.write_state(second, two)

    report = both(script, replays=16)
    assert [step.steps_replayed > 15 for step in report.whole_steps.values()] == [True, True], str(report)


@pytest.mark.parametrize("leaves", ["first", "second", "both"])
def test_two_graphed_steps_share_an_optimizer_and_one_is_given_up(
    leaves: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop takes the optimizer back when no graphed step is left that has it."""
    owners: list[bool] = []  # whether the loop has the optimizer, before each step

    def script(script: Script) -> None:
        accelerator = script.accelerator
        model, optimizer, loader, schedule = setup(script, count=480)
        clips = {"first": False, "second": False}

        def made(name: str, factor: float) -> Callable[..., Any]:
            def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
                loss = loss_of(model, batch) * factor
                accelerator.backward(loss)
                if clips[name]:  # another call than when the step was watched
                    accelerator.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
                return loss

            step.__name__ = name
            return script.graphed(step)

        one, two = made("first", 1.0), made("second", 0.5)
        for k, batch in enumerate(loader):
            clips["first"] = k >= 20 and leaves != "second"
            clips["second"] = k >= 24 and leaves != "first"
            script.write("loss", (two if k % 2 else one)(batch))
            script.write("rate", [group["lr"] for group in optimizer.optimizer.param_groups])
            plugin = getattr(accelerator, "pygraph", None)
            if plugin is not None:
                owners.append(not next(iter(plugin._the_loop()._optimizers)).suspended)
        script.write_state(model, optimizer)

    report = both(script, replays=12)
    rows = {name: [row.reason for row in step.fallbacks] for name, step in report.whole_steps.items()}
    given_up = [name for name, reasons in rows.items() if any("other calls" in why for why in reasons)]
    assert given_up == (["first", "second"] if leaves == "both" else [leaves]), rows
    assert not any(owners[4:20])
    assert owners[-1] == (leaves == "both"), owners


def illegal(body: Callable[..., Any], *, replays: int = 50, **options: Any) -> str:
    """Train with a step that cannot be graphed as a whole. Returns the reason that the report gives.

    Graphs of its phases run `replays` times.
    """

    def script(script: Script) -> None:
        model, optimizer, loader, schedule = setup(script)
        step = script.graphed(lambda batch: body(script.accelerator, model, optimizer, schedule, batch))
        for batch in loader:
            script.write("result", step(batch))
        script.write_state(model, optimizer)

    report = both(script, replays=replays, **options)
    ((_, step),) = report.whole_steps.items()
    assert step.steps_replayed == 0
    (fallback,) = step.fallbacks
    return fallback.reason


@pytest.mark.parametrize("prepared", ["nothing", "model", "optimizer"])
def test_a_step_that_trains_what_was_not_prepared(prepared: str) -> None:
    def script(script: Script) -> None:
        accelerator = script.accelerator
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        if prepared == "model":
            model = accelerator.prepare(model)
        if prepared == "optimizer":
            optimizer = accelerator.prepare(optimizer)

        @script.graphed
        def step(x: torch.Tensor) -> torch.Tensor:
            loss = model(x).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            return loss

        for x in torch.randn(30, 8, 6):
            script.write("loss", step(x))
            script.write_state(model, optimizer)

    if prepared == "nothing":
        report = both(script, refused="6 tensors that this Accelerator did not prepare")
    else:
        report = both(script, replays=20)
    (step,) = report.whole_steps.values()
    if prepared == "nothing":
        assert "accelerator.prepare(model, optimizer)" in step.fallbacks[0].fix
    elif prepared == "optimizer":
        assert step.steps_replayed > 15, str(report)
    else:
        assert (
            "the step calls the optimizer AdamW, which this Accelerator did not prepare"
            in step.fallbacks[0].reason
        ), str(report)


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_the_context_of_mixed_precision(precision: str) -> None:
    def script(script: Script) -> None:
        model, optimizer, loader, _ = setup(script)
        accelerator = script.accelerator

        def step(batch: Any) -> Any:
            optimizer.zero_grad()
            with accelerator.autocast():
                loss = (model(batch["x"]) @ torch.ones(3, 3)).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            return loss

        step = script.graphed(step)
        for batch in loader:
            script.write("loss", step(batch))
            script.write_state(model, optimizer)

    (step,) = both(script, replays=20, mixed_precision=precision).whole_steps.values()
    assert step.plan == "{F B O}", str(step)


def test_step_without_backward_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "pygraph_train"):
        reason = illegal(
            lambda accelerator, model, optimizer, schedule, batch: loss_of(model, batch), replays=8
        )
    assert "never calls accelerator.backward" in reason
    assert "never calls accelerator.backward" in caplog.text


@pytest.mark.parametrize("at", [1, 3, 4, 5, 19], ids=lambda n: f"in step {n}")
@pytest.mark.parametrize("after", ["backward", "clip", "step", "schedule"])
def test_what_a_step_has_called_before_it_raises_is_made(after: str, at: int) -> None:
    """Gradients of the backward add up to those of the next step, as in plain training."""

    def script(script: Script) -> None:
        accelerator = script.accelerator
        model, optimizer, loader, schedule = setup(script)

        @script.graphed
        def step(batch: dict[str, torch.Tensor], stop: str) -> torch.Tensor:
            loss = loss_of(model, batch)
            accelerator.backward(loss)
            if stop == "backward":
                raise ValueError(stop)
            accelerator.clip_grad_norm_(model.parameters(), 0.5)
            if stop == "clip":
                raise ValueError(stop)
            optimizer.step()
            if stop == "step":
                raise ValueError(stop)
            schedule.step()
            if stop == "schedule":
                raise ValueError(stop)
            optimizer.zero_grad()
            return loss

        for index, batch in enumerate(loader):
            try:
                script.write("loss", step(batch, after if index == at else ""))
            except ValueError as error:
                script.write("error", str(error))
            script.write_state(model, optimizer)
            script.write("rate", schedule.get_last_lr())

    both(script, replays=15, plan=None)


def test_code_that_looks_at_gradients_after_backward() -> None:
    def body(accelerator: Any, model: Any, optimizer: Any, schedule: Any, batch: Any) -> Any:
        optimizer.zero_grad()
        accelerator.backward(loss_of(model, batch))
        norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
        optimizer.step()
        return norm

    assert "the step reads model.first.weight.grad" in illegal(body)


def test_python_number_that_depends_on_what_is_put_off() -> None:
    def body(accelerator: Any, model: Any, optimizer: Any, schedule: Any, batch: Any) -> Any:
        optimizer.zero_grad()
        accelerator.backward(loss_of(model, batch))
        optimizer.step()
        schedule.step()
        return schedule.get_last_lr()[0]

    assert "returns a Python number" in illegal(body)


def test_a_list_that_grows_grows_after_replays() -> None:
    seen: list[Any] = []

    def body(accelerator: Any, model: Any, optimizer: Any, schedule: Any, batch: Any) -> Any:
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        accelerator.backward(loss)
        optimizer.step()
        seen.append(loss.detach())
        return loss

    def script(script: Script) -> None:
        model, optimizer, loader, schedule = setup(script)
        seen.clear()
        step = script.graphed(lambda batch: body(script.accelerator, model, optimizer, schedule, batch))
        for batch in loader:
            script.write("result", step(batch))
            script.write("seen", list(seen))
        script.write_state(model, optimizer)

    whole(both(script, replays=20))


def test_a_list_that_is_read_is_found_by_tracing() -> None:
    seen: list[Any] = []

    def body(accelerator: Any, model: Any, optimizer: Any, schedule: Any, batch: Any) -> Any:
        optimizer.zero_grad()
        seen.append(1)
        loss = loss_of(model, batch) + 0 * len(seen)
        accelerator.backward(loss)
        optimizer.step()
        return loss

    assert "is written by the step, and replay runs no Python" in illegal(body)
    assert len(seen) == 60


def test_what_cannot_be_graphed_as_a_whole_runs_in_regions() -> None:
    def script(script: Script) -> None:
        accelerator = script.accelerator
        model, optimizer, loader, _ = setup(script)
        losses: list[float] = []

        @script.graphed
        def step(batch: dict[str, torch.Tensor]) -> None:
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            accelerator.backward(loss)
            optimizer.step()
            losses.append(loss.item())
            print(losses[-1], file=io.StringIO())

        for batch in loader:
            step(batch)
        script.write("losses", losses)
        script.write_state(model, optimizer)

    report = both(script, replays=11)
    assert report.present_plan() == "{F} {B} {O}", str(report)
    assert report.steps_replayed > 10, str(report)


def test_on_failure_raise_raises() -> None:
    accelerator = Accelerator(cpu=True, plugins=[PyGraph(engine="emulated", on_failure="raise")])
    model = accelerator.prepare(Net())
    step = accelerator.graphed_step(lambda x: model(x))
    with pytest.raises(PyGraphError, match="never calls accelerator"):
        step(torch.randn(4, 6))


def test_graphs_off_runs_the_step_as_it_is() -> None:
    plugin = PyGraph(engine="off")
    run(train, plugin)
    assert "Graphs are off" in text_of(plugin.report())


def test_decorator_keeps_name_and_docstring() -> None:
    accelerator = Accelerator(cpu=True, plugins=[PyGraph(engine="emulated")])

    @accelerator.graphed_step()
    def my_step() -> None:
        """Mine."""

    assert my_step.__name__ == "my_step" and my_step.__doc__ == "Mine."
    assert my_step.report().steps == 0


@pytest.mark.notices("replays keep the hyperparameters of their capture")
@pytest.mark.parametrize("whole", [True, False], ids=["graphed step", "stock loop"])
def test_one_cycle_with_its_defaults_stays_in_the_graph(whole):
    def script(script: Script) -> None:
        accelerator, model = script.accelerator, Net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=40)
        loader = DataLoader(Numbers(), batch_size=8)
        model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)

        def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
            loss = loss_of(model, batch)
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            return loss

        made = script.graphed(step) if whole else step
        for batch in loader:
            script.write("loss", made(batch))
            script.write_state(model, optimizer)

    report = both(script, replays=20, compiled_reference=not whole)
    plans = [r.plan for r in report.whole_steps.values()] if whole else ["{O}"]
    assert plans == ["{F B O}" if whole else "{O}"], str(report)
    assert whole or report.optimizer_steps_replayed >= 20, str(report)


@pytest.mark.parametrize("when", ["always", "later", "by turns"])
def test_a_step_gets_one_tensor_twice(when):
    def script(script: Script) -> None:
        accelerator = script.accelerator
        model, optimizer, loader, _ = setup(script)

        @script.graphed
        def step(x: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            loss = loss_of(model, batch) + (model(x) * (2.0 if x is batch["x"] else 3.0)).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            return loss

        for index, batch in enumerate(loader):
            same = {"always": True, "later": index > 10, "by turns": index % 2 == 1}[when]
            script.write("loss", step(batch["x"] if same else batch["x"].clone(), batch))
            script.write_state(model, optimizer)

    report = both(script, replays=18)
    assert [r.plan for r in report.whole_steps.values()] == ["{F B O}"], str(report)


@pytest.mark.parametrize("graphed", [True, False])
def test_the_optimizer_inside_of_a_prepared_one_is_replaced(graphed: bool) -> None:
    def script(script: Script) -> None:
        model, optimizer, loader, _ = setup(script)
        step = plain_step(script, model, optimizer)
        step = step if graphed else getattr(step, "__wrapped__", step)
        for index, batch in enumerate([*loader, *loader]):
            if index in (20, 40):
                make = torch.optim.SGD if index == 20 else torch.optim.AdamW
                optimizer.optimizer = make(model.parameters(), lr=1e-2, fused=True)
            script.write("loss", step(batch))
            script.write_state(model, optimizer)

    report = both(script, replays=60)
    assert report.optimizer_steps_replayed >= 25, str(report)
    rows = [f.reason for row in report.whole_steps.values() for f in row.fallbacks]
    assert not graphed or any("the optimizer inside of a prepared one was replaced" in row for row in rows)


def test_the_optimizer_is_replaced_between_two_updates_of_accumulation() -> None:
    def script(script: Script) -> None:
        accelerator = script.accelerator
        model, optimizer, loader, _ = setup(script)

        @script.graphed
        def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
            with accelerator.accumulate(model):
                loss = loss_of(model, batch)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            return loss

        for index, batch in enumerate(loader):
            if index == 13:
                optimizer.optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, fused=True)
            script.write("loss", step(batch))
            script.write("an update follows", accelerator.sync_gradients)
        script.write_state(model, optimizer)

    both(script, gradient_accumulation_steps=3, replays=4)
