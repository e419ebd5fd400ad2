"""Accelerate: `Accelerator(plugins=[PyGraph()])`."""

from __future__ import annotations

from pygraph_train.integrations.accelerate.plugin import Accelerator, PyGraph
from pygraph_train.problems import not_the_users

__all__ = ["Accelerator", "PyGraph"]

not_the_users("accelerate")
