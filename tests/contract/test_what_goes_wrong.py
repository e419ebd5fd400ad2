"""What goes wrong in a training: it ends, or goes on, as a plain one does."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pygraph_train import GraphedStep
from tests.faults import nothing_is_captured, replays_are_wrong

from .compare import ENGINE, PlainStep, Run, same_as_plain
from .models import DEVICE, Net, adamw, batches, cross_entropy, loss_of, sgd

EARLY_AND_LATE = (0, 1, 4, 6, 14, 15, 25)
"""Steps in the warm-up, around the first capture, and among replays."""

# -- exceptions ----------------------------------------------------------------------------------------------------


@pytest.mark.skipif(DEVICE == "cuda", reason="CUDA is of no use to a process behind a bad label")
@same_as_plain(replays=15)
def test_a_bad_label_is_an_error_of_its_step(run: Run) -> None:
    model = Net()
    step = run.step(loss_of(model), model=model, optimizer=adamw(model))
    for number, (x, y) in enumerate(batches(36)):
        with run.may_raise(IndexError):
            step((x, y + 100 if number in EARLY_AND_LATE else y))


@same_as_plain(replays=15)
def test_a_batch_of_the_wrong_width_is_an_error_of_its_step(run: Run) -> None:
    model = Net()
    step = run.step(loss_of(model), model=model, optimizer=adamw(model))
    for number, (x, y) in enumerate(batches(36)):
        with run.may_raise(RuntimeError):
            step((x[:, :5] if number in EARLY_AND_LATE else x, y))


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt, StopIteration])
@pytest.mark.quick
@same_as_plain(replays=8)
def test_an_exception_behind_the_forward(run: Run, kind: type[BaseException]) -> None:
    """BatchNorm and random states are those after the forward; the update did not happen."""
    model, state = Net(), {"raises": False, "calls": 0}

    def step_fn(x: Tensor, y: Tensor) -> Tensor:
        state["calls"] += 1
        loss = cross_entropy(model(x), y)
        if state["raises"]:
            raise kind("stopped")
        return loss

    step = run.step(step_fn, model=model, optimizer=adamw(model))
    for number, batch in enumerate(batches(40)):
        state["raises"] = number in EARLY_AND_LATE
        with run.may_raise(kind):
            step(*batch)
        run.note("state", state)


@same_as_plain(refused="a hook of Python raises in the backward")
def test_an_exception_in_the_backward(run: Run) -> None:
    model, state = Net(), {"raises": False}

    def hook(gradient: Tensor) -> Tensor:
        if state["raises"]:
            raise ValueError("in the backward")
        return gradient * 0.5

    def step_fn(x: Tensor, y: Tensor) -> Tensor:
        out = model(x)
        out.register_hook(hook)
        return cross_entropy(out, y)

    step = run.step(step_fn, model=model, optimizer=adamw(model))
    for number, batch in enumerate(batches(20)):
        state["raises"] = number in EARLY_AND_LATE
        with run.may_raise(ValueError):
            step(*batch)


@same_as_plain(replays=12, updates=0)
def test_an_exception_of_the_optimizer(run: Run) -> None:
    class Failing(torch.optim.SGD):
        fails = False

        def step(self, closure: Any = None) -> Any:
            if self.fails:
                raise ValueError("in the update")
            return super().step(closure)

    model = Net()
    optimizer = Failing(model.parameters(), lr=1e-2)
    step = run.step(loss_of(model), model=model, optimizer=optimizer)
    for number, batch in enumerate(batches(32)):
        Failing.fails = number in EARLY_AND_LATE
        with run.may_raise(ValueError):
            step(batch)


@same_as_plain(replays=8)
def test_a_loss_that_needs_no_gradient_is_autograds_error(run: Run) -> None:
    model = Net()
    step = run.step(loss_of(model), model=model, optimizer=adamw(model))
    for number, batch in enumerate(batches(30)):
        if number in (12, 20):
            with torch.no_grad(), run.may_raise(RuntimeError):
                step(batch)
        else:
            step(batch)


def test_a_step_without_a_loss_is_told_what_it_has_to_return() -> None:
    model = Net()
    for result in (None, 1.0, {"out": torch.ones(())}):
        with (
            GraphedStep(
                lambda result=result: result, model=model, optimizer=adamw(model), engine=ENGINE
            ) as step,
            pytest.raises((TypeError, ValueError, KeyError), match="loss"),
        ):
            step()


@same_as_plain(replays=12)
def test_numbers_that_are_not_finite(run: Run) -> None:
    """NaN spreads as it does in plain training, and a checkpoint brings the run back."""
    model = Net()
    optimizer = adamw(model)
    step = run.step(loss_of(model), model=model, optimizer=optimizer)
    for number, (x, y) in enumerate(batches(36)):
        if number == 10:
            saved = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
        step((x * float("nan") if number == 14 else x / 0.0 if number == 20 else x, y))
        if number == 24:
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])


# -- changes that a graph must not miss ------------------------------------------------------------------------------


class Changes:
    """Each is made between two steps of a run whose steps come from graphs."""

    @staticmethod
    def a_parameter_is_replaced(model: Net, optimizer: Any) -> None:
        old, group = model.second.weight, optimizer.param_groups[0]
        model.second.weight = new = nn.Parameter(old.detach() * 0.5)
        group["params"] = [new if p is old else p for p in group["params"]]
        del optimizer.state[old]

    @staticmethod
    def the_data_of_a_parameter_is_set(model: Net, optimizer: Any) -> None:
        model.first.weight.data = model.first.weight.data * 0.5

    @staticmethod
    def the_strides_of_a_parameter_change(model: Net, optimizer: Any) -> None:
        model.first.weight.data = model.first.weight.data.as_strided((8, 6), (1, 8))

    @staticmethod
    def parameters_are_swapped(model: Net, optimizer: Any) -> None:
        first, other = model.first.bias, model.norm.bias
        first.data, other.data = other.data, first.data

    @staticmethod
    def a_parameter_is_written_in_place(model: Net, optimizer: Any) -> None:
        with torch.no_grad():
            model.first.weight.mul_(0.5)

    @staticmethod
    def the_dtype_of_the_model_goes_there_and_back(model: Net, optimizer: Any) -> None:
        model.double().float()

    @staticmethod
    def a_layer_is_replaced(model: Net, optimizer: Any) -> None:
        model.dropout = nn.Sequential(nn.Dropout(0.5), nn.Tanh())

    @staticmethod
    def a_forward_is_replaced(model: Net, optimizer: Any) -> None:
        model.forward = lambda x: model.second(torch.tanh(model.first(x)))

    @staticmethod
    def a_method_of_the_class_is_replaced(model: Net, optimizer: Any) -> None:
        model.__class__ = type(
            "Other", (Net,), {"forward": lambda self, x: self.second(torch.relu(self.first(x)))}
        )

    @staticmethod
    def a_number_of_a_layer_is_changed(model: Net, optimizer: Any) -> None:
        model.dropout.p, model.norm.momentum, model.norm.eps = 0.6, 0.5, 1e-2

    @staticmethod
    def a_layer_is_set_to_evaluation(model: Net, optimizer: Any) -> None:
        model.norm.eval()

    @staticmethod
    def a_buffer_is_replaced(model: Net, optimizer: Any) -> None:
        model.norm.running_mean = torch.ones(8)

    @staticmethod
    def a_forward_hook_is_added(model: Net, optimizer: Any) -> None:
        model.first.register_forward_hook(lambda module, args, out: out * 1.1)

    @staticmethod
    def a_gradient_hook_is_added(model: Net, optimizer: Any) -> None:
        model.first.weight.register_hook(lambda gradient: gradient * 0.1)

    @staticmethod
    def gradients_are_not_needed_any_more(model: Net, optimizer: Any) -> None:
        model.first.requires_grad_(False)

    @staticmethod
    def numbers_of_the_optimizer_are_changed(model: Net, optimizer: Any) -> None:
        optimizer.param_groups[0].update(lr=0.1, betas=(0.5, 0.9), weight_decay=0.3, eps=1e-3)

    @staticmethod
    def the_state_of_the_optimizer_is_cleared(model: Net, optimizer: Any) -> None:
        optimizer.state.clear()

    @staticmethod
    def random_states_are_set(model: Net, optimizer: Any) -> None:
        torch.manual_seed(77)

    @staticmethod
    def the_default_dtype_is_changed_for_a_moment(model: Net, optimizer: Any) -> None:
        torch.set_default_dtype(torch.float64)
        model.first.register_buffer("late", torch.zeros(2))
        torch.set_default_dtype(torch.float32)


NOTICES = {
    "a_parameter_is_replaced": ("parameters and buffers are never looked for elsewhere",),
    "the_data_of_a_parameter_is_set": ("`.data = ...` is not noticed",),
    "a_gradient_hook_is_added": ("hooks on gradients are not noticed",),
    "the_state_of_the_optimizer_is_cleared": ("objects of the optimizer are never told apart",),
    "numbers_of_the_optimizer_are_changed": ("replays keep the hyperparameters of their capture",),
}
"""Which faults of the library (`make planted`) are noticed by which change."""

NOT_ON_CUDA = ("the_strides_of_a_parameter_change",)
"""Its fused kernels refuse such a parameter."""

CHANGES = [
    pytest.param(name, marks=pytest.mark.notices(*NOTICES.get(name, ())))
    for name in vars(Changes)
    if not name.startswith("_") and (DEVICE == "cpu" or name not in NOT_ON_CUDA)
]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.quick
@same_as_plain(replays=8)
def test_a_change_between_two_steps(run: Run, change: str) -> None:
    model = Net()
    optimizer = adamw(model)
    step = run.step(lambda x, y: cross_entropy(model(x), y), model=model, optimizer=optimizer)
    for number, batch in enumerate(batches(24)):
        if number == 13:
            getattr(Changes, change)(model, optimizer)
        step(*batch)


@same_as_plain(replays=8)
def test_the_data_of_a_parameter_is_set_in_the_step(run: Run) -> None:
    model = Net()

    def step_fn(x: Tensor, y: Tensor, clamp: bool) -> Tensor:
        if clamp:
            model.first.weight.data = model.first.weight.data.clamp(-0.1, 0.1)
        return cross_entropy(model(x), y)

    step = run.step(step_fn, model=model, optimizer=adamw(model))
    for number, batch in enumerate(batches(32)):
        step(*batch, number % 8 == 6)


@same_as_plain(replays=12)
def test_a_teacher_follows_through_its_data(run: Run) -> None:
    model = nn.ModuleDict({"student": nn.Linear(6, 3), "teacher": nn.Linear(6, 3).requires_grad_(False)})

    def step_fn(x: Tensor, y: Tensor) -> Tensor:
        out = model["student"](x)
        loss = cross_entropy(out, y) + nn.functional.mse_loss(out, model["teacher"](x))
        with torch.no_grad():
            for s, t in zip(model["student"].parameters(), model["teacher"].parameters(), strict=True):
                t.data = t.data * 0.9 + s.data * 0.1
        return loss

    step = run.step(step_fn, model=model, optimizer=sgd(model["student"]))
    for batch in batches(32):
        step(*batch)


@same_as_plain(replays=12)
def test_switches_of_torch_hold_in_replays(run: Run) -> None:
    """Autocast around the step, and gradients that are not enabled by whoever calls."""
    model = Net()
    step = run.step(loss_of(model), model=model, optimizer=sgd(model))
    for number, batch in enumerate(batches(40)):
        with torch.autocast(DEVICE, torch.bfloat16, enabled=number % 2 == 1):
            step(batch)


@same_as_plain(replays=8)
def test_the_model_is_copied_and_the_copy_trains_on(run: Run) -> None:
    model = Net()
    optimizer = adamw(model)
    step = run.step(loss_of(model), model=model, optimizer=optimizer)
    for batch in batches(16):
        step(batch)
    other = copy.deepcopy(model)
    other_optimizer = adamw(other)
    other_optimizer.load_state_dict(optimizer.state_dict())
    for batch in batches(4):
        step(batch)
        other_optimizer.zero_grad()
        loss_of(other)(batch).backward()
        other_optimizer.step()
    run.note("copy", other)


# -- the library's own work -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("until", [9, 100])
@pytest.mark.quick
@same_as_plain(refused="there is no memory for a capture")
def test_memory_runs_out_in_captures(run: Run, until: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A capture that the user did not ask for is never the user's error; later ones may succeed."""
    model, tried = Net(), lambda: 0
    if run.ours:
        tried = nothing_is_captured(
            monkeypatch, torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 MiB.")
        )
    step = run.step(loss_of(model), model=model, optimizer=adamw(model))
    for number, batch in enumerate(batches()):
        if number == until:
            monkeypatch.undo()
        step(batch)
    assert bool(tried()) == run.ours


