"""Values that a step reads of what it is given decide which way it takes: they are read ahead of replays."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from replays import text_of
from torch import Tensor, nn
from training import Diary, Net, adamw, batches, both, line_of, loss_of, sgd

from pygraph_train import StepReport
from pygraph_train.problems import NotLegal
from pygraph_train.tracing.reproducing import ReproducingTrace

Step = Callable[..., Any]
Change = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]


def as_it_is(number: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return x, y


def train(
    make: Callable[[nn.Module], Step],
    change: Change = as_it_is,
    *,
    steps: int = 30,
    replays: int | None = 20,
    between: Callable[[int, nn.Module], None] = lambda number, model: None,
    accumulate: int = 1,
    **config: Any,
) -> StepReport:
    """Train plainly and graphed: results, exceptions, state and the states of all generators must be the same.

    Args:
        make: makes the step's function for a model.
        change: makes the batch of a step of what is drawn for it.
        steps, between, accumulate: how long, what happens before each step, micro-batches of one.
        replays: how many steps run as one graph at least; None where none may.
        **config: options of the graphed step.
    """

    def script(diary: Diary) -> None:
        random.seed(1)
        np.random.seed(2)
        model = Net()
        optimizer = adamw(model)
        step = diary.step(make(model), model=model, optimizer=optimizer)
        for number, (x, y) in enumerate(batches(steps)):
            between(number, model)
            x, y = change(number, x, y)
            before = [x.clone(), y.clone()]
            versions = [x._version, y._version]
            call = step if number % accumulate == accumulate - 1 else step.accumulate
            try:
                diary.write("result", call((x, y)))
            except (ValueError, IndexError) as error:
                diary.write("raised", [type(error).__name__, str(error), _innermost_line(error)])
            diary.write("batch", [x, y])
            assert torch.equal(before[0], x) and torch.equal(before[1], y)
            assert versions == [x._version, y._version]
            diary.write_state(model, optimizer)
            diary.write("numbers", [hash(random.getstate()), np.random.get_state()[1].tobytes()])

    if replays is None:
        report = both(script, replays=1, **config)  # of regions
        assert report.steps_replayed == 0, str(report)
        return report
    return both(script, replays=replays, **{"plan": "{F B O}", **config})


def _innermost_line(error: BaseException) -> int:
    trace = error.__traceback__
    assert trace is not None
    while trace.tb_next is not None:
        trace = trace.tb_next
    return trace.tb_lineno


def checking(model: nn.Module) -> Step:
    """As the models of speech recognition of transformers do it."""

    def step_fn(batch: Any) -> Tensor:
        x, y = batch
        if y.max() >= 3:
            raise ValueError(f"Label values must be < 3, and one is {int(y.max())}")
        return nn.functional.cross_entropy(model(x), y)

    return step_fn


def too_large_in(*numbers: int) -> Change:
    return lambda number, x, y: (x, y + 3 if number in numbers else y)


@pytest.mark.notices("reads ahead are those of the step before")
def test_a_check_of_labels_raises_as_in_plain_training() -> None:
    report = train(checking, too_large_in(12, 17, 18, 20))
    assert not report.fallbacks and "values of tensors that are read on the host decide" in text_of(report)


def test_a_check_that_fails_in_the_first_step() -> None:
    train(checking, too_large_in(0, 12), steps=34)


def test_a_check_that_never_fails() -> None:
    assert not train(checking).fallbacks


@pytest.mark.parametrize("numbers", [(12, 17, 18, 20), (0, 12)])
def test_a_check_of_all_elements_raises_as_in_plain_training(numbers: tuple[int, ...]) -> None:
    """Models of transformers for images make it."""

    def make(model: nn.Module) -> Step:
        def step_fn(batch: Any) -> Tensor:
            x, y = batch
            torch._check_tensor_all_with(ValueError, y < 3, lambda: f"a label is {y.max().item()}")
            return nn.functional.cross_entropy(model(x), y)

        return step_fn

    train(make, too_large_in(*numbers), steps=34)


def looked_up(model: nn.Module) -> Step:
    """Where a label is too large, the value that decides cannot be computed."""
    known = torch.tensor([True, True, False])

    def step_fn(batch: Any) -> Tensor:
        x, y = batch
        if known[y].all():
            x = x * 2
        return nn.functional.cross_entropy(model(x), y)

    return step_fn


def test_a_read_that_raises_does_so_in_the_line_of_the_step() -> None:
    train(looked_up, too_large_in(12, 17, 18, 20), replays=10)


def masked(model: nn.Module) -> Step:
    """As the masks of transformers: without padding another way is taken."""

    def step_fn(batch: Any) -> Tensor:
        x, y = batch
        mask = x[:, 0] > -1.0
        if mask.all():
            return nn.functional.cross_entropy(model(x), y)
        return (nn.functional.cross_entropy(model(x), y, reduction="none") * mask).sum() / 8

    return step_fn


def without_padding(wanted: Callable[[int], bool]) -> Change:
    def change(number: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        x = x.clamp(min=-0.5) if wanted(number) else x.index_fill(0, torch.tensor([1]), -2.0)
        return x, y

    return change


@pytest.mark.notices("reads ahead are those of the step before")
def test_ways_that_alternate() -> None:
    train(masked, without_padding(lambda number: number % 2 == 0), steps=40)


def test_ways_that_alternate_under_autocast() -> None:
    def make(model: nn.Module) -> Step:
        inner = masked(model)

        def step_fn(batch: Any) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return inner(batch)  # type: ignore[no-any-return]

        return step_fn

    train(make, without_padding(lambda number: number % 3 == 0), steps=40)


READS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "any of a comparison": lambda x, y: (y == 2).any(),
    "all of numbers": lambda x, y: y.bool().all(),
    "not": lambda x, y: not y.all(),
    "bool": lambda x, y: bool((y == 2).any()),
    "item": lambda x, y: y.max().item() >= 2,
    "item of a truth": lambda x, y: (y == 2).any().item(),
    "int": lambda x, y: int(y.sum()) > 8,
    "float": lambda x, y: float(x.sum()) > 0,
    "computed": lambda x, y: 2 * y.sum().item() + 1 > 17,
    "two reads": lambda x, y: y.min().item() < y.max().item() - 1,
    "a range": lambda x, y: 0 < y.sum().item() < 8,
    "and": lambda x, y: y.any() and x.sum() > 0,
    "or": lambda x, y: x.sum() > 0 or y.any(),
    "a dimension": lambda x, y: x.max(dim=1)[0].min() > 0.5,
    "made in the step": lambda x, y: (torch.arange(8) < y.sum()).all(),
    "an index": lambda x, y: x.index_select(0, y.argmax().reshape(1)).sum() > 0,
    "a copy": lambda x, y: y.cpu().float().mean() > 1,
    "is": lambda x, y: (y == 2).any().item() is True,
    "is not": lambda x, y: (y == 2).any().item() is not True,
    "nothing is a number": lambda x, y: torch.isnan(x).any() or x.sum() > 0,
}


@pytest.mark.slow_after(4)
@pytest.mark.parametrize("read", READS)
def test_a_read_that_decides(read: str) -> None:
    def make(model: nn.Module) -> Step:
        def step_fn(batch: Any) -> Tensor:
            x, y = batch
            if READS[read](x, y):
                x = x * 2
            return nn.functional.cross_entropy(model(x), y)

        return step_fn

    assert not train(make, steps=44).fallbacks


def an_item(x: Tensor, y: Tensor) -> Any:
    mask = y > 0
    mask[0] = True
    return mask.all()


def a_view(x: Tensor, y: Tensor) -> Any:
    mask = ~((y == 1) & (x.sum(1) > 0))
    mask.view(2, 4)[0].logical_not_()
    return mask.any()


def shifted(x: Tensor, y: Tensor) -> Any:
    """As encoder-decoders of transformers make the inputs of a decoder."""
    labels = y.new_zeros(y.shape)
    labels[..., 1:] = y[..., :-1].clone()
    labels[..., 0] = 2
    labels.masked_fill_(labels == 1, 5)
    return torch.all(labels >= 2).item() or labels.max() > 5 or (labels == 5).sum() > 2


def by_a_mask(x: Tensor, y: Tensor) -> Any:
    found = torch.where(x[:, :4] > 0, x[:, :4], 0.0)[:, 0]
    found[y == 2] = 9.0
    return found.flatten().sum().item() > 18


def with_an_operator(x: Tensor, y: Tensor) -> Any:
    total = y.float()
    total += x.sum(1)
    total *= y
    return total.sum() > 9


def read_twice(x: Tensor, y: Tensor) -> Any:
    mask = y > 1
    before = mask.any().item()
    mask[:4] = False
    after = mask.any().item()
    return before and not after


def changed_after_it_was_asked_for(x: Tensor, y: Tensor) -> Any:
    mask = y != 1
    found = mask[:3].all()
    mask[0] = False
    return found


def in_lists(x: Tensor, y: Tensor) -> Any:
    copies = [x.clone(), x.clone()]
    torch._foreach_add_(copies, [y[:, None].float(), y[:1].float()])
    return copies[1].sum() > 24 and copies[0].sum() > 0


CHANGED = [
    in_lists,
    an_item,
    a_view,
    shifted,
    by_a_mask,
    with_an_operator,
    read_twice,
    changed_after_it_was_asked_for,
]


@pytest.mark.slow_after(3)
@pytest.mark.parametrize("read", CHANGED)
def test_a_read_of_what_the_step_has_made_and_changed(read: Callable[..., Any]) -> None:
    def make(model: nn.Module) -> Step:
        def step_fn(batch: Any) -> Tensor:
            x, y = batch
            if read(x, y):
                x = x * 2
            return nn.functional.cross_entropy(model(x), y)

        return step_fn

    assert not train(make, steps=44).fallbacks


def test_a_check_of_what_the_step_has_changed() -> None:
    """The step computes with it, and an assertion that fails raises as in plain training."""

    def make(model: nn.Module) -> Step:
        def step_fn(batch: Any) -> Tensor:
            x, y = batch
            labels = torch.zeros_like(y)
            labels[1:] = y[:-1]
            if torch.any(labels < 0).item():
                raise ValueError("a label is negative")
            return nn.functional.cross_entropy(model(x) + labels[:, None], y.clamp(min=0))

        return step_fn

    train(make, lambda number, x, y: (x, y - 3 if number in (12, 25) else y), steps=40)


def from_constants(x: Tensor) -> Tensor:
    """As Funnel and Longformer count positions and windows."""
    positions = torch.arange(6, device=x.device)
    kept = positions[::2]
    first = kept[0] - positions[0] + 2 * kept.shape[0]
    x = x + torch.arange(first, kept[0] - positions[-1] + 5, -1, device=x.device)
    flags = torch.zeros(3, device=x.device)
    flags[1] = 2
    for _ in range(int(flags.sum())):
        x = x * flags.max().item()
    rows = torch.div(x.shape[0], 2, rounding_mode="trunc") - 1
    x = x.reshape(rows + 1, 2, -1).as_strided(
        size=(2 * rows + 2, 6), stride=(6, torch.div(3, 3, rounding_mode="floor"))
    )
    return x if flags.any() else -x


def test_values_that_are_the_same_in_each_step() -> None:
    """They may be more than a decision, and nobody looks at them again."""

    def make(model: nn.Module) -> Step:
        return lambda batch: nn.functional.cross_entropy(model(from_constants(batch[0])), batch[1])

    assert not train(make).fallbacks
    trace = ReproducingTrace(torch.device("cpu"))
    x = torch.randn(8, 6)
    assert torch.equal(trace(from_constants, (x,), {}), from_constants(x))
    assert trace.problem is None and trace.ahead.draws is None


def test_a_value_of_a_number_that_changes_is_no_constant() -> None:
    limits = [5]

    def make(model: nn.Module) -> Step:
        def step_fn(batch: Any) -> Tensor:
            x, y = batch
            for _ in range(int(torch.full((2,), limits[0]).sum())):
                x = x * 1.01
            return nn.functional.cross_entropy(model(x), y)

        return step_fn

    def between(number: int, model: nn.Module) -> None:
        limits[0] = 5 if number < 15 else 7

    train(make, between=between, steps=40)


def test_a_value_that_nobody_uses() -> None:
    def make(model: nn.Module) -> Step:
        def step_fn(batch: Any) -> Tensor:
            x, y = batch
            int(y.sum())
            return nn.functional.cross_entropy(model(x), y)

        return step_fn

    assert "decide which way" not in text_of(train(make))


def test_a_read_that_only_one_way_reaches() -> None:
    def make(model: nn.Module) -> Step:
        def step_fn(batch: Any) -> Tensor:
            x, y = batch
            if y[0] > 0:
                x = x * 2
                if x.sum() > 0:
                    x = x + 1
            elif y[1] > 0:
                x = x - 1
            return nn.functional.cross_entropy(model(x), y)

        return step_fn

    train(make, steps=60)


def test_a_read_in_each_micro_batch() -> None:
    train(masked, without_padding(lambda number: number % 3 == 0), steps=60, accumulate=2)


def test_a_parameter_is_read_as_it_is_when_the_step_begins() -> None:
    def make(model: nn.Module) -> Step:
        def step_fn(batch: Any) -> Tensor:
            x, y = batch
            loss = nn.functional.cross_entropy(model(x), y)
            return loss * 2 if model.first.weight[0, 0] > signs[0] else loss  # type: ignore[operator, union-attr, index]

        return step_fn

    signs = [0.3]
    train(make, steps=60)


def test_a_buffer_is_read_before_the_step_writes_it() -> None:
    def make(model: nn.Module) -> Step:
        def step_fn(batch: Any) -> Tensor:
            x, y = batch
            if model.norm.num_batches_tracked % 2 == 0:  # type: ignore[operator, union-attr]
                x = x * 2
            return nn.functional.cross_entropy(model(x), y)

        return step_fn

    train(make, steps=40)


def after_the_write(model: nn.Module) -> Step:
    def step_fn(batch: Any) -> Tensor:
        x, y = batch
        out = model(x)
        if model.norm.num_batches_tracked % 2 == 0:  # type: ignore[operator, union-attr]
            out = out * 2
        return nn.functional.cross_entropy(out, y)

    return step_fn


def through_another_name(model: nn.Module) -> Step:
    def step_fn(batch: Any) -> Tensor:
        x, y = batch
        model.norm.running_mean.data[:1].add_(0.1)  # type: ignore[operator, union-attr, index]
        if model.norm.running_mean[0] > 1:  # type: ignore[operator, union-attr, index]
            x = x * 2
        return nn.functional.cross_entropy(model(x), y)

    return step_fn


def with_other_memory(model: nn.Module) -> Step:
    def step_fn(batch: Any) -> Tensor:
        x, y = batch
        model.norm.running_mean.data = model.norm.running_mean * 0.5 + 0.5  # type: ignore[operator, union-attr]
        if model.norm.running_mean[0] > 0.7:  # type: ignore[operator, union-attr, index]
            x = x * 2
        return nn.functional.cross_entropy(model(x), y)

    return step_fn


def in_a_list(model: nn.Module) -> Step:
    def step_fn(batch: Any) -> Tensor:
        x, y = batch
        torch._foreach_add_([model.norm.running_mean], 0.05)  # type: ignore[union-attr]
        if model.norm.running_mean[0] > 0.6:  # type: ignore[operator, union-attr, index]
            x = x * 2
        return nn.functional.cross_entropy(model(x), y)

    return step_fn


def by_batch_normalisation(model: nn.Module) -> Step:
    """It does not count that it changes its statistics."""

    def step_fn(batch: Any) -> Tensor:
        x, y = batch
        out = model(x)
        if model.norm.running_mean[0] * 1e5 % 2 < 1:  # type: ignore[operator, union-attr, index]
            out = out * 2
        return nn.functional.cross_entropy(out, y)

    return step_fn


def a_copy_that_is_changed(*how: str) -> Callable[[nn.Module], Step]:
    def make(model: nn.Module) -> Step:
        def step_fn(batch: Any) -> Tensor:
            x, y = batch
            copy = x.clone()
            if "as an output" in how:
                torch.add(x, 0.05, out=copy)
            elif "through data" in how:
                copy.data[0] = 1.0
            elif "at random" in how:
                copy.uniform_()
            elif "of the model" in how:
                copy = model.norm.running_mean.view(-1)  # type: ignore[operator, union-attr]
                copy[0] += 0.1
            if copy.sum() * 8 % 1 < 0.5:
                x = x * 2
            return nn.functional.cross_entropy(model(x), y)

        return step_fn

    return make


def the_loss(model: nn.Module) -> Step:
    def step_fn(batch: Any) -> Tensor:
        loss = loss_of(model)(batch)
        if loss > 1.0:
            loss = loss * 0.5
        return loss

    return step_fn


def random_numbers(model: nn.Module) -> Step:
    def step_fn(batch: Any) -> Tensor:
        x, y = batch
        if (x + torch.rand_like(x)).sum() > 24:
            x = x * 2
        return nn.functional.cross_entropy(model(x), y)

    return step_fn


def a_value_that_is_computed_with(model: nn.Module) -> Step:
    def step_fn(batch: Any) -> Tensor:
        x, y = batch
        largest = x.max().item()
        if largest > 10:
            x = x * 2
        return nn.functional.cross_entropy(model(x) / largest, y)

    return step_fn


def a_count(model: nn.Module) -> Step:
    def step_fn(batch: Any) -> Tensor:
        x, y = batch
        for _ in range(int(y.sum())):
            x = x * 1.01
        return nn.functional.cross_entropy(model(x), y)

    return step_fn


def many_operations(model: nn.Module) -> Step:
    def step_fn(batch: Any) -> Tensor:
        x, y = batch
        total = x.sum()
        for _ in range(70):
            total = total * 1.01
        if total > 0:
            x = x * 2
        return nn.functional.cross_entropy(model(x), y)

    return step_fn


REFUSED: dict[str, tuple[Callable[[nn.Module], Step], str]] = {
    "written before": (after_the_write, "if model.norm"),
    "written through another name": (through_another_name, "if model.norm"),
    "written in a list": (in_a_list, "if model.norm"),
    "written by batch normalisation": (by_batch_normalisation, "if model.norm"),
    "other memory": (with_other_memory, "if model.norm"),
    **{
        f"a copy that is changed {how}": (a_copy_that_is_changed(how), "if copy.sum()")
        for how in ("as an output", "through data", "at random", "of the model")
    },
    "the loss": (the_loss, "if loss > 1.0"),
    "random numbers": (random_numbers, "if (x + torch"),
    "computed with": (a_value_that_is_computed_with, "if largest > 10"),
    "a count": (a_count, "for _ in range"),
    "many operations": (many_operations, "if total > 0"),
}


@pytest.mark.slow_after(5)
@pytest.mark.parametrize("step", REFUSED)
def test_a_read_that_is_left_to_the_step(step: str) -> None:
    make, text = REFUSED[step]
    report = train(make, replays=None, verify="off")  # where nothing is decided while a graph is replayed
    told = report.fallbacks[0]
    assert told.where == line_of(a_copy_that_is_changed if "if copy" in text else make, text), str(told)
    assert "is read on the host" in told.reason


@pytest.mark.parametrize(
    "step", [s for s in REFUSED if s not in ("other memory", "computed with", "a count")]
)
def test_a_read_that_is_left_to_the_step_decides_in_its_graph(step: str) -> None:
    """It is made where the step makes it: after what the step has written by then."""
    make, _ = REFUSED[step]
    train(make, replays=1, steps=20, plan=None)


def test_a_way_that_no_graph_can_hold_leaves_the_others_theirs() -> None:
    def make(model: nn.Module) -> Step:
        def step_fn(batch: Any) -> Tensor:
            x, y = batch
            if (x[0, 0] == -2.0).any():
                keep = x[:, 0] > 0
                return nn.functional.cross_entropy(model(x)[keep], y[keep])
            return nn.functional.cross_entropy(model(x), y)

        return step_fn

    def change(number: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return (x.index_fill(0, torch.tensor([0]), -2.0) if number in (9, 14, 15, 16, 21) else x), y

    train(make, change, steps=40)


def test_a_draw_and_a_read_in_one_step() -> None:
    def make(model: nn.Module) -> Step:
        def step_fn(batch: Any) -> Tensor:
            x, y = batch
            if random.random() < 0.5:
                x = x * 2
                if y[0] > 0:
                    x = x + 1
            if torch.rand([]) < 0.3:
                x = x - 1
            return nn.functional.cross_entropy(model(x), y)

        return step_fn

    train(make, steps=80)


def test_a_step_that_writes_to_python_and_returns_results() -> None:
    def script(diary: Diary) -> None:
        model = Net()
        optimizer = adamw(model)
        counted = {"steps": 0}
        kept: list[Tensor] = []

        def step_fn(batch: Any) -> dict[str, Any]:
            x, y = batch
            counted["steps"] += 1
            if y[0] > 1:
                x = x * 2
            kept.append(x.sum())
            return {"loss": nn.functional.cross_entropy(model(x), y), "x": x, "text": "as it is"}

        step = diary.step(step_fn, model=model, optimizer=optimizer)
        for batch in batches(60):
            diary.write("result", step(batch))
            diary.write("counted", dict(counted))
            diary.write("kept", list(kept))
            diary.write_state(model, optimizer)

    assert both(script, replays=20).steps_replayed >= 20


def test_a_grad_scaler() -> None:
    def script(diary: Diary) -> None:
        model = Net()
        optimizer = sgd(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        step = diary.step(masked(model), model=model, optimizer=optimizer, scaler=scaler)
        change = without_padding(lambda number: number % 2 == 0)
        for number, (x, y) in enumerate(batches(40)):
            diary.write("loss", step(change(number, x, y)))
            diary.write("scaler", scaler.state_dict())
            diary.write_state(model, optimizer)

    assert both(script, replays=20).steps_replayed >= 20


def test_batches_of_two_sizes() -> None:
    """A trace for many sizes reads nothing ahead: each size has a trace of its own."""

    def change(number: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return (x, y) if number % 2 else (x[:5], y[:5])

    train(checking, change, steps=60)


def test_a_threshold_that_changes() -> None:
    def make(model: nn.Module) -> Step:
        def step_fn(batch: Any) -> Tensor:
            x, y = batch
            if x.sum() > limits[0]:
                x = x * 2
            return nn.functional.cross_entropy(model(x), y)

        return step_fn

    limits = [0.0]

    def between(number: int, model: nn.Module) -> None:
        limits[0] = 0.0 if number < 25 else 2.0

    train(make, steps=60, between=between)


@pytest.mark.slow
def test_ways_without_end() -> None:
    """Each of many rows has a question of its own."""

    def make(model: nn.Module) -> Step:
        def step_fn(batch: Any) -> Tensor:
            x, y = batch
            for row in range(8):
                if x[row].sum() > 0:
                    x = x + 1e-6
            return nn.functional.cross_entropy(model(x), y)

        return step_fn

    report = train(make, steps=130, replays=None)
    assert "went ways that have no graph" in report.fallbacks[0].reason
    assert report.fallbacks[0].where == line_of(make, "if x[row].sum()")


def test_an_assertion_stays_in_the_graph() -> None:
    def make(model: nn.Module) -> Step:
        def step_fn(batch: Any) -> Tensor:
            x, y = batch
            assert y.max() < 3, "too large"
            return nn.functional.cross_entropy(model(x), y)

        return step_fn

    report = train(make)
    assert "decide which way" not in text_of(report)


@pytest.mark.slow
def test_with_inductors_kernels() -> None:
    """The kernels may round in another way: losses are compared as far as they agree."""
    from pygraph_train import GraphedStep, PyGraphConfig

    losses: list[list[float]] = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = Net(dropout=0.0)
        step = GraphedStep(
            masked(model),
            model=model,
            optimizer=adamw(model),
            config=PyGraphConfig(engine="emulated", warmup_steps=2, compile=compiled),
        )
        change = without_padding(lambda number: number % 2 == 0)
        losses.append([float(step(change(number, x, y))) for number, (x, y) in enumerate(batches(40))])
        report = step.report()
        assert report.steps_replayed >= 15, str(report)
        step.close()
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            x = x * 2
        return x * 3 if self.count > 0 else x


def test_buffers_that_processes_exchange_are_left_to_the_step() -> None:
    """They are other ones than before the step, on all processes but the first."""
    for of_buffers in (True, False):
        trace, x = ReproducingTrace(torch.device("cpu")), torch.ones(3)
        trace.ahead.of_buffers = of_buffers
        step = Counting()
        if of_buffers:
            assert torch.equal(trace(step, (x,), {}), x * 2) and trace.host_draws is not None
            with pytest.raises(NotLegal, match="another way"):
                trace(step, (-x,), {})
        else:
            with pytest.raises(NotLegal, match="read on the host"):
                trace(step, (x,), {})


def test_compiled_code_asks_no_more_than_what_is_looked_at() -> None:
    def step(x: Tensor) -> Tensor:
        if torch.compiler.is_compiling() and x.min() > 0:
            return x * 2
        return x * 3 if x.max() > 0 else x

    x = torch.ones(3)
    trace = ReproducingTrace(torch.device("cpu"))
    assert torch.equal(trace(step, (x,), {}), x * 3)
    compiled = ReproducingTrace(torch.device("cpu"), compiler=lambda graph, inputs, left: graph.forward)
    compiled.ahead.ask_no_more_than(trace.ahead)
    with pytest.raises(NotLegal, match="read on the host"):
        compiled(step, (x,), {})


def test_a_value_that_is_compared_in_a_tuple() -> None:
    """As recurrent networks compare the sizes that they are given."""

    def make(model: nn.Module) -> Step:
        def step_fn(batch: Any) -> Tensor:
            x, y = batch
            loss = nn.functional.cross_entropy(model(x), y)
            return loss * 2 if (x.shape[0], int(y.max())) == (8, 2) else loss

        return step_fn

    train(make, lambda number, x, y: (x, y.clamp(max=1) if number % 3 == 1 else y), steps=40)


def test_a_value_that_is_compared_with_an_unknown_size_in_a_tuple() -> None:
    """Dynamo of torch 2.13 says of such a size that nothing is equal to it."""

    def make(model: nn.Module) -> Step:
        def step_fn(batch: Any) -> Tensor:
            x, y = batch
            loss = nn.functional.cross_entropy(model(x), y)
            hidden = torch.zeros(2, y.max() + 1)
            return loss * 2 if hidden.size() == (2, int(y.max()) + 1) else loss

        return step_fn

    train(make, lambda number, x, y: (x, y.clamp(max=1) if number % 3 == 1 else y), replays=None)


KEYS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "in a set": lambda x, y: y.max().item() in {1, 3},
    "in a dict": lambda x, y: int(y.max()) in {1: "one"},
    "got from a dict": lambda x, y: {1: True}.get(int(y.max()), False),
    "a constant in a list": lambda x, y: 1 in [int(y.max()), int(y[0])],
    "a constant in a tuple": lambda x, y: 1 not in (y.max().item(), 5),
    "put into a set": lambda x, y: len({int(y.max()), 1}) == 1,
}


@pytest.mark.parametrize("read", KEYS)
def test_a_value_that_is_looked_up(read: str) -> None:
    """Dynamo of 2.13 would take it for an object that equals no other; of 2.11 compares it with each key."""

    def make(model: nn.Module) -> Step:
        def step_fn(batch: Any) -> Tensor:
            x, y = batch
            if KEYS[read](x, y):
                x = x * 2
            return nn.functional.cross_entropy(model(x), y)

        return step_fn

    def script(diary: Diary) -> None:
        model = Net()
        step = diary.step(make(model), model=model, optimizer=adamw(model))
        for number, (x, y) in enumerate(batches(30)):
            diary.write("loss", step((x, y.clamp(max=1) if number % 3 else y)))
        diary.write_state(model)

    both(script, replays=10)


def test_a_drawn_number_that_is_looked_up() -> None:
    def make(model: nn.Module) -> Step:
        def step_fn(batch: Any) -> Tensor:
            x, y = batch
            if random.randrange(3) in {0, 2}:
                x = x * 2
            return nn.functional.cross_entropy(model(x), y)

        return step_fn

    def script(diary: Diary) -> None:
        random.seed(1)
        model = Net()
        step = diary.step(make(model), model=model, optimizer=adamw(model))
        for batch in batches(30):
            diary.write("loss", step(batch))
        diary.write("drawn", random.random())

    both(script, replays=10)


CONVERTED: dict[str, Callable[[Tensor], Any]] = {
    "to a whole number": lambda x: int(x.sum()),
    "of Python to a whole number": lambda x: int(x.sum().item()),
    "by rounding": lambda x: round(x.sum().item()),
    "by a division": lambda x: 1 / x[0, 0].item(),
}


@pytest.mark.parametrize("how", CONVERTED)
def test_a_number_that_nobody_uses_may_raise(how: str) -> None:
    def make(model: nn.Module) -> Step:
        def step_fn(batch: Any) -> Tensor:
            x, y = batch
            CONVERTED[how](x)
            return nn.functional.cross_entropy(model(x.nan_to_num()), y)

        return step_fn

    def script(diary: Diary) -> None:
        model = Net()
        optimizer = adamw(model)
        step = diary.step(make(model), model=model, optimizer=optimizer)
        for number, (x, y) in enumerate(batches(30)):
            if number in (12, 20, 21):
                x = x * (0 if "division" in how else float("nan"))
            try:
                diary.write("loss", step((x, y)))
            except (ValueError, ZeroDivisionError) as error:
                diary.write("raised", [type(error).__name__, str(error)])
            diary.write_state(model, optimizer)

    both(script, replays=15, plan="{F B O}")


def test_zeros_of_two_signs_lead_to_two_results() -> None:
    def make(model: nn.Module) -> Step:
        def step_fn(batch: Any) -> Tensor:
            x, y = batch
            zero = 0.0 if random.random() < 0.5 else -0.0
            if x[0, 0].abs() / zero > 0:
                x = x * 2
            elif x[0, 0].abs() / -zero > 0:
                x = x * 3
            return nn.functional.cross_entropy(model(x), y)

        return step_fn

    train(make, steps=60, replays=40)


class TwoBuffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("known", torch.zeros(6))
        self.net = Net()

    def forward(self, x: Tensor) -> Tensor:
        self.mean.mul_(0.9).add_(x[0])
        return self.net(x * 2 if self.known.sum() > 0 else x)  # type: ignore[no-any-return]


ALIASES: dict[str, Callable[[TwoBuffers], object]] = {
    "data of the one that is read": lambda m: setattr(m.known, "data", m.mean.data),
    "data of the one that is written": lambda m: setattr(m.mean, "data", m.known.data),
    "a view": lambda m: setattr(m, "known", m.mean[:]),
    "set": lambda m: m.known.set_(m.mean),
}


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("how", ALIASES)
@pytest.mark.parametrize("when", [2, 25])
def test_a_buffer_that_is_read_comes_to_lie_where_the_step_writes(how: str, when: int) -> None:
    def script(diary: Diary) -> None:
        model = TwoBuffers()
        optimizer = adamw(model)
        step = diary.step(loss_of(model), model=model, optimizer=optimizer)
        for number, batch in enumerate(batches(60)):
            if number == when:
                ALIASES[how](model)
            diary.write("loss", step(batch))
            diary.write_state(model, optimizer)

    assert "shares memory now" in text_of(both(script, replays=5, verify="off")) or when == 2
    both(script, replays=5)  # and where the value decides in the graph


@pytest.mark.parametrize("when", [1, 4, 15])
def test_a_batch_that_is_read_lies_where_the_step_writes(when: int) -> None:
    def script(diary: Diary) -> None:
        model = Net()
        model.register_buffer("mean", torch.zeros(48))
        optimizer = adamw(model)

        def step_fn(batch: Any) -> Tensor:
            x, y = batch
            model.mean.mul_(0.9).add_(x.sum())  # type: ignore[operator, union-attr]
            if x[1].sum() > 0:
                x = x * 2
            return nn.functional.cross_entropy(model(x), y)

        step = diary.step(step_fn, model=model, optimizer=optimizer)
        for number, (x, y) in enumerate(batches(40)):
            if number == when:
                model.mean.copy_(x.flatten())  # type: ignore[operator, union-attr]
                x = model.mean.view(8, 6)  # type: ignore[operator, union-attr]
            diary.write("loss", step((x, y)))
            diary.write_state(model, optimizer)

    both(script, replays=5)
