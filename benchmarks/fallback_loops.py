"""The loops of `fallback_cost`, each without and with the library."""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.fallback_states import State
from pygraph_train import GraphedStep

__all__ = ["LOOPS", "SIZES", "Case", "measurable", "settled"]

SIZES = {"full": (512, 8), "tiny": (32, 3)}
SETTLE = 150
"""Steps after which every loop has settled."""

ROWS, OTHER_ROWS = 8, 6
"""Rows of a batch, and of a batch of another shape."""

Window = Callable[[int], float]
"""Makes so many steps and returns the seconds that the host took."""


class Model(nn.Module):
    """Layers, and what keeps them out of graphs."""

    def __init__(self, kind: str, width: int, depth: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)))
        self.kind = kind
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "counts":
            self.calls += 1
            x = x.clamp(max=1e6 + self.calls)  # no tensor can stand for such a number
        elif self.kind == "reads" and x.shape[0] != ROWS:
            x = x * (1 + 0 * x.sum().item())  # more than a decision: nothing reads it ahead
        result: Tensor = self.layers(x)
        return result


def _loss(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x).square().mean()
    return loss


@dataclass
class Case:
    """One loop in one state.

    Attributes:
        args: of the command line.
        state: see `State`.
        ours: whether the library makes the steps.
        rows: of the batches of the next steps.
    """

    args: argparse.Namespace
    state: State
    ours: bool
    rows: int = ROWS

    def __post_init__(self) -> None:
        width, _ = SIZES[self.args.scale]
        self.batches = {n: torch.randn(n, width, device=self.args.device) for n in (ROWS, OTHER_ROWS)}
        engine = "cuda" if self.args.device == "cuda" else "emulated"
        self.options = {"engine": engine, **self.state.options}

    @property
    def x(self) -> Tensor:
        """The batch of the next step."""
        return self.batches[self.rows]

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return Model(self.state.model, *SIZES[self.args.scale]).to(self.args.device)

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        if self.state.update:
            return torch.optim.AdamW(parameters, lr=1e-4, fused=True)
        # Adafactor and LBFGS are the optimizers of torch that no graph can hold on CUDA
        made = torch.optim.Adafactor if self.args.device == "cuda" else torch.optim.SGD
        return made(parameters, lr=1e-4)

    def window_of(self, step: Callable[[], Any]) -> Window:
        """Windows of a loop that is at hand: the first steps, and then the measured ones."""

        def window(steps: int) -> float:
            if self.args.device == "cuda":
                torch.cuda.synchronize()
            started = seconds_of(self.args)
            for _ in range(steps):
                step()
            return seconds_of(self.args) - started

        return window


def seconds_of(args: argparse.Namespace) -> float:
    """A clock. On a CPU that other processes share it is the process's own time."""
    return time.perf_counter() if args.device == "cuda" else time.process_time()


def graphed_step(case: Case) -> tuple[Window, Any]:
    """A loop in plain PyTorch."""
    model = case.model()
    optimizer = case.optimizer(model.parameters())
    if case.ours:
        step = GraphedStep(lambda x: _loss(model, x), model=model, optimizer=optimizer, **case.options)
        return case.window_of(lambda: step(case.x)), step.report

    def plain() -> Tensor:
        optimizer.zero_grad()
        loss = _loss(model, case.x)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return case.window_of(plain), None


def accelerate_loop(case: Case, *, whole: bool = False) -> tuple[Window, Any]:
    """The loop of Accelerate's documentation, as it is or as `accelerator.graphed_step`."""
    import accelerate

    from pygraph_train import Accelerator, PyGraph

    cpu = case.args.device == "cpu"
    plugin = PyGraph(**case.options) if case.ours else None
    accelerator: Any = (
        accelerate.Accelerator(cpu=cpu) if plugin is None else Accelerator(cpu=cpu, plugins=[plugin])
    )
    model = case.model()
    model, optimizer = accelerator.prepare(model, case.optimizer(model.parameters()))

    def step(x: Tensor) -> Tensor:
        loss = _loss(model, x)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    made = accelerator.graphed_step(step) if whole and case.ours else step
    return case.window_of(lambda: made(case.x)), None if plugin is None else plugin.report


def accelerate_step(case: Case) -> tuple[Window, Any]:
    """`accelerator.graphed_step`."""
    return accelerate_loop(case, whole=True)


def fabric_loop(case: Case, *, whole: bool = False) -> tuple[Window, Any]:
    """The loop of Fabric's documentation, as it is or as `graphed_step`."""
    from lightning.fabric import Fabric

    from pygraph_train import PyGraphFabric

    fabric = Fabric(accelerator=case.args.device, devices=1)
    plugin = PyGraphFabric(**case.options) if case.ours else None
    if plugin is not None:
        plugin.attach(fabric)
    model = case.model()
    model, optimizer = fabric.setup(model, case.optimizer(model.parameters()))
    if plugin is not None and whole:
        made = plugin.graphed_step(lambda x: _loss(model, x), model=model, optimizer=optimizer)
        return case.window_of(lambda: made(case.x)), plugin.report

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = _loss(model, case.x)
        fabric.backward(loss)
        optimizer.step()
        return loss.detach()

    return case.window_of(step), None if plugin is None else plugin.report


