"""Run one of Accelerate's own test scripts with our Accelerator in the stock class's place.

python tests/accelerate_suite.py test_sync
"""

from __future__ import annotations

import os
import runpy
import sys
from typing import Any

import accelerate
import accelerate.accelerator
from accelerate.test_utils.training import RegressionDataset

from pygraph_train import Accelerator, PyGraph


class Graphed(Accelerator):
    """Has a PyGraph whoever makes it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("plugins", [PyGraph(engine="emulated", warmup_steps=2)])
        super().__init__(*args, **kwargs)
        made.append(self)


made: list[Graphed] = []

# The scripts draw their data unseeded: once in a hundred runs, sums of two orders differ by more than they allow.
RegressionDataset.__init__.__defaults__ = (2, 3, 64, 0)
accelerate.Accelerator = accelerate.accelerator.Accelerator = Graphed
runpy.run_module(f"accelerate.test_utils.scripts.{sys.argv[1]}", run_name="__main__")
if any(accelerator.pygraph.report().to_dict()["phases_from_graphs"]["F"] for accelerator in made):
    print("forwards came from graphs")

# A thread of a gloo group that lets go of a Python object while the interpreter ends aborts the process, and
# each collective in a backward keeps one: the context that autograd left in the thread's state.
sys.stdout.flush()
os._exit(0)
