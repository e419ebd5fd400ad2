"""Retargeted CUDA graphs compute what eager PyTorch computes, for every kernel family and both ways to patch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
pytest.importorskip("cuda.bindings", reason="needs the package cuda-bindings")

from record_nodes import WORKS, Tensors, Work, capture_twice, random  # noqa: E402

from pygraph_train.graphs import IndirectGraph, indirection, retarget, updater  # noqa: E402
from pygraph_train.graphs.cuda import CudaEngine  # noqa: E402
from pygraph_train.graphs.memory import copy_elsewhere, span  # noqa: E402
from pygraph_train.graphs.prove import prove  # noqa: E402
from pygraph_train.graphs.retarget import IndirectCudaGraph  # noqa: E402

by_name = {work.name: work for work in WORKS}


@pytest.fixture
def engine() -> Iterator[CudaEngine]:
    engine = CudaEngine(torch.device("cuda"))
    yield engine
    engine.close()


def indirect(
    engine: CudaEngine, work: Work, inputs: Tensors, prefer: str
) -> tuple[IndirectCudaGraph, Tensors, Tensors]:
    first, second, outputs, moved = capture_twice(engine, work.run, inputs)
    return engine.indirect(first, second, inputs, moved, prefer=prefer), outputs, moved


def bits(tensors: Sequence[torch.Tensor]) -> Tensors:
    return [span(tensor).view(torch.uint8).clone() for tensor in tensors]


def eager(engine: CudaEngine, work: Work, inputs: Tensors) -> Tensors:
    """Outputs and inputs after an eager run in the capture's stream."""
    mine = [copy_elsewhere(tensor) for tensor in inputs]
    with torch.no_grad(), engine.warm_up():
        outputs = work.run(*mine)
    return bits([*outputs, *mine])


def same(one: Tensors, other: Tensors) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("prefer", ["device", "host"])
@pytest.mark.parametrize("work", WORKS, ids=[work.name for work in WORKS])
def test_alternating_replays_equal_eager(engine: CudaEngine, work: Work, prefer: str) -> None:
    sets = [work.inputs(), work.inputs()]
    graph, outputs, _ = indirect(engine, work, sets[0], prefer)
    assert isinstance(graph, IndirectGraph)
    assert graph.served == set(range(len(sets[0]))), str(graph.discovery)
    assert graph.path == ("host" if work.host_only else prefer), graph.note
    expected = [eager(engine, work, inputs) for inputs in sets]
    for turn in range(50):
        inputs = [copy_elsewhere(tensor) for tensor in sets[turn % 2]]
        graph.retarget(dict(enumerate(inputs)))
        graph.replay()
        assert same(bits([*outputs, *inputs]), expected[turn % 2]), f"turn {turn}"
    graph.check()
    graph.close()
    with pytest.raises(RuntimeError, match="closed"):
        graph.replay()
    with pytest.raises(RuntimeError, match="closed"):
        graph.retarget({0: sets[0][0]})


@pytest.mark.parametrize("prefer", ["device", "host"])
def test_one_changed_input_leaves_the_others(engine: CudaEngine, prefer: str) -> None:
    work = by_name["linear"]
    inputs = work.inputs()
    graph, outputs, moved = indirect(engine, work, inputs, prefer)
    for index in (1, 0, 2, 0):
        moved[index] = random(*moved[index].shape)
        graph.retarget({index: moved[index]})
        graph.replay()
        assert same(bits([*outputs, *moved]), eager(engine, work, moved))
    graph.close()


@pytest.mark.parametrize("prefer", ["device", "host"])
def test_more_inputs_than_one_launch_takes(engine: CudaEngine, prefer: str) -> None:
    work = Work(
        "foreach",
        lambda: [random(24, dtype=torch.float32) for _ in range(updater.TABLE + 130)],
        lambda *tensors: list(torch._foreach_mul(list(tensors), 3.0)),
    )
    sets = [work.inputs(), work.inputs()]
    graph, outputs, moved = indirect(engine, work, sets[0], prefer)
    assert len(graph.served) == len(moved), str(graph.discovery)
    for turn in range(6):
        inputs = sets[turn % 2]
        graph.retarget(dict(enumerate(inputs)))
        graph.replay()
        assert same(bits([*outputs, *inputs]), eager(engine, work, inputs))
    last = len(moved) - 1
    inputs = [*sets[1][:last], sets[0][last]]
    graph.retarget({last: sets[0][last]})
    graph.replay()
    graph.check()
    assert same(bits([*outputs, *inputs]), eager(engine, work, inputs))
    graph.close()


@pytest.mark.parametrize("prefer", ["device", "host"])
@pytest.mark.parametrize("name", ["triton", "linear", "adamw", "copies"])
def test_proof_holds_and_leaves_no_trace(engine: CudaEngine, name: str, prefer: str) -> None:
    work = by_name[name]
    graph, outputs, moved = indirect(engine, work, work.inputs(), prefer)
    before = bits(moved)
    assert prove(graph, moved, lambda: outputs) == frozenset()
    assert same(bits(moved), before)
    graph.check()
    graph.close()


@pytest.mark.parametrize("prefer", ["device", "host"])
def test_proof_finds_a_planted_stale_pointer(
    engine: CudaEngine, prefer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forgetful(*captures: Any) -> indirection.Discovery:
        found = indirection.discover(*captures)
        kept = tuple(slot for slot in found.slots if slot.input != 1)
        return indirection.Discovery(kept, found.served, found.unserved, found.alignment, found.host_only)

    monkeypatch.setattr(retarget, "discover", forgetful)
    work = by_name["triton"]
    graph, outputs, moved = indirect(engine, work, work.inputs(), prefer)
    assert prove(graph, moved, lambda: outputs) == {1}
    graph.close()


def test_misaligned_address_is_refused(engine: CudaEngine) -> None:
    work = by_name["linear"]
    graph, _, moved = indirect(engine, work, work.inputs(), "device")
    crooked = random(moved[2].numel() + 1)[1:]
    assert not graph.accepts(2, crooked)
    with pytest.raises(ValueError, match="multiple of 16 bytes"):
        graph.retarget({2: crooked})
    graph.close()


def test_without_the_device_runtime_the_host_patches(
    engine: CudaEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(updater, "find_device_runtime", lambda: None)
    monkeypatch.setattr(updater, "_cubins", {})
    monkeypatch.setattr(updater, "_kernels", {})
    work = by_name["triton"]
    graph, outputs, moved = indirect(engine, work, work.inputs(), "device")
    assert graph.path == "host" and "libcudadevrt.a was not found" in str(graph.note)
    moved = work.inputs()
    graph.retarget(dict(enumerate(moved)))
    graph.replay()
    assert same(bits([*outputs, *moved]), eager(engine, work, moved))
    graph.close()


def test_graph_that_was_not_instantiated_is_so_by_its_first_replay(engine: CudaEngine) -> None:
    x = random(64)
    graph, out = engine.capture(lambda: x + 1, instantiate=False)
    assert not graph.instantiated
    graph.replay()
    assert graph.instantiated and torch.equal(out, x + 1)
    other, _ = engine.capture(lambda: x + 1, instantiate=False)
    with pytest.raises(ValueError, match="instantiate=False"):
        engine.indirect(other, graph, [x], [x])
    graph.close()
    other.close()
