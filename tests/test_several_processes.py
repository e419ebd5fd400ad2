"""Two processes that train one model together: bit for bit as plain DistributedDataParallel, and never a hang."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks import Ranks, pair_of_ranks

pytestmark = pytest.mark.passes_without_graphs("ranks are processes of their own, and count their replays")

STEP = "tests.ranks_training:graphed_step"


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with pair_of_ranks() as pool:
        yield pool


def trained(found: list[dict[str, Any]], least: int) -> list[dict[str, Any]]:
    """Assert that all ranks trained as plain PyTorch does, and replayed that many steps at least."""
    for rank, told in enumerate(found):
        assert told["losses"] and told["state"], f"rank {rank} trains differently\n{told['report']}"
        assert told["replayed"] >= least, f"rank {rank}\n{told['report']}"
    assert len({told["replayed"] for told in found}) == 1
    return found


@pytest.mark.parametrize(
    ("options", "least"),
    [
        ({"clip": 0.5, "schedule": True}, 25),
        ({"accumulate": 3, "steps": 48, "optimizer": "adamw"}, 40),
        ({"bf16": True, "sizes": "ragged", "optimizer": "adamw"}, 18),
        ({"ddp": {"gradient_as_bucket_view": True}, "clip": 0.5}, 25),
        ({"ddp": {"gradient_as_bucket_view": True}, "accumulate": 2, "steps": 40}, 30),
        ({"ddp": {"bucket_cap_mb": 0.0005}, "optimizer": "adamw"}, 25),
        ({"config": {"verify": "always"}, "optimizer": "adamw"}, 25),
        ({"config": {"verify": "off"}, "accumulate": 2, "steps": 40}, 30),
        ({"config": {"fuse": "off", "optimizer": "on"}}, 0),
    ],
)
def test_steps_equal_those_of_plain_replicas(ranks: Ranks, options: dict[str, Any], least: int) -> None:
    trained(ranks.run(STEP, **options), least)


def test_another_shape_on_one_rank_only(ranks: Ranks) -> None:
    """Its steps run as they are on all ranks, and the others are replayed."""
    trained(ranks.run(STEP, sizes="one rank", optimizer="adamw"), 20)


@pytest.mark.parametrize(
    ("trap", "reason"),
    [
        ("a host read", "the value of a tensor is read on the host"),
        ("the reference fails", "ValueError: planted"),
        ("the capture fails", "out of memory during the capture"),
        ("the backward of the capture fails", "ValueError: planted"),
        ("the backup fails", "ValueError: planted"),
        ("the comparison fails", "differs from the step without a graph: planted"),
        ("graphs are off", "graphs are off there"),
    ],
)
def test_what_one_rank_cannot_do_none_does(ranks: Ranks, trap: str, reason: str) -> None:
    found = trained(ranks.run(STEP, trap=trap), 0)
    for told in found:
        assert told["replayed"] == 0, told["report"]
    assert "rank 1 runs without graphs" in found[0]["fallbacks"][0] and reason in found[0]["fallbacks"][0]


def test_hyperparameters_change_on_every_step(ranks: Ranks) -> None:
    for told in trained(ranks.run(STEP, schedule="one cycle", optimizer="adamw"), 25):
        assert told["report"].count("captured {F B O}") == 1, told["report"]


def test_numbers_that_one_rank_does_not_find_stay_on_all(ranks: Ranks) -> None:
    for told in trained(ranks.run(STEP, trap="numbers are not found"), 25):
        assert told["report"].count("captured {F B O}") == 1, told["report"]


def test_a_counter_on_one_rank_counts_in_replays(ranks: Ranks) -> None:
    trained(ranks.run(STEP, trap="a counter"), 20)


def test_a_branch_on_one_rank_is_taken_by_that_rank_alone(ranks: Ranks) -> None:
    trained(ranks.run(STEP, trap="a branch"), 20)


@pytest.mark.parametrize("trap", ["the capture fails", "the comparison fails"])
def test_what_one_rank_cannot_do_between_updates_none_does(ranks: Ranks, trap: str) -> None:
    """The ranks exchange BatchNorm's buffers in the same forwards afterwards."""
    trained(ranks.run(STEP, trap=trap, accumulate=2, steps=40), 0)


