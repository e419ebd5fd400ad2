"""`PyGraphFabric.graphed_step`: a whole training step of a Fabric loop, made by the library."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from lightning.fabric import Fabric
from torch import Tensor, nn

from pygraph_train.boundary import STEP, arranged, executes, quietly, surely
from pygraph_train.parallel.replication import replication_of
from pygraph_train.patches import standing_in
from pygraph_train.step.function_step import FunctionStep
from pygraph_train.step.loop import Loop
from pygraph_train.step.loss_program import loss_in
from pygraph_train.step.module_call import ModuleCall
from pygraph_train.torch_private.stock_dynamo import call_of


class FabricStep(FunctionStep):
    """A training step of a Fabric loop. Made by `PyGraphFabric.graphed_step`.

    Args:
        fn, loop: see `FunctionStep`.
        fabric: whose `backward` and `clip_gradients` make the step.
        model, optimizer: as Fabric returned them.
        clipping: the arguments of `fabric.clip_gradients`, None where nothing is clipped.
        models: all that Fabric returned.
        accumulating: the models whose gradients are being added up now.
        manual: whether `fn` makes its backwards and updates itself.

    Attributes:
        model, optimizer, manual: as given.
        norm: what `fabric.clip_gradients` returned in the last update: the norm of gradients before they were clipped.
            None without `max_norm`, and under manual optimization.
        detached: whether the PyGraphFabric that made this step was detached.
    """

    _made_by = "PyGraphFabric.graphed_step"

    def __init__(
        self,
        fn: Callable[..., Any],
        fabric: Fabric,
        loop: Loop,
        model: Any,
        optimizer: Any,
        clipping: dict[str, Any] | None,
        models: Iterable[nn.Module],
        accumulating: list[nn.Module],
        *,
        manual: bool,
    ) -> None:
        super().__init__(fn, loop)
        self.model, self.optimizer, self.manual = model, optimizer, manual
        self.norm: Tensor | None = None
        self.detached = False
        self._fabric, self._clipping = fabric, clipping
        self._models, self._accumulating = models, accumulating
        self._pending = False  # gradients, of micro-batches
        if not manual:
            self._loss_of = _Loss(fn, model)
            arranged(self._take_loss)

    def _take_loss(self) -> None:
        """Have the loss in the region of the model. A wrapper for several processes calls the model itself."""
        if not replication_of(self.model).shared:
            if isinstance(call := call_of(self.model._forward_module), ModuleCall):
                call.remove()
            self.loop.take_module(self._loss_of)

    def make(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make one step; inside of `fabric.no_backward_sync(model)` only add up gradients.

        Raises:
            RuntimeError: the PyGraphFabric that made this step was detached.
        """
        if self.detached:
            raise RuntimeError(
                f"{self.name} belongs to a PyGraphFabric that was detached: make the step again with graphed_step"
            )
        if self.manual:
            return super().make(args, kwargs)
        executes(STEP)
        update = not any(model is self.model for model in self._accumulating)
        if not self._pending:
            self.optimizer.zero_grad()
        with ExitStack() as around:
            quietly(lambda: around.enter_context(self.around()))
            result = self._loss_of(*args, **kwargs)
        self._fabric.backward(surely(lambda: loss_in(result), STEP))
        if update:
            if self._clipping is not None:
                self.norm = self._fabric.clip_gradients(self.model, self.optimizer, **self._clipping)
            self.optimizer.step()
        self._pending = not update
        return result

    def around(self) -> AbstractContextManager[None]:
        """Fabric hooks every result of a model, to see that backward is its own: here it is."""
        return standing_in((model, "_register_backward_hook", _as_it_is) for model in self._models)

    @contextmanager
    def looked_at(self) -> Iterator[None]:
        """Around a call of the function by somebody who looks at it."""
        with self.around(), self.loop.paused():
            yield


class _Loss(nn.Module):
    """A function for the loss as a module, whose calls have graphs."""

    def __init__(self, fn: Callable[..., Any], model: nn.Module) -> None:
        super().__init__()
        self._fn, self.model = fn, model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._fn(*args, **kwargs)


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor
