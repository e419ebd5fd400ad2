"""Processes that train one model together, mostly two: each rank as without the library, and never a hang."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

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
    """Each rank compares its own training. Where graphs hold collectives, they replay the same steps."""
    ranks.run("tests.contract.ranks_trainings:trained", timeout=100.0, training=name, **expected)


REPLICAS: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "clipped, with a schedule": ({"clip": 0.5, "schedule": True}, {"replays": 15}),
    "accumulated, and state is loaded": ({"accumulate": 3, "loads": True}, {"replays": 12, "updates": 2}),
    "views of buckets": ({"gradient_as_bucket_view": True}, {"replays": 15}),
    "many buckets": ({"bucket_cap_mb": 0.0002}, {"replays": 15}),
    "in bf16": ({"bf16": True}, {"replays": 15}),
    "compressed by a hook": ({"compress": True}, {"replays": 15}),
    "a hook of the user's": ({"compress": "in Python"}, {"replays": 15}),
    "static": ({"static_graph": True}, {"replays": 12}),
}


@pytest.mark.parametrize("name", REPLICAS)
@pytest.mark.slow_after(2)
def test_replicas(ranks: Ranks, name: str) -> None:
    options, expected = REPLICAS[name]
    trained(ranks, "replicas", options=options, **expected)


@pytest.mark.slow
def test_unused_parameters_are_looked_for(ranks: Ranks) -> None:
    trained(ranks, "replicas", options={"find_unused_parameters": True}, refused="DDP reads on the host")


@pytest.mark.parametrize("how", ["around", "inside", "accumulate", "all in one"])
@pytest.mark.slow_after(2)
def test_micro_batches_without_an_exchange(ranks: Ranks, how: str) -> None:
    trained(ranks, "micro_batches", options={"how": how}, replays=24, updates=6)


def test_micro_batches_of_which_one_rank_has_no_graphs(ranks: Ranks) -> None:
    options = {"how": "inside", "fails": "comparisons fail"}
    trained(ranks, "micro_batches", options=options, refused="one rank cannot replay")


def test_a_model_that_communicates(ranks: Ranks) -> None:
    trained(ranks, "a_model_that_communicates", replays=12)


@pytest.mark.parametrize("by_hand", [True, False])
def test_a_model_that_replicate_has_wrapped(ranks: Ranks, by_hand: bool) -> None:
    options = {"what": "replicate", "by_hand": by_hand}
    trained(ranks, "gradients_exchanged_by", options=options, replays=15)


@pytest.mark.parametrize("by_hand", [True, False])
def test_hooks_of_parameters_that_exchange_gradients(ranks: Ranks, by_hand: bool) -> None:
    options = {"what": "hooks", "by_hand": by_hand}
    trained(ranks, "gradients_exchanged_by", options=options, refused="hooks in another order")


def test_gradients_that_are_not_reduced_are_noticed(ranks: Ranks) -> None:
    ranks.run("tests.contract.ranks_trainings:differs_without_reduction")


TRAPS = {
    "another_shape_on_one_rank": 12,
    "another_branch_on_one_rank": 10,
    "a_counter_on_one_rank": 15,
    "a_parameter_moves_on_one_rank": 10,
    "a_step_that_raises_on_both_ranks": 8,
    "not_a_number_on_one_rank": 12,
}


@pytest.mark.parametrize("trap", TRAPS)
@pytest.mark.quick
def test_graphs_go_on_after(ranks: Ranks, trap: str) -> None:
    updates = {"updates": 0} if trap == "not_a_number_on_one_rank" else {}
    trained(ranks, trap, replays=TRAPS[trap], **updates)


@pytest.mark.parametrize("trap", ["a_host_read_on_one_rank", "fewer_batches_on_one_rank"])
@pytest.mark.quick
def test_training_goes_on_with(ranks: Ranks, trap: str) -> None:
    trained(ranks, trap, refused="one rank has no graphs, or few steps")


@pytest.mark.parametrize("shard", [False, True])
@pytest.mark.parametrize("how", ["no memory for captures", "comparisons fail", "graphs are off"])
@pytest.mark.slow_after(3)
def test_one_rank_trains_without_graphs(ranks: Ranks, how: str, shard: bool) -> None:
    options = {"how": how, "shard": shard}
    trained(ranks, "a_loop_that_fails_on_one_rank", options=options, refused="one rank cannot replay")


@pytest.mark.parametrize("how", ["steps fail", "no memory for captures", "comparisons fail"])
@pytest.mark.slow_after(1)
def test_one_rank_trains_without_graphs_between_updates(ranks: Ranks, how: str) -> None:
    options = {"how": how, "shard": False, "accumulate": 2}
    trained(ranks, "a_loop_that_fails_on_one_rank", options=options, refused="one rank cannot replay")


SHARDS: dict[str, dict[str, Any]] = {
    "clipped, with a schedule": {"clip": 0.5, "schedule": True},
    "accumulated in bf16": {"accumulate": 2, "bf16": True},
    "another shape on one rank": {"trap": "another shape"},
    "a counter on one rank": {"trap": "a counter", "reshard": False},
    "a step that raises": {"trap": "it raises"},
    "hybrid": {"mesh": (2, 1)},
    "updated by the caller": {"stepped": "by the caller"},
    "several optimizers": {"stepped": "by several optimizers"},
    "scaled": {"stepped": "with a scaler"},
}


@pytest.mark.parametrize("name", SHARDS)
@pytest.mark.slow_after(2)
def test_shards(ranks: Ranks, name: str) -> None:
    updates = {"accumulated in bf16": 6, "updated by the caller": 0, "scaled": 0}.get(name, 12)
    trained(ranks, "shards", options=SHARDS[name], replays=12, updates=updates)


BLOCKS: dict[str, dict[str, Any]] = {
    "as they are": {},
    "accumulated in bf16": {"accumulate": 2, "bf16": True},
    "accumulated in bf16, summed up in float32": {"accumulate": 2, "bf16": True, "reduced": torch.float32},
    "kept between forward and backward": {"reshard": False},
    "of two widths": {"wider": 2},
    "partly frozen": {"frozen": True},
    "hybrid": {"mesh": (2, 1)},
    "another shape on one rank, and state is loaded": {"trap": "another shape"},
}


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.slow_after(2)
def test_blocks_of_shards(ranks: Ranks, name: str) -> None:
    trained(ranks, "blocks_by_hand", options=BLOCKS[name], replays=12, updates=12)


@pytest.mark.slow
def test_blocks_of_shards_of_which_others_have_replicas() -> None:
    options = {"mesh": (2, 2), "steps": 20, "accumulate": 2}
    with pair_of_ranks(4) as four:
        trained(four, "blocks_by_hand", options=options, replays=12, updates=6)


@pytest.mark.parametrize("fails", ["graphs are off", "comparisons fail"])
@pytest.mark.slow_after(1)
def test_blocks_of_shards_one_rank_of_which_has_no_graphs(ranks: Ranks, fails: str) -> None:
    trained(ranks, "blocks_by_hand", options={"fails": fails}, refused="one rank cannot replay")


OF_SHARDS: dict[str, dict[str, Any]] = {
    "is frozen before some backwards": {"replays": 12},
    "is evaluated": {"refused": "FSDP leaves its parameters gathered"},
    "is evaluated and freed": {"replays": 12},
    "is not sharded itself": {"replays": 12},
    "calls a block twice": {"replays": 12},
    "has two results": {"replays": 12},
    "has its weights in the loss": {"replays": 12, "backwards": 0},
    "divides by another number": {"replays": 12},
    "is gathered ahead": {"replays": 12},
    "raises before a backward": {"replays": 24},
    "is reduced in part": {"refused": "a graph would reduce gradients wholly"},
    "boxes its results": {"refused": "Dynamo traces no hook that looks into them"},
    "breaks the graph": {"refused": "no part of such a model has a graph"},
    "leaves a block out": {"refused": "its parameters were not gathered in the first forward"},
}


@pytest.mark.parametrize("kind", OF_SHARDS)
@pytest.mark.slow_after(6)
def test_a_sharded_model_that(ranks: Ranks, kind: str) -> None:
    expected = OF_SHARDS[kind] if "refused" in OF_SHARDS[kind] else OF_SHARDS[kind] | {"updates": 0}
    trained(ranks, "a_sharded_model_that", options={"kind": kind}, **expected)


def test_blocks_of_shards_of_a_compiled_model(ranks: Ranks) -> None:
    trained(ranks, "blocks_of_a_compiled_model", refused="their parameters move between forward and backward")


@pytest.mark.parametrize("by_hand", [True, False])
def test_a_model_in_fsdp1(ranks: Ranks, by_hand: bool) -> None:
    trained(ranks, "a_model_in_fsdp1", options={"by_hand": by_hand}, refused="parameters are sharded")


TENSOR_PARALLEL: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "as it is": ({}, {"replays": 12, "updates": 12}),
    "by hand": ({"by_hand": True}, {"replays": 12, "updates": 12}),
    "clipped": ({"clip": 0.5}, {"replays": 12, "updates": 0}),
    "inside of FSDP2": ({"by_hand": True, "shard": True}, {"replays": 0, "updates": 12}),
    "beside layers that each rank has": ({"by_hand": True, "beside": True}, {"replays": 12, "updates": 0}),
}


@pytest.mark.parametrize("name", TENSOR_PARALLEL)
def test_tensor_parallelism(ranks: Ranks, name: str) -> None:
    options, expected = TENSOR_PARALLEL[name]
    trained(ranks, "tensor_parallel", options=options, **expected)


BLOCKS_IN_PARALLEL: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "as they are": ({}, {"replays": 20, "updates": 0}),
    "with split sequences": ({"sequence": True}, {"replays": 20, "updates": 0}),
    "accumulated": ({"accumulate": 2, "trap": "another shape"}, {"replays": 12, "updates": 0}),
    "in bf16": ({"bf16": True}, {"replays": 20, "updates": 0}),
    "accumulated, of one shape": ({"accumulate": 2}, {"replays": 20, "updates": 0}),
    "accumulated, of split sequences": ({"accumulate": 2, "sequence": True}, {"replays": 20, "updates": 0}),
    "with gates": ({"kind": "gates"}, {"replays": 20, "updates": 0}),
    "with gates around": ({"kind": "gates around"}, {"replays": 20, "updates": 0}),
    "with two heads": ({"kind": "heads"}, {"replays": 20, "updates": 0}),
    "whose heads exchange": ({"kind": "exchange"}, {"replays": 20, "updates": 0}),
    "inside of FSDP2": ({"shard": True}, {"replays": 0, "updates": 0}),
}


@pytest.mark.parametrize("name", BLOCKS_IN_PARALLEL)
@pytest.mark.slow_after(2)
def test_blocks_in_tensor_parallelism(ranks: Ranks, name: str) -> None:
    options, expected = BLOCKS_IN_PARALLEL[name]
    trained(ranks, "tensor_parallel_blocks", options=options, **expected)


@pytest.mark.parametrize("kind", ["", "heads", "sequence"])
@pytest.mark.parametrize("fails", ["graphs are off", "comparisons fail", "no memory for captures"])
@pytest.mark.quick
def test_blocks_in_tensor_parallelism_one_rank_of_which_has_no_graphs(
    ranks: Ranks, fails: str, kind: str
) -> None:
    options = {"fails": fails, "kind": kind, "sequence": kind == "sequence", "accumulate": 2}
    trained(ranks, "tensor_parallel_blocks", options=options, refused="one rank cannot replay")


@pytest.mark.parametrize("fails", ["calls fail", "choices fail"])
def test_a_fault_on_one_rank_ends_the_graphs_of_tensor_parallelism_on_both(ranks: Ranks, fails: str) -> None:
    expected = {"timeout": 100.0, "refused": "one rank cannot replay"}
    options = {"fails": fails}
    counts = ranks.run(
        "tests.contract.ranks_trainings:trained",
        training="tensor_parallel_blocks",
        options=options,
        **expected,
    )
    assert counts[0] == counts[1] and 0 < counts[0]["F"] < 20, counts


def test_both_ranks_record_tensor_parallelism_anew(ranks: Ranks) -> None:
    options = {"fails": "a parameter moves"}
    trained(ranks, "tensor_parallel_blocks", options=options, replays=26, updates=0)


def test_a_lightning_trainer_with_tensor_parallelism(ranks: Ranks) -> None:
    pytest.importorskip("lightning.pytorch")
    trained(ranks, "a_lightning_trainer", options={"tensor": True}, replays=12, updates=12)


def test_a_lightning_trainer(ranks: Ranks) -> None:
    pytest.importorskip("lightning.pytorch")
    trained(ranks, "a_lightning_trainer", replays=12)


def test_a_lightning_trainer_by_hand(ranks: Ranks) -> None:
    pytest.importorskip("lightning.pytorch")
    trained(ranks, "a_lightning_trainer_by_hand", replays=12)


@pytest.mark.slow
def test_blocks_of_shards_with_a_lightning_trainer_by_hand(ranks: Ranks) -> None:
    pytest.importorskip("lightning.pytorch")
    trained(ranks, "a_lightning_trainer_by_hand", options={"shard": True}, replays=12, updates=12)


@pytest.mark.slow
def test_a_lightning_trainer_that_accumulates_and_clips(ranks: Ranks) -> None:
    pytest.importorskip("lightning.pytorch")
    options = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}
    trained(ranks, "a_lightning_trainer", options=options, replays=8, updates=3)


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_lightning_trainer_with_shards(ranks: Ranks, accumulate: int) -> None:
    pytest.importorskip("lightning.pytorch")
    options = {"shard": True, "accumulate_grad_batches": accumulate, "gradient_clip_val": 0.1}
    trained(ranks, "a_lightning_trainer", options=options, replays=12, updates=12 // accumulate)


def test_a_graphed_step_of_accelerate(ranks: Ranks) -> None:
    pytest.importorskip("accelerate")
    trained(ranks, "an_accelerator", options={"whole": True}, replays=10)


@pytest.mark.parametrize("attach", [True, False])
@pytest.mark.slow_after(1)
def test_a_stock_loop_of_accelerate(ranks: Ranks, attach: bool) -> None:
    pytest.importorskip("accelerate")
    trained(ranks, "an_accelerator", options={"attach": attach}, replays=12)


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.slow_after(1)
def test_tensor_parallelism_with_accelerate(ranks: Ranks, whole: bool) -> None:
    pytest.importorskip("accelerate")
    trained(ranks, "an_accelerator", options={"tensor": True, "whole": whole}, replays=12, updates=12)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("how", ["stock", "whole", "method"])
@pytest.mark.quick
def test_a_fabric(ranks: Ranks, how: str, accumulate: int) -> None:
    pytest.importorskip("lightning.fabric")
    updates = 12 if accumulate == 1 else 1
    trained(ranks, "a_fabric", options={"how": how, "accumulate": accumulate}, replays=12, updates=updates)


@pytest.mark.parametrize("shard", [False, True])
@pytest.mark.slow_after(1)
def test_a_fabric_with_parts_of_a_model(ranks: Ranks, shard: bool) -> None:
    pytest.importorskip("lightning.fabric")
    trained(ranks, "a_fabric_with_parts_of_a_model", options={"shard": shard}, replays=12, updates=12)


@pytest.mark.parametrize("fails", ["graphs are off", "comparisons fail"])
@pytest.mark.parametrize("how", ["stock", "whole"])
@pytest.mark.quick
def test_a_fabric_one_rank_of_which_has_no_graphs(ranks: Ranks, how: str, fails: str) -> None:
    pytest.importorskip("lightning.fabric")
    options = {"how": how, "fails": fails, "accumulate": 2}
    trained(ranks, "a_fabric", options=options, refused="one rank cannot replay")


def test_gradients_that_are_read_late(ranks: Ranks) -> None:
    pytest.importorskip("lightning.fabric")
    trained(ranks, "a_fabric_whose_gradients_are_read_late", replays=12)


@pytest.mark.parametrize("attach", [True, False])
@pytest.mark.slow_after(1)
def test_blocks_of_shards_with_accelerate(ranks: Ranks, attach: bool) -> None:
    pytest.importorskip("accelerate")
    options = {"shard": True, "attach": attach}
    trained(ranks, "an_accelerator", options=options, replays=12, updates=12)


@pytest.mark.parametrize("way", ["trainer", "callback"])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.quick
def test_a_trainer_of_transformers(ranks: Ranks, way: str, accumulate: int) -> None:
    pytest.importorskip("transformers")
    options = {"way": way, "gradient_accumulation_steps": accumulate}
    trained(
        ranks, "a_trainer_of_transformers", options=options, replays=12, updates=12 if accumulate == 1 else 1
    )
