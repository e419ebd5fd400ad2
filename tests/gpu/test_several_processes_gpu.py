"""Two GPUs that train one model together over NCCL: bit for bit as plain DistributedDataParallel and FSDP2."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.ranks import Ranks, pair_of_ranks
from tests.ranks_sharded_models import CASES

pytestmark = [
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
    pytest.mark.passes_without_graphs("ranks are processes of their own, and count their replays"),
]

EAGER = {"compile": False, "forward": "on"}
"""Eager kernels, and graphs also where the GPU does not wait for the host."""


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with pair_of_ranks(backend="nccl") as pool:
        yield pool


@pytest.mark.parametrize(
    "options",
    [
        {"clip": 0.5, "schedule": True, "steps": 500},
        {"accumulate": 3, "steps": 60, "optimizer": "adamw"},
        {"bf16": True, "sizes": "ragged", "optimizer": "adamw", "steps": 60},
        {"ddp": {"gradient_as_bucket_view": True}, "clip": 0.5, "steps": 60},
        {"ddp": {"static_graph": True}, "steps": 60},
        {"hook": "bf16_compress_hook", "steps": 60},
        {"hook": "fp16_compress_hook", "accumulate": 2, "steps": 60},
        {"sizes": "one rank", "steps": 60},
    ],
)
def test_steps_equal_those_of_plain_replicas(ranks: Ranks, options: dict[str, Any]) -> None:
    found = ranks.run("tests.ranks_training:graphed_step", config=EAGER, timeout=120.0, **options)
    for told in found:
        assert told["losses"] and told["state"], told["report"]
        assert told["replayed"] >= options["steps"] // 2, told["report"]


@pytest.mark.parametrize(
    "trap", ["the capture fails on the device", "the comparison fails", "a parameter moves"]
)
def test_what_one_rank_cannot_do_none_does(ranks: Ranks, trap: str) -> None:
    found = ranks.run("tests.ranks_training:graphed_step", config=EAGER, timeout=120.0, trap=trap, steps=60)
    for told in found:
        assert told["losses"] and told["state"], told["report"]
        assert (told["replayed"] > 20) == (trap == "a parameter moves"), told["report"]


@pytest.mark.parametrize(
    "options",
    [
        {"clip": 0.5, "schedule": True, "steps": 500},
        {"accumulate": 3, "local": True, "policy": "bf16, reduced in fp32", "steps": 60},
        {"accumulate": 3, "clip": 0.5, "steps": 60},
        {"autocast": True, "sizes": "ragged", "steps": 60},
        {"reshard": False, "evaluate": 8, "steps": 60},
        {"sizes": "one rank", "steps": 60},
    ],
)
def test_steps_equal_those_of_plain_shards(ranks: Ranks, options: dict[str, Any]) -> None:
    found = ranks.run("tests.ranks_sharded:graphed_step", config=EAGER, timeout=120.0, **options)
    for told in found:
        assert told["losses"] and told["state"], told["report"]
        assert told["replayed"] >= options["steps"] // 2, told["report"]


@pytest.mark.parametrize("name", [name for name in CASES if name != "kept whole"])
def test_models_as_people_shard_them(ranks: Ranks, name: str) -> None:
    for told in ranks.run("tests.ranks_sharded_models:same", case=name, timeout=120.0):
        assert told["losses"] and told["state"] and told["replayed"] >= 12, told["report"]


@pytest.mark.parametrize("trap", ["the capture fails on the device", "the comparison fails"])
def test_what_one_rank_cannot_do_none_does_with_shards(ranks: Ranks, trap: str) -> None:
    found = ranks.run("tests.ranks_sharded:graphed_step", config=EAGER, timeout=120.0, trap=trap, steps=60)
    for told in found:
        assert told["losses"] and told["state"] and told["replayed"] == 0, told["report"]


def test_a_trainer_of_two_gpus_with_shards(ranks: Ranks) -> None:
    for options in (
        {"validate": True},
        {"accumulate_grad_batches": 4, "gradient_clip_val": 0.1},
    ):
        found = ranks.run(
            "tests.ranks_lightning:same",
            timeout=120.0,
            replays=20,
            shards=True,
            logs=True,
            config=EAGER,
            **options,
        )
        assert min(found) >= 20


def test_accelerate_with_shards_on_two_gpus(ranks: Ranks) -> None:
    found = ranks.run(
        "tests.ranks_accelerate:same",
        timeout=120.0,
        config=EAGER,
        shards=True,
        clip=0.5,
        accumulate=2,
        steps=60,
    )
    for told in found:
        assert told["losses"] and told["state"] and told["replayed"] >= 30, told["report"]


def test_a_trainer_of_two_gpus(ranks: Ranks) -> None:
    config = {"compile": False, "forward": "on"}
    for options in (
        {"validate": True},
        {"accumulate_grad_batches": 4, "gradient_clip_val": 0.1},
    ):
        found = ranks.run(
            "tests.ranks_lightning:same", timeout=120.0, replays=20, logs=True, config=config, **options
        )
        assert min(found) >= 20


def test_accelerate_on_two_gpus(ranks: Ranks) -> None:
    found = ranks.run(
        "tests.ranks_accelerate:same", timeout=120.0, config=EAGER, clip=0.5, accumulate=2, steps=60
    )
    for told in found:
        assert told["losses"] and told["state"] and told["replayed"] >= 30, told["report"]


@pytest.mark.parametrize("shards", [False, True])
def test_compiled_kernels_are_in_the_graph(ranks: Ranks, shards: bool) -> None:
    for told in ranks.run("tests.ranks_training:compiled", timeout=240.0, shards=shards):
        assert told["replayed"] >= 30 and all(told["compiled"]), told["report"]
        assert told["distance"] < 2e-3, told["report"]


def test_fifty_captures_take_no_more_memory_than_five(ranks: Ranks) -> None:
    for reserved in ranks.run("tests.ranks_training:captured_again", timeout=200.0, captures=50):
        assert reserved[-1] <= reserved[4], reserved
