"""`explain` lists everything that keeps a step from being one graph, and changes nothing."""

from __future__ import annotations

import copy
import json
import linecache
import logging
import random
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from training import CONFIG, Net, adam, adamw, batches, differs, frozen, line_of, loss_of, sgd

import pygraph_train
from pygraph_train import Explanation, GraphedStep, explain
from pygraph_train.diagnosis import gain
from pygraph_train.putting_back import ScratchState
from tests.ranks import alone_in_a_group

pytestmark = [
    pytest.mark.passes_without_graphs("a step is explained without any capture"),
    pytest.mark.slow_after(60),
]


class Memory:
    """Python objects that steps write to."""

    def __init__(self) -> None:
        self.count = 0
        self.losses: list[Any] = []
        self.texts: dict[str, str] = {}


memory = Memory()
own_generator = torch.Generator().manual_seed(0)
log = logging.getLogger("somebody's")
scale_on_host = torch.tensor(2.0)


def item(model: nn.Module, x: Tensor) -> Any:
    loss = model(x).square().mean()
    memory_of_value = loss.item()  # here: read on the host
    return {"loss": loss * memory_of_value, "value": 2 * memory_of_value}


def only_read(model: nn.Module, x: Tensor) -> Any:
    """No obstacle: the number is read when the graph has run."""
    loss = model(x).square().mean()
    return {"loss": loss, "value": 2 * loss.item(), "classes": int(x.argmax())}


def speech(model: nn.Module, x: Tensor) -> Any:
    """No obstacle: the graph has a gap for the loss."""
    found = model(x).log_softmax(-1)[None].repeat(6, 1, 1)
    with torch.backends.cudnn.flags(enabled=False):
        return nn.functional.ctc_loss(found, x.new_ones(len(x), 2).long(), (6,) * len(x), (2,) * len(x))


def moved(model: nn.Module, x: Tensor) -> Any:
    """No obstacle: the number is read when the graph has run."""
    loss = model(x).square().mean()
    return {"loss": loss, "value": loss.item()}


def moved_and_returned(model: nn.Module, x: Tensor) -> Any:
    y = model(x)
    shift = int(y.detach().mean(0).argmax())  # here: read on the host
    loss = (y.roll(shift, 1) * y).square().mean()
    return {"loss": loss, "value": shift}


def printed(model: nn.Module, x: Tensor) -> Any:
    loss = model(x).square().mean()
    print("loss", loss)  # here: print() reads the value of a tensor
    return loss


def decided(model: nn.Module, x: Tensor) -> Any:
    loss = model(x).square().mean()
    if loss > 1000 or torch.isnan(loss) or loss.item() < -1:  # here: read on the host
        loss = loss / 2
    return loss


def decided_by_many(model: nn.Module, x: Tensor) -> Any:
    loss = model(x).square().mean()
    if (model(x) > 1000).tolist()[0][0]:  # here: read on the host
        loss = loss / 2
    return loss


def counter(model: nn.Module, x: Tensor) -> Any:
    memory.count += 1  # here: memory.count is written by the step
    return model(x).square().mean()


def drawn(model: nn.Module, x: Tensor) -> Any:
    loss = model(x).square().mean()
    return loss ** random.uniform(0.5, 1.5)  # here: draws random numbers in Python


def numpys(model: nn.Module, x: Tensor) -> Any:
    loss = model(x).square().mean()
    worst = np.max(loss.detach().numpy())  # here: Tensor.numpy()
    return loss + float(worst)


def drawn_by_numpy(model: nn.Module, x: Tensor) -> Any:
    return model(x).square().mean() ** np.random.rand()  # here: numpy.rand runs on the host


def growing(model: nn.Module, x: Tensor) -> Any:
    loss = model(x).square().mean()
    memory.losses.append(loss.detach())  # here: memory.losses is written by the step
    return loss


def text(model: nn.Module, x: Tensor) -> Any:
    loss = model(x).square().mean()
    log.info(f"loss {loss:.3f}")  # here: puts a tensor into a text
    return loss


def formatted(model: nn.Module, x: Tensor) -> Any:
    loss = model(x).square().mean()
    memory.texts["loss"] = "{:.3f}".format(loss)  # noqa: UP032  # here: puts a tensor into a text
    return loss


