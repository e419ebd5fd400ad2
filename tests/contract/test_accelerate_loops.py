"""`Accelerator(plugins=[PyGraph()])`: a loop as it is, and `graphed_step`."""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import softplus
from torch.optim.lr_scheduler import CosineAnnealingLR

import pygraph_train
from pygraph_train import PyGraph, PyGraphError
from pygraph_train.core.recording import RecordedRegion

from .compare import ENGINE, Run, compare, same_as_plain
from .frameworks import accelerator, forget_accelerators, graphed_step, loader, train_compiled
from .models import DEVICE, Net, adamw, batches, cross_entropy, sgd

Accelerator = pytest.importorskip("accelerate").Accelerator


def prepared(run: Run, accelerator: Any, steps: int = 24, **net: Any) -> tuple[Any, ...]:
    """Model, optimizer, loader and schedule, watched."""
    model = Net(**net)
    optimizer = adamw(model)
    schedule = CosineAnnealingLR(optimizer, T_max=steps)
    made = accelerator.prepare(model, optimizer, loader(batches(steps)), schedule)
    run.watch(*made[:2])
    return made


@pytest.mark.notices(
    "the last tensor of a batch is not copied", "learning rates are not copied to the device"
)
@same_as_plain(replays=12)
def test_a_stock_loop(run: Run) -> None:
    accelerate = accelerator(run)
    model, optimizer, data, schedule = prepared(run, accelerate)
    for x, y in run.each(data):
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        accelerate.backward(loss)
        accelerate.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        schedule.step()
        run.note("loss and rate", [loss, schedule.get_last_lr()])


@same_as_plain(replays=5, updates=4)
def test_a_stock_loop_with_closures(run: Run) -> None:
    """They are called where the optimizer steps, at the end of an accumulation."""
    accelerate = accelerator(run, gradient_accumulation_steps=3)
    model, optimizer, data, schedule = prepared(run, accelerate)
    for x, y in run.each(data):
        with accelerate.accumulate(model):

            def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
                loss = cross_entropy(model(x), y)
                accelerate.backward(loss)
                run.note("loss", loss)
                return loss

            optimizer.step(closure)
            schedule.step()
            optimizer.zero_grad()


@same_as_plain(replays=12)
def test_hooks_come_and_go_in_the_middle_of_an_accumulation(run: Run) -> None:
    """The gradient of the micro-batch before lies where a replay puts the next one."""
    accelerate = accelerator(run, gradient_accumulation_steps=3)
    model, optimizer, data, _ = prepared(run, accelerate, 45)
    norms: list[Tensor] = []
    for number, (x, y) in enumerate(run.each(data)):
        if number % 7 == 1:
            weight = accelerate.unwrap_model(model).second.weight
            handle = weight.register_post_accumulate_grad_hook(lambda p: norms.append(p.grad.norm()))
        with accelerate.accumulate(model):
            loss = cross_entropy(model(x), y)
            accelerate.backward(loss)
            run.note("gradients", [p.grad for p in model.parameters()])
            optimizer.step()
            optimizer.zero_grad()
        if number % 7 == 3:
            handle.remove()
    run.note("norms", norms)


@same_as_plain(replays=12)
def test_graphs_are_released_before_the_last_backward(run: Run) -> None:
    accelerate = accelerator(run)
    model, optimizer, data, _ = prepared(run, accelerate, 24)
    for number, (x, y) in enumerate(run.each(data)):
        loss = cross_entropy(model(x), y)
        if number == 20:
            accelerate.end_training()
        loss.backward()
        run.note("gradients", [p.grad for p in model.parameters()])
        optimizer.step()
        optimizer.zero_grad()


HABITS: dict[str, Any] = {
    "two forwards before their backwards": lambda loop, x, y: [loop(x, y), loop(y=y, x=x * 2)],
    "one of them with fewer rows": lambda loop, x, y: [loop(x, y), loop(x[:5], y[:5])],
    "a forward that nobody asks for a backward": lambda loop, x, y: loop(x, y) and [loop(x, y)],
    "a backward that is made twice": lambda loop, x, y: loop(x, y, twice=True),
    "gradients are added up": lambda loop, x, y: loop(x, y, adds=True),
    "gradients are set to zero": lambda loop, x, y: loop(x, y, to_none=False),
    "gradients are read after the next forward": lambda loop, x, y: loop(x, y, reads=True),
}


