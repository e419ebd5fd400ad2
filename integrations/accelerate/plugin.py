"""Accelerate: `Accelerator(plugins=[PyGraph()])`.

The user's loop stays as it is. Forward and backward of models that `prepare` returns, and steps of optimizers, are
replayed from graphs of their own, and everything between is the user's Python.
"""

from __future__ import annotations

import functools
import inspect
import types
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, overload

from torch import nn

try:
    import accelerate
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.utils import (
        DataLoaderConfiguration,
        DeepSpeedPlugin,
        DistributedType,
        DynamoBackend,
        FullyShardedDataParallelPlugin,
        GradientAccumulationPlugin,
        KwargsHandler,
        MegatronLMPlugin,
        ParallelismConfig,
        ProjectConfiguration,
        TorchDynamoPlugin,
        TorchTensorParallelPlugin,
    )
except ImportError as error:
    raise ImportError(
        "pygraph_train.Accelerator and PyGraph need Accelerate: pip install 'pygraph-train[accelerate]'"
    ) from error

from pygraph_train.boundary import BACKWARD, SETTING_UP, arranged, executes, quietly, surely, tried
from pygraph_train.config import PyGraphConfig
from pygraph_train.parallel.replication import Replicas, why_not_spread
from pygraph_train.patches import nothing
from pygraph_train.problems import Problem
from pygraph_train.report.announcements import metrics_of, tell_once
from pygraph_train.report.loop_report import LoopReport
from pygraph_train.step.function_step import FunctionStep
from pygraph_train.step.loop import Loop
from pygraph_train.step.sizes import rows_stay

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from pygraph_train.config import PyGraphOptions

# which argument of the stock class takes which plugin; the first match counts (several are kwargs handlers)
_ARGUMENTS: tuple[tuple[type, str], ...] = (
    (DeepSpeedPlugin, "deepspeed_plugin"),
    (FullyShardedDataParallelPlugin, "fsdp_plugin"),
    (MegatronLMPlugin, "megatron_lm_plugin"),
    (TorchTensorParallelPlugin, "torch_tp_plugin"),
    (TorchDynamoPlugin, "dynamo_plugin"),
    (GradientAccumulationPlugin, "gradient_accumulation_plugin"),
    (DataLoaderConfiguration, "dataloader_config"),
    (ProjectConfiguration, "project_config"),
    (ParallelismConfig, "parallelism_config"),
    (KwargsHandler, "kwargs_handlers"),
)

_UNATTACHED = (
    "a PyGraph() was made, but no Accelerator uses it. accelerate.Accelerator has no argument plugins=: "
    "write pygraph_train.Accelerator(plugins=[PyGraph()]), or PyGraph().attach(accelerator)"
)


