"""Runs a case twice in this process, plainly and with the library, and leaves the process as it was."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import linecache
import logging
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import pygraph_train.backend

from .case import Batches, Case, Change, Loop, Optimizer
from .play import Observations, difference, play
from .script import script_of

__all__ = ["Outcome", "case_from", "compare", "run"]

_scripts = tempfile.TemporaryDirectory(prefix="pygraph_cases_")
_count = 0
_begun: set[str] = set()


@dataclass(frozen=True)
class Outcome:
    """What a comparison showed.

    Attributes:
        difference: the first thing that differs, None where nothing does.
        rounded: whether there is a difference that `torch.compile` has to answer for, not graphs: last bits mostly.
        replays: graphs that the library replayed.
        reasons: why it did not replay, by its report.
        raised: the exception that ended plain training, None where it trained to its end.
        seconds: that both runs took.
    """

    difference: str | None
    rounded: bool
    replays: int
    reasons: tuple[str, ...]
    raised: str | None
    seconds: float


def run(case: Case, *, library: bool, graphs: bool = True, backend: str = "pygraph") -> Observations:
    """Make the case's script, and run it; the library may make no graphs, or its backend be another one."""
    global _count
    _count += 1
    path = Path(_scripts.name) / f"pygraph_case_{_count}.py"
    path.write_text(script_of(case))
    options = tuple(option for option in case.loop.options if "=" in option)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # where compilers look for the globals of a function
    try:
        with isolated():
            spec.loader.exec_module(module)
            chosen: dict[str, Any] = {"graphs": graphs, "backend": backend, "options": options}
            return play(module.train, library=library, seed=case.seed, **chosen)
    finally:
        del sys.modules[path.stem]
        path.unlink()
        linecache.checkcache(str(path))


def compare(case: Case) -> Outcome:
    """Run the case plainly and with the library, and compare what was observed."""
    if case.loop.kind == "lightning" and case.loop.kind not in _begun:
        _begun.add(case.loop.kind)
        run(Case(case.loop), library=False)  # what its first fit of a process imports draws random numbers
    started = time.perf_counter()
    plain, ours = run(case, library=False), run(case, library=True)
    ended = [value for name, value in plain.entries if name == "the run ended with"]
    found = difference(plain, ours)
    rounded = found is not None and (_by_compiling(case, plain, ours) or _as_torch_compiles(case, ours))
    return Outcome(
        None if rounded else found,
        rounded,
        ours.replays,
        tuple(ours.reasons),
        ended[0] if ended else None,
        time.perf_counter() - started,
    )


def _by_compiling(case: Case, plain: Observations, ours: Observations) -> bool:
    """Whether compiled functions are the cause, as with `torch.compile`.

    They add up in another order. Where the loop compiles from its first step on, the same without graphs has to have
    the same bits. And they change buffers at their end: a step that raises in one of them has changed none.
    """
    if not ours.compiled:
        return False
    if any(name == "the run ended with" for name, _ in plain.entries):
        return difference(_up_to_the_error(plain), _up_to_the_error(ours), rounding=True) is None
    if difference(plain, ours, rounding=True) is not None:
        return False
    if case.loop.kind in ("graphed", "lightning"):
        return True
    return difference(run(case, library=True, graphs=False), ours) is None


def _as_torch_compiles(case: Case, ours: Observations) -> bool:
    """Whether another backend of `torch.compile` shows the very same, bit for bit and with the same warnings.

    With `eager` it is Dynamo that does other things than Python, with `aot_eager` it is AOTAutograd, and no backend
    could mend that.
    """
    if case.loop.kind != "backend":
        return False
    others = (run(case, library=True, backend=name) for name in ("eager", "aot_eager"))
    return any(difference(other, ours) is None and other.told == ours.told for other in others)


def _up_to_the_error(seen: Observations) -> Observations:
    ends = [i for i, (name, _) in enumerate(seen.entries) if name == "the run ended with"]
    return Observations(seen.entries[: ends[0] + 1] if ends else seen.entries, seen.told)


def case_from(text: str) -> Case:
    """The case that a printed `Case(...)` stands for."""
    names = {c.__name__: c for c in (Case, Loop, Batches, Optimizer, Change)}
    made = eval(text, {"__builtins__": {}}, names)  # what the developer pastes into the command line
    assert isinstance(made, Case)
    return made


@contextlib.contextmanager
def isolated() -> Iterator[None]:
    """Compilers start anew, and switches, hooks and loggers are as they were afterwards."""
    module = torch.nn.modules.module
    optim = importlib.import_module("torch.optim.optimizer")  # torch.optim hides its name
    tables = [
        module._global_forward_hooks,
        module._global_forward_pre_hooks,
        module._global_backward_hooks,
        module._global_backward_pre_hooks,
        optim._global_optimizer_pre_hooks,
        optim._global_optimizer_post_hooks,
    ]
    before = [dict(table) for table in tables]
    flash, maths = torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled()
    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    dtype = torch.get_default_dtype()
    quiet = [
        logging.getLogger(name) for name in ("pygraph_train", "lightning.pytorch", "torch", "accelerate")
    ]
    levels = [log.level for log in quiet]
    for log in quiet:
        log.setLevel(logging.CRITICAL)
    _reset()
    try:
        yield
    finally:
        for log, level in zip(quiet, levels, strict=True):
            log.setLevel(level)
        for table, kept in zip(tables, before, strict=True):
            table.clear()
            table.update(kept)
        torch.set_default_dtype(dtype)
        torch.use_deterministic_algorithms(False)
        torch.set_grad_enabled(True)
        torch.autograd.set_detect_anomaly(False)
        torch.backends.cuda.enable_flash_sdp(flash)
        torch.backends.cuda.enable_math_sdp(maths)
        torch.backends.mkldnn.enabled = True
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision(precision)
        _reset()
        gc.collect()


def _reset() -> None:
    torch._dynamo.reset()
    pygraph_train.backend.reset()
    try:
        from accelerate.state import AcceleratorState, GradientState
    except ImportError:
        return
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