def fabric_step(case: Case) -> tuple[Window, Any]:
    """`PyGraphFabric.graphed_step`."""
    return fabric_loop(case, whole=True)


def lightning(case: Case) -> tuple[Window, Any]:
    """A Trainer with one callback. Each window is a run of its own, timed after it has settled."""
    import lightning.pytorch as pl

    from pygraph_train import PyGraphCallback

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = case.model()

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return _loss(self.model, batch)

        def configure_optimizers(self) -> Any:
            return case.optimizer(self.parameters())

    class Clock(pl.Callback):
        started = ended = 0.0

        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 2 * SETTLE:
                self.started = seconds_of(case.args)

        def on_train_batch_end(self, *given: Any) -> None:
            self.ended = seconds_of(case.args)

    class Idle(pl.Callback):
        def on_train_batch_end(self, *given: Any) -> None:
            """Nothing: PyGraphCallback has this hook as well, for loggers."""

    latest: list[Any] = []

    def window(steps: int) -> float:
        clock, callback = Clock(), PyGraphCallback(**case.options) if case.ours else None
        trainer = pl.Trainer(
            max_epochs=1,
            accelerator="gpu" if case.args.device == "cuda" else "cpu",
            devices=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[Idle() if callback is None else callback, clock],
        )
        data = torch.utils.data.DataLoader(_one_by_one(case, steps), batch_size=None)
        trainer.fit(Module(), data)
        latest[:] = [] if callback is None else [callback.report()]
        return clock.ended - clock.started

    return window, (lambda: latest[-1]) if case.ours else None


def _one_by_one(case: Case, steps: int) -> list[Tensor]:
    """The batches of a run: as many of the first shape, then of the measured one, and the measured ones."""
    first, then = case.batches[ROWS].cpu(), case.batches[case.rows].cpu()
    return [first] * SETTLE + [then] * (SETTLE + steps)


def transformers_trainer(case: Case, *, whole: bool = True) -> tuple[Window, Any]:
    """A Trainer of transformers, with the callback or as `PyGraphTrainer`. Each window is a run of its own."""
    import transformers

    from pygraph_train import PyGraphConfig, PyGraphTrainer, PyGraphTrainerCallback

    transformers.utils.logging.set_verbosity_error()

    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = case.model()

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"loss": _loss(self.model, x[0])}

    class Clock(transformers.TrainerCallback):
        started = ended = 0.0

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 2 * SETTLE:
                self.started = seconds_of(case.args)

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.ended = seconds_of(case.args)

    latest: list[Any] = []

    def window(steps: int) -> float:
        clock = Clock()
        ours = PyGraphTrainerCallback(**case.options) if case.ours and not whole else None
        kind: Any = PyGraphTrainer if case.ours and whole else transformers.Trainer
        options = {"pygraph": PyGraphConfig(**case.options)} if case.ours and whole else {}
        model = WithLoss()
        with tempfile.TemporaryDirectory() as folder:
            trainer = kind(
                model=model,
                args=transformers.TrainingArguments(
                    folder,
                    per_device_train_batch_size=1,
                    max_steps=2 * SETTLE + steps,
                    logging_strategy="no",
                    save_strategy="no",
                    report_to=[],
                    disable_tqdm=True,
                    use_cpu=case.args.device == "cpu",
                ),
                train_dataset=[{"x": x} for x in _one_by_one(case, steps)],
                optimizers=(case.optimizer(model.parameters()), None),
                callbacks=[clock if ours is None else ours, clock][: 1 if ours is None else 2],
                **options,
            )
            trainer._get_train_sampler = lambda *given: torch.utils.data.SequentialSampler(
                trainer.train_dataset
            )
            trainer.remove_callback(transformers.PrinterCallback)
            trainer.train()
        if case.ours:
            latest[:] = [trainer.report() if ours is None else ours.report()]
        return clock.ended - clock.started

    return window, (lambda: latest[-1]) if case.ours else None


def transformers_callback(case: Case) -> tuple[Window, Any]:
    """A Trainer of transformers with `PyGraphTrainerCallback`."""
    return transformers_trainer(case, whole=False)


LOOPS: dict[str, Callable[[Case], tuple[Window, Any]]] = {
    "graphed-step": graphed_step,
    "lightning": lightning,
    "accelerate-step": accelerate_step,
    "accelerate-loop": accelerate_loop,
    "fabric-step": fabric_step,
    "fabric-loop": fabric_loop,
    "transformers-trainer": transformers_trainer,
    "transformers-callback": transformers_callback,
}

_PHASES_APART = ("accelerate-loop", "fabric-loop", "transformers-callback")
_SETTLES = ("lightning", "transformers-trainer", "transformers-callback")


def measurable(loop: str, state: State) -> bool:
    """Whether a loop knows a state."""
    return not (state.whole if loop in _PHASES_APART else state.apart)


def settled(loop: str, case: Case) -> tuple[Window, Any]:
    """Windows of a loop that has settled, and its report."""
    window, report = LOOPS[loop](case)
    if loop not in _SETTLES:  # whose windows settle by themselves
        window(SETTLE)
    if case.state.other_shape:
        case.rows = OTHER_ROWS
    if loop not in _SETTLES:
        window(SETTLE)
    return window, report