class PyGraph:
    """The Accelerate plugin: `Accelerator(plugins=[PyGraph()])`, or `PyGraph().attach(accelerator)`.

    Args:
        config: options; the defaults suit most runs.
        **overrides: single options, as `PyGraph(engine="emulated")`.

    Raises:
        ValueError, TypeError: an option is unknown or has a value that is not allowed.
    """

    def __init__(self, config: PyGraphConfig | None = None, **overrides: Unpack[PyGraphOptions]) -> None:
        self.config = PyGraphConfig.of(config, overrides)
        # when it is gone, or when the program ends
        self._unattached = weakref.finalize(self, tell_once, _UNATTACHED)
        self._accelerator: accelerate.Accelerator | None = None
        self._stock_class: type | None = None
        self._loop: Loop | None = None
        self._report = surely(LoopReport, SETTING_UP)
        self._undo: list[Callable[[], None]] = []
        self._logged_plan: str | None = None

    def attach(self, accelerator: accelerate.Accelerator) -> PyGraph:
        """Use graphs for an existing Accelerator. `detach` undoes it.

        Models and optimizers that the Accelerator has already prepared are included.

        Returns:
            This object.

        Raises:
            ValueError: the Accelerator already has a PyGraph, or this PyGraph is attached to another Accelerator.
        """
        if not isinstance(accelerator, accelerate.Accelerator):
            raise TypeError(f"attach takes an accelerate.Accelerator, got {type(accelerator).__name__}")
        if getattr(accelerator, "pygraph", None) is not None:
            raise ValueError("this Accelerator already has a PyGraph: keep one of them")
        if not isinstance(accelerator, _Graphed):
            cls = type(accelerator)
            self._stock_class = cls
            graphed = (
                Accelerator if cls is accelerate.Accelerator else type(cls.__name__, (_Graphed, cls), {})
            )
            accelerator.__class__ = graphed  # type: ignore[assignment]
        self._bind(accelerator)
        several = accelerator.num_processes > 1 and not accelerator.is_fsdp2
        for model in accelerator._models:  # without their wrappers
            replication = Replicas(model) if several else None
            arranged(functools.partial(self._take_model, model, replication=replication))
        for optimizer in accelerator._optimizers:
            arranged(functools.partial(self._take_optimizer, optimizer))
        return self

    def detach(self) -> None:
        """Release all graphs and give accelerator, models and optimizers back as they were."""
        self.release()
        accelerator, self._accelerator = self._accelerator, None
        if accelerator is not None:
            accelerator.__dict__.pop("pygraph", None)
            if self._stock_class is not None:
                accelerator.__class__ = self._stock_class
                self._stock_class = None

    def report(self) -> LoopReport:
        """The report of the training steps so far. It prints as a table."""
        return self._report

    def release(self) -> None:
        """Release all graphs and restore models and optimizers. Objects that are prepared later get new graphs."""
        if self._loop is not None:
            quietly(self._loop.release)
        while self._undo:
            quietly(self._undo.pop())
        self._loop = None

    def values(self) -> dict[str, Any]:
        """What trackers get with `log_metrics=True`: see `metrics_of`, and the plan as a text when it has changed."""
        found: dict[str, Any] = dict(metrics_of(self._report))
        plan = self._report.running_plan
        if found and plan != self._logged_plan:
            found["pygraph/plan"] = self._logged_plan = plan
        return found

    def _bind(self, accelerator: accelerate.Accelerator) -> None:
        if self._accelerator is not None and self._accelerator is not accelerator:
            raise ValueError(
                "this PyGraph is attached to another Accelerator: make a PyGraph for each Accelerator"
            )
        self._accelerator = accelerator
        self._unattached.detach()
        accelerator.__dict__["pygraph"] = self
        # an engine that cannot work is refused here, not in the first step
        surely(self._the_loop, SETTING_UP)

    def _the_loop(self) -> Loop:
        if self._loop is None:
            assert self._accelerator is not None
            accelerator = self._accelerator
            self._loop = surely(
                lambda: Loop(
                    self.config,
                    accelerator.device,
                    _unsupported(accelerator),
                    even=lambda: rows_stay(accelerator.gradient_state.active_dataloader),
                ),
                SETTING_UP,
            )
            self._report = self._loop.report
        return self._loop

    def _take_model(self, model: nn.Module, replication: Replicas | None = None) -> None:
        self._the_loop().take_module(model, replication=replication)

    def _take_optimizer(self, optimizer: Any) -> None:
        loop = self._the_loop()
        if not isinstance(optimizer, AcceleratedOptimizer) or not loop.active:
            return
        if type(optimizer) is not AcceleratedOptimizer and "step" not in vars(optimizer):
            name = type(optimizer).__name__
            return loop.refuse(f"the optimizer runs outside of graphs: {name} has a step of its own")
        self._undo.append(graph_steps(loop, optimizer))

    def __getstate__(self) -> dict[str, Any]:
        return {"config": self.config}  # graphs live in this process only

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["config"])  # type: ignore[misc]


