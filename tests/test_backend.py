"""The compile backend without a GPU: the same numbers as plain PyTorch, whatever the order of calls.

Every test runs on an engine that is worse than a GPU: whatever a replay might overwrite, it does.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from backend_training import Square, guard_what_is_read
from functorch.compile import make_boxed_func
from replays import regions_ran
from torch import nn
from torch.utils.checkpoint import checkpoint

import pygraph_train.backend as backend
from pygraph_train.graphs import CaptureError
from pygraph_train.graphs.emulated import EmulatedEngine
from pygraph_train.regions import arena as arena_module
from pygraph_train.regions import inductor
from pygraph_train.regions import region as region_module
from pygraph_train.regions import region_capture as capture_module
from pygraph_train.regions.arena import Arena, Occupant
from pygraph_train.regions.blocks import Block, block_of
from pygraph_train.torch_private.inductor import compile_with_inductor
from pygraph_train.torch_private.memory import borrow_memory, storage_use_count

OPTIONS = {"engine": "emulated", "warmup_runs": 1}


class HostileEngine(EmulatedEngine):
    """Claims to share memory between graphs, so that the arena hands dead memory on.

    As on a GPU a graph holds no tensor: what its tape holds does not count. And what a backward returns lies
    where something of that size was that it had finished to read, if there is such a thing.
    """

    shares_memory = True

    def __init__(self) -> None:
        super().__init__()
        self._pool: list[Any] = []  # outlives its graphs, as a memory pool does
        self.freed: dict[Block, torch.Tensor] = {}  # what the next capture may free
        self.reused = 0

    def capture(self, fn: Callable[[], Any], *, instantiate: bool = True) -> Any:
        graph, result = super().capture(fn, instantiate=instantiate)
        if self.freed and instantiate:
            self._reuse(graph, [t for t in result if isinstance(t, torch.Tensor)])
        self._pool.append(list(result))
        return graph, result

    def _reuse(self, graph: Any, outputs: list[torch.Tensor]) -> None:
        taped = [t for operation in graph._operations for t in operation.tensors()]
        returned = {t.untyped_storage()._cdata for t in outputs}
        made: dict[int, int] = {}  # by storage: the operation that writes it first
        read: dict[Block, int] = {}  # the last one that uses it
        for number, operation in enumerate(graph._operations):
            for _, t in operation.results:
                made.setdefault(t.untyped_storage()._cdata, number)
            read |= {block_of(t): number for t in operation.tensors()}
        places = sorted(self.freed.keys() - {block_of(t) for t in outputs})
        for storage in sorted(returned & made.keys(), key=made.__getitem__):
            aliases = [t for t in (*taped, *outputs) if t.untyped_storage()._cdata == storage]
            nbytes = aliases[0].untyped_storage().nbytes()
            fitting = [p for p in places if p.nbytes == nbytes and read.get(p, -1) < made[storage]]
            if fitting:
                places.remove(fitting[0])
                lent = borrow_memory(self.freed[fitting[0]]).untyped_storage()
                for t in aliases:
                    t.data = torch.empty(0, dtype=t.dtype).set_(
                        lent, t.storage_offset(), t.size(), t.stride()
                    )
                self.reused += 1

    def use_count(self, storage: int) -> int:
        """Of a storage, without the tapes."""
        taped = [t for graph in self._graphs for operation in graph._operations for t in operation.tensors()]
        return storage_use_count(storage) - sum(t.untyped_storage()._cdata == storage for t in taped)


def poison(tensor: torch.Tensor) -> None:
    raw = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    raw.fill_(0xFF)  # NaN in every floating type, -1 in the others


def in_the_pool(occupant: Occupant) -> list[torch.Tensor]:
    """Outputs that a graph may lose to another one; its buffers are its own."""
    return [t for i, t in occupant.tensors.items() if i not in occupant.buffers]


@pytest.fixture(autouse=True)
def hostile(monkeypatch: pytest.MonkeyPatch) -> Iterator[Arena]:
    """Before a replay, everything that its graph may overwrite is overwritten; after it, what it consumed.

    So is the memory of a pool that is given back.
    """
    torch.compiler.reset()
    backend.reset()
    engine = HostileEngine()
    arena = Arena(engine)
    monkeypatch.setattr(arena_module, "storage_use_count", engine.use_count)
    monkeypatch.setitem(inductor._arenas, ("emulated", torch.device("cpu")), arena)
    ever: list[Occupant] = []
    add, plain_replay = arena.add, capture_module.RegionCapture.replay
    before_capture = arena.before_capture

    def making_room(consumed: Occupant | None, apart: bool) -> frozenset[Block]:
        owned = consumed is not None and consumed.owned
        keeps = before_capture(consumed, apart)
        engine.freed = {}
        here = consumed is not None and consumed.pool == arena.pool(apart)  # not in a pool that was given up
        if consumed is not None and owned and not consumed.owned and here:
            engine.freed = {block_of(t): t for t in in_the_pool(consumed)}
        return keeps

    release = arena._release_pools

    def releasing() -> None:
        before = {pool for pool, _ in arena._retired}
        release()
        gone = before - {pool for pool, _ in arena._retired}
        for occupant in ever:
            if occupant.pool in gone:
                for tensor in in_the_pool(occupant):
                    poison(tensor)

    def noted(occupants: tuple[Occupant, ...]) -> None:
        ever.extend(occupants)
        add(occupants)

    def replay(
        self: capture_module.RegionCapture, inputs: list[Any], begins: Callable[[], None]
    ) -> list[Any]:
        spared: set[Block] = set(self.occupant.keeps)
        if self.consumes is not None:
            spared |= self.consumes.blocks
        for occupant in ever:  # also what the arena has forgotten
            if occupant.pool == self.occupant.pool and not occupant.blocks <= spared:
                for tensor in in_the_pool(occupant):
                    if block_of(tensor) not in spared:
                        poison(tensor)
        outputs = plain_replay(self, inputs, begins)
        if self.consumes is not None:
            for tensor in in_the_pool(self.consumes):
                if block_of(tensor) not in self.occupant.blocks:
                    poison(tensor)  # what is a gradient now is its own
        return outputs

    monkeypatch.setattr(arena, "add", noted)
    monkeypatch.setattr(arena, "before_capture", making_room)
    monkeypatch.setattr(arena, "_release_pools", releasing)
    monkeypatch.setattr(capture_module.RegionCapture, "replay", replay)
    yield arena
    torch.compiler.reset()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(F.dropout(F.gelu(self.norm(self.first(x))), 0.3, self.training))


class Broken(Net):
    """A graph break in the middle: two forwards, two backwards."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = F.gelu(self.norm(self.first(x)))
        torch._dynamo.graph_break()
        return self.last(F.dropout(hidden, 0.3, self.training))


