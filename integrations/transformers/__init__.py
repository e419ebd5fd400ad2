"""The Trainer of transformers: `callbacks=[PyGraphTrainerCallback()]`."""

from __future__ import annotations

from pygraph_train.integrations.transformers.trainer import PyGraphTrainer, PyGraphTrainerCallback

__all__ = ["PyGraphTrainer", "PyGraphTrainerCallback"]
