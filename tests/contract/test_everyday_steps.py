"""A hundred steps that people write, and that break careless designs: each trains as a plain loop does.

A case gets a `Case`, may change what it has, and returns the step function. Its number says of how many of the 32
steps forward and backward have to run from graphs at least; without a number none has to. Those that are slow have a
sister that is not.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import random
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.nn.utils import parametrizations
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

from .compare import Run, compare
from .models import DEVICE, batches

STEPS = 32
CASES: list[Any] = []


class Case:
    """What a case may use and change.

    Attributes:
        model: trained by AdamW, unless `optimizer` is set.
        seen: what is compared at the end besides model, optimizer and results.
        after: called with the number of each step behind it.
        options: of the step.
        raises: an exception that steps may raise; the loop goes on.
    """

    def __init__(self) -> None:
        self.model: Any = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, 3))
        self.seen: dict[str, Any] = {}
        self.batches = batches(STEPS)
        self.after: Callable[[int], Any] = lambda number: None
        self.options: dict[str, Any] = {}
        self.raises: tuple[type[Exception], ...] = ()
        self.accumulates = False

    @functools.cached_property
    def optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), 1e-2, fused=True)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(self.model(x), y)

    def at(self, **calls: Callable[[], Any]) -> None:
        """`at(step_15=...)`: call this behind that step."""
        self.after = lambda number: calls[f"step_{number}"]() if f"step_{number}" in calls else None


def case(
    replays: int = 0, *, updates: int | None = None, differs: str = "", slow: bool = False, notices: str = ""
) -> Callable[[Any], Any]:
    """Add a case. `differs` says why it does not train the same today; `notices` is a fault (`make planted`)."""

    def add(make: Any) -> Any:
        marks = [] if replays else [pytest.mark.passes_without_graphs("no graph has to run")]
        if slow:
            marks.append(pytest.mark.slow)
        if notices:
            marks.append(pytest.mark.notices(notices))
        if differs:
            marks.append(pytest.mark.xfail(strict=True, reason=differs))
        CASES.append(pytest.param(make, replays, updates, id=make.__name__, marks=marks))
        return make

    return add


def break_here() -> None:
    """A graph break."""
    print(end="")


# -- behind the loss ---------------------------------------------------------------------------------------


@case(19)
def only_the_loss(case: Case) -> Any:
    return case.loss


@case(3)
def a_large_loss_is_dropped(case: Case) -> Any:
    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = case.loss(x, y)
        return loss * 0.0 if loss.item() > 1.15 else loss

    return step


@case(6)
def some_steps_raise(case: Case) -> Any:
    case.seen["calls"], case.raises = 0, (ValueError,)

    def step(x: Tensor, y: Tensor) -> Tensor:
        case.seen["calls"] += 1
        loss = case.loss(x, y)
        loss.item()
        if case.seen["calls"] % 7 == 0:
            raise ValueError("caught by the loop")
        return loss

    return step


@case(19)
def the_norm_of_a_weight_is_logged_by_the_host(case: Case) -> Any:
    norms = case.seen["norms"] = []

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = case.loss(x, y)
        loss.item()
        norms.append(float(case.model[0].weight.norm()))
        return loss

    return step


@case(19)
def the_norm_of_a_weight_is_kept_as_a_tensor(case: Case) -> Any:
    norms = case.seen["norms"] = []

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = case.loss(x, y)
        norms.append(case.model[0].weight.detach().norm())
        return loss

    return step


@case(14, updates=12, slow=True)
def gradients_are_looked_for_behind_the_loss(case: Case) -> Any:
    """They are None: the loop has emptied them."""
    norms = case.seen["norms"] = []

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = case.loss(x, y)
        loss.item()
        norms.append(sum(float(p.grad.norm()) for p in case.model.parameters() if p.grad is not None))
        return loss

    return step


@case(4, updates=2, slow=True)
def a_validation_inside_of_the_step(case: Case) -> Any:
    case.seen.update(calls=0, losses=[])

    def step(x: Tensor, y: Tensor) -> Tensor:
        case.seen["calls"] += 1
        loss = case.loss(x, y)
        loss.item()
        if case.seen["calls"] % 5 == 0:
            case.model.eval()
            with torch.no_grad():
                case.seen["losses"].append(float(case.loss(x, y)))
            case.model.train()
        return loss

    return step


@case(13, updates=11, slow=True)
def a_second_call_of_the_same_code_is_only_logged(case: Case) -> Any:
    kept = case.seen["kept"] = []

    def part(x: Tensor, y: Tensor) -> Tensor:
        break_here()
        return case.loss(x, y)

    def step(x: Tensor, y: Tensor) -> Tensor:
        one, other = part(x, y), part(x.flip(0), y.flip(0))
        kept.append(other.detach())
        return one

    return step


@case(16, updates=5)
def two_losses_with_a_graph_break_between(case: Case) -> Any:
    def step(x: Tensor, y: Tensor) -> Tensor:
        one = case.loss(x, y)
        break_here()
        other = case.model(x * 2).square().mean()
        break_here()
        return one + 0.1 * other

    return step


@case(16, updates=5, slow=True)
def two_losses_of_the_same_code(case: Case) -> Any:
    def part(x: Tensor, y: Tensor) -> Tensor:
        break_here()
        return case.loss(x, y)

    return lambda x, y: part(x, y) + part(x.flip(0), y.flip(0))


@case(16, updates=14, slow=True)
def the_loss_is_scaled_behind_a_graph_break(case: Case) -> Any:
    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = case.loss(x, y)
        break_here()
        return loss / 4

    return step


@case(16, updates=14, slow=True)
def the_loss_is_read_and_scaled(case: Case) -> Any:
    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = case.loss(x, y)
        value = loss.item()
        break_here()
        case.seen["value"] = value
        return loss * 1.0

    return step


@case(14, updates=12, slow=True)
def an_average_of_weights_is_updated_behind_the_loss(case: Case) -> Any:
    averages = case.seen["averages"] = [p.detach().clone() for p in case.model.parameters()]

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = case.loss(x, y)
        loss.item()
        with torch.no_grad():
            for average, p in zip(averages, case.model.parameters(), strict=True):
                average.lerp_(p, 0.1)
        return loss

    return step


@case(19)
def a_teacher_is_updated_before_the_loss(case: Case) -> Any:
    teacher = copy.deepcopy(case.model).requires_grad_(False)
    case.seen["teacher"] = teacher

    def step(x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            for average, p in zip(teacher.parameters(), case.model.parameters(), strict=True):
                average.lerp_(p, 0.1)
            target = teacher(x)
        return case.loss(x, y) + mse_loss(case.model(x), target)

    return step


@case(19)
def a_teacher_is_updated_behind_the_loss(case: Case) -> Any:
    teacher = copy.deepcopy(case.model).requires_grad_(False)
    case.seen["teacher"] = teacher

    def step(x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            target = teacher(x)
        loss = case.loss(x, y) + mse_loss(case.model(x), target)
        with torch.no_grad():
            for average, p in zip(teacher.parameters(), case.model.parameters(), strict=True):
                average.lerp_(p, 0.1)
        return loss

    return step


@case(16, updates=14)
def the_best_weights_are_kept(case: Case) -> Any:
    case.seen.update(best=9e9, weights=None)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = case.loss(x, y)
        if loss.item() < case.seen["best"]:
            weights = {name: value.clone() for name, value in case.model.state_dict().items()}
            case.seen.update(best=loss.item(), weights=weights)
        return loss

    return step


@case(16, updates=14, slow=True)
def the_learning_rate_is_read_behind_the_loss(case: Case) -> Any:
    rates = case.seen["rates"] = []
    schedule = torch.optim.lr_scheduler.StepLR(case.optimizer, 10, 0.3)
    case.after = lambda number: schedule.step()

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = case.loss(x, y)
        break_here()
        rates.append(case.optimizer.param_groups[0]["lr"])
        return loss

    return step


@case(10)
def logs_every_tenth_step(case: Case) -> Any:
    case.seen.update(calls=0, maxima=[])

    def step(x: Tensor, y: Tensor) -> Tensor:
        out = case.model(x)
        loss = cross_entropy(out, y)
        case.seen["calls"] += 1
        if case.seen["calls"] % 10 == 0:
            case.seen["loss"] = loss.item()
            break_here()
        case.seen["maxima"].append(float(out.detach().abs().max()))
        return loss

    return step


@case(16, updates=14, slow=True)
def the_loss_is_a_view(case: Case) -> Any:
    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = case.loss(x, y)
        break_here()
        return loss.squeeze()

    return step


@case(slow=True)
def the_loss_is_changed_in_place(case: Case) -> Any:
    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = case.loss(x, y)
        break_here()
        loss *= 0.5
        return loss

    return step


@case(16, updates=5, slow=True)
def a_penalty_on_parameters_behind_a_graph_break(case: Case) -> Any:
    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = case.loss(x, y)
        break_here()
        return loss + 1e-3 * sum(p.square().sum() for p in case.model.parameters())

    return step


@case(14, updates=12, notices="a backward overwrites gradients that were delivered")
def a_backward_inside_of_the_step(case: Case) -> Any:
    def step(x: Tensor, y: Tensor) -> Tensor:
        out = case.model(x)
        (out.square().mean() * 0.1).backward(retain_graph=True)
        return cross_entropy(out, y)

    return step


# -- results and state of the step --------------------------------------------------------------------------


@case(19)
def a_dict_with_logits(case: Case) -> Any:
    def step(x: Tensor, y: Tensor) -> dict[str, Tensor]:
        out = case.model(x)
        return {"loss": cross_entropy(out, y), "logits": out}

    return step


@case(16, updates=14, slow=True)
def an_object_inside_of_the_step(case: Case) -> Any:
    def forward(x: Tensor, y: Tensor) -> Any:
        out = case.model(x)
        return SimpleNamespace(loss=cross_entropy(out, y), logits=out)

    def step(x: Tensor, y: Tensor) -> Tensor:
        output = forward(x, y)
        case.seen["rows"] = output.logits.shape[0]
        return output.loss

    return step


@case(19)
def a_counter(case: Case) -> Any:
    case.seen["calls"] = 0

    def step(x: Tensor, y: Tensor) -> Tensor:
        case.seen["calls"] += 1
        return case.loss(x, y)

    return step


@case(14, updates=12)
def the_loss_is_printed(case: Case) -> Any:
    printed = io.StringIO()
    case.after = lambda number: case.seen.update(printed=printed.getvalue())

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = case.loss(x, y)
        print(f"loss {loss.item():.6f}", file=printed)
        return loss

    return step


@case(12, updates=10)
def containers_that_grow(case: Case) -> Any:
    counts: Counter[str] = Counter()
    by_size: Any = defaultdict(list)
    case.seen.update(counts=counts, by_size=by_size, seen=set())

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = case.loss(x, y)
        counts["batches"] += 1
        by_size[len(x)].append(loss.detach() * 2)
        case.seen["seen"].add(counts["batches"])
        return loss

    return step


@case(19)
def a_list_of_losses(case: Case) -> Any:
    losses = case.seen["losses"] = []

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = case.loss(x, y)
        losses.append(loss.detach())
        return loss

    return step


@case(16)
def a_list_that_has_grown_under_another_name(case: Case) -> Any:
    """As a list of a new batch, which may lie where a shorter one lay."""
    scale = torch.ones(6, device=DEVICE)
    grows = [scale]
    held = SimpleNamespace(first=grows, second=[scale, scale], late=False)

    def swap() -> None:
        grows.append(2 * scale)
        held.first, held.second, held.late = [scale], grows, True

    def step(x: Tensor, y: Tensor) -> Tensor:
        one, other = held.second
        loss = cross_entropy(case.model(x * (held.first[0] + one + other)), y)
        return 2 * loss if held.late else loss

    case.at(step_10=swap)
    return step


@case(16, updates=14, slow=True)
def a_meter(case: Case) -> Any:
    meter = SimpleNamespace(count=0)
    case.after = lambda number: case.seen.update(count=meter.count)

    def step(x: Tensor, y: Tensor) -> Tensor:
        meter.count += len(x)
        return case.loss(x, y)

    return step


@case(18, slow=True)
def a_metric_of_torchmetrics(case: Case) -> Any:
    torchmetrics = pytest.importorskip("torchmetrics")
    accuracy = torchmetrics.Accuracy("multiclass", num_classes=3)

    def step(x: Tensor, y: Tensor) -> Tensor:
        out = case.model(x)
        accuracy(out, y)
        case.seen["accuracy"] = float(accuracy.compute())
        return cross_entropy(out, y)

    return step


@case(19)
def a_sum_of_losses_in_place(case: Case) -> Any:
    case.seen["sum"] = torch.zeros(())

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = case.loss(x, y)
        case.seen["sum"] += loss.detach()
        return loss

    return step


@case(18)
def a_sum_of_losses(case: Case) -> Any:
    case.seen["sum"] = 0.0

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = case.loss(x, y)
        case.seen["sum"] = case.seen["sum"] + loss.detach()
        return loss

    return step


def queue() -> Tensor:
    return torch.randn(32, 3, generator=torch.Generator(DEVICE).manual_seed(3))


@case(12, updates=10, slow=True)
def a_queue_that_is_written_in_place(case: Case) -> Any:
    case.seen.update(queue=queue(), at=0)

    def step(x: Tensor, y: Tensor) -> Tensor:
        out = case.model(x)
        loss = cross_entropy(out @ case.seen["queue"].T.clone(), y)
        case.seen["queue"][case.seen["at"] : case.seen["at"] + 8] = out.detach()
        case.seen["at"] = (case.seen["at"] + 8) % 32
        return loss

    return step


@case(19)
def a_queue_that_is_replaced(case: Case) -> Any:
    case.seen["queue"] = queue()

    def step(x: Tensor, y: Tensor) -> Tensor:
        out = case.model(x)
        loss = cross_entropy(out @ case.seen["queue"].T, y)
        case.seen["queue"] = torch.cat([out.detach(), case.seen["queue"]])[:32]
        return loss

    return step


@case(19)
def a_hidden_state(case: Case) -> Any:
    case.seen["hidden"] = torch.zeros(8, 3)

    def step(x: Tensor, y: Tensor) -> Tensor:
        out = case.model(x) + 0.5 * case.seen["hidden"]
        case.seen["hidden"] = out.detach()
        return cross_entropy(out, y)

    return step


@case()
def a_hidden_state_that_is_not_detached(case: Case) -> Any:
    """The second step is an error of autograd."""
    case.seen["hidden"], case.raises = torch.zeros(8, 3), (RuntimeError,)

    def step(x: Tensor, y: Tensor) -> Tensor:
        out = case.model(x) + 0.5 * case.seen["hidden"]
        case.seen["hidden"] = out
        return cross_entropy(out, y)

    return step


@case(19)
def an_output_that_keeps_its_graph(case: Case) -> Any:
    kept, flags = {}, case.seen.setdefault("flags", [])
    case.after = lambda number: flags.append(kept.pop("out").requires_grad)

    def step(x: Tensor, y: Tensor) -> Tensor:
        kept["out"] = out = case.model(x)
        return cross_entropy(out, y)

    return step


@case(16, updates=14, slow=True)
def logits_that_retain_their_gradient(case: Case) -> Any:
    kept, norms = {}, case.seen.setdefault("norms", [])
    case.after = lambda number: norms.append(float(kept.pop("out").grad.norm()))

    def step(x: Tensor, y: Tensor) -> Tensor:
        kept["out"] = out = case.model(x)
        out.retain_grad()
        return cross_entropy(out, y)

    return step


@case(18)
def a_cache_of_tensors(case: Case) -> Any:
    cache: dict[str, Tensor] = {}

    def step(x: Tensor, y: Tensor) -> Tensor:
        if "table" not in cache:
            cache["table"] = torch.arange(6).float() / 6
        return case.loss(x + cache["table"], y)

    return step


_TRACED_CACHE = "Dynamo traces through `lru_cache`, and its function is called in steps without a graph"


@case(14, differs=None if DEVICE == "cuda" else _TRACED_CACHE)
def a_function_with_a_cache(case: Case) -> Any:
    @functools.lru_cache
    def table(count: int) -> Tensor:
        case.seen["calls"] = case.seen.get("calls", 0) + 1
        return torch.arange(count).float() / count

    return lambda x, y: case.loss(x + table(6), y)


@case(16, updates=14, slow=True)
def the_next_of_an_iterator(case: Case) -> Any:
    shifts = iter([torch.full((8, 6), number / 50.0) for number in range(60)])
    return lambda x, y: case.loss(x + next(shifts), y)


@case(16, updates=14, slow=True)
def the_next_of_a_generator(case: Case) -> Any:
    shifts = (torch.full((8, 6), number / 50.0) for number in range(60))
    return lambda x, y: case.loss(x + next(shifts), y)


@case(16, updates=14)
def the_clock(case: Case) -> Any:
    def step(x: Tensor, y: Tensor) -> Tensor:
        start = time.perf_counter()
        loss = case.loss(x, y)
        case.seen["went on"] = time.perf_counter() > start > case.seen.get("last", 0)
        case.seen["last"] = 0
        return loss

    return step


@case(19)
def an_exception_that_is_handled(case: Case) -> Any:
    case.seen["errors"] = 0

    def step(x: Tensor, y: Tensor) -> Tensor:
        try:
            return case.loss(x, y)
        except RuntimeError:
            case.seen["errors"] += 1
            raise

    return step


@case(18)
def an_exception_that_becomes_another_one(case: Case) -> Any:
    def step(x: Tensor, y: Tensor) -> Tensor:
        try:
            return case.loss(x, y)
        except (IndexError, RuntimeError) as error:
            if len(x) == 0:
                raise ValueError("the batch is empty") from error
            raise

    return step


# -- numbers and tensors from outside -----------------------------------------------------------------------


@case(18)
def a_weight_that_the_step_anneals(case: Case) -> Any:
    case.seen["weight"] = 0.0

    def step(x: Tensor, y: Tensor) -> Tensor:
        case.seen["weight"] += 0.01
        return case.loss(x, y) * (1.0 + case.seen["weight"])

    return step


@case(19, notices="numbers are those of the call before")
def a_weight_that_counts_steps(case: Case) -> Any:
    case.seen["calls"] = 0

    def step(x: Tensor, y: Tensor) -> Tensor:
        case.seen["calls"] += 1
        out = case.model(x)
        return cross_entropy(out, y) + 1e-3 * case.seen["calls"] * out.square().mean()

    return step


@case(18)
def a_weight_that_the_loop_anneals(case: Case) -> Any:
    settings = SimpleNamespace(weight=0.0)
    case.after = lambda number: setattr(settings, "weight", number * 0.01)
    return lambda x, y: case.loss(x, y) + settings.weight * case.model(x).square().mean()


@case(16, differs="torch 2.11 guards no attributes of classes" if torch.__version__ < "2.12" else "")
def an_attribute_of_a_class(case: Case) -> Any:
    class Settings:
        scale = 1.0

    case.after = lambda number: setattr(Settings, "scale", 1.0 if number % 10 < 5 else 2.0)
    return lambda x, y: case.loss(x, y) * Settings.scale


@case(18)
def a_number_in_an_attribute_of_the_model(case: Case) -> Any:
    case.model.scale = 1
    case.after = lambda number: setattr(case.model, "scale", number // 10)
    return lambda x, y: case.loss(x, y) * (1 + case.model.scale)


@case(16)
def an_attribute_of_the_loss_module(case: Case) -> Any:
    criterion = nn.CrossEntropyLoss()
    case.after = lambda number: setattr(criterion, "label_smoothing", 0.1 if number > 15 else 0.0)
    return lambda x, y: criterion(case.model(x), y)


@case(18)
def weights_of_the_loss_module_are_replaced(case: Case) -> Any:
    criterion = nn.CrossEntropyLoss(weight=torch.ones(3))
    case.at(step_15=lambda: setattr(criterion, "weight", torch.tensor([1.0, 2.0, 3.0])))
    return lambda x, y: criterion(case.model(x), y)


@case(16)
def a_tensor_that_the_loop_replaces(case: Case) -> Any:
    settings = SimpleNamespace(shift=torch.zeros(3))
    case.after = lambda number: setattr(settings, "shift", torch.full((3,), number / 40.0))
    return lambda x, y: cross_entropy(case.model(x) + settings.shift, y)


@case(19)
def a_tensor_that_the_loop_changes_in_place(case: Case) -> Any:
    shift = torch.zeros(3)
    case.after = lambda number: shift.add_(0.01)
    return lambda x, y: cross_entropy(case.model(x) + shift, y)


@case(17)
def every_tenth_step_has_another_loss(case: Case) -> Any:
    case.seen["calls"] = 0

    def step(x: Tensor, y: Tensor) -> Tensor:
        case.seen["calls"] += 1
        out = case.model(x)
        loss = cross_entropy(out, y)
        return loss + 0.1 * out.abs().mean() if case.seen["calls"] % 10 == 0 else loss

    return step


# -- random numbers -------------------------------------------------------------------------------------------


@case(19)
def mixup_with_numpy(case: Case) -> Any:
    def step(x: Tensor, y: Tensor) -> Tensor:
        share, order = float(numpy.random.beta(1.0, 1.0)), torch.randperm(len(x))
        out = case.model(share * x + (1 - share) * x[order])
        return share * cross_entropy(out, y) + (1 - share) * cross_entropy(out, y[order])

    return step


@case(19)
def jitter_with_python(case: Case) -> Any:
    return lambda x, y: case.loss(x + random.random(), y)


@case(16, updates=14)
def a_generator_of_its_own(case: Case) -> Any:
    generator = torch.Generator(DEVICE).manual_seed(7)
    return lambda x, y: case.loss(x + torch.randn(8, 6, generator=generator), y)


@case(19)
def a_table_of_noise_levels(case: Case) -> Any:
    levels = torch.linspace(0, 1, 10)

    def step(x: Tensor, y: Tensor) -> Tensor:
        drawn = torch.randint(0, 10, (8,), device=DEVICE)
        return mse_loss(case.model(x * levels[drawn][:, None]), torch.randn(8, 3, device=DEVICE))

    return step


@case(16)
def predictions_are_fetched(case: Case) -> Any:
    fetched = case.seen["fetched"] = []

    def step(x: Tensor, y: Tensor) -> Tensor:
        out = case.model(x)
        fetched.append((out.detach().cpu() + 1, (out.argmax(1) == y).float().mean().to("cpu")))
        return cross_entropy(out, y)

    return step


@case(19)
def noise_levels_that_the_host_draws(case: Case) -> Any:
    levels = torch.linspace(0, 1, 10)

    def step(x: Tensor, y: Tensor) -> Tensor:
        drawn = torch.randint(0, 10, (8,), device="cpu").to(x.device)
        return mse_loss(case.model(x * levels[drawn][:, None]), torch.randn(8, 3, device=DEVICE))

    return step


@case(19)
def indices_that_the_host_writes(case: Case) -> Any:
    """They are sent, and what they are used for is both `to()` and an index."""

    def step(x: Tensor, y: Tensor) -> Tensor:
        rows = torch.zeros(8, dtype=torch.int64, device="cpu")
        rows[0] = 5
        rows[1:] += torch.arange(1, 8, device="cpu")
        a, b = torch.meshgrid(*2 * [torch.arange(2, device="cpu")], indexing="ij")
        columns = torch.stack([a, b]).flatten(1).sum(0)
        x = x[rows.to(x.device)] + x[:, columns].sum(1, keepdim=True)
        x[0:1] = torch.arange(6.0, device="cpu")
        return case.loss(x, y[rows])

    return step


@case(updates=14)
def arrays_of_numpy_that_are_added_to(case: Case) -> Any:
    """One lives as long as the training, and one as long as the step."""
    seen = numpy.zeros(3)
    case.after = lambda number: case.seen.update(seen=seen.tolist())

    def step(x: Tensor, y: Tensor) -> Tensor:
        counts = seen
        counts += 0.5
        weights = numpy.arange(6.0)
        weights[1:] += 1
        weights *= 0.1
        out = case.model(x * torch.from_numpy(weights).to(x))
        return cross_entropy(out, y) * float(counts[0])

    return step


@case(19)
def constants_of_the_step(case: Case) -> Any:
    def step(x: Tensor, y: Tensor) -> Tensor:
        x = torch.where(x > 0, torch.tensor(0.25, device=x.device), x) * x.new_tensor(2)
        x = x + torch.tensor([0.5, 1.0, 2.0, 0.1, 0.2, 0.3], device=x.device)
        x[:, [0, 2]] = 0.5
        weights = x.new_tensor([0.2, 0.3, 0.5])
        return cross_entropy(case.model(x[:, [5, 4, 3, 2, 1, 0]]), y, weight=weights)

    return step


@case(16)
def a_layer_that_is_dropped_at_random(case: Case) -> Any:
    def step(x: Tensor, y: Tensor) -> Tensor:
        out = case.model(x)
        return cross_entropy(out * 1.01 if torch.rand([], device="cpu") < 0.3 else out, y)

    return step


# -- batches ------------------------------------------------------------------------------------------------


@case(16, updates=14)
def the_batch_is_changed_in_place(case: Case) -> Any:
    case.seen["batches"] = case.batches

    def step(x: Tensor, y: Tensor) -> Tensor:
        x.mul_(2.0)
        x.add_(0.1)
        return case.loss(x, y)

    return step


@case(18)
def a_key_is_popped_from_the_batch(case: Case) -> Any:
    def step(x: Tensor, y: Tensor) -> Tensor:
        batch = {"x": x, "y": y}
        target = batch.pop("y")
        case.seen["keys"] = len(batch)
        return cross_entropy(case.model(**{"input": batch["x"]}), target)

    return step


@case(18)
def the_same_batch_in_every_step(case: Case) -> Any:
    kept: dict[str, Any] = {}

    def step(x: Tensor, y: Tensor) -> Tensor:
        kept.setdefault("batch", (x.clone(), y.clone()))
        return case.loss(*kept["batch"])

    return step


@case(6, updates=1, slow=True)
def rows_are_cut_off_in_the_step(case: Case) -> Any:
    case.seen["rows"] = 3

    def step(x: Tensor, y: Tensor) -> Tensor:
        rows = case.seen["rows"] = 4 + (case.seen["rows"] + 1) % 4
        return case.loss(x[:rows], y[:rows])

    return step


@case(11)
def the_number_of_rows_is_a_factor(case: Case) -> Any:
    case.batches = [(x[: 5 + n % 3], y[: 5 + n % 3]) for n, (x, y) in enumerate(case.batches)]
    return lambda x, y: case.loss(x, y) * x.shape[0]


@case(7)
def a_mask_selects_rows(case: Case) -> Any:
    def step(x: Tensor, y: Tensor) -> Tensor:
        kept = y != 2
        return cross_entropy(case.model(x)[kept], y[kept])

    return step


@case(19)
def a_mask_is_written_to(case: Case) -> Any:
    def step(x: Tensor, y: Tensor) -> Tensor:
        x = x.clone()
        x[x > 2] = 0.0
        return case.loss(x, y)

    return step


# -- models -------------------------------------------------------------------------------------------------


@case(16, updates=10)
def an_embedding_of_limited_norm_in_a_checkpoint(case: Case) -> Any:
    """Its forward writes its weight, in the backward once more."""

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.last = nn.Embedding(5, 8, max_norm=0.5), nn.Linear(8, 3)

        def part(self, indices: Tensor) -> Tensor:
            return self.last(self.embedding(indices).mean(1)).tanh()

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = checkpoint(self.part, (x.abs() * 3).long() % 5, use_reentrant=False)
            return result

    case.model = Checkpointed()
    return case.loss


@case(updates=19)
def a_model_that_computes_otherwise_in_compiled_code(case: Case) -> Any:
    """With an operator that graphs of eager kernels cannot hold: the step runs as Python."""

    class Otherwise(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(6, 16), nn.Linear(16, 3)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.first(x)
            if torch.compiler.is_compiling():
                hidden = torch.cond(hidden.sum() > 0, lambda h: h * 2, lambda h: h * 3, (hidden,))
            return self.last(hidden.tanh())

    case.model = Otherwise()
    return case.loss


@case(16, updates=14)
def several_layers_read_one_result_behind_a_graph_break_under_autocast(case: Case) -> Any:
    """Autocast keeps its cast of a parameter, and makes a new one of the result for each layer."""

    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(6, 16), nn.Linear(16, 3)
            self.one, self.other = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.first(x).float()
            break_here()
            return self.last(hidden + self.one(hidden) * self.other(hidden) + self.one(hidden.tanh()))

    case.model = Broken()

    def step(x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            return case.loss(x, y)

    return step


@case(16, updates=14, slow=True)
def a_graph_break_in_the_forward(case: Case) -> Any:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(6, 16), nn.Linear(16, 3)

        def forward(self, x: Tensor) -> Tensor:
            hidden = nn.functional.gelu(self.first(x))
            break_here()
            return self.second(hidden).tanh()

    case.model = Broken()
    return case.loss


@case(19)
def batch_norm(case: Case) -> Any:
    case.model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Linear(16, 3))
    return case.loss


@case(19)
def a_buffer_is_replaced(case: Case) -> Any:
    class Centered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 3)
            self.register_buffer("center", torch.zeros(3))

        def forward(self, x: Tensor) -> Tensor:
            out = self.layer(x)
            self.center = self.center * 0.9 + out.detach().mean(0) * 0.1
            return out - self.center

    case.model = Centered()
    return case.loss


@case(19)
def spectral_norm(case: Case) -> Any:
    case.model = nn.Sequential(parametrizations.spectral_norm(nn.Linear(6, 16)), nn.ReLU(), nn.Linear(16, 3))
    return case.loss


@case(19)
def weight_norm(case: Case) -> Any:
    case.model = nn.Sequential(parametrizations.weight_norm(nn.Linear(6, 16)), nn.ReLU(), nn.Linear(16, 3))
    return case.loss


@case(19)
def an_embedding_with_a_largest_norm(case: Case) -> Any:
    """Its forward writes to its weight."""
    case.model = nn.Sequential(nn.Embedding(3, 8, max_norm=1.0), nn.Linear(8, 3))
    return lambda x, y: case.loss(y, y)


@case(19)
def an_lstm(case: Case) -> Any:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.head = nn.LSTM(6, 8, batch_first=True), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.layer(x[:, None])[0][:, 0])

    case.model = Recurrent()
    return case.loss


@case(19)
def a_weight_that_two_layers_share(case: Case) -> Any:
    case.model = nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 6))
    case.model[2].weight = case.model[0].weight
    return case.loss


@case(19)
def weights_are_clamped_in_the_step(case: Case) -> Any:
    def step(x: Tensor, y: Tensor) -> Tensor:
        for p in case.model.parameters():
            p.data.clamp_(-0.2, 0.2)
        return case.loss(x, y)

    return step


# Dynamo of 2.15 takes the number for a constant, and traces each step anew
@case(0 if torch.__version__ >= "2.15" else 19)
def an_autograd_function_with_a_number(case: Case) -> Any:
    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
            ctx.scale = scale
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Any:
            return -ctx.scale * gradient, None

    case.seen["calls"] = 0

    def step(x: Tensor, y: Tensor) -> Tensor:
        case.seen["calls"] += 1
        return cross_entropy(Scaled.apply(case.model(x), 0.1 * case.seen["calls"]), y)

    return step


@case()
def a_checkpointed_model_with_dropout(case: Case) -> Any:
    return lambda x, y: cross_entropy(checkpoint(case.model, x, use_reentrant=False), y)


@case()
def a_checkpoint_whose_recomputation_draws_other_numbers(case: Case) -> Any:
    options = {"use_reentrant": False, "preserve_rng_state": False}
    return lambda x, y: cross_entropy(checkpoint(case.model, x, **options), y)


@case(updates=14)
def a_model_that_the_user_compiled(case: Case) -> Any:
    compiled = torch.compile(case.model, backend="eager")
    return lambda x, y: cross_entropy(compiled(x), y)


@case(updates=14)
def a_part_that_the_user_compiled(case: Case) -> Any:
    """With other dropout than eager kernels have: it must not be traced into."""
    case.model = nn.Sequential(nn.Linear(6, 16), nn.Sequential(nn.GELU(), nn.Dropout(0.3)), nn.Linear(16, 3))
    case.model[1].compile(backend="aot_eager")
    return case.loss


@case(updates=14)
def operations_fail_and_the_step_tries_another_way(case: Case) -> Any:
    """As the Cholesky factor of a Gaussian process does for a sample that comes twice."""
    case.seen["failed"] = 0

    def factor(matrix: Tensor) -> Tensor:
        try:
            return torch.linalg.cholesky(matrix)
        except RuntimeError:
            case.seen["failed"] += 1
            return torch.linalg.cholesky(-matrix)

    def step(x: Tensor, y: Tensor) -> Tensor:
        out = case.model(x)
        sign = torch.where(x[0, 0] > 0, 1.0, -1.0)
        return cross_entropy(out, y) + factor(torch.diag(sign * out.exp().mean(0))).sum()

    return step


@case(updates=14)
def what_operations_raise_is_suppressed(case: Case) -> Any:
    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = case.loss(x, y)
        with contextlib.suppress(RuntimeError):
            loss = loss + torch.linalg.inv(case.model[3].weight[:, :3] * (x[0, 0] > 1)).square().mean()
        return loss

    return step


class Int8(Tensor):
    """A weight of whole numbers and a scale, as torchao has them: a wrapper, which has no memory of its own."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, q: Tensor, scale: Tensor) -> Any:
        return Tensor._make_wrapper_subclass(cls, q.shape, dtype=scale.dtype, device=q.device)

    def __init__(self, q: Tensor, scale: Tensor) -> None:
        self.q, self.scale = q, scale

    def __tensor_flatten__(self) -> Any:
        return ["q", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, parts: Any, *_: Any) -> Any:
        return cls(parts["q"], parts["scale"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.clone.default):
            return cls(func(args[0].q), func(args[0].scale))
        return func(*tree_map(lambda t: t.q * t.scale if isinstance(t, cls) else t, args), **(kwargs or {}))


@case(updates=14)
def a_frozen_weight_of_a_wrapper_class(case: Case) -> Any:
    whole = torch.randint(-9, 9, (3, 6), dtype=torch.int8, device=DEVICE)
    weight = nn.Parameter(Int8(whole, torch.full((3, 1), 0.1, device=DEVICE)), requires_grad=False)
    return lambda x, y: cross_entropy(case.model(x) + nn.functional.linear(x, weight), y)


@case(19)
def a_weight_is_used_without_gradients_first_under_autocast(case: Case) -> Any:
    def step(x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            with torch.no_grad():
                scale = case.model(x).float().abs().mean()
            return cross_entropy(case.model(x) / (1 + scale), y)

    return step


@case(19)
def gradients_are_enabled_in_the_step(case: Case) -> Any:
    def step(x: Tensor, y: Tensor) -> Tensor:
        with torch.autograd.set_grad_enabled(True):
            return case.loss(x, y)

    return step


@case()
def a_penalty_on_the_gradient_of_the_input(case: Case) -> Any:
    def step(x: Tensor, y: Tensor) -> Tensor:
        x = x.requires_grad_()
        out = case.model(x)
        (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return cross_entropy(out, y) + gradient.square().mean()

    return step


# -- changes between steps ------------------------------------------------------------------------------------


@case(16)
def a_weight_is_frozen_and_thawed(case: Case) -> Any:
    weight = case.model[0].weight
    case.at(step_12=lambda: weight.requires_grad_(False), step_22=lambda: weight.requires_grad_(True))
    return case.loss


@case(18)
def the_data_of_a_parameter_is_replaced(case: Case) -> Any:
    weight = case.model[0].weight
    case.at(step_15=lambda: setattr(weight, "data", weight.data * 0.5))
    return case.loss


@case(16)
def a_layer_is_replaced_by_one_with_new_parameters(case: Case) -> Any:
    def replace() -> None:
        case.model[3] = nn.Linear(16, 3)
        case.optimizer.add_param_group({"params": case.model[3].parameters()})

    case.at(step_15=replace)
    return case.loss


@case(19)
def a_layer_is_initialized_anew(case: Case) -> Any:
    case.at(step_15=lambda: case.model[3].reset_parameters())
    return case.loss


@case(16)
def an_activation_is_replaced(case: Case) -> Any:
    case.at(step_15=lambda: case.model.__setitem__(1, nn.ReLU()))
    return case.loss


@case(16)
def a_forward_is_replaced(case: Case) -> Any:
    forward = case.model[0].forward
    case.at(step_15=lambda: setattr(case.model[0], "forward", lambda x: forward(x) * 1.1))
    return case.loss


@case(19)
def a_schedule(case: Case) -> Any:
    schedule = torch.optim.lr_scheduler.StepLR(case.optimizer, 10, 0.3)
    case.after = lambda number: schedule.step()
    return case.loss


@case(19)
def the_weight_decay_changes(case: Case) -> Any:
    case.at(step_15=lambda: case.optimizer.param_groups[0].update(weight_decay=0.5))
    return case.loss


@case(18)
def states_are_saved_and_loaded(case: Case) -> Any:
    kept = []

    def load() -> None:
        case.model.load_state_dict(kept[0])
        case.optimizer.load_state_dict(kept[1])

    def save() -> None:
        kept.extend(copy.deepcopy([case.model.state_dict(), case.optimizer.state_dict()]))

    case.at(step_10=save, step_20=load)
    return case.loss


@case(16)
def the_model_is_evaluated_for_some_steps(case: Case) -> Any:
    case.after = lambda number: case.model.train(number % 10 < 7)
    return case.loss


@case(16)
def dropout_gets_another_probability(case: Case) -> Any:
    case.at(step_15=lambda: setattr(case.model[2], "p", 0.5))
    return case.loss


@case(19)
def the_step_function_is_called_without_gradients(case: Case) -> Any:
    losses = case.seen["losses"] = []

    @torch.no_grad()
    def evaluate(number: int) -> None:
        if number % 5 == 0:
            losses.append(float(case.loss(*case.batches[number])))

    case.after = evaluate
    return case.loss


@case(19)
def gradients_are_read_between_steps(case: Case) -> Any:
    norms = case.seen["norms"] = []
    case.after = lambda number: norms.append(sum(float(p.grad.norm()) for p in case.model.parameters()))
    return case.loss


@case(
    14,
    differs="GraphedStep writes the gradients of the next step into the same memory, as its docstring says",
)
def gradients_are_kept_between_steps(case: Case) -> Any:
    kept = case.seen["kept"] = []
    case.after = lambda number: kept.append(case.model[0].weight.grad)
    return case.loss


@case(19)
def gradients_are_set_to_none_by_the_loop(case: Case) -> Any:
    case.after = lambda number: case.optimizer.zero_grad(set_to_none=True)
    return case.loss


@case(19, updates=4)
def gradients_are_accumulated(case: Case) -> Any:
    case.accumulates = True
    return case.loss


@case(19)
def gradients_are_clipped(case: Case) -> Any:
    case.options["max_grad_norm"] = 0.1
    return case.loss


# -- hooks --------------------------------------------------------------------------------------------------


@case(0)
def a_forward_hook(case: Case) -> Any:
    """The list grows inside of the loop over the modules, and Dynamo resumes no loop."""
    means = case.seen["means"] = []
    case.model[0].register_forward_hook(lambda module, args, out: means.append(out.detach().mean()))
    return case.loss


@case(16)
def a_forward_hook_is_added(case: Case) -> Any:
    case.at(step_15=lambda: case.model[0].register_forward_hook(lambda module, args, out: out * 1.1))
    return case.loss


@case(18, updates=7, slow=True)
def a_hook_scales_a_gradient(case: Case) -> Any:
    case.seen["calls"] = 0

    def hook(gradient: Tensor) -> Tensor:
        case.seen["calls"] += 1
        return gradient * 0.5

    case.model[0].weight.register_hook(hook)
    return case.loss


@case(18, updates=5)
def a_hook_scales_a_gradient_by_its_count(case: Case) -> Any:
    case.seen["calls"] = 0

    def hook(gradient: Tensor) -> Tensor:
        case.seen["calls"] += 1
        return gradient * 0.9 ** case.seen["calls"]

    case.model[0].weight.register_hook(hook)
    return case.loss


@case(8)
def a_gradient_hook_is_added(case: Case) -> Any:
    case.at(step_15=lambda: case.model[0].weight.register_hook(lambda gradient: gradient * 0.1))
    return case.loss


@case(18, updates=16)
def a_hook_behind_the_accumulation(case: Case) -> Any:
    norms = case.seen["norms"] = []
    hook = case.model[0].weight.register_post_accumulate_grad_hook
    hook(lambda p: norms.append(p.grad.norm().item()))
    return case.loss


@case(0, slow=True)
def a_backward_hook_of_a_module(case: Case) -> Any:
    calls = case.seen["calls"] = []
    case.model[0].register_full_backward_hook(lambda module, gin, gout: calls.append(1))
    return case.loss


@case(16, updates=14, slow=True)
def a_hook_of_a_tensor(case: Case) -> Any:
    case.seen["calls"] = 0

    def hook(gradient: Tensor) -> Tensor:
        case.seen["calls"] += 1
        return gradient.clamp(-0.01, 0.01)

    def step(x: Tensor, y: Tensor) -> Tensor:
        out = case.model(x)
        out.register_hook(hook)
        return cross_entropy(out, y)

    return step


@case(19, updates=0)
def a_hook_of_the_optimizer(case: Case) -> Any:
    calls = case.seen["calls"] = []
    case.optimizer.register_step_post_hook(lambda optimizer, args, kwargs: calls.append(1))
    return case.loss


# -- the test -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("make", "replays", "updates"), CASES)
@pytest.mark.quick
def test_an_everyday_step(make: Callable[[Case], Any], replays: int, updates: int | None) -> None:
    def training(run: Run) -> None:
        case = Case()
        step_fn = make(case)
        step = run.step(step_fn, model=case.model, optimizer=case.optimizer, **case.options)
        for number, batch in enumerate(case.batches):
            call = step.accumulate if case.accumulates and number % 4 != 3 else step
            with run.may_raise(*case.raises):
                call(*batch)
            case.after(number)
        run.note("seen", case.seen)

    compare(training, replays=replays, updates=updates)
