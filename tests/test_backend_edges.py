"""What users may do at the edges of a region: odd inputs, outputs that are changed or kept in part, regions that go."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from test_backend import batches, compiled, hostile, regions  # noqa: F401
from torch import nn

import pygraph_train.backend as backend
from pygraph_train.backend.arena import Arena
from pygraph_train.backend.capture import RegionCapture
from pygraph_train.backend.staging import _Buffer

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


def test_only_the_storage_of_a_gradient_is_kept() -> None:
    model = nn.Linear(6, 3)
    call, kept = compiled(model), []
    for x, _ in batches(10):
        (gradient,) = torch.autograd.grad(call(x).square().sum(), [model.weight])
        kept.append((gradient.untyped_storage(), gradient.clone()))
        del gradient
    for storage, want in kept:
        assert torch.equal(torch.empty(0).set_(storage, 0, want.size(), want.stride()), want)


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
