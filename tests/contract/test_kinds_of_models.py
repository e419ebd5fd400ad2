"""What models are and do: LoRA, checkpointing, several forwards, dropout, BatchNorm, hooks, second derivatives."""

from __future__ import annotations

import functools
import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._decomp import decompositions
from torch.func import functional_call, grad, jacrev, jvp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import normalize, scaled_dot_product_attention
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

from pygraph_train import GraphedStep
from pygraph_train.torch_private.stock_dynamo import CompiledFunction, traces

from .compare import ENGINE, Run, same_as_plain
from .models import DEVICE, Net, adamw, batches, cross_entropy, loss_of, sgd


def trains(run: Run, model: nn.Module, step_fn: Any = None, count: int = 24, optimizer: Any = adamw) -> None:
    """A loop over batches."""
    step = run.step(
        step_fn or (lambda x, y: cross_entropy(model(x), y)), model=model, optimizer=optimizer(model)
    )
    for batch in batches(count):
        step(*batch)


class Lora(nn.Module):
    """A frozen linear layer and a trained update of low rank."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        self.dropout = nn.Dropout(0.1)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(self.dropout(x))) * 2.0


class Checkpointed(nn.Module):
    """Saves no activations of its inner module."""

    def __init__(self, inner: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.reentrant = inner, reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


@same_as_plain(replays=12)
def test_lora_trains_its_own_weights_only(run: Run) -> None:
    model = Net().requires_grad_(False)
    model.first, model.second = Lora(model.first), Lora(model.second)
    trains(
        run,
        model,
        optimizer=lambda m: torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], fused=True),
    )


class Attention(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return scaled_dot_product_attention(x[None], x[None], x[None], dropout_p=0.2)[0]


@pytest.mark.parametrize(
    "drawing", [nn.Identity(), nn.Dropout(0.3), nn.Dropout(0.3, inplace=True), nn.RReLU(), Attention()]
)
@pytest.mark.quick
@same_as_plain(replays=12)
def test_gradient_checkpointing(run: Run, drawing: nn.Module) -> None:
    """What is computed again in the backward draws the numbers of the forward, as it does in plain training."""
    inner = nn.Sequential(nn.Linear(8, 8), nn.GELU(), drawing, nn.Linear(8, 8), nn.Dropout(0.1))
    trains(run, nn.Sequential(nn.Linear(6, 8), Checkpointed(inner, False), nn.Linear(8, 3)))


@pytest.mark.parametrize("obstacle", ["other memory", "rows that are found"])
@same_as_plain(refused="what precedes the checkpoint ends the graph, or moves a tensor")
def test_a_checkpoint_behind_what_no_graph_can_hold_draws_the_same_numbers_again(
    run: Run, obstacle: str
) -> None:
    inner = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3))
    model = nn.Sequential(nn.Linear(6, 8), Checkpointed(inner, False), nn.Linear(8, 3))
    mean = torch.zeros(3, device=DEVICE)

    def step_fn(x: Tensor, y: Tensor) -> Tensor:
        if obstacle == "other memory":
            with torch.no_grad():
                mean.data = mean.data * 0.9 + model[2].bias.data * 0.1
            return cross_entropy(model(x) - mean, y)
        rows = y.nonzero()[:, 0]
        return cross_entropy(model(x[rows]), y[rows])

    trains(run, model, step_fn)
    run.note("mean", mean)


@same_as_plain(replays=12)
def test_a_gradient_that_lies_transposed_crosses_a_graph_break(run: Run) -> None:
    """A sum over it goes through memory as in plain training, and has the same last bits."""
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))

    def step_fn(x: Tensor, y: Tensor) -> Tensor:
        out = model(x)
        loss = cross_entropy(out, y)
        if loss.item() > 1e6:
            loss = loss * 0.1
        return loss + 0.01 * torch.einsum("ij,kj->ik", out, out).mean()

    trains(run, model, step_fn)


@same_as_plain(replays=12)
def test_adapters_behind_checkpoints(run: Run) -> None:
    """A hook has the frozen embedding's result require gradients, as transformers and PEFT do for checkpoints."""
    inner = nn.Sequential(Lora(nn.Linear(8, 8)), nn.Dropout(0.2))
    model = nn.Sequential(nn.Linear(6, 8).requires_grad_(False), Checkpointed(inner, False), nn.Linear(8, 3))

    def requires_gradients(module: nn.Module, args: Any, output: Tensor) -> None:
        output.requires_grad_(True)

    model[0].register_forward_hook(requires_gradients)
    before = traces()
    trains(
        run,
        model,
        optimizer=lambda m: torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], fused=True),
    )
    assert traces() - before <= 2


