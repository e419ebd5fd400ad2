"""Generated training runs of `GraphedStep` are those of plain PyTorch; more by `make hunt`."""

from __future__ import annotations

import pytest
from generator.suite import check


@pytest.mark.slow
@pytest.mark.timeout(900)  # a busy machine needs more than the usual limit
@pytest.mark.parametrize("seed", range(4))
def test_generated_cases_are_equal(seed: int) -> None:
    check("graphed", 40, seed, share=0.6)


def test_a_few_generated_cases_are_equal() -> None:
    check("graphed", 5, 0, share=0.2)