def by_format(model: nn.Module, x: Tensor) -> Any:
    loss = model(x).square().mean()
    format(loss, ".3f")  # here: such as format()
    return loss


def nonzero(model: nn.Module, x: Tensor) -> Any:
    y = model(x)
    positive = y.gt(0).nonzero()  # here: shape of a tensor depends
    return y.square().mean() + positive.float().mean()


def masked(model: nn.Module, x: Tensor) -> Any:
    y = model(x)
    return y[y > -9].sum()  # here: shape of a tensor depends


def noisy(model: nn.Module, x: Tensor) -> Any:
    noise = torch.randn(x.shape, generator=own_generator)  # here: its own torch.Generator
    return model(x + noise).square().mean()


def broken(model: nn.Module, x: Tensor) -> Any:
    y = model(x)
    torch._dynamo.graph_break()  # here: graph_break()
    return y.square().mean()


def clock(model: nn.Module, x: Tensor) -> Any:
    time.time()  # here: calls time.time
    return model(x).square().mean()


def counted(model: nn.Module, x: Tensor) -> Any:
    loss = model(x).square().mean()
    for _ in range(int((x > 0).sum())):  # here: read on the host
        loss = loss * 1.01
    return loss


def changed(model: nn.Module, x: Tensor) -> Any:
    x.mul_(2)  # here: changes its batch in place
    return model(x).square().mean()


def with_gradient(model: nn.Module, x: Tensor) -> Any:
    loss = model(x).square().mean()
    for p in model.parameters():
        if p.grad is not None:
            loss = loss + p.grad.norm()  # here: a gradient of the previous step
    return loss


def listed(model: nn.Module, x: Tensor) -> Any:
    loss = model(x).square().mean()
    memory.losses = loss.reshape(1).tolist()  # here: read on the host
    return loss


def unique(model: nn.Module, x: Tensor) -> Any:
    values, places = torch.unique(x.round(), return_inverse=True)  # here: shape of a tensor depends
    return model(x).square().mean() + values[places].mean()


def whole(model: nn.Module, x: Tensor) -> Any:
    loss = model(x).square().mean()
    loss.backward()  # here: calls backward()
    return loss


STEPS = (
    *(
        item,
        printed,
        decided,
        decided_by_many,
        counter,
        drawn,
        numpys,
        drawn_by_numpy,
        growing,
        text,
        formatted,
        by_format,
        nonzero,
    ),
    *(
        masked,
        noisy,
        broken,
        clock,
        counted,
        changed,
        with_gradient,
        listed,
        unique,
        whole,
        moved_and_returned,
    ),
)


def several(model: nn.Module, x: Tensor) -> Any:
    y = model(x)
    loss = y.square().mean()
    print(loss)  # here: print() reads
    memory.count += 1  # here: memory.count is written
    loss = loss ** random.random()  # here: draws random numbers
    loss = loss + y[y > 0].sum()  # here: shape of a tensor depends
    if loss.item() > 3:  # here: read on the host
        memory.losses.append(loss)  # here: memory.losses is written
    else:
        loss = loss + torch.randn(3, generator=own_generator).sum()  # here: its own torch.Generator
    if torch.isnan(loss):  # here: read on the host
        raise ValueError("not a number")
    for name, value in zip(["a", "b"], helper(loss), strict=True):
        memory.texts[name] = f"{value}"  # here: puts a tensor into a text
    torch._dynamo.graph_break()  # here: graph_break()
    with torch.no_grad():
        time.time()  # here: calls time.time
    return loss


def helper(loss: Tensor) -> list[Any]:
    return [float(loss), loss.detach()]  # here: read on the host


def promised(*functions: Callable[..., Any]) -> dict[str, str]:
    """The words that stand after "# here:", by `file:line`."""
    found = {}
    for function in functions:
        first = function.__code__.co_firstlineno
        last = max(line for _, _, line in function.__code__.co_lines() if line)
        for line in range(first, last + 1):
            _, mark, words = linecache.getline(__file__, line).partition("# here: ")
            if mark:
                found[f"{__file__}:{line}"] = words.strip()
    return found


