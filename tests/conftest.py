"""No test leaves a switch of torch changed: another test in the same process would see it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from pygraph_train.torch_private.switches import settled_switches


def _settings() -> tuple[object, ...]:
    return (
        *settled_switches(),
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )


@pytest.fixture(autouse=True)
def _torch_is_left_as_it_was() -> Iterator[None]:
    if torch.cuda.is_available():
        torch.cuda.init()  # `settled_switches` needs it
    before = _settings()
    yield
    assert _settings() == before, "the test left a switch of torch changed"
