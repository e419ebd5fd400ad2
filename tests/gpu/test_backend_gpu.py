"""The compile backend on a GPU: graphed regions give the bits that the same kernels give without graphs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))
from backend_training import Square, emptied_after_the_forward, guard_what_is_read

import pygraph_train.backend as backend
from pygraph_train.regions import direct

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

Body = Callable[[nn.Module, Callable[..., Any], torch.optim.Optimizer], list[torch.Tensor]]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch.compiler.reset()
    backend.reset()
    yield
    torch.compiler.reset()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(64, 128), nn.BatchNorm1d(128), nn.Linear(128, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = F.gelu(self.norm(self.first(x)))
        hidden = hidden.softmax(-1) @ hidden.t() @ hidden
        return self.last(F.dropout(hidden, 0.3, self.training))


class Broken(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = F.gelu(self.norm(self.first(x)))
        torch._dynamo.graph_break()
        return self.last(F.dropout(hidden, 0.3, self.training))


def batches(n: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    g = torch.Generator().manual_seed(1)
    return [
        (torch.randn(32, 64, generator=g).cuda(), torch.randint(0, 10, (32,), generator=g).cuda())
        for _ in range(n)
    ]


def same_as_without_graphs(body: Body, kind: type[nn.Module] = Net, **more: Any) -> None:
    """On the same kernels; dropout, the optimizer's state and the gradients included."""
    results = []
    for warmup_runs in (10**6, 1):
        torch.compiler.reset()
        backend.reset()
        torch.manual_seed(0)
        model = kind().cuda()
        opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        options = {"warmup_runs": warmup_runs, "selection": False, **more}
        call = torch.compile(model, backend="pygraph", options=options)
        torch.manual_seed(7)
        values = [v.clone() for v in body(model, call, opt)]
        results.append([*values, *model.state_dict().values(), torch.cuda.get_rng_state()])
    for number, (want, got) in enumerate(zip(*results, strict=True)):
        assert torch.equal(want, got), f"value {number}"


def replays(phase: str) -> int:
    return sum(r.replays for r in backend.report().regions if r.phase == phase)


def train(call: Any, opt: torch.optim.Optimizer, steps: int = 12, accumulate: int = 1) -> list[torch.Tensor]:
    losses = []
    for step, (x, y) in enumerate(batches(steps)):
        loss = F.cross_entropy(call(x), y)
        (loss / accumulate).backward()
        if step % accumulate == accumulate - 1:
            opt.step()
            opt.zero_grad()
        losses.append(loss.detach())
    return losses


@pytest.mark.parametrize("kind", [Net, Broken])
@pytest.mark.parametrize("accumulate", [1, 4])
def test_training_equals_training_without_graphs(kind: type[nn.Module], accumulate: int) -> None:
    same_as_without_graphs(lambda model, call, opt: train(call, opt, 16, accumulate), kind)
    for region in backend.report().regions:
        assert region.replays >= 10, region


@pytest.mark.parametrize("phases", ["forward", "backward"])
@pytest.mark.parametrize("indirection", ["copy", "device"])
@pytest.mark.parametrize("accumulate", [1, 4])
def test_one_phase_from_graphs(phases: str, indirection: str, accumulate: int) -> None:
    same_as_without_graphs(
        lambda model, call, opt: train(call, opt, 24, accumulate), phases=phases, indirection=indirection
    )
    assert replays(phases) >= 16, backend.report()
    assert replays("backward" if phases == "forward" else "forward") == 0


def test_validation_between_training_and_outputs_kept() -> None:
    def body(model: nn.Module, call: Any, opt: torch.optim.Optimizer) -> list[torch.Tensor]:
        values = []
        for _ in range(3):
            model.train()
            values += train(call, opt, 6)
            model.eval()
            with torch.no_grad():
                values += [call(x) for x, _ in batches(6)]
        return values

    same_as_without_graphs(body)
    assert replays("inference") >= 10 and replays("forward") >= 10


def test_pending_forwards_and_kept_gradients() -> None:
    def body(model: nn.Module, call: Any, opt: torch.optim.Optimizer) -> list[torch.Tensor]:
        values = []
        for _ in range(4):
            pending = [F.cross_entropy(call(x), y) for x, y in batches(6)]
            for loss in reversed(pending):
                loss.backward()
            values += [p.grad for p in model.parameters()]
            opt.step()
            opt.zero_grad()
            values += [p.detach() for p in pending]
        return values

    same_as_without_graphs(body)


def test_selection_decides_and_keeps_the_numbers() -> None:
    torch.manual_seed(0)
    model = Net().cuda()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    train(torch.compile(model, backend="pygraph"), opt, 16)
    report = backend.report()
    assert report.settled, str(report)
    assert all(r.costs for r in report.regions), str(report)


