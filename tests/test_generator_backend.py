"""Generated training runs through the compile backend are those of plain PyTorch; more by `make hunt`."""

from __future__ import annotations

import pytest
from generator.suite import check


@pytest.mark.slow
@pytest.mark.timeout(900)  # a busy machine needs more than the usual limit
@pytest.mark.parametrize("seed", range(2))
def test_generated_cases_are_equal(seed: int) -> None:
    check("backend", 40, seed, share=0.6)
