"""`GraphedStep`: a loop of plain PyTorch."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pygraph_train import GraphedStep, PyGraphError, explain
from pygraph_train.torch_private.stock_dynamo import traces

from .compare import ENGINE, Run, compare, same_as_plain
from .models import Net, adamw, batches, cross_entropy, loss_of, sgd


@pytest.mark.notices("the last tensor of a batch is not copied", "a recording leaves its traces")
@pytest.mark.parametrize("optimizer", [adamw, sgd])
@pytest.mark.quick
@same_as_plain(replays=15)
def test_a_loop(run: Run, optimizer: Any) -> None:
    model = Net()
    step = run.step(loss_of(model), model=model, optimizer=optimizer(model))
    for batch in batches():
        step(batch)


@pytest.mark.notices("results are overwritten by the next replay")
@same_as_plain(replays=15)
def test_results_besides_the_loss(run: Run) -> None:
    """Each is the caller's to keep: no later step writes into it."""
    model, kept = Net(), []

    def step_fn(x: Tensor, *, y: Tensor) -> dict[str, Any]:
        out = model(x)
        return {"loss": cross_entropy(out, y), "out": out, "rows": len(x), "parts": [out[:2], out.argmax(1)]}

    step = run.step(step_fn, model=model, optimizer=adamw(model))
    for x, y in batches():
        result = step(x, y=y)
        kept.append([result["loss"], result["out"], result["parts"]])
    run.note("kept results", kept)


@pytest.mark.xfail(strict=True, reason="replays hand out a copy of each")
@same_as_plain(replays=15)
def test_results_that_share_memory(run: Run) -> None:
    model = Net()

    def step_fn(x: Tensor, y: Tensor) -> dict[str, Any]:
        out = model(x)
        return {"loss": cross_entropy(out, y), "out": out.detach(), "row": out.detach()[0]}

    step = run.step(step_fn, model=model, optimizer=adamw(model))
    for batch in batches():
        result = step(*batch)
        result["out"].zero_()
        run.note("row", result["row"])


@same_as_plain(replays=15, updates=0)
def test_the_loop_updates_by_itself(run: Run) -> None:
    model = Net()
    optimizer = adamw(model)
    step = run.step(loss_of(model), model=model)
    run.watch(optimizer)
    for batch in batches():
        step(batch)
        optimizer.step()
        optimizer.zero_grad()
        run.snapshot("after the update")


@same_as_plain(replays=15)
def test_a_step_that_makes_its_backwards_and_updates(run: Run) -> None:
    """`manual_optimization`: the step of a GAN, with two optimizers."""
    maker = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 6))
    judge = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.1), nn.LeakyReLU(0.2), nn.Linear(8, 1))
    of_maker, of_judge = adamw(maker), adamw(judge)

    def step_fn(real: Tensor) -> Tensor:
        made = maker(torch.randn(len(real), 4))
        loss = (
            nn.functional.softplus(-judge(real)).mean() + nn.functional.softplus(judge(made.detach())).mean()
        )
        of_judge.zero_grad()
        loss.backward()
        of_judge.step()
        of_maker.zero_grad()
        nn.functional.softplus(-judge(made)).mean().backward()
        of_maker.step()
        return loss.detach()

    model = nn.ModuleList([maker, judge])
    step = run.step(step_fn, model=model, optimizer=[of_maker, of_judge], manual_optimization=True)
    for real, _ in batches():
        step(real)