def test_selection_leaves_a_long_kernel_alone() -> None:
    a = torch.randn(8192, 8192, device="cuda")
    call = torch.compile(lambda x: (x @ a).relu(), backend="pygraph")
    with torch.no_grad():
        for _ in range(12):
            call(a)
    (region,) = backend.report().regions
    assert region.decision == "plain", region


def test_numpy_scalar_and_index_tensors_of_the_cpu_are_in_the_graph() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.temperature = nn.Linear(32, 32), nn.Linear(32, 32), np.power(32, 0.5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scores = torch.bmm(self.q(x), self.k(x).transpose(1, 2)) / self.temperature
            rows, columns = torch.tril_indices(16, 16, -1)
            return scores.softmax(-1)[:, rows, columns].sum(1)

    torch.manual_seed(0)
    model = Attention().cuda()
    call = torch.compile(model, backend="pygraph", options={"selection": False})
    for step in range(8):
        if step == 6:
            model.temperature = np.power(2, 0.5)
        x = torch.randn(4, 16, 32, device="cuda")
        want, got = model(x), call(x)
        torch.testing.assert_close(want, got)
        torch.testing.assert_close(
            torch.autograd.grad(want.sum(), model.q.weight), torch.autograd.grad(got.sum(), model.q.weight)
        )
    report = backend.report()
    assert all(r.replays >= 1 for r in report.regions[:2]), str(report)
    assert any(r.changes for r in report.regions), str(report)


@pytest.mark.parametrize("how", ["device", "host"])
def test_moving_batches_are_served_without_copies(how: str) -> None:
    model = nn.Sequential(nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 8)).cuda()
    call = torch.compile(model, backend="pygraph", options={"selection": False, "indirection": how})
    data = [torch.randn(1024, 512, device="cuda") for _ in range(4)]
    for step in range(12):
        x = data[step % 4]
        got = torch.autograd.grad(call(x).sum(), model[0].weight)[0]
        torch.testing.assert_close(got, torch.autograd.grad(model(x).sum(), model[0].weight)[0])
    forward, backward = backend.report().regions
    assert forward.decision == backward.decision == "graph, indirect"
    assert forward.copied_bytes == 0 and forward.patched_pointers == 1, forward
    assert backward.copied_bytes <= 4 and backward.patched_pointers >= 1, backward


class Vocabulary(nn.Module):
    """Its output is large, and read by a loss that is compiled apart."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(256, 256), nn.Linear(256, 16384)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(F.gelu(self.first(x)))


def in_a_chain(
    call: Any,
    opt: torch.optim.Optimizer,
    options: dict[str, Any],
    before_step: Callable[[int], None] = lambda step: None,
) -> list[torch.Tensor]:
    def criterion(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits.float() * 2, y)

    loss_of = torch.compile(criterion, backend="pygraph", options=options)
    generator, losses = torch.Generator("cuda").manual_seed(2), []
    for step in range(16):
        before_step(step)
        x = torch.randn(2048, 256, device="cuda", generator=generator)
        y = torch.randint(0, 16384, (2048,), device="cuda", generator=generator)
        loss = loss_of(call(x), y)
        loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(loss.detach())
    return losses


def test_calls_go_past_the_runtime_of_aotautograd(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[Any] = []
    apply = direct._apply
    monkeypatch.setattr(direct, "_apply", lambda route, *args: (taken.append(route), apply(route, *args))[1])
    for around in (True, False):
        taken.clear()

        def body(model: nn.Module, call: Any, opt: torch.optim.Optimizer) -> list[torch.Tensor]:
            losses = []
            for _ in range(12):
                x = torch.randn(64, 256, device="cuda")
                with torch.autocast("cuda", torch.bfloat16, enabled=around):  # noqa: B023
                    loss = call(x).float().square().mean()
                losses.append(loss.detach())
                loss.backward()
                opt.step()
                opt.zero_grad()
            return losses

        same_as_without_graphs(body, Vocabulary)
        assert len(taken) >= 18 and replays("forward") >= 8 and replays("backward") >= 8


def test_a_large_output_is_read_in_place_by_the_next_region() -> None:
    options = {"selection": False, "warmup_runs": 1}
    same_as_without_graphs(lambda model, call, opt: in_a_chain(call, opt, options), Vocabulary)
    for region in backend.report().regions:
        assert region.replays >= 12, region
        assert region.copied_bytes <= 2048 * 256 * 4, region  # the batch


def test_a_large_output_costs_no_memory_of_its_own() -> None:
    def before_step(step: int) -> None:
        if step == 10:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    peaks = []
    for options in ({"engine": "off"}, {"selection": False, "warmup_runs": 1}):
        torch.compiler.reset()
        model = Vocabulary().cuda()
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        call = torch.compile(model, backend="pygraph", options=options)
        in_a_chain(call, opt, options, before_step)
        peaks.append(torch.cuda.max_memory_reserved())
        del model, opt, call
    assert peaks[1] <= 1.05 * peaks[0], peaks


def test_backward_reuses_the_memory_of_what_it_consumes() -> None:
    torch.manual_seed(0)
    width, depth = 1024, 8
    model = nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(depth)]).cuda()
    data = [torch.randn(4096, width, device="cuda") for _ in range(2)]
    peaks = []
    for backend_options in ({"engine": "off"}, {"selection": False}):
        torch.compiler.reset()
        call = torch.compile(model, backend="pygraph", options=backend_options)
        for step in range(14):
            if step == 8:
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            call(data[step % 2]).sum().backward()
            model.zero_grad()
        peaks.append(torch.cuda.max_memory_reserved())
    assert peaks[1] <= 1.05 * peaks[0], peaks


def test_a_pool_whose_graphs_were_all_closed_takes_new_ones() -> None:
    from pygraph_train.regions import inductor

    model = nn.Linear(64, 64).cuda()
    call = torch.compile(model, backend="pygraph", options={"selection": False})
    x = torch.randn(8, 64, device="cuda")
    with torch.no_grad():
        for _round in range(3):
            for _ in range(6):
                torch.testing.assert_close(call(x), model(x))
            for arena in inductor._arenas.values():
                for occupant in list(arena._occupants):
                    occupant.owner.capture_again()
    (region,) = backend.report().regions
    assert region.captures == 3 and region.decision == "graph", region


def test_gradients_that_are_emptied_after_the_forward_are_not_copied() -> None:
    """Lightning's order: those of the step before are alive during a forward."""
    addresses: list[list[int]] = []
    same_as_without_graphs(emptied_after_the_forward(batches(16), addresses))
    assert all(r.captures <= 2 and r.replays >= 8 for r in backend.report().regions)
    assert addresses[-1] == addresses[-4]


