"""Writes to Python in a step that is replayed: they are made as in plain training, once for each step."""

from __future__ import annotations

import collections
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_failures import fail_in_capture
from torch import Tensor, nn
from training import Diary, adamw, batches, both

from pygraph_train.step.outputs import Outputs
from pygraph_train.tracing.seat import FailedRuns

STEPS = 30
ENOUGH = 20


class Net(nn.Module):
    """A model, and what a step may write to."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        self.n = 0
        self.buf = torch.zeros(3)
        self.register_buffer("ema", torch.zeros(3))
        self.history: list[Any] = []
        self.stats: dict[str, Any] = {"n": 0, "loss": None}
        self.recent: collections.deque[Any] = collections.deque(maxlen=4)
        self.cache: dict[Any, Any] = {}
        self.last: Any = None
        self.calls = 0
        self.metric = Accuracy()
        self.layers.register_forward_hook(self.count)

    def count(self, *_: Any) -> None:
        self.calls += 1

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layers(x)
        return result


def cross_entropy(net: Net, batch: Any) -> tuple[Tensor, Tensor]:
    out = net(batch[0])
    return nn.functional.cross_entropy(out, batch[1]), out


def counter(net: Net, batch: Any) -> Tensor:
    net.n += 1
    return cross_entropy(net, batch)[0]


def appended_loss(net: Net, batch: Any) -> Tensor:
    loss, _ = cross_entropy(net, batch)
    net.history.append(loss.detach())
    return loss


def appended_loss_with_its_history(net: Net, batch: Any) -> Tensor:
    loss, out = cross_entropy(net, batch)
    net.history.append(loss)
    net.history.append({"out": out, "first": out[0]})
    return loss


def appended_number(net: Net, batch: Any) -> Tensor:
    net.n += 1
    net.history.append(net.n * 2)
    return cross_entropy(net, batch)[0]


def moving_average(net: Net, batch: Any) -> Tensor:
    loss, out = cross_entropy(net, batch)
    net.buf = 0.9 * net.buf + out.detach().mean(0)
    return loss + 0.01 * net.buf.sum()


def moving_average_in_a_buffer(net: Net, batch: Any) -> Tensor:
    loss, out = cross_entropy(net, batch)
    net.ema = 0.9 * net.ema + out.detach().mean(0)
    return loss + 0.01 * net.ema.sum()


def previous_batch(net: Net, batch: Any) -> Tensor:
    loss, _ = cross_entropy(net, batch)
    if net.last is not None:
        loss = loss + 0.1 * (net.layers(net.last) ** 2).mean()
    net.last = batch[0]
    return loss


def statistics(net: Net, batch: Any) -> Tensor:
    loss, _ = cross_entropy(net, batch)
    net.stats["n"] += 1
    net.stats["loss"] = loss.detach()
    return loss


def recent_losses(net: Net, batch: Any) -> Tensor:
    loss, _ = cross_entropy(net, batch)
    net.recent.append(loss.detach())
    return loss


def filled_cache(net: Net, batch: Any) -> Tensor:
    key = batch[0].shape[0]
    if key not in net.cache:
        net.cache[key] = torch.linspace(0.5, 1.0, key)
    out = net(batch[0]) * net.cache[key][:, None]
    return nn.functional.cross_entropy(out, batch[1])


def several(net: Net, batch: Any) -> Tensor:
    net.n += 1
    loss, out = cross_entropy(net, batch)
    net.last = (net.n, loss.detach(), out.detach()[:2])
    net.history.append(out.detach())
    net.buf = 0.5 * net.buf + loss.detach()
    net.history.append(net.buf)
    net.stats["n"] = net.n
    return loss


def metric(net: Net, batch: Any) -> Tensor:
    """As torchmetrics does it: some of the state is changed in place, some is replaced, and updates are counted."""
    loss, out = cross_entropy(net, batch)
    net.metric.update(out.detach().argmax(1), batch[1])
    return loss


class Accuracy(nn.Module):
    """A small metric."""

    def __init__(self) -> None:
        super().__init__()
        self.correct, self.total, self.updates, self.computed = torch.zeros(()), torch.zeros(()), 0, None

    def update(self, found: Tensor, expected: Tensor) -> None:
        self.computed = None
        self.updates += 1
        self.correct = self.correct + (found == expected).sum()
        self.total += expected.numel()


def hooked(net: Net, batch: Any) -> Tensor:
    """The model has a forward hook that counts: see `Net`."""
    return cross_entropy(net, batch)[0]


def numbers_of_numbers(net: Net, batch: Any) -> Tensor:
    net.n += 2
    net.stats["n"] = net.n // 3
    net.last = (net.n, -net.n, net.stats["n"] * 3 + 1)
    return cross_entropy(net, batch)[0]


def every_third(net: Net, batch: Any) -> Tensor:
    """A counter that decides: each branch is a trace of its own."""
    net.n += 1
    loss, _ = cross_entropy(net, batch)
    if net.n % 3 == 0:
        net.history.append(net.n)
        return loss * 2
    return loss


KINDS: dict[str, Callable[[Net, Any], Tensor]] = {
    f.__name__: f
    for f in (
        several,
        metric,
        recent_losses,
        counter,
        appended_loss,
        appended_loss_with_its_history,
        appended_number,
        moving_average,
        moving_average_in_a_buffer,
        previous_batch,
        statistics,
        filled_cache,
        hooked,
        numbers_of_numbers,
        every_third,
    )
}


def state_of(net: Net) -> dict[str, Any]:
    """What the step has written to Python."""
    names = ("n", "calls", "buf", "history", "stats", "recent", "cache", "last")
    state = {name: getattr(net, name) for name in names}
    state["metric"] = {
        name: getattr(net.metric, name) for name in ("correct", "total", "updates", "computed")
    }
    tensors: list[Any] = []
    collect(state, tensors)
    return {**state, "requires grad": [t.requires_grad for t in tensors], "recent": list(net.recent)}


def collect(tree: Any, found: list[Any]) -> None:
    if isinstance(tree, Tensor):
        found.append(tree)
    elif isinstance(tree, dict):
        for value in tree.values():
            collect(value, found)
    elif isinstance(tree, (list, tuple, collections.deque)):
        for value in tree:
            collect(value, found)


def script_of(write: Callable[[Net, Any], Tensor], *, count: int = STEPS) -> Callable[[Diary], None]:
    def script(diary: Diary) -> None:
        net = Net()
        optimizer = adamw(net)
        step = diary.step(lambda batch: write(net, batch), model=net, optimizer=optimizer)
        for batch in batches(count):
            diary.write("result", step(batch).detach())
            diary.write("written", state_of(net))
        diary.write_state(net, optimizer)

    return script


@pytest.mark.slow_after(5)
@pytest.mark.parametrize("kind", KINDS)
def test_writes_are_those_of_plain_training(kind):
    both(script_of(KINDS[kind]), replays=15 if kind == "every_third" else ENOUGH, plan="{F B O}")


EXTRA = ["several", "metric", "appended_loss", "recent_losses", "previous_batch"]


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("kind", EXTRA)
def test_runs_that_make_no_step_write_nothing(kind):
    """Every replay is compared with a run without a graph."""
    report = both(script_of(KINDS[kind]), replays=ENOUGH, verify="always")
    assert report.audits >= ENOUGH, str(report)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("kind", EXTRA)
def test_a_capture_that_fails_writes_nothing(kind, monkeypatch):
    left = fail_in_capture(monkeypatch, RuntimeError("planted"))
    report = both(script_of(KINDS[kind]), replays=1)
    assert left == [0] and report.steps_replayed == 0, str(report)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("kind", EXTRA)
@pytest.mark.parametrize("first", [True, False])
def test_a_replay_that_is_undone_writes_nothing(kind, first, monkeypatch):
    """What the comparison finds wrong is not what was written: the step is made again."""
    from pygraph_train.verification import Fingerprint, PlainRuns

    compare, asked = Fingerprint.compare, [0]

    def differs(self: Any, *args: Any, **options: Any) -> Any:
        asked[0] += 1
        return "planted" if asked[0] == (1 if first else 4) else compare(self, *args, **options)

    monkeypatch.setattr(Fingerprint, "compare", differs)
    monkeypatch.setattr(PlainRuns, "refuse", lambda self, found: "planted")
    report = both(script_of(KINDS[kind]), replays=1, verify="always")
    assert any("planted" in f.reason for f in report.fallbacks), str(report)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("kind", EXTRA)
def test_writes_of_micro_batches(kind):
    def script(diary: Diary) -> None:
        net = Net()
        optimizer = adamw(net)
        step = diary.step(lambda batch: KINDS[kind](net, batch), model=net, optimizer=optimizer)
        for index, batch in enumerate(batches(40)):
            diary.write("result", (step if index % 2 else step.accumulate)(batch).detach())
            diary.write("written", state_of(net))
        diary.write_state(net, optimizer)

    both(script, replays=ENOUGH, plan="{F B O}")


def test_a_batch_that_the_step_takes_apart():
    def script(diary: Diary) -> None:
        net = Net()
        optimizer = adamw(net)

        def step_fn(batch: dict[str, Tensor]) -> Tensor:
            labels = batch.pop("labels")
            batch["logits"] = net(batch["x"])
            return nn.functional.cross_entropy(batch["logits"], labels)

        step = diary.step(step_fn, model=net, optimizer=optimizer)
        for x, y in batches(STEPS):
            batch = {"labels": y, "x": x}
            diary.write("result", step(batch).detach())
            diary.write("batch", batch)
        diary.write_state(net, optimizer)

    both(script, replays=ENOUGH, plan="{F B O}")


def test_what_is_kept_is_not_written_by_later_replays():
    """Also where it shares memory with something else that is kept."""

    def script(diary: Diary) -> None:
        net = Net()
        kept: list[Any] = []

        def step_fn(batch: Any) -> dict[str, Tensor]:
            loss, out = cross_entropy(net, batch)
            hidden = out.detach()
            kept.append((hidden, hidden[0], loss.detach(), batch[0]))
            return {"loss": loss, "hidden": hidden}

        step = diary.step(step_fn, model=net, optimizer=adamw(net))
        used = batches(STEPS)
        for batch in used:
            result = step(batch)
            result["hidden"][0] = 7.0  # as in plain training, where it is the tensor that is kept
        for hidden, first, loss, _ in kept:
            diary.write("kept", (hidden, first, loss))
            assert first.data_ptr() == hidden.data_ptr()
        diary.write("batches", [any(x is one[0] for one in used) for *_, x in kept])

    both(script, replays=ENOUGH, plan="{F B O}")


def test_the_history_of_what_is_kept_is_used():
    """In plain training the backward of the step has freed it."""
    net = Net()
    step = pygraph_step(appended_loss_with_its_history, net)
    for batch in batches(STEPS):
        step(batch)
    assert step.report().steps_replayed >= ENOUGH
    loss = net.history[-2]
    assert loss.requires_grad and loss.grad_fn is not None
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def pygraph_step(write: Callable[[Net, Any], Tensor], net: Net) -> Any:
    from training import CONFIG

    from pygraph_train import GraphedStep

    return GraphedStep(lambda batch: write(net, batch), model=net, optimizer=adamw(net), config=CONFIG)


COUNT = 0


def counted_globally(net: Net, batch: Any) -> Tensor:
    global COUNT
    COUNT += 1
    return cross_entropy(net, batch)[0]


def test_a_global_and_a_variable_of_a_closure():
    def script(diary: Diary) -> None:
        global COUNT
        COUNT = 0
        net, seen = Net(), 0

        def step_fn(batch: Any) -> Tensor:
            nonlocal seen
            seen += 3
            return counted_globally(net, batch)

        step = diary.step(step_fn, model=net, optimizer=adamw(net))
        for batch in batches(STEPS):
            step(batch)
            diary.write("counts", (COUNT, seen))

    both(script, replays=ENOUGH, plan="{F B O}")


def test_state_that_the_loop_changes_in_between():
    """Written state may be reset, replaced and read between steps."""

    def script(diary: Diary) -> None:
        net = Net()
        optimizer = adamw(net)
        step = diary.step(lambda batch: several(net, batch), model=net, optimizer=optimizer)
        for index, batch in enumerate(batches(50)):
            if index % 13 == 12:
                net.history.clear()
                net.n = 100 * index
            if index == 25:
                net.history = []
                net.buf = torch.ones(3)
            diary.write("result", step(batch).detach())
            diary.write("written", state_of(net))
        diary.write_state(net, optimizer)

    both(script, replays=40, plan="{F B O}")


def test_a_list_that_is_read_as_well_is_refused():
    def script(diary: Diary) -> None:
        net = Net()

        def step_fn(batch: Any) -> Tensor:
            loss, _ = cross_entropy(net, batch)
            net.history.append(loss.detach())
            return loss * len(net.history)

        step = diary.step(step_fn, model=net, optimizer=adamw(net))
        for batch in batches(STEPS):
            diary.write("result", step(batch).detach())
            diary.write("written", state_of(net))

    report = both(script, replays=1)
    assert report.steps_replayed == 0
    assert any("net.history is written by the step" in f.reason for f in report.fallbacks), str(report)


LOOKS: dict[str, Callable[[Any], Any]] = {
    "if": lambda items: 2.0 if items else 1.0,
    "not": lambda items: 2.0 if not items else 1.0,
    "or": lambda items: len(items or (1, 2)),
    "bool": lambda items: 1.0 + bool(items),
    "for": lambda items: 1.0 + sum(1 for _ in items),
    "in": lambda items: 2.0 if 3 in items else 1.0,
    "equal": lambda items: 2.0 if items == [] else 1.0,
    "equals": lambda items: 2.0 if [] == items else 1.0,  # noqa: SIM300
    "unequal": lambda items: 2.0 if items != [] else 1.0,
    "slice": lambda items: 1.0 + len(items[-2:]),
    "plus": lambda items: len([*items, 1]),
    "isinstance": lambda items: 2.0 if isinstance(items, list) else 1.0,
}


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.passes_without_graphs("where a list is read, few steps can be replayed")
def test_a_list_that_is_looked_at(look, late):
    """What the step finds out about a list that it appends to is true in each step."""

    def script(diary: Diary) -> None:
        net = Net()

        def step_fn(batch: Any) -> Tensor:
            loss, _ = cross_entropy(net, batch)
            if late:
                net.history.append(3)
            loss = loss * LOOKS[look](net.history)
            if not late:
                net.history.append(3)
            return loss

        step = diary.step(step_fn, model=net, optimizer=adamw(net))
        for index, batch in enumerate(batches(26)):
            if index in (9, 10, 20):
                net.history.clear()
            diary.write("result", step(batch).detach())
            diary.write("written", state_of(net))

    both(script, replays=1)


def test_one_list_under_two_names():
    def script(diary: Diary) -> None:
        net = Net()
        other = net.history

        def step_fn(batch: Any) -> Tensor:
            loss, _ = cross_entropy(net, batch)
            net.history.append(loss.detach())
            other.append(len(other))
            return loss

        step = diary.step(step_fn, model=net, optimizer=adamw(net))
        for batch in batches(STEPS):
            diary.write("result", step(batch).detach())
            diary.write("written", state_of(net))

    assert both(script, replays=1).steps_replayed == 0


def test_a_number_that_a_tensor_is_raised_to_is_refused():
    def script(diary: Diary) -> None:
        net = Net()

        def step_fn(batch: Any) -> Tensor:
            net.n += 1
            return cross_entropy(net, batch)[0] ** (1 + 0.01 * net.n)

        step = diary.step(step_fn, model=net, optimizer=adamw(net))
        for batch in batches(STEPS):
            diary.write("result", step(batch).detach())
            diary.write("n", net.n)

    report = both(script, replays=1)
    assert report.steps_replayed == 0
    assert any("net.n is written by the step" in f.reason for f in report.fallbacks), str(report)


def test_a_number_that_the_step_returns():
    """A graph would return that of its capture."""

    def script(diary: Diary) -> None:
        net = Net()

        def step_fn(batch: Any) -> dict[str, Any]:
            before = net.n
            net.n += 1
            return {"loss": cross_entropy(net, batch)[0], "before": before, "after": net.n}

        step = diary.step(step_fn, model=net, optimizer=adamw(net))
        for batch in batches(STEPS):
            result = step(batch)
            diary.write("result", (result["loss"].detach(), result["before"], result["after"]))

    assert both(script, replays=1).steps_replayed == 0


def test_steps_without_writes_are_read_by_their_graph_alone():
    """Nothing is added to the replay of a step that writes nothing."""
    net = Net()
    del net.layers._forward_hooks[next(iter(net.layers._forward_hooks))]
    step = pygraph_step(hooked, net)
    for batch in batches(STEPS):
        step(batch)
    captures = [c for v in step._runner._signatures.variants() for c in v.captures.values()]
    assert captures and all(c.writer is None and isinstance(c.outputs, Outputs) for c in captures)


@pytest.mark.slow
@pytest.mark.passes_without_graphs("the trace alone is asked")
def test_code_of_inductor_has_the_same_writes():
    """The counters are taken out of the graph that is compiled; a silent run leaves everything as it was."""
    from pygraph_train.regions.inductor import compile_whole
    from pygraph_train.tracing.reproducing import ReproducingTrace
    from pygraph_train.tracing.silent_call import SilentCall

    net = Net()
    trace = ReproducingTrace(torch.device("cpu"), compiler=compile_whole)

    def step_fn(batch: Any) -> Tensor:
        return several(net, batch)

    for index, batch in enumerate(batches(3)):
        trace(step_fn, (batch,), {}).backward()
        assert trace.problem is None and trace.reproduces and net.n == index + 1
    before = state_of(net)
    expected = SilentCall(trace, keep=True)(step_fn, (batch,), {})
    outputs = trace.take_outputs()
    after = state_of(net)
    assert after["buf"] is before["buf"] and [after[k] for k in ("n", "calls")] == [3, 3]
    assert all(map(operator.is_, before["history"], after["history"])) and len(after["history"]) == 6
    trace.write(step_fn, (batch,), {}, outputs)
    assert net.n == 4 and len(net.history) == 8 and net.last[0] == 4
    assert torch.equal(net.last[1], expected.detach())


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_full_deque_that_the_step_reads_is_left_to_python(side: str) -> None:
    """Dynamo drops nothing of a full one before the step reads it."""

    def script(diary: Diary) -> None:
        net = Net()
        optimizer = adamw(net)
        kept: collections.deque[Tensor] = collections.deque(maxlen=3)

        def step_fn(batch: Any) -> Tensor:
            out = net(batch[0])
            (kept.append if side == "left" else kept.appendleft)(out.detach().mean(0))
            apart = (out.mean(0) - kept[0 if side == "left" else -1]).abs().sum()
            loss: Tensor = nn.functional.cross_entropy(out, batch[1]) + 0.1 * apart
            return loss

        step = diary.step(step_fn, model=net, optimizer=optimizer)
        for batch in batches(30):
            diary.write("loss", step(batch))
            diary.write("kept", list(kept))
        diary.write_state(net, optimizer)

    both(script, replays=10)


def of_somebody_else(count: int, tensor: Tensor) -> Tensor:
    """It may write to all that it is given, as far as anybody knows."""
    return tensor.add_(count)


@pytest.mark.passes_without_graphs("nothing is captured")
def test_a_run_that_fails_is_taken_back_where_sizes_are_inputs() -> None:
    graph = torch.fx.Graph()
    inputs = [graph.placeholder(name) for name in ("size", "tensor")]
    graph.output(graph.call_function(of_somebody_else, tuple(inputs)))
    runs, tensor = FailedRuns(torch.fx.GraphModule({}, graph), torch.device("cpu")), torch.zeros(2)
    before = runs.before((3, tensor))
    of_somebody_else(3, tensor)
    before.restore()
    assert torch.equal(tensor, torch.zeros(2))
