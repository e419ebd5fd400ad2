"""Writes to Python in steps that are replayed on a GPU: they are those of plain training."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))
from test_kept_histories import KINDS as KEEPING
from test_kept_histories import Recurrent
from test_kept_histories import state_of as kept_by
from test_side_effects import KINDS, Net, state_of
from training import PlainStep, batches, differs, frozen

from pygraph_train import GraphedStep, PyGraphConfig

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

STEPS = 50


def trained(write: Callable[[Net, Any], Tensor], config: PyGraphConfig | None) -> tuple[list[Any], Any]:
    """What each step has returned and written to Python, and the step."""
    torch.manual_seed(0)
    net = Net().cuda()
    net.buf = net.buf.cuda()
    net.metric.correct, net.metric.total = net.metric.correct.cuda(), net.metric.total.cuda()
    optimizer = torch.optim.AdamW(net.parameters(), lr=2.0**-9, fused=True)

    def step_fn(batch: Any) -> Tensor:
        return write(net, batch)

    step: Any
    if config is None:
        step = PlainStep(step_fn, model=net, optimizer=optimizer)
    else:
        step = GraphedStep(step_fn, model=net, optimizer=optimizer, config=config)
    noted = []
    for x, y in batches(STEPS):
        result = step((x.cuda(), y.cuda()))
        noted.append(frozen((result.detach(), state_of(net))))
    noted.append(frozen([p.detach() for p in net.parameters()]))
    return noted, step


@pytest.mark.parametrize("verify", ["sample", "always"])
@pytest.mark.parametrize(
    "kind", [kind for kind in KINDS if kind not in ("filled_cache", "appended_loss_with_its_history")]
)
def test_writes_are_those_of_plain_training(kind: str, verify: Any) -> None:
    expected, _ = trained(KINDS[kind], None)
    found, step = trained(KINDS[kind], PyGraphConfig(compile=False, verify=verify))
    for index, (one, other) in enumerate(zip(expected, found, strict=True)):
        assert differs(one, other) is None, f"step {index}: {differs(one, other)}"
    least = 15 if kind == "every_third" else 30
    assert step.report().steps_replayed >= least, str(step.report())


@pytest.mark.parametrize("kind", ["counter", "appended_loss", "several"])
def test_writes_of_compiled_steps(kind: str) -> None:
    """Inductor's kernels round in another way; what counts is exact, and each value is of its own step."""
    expected, _ = trained(KINDS[kind], None)
    found, step = trained(KINDS[kind], PyGraphConfig(compile=True))
    assert step.report().steps_replayed >= 15, str(step.report())
    for one, other in zip(expected[:-1], found[:-1], strict=True):
        assert one[1]["n"] == other[1]["n"] and one[1]["calls"] == other[1]["calls"]
        assert len(one[1]["history"]) == len(other[1]["history"])
        assert torch.allclose(one[0], other[0], atol=1e-3)
    last = [entry[1]["history"] for entry in found[:-1]][-1]
    for index, entry in enumerate(found[:-1]):  # nothing that was kept has changed since
        kept = entry[1]["history"]
        assert differs(kept, last[: len(kept)]) is None, index


def test_losses_that_are_kept_with_their_history_keep_steps_out_of_graphs() -> None:
    """The history of the first losses belongs to the default stream, which no capture can hold."""
    write = KINDS["appended_loss_with_its_history"]
    expected, _ = trained(write, None)
    found, step = trained(write, PyGraphConfig(compile=False))
    for index, (one, other) in enumerate(zip(expected, found, strict=True)):
        assert differs(one, other) is None, f"step {index}: {differs(one, other)}"
    report = step.report()
    assert report.steps_replayed >= 30 or any("default stream" in f.reason for f in report.fallbacks), str(
        report
    )


@pytest.mark.parametrize("kind", KEEPING)
def test_autograd_graphs_of_plain_steps_that_the_model_keeps(kind: str) -> None:
    """Steps that ask whether the GPU waits are plain ones: their nodes belong to the default stream."""

    def train(config: PyGraphConfig | None) -> tuple[list[Any], Any]:
        torch.manual_seed(0)
        net = Recurrent().cuda()
        optimizer = torch.optim.AdamW(net.parameters(), lr=2.0**-9, fused=True)

        def step_fn(batch: Any) -> Tensor:
            return KEEPING[kind](net, batch)

        plain = PlainStep(step_fn, model=net, optimizer=optimizer)
        options = {"model": net, "optimizer": optimizer}
        step: Any = plain if config is None else GraphedStep(step_fn, config=config, **options)
        noted = []
        for index, (x, y) in enumerate(batches(STEPS)):
            result = (plain if index < 3 else step)((x.cuda(), y.cuda()))
            noted.append(frozen((result.detach(), kept_by(net))))
        return noted, step

    expected, _ = train(None)
    found, step = train(PyGraphConfig(compile=False))
    for index, (one, other) in enumerate(zip(expected, found, strict=True)):
        assert differs(one, other) is None, f"step {index}: {differs(one, other)}"
    assert step.report().steps_replayed >= 30, str(step.report())
