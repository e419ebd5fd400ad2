"""Boolean masks and `nonzero` whose counts follow from what a step is given: counts are read ahead of replays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from replays import text_of
from test_reads_ahead import train
from torch import Tensor, nn
from training import Diary, both, line_of, sgd

from pygraph_train import StepReport
from pygraph_train.problems import NotLegal
from pygraph_train.tracing.reproducing import ReproducingTrace

SHAPE = "the shape of a tensor depends on the values of another tensor"
NODES, FEATURES = 12, 6

Graph = tuple[Tensor, Tensor, Tensor]


def remove_self_loops(edges: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """As torch_geometric does it."""
    mask = edges[0] != edges[1]
    edges = edges[:, mask]
    return edges, None if weights is None else weights[mask]


def add_remaining_self_loops(edges: Tensor, weights: Tensor, nodes: int) -> tuple[Tensor, Tensor]:
    """As torch_geometric does it."""
    mask = edges[0] != edges[1]
    loops = torch.arange(nodes, device=edges.device).view(1, -1).repeat(2, 1)
    of_loops = weights.new_full((nodes,), 1.0)
    others = ~mask
    of_loops[edges[0][others]] = weights[others]
    return torch.cat([edges[:, mask], loops], 1), torch.cat([weights[mask], of_loops])


class Convolutions(nn.Module):
    """Two layers that send messages along edges."""

    def __init__(self, *, weigh: bool = True) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(FEATURES, 8), nn.Linear(8, 3)])
        self.weigh = nn.Linear(2 * FEATURES, 1) if weigh else None

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        weights = torch.ones(edges.shape[1], device=x.device)
        if self.weigh is not None:
            weights = self.weigh(torch.cat([x[edges[0]], x[edges[1]]], 1)).sigmoid().flatten()
        for layer in self.layers:
            sources, targets = add_remaining_self_loops(edges, weights, len(x))[0]
            strengths = add_remaining_self_loops(edges, weights, len(x))[1]
            messages = layer(x)[sources] * strengths[:, None]
            x = torch.zeros(len(x), messages.shape[1], device=x.device).index_add_(0, targets, messages)
        return x


def a_graph(generator: torch.Generator, loops: int) -> Graph:
    """With so many loops, at other edges each time."""
    sources = torch.randint(0, NODES, (40,), generator=generator)
    targets = (sources + torch.randint(1, NODES, (40,), generator=generator)) % NODES
    at = torch.randperm(40, generator=generator)[:loops]
    targets[at] = sources[at]
    x = torch.randn(NODES, FEATURES, generator=generator)
    return x, torch.stack([sources, targets]), torch.randint(0, 3, (NODES,), generator=generator)


def train_on_graphs(
    loops: Callable[[int], int],
    make: Callable[[], nn.Module] = Convolutions,
    *,
    steps: int = 30,
    replays: int | None = 20,
    **config: Any,
) -> StepReport:
    """Train on graphs with so many loops in each step."""

    def script(diary: Diary) -> None:
        model = make()
        optimizer = sgd(model)

        def step_fn(x: Tensor, edges: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(model(x, edges), y)

        step = diary.step(step_fn, model=model, optimizer=optimizer)
        generator = torch.Generator().manual_seed(4)
        for number in range(steps):
            diary.write("loss", step(*a_graph(generator, loops(number))))
            diary.write_state(model, optimizer)

    if replays is None:
        report = both(script, replays=1, **config)  # of regions
        assert report.steps_replayed == 0, str(report)
        return report
    return both(script, replays=replays, plan="{F B O}", **config)


@pytest.mark.parametrize("weigh", [True, False])
def test_self_loops_that_lie_elsewhere_in_each_step(weigh: bool) -> None:
    report = train_on_graphs(lambda number: 7, lambda: Convolutions(weigh=weigh))
    assert not report.fallbacks


@pytest.mark.parametrize("loops", [0, 40])
def test_graphs_with_no_loops_or_nothing_else(loops: int) -> None:
    assert not train_on_graphs(lambda number: loops).fallbacks


@pytest.mark.notices("reads ahead are those of the step before")
def test_numbers_of_loops_that_alternate() -> None:
    report = train_on_graphs(lambda number: 3 if number % 3 else 8, steps=44)
    assert "counts of selected elements" in text_of(report), report


def test_a_number_of_loops_that_comes_once() -> None:
    train_on_graphs(lambda number: 9 if number == 20 else 5)


@pytest.mark.slow
def test_numbers_of_loops_that_never_come_again() -> None:
    """Each of many steps has a count of its own."""
    report = train_rows(lambda number: number % 150, steps=150, replays=None)
    told = report.fallbacks[0]
    assert "went ways that have no graph" in told.reason and "counts of selected" in told.reason, told
    assert "torch.where" in told.fix and told.where == line_of(picked_rows, "x = x[")


def picked_rows(x: Tensor) -> Tensor:
    x = x[x[:, 0] > 0]
    return x


def train_rows(selected: Callable[[int], int], *, steps: int, replays: int | None) -> StepReport:
    """Train on as many rows of 160."""

    def script(diary: Diary) -> None:
        model = nn.Linear(4, 4)
        optimizer = sgd(model)
        step = diary.step(lambda x: model(picked_rows(x)).square().sum(), model=model, optimizer=optimizer)
        for number in range(steps):
            x = torch.randn(160, 4)
            x[:, 0] = torch.where(torch.arange(160) < selected(number), 1.0, -1.0)
            diary.write("loss", step(x))
            diary.write_state(model, optimizer)

    if replays is None:
        report = both(script, replays=1)
        assert report.steps_replayed == 0, str(report)
        return report
    return both(script, replays=replays, plan="{F B O}")


def test_many_numbers_of_which_some_come_often() -> None:
    report = train_rows(lambda number: 3 if number % 2 else number, steps=60, replays=15)
    assert not report.fallbacks


def test_batches_of_two_sizes_with_two_counts_each() -> None:
    def change(number: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        y = y.clamp(max=1).index_fill(0, torch.tensor([number % 5]), 2)
        y[7] = 2 if number % 4 < 2 else 1
        return (x, y) if number % 2 else (x[1:], y[1:])

    def make(model: nn.Module) -> Callable[..., Any]:
        def step_fn(batch: Any) -> Tensor:
            x, y = batch
            return F.cross_entropy(model(x)[y < 2], y[y < 2])

        return step_fn

    train(make, change, steps=110, replays=30)


# -- kinds of selections ------------------------------------------------------------------------------

Selecting = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Of what a model computes, with its gradient, of a batch, and of a mask of its rows: a loss."""

