"""Lightning: `Trainer(callbacks=[PyGraphCallback()])`."""

from __future__ import annotations

try:
    import lightning.pytorch  # noqa: F401  # here, to say what is missing
except ImportError as error:
    raise ImportError(
        "PyGraphCallback needs the package `lightning`, also for the Trainer of `import pytorch_lightning`: "
        "pip install 'pygraph-train[lightning]'"
    ) from error

from pygraph_train.integrations.lightning.callback import PyGraphCallback
from pygraph_train.problems import not_the_users

__all__ = ["PyGraphCallback"]

not_the_users("lightning", "lightning_fabric", "lightning_utilities", "pytorch_lightning")
