"""How much time captures spend in the garbage collector: with a clock of its own."""

from __future__ import annotations

import pytest

from pygraph_train.graphs.garbage import Everything, Garbage

pytestmark = [pytest.mark.quick, pytest.mark.passes_without_graphs("a clock and numbers only")]


class Heap:
    """A collector whose collections of everything take half a second, and those of young objects a millisecond."""

    def __init__(self) -> None:
        self.now = 100.0
        self.generations: list[int] = []
        self.garbage = Garbage(self.collect, lambda: self.now)

    def collect(self, generation: int) -> None:
        self.generations.append(generation)
        self.now += 0.5 if generation == 2 else 0.001


def test_captures_in_a_row_collect_everything_once() -> None:
    heap = Heap()
    for _ in range(49):
        heap.garbage.collect()
        heap.now += 0.02
    assert heap.generations == [2] + 48 * [1]


def test_a_capture_a_while_later_collects_everything_again() -> None:
    heap = Heap()
    heap.garbage.collect()
    heap.now += 26.0
    heap.garbage.collect()
    assert heap.generations == [2, 2]


def test_everything_is_collected_where_memory_is_wanted() -> None:
    heap = Heap()
    for _ in range(3):
        heap.garbage.collect(Everything.ALWAYS)
    assert heap.generations == [2, 2, 2]


def test_parts_of_a_step_that_are_captured_in_a_row_collect_everything_once() -> None:
    heap = Heap()
    for _ in range(18):
        heap.garbage.collect(Everything.IN_A_ROW)
        heap.garbage.collect()
        heap.now += 0.02
    assert heap.generations == [2] + 35 * [1]
    heap.now += 2.5
    heap.garbage.collect()
    heap.garbage.collect(Everything.IN_A_ROW)
    assert heap.generations[36:] == [1, 2]


def test_collections_of_everything_take_a_fiftieth_of_the_time() -> None:
    heap, begun = Heap(), 100.0
    while heap.now < begun + 1000.0:
        heap.garbage.collect()
        heap.now += 0.1
    assert 0.5 * heap.generations.count(2) <= (heap.now - begun) / 49


def test_what_was_given_up_is_collected_before_the_next_capture() -> None:
    heap = Heap()
    for _ in range(2):
        heap.garbage.collect()
        heap.garbage.collect()
        heap.garbage.expect()
    assert heap.generations == [2, 1, 2, 1]
