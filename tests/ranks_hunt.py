"""Trainings of two processes with options drawn at random, each compared with plain training.

    python -m tests.ranks_hunt --cases 60 --seed 1

Prints every case that differs, raises or hangs, as the call that runs it again. Exit status 1 where there is one.
"""

from __future__ import annotations

import argparse
import random
import sys
from typing import Any

from tests.ranks import Ranks, pair_of_ranks

__all__ = ["draw", "fault_of"]

_TRAPS = (
    "a branch",
    "a counter",
    "a host read",
    "a parameter moves",
    "the reference fails",
    "the capture fails",
    "the backward of the capture fails",
    "the backup fails",
    "the comparison fails",
)
"""What may go wrong on one rank: see `tests/ranks_traps.py`."""

_CONFIGS: tuple[Any, ...] = (
    None,
    None,
    {"verify": "always"},
    {"verify": "off"},
    {"fuse": "off"},
    {"max_signatures": 1},
)


def draw(source: random.Random) -> tuple[str, dict[str, Any]]:
    """A function of a rank, and the options that it is called with."""
    pick = source.choice
    common: dict[str, Any] = {
        "steps": 45,
        "accumulate": pick([1, 1, 2, 3]),
        "clip": pick([None, 0.5]),
        "sizes": pick(["same", "same", "ragged", "one rank"]),
        "config": pick(_CONFIGS),
    }
    kind = pick(["replicas", "replicas", "shards", "shards", "accelerate", "lightning"])
    trap = pick(["", "", *_TRAPS])
    if kind == "replicas":
        options = {
            **common,
            "bf16": pick([False, True]),
            "optimizer": pick(["sgd", "adamw"]),
            "schedule": pick([False, True]),
            "hook": pick(["", "", "fp16_compress_hook", "allreduce_hook"]),
            "ddp": pick([None, {"gradient_as_bucket_view": True}, {"bucket_cap_mb": 0.0005}]),
            "trap": trap,
        }
        return "tests.ranks_training:graphed_step", options
    if kind == "shards":
        policy = pick(["", "", "bf16", "bf16, reduced in fp32"])
        options = {
            **common,
            "local": pick([False, True]),
            "schedule": pick([False, True]),
            "evaluate": pick([0, 0, 7, 10]),
            "freeze": pick([0, 0, 17]),
            "reshard": pick([None, True, False]),
            "policy": policy,
            "autocast": policy == "" and pick([False, True]),
            "trap": "" if trap in ("a branch", "a parameter moves") else trap,
        }
        return "tests.ranks_sharded:graphed_step", options
    if kind == "accelerate":
        options = {**common, "precision": pick(["no", "bf16"]), "shards": pick([False, True])}
        return "tests.ranks_accelerate:same", {**options, "stock": pick([False, False, True])}
    options = {
        "replays": 1,
        "plan": None,
        "shards": pick([False, True]),
        "logs": pick([False, True]),
        "validate": True,
        "accumulate_grad_batches": pick([1, 2, 3]),
        "precision": pick(["32-true", "bf16-true", "bf16-mixed"]),
        "module": {"scheduler": pick([None, "step", "epoch", "plateau"])},
    }
    return "tests.ranks_lightning:same", options


def fault_of(ranks: Ranks, name: str, options: dict[str, Any]) -> str | None:
    """Run one case. Returns what is wrong with it, None where both ranks train as without graphs."""
    for rank, (kind, told) in enumerate(ranks.answers(name, timeout=100.0, keep=True, **options)):
        if kind != "done":
            return f"rank {rank} {kind}: {told[-2000:]}"
        if isinstance(told, dict) and not (told["losses"] and told["state"]):
            return f"rank {rank} trains differently\n{told['report']}"
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    source, faults = random.Random(args.seed), 0
    with pair_of_ranks() as ranks:
        for number in range(args.cases):
            name, options = draw(source)
            fault = fault_of(ranks, name, options)
            if fault is not None:
                faults += 1
                print(f"case {number}: ranks.run({name!r}, **{options!r})\n{fault}\n", flush=True)
    print(f"{args.cases} cases, {faults} with a fault")
    return int(faults > 0)


if __name__ == "__main__":
    sys.exit(main())