def trained_by_closures(run: Run, model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    def step_fn(x: Tensor, y: Tensor) -> Tensor:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = cross_entropy(model(x), y)
            loss.backward()
            return loss

        return optimizer.step(closure)

    step = run.step(step_fn, model=model, optimizer=optimizer, manual_optimization=True)
    for batch in batches():
        step(*batch)
    return step


class Step:
    """A step that is an object, with attributes of its own."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer
        self.make = self.close = self.fn = self.loop = "the user's"

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        loss = cross_entropy(self.model(x), y)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


@same_as_plain(replays=12)
def test_a_step_by_hand_that_is_an_object(run: Run) -> None:
    model = Net()
    optimizer = adamw(model)
    step = run.step(Step(model, optimizer), model=model, optimizer=optimizer, manual_optimization=True)
    for batch in batches():
        step(*batch)


@same_as_plain(replays=15, updates=10)
def test_a_step_by_hand_gives_its_optimizer_a_closure(run: Run) -> None:
    model = Net()
    trained_by_closures(run, model, adamw(model))


@same_as_plain(replays=15, updates=0)
def test_a_step_by_hand_of_lbfgs(run: Run) -> None:
    model = Net(dropout=0.0)
    step = trained_by_closures(run, model, torch.optim.LBFGS(model.parameters(), max_iter=3))
    if run.ours:
        report = step.report().to_dict()
        assert report["running_plan"] == "{F} {B} O" and report["steps_from_graphs"] == 0
        assert "how often to run the closure" in report["headline"]


@same_as_plain(replays=30)
def test_two_steps_of_one_model_take_turns(run: Run) -> None:
    model = Net()
    first = run.step(loss_of(model), model=model, optimizer=adamw(model))
    second = run.step(lambda x, y: loss_of(model)((x * 2, y)) * 0.5, model=model, optimizer=sgd(model))
    for number, batch in enumerate(batches(48)):
        first(batch) if number % 2 else second(*batch)


@pytest.mark.skipif(
    torch.__version__ < "2.13", reason="Dynamo shares its limit of traces among trainings until torch 2.13"
)
@same_as_plain(replays=70)
def test_ten_trainings_in_one_process(run: Run) -> None:
    """A sweep. Python runs the step, so Dynamo begins in the model's forward, whose code all trainings share."""
    for _ in range(10):
        model = Net()

        def step_fn(x: Tensor, y: Tensor, model: Net = model) -> Tensor:
            numbers = x.cpu().numpy()
            numbers = numbers - numbers.max(1, keepdims=True)
            return cross_entropy(model(torch.from_numpy(numbers).to(x.device)), y)

        step = run.step(step_fn, model=model, optimizer=sgd(model))
        for batch in batches(12):
            step(*batch)


@same_as_plain(replays=15)
def test_evaluation_between_steps_sees_the_weights_of_now(run: Run) -> None:
    model = Net()
    step = run.step(loss_of(model), model=model, optimizer=adamw(model))
    for batch in batches():
        step(batch)
        model.eval()
        with torch.no_grad():
            run.note("evaluation", model(batch[0]))
        model.train()


@pytest.mark.parametrize(
    "config",
    [
        {"verify": "always"},
        {"verify": "off"},
        {"optimizer": "on"},
        {"compile": False},
        {"warmup_steps": 3},
    ],
    ids=str,
)
@pytest.mark.quick
def test_every_option_trains_the_same(config: dict[str, Any]) -> None:
    def training(run: Run) -> None:
        model = Net()
        step = run.step(loss_of(model), model=model, optimizer=adamw(model))
        for batch in batches():
            step(batch)

    compare(training, replays=12, **config)


@pytest.mark.parametrize("phase", ["forward", "backward", "optimizer"])
@pytest.mark.quick
def test_a_phase_that_is_off_has_no_graph(phase: str) -> None:
    def training(run: Run) -> None:
        model = Net()
        step = run.step(loss_of(model), model=model, optimizer=adamw(model))
        for batch in batches():
            step(batch)

    counts = compare(training, refused="what is off has no graph", **{phase: "off"})
    assert counts[{"forward": "F", "backward": "B", "optimizer": "O"}[phase]] == 0
    assert sum(counts.values()) >= 12


@pytest.mark.parametrize("off", ["engine", "environment"])
@pytest.mark.quick
@pytest.mark.passes_without_graphs("graphs are off")
def test_without_graphs_nothing_changes(off: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def training(run: Run) -> None:
        model = Net()
        step = run.step(loss_of(model), model=model, optimizer=adamw(model))
        for batch in batches(12):
            step(batch)

    if off == "environment":
        monkeypatch.setenv("PYGRAPH_DISABLE", "1")
    config = {"engine": "off"} if off == "engine" else {}
    assert not any(compare(training, refused="graphs are off", **config).values())


def reading(model: nn.Module) -> Any:
    """A step whose forward no single graph holds."""

    def step_fn(batch: Any) -> Tensor:
        loss = cross_entropy(model(batch[0]), batch[1])
        for _ in range(1 + int(loss.item() / 100)):
            loss = loss * 0.9
        return loss

    return step_fn


def test_explain_names_the_line_and_changes_nothing() -> None:
    model = Net()
    optimizer, batch = adamw(model), batches(1)[0]
    before = [p.detach().clone() for p in model.parameters()]
    random_state = torch.get_rng_state()
    explanation = explain(reading(model), batch, model=model, optimizer=optimizer)
    assert not explanation.is_one_graph
    (obstacle,) = explanation.to_dict()["obstacles"]
    assert f"{__file__}:{reading.__code__.co_firstlineno + 5}" == obstacle["where"], obstacle
    assert explain(loss_of(model), batch, model=model, optimizer=optimizer).is_one_graph
    assert all(map(torch.equal, before, model.parameters()))
    assert torch.equal(random_state, torch.get_rng_state()) and model.first.weight.grad is None


def noisy(x: Tensor) -> Tensor:
    bound = torch.tensor(x.shape[1]).sqrt()
    return x + torch.empty_like(x).uniform_(-1, bound)  # reads the bound, as NEFTune does


@pytest.mark.passes_without_graphs("no graph has to run")
@pytest.mark.quick
def test_a_reason_names_the_line_that_was_traced() -> None:
    """And not the first line of the part that a capture is made of."""
    model = Net()

    def step_fn(batch: Any) -> Tensor:
        x = batch[0] * 2
        return cross_entropy(model(noisy(x)), batch[1])

    options: dict[str, Any] = {"engine": ENGINE, "warmup_steps": 2, "forward": "on"}
    with GraphedStep(step_fn, model=model, optimizer=adamw(model), **options) as step:
        for batch in batches(8):
            step(batch)
        (told,) = step.report().to_dict()["fallbacks"]
    (obstacle,) = explain(step_fn, batch, model=model, optimizer=adamw(model)).to_dict()["obstacles"]
    assert told["where"] == obstacle["where"] == f"{__file__}:{noisy.__code__.co_firstlineno + 2}"


@pytest.mark.parametrize("last", [False, True])
def test_a_number_that_is_appended_takes_no_trace_in_each_step(last: bool) -> None:
    """`append` waits on the stack of the function while the graph in front of the number ends."""
    model, found = Net(), list[float]()

    def step_fn(batch: Any) -> Tensor:
        out = model(batch[0])
        loss = cross_entropy(out, batch[1])
        found.append((loss if last else out.mean()).item())
        return loss if last else cross_entropy(out, batch[1])

    options: dict[str, Any] = {"engine": ENGINE, "warmup_steps": 2, "forward": "on"}
    with GraphedStep(step_fn, model=model, optimizer=adamw(model), **options) as step:
        counts = [(step(batch), traces())[1] for batch in batches(30)]
        assert step.report().phases_from_graphs["F"] >= 20
    assert counts[3] == counts[-1] and len(found) == 30


COUNTS = SimpleNamespace(right=0, steps=0, told=[])
"""Of a script, whose functions find it among their globals: Dynamo takes its numbers for fixed ones."""


def test_counters_of_a_script_take_no_trace_in_each_step() -> None:
    found = []
    for ours in (False, True):
        torch.manual_seed(0)
        model = Net()
        vars(COUNTS).update(right=0, steps=0, told=[])

        def step_fn(batch: Any, model: nn.Module = model) -> Tensor:
            out = model(batch[0])
            COUNTS.steps += 1
            COUNTS.right += (out.argmax(1) == batch[1]).sum().item()
            COUNTS.told.append((COUNTS.steps, out.mean().item()))
            return cross_entropy(out, batch[1])

        options: dict[str, Any] = {"engine": ENGINE if ours else "off", "warmup_steps": 2, "forward": "on"}
        with GraphedStep(step_fn, model=model, optimizer=adamw(model), **options) as step:
            counts = [(step(batch), traces())[1] for batch in batches(30)]
            assert not ours or step.report().phases_from_graphs["F"] >= 15
        assert counts[8] == counts[-1]
        found.append([*vars(COUNTS).values(), *(p.tolist() for p in model.parameters())])
    assert found[0] == found[1] and found[0][1] == 30


def test_a_text_with_a_counter_and_a_number_of_the_step() -> None:
    """The text of the counter waits on the stack while the graph in front of the other number ends."""
    model, told = Net(), list[str]()
    vars(COUNTS).update(steps=0)

    def step_fn(batch: Any) -> Tensor:
        loss = cross_entropy(model(batch[0]), batch[1])
        COUNTS.steps += 1
        if COUNTS.steps % 5 == 0:
            told.append(f"step {COUNTS.steps}: {loss.item():.3f}")
        return loss

    options: dict[str, Any] = {"engine": ENGINE, "warmup_steps": 2, "forward": "on"}
    with GraphedStep(step_fn, model=model, optimizer=adamw(model), **options) as step:
        losses = [float(step(batch)) for batch in batches(40)]
        assert step.report().phases_from_graphs["F"] >= 20
    assert told == [f"step {number}: {losses[number - 1]:.3f}" for number in range(5, 41, 5)]


def test_an_update_says_why_it_waits() -> None:
    """A loss that is kept with its autograd graph, as for a log: its backward may come."""
    model, kept = Net(), []
    optimizer = adamw(model)

    def step_fn(batch: Any) -> Tensor:
        kept.append(cross_entropy(model(batch[0] * 2), batch[1]))
        optimizer.zero_grad()
        loss = cross_entropy(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        return loss.detach()

    options: dict[str, Any] = {
        "engine": ENGINE,
        "warmup_steps": 2,
        "forward": "on",
        "manual_optimization": True,
    }
    with GraphedStep(step_fn, model=model, optimizer=optimizer, **options) as step:
        for number, batch in enumerate(batches(30)):
            step(batch)
            if number < 12 or len(kept) > 2:
                kept.clear()
        report = step.report()
    assert 0 < report.phases_from_graphs["O"] < 20 < report.phases_from_graphs["F"]
    assert "a forward still waits for its backward" in report.headline()


@pytest.mark.parametrize(("warmup_steps", "steps"), [(2, 7), (3, 8)])
@pytest.mark.quick
def test_the_report_of_a_short_run_tells_of_its_last_steps(warmup_steps: int, steps: int) -> None:
    """Its first ones, which come before graphs, are not outnumbered yet."""
    model = Net()
    options: dict[str, Any] = {"engine": ENGINE, "warmup_steps": warmup_steps, "forward": "on"}
    with GraphedStep(loss_of(model), model=model, optimizer=adamw(model), **options) as step:
        for batch in batches(steps):
            step(batch)
        told = step.report().to_dict()
    assert told["steps_from_graphs"] >= 1
    assert told["running_plan"] == "{F} {B} {O}" and "run without a graph" not in told["headline"], told


def test_the_report_is_plain_data_and_says_what_ran() -> None:
    model = Net()
    step = GraphedStep(
        loss_of(model), model=model, optimizer=adamw(model), engine=ENGINE, warmup_steps=2, forward="on"
    )
    for batch in batches():
        step(batch)
    told = json.loads(json.dumps(step.report().to_dict()))
    assert told["engine"] == ENGINE and told["steps"] == 24
    assert 15 <= told["steps_from_graphs"] == min(told["phases_from_graphs"].values()) < 24
    assert f"{told['steps_from_graphs']} of 24" in told["headline"]
    step.close()


@pytest.mark.parametrize("wrong", [{"engine": "cpu"}, {"warmup_steps": 0}, {"no_such_option": 1}], ids=str)
@pytest.mark.quick
def test_a_wrong_option_is_named_at_once(wrong: dict[str, Any]) -> None:
    model = Net()
    with pytest.raises((ValueError, TypeError), match=next(iter(wrong))):
        GraphedStep(loss_of(model), model=model, optimizer=adamw(model), **wrong)


def test_in_strict_mode_a_step_without_a_graph_ends_training() -> None:
    """A graph shows nothing to anomaly detection."""
    model = Net()
    options: dict[str, Any] = {"engine": ENGINE, "warmup_steps": 2, "on_failure": "raise"}
    step = GraphedStep(loss_of(model), model=model, optimizer=adamw(model), **options)
    with step, pytest.raises(PyGraphError, match="anomal"), torch.autograd.set_detect_anomaly(True):
        for batch in batches():
            step(batch)
