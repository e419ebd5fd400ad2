"""What users may do at the edges of a region: odd inputs, outputs that are changed or kept in part, regions that go."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from replays import regions_ran
from test_backend import batches, compiled, hostile, regions  # noqa: F401
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import pygraph_train.backend as backend
from pygraph_train.graphs.emulated import EmulatedEngine
from pygraph_train.regions.arena import Arena
from pygraph_train.regions.region_capture import RegionCapture
from pygraph_train.regions.staging import _Buffer

pytestmark = pytest.mark.usefixtures("hostile")


def test_what_lies_between_the_elements_of_a_written_input_is_left_alone() -> None:
    def step(one: torch.Tensor, other: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        one.add_(x.sum())
        other.mul_(0.5)
        return x * 2

    run = compiled(step)
    want = torch.arange(24.0).reshape(4, 6)
    got = want.clone()
    with torch.no_grad():
        for n in range(8):
            x = torch.full((2,), n + 1.0)
            want[:, 2] = got[:, 2] = n  # belongs to nobody
            assert torch.equal(step(want[:, :2], want[:, 3:], x), run(got[:, :2], got[:, 3:], x))
            assert torch.equal(want, got)
    assert regions("inference")[0].replays >= 5


def test_an_expanded_input_beside_a_strided_one() -> None:
    def step(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return (one * 2).sum() + other.sum()

    run = compiled(step)
    with torch.no_grad():
        for x, _ in batches(8):
            given = (x[0].expand(4, 6), x.flatten()[::2])
            assert torch.equal(run(*given), step(*given))
    assert regions("inference")[0].replays >= 5


@pytest.mark.parametrize("indirection", ["copy", "device"])
def test_an_input_between_aligned_addresses_is_read_at_such_an_address(
    indirection: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels are chosen by it, and others add up in another order."""
    seen: list[int] = []
    product = torch.ops.aten.addmm.out

    class Addresses(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is product or func is torch.ops.aten.addmm.default:
                seen.append(args[1].data_ptr() % 16)
            return func(*args, **(kwargs or {}))

    capture = EmulatedEngine.capture

    def watched(self: EmulatedEngine, body: Callable[[], Any], **options: Any) -> Any:
        def watching() -> Any:
            with Addresses():
                return body()

        return capture(self, watching, **options)

    monkeypatch.setattr(EmulatedEngine, "capture", watched)
    model = nn.Linear(6, 8)
    run = compiled(model, indirection=indirection)
    with torch.no_grad():
        for _ in range(8):
            x = torch.randn(8 * 6 + 1)[1:].view(8, 6)
            assert torch.equal(run(x), model(x))
    assert regions("inference")[0].replays >= 5
    assert seen and set(seen) == {4}


@pytest.mark.parametrize("indirection", ["copy", "device"])
def test_lazily_conjugated_tensors(indirection: str) -> None:
    scale = nn.Parameter(torch.ones(6))

    def step(x: torch.Tensor, z: torch.Tensor) -> tuple[torch.Tensor, ...]:
        mine = torch.complex(x * scale, (x * scale).sin())
        return mine.conj()[:, ::2], (mine * z).real.sum(), mine.conj().imag

    run = compiled(step, indirection=indirection)
    for x, _ in batches(8):
        given = (x, torch.complex(x, x.cos()).conj())
        results = []
        for call in (step, run):
            out, total, imaginary = call(*given)
            (gradient,) = torch.autograd.grad(out.imag.sum() + total + imaginary.square().sum(), scale)
            results.append((out.resolve_conj(), total, imaginary, gradient))
        for want, found in zip(*results, strict=True):
            torch.testing.assert_close(found, want)


@pytest.mark.parametrize("options", [{}, {"indirection": "device"}, {"phases": "forward"}])
def test_hooks_may_replace_a_part_of_what_is_saved(options: dict[str, Any]) -> None:
    def pack(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone() if tensor.numel() > 100 and not isinstance(tensor, nn.Parameter) else tensor

    def gradients(call: Any, model: nn.Module) -> list[torch.Tensor]:
        found: list[torch.Tensor] = []
        data = batches(24)
        for (one, _), (other, _) in zip(data[::2], data[1::2], strict=True):
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
                losses = call(one).square().sum(), call(other).square().sum()
            found += [g.clone() for g in torch.autograd.grad(sum(losses), list(model.parameters()))]
        return found

    results = []
    for wrap in (lambda m: m, lambda m: compiled(m, **options)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 4), nn.Tanh(), nn.Linear(4, 3))
        results.append(gradients(wrap(model), model))
    for want, found in zip(*results, strict=True):
        torch.testing.assert_close(found, want)
    assert all(r.captures <= 8 for r in backend.report().regions), backend.report()
    regions_ran(1)


def test_gradients_whose_shape_is_changed_in_place() -> None:
    model = nn.Linear(6, 6)
    call = compiled(model)
    changes = (torch.Tensor.t_, lambda g: g.unsqueeze_(0), lambda g: g.resize_(0))
    for step, (x, _) in enumerate(batches(12)):
        (want,) = torch.autograd.grad(model(x).square().sum(), [model.weight])
        (found,) = torch.autograd.grad(call(x).square().sum(), [model.weight])
        torch.testing.assert_close(found, want)
        changes[step % 3](found)
        del found
    regions_ran(1)


def test_only_the_storage_of_a_gradient_is_kept() -> None:
    model = nn.Linear(6, 3)
    call, kept = compiled(model), []
    for x, _ in batches(10):
        (gradient,) = torch.autograd.grad(call(x).square().sum(), [model.weight])
        kept.append((gradient.untyped_storage(), gradient.clone()))
        del gradient
    for storage, want in kept:
        assert torch.equal(torch.empty(0).set_(storage, 0, want.size(), want.stride()), want)
    regions_ran(1)


def test_regions_that_nobody_can_call_are_freed(hostile: Arena) -> None:  # noqa: F811
    alive = []
    # what earlier tests left goes first: collecting a region abandons its graphs, which are free after that
    for _ in range(3):
        gc.collect()
    for _ in range(4):
        model = nn.Linear(6, 3)
        call = compiled(model)
        for x, _ in batches(5):
            call(x).sum().backward()
        regions_ran(1)
        del model, call
        torch.compiler.reset()
        gc.collect()
        alive.append((sum(type(o) is RegionCapture for o in gc.get_objects()), len(hostile._occupants)))
    assert len(set(alive[1:])) == 1, alive  # the last ones go with the next call of a region


def test_a_staged_number_keeps_the_sign_of_its_zero() -> None:
    buffer = _Buffer(torch.tensor(0.0), torch.device("cpu"))
    for value in (0.0, -0.0, 0.0, 1.0, -0.0):
        assert torch.copysign(torch.tensor(1.0), buffer.fill(torch.tensor(value))) == (
            torch.copysign(torch.tensor(1.0), torch.tensor(value))
        )


def test_more_shapes_in_turn_than_are_kept_are_not_captured_again_and_again() -> None:
    model = nn.Linear(6, 3)
    call = compiled(model, max_signatures=2)
    sizes = [3, 4, 5, 6, 7]
    for step in range(200):
        x = torch.randn(sizes[step % 5], 6)
        torch.testing.assert_close(call(x), model(x))
        call(x).sum().backward()
        model.zero_grad()
    captures = sum(r.captures for r in backend.report().regions)
    assert captures <= 40, backend.report()  # 5 shapes, forward and backward, four rounds at most
    regions_ran(1)


def test_without_memory_for_a_second_capture_inputs_are_copied(
    hostile: Arena,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Indirection captures twice. A device that has room for one graph gets that one."""
    capture, refused = hostile.engine.capture, []

    def full(fn: Any, *, instantiate: bool = True) -> Any:
        if not instantiate:
            refused.append(fn())
            raise torch.OutOfMemoryError("no room")
        return capture(fn, instantiate=instantiate)

    monkeypatch.setattr(hostile.engine, "capture", full)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    run = compiled(model, indirection="device")
    for x, _ in batches(10):
        model.zero_grad()
        want = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
        run(x).square().sum().backward()
        for a, p in zip(want, model.parameters(), strict=True):
            assert torch.equal(a, p.grad)
    assert refused
    for region in backend.report().regions:
        assert region.decision == "graph" and region.replays >= 6 and region.copied_bytes, region
        assert any("no memory left to capture twice" in why for why in region.unserved), region


class Teacher(nn.Module):
    """MoCo's: the second network follows the first by `.data`, in the forward."""

    def __init__(self, update: Callable[[nn.Parameter, nn.Parameter], None]) -> None:
        super().__init__()
        self.student = nn.Linear(6, 3)
        self.teacher = nn.Linear(6, 3).requires_grad_(False)
        self._update = update

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for follower, leader in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            self._update(follower, leader)
        return self.student(x) + self.teacher(x)


def with_momentum(follower: nn.Parameter, leader: nn.Parameter) -> None:
    follower.data = follower.data * 0.9 + leader.data * 0.1


def with_clipped_leader(follower: nn.Parameter, leader: nn.Parameter) -> None:
    leader.data = leader.data.clamp(-0.1, 0.1)
    follower.data = (follower.data + leader.data) * 0.5


def in_place_first(follower: nn.Parameter, leader: nn.Parameter) -> None:
    follower.data.mul_(0.9)
    follower.data = follower.data + leader.data * 0.1


def with_leaders_memory(follower: nn.Parameter, leader: nn.Parameter) -> None:
    follower.data = leader.data


def with_a_part(follower: nn.Parameter, leader: nn.Parameter) -> None:
    follower.data = torch.cat([follower.data, leader.data * 0.5])[: len(leader)]


def trained(update: Any, wrap: Callable[[nn.Module], Any], steps: int = 12) -> list[list[torch.Tensor]]:
    """All values after each step; none of what `.data` was may change later."""
    torch.manual_seed(0)
    model = Teacher(update)
    call, optimizer = wrap(model), torch.optim.SGD(model.student.parameters(), lr=0.1)
    states, kept = [], []
    for x, y in batches(steps):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(call(x), y)
        loss.backward()
        optimizer.step()
        states.append([t.detach().clone() for t in (loss, *model.parameters(), *gradients(model))])
        kept += [(p.data, p.detach().clone()) for p in model.teacher.parameters()]
    if update is not in_place_first and update is not with_leaders_memory:
        assert all(torch.equal(memory, values) for memory, values in kept)
    return states


def same(want: list[list[torch.Tensor]], found: list[list[torch.Tensor]]) -> bool:
    return len(want) == len(found) and all(
        len(one) == len(other) and all(map(torch.equal, one, other))
        for one, other in zip(want, found, strict=True)
    )


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def test_a_parameter_that_is_laid_out_anew_at_the_same_address() -> None:
    def train(wrap: Callable[[nn.Module], Any]) -> list[torch.Tensor]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
        run, results = wrap(net), []
        for step, (x, _) in enumerate(batches(24)):
            if step in (8, 16):
                net[0].weight.data = net[0].weight.data.t()
            loss = run(x[:, :4]).square().sum()
            loss.backward()
            results += [loss.detach().clone(), *gradients(net)]
            net.zero_grad()
        return results

    want, found = train(lambda net: net), train(compiled)
    assert all(map(torch.equal, want, found))
    assert regions("forward")[0].replays >= 3


@pytest.mark.parametrize("options", [{}, {"indirection": "device"}, {"phases": "forward"}])
@pytest.mark.parametrize("update", [with_momentum, with_clipped_leader, in_place_first])
def test_assigned_data_is_memory_of_its_own(update: Any, options: dict[str, Any]) -> None:
    want = trained(update, lambda m: m)
    found = trained(update, lambda m: compiled(m, **options))
    assert same(want, found)
    assert regions("forward")[0].replays >= 8, backend.report()


def test_assigned_data_without_gradients() -> None:
    results = []
    for wrap in (lambda m: m, compiled):
        torch.manual_seed(0)
        model = Teacher(with_momentum)
        call = wrap(model)
        with torch.no_grad():
            results.append([(call(x), model.teacher.weight.clone()) for x, _ in batches(12)])
    for one, other in zip(*results, strict=True):
        assert all(map(torch.equal, one, other))
    assert regions("inference")[0].replays >= 8, backend.report()


@pytest.mark.parametrize(
    ("update", "why"),
    [(with_leaders_memory, "which is that of another input"), (with_a_part, "and uses a part of it only")],
)
def test_assigned_data_that_a_graph_cannot_express_names_its_line(update: Any, why: str) -> None:
    want, found = trained(update, lambda m: m), trained(update, compiled)
    assert same(want, found)
    row = regions("forward")[0]
    line = update.__code__.co_firstlineno + 1
    assert not row.replays
    assert why in row.reason and f"{__file__}:{line}" in row.reason, row.reason


@pytest.mark.parametrize("warmup", [2, 10**6])
def test_hooks_of_all_modules_see_modules_of_the_user_only(warmup: int) -> None:
    """A region that runs without a graph is no module of its own, whose results a hook could change."""
    model = nn.Linear(6, 3)
    run = compiled(lambda x: model(x).sum(), warmup_runs=warmup)
    seen: list[nn.Module] = []
    run(torch.ones(2, 6)).backward()
    hook = nn.modules.module.register_module_forward_hook(lambda module, args, result: seen.append(module))
    try:
        for _ in range(6):
            run(torch.ones(2, 6)).backward()
    finally:
        hook.remove()
    assert [module for module in seen if module is not model] == []
    assert (regions("forward")[0].replays > 0) == (warmup == 2)


def test_parameters_may_be_swapped() -> None:
    def trained(wrap: Callable[[nn.Module], Any]) -> list[list[torch.Tensor]]:
        torch.manual_seed(0)
        model, states = nn.Linear(6, 3), []
        call = wrap(model)
        for step, (x, y) in enumerate(batches(24)):
            if step % 8 == 4:
                gc.collect()
                torch.utils.swap_tensors(model.weight, nn.Parameter(model.weight.detach() * 0.5))
            loss = nn.functional.cross_entropy(call(x), y)
            loss.backward()
            states.append([loss.detach(), *(g.clone() for g in gradients(model))])
            model.zero_grad()
            del loss
        return states

    assert same(trained(lambda m: m), trained(compiled))
    assert sum(r.replays for r in regions("forward")) >= 10, backend.report()


@pytest.mark.parametrize("used", ["nowhere", "as a factor", "as a size", "as a size elsewhere"])
def test_a_counter_keeps_its_graph_where_no_tensor_depends_on_it(used: str) -> None:
    def trained(wrap: Callable[[Any], Any]) -> list[Any]:
        torch.manual_seed(0)
        model, seen = nn.Linear(6, 3), []
        count, doubled = 3, 0

        def forward(x: torch.Tensor, size: int) -> tuple[torch.Tensor, int]:
            nonlocal count, doubled
            count += 1
            doubled = (count - 1) * 2
            if used == "as a factor":
                x = x * count
            elif used == "as a size":
                x = x[:count]
            elif used == "as a size elsewhere":
                x = x[:size]
            return model(x).sum(), count * size

        call = wrap(forward)
        for x, _ in batches(40, size=64):
            loss, product = call(x, count)
            loss.backward()
            seen.append((loss.detach(), *gradients(model), count, doubled, product))
            model.zero_grad()
        return seen

    for plain, mine in zip(trained(lambda f: f), trained(compiled), strict=True):
        assert all(
            torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(plain, mine, strict=True)
        )
    for phase in ("forward", "backward"):
        replays = sum(r.replays for r in regions(phase))
        assert replays >= 8 if used == "nowhere" else replays == 0, backend.report()
    why = regions("forward")[-1].reason
    assert ("a number that is another one in every run" in why) == (used != "nowhere"), backend.report()
