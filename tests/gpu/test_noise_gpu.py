"""Kernels that add in no fixed order, on a GPU: replayed where plain runs differ as well, and never without that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from replays import text_of
from torch import Tensor, nn
from torch.nn import functional as F

from pygraph_train import GraphedStep, PyGraphConfig, StepReport
from pygraph_train.step.comparing import Comparing
from pygraph_train.verification import Fingerprint, PlainRuns

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

STEPS = 60


class Scattered(nn.Module):
    """Adds many rows to few, by atomic additions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(32, 64), nn.Linear(64, 8)
        self.register_buffer("rows", torch.arange(8192) % 16)

    def forward(self, x: Tensor) -> Tensor:
        spread = self.first(x)[torch.arange(8192, device=x.device) % x.shape[0]]
        spread = spread * torch.linspace(0.1, 3.0, 8192, device=x.device).unsqueeze(1)
        zeros = torch.zeros(16, 64, device=x.device)
        return self.last(zeros.index_add(0, self.rows, spread).tanh())


class Resized(nn.Module):
    """The backward of a bilinear resize adds by atomic additions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(2, 8, 3, padding=1), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        images = self.first(x.reshape(-1, 2, 4, 4))
        larger = F.interpolate(images, size=(37, 41), mode="bilinear", align_corners=False)
        return self.last(larger.square().mean((2, 3)))


class Generated(nn.Module):
    """As the generator of a DCGAN: noise moves activations to the other side of zero now and then."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            *(nn.Linear(32, 64 * 16), nn.Unflatten(1, (64, 4, 4)), nn.BatchNorm2d(64), nn.ReLU()),
            *(nn.ConvTranspose2d(64, 32, 4, 2, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU()),
            *(nn.ConvTranspose2d(32, 3, 4, 2, 1, bias=False), nn.Tanh(), nn.Flatten(), nn.Linear(3 * 256, 8)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)  # type: ignore[no-any-return]


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 8))


def transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
    return nn.Sequential(
        nn.Unflatten(1, (1, 32)), nn.TransformerEncoder(layer, 2), nn.Flatten(), nn.Linear(32, 8)
    )


def convnet() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (2, 4, 4)),
        nn.Conv2d(2, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(128, 8),
    )


def train(make: Callable[[], nn.Module], **config: Any) -> StepReport:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = make().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2.0**-9, fused=True)
    step = GraphedStep(
        lambda x, y: F.cross_entropy(model(x), y),
        model=model,
        optimizer=optimizer,
        config=PyGraphConfig(forward="on", **config),
    )
    with step:
        for _ in range(STEPS):
            loss = step(torch.randn(16, 32, device="cuda"), torch.randint(0, 8, (16,), device="cuda"))
        assert loss.isfinite()
        return step.report()


@pytest.mark.parametrize("make", [Scattered, Resized, Generated])
def test_a_step_with_atomic_additions_is_replayed(make: Any) -> None:
    report = train(make, compile=False)
    assert report.steps_replayed >= STEPS - 15 and report.plan == "{F B O}", str(report)
    assert not [f for f in report.fallbacks if "differs" in f.reason], text_of(report)


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("make", [mlp, transformer, convnet])
def test_deterministic_steps_agree_at_once(make: Any, compile: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """No replay differs, so nothing is ever accepted that is not equal bit for bit."""
    differed: list[int] = []
    enough = PlainRuns.enough

    def counted(self: PlainRuns, found: Fingerprint) -> bool:
        differed.append(1)
        return enough(self, found)

    monkeypatch.setattr(PlainRuns, "enough", counted)
    with torch.backends.cudnn.flags(enabled=True, deterministic=True, benchmark=False):
        report = train(make, compile=compile)
    assert report.steps_replayed >= STEPS - 15 and report.plan == "{F B O}", str(report)
    assert not differed


def test_a_deterministic_step_has_no_tolerance(monkeypatch: pytest.MonkeyPatch) -> None:
    left = Comparing._left_by

    def a_little_off(self: Comparing, capture: Any) -> Fingerprint:
        capture.gradients.final[0].mul_(1 + 1e-6)
        return left(self, capture)

    monkeypatch.setattr(Comparing, "_left_by", a_little_off)
    report = train(mlp, compile=False)
    assert report.steps_replayed == 0, str(report)
    assert "runs without the graph agree bit for bit" in text_of(report)


def test_mobilevit_is_replayed() -> None:
    transformers = pytest.importorskip("transformers")
    settings = transformers.MobileViTConfig(
        image_size=64, hidden_sizes=[16, 24, 32], neck_hidden_sizes=[8, 8, 16, 16, 24, 32, 64], num_labels=8
    )

    class Images(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.make, self.net = (
                nn.Linear(32, 3 * 64),
                transformers.MobileViTForImageClassification(settings),
            )

        def forward(self, x: Tensor) -> Tensor:
            images = self.make(x).reshape(-1, 3, 64, 1) * torch.linspace(-1, 1, 64, device=x.device)
            return self.net(images).logits  # type: ignore[no-any-return]

    report = train(Images, compile=False)
    assert report.steps_replayed >= STEPS - 15 and report.plan == "{F B O}", text_of(report)
