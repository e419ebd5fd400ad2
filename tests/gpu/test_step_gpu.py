"""Replayed training on a GPU equals training without graphs."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.compile_fx import compile_fx

from pygraph_train import GraphedStep, PyGraphConfig
from pygraph_train.regions import inductor

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

STEPS = 50
LR = 2.0**-9  # exact in float32, where capturable kernels hold it


def transformer() -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.1, batch_first=True)
    return nn.Sequential(nn.Linear(16, 64), nn.TransformerEncoder(layer, 2), nn.Linear(64, 8)).cuda()


def convnet() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Flatten(),
        nn.Linear(16 * 36, 8),
    ).cuda()


def batches(shape: tuple[int, ...], device: str = "cuda") -> list[dict[str, Tensor]]:
    g = torch.Generator().manual_seed(1)
    made = [
        {"x": torch.randn(shape, generator=g), "y": torch.randn(shape[0], 8, generator=g)}
        for _ in range(STEPS)
    ]
    if device == "cpu":
        return [{k: v.pin_memory() for k, v in b.items()} for b in made]
    return [{k: v.to(device) for k, v in b.items()} for b in made]


def loss_of(net: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    out = net(batch["x"])
    if out.dim() == 3:
        out = out.mean(1)
    return nn.functional.mse_loss(out, batch["y"])


def deterministic() -> Any:
    return torch.backends.cudnn.flags(enabled=True, deterministic=True, benchmark=False)


def plain(
    net: nn.Module, opt: Any, data: list[dict[str, Tensor]], fn: Any, scheduler: Any = None
) -> list[Tensor]:
    torch.manual_seed(7)
    losses = []
    for batch in data:
        opt.zero_grad()
        loss = fn(net, batch)
        loss.backward()
        opt.step()
        if scheduler is not None:
            scheduler.step()
        losses.append(loss.detach())
    return losses


def graphed(step: GraphedStep, data: list[dict[str, Tensor]], scheduler: Any = None) -> list[Tensor]:
    torch.manual_seed(7)
    losses = []
    for batch in data:
        losses.append(step(batch))
        if scheduler is not None:
            scheduler.step()
    return losses


@pytest.mark.parametrize(("make", "shape"), [(transformer, (4, 12, 16)), (convnet, (4, 3, 8, 8))])
def test_eager_kernels_replayed_equal_eager_bit_for_bit(make: Any, shape: tuple[int, ...]) -> None:
    with deterministic():
        a = make()
        b = copy.deepcopy(a)
        opt_a = torch.optim.AdamW(a.parameters(), lr=LR, fused=True)
        opt_b = torch.optim.AdamW(b.parameters(), lr=LR, fused=True)
        data = batches(shape)
        expected = plain(a, opt_a, data, loss_of)
        step = GraphedStep(
            lambda x: loss_of(b, x), model=b, optimizer=opt_b, config=PyGraphConfig(compile=False)
        )
        losses = graphed(step, data)
        report = step.report()
        assert report.steps_replayed >= STEPS - 10, str(report)
        assert [float(x) for x in losses] == [float(x) for x in expected]
        for (name, p), q in zip(a.state_dict().items(), b.state_dict().values(), strict=True):
            assert torch.equal(p, q), name
        assert report.first_replay_step is not None
        assert report.first_replay_step <= 20
        step.close()


def test_scheduled_learning_rate_is_followed() -> None:
    a = transformer()
    b = copy.deepcopy(a)
    opts = [torch.optim.AdamW(m.parameters(), lr=LR, fused=True) for m in (a, b)]
    schedules = [torch.optim.lr_scheduler.StepLR(o, 5, 0.5) for o in opts]  # stays exact in float32
    data = batches((4, 12, 16))
    expected = plain(a, opts[0], data, loss_of, schedules[0])
    step = GraphedStep(
        lambda x: loss_of(b, x), model=b, optimizer=opts[1], config=PyGraphConfig(compile=False)
    )
    losses = graphed(step, data, schedules[1])
    assert step.report().steps_replayed >= STEPS - 10
    assert [float(x) for x in losses] == [float(x) for x in expected]


@pytest.mark.usefixtures("same_block_sizes")
def test_inductor_kernels_replayed_equal_compiled_run_bit_for_bit() -> None:
    a = transformer()
    b = copy.deepcopy(a)
    opts = [torch.optim.AdamW(m.parameters(), lr=LR, fused=True) for m in (a, b)]
    data = batches((4, 12, 16))
    for m in (a, b):  # dropout is drawn differently by Inductor while warming up with eager kernels
        for module in m.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
            if isinstance(module, nn.MultiheadAttention):
                module.dropout = 0.0
    step = GraphedStep(
        lambda x: loss_of(b, x), model=b, optimizer=opts[1], config=PyGraphConfig(compile=True)
    )
    warm = 3
    torch.manual_seed(7)
    losses = [step(x) for x in data]
    assert step.report().steps_replayed >= STEPS - 10, str(step.report())
    compiled = torch.compile(loss_of)
    plain(a, opts[0], data[:warm], loss_of)
    expected = plain(a, opts[0], data[warm:], compiled)
    assert [float(x) for x in losses[warm:]] == [float(x) for x in expected]
    assert any(c.compiled for c in step.report().captures)


def test_small_kernels_of_a_compiled_step_run_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Casts of weights and of their gradients, and the last step of sums; no bit changes."""
    torch.manual_seed(0)
    depth = 12
    layers = [module for _ in range(depth) for module in (nn.Linear(64, 64), nn.GELU())]
    x = torch.randn(4096, 64, device="cuda")
    launches, results = [], []
    for together in (False, True):
        torch._dynamo.reset()
        net = copy.deepcopy(nn.Sequential(*layers)).cuda()
        opt = torch.optim.AdamW(net.parameters(), lr=LR, fused=True)

        def loss_of(x: Tensor, net: nn.Module = net) -> Tensor:
            with torch.autocast("cuda", dtype=torch.bfloat16):
                return net(x).float().square().mean()

        with monkeypatch.context() as patch:
            if not together:
                patch.setattr(
                    inductor, "compile_whole", lambda gm, inputs, left: compile_fx(gm, list(inputs))
                )
            step = GraphedStep(loss_of, model=net, optimizer=opt, config=PyGraphConfig(compile=True))
            losses = [float(step(x)) for _ in range(80)]  # plans are compared at first
        report = step.report()
        assert report.running_plan == "{F B O}" and report.steps_replayed >= 40, str(report)
        assert any(c.compiled for c in report.captures) and not report.notes, str(report)
        results.append([torch.tensor(losses), *(p.detach().cpu() for p in net.parameters())])
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            step(x)
            torch.cuda.synchronize()
        kernels = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
        launches.append(len(kernels))
        step.close()
    assert launches[1] <= launches[0] - 3 * depth, launches
    assert all(map(torch.equal, *results))


