"""Lightning's manual optimization on a GPU: a GAN trains as it does without graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

pl = pytest.importorskip("lightning.pytorch")

from pygraph_train import PyGraphCallback  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("same_block_sizes", "matmul_precision_put_back"),
]

ACCELERATOR, ENGINE = "gpu", "cuda"

NEVER = 10**6  # warm-up steps: compiled as with graphs, but no graph is ever made


class Gan(pl.LightningModule):
    """Two networks, two optimizers that are toggled, and gradients clipped by hand where `clip` says so."""

    def __init__(self, clip: bool) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.clip = clip
        self.generator = nn.Sequential(nn.Linear(8, 64), nn.LayerNorm(64), nn.ReLU(), nn.Linear(64, 16))
        self.discriminator = nn.Sequential(nn.Linear(16, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))
        self.losses: list[torch.Tensor] = []

    def adversarial(self, out: torch.Tensor, real: bool) -> torch.Tensor:
        return nn.functional.binary_cross_entropy_with_logits(out, torch.full_like(out, float(real)))

    def update(self, optimizer: Any, loss: torch.Tensor) -> None:
        optimizer.zero_grad()
        self.manual_backward(loss)
        if self.clip:
            self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
        optimizer.step()
        self.losses.append(loss.detach())

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second = self.optimizers()
        (x,) = batch
        z = torch.randn(len(x), 8, device=self.device)
        with self.toggled_optimizer(first):
            self.update(first, self.adversarial(self.discriminator(self.generator(z)), True))
        with self.toggled_optimizer(second):
            fake = self.adversarial(self.discriminator(self.generator(z).detach()), False)
            self.update(second, fake + self.adversarial(self.discriminator(x), True))

    def configure_optimizers(self) -> Any:
        # a power of two: the learning rate is a float32 in graphs
        return [
            torch.optim.AdamW(m.parameters(), lr=2.0**-8, fused=True)
            for m in (self.generator, self.discriminator)
        ]


def fit(callback: PyGraphCallback | None, precision: str, clip: bool) -> tuple[list[torch.Tensor], str]:
    """Losses and parameters of one training, and the report as text."""
    torch.compiler.reset()
    pl.seed_everything(1, verbose=False)
    module = Gan(clip)
    data = torch.utils.data.TensorDataset(torch.randn(200, 16))
    trainer = pl.Trainer(
        max_epochs=4,
        accelerator=ACCELERATOR,
        devices=1,
        precision=precision,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[callback] if callback else [],
    )
    trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=8, shuffle=True))
    assert trainer.global_step == 200
    found = [*module.losses, *(p.detach() for p in module.parameters())]
    return [tensor.cpu() for tensor in found], str(callback.report()) if callback else ""


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
def test_graphs_of_the_optimizers_leave_what_plain_lightning_does(precision: str, clip: bool) -> None:
    if precision != "32-true" and clip:
        pytest.skip("under mixed precision Lightning clips no gradients of fused optimizers")
    expected, _ = fit(None, precision, clip)
    callback = PyGraphCallback(engine=ENGINE, compile=False)
    found, text = fit(callback, precision, clip)
    assert all(map(torch.equal, expected, found)), text
    assert callback.report().optimizer_steps_replayed > 100, text


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_graphs_of_all_phases_leave_what_their_kernels_do_without(precision: str) -> None:
    clip = precision == "32-true"
    expected, _ = fit(PyGraphCallback(engine=ENGINE, warmup_steps=NEVER), precision, clip)
    callback = PyGraphCallback(engine=ENGINE)
    found, text = fit(callback, precision, clip)
    assert all(map(torch.equal, expected, found)), text
    report = callback.report()
    assert sum(region.replays for region in report.regions()) > 400, text
    assert report.optimizer_steps_replayed > 100, text