def test_a_parameter_that_moves_on_one_rank_is_captured_anew_on_all(ranks: Ranks) -> None:
    found = trained(ranks.run(STEP, trap="a parameter moves"), 18)
    assert found[0]["report"].count("captured {F B O}") == 2


@pytest.mark.slow
def test_ranks_with_different_options_are_told_at_the_start(ranks: Ranks) -> None:
    for kind, told in ranks.answers(STEP, trap="options differ"):
        assert kind == "raised", told
        assert (
            "the ranks of this training differ in the option warmup_steps: 3 on rank 0, 4 on rank 1" in told
        )


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"sizes": "one rank", "clip": 0.5}, {"trap": "the comparison fails"}])
def test_ranks_on_two_machines_vote_through_the_store(ranks: Ranks, options: dict[str, Any]) -> None:
    least = 0 if "trap" in options else 20
    found = trained(ranks.run("tests.ranks_training:on_two_machines", **options), least)
    assert all((told["replayed"] > 0) == (least > 0) for told in found)


@pytest.mark.slow
def test_a_rank_that_ends_is_named_by_the_others(ranks: Ranks) -> None:
    found = ranks.answers(STEP, trap="the process ends", timeout=30.0)
    assert found[0][0] == "raised" and "rank 1 ended before step 16" in found[0][1]


def test_a_wrapper_that_no_graph_can_hold_leaves_the_update_its_graph(ranks: Ranks) -> None:
    found = trained(ranks.run(STEP, ddp={"find_unused_parameters": True}), 0)
    assert "find_unused_parameters=True" in found[0]["report"]
    assert "F B {O}" in found[0]["report"]


def test_a_loop_that_drives_its_own_updates(ranks: Ranks) -> None:
    """Gradients of three kinds of micro-batches; evaluation, and a step that raises, in between."""
    trained(ranks.run("tests.ranks_training:driven"), 20)


def test_an_update_that_a_scaler_skips_is_skipped_on_all_ranks(ranks: Ranks) -> None:
    trained(ranks.run("tests.ranks_training:scaled"), 20)


def test_ranks_with_different_numbers_of_steps_join_as_without_graphs(ranks: Ranks) -> None:
    for told in ranks.run("tests.ranks_training:joined"):
        assert told["state"] and "Join lets each rank make its own number of steps" in told["report"], told


TWO_CALLS = pytest.mark.skipif(
    torch.__version__ < "2.13",
    reason="DDP of this torch raises an error for two calls of a model with buffers",
)


@pytest.mark.parametrize(
    ("calls", "reason"),
    [pytest.param(2, "more than once", marks=TWO_CALLS), (0, "never calls the model")],
)
@pytest.mark.slow_after(2)
def test_a_step_that_does_not_call_the_model_once(ranks: Ranks, calls: int, reason: str) -> None:
    """It trains as without the library: with the buffers of each call, or with the gradients of its rank alone."""
    for told in trained(ranks.run(STEP, calls=calls), 0):
        assert told["replayed"] == 0 and reason in told["report"], told["report"]


def test_a_communication_hook_of_the_user_is_left_to_python(ranks: Ranks) -> None:
    for report in ranks.run("tests.ranks_training:hooked"):
        assert "all phases in 0 of 12 steps" in report
        assert "the communication hook _python_hook takes the place of the all-reduce" in report


@pytest.mark.parametrize(
    ("hook", "options"),
    [
        ("fp16_compress_hook", {"accumulate": 2, "steps": 40}),
        ("fp16_compress_hook", {"clip": 0.5, "optimizer": "adamw"}),
        ("allreduce_hook", {"ddp": {"gradient_as_bucket_view": True}}),
    ],
)
def test_hooks_of_torch_that_compress_gradients_are_in_the_graph(
    ranks: Ranks, hook: str, options: dict[str, Any]
) -> None:
    trained(ranks.run(STEP, hook=hook, **options), 24)


LIGHTNING = "tests.ranks_lightning:same"