@pytest.mark.notices("any difference of a replay counts as noise")
@same_as_plain(refused="graphs compute something else")
def test_a_graph_that_computes_something_else_is_not_kept(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay is compared with the step without a graph, before anybody gets its results."""
    model = Net()
    if run.ours:
        replays_are_wrong(monkeypatch)
    step = run.step(loss_of(model), model=model, optimizer=adamw(model))
    for batch in batches(32):
        step(batch)


@same_as_plain(replays=6)
def test_a_step_that_is_closed_leaves_everything_to_the_loop(run: Run) -> None:
    model = Net()
    optimizer = adamw(model)
    step = run.step(loss_of(model), model=model, optimizer=optimizer)
    for batch in batches(16):
        step(batch)
    step.close()
    for batch in run.each(batches(6, seed=2)):
        optimizer.zero_grad()
        loss_of(model)(batch).backward()
        optimizer.step()
    run.note("attributes", [sorted(vars(o)) for o in (*model.modules(), optimizer)])


@pytest.mark.parametrize("closed", [True, False])
@pytest.mark.quick
def test_a_training_that_is_over_is_freed(closed: bool) -> None:
    """A sweep of trainings does not grow: of each, neither the model nor memory of its graphs stays."""
    over, alive = [], []
    for _ in range(3):
        model = Net()
        step = GraphedStep(
            loss_of(model), model=model, optimizer=adamw(model), engine=ENGINE, warmup_steps=2, forward="on"
        )
        for batch in batches():
            step(batch)
        assert step.report().to_dict()["steps_from_graphs"] >= 15
        over += [weakref.ref(model), weakref.ref(model.first.weight)]
        if closed:
            step.close()
        del model, step, batch
        for _ in range(3):  # what a model holds goes in a later round
            gc.collect()
        alive.append(sum(t.nbytes for t in gc.get_objects() if type(t) is Tensor))
    assert [reference() for reference in over] == [None] * 6
    assert alive[1] == alive[2]


@same_as_plain(replays=8)
def test_a_number_is_written_under_a_default_device(run: Run) -> None:
    """Dynamo of torch 2.13 loses it there, and raises AttributeError in the function."""
    model, seen = Net(), []
    model.decay = 1.0

    def step_fn(x: Tensor, y: Tensor) -> Tensor:
        loss = cross_entropy(model(x), y)
        model.decay *= 0.98
        return loss * (0.5 + model.decay)

    step = run.step(step_fn, model=model, optimizer=adamw(model))
    for number, batch in enumerate(batches(24)):
        with torch.device(DEVICE) if 10 <= number < 14 else nullcontext():
            step(*batch)
        seen.append(model.decay)
    run.note("numbers", seen)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
@pytest.mark.quick
def test_a_copy_of_a_step_is_refused_in_a_sentence(copied: Any) -> None:
    model = Net()
    with GraphedStep(loss_of(model), model=model, optimizer=adamw(model), engine=ENGINE) as step:
        step(batches(1)[0])
        with pytest.raises(TypeError, match="cannot be copied or pickled"):
            copied(step)


@same_as_plain(refused="another thread is in its own step now and then")
def test_two_threads_train_two_models(run: Run) -> None:
    losses: dict[int, list[Tensor]] = {0: [], 1: []}
    models = [nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)) for _ in losses]

    def train(number: int) -> None:
        model = models[number]
        optimizer = adamw(model)
        if run.ours:
            step: Any = GraphedStep(loss_of(model), model=model, optimizer=optimizer, config=run.config)
            run.reports(step.report)
        else:
            step = PlainStep(loss_of(model), model, optimizer)
        losses[number] += [step(batch).detach().clone() for batch in batches(30, seed=number)]
        step.close()

    threads = [threading.Thread(target=train, args=(number,)) for number in losses]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    run.note("losses", losses)
    run.note("models", models)


@same_as_plain(replays=12)
def test_another_thread_is_in_its_step_for_some_steps(run: Run) -> None:
    """Those steps run without a graph; no gradient or count of an earlier replay may stand in for theirs."""
    inside, over = threading.Event(), threading.Event()

    def waits(x: Tensor) -> Tensor:
        inside.set()
        assert over.wait(60)
        return other(x).square().mean()

    model, other = Net(), Net()
    step = run.step(loss_of(model), model=model, optimizer=adamw(model))
    elsewhere = run.step(waits, model=other, optimizer=adamw(other))
    thread = threading.Thread(target=elsewhere, args=(batches(1)[0][0],))
    for number, batch in enumerate(batches(24)):
        if number == 10:
            thread.start()
            assert inside.wait(60)
        elif number == 14:
            over.set()
            thread.join()
        step(batch)


@pytest.mark.xfail(strict=True, reason="plain training goes on with the casts of its first step")
@same_as_plain(replays=12)
def test_autocast_around_the_whole_loop(run: Run) -> None:
    """Its cache of casts is emptied where the outermost block ends; a traced step casts the weights of now."""
    model = Net()
    step = run.step(loss_of(model), model=model, optimizer=adamw(model))
    with torch.autocast(DEVICE, torch.bfloat16):
        for batch in batches():
            step(batch)


@same_as_plain(replays=0, updates=8)
def test_a_step_stores_activations_in_another_form(run: Run) -> None:
    """Hooks that get what is saved for the backward of a part of the step, and give back something else."""
    model, packed = Net(), []

    def pack(saved: Tensor) -> Tensor:
        packed.append(saved.shape)
        return (saved * 16).round() / 16 if saved.is_floating_point() else saved

    def step_fn(x: Tensor, y: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda stored: stored):
            out = model(x)
        return cross_entropy(out, y)

    step = run.step(step_fn, model=model, optimizer=adamw(model))
    for batch in batches(24):
        step(*batch)
    run.note("packed", packed)
