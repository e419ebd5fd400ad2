"""`self.log` inside a replayed step: the same metrics, accumulated by the graph."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.connectors.logger_connector.result import _get_default_dtype, _ResultMetric
from torch import Tensor

from pygraph_train.parallel.replication import Replication
from pygraph_train.problems import NotLegal, Problem, defined_at
from pygraph_train.tracing.late_marks import Mark
from pygraph_train.tracing.traced_code import guard_constants

__all__ = ["LogBook", "Record", "Recorder"]

_FX = "training_step"

_LOG = inspect.signature(LightningModule.log)


@dataclass
class Record:
    """One call of `self.log`."""

    name: str
    value: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def batch_size(self) -> Any:
        """The argument of that name, None where there was none."""
        return _LOG.bind(None, self.name, self.value, *self.args, **self.kwargs).arguments.get("batch_size")


class Recorder:
    """Stands in for `self.log` while `training_step` is traced or captured."""

    def __init__(self) -> None:
        self.records: list[Record] = []

    def __call__(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """Take the place of `LightningModule.log`."""
        guard_constants((value, args, kwargs))  # a graph bakes Python numbers in
        if isinstance(value, Tensor):
            # the value of now: `self.log("loss", loss)` before `loss += penalty` is without the penalty
            value = value.clone()
        self.records.append(Record(name, value, args, kwargs))


class LogRecording:
    """Context in which `self.log` appends to a list instead: traced, it is part of no graph and breaks none.

    A class and no generator, because each replayed step enters it to look at its guards.

    Args:
        model: whose `log` is meant.
        recorder: takes its place.
        inside: another context, entered inside of this one.
    """

    __slots__ = ("_inside", "_model", "_recorder")

    def __init__(
        self, model: Any, recorder: Recorder, inside: AbstractContextManager[Any] | None = None
    ) -> None:
        self._model, self._recorder, self._inside = model, recorder, inside

    def __enter__(self) -> Recorder:
        self._recorder.records.clear()
        self._model.__dict__["log"] = self._recorder
        if self._inside is not None:
            try:
                self._inside.__enter__()
            except BaseException:
                self._model.__dict__.pop("log", None)
                raise
        return self._recorder

    def __exit__(self, *error: Any) -> None:
        try:
            if self._inside is not None:
                self._inside.__exit__(*error)
        finally:
            self._model.__dict__.pop("log", None)


class _Entry:
    """One logged name: Lightning's metric, and the device tensors that graphs accumulate into."""

    def __init__(self, metric: _ResultMetric) -> None:
        self.metric = metric
        self.bar_name = metric.meta.forked_name(on_step=True)
        self.on_bar = metric.meta.prog_bar and metric.meta.on_step
        self.total = self.count = None
        if metric.meta.on_epoch:
            self.total = torch.zeros_like(metric.value)
            if metric.meta.is_mean_reduction:
                self.count = torch.zeros_like(metric.cumulated_batch_size)

    def tensors(self) -> Iterator[Tensor]:
        if self.total is not None:
            yield self.total
        if self.count is not None:
            yield self.count

    def load(self) -> None:
        """Continue from what Lightning's metric holds: it was reset, or steps ran without a graph."""
        metric = self.metric
        if self.total is not None and metric.value is not self.total:
            self.total.copy_(metric.value)
        if self.count is not None and metric.cumulated_batch_size is not self.count:
            self.count.copy_(metric.cumulated_batch_size)

    def holds(self, value: Tensor) -> bool:
        """Whether the sum loses nothing of such values."""
        return self.total is None or torch.promote_types(value.dtype, self.total.dtype) == self.total.dtype

    def add(self, value: Tensor, batch_size: int) -> None:
        """In a capture: the arithmetic of `_ResultMetric.update`, in place."""
        meta = self.metric.meta
        if self.total is None:
            return
        if meta.is_mean_reduction:
            self.total.copy_(self.total + value * batch_size)
        elif meta.is_sum_reduction:
            self.total.copy_(self.total + value)
        elif meta.reduce_fx is max:  # Python's, which would compare on the host and drops a new NaN
            self.total.copy_(torch.where(value > self.total, value, self.total))
        elif meta.reduce_fx is min:
            self.total.copy_(torch.where(value < self.total, value, self.total))
        else:
            self.total.copy_(meta.reduce_fx(self.total, value))
        if self.count is not None:
            self.count.add_(batch_size)

    def store(self, value: Tensor) -> None:
        """After a replay: let Lightning's metric see it."""
        metric = self.metric
        metric._computed = None
        metric._update_count += 1
        metric.has_reset = False
        if metric.meta.on_step:
            metric._forward_cache = value
            if not metric.meta.on_epoch:
                metric.value = value
        if self.total is not None:
            metric.value = self.total
        if self.count is not None:
            metric.cumulated_batch_size = self.count


_READ_ON_HOST = Problem(
    "self.log(...) gets a number of a tensor of the device, and not as the value that it logs (batch_size=...)",
    fix="Take the number from the shape of the batch, or from the host",
)


