"""A process of the zoo: it trains one entry in several ways, and times them in turns when its parent says so."""

from __future__ import annotations

import argparse
import gc
import time
import traceback
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from benchmarks.children import Turn
from benchmarks.command import StepTimeout, time_limit
from benchmarks.record import write_json
from benchmarks.zoo_models import FULL, TINY, Entry, NotInstalled
from benchmarks.zoo_models.entry import seed
from pygraph_train import GraphedStep, StepReport
from pygraph_train.trees import map_leaves

Row = dict[str, Any]

AGAIN = "eager again"
"""A second run of the plain loop, of which only the losses count."""
LOSSES = 20
"""Steps of which the losses are compared."""
BATCHES = 4
LEARNING_RATE = 2.0**-13
"""About 1e-4, and the same number in float32: a graph holds it on the device in float32."""
LASTING = 10
"""Steps that plan and captures stay as they are before the measurement begins."""
TRIAL_OVER = 40
"""Replays after which graphs have been timed."""
TOLD = ("headline", "running_plan", "steps", "steps_from_graphs", "fallbacks", "notes", "first_replay_step")
"""What of the library's report is kept."""


@dataclass
class Contender:
    """A training loop; `step()` makes one step on the next batch and returns its loss."""

    step: Callable[[], Tensor]
    report: Callable[[], StepReport] | None
    reserved_before: int
    losses: list[float] = field(default_factory=list)
    reserved_mib: int | None = None

    def state(self) -> object:
        """Changes as long as the library tries things out; None until the trial of its graphs is over."""
        if self.report is None:
            return "plain"
        told = self.report()
        tried = told.steps_replayed >= TRIAL_OVER
        return (told.running_plan, len(told.captures), len(told.fallbacks)) if tried else None

    def told(self) -> Row:
        """What the library says of its steps."""
        told = self.report().to_dict() if self.report else {}
        return {key: told[key] for key in TOLD if key in told}


def be_child(entry: Entry, modes: Sequence[str], args: argparse.Namespace) -> None:
    """Train an entry in these modes, time them, and write what is known of them to `args.child`."""
    turn = Turn()
    part: Row = {"stage": "began", "modes": {}}
    torch.set_float32_matmul_precision("high" if args.autocast else "highest")
    try:
        kept = _contenders(part, entry, modes, args)
    except NotInstalled as reason:
        write_json(args.child, part | {"not_installed": str(reason)})
        return
    if kept:
        part["stage"] = "waits for its turn"
        write_json(args.child, part)
        with turn.alone():
            _time(kept, part["modes"], args)
        part["stage"] = "done"
    for mode, contender in kept.items():  # plans change while they are timed, too
        part["modes"][mode] |= contender.told()
    write_json(args.child, part)


def _contenders(
    part: Row, entry: Entry, modes: Sequence[str], args: argparse.Namespace
) -> dict[str, Contender]:
    """Those that are ready to be timed; what became of each mode is in `part`."""
    _warm_up(args.device)
    # the modes share the code of the model, and with it the limit of what Dynamo compiles for it
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)
    kept: dict[str, Contender] = {}
    for mode in modes:
        part["stage"] = mode
        write_json(args.child, part)
        found = part["modes"].setdefault(mode, {})
        try:
            with time_limit(args.mode_s):
                contender = _settled(mode, entry, args)
        except StepTimeout:
            found["error"] = f"timed out after {args.mode_s} s"
        except NotInstalled:
            raise
        except Exception as error:
            found |= _crash(error)
        else:
            found |= {"losses": contender.losses, "reserved_mib": contender.reserved_mib} | contender.told()
            if mode != AGAIN:
                kept[mode] = contender
    return kept


def _warm_up(device: str) -> None:
    """Make what cuBLAS keeps for the whole process, or a mode would seem to need that memory."""
    x = torch.randn(64, 64, device=device, requires_grad=True)
    for kind in (torch.float32, torch.bfloat16):
        torch.nn.functional.linear(x.to(kind), x.to(kind), x[0].to(kind)).sum().backward()


