"""Regions of eager kernels (`compile=False`) on a GPU: the bits and the memory of plain training, and no Inductor."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from replays import text_of
from test_eager_regions import Convolutions, Experts, Images, Mixed, Tagger, of_activations
from torch import Tensor, nn

from pygraph_train import GraphedStep, PyGraphConfig, StepReport

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

LR = 2.0**-9  # exact in float32, where fused kernels of a graph hold it


@pytest.fixture(autouse=True)
def no_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("something was compiled by Inductor")

    monkeypatch.setattr("pygraph_train.regions.inductor.compile_with_inductor", refuse)
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", refuse)


@pytest.fixture(autouse=True)
def every_graph_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests ask for bits and memory: beside other processes a measured cost would say anything."""
    monkeypatch.setattr("pygraph_train.regions.measurements.TOLERANCE", 1e9)
    monkeypatch.setattr("pygraph_train.regions.measurements.GAIN", -1e9)


class Autocast(nn.Module):
    """A model under autocast, which the step enters itself."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.model = kind()

    def loss(self, *batch: Any) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return self.model.loss(*batch)


def train(
    make: Any, batches: Any, steps: int, config: PyGraphConfig | None
) -> tuple[list[Tensor], StepReport | None]:
    """Losses, then parameters, buffers and the last random number."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = make().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    step = (
        None if config is None else GraphedStep(model.loss, model=model, optimizer=optimizer, config=config)
    )
    found = []
    for batch in batches(steps):
        batch = [x.cuda() for x in batch]
        if step is not None:
            found.append(step(*batch).clone())
            continue
        optimizer.zero_grad()
        loss = model.loss(*batch)
        loss.backward()
        optimizer.step()
        found.append(loss.detach())
    found += [x.detach().clone() for x in (*model.parameters(), *model.buffers())]
    found.append(torch.randn(4, device="cuda"))
    report = None if step is None else step.report()
    if step is not None:
        step.close()
    return found, report


def same(make: Any, batches: Any, steps: int, **options: Any) -> StepReport:
    """Train plainly, twice, and with graphs: where the two plain runs agree, so does the third one."""
    runs = [train(make, batches, steps, None)[0] for _ in range(2)]
    found, report = train(make, batches, steps, PyGraphConfig(compile=False, **options))
    assert report is not None
    for index, (first, second) in enumerate(zip(*runs, strict=True)):
        assert torch.equal(first, second), (
            f"plain runs differ in entry {index}: the test needs other operations"
        )
    for index, (expected, got) in enumerate(zip(runs[0], found, strict=True)):
        assert torch.equal(expected, got), f"entry {index}: {expected} became {got}\n{report}"
    return report


def in_regions(report: StepReport, least: int) -> None:
    ran = {r.phase for r in report.regions() if r.replays >= least}
    assert {"forward", "backward"} <= ran, text_of(report)
    assert report.plan in ("{F} {B} {O}", "{F} {B} O"), str(report)
    assert "compiled" not in str(report.controllers[-1].best)


@pytest.mark.parametrize(
    "kind", [Tagger, Experts]
)  # plain runs of Images differ; parts of Graph are too small
def test_parts_around_what_depends_on_data_have_the_bits_of_plain_training(kind: Any) -> None:
    in_regions(same(kind, kind.batches, 200, forward="on"), 60)


def test_the_convolutions_of_torch_geometric_have_the_bits_of_plain_training() -> None:
    pytest.importorskip("torch_geometric")
    report = same(Convolutions, Convolutions.batches, 200)
    assert report.plan == "{F B O}" and report.steps_replayed >= 100, str(report)  # counts are read ahead


@pytest.mark.parametrize("kind", [Tagger, Images])
def test_parts_under_autocast_have_the_bits_of_plain_training(kind: Any) -> None:
    in_regions(same(lambda: Autocast(kind), kind.batches, 200, forward="on"), 60)


def test_nobody_gets_them_without_asking() -> None:
    """They may need more memory than the step had, see the last test."""
    report = same(Tagger, Tagger.batches, 200)
    assert not report.regions() and report.plan in ("F B {O}", "F B O"), str(report)
    assert "forward='on'" in " ".join(text_of(report).split()), text_of(report)


class Large(nn.Module):
    """What a forward saves is most of the memory."""

    def __init__(self) -> None:
        super().__init__()
        self.mixed, self.head = Mixed(), nn.Linear(64, 64)

    def loss(self, x: Tensor, picked: Tensor) -> Tensor:
        hidden = self.head(x)
        picked = of_activations(picked, hidden)
        return self.mixed(hidden) + hidden[picked].square().mean()

    @staticmethod
    def batches(steps: int) -> Any:
        g = torch.Generator().manual_seed(1)
        return ((torch.randn(1 << 16, 64, generator=g), torch.arange(1 << 16) < 1000) for _ in range(steps))


@pytest.mark.xfail(reason="1606 MiB where plain training reserves 940 (H100)", strict=True)
def test_the_peak_of_memory_is_that_of_plain_training() -> None:
    peaks = []
    for config in (None, PyGraphConfig(compile=False, forward="on")):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        report = train(Large, Large.batches, 60, config)[1]
        peaks.append(torch.cuda.max_memory_reserved())
    assert report is not None
    in_regions(report, 20)
    assert peaks[1] <= 1.05 * peaks[0], f"{peaks[1] >> 20} MiB instead of {peaks[0] >> 20}\n{report}"
