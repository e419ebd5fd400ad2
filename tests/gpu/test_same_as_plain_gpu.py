"""Loops that used to train differently: bit for bit as plain training over 100 steps on a GPU."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from replays import enough
from test_host_constants import Tables
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from training import Each

from pygraph_train import GraphedStep, PyGraphConfig, StepReport
from pygraph_train.verification import Audits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

STEPS = 100
LR = 2.0**-9  # exact in float32, where fused kernels of a graph hold it

Make = Callable[..., Callable[..., Tensor]]
"""(step_fn, model, optimizer) -> a training step."""


def both(
    script: Callable[[Make], list[Any]], *, replays: int, plan: str | None = None, **config: Any
) -> StepReport:
    """Run a script plainly and graphed; everything that it returns has to have the same bits.

    How often graphs have to run (`replays`), and the `plan`: see `replays.enough`.
    """
    reports: list[StepReport] = []

    def plain(fn: Any, model: nn.Module, optimizer: Any) -> Any:
        optimizer = Each(optimizer) if isinstance(optimizer, list) else optimizer

        def step(*args: Any) -> Tensor:
            optimizer.zero_grad()
            loss = fn(*args)
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step

    def graphed(fn: Any, model: nn.Module, optimizer: Any) -> Any:
        step = GraphedStep(
            fn, model=model, optimizer=optimizer, config=PyGraphConfig(compile=False, **config)
        )
        reports.append(step.report())
        return step

    found = []
    for make in (plain, graphed):
        torch._dynamo.reset()
        torch.manual_seed(0)
        np.random.seed(0)
        found.append(script(make))
    assert len(found[0]) == len(found[1]) >= STEPS
    for index, (expected, got) in enumerate(zip(*found, strict=True)):
        same = torch.equal(expected, got) if isinstance(expected, Tensor) else expected == got
        assert same, f"entry {index}: {expected} became {got}\n{reports[-1]}"
    enough(reports, replays, plan)
    return reports[-1]


def batches(count: int = STEPS) -> list[tuple[Tensor, Tensor]]:
    g = torch.Generator().manual_seed(1)
    return [
        (torch.randn(16, 32, generator=g).cuda(), torch.randint(0, 8, (16,), generator=g).cuda())
        for _ in range(count)
    ]


def mlp(outputs: int = 8) -> nn.Module:
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, outputs)).cuda()


def sgd(module: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=LR, momentum=0.5, fused=True, **options)


def test_momentum_contrast_replaces_the_teachers_weights() -> None:
    def script(make: Make) -> list[Any]:
        student, teacher = mlp(), mlp().requires_grad_(False)

        def fn(x: Tensor, y: Tensor) -> Tensor:
            with torch.no_grad():
                for s, t in zip(student.parameters(), teacher.parameters(), strict=True):
                    t.data = t.data * 0.9 + s.data * 0.1
            return F.cross_entropy(student(x), y) + F.mse_loss(student(x), teacher(x))

        step = make(fn, nn.ModuleList([student, teacher]), sgd(student))
        return [step(*batch) for batch in batches()] + [t.clone() for t in teacher.parameters()]

    both(script, replays=80, plan="{F B O}")


def test_weights_are_clipped_through_their_data() -> None:
    def script(make: Make) -> list[Any]:
        critic = mlp()

        def fn(x: Tensor, y: Tensor) -> Tensor:
            for p in critic.parameters():
                p.data = p.data.clamp(-0.05, 0.05)
            return F.cross_entropy(critic(x), y)

        step = make(fn, critic, sgd(critic))
        return [step(*batch) for batch in batches()] + [p.detach().clone() for p in critic.parameters()]

    both(script, replays=80, plan="{F B O}")


def test_a_gradient_penalty_differentiates_twice() -> None:
    def script(make: Make) -> list[Any]:
        critic = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 1)).cuda()

        def fn(x: Tensor, y: Tensor) -> Tensor:
            x = x.clone().requires_grad_()
            score = critic(x)
            (gradient,) = torch.autograd.grad(score.sum(), x, create_graph=True)
            return score.mean() + (gradient.norm(dim=1) - 1).pow(2).mean()

        step = make(fn, critic, sgd(critic))
        return [step(*batch) for batch in batches()] + [p.detach().clone() for p in critic.parameters()]

    report = both(script, replays=40)
    assert report.steps_replayed >= 40, str(report)


@pytest.mark.parametrize("reads", [False, True], ids=["one graph", "host read"])
def test_heads_that_take_turns_leave_the_others_alone(reads: bool) -> None:
    def script(make: Make) -> list[Any]:
        body, heads = nn.Linear(32, 64).cuda(), nn.ModuleList([nn.Linear(64, 8) for _ in range(2)]).cuda()
        model, task, log = nn.ModuleList([body, heads]), [0], []

        def fn(x: Tensor, y: Tensor) -> Tensor:
            scores = [head(body(x).relu()) for head in heads]
            if reads:
                log.append(scores[0].mean().item())
            return F.cross_entropy(scores[task[0]], y)

        optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.125, fused=True)
        step = make(fn, model, optimizer)
        seen: list[Any] = []
        for index, batch in enumerate(batches()):
            task[0] = index // 5 % 2
            seen += [step(*batch), [p.grad is None for p in model.parameters()]]
        return seen + [p.detach().clone() for p in model.parameters()]

    report = both(script, replays=20 if reads else 60)
    if not reads:
        assert report.steps_replayed >= 60, str(report)


def test_a_teacher_that_the_loop_replaces_between_steps() -> None:
    def script(make: Make) -> list[Any]:
        student, teacher = mlp(), mlp().requires_grad_(False)

        def fn(x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(student(x), y) + F.mse_loss(student(x), teacher(x))

        step = make(fn, nn.ModuleList([student, teacher]), sgd(student))
        losses = []
        for index, batch in enumerate(batches()):
            losses.append(step(*batch))
            if index % 20 == 19:
                for s, t in zip(student.parameters(), teacher.parameters(), strict=True):
                    t.data = t.data * 0.9 + s.data * 0.1
        return losses

    assert both(script, replays=40).steps_replayed >= 40


def test_what_the_loop_moves_on_every_step_is_followed() -> None:
    def script(make: Make) -> list[Any]:
        student, teacher = mlp(), mlp().requires_grad_(False)
        held = {"other": torch.zeros(16, 32, device="cuda")}

        def fn(x: Tensor, y: Tensor) -> Tensor:
            apart = F.mse_loss(student(held["other"]), teacher(held["other"]))
            return F.cross_entropy(student(x), y) + apart

        step = make(fn, nn.ModuleList([student, teacher]), sgd(student))
        losses = []
        for index, batch in enumerate(batches()):
            held["other"] = batch[0].flip(0) + index / 8
            for s, t in zip(student.parameters(), teacher.parameters(), strict=True):
                t.data = t.data * 0.9 + s.data * 0.1
                s.data = s.data.clamp(-0.2, 0.2)
            losses.append(step(*batch))
        return losses + [p.detach().clone() for m in (student, teacher) for p in m.parameters()]

    report = both(script, replays=80, plan="{F B O}")
    assert len(report.captures) <= 3, str(report)


def test_noise_of_numpy_is_numpys() -> None:
    def script(make: Make) -> list[Any]:
        model = mlp()

        def fn(x: Tensor, y: Tensor) -> Tensor:
            noise = torch.from_numpy(np.random.randn(16, 32).astype(np.float32)).cuda()
            return F.cross_entropy(model(x + noise * np.float32(0.1)), y)

        step = make(fn, model, sgd(model))
        return [step(*batch) for batch in batches()] + [float(np.random.rand())]

    both(script, replays=20)


def test_numpy_scalars_count_as_numbers() -> None:
    def script(make: Make) -> list[Any]:
        model, weight = mlp(), np.float64(0.3)
        step = make(lambda x, y: F.cross_entropy(model(x) / np.sqrt(8), y) * weight, model, sgd(model))
        return [step(*batch) for batch in batches()]

    assert both(script, replays=80).steps_replayed >= 80


def test_what_is_switched_in_mid_run() -> None:
    def script(make: Make) -> list[Any]:
        inner, outer = nn.Linear(32, 3 * 64).cuda(), nn.Linear(64, 8).cuda()
        model, packed = nn.ModuleList([inner, outer]), [0]

        def fn(x: Tensor, y: Tensor) -> Tensor:
            q, k, v = inner(x[:, None].repeat(1, 8, 1)).view(-1, 8, 3, 1, 64).permute(2, 0, 3, 1, 4)
            return F.cross_entropy(outer(F.scaled_dot_product_attention(q, k, v).sum((1, 2))), y)

        def pack(tensor: Tensor) -> Tensor:
            packed[0] += 1
            return tensor

        step, seen = make(fn, model, sgd(model)), []
        for index, batch in enumerate(batches()):
            hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t)
            kernels = sdpa_kernel(SDPBackend.MATH if 30 <= index < 60 else SDPBackend.EFFICIENT_ATTENTION)
            with kernels, hooks if index in (70, 80) else nullcontext():
                seen += [step(*batch), packed[0]]
        return seen

    assert both(script, replays=60).steps_replayed >= 60


def test_audits_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Audits, "FIRST", 4)
    monkeypatch.setattr(Audits, "SHARE", math.inf)

    def script(make: Make) -> list[Any]:
        model = nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.Dropout(0.2), nn.Linear(64, 8)).cuda()
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
        step = make(lambda x, y: F.cross_entropy(model(x), y), model, optimizer)
        return [step(*batch) for batch in batches()] + [b.clone() for b in model.buffers()]

    report = both(script, replays=80)
    assert report.audits >= 3 and report.steps_replayed >= 80, str(report)


@pytest.mark.parametrize("cell", [nn.LSTM, nn.GRU, nn.RNN])
def test_rnns(cell: Any) -> None:
    def script(make: Make) -> list[Any]:
        torch.backends.cudnn.deterministic = True
        rnn, out = cell(32, 64, 2, batch_first=True).cuda(), nn.Linear(64, 8).cuda()
        model = nn.ModuleList([rnn, out])
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
        step = make(
            lambda x, y: F.cross_entropy(out(rnn(x[:, None].expand(-1, 5, -1))[0][:, -1]), y),
            model,
            optimizer,
        )
        seen = [step(x.cuda(), y.cuda()) for x, y in batches()]
        torch.backends.cudnn.deterministic = False
        return [*seen, *(p.detach() for p in model.parameters())]

    both(script, replays=80, plan="{F B O}", forward="on")


def test_several_optimizers_of_one_step() -> None:
    def script(make: Make) -> list[Any]:
        first, second = nn.Linear(32, 64).cuda(), nn.Linear(64, 8).cuda()
        model = nn.Sequential(first, nn.Dropout(0.1), second)
        optimizers = [
            torch.optim.AdamW(first.parameters(), lr=LR, fused=True),
            torch.optim.SGD(second.parameters(), lr=LR, momentum=0.9, fused=True),
        ]
        schedule = torch.optim.lr_scheduler.StepLR(optimizers[1], 20, gamma=0.5)
        step, seen = make(lambda x, y: F.cross_entropy(model(x), y), model, optimizers), []
        for x, y in batches():
            seen.append(step(x.cuda(), y.cuda()))
            schedule.step()
        return [*seen, *(p.detach() for p in model.parameters())]

    both(script, replays=80, plan="{F B O}", forward="on")


def tables(make: Make) -> list[Any]:
    model = Tables().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    step = make(lambda x, y: F.cross_entropy(model(x), y), model, optimizer)
    return [step(x.cuda(), y.cuda()) for x, y in batches()] + [p.detach() for p in model.parameters()]


def test_constants_of_the_host_are_made_once() -> None:
    report = both(tables, replays=80, plan="{F B O}", forward="on")
    told = [note for note in report.notes if "a constant of the host is copied to the device once" in note]
    assert len(told) >= 6 and all("test_host_constants.py:" in note for note in told), report


def test_constants_of_the_host_are_made_once_with_compiled_kernels() -> None:
    model = Tables().cuda()
    plain = copy.deepcopy(model)
    losses = []
    for net, engine in ((plain, "off"), (model, "cuda")):
        optimizer = torch.optim.AdamW(net.parameters(), lr=LR, fused=True)
        step = GraphedStep(
            lambda x, y, net=net: F.cross_entropy(net(x), y),
            model=net,
            optimizer=optimizer,
            config=PyGraphConfig(compile=True, engine=engine),  # type: ignore[arg-type]
        )
        losses.append([step(x.cuda(), y.cuda()) for x, y in batches()])
    report = step.report()
    assert report.steps_replayed >= 80 and report.captures[0].compiled, report
    torch.testing.assert_close(torch.stack(losses[1]), torch.stack(losses[0]), rtol=2e-3, atol=1e-4)


@pytest.mark.parametrize("changes", [False, True])
def test_tables_of_the_host_are_copied_where_they_have_changed(changes: bool) -> None:
    def script(make: Make) -> list[Any]:
        model, left = nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.1)).cuda(), torch.linspace(0.1, 0.9, 100)
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)

        def noised(x: Tensor) -> Tensor:
            drawn = torch.randint(0, 100, (len(x),), device=x.device)
            kept, rest = left.to(x.device)[drawn][:, None], (1 - left).sqrt().to(x)[drawn][:, None]
            noise = torch.randn_like(x)
            return F.mse_loss(model(kept.sqrt() * x + rest * noise), noise)

        step, seen = make(noised, model, optimizer), []
        for number, (x, _) in enumerate(batches()):
            if changes and number % 20 == 19:
                left.numpy()[number // 20 :] *= 0.9
            seen.append(step(x.cuda()))
        return [*seen, *(p.detach() for p in model.parameters())]

    both(script, replays=80, plan="{F B O}", forward="on")


@pytest.mark.parametrize("count", [4, STEPS])
def test_tensors_of_the_batch_get_their_gradients(count: int) -> None:
    """Those that come again add them up."""

    def script(make: Make) -> list[Any]:
        model = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 1)).cuda()
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)

        def step_fn(x: Tensor, t: Tensor) -> Tensor:
            u = model(torch.cat([x, t], 1))
            u_x, u_t = (torch.autograd.grad(u.sum(), by, create_graph=True)[0] for by in (x, t))
            (u_xx,) = torch.autograd.grad(u_x.sum(), x, create_graph=True)
            return (u_t + u * u_x - 0.01 * u_xx).square().mean()

        step = make(step_fn, model, optimizer)
        g = torch.Generator().manual_seed(1)
        points = [
            [torch.rand(256, 1, generator=g).cuda().requires_grad_() for _ in "xt"] for _ in range(count)
        ]
        found: list[Any] = []
        for index in range(STEPS):
            x, t = points[index % count]
            found += [step(x, t).clone(), x.grad.clone(), t.grad.clone()]
        return [*found, *(p.detach().clone() for p in model.parameters())]

    both(script, replays=80, plan="{F B O}")
