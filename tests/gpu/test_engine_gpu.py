"""The CUDA engine keeps the contract of `graphs.engine`, above all when a capture fails."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from pygraph_train.graphs.cuda import CudaEngine
from pygraph_train.graphs.engine import CaptureError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture
def engine() -> Iterator[CudaEngine]:
    engine = CudaEngine(torch.device("cuda"))
    yield engine
    engine.close()


def test_replay_equals_eager_with_dropout(engine: CudaEngine) -> None:
    x = torch.randn(64, 64, device="cuda")
    net = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5)).cuda()
    net(x)
    graph, out = engine.capture(lambda: net(x))
    torch.manual_seed(3)
    expected = [net(x).clone() for _ in range(4)]
    state = torch.cuda.get_rng_state()
    torch.manual_seed(3)
    for want in expected:
        graph.replay()
        assert torch.equal(out, want)
    assert torch.equal(torch.cuda.get_rng_state(), state)
    assert graph.nodes > 0
    graph.close()
    with pytest.raises(RuntimeError, match="closed"):
        graph.replay()


def test_capture_executes_nothing(engine: CudaEngine) -> None:
    total = torch.zeros(4, device="cuda")
    state = torch.cuda.get_rng_state()
    engine.capture(lambda: total.add_(torch.rand(4, device="cuda")))
    assert torch.equal(total, torch.zeros(4, device="cuda"))
    assert torch.equal(torch.cuda.get_rng_state(), state)


def test_a_pool_is_destroyed_where_nobody_makes_tensors(engine: CudaEngine) -> None:
    """torch ends a process that destroys one while another is in use, as two threads may do, or a collection."""
    with engine.scratch_pool() as used, engine.scratch_pool() as gone:
        pass
    with engine.allocating_in(gone):
        torch.ones(1 << 22, device="cuda")
    held = torch.cuda.memory_reserved()
    with engine.allocating_in(used):
        del gone
        gc.collect()
        kept = torch.ones(4, device="cuda")
        during = torch.cuda.memory_reserved()
    assert during >= held > torch.cuda.memory_reserved() and kept.sum().item() == 4


def _host_read(x: torch.Tensor) -> None:
    torch.dropout(x, 0.5, True)
    x.sum().item()


def _host_copy(x: torch.Tensor) -> None:
    torch.dropout(x, 0.5, True)
    x.add_(torch.ones(4).cuda())


def _exception(x: torch.Tensor) -> None:
    torch.dropout(x, 0.5, True)
    raise KeyError("user")


def _interrupt(x: torch.Tensor) -> None:
    torch.dropout(x, 0.5, True)
    raise KeyboardInterrupt


def _out_of_memory(x: torch.Tensor) -> None:
    torch.dropout(x, 0.5, True)
    torch.empty(1 << 42, device="cuda")


@pytest.mark.parametrize(
    ("fail", "error"),
    [
        (_host_read, CaptureError),
        (_host_copy, CaptureError),
        (_exception, KeyError),
        (_interrupt, KeyboardInterrupt),
        (_out_of_memory, torch.OutOfMemoryError),
    ],
)
def test_failed_capture_leaves_everything_usable(engine: CudaEngine, fail, error) -> None:  # type: ignore[no-untyped-def]
    x = torch.zeros(4, device="cuda")
    drop = nn.Dropout(0.5)
    ones = torch.ones(1000, device="cuda")
    before, kept = engine.capture(lambda: drop(ones))
    stream, state = torch.cuda.current_stream(), torch.cuda.get_rng_state()
    with pytest.raises(error) as caught:
        engine.capture(lambda: fail(x))
    if error is CaptureError:
        assert __file__ in (caught.value.where or "")
    torch.cuda.synchronize()
    assert torch.cuda.current_stream() == stream
    assert torch.equal(torch.cuda.get_rng_state(), state)
    assert torch.equal(x, torch.zeros(4, device="cuda"))
    assert not torch.cuda.is_current_stream_capturing()
    # eager dropout, an older graph and a new one agree on the random state
    torch.manual_seed(1)
    expected = [drop(ones).clone() for _ in range(3)]
    after, fresh = engine.capture(lambda: drop(ones))
    torch.manual_seed(1)
    before.replay()
    assert torch.equal(kept, expected[0])
    assert torch.equal(drop(ones), expected[1])
    after.replay()
    assert torch.equal(fresh, expected[2])
    free = torch.cuda.memory_reserved()
    for _ in range(3):
        big = torch.empty(1 << 28, device="cuda")
        del big
        torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= free  # freed blocks go back: no capture is thought to be under way


def test_second_capture_inside_a_capture_is_refused(engine: CudaEngine) -> None:
    other = CudaEngine(torch.device("cuda"))
    with pytest.raises(RuntimeError, match="another capture is under way"):
        engine.capture(lambda: other.capture(lambda: torch.ones(1, device="cuda")))


def test_graphs_share_one_pool(engine: CudaEngine) -> None:
    def work() -> torch.Tensor:
        big = torch.ones(1 << 26, device="cuda")
        return (big * 2).sum()

    work()
    engine_graphs = [engine.capture(work)]
    torch.cuda.empty_cache()
    one = torch.cuda.memory_reserved()
    engine_graphs += [engine.capture(work) for _ in range(3)]
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() - one < 64 << 20
    for graph, out in engine_graphs:
        graph.replay()
        assert float(out) == 2 << 26


@pytest.mark.parametrize("closed", [True, False])
def test_memory_is_given_back_after_replays_under_way(closed: bool) -> None:
    """The allocator would unmap it below them: an illegal memory access."""
    for _ in range(3):
        engine = CudaEngine(torch.device("cuda", torch.cuda.current_device()))
        x = torch.randn(2048, 2048, device="cuda")

        def work(x: torch.Tensor = x) -> torch.Tensor:
            for _ in range(20):
                x = (x @ x).tanh()
            return x.sum()

        work()
        graph, result = engine.capture(work)
        for _ in range(50):
            graph.replay()
        if closed:
            graph.close()
            engine.close()
        del graph, engine, result
        torch.cuda.empty_cache()
    torch.cuda.synchronize()


def test_a_scratch_pool_shares_no_memory_with_the_usual_one(engine: CudaEngine) -> None:
    x = torch.randn(1 << 20, device="cuda")
    first, one = engine.capture(lambda: x * 2)
    with engine.scratch_pool():
        second, two = engine.capture(lambda: x * 3)
    del one
    third, three = engine.capture(lambda: x * 5)  # may take the place of `one`
    for graph in (second, first, third):
        graph.replay()
    assert torch.equal(two, x * 3) and torch.equal(three, x * 5)


def streams_used(run: Callable[[], object]) -> set[int]:
    """Streams in which `run()` has the device work."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    events = profile.profiler.kineto_results.events()  # type: ignore[union-attr]
    device = torch.autograd.DeviceType.CUDA
    names = ("vectorized", "elementwise", "kernel", "Mem", "gemm", "reduce")
    work = [e for e in events if e.device_type() == device and any(name in e.name() for name in names)]
    assert work
    return {e.device_resource_id() for e in work}


def test_nothing_is_launched_in_another_stream(engine: CudaEngine) -> None:
    """Some eight launches there, and kernels of every graph in the process start later from then on."""
    net = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5)).cuda()
    x = torch.randn(64, 64, device="cuda")

    def prepare_and_capture() -> None:
        for _ in range(3):
            net.zero_grad()
            net(x).sum().backward()
        for _ in range(3):
            graph, _ = engine.capture(lambda: net(x))
            graph.replay()

    usual = streams_used(lambda: x.mul_(1.0))
    assert len(usual) == 1
    assert streams_used(prepare_and_capture) == usual