@pytest.mark.parametrize("habit", HABITS)
def test_a_loop_takes_up_another_habit(habit: str) -> None:
    """Until then each step has made one forward, and emptied its gradients before the next one."""

    def training(run: Run) -> None:
        accelerate = accelerator(run)
        model, optimizer, data, _ = prepared(run, accelerate, 40)

        def loss_of(x: Tensor, y: Tensor, **options: bool) -> Any:
            loss = cross_entropy(model(x), y)
            if not options:
                return loss
            if options.get("twice"):
                loss.backward(retain_graph=True)
            if options.get("reads"):
                run.note("gradients of the step before", [p.grad for p in model.parameters()])
                optimizer.zero_grad()
            accelerate.backward(loss)
            if not options.get("adds") or number % 3 == 0:
                optimizer.step()
                if not options.get("reads"):
                    optimizer.zero_grad(set_to_none=options.get("to_none", True))
            return []

        for number, (x, y) in enumerate(run.each(data)):
            losses = [loss_of(x, y)] if number % 20 < 12 else HABITS[habit](loss_of, x, y)
            for loss in losses:
                accelerate.backward(loss)
            run.note("losses", (losses, [p.grad for p in model.parameters()]))
            if losses:
                optimizer.step()
                optimizer.zero_grad()

    compare(training, replays=8, updates=8)


class _Teacher(Net):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        _count()
        return super().forward(x)


def _count() -> None:
    if not torch.compiler.is_compiling():
        _Teacher.calls += 1


@same_as_plain(replays=12)
def test_a_teacher_without_gradients(run: Run) -> None:
    """Its calls are part of each step, so they are replayed. Those of an evaluation between two steps are not, nor are
    those of a module that a step calls again and again."""
    accelerate = accelerator(run)
    model, optimizer, data, _ = prepared(run, accelerate, 40)
    teacher, often = accelerate.prepare(_Teacher().eval(), _Teacher().eval())
    calls = []
    for number, (x, y) in enumerate(run.each(data)):
        _Teacher.calls = 0
        with torch.no_grad():
            for k in range(8):  # as a text is generated
                run.note("word", often(x[k:]))
        assert _Teacher.calls == 8, "they run as they are written"
        _Teacher.calls = 0
        with torch.no_grad():
            soft = teacher(x).softmax(1)
        loss = cross_entropy(model(x), soft) + cross_entropy(model(x), y)
        accelerate.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        run.note("loss", (loss, soft))
        calls.append(_Teacher.calls)
        if number % 20 == 19:
            with torch.no_grad():
                run.note("evaluated", [model(x) for x, _ in batches(4, 3)])
        with torch.no_grad():  # it follows the student
            for p, q in zip(teacher.parameters(), model.parameters(), strict=True):
                p.lerp_(q, 0.1)
    assert calls[0] == 1 and (not run.ours or not any(calls[14:])), calls


@pytest.mark.quick
@same_as_plain(replays=12)
def test_a_model_of_layers_of_torch(run: Run) -> None:
    """No line of its forward is the user's."""
    accelerate = accelerator(run)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = adamw(model)
    model, optimizer = accelerate.prepare(model, optimizer)
    run.watch(model, optimizer)
    for x, y in run.each(batches(24)):
        loss = cross_entropy(model(x), y)
        accelerate.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        run.note("loss", loss)


@same_as_plain(replays=24)
def test_backwards_of_all_and_of_some_parameters(run: Run) -> None:
    """Two calls in one loss. Late steps ask for gradients of some parameters, as loggers of their norms do."""
    accelerate = accelerator(run)
    model, optimizer, data, _ = prepared(run, accelerate, 40)
    some = [model.first.weight, model.norm.bias]
    for number, (x, y) in enumerate(run.each(data)):
        loss = cross_entropy(model(x), y) + 0.1 * model(x.flip(0)).square().mean()
        if number % 10 == 9:
            found = torch.autograd.grad(loss, some, retain_graph=True)
            run.note("gradients", [found, [p.grad for p in some]])
        if number % 10 == 8:
            loss.backward(inputs=some, retain_graph=True)
            run.note("gradients", [p.grad for p in model.parameters()])
            optimizer.zero_grad()
        accelerate.backward(loss, **({"retain_graph": True} if number % 7 == 6 else {}))
        optimizer.step()
        optimizer.zero_grad()
        run.note("loss", loss)