class LogBook:
    """Everything that a training step logs.

    A replay updates the epoch's sums on the device and hands out the step's values. The host only marks
    Lightning's metrics as updated; it waits for the device nowhere. The progress bar, which wants Python
    numbers, gets those of the step before; the last step of an epoch waits for its own.
    """

    def __init__(self, trainer: Trainer, module: LightningModule, replication: Replication) -> None:
        self._trainer = trainer
        self._module = module
        self._replication = replication
        self._entries: dict[str, _Entry] = {}
        self._results: Any = trainer.fit_loop.epoch_loop._results
        self._late = _LateNumbers(trainer.strategy.root_device)
        self._replayed = False
        self._metrics: Callable[[bool], Any] = self._results.metrics

    def attach(self) -> Callable[[], None]:
        """Serve the bar from this book. Returns what undoes it."""
        self._results.metrics = self._metrics_with_late_bar
        return self._detach

    def _detach(self) -> None:
        self._results.__dict__.pop("metrics", None)
        for entry in self._entries.values():
            # accumulators outlive the run only inside metrics: leave ordinary tensors there
            if entry.total is not None and entry.metric.value is entry.total:
                entry.metric.value = entry.total.clone()
            if entry.count is not None and entry.metric.cumulated_batch_size is entry.count:
                entry.metric.cumulated_batch_size = entry.count.clone()

    def accumulators(self) -> Iterator[Tensor]:
        """Device tensors that captured steps write."""
        for entry in self._entries.values():
            yield from entry.tensors()

    def know(self, records: list[Record]) -> None:
        """After Lightning logged these for real: make accumulators like its own, outside of any capture."""
        for record in records:
            key = f"{_FX}.{record.name}"
            metric = self._results.get(key)
            if key not in self._entries and metric is not None and metric.is_tensor:
                self._entries[key] = _Entry(metric)

    def accumulate(self, records: list[Record]) -> dict[str, Tensor]:
        """In a capture, or a run that stands for one: add the logged values up.

        Returns:
            The values of this step by storage key, 0-dim.
        Raises:
            NotLegal: something was logged that only Python can add up.
        """
        values: dict[str, Tensor] = {}
        if self._trainer.barebones:
            return values  # where `self.log` does nothing
        for record in records:
            if any(isinstance(x, Mark) for x in (*record.args, *record.kwargs.values())):
                raise NotLegal(_READ_ON_HOST)
            key = f"{_FX}.{record.name}"
            metric, entry = self._results.get(key), self._entries.get(key)
            if metric is None or entry is None or metric.meta.enable_graph:
                raise NotLegal(
                    Problem(
                        f"self.log({record.name!r}, ...) in training_step logs a value that only Python can add up",
                        defined_at(type(self._module).training_step),
                    )
                )
            value = self._as_tensor(record.value)
            if not entry.holds(value):
                raise NotLegal(Problem(f"self.log({record.name!r}, ...) logs values whose dtype changes"))
            entry.add(value, self._results._extract_batch_size(metric, record.batch_size, metric.meta))
            values[key] = self._of_all_ranks(metric, value)
        return values

    def _of_all_ranks(self, metric: _ResultMetric, value: Tensor) -> Tensor:
        """In a capture: what `self.log(on_step=True, sync_dist=True)` shows, which is reduced over the ranks."""
        sync = metric.meta.sync
        if (
            not (sync.should and metric.meta.on_step)
            or sync.rank_zero_only
            or self._replication.group is None
        ):
            return value
        if sync.group is not None or sync.op not in ("mean", "sum"):
            raise NotLegal(
                Problem(
                    f"self.log(..., sync_dist=True) reduces with {sync.op!r} or in a group, and a graph "
                    'holds "mean" and "sum" over all ranks only'
                )
            )
        return self._replication.reduced(value, mean=sync.op == "mean")

    def _as_tensor(self, value: Any) -> Tensor:
        dtype = _get_default_dtype()
        if isinstance(value, Mark):  # of a tensor, which the graph has
            if value.tensor is None:
                raise NotLegal(
                    Problem("self.log(...) logs a number that Python computes of values of the device")
                )
            return value.tensor.reshape(()).double().to(dtype)  # as a float of Python
        if not isinstance(value, Tensor):
            # torch.tensor would copy from the host, which a capture cannot hold
            return torch.full((), float(value), dtype=dtype, device=self._module.device)
        value = value.detach().squeeze()
        return value if value.dtype in (torch.float32, torch.float64) else value.to(dtype)

    # -- around each step ---------------------------------------------------------------------------

    def start_step(self) -> None:
        """Before a step that may be replayed: accumulators hold what Lightning's metrics hold."""
        if not self._entries:
            return
        if self._trainer._logger_connector.should_reset_tensors(_FX):
            self._results.reset(metrics=False, fx=_FX)
        for key, entry in self._entries.items():
            entry.metric = self._results[key]
            entry.load()

    def ran(self) -> None:
        """The step ran without a graph: Lightning logged."""
        self._replayed = False
        self._late.forget()

    def replayed(self, values: dict[str, Tensor]) -> None:
        """The step was replayed: do what `self.log` would have done."""
        self._replayed = True
        for key, value in values.items():
            self._entries[key].store(value)
        if values:
            self._trainer._logger_connector._current_fx = _FX
        on_bar = {self._entries[key].bar_name: v for key, v in values.items() if self._entries[key].on_bar}
        self._late.push(on_bar)

    def _metrics_with_late_bar(self, on_step: bool) -> Any:
        if not on_step or not self._replayed:
            return self._metrics(on_step)
        on_bar = [e for e in self._entries.values() if e.on_bar and not e.metric.has_reset]
        if not on_bar:
            return self._metrics(on_step)
        for entry in on_bar:
            entry.metric.meta.prog_bar = False  # would wait for the device
        try:
            metrics = self._metrics(on_step)
        finally:
            for entry in on_bar:
                entry.metric.meta.prog_bar = True
        epoch_loop = self._trainer.fit_loop.epoch_loop
        final = (
            epoch_loop.batch_progress.is_last_batch
            or epoch_loop._is_training_done
            or self._trainer.should_stop
        )
        numbers = self._late.read(final=final)
        for entry in on_bar:
            if entry.bar_name in numbers:
                metrics["pbar"][entry.bar_name] = numbers[entry.bar_name]
        return metrics


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
            self._buffers[slot] = torch.zeros(len(values), dtype=torch.float64, pin_memory=True)
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