SELECTIONS: dict[str, Selecting] = {
    "rows": lambda out, x, rows: out[rows].square().sum(),
    "columns": lambda out, x, rows: out[:, rows[:3]].square().sum(),
    "after dots": lambda out, x, rows: out[..., rows[:3]].square().sum() + out[rows, ...].sum(),
    "after nothing": lambda out, x, rows: (out[None, rows] * x[0, :3]).square().sum(),
    "with a slice": lambda out, x, rows: out[rows, 1:].square().sum(),
    "with a number": lambda out, x, rows: out[rows, 1].square().sum(),
    "with places": lambda out, x, rows: out[rows, x[:1, 0].long() + 1].square().sum(),
    "elements": lambda out, x, rows: out[x[:, :3] > 0].square().sum(),
    "elements of copies": lambda out, x, rows: out.expand(2, 8, 3)[:, rows].square().sum(),
    "the same ones twice": lambda out, x, rows: out[rows][rows[rows]].square().sum(),
    "places": lambda out, x, rows: out[rows.nonzero().squeeze(1)].square().sum(),
    "places of elements": lambda out, x, rows: out[torch.nonzero(x[:, :3] > 0, as_tuple=True)].exp().sum(),
    "places of numbers": lambda out, x, rows: out[(x[:, 0] > 0).long().nonzero()].square().sum(),
    "where": lambda out, x, rows: out[torch.where(x[:, :3] > 0)].square().sum(),
    "argwhere": lambda out, x, rows: out[torch.argwhere(rows)[:, 0]].square().sum(),
    "masked_select": lambda out, x, rows: out.mean() * x.masked_select(x > 0).sum(),
    "masked_scatter": lambda out, x, rows: scattered(x[:, :3], rows[:, None], out[:5]),
    "masked_scatter of a large source": lambda out, x, rows: scattered(out.exp(), x[:, :3] > 0, out),
    "masked_scatter in parts": lambda out, x, rows: scattered(
        out.expand(2, 8, 3), rows[:, None], out[None, :6] * 2
    ),
    "repeat_interleave": lambda out, x, rows: out.repeat_interleave(rows.long() + 1, 0).square().sum(),
    "repeat_interleave alone": lambda out, x, rows: out[torch.repeat_interleave(rows.long())].square().sum(),
    "triplets": lambda out, x, rows: triplets(out, rows),
    "tokens": lambda out, x, rows: F.cross_entropy(out[rows], (x[:, 0] > 0).long()[rows]),
    "written rows": lambda out, x, rows: written(out, rows, out.detach()[:1] * 2),
    "written with a gradient": lambda out, x, rows: written(out, rows, out.sum(0)),
    "written elements": lambda out, x, rows: written(out, x[:, :3] > 0, out[0, 0]),
    "written numbers": lambda out, x, rows: written(out, rows, 0.5),
    "written with index_put": lambda out, x, rows: out.index_put((rows,), out[0]).square().sum(),
    "under autocast": lambda out, x, rows: under_autocast(out, rows),
}


