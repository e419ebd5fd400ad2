"""Weights that each of several calls uses more than once: in which order their gradients are added."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from replays import regions_ran, runs_of_graphs
from torch import Tensor, nn
from torch.nn.functional import softplus
from torch.nn.utils.parametrizations import spectral_norm
from training import Diary, adamw, batches, both, differs, frozen

from pygraph_train import backend


class Twice(nn.Module):
    """Uses one of its layers twice."""

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.last = nn.Linear(6, 6), nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(torch.tanh(self.twice(torch.tanh(self.twice(x)))))
        return out


def spectral() -> nn.Module:
    """Spectral normalisation uses a weight twice: as it is, and to find its largest singular value."""
    return nn.Sequential(spectral_norm(nn.Linear(6, 8)), nn.LeakyReLU(), spectral_norm(nn.Linear(8, 1)))


class _Sum(torch.autograd.Function):
    """Hands over the sum of the gradients of all uses."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


def judged(judge: Callable[[Tensor], Tensor], real: Tensor, made: Tensor) -> Tensor:
    return softplus(-judge(real)).mean() + softplus(judge(made)).mean()


@pytest.mark.parametrize("kind", [Twice, spectral])
def test_each_call_hands_over_its_sum_as_under_torch_compile(kind: Callable[[], nn.Module]) -> None:
    """Plain training adds each use to what there is; compiled functions first add up the uses of one call."""

    def gradients(how: str) -> list[Any]:
        torch._dynamo.reset()
        backend.reset()
        torch.manual_seed(0)
        model, found = kind(), []
        call: Any = model
        if how == "sums":

            def call(x: Tensor) -> Any:
                sums = {name: _Sum.apply(p) for name, p in model.named_parameters()}
                return torch.func.functional_call(model, sums, (x,))

        elif how == "pygraph":
            call = backend.compile(model, engine="emulated", compile=False)
        elif how:
            call = torch.compile(model, backend=how)
        for x, _ in batches(12):
            model.zero_grad()
            judged(call, x, x.flip(0)).backward()
            found.append([p.grad for p in model.parameters()])
        return found

    plain, sums, of_compile, ours = map(gradients, ["", "sums", "aot_eager", "pygraph"])
    regions_ran(6)
    assert differs(of_compile, ours) is None
    assert differs(sums, ours) is None
    assert differs(plain, ours) is not None


def parts() -> tuple[Any, ...]:
    """A maker and a judge with spectral normalisation, and an optimizer for each."""
    maker = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 6))
    judge = spectral()
    return maker, judge, adamw(maker), adamw(judge)


def gan(*given: Any, backward: Callable[[Tensor], Any]) -> Any:
    """The step of a GAN of `parts`: one backward goes through two calls of the judge."""
    maker, judge, of_maker, of_judge = given

    def step(real: Tensor) -> tuple[Tensor, Tensor]:
        made = maker(torch.randn(len(real), 4))
        of_judge.zero_grad()
        first = judged(judge, real, made.detach())
        backward(first)
        of_judge.step()
        of_maker.zero_grad()
        second = softplus(-judge(made)).mean()
        backward(second)
        of_maker.step()
        return first.detach(), second.detach()

    return step


def train(script: Any, step: Any, *models: nn.Module) -> None:
    for real, _ in batches(35):
        script.write("losses", step(real))
        for model in models:
            script.write("state", model.state_dict())
            script.write("gradients", [p.grad for p in model.parameters()])


def same(one: Any, other: Any) -> None:
    """Two runs wrote the same."""
    assert one.entries and differs(frozen(one.entries), frozen(other.entries)) is None


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch.compiler.reset()
    backend.reset()


@pytest.mark.parametrize("config", [{}, {"fuse": "off"}])
def test_a_step_that_is_compiled_as_a_whole_has_the_sums_of_plain_training(config: dict[str, Any]) -> None:
    """One compiled function makes both calls."""

    def script(diary: Diary) -> None:
        judge = spectral()
        optimizer = adamw(judge)
        step = diary.step(lambda x: judged(judge, x, x.flip(0)), model=judge, optimizer=optimizer)
        train(diary, step, judge)

    both(script, replays=60 if config else 25, plan="{F} {B} {O}" if config else "{F B O}", **config)


