"""Functions that draw on the host, or read the batch there: they are called as they are before each replay."""

from __future__ import annotations

import copy
import functools
import random
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from replays import text_of
from test_draws_into_tensors import _as_on_a_device as as_on_a_device  # noqa: F401
from test_draws_into_tensors import states
from torch import Tensor, nn
from training import Diary, adamw, both, differs

from pygraph_train import StepReport
from pygraph_train.random_state import HostRandomState
from pygraph_train.torch_private import host_functions
from pygraph_train.torch_private.host_functions import CallOnHost, HostFunction, host_function
from pygraph_train.tracing.reproducing import ReproducingTrace

HERE = sys.modules[__name__]
NODES = 10

# -- functions as libraries have them ------------------------------------------------------------------------


def mask_indices(
    shape: tuple[int, int], share: float, length: int, attention_mask: Tensor | None = None
) -> np.ndarray:
    """Spans of so many columns, which may overlap, in the first columns of each row that a mask leaves."""
    height, columns = shape
    if length > columns:
        raise ValueError("the spans are longer than the rows")
    more = np.random.rand(1).item()
    widths = [columns] * height if attention_mask is None else attention_mask.detach().sum(-1).tolist()
    found = np.zeros(shape, dtype=bool)
    for row, width in zip(found, widths, strict=True):
        count = int(share * width / length + more)
        for start in np.random.choice(np.arange(width - length + 1), count, replace=False):
            row[start : start + length] = True
    return found


def sample(population: int, count: int) -> Tensor:
    return torch.tensor(random.sample(range(population), min(population, count)))


