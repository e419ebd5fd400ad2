"""Pointer indirection: which pointers are found, which inputs are refused, and that patches add up.

The parameters of captured kernels are made by hand here.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pygraph_train.graphs import IndirectionUnavailable, nodes, patch
from pygraph_train.graphs.indirection import Discovery, Slot, discover
from pygraph_train.graphs.memory import AddressRange
from pygraph_train.graphs.nodes import Node

pytestmark = pytest.mark.quick


OLD, NEW = 0x7F12_3400_0000, 0x7F56_7800_0000  # where input 0 lies in the two captures
OTHER_OLD, OTHER_NEW = 0x7F12_3480_0000, 0x7F56_7A00_0000
SIZE = 4096
RANGES = ([AddressRange(OLD, SIZE)], [AddressRange(NEW, SIZE)])
TWO = (
    [AddressRange(OLD, SIZE), AddressRange(OTHER_OLD, SIZE)],
    [AddressRange(NEW, SIZE), AddressRange(OTHER_NEW, SIZE)],
)


def kernel(*blocks: bytes | tuple[int, bytes], name: str = "k", **more: Any) -> Node:
    """A kernel node; blocks without an offset follow each other in 8-byte steps."""
    placed, at = [], 0
    for block in blocks:
        offset, data = block if isinstance(block, tuple) else (at, block)
        placed.append((offset, data))
        at = -(-(offset + len(data)) // 8) * 8
    return Node("kernel", name, (1, 1, 1, 32, 1, 1, 0), tuple(placed), **more)


def word(value: int) -> bytes:
    return struct.pack("<Q", value)


def both(make: Callable[[int, int], Sequence[Node]], ranges: Any = TWO) -> Discovery:
    """Discover in two captures that differ in the addresses of the two inputs."""
    return discover(make(OLD, OTHER_OLD), make(NEW, OTHER_NEW), *ranges)


def test_pointers_in_separate_parameters_are_found() -> None:
    found = both(lambda a, b: [kernel(word(b), word(a), struct.pack("<i", 7)), kernel(word(a))])
    assert found.served == {0, 1} and not found.unserved
    assert found.slots == (Slot(0, 0, 1, 0), Slot(0, 8, 0, 0), Slot(1, 0, 0, 0))


def test_pointers_in_packed_parameters_and_structs_are_found() -> None:
    struct_of = "<iiQdQ"
    found = both(
        lambda a, b: [kernel(struct.pack(struct_of, 3, 4, a, 0.5, b)), kernel(bytes(1000) + word(b))]
    )
    assert found.slots == (Slot(0, 8, 0, 0), Slot(0, 24, 1, 0), Slot(1, 1000, 1, 0))


def test_tensor_map_that_holds_the_address_several_times_is_found() -> None:
    def tensor_map(address: int) -> bytes:
        return word(address) + bytes(range(120))

    found = both(lambda a, b: [kernel(tensor_map(a) + word(a) + tensor_map(b) + word(a + 64) + word(b))])
    assert [(slot.offset, slot.input, slot.delta) for slot in found.slots] == [
        (0, 0, 0),
        (128, 0, 0),
        (136, 1, 0),
        (264, 0, 64),
        (272, 1, 0),
    ]
    assert found.served == {0, 1}


def test_interior_pointer_keeps_its_distance() -> None:
    found = both(lambda a, b: [kernel(word(a + 520), word(b))])
    assert found.slots[0] == Slot(0, 0, 0, 520)


def test_parameter_block_at_a_multiple_of_four_is_found() -> None:
    found = both(lambda a, b: [kernel((0, bytes(4)), (4, word(a))), kernel((4, bytes(4) + word(b)))])
    assert found.slots == (Slot(0, 4, 0, 0), Slot(1, 8, 1, 0))


def test_number_that_looks_like_an_address_is_no_slot() -> None:
    found = both(lambda a, b: [kernel(word(a), word(b), word(OLD + 8))])
    assert found.served == {0, 1}
    assert all(slot.offset != 16 for slot in found.slots)


def test_address_that_moved_otherwise_than_its_input_is_refused() -> None:
    first = [kernel(word(OLD), word(OLD + 8))]
    found = discover(first, [kernel(word(NEW), word(NEW + 16))], *RANGES)
    assert not found.served and "did not move" in found.unserved[0]


def test_address_that_only_the_second_capture_holds_is_refused() -> None:
    found = discover([kernel(word(OLD), word(5))], [kernel(word(NEW), word(NEW + 16))], *RANGES)
    assert not found.served and "did not move" in found.unserved[0]


@pytest.mark.parametrize("distance", [SIZE, -64], ids=["one past the end", "before the start"])
def test_pointer_just_outside_is_no_slot_and_refuses_the_input(distance: int) -> None:
    found = both(lambda a, b: [kernel(word(a), word(a + distance), word(b))])
    assert found.served == {1}
    assert "just outside" in found.unserved[0]


def test_memory_next_to_an_input_that_stays_is_nobodys() -> None:
    found = both(lambda a, b: [kernel(word(a), word(OLD + SIZE), word(b))])
    assert found.served == {0, 1} and len(found.slots) == 2


def test_unaligned_pointer_refuses_the_input() -> None:
    found = both(lambda a, b: [kernel(word(a), word(b), bytes(3) + word(a) + bytes(5))])
    assert found.served == {1}
    assert "not aligned" in found.unserved[0]


def test_value_across_two_blocks_is_none() -> None:
    low, high = word(OLD)[:4], word(OLD)[4:]
    found = both(lambda a, b: [kernel(word(a), word(b), (16, bytes(4) + low), (24, high))])
    assert found.served == {0, 1}


def test_copies_and_fills_are_found() -> None:
    def captured(a: int, b: int) -> list[Node]:
        copy = Node("memcpy", shape=(64, 1, 1), blocks=((0, word(b) + word(a)),))
        return [copy, Node("memset", shape=(1, 64, 1, 0), blocks=((0, word(b)),))]

    found = both(captured)
    assert found.slots == (Slot(0, 0, 1, 0), Slot(0, 8, 0, 0), Slot(1, 0, 1, 0))


def test_two_dimensional_copy_refuses_the_input() -> None:
    def captured(a: int, b: int) -> list[Node]:
        return [
            Node("memcpy", shape=(64, 4, 1), blocks=((0, word(5) + word(a)),), patchable=False),
            kernel(word(b)),
        ]

    found = both(captured)
    assert found.served == {1} and "cannot be changed" in found.unserved[0]


@pytest.mark.parametrize(
    "second",
    [
        [kernel(word(NEW))],
        [kernel(word(NEW)), kernel(word(1), name="other")],
        [kernel(word(NEW)), kernel(word(1), word(2))],
        [kernel(word(NEW)), Node("memset", blocks=((0, word(1)),))],
    ],
    ids=["count", "name", "parameters", "kind"],
)
def test_captures_of_different_work_serve_nothing(second: list[Node]) -> None:
    found = discover([kernel(word(OLD)), kernel(word(1))], second, *RANGES)
    assert not found.served and not found.slots
    assert "differ" in found.unserved[0]


def test_unreadable_node_serves_nothing() -> None:
    found = both(lambda a, b: [kernel(word(a), word(b)), Node("other", "HOST", readable=False)])
    assert not found.served
    assert "node 1 (other HOST) cannot be read" in found.unserved[0]


def test_inputs_that_share_memory_are_refused() -> None:
    ranges = tuple([*given, AddressRange(given[0].address + 1024, 512)] for given in TWO)
    found = both(lambda a, b: [kernel(word(a), word(b), word(a + 1024))], ranges)
    assert found.served == {1}
    assert "overlaps input 2" in found.unserved[0] and "overlaps input 0" in found.unserved[2]


def test_input_that_stayed_is_empty_or_is_not_used_is_refused() -> None:
    first = [
        AddressRange(OLD, SIZE),
        AddressRange(OTHER_OLD, SIZE),
        AddressRange(0, 0),
        AddressRange(1 << 40, 8),
    ]
    second = [
        AddressRange(OLD, SIZE),
        AddressRange(OTHER_NEW, SIZE),
        AddressRange(0, 0),
        AddressRange(1 << 41, 8),
    ]
    found = discover(
        [kernel(word(OLD), word(OTHER_OLD))], [kernel(word(OLD), word(OTHER_NEW))], first, second
    )
    assert found.served == {1}
    assert "same address" in found.unserved[0]
    assert "no memory" in found.unserved[2]
    assert "no captured operation" in found.unserved[3]


def test_alignment_of_the_capture_is_recorded() -> None:
    first = [AddressRange(OLD, 64), AddressRange(OTHER_OLD + 4, 64)]
    second = [AddressRange(NEW, 64), AddressRange(OTHER_NEW + 4, 64)]
    found = both(lambda a, b: [kernel(word(a), word(b + 4))], (first, second))
    assert found.alignment == (16, 4)


# --- reading and patching nodes, with a driver made by hand ------------------------------------------


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

    def instantiate(self) -> None: ...


@pytest.fixture
def driver_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[bytes], bytes], Driver]:
    def install(separate: list[bytes], packed: bytes) -> Driver:
        made = Driver(separate, packed)
        for module in (nodes, patch):
            monkeypatch.setattr(module, "driver", lambda: made)
        return made

    return install


def test_both_ways_of_passing_parameters_are_read(driver_of: Any) -> None:
    driver_of([word(OLD), struct.pack("<i", 5)], bytes(12) + word(OLD))
    separate, packed = nodes.read_nodes(1)
    assert separate.name == "kernel7" and separate.blocks == ((0, word(OLD)), (8, struct.pack("<i", 5)))
    assert packed.blocks == ((0, bytes(12) + word(OLD)),)


def test_node_of_an_unknown_kind_is_unreadable_and_an_event_is_harmless(driver_of: Any) -> None:
    driver = driver_of([word(OLD)], word(OLD))
    driver.kinds = [
        Driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_HOST,
        Driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_EMPTY,
    ]
    host, empty = nodes.read_nodes(1)
    assert not host.readable and empty.readable


def test_successive_host_patches_add_up(driver_of: Any) -> None:
    def captured(a: int, b: int) -> Driver:
        return driver_of(
            [word(a), struct.pack("<i", 5), word(b + 8)], bytes(12) + word(b) + bytes(4) + word(a)
        )

    captured(OLD, OTHER_OLD)
    first = nodes.read_nodes(1)
    driver = captured(NEW, OTHER_NEW)
    slots = (Slot(0, 0, 0, 0), Slot(0, 16, 1, 8), Slot(1, 12, 1, 0), Slot(1, 24, 0, 0))
    second = nodes.read_nodes(1)
    # 12 is no place where a compiler puts a pointer, but the patcher can write there
    found = discover(first, second, *TWO)
    assert "not aligned" in found.unserved[1]
    patcher = patch.HostPatcher(FakeGraph(), Discovery(slots, frozenset({0, 1}), {}, (16, 16)))
    patcher.patch({0: 0x1000})
    patcher.patch({1: 0x2000})
    assert driver.seen[0] == word(0x1000) + struct.pack("<i", 5) + word(0x2008)
    assert driver.seen[1] == bytes(12) + word(0x2000) + bytes(4) + word(0x1000)
    assert nodes.read_nodes(1) == second, "the graph's own memory was written to"
    patcher.close()


def test_refused_host_patch_raises(driver_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = driver_of([word(OLD)], word(OLD))

    class Refusal(int):
        name = "CUDA_ERROR_INVALID_VALUE"

    monkeypatch.setattr(driver, "cuGraphExecKernelNodeSetParams", lambda *_: (Refusal(1),), raising=True)
    patcher = patch.HostPatcher(FakeGraph(), Discovery((Slot(0, 0, 0, 0),), frozenset({0}), {}, (16,)))
    with pytest.raises(patch.PatchError, match="CUDA_ERROR_INVALID_VALUE"):
        patcher.patch({0: 64})


def test_machine_without_a_driver_is_told_in_a_sentence() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a driver here")
    with pytest.raises(IndirectionUnavailable, match="pointer indirection needs"):
        nodes.read_nodes(1)
