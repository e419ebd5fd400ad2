"""`self.log` inside of a step on regions: Lightning logs behind the step, and the progress bar waits for nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor

from pygraph_train.boundary import quietly


class Recorder:
    """Stands in for `self.log` while `training_step` runs through Dynamo: stock logging would break each graph.

    Attributes:
        records: the calls: name, value, further arguments.
    """

    def __init__(self) -> None:
        self.records: list[tuple[str, Any, tuple[Any, ...], dict[str, Any]]] = []

    def __call__(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """Take the place of `LightningModule.log`."""
        if isinstance(value, Tensor):
            # the value of now: `self.log("loss", loss)` before `loss += penalty` is without the penalty
            value = value.clone()
        self.records.append((name, value, args, kwargs))


class LogBook:
    """What the progress bar shows of replayed steps.

    The bar wants Python numbers, and the host would wait for the device in each step. It gets those of the step
    before; the last step of an epoch waits for its own.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._results: Any = trainer.fit_loop.epoch_loop._results
        self._late = _LateNumbers(trainer.strategy.root_device)
        self._replayed = False
        self._metrics: Callable[[bool], Any] = self._results.metrics

    def stands_in(self) -> tuple[Any, str, Any]:
        """What serves the bar from this book, see `standing_in`."""
        return self._results, "metrics", self._metrics_with_late_bar

    def _on_bar(self) -> list[Any]:
        """Lightning's metrics that the bar shows of this step."""
        found = [m for m in self._results.values() if getattr(m, "is_tensor", False)]
        return [m for m in found if m.meta.prog_bar and m.meta.on_step and not m.has_reset]

    def ran(self) -> None:
        """The step ran without a graph."""
        self._replayed = False
        self._late.forget()

    def replayed(self) -> None:
        """The step was replayed, and Lightning has logged its values."""
        self._replayed = True
        on_bar = {m.meta.forked_name(on_step=True): m._forward_cache for m in self._on_bar()}
        self._late.push({name: value for name, value in on_bar.items() if isinstance(value, Tensor)})

    def _metrics_with_late_bar(self, on_step: bool) -> Any:
        on_bar: list[Any] = []
        if on_step and self._replayed:
            quietly(lambda: on_bar.extend(self._on_bar()))
        if not on_bar:
            return self._metrics(on_step)
        for metric in on_bar:
            metric.meta.prog_bar = False  # would wait for the device
        try:
            metrics = self._metrics(on_step)
        finally:
            for metric in on_bar:
                metric.meta.prog_bar = True
        quietly(lambda: self._put_on_bar(on_bar, metrics["pbar"]))
        return metrics

    def _put_on_bar(self, on_bar: list[Any], shown: dict[str, Any]) -> None:
        epoch_loop = self._trainer.fit_loop.epoch_loop
        final = (
            epoch_loop.batch_progress.is_last_batch
            or epoch_loop._is_training_done
            or self._trainer.should_stop
        )
        numbers = self._late.read(final=final)
        names = [metric.meta.forked_name(on_step=True) for metric in on_bar]
        shown.update({name: numbers[name] for name in names if name in numbers})


class _LateNumbers:
    """Named scalars on their way from the device to the host, one step behind."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._steps = 0
        self._pushes = 0
        # step, names, values, when they have arrived: of the last two steps that had any
        self._sent: list[tuple[int, list[str], Tensor | list[Tensor], torch.cuda.Event | None]] = []
        self._numbers: dict[str, float] = {}
        self._buffers: dict[tuple[int, int], Tensor] = {}

    def forget(self) -> None:
        """The host has newer numbers."""
        if self._sent:
            self._sent, self._numbers = [], {}

    def push(self, values: dict[str, Tensor]) -> None:
        """Begin a step, and start moving its values."""
        self._steps += 1
        if not values:
            return
        arriving, event = self._send(list(values.values()))
        self._sent = [*self._sent[-1:], (self._steps, list(values), arriving, event)]

    def _send(self, values: list[Tensor]) -> tuple[Tensor | list[Tensor], torch.cuda.Event | None]:
        if not self._cuda:
            return values, None
        self._pushes += 1
        # three in turn: one being written, one being read, one for a host that is ahead
        slot = (self._pushes % 3, len(values))
        if slot not in self._buffers:
            self._buffers[slot] = torch.zeros(len(values), dtype=torch.float64, device="cpu", pin_memory=True)
        buffer = self._buffers[slot]
        for i, value in enumerate(values):
            buffer[i].copy_(value, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return buffer, event

    def read(self, *, final: bool) -> dict[str, float]:
        """The latest values of earlier steps, of this step too when `final`. A CPU has no reason to wait."""
        for step, names, values, event in self._sent:
            if step == self._steps and self._cuda and not final:
                continue
            if event is not None:
                event.synchronize()
            self._numbers.update(zip(names, map(float, values), strict=True))
        return self._numbers
