"""Lightning Fabric: `PyGraphFabric().attach(fabric)`."""

from __future__ import annotations

from pygraph_train.integrations.fabric.plugin import PyGraphFabric
from pygraph_train.problems import not_the_users

__all__ = ["PyGraphFabric"]

not_the_users("lightning", "lightning_fabric", "lightning_utilities")
