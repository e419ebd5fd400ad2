"""What cuDNN draws for the dropout between the layers of recurrent networks: where it is, and putting it back."""

from __future__ import annotations

import torch
from torch import Tensor

from pygraph_train.torch_private.cudnn_dropout import begin_dropout_anew, dropout_memory

__all__ = ["DropoutOfLayers"]

_of_devices: dict[torch.device, DropoutOfLayers] = {}


class DropoutOfLayers:
    """cuDNN's generator of one device, which graphs draw from as well as plain steps.

    Graphs hold the address of its memory. Where it begins anew, as after `torch.manual_seed`, ATen makes another memory
    in the next plain step. That is given the address from before, with what the new one holds.

    Args:
        device: of the networks.

    Attributes:
        looks: how often it was looked at, and had not advanced.
        unreadable: why nobody can look at it: a sentence, where this build of torch does not show it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory: Tensor | None = None  # what ATen keeps now
        self._lies: Tensor | None = None  # where graphs read and write
        self._before: Tensor | None = None  # what it held before a step, until it was seen to advance
        self._advances = False
        self.looks = 0
        self.unreadable = ""

    @classmethod
    def on(cls, device: torch.device) -> DropoutOfLayers:
        """The one of this device, from now on put back with other random states."""
        device = _with_index(device)
        return _of_devices.setdefault(device, cls(device))

    @classmethod
    def known_on(cls, device: torch.device) -> DropoutOfLayers | None:
        """The one of this device, where a step was seen that draws from it."""
        if not _of_devices or not torch.backends.cudnn.enabled:
            return None
        found = _of_devices.get(_with_index(device))
        return None if found is None or found.unreadable else found

    def goes_on(self) -> bool:
        """Whether the next network draws where the last one has stopped, and graphs do the same. Hot path.

        Otherwise the random state of the device was set, and the next step has to run without a graph.
        """
        if self.unreadable:
            return False
        try:
            found = dropout_memory(self._device)
        except (AttributeError, TypeError, RuntimeError) as error:
            self.unreadable = f"{type(error).__name__}: {error}"
            return False
        if found is not None and found is not self._memory:
            self._take(found)
        return found is not None

    def advances(self) -> bool:
        """Whether plain steps were seen to write to its memory. If anything else kept count, replays would not."""
        if self._advances or not self.goes_on():
            return self._advances
        assert self._lies is not None
        if self._before is None:
            self._before = self._lies.detach().clone()
        elif not torch.equal(self._before, self._lies):
            self._advances, self._before = True, None
        else:
            self.looks += 1
        return self._advances

    def place(self) -> Tensor | None:
        """Where it stands: a copy of its memory. None where it begins anew with the next network."""
        return self._lies.detach().clone() if self.goes_on() and self._lies is not None else None

    def put_back(self, place: Tensor | None) -> None:
        """Let it go on from there."""
        if place is None:
            begin_dropout_anew(self._device)
            return
        found = dropout_memory(self._device, begins=True)
        if found is not None and found is not self._memory:
            self._take(found)
        assert self._lies is not None
        self._lies.data.copy_(place)

    def _take(self, memory: Tensor) -> None:
        """Let a memory that ATen has made lie where the one before lay. No backward under way sees that (`.data`)."""
        if self._lies is None:
            self._lies = memory.detach()
        else:
            self._lies.data.copy_(memory.data)
            memory.data = self._lies
        self._memory, self._before = memory, None


def _with_index(device: torch.device) -> torch.device:
    if device.type != "cuda" or device.index is not None:
        return device
    return torch.device("cuda", torch.cuda.current_device())