class Checkpointed(Net):
    """Without the BatchNorm, whose statistics eager checkpointing updates twice and torch.compile once."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = checkpoint(lambda t: F.gelu(self.first(t)).cos(), x, use_reentrant=False)
        return self.last(hidden)


def net(kind: type[nn.Module] = Net) -> nn.Module:
    torch.manual_seed(0)
    return kind()


def compiled(model: Any, **options: Any) -> Any:
    return torch.compile(model, backend="pygraph", options={**OPTIONS, **options})


def batches(n: int, size: int = 5) -> list[tuple[torch.Tensor, torch.Tensor]]:
    g = torch.Generator().manual_seed(1)
    return [(torch.randn(size, 6, generator=g), torch.randint(0, 3, (size,), generator=g)) for _ in range(n)]


def regions(phase: str) -> list[backend.RegionRecord]:
    return [r for r in backend.report().regions if r.phase == phase]


def graphed_regions(arena: Arena) -> list[region_module.Region]:
    """Those that have a graph, by name."""
    owners = [o for o in arena.owners() if isinstance(o, region_module.Region)]
    return sorted(owners, key=lambda region: region.spec.name)


def replays(phase: str) -> int:
    return sum(r.replays for r in regions(phase))


Body = Callable[[nn.Module, Callable[..., Any], torch.optim.Optimizer], list[torch.Tensor]]


def same_as_plain(
    body: Body,
    kind: type[nn.Module] = Net,
    without_graphs: bool = False,
    *,
    least: int = 0,
    refused: str | None = None,
    **options: Any,
) -> None:
    """`body(model, call, optimizer)` must give the same tensors and leave the same model and random state.

    Graphs of regions have to run `least` times, or `refused` says why they cannot.
    `without_graphs` compares with the compiled model instead, where compiling itself makes a difference.
    """
    results = []
    plain = (lambda m: compiled(m, warmup_runs=10**6, direct=False)) if without_graphs else (lambda m: m)
    for wrap in (plain, lambda m: compiled(m, **options)):
        torch.compiler.reset()
        backend.reset()
        model = net(kind)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        torch.manual_seed(7)
        values = [v.clone() for v in body(model, wrap(model), optimizer)]
        results.append([*values, *model.state_dict().values(), torch.get_rng_state()])
    for number, (want, got) in enumerate(zip(*results, strict=True)):
        assert torch.equal(want, got), f"value {number}"
    regions_ran(least, refused)


def update(loss: torch.Tensor, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    """Backward and a step of the optimizer. Returns the loss."""
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def train(call: Callable[..., Any], optimizer: torch.optim.Optimizer, steps: int = 8) -> list[torch.Tensor]:
    losses = []
    for x, y in batches(steps):
        loss = F.cross_entropy(call(x), y)  # alive during the next forward, as in the usual loop
        losses.append(update(loss, optimizer))
    return losses


class Turned(nn.Module):
    """Dropout of what lies transposed in memory, and of everything."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dropped = F.dropout(self.first(x).t(), 0.3, self.training).t()
        return self.last(dropped + F.dropout(dropped, 1.0, self.training))