class _Graphed(accelerate.Accelerator):  # type: ignore[misc]  # it has no types
    """What an Accelerator with a `PyGraph` does differently. Without one it is the stock class."""

    pygraph: PyGraph | None = None
    """The plugin: `accelerator.pygraph.report()`. None without one."""

    @overload
    def graphed_step(self, fn: None = None) -> Callable[[Callable[..., Any]], GraphedStepFunction]: ...

    @overload
    def graphed_step(self, fn: Callable[..., Any]) -> GraphedStepFunction: ...

    def graphed_step(self, fn: Callable[..., Any] | None = None) -> Any:
        """A training step that returns detached results and has a report of its own; also as a decorator.

        It runs as it is written. Prepared models and optimizers have the graphs that they have in a stock loop.

        ```python
        @accelerator.graphed_step
        def step(batch):
            with accelerator.accumulate(model):
                loss = loss_fn(model(batch["x"]), batch["y"])
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            return loss
        ```

        Args:
            fn: one training step, or micro-batch.

        Returns:
            A callable that does the same and returns the same, detached.

        Raises:
            RuntimeError: this Accelerator has no PyGraph.
        """
        if fn is None:
            return self.graphed_step
        plugin = self.pygraph
        if plugin is None:
            raise RuntimeError("graphed_step needs a PyGraph: Accelerator(plugins=[PyGraph()])")
        return surely(lambda: GraphedStepFunction(fn, self, plugin._the_loop()), SETTING_UP)

    def prepare(self, *args: Any, **kwargs: Any) -> Any:
        before = list(map(id, (*self._models, *self._optimizers)))
        result = super().prepare(*args, **kwargs)
        if self.pygraph is not None and self.is_fsdp2:  # parameters, and what optimizers hold, were replaced
            for model in (m for m in self._models if id(m) not in before):
                arranged(functools.partial(self.pygraph._take_model, model))
            for optimizer in (o for o in self._optimizers if id(o) not in before):
                arranged(functools.partial(self.pygraph._take_optimizer, optimizer))
        return result

    def prepare_model(self, model: Any, device_placement: Any = None, evaluation_mode: bool = False) -> Any:
        model = super().prepare_model(model, device_placement, evaluation_mode)
        plugin = self.pygraph
        loop = None if plugin is None or evaluation_mode else arranged(plugin._the_loop)
        if plugin is None or loop is None or not loop.active:
            return model
        backend = self.state.dynamo_plugin.backend
        if backend == DynamoBackend.NO:
            arranged(lambda: plugin._take_model(model))
        else:
            loop.refuse(
                f"the Accelerator compiles models with {backend.value.lower()}, so forward and backward get no graphs "
                "of pygraph-train",
                "Remove dynamo_backend. With compile=True graphs of pygraph-train hold Inductor's kernels",
            )
        return model

    def prepare_optimizer(self, optimizer: Any, device_placement: Any = None) -> Any:
        known = optimizer in self._optimizers
        optimizer = super().prepare_optimizer(optimizer, device_placement)
        if self.pygraph is not None and not known and not self.is_fsdp2:
            arranged(functools.partial(self.pygraph._take_optimizer, optimizer))
        return optimizer

    def backward(self, loss: Any, **kwargs: Any) -> None:
        if self.pygraph is None or (loop := self.pygraph._loop) is None:
            return super().backward(loss, **kwargs)
        stock = super().backward
        loop.boundary.make(functools.partial(make_backward, loop, self, stock), stock, loss, **kwargs)

    def log(self, values: dict[str, Any], step: int | None = None, log_kwargs: Any = None) -> None:
        plugin = self.pygraph
        if plugin is not None and plugin.config.log_metrics and self.trackers:
            found: dict[str, Any] = {}
            quietly(lambda: found.update(plugin.values()))
            values = {**values, **found}
        super().log(values, step=step, log_kwargs=log_kwargs)

    def free_memory(self, *objects: Any) -> Any:
        if self.pygraph is not None:
            self.pygraph.release()
        return super().free_memory(*objects)

    def end_training(self) -> None:
        if self.pygraph is not None:
            self.pygraph.release()  # before the process group goes
        super().end_training()


class GraphedStepFunction(FunctionStep):
    """A training step of an Accelerate loop. Made by `accelerator.graphed_step`.

    Args:
        fn, loop: see `FunctionStep`.
        accelerator: whose `backward`, optimizers and schedulers `fn` uses.

    Attributes:
        accelerator: as given.
    """

    _made_by = "accelerator.graphed_step"

    def __init__(self, fn: Callable[..., Any], accelerator: Any, loop: Loop) -> None:
        super().__init__(fn, loop)
        self.accelerator = accelerator
        loop.patience = 1  # a whole step has met its optimizer


class Accelerator(_Graphed):
    """`accelerate.Accelerator` with one more argument.

    Args:
        *args, **kwargs: as in `accelerate.Accelerator`.
        plugins: a `PyGraph`, and any of Accelerate's own plugins and kwargs handlers. Each of these replaces
            the argument that it belongs to.
        dynamo_backend: as in `accelerate.Accelerator`, or "pygraph", which means `plugins=[PyGraph(compile=True)]`.

    Raises:
        TypeError: an object in `plugins` is of another class.
        ValueError: a plugin was given twice, or also as an argument of its own.
    """

    def __init__(self, *args: Any, plugins: Any = (), **kwargs: Any) -> None:
        plugin, kwargs = surely(lambda: _sorted(plugins, args, kwargs), SETTING_UP)
        super().__init__(*args, **kwargs)
        if plugin is not None:
            plugin._bind(self)


def make_backward(
    loop: Loop, accelerator: accelerate.Accelerator, stock: Callable[..., None], loss: Any, **kwargs: Any
) -> None:
    """In the place of an Accelerator's `backward`, which is `stock`."""
    directly = functools.partial(loop.made_backward, loss, accelerator.gradient_accumulation_steps)
    if kwargs or accelerator.scaler is not None or not tried(directly):
        ends = loop.ends_of(loss, **kwargs)
        executes(BACKWARD)
        stock(loss, **ends)