def test_a_gan_in_one_graph() -> None:
    def script(diary: Diary) -> None:
        made = parts()
        maker, judge, *optimizers = made
        options: dict[str, Any] = {"model": nn.ModuleList([maker, judge]), "optimizer": optimizers}
        step = diary.step(
            gan(*made, backward=lambda loss: loss.backward()), manual_optimization=True, **options
        )
        train(diary, step, maker, judge)

    both(script, replays=25, plan="{F B O}")


@pytest.mark.quick
@pytest.mark.parametrize("loop", ["stock", "whole", "eager"])
def test_a_gan_in_accelerate(loop: str) -> None:
    """A stock loop computes the same with graphs as compiled; a whole step, and eager kernels, as plain training."""
    accelerate_training = pytest.importorskip("accelerate_training", exc_type=ImportError)
    from pygraph_train import PyGraph

    def script(script: Any) -> None:
        made = script.accelerator.prepare(*parts())
        step = gan(*made, backward=lambda loss: script.accelerator.backward(loss))
        train(script, script.graphed(step) if loop == "whole" else step, *made[:2])

    run = accelerate_training.run
    compiled = PyGraph(engine="emulated", warmup_steps=accelerate_training.NEVER)
    plugin = PyGraph(engine="emulated", warmup_steps=2, compile=False if loop == "eager" else "auto")
    same(run(script, compiled if loop == "stock" else None), run(script, plugin))
    assert runs_of_graphs(plugin.report()) > 25
    if loop == "stock":
        regions_ran(150)


@pytest.mark.quick
@pytest.mark.parametrize("loop", ["stock", "whole", "eager"])
def test_a_gan_in_fabric(loop: str) -> None:
    """As in Accelerate."""
    fabric_training = pytest.importorskip("fabric_training", exc_type=ImportError)
    from pygraph_train import PyGraphFabric

    def script(script: Any) -> None:
        maker, judge, of_maker, of_judge = parts()
        fabric = script.fabric
        (maker, of_maker), (judge, of_judge) = fabric.setup(maker, of_maker), fabric.setup(judge, of_judge)
        step = gan(maker, judge, of_maker, of_judge, backward=lambda loss: fabric.backward(loss))
        if loop == "whole" and script.pygraph is not None:
            options: dict[str, Any] = {"model": [maker, judge], "optimizer": [of_maker, of_judge]}
            step = script.pygraph.graphed_step(step, manual_optimization=True, **options)
        train(script, step, maker, judge)

    run = fabric_training.run
    compiled = PyGraphFabric(engine="emulated", warmup_steps=fabric_training.NEVER)
    pygraph = PyGraphFabric(engine="emulated", warmup_steps=2, compile=False if loop == "eager" else "auto")
    same(run(script, compiled if loop == "stock" else None), run(script, pygraph))
    assert runs_of_graphs(pygraph.report()) > 25
    if loop == "stock":
        regions_ran(150)


@pytest.mark.quick
@pytest.mark.parametrize("loop", ["phases", "whole", "eager"])
def test_a_gan_under_manual_optimization_of_lightning(loop: str) -> None:
    """As in Accelerate."""
    pl = pytest.importorskip("lightning.pytorch")
    from lightning_training import emulated, fit

    class Gan(pl.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.maker, self.judge, *_ = parts()

        def training_step(self, batch: Any, batch_idx: int) -> None:
            gan(self.maker, self.judge, *self.optimizers(), backward=self.manual_backward)(batch[0])

        def configure_optimizers(self) -> Any:
            return [adamw(self.maker), adamw(self.judge)]

    def run(**config: Any) -> Any:
        torch.manual_seed(0)
        return fit([emulated(**config)] if config else [], module=Gan())

    configs: dict[str, dict[str, Any]] = {
        "phases": {"fuse": "off"},
        "whole": {"fuse": "auto"},
        "eager": {"fuse": "off", "compile": False},
    }
    config = configs[loop]
    graphed = run(**config)
    assert runs_of_graphs(graphed.report) > 30
    if loop == "phases":
        regions_ran(150)
    same(run(**config, warmup_steps=10**6) if loop == "phases" else run(), graphed)