def test_dropout_of_a_transposed_tensor_draws_the_same_mask() -> None:
    same_as_plain(lambda model, call, opt: train(call, opt, 12), Turned, least=17)
    assert replays("forward") >= 8


def accumulating(steps: int, set_to_none: bool = True) -> Body:
    """Groups of four micro-batches."""

    def body(model: nn.Module, call: Any, opt: torch.optim.Optimizer) -> list[torch.Tensor]:
        losses = []
        for step, (x, y) in enumerate(batches(steps)):
            loss = F.cross_entropy(call(x), y) / 4
            loss.backward()
            losses.append(loss.detach())
            if step % 4 == 3:
                opt.step()
                opt.zero_grad(set_to_none=set_to_none)
        return losses

    return body


@pytest.mark.parametrize("indirection", ["copy", "device"])
@pytest.mark.parametrize("kind", [Net, Broken, Checkpointed])
def test_training_equals_plain_training_bit_for_bit(kind: type[nn.Module], indirection: str) -> None:
    same_as_plain(lambda model, call, opt: train(call, opt), kind, indirection=indirection, least=11)
    assert len(regions("forward")) == len(regions("backward")) == (2 if kind is Broken else 1)
    for region in backend.report().regions:
        assert region.replays >= 5 and region.captures == 1, region


def test_gradients_of_autograd_grad_kept_for_many_steps_keep_their_values() -> None:
    def body(model: nn.Module, call: Any, opt: torch.optim.Optimizer) -> list[torch.Tensor]:
        kept, values = [], []
        for step, (x, y) in enumerate(batches(28)):
            grads = torch.autograd.grad(F.cross_entropy(call(x), y), list(model.parameters()))
            if step % 4 == 0:
                kept.append(grads[2])  # the very object that the backward returned
            if step % 4 == 1:
                grads[0].requires_grad_()  # the next one must not
            values += [g.detach().clone() for g in grads]
            assert not any(g.requires_grad for g in grads[1:])
            assert grads[0].requires_grad == (step % 4 == 1)
        return values + kept

    same_as_plain(body, least=40)
    # the gradients of the step before are alive in each step: after four graphs for as many addresses,
    # copies are handed out
    assert replays("backward") >= 20


@pytest.mark.parametrize("kept", [0, 1, 3])
@pytest.mark.parametrize("direct", [True, False])
def test_gradients_in_reused_memory_may_be_kept(hostile: Arena, direct: bool, kept: int) -> None:
    """How many steps they are kept for: the very objects that the backward returned."""

    def body(model: nn.Module, call: Any, opt: torch.optim.Optimizer) -> list[torch.Tensor]:
        alive: list[Any] = []
        values = []
        for x, _ in batches(32, size=6):
            alive.append(torch.autograd.grad(call(x).square().sum(), list(model.parameters())))
            if len(alive) > kept:
                values += [gradient.clone() for gradient in alive.pop(0)]
        return values

    same_as_plain(body, Square, direct=direct, least=40)
    assert hostile.engine.reused >= 2  # type: ignore[attr-defined]
    assert replays("backward") >= 10


def test_gradients_in_reused_memory_are_taken_without_a_copy(hostile: Arena) -> None:
    taken: list[int] = []

    def body(model: nn.Module, call: Any, opt: torch.optim.Optimizer) -> list[torch.Tensor]:
        losses = []
        for x, _ in batches(12, size=6):
            losses.append(update(call(x).square().sum(), opt))
        call(x).square().sum().backward()
        taken.extend(p.grad.data_ptr() for p in model.parameters())  # type: ignore[union-attr]
        return losses

    same_as_plain(body, Square, least=19)
    assert hostile.engine.reused >= 2  # type: ignore[attr-defined]
    (backward,) = [o for o in hostile._occupants if o.owner.record.phase == "backward"]  # type: ignore[attr-defined]
    assert len(backward.tensors) == len(list(Square().parameters()))
    assert set(taken[-len(backward.tensors) :]) == {t.data_ptr() for t in backward.tensors.values()}


def test_inputs_served_by_indirection_are_not_copied() -> None:
    # all batches are alive at once: no two share an address
    same_as_plain(lambda model, call, opt: train(call, opt), indirection="device", least=11)
    (forward,), (backward,) = regions("forward"), regions("backward")
    assert forward.decision == "graph, indirect" and forward.copied_bytes == 0, forward
    assert forward.patched_pointers == 1, forward
    # the batch is saved for the gradient of the first weight, and read by the backward where it lies
    assert backward.copied_bytes == 0 and backward.patched_pointers >= 1, backward


