"""One captured graph: capture, replay, memory pool, pointer indirection, CPU emulation. Knows nothing of training."""

from __future__ import annotations

from pygraph_train.graphs.devices import make_engine
from pygraph_train.graphs.engine import CaptureError, Engine, Graph, IndirectionUnavailable

__all__ = ["CaptureError", "Engine", "Graph", "IndirectionUnavailable", "make_engine"]
