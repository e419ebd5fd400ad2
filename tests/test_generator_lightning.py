"""Generated training runs of a Lightning Trainer are those of plain PyTorch; more by `make hunt`."""

from __future__ import annotations

import pytest

pytest.importorskip("lightning")

from generator.suite import check


@pytest.mark.skip(
    reason="hypothesis calls a case of seed 0 flaky: its first error is hidden; make hunt runs these loops"
)
@pytest.mark.parametrize("seed", range(2))
def test_generated_cases_are_equal(seed: int) -> None:
    check("lightning", 15, seed, share=0.4)