def state_of(*things: Any) -> list[Any]:
    """A copy of all that a step could change."""
    states: list[Any] = [torch.get_rng_state(), own_generator.get_state(), repr(random.getstate())]
    states.append(repr(np.random.get_state()))
    states.append({name: repr(value) for name, value in vars(memory).items()})
    for thing in things:
        if isinstance(thing, nn.Module):
            states.append(frozen(dict(thing.named_parameters())) | frozen(dict(thing.named_buffers())))
            states.append({name: frozen(p.grad) for name, p in thing.named_parameters()})
            states.append([sorted(vars(module)) for module in thing.modules()])
            states.append([t._version for t in (*thing.parameters(), *thing.buffers())])
        elif isinstance(thing, torch.optim.Optimizer):
            states.append(frozen(thing.state_dict()))
            states.append(sorted(vars(thing)))
        else:
            states.append(frozen(thing))
    return states


def same(before: list[Any], after: list[Any]) -> None:
    """Assert that nothing has changed."""
    assert [differs(*pair) for pair in zip(before, after, strict=True)] == [None] * len(before)


def trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Gradients and optimizer state, so that there is something to change."""
    model(torch.randn(6, 6)).square().mean().backward()
    optimizer.step()


def explained(fn: Callable[..., Any], **options: Any) -> Explanation:
    """Explain a step of a model that has been trained for a step. Nothing may change, and nothing be printed."""
    torch.manual_seed(0)
    model = Net()
    optimizer = adamw(model)
    trained(model, optimizer)
    x = torch.randn(6, 6)
    before = state_of(model, optimizer, x)
    found = explain(lambda x: fn(model, x), x, model=model, optimizer=optimizer, **options)
    after = state_of(model, optimizer, x)
    same(before, after)
    return found


@pytest.mark.parametrize("fn", STEPS)
def test_an_obstacle_is_found_with_its_line(
    fn: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    found = explained(fn)
    assert not any(capsys.readouterr())
    (where, words), *more = promised(fn).items()
    assert not more
    here = [p for p in found.obstacles if p.where == where]
    assert any(words in p.reason for p in here), found
    assert all(p.where == where for p in found.obstacles), found
    assert all(p.fix for p in here if "in place" not in p.reason), here
    source = linecache.getline(__file__, int(where.rpartition(":")[2])).strip()
    assert where in str(found) and source in str(found)


def computed_later(model: nn.Module, x: Tensor) -> Any:
    loss = model(x).square().mean()
    value = loss.item()
    return {"loss": loss, "kept": (round(value, 3), min(value, 1.0) / len(x), f"{value:.3f}")}


@pytest.mark.parametrize("fn", [only_read, computed_later, speech, moved])
def test_what_graphs_do_late_or_in_gaps_is_no_obstacle(fn: Callable[..., Any]) -> None:
    found = explained(fn)
    assert found.is_one_graph and not found.obstacles, found


def test_all_obstacles_of_one_step_are_found() -> None:
    found = explained(several)
    expected = promised(several, helper)
    assert len(expected) == 12
    for where, words in expected.items():
        assert any(p.where == where and words in p.reason for p in found.obstacles), (
            f"{where} {words}\n{found}"
        )
    assert {p.where for p in found.obstacles} == set(expected), found
    assert not any("could not be examined" in note for note in found.notes), found.notes
    assert any(line_of(several, "loss.item() > 3") in note for note in found.notes), found.notes
    assert str(found).startswith(f"{len(found.obstacles)} obstacles keep ")


def test_a_step_with_nothing_in_the_way_says_so() -> None:
    model = Net()
    optimizer = sgd(model)
    trained(model, optimizer)
    (batch,) = batches(1)
    before = state_of(model, optimizer, batch)
    found = explain(loss_of(model), batch, model=model, optimizer=optimizer)
    assert [differs(*pair) for pair in zip(before, state_of(model, optimizer, batch), strict=True)] == [
        None
    ] * len(before)
    assert found.is_one_graph and found.obstacles == ()
    assert str(found).startswith("Nothing was found that keeps step_fn from being one graph.")


def test_a_number_that_only_decides_is_no_obstacle() -> None:
    def step(model: nn.Module, x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        if torch.rand(()) < 0.5 or random.random() < np.random.rand():
            loss = 2 * loss
        return loss

    assert not explained(step).obstacles


def test_a_condition_on_the_batch_is_no_obstacle() -> None:
    def step(model: nn.Module, x: Tensor) -> Tensor:
        if x.max().item() > 100:
            raise ValueError("too large")
        if (x > 0).any() and not x.isnan().any():
            x = 2 * x
        return model(x).square().mean()

    found = explained(step)
    assert found.is_one_graph and not found.obstacles


def test_what_is_explained_as_one_graph_is_replayed_as_one() -> None:
    model = Net()
    optimizer = adamw(model)
    step = GraphedStep(loss_of(model), model=model, optimizer=optimizer, config=CONFIG)
    assert explain(step, batches(1)[0]).is_one_graph
    for batch in batches(12):
        step(batch)
    assert step.report().plan == "{F B O}"


def test_without_a_gpu_nothing_is_measured_and_the_text_says_so() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    found = explained(several)
    assert "There is no CUDA device to measure it on" in found.gain and found.gain.split()[0] in str(found)


def test_the_gain_is_measured_without_a_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, which only the clock needs."""
    runs = []

    def measured(run: Callable[[], None]) -> tuple[float, float]:
        for _ in range(3):
            run()
            runs.append(run)
        return 0.004, 0.001

    monkeypatch.setattr(gain, "_measured", measured)
    monkeypatch.setattr(gain, "ScratchState", lambda _, kept: ScratchState(torch.device("cpu"), kept))
    model = Net()
    optimizer = adamw(model)
    trained(model, optimizer)
    (batch,) = batches(1)
    kept = [dict(model.named_buffers()), {name: p.grad for name, p in model.named_parameters()}]
    before = frozen([*kept, dict(model.named_parameters()), torch.get_rng_state()])
    device: Any = SimpleNamespace(type="cuda")
    told = gain.gain_of(loss_of(model), (batch,), {}, model, device, nullcontext, clean=True)
    after = frozen([*kept, dict(model.named_parameters()), torch.get_rng_state()])
    assert differs(before, after) is None
    assert (
        len(runs) == 3
        and "took 4.00 ms" in told
        and "for 75% of that time" in told
        and "3.00 ms of each" in told
    )
    not_run = gain.gain_of(loss_of(model), (batch,), {}, model, device, nullcontext, clean=False)
    assert "was not measured" in not_run and len(runs) == 3
    failing = gain.gain_of(lambda batch: 1 / 0, (batch,), {}, model, device, nullcontext, clean=True)
    assert "the step raised ZeroDivisionError" in failing


