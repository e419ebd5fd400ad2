"""Regions of eager kernels (`compile=False`): bit for bit as plain training around what no graph can hold."""

from __future__ import annotations

import copy
import functools
import inspect
import io
import weakref
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from replays import text_of
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from training import Diary, adamw, both

from pygraph_train import PyGraphConfig, StepReport
from pygraph_train.report.backend_report import RegionRecord
from pygraph_train.selection import timing
from pygraph_train.selection.arms import NOTHING, OPTIMIZER, REGIONS, SEPARATE, Arm
from pygraph_train.selection.controller import Estimate
from pygraph_train.step.decisions import Decisions
from pygraph_train.step.plan import legal_plans
from pygraph_train.step.region_proof import ProvedPart
from pygraph_train.step.regions import why_no_regions
from pygraph_train.step.times import Times
from pygraph_train.torch_private.aot import compile_with_aten
from pygraph_train.tracing.gradient_order import GradientOrder

SIZE, WIDTH, CLASSES = 12, 16, 5


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(1)


def of_activations(picked: Tensor, hidden: Tensor) -> Tensor:
    """The same mask, which follows from activations now: nobody knows ahead of the step how many it picks."""
    return picked & hidden.detach().isfinite().all()


class Tagger(nn.Module):
    """Tokens, of which a mask picks those that the loss is made of."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, WIDTH)
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.1, batch_first=True)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)

    def loss(self, tokens: Tensor, picked: Tensor, labels: Tensor) -> Tensor:
        hidden = self.norm(self.layer(self.embedding(tokens)))
        picked = of_activations(picked, hidden)
        return nn.functional.cross_entropy(self.head(hidden[picked]), labels[picked])

    @staticmethod
    def batches(steps: int) -> list[tuple[Tensor, ...]]:
        g, found = generator(), []
        for _ in range(steps):
            tokens, labels = (torch.randint(n, (4, SIZE), generator=g) for n in (20, CLASSES))
            picked = torch.zeros(4 * SIZE, dtype=torch.bool)
            picked[torch.randperm(4 * SIZE, generator=g)[:10]] = True
            found.append((tokens, picked.view(4, SIZE), labels))
        return found


class Experts(nn.Module):
    """Each token goes to one expert: `torch.where` says which tokens an expert gets."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU())
        self.gate = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, WIDTH)) for _ in range(3)
        )
        self.last = nn.Sequential(nn.LayerNorm(WIDTH), nn.Dropout(0.1), nn.Linear(WIDTH, CLASSES))

    def loss(self, x: Tensor, labels: Tensor) -> Tensor:
        hidden = self.first(x)
        weights = self.gate(hidden).softmax(-1)
        best, chosen = weights.max(-1)
        mixed = torch.zeros_like(hidden)
        for number, expert in enumerate(self.experts):
            (where,) = torch.where(chosen == number)
            mixed = mixed.index_add(0, where, expert(hidden[where]) * best[where, None])
        return nn.functional.cross_entropy(self.last(mixed), labels)

    @staticmethod
    def batches(steps: int) -> list[tuple[Tensor, ...]]:
        g = generator()
        return [
            (torch.randn(SIZE, WIDTH, generator=g), torch.randint(CLASSES, (SIZE,), generator=g))
            for _ in range(steps)
        ]


