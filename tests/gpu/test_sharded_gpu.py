"""One GPU that holds all shards of a model under `fully_shard`: hooks, streams and collectives in the graph."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.ranks import Ranks, pair_of_ranks
from tests.ranks_sharded_models import CASES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.passes_without_graphs("the rank is a process of its own, and counts its replays"),
]

EAGER = {"compile": False, "forward": "on"}
"""Eager kernels, and graphs also where the GPU does not wait for the host."""


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with pair_of_ranks(ranks=1, backend="nccl") as pool:
        yield pool


@pytest.mark.parametrize(
    "options",
    [
        {"clip": 0.5, "schedule": True, "steps": 200},
        {"accumulate": 3, "local": True, "policy": "bf16, reduced in fp32", "steps": 60},
        {"accumulate": 3, "local": True, "steps": 60},
        {"accumulate": 3, "clip": 0.5, "steps": 60},
        {"autocast": True, "sizes": "ragged", "steps": 60},
        {"reshard": False, "evaluate": 8, "steps": 60},
        {"config": {**EAGER, "verify": "always"}, "steps": 40},
    ],
)
def test_steps_equal_those_of_plain_shards(ranks: Ranks, options: dict[str, Any]) -> None:
    (told,) = ranks.run("tests.ranks_sharded:graphed_step", timeout=120.0, **{"config": EAGER, **options})
    assert told["losses"] and told["state"], told["report"]
    assert told["replayed"] >= options["steps"] // 2, told["report"]


@pytest.mark.parametrize("name", [name for name in CASES if name != "kept whole"])
def test_models_as_people_shard_them(ranks: Ranks, name: str) -> None:
    (told,) = ranks.run("tests.ranks_sharded_models:same", case=name, timeout=120.0)
    assert told["losses"] and told["state"] and told["replayed"] >= 12, told["report"]


def test_compiled_kernels_are_in_the_graph(ranks: Ranks) -> None:
    (told,) = ranks.run("tests.ranks_training:compiled", timeout=240.0, shards=True)
    assert told["replayed"] >= 30 and all(told["compiled"]), told["report"]
    assert told["distance"] < 2e-3, told["report"]
