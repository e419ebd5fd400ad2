"""Straight to the region of a compiled function without gradients, past the runtime of AOTAutograd.

As `direct` does for functions with gradients. All that the runtime does for such a function is known when that is
compiled: it may copy new values into arguments, make results anew that are views, change the grad mode. Where it does
nothing of that, it only switches off gradients and autocast around the region.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from pygraph_train.regions.direct import LOOKS, run_uncast, watched
from pygraph_train.regions.pair import Pair
from pygraph_train.regions.region import Region
from pygraph_train.torch_private.aot import mark_dynamic
from pygraph_train.torch_private.dispatch import set_grad_mode

__all__ = ["DirectInference"]


class DirectInference:
    """A compiled function without gradients, in the plain convention.

    Args:
        compiled: calls the region through AOTAutograd's runtime.
        pair: has the region.
    """

    def __init__(self, compiled: Callable[..., Any], pair: Pair) -> None:
        self._compiled = compiled
        self._pair = pair
        self._dynamic = pair.dynamic
        self._looks = LOOKS
        self._region: Region | None = None

    def __call__(self, *args: Any) -> Any:
        region = self._region
        if region is None:
            return self._look(args) if self._looks else self._compiled(*args)
        result = _call(region, args)
        for i, dims in self._dynamic:
            mark_dynamic(result[i], dims)
        return result

    def _look(self, args: tuple[Any, ...]) -> Any:
        """Call the long way, and find out whether it is nothing but a run of the region."""
        region = self._pair.forward
        if type(region) is not Region:
            self._looks = 0
            return self._compiled(*args)
        self._looks -= 1
        result, seen = watched(region, self._compiled, args)
        if len(seen.runs) == 1:
            inputs, outputs = seen.runs[0]
            if _same(inputs, args) and isinstance(result, (list, tuple)) and _same(outputs, result):
                self._region = region
        return result


def _call(region: Region, args: Sequence[Any]) -> list[Any]:
    if not torch.is_grad_enabled():
        return run_uncast(region, list(args))
    set_grad_mode(False)
    try:
        return run_uncast(region, list(args))
    finally:
        set_grad_mode(True)


def _same(ones: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether these are the same tensors, or equal numbers, in the same order."""
    return len(ones) == len(others) and all(
        x is y or (type(x) is int and type(y) is int and x == y) for x, y in zip(ones, others, strict=True)
    )
