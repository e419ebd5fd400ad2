"""The Trainer of transformers: `callbacks=[PyGraphTrainerCallback()]`."""

from __future__ import annotations

try:
    import transformers  # noqa: F401  # here, to say what is missing
except ImportError as error:
    raise ImportError(
        "PyGraphTrainer and PyGraphTrainerCallback need transformers: pip install 'pygraph-train[transformers]'"
    ) from error

from pygraph_train.integrations.transformers.callback import PyGraphTrainerCallback
from pygraph_train.integrations.transformers.trainer import PyGraphTrainer, PyGraphTrainerMixin

__all__ = ["PyGraphTrainer", "PyGraphTrainerCallback", "PyGraphTrainerMixin"]
