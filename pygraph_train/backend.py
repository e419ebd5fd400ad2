"""The compile backend "pygraph": forwards and backwards with Inductor's kernels, as CUDA graphs.

`torch.compile(model, backend="pygraph")` after `import pygraph_train.backend`, or without the import where
pygraph-train is installed (it is registered as an entry point).
"""

from __future__ import annotations

import functools
import itertools
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.fx import GraphModule

from pygraph_train.boundary import SETTING_UP, Boundary, arranged, quietly, surely
from pygraph_train.config import BackendOptions
from pygraph_train.core.region import PhaseRegion, PhaseRegions, SharedGraph
from pygraph_train.graphs.devices import make_engine
from pygraph_train.graphs.engine import Engine
from pygraph_train.problems import Problem, PyGraphError
from pygraph_train.report.announcements import NO_DEVICE, switched_off, tell_why_off
from pygraph_train.report.backend_report import BackendReport, RegionRecord
from pygraph_train.step.outside import what_watches
from pygraph_train.torch_private.phases import compiled_autograd_wanted, compiled_by, is_transformed

__all__ = ["BackendOptions", "BackendReport", "RegionRecord", "compile", "pygraph", "report", "reset"]

F = TypeVar("F", bound=Callable[..., Any])

_engines: dict[tuple[str, torch.device], Engine | None] = {}
_rows: list[tuple[PhaseRegion, int]] = []
_MOST_ROWS = 256
"""Regions, beginning with the last one, that the report tells of."""
_numbers = itertools.count()


def pygraph(
    gm: GraphModule,
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
    return arranged(lambda: _compiled(gm, example_inputs, chosen), within_dynamo=True) or gm.forward


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


def report() -> BackendReport:
    """What became of the regions of this process: of those that exist, and of the last ones that did."""
    found: list[RegionRecord] = []
    quietly(*(functools.partial(_tell, found, *row) for row in _rows))
    without = not torch.cuda.is_available() and ("auto", torch.device("cpu")) in _engines
    return BackendReport(found, [NO_DEVICE] * without)


def reset() -> None:
    """Release all graphs of the backend and forget the rows of the report. What is compiled runs without graphs."""
    for region, _ in _rows:
        region.owner.close()
    _rows.clear()
    for engine in filter(None, _engines.values()):
        quietly(engine.close)
    _engines.clear()


def _compiled(gm: GraphModule, examples: Sequence[Any], options: BackendOptions) -> Callable[..., Any]:
    engine = None
    if switched_off():
        tell_why_off(options)
    elif not (compiled_autograd_wanted() or is_transformed()):
        engine = _engine_for(options, examples)
    if engine is None:
        return _inductor(gm, examples, options) if options.compile else gm.forward
    return _Graph(gm, examples, options, engine).guarded()


def _inductor(gm: GraphModule, examples: Sequence[Any], options: BackendOptions) -> Callable[..., Any]:
    return compiled_by("inductor", gm, examples, config_patches=dict(options.inductor))


def _engine_for(options: BackendOptions, examples: Sequence[Any]) -> Engine | None:
    """All graphs of a device share an engine."""
    tensors = [t for t in examples if isinstance(t, Tensor)]
    device = next((t.device for t in tensors if t.is_cuda), torch.device("cpu"))
    key = (options.engine, device)
    if key not in _engines:
        _engines[key] = make_engine(options.engine, device)
    if _engines[key] is None and not torch.cuda.is_available():  # else it is a graph of CPU tensors
        tell_why_off(options)
    return _engines[key]


class _Owner(PhaseRegions):
    """What the regions of one graph have in common."""

    owns = False

    def __init__(self, engine: Engine, options: BackendOptions) -> None:
        boundary = Boundary(rest=self.close)
        super().__init__(engine, options, tuple, self._tell, boundary, delivers=False, inference=True)
        self._options = options

    def _tell(self, problem: Problem) -> None:
        if self._options.on_failure == "raise":
            raise PyGraphError(str(problem))

    def kernels(self, gm: GraphModule, examples: Sequence[Any]) -> Callable[..., Any] | None:
        if not self._options.compile:
            return None
        if self.engine.name == "cuda":
            return _inductor(gm, examples, self._options)
        return compiled_by("aot_eager_default_partitioner", gm, examples)


class _Region(PhaseRegion):
    """A region that runs as it is in other threads, and where something watches that would see nothing of a replay."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._thread = threading.get_ident()

    def __call__(self, *given: Any) -> Any:
        """Run it. Hot path."""
        watched = what_watches() is not None or self._thread != threading.get_ident()
        return self.run_plainly(*given) if watched else super().__call__(*given)


class _Graph(SharedGraph):
    """A graph of the backend. The region of a module is gone with the module.

    Args:
        gm, examples: from Dynamo.
        options: of the backend.
        engine: of the device.
    """

    kind = _Region

    def __init__(
        self, gm: GraphModule, examples: Sequence[Any], options: BackendOptions, engine: Engine
    ) -> None:
        owner = _Owner(engine, options)
        super().__init__(owner, gm, examples)
        weakref.finalize(self, owner.close).atexit = False

    def region_of(self, key: int | None, given: Sequence[Any]) -> PhaseRegion:
        """See `SharedGraph`: nobody has the shared one, which knows no reason of a module that is gone."""
        region = self.shared.another()
        region.owner.regions.append(region)
        if key is not None:
            assert self.first is not None
            weakref.finalize(given[self.first], _forget, weakref.ref(self), key).atexit = False
        self.regions[key] = region
        _rows.append((region, next(_numbers)))
        del _rows[:-_MOST_ROWS]
        return region


def _forget(graph: weakref.ref[_Graph], key: int) -> None:
    """A parameter is gone, and with it the model whose region this is."""
    if (alive := graph()) is not None:
        alive.regions.pop(key).close()


def _tell(found: list[RegionRecord], region: PhaseRegion, number: int) -> None:
    """Add the rows of a region: its forward, and the backward where there is one."""
    phases = {"forward": region.replays, "backward": region.backwards}
    if region.inference:
        phases = {"inference": region.replays}
    for phase, replays in phases.items():
        record = RegionRecord(f"{phase} {number}", phase, region.where, reason=region.reason or "")
        record.captures, record.replays = region.recordings, replays
        record.plain_runs = max(0, region.calls - replays)
        record.decision = "plain" if region.reason else "graph" if region.recordings else "warming up"
        found.append(record)
