"""Regions of eager kernels are compared with the part of the step that they stand for, bit for bit.

The same inputs go through both, forward and backward, with gradients of our own. Nothing of that stays: what the part
writes to, and the random numbers, are put back.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor

from pygraph_train.graphs.memory import copy_elsewhere, span
from pygraph_train.problems import first_line
from pygraph_train.putting_back import ScratchState
from pygraph_train.torch_private.autocast import around_backward, present
from pygraph_train.torch_private.dispatch import no_autocast
from pygraph_train.verification import Fingerprint, PlainRuns

if TYPE_CHECKING:
    from pygraph_train.regions.pair import Bounds
    from pygraph_train.report.backend_report import RegionRecord

__all__ = ["FirstRun", "ProvedPart", "Told"]

_ATTEMPTS = 8
"""Comparisons that came to nothing: the part raised an exception, or its graphs did not run."""

_COMPILED = 3
"""Runs after which the backward is compiled, so that it is known what the part's regions are."""

_PATIENCE = 32
"""Runs without a capture after which a part goes on without regions: its shapes do not come back, mostly."""


class FirstRun(NamedTuple):
    """What the first run of a part has shown.

    Attributes:
        outputs: its results.
        several: which inputs it uses more than once.
        there: which results have got a gradient; filled by the backward.
    """

    outputs: Any
    several: Sequence[int]
    there: set[int]


class Told(NamedTuple):
    """What the step is told of a part.

    Attributes:
        first: makes the first run with this function and these inputs.
        ran: gets those inputs of a run through regions, and its results.
        make_way: closes the graphs of these regions if a run with eager kernels needs their memory.
        compared: gets the seconds of each comparison.
        left: gets the reason when the part runs with eager kernels from then on; None if no graph paid or was
            possible, which the records say.
    """

    first: Callable[[Callable[..., Any], Sequence[Any]], FirstRun]
    ran: Callable[[Sequence[Any], Sequence[Any]], None]
    make_way: Callable[[Sequence[RegionRecord]], None]
    compared: Callable[[float], None]
    left: Callable[[str | None], None]


class ProvedPart:
    """A part of a step whose regions hold eager kernels.

    Its first run is one with eager kernels that is watched. The second one is compared, and one that comes from graphs,
    again after the 2nd, 4th, 8th, ... capture.

    Args:
        compiled: runs the regions.
        eager: runs the part as Dynamo has traced it.
        records: of its regions. The list grows.
        written: positions of inputs that the part changes.
        verify: see `PyGraphConfig`.
        bounds: of captures. The first one is made within a comparison: beside its graph a run with eager kernels would
            need the part's memory twice.
        told: what happens is told to the step.
    """

    def __init__(
        self,
        compiled: Callable[..., Any],
        eager: Callable[..., Any],
        records: Sequence[RegionRecord],
        written: Sequence[int],
        verify: Literal["off", "first", "sample", "always"],
        bounds: Bounds,
        told: Told,
    ) -> None:
        self._compiled: Callable[..., Any] | None = compiled
        self._eager = eager
        self._records = records
        self._written = written
        self._verify = verify
        self._bounds = bounds
        self._told = told
        self._first: FirstRun | None = None  # without the outputs
        self._kernels_proved = verify == "off"
        self._captures = 1  # from which on graphs are compared
        self._attempts = self._runs = 0

    def __call__(self, *args: Any) -> Any:
        """Run the part once."""
        if (first := self._first) is None:
            first = self._told.first(self._eager, args)
            self._first = first._replace(outputs=None)
            return first.outputs
        if self._compiled is not None:
            self._runs += 1
            if self._runs > _COMPILED and all(r.decision == "plain" for r in self._records):
                self._leave(None)
            elif self._runs > _PATIENCE and not self._count():
                self._leave("its sizes are others in most runs, and none has earned a graph")
        if self._compiled is not None and self._is_due() and not self._prove(args):
            return self._eager(*args)
        if self._compiled is None:
            return self._eager(*args)
        self._bounds.open = self._may_capture()
        outputs = self._compiled(*args)
        self._told.ran([args[i] for i in first.several], outputs)
        return outputs

    def _is_due(self) -> bool:
        if self._verify in ("off", "always"):
            return self._verify == "always"
        if not self._kernels_proved or (self._bounds.wanted and not self._may_capture()):
            return True
        ran = all(r.replays for r in self._records if r.decision != "plain")
        return ran and self._count() >= self._captures

    def _may_capture(self) -> bool:
        """Whether there may be captures outside of comparisons."""
        if self._verify in ("off", "always") or self._attempts > _ATTEMPTS:
            return True
        return self._captures > 1

    def _count(self) -> int:
        return sum(r.captures for r in self._records)

    def _leave(self, why: str | None) -> None:
        self._compiled = None  # its graphs are closed with it
        if why is not None:
            for record in self._records:
                record.decision, record.reason = "plain", why
        self._told.left(why)

    def _prove(self, args: tuple[Any, ...]) -> bool:
        """Compare the two. Returns whether the regions may run this time."""
        if any(isinstance(args[i], Tensor) and args[i].requires_grad for i in self._written):
            self._leave("it changes tensors that require a gradient, and cannot be run for a comparison")
            return False
        if self._captures > 1:
            self._told.make_way(self._records)
        replays, started = [r.replays for r in self._records], time.perf_counter()
        try:
            why = self._difference(args)
        except _Raised:  # the step is about to raise it as well
            self._attempts += 1
            if self._attempts > _ATTEMPTS:
                self._leave("it could not be compared with eager kernels")
            return False
        except Exception as error:
            why = f"the comparison with eager kernels failed: {first_line(error)}"
        finally:
            self._told.compared(time.perf_counter() - started)
        if why is not None:
            self._leave(why)
            return False
        self._kernels_proved = True
        before = zip(self._records, replays, strict=False)
        from_graphs = all(r.replays > n for r, n in before if r.decision != "plain")
        self._attempts = 0 if from_graphs else self._attempts + 1
        if self._count() >= self._captures and (from_graphs or self._attempts > _ATTEMPTS):
            self._captures = 2 * self._count() if self._verify == "sample" else 1 << 62
            self._attempts = 0
        return True

    def _difference(self, args: tuple[Any, ...]) -> str | None:
        assert self._compiled is not None and self._first is not None
        there = self._first.there
        devices = [x.device for x in args if isinstance(x, Tensor)]
        device = next((d for d in devices if d.type != "cpu"), torch.device("cpu"))
        written = [_alias(args[i]) for i in self._written]
        state, values = ScratchState(device, ()), [copy_elsewhere(x) for x in written]

        def run(function: Callable[..., Any]) -> tuple[list[Any], Fingerprint]:
            try:
                return _run(function, args, self._written, there, device)
            finally:
                state.restore()
                with torch.no_grad():
                    for tensor, value in zip(written, values, strict=True):
                        span(tensor).copy_(span(value))

        try:
            looks, first = run(self._eager)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            raise _Raised from error
        self._bounds.open, self._bounds.wanted = self._kernels_proved, False
        looks_here, found = run(self._compiled)
        if looks_here != looks:
            return "its results, or random numbers, are others than those of eager kernels"
        runs = PlainRuns(first, "result or gradient")
        while not runs.same(found) and not runs.enough(found):
            runs.add(run(self._eager)[1])
        refused = runs.refuse(found)
        return None if refused is None else f"it computes other bits than eager kernels: {refused}"