class Graph(nn.Module):
    """Graph convolutions, with a loop at each node in place of those that the graph has.

    No node gets more than two messages: on a GPU they are added in any order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList((nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)))
        self.norm = nn.LayerNorm(WIDTH)

    def loss(self, x: Tensor, edges: Tensor, labels: Tensor) -> Tensor:
        for layer in self.layers:
            others = edges[:, (edges[0] != edges[1]) & x.detach().isfinite().all()]
            nodes = torch.arange(len(x), device=x.device)
            sources, targets = torch.cat([others, nodes.expand(2, -1)], 1)
            degree = x.new_zeros(len(x)).scatter_add(0, targets, x.new_ones(len(targets)))
            factor = degree.pow(-0.5)
            messages = layer(x)[sources] * (factor[sources] * factor[targets])[:, None]
            x = x.new_zeros(len(x), messages.shape[1]).index_add(0, targets, messages)
            x = self.norm(x).relu() if layer is self.layers[0] else x
        return nn.functional.cross_entropy(x, labels)

    @staticmethod
    def batches(steps: int) -> list[tuple[Tensor, ...]]:
        g, edges = (
            generator(),
            torch.tensor([[0, 1, 2, 2, 5, 7, 7, 3], [1, 1, 3, 2, 4, 0, 7, 6]]),
        )
        return [
            (torch.randn(SIZE, WIDTH, generator=g), edges, torch.randint(CLASSES, (SIZE,), generator=g))
            for _ in range(steps)
        ]


class Speech(nn.Module):
    """A CTC loss, which reads on the host how long each sequence is."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv1d(WIDTH, 32, 3, padding=1), nn.LayerNorm(32)
        self.head = nn.Linear(32, CLASSES)

    def loss(self, x: Tensor, lengths: Tensor, labels: Tensor) -> Tensor:
        hidden = self.norm(self.first(x).transpose(1, 2)).relu()
        logits = self.head(hidden).log_softmax(-1).transpose(0, 1)
        sizes = [labels.shape[1]] * len(labels)
        return nn.functional.ctc_loss(logits, labels, tuple(lengths.tolist()), tuple(sizes))

    @staticmethod
    def batches(steps: int) -> list[tuple[Tensor, ...]]:
        g, found = generator(), []
        for _ in range(steps):
            lengths = torch.randint(8, SIZE + 1, (3,), generator=g)
            labels = torch.randint(1, CLASSES, (3, 3), generator=g)
            found.append((torch.randn(3, WIDTH, SIZE, generator=g), lengths, labels))
        return found


class Convolutions(nn.Module):
    """Graph convolutions of torch_geometric, which adds the loops itself, with a mask."""

    def __init__(self) -> None:
        super().__init__()
        from torch_geometric.nn import GCNConv

        self.first, self.second = GCNConv(WIDTH, WIDTH), GCNConv(WIDTH, CLASSES)
        self.norm = nn.LayerNorm(WIDTH)

    def loss(self, x: Tensor, edges: Tensor, labels: Tensor) -> Tensor:
        hidden = self.norm(self.first(x, edges)).relu()
        return nn.functional.cross_entropy(self.second(hidden, edges), labels)

    batches = staticmethod(Graph.batches)


def training(kind: Any, steps: int = 40, **options: Any) -> Any:
    def script(diary: Diary) -> None:
        model = kind()
        optimizer = adamw(model)
        step = diary.step(model.loss, model=model, optimizer=optimizer, **options)
        for batch in kind.batches(steps):
            diary.write("loss", step(*batch))
            diary.write_state(model, optimizer)

    return script


@pytest.fixture(autouse=True)
def _dynamo_knows_nothing() -> None:
    """Functions that were traced anew too often, in other tests, are not traced any more."""
    torch._dynamo.reset()


@pytest.fixture
def no_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("something was compiled by Inductor")

    monkeypatch.setattr("pygraph_train.regions.inductor.compile_with_inductor", refuse)
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", refuse)


def in_regions(report: StepReport, least: int = 20) -> StepReport:
    assert report.plan == "{F} {B} {O}", str(report)
    assert {r.phase for r in report.regions() if r.replays >= least} >= {"forward", "backward"}, text_of(
        report
    )
    return report


@pytest.mark.parametrize("kind", [Tagger, Experts, Graph, Speech])
def test_parts_around_what_depends_on_data_are_in_graphs(kind: Any, no_inductor: None) -> None:
    report = in_regions(both(training(kind), compile=False, replays=20))
    assert report.steps_replayed == 0
    assert "compiled" not in str(report.controllers[0].best)


def test_the_convolutions_of_torch_geometric_are_one_graph(no_inductor: None) -> None:
    pytest.importorskip("torch_geometric")
    both(training(Convolutions), compile=False, replays=20, plan="{F B O}")  # counts are read ahead


