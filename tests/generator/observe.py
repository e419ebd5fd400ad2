"""Copies and comparisons of everything that a training run shows. It needs nothing else of this package."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["differs", "frozen", "mapped", "overlap", "switches", "tensors_of", "told"]


def told(error: Exception) -> str:
    """An exception's type and the first line of its message."""
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def differs(expected: Any, found: Any, *, rounding: bool = False) -> str | None:
    """None when equal bit for bit (NaN equals NaN), types included; else where they differ.

    With `rounding` floating-point numbers may differ as far as their order of additions explains it.
    """
    if type(expected) is not type(found):
        return f": {_brief(expected)} became {_brief(found)}"
    if isinstance(expected, Tensor):
        if expected.dtype != found.dtype or expected.shape != found.shape:
            return f": {expected.dtype} {list(expected.shape)} became {found.dtype} {list(found.shape)}"
        if rounding and expected.is_floating_point():
            same = torch.allclose(expected, found, rtol=1e-3, atol=1e-5, equal_nan=True)
        else:
            same = _same_bits(expected, found)
        return None if same else f": {_brief(expected)} became {_brief(found)}"
    if isinstance(expected, np.ndarray):
        return differs(torch.from_numpy(expected), torch.from_numpy(found), rounding=rounding)
    if isinstance(expected, dict):
        if list(expected) != list(found):
            return f": keys {list(expected)} became {list(found)}"
        pairs = [(f"[{key!r}]", expected[key], found[key]) for key in expected]
    elif isinstance(expected, list):
        if len(expected) != len(found):
            return f": {len(expected)} entries became {len(found)}"
        pairs = [(f"[{k}]", a, b) for k, (a, b) in enumerate(zip(expected, found, strict=True))]
    else:
        equal = expected == found or (expected != expected and found != found)
        equal |= rounding and isinstance(expected, float) and math.isclose(expected, found, rel_tol=1e-3)
        return None if equal else f": {_brief(expected)} became {_brief(found)}"
    for place, a, b in pairs:
        if (text := differs(a, b, rounding=rounding)) is not None:
            return place + text
    return None


def _same_bits(a: Tensor, b: Tensor) -> bool:
    if not a.is_floating_point():
        return torch.equal(a, b)
    nan = a.isnan()
    return torch.equal(nan, b.isnan()) and bool(
        ((a == b) & (torch.signbit(a) == torch.signbit(b)) | nan).all()
    )


def _brief(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) < 300 else text[:300] + "..."


def frozen(value: Any) -> Any:
    """A copy that nothing changes any more, of tensors, arrays, dicts, lists and dataclasses."""
    if isinstance(value, Tensor):
        copy = value.detach()
        return copy.to_dense() if copy.layout is not torch.strided else copy.clone()
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, Mapping):
        return {name: frozen(item) for name, item in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: frozen(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, (list, tuple)):
        return [type(value).__name__, *map(frozen, value)]
    known = (int, float, str, bool, bytes, type(None), np.generic)
    if type(value).__name__ == "Held":  # of a script
        return ["Held", frozen(vars(value))]
    return value if isinstance(value, known) else type(value).__name__


def mapped(change: Callable[[Any], Any], tree: Any) -> Any:
    """A tree of dicts, lists and tuples with `change` applied to its leaves."""
    if isinstance(tree, dict):
        return {name: mapped(change, item) for name, item in tree.items()}
    if isinstance(tree, (list, tuple)) and type(tree) in (list, tuple):
        return type(tree)(mapped(change, item) for item in tree)
    return change(tree)


def tensors_of(tree: Any) -> list[Tensor]:
    """The tensors of a tree, in order."""
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, Mapping):
        tree = list(tree.values())
    if is_dataclass(tree) and not isinstance(tree, type):
        tree = [getattr(tree, f.name) for f in fields(tree)]
    return [t for item in tree for t in tensors_of(item)] if isinstance(tree, (list, tuple)) else []


def overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors lie in memory that they share."""
    if a.layout is not torch.strided or not a.numel() or not b.numel():
        return False
    (start, end), (other_start, other_end) = _bytes(a), _bytes(b)
    return start < other_end and other_start < end


def _bytes(t: Tensor) -> tuple[int, int]:
    reach = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True)) + 1
    return t.data_ptr(), t.data_ptr() + reach * t.element_size()


def switches() -> list[Any]:
    """Global switches that a run could leave changed."""
    return [
        torch.is_grad_enabled(),
        str(torch.get_default_dtype()),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_anomaly_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.backends.cuda.flash_sdp_enabled(),
        torch.backends.cuda.math_sdp_enabled(),
        torch.backends.mkldnn.enabled,
        torch.get_float32_matmul_precision(),
    ]
