"""Lightning's manual optimization: forward and backward of the called modules, and each optimizer's step, from graphs.

The user's `training_step` runs in Python on every batch, and with it `manual_backward`, toggling, clipping, logging and
all hooks. Lightning's own loop calls it, and counts what the optimizers do. So it is for sharded models under
automatic optimization, whose calls have graphs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn

from pygraph_train.boundary import quietly
from pygraph_train.config import PyGraphConfig
from pygraph_train.integrations.lightning.package import base_of, batches_left
from pygraph_train.optimizers.graph import OptimizerGraph
from pygraph_train.parallel.replication import Replication
from pygraph_train.patches import standing_in
from pygraph_train.step.by_hand import called_parts
from pygraph_train.step.loop import Loop
from pygraph_train.step.sizes import rows_stay


class ManualOptimization:
    """Graphs the phases of batches that Lightning makes, from `attach` to `detach`.

    Args:
        trainer: its optimizers exist, and checkpoints are restored.
        module: under manual optimization, or sharded.
        replication: how processes share it.
        config: options.

    Attributes:
        report: filled while training.
    """

    def __init__(
        self, trainer: Trainer, module: LightningModule, replication: Replication, config: PyGraphConfig
    ) -> None:
        self._module, self._replication = module, replication
        self._precision = trainer.precision_plugin
        loop, automatic = trainer.fit_loop.epoch_loop, module.automatic_optimization
        self._batches: Any = loop.automatic_optimization if automatic else loop.manual_optimization
        self._scaler: torch.amp.GradScaler | None = getattr(self._precision, "scaler", None)
        self._loop = Loop(
            config,
            trainer.strategy.root_device,
            left=lambda: batches_left(trainer),
            even=lambda: rows_stay(trainer.train_dataloader),
        )
        self._wrapper: Any = trainer.strategy.model or module
        self._optimizers: dict[int, OptimizerGraph] = {}
        self._patches = ExitStack()
        self._logs: list[tuple[Any, str, Any]] = []
        self.report = self._loop.report

    def attach(self) -> None:
        """Take over calls of the module's parts, and steps of the optimizers."""
        if not self._loop.active:
            return
        for module in called_parts(self._module, base_of(type(self._module)) or nn.Module):
            # a wrapper calls the module itself, to run training_step
            if module is not self._module or self._wrapper is module:
                self._loop.take_module(module, replication=self._replication)
        # Dynamo would trace Lightning's loggers where a forward that is compiled calls these
        self._logs = [
            (self._module, name, torch.compiler.disable(getattr(self._module, name)))
            for name in ("log", "log_dict")
        ]
        run = functools.partial(self._run, self._batches.run)
        step = functools.partial(self._optimizer_step, self._precision.optimizer_step)
        replaced = [(self._batches, "run", run), (self._precision, "optimizer_step", step)]
        if type(self._module).backward is LightningModule.backward:
            backward = functools.partial(self._backward, self._precision.backward)
            replaced.append((self._precision, "backward", backward))
        self._patches.enter_context(standing_in(replaced))

    def detach(self) -> None:
        """Release all graphs and give modules, optimizers and Lightning's objects back as they were."""
        quietly(self._patches.close, self._loop.release)

    def _run(self, stock: Callable[..., Any], *given: Any) -> Any:
        """In the place of `run` of Lightning's loop: one batch."""
        with ExitStack() as logs:
            quietly(lambda: logs.enter_context(standing_in(self._logs)))
            output = stock(*given)
        self._loop.step_ended()
        return output

    def _backward(
        self, stock: Callable[..., None], loss: Any, module: Any, optimizer: Any, *args: Any, **kwargs: Any
    ) -> None:
        """In the place of the precision plugin's, which gets the arguments of `manual_backward` as well."""
        stock(loss, module, optimizer, *args, **self._loop.ends_of(loss, *args, **kwargs))

    def _optimizer_step(
        self,
        stock: Callable[..., Any],
        optimizer: torch.optim.Optimizer,
        model: Any,
        closure: Callable[[], Any],
        **kwargs: Any,
    ) -> Any:
        """In the place of the precision plugin's: what it does, with the end of it from a graph."""
        known = self._loop.boundary.make(lambda: self._serving(optimizer), lambda: None)
        if known is None:
            return stock(optimizer, model=model, closure=closure, **kwargs)
        graph, serves = known
        if not serves:
            results: list[Any] = []
            body = functools.partial(stock, optimizer, model=model, closure=closure, **kwargs)
            self._loop.update(graph, lambda: results.append(body()))
            return results[0]
        if kwargs:
            return stock(optimizer, model=model, closure=closure, **kwargs)
        # torch's optimizers, which graphs serve, call the closure once and first; only a scaler calls it before that
        with torch.enable_grad() if self._scaler is None else nullcontext():
            result = closure()
            if graph.scaling.on:
                graph.scaling.unscale(in_kernels=True)
            self._precision._after_closure(model, optimizer)
        self._loop.update(graph, graph.scaling.step)
        return result if self._scaler is None else None

    def _serving(self, optimizer: torch.optim.Optimizer) -> tuple[OptimizerGraph, bool]:
        """The graph of an optimizer, and whether it may make the next step. New optimizers may come in mid-training."""
        graph = self._optimizers.get(id(optimizer)) or self._loop.take_optimizer(optimizer, self._scaler)
        assert graph is not None  # the loop is active
        self._optimizers[id(optimizer)] = graph
        return graph, graph.serves()