@pytest.mark.parametrize("verify", ["off", "always"])
def test_comparisons_of_parts_follow_the_option(verify: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made, compare = [], ProvedPart._difference
    monkeypatch.setattr(ProvedPart, "_difference", lambda part, args: made.append(0) or compare(part, args))
    report = in_regions(both(training(Tagger), compile=False, replays=20, verify=verify))
    assert len(made) == 0 if verify == "off" else len(made) >= 60, text_of(report)


class Images(nn.Module):
    """Normalised by the batch, resized, and a mask over their pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3), nn.Conv2d(8, CLASSES, 3)
        self.norm = nn.BatchNorm2d(8)

    def loss(self, x: Tensor, labels: Tensor) -> Tensor:
        hidden = self.norm(self.first(x)).relu()
        hidden = nn.functional.interpolate(hidden, scale_factor=2, mode="bilinear")
        out = self.second(hidden).permute(0, 2, 3, 1)
        picked = of_activations(labels >= 0, out)
        return nn.functional.cross_entropy(out[picked], labels[picked])

    @staticmethod
    def batches(steps: int) -> list[tuple[Tensor, ...]]:
        g = generator()
        labels = torch.randint(-1, CLASSES, (2, 10, 10), generator=g)
        return [(torch.randn(2, 3, 8, 8, generator=g), labels) for _ in range(steps)]


def test_images_keep_their_kernels_and_statistics(no_inductor: None) -> None:
    in_regions(both(training(Images), compile=False, replays=20))


class Shared(nn.Module):
    """A weight that two parts of the step use, with a mask between them."""

    def __init__(self, early: int, late: int, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.first, self.shared = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, CLASSES)
        self.early, self.late, self.dtype = early, late, dtype

    def loss(self, x: Tensor, picked: Tensor, labels: Tensor) -> Tensor:
        with torch.autocast("cpu", self.dtype, enabled=self.dtype is not None):
            hidden = self.first(x)
            for _ in range(self.early):
                hidden = self.shared(hidden).tanh()
            picked = of_activations(picked, hidden)
            hidden = hidden[picked]
            for _ in range(self.late):
                hidden = self.shared(hidden).tanh()
            return nn.functional.cross_entropy(self.last(hidden), labels[picked])

    @staticmethod
    def batches(steps: int) -> list[tuple[Tensor, ...]]:
        g, found = generator(), []
        for _ in range(steps):
            picked = torch.randperm(SIZE, generator=g) < 7
            found.append(
                (torch.randn(SIZE, WIDTH, generator=g), picked, torch.randint(CLASSES, (SIZE,), generator=g))
            )
        return found


def shared(*arguments: Any) -> Any:
    kind = functools.partial(Shared, *arguments)
    kind.batches = Shared.batches  # type: ignore[attr-defined]
    return kind


@pytest.mark.parametrize("uses", [(1, 1), (1, 3)])
def test_a_weight_of_two_parts_gets_its_gradients_in_the_order_of_plain_training(
    uses: tuple[int, int],
) -> None:
    in_regions(both(training(shared(*uses)), compile=False, replays=20))


def test_gradients_that_would_be_added_in_another_order_speak_against_regions() -> None:
    report = both(training(shared(2, 1)), compile=False, replays=20)
    assert report.plan == "F B {O}" and not any(r.replays for r in report.regions()), str(report)
    assert "added in another order" in text_of(report)


def test_a_cast_that_autocast_keeps_for_two_parts_speaks_against_regions() -> None:
    report = both(training(shared(1, 1, torch.bfloat16)), compile=False, replays=20)
    assert report.plan == "F B {O}" and not any(r.replays for r in report.regions()), str(report)
    assert "shares casts of weights" in text_of(report)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("early", "late", "outside"), [(1, 1, 0), (1, 3, 0), (3, 0, 1), (2, 1, 0), (1, 2, 1), (1, 1, 2)]
)
@pytest.mark.parametrize("compiled", [False, True])
def test_the_order_of_gradients_is_that_of_sums_by_parts(
    early: int, late: int, outside: int, compiled: bool
) -> None:
    """What `GradientOrder` says is compared with parts that hand over sums, on numbers that round."""
    scale = torch.randn(3, 1000, generator=generator(), dtype=torch.float32)

    def step(weight: Tensor, order: GradientOrder | None, *, sums: bool) -> Tensor:
        def part(x: Tensor, uses: int) -> Tensor:
            inner = _Summed.apply(weight) if sums else weight
            sources = GradientOrder.sources([x, weight])
            for _ in range(uses):
                x = (x * inner).sin() * scale[0]
            if order is not None and compiled:
                order.ran_compiled([weight] if uses > 1 else [], [x := _Part.apply(x, weight)])
            elif order is not None:
                order.ran(sources, [x])
            return x

        x = part(scale[1], early) if early else scale[1]
        x = part(x.cos(), late) if late else x
        for _ in range(outside):
            x = (x * weight).cos()
        return x.sum()

    gradients = []
    for sums in (False, True):
        weight = scale[2].clone().requires_grad_()
        step(weight, None, sums=sums).backward()
        gradients.append(weight.grad)
    order, weight = GradientOrder(), scale[2].clone().requires_grad_()
    why = order.why_not([step(weight, order, sums=False)])
    assert (why is None) == torch.equal(*gradients)  # type: ignore[arg-type]


class _Summed(torch.autograd.Function):
    """Hands over the sum of the gradients of all uses, as a compiled part does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class _Part(torch.autograd.Function):
    """Stands for the node of a compiled part."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, gradient


def test_a_part_that_comes_late_is_looked_at_before_it_is_in_graphs() -> None:
    def script(diary: Diary) -> None:
        model = Shared(1, 1)
        optimizer = adamw(model)
        step = diary.step(model.loss, model=model, optimizer=optimizer)
        for index, batch in enumerate(Shared.batches(80)):
            model.early = 1 if index < 40 else 2
            diary.write("loss", step(*batch))
            diary.write_state(model, optimizer)

    report = both(script, compile=False, replays=20)
    assert max(r.replays for r in report.regions()) >= 20 and report.plan == "F B {O}", str(report)
    assert "added in another order" in text_of(report)


class Halves(nn.Module):
    """One operation has two results, and the step does not always use both of them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def loss(self, x: Tensor) -> Tensor:
        left, right = self.first(x).tanh().chunk(2, dim=-1)
        total = left.sum().item()
        print(total, file=io.StringIO())
        return self.second(left if total > 0 else right).square().mean()


def test_a_result_without_a_gradient_beside_one_that_has_one_speaks_against_regions() -> None:
    def script(diary: Diary) -> None:
        model = Halves()
        optimizer = adamw(model)
        step = diary.step(model.loss, model=model, optimizer=optimizer)
        for batch in Shared.batches(40):
            diary.write("loss", step(batch[0]))
            diary.write_state(model, optimizer)

    report = both(script, compile=False, replays=20)
    assert report.plan == "F B {O}" and "only some results of an operation have a gradient" in text_of(
        report
    ), str(report)


def test_a_gradient_in_another_layout_speaks_against_regions() -> None:
    def script(diary: Diary) -> None:
        model = nn.Linear(WIDTH, WIDTH)
        optimizer = adamw(model)

        def step_fn(x: Tensor) -> Tensor:
            hidden = model(x).tanh()
            torch._dynamo.graph_break()
            with torch.no_grad():
                torch._dynamo.graph_break()
            return Expanding.apply(hidden)

        step = diary.step(step_fn, model=model, optimizer=optimizer)
        for batch in Shared.batches(40):
            diary.write("loss", step(batch[0]))
            diary.write_state(model, optimizer)

    report = both(script, compile=False, replays=20)
    assert report.plan == "F B {O}" and "comes in another layout" in text_of(report), str(report)


@pytest.mark.parametrize("wrong", ["result", "gradient", "statistics"])
def test_a_part_that_computes_other_bits_is_left_to_eager_kernels(
    wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compile_graph(graph: Any, inputs: Any, options: Any, made: Any, bounds: Any) -> Any:
        record = RegionRecord("forward 0", "forward")
        made(record)
        forward = copy.deepcopy(graph).forward

        def compiled(*args: Any) -> Any:
            record.plain_runs += 1
            results = forward(*args)
            if wrong == "statistics":
                for x in args:
                    if (
                        isinstance(x, Tensor)
                        and not x.requires_grad
                        and x.is_floating_point()
                        and x.dim() == 1
                    ):
                        x.data.add_(1e-6)
            return [_Wrong.apply(x, wrong) if x.requires_grad else x for x in results]

        return compiled

    monkeypatch.setattr("pygraph_train.regions.inductor.compile_graph", compile_graph)

    def script(diary: Diary) -> None:
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, CLASSES))
        optimizer = adamw(model)

        def step_fn(x: Tensor, picked: Tensor, labels: Tensor) -> Tensor:
            found = model(x)
            picked = of_activations(picked, found)
            return nn.functional.cross_entropy(found[picked], labels[picked])

        step = diary.step(step_fn, model=model, optimizer=optimizer)
        for batch in Shared.batches(60):
            diary.write("loss", step(*batch))
            diary.write_state(model, optimizer)

    report = both(script, compile=False, replays=5)
    assert report.plan == "F B {O}" and "it computes other bits than eager kernels" in text_of(report), str(
        report
    )


