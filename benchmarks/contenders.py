"""One training step in the ways that are compared: as it is, with `torch.compile`, with this library."""

from __future__ import annotations

import contextlib
import gc
import time
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from benchmarks.children import TimeOver
from benchmarks.zoo_models.entry import Parts, seed
from pygraph_train import GraphedStep, StepReport
from pygraph_train.trees import map_leaves

__all__ = [
    "MODES",
    "Contender",
    "Rounds",
    "Setting",
    "Window",
    "first_losses",
    "settle",
    "start",
    "timed",
    "windows",
]

BATCHES = 4
MIB = 2**20
LEARNING_RATE = 2.0**-13
"""About 1e-4, and the same number in float32: a graph holds it on the device in float32."""
LASTING = 10
"""Steps that plan and captures stay as they are before the measurement begins."""
TRIAL_OVER = 40
"""Replays after which graphs have been timed."""


@dataclass(frozen=True)
class Setting:
    """What all contenders of one entry share.

    Attributes:
        build: makes the entry, with the random numbers of the moment.
        device: where it is trained.
        autocast: whether forward and loss run under bf16 autocast.
        engine: of this library's graphs.
    """

    build: Callable[[], Parts]
    device: torch.device
    autocast: bool
    engine: str


@dataclass
class Contender:
    """A training loop; `step()` makes one step on the next batch and returns its loss."""

    mode: str
    step: Callable[[], Tensor]
    report: Callable[[], StepReport] | None = None
    reserved_before: int = 0
    losses: list[float] = field(default_factory=list)
    reserved_mib: int | None = None

    def decided(self) -> bool:
        """Whether every region that the step runs has been decided on, and the trial of its graphs is over.

        A contender that keeps no graphs never says so, and is ready when its time is over.
        """
        if self.mode == "backend":
            from pygraph_train.backend import report

            return report().settled
        return self.report is None or self.report().steps_replayed >= TRIAL_OVER

    def state(self) -> object:
        """Changes as long as the library tries things out."""
        if self.report is None:
            return None
        told = self.report()
        return told.running_plan, len(told.captures), len(told.fallbacks)


def _to(device: torch.device) -> Callable[[Any], Any]:
    def move(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return leaf.detach().to(device).requires_grad_(leaf.requires_grad)

    return move


def start(mode: str, setting: Setting) -> Contender:
    """A contender with new weights; all contenders of a setting have the same ones, and the same batches."""
    gc.collect()
    if setting.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_reserved() if setting.device.type == "cuda" else 0
    seed(0)
    parts = setting.build()
    model = parts.model.to(setting.device)
    seed(1)
    batches = [map_leaves(_to(setting.device), parts.make_batch()) for _ in range(BATCHES)]
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, fused=True)

    def loss_of(batch: Any) -> Tensor:
        with torch.autocast(setting.device.type, torch.bfloat16, enabled=setting.autocast):
            return parts.loss_of(model, batch)

    # Dynamo keeps what it compiled with the code: contenders must not meet each other's guards
    code = loss_of.__code__.replace(co_name=f"loss_of_{mode.replace('-', '_')}")
    own = types.FunctionType(code, loss_of.__globals__, code.co_name, None, loss_of.__closure__)
    step, report = MODES[mode](own, model, optimizer, setting)
    turn = 0

    def next_step() -> Tensor:
        nonlocal turn
        turn += 1
        return step(batches[turn % BATCHES])

    seed(2)
    return Contender(mode, next_step, report, before)


Made = tuple[Callable[[Any], Tensor], Callable[[], StepReport] | None]


