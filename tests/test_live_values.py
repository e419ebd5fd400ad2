"""Python numbers that change with each step, and that tensors depend on: bit for bit as in plain training."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from replays import text_of
from torch import Tensor, nn
from training import Diary, adamw, batches, both

from pygraph_train.problems import NotLegal
from pygraph_train.tracing.reproducing import ReproducingTrace

STEPS = 40


class Net(nn.Module):
    """A model with a second loss, and numbers that a step reads and writes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        self.weight = 0.0
        self.number = 0
        self.decay = 1.0
        self.last: Any = None

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layers(x)
        return result


def loss_of(net: Net, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(net(batch[0]), batch[1])


def both_losses(net: Net, batch: Any) -> tuple[Tensor, Tensor]:
    logits = net(batch[0])
    return nn.functional.cross_entropy(logits, batch[1]), logits.square().mean()


def an_argument(net: Net, batch: Any, w: float) -> Tensor:
    loss, other = both_losses(net, batch)
    return loss + w * other


def an_attribute(net: Net, batch: Any, w: float) -> Tensor:
    loss, other = both_losses(net, batch)
    return loss * (1 - net.weight) + other * net.weight


def a_power(net: Net, batch: Any, w: float) -> Tensor:
    net.number += 1
    loss, other = both_losses(net, batch)
    return loss + 0.99**net.number * other


def a_decay(net: Net, batch: Any, w: float) -> Tensor:
    net.decay *= 0.97
    loss, other = both_losses(net, batch)
    net.last = net.decay * 2
    return loss + other * net.decay


def a_temperature(net: Net, batch: Any, w: float) -> Tensor:
    return nn.functional.cross_entropy(net(batch[0]) / (0.1 + w), batch[1])


def a_cosine(net: Net, batch: Any, w: float) -> Tensor:
    share = 0.5 * (1 + math.cos(math.pi * min(1.0, net.number / 30)))
    loss, other = both_losses(net, batch)
    return loss.mul(share) - (1.5 - share) * other


def a_whole_number(net: Net, batch: Any, w: float) -> Tensor:
    return loss_of(net, batch) * (net.number + 1) / 8


def divided_by_a_tensor(net: Net, batch: Any, w: float) -> Tensor:
    loss, other = both_losses(net, batch)
    return loss + (w + 0.5) / (1 + other)


def in_place(net: Net, batch: Any, w: float) -> Tensor:
    logits = net(batch[0]) * 1.0
    logits *= w + 0.3
    logits -= w
    logits.div_(1 + w).add_(w)
    return nn.functional.cross_entropy(logits, batch[1])


def halves(net: Net, batch: Any, w: float) -> Tensor:
    small = net(batch[0]).bfloat16()
    other = net(batch[0]).half()
    parts = (small * w / (w + 0.7)).float(), (w * other).float()
    return nn.functional.cross_entropy(parts[0] + parts[1], batch[1])


def doubles(net: Net, batch: Any, w: float) -> Tensor:
    return nn.functional.cross_entropy((net(batch[0]).double() * w + w) / (1 + w), batch[1]).float()


def a_condition(net: Net, batch: Any, w: float) -> Tensor:
    loss, other = both_losses(net, batch)
    return loss + w * other if w > 0.1 and net.weight != 7 else loss


def a_truth(net: Net, batch: Any, w: float) -> Tensor:
    loss, other = both_losses(net, batch)
    loss = loss * (round(w, 1) or 2.0)
    return loss + other * w if not int(2 * w) else loss


def a_member(net: Net, batch: Any, w: float) -> Tensor:
    return loss_of(net, batch) * (2 if net.number in (3, 20, 25) else 1) * net.number


REPLAYED: dict[str, tuple[Callable[[Net, Any, float], Tensor], int]] = {
    f.__name__: (f, replays)
    for f, replays in (
        (an_argument, 30),
        (a_power, 30),
        (a_decay, 30),
        (halves, 30),
        (a_temperature, 30),
        (an_attribute, 30),
        (a_cosine, 30),
        (a_whole_number, 30),
        (divided_by_a_tensor, 30),
        (in_place, 30),
        (doubles, 30),
        (a_condition, 25),
        (a_truth, 20),
        (a_member, 25),
    )
}


def script_of(step_of: Callable[[Net, Any, float], Any], weights: Any = None) -> Callable[[Diary], None]:
    def script(diary: Diary) -> None:
        net = Net()
        optimizer = adamw(net)
        step = diary.step(lambda batch, w: step_of(net, batch, w), model=net, optimizer=optimizer)
        for index, batch in enumerate(batches(STEPS)):
            net.weight = index / 77
            w = (weights or (lambda i: math.sin(i / 9) ** 2 + 1e-3))(index)
            if step_of is not a_power:
                net.number = index
            result = step(batch, w)
            diary.write("result", result)
            diary.write("written", [net.number, net.decay, net.last])
        diary.write_state(net, optimizer)

    return script


@pytest.mark.slow_after(4)
@pytest.mark.parametrize("kind", REPLAYED)
def test_a_number_that_tensors_depend_on_may_change_with_each_step(kind):
    step_of, replays = REPLAYED[kind]
    both(script_of(step_of), replays=replays, plan="{F B O}")


def test_numbers_that_are_not_finite_or_zero():
    special = [0.0, -0.0, 1.0, math.inf, -1.5, 1e-42, 1e300]
    both(script_of(an_argument, lambda i: special[i % 7] if i > 10 else i / 7), replays=25, plan="{F B O}")


def raised(net: Net, batch: Any, w: float) -> Tensor:
    return loss_of(net, batch) ** (1 + w)


def a_limit(net: Net, batch: Any, w: float) -> Tensor:
    return loss_of(net, batch).clamp(max=5 * w)


def a_fill(net: Net, batch: Any, w: float) -> Tensor:
    return loss_of(net, batch) + torch.full((3,), w).sum()


def an_alpha(net: Net, batch: Any, w: float) -> Tensor:
    loss, other = both_losses(net, batch)
    return torch.add(loss, other, alpha=w)


def a_result(net: Net, batch: Any, w: float) -> dict[str, Any]:
    loss, other = both_losses(net, batch)
    return {"loss": loss + w * other, "w": w, "twice": w * 2}


def a_new_tensor(net: Net, batch: Any, w: float) -> Tensor:
    return loss_of(net, batch) * torch.tensor(w)


def an_index(net: Net, batch: Any, w: float) -> Tensor:
    return loss_of(net, batch) * net.number + net(batch[0])[net.number % 4, 0]


def whole_tensors(net: Net, batch: Any, w: float) -> Tensor:
    return loss_of(net, batch) + (batch[1] * w).sum() * 0.01


def a_text(net: Net, batch: Any, w: float) -> dict[str, Any]:
    return {"loss": loss_of(net, batch) * w, "text": f"{w:.3f}"}


def a_chosen_item(net: Net, batch: Any, w: float) -> Tensor:
    return loss_of(net, batch) * [1.0, 2.0, 3.0][int(3 * w) % 3] * w


def a_key(net: Net, batch: Any, w: float) -> Tensor:
    net.last = {w: 1}
    return loss_of(net, batch) * w


def a_size(net: Net, batch: Any, w: float) -> Tensor:
    return loss_of(net, batch) * net.number + torch.ones(net.number + 1).mean()


def a_loop(net: Net, batch: Any, w: float) -> Tensor:
    loss = loss_of(net, batch) * net.number
    for k in range(net.number % 3):
        loss = loss + k * w
    return loss


def a_dropout(net: Net, batch: Any, w: float) -> Tensor:
    return loss_of(net, (nn.functional.dropout(batch[0], p=w / 2), batch[1])) * w


def an_overflow(net: Net, batch: Any, w: float) -> Tensor:
    return loss_of(net, batch) * (net.number + 2**60)


OTHERS = (
    *(raised, a_limit, a_fill, an_alpha, a_result, a_new_tensor, an_index, whole_tensors, a_text),
    *(an_overflow, a_chosen_item, a_key, a_size, a_loop, a_dropout),
)


@pytest.mark.slow_after(4)
@pytest.mark.parametrize("step_of", OTHERS)
@pytest.mark.passes_without_graphs("these steps cannot be replayed")
def test_what_no_tensor_can_stand_for_is_never_stale(step_of):
    report = both(script_of(step_of), replays=1)
    assert report.plan != "{F B O}", str(report)
    assert "test_live_values.py:" in text_of(report), str(report)


def test_an_error_of_the_numbers_is_the_users():
    def script(diary: Diary) -> None:
        net = Net()
        step = diary.step(lambda batch, n: loss_of(net, batch) * (1 / n), model=net, optimizer=adamw(net))
        for index, batch in enumerate(batches(STEPS)):
            try:
                diary.write("loss", step(batch, index + 1.5 if index != 20 else 0.0))
            except ZeroDivisionError as error:
                diary.write("raised", str(error))

    both(script, replays=28, plan="{F B O}")


def inverse_that_is_written(net: Net, batch: Any, w: float) -> Tensor:
    net.last = 1 / w
    return loss_of(net, batch) * (w + 1)


def logarithm_that_nobody_reads(net: Net, batch: Any, w: float) -> Tensor:
    math.log(abs(w))
    return loss_of(net, batch) * (w + 1)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("step_of", [inverse_that_is_written, logarithm_that_nobody_reads])
def test_an_error_of_a_number_that_no_tensor_depends_on_comes_before_the_step_is_made(step_of):
    def script(diary: Diary) -> None:
        net = Net()
        optimizer = adamw(net)
        step = diary.step(lambda batch, w: step_of(net, batch, w), model=net, optimizer=optimizer)
        for index, batch in enumerate(batches(STEPS)):
            try:
                diary.write("loss", step(batch, 0.0 if index in (22, 30) else index / 7 + 0.1))
            except (ZeroDivisionError, ValueError) as error:
                diary.write("raised", str(error))
            diary.write("written", net.last)
        diary.write_state(net, optimizer)

    both(script, replays=25, plan="{F B O}")


def the_type_of_the_smaller(net: Net, batch: Any, w: float) -> Tensor:
    return loss_of(net, batch) * (2 if isinstance(min(w, 1), int) else 3) * w


def the_type_of_a_power(net: Net, batch: Any, w: float) -> Tensor:
    power = 2 ** int(4 * w - 2)
    return loss_of(net, batch) * (5 if type(power) is int else 7) + power


def the_smaller_one_may_be_a_truth(net: Net, batch: Any, w: float) -> Tensor:
    return loss_of(net, batch) * min(w, True)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    "step_of", [the_type_of_the_smaller, the_type_of_a_power, the_smaller_one_may_be_a_truth]
)
def test_a_number_that_becomes_one_of_another_type(step_of):
    weights = [1.7, 1.4, 0.3, 1.2, 0.8]
    both(script_of(step_of, lambda i: weights[i % 5] + i / 99 if i > 12 else 1.5 + i / 99), replays=20)