@same_as_plain(replays=12)
def test_reentrant_checkpointing(run: Run) -> None:
    inner = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Dropout(0.2), nn.Linear(8, 8))
    trains(run, nn.Sequential(nn.Linear(6, 8), Checkpointed(inner, True), nn.Linear(8, 3)))


@same_as_plain(replays=12)
def test_reentrant_checkpointing_of_data(run: Run) -> None:
    """torch trains nothing within, as its input needs no gradient."""
    inner = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Dropout(0.2), nn.Linear(8, 8))
    trains(run, nn.Sequential(Checkpointed(inner, True), nn.Linear(8, 3)))


@same_as_plain(replays=12)
def test_reentrant_checkpointing_within_another_one_of_what_is_frozen_for_a_while(run: Run) -> None:
    """torch trains nothing within while the input needs no gradient."""
    first = nn.Linear(6, 6)
    body = nn.Sequential(first, Checkpointed(nn.Linear(6, 8), True), nn.Linear(8, 3))
    model = Checkpointed(body, False)
    step = run.step(loss_of(model), model=model, optimizer=sgd(model))
    for number, batch in enumerate(batches()):
        first.requires_grad_(number not in (12, 13))
        step(batch)


@same_as_plain(replays=12)
def test_two_forwards_before_a_backward(run: Run) -> None:
    """Contrastive: the same model over two views of a batch, with other dropout masks and BatchNorm twice."""
    model = Net()

    def step_fn(x: Tensor, y: Tensor) -> Tensor:
        one, other = normalize(model(x), dim=1), normalize(model(x + 0.1), dim=1)
        return cross_entropy(one @ other.T, torch.arange(len(x)))

    trains(run, model, step_fn)