def test_a_backward_does_not_go_on_to_each_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Autograd takes microseconds for each."""
    asked = []
    backward = torch.Tensor.backward

    def noting(self: Tensor, *args: Any, **kwargs: Any) -> None:
        asked.append(kwargs.get("inputs"))
        backward(self, *args, **kwargs)

    def training(run: Run) -> None:
        accelerate = accelerator(run)
        model, optimizer, data, _ = prepared(run, accelerate)
        for x, y in run.each(data):
            accelerate.backward(cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()

    monkeypatch.setattr(Tensor, "backward", noting)
    compare(training, replays=12)
    ours = asked[len(asked) // 2 :]
    assert ours[0] is None and ours[-1] is not None and len(ours[-1]) == 1


def test_a_frozen_network_has_graphs_of_its_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a teacher does, or a generator while the other network is trained. Its norm still counts batches."""
    replay, made = RecordedRegion.replay_forward, []

    def noting(self: RecordedRegion, *given: Any) -> Any:
        made.append(self.region.inference)
        return replay(self, *given)

    def training(run: Run) -> None:
        accelerate = accelerator(run)
        model, optimizer, data, _ = prepared(run, accelerate)
        teacher = accelerate.prepare(Net().requires_grad_(False))
        run.watch(teacher)
        for x, y in run.each(data):
            accelerate.backward(cross_entropy(model(x), y) + (model(x) - teacher(x)).square().mean())
            optimizer.step()
            optimizer.zero_grad()

    monkeypatch.setattr(RecordedRegion, "replay_forward", noting)
    compare(training, replays=12)
    assert made.count(True) >= 12


