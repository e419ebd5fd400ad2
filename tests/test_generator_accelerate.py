"""Generated training runs of Accelerate loops are those of plain PyTorch; more by `make hunt`."""

from __future__ import annotations

import pytest

pytest.importorskip("accelerate")

from generator.suite import check


@pytest.mark.slow
@pytest.mark.timeout(900)  # a busy machine needs more than the usual limit
@pytest.mark.parametrize("seed", range(2))
def test_generated_cases_are_equal(seed: int) -> None:
    check("accelerate", 30, seed, share=0.6)
