"""Lightning Fabric: `PyGraphFabric().attach(fabric)`.

The user's loop stays as it is. Models that `fabric.setup` returns run forward and backward from graphs, optimizers step
from graphs of their own, and everything between is the user's Python. `graphed_step` makes a whole step of a function.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

try:
    from lightning.fabric import Fabric
    from lightning.fabric.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision
    from lightning.fabric.strategies.ddp import DDPStrategy
    from lightning.fabric.strategies.model_parallel import ModelParallelStrategy
    from lightning.fabric.strategies.single_device import SingleDeviceStrategy
    from lightning.fabric.wrappers import _FabricModule, _FabricOptimizer
except ImportError as error:
    raise ImportError("PyGraphFabric needs Lightning: pip install 'pygraph-train[lightning]'") from error

from pygraph_train.boundary import BACKWARD, SETTING_UP, arranged, executes, quietly, surely, tried
from pygraph_train.config import PyGraphConfig
from pygraph_train.integrations.fabric.step import FabricStep
from pygraph_train.optimizers.graph import OptimizerGraph
from pygraph_train.parallel.replication import why_not_spread
from pygraph_train.patches import standing_in
from pygraph_train.problems import Problem
from pygraph_train.report.announcements import metrics_of
from pygraph_train.report.loop_report import LoopReport
from pygraph_train.step.loop import Loop

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from pygraph_train.config import PyGraphOptions


_KNOWN_PRECISION = (Precision, MixedPrecision, HalfPrecision, DoublePrecision)

_CLOSED = "this PyGraphFabric is attached to no Fabric: call attach(fabric) first"


class PyGraphFabric:
    """Runs the training loop of a Lightning Fabric from graphs. The loop itself does not change.

    ```python
    fabric = Fabric(accelerator="gpu", devices=1, precision="bf16-mixed")
    pygraph = PyGraphFabric().attach(fabric)            # the only new line, before fabric.setup
    model, optimizer = fabric.setup(model, optimizer)
    ...
    print(pygraph.report())
    ```

    Losses, parameters, optimizer state and checkpoints are the same as without PyGraphFabric. As a context manager
    it detaches at the end: `with PyGraphFabric().attach(fabric) as pygraph:`.

    Args:
        config: options; the defaults suit most runs.
        **overrides: single options, as `PyGraphFabric(engine="emulated")`.

    Raises:
        ValueError, TypeError: an option is unknown or has a value that is not allowed.
    """

    def __init__(self, config: PyGraphConfig | None = None, **overrides: Unpack[PyGraphOptions]) -> None:
        self.config = PyGraphConfig.of(config, overrides)
        self._fabric: Fabric | None = None
        self._loop: Loop | None = None
        self._report = surely(LoopReport, SETTING_UP)
        self._graphs: weakref.WeakValueDictionary[int, OptimizerGraph] = weakref.WeakValueDictionary()
        self._models: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._steps: weakref.WeakSet[FabricStep] = weakref.WeakSet()
        self._accumulating: list[nn.Module] = []
        self._patches = ExitStack()

    def attach(self, fabric: Fabric) -> PyGraphFabric:
        """Use graphs for all models and optimizers that this Fabric sets up from now on. `detach` undoes it.

        Args:
            fabric: a `lightning.fabric.Fabric` that has set up no model yet.

        Returns:
            This object.

        Raises:
            TypeError: `fabric` is no `lightning.fabric.Fabric`.
            ValueError: the Fabric already has a PyGraphFabric or models; this PyGraphFabric is attached to another
                Fabric; or the chosen engine cannot work on the Fabric's device.
            PyGraphError: no part of the training can have a graph, and `on_failure="raise"` is set.
        """
        if not isinstance(fabric, Fabric):
            raise TypeError(_no_fabric(fabric))
        if self._fabric is not None:
            raise ValueError(
                "this PyGraphFabric is already attached to a Fabric: make a PyGraphFabric for each Fabric"
            )
        if "_pygraph" in vars(fabric):
            raise ValueError("this Fabric already has a PyGraphFabric: attach only one")
        if fabric._models_setup:
            raise ValueError(
                "this Fabric set up a model before PyGraphFabric was attached: call attach(fabric) before "
                "fabric.setup"
            )
        loop = self._begin(fabric)
        replaced: list[tuple[Any, str, Any]] = [
            (fabric, "_pygraph", self),
            (fabric, "no_backward_sync", self._no_backward_sync),
        ]
        if loop.active:
            strategy: Any = fabric.strategy
            ours: list[tuple[Any, str, Any]] = [
                *((fabric, name, self._set_up) for name in ("setup", "setup_module", "setup_optimizers")),
                (strategy, "optimizer_step", self._optimizer_step),
                (strategy, "backward", self._backward),
                *([(fabric, "log_dict", self._log_dict)] if self.config.log_metrics else []),
            ]
            replaced += [(of, name, _in_place_of(getattr(of, name), call)) for of, name, call in ours]
        arranged(lambda: self._patches.enter_context(standing_in(replaced)))
        return self

    def detach(self) -> None:
        """Release all graphs and give Fabric, models and optimizers back as they were. The report stays.

        Graphed steps cannot be called any more.
        """
        for step in self._steps:
            step.detached = True
        if self._loop is not None:
            quietly(self._loop.release)
        quietly(self._patches.close)
        self._fabric, self._loop = None, None
        self._steps.clear()
        self._graphs.clear()

    def __enter__(self) -> PyGraphFabric:
        return self

    def __exit__(self, *exc: object) -> None:
        self.detach()

    def on_after_setup(self, fabric: Fabric) -> None:
        """Called where somebody took this object for a callback of Fabric.

        Raises:
            TypeError: it is not attached, so nothing would be graphed.
        """
        if self._fabric is None:
            raise TypeError(
                "PyGraphFabric is no callback of Fabric: call PyGraphFabric().attach(fabric) instead"
            )

    def report(self) -> LoopReport:
        """The report of the training steps so far. It prints as a table."""
        return self._report

    def graphed_step(
        self,
        fn: Callable[..., Any] | None = None,
        *,
        model: nn.Module | Sequence[nn.Module],
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        max_norm: float | None = None,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
        clip_val: float | None = None,
        manual_optimization: bool = False,
    ) -> Any:
        """A whole training step of a function that computes the loss. Also a decorator.

        Forward with the loss, backward and update have graphs, and Fabric clips between them.

        ```python
        @pygraph.graphed_step(model=model, optimizer=optimizer, max_norm=1.0, error_if_nonfinite=False)
        def step(batch):
            return loss_fn(model(batch["x"]), batch["y"])

        for batch in loader:
            loss = step(batch)  # instead of zero_grad, forward, fabric.backward, fabric.clip_gradients, step
            scheduler.step()
        ```

        Inside `fabric.no_backward_sync(model)` a call adds up gradients and makes no optimizer step. The first
        call after that makes the optimizer step.

        Args:
            fn: computes the loss: a 0-dim tensor that requires grad, or a dict with such a tensor under "loss".
                The tensors among its arguments are on the device.
            model: as `fabric.setup` returned it.
            optimizer: as `fabric.setup` returned it. Gradients are emptied before each step, and
                the next replay overwrites them: keep a clone if you need one longer.
            max_norm, norm_type, error_if_nonfinite, clip_val: as in `fabric.clip_gradients`; without `max_norm` and
                `clip_val` nothing is clipped. With `error_if_nonfinite=True`, Fabric's default, the host waits for the
                norm.
            manual_optimization: `fn` makes the whole step itself: it calls `fabric.backward`,
                `fabric.clip_gradients`, and `step` and `zero_grad` of its optimizers. `model` and `optimizer` may be
                lists then. Forward, backward and optimizers have graphs of their own.

        Returns:
            A `FabricStep`: called, it makes one step, and returns what `fn` returns, detached. Its attribute `norm`
            is what `fabric.clip_gradients` has returned.

        Raises:
            TypeError: model or optimizer was not set up with Fabric.
            ValueError: model or optimizer was set up with another Fabric, or both `max_norm` and `clip_val` were given,
                or one of them under manual optimization.
            RuntimeError: this object is not attached to a Fabric.
        """
        fabric, loop = surely(self._attached, SETTING_UP)
        clips = max_norm is not None or clip_val is not None
        if max_norm is not None and clip_val is not None:
            raise ValueError("graphed_step takes max_norm or clip_val, but not both: leave one of them out")
        if manual_optimization and clips:
            raise ValueError(
                "under manual_optimization=True the function clips by itself: leave out max_norm and clip_val"
            )
        clipping = {
            "max_norm": max_norm,
            "norm_type": norm_type,
            "error_if_nonfinite": error_if_nonfinite,
            "clip_val": clip_val,
        }
        given: Any
        for what, given, kind in ("model", model, _FabricModule), ("optimizer", optimizer, _FabricOptimizer):
            several = manual_optimization and isinstance(given, (list, tuple))
            for one in given if several else [given]:
                surely(functools.partial(_check, fabric, what, one, kind), SETTING_UP)

        def made(fn: Callable[..., Any]) -> FabricStep:
            given = model, optimizer, clipping if clips else None, self._models, self._accumulating
            step = surely(
                lambda: FabricStep(fn, fabric, loop, *given, manual=manual_optimization), SETTING_UP
            )
            self._steps.add(step)
            return step

        return made if fn is None else surely(lambda: made(fn), SETTING_UP)

    def _begin(self, fabric: Fabric) -> Loop:
        loop = surely(lambda: Loop(self.config, fabric.device, _unsupported(fabric)), SETTING_UP)
        self._fabric, self._loop, self._report = fabric, loop, loop.report
        return loop

    def _attached(self) -> tuple[Fabric, Loop]:
        if self._fabric is None:
            raise RuntimeError(_CLOSED)
        return self._fabric, self._loop or self._begin(self._fabric)

    # -- in the place of methods of Fabric and its strategy --------------------------------------------

    def _set_up(self, stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """One of Fabric's methods that set up; models and optimizers that it returns are taken over."""
        made = stock(*args, **kwargs)
        for one in made if isinstance(made, tuple) else (made,):
            arranged(functools.partial(self._take, one))
        return made

    def _take(self, made: Any) -> None:
        _, loop = self._attached()
        if isinstance(made, _FabricModule):
            self._models.add(made)
            loop.take_module(made._forward_module)
        elif isinstance(made, _FabricOptimizer) and id(made.optimizer) not in self._graphs:
            graph = loop.take_optimizer(made.optimizer, getattr(made._strategy.precision, "scaler", None))
            if graph is not None:
                self._graphs[id(made.optimizer)] = graph

    def _optimizer_step(self, stock: Callable[..., Any], optimizer: Any, **kwargs: Any) -> Any:
        """`strategy.optimizer_step`, from the optimizer's own graph where it has one."""
        graph, loop, closure = self._graphs.get(id(optimizer)), self._loop, kwargs.get("closure")
        if loop is None or graph is None or (kwargs and (closure is None or graph.scaling.on)):
            return stock(optimizer, **kwargs)
        body, made = loop.with_closure(graph, lambda *c: stock(optimizer, **(kwargs if c else {})), closure)
        loop.step(graph, body)
        return made[-1]

    def _backward(self, stock: Callable[..., None], *given: Any, **named: Any) -> None:
        """`strategy.backward`, without autograd where that is possible."""
        if self._loop is None:
            return stock(*given, **named)
        self._loop.boundary.make(functools.partial(self._make_backward, stock), stock, *given, **named)

    def _make_backward(
        self, stock: Callable[..., None], loss: Any, module: Any, *args: Any, **kwargs: Any
    ) -> None:
        fabric, loop = self._attached()
        others = args or kwargs or getattr(fabric.strategy.precision, "scaler", None)
        if others or not tried(lambda: loop.made_backward(loss, 1)):
            ends = loop.ends_of(loss, *args, **kwargs)
            executes(BACKWARD)
            stock(loss, module, *args, **ends)

    def _log_dict(self, stock: Callable[..., None], metrics: Any, *args: Any, **kwargs: Any) -> None:
        """`fabric.log_dict`, which `fabric.log` calls, with what loggers get of the report."""
        found: dict[str, float] = {}
        quietly(lambda: found.update(metrics_of(self._report)))
        stock({**metrics, **found}, *args, **kwargs)

    def _no_backward_sync(self, module: Any, enabled: bool = True) -> AbstractContextManager[Any]:
        fabric, _ = self._attached()
        stock = type(fabric).no_backward_sync(fabric, module, enabled)
        return self._noting(module, stock) if enabled else stock

    @contextmanager
    def _noting(self, module: nn.Module, stock: AbstractContextManager[Any]) -> Iterator[None]:
        self._accumulating.append(module)
        try:
            with stock:
                yield
        finally:
            self._accumulating.pop()

    def __getstate__(self) -> dict[str, Any]:
        return {"config": self.config, "fabric": self._fabric}  # graphs live in this process only

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["config"])  # type: ignore[misc]
        self._fabric = state["fabric"]


