"""Parameter indirection: which pointers are found, what is refused, and that new addresses are written.

The parameters of captured kernels are made by hand here.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pygraph_train.graphs import IndirectionUnavailable, indirection, nodes
from pygraph_train.graphs.indirection import MovableInputs, Pointer, find_pointers
from pygraph_train.graphs.memory import AddressRange
from pygraph_train.graphs.nodes import KernelParameters, Node

pytestmark = pytest.mark.quick

ONE, TWO = 0x5A31_7000_02F0, 0x5A31_7000_24F0  # where the stand-ins lie
SIZE = 4096
RANGES = [AddressRange(ONE, SIZE), AddressRange(TWO, SIZE)]


def kernel(*blocks: bytes | tuple[int, bytes], name: str = "k", **more: Any) -> Node:
    """A kernel node; blocks without an offset follow each other in 8-byte steps."""
    placed, at = [], 0
    for block in blocks:
        offset, data = block if isinstance(block, tuple) else (at, block)
        placed.append((offset, data))
        at = -(-(offset + len(data)) // 8) * 8
    return Node("kernel", name, tuple(placed), **more)


def word(value: int) -> bytes:
    return struct.pack("<Q", value)


BOTH = kernel(word(ONE), word(TWO))


def test_pointers_in_separate_parameters_are_found() -> None:
    found = find_pointers([kernel(word(TWO), word(ONE), struct.pack("<i", 7)), kernel(word(ONE))], RANGES)
    assert found == [Pointer(0, 0, 1), Pointer(0, 8, 0), Pointer(1, 0, 0)]


def test_pointers_in_packed_parameters_and_structs_are_found() -> None:
    packed = struct.pack("<iiQdQ", 3, 4, ONE, 0.5, TWO)
    found = find_pointers([kernel(packed), kernel(bytes(1000) + word(TWO))], RANGES)
    assert found == [Pointer(0, 8, 0), Pointer(0, 24, 1), Pointer(1, 1000, 1)]


def test_a_tensor_map_that_holds_the_address_several_times_is_found() -> None:
    tensor_map = word(ONE) + bytes(range(120))
    found = find_pointers([kernel(tensor_map + word(ONE) + word(TWO))], RANGES)
    assert [(p.offset, p.input) for p in found] == [(0, 0), (128, 0), (136, 1)]


@pytest.mark.parametrize("live", range(1, 8))
def test_bytes_in_front_of_what_is_left_of_a_pointer_are_none(live: int) -> None:
    """torch leaves parameters as they were on the stack: here the last block of a launch works on tensor 46."""
    for tensor in (0, 46, 109):
        mixed = bytes([tensor] * live) + word(ONE)[live:]
        assert len(find_pointers([BOTH, kernel(mixed)], RANGES)) == 2


def test_numbers_and_other_addresses_are_none() -> None:
    more = kernel(word(0x7F12_3400_0000), struct.pack("<ii", 1, 2), word(4096), bytes(3), word(2**64 - 1))
    inside = kernel(word(ONE + 64), word(ONE - 64), word(ONE + SIZE), bytes(3) + word(TWO))
    assert len(find_pointers([BOTH, more, inside], RANGES)) == 2


def test_a_value_across_two_blocks_is_none() -> None:
    parts = kernel((0, word(ONE)[:4]), (4, word(ONE)[4:]))
    assert len(find_pointers([BOTH, parts], RANGES)) == 2


def test_an_empty_input_needs_no_pointer() -> None:
    empty = AddressRange(TWO + 2 * SIZE, 0)
    assert len(find_pointers([BOTH], [*RANGES, empty])) == 2


COPY = Node("memcpy", blocks=((0, word(TWO) + word(5)),))
FILL = Node("memset", blocks=((0, word(TWO)),))


@pytest.mark.parametrize(
    ("more", "why"),
    [
        (COPY, "cannot be replaced"),
        (FILL, "cannot be replaced"),
        (Node("other", "HOST", readable=False), "cannot be read"),
    ],
)
def test_what_is_refused(more: Node, why: str) -> None:
    with pytest.raises(IndirectionUnavailable, match=why):
        find_pointers([BOTH, more], RANGES)


def test_an_input_that_nothing_reads_is_refused() -> None:
    with pytest.raises(IndirectionUnavailable, match="no captured operation holds"):
        find_pointers([kernel(word(ONE))], RANGES)


# --- reading and writing nodes, with a driver made by hand -------------------------------------------


class Driver:
    """As much of `cuda.bindings.driver` as kernel nodes need: two kernels, one for each way to pass parameters."""

    CUgraphNodeType = SimpleNamespace(
        **{
            f"CU_GRAPH_NODE_TYPE_{name}": SimpleNamespace(name=name)
            for name in ("KERNEL", "MEMCPY", "MEMSET", "EMPTY", "WAIT_EVENT", "EVENT_RECORD", "HOST")
        }
    )
    CUresult = SimpleNamespace(CUDA_ERROR_INVALID_VALUE=1)
    CUgraph = CUgraphExec = int

    def __init__(self, separate: list[bytes], packed: bytes) -> None:
        self.layout = [(8 * i, len(data)) for i, data in enumerate(separate)]
        self._values = [ctypes.create_string_buffer(data, len(data)) for data in separate]
        self._array = (ctypes.c_void_p * len(separate))(*map(ctypes.addressof, self._values))
        self._packed = ctypes.create_string_buffer(packed, len(packed))
        self._size = ctypes.c_size_t(len(packed))
        at = [ctypes.addressof(self._packed), ctypes.addressof(self._size)]
        self._extra = (ctypes.c_uint64 * 5)(1, at[0], 2, at[1], 0)
        self.seen: dict[int, bytes] = {}
        self.kinds = [self.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL] * 2

    def cuGraphGetNodes(self, graph: int, count: int = 0) -> tuple[Any, ...]:
        return 0, list(range(count)), len(self.kinds)

    def cuGraphNodeGetType(self, node: int) -> tuple[Any, ...]:
        return 0, self.kinds[node]

    def cuGraphKernelNodeGetParams(self, node: int) -> tuple[Any, ...]:
        sizes = {f"{what}Dim{axis}": 1 for what in ("grid", "block") for axis in "XYZ"}
        array = ctypes.addressof(self._array) if node == 0 else 0
        extra = ctypes.addressof(self._extra) if node == 1 else 0
        more = {"func": 7 + node, "kern": 0, "sharedMemBytes": 0, "kernelParams": array, "extra": extra}
        return 0, SimpleNamespace(**sizes, **more)

    def cuFuncGetName(self, function: int) -> tuple[Any, ...]:
        return 0, b"kernel%d" % function

    def cuFuncGetParamInfo(self, function: int, index: int) -> tuple[Any, ...]:
        return (0, *self.layout[index]) if index < len(self.layout) else (1, 0, 0)

    def cuGraphExecKernelNodeSetParams(self, executable: int, node: int, params: Any) -> tuple[int]:
        if node == 0:
            array = (ctypes.c_uint64 * len(self.layout)).from_address(params.kernelParams)
            self.seen[0] = b"".join(
                ctypes.string_at(p, size) for p, (_, size) in zip(array, self.layout, strict=True)
            )
        else:
            self.seen[1] = nodes.packed_parameters(params.extra) or b""
        return (0,)


class FakeGraph:
    raw, raw_exec = 1, 2

    def __init__(self) -> None:
        self.kept: dict[int, KernelParameters] = {}

    def read(self) -> tuple[Node, ...]:
        return nodes.read_nodes(self.raw)

    def parameters(self, handle: int) -> KernelParameters:
        self.kept[handle] = self.kept.get(handle) or KernelParameters(self.raw_exec, handle)
        return self.kept[handle]


class Range:
    """In the place of addresses of a GPU."""

    address = 0x5A31_7000_0000
    closed = False

    def __init__(self, nbytes: int, device: int) -> None: ...

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def driver_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[bytes], bytes], Driver]:
    def install(separate: list[bytes], packed: bytes) -> Driver:
        made = Driver(separate, packed)
        for module in (nodes, indirection):
            monkeypatch.setattr(module, "driver", lambda: made)
        return made

    return install


def test_both_ways_of_passing_parameters_are_read(driver_of: Any) -> None:
    driver_of([word(ONE), struct.pack("<i", 5)], bytes(12) + word(ONE))
    separate, packed = nodes.read_nodes(1)
    assert separate.name == "kernel7" and separate.blocks == ((0, word(ONE)), (8, struct.pack("<i", 5)))
    assert packed.blocks == ((0, bytes(12) + word(ONE)),)


def test_node_of_an_unknown_kind_is_unreadable_and_an_event_is_harmless(driver_of: Any) -> None:
    driver = driver_of([word(ONE)], word(ONE))
    driver.kinds = [
        Driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_HOST,
        Driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_EMPTY,
    ]
    host, empty = nodes.read_nodes(1)
    assert not host.readable and empty.readable


def movable(monkeypatch: pytest.MonkeyPatch, *inputs: torch.Tensor) -> MovableInputs:
    monkeypatch.setattr(indirection, "_RepeatedMemory", Range)
    monkeypatch.setattr(indirection, "tensor_at", lambda address, like, nbytes: address)
    return MovableInputs(inputs)


def test_addresses_of_inputs_are_written_and_the_other_parameters_stay(
    driver_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = movable(monkeypatch, torch.zeros(64), torch.zeros(64))
    one, two = inputs.stand_ins
    driver = driver_of([word(one), struct.pack("<i", 5), word(two)], bytes(8) + word(two) + word(9))
    captured, graph = nodes.read_nodes(1), FakeGraph()
    inputs.follow(graph)
    inputs.take((), [0x1000, 0x2000])
    assert driver.seen[0] == word(0x1000) + struct.pack("<i", 5) + word(0x2000)
    assert driver.seen[1] == bytes(8) + word(0x2000) + word(9)
    driver.seen.clear()
    inputs.take((), [0x1000, 0x2000])
    assert not driver.seen, "nothing has moved"
    inputs.take((), [0x3000, 0x2000])
    assert driver.seen == {0: word(0x3000) + struct.pack("<i", 5) + word(0x2000)}, "the other kernel has none"
    assert nodes.read_nodes(1) == captured, "the graph's own memory was written to"
    memory = inputs._memory
    inputs.close()
    assert memory.closed  # type: ignore[union-attr]


def test_what_else_writes_to_a_kernel_keeps_the_addresses(
    driver_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = movable(monkeypatch, torch.zeros(64))
    driver = driver_of([word(inputs.stand_ins[0]), struct.pack("<i", 5)], bytes(8))
    graph = FakeGraph()
    inputs.follow(graph)
    inputs.take((), [0x1000])
    graph.parameters(0).memory[8] = 6
    graph.parameters(0).update()
    assert driver.seen[0] == word(0x1000) + struct.pack("<i", 6)


def test_all_addresses_are_written_again_after_a_refusal(
    driver_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = movable(monkeypatch, torch.zeros(64), torch.zeros(64))
    one, two = inputs.stand_ins
    driver = driver_of([word(one)], word(two))
    inputs.follow(FakeGraph())
    inputs.take((), [0x1000, 0x2000])

    class Refusal(int):
        name = "CUDA_ERROR_INVALID_VALUE"

    with monkeypatch.context() as patched:
        patched.setattr(driver, "cuGraphExecKernelNodeSetParams", lambda *_: (Refusal(1),), raising=True)
        for kernel in inputs._kernels:
            patched.setattr(kernel.parameters, "_set", driver.cuGraphExecKernelNodeSetParams)
        with pytest.raises(RuntimeError, match="CUDA_ERROR_INVALID_VALUE"):
            inputs.take((), [0x1000, 0x3000])
    driver.seen.clear()
    inputs.take((), [0x1000, 0x2000])
    assert driver.seen == {0: word(0x1000), 1: word(0x2000)}


def test_an_address_keeps_the_alignment_of_the_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = torch.zeros(65)
    inputs = movable(monkeypatch, memory[:64], memory[1:])
    aligned, shifted = memory.data_ptr() & 15, memory[1:].data_ptr() & 15
    assert [address & 15 for address in inputs.stand_ins] == [aligned, shifted]
    assert inputs.fit([0x1000, 0x2000]) and inputs.fit([0x1000, 0x2004])
    assert not inputs.fit([0x1004, 0x2000]) or aligned


def test_machine_without_a_driver_is_told_in_a_sentence() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a driver here")
    with pytest.raises(IndirectionUnavailable, match="pointer indirection needs"):
        nodes.read_nodes(1)
    with pytest.raises(IndirectionUnavailable, match="pointer indirection needs"):
        MovableInputs([torch.zeros(4)])
