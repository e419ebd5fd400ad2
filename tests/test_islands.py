"""Modules in which values decide about shapes run on the host, between parts of a graph of the rest of the step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from training import Diary, both, sgd

from pygraph_train import PyGraphError
from pygraph_train.torch_private.islands import IslandRun

WIDTH, EXPERTS, ROWS = 8, 4, 6


class Experts(nn.Module):
    """As in transformers: all experts in one parameter, and a loop over those that have something to do."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH, WIDTH) * 0.3)
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * WIDTH) * 0.3)
        self.dropout = dropout

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        found = torch.zeros_like(x)
        with torch.no_grad():
            mask = F.one_hot(chosen, EXPERTS).permute(2, 1, 0)
            hit = mask.sum((-1, -2)).greater(0).nonzero()
        for number in hit:
            number = number[0]
            place, row = torch.where(mask[number])
            hidden = F.dropout(F.silu(F.linear(x[row], self.up[number])), self.dropout, self.training)
            made = F.linear(hidden, self.down[number]) * weights[row, place, None]
            found.index_add_(0, row, made.to(found.dtype))
        return found


class ExpertsApart(nn.Module):
    """Each expert has parameters of its own."""

    def __init__(self, *, hit_only: bool) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))
        self.hit_only = hit_only

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        found = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            row, place = torch.where(chosen == number)
            if self.hit_only and not len(row):
                continue
            found = found.index_add(0, row, expert(x[row]).tanh() * weights[row, place, None])
        return found


class Block(nn.Module):
    """The gate uses the rows before the experts, and a shared expert uses them before and after."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.gate = nn.Linear(WIDTH, EXPERTS)
        self.experts = experts
        self.shared = nn.Linear(WIDTH, WIDTH)
        self.shared_gate = nn.Linear(WIDTH, 1)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        shared = self.shared(h)
        weights, chosen = self.gate(h).softmax(-1).topk(2, -1)
        found = self.experts(h, chosen, weights=weights)
        found += self.shared_gate(h).sigmoid() * shared
        return x + self.drop(found) + h * 0.1 + h.square() * 0.1  # type: ignore[no-any-return]


class Model(nn.Module):
    def __init__(self, *experts: nn.Module) -> None:
        super().__init__()
        self.inside = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(map(Block, experts))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inside(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


def under_autocast(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return loss_of(model, batch)


def a_batch(generator: torch.Generator, rows: int = ROWS) -> dict[str, Tensor]:
    return {
        "x": torch.randn(rows, WIDTH, generator=generator),
        "y": torch.randint(0, 3, (rows,), generator=generator),
    }


def train(
    make: Callable[[], nn.Module],
    loss_of: Callable[[nn.Module, dict[str, Tensor]], Any] = loss_of,
    *,
    steps: int = 30,
    replays: int | None = 20,
    plan: str | None = "{F B O}",
    rows: int = ROWS,
    micro_batches: int = 1,
    make_batch: Callable[..., dict[str, Tensor]] = a_batch,
    each: Callable[[nn.Module, int], None] = lambda model, number: None,
    optimizer: Callable[..., Any] = sgd,
    **config: Any,
) -> Any:
    def script(diary: Diary) -> None:
        model = make()
        rule = optimizer(model)
        step = diary.step(lambda batch: loss_of(model, batch), model=model, optimizer=rule)
        generator = torch.Generator().manual_seed(4)
        for number in range(steps * micro_batches):
            each(model, number)
            update = number % micro_batches == micro_batches - 1
            batch = make_batch(generator, rows)
            try:
                diary.write("loss", step(batch) if update else step.accumulate(batch))
            except ZeroDivisionError as error:
                diary.write("error", str(error))
            diary.write_state(model, rule)
            diary.write("attributes", [getattr(m, "calls", None) for m in model.modules()])

    return both(script, replays=replays, plan=plan, **config)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), 1e-2, fused=True, weight_decay=0.1)


@pytest.mark.parametrize("optimizer", [sgd, adam])
@pytest.mark.parametrize("loss", [loss_of, under_autocast])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_experts_run_between_parts_of_the_graph(
    optimizer: Callable[..., Any], loss: Callable[..., Any], dropout: float
) -> None:
    report = train(lambda: Model(Experts(dropout), Experts(dropout)), loss, optimizer=optimizer)
    assert not report.fallbacks, str(report)


def test_second_names_keep_the_order_of_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without them a capture is refused, and it has to be: the bits are others."""
    monkeypatch.setattr("pygraph_train.tracing.with_gaps.give_second_names", lambda graph: None)
    report = train(lambda: Model(Experts()), replays=1, plan=None, verify="off")
    assert report.steps_replayed == 0 and "added in another order" in report.fallbacks[0].reason, str(report)
    monkeypatch.setattr("pygraph_train.tracing.with_gaps.check_order", lambda loss: None)
    report = train(lambda: Model(Experts()), replays=1, plan=None)
    assert report.steps_replayed == 0 and "differs" in report.fallbacks[0].reason, str(report)
    with pytest.raises(AssertionError):
        train(lambda: Model(Experts()), verify="off")