@same_as_plain(replays=12)
def test_dropout_and_noise_draw_the_same_numbers(run: Run) -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.AlphaDropout(0.2), nn.Linear(8, 3))

    def step_fn(x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(model(x + 0.1 * torch.randn_like(x)), y) + torch.rand(()) * 0

    trains(run, model, step_fn)


class LeftOut(nn.Module):
    """Layers share Dynamo's graphs, which end where each of them may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1.1
        if torch.rand([], device="cpu") < 0.1:
            return x
        return torch.tanh(self.linear(x)) + x


@same_as_plain(replays=30, updates=12)
def test_layers_are_left_out_at_random(run: Run) -> None:
    model = nn.Sequential(*(LeftOut() for _ in range(3)), nn.Linear(6, 3))
    step = run.step(loss_of(model), model=model, optimizer=adamw(model))
    for batch in batches(60):
        step(batch)


@same_as_plain(replays=12)
def test_running_statistics_follow_every_forward(run: Run) -> None:
    model = nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), nn.BatchNorm1d(8, momentum=0.3), nn.Linear(8, 3)
    )
    step = run.step(loss_of(model), model=model, optimizer=adamw(model))
    for number, batch in enumerate(batches(30)):
        step(batch)
        if number % 5 == 4:
            run.note("evaluation", model.eval()(batch[0]))
            model.train()


@same_as_plain(replays=12)
def test_attention_with_a_causal_mask(run: Run) -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix, self.out, self.norm = nn.Linear(6, 24), nn.Linear(8, 3), nn.LayerNorm(8)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.mix(x)[None].split(8, dim=-1)
            return self.out(self.norm(scaled_dot_product_attention(q, k, v, is_causal=True)[0]))

    trains(run, Attention())


class Recurrent(nn.Module):
    """Looks at steps of time, of which each has two numbers."""

    def __init__(self, kind: Any, **options: Any) -> None:
        super().__init__()
        self.layer = kind(2, 4, batch_first=True, **options)
        self.first, self.head = nn.Linear(2, 2), nn.Linear(8 if self.layer.bidirectional else 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(self.first(x.view(len(x), -1, 2)))[0][:, -1])


@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "bidirectional": True, "bias": False}])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.quick
@same_as_plain(replays=10)
def test_recurrent_layers(run: Run, kind: Any, options: dict[str, Any]) -> None:
    trains(run, Recurrent(kind, **options))


class Ending(Recurrent):
    """Looks at the state behind the last step of time."""

    def forward(self, x: Tensor) -> Tensor:
        states = self.layer(self.first(x.view(len(x), -1, 2)))[1]
        states = states[0] if isinstance(states, tuple) else states
        assert states.shape == (1, len(x), 4)
        return self.head(states[-1])


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.quick
@same_as_plain(replays=10)
def test_states_of_recurrent_layers(run: Run, kind: Any) -> None:
    trains(run, Ending(kind))


masks_differ = pytest.mark.skipif(DEVICE == "cuda", reason="cuDNN draws other masks")


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("options", [{}, {"bidirectional": True, "bias": False}])
@masks_differ
@pytest.mark.quick
@same_as_plain(replays=10)
def test_recurrent_layers_with_dropout(run: Run, kind: Any, options: dict[str, Any]) -> None:
    trains(run, Recurrent(kind, num_layers=3, dropout=0.4, **options))


class Packed(Recurrent):
    """Rows of several lengths, which the host knows."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x.view(len(x), -1, 2))
        lengths = 3 - torch.arange(len(x), device="cpu") * 3 // len(x)
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
        found, _ = nn.utils.rnn.pad_packed_sequence(self.layer(packed)[0], batch_first=True)
        return self.head(found.mean(1))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
@pytest.mark.parametrize("dropout", [0.0, pytest.param(0.4, marks=masks_differ)])
@pytest.mark.quick
@same_as_plain(replays=10)
def test_packed_rows(run: Run, kind: Any, dropout: float) -> None:
    trains(run, Packed(kind, num_layers=2, dropout=dropout))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
@pytest.mark.quick
def test_seeds_tell_what_replays_of_recurrent_layers_draw(kind: Any) -> None:
    """Also after steps without graphs, in which cuDNN gives its random state other memory."""
    model = Recurrent(kind, num_layers=2, dropout=0.5).to(DEVICE)
    x, y = torch.randn(4, 80, device=DEVICE), torch.zeros(4, dtype=torch.long, device=DEVICE)
    step = GraphedStep(
        lambda x, y: cross_entropy(model(x), y),
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), 0.0),
        engine=ENGINE,
        **dict.fromkeys(("forward", "backward"), "on"),
    )
    losses = []
    for i in range(40):
        torch.manual_seed(i % 4)
        losses.append(float(step(x, y)))
        if i % 5 == 4:
            cross_entropy(model(x[:3]), y[:3]).backward()
    assert step.report().steps_replayed >= 30
    assert len(set(losses[-4:])) == 4 and losses[-4:] * 5 == losses[-20:]


def test_a_trace_makes_one_step_of_time_of_a_recurrent_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    cells: list[Any] = []
    model = Recurrent(nn.GRU).to(DEVICE)
    stock = decompositions.gru_cell
    monkeypatch.setattr(decompositions, "gru_cell", lambda *given: cells.append(given) or stock(*given))
    x, y = torch.randn(4, 80, device=DEVICE), torch.zeros(4, dtype=torch.long, device=DEVICE)
    step = GraphedStep(
        lambda: cross_entropy(model(x), y), model=model, optimizer=adamw(model), engine=ENGINE, forward="on"
    )
    for _ in range(8):
        step()
    assert step.report().steps_replayed and 1 <= len(cells) < 10


