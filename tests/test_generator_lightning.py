"""Generated training runs of a Lightning Trainer are those of plain PyTorch; more by `make hunt`."""

from __future__ import annotations

import pytest

pytest.importorskip("lightning")

from generator.suite import check


@pytest.mark.slow
@pytest.mark.timeout(900)  # a busy machine needs more than the usual limit
@pytest.mark.parametrize("seed", range(2))
def test_generated_cases_are_equal(seed: int) -> None:
    check("lightning", 15, seed, share=0.4)
