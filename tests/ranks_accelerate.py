"""Accelerate with FSDP2 in each of the processes of `tests/ranks.py`."""

from __future__ import annotations

import io
import os
import runpy
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any
from unittest import mock

from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType

from pygraph_train import Accelerator

__all__ = ["runs_example", "sharded_on_cpus", "split_on_cpus"]


def runs_example(rank: int) -> str:
    """What `examples/accelerate_fsdp2.py` prints on a CPU."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    example = Path(__file__).parents[1] / "examples" / "accelerate_fsdp2.py"
    arguments = [str(example), "--engine", "emulated", "--small", "--steps", "120"]
    output = io.StringIO()
    with (
        sharded_on_cpus(),
        mock.patch.object(sys, "argv", arguments),
        mock.patch.object(sys, "path", [str(example.parent), *sys.path]),
        mock.patch.dict(os.environ, ACCELERATE_USE_CPU="true"),
        mock.patch.object(Accelerator, "end_training"),  # the processes go on
        redirect_stdout(output),
    ):
        runpy.run_path(str(example), run_name="__main__")
    return output.getvalue()


@contextmanager
def sharded_on_cpus() -> Iterator[None]:
    """Accelerate has FSDP2 on devices only. An accelerator with shards leaves variables of the environment behind."""
    stock = AcceleratorState.__init__

    def init(self: Any, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
        stock(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is None:
            return  # it exists already
        self.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP
        self.fsdp_plugin = fsdp_plugin
        if self._mixed_precision != "no":
            fsdp_plugin.set_mixed_precision(self._mixed_precision)

    with mock.patch.object(AcceleratorState, "__init__", init), mock.patch.dict(os.environ):
        yield


@contextmanager
def split_on_cpus() -> Iterator[None]:
    """Accelerate has tensor parallelism on devices only."""
    stock = AcceleratorState.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        stock(self, *args, **kwargs)
        self.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU

    with mock.patch.object(AcceleratorState, "__init__", init):
        yield
