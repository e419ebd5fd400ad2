"""Two processes that share the parameters of one model: bit for bit as plain `fully_shard`, and never a hang."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from tests.ranks import Ranks, pair_of_ranks
from tests.ranks_hunt import draw, fault_of
from tests.ranks_sharded_models import CASES
from tests.test_several_processes import trained

pytestmark = pytest.mark.passes_without_graphs("ranks are processes of their own, and count their replays")

STEP = "tests.ranks_sharded:graphed_step"


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with pair_of_ranks() as pool:
        yield pool


@pytest.mark.parametrize(
    ("options", "least"),
    [
        ({"clip": 0.5, "schedule": True, "evaluate": 8}, 22),
        ({"policy": "bf16, reduced in fp32", "accumulate": 3, "local": True, "steps": 48}, 40),
        ({"freeze": 15, "reshard": False, "steps": 48}, 35),
        ({"policy": "bf16"}, 25),
        ({"policy": "bf16", "accumulate": 3, "local": True, "steps": 48}, 40),
        ({"accumulate": 3, "steps": 48, "clip": 0.5}, 40),
        ({"accumulate": 3, "local": True, "steps": 48}, 40),
        ({"autocast": True, "sizes": "ragged", "steps": 48}, 30),
        ({"reshard": True, "evaluate": 6}, 25),
        ({"config": {"verify": "always"}, "clip": 0.5}, 25),
        ({"config": {"verify": "off"}, "accumulate": 2, "local": True, "steps": 40}, 30),
        ({"config": {"fuse": "off", "optimizer": "on"}}, 0),
    ],
)
@pytest.mark.slow_after(3)
def test_steps_equal_those_of_plain_shards(ranks: Ranks, options: dict[str, Any], least: int) -> None:
    trained(ranks.run(STEP, **options), least)


def test_another_shape_on_one_rank_only(ranks: Ranks) -> None:
    """Its steps run as they are on all ranks, and the others are replayed."""
    trained(ranks.run(STEP, sizes="one rank", steps=40), 20)


@pytest.mark.parametrize(
    ("trap", "reason"),
    [
        ("a counter", "counter.calls is written by the step"),
        ("the backward of the capture fails", "ValueError: planted"),
        ("a host read", "the value of a tensor is read on the host"),
        ("the capture fails", "out of memory during the capture"),
        ("the backup fails", "ValueError: planted"),
        ("the comparison fails", "differs from the step without a graph: planted"),
    ],
)
@pytest.mark.slow_after(2)
def test_what_fails_on_one_rank_ends_the_graphs_of_all(ranks: Ranks, trap: str, reason: str) -> None:
    found = trained(ranks.run(STEP, trap=trap), 0)
    assert all(told["replayed"] == 0 and reason in " ".join(told["report"].split()) for told in found)
    assert "rank 1 runs without graphs, so all ranks do" in " ".join(found[0]["report"].split())


def test_gradients_that_wait_are_as_before_a_capture_that_is_given_up(ranks: Ranks) -> None:
    trained(ranks.run(STEP, trap="the comparison fails", accumulate=3, local=True, steps=40), 0)


def test_a_rank_without_the_library(ranks: Ranks) -> None:
    found = trained(ranks.run(STEP, trap="graphs are off"), 0)
    assert "rank 1 runs without graphs (graphs are off there), so all ranks do" in " ".join(
        found[0]["report"].split()
    )


def test_ranks_with_different_models_are_told_at_the_start(ranks: Ranks) -> None:
    for kind, told in ranks.answers(STEP, trap="models differ", timeout=40.0):
        assert kind == "raised"
        assert "the ranks of this training differ in the parameters of the model" in told, told


def test_checkpoints_and_whole_parameters_in_between(ranks: Ranks) -> None:
    trained(ranks.run("tests.ranks_sharded:resumed"), 40)


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("replicas", "fully_shard with replicas (a mesh of two dimensions, HSDP) is not supported yet"),
        (
            "tensor parallelism",
            "fully_shard after tensor parallelism (a mesh of several dimensions) is not supported yet",
        ),
        ("offload", "fully_shard with CPUOffloadPolicy acts in Python, or on the CPU"),
        ("a hook", "fully_shard with an all-reduce hook acts in Python, or on the CPU"),
        ("FSDP1", "FullyShardedDataParallel (FSDP1) is not supported"),
    ],
)
def test_what_no_graph_can_hold_is_said(ranks: Ranks, how: str, reason: str) -> None:
    for report in ranks.run("tests.ranks_sharded:refused", how=how):
        text = " ".join(report.split())
        assert "all phases in 0 of 30 steps" in text and reason in text, report
        assert "F B {O}" in text, report


@pytest.mark.parametrize("name", [name for name in CASES if name not in ("kept whole", "an event")])
@pytest.mark.slow_after(2)
def test_models_as_people_shard_them(ranks: Ranks, name: str) -> None:
    trained(ranks.run("tests.ranks_sharded_models:same", case=name), 12)


@pytest.mark.parametrize("fails", [False, True])
def test_blocks_are_compiled_beneath_the_hooks(ranks: Ranks, fails: bool) -> None:
    for rank, told in enumerate(ranks.run("tests.ranks_sharded:compiled_units", fails=fails)):
        assert told["same"] and told["units"] == 2
        assert told["compiled"] == 2, "each block is compiled once"
        why = ["a module runs with eager kernels: no compiler here"] * 2
        assert told["left"] == (why if fails and rank == 1 else [])


def test_parameters_that_stay_whole_have_a_reason(ranks: Ranks) -> None:
    for told in trained(ranks.run("tests.ranks_sharded_models:same", case="kept whole"), 0):
        assert told["replayed"] == 0
        assert "parameters are whole when a step begins" in " ".join(told["report"].split())


@pytest.mark.slow
def test_a_rank_that_fails_in_a_second_run_ends_the_training(ranks: Ranks) -> None:
    """The others wait for its part of the parameters: they cannot go on, and must not go on with other ones."""
    found = ranks.answers("tests.ranks_sharded:fails_alone", timeout=40.0)
    assert found[1][0] == "ended", found
    assert "a training step failed on this rank" in found[0][1], found


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.slow
def test_trainings_with_options_drawn_at_random(ranks: Ranks, seed: int) -> None:
    pytest.importorskip("lightning")
    pytest.importorskip("accelerate")
    name, options = draw(random.Random(seed))
    assert fault_of(ranks, name, options) is None, (name, options)


LIGHTNING = "tests.ranks_lightning:same"


@pytest.mark.parametrize(
    "options",
    [
        {"logs": True, "validate": True},
        {"accumulate_grad_batches": 4, "gradient_clip_val": 0.1, "freezes": True},
        {"precision": "bf16-mixed", "module": {"scheduler": "step"}},
        {"precision": "bf16-true"},
        {"module": {"scheduler": "plateau"}, "validate": True, "gradient_clip_val": 0.5},
    ],
)
@pytest.mark.slow_after(2)
def test_a_trainer_with_shards_trains_as_without_the_callback(ranks: Ranks, options: dict[str, Any]) -> None:
    """Losses, gradients, parameters, logged values, progress and random state of both ranks, after every batch."""
    pytest.importorskip("lightning")
    found = ranks.run(LIGHTNING, timeout=100.0, replays=24, shards=True, **options)
    assert found[0] == found[1] >= 24


@pytest.mark.parametrize("shards", ["whole", "sharded"])
@pytest.mark.slow
def test_a_trainer_with_shards_resumes(ranks: Ranks, tmp_path: Any, shards: str) -> None:
    pytest.importorskip("lightning")
    found = ranks.run(
        "tests.ranks_lightning:same_after_resuming", timeout=100.0, folder=str(tmp_path), shards=shards
    )
    assert min(found) >= 15


@pytest.mark.parametrize(
    ("options", "least"),
    [
        ({"clip": 0.5, "accumulate": 3, "steps": 48}, 30),
        ({"precision": "bf16", "sizes": "one rank", "steps": 40}, 25),
        ({"stock": True, "clip": 0.5}, 10),
        ({"precision": "bf16", "accumulate": 3, "steps": 48}, 40),
    ],
)
def test_accelerate_with_shards_trains_as_the_stock_accelerator(
    ranks: Ranks, options: dict[str, Any], least: int
) -> None:
    pytest.importorskip("accelerate")
    trained(ranks.run("tests.ranks_accelerate:same", timeout=100.0, shards=True, **options), least)


@pytest.mark.parametrize("shards", [False, True])
@pytest.mark.slow
def test_accelerate_resumes(ranks: Ranks, tmp_path: Any, shards: bool) -> None:
    pytest.importorskip("accelerate")
    options: dict[str, Any] = {"shards": shards, "folder": str(tmp_path), "steps": 40}
    trained(ranks.run("tests.ranks_accelerate:same", timeout=100.0, **options), 25)