def a_value_read_ahead(net: Net, batch: Any, w: float) -> Tensor:
    loss, other = both_losses(net, batch)
    if (batch[0].max() * w) > 1.4:
        loss = loss * 2
    return loss + other * w


def a_value_beside(net: Net, batch: Any, w: float) -> Tensor:
    loss, other = both_losses(net, batch)
    if batch[0].max() > 1.6:
        loss = loss * 2
    return loss + other * w


def test_a_number_in_a_value_that_is_read_ahead_is_a_constant():
    """The value is read before the tensor of the number is filled. Numbers that change rarely keep their graphs."""
    both(script_of(a_value_read_ahead, lambda i: 0.7 + (i // 20) / 3), replays=10, plan="{F B O}")
    both(script_of(a_value_read_ahead), replays=1)  # of the optimizer


def test_numbers_change_beside_values_that_are_read_ahead():
    both(script_of(a_value_beside), replays=15, plan="{F B O}")


def test_a_number_is_computed_once_however_often_it_is_read():
    def doubled(net: Net, batch: Any, w: float) -> Tensor:
        for _ in range(60):
            w = (w + w) / 2
        for _ in range(1200):
            w = w + 0.001
        return loss_of(net, batch) * w

    both(script_of(doubled), replays=30, plan="{F B O}")


def test_a_compiled_trace_follows_the_first_one():
    """It reads the same numbers, and one that takes them for constants is no trace of this step."""

    def fn(x: Tensor, w: float) -> Tensor:
        return x * math.exp(w) if w > 0.1 else x

    def constant(x: Tensor, w: float) -> Tensor:
        return x * 2

    x = torch.randn(5)
    first = ReproducingTrace(torch.device("cpu"))
    first.take_as_inputs((), ("L['args'][1]",))
    assert torch.equal(first(fn, (x, 0.3), {}), x * math.exp(0.3))
    compiled = ReproducingTrace(torch.device("cpu"), compiler=lambda graph, inputs, left: graph.forward)
    compiled.live.follow(first.live)
    assert torch.equal(compiled(fn, (x, 0.3), {}), x * math.exp(0.3))
    for trace in (first, compiled):
        assert trace.reproduces
        assert trace.holds(fn, (x, 0.7), {})
        assert not trace.holds(fn, (x, 0.05), {})
        assert torch.equal(trace.silently(fn, (x, 0.7), {}), x * math.exp(0.7))
        with pytest.raises(NotLegal, match="leads to another decision"):
            trace.silently(fn, (x, 0.05), {})
    other = ReproducingTrace(torch.device("cpu"), compiler=lambda graph, inputs, left: graph.forward)
    other.live.follow(first.live)
    with pytest.raises(NotLegal, match="constants of the compiled step"):
        other(constant, (x, 0.3), {})