def scattered(x: Tensor, mask: Tensor, source: Tensor) -> Tensor:
    """As features of images are put among tokens."""
    source = torch.cat([source.flatten(), source.flatten()])
    return x.masked_scatter(mask, source).square().sum()


def triplets(out: Tensor, rows: Tensor) -> Tensor:
    """All pairs of rows with the same label, and others, as losses on distances pick them."""
    same = rows[:, None] == rows
    anchors, positives = torch.nonzero(same.triu(1), as_tuple=True)
    others, negatives = (~same).nonzero(as_tuple=True)
    near = (out[anchors] - out[positives]).square().sum(1)
    far = (out[others] - out[negatives]).square().sum(1)
    return F.relu(near.sum() - far.sum() + 1) + near.sum()


def written(out: Tensor, mask: Tensor, value: Any) -> Tensor:
    out = out * 1.5
    out[mask] = value
    return out.square().sum()


def under_autocast(out: Tensor, rows: Tensor) -> Tensor:
    with torch.autocast(out.device.type, dtype=torch.bfloat16):
        return (out[rows] @ torch.ones(3, 3, device=out.device)).float().square().sum()


def train_selecting(loss: Selecting, **expected: Any) -> StepReport:
    """Train where five of eight rows are chosen, and half of the elements of the batch are positive."""

    def script(diary: Diary) -> None:
        model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
        optimizer = sgd(model)

        def step_fn(x: Tensor, rows: Tensor) -> dict[str, Any]:
            return {"loss": loss(model(x), x, rows)}

        step = diary.step(step_fn, model=model, optimizer=optimizer)
        for _ in range(16):
            signs = torch.stack([(torch.randperm(8) < 4) * 2.0 - 1 for _ in range(6)], 1)
            diary.write("result", step(torch.rand(8, 6) * signs, torch.randperm(8) < 5))
            diary.write_state(model, optimizer)

    return both(script, **expected)


@pytest.mark.slow
@pytest.mark.passes_without_graphs("kernels of Inductor")
@pytest.mark.parametrize("kind", ["rows", "tokens", "written rows", "masked_scatter of a large source"])
def test_a_selection_with_the_kernels_of_inductor(kind: str) -> None:
    from pygraph_train.regions.inductor import compile_whole

    model, x, rows = nn.Linear(6, 3), torch.randn(8, 6), torch.randperm(8) < 5
    trace = ReproducingTrace(torch.device("cpu"), compiler=compile_whole)

    def step_fn(x: Tensor, rows: Tensor) -> Tensor:
        return SELECTIONS[kind](model(x), x, rows)

    found = []
    for run in (step_fn, lambda *args: trace(step_fn, args, {})):
        loss = run(x, rows)
        found.append((loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))))
    torch.testing.assert_close(found[1], found[0])
    assert trace.problem is None and trace.ahead.draws is not None
    with pytest.raises(NotLegal):  # another count
        trace(step_fn, (x.abs(), torch.arange(8) < 4), {})


FEW = {"columns", "after dots", "triplets"}
"""Their counts differ, because a part of the rows is asked for."""