@pytest.mark.notices("inputs of regions are not copied")
@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradient_accumulation_pytorch_169545(set_to_none: bool) -> None:
    """reduce-overhead: "accessing tensor output of CUDAGraphs that has been overwritten"."""
    same_as_plain(accumulating(16, set_to_none), least=19)
    assert replays("forward") >= 10 and replays("backward") >= 10


def test_accumulation_on_an_engine_that_frees_the_memory_of_closed_graphs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(inductor._arenas, ("emulated", torch.device("cpu")), Arena(EmulatedEngine()))
    same_as_plain(accumulating(48), least=75)


def test_outputs_converted_to_float32_accelerate_2645() -> None:
    """Accelerate converts low-precision outputs outside the compiled model, which reads them later."""

    def body(model: nn.Module, call: Any, opt: torch.optim.Optimizer) -> list[torch.Tensor]:
        kept, losses = [], []
        for x, y in batches(8):
            with torch.autocast("cpu", torch.bfloat16):
                out = call(x)
            out = out.float()
            kept.append(out)  # evaluation loops gather outputs over many steps
            losses.append(update(F.cross_entropy(out, y), opt))
        return losses + kept

    same_as_plain(body, without_graphs=True, least=11)
    assert replays("forward") >= 5


def test_a_compiled_function_reads_what_another_returned_pytorch_122192() -> None:
    """reduce-overhead: "accessing tensor output of CUDAGraphs that has been overwritten", after two runs of one."""
    first = torch.compile(torch.cos, backend="pygraph", options=OPTIONS)
    second = torch.compile(torch.sin, backend="pygraph", options=OPTIONS)
    for number in range(8):
        for repeat in range(2):
            x = first(torch.full((5,), float(number + repeat)))
        assert torch.equal(second(x), torch.full((5,), float(number + 1)).cos().sin())
    assert replays("inference") >= 10


def test_validation_after_training_and_training_again_pytorch_128218() -> None:
    def body(model: nn.Module, call: Any, opt: torch.optim.Optimizer) -> list[torch.Tensor]:
        values = []
        for _ in range(3):
            model.train()
            values += train(call, opt, 5)
            model.eval()
            with torch.no_grad():
                values += [call(x) for x, _ in batches(5)]
        return values

    same_as_plain(body, least=30)
    assert replays("inference") >= 10 and replays("forward") >= 10


@pytest.mark.parametrize("dynamic", [True, False])
def test_a_shape_that_never_returns_is_not_captured_pytorch_196385(dynamic: bool) -> None:
    model = net()
    call = torch.compile(model.eval(), backend="pygraph", options=OPTIONS, dynamic=dynamic)
    with torch.no_grad(), torch._dynamo.config.patch(recompile_limit=64):
        for size in range(2, 26):
            x = torch.randn(size, 6)
            assert torch.equal(call(x), model(x))
        assert sum(r.captures for r in regions("inference")) == 0
        for _ in range(4):
            x = torch.randn(7, 6)
            assert torch.equal(call(x), model(x))
    assert sum(r.captures for r in regions("inference")) == 1


def test_returning_shapes_keep_at_most_max_signatures_graphs(hostile: Arena) -> None:
    model = net().eval()
    call = torch.compile(model, backend="pygraph", options={**OPTIONS, "max_signatures": 2}, dynamic=True)
    with torch.no_grad():
        for _ in range(4):
            for size in (3, 4, 5, 6):
                x = torch.randn(size, 6)
                assert torch.equal(call(x), model(x))
    assert len(hostile._occupants) <= 2
    regions_ran(5)


def test_two_forwards_before_the_first_backward() -> None:
    def body(model: nn.Module, call: Any, opt: torch.optim.Optimizer) -> list[torch.Tensor]:
        losses = []
        data = batches(16)
        for (x1, y1), (x2, y2) in zip(data[::2], data[1::2], strict=True):
            first, second = F.cross_entropy(call(x1), y1), F.cross_entropy(call(x2), y2)
            first.backward()
            second.backward()
            opt.step()
            opt.zero_grad()
            losses += [first.detach(), second.detach()]
        return losses

    same_as_plain(body, least=20)
    assert replays("forward") >= 8 and replays("backward") >= 8


def test_many_pending_forwards_are_all_correct() -> None:
    def body(model: nn.Module, call: Any, opt: torch.optim.Optimizer) -> list[torch.Tensor]:
        losses = []
        for _ in range(3):
            pending = [F.cross_entropy(call(x), y) for x, y in batches(9)]
            for loss in reversed(pending):
                loss.backward()
            opt.step()
            opt.zero_grad()
            losses += [p.detach() for p in pending]
        return losses

    same_as_plain(body, least=9)