@same_as_plain(replays=12, updates=24)
def test_gradients_that_move_every_few_steps(run: Run) -> None:
    """The optimizer's graph gets copies: captures would not pay."""
    accelerate = accelerator(run)
    model, optimizer, data, _ = prepared(run, accelerate, 56)
    homes = [[torch.empty_like(p) for p in model.parameters()] for _ in range(7)]
    for number, (x, y) in enumerate(run.each(data)):
        accelerate.backward(cross_entropy(model(x), y))
        for p, home in zip(model.parameters(), homes[number // 8], strict=True):
            p.grad = home.copy_(p.grad)
        optimizer.step()
        optimizer.zero_grad()


@same_as_plain(replays=12, updates=0)
def test_gradients_of_two_models_are_clipped_together(run: Run) -> None:
    """Each optimizer holds the parameters of one."""
    accelerate = accelerator(run)
    model, optimizer, data, _ = prepared(run, accelerate)
    head, other = accelerate.prepare(head := nn.Linear(3, 3), adamw(head))
    run.watch(head, other)
    for x, y in run.each(data):
        loss = cross_entropy(head(model(x)), y)
        accelerate.backward(loss)
        norm = accelerate.clip_grad_norm_([*model.parameters(), *head.parameters()], 0.1)
        for each in (optimizer, other):
            each.step()
            each.zero_grad()
        run.note("loss and norm", [loss, norm])


@same_as_plain(replays=8)
def test_a_stock_loop_that_accumulates(run: Run) -> None:
    accelerate = accelerator(run, gradient_accumulation_steps=3)
    model, optimizer, data, schedule = prepared(run, accelerate, 47)
    for x, y in run.each(data):
        with accelerate.accumulate(model):
            loss = cross_entropy(model(x), y)
            accelerate.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        run.note("loss", [loss, accelerate.sync_gradients, optimizer.step_was_skipped])


@same_as_plain(replays=24, updates=20, max_signatures=1)
def test_one_of_two_forwards_has_a_further_shape(run: Run) -> None:
    """Its gradients are added where graphs put theirs, before them or behind them."""
    accelerate = accelerator(run)
    model, optimizer, data, _ = prepared(run, accelerate, 40)
    for number, (x, y) in enumerate(run.each(data)):
        rows = [8, 8 if number < 10 or number % 3 else 5]
        losses = [cross_entropy(model(x[:k]), y[:k]) for k in (rows if number % 2 else reversed(rows))]
        accelerate.backward(losses[0] + 2 * losses[1])
        optimizer.step()
        optimizer.zero_grad()
        run.note("losses", losses)


@same_as_plain(replays=12)
def test_a_stock_loop_under_mixed_precision(run: Run) -> None:
    accelerate = accelerator(run, mixed_precision="bf16")
    model, optimizer, data, _ = prepared(run, accelerate)
    for x, y in run.each(data):
        out = model(x)
        loss = cross_entropy(out, y)
        run.note("results", [out, loss])
        accelerate.backward(loss)
        optimizer.step()
        optimizer.zero_grad()


@same_as_plain(replays=12)
def test_a_stock_loop_that_logs_and_evaluates(run: Run) -> None:
    """Reads of the loss on the host, gathered metrics, and a validation every fifth step."""
    accelerate = accelerator(run)
    model, optimizer, data, _ = prepared(run, accelerate)
    total = 0.0
    for number, (x, y) in enumerate(run.each(data)):
        loss = cross_entropy(model(x), y)
        total += loss.item()
        accelerate.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        run.note("gathered", accelerate.gather_for_metrics(loss.detach()[None]))
        if number % 5 == 4:
            model.eval()
            with torch.no_grad():
                run.note("validation", [cross_entropy(model(x), y).item() for x, y in batches(2, seed=2)])
            model.train()
    run.note("total", total)


@pytest.mark.notices(
    "the last tensor of a batch is not copied", "learning rates are not copied to the device"
)
@same_as_plain(replays=15)
def test_a_graphed_step(run: Run) -> None:
    accelerate = accelerator(run)
    model, optimizer, data, schedule = prepared(run, accelerate)

    def step(x: Tensor, y: Tensor) -> dict[str, Tensor]:
        out = model(x)
        loss = cross_entropy(out, y)
        accelerate.backward(loss)
        norm = accelerate.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        return {"loss": loss, "out": out, "norm": norm}

    step = graphed_step(run, accelerate, step)
    for batch in data:
        step(*batch)
        run.note("rate", schedule.get_last_lr())


@same_as_plain(replays=20, updates=8)
def test_a_graphed_step_that_accumulates(run: Run) -> None:
    accelerate = accelerator(run, gradient_accumulation_steps=3)
    model, optimizer, data, schedule = prepared(run, accelerate, 47)

    def step(x: Tensor, y: Tensor) -> Tensor:
        with accelerate.accumulate(model):
            loss = cross_entropy(model(x), y)
            accelerate.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        return loss

    step = graphed_step(run, accelerate, step)
    for batch in data:
        step(*batch)


@same_as_plain(replays=12)
def test_training_resumes_from_a_saved_state(run: Run) -> None:
    accelerate = accelerator(run)
    model, optimizer, data, schedule = prepared(run, accelerate, 36)
    for number, (x, y) in enumerate(run.each(data)):
        loss = cross_entropy(model(x), y)
        accelerate.backward(loss)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if number == 15:
            accelerate.save_state(str(run.folder / "saved"))
        if number == 25:
            accelerate.load_state(str(run.folder / "saved"))
    run.note("saved weights", accelerate.get_state_dict(model))


def of_inputs(model: nn.Module, x: Tensor, loss: Tensor) -> Tensor:
    """As an adversarial batch is made: no parameter gets a gradient."""
    points = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(points).square().mean(), points)
    return loss + 0.1 * slope.sign().mean()


def of_parameters(model: nn.Module, x: Tensor, loss: Tensor) -> Tensor:
    """As two losses are balanced."""
    last = list(model.parameters())[-1]
    found = torch.autograd.grad(loss, [last], retain_graph=True)
    return loss * (1 + found[0].norm())


def in_place(model: nn.Module, x: Tensor, loss: Tensor) -> Tensor:
    loss *= 2
    return loss


@pytest.mark.parametrize("begins", [0, 14])
@pytest.mark.parametrize("ask", [of_inputs, of_parameters, in_place])
@pytest.mark.quick
def test_a_loop_that_asks_for_gradients_itself(ask: Any, begins: int) -> None:
    def training(run: Run) -> None:
        accelerate = accelerator(run)
        model, optimizer, data, _ = prepared(run, accelerate, dropout=0.0)
        for number, (x, y) in enumerate(run.each(data)):
            loss = cross_entropy(model(x), y)
            if number >= begins:
                loss = ask(model, x, loss)
            accelerate.backward(loss)
            optimizer.step()
            optimizer.zero_grad()

    compare(training, replays=12, updates=8)


@pytest.mark.notices("backwards that keep the graph are not noticed")
@pytest.mark.parametrize("every", [1, 9])
def test_backwards_that_keep_the_graph_now_and_then(every: int) -> None:
    """A recorded backward overwrites what its forward has saved, which another backward reads."""

    def training(run: Run) -> None:
        accelerate = accelerator(run)
        model, optimizer, data, _ = prepared(run, accelerate)
        for number, (x, y) in enumerate(run.each(data)):
            loss = cross_entropy(model(x), y)
            if number % every == every - 1:
                accelerate.backward(loss, retain_graph=True)
            accelerate.backward(loss * 2)
            optimizer.step()
            optimizer.zero_grad()

    compare(training, replays=12, updates=8)


@pytest.mark.notices("recordings overwrite each other's activations")
@same_as_plain(replays=24)
def test_two_models_whose_forwards_are_pending_together_now_and_then(run: Run) -> None:
    """Recordings that are not pending together share memory."""
    accelerate = accelerator(run)
    one, of_one, data, _ = prepared(run, accelerate, steps=32)
    other, of_other, _, _ = prepared(run, accelerate, steps=32)
    for number, (x, y) in enumerate(run.each(data)):
        if number % 3 == 0 or number > 24:
            together = cross_entropy(one(x), y), cross_entropy(other(x), y)
            for loss in together:
                accelerate.backward(loss)
        else:
            for model in (one, other):
                accelerate.backward(cross_entropy(model(x), y))
        for optimizer in (of_one, of_other):
            optimizer.step()
            optimizer.zero_grad()


class ReadsTwice(torch.autograd.Function):
    """Its backward asks for what it has saved two times, with a computation in between."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x.sin())
        return x.cos()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (sine,) = ctx.saved_tensors
        scaled = gradient * sine
        del sine
        scaled = scaled * 1.5 - scaled * 0.5
        return -scaled + 0 * ctx.saved_tensors[0]


@torch.compiler.allow_in_graph
def reads_twice(x: Tensor) -> Any:
    return ReadsTwice.apply(x)


@same_as_plain(replays=12)
def test_a_backward_that_reads_twice_what_it_has_saved(run: Run) -> None:
    class Waves(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.second(reads_twice(self.first(x)))

    accelerate, model = accelerator(run), Waves()
    model, optimizer = accelerate.prepare(model, adamw(model))
    run.watch(model, optimizer)
    for x, y in run.each(batches()):
        accelerate.backward(cross_entropy(model(x), y))
        optimizer.step()
        optimizer.zero_grad()


@same_as_plain(replays=12)
def test_a_backward_outside_of_the_autocast_of_its_forward(run: Run) -> None:
    class Exact(nn.Module):
        """Computes its last layer in float32."""

        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            h = torch.tanh(self.first(x))
            with torch.autocast("cpu", enabled=False):
                return self.last(h.float())

    accelerate, model = accelerator(run), Exact()
    model, optimizer = accelerate.prepare(model, adamw(model))
    run.watch(model, optimizer)
    for x, y in run.each(batches()):
        with torch.autocast("cpu", torch.bfloat16):
            out = model(x)
        accelerate.backward(cross_entropy(out, y))
        optimizer.step()
        optimizer.zero_grad()


@same_as_plain(refused="one graph has no gradient of a result from which another one is computed")
def test_the_gradient_of_a_hidden_state(run: Run) -> None:
    class Hidden(Net):
        def forward(self, x: Tensor) -> Any:
            hidden = self.first(x)
            return hidden, self.second(torch.tanh(hidden))

    accelerate, model = accelerator(run), Hidden()
    model, optimizer = accelerate.prepare(model, adamw(model))
    run.watch(model, optimizer)
    for x, y in run.each(batches()):
        hidden, out = model(x)
        loss = cross_entropy(out, y)
        (found,) = torch.autograd.grad(loss, hidden, retain_graph=True)
        run.note("gradient", found)
        accelerate.backward(loss)
        optimizer.step()
        optimizer.zero_grad()


class Features(Net):
    """Returns what its results are computed from, and what no gradient goes through."""

    def forward(self, x: Tensor) -> Any:
        hidden = torch.tanh(self.first(x))
        logits = self.second(hidden)
        return hidden, logits, logits.argmax(1)


@pytest.mark.parametrize("asks", ["retain_grad", "hook", "grad"])
@same_as_plain(refused="one graph has no gradient of a result from which another one is computed")
def test_the_gradient_of_features_beside_predictions(run: Run, asks: str) -> None:
    """Predictions come from the logits, but no gradient goes through them."""
    accelerate, model = accelerator(run), Features()
    model, optimizer = accelerate.prepare(model, adamw(model))
    run.watch(model, optimizer)
    for x, y in run.each(batches()):
        hidden, logits, predicted = model(x)
        run.note("predicted", predicted)
        loss = cross_entropy(logits, y) + 0.1 * hidden.square().mean()
        if asks == "retain_grad":
            hidden.retain_grad()
        elif asks == "hook":
            hidden.register_hook(lambda g: g * 0.5)
        else:
            run.note("asked", torch.autograd.grad(loss, hidden, retain_graph=True))
        accelerate.backward(loss)
        run.note("gradient", hidden.grad if asks == "retain_grad" else None)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("asks", ["retain_grad", "hook"])
def test_a_gradient_of_features_that_no_graph_has_is_refused(asks: str) -> None:
    """It is asked for after graphs were made, which have no such gradient."""

    def training(run: Run) -> None:
        accelerate, model = accelerator(run), Features()
        model, optimizer = accelerate.prepare(model, adamw(model))
        run.watch(model, optimizer)
        for number, (x, y) in enumerate(run.each(batches(20))):
            hidden, logits, _ = model(x)
            loss = cross_entropy(logits, y) + hidden.square().mean()
            if number < 18:
                accelerate.backward(loss)
                optimizer.step()
            else:
                hidden.retain_grad() if asks == "retain_grad" else hidden.register_hook(lambda g: -g)
                with (
                    pytest.raises(PyGraphError, match="computed, for the first time")
                    if run.ours
                    else nullcontext()
                ):
                    accelerate.backward(loss)
                break
            optimizer.zero_grad()

    compare(training, replays=10, updates=0)


@pytest.mark.parametrize("by", ["hand", "an update"])
@same_as_plain(
    replays=10, updates=0, last_bits=DEVICE == "cuda"
)  # kernels that tell autograd are no fused ones
def test_weights_that_change_before_their_backward(run: Run, by: str) -> None:
    """Plain training raises: the gradient would be that of other weights."""
    accelerate, model = accelerator(run), Net()
    model, optimizer = accelerate.prepare(model, sgd(model, fused=False))
    run.watch(model, optimizer)
    for number, (x, y) in enumerate(run.each(batches(24))):
        out = model(x)
        accelerate.backward(cross_entropy(out, y), retain_graph=True)
        if number == 20 and by == "hand":
            with torch.no_grad():
                accelerate.unwrap_model(model).second.weight.mul_(0.9)
        else:
            optimizer.step()
        if number >= 20:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                accelerate.backward(out.square().mean())
            break
        optimizer.zero_grad()


def test_a_training_that_is_over_is_freed() -> None:
    """A search over hyperparameters makes an Accelerator for each trial."""
    over = []
    for _ in range(3):
        forget_accelerators()
        plugin = PyGraph(engine=ENGINE, forward="on", print_report=False)
        accelerate = pygraph_train.Accelerator(cpu=DEVICE == "cpu", plugins=[plugin])
        model = Net()
        prepared, optimizer = accelerate.prepare(model, adamw(model))
        for x, y in batches():
            accelerate.backward(cross_entropy(prepared(x), y))
            optimizer.step()
            optimizer.zero_grad()
        assert accelerate.pygraph.report().to_dict()["phases_from_graphs"]["F"] >= 12
        over.append(weakref.ref(model))
        del accelerate, plugin, model, prepared, optimizer, x, y
        gc.collect()
        gc.collect()
    assert [reference() for reference in over] == [None] * 3


class Undefined(torch.autograd.Function):
    """Its backward has no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> None:
        return None


@pytest.mark.notices("absent gradients are zero")
@same_as_plain(replays=12)
def test_a_result_without_a_gradient(run: Run) -> None:
    accelerate, model = accelerator(run), Features()
    model, optimizer = accelerate.prepare(model, adamw(model))
    run.watch(model, optimizer)
    for x, y in run.each(batches(24)):
        hidden, logits, _ = model(x)
        accelerate.backward(cross_entropy(logits, y) + Undefined.apply(hidden).mean())
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.notices("absent gradients are zero")
@same_as_plain(replays=8)
def test_heads_that_take_turns(run: Run) -> None:
    """In each step one head has gradients and the other one has none, which an update tells from zeros."""

    class Heads(Net):
        def __init__(self) -> None:
            super().__init__()
            self.other = nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Any:
            hidden = torch.tanh(self.first(x))
            return self.second(hidden), self.other(hidden)

    accelerate, model = accelerator(run), Heads()
    model, optimizer = accelerate.prepare(model, adamw(model))
    run.watch(model, optimizer)
    for number, (x, y) in enumerate(run.each(batches(36))):
        accelerate.backward(cross_entropy(model(x)[number % 2], y))
        run.note("which", [p.grad is None for p in model.parameters()])
        optimizer.step()
        optimizer.zero_grad()


def gan(run: Run, prepare: Any) -> tuple[Any, ...]:
    """Two networks and their optimizers, watched."""
    maker, judge = nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1))
    made = prepare(maker, judge, adamw(maker), adamw(judge))
    run.watch(*made)
    return made


