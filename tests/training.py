"""Runs one training script twice, plainly and under `GraphedStep`, and compares everything bit for bit."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from replays import enough
from torch import Tensor, nn

from pygraph_train import GraphedStep, PyGraphConfig, StepReport

CONFIG = PyGraphConfig(engine="emulated", warmup_steps=2)


class Each:
    """Several optimizers in a plain loop."""

    def __init__(self, optimizers: list[torch.optim.Optimizer]) -> None:
        self.optimizers = optimizers

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()


class PlainStep:
    """What `GraphedStep` promises to be equal to: the loop that a user would write."""

    def __init__(
        self,
        step_fn: Callable[..., Any],
        *,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | list[torch.optim.Optimizer] | None = None,
        scaler: torch.amp.GradScaler | None = None,
        max_grad_norm: float | None = None,
        manual_optimization: bool = False,
    ) -> None:
        self.manual = manual_optimization
        self.step_fn, self.model, self.scaler = step_fn, model, scaler
        self.optimizer = Each(optimizer) if isinstance(optimizer, list) else optimizer
        self.max_grad_norm = max_grad_norm
        self.pending = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.manual:
            return self.step_fn(*args, **kwargs)
        pending = self.pending
        try:
            return self._step(*args, **kwargs)
        except BaseException:
            self.pending = pending  # the loop that a user writes begins a step with zero_grad
            raise

    def _step(self, *args: Any, **kwargs: Any) -> Any:
        result = self.accumulate(*args, **kwargs)
        if self.optimizer is None:
            return result
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        if self.max_grad_norm is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.max_grad_norm)
        if self.scaler is not None:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.step()
        self.pending = False
        return result

    def accumulate(self, *args: Any, **kwargs: Any) -> Any:
        if self.optimizer is not None and not self.pending:
            self.optimizer.zero_grad()
        result = self.step_fn(*args, **kwargs)
        loss = result["loss"] if isinstance(result, Mapping) else result
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        self.pending = True
        return result

    def close(self) -> None:
        pass


class Diary:
    """What a script wants to be equal in both runs; `step` makes one of the two kinds of steps."""

    def __init__(self, config: PyGraphConfig | None) -> None:
        self._config = config
        self.entries: list[tuple[str, Any]] = []
        self.steps: list[Any] = []

    @property
    def graphed(self) -> bool:
        return self._config is not None

    def step(self, step_fn: Callable[..., Any], **options: Any) -> Any:
        """A `PlainStep` or a `GraphedStep` over the same function."""
        if self._config is None:
            made: Any = PlainStep(step_fn, **options)
        else:
            made = GraphedStep(step_fn, config=self._config, **options)
        self.steps.append(made)
        return made

    def write(self, name: str, value: Any) -> None:
        """Note a copy of the present value."""
        self.entries.append((name, frozen(value)))

    def write_state(self, model: nn.Module, *optimizers: torch.optim.Optimizer) -> None:
        """Note parameters, gradients, buffers, optimizer state and random state."""
        self.write("parameters", dict(model.named_parameters()))
        self.write("gradients", {name: p.grad for name, p in model.named_parameters()})
        self.write("buffers", dict(model.named_buffers()))
        for optimizer in optimizers:
            self.write("optimizer", optimizer.state_dict())
        self.write("random state", torch.get_rng_state())


def both(
    script: Callable[[Diary], None],
    *,
    replays: int | None = None,
    plan: str | None = None,
    refused: str | None = None,
    never: str | None = None,
    **config: Any,
) -> StepReport:
    """Run `script` plainly and graphed; everything it wrote into its diary has to be equal.

    Args:
        script: the training script.
        replays: how often graphs have to run at least: see `replays.enough`.
        plan: which plan the last step has to end with.
        refused, never: why no graph runs.
        **config: options of the graphed steps.
    Returns:
        The report of the last graphed step.
    """
    plain, graphed = Diary(None), Diary(dataclasses.replace(CONFIG, **config))
    for diary in (plain, graphed):
        torch.manual_seed(0)
        script(diary)
    assert plain.entries, "the script compared nothing"
    assert len(plain.entries) == len(graphed.entries)
    for index, (expected, found) in enumerate(zip(plain.entries, graphed.entries, strict=True)):
        difference = differs(expected[1], found[1])
        assert difference is None, f"entry {index}, {expected[0]}{difference}"
    reports: list[StepReport] = [step.report() for step in graphed.steps]
    enough(reports, replays, plan, refused, never)
    for step in graphed.steps:
        step.close()
    return reports[-1]


def replayed(report: StepReport, *, least: int = 20, plan: str = "{F} {B} {O}") -> StepReport:
    """Assert that a test which claims parity really replayed."""
    assert report.steps_replayed >= least, (
        f"only {report.steps_replayed} of {report.steps} replayed\n{report}"
    )
    assert report.running_plan == plan, str(report)
    return report


def frozen(value: Any) -> Any:
    """A deep copy in which tensors are detached copies: of a sharded one, of the part that this rank holds."""
    if isinstance(value, Tensor):
        return getattr(value, "_local_tensor", value).detach().clone()
    if isinstance(value, Mapping):
        return {name: frozen(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [frozen(item) for item in value]
    return value


def differs(expected: Any, found: Any) -> str | None:
    """None when equal bit for bit, types included; else where they differ."""
    if type(expected) is not type(found):
        return f": {expected!r} became {found!r}"
    if isinstance(expected, Tensor):
        if expected.dtype != found.dtype or expected.shape != found.shape:
            return f": {expected.dtype} {expected.shape} became {found.dtype} {found.shape}"
        if torch.equal(expected, found):  # without NaN, which is the usual case
            return None
        same = torch.equal(torch.nan_to_num(expected), torch.nan_to_num(found)) and torch.equal(
            expected.isnan(), found.isnan()
        )
        return None if same else f": {expected} became {found}"
    if isinstance(expected, dict):
        if list(expected) != list(found):
            return f": keys {list(expected)} became {list(found)}"
        differences = [(f"[{k!r}]", differs(expected[k], found[k])) for k in expected]
    elif isinstance(expected, list):
        if len(expected) != len(found):
            return f": {len(expected)} entries became {len(found)}"
        differences = [(f"[{k}]", differs(*pair)) for k, pair in enumerate(zip(expected, found, strict=True))]
    else:
        both_nan = isinstance(expected, float) and math.isnan(expected) and math.isnan(found)
        return None if both_nan or expected == found else f": {expected!r} became {found!r}"
    return next((place + text for place, text in differences if text is not None), None)


# -- small things to train ---------------------------------------------------------------------------


class Net(nn.Module):
    """Dropout (random state), batch norm (buffers) and two layers that can be frozen."""

    def __init__(self, features: int = 6, classes: int = 3, dropout: float = 0.2) -> None:
        super().__init__()
        self.first = nn.Linear(features, 8)
        self.norm = nn.BatchNorm1d(8)
        self.dropout = nn.Dropout(dropout)
        self.second = nn.Linear(8, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.dropout(torch.relu(self.norm(self.first(x)))))


def batches(count: int, size: int = 8, features: int = 6, classes: int = 3) -> list[tuple[Tensor, Tensor]]:
    """Random batches, the same in every run; they leave the default random state alone."""
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(size, features, generator=generator),
            torch.randint(0, classes, (size,), generator=generator),
        )
        for _ in range(count)
    ]


def loss_of(model: nn.Module) -> Callable[[Any], Tensor]:
    """The usual step function, for batches `(x, y)`."""

    def step_fn(batch: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    return step_fn


def adamw(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), **{"lr": 1e-2, "fused": True, **options})


def sgd(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), **{"lr": 1e-2, "momentum": 0.9, "fused": True, **options})


def adam(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    """Its default kernels read the step count on the host: it stays outside of the graph."""
    return torch.optim.Adam(model.parameters(), **{"lr": 1e-2, **options})


def line_of(obj: Any, text: str) -> str:
    """`file:line` of the first line of an object's source that contains `text`."""
    lines, start = inspect.getsourcelines(obj)
    number = start + next(i for i, line in enumerate(lines) if text in line)
    return f"{inspect.getsourcefile(obj)}:{number}"