@pytest.mark.parametrize("patience", [math.inf, 1e-9, 0.0])
def test_functions_whose_traces_take_too_long_are_left_to_python(patience: float) -> None:
    graphs: list[Any] = []

    def backend(gm: Any, examples: Any) -> Any:
        graphs.append(gm)
        return gm.forward

    def inner(x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return model(x).tanh()

    def step(x: Tensor) -> Tensor:
        return inner(x.sin()).cos().sum()

    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    compiled = CompiledFunction(step, backend)
    compiled.patience = patience
    found = [(compiled(x), *torch.autograd.grad(compiled(x), list(model.parameters()))) for _ in range(3)]
    plain = step(x), *torch.autograd.grad(step(x), list(model.parameters()))
    assert all(map(torch.equal, found[-1], plain)) and bool(graphs) == (patience == math.inf)


@pytest.mark.passes_without_graphs("traces are counted")
def test_what_breaks_a_graph_is_found_out_once() -> None:
    """Dynamo traces all that a function calls once more where it breaks the graph, for each function on the way."""
    traced: list[Any] = []

    @torch.library.custom_op("pygraph_tests::seen", mutates_args=())
    def seen(x: Tensor) -> Tensor:
        return x.clone()

    @seen.register_fake
    def _(x: Tensor) -> Tensor:
        traced.append(x.shape)
        return torch.empty_like(x)

    def inner(x: Tensor) -> Tensor:
        x = seen(x).sin()
        torch._dynamo.graph_break()
        return x.cos()

    functions: list[Any] = [inner]
    for _ in range(5):
        functions.append(lambda x, call=functions[-1]: call(x + 1) * 2)
        functions[-1].__code__ = functions[-1].__code__.replace()
    graphs: list[Any] = []

    def backend(gm: Any, examples: Any) -> Any:
        graphs.append(gm)
        return gm.forward

    compiled, x = CompiledFunction(functions[-1], backend), torch.randn(3)
    assert torch.equal(compiled(x), functions[-1](x))
    assert len(traced) <= 4 and len(graphs) == 12


@pytest.mark.passes_without_graphs("traces are counted")
def test_no_guard_depends_on_what_is_handed_to_a_function_that_breaks_the_graph() -> None:
    """A loss that is left to Python takes lists of boxes, of which each image has another number."""

    @torch.compiler.disable
    def loss(x: Tensor, boxes: list[dict[str, Tensor]]) -> Tensor:
        return torch.stack([x.sum(), *[box["corners"].sum() for box in boxes]]).sum()

    def step(x: Tensor, boxes: list[dict[str, Tensor]]) -> Tensor:
        y = x.sin()
        return loss(y, boxes)

    def backend(gm: Any, examples: Any) -> Any:
        graphs.append(gm)
        return gm.forward

    graphs: list[Any] = []
    compiled, x = CompiledFunction(step, backend), torch.randn(3)
    for count in (2, 1, 0, 3):
        boxes = [{"corners": torch.randn(count + n, 4)} for n in range(2)]
        assert torch.equal(compiled(x, boxes), step(x, boxes))
    assert len(graphs) == 1


def test_what_the_user_has_compiled_is_traced_however_long_other_traces_take() -> None:
    @torch.compile(fullgraph=True, backend="eager")
    def compiled_by_user(x: Tensor) -> Tensor:
        return x.cos() + 1

    def step(x: Tensor) -> Tensor:
        y = x.sin()
        torch._dynamo.graph_break()
        return torch.compiler.disable(lambda: compiled_by_user(y))()

    def backend(gm: Any, examples: Any) -> Any:
        return gm.forward

    compiled, x = CompiledFunction(step, backend), torch.randn(3)
    compiled.patience = 1e-9
    assert torch.equal(compiled(x), x.sin().cos() + 1)


@same_as_plain(refused="a packed sequence has lengths that are read on the host")
def test_packed_sequences(run: Run) -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.head = nn.LSTM(2, 4, batch_first=True), nn.Linear(4, 3)

        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
            return self.head(pad_packed_sequence(self.layer(packed)[0], batch_first=True)[0].sum(1))

    model = Recurrent()
    trains(run, model, lambda x, y: cross_entropy(model(x.view(8, 3, 2), y + 1), y))


@same_as_plain(refused="sizes depend on values")
def test_experts_get_the_rows_that_are_routed_to_them(run: Run) -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.experts = nn.Linear(6, 3), nn.ModuleList(nn.Linear(6, 3) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            weight, chosen = self.gate(x).softmax(-1).max(-1)
            out = x.new_zeros(len(x), 3)
            for number, expert in enumerate(self.experts):
                (rows,) = torch.where(chosen == number)
                out = out.index_add(0, rows, expert(x[rows]) * weight[rows, None])
            return out

    trains(run, Experts())


@same_as_plain(refused="the lengths are read on the host")
def test_a_ctc_loss(run: Run) -> None:
    model = nn.Linear(6, 5)
    draw = torch.Generator(DEVICE).manual_seed(1)

    def step_fn(x: Tensor, targets: Tensor, lengths: Tensor) -> Tensor:
        steps = torch.full_like(lengths, len(x))
        return nn.functional.ctc_loss(model(x).log_softmax(-1), targets, steps, lengths)

    step = run.step(step_fn, model=model, optimizer=adamw(model))
    for _ in range(24):
        x, targets = torch.randn(12, 4, 6, generator=draw), torch.randint(1, 5, (4, 3), generator=draw)
        step(x, targets, torch.randint(1, 4, (4,), generator=draw))


@same_as_plain(replays=12, updates=0)
def test_complex_numbers(run: Run) -> None:
    """Conjugates are lazy: a bit says so."""

    class Filter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 3, dtype=torch.cfloat))
            self.out = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            found = torch.fft.rfft(x).conj() @ self.weight
            return self.out((found * found.conj()).real)

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        lr: Any = torch.tensor(1e-2, device="cuda") if DEVICE == "cuda" else 1e-2  # a graph reads it there
        return torch.optim.AdamW(model.parameters(), lr, capturable=DEVICE == "cuda")

    trains(run, Filter(), optimizer=optimizer)


