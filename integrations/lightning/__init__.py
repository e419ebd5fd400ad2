"""Lightning: `Trainer(callbacks=[PyGraphCallback()])`."""

from __future__ import annotations

from pygraph_train.integrations.lightning.callback import PyGraphCallback
from pygraph_train.problems import not_the_users

__all__ = ["PyGraphCallback"]

not_the_users("lightning", "lightning_fabric", "lightning_utilities", "pytorch_lightning")
