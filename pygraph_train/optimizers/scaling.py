"""The GradScaler of a training loop, as the update of the parameters meets it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pygraph_train.boundary import UPDATE, executes
from pygraph_train.optimizers.preparation import OptimizerPreparation
from pygraph_train.patches import nothing
from pygraph_train.torch_private.optim import states_of_scaler, step_supports_amp_scaling, tensors_of_scaler


class Scaling:
    """What a loop's GradScaler does for one optimizer, and what that means for a graph of the update.

    A scaler that is switched off counts as none: all that it does is to call the optimizer.

    Args:
        scaler: of the loop, None where it has none.
        optimizer: as the user made it, before anything prepares it; None where the step has none.

    Attributes:
        on: whether losses are scaled.
        unscales_itself: whether the user's own optimizer unscales gradients in its kernels, which tells the host
            nothing of overflows.
    """

    def __init__(self, scaler: torch.amp.GradScaler | None, optimizer: torch.optim.Optimizer | None) -> None:
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self._optimizer = optimizer
        self.on = self._scaler is not None
        self.unscales_itself = optimizer is not None and step_supports_amp_scaling(optimizer)

    def scale(self, loss: Tensor) -> Tensor:
        """The loss to run the backward of."""
        return loss if self._scaler is None else self._scaler.scale(loss)

    def unscale(self, *, in_kernels: bool = False) -> None:
        """Unscale the optimizer's gradients.

        Args:
            in_kernels: leave it to the kernels of an optimizer that unscales itself.
        """
        if self._scaler is not None and not (in_kernels and self.unscales_itself):
            assert self._optimizer is not None
            executes(UPDATE)
            self._scaler.unscale_(self._optimizer)

    def step(self) -> None:
        """The optimizer's step, unless gradients overflowed, and the scaler's update."""
        assert self._optimizer is not None
        executes(UPDATE)
        if self._scaler is None:
            self._optimizer.step()
        else:
            self._scaler.step(self._optimizer)
            self._scaler.update()

    @property
    def unscaled(self) -> bool:
        """Whether gradients were unscaled in this step: what was found then is in tensors that are new every time."""
        if self._scaler is None:
            return False
        state = states_of_scaler(self._scaler).get(id(self._optimizer))
        return bool(state and state["found_inf_per_device"])

    def why_update_stays_outside(
        self, preparation: OptimizerPreparation, *, other_kernels: bool = False
    ) -> str | None:
        """Why a graph cannot hold the update.

        Args:
            preparation: of the optimizer.
            other_kernels: whether kernels will do that the preparation has chosen. False where the loop around the
                update takes another way for an optimizer that unscales itself: the graph would hold that one.
        """
        if self._scaler is None:
            return None
        if preparation.step_supports_scaler and (other_kernels or self.unscales_itself):
            return None
        return "the GradScaler reads on the host whether gradients overflowed; AdamW(fused=True) does not need that"

    def numbers(self) -> tuple[Any, ...]:
        """What an update bakes in of the scaler. The scale itself is on the device. Hot path."""
        scaler = self._scaler
        if scaler is None:
            return ()
        return scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()

    def notes(self) -> Callable[[], None]:
        """Where the scaler is in this step: whose gradients it has unscaled, and whose optimizer it has stepped.

        Returns:
            What puts that back, after a capture or a trial: they are no steps.
        """
        scaler = self._scaler
        if scaler is None:
            return nothing
        notes = {
            owner: {name: dict(value) if isinstance(value, dict) else value for name, value in state.items()}
            for owner, state in states_of_scaler(scaler).items()
        }

        def put_back() -> None:
            states = states_of_scaler(scaler)  # an update makes them anew
            states.clear()
            states.update(notes)

        return put_back

    def tensors(self) -> list[Tensor]:
        """What an update writes: scale and growth counter, once they are on the device."""
        found = () if self._scaler is None else tensors_of_scaler(self._scaler)
        return [t for t in found if t is not None]
