"""Where the operations of a graph are: devices, and lines of the user's code."""

from __future__ import annotations

import torch

from pygraph_train.problems import user_line_in

__all__ = ["device_of", "first_user_line"]


def device_of(gm: torch.fx.GraphModule) -> tuple[torch.device | None, str]:
    """The one device that the graph works on, besides the CPU."""
    found = _devices_in(gm)
    accelerators = {d for d in found if d.type == "cuda"}
    if len(accelerators) > 1:
        return None, f"it works on several devices: {', '.join(sorted(map(str, accelerators)))}"
    return next(iter(accelerators or found), None), "it works on no tensors"


def _devices_in(gm: torch.fx.GraphModule) -> set[torch.device]:
    """Devices of all tensors that the graph computes."""
    found = set()
    for node in gm.graph.nodes:
        value = node.meta.get("val", node.meta.get("tensor_meta"))
        for tensor in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(tensor, torch.Tensor):
                found.add(tensor.device)
    return found


def first_user_line(gm: torch.fx.GraphModule) -> str | None:
    """`file:line` of the first operation whose stack names user code."""
    return next((where for n in gm.graph.nodes if (where := user_line_in(n.meta.get("stack_trace")))), None)
