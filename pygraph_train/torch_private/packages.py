"""Whose code a function is, also under decorators of torch. (2.11, 2.13)"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

__all__ = ["layers_of"]


def layers_of(function: Any) -> Iterator[tuple[Any, str]]:
    """The function and those that it wraps, each with the package of its code.

    `torch.no_grad()` around a function is code of torch, with the function in it.
    """
    function = getattr(function, "__func__", function)
    seen: set[int] = set()
    while function is not None and id(function) not in seen:
        seen.add(id(function))
        module = getattr(function, "__globals__", {}).get("__name__") or type(function).__module__
        yield function, str(module).partition(".")[0]
        function = getattr(function, "__wrapped__", None) or getattr(
            function, "_torchdynamo_orig_callable", None
        )