def jacobian(model: nn.Module, x: Tensor) -> Tensor:
    return vmap(jacrev(model))(x)


def directional(model: nn.Module, x: Tensor) -> Tensor:
    return jvp(model, (x,), (torch.ones_like(x),))[1]


def curvature(model: nn.Module, x: Tensor) -> Tensor:
    """As a network that solves a differential equation has it."""
    x = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return torch.autograd.grad(slope[:, 0].sum(), x, create_graph=True)[0]


def nested(model: nn.Module, x: Tensor) -> Tensor:
    """A second derivative for each row, by transforms of transforms."""
    return vmap(grad(lambda x: grad(lambda x: model(x[None]).sum())(x).sum()))(x)


def adversarial(model: nn.Module, x: Tensor) -> Tensor:
    """The gradient of a leaf that the step has made."""
    x = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).square().sum(), x)
    return model((x + 0.1 * slope.sign()).detach())


def accumulated(model: nn.Module, x: Tensor) -> Tensor:
    """The same, where the leaf keeps it."""
    x = x.clone().requires_grad_()
    model(x).square().sum().backward(inputs=[x])
    return model((x + 0.1 * x.grad.sign()).detach())  # type: ignore[union-attr]


def adapted(model: nn.Module, x: Tensor) -> Tensor:
    """A model that one step of gradient descent has adapted, as in meta-learning."""
    weights = dict(model.named_parameters())
    slopes = torch.autograd.grad(model(x).square().mean(), list(weights.values()), create_graph=True)
    moved = {name: w - 0.1 * slope for (name, w), slope in zip(weights.items(), slopes, strict=True)}
    return functional_call(model, moved, (x,))  # type: ignore[no-any-return]


TRACED = torch.__version__ >= "2.13"
"""Whether Dynamo traces torch.autograd.grad."""

INNER = [curvature, adversarial, adapted]


@pytest.mark.parametrize("penalty", [jacobian, directional, nested, accumulated, *([] if TRACED else INNER)])
@pytest.mark.quick
@same_as_plain(refused="the step differentiates inside")
def test_derivatives_inside_of_the_step(run: Run, penalty: Any) -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    trains(run, model, lambda x, y: cross_entropy(model(x), y) + penalty(model, x).square().mean())


