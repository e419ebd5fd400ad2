"""How a framework spreads one training over devices and processes, and what of that can be graphed."""

from __future__ import annotations

from dataclasses import dataclass

from pygraph_train.problems import Problem

__all__ = ["Spread"]


@dataclass(frozen=True)
class Spread:
    """What a framework says of the devices and processes of one training. The default is one of each.

    Attributes:
        wrapper: what it puts around the model, in its own words ("DDPStrategy", "FSDP"): that communicates in forward,
            backward or update. None where the model runs as the user made it.
        processes: how many train together.
        devices: how many one process trains on, each with a copy of the model.
    """

    wrapper: str | None = None
    processes: int = 1
    devices: int = 1

    @property
    def problem(self) -> Problem | None:
        """Why nothing of the training can be graphed, None for one process with one device."""
        what = self.wrapper
        if what is None and (self.processes > 1 or self.devices > 1):
            what = "training on several devices"
        return None if what is None else Problem(f"{what} is not supported yet: its steps run without graphs")