def test_kernels_at_the_same_time_count_once() -> None:
    assert gain._covered([(0, 2), (1, 3), (5, 6), (5.5, 5.7)]) == 4


def test_an_explanation_is_a_dict_for_json() -> None:
    found = explained(printed)
    read = json.loads(json.dumps(found.to_dict()))
    (row,) = read["obstacles"]
    assert row["line"].startswith('print("loss", loss)') and row["where"] == found.obstacles[0].where
    assert row["fix"] and read["is_one_graph"] is False and read["notes"] and read["gain"]


def test_modules_are_found_in_the_function_where_none_is_given() -> None:
    model = Net()
    model.first.weight.register_hook(lambda gradient: None)
    found = explain(lambda x: model(x).square().mean(), torch.randn(6, 6))
    assert [p.reason for p in found.obstacles if "gradient hook" in p.reason], found
    assert not any("No model was given" in note for note in found.notes)


def test_every_gradient_hook_is_listed() -> None:
    model = Net()
    model.first.weight.register_hook(lambda gradient: None)
    model.second.bias.register_hook(lambda gradient: None)
    model.norm.register_full_backward_hook(lambda *arguments: None)
    found = explain(loss_of(model), batches(1)[0], model=model, optimizer=adamw(model))
    assert [p.where for p in found.obstacles if "has the" in p.reason] == [
        line_of(test_every_gradient_hook_is_listed, f"model.{name}.register")
        for name in ("first.weight", "second.bias", "norm")
    ], found


def test_a_cpu_tensor_in_a_step_on_another_device_is_found() -> None:
    with torch.device("meta"):
        model = nn.Linear(4, 3)
        x = torch.randn(6, 4)

    def step_fn(x: Tensor) -> Tensor:
        loss = model(x).square().mean() * scale_on_host  # here: is a tensor on cpu
        return loss + torch.ones(3).sum() + torch.rand(3).sum()  # here: rand makes a tensor on cpu

    found = explain(step_fn, x, model=model, optimizer=sgd(model, fused=False))
    expected = promised(step_fn)
    assert len(expected) == 2
    for where, words in expected.items():
        assert any(p.where == where and words in p.reason for p in found.obstacles), found


