"""The processes that train together: what is refused there, and what they agree on."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pygraph_train.parallel.replication import replication_of, why_not_spread


def reason(problem: Any) -> str | None:
    return None if problem is None else str(problem)


def test_accelerate_says_how_it_spreads_a_training() -> None:
    plugin = pytest.importorskip("pygraph_train.integrations.accelerate.plugin")
    accelerate = pytest.importorskip("accelerate")
    kinds = accelerate.utils.DistributedType

    def why(kind: Any, precision: str = "no", *, fsdp2: bool = False) -> str | None:
        told = SimpleNamespace(distributed_type=kind, mixed_precision=precision, is_fsdp2=fsdp2)
        return reason(plugin._unsupported(told))

    assert why(kinds.NO) is None
    assert why(kinds.MULTI_GPU) is None
    assert why(kinds.DEEPSPEED) == "DEEPSPEED is not supported yet: its steps run without graphs"
    assert why(kinds.FSDP, fsdp2=True) is None
    assert why(kinds.FSDP, "fp8") == "FSDP is not supported yet: its steps run without graphs"
    assert why(kinds.NO, "fp8") == "mixed_precision='fp8' is not supported yet: its steps run without graphs"


def test_transformers_says_how_it_spreads_a_training() -> None:
    callback = pytest.importorskip("pygraph_train.integrations.transformers.callback")
    from transformers.training_args import ParallelMode

    def why(**told: Any) -> str | None:
        plain = {
            "world_size": 1,
            "n_gpu": 1,
            "deepspeed": None,
            "fsdp": [],
            "parallel_mode": "not distributed",
        }
        return reason(callback.unsupported(SimpleNamespace(**{**plain, **told})))

    assert why() is None and why(n_gpu=0) is None
    assert why(world_size=2, parallel_mode=ParallelMode.DISTRIBUTED) is None
    for told in ({"world_size": 2}, {"n_gpu": 4}):
        assert why(**told) == "training on several devices is not supported yet: its steps run without graphs"
    assert why(deepspeed="config.json") == "DeepSpeed is not supported yet: its steps run without graphs"
    assert why(fsdp=["full_shard"]) == "FSDP is not supported yet: its steps run without graphs"


def test_parameters_that_are_spread_over_a_mesh_have_no_graphs(tmp_path: Path) -> None:
    """Their operations communicate. It is told before anything is traced."""
    distributed = torch.distributed
    distributed.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh())
        assert replication_of(model).problem is None
        mesh = distributed.device_mesh.init_device_mesh("cpu", (1,))
        parallelize_module(model, mesh, {"0": ColwiseParallel()})
        told = reason(replication_of(model).problem)
        assert told == "parameters are DTensors, so calls of the model have graphs, and no whole step has one"
    finally:
        distributed.destroy_process_group()


@pytest.mark.parametrize("spread", [True, False])
def test_lightning_says_how_it_spreads_a_training(spread: bool) -> None:
    pl = pytest.importorskip("lightning.pytorch")
    strategies = pytest.importorskip("lightning.pytorch.strategies")
    from pygraph_train.integrations.lightning import callback

    def why(strategy: Any) -> str | None:
        trainer = pl.Trainer(accelerator="cpu", devices=1, strategy=strategy, logger=False, barebones=True)
        trainer.strategy._optimizers = [torch.optim.SGD([torch.zeros(1)], lr=0.1)]
        return reason(callback._unsupported(trainer, pl.LightningModule()))

    if spread:
        strategy = strategies.DDPStrategy(process_group_backend="gloo")  # it has wrapped nothing
        assert why(strategy) == "DDPStrategy is not supported yet: its steps run without graphs"
        found = why(strategies.ModelParallelStrategy(process_group_backend="gloo"))
        assert found is None or "not supported yet" not in found
    else:
        found = why("auto")
        assert found is None or "not supported yet" not in found


def test_a_loop_that_is_refused_has_the_problem_in_its_report() -> None:
    loop = pytest.importorskip("pygraph_train.step.loop")
    from pygraph_train import PyGraphConfig, PyGraphError

    problem = why_not_spread("MULTI_GPU")
    device = torch.device("cpu")
    refused = loop.Loop(PyGraphConfig(engine="emulated"), device, problem)
    assert not refused.active
    assert [f.reason for f in refused.report.fallbacks] == [problem.reason]
    with pytest.raises(PyGraphError, match="MULTI_GPU is not supported yet"):
        loop.Loop(PyGraphConfig(engine="emulated", on_failure="raise"), device, problem)
