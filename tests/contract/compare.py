"""Runs a training twice, as it is and with the library, and compares everything that it leaves, bit for bit.

    @same_as_plain(replays=15)
    def test_gradients_are_clipped(run: Run) -> None:
        model = Net()
        step = run.step(loss_of(model), model=model, optimizer=adamw(model), max_grad_norm=0.1)
        for batch in batches(24):
            step(batch)

The body is the training. What it gets from `run` is stock in the first run, and ours in the second one. Nothing here
knows how the library works: it trains, and it reads `report().to_dict()`.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import math
import random
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from pygraph_train import GraphedStep, PyGraphConfig, backend

from .models import DEVICE

__all__ = ["ALWAYS", "ENGINE", "PlainStep", "Run", "compare", "same_as_plain"]

ENGINE = "emulated" if DEVICE == "cpu" else "cuda"

ALWAYS = {} if DEVICE == "cpu" else dict.fromkeys(("forward", "backward", "optimizer"), "on")
"""Graphs stay although such small models have no gain of them."""


def same_as_plain(
    *,
    replays: int | None = None,
    updates: int | None = None,
    refused: str | None = None,
    last_bits: bool = False,
    **config: Any,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a test of a training: see `compare`. Parameters of the test besides `run` are pytest's."""

    def decorate(training: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(training)
        given = [p for name, p in signature.parameters.items() if name != "run"]
        folder = inspect.Parameter("tmp_path", inspect.Parameter.KEYWORD_ONLY)

        @functools.wraps(training)
        def test(*, tmp_path: Path, **arguments: Any) -> None:
            body = functools.partial(training, **arguments)
            least = {"replays": replays, "updates": updates, "refused": refused}
            compare(body, **least, last_bits=last_bits, folder=tmp_path, **config)

        test.__signature__ = signature.replace(parameters=[*given, folder])  # type: ignore[attr-defined]
        why = refused or (None if replays else "no graph has to run")
        return test if why is None else pytest.mark.passes_without_graphs(why)(test)

    return decorate


def compare(
    training: Callable[[Run], None],
    *,
    replays: int | None = None,
    backwards: int | None = None,
    updates: int | None = None,
    refused: str | None = None,
    last_bits: bool = False,
    folder: Path | None = None,
    **config: Any,
) -> dict[str, int]:
    """Run a training without and with the library; everything that is noted has to be equal.

    Args:
        training: gets the `Run`, and trains.
        replays: of how many steps at least forward and backward have to run from graphs; 0 if none has to.
        backwards: of how many steps at least the backward has to, where that are fewer.
        updates: of how many steps at least the optimizer has to run from a graph; as `replays` if left out.
        refused: why no graph need run. Where none does, the report has to give a reason.
        last_bits: whether the last bits of floats may differ.
        folder: for files; each run has one of its own below it.
        **config: options of the library.
    Returns:
        How many steps ran from graphs, by phase: "F", "B" and "O".
    """
    plain, ours = (Run(name, folder, config) for name in ("plain", "ours"))
    for run in (plain, ours):
        with run.running():
            training(run)
    assert plain.seen, "the training compares nothing"
    for index, (expected, found) in enumerate(zip(plain.seen, ours.seen, strict=False)):
        assert expected[0] == found[0], f"entry {index}: {expected[0]} became {found[0]}"
        difference = differs(expected[1], found[1], last_bits=last_bits)
        assert difference is None, f"entry {index}, {expected[0]}{difference}\n{ours}"
    assert len(plain.seen) == len(ours.seen), f"{len(plain.seen)} entries became {len(ours.seen)}"
    counts = ours.from_graphs()
    if refused is not None:
        assert replays is None, "either graphs have to run, or they need not"
        assert any(counts.values()) or ours.gives_reasons(), f"nothing says why no graph ran\n{ours}"
        return counts
    assert replays is not None, "say how many steps have to run from graphs at least, or why none has to"
    least = {
        "F": replays,
        "B": replays if backwards is None else backwards,
        "O": replays if updates is None else updates,
    }
    missing = {phase: count for phase, count in counts.items() if count < least[phase]}
    assert not missing, f"from graphs ran {missing}, not {least}\n{ours}"
    return counts


class Run:
    """One of the two runs of a training.

    Attributes:
        ours: whether this is the run with the library.
        folder: an empty one for this run.
        seen: what is compared, with its names.
        told: what reports said at the end, as `to_dict` gives it.
    """

    def __init__(self, name: str, folder: Path | None, config: Mapping[str, Any]) -> None:
        self.ours = name == "ours"
        self.config = PyGraphConfig(**{"engine": ENGINE, "warmup_steps": 2, **ALWAYS, **config})
        self._folder = None if folder is None else folder / name
        self.seen: list[tuple[str, Any]] = []
        self._watched: list[Any] = []
        self._reports: list[Callable[[], Any]] = []
        self.told: list[dict[str, Any]] = []
        self._ends: list[Callable[[], None]] = []

    @property
    def folder(self) -> Path:
        assert self._folder is not None, "this test has no folder"
        self._folder.mkdir(exist_ok=True)
        return self._folder

    @contextmanager
    def running(self) -> Iterator[None]:
        """Both runs begin with the same random states, and what they made is closed at their ends."""
        torch.compiler.reset()
        backend.reset()
        torch.manual_seed(0)
        random.seed(0)
        numpy.random.seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                yield
                self.note("random states", random_states())
                self.told = [report().to_dict() for report in self._reports]
            finally:
                for end in self._ends:
                    end()

    # -- what is compared -----------------------------------------------------------------------------

    def note(self, name: str, value: Any) -> None:
        """Compare a copy of the present value."""
        self.seen.append((name, frozen(value)))

    def watch(self, *objects: Any) -> None:
        """Compare models, optimizers, schedulers and the like at every `snapshot`."""
        self._watched += [o for o in objects if not any(o is known for known in self._watched)]

    def snapshot(self, place: str = "") -> None:
        """Compare everything that is watched, and the random states."""
        for number, thing in enumerate(self._watched):
            self.note(f"watched object {number} {place}", thing)
        self.note(f"random states {place}", random_states())

    def each(self, items: Iterable[Any]) -> Iterator[Any]:
        """The items of a loop, with a snapshot after each."""
        for number, item in enumerate(items):
            yield item
            self.snapshot(f"after {number}")

    @contextmanager
    def may_raise(self, *kinds: type[BaseException]) -> Iterator[None]:
        """A block that may raise one of these, in both runs at the same time and with the same text."""
        raised = "nothing"
        try:
            yield
        except kinds as error:
            raised = f"{type(error).__name__}: {error}"
            self.snapshot("after an exception")
        self.note("raised", raised)

    # -- how much ran from graphs -----------------------------------------------------------------------

    def reports(self, report: Callable[[], Any]) -> None:
        """Count what a report tells at the end of the run."""
        self._reports.append(report)

    def from_graphs(self) -> dict[str, int]:
        """Of how many steps a phase ran from graphs; of a compiled model alone, how often."""
        counts = dict.fromkeys("FBO", 0)
        for told in self.told:
            if "phases_from_graphs" in told:
                for phase, count in told["phases_from_graphs"].items():
                    counts[phase] += count
            else:  # of the backend: rows of forwards and backwards
                for row in told["regions"]:
                    counts[row["phase"][:1].upper().replace("I", "F")] += row["replays"]
        return counts

    def gives_reasons(self) -> bool:
        """Whether reports say why something did not run from graphs."""
        return any(
            "In the way of" in told.get("headline", "")  # of a part, which has a report of its own
            or told.get("fallbacks")
            or told.get("notes")
            or any(r["reason"] for r in told.get("regions", ()))
            for told in self.told
        )

    def __str__(self) -> str:
        """What reports say, for messages."""
        lines = []
        for told in self.told:
            lines += [f"{key}: {told[key]}" for key in ("headline", "fallbacks", "notes") if key in told]
            lines += [f"{r['name']}: {r['replays']} replays {r['reason']}" for r in told.get("regions", ())]
        return "\n".join(lines)

    def at_end(self, close: Callable[[], None]) -> None:
        """Call this at the end of the run."""
        self._ends.append(close)

    # -- what trains ------------------------------------------------------------------------------------

    def step(
        self, step_fn: Callable[..., Any], *, model: nn.Module, optimizer: Any = None, **options: Any
    ) -> Any:
        """The loop that a user writes, or `GraphedStep`; results and state are compared after each call."""
        if self.ours:
            made: Any = GraphedStep(step_fn, model=model, optimizer=optimizer, config=self.config, **options)
            self.reports(made.report)
            self.at_end(made.close)
        else:
            made = PlainStep(step_fn, model, optimizer, **options)
        optimizers = optimizer if isinstance(optimizer, list) else [optimizer]
        self.watch(model, *(o for o in optimizers if o is not None))
        return self.noted(made)

    def noted(self, made: Any) -> Any:
        """A step whose results, and what is watched after it, are compared."""
        return Noted(self, made)

    def compile(self, model: Any, *, in_place: bool = False, **options: Any) -> Any:
        """The model, or the model compiled with our backend: with `torch.compile`, or with its own `compile`."""
        self.watch(model)
        if not self.ours:
            return model
        if backend.report not in self._reports:
            self.reports(backend.report)
        # on a GPU the kernels of Inductor have other bits
        warm_up = {"engine": ENGINE, "warmup_runs": 1, "compile": DEVICE == "cpu"}
        given: Any = {"backend": "pygraph", "options": {**warm_up, **options}}
        if in_place:
            model.compile(**given)
            return model
        return torch.compile(model, **given)


class PlainStep:
    """What `GraphedStep` promises to be equal to: the loop that a user would write."""

    def __init__(
        self,
        step_fn: Callable[..., Any],
        model: nn.Module,
        optimizer: Any,
        *,
        scaler: torch.amp.GradScaler | None = None,
        max_grad_norm: float | None = None,
        manual_optimization: bool = False,
    ) -> None:
        self.step_fn, self.model, self.scaler = step_fn, model, scaler
        self.optimizers = (
            [] if optimizer is None else optimizer if isinstance(optimizer, list) else [optimizer]
        )
        self.max_grad_norm, self.manual = max_grad_norm, manual_optimization
        self.pending = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.manual:
            return self.step_fn(*args, **kwargs)
        result = self._accumulate(args, kwargs)
        for optimizer in self.optimizers:
            if self.scaler is not None:
                self.scaler.unscale_(optimizer)
        if self.max_grad_norm is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.max_grad_norm)
        for optimizer in self.optimizers:
            if self.scaler is None:
                optimizer.step()
            else:
                self.scaler.step(optimizer)
                self.scaler.update()
        self.pending = False
        return result

    def accumulate(self, *args: Any, **kwargs: Any) -> Any:
        with self.model.no_sync() if hasattr(self.model, "no_sync") else nullcontext():  # of replicas
            result = self._accumulate(args, kwargs)
        self.pending = True
        return result

    def close(self) -> None:
        """As `GraphedStep` has it."""

    def _accumulate(self, args: Any, kwargs: Any) -> Any:
        if not self.pending:
            for optimizer in self.optimizers:
                optimizer.zero_grad()
        result = self.step_fn(*args, **kwargs)
        loss = result["loss"] if isinstance(result, Mapping) else result
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        return result