def _in_place_of(stock: Callable[..., Any], call: Callable[..., Any]) -> Callable[..., Any]:
    """What is called with the stock method first. Fabric takes it for that: no strategy has a backward of its own."""
    return functools.update_wrapper(functools.partial(call, stock), stock)


def _no_fabric(given: object) -> str:
    module = type(given).__module__
    if module.partition(".")[0] == "lightning_fabric":
        return (
            "this Fabric comes from `import lightning_fabric`, and PyGraphFabric supports `lightning.fabric` "
            "only: use `from lightning.fabric import Fabric`"
        )
    return f"attach takes a lightning.fabric.Fabric, got {type(given).__name__}"


def _check(fabric: Fabric, what: str, given: Any, kind: Any) -> None:
    """What `graphed_step` is given comes from this Fabric."""
    how = "use the objects that `model, optimizer = fabric.setup(model, optimizer)` returns"
    if not isinstance(given, kind):
        raise TypeError(
            f"the {what} of graphed_step is a {type(given).__name__} that Fabric has not set up: {how}"
        )
    if given._strategy is not fabric.strategy:
        raise ValueError(
            f"the {what} of graphed_step was set up with another Fabric than the Fabric of this PyGraphFabric: "
            "attach a PyGraphFabric to each Fabric"
        )


def _unsupported(fabric: Fabric) -> Problem | None:
    """Why nothing of this Fabric's training can be graphed."""
    strategy = type(fabric.strategy)
    known = strategy in (SingleDeviceStrategy, DDPStrategy, ModelParallelStrategy)
    problem = why_not_spread(None if known else strategy.__name__)
    if problem is not None:
        return Problem(problem.reason, fix='Graphs need one device, strategy="ddp" or ModelParallelStrategy')
    if type(fabric.strategy.precision) not in _KNOWN_PRECISION:
        return Problem(
            f"the precision plugin {type(fabric.strategy.precision).__name__} is not one of Fabric's own, so "
            "steps run without graphs",
            fix="Choose the precision with Fabric(precision=...)",
        )
    return None
