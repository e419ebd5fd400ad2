"""Numbers that a step reads of its own tensors for the shift of a roll, or to take a column (Autoformer)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from test_failures import fail_in_capture
from torch import Tensor, nn
from torch._dynamo.backends.debugging import aot_eager
from training import Diary, adamw, batches, both

from pygraph_train.torch_private.rolled import can_be_rolled, rolled
from pygraph_train.torch_private.selected import selected
from pygraph_train.tracing.read_ahead import ReadingAhead

STEPS = 16
ENOUGH = 8


class Delays(nn.Module):
    """Its hidden states are moved by what was computed of them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 9), nn.Linear(9, 3)
        self.n = 0

    def forward(self, x: Tensor, kind: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        hidden = torch.tanh(self.first(x))
        delays = hidden.mean(0).topk(3).indices
        moved: Tensor = kind(hidden, delays)
        result: Tensor = self.second(moved * hidden)
        return result


def autoformer(x: Tensor, delays: Tensor) -> Tensor:
    total = torch.zeros_like(x).float()
    for i in range(3):
        total += x.roll(shifts=-int(delays[i]), dims=1) * x[:, i].view(-1, 1)
    return total


def item(x: Tensor, delays: Tensor) -> Tensor:
    return torch.roll(x, delays[0].item(), 1) - torch.roll(x, dims=[-1], shifts=[delays[1].item()])


def arithmetic(x: Tensor, delays: Tensor) -> Tensor:
    first, second = int(delays[0]), int(delays[1])
    moved = x.roll((3 - first) * 2 + second - 1, 0) + x.roll(-(-first % 4), (1,))
    first += 2
    return moved + x.roll(int(+first), 1)


def before_it_changes(x: Tensor, delays: Tensor) -> Tensor:
    shift = int(delays[0])
    delays += 1
    moved = x.roll(shift, 1) + x.roll(int(delays[0]), 1)
    delays.zero_()
    return moved


def of_what_needs_no_gradient(x: Tensor, delays: Tensor) -> Tensor:
    return x.detach().roll(int(delays[0].to(torch.int32)), 1) + x * torch.ones_like(x).long().roll(
        int(delays[1]), 0
    )


def columns(x: Tensor, delays: Tensor) -> Tensor:
    """Autoformer takes these as well, which torch reads on the host."""
    weights = torch.stack([x[:, delays[i]] for i in range(3)], dim=-1).softmax(-1)
    total = torch.zeros_like(x)
    for i in range(3):
        total += x.roll(-int(delays[i]), 1) * weights[:, i].view(-1, 1)
    return total


KINDS = (columns, autoformer, item, arithmetic, before_it_changes, of_what_needs_no_gradient)


def script_of(kind: Callable[[Tensor, Tensor], Tensor], *, count: int = STEPS) -> Callable[[Diary], None]:
    def script(diary: Diary) -> None:
        net = Delays()
        optimizer = adamw(net)

        def step_fn(batch: tuple[Tensor, Tensor]) -> Tensor:
            return nn.functional.cross_entropy(net(batch[0], kind), batch[1])

        step = diary.step(step_fn, model=net, optimizer=optimizer)
        for batch in batches(count):
            diary.write("result", step(batch).detach())
        diary.write_state(net, optimizer)

    return script


@pytest.mark.parametrize("verify", ["sample", "always"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_shift_that_is_computed_stays_on_the_device(kind, verify):
    both(script_of(kind), replays=ENOUGH, plan="{F B O}", verify=verify)


def test_compilers_trace_into_the_roll():
    graph = torch.fx.Graph()
    x, shift = graph.placeholder("x"), graph.placeholder("shift")
    graph.output((graph.call_function(rolled, (x, shift, 1)),))
    given = torch.randn(3, 5, requires_grad=True)
    compiled = aot_eager(torch.fx.GraphModule({}, graph), [given, torch.tensor(2)])
    for n in (2, -7):
        (found,), want = compiled(given, torch.tensor(n)), given.roll(n, 1)
        assert torch.equal(found, want)
        factor = torch.randn(3, 5)
        gradients = [torch.autograd.grad((made * factor).sum(), given)[0] for made in (found, want)]
        assert torch.equal(*gradients)


def test_steps_go_on_plainly_after_a_capture_that_fails(monkeypatch):
    left = fail_in_capture(monkeypatch, RuntimeError("planted"))
    report = both(script_of(autoformer), replays=1)
    assert left == [0] and report.steps_replayed == 0, str(report)


def an_index(x: Tensor, delays: Tensor) -> Tensor:
    shift = int(delays[0])
    return x.roll(shift, 1) + x[:, shift].view(-1, 1)


def a_decision(x: Tensor, delays: Tensor) -> Tensor:
    shift = int(delays[0])
    return x.roll(shift, 1) if shift > 3 else x.roll(-shift, 1)


def a_factor(x: Tensor, delays: Tensor) -> Tensor:
    shift = int(delays[0])
    return x.roll(shift, 1) * shift


def a_fraction(x: Tensor, delays: Tensor) -> Tensor:
    shift = int(delays[0])
    return x.roll(int(shift / 2), 1)


def a_text(x: Tensor, delays: Tensor) -> Tensor:
    shift = int(delays[0])
    return x.roll(len(f"{shift}"), 1)


def a_range(x: Tensor, delays: Tensor) -> Tensor:
    shift = int(delays[0])
    return x.roll(len(range(shift)), 1)


def a_key(x: Tensor, delays: Tensor) -> Tensor:
    shift = int(delays[0])
    return x.roll({shift: 3}.get(2, 1), 1)


def a_list(x: Tensor, delays: Tensor) -> Tensor:
    shift = int(delays[0])
    return x.roll(1 if shift in [1, 2] else 2, 1)


def a_tuple(x: Tensor, delays: Tensor) -> Tensor:
    """Dynamo of torch 2.13 says of a size that it does not know that nothing is equal to it."""
    shift = int(delays[0])
    return x * 2 if torch.zeros(2, delays[0]).size() == (2, shift) else x


def a_tuple_in_a_list(x: Tensor, delays: Tensor) -> Tensor:
    shift = int(delays[0])
    return x * 2 if [(1, 3), shift] != [(1, 3), delays.sum().item()] else x


QUESTIONS: dict[str, Callable[[int, Tensor], Any]] = {
    "the greatest": lambda n, t: max([n, 3]),
    "a constant in a list": lambda n, t: 4 in [n, 11],
    "a constant in a tuple": lambda n, t: 4 in (11, n),
    "a constant in a list of lists": lambda n, t: [4] in [[n]],
    "among the values of a dict": lambda n, t: 4 in {"a": n}.values(),
    "in a set": lambda n, t: 4 in {n, 11},
    "the place in a list": lambda n, t: [n, 4].index(4),
    "how often": lambda n, t: [n, 4].count(4),
    "a list that is sorted": lambda n, t: sorted([n, 4])[0],
    "two lists": lambda n, t: [n, 1] == [4, 1],
    "two tuples": lambda n, t: (n, 2) > (4, 1),
    "two dicts": lambda n, t: {"a": n} == {"a": 4},
    "two ranges": lambda n, t: range(n) == range(4),
    "identity": lambda n, t: n is None,
    "whether any": lambda n, t: any([n - 4]),
    "a size that is not known": lambda n, t: torch.zeros(2, t[0]).size() == (2, n),
    "a chain of comparisons": lambda n, t: 3 < n < 5,
    "truth": lambda n, t: bool(n - 4) or not n,
    "a class of its own": lambda n, t: Box(n) == Box(4),
    "a named tuple": lambda n, t: Pair(n, 1) == Pair(4, 1),
    "a match": lambda n, t: matched(n),
    "a slice": lambda n, t: len([1, 2, 3, 4, 5, 6, 7, 8, 9][:n]),
    "an index": lambda n, t: [1, 2, 3, 4, 5, 6, 7, 8, 9][n],
    "a power": lambda n, t: n**2,
    "bits": lambda n, t: n & 3,
    "a method": lambda n, t: n.bit_length(),
    "a division": lambda n, t: divmod(n, 3)[0] + n // 2,
}


@dataclasses.dataclass
class Box:
    n: int


class Pair(NamedTuple):
    a: int
    b: int


def matched(n: int) -> int:
    match n:
        case 4:
            return 5
        case _:
            return 7


@pytest.mark.parametrize("ask", QUESTIONS)
def test_a_question_is_never_answered_by_the_trace(ask):
    """A number of its own kind equals nothing that Dynamo knows: a wrong answer would train in another way."""

    def asks(x: Tensor, delays: Tensor) -> Tensor:
        shift = int(delays[0])
        return x * float(QUESTIONS[ask](shift, delays)) + x.roll(shift, 1)

    report = both(script_of(asks, count=4), never="a number is read")
    assert report.fallbacks, "the trace has answered"


def all_dimensions(x: Tensor, delays: Tensor) -> Tensor:
    shift = int(delays[0])
    return x.roll(shift)


def two_dimensions(x: Tensor, delays: Tensor) -> Tensor:
    shift = int(delays[0])
    return x.roll((shift, 1), (0, 1))


def four_dimensions(x: Tensor, delays: Tensor) -> Tensor:
    """On a CPU the result may be channels-last."""
    shift = int(delays[0])
    return x.view(2, 2, 2, 9).roll(shift, 1).view(8, 9)


def a_column_alone(x: Tensor, delays: Tensor) -> Tensor:
    """It is a view: kernels may add its elements in another order than those of a copy."""
    return x * x[:, delays[0]].sum()


def a_column_that_is_written(x: Tensor, delays: Tensor) -> Tensor:
    x = x.clone()
    column = x[:, delays[0]]
    x += 1
    return x * torch.stack([column]).view(-1, 1)


def a_place_that_was_changed(x: Tensor, delays: Tensor) -> Tensor:
    delays -= 9
    return x * torch.stack([x[:, delays[0]]]).view(-1, 1)


def a_place_of_something_else(x: Tensor, delays: Tensor) -> Tensor:
    places = (delays > 3).long()
    return x * torch.stack([x[:, places[0]]]).view(-1, 1)


def a_row_of_fewer(x: Tensor, delays: Tensor) -> Tensor:
    return x * torch.stack([torch.cat([x, x.detach()[:2]])[:9][:, :8][:, delays[0] * 0]]).view(-1, 1)[:8]


REFUSED = (
    a_column_alone,
    a_column_that_is_written,
    a_place_that_was_changed,
    a_place_of_something_else,
    a_row_of_fewer,
    an_index,
    a_decision,
    a_factor,
    a_fraction,
    a_text,
    a_range,
    a_key,
    a_list,
    a_tuple,
    a_tuple_in_a_list,
    all_dimensions,
    two_dimensions,
    four_dimensions,
)


@pytest.mark.parametrize("kind", REFUSED)
def test_anything_else_that_follows_is_refused_as_before(kind, monkeypatch):
    report = both(script_of(kind, count=4), never="a number is read")
    assert report.fallbacks
    monkeypatch.setattr(ReadingAhead, "holds_number", lambda self, where: False)
    assert report.fallbacks == both(script_of(kind, count=4), never="a number is read").fallbacks


def test_a_number_that_the_step_writes_or_returns_is_refused():
    def script(diary: Diary) -> None:
        net = Delays()

        def writes(x: Tensor, delays: Tensor) -> Tensor:
            net.n = int(delays[0])
            return x.roll(net.n, 1)

        def step_fn(batch: tuple[Tensor, Tensor]) -> Tensor:
            return nn.functional.cross_entropy(net(batch[0], writes), batch[1])

        step = diary.step(step_fn, model=net, optimizer=adamw(net))
        for batch in batches(4):
            diary.write("result", (step(batch).detach(), net.n))

    both(script, refused="the value of a tensor is read on the host")


def test_a_column_has_the_same_bits_and_gradients():
    x = torch.randn(3, 5)
    x[:, 2] = -0.0
    for dim, place in ((1, 0), (1, 2), (0, 2)):
        results = []
        for take in (
            lambda t, n=place, d=dim: t.select(d, n),
            lambda t, n=place, d=dim: selected(t, torch.tensor(n), d),
        ):
            leaf = x.clone().requires_grad_()
            made = torch.stack([take(leaf), take(leaf)])
            factor = torch.full_like(made, -0.0)
            factor[:, 1] = 2.0
            (first,) = torch.autograd.grad((made * factor).sum(), leaf, create_graph=True)
            (again,) = torch.autograd.grad((take(leaf) ** 3).sum(), leaf, create_graph=True)
            (second,) = torch.autograd.grad(again.sum(), leaf)
            results.append((made, first, again, second))
        for one, other in zip(*results, strict=True):
            assert torch.equal(one, other) and torch.equal(one.signbit(), other.signbit())
            assert one.stride() == other.stride()


SHAPES: list[tuple[tuple[int, ...], int]] = [
    ((7,), 0),
    ((3, 5), 1),
    ((3, 5), 0),
    ((2, 3, 4), 1),
    ((2, 3, 4), -1),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize(("shape", "dim"), SHAPES)
def test_a_roll_moves_the_same_bits_to_the_same_places(shape, dim, dtype):
    """Also -0.0 and NaN, of tensors that lie in another order, and with gradients of gradients."""
    x = torch.randn(shape).mul(3).to(dtype)
    if dtype.is_floating_point:
        x.view(-1)[0], x.view(-1)[-1] = -0.0, float("nan")
    for source in (x, x.mT.contiguous().mT if x.dim() > 1 else x, x[:1].expand_as(x)):
        assert can_be_rolled(source)
        for shift in (-13, -1, 0, 1, 2, 100):
            want, found = source.roll(shift, dim), rolled(source, torch.tensor(shift), dim)
            assert want.dtype == found.dtype and want.stride() == found.stride()
            assert torch.equal(want.contiguous().view(torch.uint8), found.contiguous().view(torch.uint8))
            if not dtype.is_floating_point:
                continue
            results = []
            for roll in (
                lambda t, n=shift: t.roll(n, dim),
                lambda t, n=shift: rolled(t, torch.tensor(n), dim),
            ):
                leaf = source.detach().nan_to_num().requires_grad_()
                (first,) = torch.autograd.grad(roll(leaf).square().sum(), leaf, create_graph=True)
                (second,) = torch.autograd.grad((first * first).sum(), leaf)
                results.append((first, second))
            for one, other in zip(*results, strict=True):
                assert torch.equal(one, other) and one.stride() == other.stride()
                assert torch.equal(one.signbit(), other.signbit())


def test_autoformer_is_one_graph():
    transformers = pytest.importorskip("transformers")

    def script(diary: Diary) -> None:
        config = transformers.AutoformerConfig(
            prediction_length=6,
            context_length=8,
            lags_sequence=[1, 2],
            num_time_features=1,
            d_model=16,
            encoder_layers=1,
            decoder_layers=1,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            encoder_ffn_dim=16,
            decoder_ffn_dim=16,
            encoder_layerdrop=0.0,
            decoder_layerdrop=0.0,
            label_length=4,
            moving_average=3,
        )
        net = transformers.AutoformerForPrediction(config).train()
        optimizer = adamw(net)
        step = diary.step(lambda batch: net(**batch).loss, model=net, optimizer=optimizer)
        generator = torch.Generator().manual_seed(1)
        past = config.context_length + max(config.lags_sequence)

        def batch() -> dict[str, Any]:
            sizes = {"past_values": (2, past), "past_time_features": (2, past, 1)}
            sizes |= {"future_values": (2, 6), "future_time_features": (2, 6, 1)}
            made = {name: torch.randn(size, generator=generator) for name, size in sizes.items()}
            return {**made, "past_observed_mask": torch.ones(2, past)}

        for _ in range(14):
            diary.write("result", step(batch()).detach())
        diary.write_state(net, optimizer)

    both(script, replays=6, plan="{F B O}")