class Noted:
    """See `Run.noted`."""

    def __init__(self, run: Run, made: Any) -> None:
        self._run, self._made = run, made

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._noted(self._made(*args, **kwargs))

    def accumulate(self, *args: Any, **kwargs: Any) -> Any:
        return self._noted(self._made.accumulate(*args, **kwargs))

    def close(self) -> None:
        self._made.close()

    def report(self) -> Any:
        return self._made.report()

    def _noted(self, result: Any) -> Any:
        self._run.note("result", result)
        self._run.snapshot()
        return result


# -- copies that can be compared ----------------------------------------------------------------------------


def random_states() -> list[Any]:
    """Of torch, Python and numpy."""
    _, keys, *others = numpy.random.get_state()
    device = [] if DEVICE == "cpu" else [torch.cuda.get_rng_state()]
    return [torch.get_rng_state(), *device, hash(random.getstate()), hash(keys.tobytes()), *others]


def frozen(value: Any) -> Any:
    """A deep copy of plain data and detached tensors. Of a model also gradients, of an optimizer everything.

    Of a sharded tensor it is the part that this process holds.
    """
    if isinstance(value, Tensor):
        return (value.to_local() if hasattr(value, "to_local") else value).detach().clone()
    if isinstance(value, nn.Module):
        gradients = {name: p.grad for name, p in value.named_parameters()}
        needed = {name: p.requires_grad for name, p in value.named_parameters()}
        buffers = dict(value.named_buffers())
        modes = [module.training for module in value.modules()]
        return frozen([value.state_dict(), buffers, gradients, needed, modes])
    if isinstance(value, torch.optim.Optimizer):
        return frozen(value.state_dict())
    if isinstance(value, (torch.optim.lr_scheduler.LRScheduler, torch.amp.GradScaler)):
        return frozen({k: v for k, v in value.state_dict().items() if not callable(v)})
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return frozen(vars(value))
    if isinstance(value, Mapping):
        return {name: frozen(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [frozen(item) for item in value]
    if isinstance(value, (set, numpy.ndarray, numpy.generic)):
        return copy.deepcopy(value)
    assert value is None or isinstance(value, (bool, int, float, complex, str, bytes)), (
        f"{type(value)} as data"
    )
    return value


def differs(expected: Any, found: Any, *, last_bits: bool = False) -> str | None:
    """None when equal bit for bit, types included, else where they differ.

    Args:
        last_bits: whether the last bits of floats may differ.
    """
    if type(expected) is not type(found):
        return f": {expected!r} became {found!r}"
    if isinstance(expected, Tensor):
        if expected.dtype != found.dtype or expected.shape != found.shape:
            return f": {expected.dtype} {expected.shape} became {found.dtype} {found.shape}"
        if torch.equal(expected, found):  # without NaN, which is the usual case
            return None
        if last_bits and expected.is_floating_point():
            same = torch.allclose(expected, found, rtol=1e-4, atol=1e-6, equal_nan=True)
        else:
            numbers = torch.equal(expected.nan_to_num(), found.nan_to_num())
            same = numbers and torch.equal(expected.isnan(), found.isnan())
        return None if same else f": {expected} became {found}"
    if isinstance(expected, dict):
        if list(expected) != list(found):
            return f": keys {list(expected)} became {list(found)}"
        pairs = [(f"[{key!r}]", expected[key], found[key]) for key in expected]
    elif isinstance(expected, list):
        if len(expected) != len(found):
            return f": {len(expected)} entries became {len(found)}"
        pairs = [(f"[{number}]", a, b) for number, (a, b) in enumerate(zip(expected, found, strict=True))]
    else:
        real = isinstance(expected, float)
        both_nan = real and math.isnan(expected) and math.isnan(found)
        close = real and last_bits and math.isclose(expected, found, rel_tol=1e-4)
        return None if both_nan or close or expected == found else f": {expected!r} became {found!r}"
    for place, a, b in pairs:
        if (text := differs(a, b, last_bits=last_bits)) is not None:
            return place + text
    return None