def test_all_shapes_of_experts_that_gradients_reach() -> None:
    """Rows reach each expert or not: an empty selection has a gradient of zeros, and it is in the graph."""
    report = train(
        lambda: Model(ExpertsApart(hit_only=False), ExpertsApart(hit_only=False)), rows=2, optimizer=adam
    )
    assert not report.fallbacks, str(report)


def test_experts_without_a_gradient_make_the_step_as_it_is_written() -> None:
    """AdamW leaves a parameter alone whose gradient is None, and changes one whose gradient is zero."""
    report = train(
        lambda: Model(ExpertsApart(hit_only=True)),
        rows=13,
        steps=60,
        replays=20,
        plan="{F B O}",
        optimizer=adam,
    )
    assert not report.fallbacks, str(report)


def test_experts_that_often_have_no_gradient_are_refused() -> None:
    report = train(
        lambda: Model(ExpertsApart(hit_only=True)), rows=2, steps=60, replays=1, plan=None, optimizer=adam
    )
    assert "which of its parameters get gradients" in report.fallbacks[0].reason, str(report)


@pytest.mark.parametrize("loss", [loss_of, under_autocast])
def test_gradients_are_accumulated(loss: Callable[..., Any]) -> None:
    report = train(lambda: Model(Experts(0.2), Experts()), loss, micro_batches=3, replays=20)
    assert not report.fallbacks, str(report)


class Raises(Experts):
    """Some batches are bad."""

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        found = super().forward(x, chosen, weights)
        if x.sum() > 1e3:
            raise ZeroDivisionError("a bad batch")
        return found


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_an_island_that_raises(micro_batches: int) -> None:
    class Scaled(Model):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * 1.0

    def make() -> nn.Module:
        model = Scaled(Raises(0.2))
        model.blocks[0].norm = nn.Identity()
        return model

    def batches(generator: torch.Generator, rows: int) -> dict[str, Tensor]:
        batch = a_batch(generator, rows)
        if batch["y"].sum() % 7 == 6:
            batch["x"] = batch["x"].abs() * 1e4
        return batch

    class Positive(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.abs()

    def with_positive() -> nn.Module:
        model = make()
        model.inside = Positive()  # type: ignore[assignment]
        return model

    train(with_positive, make_batch=batches, steps=60, micro_batches=micro_batches)


class Counts(Experts):
    calls = 0

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x, chosen, weights)


class CountsLater(Experts):
    calls = 0
    begins = False

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        if self.begins:
            self.calls += 1
        return super().forward(x, chosen, weights)


class Resizes(Experts):
    """Half of the rows, or a third."""

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        found = super().forward(x, chosen, weights)
        return found[: 2 + int(chosen.sum() % 2)]


class InPlace(Experts):
    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        return super().forward(x, chosen, weights.mul_(1.5))


class CallsFunction(Experts):
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
            return grad * 2

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        return super().forward(self.Twice.apply(x), chosen, weights)  # type: ignore[no-untyped-call]


class UsesAnother(Experts):
    """A trained tensor that is not its own."""

    def __init__(self) -> None:
        super().__init__()
        self.other = [nn.Parameter(torch.ones(WIDTH))]

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        return super().forward(x * self.other[0], chosen, weights)


