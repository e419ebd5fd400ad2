"""The engines of a device, and what they have in common.

All engines of one device capture on one stream, and allocate what stays from one pool. Each engine has memory of its
own for what its graphs make: a training run has one, and so have all regions of a device together. One pool for all of
them would not be safe: a replay writes to every block that was free during its capture, and the gradients of a run that
was captured later may lie there, or what a region has saved for a backward that is still to come.
"""

from __future__ import annotations

import torch

from pygraph_train.boundary import quietly
from pygraph_train.graphs.engine import Engine
from pygraph_train.versions import tell_if_newer


def make_engine(name: str, device: torch.device) -> Engine | None:
    """An engine for tensors on `device`, with memory of its own.

    Args:
        name: "auto", "cuda", "emulated" or "off".
        device: where the step's parameters live.
    Returns:
        None when graphs are off, or "auto" finds no CUDA device.
    Raises:
        ValueError: the engine cannot work on that device.
    """
    if name == "off" or (name == "auto" and device.type != "cuda"):
        return None
    quietly(tell_if_newer)
    if name == "emulated":
        if device.type != "cpu":
            raise ValueError(f"engine='emulated' works on the CPU, but the model is on {device}")
        from pygraph_train.graphs.emulated import EmulatedEngine

        return EmulatedEngine()
    if not torch.cuda.is_available():
        raise ValueError(
            "engine='cuda' needs a CUDA device, and torch finds none; use engine='auto' to run without graphs here"
        )
    if device.type != "cuda":
        raise ValueError(f"engine='cuda' needs the model on a CUDA device, but it is on {device}")
    from pygraph_train.graphs.cuda import CudaEngine

    return CudaEngine(device)