def test_a_backward_that_never_comes() -> None:
    def body(model: nn.Module, call: Any, opt: torch.optim.Optimizer) -> list[torch.Tensor]:
        values = []
        for step, (x, y) in enumerate(batches(12)):
            loss = F.cross_entropy(call(x), y)
            values.append(update(loss, opt) if step % 3 else loss.detach())
        return values

    same_as_plain(body, least=15)
    assert replays("forward") >= 8 and replays("backward") >= 4


def test_a_retained_graph_runs_backward_twice() -> None:
    def body(model: nn.Module, call: Any, opt: torch.optim.Optimizer) -> list[torch.Tensor]:
        values = []
        for step, (x, y) in enumerate(batches(10)):
            loss = F.cross_entropy(call(x), y)
            if step % 2:
                loss.backward(retain_graph=True)
            values.append(update(loss, opt))
        return values

    # torch refuses retain_graph with donated buffers, and names this setting
    with torch._functorch.config.patch(donated_buffer=False):
        same_as_plain(body, least=14)
    assert replays("backward") >= 5


def test_gradients_kept_for_many_steps_keep_their_values() -> None:
    def body(model: nn.Module, call: Any, opt: torch.optim.Optimizer) -> list[torch.Tensor]:
        kept = []
        for x, y in batches(12):
            F.cross_entropy(call(x), y).backward()
            kept += [p.grad for p in model.parameters()]
            opt.step()
            opt.zero_grad()
        return kept

    same_as_plain(body, least=12)