class Expanding(torch.autograd.Function):
    """A sum, whose gradient is one number, expanded."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.size = x.size()
        return x.sum()

    @staticmethod
    @torch._dynamo.disable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.expand(ctx.size)


class _Wrong(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, wrong: str) -> Tensor:
        ctx.wrong = wrong
        return x * (1 + 1e-6) if wrong == "result" else x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * (1 + 1e-6) if ctx.wrong == "gradient" else gradient, None


class Mixed(nn.Module):
    """Operations whose backward computes something of what the forward saves: powers, quotients, a norm by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.first, self.second = (
            nn.Parameter(torch.ones(64)),
            nn.Linear(64, 64),
            nn.Linear(64, 64),
        )

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            normed = x * (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * self.scale
            x = x + nn.functional.dropout(nn.functional.gelu(self.first(normed)), 0.1) / (
                1 + self.second(x).abs()
            )
            x = x + x.clamp(-1, 1) ** 3 + nn.functional.silu(x) * x.sigmoid()
        return x.std(-1).mean() + x.logsumexp(-1).mean()


def test_what_is_saved_for_the_backward_is_no_more_than_autograd_saves() -> None:
    model, x = Mixed(), torch.randn(512, 64, generator=generator())
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), x)}

    def nbytes(tensors: list[Tensor]) -> int:
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        return sum(size for at, size in storages.items() if at not in own)

    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        model(x)
    kept: list[Tensor] = []

    def build(compile_kernels: Any, gm: Any, inputs: Any, traced: Any) -> Any:
        kernels = compile_kernels(gm, inputs)

        def run(arguments: list[Any]) -> Any:
            outputs = kernels(arguments)
            assert not arguments  # let go of as soon as they are used
            if traced.phase == "forward":
                kept.extend(t for t in outputs[traced.saved_from :] if isinstance(t, Tensor))
            return outputs

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    torch.compile(model, backend=lambda gm, inputs: compile_with_aten(gm, inputs, build))(x).backward()
    assert 0 < nbytes(kept) <= nbytes(saved)