class Hooked(Experts):
    def __init__(self) -> None:
        super().__init__()
        self.register_forward_hook(lambda module, args, result: result * 2)


class ReturnsMore(Experts):
    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Any:
        return {"found": super().forward(x, chosen, weights)}


class Shrinks(Model):
    def forward(self, x: Tensor) -> Tensor:
        h = self.inside(x)
        weights, chosen = h[:, :EXPERTS].softmax(-1).topk(2, -1)
        return self.head(x) + self.blocks[0].experts(h, chosen, weights).mean()  # type: ignore[no-any-return,operator]


def in_checkpoint(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    found = checkpoint(model.blocks[0], model.inside(batch["x"]), use_reentrant=False)  # type: ignore[operator,index]
    return F.cross_entropy(model.head(found), batch["y"])  # type: ignore[operator]


def twice(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    block = model.blocks[0]  # type: ignore[index]
    return F.cross_entropy(model.head(block(block(model.inside(batch["x"])))), batch["y"])  # type: ignore[operator]


@pytest.mark.parametrize("make", [Counts, InPlace, CallsFunction, UsesAnother, Hooked])
def test_modules_that_are_no_islands(make: Callable[[], nn.Module]) -> None:
    report = train(lambda: Model(make()), replays=1, plan=None, verify="off")
    assert report.steps_replayed == 0 and report.fallbacks, str(report)


@pytest.mark.parametrize("loss", [in_checkpoint, twice])
def test_calls_that_are_no_islands(loss: Callable[..., Any]) -> None:
    report = train(lambda: Model(Experts()), loss, replays=1, plan=None, verify="off")
    assert report.steps_replayed == 0 and report.fallbacks, str(report)


def test_an_attribute_that_a_module_changes_later() -> None:
    def begin(model: nn.Module, number: int) -> None:
        model.blocks[0].experts.begins = number in (20, 21, 30)  # type: ignore[index,union-attr]

    train(lambda: Model(CountsLater()), each=begin, steps=40, verify="off")


def test_a_module_whose_results_have_shapes_of_values() -> None:
    report = train(lambda: Shrinks(Resizes()), replays=1, plan=None)
    assert "what Resizes returns" in report.fallbacks[0].reason, str(report)


class Encoder(nn.Module):
    """Sequences of different lengths."""

    def __init__(self, kind: type[nn.RNNBase], *, both: bool) -> None:
        super().__init__()
        self.rnn = kind(WIDTH, WIDTH, num_layers=2, batch_first=True, bidirectional=both, dropout=0.2)

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        found, state = self.rnn(packed)
        state = state[0] if isinstance(state, tuple) else state
        return nn.utils.rnn.pad_packed_sequence(found, batch_first=True, total_length=x.shape[1])[0], state


class Sequences(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], *, both: bool) -> None:
        super().__init__()
        self.inside = nn.Linear(WIDTH, WIDTH)
        self.encoder = Encoder(kind, both=both)
        self.head = nn.Linear(2 * WIDTH if both else WIDTH, 3)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        x = self.inside(x)
        found, state = self.encoder(x, lengths)
        return self.head(found.mean(1)) + state.mean() + x.square().mean()  # type: ignore[no-any-return]


@pytest.mark.parametrize(("kind", "both_ways"), [(nn.LSTM, False), (nn.LSTM, True), (nn.GRU, True)])
def test_packed_sequences(kind: type[nn.RNNBase], both_ways: bool) -> None:
    def batches(generator: torch.Generator, rows: int) -> dict[str, Tensor]:
        return {
            "x": torch.randn(rows, 5, WIDTH, generator=generator),
            "lengths": torch.randint(1, 6, (rows,), generator=generator),
            "y": torch.randint(0, 3, (rows,), generator=generator),
        }

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch["x"], batch["lengths"]), batch["y"])

    report = train(lambda: Sequences(kind, both=both_ways), loss, make_batch=batches)
    assert not report.fallbacks, str(report)


