"""Two processes that train one model together: each rank as without the library, and never a hang."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.ranks import Ranks, pair_of_ranks

pytestmark = [
    pytest.mark.passes_without_graphs("ranks are processes of their own, and count their replays"),
    pytest.mark.timeout(180),
]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with pair_of_ranks() as pool:
        yield pool


def trained(ranks: Ranks, name: str, **expected: Any) -> None:
    """Each rank compares its own training; both replay forward and backward in the same steps."""
    found = ranks.run("tests.contract.ranks_trainings:trained", timeout=100.0, training=name, **expected)
    assert found[0]["F"] == found[1]["F"] and found[0]["B"] == found[1]["B"], found


REPLICAS: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "clipped": ({"clip": 0.5}, {"replays": 15}),
    "accumulated": ({"accumulate": 3}, {"replays": 12, "updates": 4}),
    "views of buckets": ({"gradient_as_bucket_view": True}, {"replays": 15}),
    "many buckets": ({"bucket_cap_mb": 0.0002}, {"replays": 15}),
}


@pytest.mark.parametrize("name", REPLICAS)
@pytest.mark.slow_after(2)
def test_replicas(ranks: Ranks, name: str) -> None:
    options, expected = REPLICAS[name]
    trained(ranks, "replicas", options=options, **expected)


@pytest.mark.slow
def test_unused_parameters_are_looked_for(ranks: Ranks) -> None:
    trained(ranks, "replicas", options={"find_unused_parameters": True}, refused="DDP reads on the host")


def test_another_shape_on_one_rank(ranks: Ranks) -> None:
    trained(ranks, "another_shape_on_one_rank", replays=12)


def test_another_branch_on_one_rank(ranks: Ranks) -> None:
    trained(ranks, "another_branch_on_one_rank", replays=10)


def test_a_host_read_on_one_rank(ranks: Ranks) -> None:
    trained(ranks, "a_host_read_on_one_rank", refused="what one rank cannot do none does")


def test_no_memory_for_the_capture_of_one_rank(ranks: Ranks) -> None:
    trained(ranks, "no_memory_on_one_rank", refused="what one rank cannot do none does")


def test_a_parameter_that_moves_on_one_rank(ranks: Ranks) -> None:
    trained(ranks, "a_parameter_moves_on_one_rank", replays=10)


def test_a_step_that_raises_on_both_ranks(ranks: Ranks) -> None:
    trained(ranks, "a_step_that_raises_on_both_ranks", replays=8)


SHARDS: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "clipped": ({"clip": 0.5}, {"replays": 15}),
    "accumulated in bf16": ({"accumulate": 2, "bf16": True}, {"replays": 12, "updates": 5}),
}


@pytest.mark.parametrize("name", SHARDS)
@pytest.mark.quick
def test_shards(ranks: Ranks, name: str) -> None:
    options, expected = SHARDS[name]
    trained(ranks, "shards", options=options, **expected)


def test_a_lightning_trainer(ranks: Ranks) -> None:
    pytest.importorskip("lightning.pytorch")
    trained(ranks, "a_lightning_trainer", replays=12)


@pytest.mark.slow
def test_a_lightning_trainer_that_accumulates_and_clips(ranks: Ranks) -> None:
    pytest.importorskip("lightning.pytorch")
    options = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}
    trained(ranks, "a_lightning_trainer", options=options, replays=8, updates=3)


def test_a_graphed_step_of_accelerate(ranks: Ranks) -> None:
    pytest.importorskip("accelerate")
    trained(ranks, "an_accelerator", options={"whole": True}, replays=10)


@pytest.mark.slow
def test_a_stock_loop_of_accelerate(ranks: Ranks) -> None:
    pytest.importorskip("accelerate")
    trained(ranks, "an_accelerator", options={"whole": False}, replays=0)