def test_optimizers_are_looked_at() -> None:
    model = Net()
    step = loss_of(model)
    (batch,) = batches(1)

    def obstacles(optimizer: torch.optim.Optimizer) -> list[str]:
        found = explain(step, batch, model=model, optimizer=optimizer)
        return [p.reason for p in found.obstacles]

    (lbfgs,) = obstacles(torch.optim.LBFGS(model.parameters()))
    assert "how often to run the closure" in lbfgs
    (sparse,) = obstacles(torch.optim.SparseAdam(model.parameters()))
    assert "sparse gradients" in sparse
    assert obstacles(adam(model)) == []  # on a GPU its kernels can be captured

    hooked = adamw(model)
    hooked.register_step_post_hook(lambda *arguments: None)
    (hook,) = explain(step, batch, model=model, optimizer=hooked).obstacles
    assert "step hook" in hook.reason and hook.where == line_of(
        test_optimizers_are_looked_at, "step_post_hook("
    )

    class Own(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    (own,) = obstacles(Own(model.parameters()))
    assert "Own is not one of torch.optim's" in own


def test_a_lazy_module_keeps_its_shape_for_its_first_call() -> None:
    model = nn.LazyLinear(3)
    (found,) = explain(lambda x: model(x).sum(), torch.randn(6, 4), model=model).obstacles
    assert "has no shape yet" in found.reason
    assert isinstance(model.weight, nn.UninitializedParameter)


def test_a_step_that_returns_no_loss_is_told() -> None:
    model = Net()

    def step_fn(x: Tensor) -> Tensor:
        return model(x)

    (found,) = explain(step_fn, torch.randn(6, 6), model=model).obstacles
    assert "returns a tensor of shape (6, 3)" in found.reason and "Return the loss" in found.fix
    assert found.where == line_of(step_fn, "def step_fn")


def test_a_step_that_raises_is_told_with_its_line() -> None:
    model = Net()

    def step_fn(x: Tensor) -> Tensor:
        raise ValueError("not today")  # here: raises ValueError

    (found,) = explain(step_fn, torch.randn(6, 6), model=model).obstacles
    (expected,) = promised(step_fn).items()
    assert found.where == expected[0] and expected[1] in found.reason


def test_an_optimizer_that_the_step_steps_itself_is_told() -> None:
    model = Net()
    optimizer = adamw(model)
    trained(model, optimizer)

    def step_fn(x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        optimizer.step()  # here: calls step() or zero_grad() of an optimizer
        optimizer.zero_grad()  # here: calls step() or zero_grad() of an optimizer
        return loss

    x = torch.randn(6, 6)
    before = state_of(model, optimizer)
    found = explain(step_fn, x, model=model, optimizer=optimizer)
    same(before, state_of(model, optimizer))
    expected = promised(step_fn)
    assert len(expected) == 2 and {p.where for p in found.obstacles} == set(expected), found
    assert all("calls step() or zero_grad()" in p.reason for p in found.obstacles), found


def test_every_way_of_a_chain_of_conditions_is_looked_at() -> None:
    model = Net()

    def step_fn(x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        if loss > 3:  # here: read on the host
            memory.count += 1  # here: memory.count is written
        elif loss > 2:  # here: read on the host
            memory.texts = {"a": "b"}  # here: memory.texts is written
        elif loss > 1:  # here: read on the host
            print("small")  # here: calls print()
        else:
            memory.losses = [1]  # here: memory.losses is written
        if loss < 0:  # here: read on the host
            raise ValueError("negative")
        return loss

    found = explain(step_fn, torch.randn(6, 6), model=model)
    expected = promised(step_fn)
    assert len(expected) == 8
    for where, words in expected.items():
        assert any(p.where == where and words in p.reason for p in found.obstacles), (
            f"{where} {words}\n{found}"
        )
    assert {p.where for p in found.obstacles} == set(expected), found
    assert any("Each way was looked at" in note for note in found.notes), found.notes
    assert not any("could not be examined" in note for note in found.notes), found.notes


def test_a_step_with_very_many_conditions_says_that_some_ways_were_left_out() -> None:
    model = nn.Linear(6, 3)
    source = "".join(f"    if loss > {k}:\n        loss = loss + {k}\n" for k in range(20))
    code = f"def step_fn(x):\n    loss = model(x).square().mean()\n{source}    return loss\n"
    namespace: dict[str, Any] = {"model": model}
    exec(compile(code, str(Path(__file__).with_name("made.py")), "exec"), namespace)
    found = explain(namespace["step_fn"], torch.randn(6, 6), model=model)
    assert len(found.obstacles) >= 5 and all("read on the host" in p.reason for p in found.obstacles)
    assert any("some were not looked at" in note for note in found.notes), found.notes


def test_a_step_that_cannot_be_looked_at_to_its_end_says_so() -> None:
    model = Net()

    def step_fn(x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        if loss > 3:
            loss = loss / 2
        print(loss)
        raise ValueError("at last")  # here

    found = explain(step_fn, torch.randn(6, 6), model=model)
    assert len([p for p in found.obstacles if "print()" in p.reason]) == 1
    end = f"The code after {line_of(step_fn, '# here')} could not be examined."
    assert [note for note in found.notes if note.startswith(end)], found.notes


def test_an_optimizer_in_a_graphed_step_is_looked_at_as_it_was() -> None:
    model = Net()
    optimizer = sgd(model)
    step = GraphedStep(loss_of(model), model=model, optimizer=optimizer, config=CONFIG)
    torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for batch in batches(6):
        step(batch)
    assert explain(step, batches(1)[0]).is_one_graph
    step.close()


def test_hooks_and_modes_around_the_step_are_all_listed() -> None:
    model = Net()
    handle = torch.nn.modules.module.register_module_forward_hook(lambda *arguments: None)
    try:
        with torch.autograd.set_detect_anomaly(True):
            found = explain(loss_of(model), batches(1)[0], model=model)
    finally:
        handle.remove()
    reasons = " ".join(p.reason for p in found.obstacles)
    assert "anomaly detection" in reasons and "a hook on all modules" in reasons


def test_batches_that_cannot_be_static_are_all_listed() -> None:
    model = Net()
    x = torch.randn(6, 6)
    batch = {"a": x, "b": np.ones(3), "c": x.clone().requires_grad_() * 1}
    found = explain(lambda batch: model(batch["a"]).square().mean(), batch, model=model)
    reasons = " ".join(p.reason for p in found.obstacles)
    assert "args[0]['b'] is a NumPy" in reasons and "args[0]['c'] requires a gradient" in reasons


def test_something_that_is_no_step_is_refused() -> None:
    with pytest.raises(TypeError, match="explain takes a function that computes the loss"):
        explain(Net(), torch.randn(6, 6))


def test_dynamo_that_is_switched_off_executes_nothing() -> None:
    called = []

    @torch.compiler.disable
    def step_fn(x: Tensor) -> Tensor:
        called.append(x)
        return x.sum()

    assert not explain(step_fn, torch.randn(3)).is_one_graph
    with torch._dynamo.config.patch(disable=True):
        found = explain(lambda x: called.append(x), torch.randn(3))
    assert any("Dynamo did not trace the step" in p.reason for p in found.obstacles), found
    assert called == []


def test_nothing_of_a_step_that_was_explained_is_kept() -> None:
    before = len(gc_objects())
    for _ in range(3):
        explained(several)
    assert len(gc_objects()) <= before


def gc_objects() -> list[Any]:
    import gc

    gc.collect()
    return [thing for thing in gc.get_objects() if type(thing) is Net]


# -- frameworks --------------------------------------------------------------------------------------


def lightning_module() -> Any:
    pl = pytest.importorskip("lightning.pytorch")

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()
            self.seen = 0
            self.configured = 0

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
            self.log("loss", loss)
            self.log("value", loss.item())
            self.seen += 1  # here
            return loss

        def on_after_backward(self) -> None:  # here
            self.seen += 1

        def configure_optimizers(self) -> Any:
            self.configured += 1
            optimizer = torch.optim.LBFGS(self.parameters())
            return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.ConstantLR(optimizer)}

    return Module()


def test_a_lightning_module() -> None:
    module = lightning_module()
    before = state_of(module)
    found = explain(module, batches(1)[0])
    same(before, state_of(module))
    assert module.seen == 0 and module.configured == 0 and "log" not in vars(module)
    lines = [
        linecache.getline(__file__, int(str(p.where).rpartition(":")[2])) for p in found.obstacles if p.where
    ]
    assert len(lines) == 2 and all("# here" in line for line in lines), found
    assert any("how often to run the closure" in p.reason for p in found.obstacles), found
    assert str(found).startswith("3 obstacles keep Module.training_step")


def test_a_lightning_module_with_nothing_in_the_way() -> None:
    pytest.importorskip("lightning")
    from lightning.pytorch.demos.boring_classes import BoringModel

    found = explain(BoringModel(), torch.randn(4, 32))
    assert found.is_one_graph, found
    assert any("no Trainer yet" in note for note in found.notes)


def test_a_graphed_step_of_accelerate() -> None:
    pytest.importorskip("accelerate")
    from accelerate_training import fresh_state

    with fresh_state():
        accelerator = pygraph_train.Accelerator(cpu=True, plugins=[pygraph_train.PyGraph(engine="emulated")])
        plain = Net()
        model, optimizer = accelerator.prepare(plain, adamw(plain))

        def train_step(x: Tensor, y: Tensor) -> Tensor:
            loss = nn.functional.cross_entropy(model(x), y)
            accelerator.backward(loss)
            memory.count += 1  # here: memory.count is written
            optimizer.step()
            optimizer.zero_grad()
            return loss

        step = accelerator.graphed_step(train_step)
        before = state_of(plain, optimizer.optimizer)
        found = explain(step, *batches(1)[0])
        after = state_of(plain, optimizer.optimizer)
        same(before, after)
        assert {p.where for p in found.obstacles} == set(promised(train_step)), found

        def loss_fn(x: Tensor, y: Tensor) -> Tensor:
            return nn.functional.cross_entropy(model(x), y)

        assert explain(loss_fn, *batches(1)[0], model=model, optimizer=optimizer).is_one_graph
        accelerator.end_training()


class ReadsItsNorm(nn.Module):
    """A model whose results Accelerate converts, a number among them."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, x: Tensor) -> Any:
        y = self.net(x)
        return {"out": y, "norm": y.norm().item()}  # here: read on the host


def test_what_follows_in_the_code_of_a_framework_is_not_listed() -> None:
    pytest.importorskip("accelerate")
    import accelerate
    from accelerate_training import fresh_state

    with fresh_state():
        accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
        plain = ReadsItsNorm()
        model, optimizer = accelerator.prepare(plain, adamw(plain))

        def loss_fn(x: Tensor, y: Tensor) -> Tensor:
            loss = nn.functional.cross_entropy(model(x)["out"], y)
            print(loss)  # here: print() reads
            return loss

        found = explain(loss_fn, *batches(1)[0], model=model, optimizer=optimizer)
        expected = promised(ReadsItsNorm.forward, loss_fn)
        assert len(expected) == 2 and {p.where for p in found.obstacles} == set(expected), found
        assert len(found.obstacles) == 2, found


def test_a_step_of_fabric() -> None:
    fabrics = pytest.importorskip("lightning.fabric")
    fabric = fabrics.Fabric(accelerator="cpu", devices=1)
    pygraph = pygraph_train.PyGraphFabric(engine="emulated").attach(fabric)
    plain = Net()
    model, optimizer = fabric.setup(plain, adamw(plain))

    def loss_fn(batch: Any) -> Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    step = pygraph.graphed_step(loss_fn, model=model, optimizer=optimizer)
    (batch,) = batches(1)
    assert explain(step, batch).is_one_graph
    assert explain(loss_fn, batch, model=model, optimizer=optimizer).is_one_graph
    pygraph.detach()


def test_a_model_in_distributed_data_parallel() -> None:
    with alone_in_a_group():
        model = nn.parallel.DistributedDataParallel(Net())
        (batch,) = batches(1)
        forward = nn.parallel.DistributedDataParallel.forward
        assert explain(loss_of(model), batch, model=model, optimizer=adamw(model)).is_one_graph
        assert nn.parallel.DistributedDataParallel.forward is forward
        looking = nn.parallel.DistributedDataParallel(Net(), find_unused_parameters=True)
        (found,) = explain(loss_of(looking), batch, model=looking).obstacles
        assert "find_unused_parameters" in found.reason and "static_graph=True" in found.fix


def test_a_copy_of_an_explanation_is_equal() -> None:
    found = explained(item)
    assert copy.deepcopy(found) == found
