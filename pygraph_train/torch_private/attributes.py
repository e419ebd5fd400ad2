"""Attributes that type checkers do not know."""

from __future__ import annotations

from typing import Any

import torch

__all__ = [
    "attribute",
]


def attribute(gm: torch.fx.GraphModule, target: str) -> torch.Tensor:
    """The tensor that a `get_attr` node names. (2.11, 2.13)"""
    owner: Any = gm
    for part in target.split("."):
        owner = getattr(owner, part)
    return owner