def test_a_backward_lets_go_of_what_was_saved_as_it_goes() -> None:
    alive: list[int] = []

    class Look(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            alive.append(sum(at() is not None for at in kept))
            return func(*args, **(kwargs or {}))

    kept: list[Any] = []

    def build(compile_kernels: Any, gm: Any, inputs: Any, traced: Any) -> Any:
        kernels = compile_kernels(gm, inputs)

        def run(arguments: list[Any]) -> Any:
            if traced.phase != "backward":
                return kernels(arguments)
            kept.extend(weakref.ref(t) for t in arguments if isinstance(t, Tensor) and t.numel() > 64 * 64)
            with Look():
                return kernels(arguments)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    model, x = Mixed(), torch.randn(512, 64, generator=generator())
    torch.compile(model, backend=lambda gm, inputs: compile_with_aten(gm, inputs, build))(x).backward()
    assert len(kept) > 10 and alive[len(alive) // 2] < 0.8 * len(kept) and alive[-1] <= 2, alive


def test_regions_that_are_measured_to_be_slower_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    declared = timing.declared_seconds
    monkeypatch.setattr(timing, "declared_seconds", lambda arm: declared(arm) + 5e-3 * arm.plan.regions)
    monkeypatch.setattr(Decisions, "_estimate", lambda *args: Estimate())
    report = both(training(Tagger, steps=150), compile=False, replays=20)
    assert report.plan == "F B {O}", str(report)
    assert any(arm.plan.regions for arm in report.controllers[0].times), str(report)


@pytest.mark.quick
def test_regions_on_a_device_have_to_pay_for_themselves() -> None:
    """With `compile=False` such a step begins with what it has without regions."""
    program: Any = SimpleNamespace(replication=SimpleNamespace(sharded=False))
    engine: Any = SimpleNamespace(name="cuda", device=torch.device("cuda", 0))
    config, times, nothing = PyGraphConfig(compile=False), Times(), cast(Any, None)
    decisions = Decisions(program, config, engine, nothing, times, nothing, nothing)
    plans = legal_plans(config, forward_backward=False, optimizer=True, between=False, regions=True)
    arms = decisions.arms(None, plans)
    assert arms == [Arm(OPTIMIZER), Arm(NOTHING), Arm(SEPARATE), Arm(REGIONS)]
    controller: Any = SimpleNamespace(times={Arm(OPTIMIZER): 0.01}, best=Arm(OPTIMIZER))
    likely, cost = [], []
    for device in (0.0101, 0.03):  # the host takes 10 ms
        times.latest[Arm(OPTIMIZER)] = timing.StepTime(0.01, device)
        known = decisions._estimate(None, controller, Arm(SEPARATE), device)
        likely.append(known.likely / device)
        cost.append(known.one_time)
    assert likely[0] == 0.5 and 0.9 < likely[1] < 1.0 and min(cost) > 0
    times.compiling = 7.0
    assert decisions._estimate(None, controller, Arm(SEPARATE), 0.01).one_time == 7.0


def test_a_part_with_a_checkpoint_runs_as_it_is() -> None:
    def script(diary: Diary) -> None:
        model = Shared(1, 0)
        optimizer = adamw(model)

        def step_fn(x: Tensor, picked: Tensor, labels: Tensor) -> Tensor:
            hidden = checkpoint(
                lambda x: nn.functional.dropout(model.first(x), 0.1).tanh(), x, use_reentrant=False
            )
            picked = of_activations(picked, hidden)
            return nn.functional.cross_entropy(model.last(hidden[picked].tanh()), labels[picked])

        step = diary.step(step_fn, model=model, optimizer=optimizer)
        for batch in Shared.batches(60):
            diary.write("loss", step(*batch))
            diary.write_state(model, optimizer)

    report = both(script, compile=False, replays=20)
    lines = {r.where for r in report.regions() if r.replays >= 20}
    assert report.plan == "{F} {B} {O}" and len(lines) >= 1, text_of(report)
    source, first = inspect.getsourcelines(test_a_part_with_a_checkpoint_runs_as_it_is)
    line = first + next(i for i, text in enumerate(source) if "checkpoint(lambda" in text)
    assert not any(f"{__file__}:{line}" == where for where in lines), lines


def test_a_part_whose_sizes_never_come_back_runs_as_it_is() -> None:
    """A mask that picks another number of tokens on every step, between parts whose sizes stay."""

    def script(diary: Diary) -> None:
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES))
        optimizer = adamw(model)

        def step_fn(x: Tensor, labels: Tensor, count: int) -> Tensor:
            hidden = model[1](model[0](x)).tanh()
            picked = of_activations(labels < 10 * count, hidden)
            return nn.functional.cross_entropy(model[2](hidden[picked].sin()), labels[picked] % CLASSES)

        step = diary.step(step_fn, model=model, optimizer=optimizer)
        g = generator()
        for index in range(120):
            x, labels = torch.randn(4000, WIDTH, generator=g), torch.randperm(4000, generator=g)
            diary.write("loss", step(x, labels, torch.tensor(100 + index)))
            diary.write_state(model, optimizer)

    report = both(script, compile=False, replays=20)
    assert report.plan == "{F} {B} {O}", text_of(report)
    assert any(r.replays >= 20 for r in report.regions() if r.phase == "backward"), text_of(report)
    assert "its sizes are others in most runs" in text_of(report)