@pytest.mark.skipif(not TRACED, reason="Dynamo traces torch.autograd.grad from torch 2.13 on")
@pytest.mark.parametrize("penalty", INNER)
@pytest.mark.quick
@same_as_plain(replays=16)
def test_gradients_inside_of_the_step(run: Run, penalty: Any) -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 3))
    trains(run, model, lambda x, y: cross_entropy(model(x), y) + penalty(model, x).square().mean())


@pytest.mark.quick
@same_as_plain(refused="a hook of a weight belongs to the gradient inside")
def test_a_gradient_inside_of_the_step_of_a_weight_with_a_hook(run: Run) -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    model[0].weight.register_hook(lambda gradient: 2 * gradient)
    trains(run, model, lambda x, y: cross_entropy(adapted(model, x), y))


@pytest.mark.passes_without_graphs("the step differentiates inside")
@pytest.mark.quick
def test_derivatives_of_torch_func_are_the_reason_that_is_told(capfd: pytest.CaptureFixture[str]) -> None:
    """And not the traceback of an attempt, whose error asks for an issue at PyTorch."""
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    options: dict[str, Any] = {"engine": ENGINE, "warmup_steps": 2, "forward": "on"}

    def step_fn(batch: Any) -> Tensor:
        return cross_entropy(model(batch[0]), batch[1]) + nested(model, batch[0]).square().mean()

    with GraphedStep(step_fn, model=model, optimizer=adamw(model), **options) as step:
        for batch in batches(8):
            step(batch)
        (told,) = step.report().to_dict()["fallbacks"]
    assert "derivatives of torch.func" in told["reason"] and "Traceback" not in capfd.readouterr().err


@same_as_plain(refused="hooks of Python have to be called")
def test_hooks_of_modules_parameters_and_tensors_are_called(run: Run) -> None:
    model, called = Net(), []
    model.first.register_forward_hook(lambda module, args, out: called.append(["forward", out.shape[0]]))
    model.norm.register_full_backward_hook(
        lambda module, gin, gout: called.append(["module", gout[0].norm().item()])
    )
    model.second.weight.register_hook(lambda gradient: gradient * 0.5)
    model.second.bias.register_post_accumulate_grad_hook(
        lambda p: called.append(["bias", p.grad.sum().item()])
    )

    def step_fn(x: Tensor, y: Tensor) -> Tensor:
        out = model(x)
        out.register_hook(lambda gradient: called.append(["tensor", gradient.norm().item()]))
        return cross_entropy(out, y)

    trains(run, model, step_fn)
    run.note("called", called)


@pytest.mark.parametrize("parts", [1, 2])
@same_as_plain(replays=12)
def test_hooks_of_parameters_draw_random_numbers(run: Run, parts: int) -> None:
    """So it matters which of them is called first: noise on gradients, as for privacy."""
    model, called = Net(), []

    def noisy(name: str, gradient: Tensor) -> Tensor:
        called.append(name)
        return gradient + 1e-3 * torch.randn_like(gradient)

    for name, p in model.named_parameters():
        if name != "norm.bias":  # whose gradient is delivered as ever
            p.register_hook(functools.partial(noisy, name))

    def step_fn(x: Tensor, y: Tensor) -> Tensor:
        hidden = torch.relu(model.norm(model.first(x)))
        if parts == 2:
            torch._dynamo.graph_break()
        return cross_entropy(model.second(model.dropout(hidden)), y)

    trains(run, model, step_fn)
    run.note("called", called)


@same_as_plain(replays=12)
def test_mixed_precision_in_the_step(run: Run) -> None:
    model = Net()

    def step_fn(x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast(DEVICE, torch.bfloat16):
            out = model(x)
        return cross_entropy(out.float(), y)

    trains(run, model, step_fn)


@same_as_plain(replays=8)
def test_another_kernel_of_attention_in_mid_run(run: Run) -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix, self.out = nn.Linear(6, 24), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (t.view(1, 1, 8, 8) for t in self.mix(x).split(8, dim=-1))
            return self.out(scaled_dot_product_attention(q, k, v)[0, 0])

    model = Attention()
    step = run.step(loss_of(model), model=model, optimizer=adamw(model))
    for number, batch in enumerate(batches(36)):
        with sdpa_kernel(SDPBackend.MATH) if number >= 18 else nullcontext():
            step(batch)