def _settled(mode: str, entry: Entry, args: argparse.Namespace) -> Contender:
    """A contender that has made its first steps, and goes on as it will when it is timed."""
    contender = _start(mode, entry, args)
    contender.losses += [float(contender.step()) for _ in range(LOSSES)]
    least, most = (5, 5) if contender.report is None else (args.least, args.most)
    begun, seen = time.monotonic(), []
    for made in range(most):
        contender.step()
        seen = [*seen, contender.state()][-LASTING:]
        lasts = seen[0] is not None and seen == seen[:1] * LASTING
        if made + 1 >= least and (lasts or time.monotonic() - begun > args.settle_s):
            break
    if args.device == "cuda":
        torch.cuda.synchronize()
        contender.reserved_mib = (torch.cuda.max_memory_reserved() - contender.reserved_before) >> 20
    return contender


def _start(mode: str, entry: Entry, args: argparse.Namespace) -> Contender:
    """A contender with new weights; all contenders of an entry have the same ones, and the same batches."""
    device, before = torch.device(args.device), 0
    gc.collect()
    if args.device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_reserved()
    seed(0)
    parts = entry.build(FULL if args.scale == "full" else TINY)
    model = parts.model.to(device)

    def moved(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return leaf.detach().to(device).requires_grad_(leaf.requires_grad)

    seed(1)
    batches = [map_leaves(moved, parts.make_batch()) for _ in range(BATCHES)]
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, fused=True)

    def loss_of(batch: Any) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=args.autocast):
            return parts.loss_of(model, batch)

    # Dynamo keeps what it compiled with the code: contenders must not meet each other's guards
    code = loss_of.__code__.replace(co_name=f"loss_of_{mode.replace('-', '_').replace(' ', '_')}")
    own = types.FunctionType(code, loss_of.__globals__, code.co_name, None, loss_of.__closure__)
    report, turn = None, 0
    if mode.startswith("graphed"):
        engine = "cuda" if args.device == "cuda" else "emulated"
        step: Any = GraphedStep(
            own, model=model, optimizer=optimizer, engine=engine, compile=mode == "graphed-compiled"
        )
        report = step.report
    else:
        step = _loop(mode, own, optimizer)

    def next_step() -> Tensor:
        nonlocal turn
        turn += 1
        return step(batches[turn % BATCHES])

    seed(2)
    return Contender(next_step, report, before)


def _loop(mode: str, loss_of: Any, optimizer: torch.optim.Optimizer) -> Callable[[Any], Tensor]:
    """The plain loop, compiled as the mode says."""
    marks = mode == "reduce-overhead"
    if mode in ("compile", "reduce-overhead"):
        loss_of = torch.compile(loss_of, mode="reduce-overhead" if marks else None)

    def step(batch: Any) -> Tensor:
        optimizer.zero_grad()
        if marks:
            torch.compiler.cudagraph_mark_step_begin()
        loss = loss_of(batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def _time(kept: dict[str, Contender], found: dict[str, Row], args: argparse.Namespace) -> None:
    """Windows of the contenders in turns, in an order that alternates: A B, B A, A B, ...

    Of a contender that crashes no windows are kept, whatever stands for the missing ones.
    """
    steps: dict[str, int] = {}
    times: dict[str, list[float]] = {}

    def window(mode: str, count: int) -> float:
        if "error" in found[mode]:
            return 1.0
        try:
            return _timed(kept[mode], count)
        except Exception as error:
            found[mode] |= _crash(error)
            return 1.0

    for mode in kept:
        window(mode, 2)
        steps[mode] = max(BATCHES, min(1000, round(args.window_s * 1e3 / window(mode, BATCHES))))
        window(mode, steps[mode])
        times[mode] = []
    order = list(kept)
    for _ in range(args.windows):
        order.reverse()
        for mode in order:
            times[mode].append(window(mode, steps[mode]))
    for mode, ms in times.items():
        if "error" not in found[mode]:
            found[mode]["windows_ms"] = ms


def _timed(contender: Contender, steps: int) -> float:
    """Milliseconds a step, after one step that is not timed: before it, other processes or contenders ran."""
    contender.step()
    torch.get_device_module().synchronize()
    begun = time.perf_counter()
    for _ in range(steps):
        contender.step()
    torch.get_device_module().synchronize()
    return (time.perf_counter() - begun) / steps * 1e3


def _crash(error: Exception) -> Row:
    return {
        "error": f"{type(error).__name__}: {error}"[:1000],
        "error_at": traceback.format_exc().strip().splitlines()[-8:],
    }
