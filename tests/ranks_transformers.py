"""What each rank of `tests/ranks.py` trains with the transformers Trainer: the same with and without the library."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from test_transformers_trainer import CONFIG, arguments, bert, tokens
from training import differs, frozen
from transformers import PrinterCallback, Trainer

from pygraph_train import PyGraphTrainer, PyGraphTrainerCallback
from tests.replays import text_of

__all__ = ["same"]


def same(rank: int, *, stock: bool = False, **options: Any) -> dict[str, Any]:
    """Train with the stock Trainer, and with ours or with the callback; compare all logs and the final parameters."""
    expected, _ = _train(Trainer, **options)
    if stock:
        callback = PyGraphTrainerCallback(CONFIG)
        found, _ = _train(Trainer, callbacks=[callback], **options)
        report: Any = callback.report()
        replayed = report.optimizer_steps_replayed
    else:
        found, trainer = _train(PyGraphTrainer, pygraph=CONFIG, **options)
        report = trainer.report()
        replayed = report.whole_steps["training_step"].steps_replayed
    return {"difference": differs(expected, found), "replayed": replayed, "report": text_of(report)}


def _train(
    make: Any, *, count: int = 240, pygraph: Any = None, callbacks: Any = None, **options: Any
) -> tuple[Any, Any]:
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    torch.manual_seed(0)
    given: dict[str, Any] = {} if pygraph is None else {"pygraph": pygraph}
    given |= {} if callbacks is None else {"callbacks": callbacks}
    with tempfile.TemporaryDirectory() as folder:
        args = arguments(Path(folder), **{"ddp_find_unused_parameters": False, **options})
        trainer = make(model=bert(), args=args, train_dataset=tokens(count), eval_dataset=tokens(10), **given)
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    timed = ("runtime", "per_second")
    logs = [{k: v for k, v in row.items() if not k.endswith(timed)} for row in trainer.state.log_history]
    return frozen([logs, dict(trainer.model.named_parameters())]), trainer