def test_batches_from_pinned_host_memory_are_staged() -> None:
    a = transformer()
    b = copy.deepcopy(a)
    opts = [torch.optim.SGD(m.parameters(), lr=LR, momentum=0.9, fused=True) for m in (a, b)]
    expected = plain(a, opts[0], batches((4, 12, 16)), loss_of)
    step = GraphedStep(
        lambda x: loss_of(b, x), model=b, optimizer=opts[1], config=PyGraphConfig(compile=False)
    )
    losses = graphed(step, batches((4, 12, 16), "cpu"))
    assert [float(x) for x in losses] == [float(x) for x in expected]


def test_fp16_scaler_skips_steps_inside_the_graph() -> None:
    data = batches((4, 12, 16))
    data[20]["x"][0, 0, 0] = float("inf")
    results = []
    for use_graph in (False, True):
        net = transformer()
        opt = torch.optim.AdamW(net.parameters(), lr=LR, fused=True)
        scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10, growth_interval=8)

        def fn(x: dict[str, Tensor], net: nn.Module = net) -> Tensor:
            with torch.autocast("cuda", dtype=torch.float16):
                return loss_of(net, x)

        config = PyGraphConfig(compile=False, engine="cuda" if use_graph else "off")
        step = GraphedStep(fn, model=net, optimizer=opt, scaler=scaler, max_grad_norm=1.0, config=config)
        torch.manual_seed(7)
        for x in data:
            step(x)
        if use_graph:
            assert step.report().steps_replayed >= STEPS - 10, str(step.report())
        results.append([*net.state_dict().values(), torch.tensor(scaler.get_scale())])
        step.close()
    for p, q in zip(*results, strict=True):
        assert torch.equal(p.cpu(), q.cpu())


def test_accumulation_replays_first_middle_and_last() -> None:
    results = []
    for use_graph in (False, True):
        net = transformer()
        opt = torch.optim.AdamW(net.parameters(), lr=LR, fused=True)
        config = PyGraphConfig(compile=False, engine="cuda" if use_graph else "off")
        step = GraphedStep(lambda x, net=net: loss_of(net, x) / 4, model=net, optimizer=opt, config=config)
        torch.manual_seed(7)
        for i, x in enumerate(batches((4, 12, 16))):
            (step if i % 4 == 3 else step.accumulate)(x)
        if use_graph:
            plans = {c.plan for c in step.report().captures}
            assert plans == {"{F B}", "{F B}+", "{F B O}+"}, str(step.report())
        results.append(list(net.state_dict().values()))
        step.close()
    for p, q in zip(*results, strict=True):
        assert torch.equal(p, q)


def test_host_read_in_the_step_falls_back_and_training_goes_on() -> None:
    a = transformer()
    b = copy.deepcopy(a)
    opts = [torch.optim.AdamW(m.parameters(), lr=LR, fused=True) for m in (a, b)]
    data = batches((4, 12, 16))[:30]

    def reads(net: nn.Module, x: dict[str, Tensor]) -> Tensor:
        loss = loss_of(net, x)
        print(loss.item(), file=io.StringIO())  # a print is in no graph
        return loss * 2 if loss.item() > 1 else loss

    expected = plain(a, opts[0], data, reads)
    step = GraphedStep(lambda x: reads(b, x), model=b, optimizer=opts[1], config=PyGraphConfig(compile=False))
    losses = graphed(step, data)
    assert step.report().steps_replayed == 0
    assert [float(x) for x in losses] == [float(x) for x in expected]
    assert __file__ in (step.report().fallbacks[0].where or "")


def test_capture_that_cuda_refuses_falls_back_from_the_very_step() -> None:
    """Dynamo sees nothing wrong here: only the capture does."""
    a = transformer()
    b = copy.deepcopy(a)
    opts = [torch.optim.AdamW(m.parameters(), lr=LR, fused=True) for m in (a, b)]
    data = batches((4, 12, 16))[:30]
    expected = plain(a, opts[0], data, lambda net, x: loss_of(net, x))

    @torch.library.custom_op("pygraph_test::sync", mutates_args=())
    def sync(x: Tensor) -> Tensor:
        torch.cuda.synchronize()
        return x.clone()

    sync.register_fake(lambda x: x.clone())
    sync.register_autograd(lambda ctx, grad: grad)
    step = GraphedStep(
        lambda x: sync(loss_of(b, x)), model=b, optimizer=opts[1], config=PyGraphConfig(compile=False)
    )
    losses = graphed(step, data)
    assert step.report().steps_replayed == 0
    assert step.report().fallbacks
    assert [float(x) for x in losses] == [float(x) for x in expected]
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        assert torch.equal(p, q)
