"""The Lightning callback on a GPU: same training, same logs, fewer host waits."""

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
]


class Module(pl.LightningModule):
    def __init__(self, lr: float = 2.0**-8) -> None:
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(
            nn.Linear(16, 64),
            nn.BatchNorm1d(64),
            nn.ReLU(),
            nn.Dropout(0.2),
            nn.Linear(64, 64),
            nn.ReLU(),
            nn.Linear(64, 8),
        )

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        out = self.net(x)
        loss = nn.functional.cross_entropy(out, y)
        self.log("loss", loss, prog_bar=True, on_step=True, on_epoch=True)
        self.log("acc", (out.argmax(1) == y).float().mean(), on_step=False, on_epoch=True)
        self.log("worst", loss, reduce_fx="max", on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val", nn.functional.cross_entropy(self.net(x), y))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.lr, fused=True)


class Watch(pl.Callback):
    def __init__(self) -> None:
        self.losses: list[torch.Tensor] = []
        self.metrics: list[dict[str, torch.Tensor]] = []

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.losses.append(outputs["loss"])
        self.metrics.append(dict(trainer.callback_metrics))


def fit(callbacks: list[Any], max_epochs: int = 4, **options: Any) -> tuple[Module, Watch, Any]:
    pl.seed_everything(1, verbose=False)
    module, watch = Module(), Watch()
    data = torch.utils.data.TensorDataset(torch.randn(200, 16), torch.randint(0, 8, (200,)))
    trainer = pl.Trainer(
        max_epochs=max_epochs,
        accelerator="gpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[*callbacks, watch],
        **options,
    )
    trainer.fit(
        module,
        torch.utils.data.DataLoader(data, batch_size=8, shuffle=True, pin_memory=True),
        torch.utils.data.DataLoader(data, batch_size=50),
    )
    return module, watch, trainer


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"precision": "bf16-mixed"},
        {"precision": "16-mixed"},
        {"precision": "bf16-true"},
        {"gradient_clip_val": 0.5},
        {"accumulate_grad_batches": 3, "gradient_clip_val": 0.5},
    ],
    ids=lambda o: ",".join(f"{k}={v}" for k, v in o.items()) or "32",
)
def test_training_and_logs_equal_a_run_without_the_callback(options: dict[str, Any]) -> None:
    module, watch, trainer = fit([], **options)
    callback = PyGraphCallback(compile=False)
    module2, watch2, trainer2 = fit([callback], **options)
    assert callback.report().steps_replayed > 60, str(callback.report())
    assert [float(x) for x in watch.losses] == [float(x) for x in watch2.losses]
    for mine, theirs in zip(watch.metrics, watch2.metrics, strict=True):
        assert {k: float(v) for k, v in mine.items()} == {k: float(v) for k, v in theirs.items()}
    for p, q in zip(module.state_dict().values(), module2.state_dict().values(), strict=True):
        assert torch.equal(p, q)
    assert trainer.progress_bar_metrics == trainer2.progress_bar_metrics


def test_replayed_steps_wait_for_the_device_at_most_once_for_the_bar() -> None:
    """No synchronizing call in a replayed step, but for the event of the step before."""
    seen: list[int] = []

    class Strict(pl.Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            report = (
                callback.report()
            )  # while plans are compared, the first step of another plan waits for its clock
            replaying = report.steps_replayed > 5 and all(c.settled for c in report.controllers)
            torch.cuda.set_sync_debug_mode("error" if replaying and batch_idx not in (0, 24) else "default")
            seen.append(replaying)

        def on_train_batch_end(
            self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            torch.cuda.set_sync_debug_mode("default")

    callback = PyGraphCallback(compile=False)
    try:
        fit([callback, Strict()], max_epochs=16)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert sum(seen) > 100, callback.report().controllers