def test_outputs_that_share_memory_still_share_it() -> None:
    def body(model: nn.Module, call: Any, opt: torch.optim.Optimizer) -> list[torch.Tensor]:
        def two(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            out = model(x)
            return out, out[:, :2].t()

        run = compiled(two) if call is not model else two
        values = []
        with torch.no_grad():
            for x, _ in batches(6):
                out, view = run(x)
                out.add_(1)
                values += [out, view]
        return values

    same_as_plain(body, least=4)


def test_a_cache_given_as_argument_is_written_in_place() -> None:
    def step(cache: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        cache.mul_(0.9).add_(x.sum())
        return cache * 2

    run = compiled(step)
    with torch.no_grad():
        for cache_want in (torch.zeros(3), torch.ones(3)):
            cache_got = cache_want.clone()
            for x, _ in batches(6):
                assert torch.equal(step(cache_want, x), run(cache_got, x))
                assert torch.equal(cache_want, cache_got)
    assert replays("inference") >= 8


def test_parameters_that_move_are_not_read_at_their_old_address() -> None:
    def body(model: nn.Module, call: Any, opt: torch.optim.Optimizer) -> list[torch.Tensor]:
        values = []
        for step, (x, y) in enumerate(batches(24)):
            if step % 6 == 5:
                for p in model.parameters():
                    p.data = p.data.clone() * 1.5
            loss = F.cross_entropy(call(x), y)
            values.append(update(loss, opt))
        return values

    same_as_plain(body, least=30)
    assert replays("forward") >= 5


def test_two_threads_share_a_model() -> None:
    model = net().eval()
    call = compiled(model)
    failures: list[str] = []

    def work(seed: int) -> None:
        g = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for _ in range(20):
                x = torch.randn(5, 6, generator=g)
                if not torch.equal(call(x), model(x)):
                    failures.append(f"thread {seed}")

    work(0)
    threads = [threading.Thread(target=work, args=(seed,)) for seed in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert replays("inference") > 20


def test_inside_an_outer_capture_a_region_runs_its_kernels(hostile: Arena) -> None:
    model = net().eval()
    call = compiled(model)
    x = torch.randn(5, 6)
    with torch.no_grad():
        for _ in range(4):
            call(x)
        graph, out = hostile.engine.capture(lambda: call(x))
        x.copy_(torch.randn(5, 6))
        graph.replay()
        assert torch.equal(out, model(x))


def reads_the_host(x: torch.Tensor) -> torch.Tensor:
    return x.nonzero().sum() + x


def test_what_cannot_be_captured_runs_as_compiled_and_says_why() -> None:
    call = compiled(reads_the_host, transform=False)
    with torch.no_grad(), torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        for x, _ in batches(5):
            assert torch.equal(call(x), reads_the_host(x))
    (region,) = regions("inference")
    assert region.decision == "plain" and region.plain_runs == 5
    assert "nonzero" in region.reason and "test_backend.py" in region.reason


def test_a_compile_that_fails_with_kernels_together_is_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    entered = []

    @contextmanager
    def failing() -> Iterator[None]:
        entered.append(True)
        yield
        raise AssertionError("no such tiling\nand a page about it")

    monkeypatch.setattr(inductor, "small_ends_together", failing)
    same_as_plain(lambda model, call, opt: train(call, opt), least=11)
    rows = backend.report().regions
    assert len(entered) == len(rows) == 2
    assert all(row.decision == "graph" and row.replays >= 4 for row in rows)
    told = "small kernels were not put together, which failed: AssertionError: no such tiling"
    assert all(told in row.left for row in rows)
    entered.clear()
    same_as_plain(lambda model, call, opt: train(call, opt), transform=False, least=11)
    assert not entered


def test_on_failure_raise_raises() -> None:
    call = compiled(reads_the_host, transform=False, on_failure="raise")
    with torch.no_grad(), torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        call(batches(1)[0][0])
        with pytest.raises(CaptureError, match="nonzero"):
            call(batches(1)[0][0])


def test_unknown_options_name_the_allowed_ones() -> None:
    x = torch.zeros(2, 6)
    with pytest.raises(
        Exception, match="no option 'engin'; the options are: engine, phases, compile, transform, direct"
    ):
        torch.compile(net(), backend="pygraph", options={"engin": "cuda"})(x)
    with pytest.raises(TypeError, match="no option 'engin'"):
        backend.compile(net(), engin="cuda")
    with pytest.raises(ValueError, match="engine='gpu' of backend 'pygraph' is not allowed"):
        backend.compile(net(), engine="gpu")
    with pytest.raises(Exception, match="takes options, no mode"):
        torch.compile(net(), backend="pygraph", mode="reduce-overhead")(x)


def test_settings_of_inductor_are_checked() -> None:
    with pytest.raises(
        ValueError, match="Inductor has no setting 'max_autotun'; did you mean 'max_autotune'"
    ):
        backend.compile(net(), inductor={"max_autotun": True})
    with pytest.raises(ValueError, match="is not for you to set"):
        backend.compile(net(), inductor={"triton.cudagraphs": True})


def test_settings_of_inductor_hold_for_forward_and_backward() -> None:
    import torch._inductor.config as config

    seen: list[tuple[str, Any]] = []

    def build(compile_kernels: Any, gm: Any, inputs: Any, traced: Any) -> Any:
        seen.append((traced.phase, config.combo_kernels))
        return make_boxed_func(gm.forward)

    def compiler(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        return compile_with_inductor(gm, inputs, build, {"combo_kernels": True})

    model = net()
    torch.compile(model, backend=compiler)(batches(1)[0][0]).sum().backward()
    assert seen == [("forward", True), ("backward", True)]
    assert not config.combo_kernels


@pytest.mark.slow
def test_without_cuda_the_default_engine_is_plain_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYGRAPH_DISABLE", "1")
    model = net().eval()
    x = torch.randn(3, 6)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(model, backend="pygraph")(x), model(x))
    assert not backend.report().regions


PHASES = pytest.mark.parametrize("phases", ["forward", "backward"])


def only(phases: str, least: int) -> None:
    """Assert that the one phase ran from graphs, and the other one never did."""
    other = "backward" if phases == "forward" else "forward"
    assert replays(phases) >= least, backend.report()
    assert not replays(other) and not any(r.captures for r in regions(other))
    for region in regions(other):
        assert region.decision == "plain" and region.reason == f"phases='{phases}' is set"


@PHASES
@pytest.mark.parametrize("indirection", ["copy", "device"])
@pytest.mark.parametrize("kind", [Net, Broken, Checkpointed])
def test_one_phase_from_graphs(kind: type[nn.Module], indirection: str, phases: str) -> None:
    same_as_plain(
        lambda model, call, opt: train(call, opt, 24), kind, phases=phases, indirection=indirection, least=18
    )
    only(phases, 20)
    assert sum(r.captures for r in regions(phases)) <= (4 if kind is Broken else 2)


@PHASES
@pytest.mark.parametrize("set_to_none", [True, False])
def test_accumulation_with_one_phase_from_graphs(set_to_none: bool, phases: str) -> None:
    same_as_plain(accumulating(32, set_to_none), phases=phases, least=20)
    only(phases, 20)


@PHASES
@pytest.mark.parametrize("pending", [2, 9])
def test_pending_forwards_with_one_phase_from_graphs(pending: int, phases: str) -> None:
    def body(model: nn.Module, call: Any, opt: torch.optim.Optimizer) -> list[torch.Tensor]:
        data, losses = batches(5 * pending), []
        for start in range(0, len(data), pending):
            group = [F.cross_entropy(call(x), y) for x, y in data[start : start + pending]]
            for loss in reversed(group):
                loss.backward()
            opt.step()
            opt.zero_grad()
            losses += [loss.detach() for loss in group]
        return losses

    same_as_plain(body, phases=phases, least=7)
    only(phases, 7)


@PHASES
def test_backwards_that_come_never_or_twice_with_one_phase_from_graphs(phases: str) -> None:
    def body(model: nn.Module, call: Any, opt: torch.optim.Optimizer) -> list[torch.Tensor]:
        kept, values = [], []
        for step, (x, y) in enumerate(batches(24)):
            loss = F.cross_entropy(call(x), y)
            if step % 5 == 4:
                loss.backward(retain_graph=True)
            if step % 3:
                loss.backward()
                kept += [p.grad for p in model.parameters()]
                opt.step()
                opt.zero_grad()
            values.append(loss.detach())
        return values + kept

    with torch._functorch.config.patch(donated_buffer=False):
        same_as_plain(body, phases=phases, least=11)
    only(phases, 8)


class HandsOut(torch.autograd.Function):
    """Its gradient is the very tensor that its forward has saved."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x.sin())
        return x.cos()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (saved,) = ctx.saved_tensors
        return saved


class Handed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(6)), nn.Parameter(torch.zeros(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * HandsOut.apply(self.scale) + self.shift)


@pytest.mark.parametrize("phases", ["both", "forward", "backward"])
def test_what_a_forward_saved_may_be_a_gradient(phases: str) -> None:
    def body(model: nn.Module, call: Any, opt: torch.optim.Optimizer) -> list[torch.Tensor]:
        kept: list[torch.Tensor] = []
        for x, y in batches(24):
            kept += torch.autograd.grad(F.cross_entropy(call(x), y), [model.scale, model.shift])
            kept.append(update(F.cross_entropy(call(x), y), opt))
        return kept

    for each in (body, accumulating(32)):
        same_as_plain(each, Handed, phases=phases, least=20)
        assert replays("backward" if phases == "backward" else "forward") >= 20


def test_a_backward_alone_reads_parameters_where_they_are() -> None:
    same_as_plain(lambda model, call, opt: train(call, opt, 12), phases="backward", least=8)
    (region,) = regions("backward")
    # batch, hidden layers, statistics, gradient of the output, mask
    activations = 4 * (5 * 6 + 3 * 5 * 8 + 4 * 8 + 5 * 3) + 5 * 8
    assert region.copied_bytes == activations, region


def test_inference_counts_as_a_forward() -> None:
    for phases, least in (("forward", 4), ("backward", 0)):
        torch.compiler.reset()
        backend.reset()
        call = compiled(net().eval(), phases=phases)
        with torch.no_grad():
            for x, _ in batches(6):
                call(x)
        assert (replays("inference") >= least) and (least or not replays("inference"))


def test_phases_that_do_not_exist_name_the_allowed_ones() -> None:
    allowed = (
        "phases='optimizer' of backend 'pygraph' is not allowed: use one of 'both', 'forward', 'backward'"
    )
    with pytest.raises(ValueError, match=allowed):
        backend.compile(net(), phases="optimizer")


@pytest.mark.parametrize("kind", [Net, Broken])
def test_what_a_backward_reads_was_guarded_until_then(
    kind: type[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after graphs that read it were closed: gradients that accumulate move to a pool of their own."""
    seen = guard_what_is_read(monkeypatch)
    same_as_plain(accumulating(32), kind, least=40)
    assert len(seen) >= 20
    assert all(r.captures == 1 for r in regions("forward"))  # they wait for the gradients to be emptied
    assert all(r.replays >= 24 for r in backend.report().regions)


def test_a_gradient_that_only_python_holds_is_kept() -> None:
    def body(model: nn.Module, call: Any, opt: torch.optim.Optimizer) -> list[torch.Tensor]:
        kept = []
        for step, (x, y) in enumerate(batches(12)):
            grads = torch.autograd.grad(F.cross_entropy(call(x), y), list(model.parameters()))
            if step == 4:
                kept.append(grads[2])
            del grads
        return kept

    same_as_plain(body, least=12)


def _steps(call: Any, opt: torch.optim.Optimizer, n: int) -> list[torch.Tensor]:
    return [update(F.cross_entropy(call(x), y), opt) for x, y in batches(n)]


def pending_once(model: nn.Module, call: Any, opt: torch.optim.Optimizer) -> list[torch.Tensor]:
    """More forwards than there are versions of a graph; then the parameters move."""
    losses = _steps(call, opt, 6)
    pending = [F.cross_entropy(call(x), y) for x, y in batches(5)]
    for loss in pending:
        loss.backward()
    del loss, pending
    opt.step()
    opt.zero_grad()
    for p in model.parameters():
        p.data = p.data.clone()
    return losses + _steps(call, opt, 20)


def kept_for_a_while(model: nn.Module, call: Any, opt: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Gradients of more steps than there are versions, and two forwards pending."""
    losses, grads = _steps(call, opt, 6), []
    for x, y in batches(5):
        F.cross_entropy(call(x), y).backward()
        grads += [p.grad for p in model.parameters()]
        opt.step()
        opt.zero_grad()
    pending = [call(x) for x, _ in batches(2)]
    losses += _steps(call, opt, 3)
    del pending, grads
    return losses + _steps(call, opt, 20)


@pytest.mark.notices("inputs of regions are never looked for elsewhere")
@pytest.mark.parametrize("body", [pending_once, kept_for_a_while])
def test_graphs_come_back_after_all_versions_were_used(body: Body) -> None:
    same_as_plain(body, least=40)
    (forward,), (backward,) = regions("forward"), regions("backward")
    assert forward.replays >= 18 and forward.plain_runs <= 12, forward
    assert backward.replays >= 18 and backward.plain_runs <= 12, backward


@pytest.mark.notices("inputs of regions are never looked for elsewhere")
def test_versions_for_what_does_not_come_back_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """The only one there may be is blocked for good by what it saved for a backward that never comes."""
    monkeypatch.setattr(region_module, "MAX_VERSIONS", 1)

    def body(model: nn.Module, call: Any, opt: torch.optim.Optimizer) -> list[torch.Tensor]:
        losses = _steps(call, opt, 6)
        pending = call(batches(1)[0][0])
        losses += _steps(call, opt, 80)
        return [*losses, pending.detach()]

    same_as_plain(body, least=75)
    (forward,), (backward,) = regions("forward"), regions("backward")
    assert forward.captures == 2 and forward.replays >= 40, forward
    assert backward.replays >= 40, backward


def test_what_closed_graphs_left_makes_room_once_it_is_dead(hostile: Arena) -> None:
    """Both of a pair are closed when their gradients exist, as after copies were chosen instead of indirection."""
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    call = compiled(lambda x: model(x).square().sum())

    def step() -> None:
        model.zero_grad()
        call(torch.randn(4, 6)).backward()

    for _ in range(4):
        step()
    graphed = graphed_regions(hostile)
    assert {region.spec.phase for region in graphed} == {"forward", "backward"}
    gradients = {block_of(p.grad) for p in model.parameters()}
    assert gradients & {block for o in hostile._occupants for block in o.blocks}
    for region in graphed:
        region.capture_again()
    step()
    for region in graphed:
        assert region.last is not None and not gradients & region.last.occupant.keeps


@pytest.mark.parametrize("expanded", [False, True])
def test_whoever_still_needs_what_a_closed_graph_saved_is_seen(hostile: Arena, expanded: bool) -> None:
    """What is saved lies in an input buffer, of which the graph may hold a second view."""
    weight = nn.Parameter(torch.randn(6))
    call = compiled(lambda x: (x * weight).square().sum())

    def loss() -> torch.Tensor:
        weight.grad = None
        return call(torch.randn(1, 6).expand(4, 6) if expanded else torch.randn(4, 6))  # type: ignore[no-any-return]

    for _ in range(5):
        loss().backward()
    pending = loss()
    (saved,) = (o for o in hostile._active if o.buffers)
    for region in graphed_regions(hostile):
        region.capture_again()
    gc.collect()  # the capture itself is gone
    assert saved.alive()
    pending.backward()
    del pending
    assert not saved.alive()


def test_a_backward_is_refused_by_what_the_graph_of_its_forward_saves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # What attention saves of its random state lies on the CPU in a plain run, and on the device in a graph.
    # Here a tensor is negated lazily instead, which a graph cannot take either.
    call = region_module.Region._call

    def lazily(region: region_module.Region, inputs: list[Any]) -> Any:
        if region.spec.phase == "backward" and not region.fed:
            i = next(i for i, x in enumerate(inputs) if isinstance(x, torch.Tensor) and x.is_floating_point())
            inputs[i] = inputs[i].neg()._neg_view()
        return call(region, inputs)

    monkeypatch.setattr(region_module.Region, "_call", lazily)
    same_as_plain(lambda m, c, o: train(c, o), least=10, warmup_runs=2, direct=False)
    assert replays("backward") == replays("forward") == 6

    def always(region: region_module.Region, inputs: list[Any]) -> Any:
        if region.spec.phase == "backward":
            i = next(i for i, x in enumerate(inputs) if isinstance(x, torch.Tensor) and x.is_floating_point())
            inputs[i] = inputs[i].neg()._neg_view()
        return call(region, inputs)

    monkeypatch.setattr(region_module.Region, "_call", always)
    same_as_plain(lambda m, c, o: train(c, o), least=6, warmup_runs=2, direct=False)
    assert replays("backward") == 0 and "negated lazily" in regions("backward")[0].reason