class _Raised(Exception):
    """The part raised an exception with eager kernels."""

    __pygraph_theirs__ = True


def _alias(tensor: Tensor) -> Tensor:
    """The same memory, without history, and with a count of changes of its own."""
    return tensor.data


def _stand_in(value: Any) -> Any:
    return _alias(value).requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value


def _run(
    function: Callable[..., Any],
    args: Sequence[Any],
    written: Sequence[int],
    there: set[int],
    device: torch.device,
) -> tuple[list[Any], Fingerprint]:
    """One forward and backward: what results look like, and what tells their values from others.

    Args:
        there: which results get a gradient.
    """
    given = [_stand_in(x) for x in args]
    results = dict(enumerate(function(*given)))
    outputs = [x for x in results.values() if isinstance(x, Tensor)]
    ends = [x for i, x in results.items() if isinstance(x, Tensor) and x.requires_grad and i in there]
    results.clear()
    wanted = [x for x in given if isinstance(x, Tensor) and x.requires_grad]
    gradients: Sequence[Tensor | None] = ()
    if ends and wanted:
        generator = torch.Generator(device).manual_seed(0)
        with _as_backward():
            tangents = [_tangent(x, generator) for x in ends]
            gradients = torch.autograd.grad(ends, wanted, tangents, allow_unused=True)
    found = [*outputs, *(given[i] for i in written), *gradients]
    del ends, wanted
    looks: list[Any] = [None if x is None else (x.dtype, x.size(), _strides(x)) for x in found]
    looks += [x.requires_grad for x in outputs]
    looks.append(torch.get_rng_state().tolist())
    if device.type == "cuda":
        looks.append(torch.cuda.get_rng_state(device).tolist())
    with torch.no_grad():
        return looks, Fingerprint.of(torch.zeros((), device=device), found)


def _strides(tensor: Tensor) -> list[int]:
    return [step for n, step in zip(tensor.size(), tensor.stride(), strict=True) if n > 1]


def _tangent(result: Tensor, generator: torch.Generator) -> Tensor:
    if result.device != generator.device:
        generator = torch.Generator(result.device).manual_seed(0)
    values = torch.randn(result.size(), generator=generator, device=result.device, dtype=torch.float32)
    return torch.empty_like(result).copy_(values)


def _as_backward() -> AbstractContextManager[Any]:
    """The autocast that the step's backward is called under."""
    around = around_backward()
    if around is None or around == present():
        return nullcontext()
    if around:
        raise RuntimeError("the backward is called under another autocast than the forward")
    return no_autocast()
