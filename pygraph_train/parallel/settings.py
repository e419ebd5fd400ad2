"""Settings of the environment under which no graph may hold collectives of NCCL."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from torch import distributed

from pygraph_train.problems import Problem
from pygraph_train.torch_private.names import PROCESSES, lacking

__all__ = ["SETTINGS", "problem_of_settings", "setting_problems"]

SETTINGS = (
    (
        "NCCL_GRAPH_REGISTER",
        ("0",),
        "NCCL registers the memory of graphs, which hangs with memory that grows",
    ),
    ("TORCH_NCCL_BLOCKING_WAIT", ("0", ""), "collectives wait on the host, which a capture forbids"),
    (
        "TORCH_DISTRIBUTED_DEBUG",
        ("OFF", "INFO"),
        "each collective is checked on the host, which a capture forbids",
    ),
)
"""Environment variables of NCCL and torch, the values that are allowed (the default first), and why."""


def setting_problems() -> Iterator[Problem]:
    """A problem for each variable that has a value which is not allowed."""
    for name, allowed, why in SETTINGS:
        setting = os.environ.get(name, allowed[0])
        if setting.upper() not in allowed:
            yield Problem(f"{name}={setting} is set: {why}", fix=f"Leave {name} out")


def problem_of_settings(group: Any) -> Problem | None:
    """Why no graph can hold collectives of this process group. Sets what NCCL needs and the user has left open."""
    if (lack := lacking(PROCESSES)) is not None:
        return lack
    if distributed.get_backend(group) != "nccl":
        return None
    os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")
    return next(setting_problems(), None)
