"""`explain` says how a step will run, as it then runs, and leaves no trace."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from training import Net, adamw, batches, differs, frozen, line_of, loss_of, sgd

import pygraph_train
from pygraph_train import Explanation, GraphedStep, explain

pytestmark = pytest.mark.passes_without_graphs("a step is explained; what is captured is thrown away")

Step = Callable[[Any], Any]


def ordinary(model: nn.Module) -> Step:
    return loss_of(model)


def in_a_dict(model: nn.Module) -> Step:
    def step(batch: Any) -> Any:
        loss = cross_entropy(model(batch[0]), batch[1])
        return {"loss": loss, "twice": loss.detach() * 2}

    return step


def counts(model: nn.Module) -> Step:
    seen = SimpleNamespace(steps=0)

    def step(batch: Any) -> Tensor:
        seen.steps += 1
        return cross_entropy(model(batch[0]), batch[1])

    return step


def reads_behind(model: nn.Module) -> Step:
    losses: list[float] = []

    def step(batch: Any) -> Tensor:
        loss = cross_entropy(model(batch[0]), batch[1])
        losses.append(loss.item())
        return loss

    return step


def reads_between(model: nn.Module) -> Step:
    def step(batch: Any) -> Tensor:
        out = model(batch[0])
        largest = out.abs().max().item()  # here
        return cross_entropy(out.sin() + out * min(largest, 1.0), batch[1])

    return step


def annealed(model: nn.Module) -> Step:
    seen = SimpleNamespace(steps=0)

    def step(batch: Any) -> Tensor:
        seen.steps += 1
        return cross_entropy(model(batch[0]), batch[1]) * (1.0 / seen.steps)

    return step


def measured(model: nn.Module) -> Step:
    right: list[float] = []

    @torch.no_grad()
    def measure(out: Tensor, y: Tensor) -> None:
        right.append((out.argmax(1) == y).float().mean().item())

    def step(batch: Any) -> Tensor:
        out = model(batch[0])
        loss = cross_entropy(out, batch[1])
        measure(out, batch[1])
        return loss

    return step


state = SimpleNamespace(tables=[dict.fromkeys(range(n), n) for n in range(64)], at=0)


def with_new_keys(model: nn.Module) -> Step:
    """Dynamo traces it anew in each call."""
    state.at = 0

    def step(batch: Any) -> Tensor:
        state.at += 1
        weight = sum(value for key, value in state.tables[state.at].items() if key > 0)
        return cross_entropy(model(batch[0]), batch[1]) * (1 + 1e-3 * weight)

    return step


def disabled(model: nn.Module) -> Step:
    @torch.compiler.disable
    def step(batch: Any) -> Tensor:
        return cross_entropy(model(batch[0]), batch[1])

    return step


def resized(model: nn.Module) -> Step:
    def step(batch: Any) -> Tensor:
        out = model(batch[0])
        room = torch.zeros(2, device=out.device)
        room.resize_(3)
        return cross_entropy(out + room.fill_(0.5), batch[1])

    return step


def penalized(model: nn.Module) -> Step:
    def step(batch: Any) -> Tensor:
        x = batch[0].clone().requires_grad_()
        out = model(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return cross_entropy(out, batch[1]) + slope.square().mean()

    return step


KINDS = (
    ordinary,
    in_a_dict,
    counts,
    reads_behind,
    reads_between,
    annealed,
    measured,
    with_new_keys,
    disabled,
    resized,
    penalized,
)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_explain_and_the_run_agree(kind: Callable[[nn.Module], Step]) -> None:
    model = Net()
    optimizer, step = adamw(model), kind(model)
    found = explain(step, batches(1)[0], model=model, optimizer=optimizer)
    graphed = GraphedStep(kind(model), model=model, optimizer=optimizer, engine="emulated", warmup_steps=2)
    for batch in batches(30):
        graphed(batch)
    report = graphed.report()
    graphed.close()
    phases = zip("FBO", report.to_dict()["phases_from_graphs"].values(), strict=True)
    plan = " ".join(f"{{{name}}}" if count >= 10 else name for name, count in phases)
    assert found.plan == plan, f"{found}\n{report}"
    assert ("{F}" in found.plan) == (found.graphs_of_forward > 0)
    assert found.is_one_graph == (found.plan == "{F} {B} {O}" and found.graphs_of_forward == 1), found


@pytest.mark.parametrize("kind", [ordinary, in_a_dict, counts, reads_behind, annealed, measured])
def test_what_costs_no_graph_is_no_obstacle(kind: Callable[[nn.Module], Step]) -> None:
    model = Net()
    found = explain(kind(model), batches(1)[0], model=model, optimizer=adamw(model))
    assert found.is_one_graph and found.graphs_of_forward == 1, found
    assert "{F} {B} {O}" in str(found)


def test_a_value_that_is_read_before_the_loss_is_named_with_its_line() -> None:
    model = Net()
    step = reads_between(model)
    found = explain(step, batches(1)[0], model=model, optimizer=adamw(model))
    (obstacle,) = found.obstacles
    assert obstacle.where == line_of(step, "# here") and ".item()" in obstacle.reason
    assert found.graphs_of_forward == 2 and "2 graphs" in str(found)
    assert "largest = out.abs().max().item()" in str(found)


def test_a_break_inside_of_a_module_is_named_with_its_line() -> None:
    class Prints(Net):
        def forward(self, x: Tensor) -> Tensor:
            x = torch.relu(self.first(x))
            print("x", end="")  # here
            return self.second(x.sin())

    model = Prints()
    found = explain(loss_of(model), batches(1)[0], model=model, optimizer=adamw(model))
    assert [o.where for o in found.obstacles] == [line_of(Prints.forward, "# here")], found
    assert json.loads(json.dumps(found.to_dict()))["obstacles"][0]["line"].startswith("print(")


class Counted(nn.Module):
    """A counter has Dynamo trace the first part anew in the second call, and a value is read between two layers."""

    def __init__(self, says: Callable[[int], None] = lambda calls: None) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 3)
        self.says, self.calls = says, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = torch.relu(self.first(x))
        self.says(self.calls)  # here
        largest = x.max().item()  # and here
        return self.second(x * min(largest, 1.0))


def says(calls: int) -> None:
    print(f"call {calls}", end="")


@pytest.mark.parametrize("prints", [False, True], ids=["counts", "prints"])
def test_all_obstacles_of_a_trace_are_told_at_once(prints: bool) -> None:
    model = Counted(says) if prints else Counted()
    found = explain(loss_of(model), batches(1)[0], model=model, optimizer=adamw(model))
    read, call = (line_of(Counted.forward, text) for text in ("# and here", "# here"))
    printed = {
        call,
        line_of(says, "print("),
    }  # Dynamo breaks at the call where it has seen the function before
    places = [o.where for o in found.obstacles]
    assert places[-1] == read and bool(printed & {*places}) is prints, found
    if (
        prints
    ):  # whether Dynamo takes the counter for a dynamic number depends on what the process has traced before
        anew = any("traces the step anew in each call" in o.reason for o in found.obstacles)
        assert found.plan[:3] == ("F B" if anew else "{F}"), found
    else:
        assert places == [read] and found.graphs_of_forward == 2, found
    assert not any("cuts none" in note for note in found.notes) and "too few" not in str(found), found


def hooked(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = adamw(model)
    optimizer.register_step_post_hook(lambda *_: None)
    return optimizer


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (hooked, "hook"),
        (lambda model: torch.optim.LBFGS(model.parameters()), "how often to run the closure"),
        (lambda model: torch.optim.Adafactor(model.parameters()), "on the host"),
    ],
    ids=["hook", "LBFGS", "Adafactor"],
)
def test_an_optimizer_that_stays_outside(make: Callable[[nn.Module], Any], words: str) -> None:
    model = Net()
    (obstacle,) = (
        found := explain(loss_of(model), batches(1)[0], model=model, optimizer=make(model))
    ).obstacles
    assert words in obstacle.reason and found.plan == "{F} {B} O", found


def test_kernels_of_the_cpu_are_no_obstacle_on_a_gpu() -> None:
    model = Net()
    found = explain(loss_of(model), batches(1)[0], model=model, optimizer=adamw(model, fused=False))
    assert found.is_one_graph and any("On the CPU" in note for note in found.notes), found


def test_a_step_that_raises_is_told_and_leaves_nothing() -> None:
    model = nn.Sequential(nn.BatchNorm1d(5), nn.Linear(6, 3))
    optimizer = adamw(model)

    def step(batch: Any) -> Tensor:
        return model(batch[0][:, :5]).sum()  # here

    before = everything(model, optimizer)
    (obstacle,) = explain(step, batches(1)[0], model=model, optimizer=optimizer).obstacles
    assert "raises RuntimeError" in obstacle.reason and obstacle.where == line_of(step, "# here")
    assert differs(before, everything(model, optimizer)) is None


def test_nothing_is_said_for_a_line_behind_which_the_step_raises() -> None:
    class Raises(Counted):
        def forward(self, x: Tensor) -> Tensor:
            largest = self.first(x).max().item()
            return self.first(self.first(x) * largest)

    model = Raises()
    found = explain(loss_of(model), batches(1)[0], model=model, optimizer=adamw(model))
    assert "raises RuntimeError" in found.obstacles[0].reason
    assert not any("cuts none" in note for note in found.notes), found


def test_a_result_that_is_no_loss_is_told() -> None:
    model = Net()
    (obstacle,) = explain(lambda batch: model(batch[0]), batches(1)[0], model=model).obstacles
    assert "must return the loss" in obstacle.reason


def everything(model: nn.Module, optimizer: Any) -> Any:
    gradients = {name: p.grad for name, p in model.named_parameters()}
    states = [torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()]
    return frozen([model.state_dict(), gradients, optimizer.state_dict(), states])


@pytest.mark.parametrize("begun", [False, True], ids=["new", "begun"])
def test_explain_leaves_no_trace(begun: bool) -> None:
    """Tensors are the same objects with the same values, and training goes on as without it."""

    def train(*, asks: bool) -> Any:
        torch.manual_seed(3)
        model = Net()
        optimizer = sgd(model)
        if begun:
            loss_of(model)(batches(1)[0]).backward()
            optimizer.step()
        batch = batches(1)[0]
        if asks:
            before = [everything(model, optimizer), frozen(list(batch))]
            objects = [*model.parameters(), *model.buffers(), *(p.grad for p in model.parameters())]
            assert explain(reads_between(model), batch, model=model, optimizer=optimizer).obstacles
            assert differs(before, [everything(model, optimizer), frozen(list(batch))]) is None
            after = [*model.parameters(), *model.buffers(), *(p.grad for p in model.parameters())]
            assert all(map(lambda a, b: a is b, objects, after))
        graphed = GraphedStep(reads_between(model), model=model, optimizer=optimizer, engine="emulated")
        losses = [graphed(batch) for batch in batches(14)]
        replays = graphed.report().steps_replayed
        graphed.close()
        return frozen([losses, model.state_dict()]), replays

    plain, asked = train(asks=False), train(asks=True)
    assert differs(plain[0], asked[0]) is None and plain[1] == asked[1] >= 5


def test_a_function_that_failed_is_traced_later() -> None:
    model = Net()
    optimizer, step = adamw(model), loss_of(model)
    bad = (torch.randn(8, 5), batches(1)[0][1])
    assert not explain(step, bad, model=model, optimizer=optimizer).is_one_graph
    assert explain(step, batches(1)[0], model=model, optimizer=optimizer).is_one_graph


def test_nothing_of_a_step_is_kept() -> None:
    import gc

    def nets() -> int:
        gc.collect()
        return sum(type(thing) is Net for thing in gc.get_objects())

    before = nets()
    for _ in range(3):
        explain(reads_between(model := Net()), batches(1)[0], model=model)
    del model
    assert nets() <= before


def test_what_is_on_around_the_step_is_all_told() -> None:
    model = Net()
    handle = torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        with torch.autograd.set_detect_anomaly(True):
            found = explain(loss_of(model), batches(1)[0], model=model, optimizer=adamw(model))
    finally:
        handle.remove()
    reasons = " ".join(o.reason for o in found.obstacles)
    assert "anomaly detection" in reasons and "a hook on all modules" in reasons
    assert "was not looked at" in str(found)


def test_parameters_without_a_shape_are_told() -> None:
    model = nn.LazyLinear(3)
    (obstacle,) = explain(loss_of(model), batches(1)[0], model=model, optimizer=sgd(model)).obstacles
    assert "has no shape yet" in obstacle.reason


def test_modules_are_found_and_several_optimizers_are_looked_at() -> None:
    model = Net()
    halves = [[*model.first.parameters()], [*model.second.parameters()]]
    optimizers = [torch.optim.SGD(halves[0], 0.1, fused=True), torch.optim.LBFGS(halves[1])]
    (obstacle,) = explain(loss_of(model), batches(1)[0], optimizer=optimizers).obstacles
    assert "LBFGS" in obstacle.reason


def test_something_that_is_no_step_is_refused() -> None:
    for wrong in (Net(), 3):
        with pytest.raises(TypeError, match="explain takes a function that computes the loss"):
            explain(wrong, torch.randn(6, 6))


def test_a_graphed_step_is_explained_between_its_steps() -> None:
    model = Net()
    step = GraphedStep(loss_of(model), model=model, optimizer=adamw(model), engine="emulated", warmup_steps=2)
    for batch in batches(8):
        step(batch)
    assert explain(step, batches(1)[0]).is_one_graph
    for batch in batches(8):
        step(batch)
    assert step.report().steps_replayed >= 12
    step.close()


def test_an_explanation_is_plain_data() -> None:
    model = Net()
    found = explain(reads_between(model), batches(1)[0], model=model)
    assert isinstance(found, Explanation) and copy.deepcopy(found) == found
    assert json.loads(json.dumps(found.to_dict()))["plan"] == found.plan == "{F} {B} O"
    assert any("No optimizer was given" in note for note in found.notes)


# -- frameworks --------------------------------------------------------------------------------------


def test_a_lightning_module() -> None:
    pl = pytest.importorskip("lightning.pytorch")

    class Module(pl.LightningModule):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__()
            self.net, self.configured = Net(), 0

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            out = self.net(batch[0])
            print("out", end="")  # here
            loss = cross_entropy(out.sin(), batch[1])
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            self.configured += 1
            optimizer = torch.optim.LBFGS(self.parameters())
            return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.ConstantLR(optimizer)}

    module = Module()
    before = frozen(module.state_dict())
    found = explain(module, batches(1)[0])
    assert differs(before, frozen(module.state_dict())) is None
    assert module.configured == 0 and "log" not in vars(module)
    assert [o.where for o in found.obstacles if o.where] == [line_of(Module.training_step, "# here")], found
    assert any("how often to run the closure" in o.reason for o in found.obstacles), found
    assert str(found).startswith("2 obstacles keep Module.training_step")
    assert any("no Trainer yet" in note for note in found.notes)


def test_a_graphed_step_that_makes_its_backwards_and_updates() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, fused=True)

    def step_fn(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    options = {"model": model, "optimizer": optimizer, "manual_optimization": True}
    step, batch = GraphedStep(step_fn, engine="emulated", **options), torch.randn(3, 4)
    step(batch)
    assert explain(step, batch).to_dict() == explain(step_fn, batch, **options).to_dict()
    assert step.report().to_dict()["steps"] == 1


def test_a_lightning_module_under_manual_optimization() -> None:
    pl = pytest.importorskip("lightning.pytorch")

    class Two(nn.Module):
        def __init__(self, reads: bool) -> None:
            super().__init__()
            self.net, self.reads = Net(), reads

        def forward(self, x: Tensor) -> Tensor:
            out = self.net(x)
            largest = out.max().item() if self.reads else 1.0  # here
            return out.sin() * largest

    class Module(pl.LightningModule):  # type: ignore[name-defined, misc]
        def __init__(self, reads: bool) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.one, self.other = Net(), Two(reads)

        def training_step(self, batch: Any, batch_idx: int) -> None:
            for optimizer, net in zip(self.optimizers(), (self.one, self.other), strict=True):
                self.toggle_optimizer(optimizer)
                loss = cross_entropy(net(batch[0]), batch[1])
                optimizer.zero_grad()
                self.manual_backward(loss)
                self.clip_gradients(optimizer, 1.0)
                optimizer.step()
                self.untoggle_optimizer(optimizer)
            self.log_dict({"loss": loss})

        def configure_optimizers(self) -> Any:
            return [adamw(self.one), adamw(self.other)]

    for reads in (False, True):
        module = Module(reads)
        before = frozen(module.state_dict())
        found = explain(module, batches(1)[0])
        assert differs(before, frozen(module.state_dict())) is None and "optimizers" not in vars(module)
        assert found.plan == "{F} {B} {O}" and found.graphs_of_forward == 2 + reads, found
        wanted = [line_of(Two.forward, "# here")] if reads else []
        assert [o.where for o in found.obstacles] == wanted, found


def test_a_graphed_step_of_accelerate() -> None:
    pytest.importorskip("accelerate")
    from accelerate_training import fresh_state

    with fresh_state():
        accelerator = pygraph_train.Accelerator(cpu=True, plugins=[pygraph_train.PyGraph(engine="emulated")])
        plain = Net()
        model, optimizer = accelerator.prepare(plain, adamw(plain))

        def train_step(x: Tensor, y: Tensor) -> Tensor:
            with accelerator.accumulate(model):
                loss = cross_entropy(model(x), y)
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            return loss

        step = accelerator.graphed_step(train_step)
        before = everything(plain, optimizer.optimizer)
        found = explain(step, *batches(1)[0])
        assert found.is_one_graph and found.name == "train_step", found
        assert differs(before, everything(plain, optimizer.optimizer)) is None

        def loss_fn(x: Tensor, y: Tensor) -> Tensor:
            return cross_entropy(model(x), y)

        assert explain(loss_fn, *batches(1)[0], model=model, optimizer=optimizer).is_one_graph
        accelerator.end_training()


def test_a_step_of_fabric() -> None:
    fabrics = pytest.importorskip("lightning.fabric")
    fabric = fabrics.Fabric(accelerator="cpu", devices=1)
    pygraph = pygraph_train.PyGraphFabric(engine="emulated").attach(fabric)
    plain = Net()
    model, optimizer = fabric.setup(plain, adamw(plain))

    def loss_fn(batch: Any) -> Tensor:
        return cross_entropy(model(batch[0]), batch[1])

    step = pygraph.graphed_step(loss_fn, model=model, optimizer=optimizer)
    (batch,) = batches(1)
    assert explain(step, batch).is_one_graph
    pygraph.detach()
