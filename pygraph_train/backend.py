"""The compile backend "pygraph": Inductor's forwards and backwards as CUDA graphs.

`torch.compile(model, backend="pygraph")` after `import pygraph_train.backend`, or without the import where
pygraph-train is installed (it is registered as an entry point).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from pygraph_train.boundary import SETTING_UP, arranged, surely
from pygraph_train.regions.inductor import compile_graph, report, reset
from pygraph_train.regions.options import BackendOptions
from pygraph_train.report.backend_report import BackendReport, RegionRecord

__all__ = ["BackendOptions", "BackendReport", "RegionRecord", "compile", "pygraph", "report", "reset"]

F = TypeVar("F", bound=Callable[..., Any])


def pygraph(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """The backend, as `torch.compile` calls it.

    Raises:
        ValueError, TypeError: an option is not allowed (see BackendOptions), or a mode was given.
    """
    if mode is not None:
        raise ValueError(f"backend 'pygraph' takes options, no mode (got mode={mode!r})")
    chosen = surely(lambda: BackendOptions.of(options), SETTING_UP)
    return arranged(lambda: compile_graph(gm, example_inputs, chosen), within_dynamo=True) or gm.forward


def compile(model: F, *, dynamic: bool | None = None, fullgraph: bool = False, **options: Any) -> F:
    """`torch.compile(model, backend="pygraph", options=options)` with the options checked at once.

    Args:
        model: a module or function.
        dynamic, fullgraph: as in `torch.compile`.
        **options: see BackendOptions.
    Raises:
        ValueError, TypeError: an option is not allowed.
    """
    surely(lambda: BackendOptions.of(options), SETTING_UP)
    return torch.compile(model, backend=pygraph, options=options, dynamic=dynamic, fullgraph=fullgraph)  # type: ignore[return-value]
