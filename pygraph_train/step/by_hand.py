"""Steps whose function makes its backwards and updates itself."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from pygraph_train.boundary import arranged
from pygraph_train.config import PyGraphConfig
from pygraph_train.optimizers.graph import OptimizerGraph
from pygraph_train.parallel.replication import is_sharded
from pygraph_train.patches import standing_in
from pygraph_train.step.function_step import FunctionStep
from pygraph_train.step.loop import Loop


class StepsByHand(FunctionStep):
    """Calls a function as it is written; its modules and its optimizers have graphs of their own.

    Args:
        fn: makes a whole training step.
        model: holds all modules of the step.
        optimizers: all that the function steps.
        device: of the model.
        config: options.
        scaler: the GradScaler of the function, if it has one.

    Attributes:
        model, optimizers: as given.
    """

    _made_by = "GraphedStep"

    def __init__(
        self,
        fn: Callable[..., Any],
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        device: torch.device,
        config: PyGraphConfig,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        super().__init__(fn, Loop(config, device))
        self.model, self.optimizers, self._scaler = model, optimizers, scaler
        self.loop.patience *= bool(optimizers)
        self._graphs: list[OptimizerGraph] = []
        arranged(lambda: self._take(model), self.loop.report.failed)

    def _take(self, model: nn.Module) -> None:
        loop = self.loop
        for module in called_parts(model):
            loop.take_module(module)
        for optimizer in self.optimizers:
            graph = loop.take_optimizer(optimizer, self._scaler)
            if graph is not None:
                self._graphs.append(graph)

    def make(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with standing_in([(graph.optimizer, "step", self._stepping(graph)) for graph in self._graphs]):
            return self.fn(*args, **kwargs)

    def _stepping(self, graph: OptimizerGraph) -> Callable[..., Any]:
        """In the place of an optimizer's `step`, which is there again while a step is made."""
        optimizer, loop = graph.optimizer, self.loop
        stock, own = optimizer.step, vars(optimizer).get("step")

        @functools.wraps(stock)  # schedulers look for their own mark on it
        def step(closure: Any = None) -> Any:
            routed = vars(optimizer).pop("step")
            if own is not None:
                vars(optimizer)["step"] = own
            try:
                body, made = loop.with_closure(graph, stock, closure)
                loop.update(graph, body)
                return made[-1]
            finally:
                vars(optimizer)["step"] = routed

        return step

    def close(self) -> None:
        """Release all graphs."""
        self._graphs.clear()
        self.loop.release()


def called_parts(module: nn.Module, base: type[nn.Module] = nn.Module) -> Iterator[nn.Module]:
    """What a step may call: the module, where it has a forward, and its parts. Nested calls are one region.

    Args:
        module: holds all modules of the step.
        base: a class that has no forward of its own to call.
    """
    sharded = is_sharded(module)
    if sharded or type(module).forward is not base.forward:
        yield module
    if not sharded:  # its parts have no parameters of their own
        yield from _parts(module)


def _parts(module: nn.Module) -> Iterator[nn.Module]:
    """The modules directly inside of one that hold parameters, and those inside of lists and dicts of modules."""
    for child in module.children():
        if type(child).forward is nn.Module.forward:  # nobody calls a list or a dict
            yield from _parts(child)
        elif any(True for _ in child.parameters()):
            yield child