@pytest.mark.parametrize(
    "options",
    [
        {"logs": True, "validate": True},
        {"accumulate_grad_batches": 4, "gradient_clip_val": 0.1},
        {"precision": "bf16-mixed", "module": {"scheduler": "step"}},
        {"module": {"scheduler": "plateau"}, "validate": True, "gradient_clip_val": 0.5},
    ],
)
def test_a_trainer_with_ddp_trains_as_without_the_callback(ranks: Ranks, options: dict[str, Any]) -> None:
    """Losses, gradients, parameters, logged values, progress and random state of both ranks, after every batch."""
    pytest.importorskip("lightning")
    found = ranks.run(LIGHTNING, timeout=100.0, replays=30, **options)
    assert found[0] == found[1] >= 30


@pytest.mark.slow
def test_a_trainer_with_ddp_resumes(ranks: Ranks, tmp_path: Any) -> None:
    pytest.importorskip("lightning")
    found = ranks.run("tests.ranks_lightning:same_after_resuming", timeout=100.0, folder=str(tmp_path))
    assert min(found) >= 15


@pytest.mark.slow
def test_a_signal_that_one_rank_got_ends_both() -> None:
    pytest.importorskip("lightning")
    steps = []
    for ours in (False, True):
        with pair_of_ranks() as pair:
            found = pair.run("tests.ranks_lightning:ends_together", timeout=100.0, ours=ours)
        steps.append({made for made, _ in found})
        assert all((replayed > 5) == ours for _, replayed in found), found
    assert steps[0] == steps[1] and len(steps[0]) == 1


@pytest.mark.parametrize(
    ("options", "least"),
    [
        ({"clip": 0.5, "accumulate": 3, "steps": 48}, 25),
        ({"precision": "bf16", "sizes": "one rank"}, 15),
        ({"stock": True}, 5),
        ({"stock": True, "attached": True}, 5),
        ({"attached": True}, 0),
    ],
)
def test_accelerate_with_replicas_trains_as_the_stock_accelerator(
    ranks: Ranks, options: dict[str, Any], least: int
) -> None:
    pytest.importorskip("accelerate")
    for told in trained(ranks.run("tests.ranks_accelerate:same", timeout=100.0, **options), least):
        assert ("Call attach() before prepare()" in told["report"]) == ("attached" in options)


@pytest.mark.parametrize(
    ("options", "least"),
    [
        ({"gradient_accumulation_steps": 3, "max_grad_norm": 0.5}, 20),
        ({"stock": True}, 10),
        ({"num_train_epochs": 2, "eval_strategy": "epoch"}, 50),
        ({"bf16": True, "lr_scheduler_type": "cosine"}, 20),
    ],
)
@pytest.mark.slow_after(2)
def test_the_trainer_of_transformers_with_replicas_trains_as_the_stock_one(
    ranks: Ranks, options: dict[str, Any], least: int
) -> None:
    """Logs and parameters of both ranks."""
    pytest.importorskip("transformers")
    for told in ranks.run("tests.ranks_transformers:same", timeout=100.0, **options):
        assert told["difference"] is None, told["difference"]
        assert told["replayed"] >= least, told["report"]


def test_the_trainer_of_transformers_says_what_stands_in_the_way(ranks: Ranks) -> None:
    """It looks for unused parameters unless it is told not to."""
    pytest.importorskip("transformers")
    for told in ranks.run(
        "tests.ranks_transformers:same", timeout=100.0, count=120, ddp_find_unused_parameters=None
    ):
        text = " ".join(told["report"].split())
        assert told["difference"] is None and told["replayed"] == 0
        assert "looks through each step on the host" in text and "ddp_find_unused_parameters=False" in text


@pytest.mark.parametrize("strategy", ["ddp_spawn", "ddp_notebook"])
@pytest.mark.slow
def test_processes_that_lightning_starts_itself(strategy: str) -> None:
    pytest.importorskip("lightning")
    script = Path(__file__).with_name("spawned_training.py")
    done = subprocess.run(
        [sys.executable, str(script), strategy],
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert "equal: True, replays: 20" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize("shards", [False, True])
def test_manual_optimization_of_several_processes(ranks: Ranks, shards: bool) -> None:
    """The optimizer's step has a graph. Losses, gradients, parameters and logs of both ranks, after every batch."""
    pytest.importorskip("lightning")
    for replayed, report in ranks.run("tests.ranks_lightning:manual", timeout=100.0, shards=shards):
        assert replayed >= 10, report
