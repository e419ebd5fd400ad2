"""Ctrl-C ends a training in a Trainer: the report is printed all the same."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

OPTIONS: dict[str, Any] = {"engine": "emulated", "warmup_steps": 2}


@pytest.mark.parametrize("prints", [True, False])
@pytest.mark.quick
def test_the_report_of_a_lightning_trainer(prints: bool, capsys: pytest.CaptureFixture[str]) -> None:
    pl = pytest.importorskip("lightning.pytorch")
    from lightning_training import QUIET, Module, loader

    from pygraph_train import PyGraphCallback

    class Interrupted(Module):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 9:
                raise KeyboardInterrupt

    callback = PyGraphCallback(**OPTIONS, print_report=prints)
    with pytest.raises(SystemExit):
        pl.Trainer(accelerator="cpu", max_epochs=1, callbacks=[callback], **QUIET).fit(
            Interrupted(), loader()
        )
    assert capsys.readouterr().out.count("pygraph-train: ") == prints
    assert callback.report().steps == 10 and callback.report().steps_from_graphs > 0


SCRIPT = """
import sys, torch, transformers
from pygraph_train import PyGraphConfig, PyGraphTrainer, PyGraphTrainerCallback

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.calls = torch.nn.Linear(6, 3), 0

    def forward(self, x, labels):
        return {"loss": torch.nn.functional.cross_entropy(self.net(x), labels)}

class Ends(transformers.TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 12:
            raise KeyboardInterrupt

config = PyGraphConfig(engine="emulated", warmup_steps=2)
args = transformers.TrainingArguments(
    sys.argv[1], per_device_train_batch_size=2, report_to=[], use_cpu=True, disable_tqdm=True, save_strategy="no",
    optim="adamw_torch_fused",
)
rows = [{"x": torch.randn(6), "labels": torch.tensor(1)} for _ in range(40)]
given = {"model": Model(), "args": args, "train_dataset": rows}
if sys.argv[2] == "PyGraphTrainer":
    made = PyGraphTrainer(**given, callbacks=[Ends()], pygraph=config)
else:
    made = transformers.Trainer(**given, callbacks=[PyGraphTrainerCallback(config), Ends()])
made.train()
"""


@pytest.mark.parametrize("kind", ["PyGraphTrainer", "PyGraphTrainerCallback"])
@pytest.mark.quick
def test_the_report_of_a_trainer_of_transformers(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    command = [sys.executable, "-c", SCRIPT, str(tmp_path), kind]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode and done.stderr.rstrip().endswith("KeyboardInterrupt"), done.stderr
    assert done.stdout.count("pygraph-train: ") == 1, done.stdout
    assert "ran from graphs" in done.stdout