def _loop(loss_of: Any, optimizer: Any, *, marks: bool = False) -> Callable[[Any], Tensor]:
    def step(batch: Any) -> Tensor:
        optimizer.zero_grad()
        if marks:
            torch.compiler.cudagraph_mark_step_begin()
        loss = loss_of(batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def _eager(loss_of: Any, model: Any, optimizer: Any, setting: Setting) -> Made:
    return _loop(loss_of, optimizer), None


def _compile(loss_of: Any, model: Any, optimizer: Any, setting: Setting) -> Made:
    return _loop(torch.compile(loss_of), optimizer), None


def _reduce_overhead(loss_of: Any, model: Any, optimizer: Any, setting: Setting) -> Made:
    return _loop(torch.compile(loss_of, mode="reduce-overhead"), optimizer, marks=True), None


def _backend(loss_of: Any, model: Any, optimizer: Any, setting: Setting) -> Made:
    return _loop(torch.compile(loss_of, backend="pygraph"), optimizer), None


def _graphed(**options: Any) -> Callable[..., Made]:
    def make(loss_of: Any, model: Any, optimizer: Any, setting: Setting) -> Made:
        step = GraphedStep(loss_of, model=model, optimizer=optimizer, engine=setting.engine, **options)
        return step, step.report

    return make


def _in_accelerate(mode: str | None) -> Callable[..., Made]:
    """Accelerate's stock loop with a model that `torch.compile` compiles in this mode; None: as it is."""

    def make(loss_of: Any, model: Any, optimizer: Any, setting: Setting) -> Made:
        import accelerate

        accelerator = accelerate.Accelerator(cpu=setting.device.type == "cpu")
        model, optimizer = accelerator.prepare(model, optimizer)
        if mode is not None:
            model.compile(mode=mode)  # in place, as loss_of has the model
        return _stock_loop(accelerator, loss_of, optimizer, marks=mode == "reduce-overhead"), None

    return make


def _stock_loop(
    accelerator: Any, loss_of: Any, optimizer: Any, *, marks: bool = False
) -> Callable[[Any], Tensor]:
    def step(batch: Any) -> Tensor:
        if marks:
            torch.compiler.cudagraph_mark_step_begin()
        loss = loss_of(batch)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def _accelerate(loss_of: Any, model: Any, optimizer: Any, setting: Setting) -> Made:
    from pygraph_train import Accelerator, PyGraph

    plugin = PyGraph(engine=setting.engine)
    accelerator: Any = Accelerator(cpu=setting.device.type == "cpu", plugins=[plugin])
    model, optimizer = accelerator.prepare(model, optimizer)
    return _stock_loop(accelerator, loss_of, optimizer), plugin.report


MODES: dict[str, Callable[..., Made]] = {
    "eager": _eager,
    "compile": _compile,
    "reduce-overhead": _reduce_overhead,
    "graphed-eager": _graphed(compile=False),
    "graphed-compiled": _graphed(compile=True),
    "graphed": _graphed(),
    "backend": _backend,
    "accelerate": _accelerate,
    "accelerate-eager": _in_accelerate(None),
    "accelerate-compile": _in_accelerate("default"),
    "accelerate-reduce-overhead": _in_accelerate("reduce-overhead"),
}
"""How each mode makes the loop of a contender."""


def first_losses(contender: Contender, count: int) -> None:
    """Make the first steps, and keep their losses."""
    contender.losses += [float(contender.step()) for _ in range(count)]


def settle(contender: Contender, *, least: int, most: int, seconds: float) -> None:
    """Make steps until the library has chosen, and note the peak of the reserved memory until then, in MiB."""
    begun, seen = time.monotonic(), []
    for made in range(most):
        contender.step()
        seen = [*seen, contender.state()][-LASTING:]
        lasts = seen == seen[:1] * LASTING and contender.decided()
        if made + 1 >= least and (lasts or time.monotonic() - begun > seconds):
            break
    contender.reserved_mib = _peak_mib(contender)


def _peak_mib(contender: Contender) -> int | None:
    if not torch.cuda.is_available():
        return None
    torch.cuda.synchronize()
    return round((torch.cuda.max_memory_reserved() - contender.reserved_before) / MIB)


Window = Callable[[str, int], "float | None"]
"""Makes so many steps in a mode, and has their milliseconds a step; None where that mode has crashed."""


class Rounds:
    """Windows of modes that take turns, in an order that alternates: A B, B A, A B, ..."""

    def __init__(self, window: Window, seconds: float) -> None:
        self._window, self._seconds = window, seconds
        self._steps: dict[str, int] = {}
        self._made: list[dict[str, float | None]] = []
        self.cut = False
        """Whether the time for the whole run was over meanwhile."""

    def prepare(self, modes: Sequence[str]) -> None:
        """Choose the steps of a window of each mode, and make one that is not timed."""
        with self._cut_when_time_is_over():
            for mode in modes:
                self._window(mode, 2)
                if ms := self._window(mode, BATCHES):
                    self._steps[mode] = max(BATCHES, min(1000, round(self._seconds * 1e3 / ms)))
                    self._window(mode, self._steps[mode])

    def make(self, count: int) -> None:
        """Make so many more windows of each mode."""
        with self._cut_when_time_is_over():
            for _ in range(0 if self.cut else count):
                order = list(self._steps) if len(self._made) % 2 else list(reversed(self._steps))
                self._made.append({mode: self._window(mode, self._steps[mode]) for mode in order})

    def times(self) -> dict[str, list[float]]:
        """Milliseconds a step in whole rounds, of the modes that have not crashed."""
        times = {mode: [ms for made in self._made if (ms := made[mode])] for mode in self._steps}
        return {mode: found for mode, found in times.items() if found and len(found) == len(self._made)}

    @contextlib.contextmanager
    def _cut_when_time_is_over(self) -> Iterator[None]:
        try:
            yield
        except TimeOver:
            self.cut = True


def windows(modes: Sequence[str], window: Window, *, count: int, seconds: float) -> dict[str, list[float]]:
    """Milliseconds a step in `count` windows of each mode that has not crashed."""
    rounds = Rounds(window, seconds)
    rounds.prepare(modes)
    rounds.make(count)
    return rounds.times()


def timed(contender: Contender, steps: int) -> float:
    """Milliseconds a step, after one step that is not timed: before it, other processes or contenders ran."""
    contender.step()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(steps):
        contender.step()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return (time.perf_counter() - begun) / steps * 1e3