def graph_steps(loop: Loop, optimizer: AcceleratedOptimizer) -> Callable[[], None]:
    """Have a loop make the steps of a prepared optimizer. Returns the undo."""
    graph = loop.take_optimizer(optimizer.optimizer, optimizer.scaler)

    def step(body: Callable[..., None], closure: Any) -> None:
        nonlocal graph
        if graph is not None and optimizer.optimizer is not graph.optimizer:  # somebody has replaced it
            quietly(graph.close)
            graph = loop.take_optimizer(optimizer.optimizer, optimizer.scaler)
        loop.step(graph, loop.with_closure(graph, body, closure)[0])

    return route_step(optimizer, step)


def route_step(
    optimizer: AcceleratedOptimizer, run: Callable[[Callable[..., None], Any], None]
) -> Callable[[], None]:
    """Make `optimizer.step()` go through `run(body, closure)` where gradients are synchronised. Returns the undo."""
    stock = vars(optimizer).get("step")  # of a scheduler, which counts its calls
    if stock is None and type(optimizer) is not AcceleratedOptimizer:
        return nothing
    inner, routed = optimizer.step, [True]

    def body(*closure: Any) -> None:
        inner(*closure)
        own, kind = vars(optimizer.optimizer), type(optimizer.optimizer)
        # a scaler leaves the optimizer's own method behind, which looks as if somebody had replaced it
        if optimizer.scaler is not None and getattr(own.get("step"), "__func__", None) is kind.step:
            del own["step"]

    def step(self: AcceleratedOptimizer, closure: Any = None) -> None:
        if self is not optimizer:  # a copy
            return type(self).step(self, closure)
        scaled = closure is not None and self.scaler is not None
        if scaled or not self.gradient_state.sync_gradients or not routed:
            return inner(closure)
        run(body, closure)

    replaced = types.MethodType(step, optimizer)  # a pickled one becomes the method of the class again
    if hasattr(inner, "_wrapped_by_lr_sched"):
        step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    vars(optimizer)["step"] = replaced

    def undo() -> None:
        routed.clear()  # a scheduler may have wrapped it meanwhile
        if vars(optimizer).get("step") is replaced:
            del vars(optimizer)["step"]
            if stock is not None:
                vars(optimizer)["step"] = stock

    return undo


def _sorted(
    plugins: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[PyGraph | None, dict[str, Any]]:
    """The PyGraph among the plugins, and the stock class's keyword arguments with all others in place."""
    if not isinstance(plugins, (list, tuple)):
        plugins = [plugins]
    if kwargs.get("dynamo_backend") == "pygraph":  # no member of Accelerate's DynamoBackend
        kwargs = {name: value for name, value in kwargs.items() if name != "dynamo_backend"}
        plugins = [*plugins, PyGraph(compile=True)]
    stock = inspect.signature(accelerate.Accelerator.__init__)
    given = {k for k, v in stock.bind_partial(None, *args, **kwargs).arguments.items() if v is not None}
    given -= {"gradient_accumulation_steps"}
    found: PyGraph | None = None
    sorted_kwargs = dict(kwargs)
    for plugin in plugins:
        if isinstance(plugin, PyGraph):
            if found is not None:
                raise ValueError("plugins holds two PyGraph plugins; keep one of them")
            found = plugin
            continue
        argument = next((name for cls, name in _ARGUMENTS if isinstance(plugin, cls)), None)
        if argument is None:
            accepted = ", ".join(["PyGraph", *(cls.__name__ for cls, _ in _ARGUMENTS)])
            raise TypeError(f"plugins takes instances of {accepted}; got {plugin!r}")
        if argument == "kwargs_handlers":
            if argument in given and argument not in kwargs:
                raise ValueError("pass kwargs_handlers by name, or all of them in plugins")
            sorted_kwargs[argument] = [*(sorted_kwargs.get(argument) or ()), plugin]
        elif argument in given:
            raise ValueError(f"{argument} was given twice; keep one of them")
        else:
            sorted_kwargs[argument] = plugin
            given.add(argument)
    return found, sorted_kwargs


def _unsupported(accelerator: accelerate.Accelerator) -> Problem | None:
    """Why nothing of this Accelerator's training can be graphed."""
    kind = accelerator.distributed_type
    known = (DistributedType.NO, DistributedType.MULTI_GPU, DistributedType.MULTI_CPU)
    problem = why_not_spread(None if kind in known or accelerator.is_fsdp2 else kind.value)
    if problem is None and accelerator.mixed_precision == "fp8":
        return Problem("mixed_precision='fp8' is not supported yet: its steps run without graphs")
    return problem