@pytest.mark.slow_after(6)
@pytest.mark.parametrize("kind", sorted(SELECTIONS.keys() - FEW))
def test_a_selection(kind: str) -> None:
    report = train_selecting(SELECTIONS[kind], replays=10, plan="{F B O}")
    assert not report.fallbacks, report


@pytest.mark.parametrize("kind", sorted(FEW))
def test_a_selection_of_a_few_sizes(kind: str) -> None:
    train_selecting(SELECTIONS[kind], replays=2)


@pytest.mark.passes_without_graphs("looks at a trace")
def test_places_lie_in_memory_as_those_of_torch() -> None:
    def found(x: Tensor) -> Any:
        mask = x > 0
        return mask.nonzero(), mask[0].nonzero(), mask.nonzero(as_tuple=True), x[mask], x[:, mask[0]]

    x, trace = torch.randn(5, 6), ReproducingTrace(torch.device("cpu"))
    result, expected = trace(found, (x,), {}), found(x)
    assert trace.problem is None
    for one, other in zip(_flat(result), _flat(expected), strict=True):
        assert torch.equal(one, other) and one.stride() == other.stride()


def _flat(values: Any) -> list[Tensor]:
    return [x for value in values for x in (value if isinstance(value, tuple) else [value])]


@pytest.mark.parametrize("mask", [lambda x: x[:4, 0] > 0, lambda x: x.T > 0])
def test_a_mask_of_another_shape_raises_as_in_plain_training(mask: Callable[[Tensor], Tensor]) -> None:
    def script(diary: Diary) -> None:
        model = nn.Linear(6, 3)
        step = diary.step(lambda x: x[mask(x)].sum() + model(x).sum(), model=model, optimizer=sgd(model))
        for _ in range(4):
            with pytest.raises(IndexError) as raised:
                step(torch.randn(8, 6))
            diary.write("error", str(raised.value))

    both(script, never="each step raises an error")


def test_a_mask_that_is_changed_after_it_was_an_index_raises_as_in_plain_training() -> None:
    """Autograd has saved it."""

    def script(diary: Diary) -> None:
        model = nn.Linear(6, 3)

        def step_fn(x: Tensor) -> Tensor:
            mask = x[:, 0] > -9
            loss = model(x)[mask].sum()
            mask[2:5] = False
            return loss

        step = diary.step(step_fn, model=model, optimizer=sgd(model))
        for _ in range(8):
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                step(torch.randn(8, 6))
            diary.write_state(model)

    both(script, never="each step raises an error")


