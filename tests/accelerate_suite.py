"""Run one of Accelerate's own test scripts with our Accelerator in the stock class's place.

python tests/accelerate_suite.py test_sync
"""

from __future__ import annotations

import runpy
import sys
from typing import Any

import accelerate
import accelerate.accelerator

import pygraph_train.backend as backend
from pygraph_train import Accelerator, PyGraph


class Graphed(Accelerator):
    """Has a PyGraph whoever makes it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("plugins", [PyGraph(engine="emulated", warmup_steps=2)])
        super().__init__(*args, **kwargs)


accelerate.Accelerator = accelerate.accelerator.Accelerator = Graphed
runpy.run_module(f"accelerate.test_utils.scripts.{sys.argv[1]}", run_name="__main__")
if any(region.replays for region in backend.report().regions):
    print("regions replayed")
