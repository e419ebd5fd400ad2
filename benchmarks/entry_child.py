"""A process that makes contenders of one entry, and the windows that its parent asks for."""

from __future__ import annotations

import argparse
import time
import traceback
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.children import Turns
from benchmarks.contenders import Contender, Setting, first_losses, settle, start, timed
from benchmarks.limit import StepTimeout, time_limit
from benchmarks.noise import TWIN
from benchmarks.record import write_json
from benchmarks.zoo_models import FULL, TINY, Entry, NotInstalled

__all__ = ["be_child"]

Row = dict[str, Any]

LOSSES = 20
"""Steps of which the losses are compared."""


def be_child(entry: Entry, modes: Sequence[str], args: argparse.Namespace) -> None:
    """Make contenders of one entry, write what is known of them to `args.child`, and make the windows asked for.

    Args:
        modes: of `contenders.MODES`. "eager again" is a second run of the plain loop, of which only the losses count.
            A mode with `TWIN` at its end is the same contender in another process.
        args: has the options above, and `autocast`.
    """
    turns = Turns()
    part: Row = {"stage": "began", "modes": {}}
    torch.set_float32_matmul_precision("high" if args.autocast else "highest")
    try:
        kept = _contenders(part, entry, modes, args)
    except NotInstalled as reason:
        write_json(args.child, part | {"not_installed": str(reason)})
        return

    def window(asked: str) -> str:
        mode, steps = asked.rsplit(" ", 1)
        try:
            return str(timed(kept[mode], int(steps)))
        except Exception as error:
            part["modes"][mode] |= _crash(error)
            write_json(args.child, part)
            return ""

    if kept:
        part["stage"] = "waits for its turn"
        write_json(args.child, part)
        turns.answer(window)
    for mode, contender in kept.items():  # plans change while they are timed, too
        part["modes"][mode] |= _told_by(contender)
    write_json(args.child, part)


def _contenders(
    part: Row, entry: Entry, modes: Sequence[str], args: argparse.Namespace
) -> dict[str, Contender]:
    """Those that are ready to be timed; what became of each mode is in `part`."""
    size = FULL if args.scale == "full" else TINY
    setting = Setting(lambda: entry.build(size), torch.device(args.device), args.autocast, args.engine)
    _warm_up(setting.device)
    if len(modes) > 1:
        # they share the code of the model, and with it the limit of what Dynamo compiles for it
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)
    kept: dict[str, Contender] = {}
    for mode in modes:
        part["stage"] = mode
        write_json(args.child, part)
        found = part["modes"].setdefault(mode, {})
        try:
            with time_limit(args.mode_s if len(modes) > 1 else 0):  # the parent has the limit of a single one
                contender = _settled(mode, setting, args)
        except StepTimeout:
            found["error"] = f"timed out after {args.mode_s} s"
        except NotInstalled:
            raise
        except Exception as error:
            found |= _crash(error)
        else:
            found |= {"losses": contender.losses, "reserved_mib": contender.reserved_mib}
            found |= _told_by(contender) | _cost_of_the_start()
            if mode != "eager again":
                kept[mode] = contender
    return kept


def _warm_up(device: torch.device) -> None:
    """Make what cuBLAS keeps for the whole process, or a mode would seem to need that memory."""
    x = torch.randn(64, 64, device=device, requires_grad=True)
    for kind in (torch.float32, torch.bfloat16):
        torch.nn.functional.linear(x.to(kind), x.to(kind), x[0].to(kind)).sum().backward()


def _settled(mode: str, setting: Setting, args: argparse.Namespace) -> Contender:
    contender = start(mode.removesuffix(" again").removesuffix(TWIN), setting)
    first_losses(contender, LOSSES)
    plain = contender.report is None and mode != "backend"
    least, most = (5, 5) if plain else (args.least, args.most)
    settle(contender, least=least, most=most, seconds=args.settle_s)
    if mode.startswith("graphed") and _has_no_graph_of_both(contender):
        # graphs may come late
        end = time.monotonic() + args.settle_s / 2
        for _ in range(args.most):
            contender.step()
            if time.monotonic() > end:
                break
        settle(contender, least=least, most=most, seconds=args.settle_s)
    return contender


def _cost_of_the_start() -> Row:
    """The processor's seconds in this process until now, and how often Inductor found a graph on disk."""
    found = torch._dynamo.utils.counters["inductor"]
    caches = {key: found[f"fxgraph_cache_{key}"] for key in ("hit", "miss", "bypass")}
    return {"ready_cpu_s": round(time.process_time(), 1), "graphs_on_disk": caches}


def _has_no_graph_of_both(contender: Contender) -> bool:
    assert contender.report is not None
    return str(contender.report().running_plan) in ("F B O", "F B {O}")


def _told_by(contender: Contender) -> Row:
    """What the library says of its steps."""
    if contender.report is None:
        return {}
    told = contender.report().to_dict()
    names = (
        "headline",
        "running_plan",
        "steps",
        "steps_from_graphs",
        "fallbacks",
        "notes",
        "first_replay_step",
    )
    return {key: told[key] for key in names}


def _crash(error: Exception) -> Row:
    return {
        "error": f"{type(error).__name__}: {error}"[:1000],
        "error_at": traceback.format_exc().strip().splitlines()[-8:],
    }
