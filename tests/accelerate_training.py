"""Runs one Accelerate script on the stock class and on ours, and compares everything bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import accelerate
import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from replays import enough
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from training import Net, differs, frozen

import pygraph_train.backend as backend
from pygraph_train import Accelerator, PyGraph
from pygraph_train.report.loop_report import LoopReport

NEVER = 10**6  # warm-up steps: compiled as with graphs, but no graph is ever made


class Numbers(Dataset):
    """`count` classified points, the same in every run."""

    def __init__(self, count: int = 240, features: int = 6, classes: int = 3) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(count, features, generator=generator)
        self.y = torch.randint(0, classes, (count,), generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self.x[index], "y": self.y[index]}


class Island(Net):
    """A layer in single precision under autocast."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        with torch.autocast("cpu", enabled=False):
            return self.second(h.float())  # type: ignore[no-any-return]


class Script:
    """What a script gets: its Accelerator, and a diary of what has to be equal."""

    def __init__(self, accelerator: accelerate.Accelerator) -> None:
        self.accelerator: Any = accelerator
        self.entries: list[tuple[str, Any]] = []

    def write(self, name: str, value: Any) -> None:
        """Note a copy of the present value."""
        self.entries.append((name, frozen(value)))

    def write_state(self, model: nn.Module, optimizer: Any) -> None:
        """Note parameters, gradients, buffers, optimizer state and random state."""
        self.write("parameters", dict(model.named_parameters()))
        self.write("gradients", {name: p.grad for name, p in model.named_parameters()})
        self.write("buffers", dict(model.named_buffers()))
        self.write("optimizer", optimizer.state_dict())
        self.write("random state", torch.get_rng_state())

    def graphed(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """The whole step as one graph, where the Accelerator can."""
        made = getattr(self.accelerator, "graphed_step", None)
        return step if made is None else made(step)


@contextmanager
def fresh_state() -> Iterator[None]:
    """Accelerate keeps its state in class attributes."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    try:
        yield
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Around every test of a module that imports it: nothing compiled, no state of Accelerate."""
    torch.compiler.reset()
    backend.reset()
    with fresh_state():
        yield


def run(script: Callable[[Script], None], plugin: PyGraph | None, **options: Any) -> Script:
    """One run, on the stock class where there is no plugin."""
    with fresh_state():
        torch.manual_seed(0)
        if plugin is None:
            accelerator = accelerate.Accelerator(cpu=True, **options)
        else:
            accelerator = Accelerator(cpu=True, plugins=[plugin], **options)
        made = Script(accelerator)
        script(made)
        accelerator.end_training()
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
    """Run `script` on the stock class and on ours; everything that it wrote has to be equal.

    Args:
        script: the training script.
        replays: how often graphs have to run at least: see `replays.enough`.
        plan: which plan the report has to end with.
        refused, never: why no graph runs.
        compiled_reference: compare with ours without graphs, where compiling itself changes rounding.
        **options: of the Accelerator.
    """
    plain = run(
        script, PyGraph(engine="emulated", warmup_steps=NEVER) if compiled_reference else None, **options
    )
    plugin = PyGraph(engine="emulated", warmup_steps=2)
    graphed = run(script, plugin, **options)
    assert plain.entries, "the script compared nothing"
    assert len(plain.entries) == len(graphed.entries)
    for index, (expected, found) in enumerate(zip(plain.entries, graphed.entries, strict=True)):
        difference = differs(expected[1], found[1])
        assert difference is None, f"entry {index}, {expected[0]}{difference}\n{plugin.report()}"
    enough([plugin.report()], replays, plan, refused, never)
    return plugin.report()


def setup(
    script: Script, *, batch: int = 8, count: int = 240, steps: int = 30, fused: bool = True, **net: Any
) -> Any:
    """Model, optimizer, loader and a cosine schedule, prepared."""
    model = Net(**net)
    make = torch.optim.AdamW if fused else torch.optim.SGD  # whose default kernels can be captured as well
    optimizer = make(model.parameters(), lr=1e-2, fused=fused)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
    return script.accelerator.prepare(
        model, optimizer, DataLoader(Numbers(count), batch_size=batch), schedule
    )


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """For the batches of `Numbers`."""
    return nn.functional.cross_entropy(model(batch["x"]), batch["y"])
