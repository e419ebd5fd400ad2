"""On a GPU, functions that draw on the host are called before each replay, and read a batch of the device there."""

from __future__ import annotations

from typing import Any

import pytest
import test_host_functions as on_host
import torch
from test_host_draws_gpu import both
from torch import Tensor, nn

from pygraph_train.torch_private import host_functions
from pygraph_train.torch_private.host_functions import HostFunction

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(autouse=True)
def _known(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {"mask_indices": "numpy", "other_edges": "python"}
    known = [HostFunction(on_host.__name__, name, generator) for name, generator in names.items()]
    monkeypatch.setattr(host_functions, "KNOWN", (*host_functions.KNOWN, *known))


def on_device(batch: Any) -> Any:
    return batch.cuda() if isinstance(batch, Tensor) else tuple(map(on_device, batch))


def test_masks_whose_counts_change() -> None:
    batches = on_device(on_host.sequences(100))
    both(on_host.Masked, lambda net, x: net(x), list(batches), whole=30)


def test_masks_that_follow_from_the_batch() -> None:
    masks = [(torch.arange(5) < torch.tensor([[5], [3 + i % 2]])).long() for i in range(100)]
    batches = on_device(tuple(zip(on_host.sequences(100), masks, strict=True)))
    both(on_host.Masked, lambda net, given: net(*given), list(batches), whole=20)


def test_edges_that_are_not_in_the_batch() -> None:
    """The backward of an index adds in no fixed order on a GPU."""
    batches = on_device(tuple(on_host.graphs(60)))
    both(lambda: nn.Linear(6, 6), on_host.with_edges, list(batches), whole=30, close=1e-2)
