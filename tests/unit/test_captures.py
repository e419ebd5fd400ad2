"""What captures on CUDA ask of torch, where that can be seen without a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pygraph_train.graphs.cuda import begin_capture

pytestmark = pytest.mark.quick


class GraphOnTheCpu:
    """Does what torch.cuda.CUDAGraph does when a capture begins."""

    def __init__(self) -> None:
        self.seed, self.other = torch.zeros(1, dtype=torch.int64), torch.zeros(3)
        self.begun: list[Any] = []

    def capture_begin(self, pool: Any, capture_error_mode: str) -> None:
        self.seed.fill_(7)
        self.other.add_(1)
        self.begun.append((pool, capture_error_mode))


def test_a_capture_begins_without_writing_the_random_generators_state() -> None:
    graph: Any = GraphOnTheCpu()
    begin_capture(graph, (0, 1))
    assert graph.begun == [((0, 1), "thread_local")]
    assert graph.seed.item() == 0 and graph.other.tolist() == [1, 1, 1]
    graph.seed.fill_(7)  # and afterwards everything is as usual
    assert graph.seed.item() == 7
