"""Generated training runs of `GraphedStep` are those of plain PyTorch; more by `make hunt`."""

from __future__ import annotations

import pytest
from generator.suite import check


@pytest.mark.parametrize("seed", range(4))
def test_generated_cases_are_equal(seed: int) -> None:
    check("graphed", 40, seed, share=0.6)