def test_a_selection_in_each_micro_batch() -> None:
    def make(model: nn.Module) -> Callable[..., Any]:
        def step_fn(batch: Any) -> Tensor:
            x, y = batch
            return F.cross_entropy(model(x)[y < 3], y[y < 3])

        return step_fn

    def change(number: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x, y.index_fill(0, torch.tensor([number % 8, (number + 3) % 8]), 3)

    train(make, change, steps=60, accumulate=2)


def test_a_mask_in_a_buffer_that_the_loop_changes() -> None:
    """As weights that are pruned."""

    def script(diary: Diary) -> None:
        model = nn.Linear(6, 6)
        model.register_buffer("kept", torch.ones(6, dtype=torch.bool))
        optimizer = sgd(model)
        step = diary.step(lambda x: model(x)[:, model.kept].square().sum(), model=model, optimizer=optimizer)
        for number in range(40):
            if number == 20:
                model.kept[2] = False  # type: ignore[operator, index]
            if number == 30:
                model.kept[2:4] = torch.tensor([True, False])  # type: ignore[operator, index]
            diary.write("loss", step(torch.randn(5, 6)))
            diary.write_state(model, optimizer)

    both(script, replays=25, plan="{F B O}")


def test_a_mask_that_the_step_changes_before() -> None:
    def make(model: nn.Module) -> Callable[..., Any]:
        def step_fn(batch: Any) -> Tensor:
            x, y = batch
            mask = y >= 0
            mask[2:5] = False
            return F.cross_entropy(model(x)[mask], y[mask])

        return step_fn

    assert not train(make).fallbacks


# -- what is refused ----------------------------------------------------------------------------------


def of_the_loss(out: Tensor, x: Tensor, rows: Tensor) -> Tensor:
    return out[out > 0].square().sum()  # here


def with_its_gradient(out: Tensor, x: Tensor, rows: Tensor) -> Tensor:
    return out.masked_select(rows[:, None]).sum()  # here


def scattered_by_the_loss(out: Tensor, x: Tensor, rows: Tensor) -> Tensor:
    return x[:, :3].masked_scatter(out > 0, out).sum()  # here


def at_random(out: Tensor, x: Tensor, rows: Tensor) -> Tensor:
    return out[torch.rand_like(x[:, 0]) > 0.5].sum()  # here


def unique(out: Tensor, x: Tensor, rows: Tensor) -> Tensor:
    return out[torch.unique(rows.long())].sum()  # here


def written_where_unique(out: Tensor, x: Tensor, rows: Tensor) -> Tensor:
    found = torch.unique(rows.long())  # here
    out = out * 2
    out[found] = x[found, :3]
    out[found] = out[found] + found.float()[:, None]
    return out.sum()


@pytest.mark.parametrize(
    "loss", [of_the_loss, scattered_by_the_loss, with_its_gradient, at_random, unique, written_where_unique]
)
def test_a_selection_that_is_refused_as_before(loss: Selecting) -> None:
    report = train_selecting(loss, replays=1)  # of regions
    told = report.fallbacks[0]
    assert SHAPE in told.reason and not report.steps_replayed, report
    assert told.where == line_of(loss, "# here")


def test_numbers_of_tokens_of_experts_are_read_in_the_step() -> None:
    """They follow from layers."""

    def routed(out: Tensor, x: Tensor, rows: Tensor) -> Tensor:
        chosen = out.argmax(1)
        counts = torch.bincount(chosen, minlength=3).tolist()  # here
        parts = out[chosen.argsort(stable=True)].split(counts)
        return torch.stack([(i + 1) * part.square().sum() for i, part in enumerate(parts)]).sum()

    report = train_selecting(routed, replays=1)  # of regions
    told = report.fallbacks[0]
    assert told.where == line_of(routed, "# here") and not report.steps_replayed, report
    assert "read on the host" in told.reason or SHAPE in told.reason, told


def test_a_mask_of_parameters_is_refused_as_before() -> None:
    def make(model: nn.Module) -> Callable[..., Any]:
        def step_fn(batch: Any) -> Tensor:
            x, y = batch
            weights = model.first.weight  # type: ignore[union-attr]
            return F.cross_entropy(model(x), y) + weights[weights > 0].sum()

        return step_fn

    report = train(make, replays=None)
    assert SHAPE in report.fallbacks[0].reason
    assert report.fallbacks[0].where == line_of(make, "weights > 0")


# -- torch_geometric ----------------------------------------------------------------------------------


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("name", ["GCNConv", "GATConv", "GATv2Conv"])
def test_convolutions_of_torch_geometric(name: str) -> None:
    geometric = pytest.importorskip("torch_geometric.nn")

    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = getattr(geometric, name)(FEATURES, 8)
            self.second = getattr(geometric, name)(8, 3)

        def forward(self, x: Tensor, edges: Tensor) -> Tensor:
            return self.second(self.first(x, edges).relu(), edges)  # type: ignore[no-any-return]

    report = train_on_graphs(lambda number: 4 + number % 2, Layers, steps=36)
    assert not report.fallbacks, report


@pytest.mark.slow
def test_features_of_images_among_tokens() -> None:
    transformers = pytest.importorskip("transformers")
    small = {"intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    images = transformers.CLIPVisionConfig(hidden_size=16, image_size=8, patch_size=4, **small)
    texts = transformers.LlamaConfig(vocab_size=50, hidden_size=32, num_key_value_heads=2, **small)

    def script(diary: Diary) -> None:
        parts = {"vision_config": images, "text_config": texts}
        config = transformers.LlavaConfig(**parts, image_token_index=49, image_seq_length=4)
        model = transformers.LlavaForConditionalGeneration(config).train()
        optimizer = sgd(model)
        step = diary.step(lambda **batch: model(**batch).loss, model=model, optimizer=optimizer)
        for number in range(18):
            ids = torch.randint(3, 48, (2, 12))
            ids[:, number % 7 : number % 7 + 4] = 49
            diary.write("loss", step(input_ids=ids, labels=ids.clone(), pixel_values=torch.randn(2, 3, 8, 8)))
            diary.write_state(model, optimizer)

    both(script, replays=8, plan="{F B O}")
