"""Numbers in the kernels of a CUDA graph: found in recorded and made-up nodes, rewritten through a made-up driver."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from pygraph_train.graphs import nodes
from pygraph_train.graphs.engine import NumbersNotFound
from pygraph_train.graphs.nodes import Node
from pygraph_train.graphs.rewriting import KernelNumber, NumberRewriter, check_sets, find_numbers

from .test_indirection import Driver, FakeGraph

BETA, DECAY, OTHER = 0.8143271, 0.0231177, 0.6651209


def double(value: float) -> bytes:
    return struct.pack("<d", value)


def single(value: float) -> bytes:
    return struct.pack("<f", value)


def kernel(*blocks: bytes, name: str = "fused") -> Node:
    return Node("kernel", name, blocks=tuple((8 * i, data) for i, data in enumerate(blocks)))


def test_a_number_is_a_whole_parameter() -> None:
    """Neither a piece of a larger one, such as the list of tensors, nor bytes of another number."""
    inside = kernel(bytes(8) + double(BETA), double(BETA)[:4], double(-BETA), double(1 - BETA))
    assert find_numbers([inside], [BETA]) == ()


def test_numbers_that_a_kernel_takes_as_floats_are_found() -> None:
    found = find_numbers([kernel(single(BETA), bytes(8)), kernel(bytes(8), double(BETA))], [BETA])
    assert found == (KernelNumber(0, 0, 4, 0), KernelNumber(1, 8, 8, 0))


@pytest.mark.parametrize(
    ("found", "sets"),
    [
        ([[0]], [[BETA]]),
        ([[1, 0], [0, 1]], [[BETA, DECAY]]),  # a group of so many parameters that it takes two launches
        ([[0, 1], [2]], [[BETA, DECAY], [OTHER]]),
        ([[0], []], [[BETA], []]),
        ([], []),
    ],
)
def test_numbers_that_are_complete(found: Sequence[Sequence[int]], sets: Sequence[Sequence[float]]) -> None:
    check_sets([("fused", numbers) for numbers in found], sets)


@pytest.mark.parametrize(
    ("found", "sets"),
    [
        ([], [[BETA]]),  # in no kernel
        ([[0]], [[BETA, DECAY]]),  # one of two
        ([[0, 0]], [[BETA]]),  # twice
        ([[0], []], [[BETA]]),  # a kernel without any
        ([[0], [1]], [[BETA, DECAY]]),  # in two halves
        ([[0, 1]], [[BETA], [DECAY]]),  # of two groups
        ([[0]], [[BETA], [DECAY]]),  # a group is missing
        ([[0]], []),  # a group that should not be stepped
    ],
)
def test_numbers_that_are_not_complete(
    found: Sequence[Sequence[int]], sets: Sequence[Sequence[float]]
) -> None:
    with pytest.raises(NumbersNotFound):
        check_sets([("fused", numbers) for numbers in found], sets)


# --- through a driver made by hand: node 0 takes its parameters one by one, node 1 as one block ------


class Refusal(int):
    name = "CUDA_ERROR_INVALID_VALUE"


@pytest.fixture
def driver_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[bytes], bytes], Driver]:
    def install(separate: list[bytes], packed: bytes) -> Driver:
        made = Driver(separate, packed)
        monkeypatch.setattr(nodes, "driver", lambda: made)
        return made

    return install


def test_successive_numbers_are_written_and_the_other_parameters_stay(driver_of: Any) -> None:
    pointers = bytes(range(8))
    driver = driver_of([pointers, double(DECAY), b"\1", single(BETA)], bytes(16))
    written = NumberRewriter(FakeGraph(), [[BETA, DECAY]], ["kernel7"])
    captured = nodes.read_nodes(1)
    written.write([0.9, 0.1])
    assert driver.seen[0] == pointers + double(0.1) + b"\1" + single(0.9)
    written.write([0.95, 0.1])
    assert driver.seen[0] == pointers + double(0.1) + b"\1" + single(0.95)
    assert nodes.read_nodes(1) == captured, "the graph's own memory was written to"
    assert 1 not in driver.seen, "a kernel without numbers was updated"


def test_a_kernel_is_updated_only_when_one_of_its_numbers_changes(
    driver_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = driver_of([double(BETA), bytes(8)], bytes(16))
    updates = []
    monkeypatch.setattr(
        driver, "cuGraphExecKernelNodeSetParams", lambda *given: (updates.append(given[1]), (0,))[1]
    )
    written = NumberRewriter(FakeGraph(), [[BETA]], ["kernel7"])
    for value in (0.9, 0.9, 0.8, 0.8, 0.9):
        written.write([value])
    assert updates == [0, 0, 0]


@pytest.mark.parametrize("names", [["kernel7"], ["kernel7", "kernel8"], ["kernel9"]])
def test_numbers_in_packed_parameters_or_in_no_kernel_are_not_found(names: list[str], driver_of: Any) -> None:
    driver_of([bytes(8), b"\1"], bytes(8) + double(BETA))
    with pytest.raises(NumbersNotFound):
        NumberRewriter(FakeGraph(), [[BETA]], names)


def test_kernels_of_other_names_are_not_looked_at(driver_of: Any) -> None:
    driver = driver_of([double(BETA)], double(BETA))
    driver.kinds += [Driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_HOST]
    NumberRewriter(FakeGraph(), [[BETA]], ["kernel7"]).write([0.5])
    assert list(driver.seen) == [0]


def test_nodes_that_cannot_be_read_are_told_as_numbers_that_are_not_found(
    driver_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = driver_of([double(BETA)], bytes(8))
    monkeypatch.setattr(driver, "cuFuncGetParamInfo", lambda *_: (Refusal(201), 0, 0))
    with pytest.raises(NumbersNotFound):
        NumberRewriter(FakeGraph(), [[BETA]], ["kernel7"])


def test_a_refused_update_raises(driver_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = driver_of([double(BETA)], bytes(8))

    monkeypatch.setattr(driver, "cuGraphExecKernelNodeSetParams", lambda *_: (Refusal(1),))
    written = NumberRewriter(FakeGraph(), [[BETA]], ["kernel7"])
    with pytest.raises(RuntimeError, match="CUDA_ERROR_INVALID_VALUE"):
        written.write([0.5])
