"""Runs one Fabric script without and with `PyGraphFabric`, and compares everything bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from replays import enough
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from training import Diary, Net, batches, differs

from pygraph_train import PyGraphFabric, backend
from pygraph_train.report.loop_report import LoopReport

NEVER = 10**6  # warm-up steps: compiled as with graphs, but no graph is ever made


@pytest.fixture(autouse=True)
def fresh() -> None:
    """Around every test of a module that imports it: nothing compiled."""
    torch.compiler.reset()
    backend.reset()


class Script(Diary):
    """What a script gets: its Fabric, what is attached to it if anything is, and a diary of what has to be equal."""

    def __init__(self, fabric: Fabric, pygraph: PyGraphFabric | None) -> None:
        super().__init__(None)
        self.fabric = fabric
        self.pygraph = pygraph

    def whole(
        self, fn: Callable[..., Tensor], model: Any, optimizer: Any, **clipping: Any
    ) -> Callable[..., Tensor]:
        """A step of everything: `graphed_step`, or what a Fabric loop has in its place.

        Its keyword `update` says whether the optimizer steps; otherwise gradients are added up. The norm that is
        clipped goes into the diary.
        """
        fabric, pending = self.fabric, False
        if self.pygraph is not None:
            graphed = self.pygraph.graphed_step(fn, model=model, optimizer=optimizer, **clipping)

            def step(*args: Any, update: bool = True) -> Tensor:
                with fabric.no_backward_sync(model, enabled=not update):
                    result = graphed(*args)
                if update:
                    self.write("norm", graphed.norm)
                return result

            return step

        def plain(*args: Any, update: bool = True) -> Tensor:
            nonlocal pending
            if not pending:
                optimizer.zero_grad()
            with fabric.no_backward_sync(model, enabled=not update):
                loss = fn(*args)
                fabric.backward(loss)
            if update:
                norm = fabric.clip_gradients(model, optimizer, **clipping) if clipping else None
                optimizer.step()
                self.write("norm", norm)
            pending = not update
            return loss.detach()

        return plain


def run(script: Callable[[Script], None], pygraph: PyGraphFabric | None, **options: Any) -> Script:
    """One run; nothing is attached where `pygraph` is None."""
    torch.manual_seed(0)
    given = {name: make() if callable(make) else make for name, make in options.items()}
    fabric = Fabric(accelerator="cpu", **{"devices": 1, **given})
    if pygraph is not None:
        pygraph.attach(fabric)
    fabric.launch()
    made = Script(fabric, pygraph)
    script(made)
    if pygraph is not None:
        pygraph.detach()
    return made


def both(
    script: Callable[[Script], None],
    *,
    replays: int | None = None,
    plan: str | None = None,
    refused: str | None = None,
    never: str | None = None,
    compiled_reference: bool = False,
    **options: Any,
) -> LoopReport:
    """Run `script` without and with `PyGraphFabric`; everything that it wrote has to be equal.

    Args:
        script: the training script.
        replays: how often graphs have to run at least: see `replays.enough`.
        plan: which plan the report has to end with.
        refused, never: why no graph runs.
        compiled_reference: compare with ours without graphs, where compiling itself changes rounding.
        **options: of the Fabric; functions are called, once for each run.
    """
    never_graphed = PyGraphFabric(engine="emulated", warmup_steps=NEVER) if compiled_reference else None
    plain = run(script, never_graphed, **options)
    pygraph = PyGraphFabric(engine="emulated", warmup_steps=2)
    graphed = run(script, pygraph, **options)
    report = pygraph.report()
    assert plain.entries, "the script compared nothing"
    assert len(plain.entries) == len(graphed.entries)
    for index, (expected, found) in enumerate(zip(plain.entries, graphed.entries, strict=True)):
        difference = differs(expected[1], found[1])
        assert difference is None, f"entry {index}, {expected[0]}{difference}\n{report}"
    enough([report], replays, plan, refused, never)
    return report


def setup(
    script: Script, *, net: type[nn.Module] = Net, fused: bool = True, steps: int = 30, **options: Any
) -> Any:
    """Model and optimizer that Fabric has set up, a loader of batches `[x, y]`, and a cosine schedule."""
    model = net(**options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
    model, optimizer = script.fabric.setup(model, optimizer)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
    xs, ys = zip(*batches(steps), strict=True)
    loader = DataLoader(TensorDataset(torch.cat(xs), torch.cat(ys)), batch_size=8)
    return model, optimizer, script.fabric.setup_dataloaders(loader), schedule


def loss_of(model: nn.Module, batch: list[Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])
