"""Generated training runs of `GraphedStep` are those of plain PyTorch; more by `make hunt`."""

from __future__ import annotations

import pytest
from generator.suite import check


@pytest.mark.timeout(900)  # a busy machine needs more than the usual limit
@pytest.mark.parametrize("seed", range(4))
def test_generated_cases_are_equal(seed: int) -> None:
    check("graphed", 40, seed, share=0.6)