def other_edges(edges: Tensor, nodes: int, tries: int = 3) -> Tensor:
    """As many edges that are not among these, or fewer where the tries do not find them."""
    known = (edges[0] * nodes + edges[1]).cpu()
    found = known.new_empty(0)
    for _ in range(tries):
        drawn = sample(nodes * nodes, edges.shape[1])
        drawn = drawn[~torch.from_numpy(np.isin(drawn.numpy(), torch.cat([known, found]).numpy()))]
        found = torch.cat([found, drawn])[: edges.shape[1]]
    found = found.to(edges.device)
    return torch.stack([found // nodes, found % nodes])


@pytest.fixture(autouse=True)
def _known(monkeypatch: pytest.MonkeyPatch) -> None:
    """These are functions that are known to do nothing but draw."""
    names = {
        "mask_indices": "numpy",
        "other_edges": "python",
        "asks": "python",
        **dict.fromkeys(HIDDEN, "python"),
    }
    known = [HostFunction(__name__, name, generator) for name, generator in names.items()]
    monkeypatch.setattr(host_functions, "KNOWN", (*host_functions.KNOWN, *known))


# -- training with them --------------------------------------------------------------------------------------


class Masked(nn.Module):
    """Puts something learned in the place of rows of each sequence, as wav2vec2 does it."""

    def __init__(self, share: float = 0.5) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(6, 6), nn.Linear(6, 6)
        self.instead = nn.Parameter(torch.randn(6))
        self.share = share

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x = self.before(x)
        shape = (x.shape[0], x.shape[1])
        mask = mask_indices(shape, share=self.share, length=2, attention_mask=attention_mask)
        places = torch.tensor(mask, device=x.device, dtype=torch.bool)
        x[places] = self.instead.to(x.dtype)
        return self.after(x).square().mean()


def sequences(count: int, length: int = 5) -> list[Tensor]:
    numbers = torch.Generator().manual_seed(3)
    return [torch.randn(2, length, 6, generator=numbers) for _ in range(count)]


def graphs(count: int, edges: int = 12) -> list[tuple[Tensor, Tensor]]:
    numbers = torch.Generator().manual_seed(4)
    found = []
    for _ in range(count):
        places = torch.randperm(NODES * NODES, generator=numbers)[:edges]
        found.append(
            (torch.randn(NODES, 6, generator=numbers), torch.stack([places // NODES, places % NODES]))
        )
    return found


def link_loss(model: nn.Module, x: Tensor, edges: Tensor, others: Tensor) -> Tensor:
    found = model(x)
    scores = (found[edges[0]] * found[edges[1]]).sum(-1)
    of_others = (found[others[0]] * found[others[1]]).sum(-1)
    return F.softplus(-scores).mean() + F.softplus(of_others).mean()


def with_edges(model: nn.Module, given: tuple[Tensor, Tensor]) -> Tensor:
    x, edges = given
    return link_loss(model, x, edges, other_edges(edges, NODES))


def trained(
    step_fn: Callable[[Any, Any], Any],
    inputs: list[Any],
    *,
    make: Callable[[], nn.Module] = lambda: nn.Linear(6, 6),
    between: Callable[[int], None] = lambda number: None,
    note: Callable[[], Any] = lambda: None,
    replays: int | None,
    **options: Any,
) -> StepReport:
    """Train plainly and graphed: what steps return or raise is the same, and all states are.

    Args:
        step_fn: of the model and one of the inputs.
        between: what happens before each step.
        note: what is the same as well after each step.
        replays: the least number of whole steps from graphs. None where there may be none.
    """

    def script(diary: Diary) -> None:
        random.seed(1)
        np.random.seed(2)
        model = make()
        optimizer = adamw(model)
        step = diary.step(lambda given: step_fn(model, given), model=model, optimizer=optimizer)
        for number, given in enumerate(copy.deepcopy(inputs)):
            between(number)
            if number % 7 == 3:
                diary.write("drawn between steps", [random.random(), np.random.rand(), torch.rand(1)])
            try:
                diary.write("result", step(given))
            except (IndexError, ValueError) as error:
                diary.write("error", [type(error).__name__, str(error)])
            diary.write("states", [states(), note()])
            diary.write_state(model, optimizer)

    options = {"compile": False, **options}
    if replays is None:
        report = both(script, replays=1, **options)  # of the optimizer
        assert report.steps_replayed == 0, report
        return report
    return both(script, replays=replays, plan="{F B O}", **options)


def test_masks_whose_counts_change() -> None:
    """Spans overlap, so that the number of masked rows is another one in many steps."""
    inputs = sequences(80)
    report = trained(lambda model, x: model(x), inputs, make=Masked, replays=25)
    assert not report.fallbacks, report
    assert "random numbers that are drawn on the host" in text_of(report)


def test_masks_that_follow_from_the_batch() -> None:
    lengths = [5 if i % 3 else 3 for i in range(80)]
    inputs = [
        (x, (torch.arange(5) < torch.tensor([[5], [n]])).long())
        for x, n in zip(sequences(80), lengths, strict=True)
    ]
    report = trained(lambda model, given: model(*given), inputs, make=Masked, replays=20)
    assert not report.fallbacks, report


def test_masks_that_are_used_together_with_the_batch() -> None:
    """How many rows are left depends on what is drawn and on the batch."""

    def step_fn(model: nn.Module, given: tuple[Tensor, Tensor]) -> Tensor:
        x, attention_mask = given
        drawn = torch.tensor(mask_indices((2, 5), 0.5, 2), device=x.device)
        return model(x[drawn & attention_mask]).square().sum()

    inputs = [(x, torch.arange(5) < torch.tensor([[5], [2 + i % 2]])) for i, x in enumerate(sequences(100))]
    assert not trained(step_fn, inputs, replays=20).fallbacks


def test_a_number_that_follows_from_a_drawn_mask() -> None:
    def step_fn(model: nn.Module, x: Tensor) -> Tensor:
        mask = torch.tensor(mask_indices((2, 5), 0.5, 2), device=x.device)
        if mask.sum() > 5:
            x = x * 2
        return (model(x) * mask[:, :, None]).square().sum() / mask.sum()

    assert not trained(step_fn, sequences(60), replays=30).fallbacks


def test_edges_that_are_not_in_the_batch() -> None:
    report = trained(with_edges, graphs(40), replays=25)
    assert not report.fallbacks, report


@pytest.mark.usefixtures("as_on_a_device")
def test_edges_beside_a_device() -> None:
    assert not trained(with_edges, graphs(40), replays=25).fallbacks


def test_numbers_of_edges_that_change() -> None:
    """In a dense graph the function finds fewer than it was asked for, in some steps."""

    def step_fn(model: nn.Module, given: tuple[Tensor, Tensor]) -> Tensor:
        x, edges = given
        others = other_edges(edges, NODES, tries=1)
        counts.append(others.shape[1])
        return link_loss(model, x, edges, others)

    counts: list[int] = []
    trained(lambda model, given: step_fn(model, given), graphs(140, edges=20), replays=30)
    assert len(set(counts)) > 2


def test_what_it_returns_is_changed_and_kept() -> None:
    def step_fn(model: nn.Module, given: tuple[Tensor, Tensor]) -> dict[str, Any]:
        x, edges = given
        others = other_edges(edges, NODES)
        others[0] += 1
        others.remainder_(NODES)
        return {"loss": link_loss(model, x, edges, others), "others": others, "twice": 2 * others}

    assert not trained(step_fn, graphs(40), replays=25).fallbacks


def test_edges_of_a_batch_that_the_step_has_prepared() -> None:
    def step_fn(model: nn.Module, given: tuple[Tensor, Tensor]) -> Tensor:
        x, edges = given
        both_ways = torch.cat([edges, edges.flip(0)], 1)
        share = np.random.beta(0.5, 0.5)
        others = other_edges(edges=both_ways, nodes=NODES)
        return link_loss(model, x, both_ways, others[:, random.sample(range(4), 3)]) * share

    assert not trained(step_fn, graphs(50), replays=25).fallbacks


def test_errors_are_raised_as_in_plain_training() -> None:
    def step_fn(model: nn.Module, given: tuple[Tensor, int]) -> Tensor:
        x, _ = given
        first = random.random()
        mask = torch.tensor(mask_indices((2, x.shape[1]), 0.4, 2))
        return (model(x)[mask].sum() * first * np.random.rand()).square()

    lengths = [1 if i in (20, 21, 30) else 5 for i in range(70)]
    trained(step_fn, [(sequences(1, length)[0], 0) for length in lengths], replays=15)


def test_an_error_of_what_the_batch_holds() -> None:
    def step_fn(model: nn.Module, given: tuple[Tensor, Tensor]) -> Tensor:
        x, attention_mask = given
        mask = torch.tensor(mask_indices((2, 5), 0.5, 2, attention_mask))
        return model(x * ~mask[:, :, None]).square().mean()

    def mask(number: int) -> Tensor:
        return torch.full((2, 5), number not in (15, 16, 30), dtype=torch.long)

    inputs = [(x, mask(i)) for i, x in enumerate(sequences(50))]
    trained(step_fn, inputs, replays=25)


def test_gradients_that_are_accumulated() -> None:
    def script(diary: Diary) -> None:
        random.seed(4)
        model = nn.Linear(6, 6)
        optimizer = adamw(model)
        step = diary.step(lambda given: with_edges(model, given), model=model, optimizer=optimizer)
        for number, given in enumerate(graphs(60)):
            diary.write("loss", step(given) if number % 2 else step.accumulate(given))
            diary.write("states", states())
            diary.write_state(model, optimizer)

    assert both(script, replays=30, compile=False).steps_replayed >= 15


def asks(edges: Tensor) -> Tensor:
    found = torch.tensor(random.sample(range(NODES - 1), 4)).repeat(2, 1)
    return found + 1 if torch.compiler.is_compiling() else found


def test_nothing_compiles_it() -> None:
    """It is told the same while the step is traced."""

    def step_fn(model: nn.Module, given: tuple[Tensor, Tensor]) -> Tensor:
        return link_loss(model, *given, asks(given[1]))

    assert not trained(step_fn, graphs(20), replays=15).fallbacks


def test_replays_are_compared_in_mid_run() -> None:
    assert not trained(with_edges, graphs(40), replays=20, verify="always").fallbacks


def test_it_is_called_once_for_all_ways_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    call = CallOnHost.__call__

    def counted(self: CallOnHost, *args: Any, **kwargs: Any) -> Any:
        calls.append(self)
        return call(self, *args, **kwargs)

    def step_fn(model: nn.Module, given: tuple[Tensor, Tensor]) -> Tensor:
        loss = with_edges(model, given)
        return loss * 2 if random.random() < 0.5 else loss

    seen: list[int] = []
    monkeypatch.setattr(CallOnHost, "__call__", counted)
    trained(step_fn, graphs(60), replays=35, between=lambda number: seen.append(len(calls)))
    of_steps = np.diff(seen[60:])  # of the graphed run
    assert len(calls) > 30 and (of_steps[-20:] == 1).all(), of_steps


# -- functions that do more ----------------------------------------------------------------------------------

count_of_calls = 0
noted: list[int] = []


class Notes:
    calls = 0


def counts_in_a_global(edges: Tensor) -> Tensor:
    global count_of_calls
    count_of_calls += 1
    return torch.tensor(random.sample(range(NODES), 4)).repeat(2, 1)


def counts_in_an_attribute(edges: Tensor) -> Tensor:
    Notes.calls += 1
    return torch.tensor(random.sample(range(NODES), 4)).repeat(2, 1)


def counts_in_a_list(edges: Tensor) -> Tensor:
    noted.append(1)
    return torch.tensor(random.sample(range(NODES), 4)).repeat(2, 1)


def _counts() -> None:
    Notes.calls += 1


def calls_one_that_counts(edges: Tensor) -> Tensor:
    _counts()
    return torch.tensor(random.sample(range(NODES), 4)).repeat(2, 1)


def draws_from_another_generator(edges: Tensor) -> Tensor:
    order = torch.from_numpy(np.random.permutation(NODES))
    return order[random.sample(range(NODES), 4)].repeat(2, 1)


def returns_what_it_is_given(edges: Tensor) -> Tensor:
    return edges if random.sample(range(4), 2) else edges + 1


def changes_what_it_is_given(edges: Tensor) -> Tensor:
    edges.remainder_(NODES - 1)
    return torch.tensor(random.sample(range(NODES), 4)).repeat(2, 1)


@functools.wraps(other_edges)
def around(*args: Any, **kwargs: Any) -> Tensor:
    noted.append(1)
    return other_edges(*args, **kwargs)


HIDDEN: dict[str, Callable[[Tensor], Tensor]] = {
    fn.__name__: fn
    for fn in (
        *(counts_in_a_global, counts_in_an_attribute, counts_in_a_list, calls_one_that_counts),
        *(draws_from_another_generator, returns_what_it_is_given, changes_what_it_is_given),
    )
}


@pytest.mark.parametrize("name", HIDDEN)
def test_a_function_that_does_more_is_followed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No replay calls it, and what it writes is the same as in plain training."""

    def step_fn(model: nn.Module, given: tuple[Tensor, Tensor]) -> Tensor:
        x, edges = given
        return link_loss(model, x, edges, HIDDEN[name](edges))

    def note() -> Any:
        return count_of_calls - start[0], Notes.calls - start[1], len(noted) - start[2]

    def between(number: int) -> None:
        if not number:
            start[:] = [count_of_calls, Notes.calls, len(noted)]

    def called(self: CallOnHost, *args: Any, **kwargs: Any) -> Any:
        calls.append(self)
        return self.fn(*args, **kwargs)

    start: list[int] = []
    calls: list[CallOnHost] = []
    monkeypatch.setattr(CallOnHost, "__call__", called)
    least = {
        "counts_in_a_global": 10,
        "counts_in_a_list": 10,
        "draws_from_another_generator": 10,
        "returns_what_it_is_given": 10,
    }
    trained(step_fn, graphs(20), between=between, note=note, replays=least.get(name))
    seen = list(HIDDEN).index(name) >= 4
    assert len(calls) < 5 and bool(calls) == seen, f"{len(calls)} calls; those of a trace show what it does"


def test_another_function_around_it_is_followed() -> None:
    assert host_function(other_edges) is not None
    assert host_function(around) is None


def test_another_function_of_its_name_is_followed() -> None:
    def other_edges(edges: Tensor, nodes: int) -> Tensor:
        return edges + nodes

    assert host_function(other_edges) is None


def one_that_notes(population: int, count: int) -> Tensor:
    noted.append(count)
    return torch.tensor(random.sample(range(population), count))


def others_that_are_noted(edges: Tensor, nodes: int, tries: int = 3) -> Tensor:
    noted.append(nodes)
    return torch.tensor(random.sample(range(nodes), 8)).view(2, 4)


def a_draw_that_notes(*args: Any) -> list[int]:
    noted.append(len(args))
    return draw_of_python(*args)


draw_of_python = random.sample
OWN = random.Random(7)
REPLACED: dict[str, tuple[Any, str, Any]] = {
    "a function that it calls": (HERE, "sample", one_that_notes),
    "the function": (HERE, "other_edges", others_that_are_noted),
    "a draw": (random, "sample", a_draw_that_notes),
    "a draw of another generator": (random, "sample", OWN.sample),
}


@pytest.mark.parametrize("name", REPLACED)
def test_what_is_replaced_in_mid_run(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may write: it is called as often as in plain training."""
    owner, attribute, instead = REPLACED[name]
    stock = getattr(owner, attribute)

    def step_fn(model: nn.Module, given: tuple[Tensor, Tensor]) -> Tensor:
        loss = with_edges(model, given)
        return loss * random.choices(range(1, 9), weights=[8, *[1] * 7])[0]  # some ways have no graph

    def between(number: int) -> None:
        monkeypatch.setattr(owner, attribute, instead if 20 <= number < 30 else stock)
        if not number:
            noted.clear()
            OWN.seed(7)

    def note() -> Any:
        return list(noted), OWN.getstate()

    trained(step_fn, graphs(80), between=between, note=note, replays=20)
    assert len(noted) >= 10 or "generator" in name


# -- a device that computes nothing --------------------------------------------------------------------------


def put_in_the_place_of_masked(x: Tensor) -> Tensor:
    mask = torch.tensor(mask_indices((4, 6), 0.5, 2), device=x.device)
    x[mask] = torch.ones(6, device=x.device, requires_grad=True)[0] * 2
    return x


ON_META: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[], list[Tensor]]]] = {
    "a mask": (
        lambda x: x * torch.tensor(mask_indices((4, 6), 0.5, 2)).to(x.device),
        lambda: [torch.tensor(mask_indices((4, 6), 0.5, 2))],
    ),
    "a mask as an index": (
        lambda x: x[torch.tensor(mask_indices((4, 6), 0.3, 2), device=x.device)],
        lambda: [torch.tensor(mask_indices((4, 6), 0.3, 2))],
    ),
    "part of a mask as an index": (
        lambda x: x[torch.tensor(mask_indices((4, 6), 0.3, 6), device=x.device)[:, 2:3].expand(-1, 6)],
        lambda: [torch.tensor(mask_indices((4, 6), 0.3, 6))],
    ),
    "edges": (
        lambda x: x[sample(4, 3).to(x.device)] + x[other_edges(EDGES, 4)[0][:3].to(x.device)],
        lambda: [sample(4, 3), other_edges(EDGES, 4)[0][:3]],
    ),
}
EDGES = torch.tensor([[0, 1, 2], [1, 2, 3]])


@pytest.mark.passes_without_graphs("a device without values computes nothing")
@pytest.mark.parametrize("name", ON_META)
def test_a_graph_of_a_device_reads_what_a_function_returns(name: str) -> None:
    make, drawn = ON_META[name]
    trace, x = ReproducingTrace(torch.device("meta")), torch.empty(4, 6, device="meta")
    given: tuple[Any, ...] = (lambda x: 2 * make(x), (x,), {})
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(5)
    ways = 0
    for _ in range(12):
        before = HostRandomState()
        expected, after = drawn(), states()
        before.restore()
        ahead = trace.ahead.look({"args": (x,)}) if trace.traced else None
        if ahead is None or ahead.matches:
            assert ahead is None or differs(expected, list(ahead.taken)) is None
            trace(*given)
            assert trace.problem is None and trace.reproduces, trace.problem
            assert differs(states(), after) is None
            ways += 1
        before.restore()
        drawn()
    assert ways > 3


def of_a_mask(x: Tensor, columns: Tensor) -> Tensor:
    mask = torch.tensor(mask_indices((4, 6), 0.5, 2, columns), device=x.device)
    return x[mask].sum() / mask.sum() + x[mask & (columns > 0)].square().sum()


def of_edges(x: Tensor, columns: Tensor) -> Tensor:
    places = other_edges(columns.nonzero().t(), 6)
    return (x[places[0] % 4] * x[places[1] % 4]).sum() * random.random()


@pytest.mark.passes_without_graphs("what is compared is what traces compute")
@pytest.mark.parametrize("step_fn", [of_a_mask, of_edges])
def test_a_trace_for_compiled_kernels_takes_the_same(step_fn: Callable[[Tensor, Tensor], Tensor]) -> None:
    device = torch.device("cpu")
    first = ReproducingTrace(device)
    second = ReproducingTrace(device, compiler=lambda graph, inputs, left: graph.forward)
    second.ahead.ask_no_more_than(first.ahead)
    for seed in (random.seed, np.random.seed):
        seed(5)
    same = 0
    for x in torch.randn(40, 4, 6, generator=torch.Generator().manual_seed(6)):
        given = x, (torch.arange(6) < torch.tensor([[6], [5], [4], [6]])).long()
        before = HostRandomState()
        expected, after = step_fn(*given), states()
        for trace in (first, second):
            before.restore()
            if trace is second and first.traced and not second.traced:
                second.ahead.ask_no_more_than(first.ahead)
            frame = {"fn": step_fn, "args": given, "kwargs": {}}
            if not trace.traced or (trace.holds(step_fn, given, {}) and trace.ahead.look(frame).matches):
                found = trace(step_fn, given, {})
                assert trace.problem is None and trace.reproduces, trace.problem
                assert differs(found, expected) is None and differs(states(), after) is None
                same += trace is second
        before.restore()
        step_fn(*given)
    assert same > 5


@pytest.mark.passes_without_graphs("nothing is replayed")
def test_what_it_returns_is_changed_in_each_of_two_looks() -> None:
    """One call serves both, and each changes a tensor of its own."""

    def step_fn(x: Tensor) -> Tensor:
        others = other_edges(EDGES, 4)
        others.add_(1).remainder_(4)
        return x * others.to(x.device)[:, :1].expand(-1, 6).sum()

    trace, x = ReproducingTrace(torch.device("meta")), torch.empty(4, 6, device="meta")
    trace(step_fn, (x,), {})
    assert trace.host_draws is not None and not trace.host_draws.is_cheap
    known: dict[int, Any] = {}
    looks = [trace.ahead.look({"args": (x,)}, shared) for shared in (known, known, known, None)]
    assert looks[-1].taken and all(differs(list(looks[-1].taken), list(look.taken)) is None for look in looks)


# -- the libraries themselves --------------------------------------------------------------------------------


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", ["Wav2Vec2", "Hubert", "WavLM"])
def test_masks_in_time_of_models_of_speech(name: str, masked: bool) -> None:
    transformers = pytest.importorskip("transformers", reason="the models are those of transformers")
    kind = getattr(transformers, f"{name}Model")
    options: dict[str, Any] = {
        "vocab_size": 32,
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
        "conv_dim": (8, 8),
        "conv_kernel": (10, 3),
        "conv_stride": (5, 4),
        "num_conv_pos_embeddings": 8,
        "num_conv_pos_embedding_groups": 2,
        "mask_time_prob": 0.4,
        "mask_time_length": 2,
        "mask_time_min_masks": 0,
        "mask_feature_prob": 0.0 if name == "WavLM" else 0.3,  # its configuration has no least count of these
        "mask_feature_length": 2,
        "layerdrop": 0.0,
    }

    def step_fn(model: nn.Module, given: tuple[Tensor, Tensor]) -> Tensor:
        x, attention_mask = given
        found = model(x, attention_mask=attention_mask) if masked else model(x)
        return found.last_hidden_state.square().mean()  # type: ignore[no-any-return]

    numbers = torch.Generator().manual_seed(3)
    lengths = torch.tensor([[170], [120]])
    inputs = [
        (torch.randn(2, 170, generator=numbers), (torch.arange(170) < lengths).long()) for _ in range(50)
    ]
    report = trained(step_fn, inputs, make=lambda: kind(kind.config_class(**options)).train(), replays=12)
    assert not report.fallbacks, report


@pytest.mark.parametrize("method", ["sparse", "dense"])
def test_negative_sampling_of_torch_geometric(method: str) -> None:
    pytest.importorskip("torch_geometric", reason="the function is one of torch_geometric")
    from torch_geometric.nn import SAGEConv
    from torch_geometric.utils import negative_sampling

    def step_fn(model: nn.Module, given: tuple[Tensor, Tensor]) -> Tensor:
        x, edges = given
        others = negative_sampling(edges, num_nodes=len(x), method=method)
        found = model(x, edges)
        labels = torch.cat([torch.ones(edges.shape[1]), torch.zeros(others.shape[1])])
        both = torch.cat([edges, others], 1)
        scores = (found[both[0]] * found[both[1]]).sum(-1)
        return F.binary_cross_entropy_with_logits(scores, labels)

    report = trained(step_fn, graphs(50), make=lambda: SAGEConv(6, 6), replays=30)
    assert not report.fallbacks, report


@pytest.mark.parametrize("nodes", [None, NODES, (NODES, NODES)])
def test_other_ways_to_sample_of_torch_geometric(nodes: Any) -> None:
    """Without a number of nodes, edges in both directions, for several graphs, and in counts that change."""
    pytest.importorskip("torch_geometric", reason="the functions are those of torch_geometric")
    from torch_geometric.utils import batched_negative_sampling, negative_sampling

    def step_fn(model: nn.Module, given: tuple[Tensor, Tensor]) -> Tensor:
        x, edges = given
        others = negative_sampling(edges, nodes, num_neg_samples=20, force_undirected=nodes == NODES)
        if nodes is None:
            graph = torch.zeros(len(x), dtype=torch.long)
            others = torch.cat([others, batched_negative_sampling(edges, graph)], 1)
        return link_loss(model, x, edges, others)

    trained(step_fn, graphs(100, edges=50), replays=40)