class Doubles(nn.Module):
    """Takes the place of experts, and has their parameters."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.up, self.down = experts.up, experts.down
        self.forward_of: Any = [experts]

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        found: Tensor = self.forward_of[0](x, chosen, weights)
        return found * 2


def test_another_module_in_the_place_of_an_island() -> None:
    def exchange(model: nn.Module, number: int) -> None:
        if number == 20:
            model.blocks[0].experts = Doubles(model.blocks[0].experts)  # type: ignore[index,union-attr]

    train(lambda: Model(Experts()), each=exchange, steps=40, replays=10, plan=None)


def test_modes_of_an_island_that_change_in_mid_run() -> None:
    def change(model: nn.Module, number: int) -> None:
        experts = model.blocks[0].experts  # type: ignore[index,union-attr]
        experts.train(number % 10 < 5)
        experts.dropout = 0.3 if number < 20 else 0.1

    train(lambda: Model(Experts(0.3)), each=change, steps=40, verify="off")


class Normalizes(Experts):
    """Writes to buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("seen", torch.zeros(EXPERTS))

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        self.seen += torch.bincount(chosen.flatten(), minlength=EXPERTS)
        found = self.norm(super().forward(x, chosen, weights))
        if self.seen[0] % 5 == 4:
            raise ZeroDivisionError("a number")
        return found


@pytest.mark.parametrize("verify", ["always", "off"])
def test_buffers_that_an_island_writes(verify: str) -> None:
    """Also where it raises after that: its replay is taken back, and the step makes the writes."""

    def reads(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        loss = loss_of(model, batch)
        return loss + model.blocks[0].experts.seen.sum() * 1e-3  # type: ignore[index,union-attr,operator,return-value]

    train(lambda: Model(Normalizes()), reads, steps=60, verify=verify)


def test_objects_that_the_step_writes_and_an_island_reads() -> None:
    def writes(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        """Dynamo sees that nothing is left of it."""
        model.blocks[0].experts.dropout = 0.3 if batch["x"].shape[0] == ROWS else 0.1  # type: ignore[index,union-attr]
        loss = loss_of(model, batch)
        model.blocks[0].experts.dropout = 0.0  # type: ignore[index,union-attr]
        return loss

    report = train(lambda: Model(Experts()), writes, replays=1, plan=None, verify="off")
    assert report.steps_replayed == 0 and "may read" in report.fallbacks[0].reason, str(report)


@pytest.mark.parametrize("kind", ["Mixtral", "Qwen2Moe"])
@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
def test_models_of_transformers(kind: str, implementation: str) -> None:
    """Dynamo does not know `torch.nn.functional.grouped_mm` of float32, and transformers has another branch for it."""
    transformers = pytest.importorskip("transformers")

    def make() -> nn.Module:
        config = getattr(transformers, f"{kind}Config")(
            vocab_size=50,
            hidden_size=16,
            intermediate_size=24,
            moe_intermediate_size=24,
            shared_expert_intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            num_local_experts=4,
            num_experts=4,
            num_experts_per_tok=2,
            max_position_embeddings=32,
        )
        config._experts_implementation = implementation
        model: nn.Module = getattr(transformers, f"{kind}ForCausalLM")(config)
        return model.train()

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return model(input_ids=batch["x"], labels=batch["x"], use_cache=False).loss  # type: ignore[no-any-return]

    def batches(generator: torch.Generator, rows: int) -> dict[str, Tensor]:
        return {"x": torch.randint(0, 50, (rows, 7), generator=generator)}

    report = train(make, loss, make_batch=batches, optimizer=adam)
    assert not report.fallbacks, str(report)


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_backward_that_fails_is_taken_back_or_told(
    micro_batches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where gradients of an accumulation are there already, they cannot be put back: this ends the training."""
    stock, calls = IslandRun.backward, []

    def backward(self: IslandRun, *args: Any, **kwargs: Any) -> Any:
        calls.append(self)
        if len(calls) in (10, 12, 20):
            raise RuntimeError("out of luck")
        return stock(self, *args, **kwargs)

    monkeypatch.setattr(IslandRun, "backward", backward)
    if micro_batches == 1:
        report = train(lambda: Model(Experts(0.1)), steps=40)
        assert len(calls) > 20 and not report.fallbacks, str(report)
        return
    calls += [None] * 3  # so that it is a second micro-batch
    with pytest.raises((PyGraphError, AssertionError), match="gradients of this accumulation are lost"):
        train(lambda: Model(Experts(0.1)), micro_batches=2)
