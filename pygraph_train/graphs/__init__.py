"""One captured graph: capture, replay, memory pool, pointer indirection, CPU emulation. Knows nothing of training."""

from __future__ import annotations

import torch

from pygraph_train.graphs.engine import (
    CaptureError,
    Engine,
    Graph,
    IndirectGraph,
    IndirectionUnavailable,
)

__all__ = ["CaptureError", "Engine", "Graph", "IndirectGraph", "IndirectionUnavailable", "make_engine"]


def make_engine(name: str, device: torch.device) -> Engine | None:
    """The engine for tensors on `device`.

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