def test_parts_take_the_branches_of_plain_training() -> None:
    def script(diary: Diary) -> None:
        model = Shared(1, 0)
        optimizer = adamw(model)

        def step_fn(x: Tensor, picked: Tensor, labels: Tensor) -> Tensor:
            hidden = model.first(x).tanh() if torch.compiler.is_compiling() else model.first(x).sin()
            picked = of_activations(picked, hidden)
            return nn.functional.cross_entropy(model.last(hidden[picked].tanh()), labels[picked])

        step = diary.step(step_fn, model=model, optimizer=optimizer)
        for batch in Shared.batches(50):
            diary.write("loss", step(*batch))
            diary.write_state(model, optimizer)

    in_regions(both(script, compile=False, replays=20))


@pytest.mark.passes_without_graphs("nothing is run")
def test_on_a_gpu_they_are_made_where_somebody_asks_for_them() -> None:
    for options in ({}, {"fuse": "on"}, {"optimizer": "on"}):
        reason = why_no_regions(PyGraphConfig(compile=False, **options), "cuda")
        assert reason is not None and "forward='on'" in reason
    for asked in ({"forward": "on"}, {"backward": "on"}):
        assert why_no_regions(PyGraphConfig(compile=False, **asked), "cuda") is None
    assert why_no_regions(PyGraphConfig(compile=False), "emulated") is None
    assert why_no_regions(PyGraphConfig(), "cuda") is None
    assert why_no_regions(PyGraphConfig(forward="off", backward="off"), "cuda") is not None