@same_as_plain(refused="a step of several backwards")
def test_a_graphed_step_of_a_gan(run: Run) -> None:
    accelerate = accelerator(run)
    maker, judge, of_maker, of_judge = gan(run, accelerate.prepare)

    def step(x: Tensor, y: Tensor) -> Tensor:
        made = maker(x)
        of_judge.zero_grad()
        loss = softplus(judge(made.detach())).mean() + softplus(-judge(x)).mean()
        accelerate.backward(loss)
        of_judge.step()
        of_maker.zero_grad()
        accelerate.backward(softplus(-judge(made)).mean())
        of_maker.step()
        return loss

    step = graphed_step(run, accelerate, step)
    for batch in loader(batches()):
        step(*batch)


@same_as_plain(replays=12, updates=0)
def test_the_compile_backend_with_a_stock_accelerator(run: Run) -> None:
    forget_accelerators()
    accelerate = Accelerator(cpu=DEVICE == "cpu")
    train_compiled(run, accelerate.prepare, accelerate.backward)


class ViewsItsInput(nn.Sequential):
    """No graph can hold it."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), x[:2]


@same_as_plain(refused="a part has no graph, so no step has one as a whole")
def test_steps_of_which_a_part_has_no_graph_are_not_told_as_whole(run: Run) -> None:
    accelerate, body = accelerator(run), nn.Sequential(nn.Linear(6, 8), nn.Tanh())
    head = ViewsItsInput(*[nn.Linear(8, 8) for _ in range(4)])
    body, head, optimizer = accelerate.prepare(body, head, adamw(nn.ModuleList([body, head])))
    run.watch(body, head, optimizer)
    for x, _ in run.each(batches(30)):
        accelerate.backward(head(body(x))[0].square().mean())
        optimizer.step()
        optimizer.zero_grad()
    if run.ours:
        assert accelerate.pygraph.report().phases_from_graphs["F"] == 0


SMALL = "the model has too few operations"
IN_PLACE = "it writes in place what it is given, and gradients go through that"
MANY = "is called more than 4 times before its backward"


@pytest.mark.parametrize("why", [SMALL, IN_PLACE, MANY])
def test_why_there_is_no_graph(why: str) -> None:
    def training(run: Run) -> None:
        accelerate = accelerator(run)
        model: nn.Module = nn.Linear(6, 3) if why is SMALL else nn.Sequential(nn.Linear(6, 3), nn.Tanh())
        first = nn.Linear(6, 6)
        if why is IN_PLACE:
            model = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(6, 3), nn.Tanh())
        model, optimizer = accelerate.prepare(model, adamw(nn.ModuleList([first, model])))
        run.watch(model, optimizer)
        for x, y in run.each(batches(24)):
            given = [first(x) if why is IN_PLACE else x + i for i in range(5 if why is MANY else 1)]
            accelerate.backward(sum(cross_entropy(out, y) for out in map(model, given)))
            optimizer.step()
            optimizer.zero_grad()
        if run.ours:
            assert why in accelerate.pygraph.report().headline(), run

    compare(training, refused=why, last_bits=why is MANY)


@same_as_plain(refused=SMALL)
def test_small_modules_are_told_of_together(run: Run) -> None:
    accelerate, body, head = accelerator(run), nn.Linear(6, 8), nn.Linear(8, 3)
    body, head, optimizer = accelerate.prepare(body, head, adamw(nn.ModuleList([body, head])))
    run.watch(body, head, optimizer)
    for x, y in run.each(batches(24)):
        accelerate.backward(cross_entropy(head(body(x)), y))
        optimizer.step()
        optimizer.zero_grad()
    if run.ours:
        assert SMALL in accelerate.pygraph.report().headline()
