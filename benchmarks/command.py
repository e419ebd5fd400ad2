"""What the benchmark scripts share: options, the head of the JSON, rows that tell of crashes."""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.record import environment
from benchmarks.workloads import WorkloadUnavailable

NO_CLAIM = (
    "NO TIMING CLAIM (tiny models, emulated on a CPU or too small for a GPU): only that the script runs"
)

Row = dict[str, Any]


def new_parser(about: str | None) -> argparse.ArgumentParser:
    """A command line with the options that scripts share. `about` is the script's docstring."""
    parser = argparse.ArgumentParser(description=(about or "").splitlines()[0])
    parser.add_argument("--scale", choices=("full", "tiny"), default="full")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument("--json", type=Path, help="write rows and environment there, after each row")
    return parser


def settle(parser: argparse.ArgumentParser, args: argparse.Namespace, **known: Sequence[str]) -> None:
    """Make "cuda" or "cpu" of --device auto, and lists of the comma-separated options whose items are `known`.

    The full scale needs a GPU, and each item has to be among the known ones of its option.
    """
    if args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    if args.device == "cpu" and args.scale == "full":
        parser.error("--scale full needs a CUDA GPU; --scale tiny tries the script on a CPU")
    for name, names in known.items():
        chosen = getattr(args, name).split(",")
        if unknown := [c for c in chosen if c not in names]:
            parser.error(f"--{name}: unknown {', '.join(unknown)}; choose from {', '.join(names)}")
        setattr(args, name, chosen)


def settle_defaults(args: argparse.Namespace, **defaults: tuple[Any, Any]) -> None:
    """Fill in options that were not given, from pairs: on a GPU, on a CPU."""
    for name, (on_gpu, on_cpu) in defaults.items():
        if getattr(args, name) is None:
            setattr(args, name, on_cpu if args.device == "cpu" else on_gpu)


def begin_anew(device: str) -> None:
    """Drop compiled code and cached memory of the row before; the peak of memory starts again."""
    torch._dynamo.reset()
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def new_record(benchmark: str, args: argparse.Namespace) -> dict[str, Any]:
    """What the JSON begins with: whether the times mean anything, and where they were measured."""
    claim = args.device == "cuda" and args.scale == "full"
    record = {"benchmark": benchmark, "timing_claim": claim, "device": args.device}
    return {**record, "environment": environment()}


class StepTimeout(BaseException):
    """The row ran past its limit. Not an Exception, so that no fallback mistakes it for a failure."""


@contextlib.contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    """Raise StepTimeout in the main thread after `seconds`; 0 means no limit."""

    def expire(*_: Any) -> None:
        raise StepTimeout

    if not seconds:
        yield
        return
    previous = signal.signal(signal.SIGALRM, expire)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)


@contextlib.contextmanager
def told_in(row: Row, timeout_s: int) -> Iterator[None]:
    """A crash or a time-out inside becomes part of the row; so do the seconds that it all took."""
    started = time.perf_counter()
    try:
        with time_limit(timeout_s):
            yield
    except WorkloadUnavailable as reason:
        row["skipped"] = str(reason)
    except StepTimeout:
        row["error"] = f"timed out after {timeout_s} s"
    except Exception as error:
        row["error"] = f"{type(error).__name__}: {error}"[:2000]
    row["seconds"] = round(time.perf_counter() - started, 1)


def measured_rows(
    args: argparse.Namespace, measure: Callable[[str, str, argparse.Namespace], Row]
) -> Iterator[Row]:
    """A row for each model in each mode. Once the CUDA context is lost, the others only say so."""
    lost: str | None = None
    for model, mode in itertools.product(args.models, args.modes):
        if lost:
            yield {"model": model, "mode": mode, "error": None, "skipped": lost}
        else:
            yield measure(model, mode, args)
            lost = _lost_device(args.device, model, mode)


def _lost_device(device: str, model: str, mode: str) -> str | None:
    """After an illegal access the CUDA context is gone, and every later row would blame the wrong mode."""
    if device == "cuda":
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            return f"the CUDA context was lost in {model} {mode}: run the other rows again without it"
    return None
