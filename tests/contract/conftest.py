"""What the tests of the contract share."""

from __future__ import annotations

import gc

import pytest
import torch

torch.set_num_threads(1)  # threads that wait for each other take longer than these models


@pytest.fixture(autouse=True)
def _earlier_tests_are_not_looked_through_for_garbage() -> None:
    """What they left in caches of Dynamo costs a fifth of a second for each `gc.collect()`."""
    gc.freeze()