@pytest.mark.parametrize("kind", [Net, Broken])
def test_what_a_backward_reads_was_guarded_until_then(
    kind: type[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = guard_what_is_read(monkeypatch)
    same_as_without_graphs(lambda model, call, opt: train(call, opt, 32, 4), kind)
    assert len(seen) >= 20


def test_small_kernels_run_together() -> None:
    """Casts of weights, casts of their gradients, and the last step of the sums that are biases' gradients."""
    layers, depth = nn.Sequential(), 12
    for _ in range(depth):
        layers.append(nn.Linear(64, 64)).append(nn.GELU())
    layers.cuda()
    x = torch.randn(4096, 64, device="cuda")

    def loss_of(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return layers(x).float().square().mean()

    launches, gradients = [], []
    for transform in (False, True):
        torch.compiler.reset()
        call = torch.compile(loss_of, backend="pygraph", options={"transform": transform, "engine": "cuda"})
        for _ in range(8):
            layers.zero_grad()
            call(x).backward()
        gradients.append([p.grad.clone() for p in layers.parameters()])
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            layers.zero_grad()
            call(x).backward()
            torch.cuda.synchronize()
        kernels = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
        launches.append(len(kernels))
    assert launches[1] <= launches[0] - (2 * depth - 2) - (depth - 2) - (depth - 3), launches
    for before, after in zip(*gradients, strict=True):
        if before.dim() == 2:
            assert torch.equal(before, after)
        else:  # a sum: its blocks may be of another size
            torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-6)


def test_gradients_at_the_place_of_what_was_saved_are_guarded_and_not_copied() -> None:
    torch.manual_seed(0)
    model = Square(256, 6).cuda()
    parameters = list(model.parameters())

    def loss_of(x: torch.Tensor) -> torch.Tensor:
        return model(x).square().sum()

    call = torch.compile(loss_of, backend="pygraph", options={"selection": False})
    data = [torch.randn(256, 256, device="cuda") for _ in range(16)]
    kept = [torch.autograd.grad(call(x), parameters) for x in data]
    for x, found in zip(data, kept, strict=True):
        torch.testing.assert_close(found, torch.autograd.grad(loss_of(x), parameters), rtol=1e-4, atol=1e-4)
    del kept, found
    # gradients that somebody keeps are copied from then on
    torch.compiler.reset()
    call = torch.compile(loss_of, backend="pygraph", options={"selection": False})
    for _ in range(12):
        model.zero_grad()
        call(data[0]).backward()
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    model.zero_grad()
    call(data[0]).backward()
    made = torch.cuda.memory_stats()["allocation.all.allocated"] - before
    assert made <= 4, made  # the loss and its gradient, and no gradient of a parameter
